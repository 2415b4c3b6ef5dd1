"""Models of every common kind, trained for some steps without any mark for memtrace.

    owner_models.py NAME...     each in a forked child, which traces into a file of its own

At checkpoints the child records the kind of each tensor, from torch's own knowledge:
`checkers/owner_totals.py` compares the trace with it.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))


class Checkpoints:
    """Records parameters, buffers, gradients and optimizer state, by the address of their storage."""

    def __init__(self, name, roots, optimizers):
        self.name, self.roots, self.optimizers = name, roots, optimizers
        self.numbers = itertools.count()
        self.file = open(os.path.join(os.environ["OWNER_OUT"], f"{name}.jsonl"), "w")  # noqa: SIM115
        self.names = {}

    def paths(self):
        """Returns the module path and the name of every parameter; tied parameters have the first ones."""
        found, taken = {}, {}
        for root in self.roots:
            base = type(root).__name__
            taken[base] = taken.get(base, 0) + 1
            base += f"#{taken[base]}" if taken[base] > 1 else ""
            for name, module in root.named_modules():
                path = f"{base}.{name}" if name else base
                for parameter in module._parameters.values():
                    if parameter is not None:
                        found.setdefault(parameter, path)
                for buffer in module._buffers.values():
                    if buffer is not None:
                        found.setdefault(buffer, path)
        return found

    def __call__(self, label):
        number = next(self.numbers)
        tensors = {}

        def add(tensor, category, path):
            storage = tensor.untyped_storage()
            if tensor.is_cuda and storage.nbytes():
                tensors.setdefault(
                    storage.data_ptr(), (category, path, max(512, -(-storage.nbytes() // 512) * 512))
                )

        paths = self.paths()
        for tensor, path in paths.items():
            if isinstance(tensor, nn.Parameter):
                add(tensor, "parameter", path)
                if tensor.grad is not None:
                    add(tensor.grad, "gradient", path)
            else:
                add(tensor, "buffer", path)
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for value in state.values():
                    if torch.is_tensor(value):
                        add(value, "optimizer_state", paths[parameter])
        torch.cuda.nvtx.mark(f"checkpoint:{number}")
        line = {
            "checkpoint": number,
            "label": label,
            "tensors": [[p, *rest] for p, rest in tensors.items()],
            "allocated": torch.cuda.memory_allocated(),
        }
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def train(name, models, forward, optimizers=None, steps=3):
    optimizers = optimizers or [torch.optim.AdamW([p for m in models for p in m.parameters()], lr=1e-3)]
    checkpoint = Checkpoints(name, models, optimizers)
    for _ in range(steps):
        loss = forward()
        checkpoint("forward")
        loss.backward()
        checkpoint("backward")
        for optimizer in optimizers:
            optimizer.step()
        checkpoint("optimizer")
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        del loss
        checkpoint("zero_grad")


def tokens(vocabulary, *shape):
    return torch.randint(vocabulary, shape).cuda()


def gpt():
    import train_gpt

    model = train_gpt.GPT(vocabulary=2000, context=64, width=64, heads=4, layers=3).cuda()
    train("gpt", [model], lambda: model(tokens(2000, 4, 64), tokens(2000, 4, 64)))


class Residual(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.down = None
        if stride != 1:
            self.down = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        self.layer1 = nn.Sequential(Residual(16, 16, 1), Residual(16, 16, 1))
        self.layer2 = nn.Sequential(Residual(16, 32, 2), Residual(32, 32, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        return self.fc(self.pool(self.layer2(self.layer1(self.stem(x)))).flatten(1))


def resnet():
    model = ResNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(4, 3, 64, 64)
    train("resnet", [model], lambda: F.cross_entropy(model(images.cuda()), tokens(10, 4)), [optimizer])


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).cuda()

    def forward():
        x = tokens(1000, 4, 64)
        return model(input_ids=x, labels=x).loss

    train("llama", [model], forward)


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = BertForSequenceClassification(config).cuda()
    train("bert", [model], lambda: model(input_ids=tokens(1000, 4, 64), labels=tokens(2, 4)).loss)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 32)
        self.lstm = nn.LSTM(32, 64, 2, batch_first=True)
        self.out = nn.Linear(64, 17)

    def forward(self, x):
        return self.out(self.lstm(self.embedding(x))[0])


def lstm():
    model = Tagger().cuda()
    train("lstm", [model], lambda: F.cross_entropy(model(tokens(500, 4, 20)).flatten(0, 1), tokens(17, 80)))


class Autoencoder(nn.Module):
    """The decoder uses the encoder's weight, and one block runs twice."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(256, 256, bias=False)
        self.middle = nn.Linear(256, 256)
        self.again = nn.ModuleList([self.middle])
        self.decoder = nn.Linear(256, 256, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(F.relu(self.again[0](F.relu(self.middle(self.encoder(x))))))


def tied():
    model = Autoencoder().cuda()
    train("tied", [model], lambda: model(torch.randn(64, 256).cuda()).pow(2).mean())


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 256))

    def forward(self, x):
        return self.net(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 128), nn.LeakyReLU(), nn.Linear(128, 1))

    def forward(self, x):
        return self.net(x)


def gan():
    generator, discriminator = Generator().cuda(), Discriminator().cuda()
    of_g = torch.optim.Adam(generator.parameters())
    of_d = torch.optim.SGD(discriminator.parameters(), lr=0.1, momentum=0.9)
    checkpoint = Checkpoints("gan", [generator, discriminator], [of_g, of_d])
    ones, zeros = torch.ones(64, 1).cuda(), torch.zeros(64, 1).cuda()
    loss_of = F.binary_cross_entropy_with_logits
    for _ in range(3):
        of_d.zero_grad()
        fake = generator(torch.randn(64, 32).cuda())
        real = torch.randn(64, 256).cuda()
        (loss_of(discriminator(real), ones) + loss_of(discriminator(fake.detach()), zeros)).backward()
        checkpoint("discriminator's backward")
        of_d.step()
        checkpoint("discriminator's step")
        of_g.zero_grad()
        loss_of(discriminator(fake), ones).backward()
        checkpoint("generator's backward")
        of_g.step()
        checkpoint("generator's step")


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = self.double(3, 16)
        self.down2 = self.double(16, 32)
        self.middle = self.double(32, 64)
        self.up2 = nn.ConvTranspose2d(64, 32, 2, 2)
        self.merge2 = self.double(64, 32)
        self.up1 = nn.ConvTranspose2d(32, 16, 2, 2)
        self.merge1 = self.double(32, 16)
        self.out = nn.Conv2d(16, 2, 1)

    @staticmethod
    def double(inside, outside):
        return nn.Sequential(nn.Conv2d(inside, outside, 3, 1, 1), nn.GroupNorm(8, outside), nn.SiLU())

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        d = self.merge2(torch.cat([self.up2(c), b], 1))
        return self.out(self.merge1(torch.cat([self.up1(d), a], 1)))


def unet():
    model = UNet().cuda()
    images = torch.randn(2, 3, 32, 32)
    train("unet", [model], lambda: F.cross_entropy(model(images.cuda()), tokens(2, 2, 32, 32)))


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:]:
        if name in ("llama", "bert"):
            pass  # once, not in every child
        child = os.fork()
        if child == 0:
            globals()[name]()
            sys.stdout.flush()
            os._exit(0)  # as in owner_tracker.py
        assert os.waitpid(child, 0)[1] == 0, name
        print(name, child, flush=True)
