"""Trains with Lightning: lit.py train|predictions|outputs|losses [fix]."""

import os
import sys

import lightning
import torch
from torch import nn

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 6))


def block():
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 1024), *(block() for _ in range(6)))
        self.outputs = []

    def training_step(self, batch, index):
        out = self.net(batch[0])
        if KIND == "outputs":
            self.outputs.append(out.detach().cpu() if FIX else out)
        loss = out.square().mean()
        if KIND == "losses":  # a second view of the batch, for a plot after the epoch
            again = self.net(batch[0].flip(0)).square().mean()
            self.outputs.append(again.item() if FIX else again)
        return loss

    def validation_step(self, batch, index):
        out = self.net(batch[0])
        self.outputs.append(out.cpu() if FIX else out)

    def on_validation_epoch_end(self):
        self.outputs.clear()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def loader(rows, batches):
    data = torch.utils.data.TensorDataset(torch.randn(rows * batches, 64))
    return torch.utils.data.DataLoader(data, batch_size=rows)


trainer = lightning.Trainer(
    max_epochs=1,
    num_sanity_val_steps=0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
if KIND == "predictions":
    trainer.fit(Model(), loader(512, 2), loader(8192, STEPS))
else:
    rows = {"outputs": 4096, "losses": 1024}.get(KIND, 2048 if FIX else 8192)
    trainer.fit(Model(), loader(rows, STEPS))
