"""LitGPT: fine-tuning in bfloat16 with LoRA, one optimizer step over the longest sequences.

litgpt_finetune.py MODEL BATCH LENGTH RANK PARTS    # the parts with LoRA: q k v o(projection) m(lp) h(ead)
"""

import json
import sys

import lightning
import torch
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
from litgpt.utils import chunked_cross_entropy

name, (batch, length, rank), parts = sys.argv[1], map(int, sys.argv[2:5]), sys.argv[5]
names = {"q": "query", "k": "key", "v": "value", "o": "projection", "m": "mlp", "h": "head"}
adapted = {f"lora_{names[part]}": part in parts for part in names}
config = Config.from_name(name, lora_r=rank, lora_alpha=16, lora_dropout=0.05, **adapted)
fabric = lightning.Fabric(devices=1, precision="bf16-true")
with fabric.init_module(empty_init=True):
    model = GPT(config)
mark_only_lora_as_trainable(model)
model = fabric.setup_module(model)
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = fabric.setup_optimizers(torch.optim.AdamW(trained, lr=2e-4))
model.max_seq_length = length


ids = torch.randint(100, (batch, length)).cuda()
model.eval()
with torch.no_grad():
    for _ in range(2):
        logits = model(ids)
        chunked_cross_entropy(logits[..., :-1, :], ids[..., 1:], chunk_size=0).item()
model.train()
for _ in range(3):
    logits = model(ids, lm_head_chunk_size=128)  # frees the logits of the previous step
    logits[-1] = logits[-1][..., :-1, :]
    loss = chunked_cross_entropy(logits, ids[..., 1:])
    fabric.backward(loss / 8)
    optimizer.step()
    optimizer.zero_grad()
values = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
print(json.dumps({"label": name} | values))
