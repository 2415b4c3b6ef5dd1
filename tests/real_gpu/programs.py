"""Trains small models of many kinds: programs.py NAME.

`h200.csv` has the peaks of each on a real H200.
"""

import random
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

DEVICE = "cuda"
VOCABULARY = 50304


class WithLoss(nn.Module):
    """Computes a loss from the output of `model`."""

    def __init__(self, model, loss):
        super().__init__()
        self.model = model.to(DEVICE)
        self.loss = loss

    def forward(self, *inputs):
        return self.loss(self.model, *inputs)


def train(model, batch, steps=3, autocast=None, optimizer=torch.optim.AdamW, **options):
    """Trains for `steps` steps, with the inputs that `batch` returns."""
    optimizer = optimizer(model.parameters(), **options)
    for _ in range(steps):
        inputs = batch()
        with torch.autocast("cuda", autocast, enabled=autocast is not None):
            loss = model(*inputs)
        (loss if loss.dim() == 0 else loss.float().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


def square(model, *inputs):
    return model(*inputs).square().mean()


def classify(model, images, labels):
    return F.cross_entropy(model(images), labels)


def gpt(batch=4, layers=12, length=1024, **options):
    from train_gpt import GPT

    with torch.device(DEVICE):
        model = GPT(layers=layers)

    def tokens():
        shape = (batch, length() if callable(length) else length)
        return [torch.randint(VOCABULARY, shape, device=DEVICE) for _ in range(2)]

    train(model, tokens, **options)


def gpt_lengths():
    random.seed(1)
    length = lambda: random.randrange(64, 1024)
    gpt(8, 6, length, steps=12, autocast=torch.bfloat16)


def gpt_tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    gpt()


def vit():
    import timm

    model = WithLoss(timm.create_model("vit_base_patch16_224", num_classes=1000), classify)
    train(model, images(torch.contiguous_format), autocast=torch.bfloat16)


def images(memory_format):
    def batch():
        pixels = torch.randn(32, 3, 224, 224, device=DEVICE).to(memory_format=memory_format)
        return pixels, torch.randint(1000, (32,), device=DEVICE)

    return batch


def resnet(channels_last=False, benchmark=False, autocast=None):
    import torchvision

    torch.backends.cudnn.benchmark = benchmark
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    model = torchvision.models.resnet50().to(DEVICE).to(memory_format=memory_format)
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    train(WithLoss(model, classify), images(memory_format), autocast=autocast, **sgd)


class UNet3d(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = self.block(1, 32), self.block(32, 64), self.block(64, 128)
        self.u1, self.d1 = nn.ConvTranspose3d(128, 64, 2, 2), self.block(128, 64)
        self.u2, self.d2 = nn.ConvTranspose3d(64, 32, 2, 2), self.block(64, 32)
        self.o = nn.Conv3d(32, 2, 1)

    @staticmethod
    def block(inputs, outputs):
        convolution = nn.Conv3d(inputs, outputs, 3, padding=1)
        return nn.Sequential(convolution, nn.InstanceNorm3d(outputs), nn.LeakyReLU())

    def forward(self, x):
        a = self.a(x)
        b = self.b(F.max_pool3d(a, 2))
        c = self.c(F.max_pool3d(b, 2))
        d = self.d1(torch.cat([self.u1(c), b], 1))
        return self.o(self.d2(torch.cat([self.u2(d), a], 1)))


def unet():
    train(WithLoss(UNet3d(), square), lambda: [torch.randn(1, 1, 64, 96, 96, device=DEVICE)])


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells = kind(256, 512, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(1024, 1000)

    def forward(self, x):
        return self.head(self.cells(x)[0])


def recurrent(kind):
    train(WithLoss(Recurrent(kind), square), lambda: [torch.randn(32, 128, 256, device=DEVICE)])


def llama(batch, lora=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
    )
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if lora:
        from peft import LoraConfig, get_peft_model

        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    model = WithLoss(model, lambda model, tokens: model(input_ids=tokens, labels=tokens).loss)
    train(model, lambda: [torch.randint(32000, (batch, 2048), device=DEVICE)])


def distributed(model, wrap):
    """Trains as the only rank of a group."""
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    train(WithLoss(wrap(model.to(DEVICE)), square), lambda: [torch.randn(256, 1024, device=DEVICE)])
    dist.destroy_process_group()


def fsdp():
    from torch.distributed.fsdp import fully_shard

    def shard(model):
        for block in model:
            fully_shard(block)
        return fully_shard(model)

    block = lambda: nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    distributed(nn.Sequential(*(block() for _ in range(8))), shard)


def loader():
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.randn(512, 3, 64, 64), torch.randint(10, (512,)))
    layers = nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for pixels, labels in DataLoader(data, 64, num_workers=2, pin_memory=True):
        F.cross_entropy(model(pixels.cuda(non_blocking=True)), labels.cuda(non_blocking=True)).backward()
        optimizer.step()
        optimizer.zero_grad()


def attention():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(4, 16, 4096, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        with sdpa_kernel(getattr(SDPBackend, name)):
            F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def flex():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    causal = lambda batch, head, query, key: query >= key
    mask = create_block_mask(causal, None, None, 2048, 2048, device=DEVICE)
    q = torch.randn(2, 8, 2048, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(flex_attention)(q, q, q, block_mask=mask).sum().backward()


def linalg():
    a = torch.randn(1024, 1024, device=DEVICE)
    s = a @ a.T + 1024 * torch.eye(1024, device=DEVICE)
    decompositions = [torch.linalg.cholesky(s), torch.linalg.qr(a), torch.linalg.eigh(s), torch.linalg.svd(a)]
    solutions = [torch.linalg.inv(s), torch.linalg.solve(s, a), torch.linalg.lu(a)]
    return decompositions, solutions, torch.fft.fft2(a), torch.linalg.lstsq(a, a)


def sparse():
    a = torch.randn(4096, 4096, device=DEVICE)
    a = a * (a > 1.5)
    csr, b = a.to_sparse_csr(), torch.randn(4096, 256, device=DEVICE)
    return csr @ b, a.to_sparse() @ b


BF16, F16 = {"autocast": torch.bfloat16}, {"autocast": torch.float16}
PROGRAMS = {
    "gpt-fp32": gpt,
    "gpt-amp": lambda: gpt(8, **BF16),
    "gpt-tf32": gpt_tf32,
    "gpt-fused": lambda: gpt(**BF16, fused=True),
    "gpt-sgd": lambda: gpt(**F16, optimizer=torch.optim.SGD, lr=1e-3, momentum=0.9),
    "gpt-lengths": gpt_lengths,
    "vit": vit,
    "resnet-fp32": resnet,
    "resnet-amp": lambda: resnet(**F16),
    "resnet-cl-amp": lambda: resnet(channels_last=True, **F16),
    "resnet-cl-bench": lambda: resnet(channels_last=True, benchmark=True),
    "resnet-bench": lambda: resnet(benchmark=True),
    "unet3d": unet,
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU),
    "linalg": linalg,
    "sparse": sparse,
    "llama-lora": lambda: llama(2, lora=True),
    "llama-full": lambda: llama(4),
    "ddp1": lambda: distributed(
        nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))), nn.parallel.DistributedDataParallel
    ),
    "fsdp1": fsdp,
    "loader": loader,
    "flash": attention,
    "flex": flex,
}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PROGRAMS:
        sys.exit(f"{__doc__}\nNAME is one of {', '.join(PROGRAMS)}")
    torch.manual_seed(0)
    kept = PROGRAMS[sys.argv[1]]()
    torch.cuda.synchronize()
