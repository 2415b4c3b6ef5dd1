"""Trains and evaluates with timm, torchvision, torchmetrics and diffusers: vision.py KIND [fix].

KIND is metric, hook, sizes, segment, average or ranks.
"""

import os
import sys

import torch
from torch.nn import functional as F

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 4))


def update(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def metric():
    """Stores each prediction in a metric until the metric is computed."""
    import segmentation_models_pytorch
    from torchmetrics.classification import BinaryAveragePrecision

    model = segmentation_models_pytorch.Unet("resnet18", encoder_weights=None).cuda().eval()
    metric = BinaryAveragePrecision(thresholds=None, validate_args=False, compute_on_cpu=FIX).cuda()
    with torch.no_grad():
        for _ in range(STEPS):
            images = torch.randn(8, 3, 512, 512, device="cuda")
            labels = torch.randint(0, 2, (8, 1, 512, 512), device="cuda")
            metric.update(model(images).sigmoid(), labels)


def hook():
    """Stores the features of each batch in a hook."""
    import timm

    model = timm.create_model("convnext_tiny", num_classes=0).cuda().eval()
    features = []
    model.stages[0].register_forward_hook(
        lambda module, inputs, output: features.append(output.mean((2, 3)) if FIX else output)
    )
    with torch.no_grad():
        for _ in range(STEPS):
            model(torch.randn(16, 3, 224, 224, device="cuda"))


def sizes():
    """Trains on images of another size in each batch."""
    import timm

    model = timm.create_model("resnet26", num_classes=100).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        size = 256 if FIX else 128 + 32 * (step * 7 % 11)
        images = torch.randn(16, 3, size, size, device="cuda")
        update(model(images).square().mean(), optimizer)


def segment():
    """torchvision's segmentation, evaluated on large images as soon as it has been trained."""
    from torchvision.models.segmentation import deeplabv3_resnet50

    model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        labels = torch.randint(0, 21, (2, 256, 256), device="cuda")
        images = torch.randn(2, 3, 256, 256, device="cuda")
        update(F.cross_entropy(model(images)["out"], labels), optimizer)
    model.eval()
    for _ in range(STEPS):
        with torch.set_grad_enabled(not FIX):
            model(torch.randn(2, 3, 768, 768, device="cuda"))["out"].argmax(1).cpu()


def average():
    """Keeps an average of the weights in addition to the optimizer's state."""
    from diffusers import UNet2DModel
    from diffusers.training_utils import EMAModel

    model = UNet2DModel(sample_size=32, block_out_channels=(128, 256, 512, 512)).cuda()
    average = EMAModel(model.parameters(), model_cls=UNet2DModel, model_config=model.config)
    average.to("cuda")
    if FIX:
        from bitsandbytes.optim import AdamW8bit as AdamW
    else:
        from torch.optim import AdamW
    optimizer = AdamW(model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        images = torch.randn(1, 3, 32, 32, device="cuda")
        update(model(images, torch.tensor([5], device="cuda")).sample.square().mean(), optimizer)
        average.step(model.parameters())


def ranks():
    """DDP around a vision transformer."""
    import timm
    from torch.nn.parallel import DistributedDataParallel

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    model = timm.create_model("vit_base_patch16_224").cuda()
    model.set_grad_checkpointing(FIX)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        update(model(torch.randn(16, 3, 224, 224, device="cuda")).square().mean(), optimizer)
    torch.distributed.destroy_process_group()


{f.__name__: f for f in (metric, hook, sizes, segment, average, ranks)}[KIND]()
