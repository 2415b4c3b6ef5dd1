"""Trains with the Trainer of transformers: trainer.py train|optimizer|evaluate [fix]."""

import os
import sys
import tempfile

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 4))


class Texts(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        words = torch.randint(0, 8192, (128,))
        return {"input_ids": words, "labels": words}


config = BertConfig(
    vocab_size=8192,
    hidden_size=512,
    num_hidden_layers=24 if KIND == "optimizer" else 6,
    num_attention_heads=8,
    intermediate_size=2048,
)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=STEPS,
    per_device_train_batch_size=64 if KIND == "train" else 1,
    optim="adamw_bnb_8bit" if FIX and KIND == "optimizer" else "adamw_torch",
    per_device_eval_batch_size=32,
    gradient_checkpointing=FIX and KIND == "train",
    eval_accumulation_steps=1 if FIX else None,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(
    BertForMaskedLM(config),
    arguments,
    train_dataset=Texts(64 * STEPS),
    eval_dataset=Texts(32 * STEPS),
    compute_metrics=lambda result: {"accuracy": 0.0},
)
trainer.evaluate() if KIND == "evaluate" else trainer.train()
