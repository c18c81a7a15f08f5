"""Building and offloading a deferred model of six units takes the memory of about one, whatever makes its values."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import TinyLM
from tests.helpers.resident import measured_alone, peak_bytes, reset_peak
from zero_offload.base.types import MIB

DIM, NUM_BLOCKS = 768, 6
UNIT_BYTES = 8 * DIM * DIM * 4
"""Of a block in fp32, norms and biases aside: 18 MiB, in two parameters. The model takes 108."""
UNITS_MAX = 3
"""Staging of a chunk (12 MiB), one parameter, and, while it is built, some more that were used last."""


class Drawn(nn.Module):
    """As many parameters of the same size, whose values are there before they are registered."""

    def __init__(self, dim: int = 32, num_blocks: int = 3) -> None:
        super().__init__()
        weights = (torch.randn(dim, 4 * dim).mul_(0.02) for _ in range(2 * num_blocks))
        self.weights = nn.ParameterList(nn.Parameter(weight) for weight in weights)


def plain_and_deferred(kind: Callable[..., nn.Module], nvme: Path) -> dict[str, int]:
    """Bytes that building and offloading take, plain and deferred."""
    taken = {}
    for values in ("init", "skip", "plain"):
        folder = nvme / values
        folder.mkdir()
        before = reset_peak()
        if values == "plain":
            model = kind(DIM, NUM_BLOCKS)
        else:
            with zo.deferred_init(values):
                model = kind(DIM, NUM_BLOCKS)
        taken[f"build {values}"] = peak_bytes() - before
        zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=folder, precision="fp32"))
        taken[f"offload {values}"] = peak_bytes() - before
        zo.close(model)
        del model
    return taken


def measure(folder: str, kind: str) -> None:
    """The subprocess: prints what was taken, as JSON."""
    torch.set_num_threads(2)
    root = Path(folder)
    with zo.deferred_init():
        small = TinyLM()
    zo.close(zo.offload(small, zo.OffloadConfig(params="nvme", nvme=root / "small")))
    print(json.dumps(plain_and_deferred({"lm": TinyLM, "drawn": Drawn}[kind], root)))


@pytest.mark.parametrize("kind", ["lm", "drawn"])
def test_a_unit_is_enough(kind: str, tmp_path: Path) -> None:
    taken = measured_alone("tests.models.test_deferred_memory", tmp_path, kind)
    # The measurement sees a process that holds the whole model.
    assert taken.pop("build plain") > 0.9 * UNIT_BYTES * NUM_BLOCKS
    taken.pop("offload plain")
    shown = {name: f"{n / MIB:.1f} MiB" for name, n in taken.items()}
    assert max(taken.values()) < UNITS_MAX * UNIT_BYTES, shown


if __name__ == "__main__":
    measure(sys.argv[1], sys.argv[2])
