"""The optimizer's pass over 100M parameters: states on disk, and in memory."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_offload as zo

WIDTH, LAYERS = 3584, 8
NUM_PARAMS = LAYERS * WIDTH * WIDTH
BYTES_PER_PARAM = 12
"""Read, and as many written: bf16 value, 16-bit residual, two fp32 moments."""


class UpdatePass:
    """A model whose step does nothing but update: no work is done beside it, none is overlapped."""

    def __init__(self, nvme: Path | None) -> None:
        tier = "cpu" if nvme is None else "nvme"
        self._model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        settings: dict[str, Any] = {"nvme": nvme, "existing": "discard"} if nvme else {}
        zo.offload(
            self._model,
            zo.OffloadConfig(params=tier, optimizer=tier, grads="cpu", overlap="none", **settings),
        )
        self._optimizer = zo.AdamW(self._model.parameters(), lr=1e-4)
        self._seconds: list[float] = []

    def step(self) -> None:
        self._model(torch.ones(1, WIDTH)).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._seconds.append(zo.stats(self._model).update_s)

    def median_s(self) -> float:
        """Without the first two, which fill pools."""
        return statistics.median(self._seconds[2:])

    def close(self) -> None:
        zo.close(self._model)
