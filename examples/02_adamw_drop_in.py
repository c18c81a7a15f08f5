"""`zo.AdamW` without offloading: a fast CPU AdamW for any parameters, compared here with torch's.

python examples/02_adamw_drop_in.py
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import zero_offload as zo

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 20) -> float:
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        x = torch.randn(32, 64, generator=generator)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    theirs = copy.deepcopy(ours)
    our_loss = train(ours, zo.AdamW(ours.parameters(), **SETTINGS))
    their_loss = train(theirs, torch.optim.AdamW(theirs.parameters(), **SETTINGS))
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    apart = max((one - other).abs().max().item() for one, other in pairs)
    print(f"loss {our_loss:.6f} and {their_loss:.6f}; parameters differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()
