"""Trains with Hugging Face's Trainer. memtrace marks its phases, and adds the peaks to the Trainer's log.

memtrace run --phantom h100-80g -o out -- python examples/trainer.py
memtrace peak --by phase out
"""

import tempfile

import memtrace.integrations.transformers
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"input_ids": torch.arange(64), "labels": torch.arange(64)}


model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=1024))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=8,
        report_to=[],
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts())
    memtrace.integrations.transformers.watch(trainer)
    trainer.train()
print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
