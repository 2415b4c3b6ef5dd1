"""The Trainer with evaluation, saving and gradient accumulation; under `accelerate launch` on two ranks."""

import tempfile

import torch
from peaks import print_peak
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"input_ids": torch.arange(64) + index, "labels": torch.arange(64)}


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=8, vocab_size=1024, n_positions=64))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=6,
        logging_steps=100,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        bf16=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts())
    trainer.train()
    if trainer.is_world_process_zero():
        print("steps", trainer.state.global_step)
print_peak()
