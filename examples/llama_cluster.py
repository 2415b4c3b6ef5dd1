"""Shows the memory that one rank of a cluster needs, for a model with the shape of Llama 3 under FSDP2.

memtrace run --phantom 512xh100-80g --ranks 0 -o out -- \\
    torchrun --nnodes 64 --nproc-per-node 8 examples/llama_cluster.py 405B --sequence 2048
memtrace peak --by category out
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

# For each model, from "The Llama 3 Herd of Models": width, layers, heads, key-value heads, width of the MLP.
SHAPES = {
    "tiny": (256, 2, 4, 2, 512),
    "8B": (4096, 32, 32, 8, 14336),
    "70B": (8192, 80, 64, 8, 28672),
    "405B": (16384, 126, 128, 8, 53248),
}
WORDS = 128_256


class Block(nn.Module):
    def __init__(self, width, heads, groups, inner):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        linear = lambda rows, columns: nn.Linear(rows, columns, bias=False)
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = linear(width, width), linear(width, width)
        self.key, self.value = (linear(width, groups * self.size) for _ in range(2))
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(self, x):
        y = self.before_attention(x)
        split = lambda layer, heads: layer(y).unflatten(-1, (heads, self.size)).transpose(1, 2)
        query, key, value = (
            split(self.query, self.heads),
            split(self.key, self.groups),
            split(self.value, self.groups),
        )
        repeats = self.heads // self.groups
        key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, width, layers, heads, groups, inner):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Block(width, heads, groups, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("model", choices=SHAPES)
arguments.add_argument("--batch", type=int, default=1, help="sequences of a rank")
arguments.add_argument("--sequence", type=int, default=8192, help="tokens of a sequence")
options = arguments.parse_args()

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
with torch.device("meta"):
    model = Llama(*SHAPES[options.model])
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.zeros(options.batch, options.sequence, dtype=torch.int64, device="cuda")
for _ in range(2):
    F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"reserved {torch.cuda.max_memory_reserved() / 2**20:.1f} MiB")
    print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
dist.destroy_process_group()
