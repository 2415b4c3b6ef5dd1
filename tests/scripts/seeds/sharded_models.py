"""Models for FSDP2. Each function makes a model, and returns it with its optimizer, its inputs and a function
that runs one iteration."""

import torch
import torch.nn.functional as F
from programs import Transformer
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS = 2


def _trained(model, inputs, loss_of):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def iteration():
        loss_of(model(*inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, inputs, iteration


def _transformer(checkpoints, **options):
    model = Transformer(checkpoints=checkpoints).cuda()
    for block in model.h:
        fully_shard(block, **options)
    fully_shard(model, **options)
    tokens = torch.zeros(8, 128, dtype=torch.long, device="cuda")
    return _trained(model, (tokens,), lambda scores: F.cross_entropy(scores.flatten(0, 1), tokens.flatten()))


def transformer():
    """A transformer with checkpoints: each block gathers its parameters three times."""
    return _transformer(checkpoints=True)


def half():
    """A transformer that gathers bfloat16 and reduces float32."""
    return _transformer(
        checkpoints=False,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )


def convolutions():
    """Convolutions with buffers, which stay gathered between forward and backward."""

    def block(inside, outside):
        parts = nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)
        return nn.Sequential(*parts)

    model = nn.Sequential(block(3, 64), block(64, 128), nn.Flatten(), nn.Linear(128 * 16 * 16, 16)).cuda()
    for part in model[:2]:
        fully_shard(part, reshard_after_forward=False)
    fully_shard(model)
    images = torch.randn(16, 3, 64, 64, device="cuda")
    return _trained(model, (images,), lambda scores: scores.square().mean())


MODELS = {each.__name__: each for each in (transformer, half, convolutions)}
