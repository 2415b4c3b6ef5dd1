"""Liger-Kernel: Llama's MLP in bf16, with silu or gelu.

The `--variant`s of tiles run DeepSpeed's algorithm: forward in shards without a graph, again in backward.
`--blackwell 1` sets the 32 MiB that torch takes for cuBLAS on a B200 in versions after 2.11.
"""

import os

import torch
from harness.liger import measure, sweep


class MLP(torch.nn.Module):
    def __init__(self, hidden, inner, activation):
        super().__init__()
        self.activation = activation
        self.gate = torch.nn.Linear(hidden, inner, bias=False)
        self.up = torch.nn.Linear(hidden, inner, bias=False)
        self.down = torch.nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mlp, x, shards):
        ctx.mlp, ctx.shards = mlp, shards
        ctx.save_for_backward(x)
        parts = list(torch.chunk(x, shards, dim=-2))
        with torch.no_grad():
            outputs = [mlp(part) for part in parts]
        return torch.cat(outputs, dim=-2)

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        x = saved.detach().view(-1, saved.shape[-1])
        gradient = gradient.view(-1, saved.shape[-1])
        x_gradient = torch.zeros_like(x)
        begin = 0
        for part in torch.chunk(x, ctx.shards, dim=0):
            part.requires_grad_()
            rows = slice(begin, begin + part.shape[0])
            part.grad = x_gradient[rows]
            with torch.enable_grad():
                output = ctx.mlp(part)
            torch.autograd.backward(output, gradient[rows])
            begin += part.shape[0]
        return None, x_gradient.view(saved.shape), None


def case(T, arguments):
    if arguments.blackwell:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    x = torch.randn(
        arguments.batch, T, arguments.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    activation = torch.nn.SiLU() if "silu" in arguments.variant else torch.nn.GELU(approximate="tanh")
    with torch.device("cuda"):
        mlp = MLP(arguments.hidden, arguments.inner, activation).to(torch.bfloat16)
    tiled = arguments.variant.startswith("tiled")
    measure(f"T={T}", lambda: Tiled.apply(mlp, x, 4) if tiled else mlp(x), arguments.mode)


sweep("T", case, batch=4, hidden=4096, inner=11008, blackwell=0)
