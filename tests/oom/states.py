"""Saves and loads the state of a training, on one GPU or sharded: states.py resume|save|root [fix]."""

import os
import sys
import tempfile

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 4))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, hidden):
        return hidden + self.down(nn.functional.gelu(self.up(hidden)))


class GPT(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(16384, 1024)
        self.h = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, words):
        hidden = self.embedding(words)
        for block in self.h:
            hidden = block(hidden)
        return (hidden @ self.embedding.weight[:1024].T).square().mean()


def train(model, optimizer, steps, tokens=512):
    for _ in range(steps):
        model(torch.randint(0, 16384, (2, tokens), device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def resume():
    """nanoGPT#236: a resumed training needs more memory than the one that wrote the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ckpt.pt")
        model = GPT(8)
        state = {"step": torch.tensor(100.0)}
        saved = torch.optim.AdamW(model.parameters()).state_dict()
        saved["state"] = {
            index: state | {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            for index, p in enumerate(model.parameters())
        }
        torch.save({"model": model.state_dict(), "optimizer": saved, "iter_num": 100}, path)
        checkpoint = torch.load(path, map_location="cpu" if FIX else "cuda")
    model = GPT(8)
    state_dict = checkpoint["model"]
    unwanted_prefix = "_orig_mod."
    for key in list(state_dict):
        if key.startswith(unwanted_prefix):
            state_dict[key[len(unwanted_prefix) :]] = state_dict.pop(key)
    model.load_state_dict(state_dict)
    iter_num = checkpoint["iter_num"]
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(model, optimizer, STEPS)
    print(iter_num + STEPS)


def shard(model, policy):
    device = torch.cuda.current_device()
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)


def save():
    """accelerate#1181: FSDP gathers the whole state on the GPU to save it."""
    model = shard(GPT(24), ModuleWrapPolicy({Block}))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), STEPS, tokens=64)
    config = FullStateDictConfig(offload_to_cpu=FIX, rank0_only=FIX)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        model.state_dict()


def root():
    """fairscale#1050: the model is wrapped as a whole, so that all parameters are gathered at once."""
    policy = ModuleWrapPolicy({Block}) if FIX else None
    model = shard(GPT(24), policy)
    train(model, torch.optim.AdamW(model.parameters()), STEPS)


if KIND == "resume":
    resume()
else:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    {"save": save, "root": root}[KIND]()
    torch.distributed.destroy_process_group()
