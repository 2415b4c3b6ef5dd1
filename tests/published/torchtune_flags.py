"""torchtune's table of optimization flags: Llama 3.2 3B, two packs of 4096 tokens, bf16, peak active memory.

Each setting keeps those before it; LoRA and QLoRA leave the optimizer's two out. The modules are
torchtune's own, in the order of its recipe; a pack is eight samples of 512 tokens.

    torchtune_flags.py SETTING  # packed compile chunked checkpointing backward offloading adam8bit lora qlora
"""

import sys

import torch
import torch._inductor.compile_fx  # flex_attention alone imports in a circle
from harness import figure
from torch._inductor.kernel import flex_attention
from torchtune import modules, training
from torchtune.models.llama3_2 import llama3_2_3b, lora_llama3_2_3b, qlora_llama3_2_3b
from torchtune.modules.attention_utils import packed_block_causal_mask
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params

SETTINGS = ["packed", "compile", "chunked", "checkpointing", "backward", "offloading", "adam8bit", "lora"]
name = sys.argv[1]
setting = SETTINGS.index("lora" if name == "qlora" else name)
lora = setting == SETTINGS.index("lora")
compiled, chunked, checkpointing = (setting >= number for number in (1, 2, 3))
in_backward, offloading = setting >= 4 and not lora, setting >= 5
# 2.6.0 has no tile for this head on an A100 (pytorch/pytorch#141603); the tensors do not depend on it.
flex_attention._get_default_config_bwd = lambda query: (32, 64, 4, 3)

device = torch.device("cuda")
with training.set_default_dtype(torch.bfloat16), device:
    if lora:
        build = qlora_llama3_2_3b if name == "qlora" else lora_llama3_2_3b
        projections = ["q_proj", "v_proj", "output_proj"]
        model = build(projections, apply_lora_to_mlp=True, lora_rank=64, lora_alpha=128)
    else:
        model = llama3_2_3b()
if lora:
    set_trainable_params(model, get_adapter_params(model))
if compiled:
    training.compile_model(model, verbose=False)
if checkpointing:
    layer = {modules.TransformerSelfAttentionLayer}
    training.set_activation_checkpointing(model, auto_wrap_policy=layer)
offload = training.get_act_offloading_ctx_manager(model, offloading)

make = torch.optim.AdamW
if setting == SETTINGS.index("adam8bit"):
    from torchao.prototype.low_bit_optim import AdamW8bit as make
trained = [weight for weight in model.parameters() if weight.requires_grad]
if in_backward:
    each = {weight: make([weight], lr=2e-5) for weight in trained}
    training.register_optim_in_bwd_hooks(model=model, optim_dict=each)
else:
    optimizer = make(trained, lr=2e-5, fused=True)
loss_function = CEWithChunkedOutputLoss() if chunked else torch.nn.CrossEntropyLoss()
if compiled:
    loss_function = training.compile_loss(loss_function, verbose=False)
if chunked:
    model.set_num_output_chunks(loss_function.num_output_chunks)
ignored = torch.full((2, 1), -100, device=device)

for _ in range(3):
    torch.cuda.reset_peak_memory_stats()  # the recipe logs each step's own peak
    mask = packed_block_causal_mask([torch.full((8,), 512)] * 2)
    ids, places = torch.randint(128000, (2, 4096)), torch.arange(4096).remainder(512).repeat(2, 1)
    labels = ids.cuda()
    with offload:
        logits = model(ids.cuda(), mask=mask.to(device), input_pos=places.cuda())
    labels = torch.hstack((labels[..., 1:], ignored))
    if not chunked:
        labels, logits = labels.reshape(-1), logits.reshape(-1, logits.size(-1))
    loss = loss_function(logits, labels)
    del logits
    loss.backward()
    if not in_backward:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    loss.item()
figure(name, active=torch.cuda.memory_stats()["active_bytes.all.peak"])
