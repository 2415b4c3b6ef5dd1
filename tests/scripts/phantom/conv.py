"""Runs a net like ResNet on the simulated GPU, in each usual mode."""

import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F


def unit(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(unit(inputs, outputs, stride), unit(outputs, outputs, 1))
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


def net():
    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    return nn.Sequential(
        unit(3, 64, 2), nn.MaxPool2d(3, 2, 1), *(Residual(*width) for width in widths),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000),
    ).cuda()  # fmt: skip


def train(cudnn, benchmark, amp, channels_last):
    torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark = cudnn, benchmark
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = net().to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=amp)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        images = torch.randn(16, 3, 224, 224).cuda(non_blocking=True).to(memory_format=layout)
        labels = torch.randint(0, 1000, (16,), device="cuda")
        with torch.autocast("cuda", torch.float16, enabled=amp):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert loss.item() == 0.0
    return torch.cuda.max_memory_allocated()


peaks = {}
for ways in itertools.product([True, False], [False, True], [False, True], [False, True]):
    peaks[ways] = train(*ways)
    print(dict(zip(("cudnn", "benchmark", "amp", "channels_last"), ways)), peaks[ways])

plain = peaks[True, False, False, False]
assert 0.4 * plain < peaks[True, False, True, False] < 0.9 * plain, (
    "half precision keeps half the activations"
)
assert torch.cuda.memory_stats()["num_ooms"] == 0

# Shapes that the graph API may reject: transposed, three-dimensional, depthwise and dilated convolutions.
torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark = True, False
others = [
    (nn.Conv1d(4, 8, 5, padding=2), (2, 4, 100)),
    (nn.Conv3d(1, 8, 3), (1, 1, 8, 16, 16)),
    (nn.ConvTranspose2d(8, 4, 4, 2, 1), (2, 8, 16, 16)),
    (nn.ConvTranspose3d(8, 1, 3), (1, 8, 6, 6, 6)),
    (nn.Conv2d(32, 32, 3, padding=1, groups=32), (2, 32, 28, 28)),
    (nn.Conv2d(8, 8, 3, padding=2, dilation=2), (2, 8, 28, 28)),
]
for layer, shape in others:
    out = layer.cuda()(torch.randn(shape, device="cuda", requires_grad=True))
    out.sum().backward()
    assert out.shape == layer.cpu()(torch.zeros(shape)).shape
print("ok")
