"""torchtitan's releases from 0.2.0 on: runs in its commit messages.

Runs one rank of a group whose peers do not exist: the memory of a rank does not depend on them. The modules
and the steps are torchtitan's own, in the order of its `Trainer`; the values of the weights do not matter.

    torchtitan_release.py MODEL FLAVOR RANKS [FLAG...]

MODEL, FLAVOR: one of torchtitan's, such as llama3 8B
FLAG, any of:
    tp=N, batch=N, length=N  tensor parallelism; the batch (1), the tokens of a row (8192)
    ac=full, ac=2            checkpointing of each layer or of every second one, instead of operators
    compile                  the blocks and the loss are compiled
    lora                     adapters of rank 8 beside each linear layer, which is frozen with the rest
    plain                    no expandable segments
    flash                    attention by FlashAttention, as until October 2025; since then, cuDNN is first
"""

import contextlib
import os
import sys

if "plain" not in sys.argv[4:]:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch
import torch.distributed as dist
from harness import figure
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.protocols.train_spec import get_train_spec

STEPS = 3
model_name, flavor, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
flags = dict(flag.partition("=")[::2] for flag in sys.argv[4:])
if "flash" in flags:
    ScaledDotProductAttentionWrapper.sdpa_backends = [SDPBackend.FLASH_ATTENTION]
tp, batch, length = (int(flags.get(*one)) for one in (("tp", 1), ("batch", 1), ("length", 8192)))
label = ", ".join([f"{model_name} {flavor}", f"{ranks} GPUs", *sys.argv[4:]])
config = JobConfig()
config.training.local_batch_size, config.training.seq_len = batch, length
config.parallelism.tensor_parallel_degree = tp
mode = flags.get("ac", "op")
config.activation_checkpoint.mode = "full" if mode == "full" else "selective"
config.activation_checkpoint.selective_ac_option = mode
config.compile.enable = "compile" in flags


class Adapted(torch.nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        adapted = self.lora_b(self.lora_a(x))
        return output + 2.0 * adapted


os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
axes = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": tp, "pp": 1, "ep": 1, "etp": 1}
dims = ParallelDims(**axes, world_size=ranks)
spec = get_train_spec(model_name)
arguments = spec.model_args[flavor]
if model_name == "llama3" and flavor == "8B":
    arguments.vocab_size = 128256
arguments.update_from_config(config)
with torch.device("meta"):
    model = spec.model_cls(arguments)
if "lora" in flags:
    model.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, torch.nn.Linear):
            module.__class__ = Adapted
            with torch.device("meta"):
                module.lora_a = torch.nn.Linear(module.in_features, 8, bias=False)
                module.lora_b = torch.nn.Linear(8, module.out_features, bias=False)
model = spec.parallelize_fn(model, dims, config)
model.to_empty(device="cuda")
with torch.no_grad():
    model.init_weights(buffer_device=None)
model.train()
loss_of = spec.build_loss_fn(config)
optimizer = spec.build_optimizers_fn([model], config.optimizer, dims)
for step in range(STEPS):
    optimizer.zero_grad()
    ids = torch.randint(arguments.vocab_size, (batch, length)).cuda()
    labels = torch.randint(arguments.vocab_size, (batch, length)).cuda()
    with loss_parallel() if tp > 1 else contextlib.nullcontext():
        predicted = model(ids)
        loss = loss_of(predicted, labels) / 1
        del predicted
        loss.backward()
    norm = dist_utils.clip_grad_norm_(
        list(model.parameters()), config.training.max_norm, foreach=True, pp_mesh=None
    )
    optimizer.step()
    loss.item()
    if step == 0:
        figure(f"{label}, first step", reserved=torch.cuda.max_memory_reserved())
figure(label, reserved=torch.cuda.max_memory_reserved())
