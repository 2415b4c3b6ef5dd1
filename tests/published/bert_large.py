"""Transformers' page on training on one GPU: bert-large-uncased, 512 random tokens, with its `Trainer`.

The page reads NVML after each run, in a process of its own; `model` only moves the weights. The context,
which the page gives with one tiny tensor, is left out here. The fp16 run has `gelu` in fp32, so its torch
is 1.9 or older. That no longer runs here; `harness.older` has its rules.

    bert_large.py SETTING    # model plain accumulation checkpointing fp16 adafactor all adam8bit
"""

import os
import sys
import tempfile

import torch
import transformers as hf
from harness import figure, older

setting = sys.argv[1]
STEPS = 4  # the page runs 128, but the allocator's cache no longer grows after the second
ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
CHANGES = {
    "accumulation": ONE,
    "checkpointing": ONE | {"gradient_checkpointing": True},
    "fp16": {"fp16": True},
    "adafactor": {"adafactor": True},
    "all": ONE | {"gradient_checkpointing": True, "fp16": True, "adafactor": True},
}


older.softmax_saves_its_input()
older.gelu_is_fp32_under_autocast()
older.zero_grad_keeps_the_gradients()


class Dummy(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * STEPS

    def __getitem__(self, index):
        return {"input_ids": torch.randint(100, 30000, (512,)), "labels": 0}


config = hf.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
tiny = torch.ones((1, 1)).to("cuda")
before = torch.cuda.memory_reserved()  # the page counts this tensor's segment as context, too
model = hf.AutoModelForSequenceClassification.from_config(config).to("cuda")
if setting != "model":
    os.environ["WANDB_DISABLED"] = "true"
    changes = {"per_device_train_batch_size": 4, "disable_tqdm": True, "log_level": "error"} | CHANGES.get(
        setting, {}
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = hf.TrainingArguments(output_dir=folder, save_strategy="no", report_to="none", **changes)
        optimizers = (None, None)
        if setting == "adam8bit":
            import bitsandbytes

            optimizers = (bitsandbytes.optim.Adam8bit(model.parameters()), None)
        trainer = hf.Trainer(model=model, args=arguments, train_dataset=Dummy(), optimizers=optimizers)
        trainer.train()
figure(setting, reserved=torch.cuda.memory_reserved() - before)
