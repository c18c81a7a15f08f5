"""Lightning's Trainer over an offloaded module, with checkpoints that stream. Stop it and start it again: it goes on.

python examples/lightning_trainer.py [DIRECTORY]
"""

import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

import zero_offload as zo
from zero_offload.integrations.lightning import OffloadStrategy


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return (self.layers(batch).float() - batch.sin()).square().mean()

    def configure_optimizers(self) -> zo.AdamW:
        return zo.AdamW(self.parameters(), lr=1e-3)


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lightning")
config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=folder / "swap", durability="scratch")
keeper = L.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)
trainer = L.Trainer(
    strategy=OffloadStrategy(config), devices=1, max_epochs=4, gradient_clip_val=1.0, callbacks=[keeper], logger=False
)
trainer.fit(Net(), DataLoader(torch.randn(256, 256), batch_size=32), ckpt_path="last")
