"""xformers' benchmark of its first memory-efficient attention: only its baseline, the plain one, fp32.

The torch of April 2022 did not allocate cuBLAS's workspaces, so they are off. The forward numbers omit the
scaling of the queries, which xformers added last.
"""

import argparse
import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"

import torch
from harness import figure


def attention(q, scaled):
    first = q * (1.0 / q.shape[-1] ** 0.5) if scaled else q
    return (first @ q.transpose(-2, -1)).softmax(-1) @ q


def forward(shape):
    q = torch.rand(shape, device="cuda")
    results = [attention(q, False) for _ in range(2)]  # noqa: F841 - both results stay allocated.
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        attention(q, False)


def backward(shape):
    q = torch.rand(shape, device="cuda", requires_grad=True)
    r = attention(q, True)
    r.backward(torch.ones_like(q))
    grad = q.grad
    q.grad = None
    rr = attention(q, True)  # noqa: F841
    rr.backward(torch.ones_like(q))
    grad = torch.ones_like(q)
    out = attention(q, True)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        out.backward(grad, retain_graph=True)


parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["forward", "backward"], required=True)
parser.add_argument("--shapes", nargs="+", required=True)
arguments = parser.parse_args()
for text in arguments.shapes:
    (forward if arguments.mode == "forward" else backward)(tuple(map(int, text.split("x"))))
    figure(text, allocated=torch.cuda.max_memory_allocated())
