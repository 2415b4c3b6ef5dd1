"""TITLE

torchrun --nproc-per-node N train.py --data FILE   trains a new MODEL on 32-bit token ids, and writes trained/
# [zero]
python trained/zero_to_fp32.py trained weights     turns the checkpoint into a file of weights
# []
"""

import argparse
import os
import pydoc

# [pretrain]
import accelerate

# []
# [zero]
import deepspeed

# []
import torch
import transformers

MODEL = "a name on the Hugging Face hub, or a folder"
BATCH = 1
SEQ = 2048
OPTIMIZER = "torch.optim.AdamW"
LEARNING_RATE = 0.0003
CHECKPOINTING = True
ATTENTION = "sdpa"
CPU_OFFLOAD = False
ACCUMULATION = 1
# [zero]
STAGE = 3
# []
# [pretrain]
RESHARD = True
# []
TRUST_REMOTE_CODE = False
parser = argparse.ArgumentParser(epilog="N is the number of GPUs. --batch is the batch of each GPU.")
for name, default in {"model": MODEL, "batch": BATCH, "seq": SEQ, "steps": 100, "data": ""}.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
parser.add_argument("--random", action="store_true", help="train on random tokens, and write nothing")
args = parser.parse_args()
if bool(args.data) == args.random:
    parser.error("give either --data FILE or --random")
if "RANK" not in os.environ:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if device == "cuda" else -1)  # -1 does nothing.
config = transformers.AutoConfig.from_pretrained(args.model, trust_remote_code=TRUST_REMOTE_CODE)
options = {"dtype": torch.float32, "attn_implementation": ATTENTION, "trust_remote_code": TRUST_REMOTE_CODE}
# [pretrain]
torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
with accelerate.init_empty_weights():  # The buffers get values, which fully_shard moves to the device.
    model = transformers.AutoModelForCausalLM.from_config(config, **options)
fsdp = torch.distributed.fsdp
precision = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
offload = fsdp.CPUOffloadPolicy() if CPU_OFFLOAD else fsdp.OffloadPolicy()
blocks = [block for block in model.modules() if type(block).__name__ in (model._no_split_modules or ())]
if not blocks:
    raise SystemExit(f"{type(model).__name__} does not name its blocks (_no_split_modules) for FSDP to shard")
for block in [*reversed(blocks), model]:  # the inner ones first
    fsdp.fully_shard(block, mp_policy=precision, offload_policy=offload, reshard_after_forward=RESHARD)
model._apply(lambda t: torch.empty_like(t, device="cpu" if CPU_OFFLOAD else device) if t.is_meta else t)
model.apply(lambda module: setattr(module, "_is_hf_initialized", False))  # transformers 4 sets it on meta
model.init_weights()
optimizer = pydoc.locate(OPTIMIZER)(model.parameters(), lr=LEARNING_RATE)
# []
# [zero]
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
offload, micro_batch = {"device": "cpu" if CPU_OFFLOAD else "none"}, -(-args.batch // ACCUMULATION)
settings = {
    "train_micro_batch_size_per_gpu": micro_batch,
    "gradient_accumulation_steps": -(-args.batch // micro_batch),
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": STAGE, "offload_optimizer": offload},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,  # deepspeed.ops.adam.DeepSpeedCPUAdam is faster there.
}
if STAGE == 3:
    settings["zero_optimization"]["offload_param"] = offload
with deepspeed.zero.Init(config_dict_or_path=settings, enabled=STAGE == 3):
    model = transformers.AutoModelForCausalLM.from_config(config, **options)
optimizer = pydoc.locate(OPTIMIZER)(model.parameters(), lr=LEARNING_RATE)
model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
# []
if CHECKPOINTING:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
size, rank, world = args.batch * args.seq, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
tokens = torch.randint(config.get_text_config().vocab_size, (size,), dtype=torch.int32)
if args.data:
    tokens = torch.from_file(args.data, size=os.path.getsize(args.data) // 4, dtype=torch.int32)
if len(tokens) < size:
    raise SystemExit(f"--data has {len(tokens)} tokens, fewer than {args.batch} rows of {args.seq}")
rows = tokens[: len(tokens) // size * size].view(-1, args.batch, args.seq)
for step in range(args.steps):
    batch = rows[(step * world + rank) % len(rows)].long().to(device)
    optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) * 10 / args.steps)  # warm-up
    parts, total = batch.chunk(ACCUMULATION), 0
    for part in parts:
        loss = model(input_ids=part, labels=part).loss * len(part) / len(batch)
        total += loss.detach()
        # [zero]
        model.backward(loss * len(parts))  # DeepSpeed divides by the number of parts.
        model.step()
        # []
        # [pretrain]
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    # []
    print(f"step {step}, rank {rank}: loss {total.item():.3f}", flush=True)
if not args.random:
    # [zero]
    model.save_checkpoint("trained")
    # []
    # [pretrain]
    checkpoint = pydoc.locate("torch.distributed.checkpoint.state_dict")
    whole = checkpoint.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = checkpoint.get_model_state_dict(model, options=whole)
    if rank == 0:
        model.save_pretrained("trained", state_dict=weights)
    # []
torch.distributed.destroy_process_group()
