"""canifinetune's benchmark: some steps of LoRA or QLoRA on Qwen 2.5, with random weights of the same shapes.

canifinetune_bench.py MODEL METHOD LENGTH BATCH STEPS CHECKPOINTING     # CHECKPOINTING: on or off
"""

import json
import sys
from pathlib import Path

import bitsandbytes
import peft
import torch
import transformers as hf
from harness import figure

name, method, length, batch, steps, checkpointing = sys.argv[1:]
MODELS = Path(__file__).resolve().parents[2] / "src/cli/commands/fit/recipe/models.json"
config = hf.AutoConfig.for_model(**json.loads(MODELS.read_text())[f"Qwen/{name}"])
options = {"config": config, "dtype": torch.bfloat16, "attn_implementation": "sdpa"}
if method == "qlora":
    options["device_map"] = {"": 0}
    options["quantization_config"] = hf.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
    )
with torch.device("meta"):
    empty = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
weights = {key: torch.empty(value.shape, dtype=value.dtype) for key, value in empty.named_parameters()}
model = type(empty).from_pretrained(None, state_dict=weights, **options)
if method == "lora":
    model = model.to("cuda")
else:
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing == "on")
if checkpointing == "on" and not model.is_gradient_checkpointing:
    model.gradient_checkpointing_enable()
targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
adapters = peft.LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, bias="none", target_modules=targets)
adapters.task_type = "CAUSAL_LM"
model = peft.get_peft_model(model, adapters)
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = bitsandbytes.optim.PagedAdamW8bit(trained, lr=2e-4)
model.train()
for _ in range(int(steps)):
    ids = torch.randint(config.vocab_size, (int(batch), int(length)))
    mask, labels = torch.ones_like(ids).cuda(), ids.clone().cuda()
    outputs = model(input_ids=ids.cuda(), attention_mask=mask, labels=labels)
    loss = outputs.loss
    loss.detach().to("cpu").item()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
values = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
figure(f"{name} {method} {length}x{batch} {checkpointing}", **values)
