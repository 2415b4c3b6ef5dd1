"""Fits, validates and saves a small Lightning module: lightning_fit.py FOLDER."""

import sys

import lightning.pytorch as pl
import torch
from memtrace.integrations.lightning import MemtraceCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch, index):
        return self.layers(batch[0]).sum()

    def validation_step(self, batch, index):
        self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = DataLoader(TensorDataset(torch.randn(32, 64)), batch_size=8)
trainer = pl.Trainer(
    max_epochs=1,
    num_sanity_val_steps=0,
    default_root_dir=sys.argv[1],
    logger=False,
    enable_progress_bar=False,
    enable_checkpointing=False,
    callbacks=[MemtraceCallback()],
)
trainer.fit(Model(), data, data)
trainer.save_checkpoint(sys.argv[1] + "/model.ckpt")
print("logged", int("gpu_peak_allocated_mib" in trainer.callback_metrics), "steps", trainer.global_step)
