"""Lightning's Trainer in mixed precision, with validation and a checkpoint."""

import logging
import tempfile
import warnings

import lightning
import torch
from peaks import print_peak
from torch import nn

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def validation_step(self, batch, _):
        self.log("loss", self.net(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


data = torch.utils.data.DataLoader([torch.randn(512) for _ in range(64)], batch_size=16)
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        max_epochs=2,
        precision="bf16-mixed",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), data, data)
print("steps", trainer.global_step)
print_peak()
