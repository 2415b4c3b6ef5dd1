"""Unsloth: LoRA on a Llama that it loads from a folder, with its own kernels and checkpointing."""

import tempfile

import unsloth  # isort: skip
import torch
from made_up import llama, tokenizer
from peaks import print_peak

torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    llama().to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        folder, max_seq_length=256, dtype=torch.bfloat16, load_in_4bit=False
    )
model = unsloth.FastLanguageModel.get_peft_model(
    model, r=8, target_modules=["q_proj", "v_proj"], use_gradient_checkpointing="unsloth"
)
optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
ids = torch.randint(3, 512, (4, 128), device="cuda")
for _ in range(3):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
print_peak()
