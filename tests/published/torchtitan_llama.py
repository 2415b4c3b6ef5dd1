"""torchtitan's benchmark of December 2024: Llama 3.1 8B, FSDP2, selective checkpointing, batch 2 of 8192.

Runs one rank of a group whose peers do not exist: the memory of a rank does not depend on them. The modules
are torchtitan's own, in the order of its `Trainer`; the values of the weights do not matter.

    torchtitan_llama.py RANKS SETTING    # eager compile float8
"""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from harness import figure
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.models.llama3 import Transformer, llama3_configs
from torchtitan.models.llama3.infra.parallelize import apply_ac, apply_compile, apply_fsdp

LENGTH, BATCH, STEPS = 8192, 2, 3
ranks, setting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
mesh = dist.init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp",))
config = llama3_configs["8B"]
config.vocab_size, config.max_seq_len = 128256, LENGTH
with torch.device("meta"):
    model = Transformer(config)
if setting == "float8":
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    float8 = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=float8, module_filter_fn=lambda _, name: name != "output")


def loss_of(predicted, labels):
    return torch.nn.functional.cross_entropy(predicted.flatten(0, 1).float(), labels.flatten(0, 1))


apply_ac(model, SimpleNamespace(mode="selective", selective_ac_option="op"))
if setting != "eager":
    apply_compile(model)  # the loss was not compiled then (pytorch/torchtitan#755)
apply_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False)
model.to_empty(device="cuda")
with torch.no_grad():
    model.init_weights()
optimizer = torch.optim.AdamW(
    model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True, fused=False
)
for _ in range(STEPS):
    optimizer.zero_grad()
    ids = torch.randint(config.vocab_size, (BATCH, LENGTH)).cuda()
    labels = torch.randint(config.vocab_size, (BATCH, LENGTH)).cuda()
    predicted = model(ids)
    loss = loss_of(predicted, labels)
    del predicted
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    norm.full_tensor()
    optimizer.step()
    if setting == "float8":
        precompute_float8_dynamic_scale_for_fsdp(model)
    loss.item()
figure(f"{setting}, {ranks} GPUs", reserved=torch.cuda.max_memory_reserved())
