"""Full fine-tuning block by block: a few blocks are trained at a time, and those that rest have no optimizer states.

The order is LISA's (blocks drawn at random, with what is around them always trained) or BAdam's (one after the other,
nothing beside it). Masters and values of all blocks rest on disk.

python examples/05_block_by_block.py [lisa | badam] [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import nn

import zero_offload as zo

NUM_BLOCKS, NUM_LIVE, PERIOD = 6, 1, 5
"""Of so many blocks so many are trained at a time, for so many steps."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def fine_tune(method: str, directory: str) -> None:
    torch.manual_seed(0)
    model = Net()
    # Frozen at zo.offload: a block gets states when it is trained.
    (model.blocks if method == "lisa" else model).requires_grad_(False)
    order = "random" if method == "lisa" else "descending"
    live = zo.LiveBlocks(model.blocks, NUM_LIVE, order=order, every=PERIOD)
    config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=directory, commit_every=PERIOD)
    print(zo.plan(model, config, live=live))
    zo.offload(model, config)
    optimizer = zo.AdamW(model.parameters(), lr=2e-3)
    for step in range(6 * PERIOD):
        live.begin_step(step, optimizer)
        x = torch.randn(32, 128, generator=torch.Generator().manual_seed(step)).to(zo.device(model))
        loss = (model(x).float() - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % PERIOD == PERIOD - 1:
            print(f"step {step + 1}: loss {loss.item():.4f}, states of {len(optimizer.state)} parameters")
    zo.close(model)


def main() -> None:
    method = sys.argv[1] if len(sys.argv) > 1 else "lisa"
    if len(sys.argv) > 2:
        fine_tune(method, sys.argv[2])
        return
    with tempfile.TemporaryDirectory() as directory:
        fine_tune(method, directory)


if __name__ == "__main__":
    main()
