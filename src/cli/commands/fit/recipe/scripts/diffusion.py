"""TITLE

python train.py --data rows.pt   trains MODEL on torch.save's list of {"latents", "text", "pooled"}: the
scaled latents of the VAE (packed for FLUX), and what the text encoders made of the caption. Writes trained/
"""

import argparse
import pydoc

import diffusers
import peft
import torch

MODEL = "a name on the Hugging Face hub, or a folder"
SUBFOLDER = ""
BATCH = 1
SIZE = 1024
RANK = 16
TARGETS = "to_q,to_k,to_v,to_out.0"
OPTIMIZER = "torch.optim.AdamW"
LEARNING_RATE = 0.0001
CHECKPOINTING = True
# [blocks_to_swap]
BLOCKS_TO_SWAP = 0
# []
DTYPE = "bfloat16"
parser = argparse.ArgumentParser()
for name, default in {"model": MODEL, "batch": BATCH, "size": SIZE, "steps": 100, "data": ""}.items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
parser.add_argument("--random", action="store_true", help="train random weights on random rows")
if bool((args := parser.parse_args()).data) == args.random:
    parser.error("give either --data FILE or --random")
device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, DTYPE)
facts = diffusers.UNet2DConditionModel.load_config(args.model, subfolder=SUBFOLDER)
kind, is_flux, start = getattr(diffusers, facts["_class_name"]), "joint_attention_dim" in facts, device
# [blocks_to_swap]
start = "meta" if device == "cuda" else "cpu"
# []
if args.random:
    torch.set_default_dtype(dtype)
    with torch.device(start):
        model = kind.from_config(facts)
    torch.set_default_dtype(torch.float32)
else:
    model = kind.from_pretrained(args.model, subfolder=SUBFOLDER, torch_dtype=dtype)
# [blocks_to_swap]
if args.random and start == "meta":  # Memory does not depend on the values, so none are written.
    model.to_empty(device="cpu")
# []
model.train().requires_grad_(False)
model.add_adapter(peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS.split(",")))
diffusers.training_utils.cast_training_params(model)
if CHECKPOINTING:
    model.enable_gradient_checkpointing()
# [blocks_to_swap]
assert CHECKPOINTING or not BLOCKS_TO_SWAP, "BLOCKS_TO_SWAP needs CHECKPOINTING"
# The frozen weights of the first blocks stay in host memory. A block has them on the card for its forward
# pass and, because CHECKPOINTING runs it again, for its backward pass.
parts = model.named_modules()
blocks = [part for name, part in parts if name.rpartition(".")[0].endswith("transformer_blocks")]
swapped = {block: [] for block in blocks[:BLOCKS_TO_SWAP]}
for block, pairs in swapped.items():
    for weight in filter(lambda weight: not weight.requires_grad, block.parameters()):
        pairs.append((weight, weight.data))
        weight.data = weight.new_empty(0)
on_card = []


def swap_in(block, _):
    for weight, _ in on_card:
        weight.data = weight.new_empty(0)
    on_card[:] = swapped[block]
    for weight, on_host in on_card:
        weight.data = on_host.to(device)


for block in swapped:
    block.register_forward_pre_hook(swap_in)
if start == "meta" and args.random:
    unwritten = sum(on_host.nbytes for pairs in swapped.values() for _, on_host in pairs)
    print(f"unwritten weights on the host: {unwritten} bytes", flush=True)
# []
optimizer = pydoc.locate(OPTIMIZER)(model.to(device).parameters(), lr=LEARNING_RATE)
config, side = model.config, args.size // 8
if is_flux:
    shape, width, pooled_width = (side**2 // 4, 64), config.joint_attention_dim, config.pooled_projection_dim
    grid = torch.cartesian_prod(*(torch.arange(n, device=device) for n in (1, side // 2, side // 2)))
else:  # SDXL adds six numbers about the image to the embedding of the text.
    shape, width = (config.in_channels, side, side), config.cross_attention_dim
    pooled_width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    image = torch.tensor([[args.size, args.size, 0, 0, args.size, args.size]] * args.batch, device=device)
    noises = diffusers.DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
sizes = {"latents": shape, "text": (512 if is_flux else 77, width), "pooled": (pooled_width,)}
rows = torch.load(args.data) if args.data else [{name: torch.randn(sizes[name]) for name in sizes}]
if not rows:
    raise SystemExit(f"--data {args.data}: the list is empty")
order = torch.cat([torch.randperm(len(rows)) for _ in range(args.steps * args.batch // len(rows) + 1)])
for step in range(args.steps):
    chosen = [rows[place] for place in order[step * args.batch : (step + 1) * args.batch]]
    clean, text, pooled = (torch.stack([row[name] for row in chosen]).to(device, dtype) for name in sizes)
    noise, times = torch.randn_like(clean), torch.rand(args.batch, device=device)
    with torch.autocast(device, torch.bfloat16):
        if is_flux:
            noisy, wanted = torch.lerp(clean, noise, times.to(dtype).view(-1, 1, 1)), noise - clean
            guidance = torch.ones_like(times) if config.guidance_embeds else None
            out = model(noisy, text, pooled, times, grid, grid[:1].expand(text.shape[1], 3), guidance).sample
        else:
            steps, wanted, added = (times * 1000).long(), noise, {"text_embeds": pooled, "time_ids": image}
            noisy = noises.add_noise(clean, noise, steps)
            out = model(noisy, steps, text, added_cond_kwargs=added).sample
    loss = torch.nn.functional.mse_loss(out.float(), wanted.float())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}", flush=True)
if not args.random:
    model.save_lora_adapter("trained")  # load_lora_adapter("trained", prefix=None) reads it.
