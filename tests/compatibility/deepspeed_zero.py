"""DeepSpeed's ZeRO under its own launcher: deepspeed_zero.py 1|2|3|offload."""

import sys

import deepspeed
import torch
from peaks import print_peak
from torch import nn

kind = next(word for word in sys.argv[1:] if not word.startswith("--"))
zero = {"stage": 3 if kind == "offload" else int(kind)}
if kind == "offload":
    zero["offload_optimizer"] = {"device": "cpu"}
config = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": zero,
    "bf16": {"enabled": True},
    # DeepSpeed's own fused AdamW is compiled with nvcc, which few machines have.
    "zero_force_ds_cpu_optimizer": False,
}
deepspeed.init_distributed()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)))
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
for _ in range(3):
    batch = torch.randn(8, 1024, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(batch).float().square().mean())
    engine.step()
if torch.distributed.get_rank() == 0:
    print("steps", engine.global_steps, "stage", engine.zero_optimization_stage())
print_peak()
torch.distributed.destroy_process_group()
