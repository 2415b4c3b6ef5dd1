"""torchtune's table of optimization flags: Llama 3.2 3B, packs of some length, bf16, peak active memory.

Each setting adds to the settings before it; LoRA and QLoRA omit the optimizer's two. The modules are
torchtune's own, in the order of its recipe; the samples of a pack have 512 tokens.

    torchtune_flags.py SETTING PACKS LENGTH  # SETTING: one of SETTINGS, or qlora
"""

import os
import sys

import torch
import torch._inductor.compile_fx  # before flex_attention, which alone fails with a circular import
from harness import figure
from torch._inductor.kernel import flex_attention
from torchtune import modules, training
from torchtune.models.llama3_2 import llama3_2_3b, lora_llama3_2_3b, qlora_llama3_2_3b
from torchtune.modules.attention_utils import packed_block_causal_mask
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params

SETTINGS = ["packed", "compile", "chunked", "checkpointing", "backward", "offloading", "adam8bit", "lora"]
name, packs, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
setting = SETTINGS.index("lora" if name == "qlora" else name)
lora = setting == SETTINGS.index("lora")
compiled, chunked, checkpointing, in_backward, offloading = (setting >= number for number in range(1, 6))
# torch 2.6.0 has no tile size for this head on an A100 (pytorch/pytorch#141603). Any size works, because the
# tensors do not depend on it.
flex_attention._get_default_config_bwd = lambda query: (32, 64, 4, 3)

device = torch.device("cuda")
with training.set_default_dtype(torch.bfloat16), device:
    build = {"lora": lora_llama3_2_3b, "qlora": qlora_llama3_2_3b}.get(name)
    parts = ["q_proj", "v_proj", "output_proj"]
    model = build(parts, True, lora_rank=64, lora_alpha=128) if build else llama3_2_3b()
if lora:
    set_trainable_params(model, get_adapter_params(model))
if compiled:
    training.compile_model(model, verbose=False)
if checkpointing:
    training.set_activation_checkpointing(model, {modules.TransformerSelfAttentionLayer})
offload = training.get_act_offloading_ctx_manager(model, offloading)

make = torch.optim.AdamW
if name == "adam8bit":
    # Starts with an empty cache of Inductor, as a first run does, because autotuning needs memory, too.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath("inductor")
    from torchao.prototype.low_bit_optim import AdamW8bit as make
trained = [weight for weight in model.parameters() if weight.requires_grad]
if in_backward and not lora:
    each = {weight: make([weight], lr=2e-5) for weight in trained}
    training.register_optim_in_bwd_hooks(model=model, optim_dict=each)
else:
    optimizer = make(trained, lr=2e-5, fused=True)
loss_function = CEWithChunkedOutputLoss() if chunked else torch.nn.CrossEntropyLoss()
if compiled:  # only in place: the recipe ignores the returned loss, so a loss without chunks stays uncompiled
    training.compile_loss(loss_function, verbose=False)
if chunked:
    model.set_num_output_chunks(loss_function.num_output_chunks)
ignored, peaks = torch.full((packs, 1), -100, device=device), []
for _ in range(3):
    torch.cuda.reset_peak_memory_stats()  # the recipe logs each step's peak; step 1 creates the states
    mask = packed_block_causal_mask([torch.full((length // 512,), 512)] * packs)
    ids = torch.randint(128000, (packs, length))
    places = torch.arange(length).remainder(512).repeat(packs, 1)
    labels = ids.cuda()
    with offload:
        logits = model(ids.cuda(), mask=mask.to(device), input_pos=places.cuda())
    labels = torch.hstack((labels[..., 1:], ignored))
    if not chunked:
        labels, logits = labels.reshape(-1), logits.flatten(0, 1)
    loss = loss_function(logits, labels)
    del logits
    loss.backward()
    if lora or not in_backward:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    loss.item()
    peaks.append(torch.cuda.memory_stats()["active_bytes.all.peak"])
figure(name, active=max(peaks))
