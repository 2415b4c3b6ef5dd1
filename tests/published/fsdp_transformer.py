"""Lightning's pages on FSDP: a Transformer of 1 B parameters, fp32, two GPUs, 35 tokens, Adam.

Runs rank 0 of two; the other rank does not exist. On Fabric's page, the optimizer's step follows the backward
pass. The Trainer passes a closure to the optimizer's step. The closure runs the forward pass, clears the
gradients, and runs the backward pass.

    fsdp_transformer.py fabric|trainer ddp|no_shard|shard_grad_op|full_shard|offload
"""

import math
import sys

import torch
import torch.distributed as dist
from harness import figure, older
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

page, setting = sys.argv[1:]
TOKENS, WIDTH, LENGTH = 33278, 1024, 35


class Transformer(nn.Module):
    # Lightning's demo of summer 2023; its positions, a frozen parameter, change nothing.
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(5000, 1, WIDTH), requires_grad=False)
        self.dropout, self.embedding = nn.Dropout(0.2), nn.Embedding(TOKENS, WIDTH)
        sizes = {"num_encoder_layers": 32, "num_decoder_layers": 32, "dim_feedforward": 4096}
        self.transformer = nn.Transformer(WIDTH, 64, dropout=0.2, batch_first=True, **sizes)
        self.decoder = nn.Linear(WIDTH, TOKENS)

    def forward(self, inputs, target):
        mask = torch.tril(torch.ones(LENGTH, LENGTH, device=inputs.device)) == 1
        mask = mask.float().masked_fill(mask == 0, -math.inf).masked_fill(mask == 1, 0.0)
        source, target = (self.embedding(tokens) * math.sqrt(WIDTH) for tokens in (inputs, target))
        source, target = self.dropout(source), self.dropout(target)
        output = self.decoder(self.transformer(source, target, tgt_mask=mask))
        return F.log_softmax(output, dim=-1).view(-1, TOKENS)


if page == "fabric":
    older.second_intermediate_of_adam()  # in the figures of Fabric's page only
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
with torch.device("meta"):
    model = Transformer()
model.to_empty(device="cpu")
if setting == "ddp":
    model = nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[0])
else:
    strategy = "full_shard" if setting == "offload" else setting
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}),
        sharding_strategy=ShardingStrategy[strategy.upper()],
        cpu_offload=CPUOffload(setting == "offload"),
        device_id=0,
        use_orig_params=True,
    )
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
inputs, target = (torch.randint(TOKENS, (1, LENGTH)).cuda() for _ in range(2))


def closure():
    loss = F.nll_loss(model(inputs, target), target.view(-1))
    optimizer.zero_grad()
    loss.backward()
    return loss


for _ in range(3):
    if page == "trainer":
        optimizer.step(closure)
    else:
        output = model(inputs, target)
        loss = F.nll_loss(output, target.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
figure(f"{page} {setting}", allocated=torch.cuda.max_memory_allocated())
