"""Quantized weights and states: quantized.py nf4|int8|adam8bit|torchao_int8|torchao_float8."""

import sys

import torch
from peaks import print_peak
from torch import nn

WIDTH = 1024


def mlp():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))).to(torch.bfloat16)


def train(model, optimizer):
    for _ in range(3):
        model(torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def infer(model):
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16))


def nf4():
    import bitsandbytes as bnb

    layers = [
        bnb.nn.Linear4bit(WIDTH, WIDTH, quant_type="nf4", compute_dtype=torch.bfloat16) for _ in range(4)
    ]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)).cuda()
    train(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))


def int8():
    import bitsandbytes as bnb

    infer(
        nn.Sequential(*(bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False) for _ in range(4))).cuda()
    )


def adam8bit():
    import bitsandbytes as bnb

    model = mlp().cuda()
    train(model, bnb.optim.AdamW8bit(model.parameters()))


def torchao_int8():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = mlp().cuda()
    quantize_(model, Int8WeightOnlyConfig())
    infer(model)


def torchao_float8():
    from torchao.float8 import convert_to_float8_training

    model = convert_to_float8_training(mlp().cuda())
    train(model, torch.optim.AdamW(model.parameters()))


torch.manual_seed(0)
globals()[sys.argv[1]]()
print("done")
print_peak()
