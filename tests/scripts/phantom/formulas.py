"""Compares memory on the simulated GPU with formulas of papers and with PyTorch's own rules, layer by layer.

Runs on any card; the expected cuBLAS workspace depends on its compute capability.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

D = "cuda"


def requested():
    """Returns the bytes that the program requested and still holds."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def near(found, expected, share, what):
    print(f"{what}: {found} bytes, the formula says {expected} ({found / expected - 1:+.3%})")
    assert abs(found - expected) <= share * expected, what


def cublas_workspace():
    """Checks parseChosenWorkspaceSize's rule (CublasHandlePool.cpp): 32 MiB on Hopper, else :4096:2:16:8."""
    capability = torch.cuda.get_device_capability()
    # On Blackwell torch 2.8 and later use the larger size; no Blackwell card is tested here.
    size = 32 << 20 if capability == (9, 0) else 2 * (4096 << 10) + 8 * (16 << 10)
    a = torch.zeros(16, 16, device=D)
    before = requested()
    b = a @ a
    assert requested() - before == size + 16 * 16 * 4, (requested() - before, size)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        c = a @ a
    assert requested() - before == 2 * (size + 16 * 16 * 4), "one for each stream"
    del b, c
    torch._C._cuda_clearCublasWorkspaces()
    assert requested() == before
    print("cublas workspace", size)


class Layer(nn.Module):
    """A layer of the transformer that Korthikanti et al. count."""

    def __init__(self, width, heads, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def attention(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
            return y.transpose(1, 2).reshape(batch, length, width)
        # baddbmm scales during the multiplication, so there is only one copy of the scores.
        q, k, v = (part.reshape(batch * self.heads, length, -1) for part in (q, k, v))
        scores = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=1 / math.sqrt(q.shape[-1]))
        y = F.dropout(torch.softmax(scores, -1), 0.1) @ v
        return y.view(batch, self.heads, length, -1).transpose(1, 2).reshape(batch, length, width)

    def forward(self, x):
        x = x + self.drop(self.proj(self.attention(self.ln_1(x))))
        return x + self.drop(self.out(F.gelu(self.fc(self.ln_2(x)))))


def activations_of_a_transformer_layer():
    """Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), equation 1.

    A layer keeps s b h (34 + 5 a s / h) bytes in 16 bits. A fused attention kernel omits the second term.
    """
    batch, length, width, heads = 4, 1024, 1024, 16
    sbh = batch * length * width
    for fused in (True, False):
        model = nn.Sequential(*(Layer(width, heads, fused) for _ in range(4))).to(D, torch.bfloat16)
        kept = []
        for depth in (2, 4):
            x = torch.randn(batch, length, width, device=D, dtype=torch.bfloat16, requires_grad=True)
            model[:1](x).sum().backward()  # allocates cuBLAS's workspace
            before = requested()
            y = model[:depth](x)
            kept.append(requested() - before)
            del y, x
        # The paper omits the statistics of two norms and the log-sum-exp of the fused kernel.
        small = batch * length * 2 * 2 * 2 + (batch * heads * length * 4 if fused else 0)
        expected = 34 * sbh + small + (0 if fused else 5 * heads * length * length * batch)
        near(
            (kept[1] - kept[0]) // 2,
            expected,
            0.001,
            f"a transformer layer, {'fused' if fused else 'plain'} attention",
        )


def resnet50():
    """He et al.'s ResNet-50, counted by hand: the tensors that each layer keeps for its backward."""
    import torchvision

    batch, side = 8, 224
    model = torchvision.models.resnet50().cuda()
    parameters = sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert parameters == 25_557_032 and requested() >= 4 * parameters + buffers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = (
        torch.randn(batch, 3, side, side, device=D),
        torch.zeros(batch, dtype=torch.long, device=D),
    )
    before = requested()
    loss = F.cross_entropy(model(images), labels)
    kept = requested() - before
    # The stem: the convolution's output, the norm's (rectified in place), the pool's with its indices.
    expected = 4 * batch * (2 * 64 * 112**2 + 64 * 56**2) + 8 * batch * 64 * 56**2
    channels = 64
    places = 56
    statistics = 64
    for blocks, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for block in range(blocks):
            inner = places
            if block == 0:
                places //= stride
            # Each of three convolutions keeps its output and the norm's; its input is the previous output.
            elements = 2 * width * inner**2 + 2 * width * places**2 + 2 * 4 * width * places**2
            statistics += 2 * width + 4 * width
            if channels != 4 * width:
                elements += (
                    4 * width * places**2
                )  # the shortcut's convolution; its norm's output is added, not kept
                statistics += 4 * width
            expected += 4 * batch * elements
            channels = 4 * width
    # Means and deviations of the norms, the pooled features, and the log-softmax with two scalars.
    expected += 2 * 4 * statistics + 4 * batch * (2048 + 1000)
    near(kept, expected, 0.0001, "activations of a ResNet-50")
    before = requested()
    loss.backward()
    with_gradients = requested()
    assert with_gradients - (before - kept) >= 4 * parameters
    assert sum(p.grad.numel() * 4 for p in model.parameters()) == 4 * parameters
    optimizer.step()
    assert requested() - with_gradients == 4 * parameters, "momentum, to the byte"
    del loss
    before = requested()
    optimizer.zero_grad()
    assert before - requested() == 4 * parameters, "gradients, to the byte"


cublas_workspace()
# These figures are the same on every card, so one card checks them.
if torch.cuda.get_device_capability() == (9, 0):
    activations_of_a_transformer_layer()
    resnet50()
