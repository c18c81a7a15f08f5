"""Loading and exporting a model of six units takes the memory of about one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import zero_offload as zo
from tests.helpers.models import TinyLM
from tests.helpers.pairwise import full
from tests.helpers.pretrained import write_weights
from tests.helpers.resident import measured_alone, peak_bytes, reset_peak
from zero_offload.base.types import MIB

DIM, NUM_BLOCKS = 768, 6
UNIT_BYTES = 8 * DIM * DIM * 4
"""Of a block in fp32, norms and biases aside: 18 MiB. The model takes 108."""
UNITS_MAX = 2.5
"""Staging of a chunk (12 MiB), its values, and holes in the heap."""


def _config(nvme: Path, precision: str) -> zo.OffloadConfig:
    nvme.mkdir()
    return zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme, precision=precision)


def measure(folder: str, precision: str) -> None:
    """The subprocess: prints what each call took, in bytes, as JSON."""
    torch.set_num_threads(2)
    root = Path(folder)
    small = zo.offload(TinyLM(), _config(root / "warm", precision))
    zo.export_pretrained(small, root / "small")
    zo.load_pretrained(small, root / "small")
    model = TinyLM(DIM, NUM_BLOCKS)
    write_weights(root / "in", model)
    zo.offload(model, _config(root / "run", precision))
    taken = {}
    for name, call in (
        ("load", lambda: zo.load_pretrained(model, root / "in")),
        ("export", lambda: zo.export_pretrained(model, root / "out")),
        ("masters", lambda: zo.export_pretrained(model, root / "masters", "50MB", "fp32")),
        ("state_dict", lambda: model.state_dict()),
        ("whole", lambda: sum(bool(tensor.any()) for tensor in [*model.state_dict().values()])),
    ):
        before = reset_peak()
        call()
        taken[name] = peak_bytes() - before
    zo.close(model)
    print(json.dumps(taken))


@pytest.mark.parametrize("precision", [full("fp32"), "bf16"])
def test_a_unit_is_enough(precision: str, tmp_path: Path) -> None:
    taken = measured_alone("tests.models.test_pretrained_memory", tmp_path, precision)
    # The measurement sees a process that holds the whole model; a state dict holds nothing until it is looked at.
    assert taken.pop("whole") > UNIT_BYTES * NUM_BLOCKS / (1 if precision == "fp32" else 2)
    assert max(taken.values()) < UNITS_MAX * UNIT_BYTES, {name: f"{n / MIB:.1f} MiB" for name, n in taken.items()}


if __name__ == "__main__":
    measure(sys.argv[1], sys.argv[2])
