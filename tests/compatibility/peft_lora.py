"""LoRA adapters of PEFT on a Llama, with gradient checkpointing."""

import torch
from peaks import print_peak
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
kind = LlamaConfig(
    vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8
)
base = LlamaForCausalLM(kind).to(torch.bfloat16)
model = get_peft_model(
    base, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
).cuda()
model.enable_input_require_grads()
model.gradient_checkpointing_enable()
model.train()
optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
ids = torch.randint(0, 1024, (8, 128), device="cuda")
for _ in range(3):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", sum(p.numel() for p in model.parameters() if p.requires_grad))
print_peak()
