"""Trains a small model for three steps, with the change that a flag asks for: train.py MODEL [FLAG...].

Several runs with ` / ` between them run as forked.py says.

Prints the peaks of reserved and of allocated memory by torch's own count, in bytes, as the last two lines.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

import library_models
import models
import torch
import torch._dynamo  # once, not in every child: the first step of an optimizer imports it
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import forked

MODELS = models.MODELS | library_models.MODELS
parser = argparse.ArgumentParser()
parser.add_argument("model", choices=MODELS)
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--one-checkpoint", action="store_true", help="one checkpoint around the whole model")
parser.add_argument("--optimizer", default="")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--autocast", action="store_true", help="run the forward under autocast to bfloat16")
parser.add_argument("--chunk-loss", type=int, default=1)
parser.add_argument(
    "--float-loss", action="store_true", help="cast the logits of a language model to float32"
)
parser.add_argument("--batch", type=float, default=1, help="times the model's own number of rows")
parser.add_argument("--offload", action="store_true")
parser.add_argument("--shard", default="", help="fsdp, optimizer, or mixed: fsdp that computes in bfloat16")
parser.add_argument("--adapters", default="", help="train LoRA adapters (lora), of packed weights (4bit)")
parser.add_argument("--steps", type=int, default=3)
runs = " ".join(sys.argv[1:]).split(" / ")
run = forked.each(runs, is_frozen=True)
options = parser.parse_args(run.split())

dtype = getattr(torch, {"bf16": "bfloat16"}.get(options.dtype, options.dtype))
model = MODELS[options.model]()
pattern, rows = type(model).checkpointed, int(options.batch * type(model).rows)
batch = model.batch


def with_adapters(model):
    """Returns the model with LoRA adapters on all linear layers but the head, whose weights may be packed."""
    from peft import LoraConfig, get_peft_model

    linear = [(name, one) for name, one in model.named_modules() if type(one) is torch.nn.Linear]
    linear = [(name, one) for name, one in linear if not name.endswith("head")]
    for name, one in linear if options.adapters == "4bit" else []:
        from bitsandbytes.nn import Linear4bit, Params4bit

        packed = Linear4bit(one.in_features, one.out_features, one.bias is not None, dtype, quant_type="nf4")
        packed.weight = Params4bit(one.weight.data, requires_grad=False, quant_type="nf4")
        packed.bias = one.bias
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, packed)
    return get_peft_model(model, LoraConfig(r=16, target_modules=[name for name, _ in linear]))


if options.adapters:
    model = with_adapters(model.to(dtype)).to("cuda")
elif options.shard in ("fsdp", "mixed"):
    model.to(dtype)
else:
    model.to("cuda", dtype)


def recomputed(forward):
    return lambda *inputs, **named: checkpoint(forward, *inputs, use_reentrant=False, **named)


def chosen(pattern):
    """Yields the modules whose paths match a pattern."""
    for name, module in model.named_modules():
        path = f"{type(model).__name__}.{name}"
        if fnmatch.fnmatchcase(path, pattern) and path.count(".") == pattern.count("."):
            yield module


if options.checkpoint:
    for module in chosen(pattern):
        module.forward = recomputed(module.forward)
if options.one_checkpoint:
    model.forward = recomputed(model.forward)
if options.shard:
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", **forked.group(run if len(runs) > 1 else ""))
if options.shard in ("fsdp", "mixed"):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if options.shard == "mixed" else None)
    for module in chosen(getattr(model, "units", pattern)):
        fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
if options.chunk_loss > 1:
    model.parts = options.chunk_loss
model.float_loss = options.float_loss


def optimizer_of(parameters):
    """Returns the optimizer of --optimizer; by default SGD with momentum for the ResNet, else AdamW."""
    momentum = options.model == "resnet"
    if options.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3)
    if options.optimizer == "adafactor":
        return torch.optim.Adafactor(parameters)
    if options.optimizer == "8bit":
        import bitsandbytes

        if momentum:
            return bitsandbytes.optim.SGD8bit(parameters, lr=1e-3, momentum=0.9)
        return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-3)
    if options.shard == "optimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        if momentum:
            return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=1e-3, momentum=0.9)
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-3)
    if options.offload:
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(parameters, torch.optim.AdamW)
    if momentum:
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-3)


def step_in_backward(parameter):
    own = optimizer_of([parameter])

    def step(parameter):
        own.step()
        own.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = None
if options.optimizer == "in-backward":
    for parameter in parameters:
        step_in_backward(parameter)
else:
    optimizer = optimizer_of(parameters)

for _ in range(options.steps):
    with torch.autocast("cuda", torch.bfloat16, enabled=options.autocast):
        loss = model(*batch(rows, dtype))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    loss.item()
print(torch.cuda.max_memory_reserved())
print(torch.cuda.max_memory_allocated())
