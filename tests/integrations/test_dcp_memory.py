"""Saving and loading a model of ten units by torch.distributed.checkpoint takes the memory of about one."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import zero_offload as zo
from tests.helpers.models import TinyLM, tokens_of
from tests.helpers.resident import measured_alone, peak_bytes, reset_peak
from zero_offload.base.types import MIB

DIM, NUM_BLOCKS = 640, 10
UNIT_BYTES = 8 * DIM * DIM * 4
"""Of a block in fp32: 12.5 MiB. The model's masters and states take 375."""
UNITS_MAX = 2
"""Staging of a chunk, and one tensor as it is written or read."""
PRECISION = "bf16"
"""Which has the most kinds of tensors."""


def _trained(folder: Path, dim: int, num_blocks: int) -> tuple[TinyLM, zo.AdamW]:
    folder.mkdir()
    model = TinyLM(dim, num_blocks)
    zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=folder, precision=PRECISION))
    optimizer = zo.AdamW(model.parameters())
    model(tokens_of(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def measure(folder: str) -> None:
    """The subprocess: prints what each call took, in bytes, as JSON."""
    warnings.simplefilter("ignore")  # one process
    torch.set_num_threads(2)
    root = Path(folder)
    _taken(root / "warm", 32, 2)
    print(json.dumps(_taken(root / "run", DIM, NUM_BLOCKS)))


def _taken(folder: Path, dim: int, num_blocks: int) -> dict[str, int]:
    model, optimizer = _trained(folder, dim, num_blocks)
    states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    taken = {}
    for name, call in (
        ("save", lambda: dcp.save(states, checkpoint_id=folder / "saved")),
        ("load", lambda: dcp.load(states, checkpoint_id=folder / "saved")),
        ("async_save", lambda: dcp.async_save(states, checkpoint_id=folder / "again").result()),
    ):
        before = reset_peak()
        call()
        taken[name] = peak_bytes() - before
    zo.close(model)
    return taken


def test_a_unit_is_enough(tmp_path: Path) -> None:
    taken = measured_alone("tests.integrations.test_dcp_memory", tmp_path)
    assert max(taken.values()) < UNITS_MAX * UNIT_BYTES, {name: f"{n / MIB:.1f} MiB" for name, n in taken.items()}


if __name__ == "__main__":
    measure(sys.argv[1])
