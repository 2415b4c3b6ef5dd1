"""Trains with Lightning. A callback marks phases in the trace, and adds the peaks to the trainer's own log.

memtrace run --phantom h100-80g -o out -- python examples/lightning_fit.py
memtrace peak --by phase out
"""

import lightning.pytorch as pl
import torch
from memtrace.integrations.lightning import MemtraceCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 1))

    def training_step(self, batch, index):
        return self.layers(batch[0]).mean()

    def validation_step(self, batch, index):
        self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


data = DataLoader(TensorDataset(torch.randn(64, 512)), batch_size=16)
trainer = pl.Trainer(
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[MemtraceCallback()],
)
trainer.fit(Model(), data, data)
print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
