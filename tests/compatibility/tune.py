"""torchtune: LoRA on a Llama 3.2, with its chunked loss and activation checkpointing."""

import torch
from peaks import print_peak
from torchtune.models.llama3_2 import lora_llama3_2
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from torchtune.training import set_activation_checkpointing, set_default_dtype

torch.manual_seed(0)
with set_default_dtype(torch.bfloat16), torch.device("cuda"):
    model = lora_llama3_2(
        ["q_proj", "v_proj"],
        apply_lora_to_mlp=True,
        vocab_size=1024,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        embed_dim=256,
        max_seq_len=256,
        intermediate_dim=512,
        lora_rank=8,
        lora_alpha=16,
    )
set_trainable_params(model, get_adapter_params(model))
set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
loss = CEWithChunkedOutputLoss()
model.set_num_output_chunks(loss.num_output_chunks)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), fused=True)
ids = torch.randint(0, 1024, (4, 256), device="cuda")
for _ in range(3):
    loss(model(ids), ids).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print("trained", sum(p.numel() for p in model.parameters() if p.requires_grad))
print_peak()
