"""Fine-tuning with trl: trl_train.py sft|dpo|grpo."""

import sys
import tempfile

import torch
from datasets import Dataset
from made_up import llama, tokenizer
from peaks import print_peak

SAID = "w1 w2 w3 w4 w5 w6 w7 w8"
SHARED = {"max_steps": 3, "report_to": [], "disable_tqdm": True, "logging_steps": 100, "bf16": True}


def sft(folder):
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(folder, per_device_train_batch_size=4, max_length=64, **SHARED)
    data = Dataset.from_dict({"text": [f"{SAID} w{n}" for n in range(32)]})
    return SFTTrainer(llama(), arguments, train_dataset=data, processing_class=tokenizer())


def dpo(folder):
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(folder, per_device_train_batch_size=2, max_length=64, **SHARED)
    data = Dataset.from_dict({"prompt": [SAID] * 32, "chosen": ["w9 w10"] * 32, "rejected": ["w11"] * 32})
    return DPOTrainer(llama(), llama(), args=arguments, train_dataset=data, processing_class=tokenizer())


def grpo(folder):
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        folder, per_device_train_batch_size=4, num_generations=4, max_completion_length=8, **SHARED
    )
    data = Dataset.from_dict({"prompt": [SAID] * 32})

    def reward(completions, **_):
        return [float(len(text)) for text in completions]

    return GRPOTrainer(llama(), reward, args=arguments, train_dataset=data, processing_class=tokenizer())


torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    trainer = globals()[sys.argv[1]](folder)
    trainer.train()
    print("steps", trainer.state.global_step)
print_peak()
