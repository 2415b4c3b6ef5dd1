"""TITLE

python train.py --data rows.jsonl   trains MODEL, then writes the adapters to trained/
# [dpo]
python train.py --random            the same with random weights and tokens: reads config.json, writes nothing

A line of the data is {"prompt": ..., "chosen": ..., "rejected": ...}. --seq is prompt and answer.
# []
# [grpo]
A line of the data is {"prompt": ..., "answer": ...}. Prompts without room for an answer are left out.
# []
"""

import argparse

import datasets
import peft
import tokenizers
import torch
import transformers
import trl

MODEL = "a name on the Hugging Face hub, or a folder"
BATCH = 1
SEQ = 2048
RANK = 16
TARGETS = "all-linear"
# [grpo]
GENERATIONS = 8
COMPLETION = 256
# []
OPTIMIZER = "adamw_torch"
LEARNING_RATE = 0.0001
CHECKPOINTING = True
ACCUMULATION = 1
ATTENTION = "sdpa"
DTYPE = "bfloat16"
TRUST_REMOTE_CODE = False
parser = argparse.ArgumentParser()
for name, default in {"model": MODEL, "batch": BATCH, "seq": SEQ, "steps": 100, "data": ""}.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
parser.add_argument("--random", action="store_true", help="train random weights on random tokens")
if bool((args := parser.parse_args()).data) == args.random:
    parser.error("give either --data FILE or --random")
device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, DTYPE)
if device == "cuda" and DTYPE == "bfloat16" and torch.cuda.get_device_capability() < (8, 0):
    raise SystemExit("this card cannot train in bfloat16: choose DTYPE = float16 (--set dtype=float16)")
auto, trust = transformers.AutoModelForCausalLM, TRUST_REMOTE_CODE
config = transformers.AutoConfig.from_pretrained(args.model, trust_remote_code=trust)
options = {"config": config, "dtype": dtype, "attn_implementation": ATTENTION, "device_map": {"": device}}
part = -(-args.batch // ACCUMULATION)  # the rows of one of the steps that are accumulated
# [dpo]
completion = args.seq // 2
settings = {"per_device_train_batch_size": part, "max_length": args.seq}
# []
# [grpo]
completion = min(COMPLETION, args.seq // 2)  # Random weights end early, so it is the least length, too.
settings = {"generation_kwargs": {"min_new_tokens": args.random * completion}, "num_generations": GENERATIONS}
settings |= {"per_device_train_batch_size": part * GENERATIONS, "max_completion_length": completion}
# []
if args.random:
    # [+random_weights]
    words = {"<end>": 0, **{str(token): token for token in range(1, config.get_text_config().vocab_size)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    # [dpo]
    # DPO adds a token at the end of each answer.
    lengths = {"prompt": args.seq - completion, "chosen": completion - 1, "rejected": completion - 1}
    # []
    # [grpo]
    lengths = {"prompt": args.seq - completion, "answer": 1}
    # []
    text = lambda key: " " + " ".join(map(str, torch.randint(1, len(tokenizer), (lengths[key],)).tolist()))
    rows = datasets.Dataset.from_list([{key: text(key) for key in lengths}] * part * -(-args.batch // part))
else:
    model = auto.from_pretrained(args.model, trust_remote_code=trust, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, trust_remote_code=trust)
    rows = datasets.load_dataset("json", data_files=args.data, split="train")
    # [grpo]
    rows = rows.filter(lambda row: len(tokenizer(row["prompt"]).input_ids) <= args.seq - completion)
    if len(rows) < args.batch:
        raise SystemExit(f"--data has {len(rows)} prompts with room for an answer, fewer than a batch")
    # []
adapters = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
settings |= {"output_dir": "." if args.random else "trained", "save_strategy": "no", "report_to": "none"}
settings |= {"logging_steps": 1, "max_steps": args.steps, "use_cpu": device == "cpu", "optim": OPTIMIZER}
settings |= {"learning_rate": LEARNING_RATE, "gradient_checkpointing": CHECKPOINTING}
settings |= {"gradient_accumulation_steps": -(-args.batch // part), "bf16": DTYPE == "bfloat16"}
settings["fp16"] = DTYPE == "float16" and device == "cuda"
# [dpo]
own = {"args": trl.DPOConfig(**settings), "processing_class": tokenizer, "peft_config": adapters}
trainer = trl.DPOTrainer(model, train_dataset=rows, **own)
# []
# [grpo]
# A completion is worth 1 if it contains the answer. Write your own reward for other tasks.
reward = lambda completions, answer, **columns: [float(str(a) in c) for a, c in zip(answer, completions)]
own = {"args": trl.GRPOConfig(**settings), "processing_class": tokenizer, "peft_config": adapters}
trainer = trl.GRPOTrainer(model, reward, train_dataset=rows, **own)
# []
trainer.train()
if not args.random:
    trainer.save_model()
