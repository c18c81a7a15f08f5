"""Fine-tune a few parameters of a frozen model: the frozen ones rest on disk and own no optimizer state.

python examples/03_frozen_base.py [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import nn

import zero_offload as zo


class LowRank(nn.Module):
    """A frozen linear layer and a trained correction of low rank."""

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def fine_tune(directory: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(LowRank(256) for _ in range(4)))
    zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="cpu", nvme=directory))
    optimizer = zo.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    for step in range(1, 31):
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(step)).to(zo.device(model))
        loss = (model(x).float() - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    with zo.gathered(model[0]):
        print(f"the correction of the first layer now has norm {model[0].up.weight.float().norm():.3f}")
    zo.close(model)


def main() -> None:
    if len(sys.argv) > 1:
        fine_tune(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as directory:
        fine_tune(directory)


if __name__ == "__main__":
    main()
