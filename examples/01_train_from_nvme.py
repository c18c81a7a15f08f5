"""Train your own module with its parameters and optimizer states on disk. Run it twice: it resumes.

python examples/01_train_from_nvme.py [DIRECTORY]
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import zero_offload as zo

STEPS = 30


class Net(nn.Module):
    """Any module will do; the equal layers of the ModuleList become the units that travel."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(32, 256)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.out = nn.Linear(256, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.out(x)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
    return x, x.sin().sum(1, keepdim=True)


def main() -> None:
    directory = sys.argv[1] if len(sys.argv) > 1 else "runs/example"
    torch.manual_seed(0)
    model = zo.offload(
        Net(),
        zo.OffloadConfig(params="nvme", grads="cpu", optimizer="nvme", nvme=directory, existing="resume"),
    )
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in zo.steps(model, optimizer, STEPS, scheduler=scheduler):
        x, y = batch_of(step)
        # Forward brings its inputs to the compute device. Targets, which the output is compared with, are moved here.
        loss = nn.functional.mse_loss(model(x).float(), y.to(zo.device(model)))
        loss.backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            read = zo.stats(model).read_bytes["nvme"]
            print(f"step {step}: loss {loss.item():.4f}, {read:,} bytes read from disk")
    zo.close(model)


if __name__ == "__main__":
    main()
