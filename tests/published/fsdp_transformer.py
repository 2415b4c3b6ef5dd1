"""Lightning's pages on FSDP: a Transformer of 1 B parameters, fp32, two GPUs, 35 tokens, Adam.

One of two ranks whose peer does not exist. On Fabric's page the step follows the backward pass; the Trainer
runs both in the optimizer's closure.

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
closure = page == "trainer"
TOKENS, WIDTH, LENGTH = 33278, 1024, 35


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout, self.embedding, self.positions = nn.Dropout(0.2), nn.Embedding(TOKENS, WIDTH), None
        sizes = {"num_encoder_layers": 32, "num_decoder_layers": 32, "dim_feedforward": 4096}
        self.transformer = nn.Transformer(WIDTH, 64, dropout=0.2, batch_first=True, **sizes)
        self.decoder = nn.Linear(WIDTH, TOKENS)

    def forward(self, inputs, target):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=inputs.device)
        if self.positions is None:  # made by the first call, and kept
            self.positions = torch.zeros(5000, WIDTH, device=inputs.device)
        source = self.dropout(self.embedding(inputs) * math.sqrt(WIDTH))
        target = self.dropout(self.embedding(target) * math.sqrt(WIDTH))
        output = self.decoder(self.transformer(source, target, tgt_mask=mask))
        return F.log_softmax(output, dim=-1).view(-1, TOKENS)


if page == "fabric":
    older.second_intermediate_of_adam()  # its figures have it, those of the other page do not
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


def backward():
    if closure:
        optimizer.zero_grad()
    loss = F.nll_loss(model(inputs, target), target.view(-1))
    loss.backward()
    return loss


for _ in range(3):
    if not closure:
        backward()
    optimizer.step(backward if closure else None)
    if not closure:
        optimizer.zero_grad()
figure(f"{page} {setting}", allocated=torch.cuda.max_memory_allocated())
