"""Trains a tiny GPT-2 with the Trainer, evaluates, saves and generates: trainer.py FOLDER."""

import copy
import sys

import memtrace.integrations.transformers
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"input_ids": torch.arange(16), "labels": torch.arange(16)}


model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=128, n_positions=32))
arguments = TrainingArguments(
    sys.argv[1],
    max_steps=4,
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=2,
    save_steps=4,
    per_device_train_batch_size=4,
    report_to=[],
)
trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts())
memtrace.integrations.transformers.watch(trainer)
# A second call of `watch` changes nothing.
memtrace.integrations.transformers.watch(trainer)
trainer.train()
assert copy.deepcopy(model).generate.__self__ is not model, "a copy generates with its own weights"
model.generate(torch.zeros(1, 4, dtype=torch.long, device=model.device), max_new_tokens=2, pad_token_id=0)
logged = [entry for entry in trainer.state.log_history if "gpu_peak_allocated_mib" in entry]
callbacks = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
print("logged", len(logged), "callbacks", callbacks.count("MemtraceCallback"))
if logged:
    last = torch.cuda.max_memory_allocated() / 2**20
    assert 0 < logged[-1]["gpu_peak_allocated_mib"] <= last + 0.01, (logged[-1], last)
