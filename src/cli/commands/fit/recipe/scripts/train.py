"""TITLE

python train.py --data book.txt   trains MODEL on a text file, then writes what it trained to trained/
python train.py --random          the same with random weights and tokens: reads config.json, writes nothing
"""

import argparse
import pathlib
import pydoc

# [lora qlora]
import peft

# []
import torch
import transformers

MODEL = "a name on the Hugging Face hub, or a folder"
BATCH = 1
SEQ = 2048
# [lora qlora]
RANK = 16
TARGETS = "all-linear"
# []
# [lora full]
OPTIMIZER = "torch.optim.AdamW"
# []
# [qlora]
OPTIMIZER = "bitsandbytes.optim.PagedAdamW8bit"
UPCAST = True
# []
LEARNING_RATE = 0.0001
CHECKPOINTING = True
ATTENTION = "sdpa"
# [full]
# A weight in bfloat16 loses updates below 1/256 of it. In float32 it keeps them, and needs twice the memory.
# []
DTYPE = "bfloat16"
AUTOCAST = True
ACCUMULATION = 1
# [packing]
PACKING = 1
# []
# [liger]
LIGER = False
# []
TRUST_REMOTE_CODE = False
parser = argparse.ArgumentParser()
for name, default in {"model": MODEL, "batch": BATCH, "seq": SEQ, "steps": 100, "data": ""}.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
parser.add_argument("--random", action="store_true")
if bool((args := parser.parse_args()).data) == args.random:
    parser.error("give either --data FILE or --random")
device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, DTYPE)
auto, trust = transformers.AutoModelForCausalLM, TRUST_REMOTE_CODE
# [liger]
if LIGER:
    from liger_kernel.transformers import AutoLigerKernelForCausalLM as auto
# []
config = transformers.AutoConfig.from_pretrained(args.model, trust_remote_code=trust)
options = {"config": config, "dtype": dtype, "attn_implementation": ATTENTION, "device_map": {"": device}}
# [qlora]
nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
options["quantization_config"] = transformers.BitsAndBytesConfig(load_in_4bit=True, **nf4)
# []
if args.random:
    # [+random_weights]
    tokens = torch.randint(config.get_text_config().vocab_size, (args.seq * args.batch,))
else:
    model = auto.from_pretrained(args.model, trust_remote_code=trust, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, trust_remote_code=trust)
    tokens = tokenizer(pathlib.Path(args.data).read_text("utf-8"), return_tensors="pt").input_ids[0]
if len(tokens) < args.seq:
    raise SystemExit(f"--data has {len(tokens)} tokens, fewer than a row of {args.seq}")
# [qlora]
model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False) if UPCAST else model
# []
if CHECKPOINTING:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
# [lora qlora]
adapters = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
model = peft.get_peft_model(model, adapters)
scaler = torch.amp.GradScaler(device, enabled=DTYPE == "float16")  # Small gradients would round to 0.
# []
optimizer = pydoc.locate(OPTIMIZER)(model.train().parameters(), lr=LEARNING_RATE)
schedule = transformers.get_linear_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
rows = tokens[: len(tokens) // args.seq * args.seq].view(-1, args.seq)
order = torch.cat([torch.randperm(len(rows)) for _ in range(args.steps * args.batch // len(rows) + 1)])
# [packing]
# A row is cut into at most PACKING documents of equal length, but the last may be shorter. Each begins at
# position 0 and attends only to itself.
if args.seq < 2 * PACKING:
    raise SystemExit(f"a document of a row of {args.seq} would have fewer than 2 tokens")
places = (torch.arange(args.seq, device=device) % -(-args.seq // PACKING))[None]
# []
for step in range(args.steps):
    batch, total = rows[order[step * args.batch : (step + 1) * args.batch]].to(device), 0
    for part in batch.chunk(ACCUMULATION):
        with torch.autocast(device, dtype if dtype.itemsize == 2 else torch.bfloat16, enabled=AUTOCAST):
            # [!packing]
            loss = model(input_ids=part, labels=part, use_cache=False).loss
            # []
            # [packing]
            labels = part.masked_fill(places == 0, -100)  # A document does not predict the next one.
            loss = model(input_ids=part, labels=labels, position_ids=places, use_cache=False).loss
            # []
        # [lora qlora]
        scaler.scale(loss * len(part) / len(batch)).backward()
        # []
        # [full]
        (loss * len(part) / len(batch)).backward()
        # []
        total += loss.detach() * len(part) / len(batch)
    # [lora qlora]
    scaler.step(optimizer)
    scaler.update()
    # []
    # [full]
    optimizer.step()
    # []
    optimizer.zero_grad()
    schedule.step()
    print(f"step {step}: loss {total.item():.3f}", flush=True)
if not args.random:
    model.save_pretrained("trained")
    tokenizer.save_pretrained("trained")
