"""torchtitan, Llama 3.1 8B with FSDP2: its benchmark of December 2024, and runs in its commit messages.

Runs one rank of a group whose peers do not exist: the memory of a rank does not depend on them. The modules
are torchtitan's own, in the order of its `Trainer`; the values of the weights do not matter.

    torchtitan_llama.py RANKS SETTING [FLAG...]

SETTING: eager, compile, float8 (compiled, Float8 in the all-gather), plain (Float8 without that), rowwise
FLAG, any of:
    one            as run_train.sh: a batch of 1 instead of 2, expandable segments
    uncompiled     Float8 without a compiler
    always, never  resharding after the forward
    norm           RMSNorm in Python, as until March 2025
    chunked        the loss in eight parts
    abs            checkpointing keeps absolute values, as until February 2025
    before         torchao is older than its pull request 1629; this names the run and changes nothing
    late           the scales of Float8 are not computed before the all-gather
"""

import os
import sys
from types import SimpleNamespace

if "one" in sys.argv[3:]:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch
import torch.distributed as dist
from harness import figure
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.models.llama3 import Transformer, llama3_configs
from torchtitan.models.llama3.infra import parallelize
from torchtitan.models.llama3.infra.parallelize import apply_ac, apply_compile, apply_fsdp

LENGTH, STEPS = 8192, 3
ranks, setting, flags = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
batch = 1 if "one" in flags else 2
label = ", ".join([setting, f"{ranks} GPUs", *flags])
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
mesh = dist.init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp",))
config = llama3_configs["8B"]
config.vocab_size, config.max_seq_len = 128256, LENGTH


def norm_in_python(self, x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


if "norm" in flags:
    torch.nn.RMSNorm.forward = norm_in_python
if "abs" in flags:
    parallelize._save_list.add(torch.ops.aten.abs.default)
with torch.device("meta"):
    model = Transformer(config)
if setting in ("float8", "plain", "rowwise"):
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    float8 = Float8LinearConfig(enable_fsdp_float8_all_gather=setting == "float8")
    if setting == "rowwise":
        if hasattr(Float8LinearConfig, "from_recipe_name"):  # torchao 0.9.0
            float8 = Float8LinearConfig.from_recipe_name("rowwise")
        else:
            from torchao.float8.config import Float8LinearRecipeName, recipe_name_to_linear_config

            float8 = recipe_name_to_linear_config(Float8LinearRecipeName.ALL_AXISWISE)
        torch._inductor.config.emulate_precision_casts = True  # as torchtitan sets it for this recipe
    convert_to_float8_training(model, config=float8, module_filter_fn=lambda _, name: name != "output")


def loss_of(predicted, labels):
    predicted, labels = predicted.flatten(0, 1), labels.flatten(0, 1)
    if "chunked" not in flags:
        return torch.nn.functional.cross_entropy(predicted.float(), labels)
    parts = zip(predicted.chunk(8), labels.chunk(8))
    losses = [torch.nn.functional.cross_entropy(part.float(), of, reduction="sum") for part, of in parts]
    return torch.stack(losses).sum() / labels.numel()


apply_ac(model, SimpleNamespace(mode="selective", selective_ac_option="op"))
if setting != "eager" and "uncompiled" not in flags:
    apply_compile(model)  # the loss was not compiled then (pytorch/torchtitan#755)
policy = next((flag for flag in flags if flag in ("always", "never")), "default")
types = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
apply_fsdp(model, mesh, pp_enabled=False, reshard_after_forward_policy=policy, **types)
model.to_empty(device="cuda")
with torch.no_grad():
    model.init_weights()
optimizer = torch.optim.AdamW(
    model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True, fused=False
)
for step in range(STEPS):
    optimizer.zero_grad()
    ids = torch.randint(config.vocab_size, (batch, LENGTH)).cuda()
    labels = torch.randint(config.vocab_size, (batch, LENGTH)).cuda()
    predicted = model(ids)
    loss = loss_of(predicted, labels)
    del predicted
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    norm.full_tensor()
    optimizer.step()
    if setting == "float8" and "late" not in flags:
        precompute_float8_dynamic_scale_for_fsdp(model)
    loss.item()
    if step == 0:
        figure(f"{label}, first step", reserved=torch.cuda.max_memory_reserved())
figure(label, reserved=torch.cuda.max_memory_reserved())
