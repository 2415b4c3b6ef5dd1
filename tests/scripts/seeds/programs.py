"""Programs for the comparison of PyTorch's own tools with memtrace. Each function makes a model and returns
it, other objects that a tool should know, and a function that runs one iteration."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 3


def cnn():
    """Convolutions with batch norm."""

    def block(inside, outside):
        parts = nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)
        return nn.Sequential(*parts)

    model = nn.Sequential(block(3, 32), block(32, 64), nn.Flatten(), nn.Linear(64 * 16 * 16, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(16, 3, 64, 64, device="cuda")
    classes = torch.zeros(16, dtype=torch.long, device="cuda")

    def iteration():
        F.cross_entropy(model(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, (optimizer, images, classes), iteration


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, cache=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        if cache is not None:
            cache[:] = [torch.cat(pair, dim=1) for pair in zip(cache, (k, v), strict=True)]
            k, v = cache
        weights = (q @ k.transpose(1, 2)).softmax(-1)
        x = x + self.out(weights @ v)
        return x + self.mlp(x)


class Transformer(nn.Module):
    """A decoder, with activation checkpoints or with a key-value cache."""

    def __init__(self, width=256, layers=3, words=1000, checkpoints=False):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words)
        self.checkpoints = checkpoints

    def forward(self, tokens, caches=None):
        x = self.tokens(tokens)
        for index, block in enumerate(self.h):
            if self.checkpoints:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, caches[index] if caches else None)
        return self.head(x)


def amp():
    """A transformer with autocast, a scaler and checkpoints."""
    model = Transformer(checkpoints=True).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    tokens = torch.zeros(8, 128, dtype=torch.long, device="cuda")

    def iteration():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return model, (optimizer, tokens), iteration


def gan():
    """Two models with an optimizer each."""
    generator = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 784), nn.Tanh())
    critic = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))
    both = nn.ModuleList([generator, critic]).cuda()
    optimizers = [torch.optim.Adam(each.parameters()) for each in both]
    real, noise = torch.randn(128, 784, device="cuda"), torch.randn(128, 64, device="cuda")

    def iteration():
        optimizers[1].zero_grad()
        (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(generator(noise)).mean()).backward()
        optimizers[0].step()

    return both, (*optimizers, real, noise), iteration


def generation():
    """Inference with a cache of keys and values."""
    model = Transformer().cuda().eval()
    prompt = torch.zeros(4, 64, dtype=torch.long, device="cuda")
    token = torch.zeros(4, 1, dtype=torch.long, device="cuda")

    def iteration():
        with torch.no_grad():
            caches = [[torch.empty(4, 0, 256, device="cuda") for _ in "kv"] for _ in model.h]
            model(prompt, caches)
            for _ in range(4):
                model(token, caches)

    return model, (prompt, token), iteration


class Squared(torch.autograd.Function):
    """A function that keeps its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def hooked():
    """A custom autograd function, and hooks of modules and of tensors."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(512, 1024), nn.Linear(1024, 512)

        def forward(self, x):
            return self.second(Squared.apply(self.first(x)))

    model = Net().cuda()
    seen = []
    model.first.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model.second.register_full_backward_hook(lambda module, given, made: seen.append(made[0].shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(256, 512, device="cuda")

    def iteration():
        y = model(x)
        y.register_hook(lambda gradient: gradient * 0.5)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, (optimizer, x), iteration


def fsdp2():
    """FSDP2 on one rank."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    model = Transformer().cuda()
    for block in model.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(8, 128, dtype=torch.long, device="cuda")

    def iteration():
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, (optimizer, tokens), iteration


class Splats(nn.Module):
    """Parameters that are used without a call of a module, as in Gaussian splatting."""

    def __init__(self):
        super().__init__()
        self.points = nn.Parameter(torch.randn(1 << 16, 3))
        self.colours = nn.Parameter(torch.randn(1 << 16, 48))


def raw():
    """Raw parameters, one of which is replaced in the optimizer together with its state."""
    model = Splats().cuda()
    optimizer = torch.optim.Adam(
        [{"params": [model.points], "name": "points"}, {"params": [model.colours], "name": "colours"}]
    )
    target = torch.zeros(1 << 16, device="cuda")
    count = 0

    def iteration():
        nonlocal count
        (model.points.sum(1) + model.colours.sum(1) - target).abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1
        if count == 2:
            group = optimizer.param_groups[1]
            old = group["params"][0]
            state = optimizer.state.pop(old)
            new = nn.Parameter(torch.cat([old.detach(), old.detach()[: 1 << 15]]))
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.cat([state[key], torch.zeros_like(state[key][: 1 << 15])])
            optimizer.state[new] = state
            group["params"][0] = model.colours = new
            model.points = nn.Parameter(torch.cat([model.points.detach(), model.points.detach()[: 1 << 15]]))
            optimizer.param_groups[0]["params"][0] = model.points
            resize(target)

    def resize(old):
        nonlocal target
        target = torch.zeros(old.shape[0] + (1 << 15), device="cuda")

    return model, (optimizer, target), iteration


def two_gpus():
    """An embedding on the CPU, and one half of the model on each of two GPUs."""

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(5000, 256)
            self.first = nn.Sequential(nn.Linear(256, 1024), nn.GELU()).to("cuda:0")
            self.second = nn.Linear(1024, 256).to("cuda:1")

        def forward(self, tokens):
            return self.second(self.first(self.tokens(tokens).to("cuda:0")).to("cuda:1"))

    model = Halves()
    optimizer = torch.optim.Adam(model.parameters())
    tokens = torch.zeros(32, 64, dtype=torch.long)

    def iteration():
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, (optimizer, tokens), iteration


def shared():
    """Calls one block several times in a row."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block(256)

        def forward(self, x):
            for _ in range(3):
                x = self.block(x)
            return x

    model = Shared().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 128, 256, device="cuda")

    def iteration():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, (optimizer, x), iteration


PROGRAMS = {each.__name__: each for each in (cnn, amp, gan, generation, hooked, fsdp2, raw, two_gpus, shared)}
