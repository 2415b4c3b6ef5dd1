"""Validates and predicts as users do, and keeps too much: validation.py KIND [fix].

KIND is segmentation, meter, checkpointed, trainer, epochs or boxes.
"""

import os
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 6))


def update(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, count):
        self.sum += value * count
        self.count += count


def segmentation():
    """semseg#60: the loop over the validation set has no torch.no_grad()."""
    import segmentation_models_pytorch

    model = segmentation_models_pytorch.Unet("resnet18", encoder_weights=None, classes=19).cuda()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def batch():
        images = torch.randn(4, 3, 384, 384).cuda(non_blocking=True)
        return images, torch.randint(0, 19, (4, 384, 384)).cuda(non_blocking=True)

    def train():
        model.train()
        meter = AverageMeter()
        for _ in range(STEPS):
            images, target = batch()
            output = model(images)
            loss = criterion(output, target)
            update(loss, optimizer)
            output = output.max(1)[1]
            meter.update(loss.item(), len(images))

    def validate():
        model.eval()
        meter = AverageMeter()
        for _ in range(STEPS):
            images, target = batch()
            with torch.set_grad_enabled(not FIX):
                output = model(images)
                loss = criterion(output, target)
            labels = output.max(1)[1]
            meter.update(loss.item(), len(images))
            meter.update((labels == target).float().mean().item(), len(images))

    train()
    validate()


def meter():
    """pytorch#4932: validation in the ImageNet example builds graphs, and a meter sums results with them."""
    import torchvision

    model = torchvision.models.resnet18().cuda()
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for training in (True, False):
        model.train(training)
        losses = AverageMeter()
        with torch.set_grad_enabled(training or not FIX):
            for _ in range(STEPS):
                images = torch.randn(32, 3, 160, 160, device="cuda")
                target = torch.randint(0, 1000, (32,), device="cuda")
                loss = criterion(model(images), target)
                if training:
                    losses.update(loss.item(), 32)
                    update(loss, optimizer)
                else:
                    losses.update(loss, 32)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        self.out = nn.Linear(4 * width, width)

    def forward(self, hidden):
        return hidden + self.out(self.mlp(hidden))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(768) for _ in range(12))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden


def checkpointed():
    """Validation sums losses through checkpointed layers, so the layers' inputs of each forward stay."""
    model = Encoder().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        update(model(torch.randn(2048, 768, device="cuda")).square().mean(), optimizer)
    total = 0
    with torch.set_grad_enabled(not FIX):
        for _ in range(4 * STEPS):
            total += model(torch.randn(2048, 768, device="cuda")).square().mean()
    print(total / STEPS)


def trainer():
    """transformers#17089, #8476: the Trainer evaluates during the training and gathers all logits."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Texts(torch.utils.data.Dataset):
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return self.rows

        def __getitem__(self, row):
            words = torch.randint(0, 16384, (256,))
            return {"input_ids": words, "labels": words}

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        eval_accumulation_steps=1 if FIX else None,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(
        GPT2LMHeadModel(GPT2Config(vocab_size=16384, n_embd=256, n_layer=4, n_head=4, use_cache=False)),
        arguments,
        train_dataset=Texts(16),
        eval_dataset=Texts(8 * STEPS),
        compute_metrics=lambda result: {"perplexity": 0.0},
    ).train()


def epochs():
    """Lightning#12703: the outputs of an epoch are kept until it ends, and the second epoch is longer."""
    model = nn.Sequential(nn.Linear(64, 2048), *(Layer(2048) for _ in range(2))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        outputs = []
        for _ in range(STEPS if epoch == 0 else 8 * STEPS):
            out = model(torch.randn(4096, 64, device="cuda"))
            update(out.square().mean(), optimizer)
            outputs.append(out.detach().cpu() if FIX else out.detach())
        print(sum(out.mean().item() for out in outputs))


def boxes():
    """mmdetection#188: compares all boxes of an image with all anchors; one image has 3,000 boxes."""
    from torchvision.ops import box_iou

    backbone = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(3 if i == 0 else 64, 64, 3, padding=1), nn.ReLU()) for i in range(3))
    ).cuda()
    head = nn.Conv2d(64, 9 * 4, 3, padding=1).cuda()
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.01)
    corners = torch.rand(128 * 128 // 4 * 9, 4)
    anchors = torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:]], 1).cuda()

    def match(boxes, anchors):
        return box_iou(boxes, anchors).max(0)

    for step in range(2 * STEPS):
        image = torch.randn(2, 3, 128, 128, device="cuda")
        found = head(F.max_pool2d(backbone(image), 2))
        count = 3000 if step % 12 == 9 else 40 + 37 * (step % 6)
        corners = torch.rand(count, 4)
        truth = torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:]], 1).cuda()
        if FIX:
            match(truth.cpu(), anchors.cpu())
        else:
            match(truth, anchors)
        update(found.square().mean(), optimizer)


{f.__name__: f for f in (segmentation, meter, checkpointed, trainer, epochs, boxes)}[KIND]()
