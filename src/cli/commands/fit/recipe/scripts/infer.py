"""TITLE

python infer.py            continues random prompts with the weights of MODEL, to measure; writes nothing
python infer.py --random   the same with random weights: reads only config.json
"""

import argparse

import torch
import transformers

MODEL = "a name on the Hugging Face hub, or a folder"
BATCH = 1
SEQ = 2048
CACHE = "dynamic"
OFFLOADED_LAYERS = 0
ATTENTION = "sdpa"
DTYPE = "bfloat16"
TRUST_REMOTE_CODE = False

parser = argparse.ArgumentParser()
parser.add_argument("--model", default=MODEL)
parser.add_argument("--batch", type=int, default=BATCH)
parser.add_argument("--seq", type=int, default=SEQ, help="prompt and answer")
parser.add_argument("--steps", type=int, default=32, help="the tokens of the answer")
parser.add_argument("--random", action="store_true")
args = parser.parse_args()
if args.seq < 2 or args.steps < 1:
    parser.error("a prompt and an answer have a token each: --seq is at least 2, and --steps at least 1")

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = getattr(torch, DTYPE)
auto, trust = transformers.AutoModelForCausalLM, TRUST_REMOTE_CODE
config = transformers.AutoConfig.from_pretrained(args.model, trust_remote_code=trust)
options = {"config": config, "dtype": dtype, "attn_implementation": ATTENTION, "device_map": {"": device}}
if OFFLOADED_LAYERS:  # The first layers stay in host memory. accelerate copies each to the card for its turn.
    with torch.device("meta"):
        parts = dict(auto.from_config(config, dtype=dtype, trust_remote_code=trust).named_modules())
    count = config.get_text_config().num_hidden_layers
    lists = [name for name, part in parts.items() if isinstance(part, torch.nn.ModuleList)]
    blocks = next(name for name in lists if len(parts[name]) == count)
    leaves = [name for name, part in parts.items() if not list(part.children()) or part._parameters]
    offloaded = tuple(f"{blocks}.{index}." for index in range(OFFLOADED_LAYERS))
    options["device_map"] = {name: "cpu" if name.startswith(offloaded) else device for name in leaves}
if args.random:
    # [+random_weights]
    if OFFLOADED_LAYERS and device == "cuda":
        unwritten = sum(weight.nbytes for weight in parts[blocks][:OFFLOADED_LAYERS].parameters())
        print(f"unwritten weights on the host: {unwritten} bytes", flush=True)
else:
    model = auto.from_pretrained(args.model, trust_remote_code=trust, **options)
model.eval()

new = min(args.steps, args.seq - 1)
prompt = torch.randint(config.get_text_config().vocab_size, (args.batch, args.seq - new), device=device)
answer = model.generate(
    input_ids=prompt,
    attention_mask=torch.ones_like(prompt),
    max_new_tokens=new,
    min_new_tokens=new,
    do_sample=False,
    cache_implementation=None if CACHE == "dynamic" else CACHE,
)
print(f"{answer.shape[0]} answers of {answer.shape[1]} tokens")
