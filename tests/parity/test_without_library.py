"""A run without the native library == the run with it: numba's kernels, and the portable file engine."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.fresh import run_script
from tests.helpers.models import NARROW, TinyLM
from tests.helpers.pairwise import in_turn
from tests.helpers.reference import Recipe, Trajectory, train_offloaded
from tests.helpers.without_library import whole_run_without_library
from zero_offload.model.api import runtime_of
from zero_offload.storage.files.aiofiles_engine import AiofilesEngine

TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "device_memory": "8MiB"},
}


def run(precision: str, tier: str, nvme: Path, states: str = "fp32") -> Trajectory:
    recipe = Recipe(functools.partial(TinyLM, NARROW), precision, num_steps=8, micro_batches=2, max_norm=0.5)
    kept = zo.Precision(compute=precision, states=states)
    config = zo.OffloadConfig(nvme=nvme, existing="discard", precision=kept, **TIERS[tier])
    return train_offloaded(recipe, config)


@in_turn(precision=["fp32", "bf16", "fp16"], tier=list(TIERS))
def test_trains_to_the_bits_of_the_native_run(precision: str, tier: str, nvme: Path) -> None:
    expected = run(precision, tier, nvme)
    assert len(set(expected.losses)) > 10
    with whole_run_without_library():
        assert run(precision, tier, nvme) == expected


@pytest.mark.parametrize(("precision", "tier", "states"), [("bf16", "nvme", "compact"), ("fp16", "cpu", "bf16")])
def test_trains_with_states_of_other_formats(precision: str, tier: str, states: str, nvme: Path) -> None:
    expected = run(precision, tier, nvme, states)
    with whole_run_without_library():
        assert run(precision, tier, nvme, states) == expected


def test_the_portable_engine_serves(nvme: Path) -> None:
    with whole_run_without_library():
        model = zo.offload(TinyLM(NARROW), zo.OffloadConfig(nvme=nvme, optimizer="nvme"))
        owner = runtime_of(model)
        assert owner is not None and owner.store.swap is not None
        engine = owner.store.swap._engine
        assert isinstance(engine, AiofilesEngine)
        zo.close(model)


def test_a_program_warns_once() -> None:
    code = (
        "import warnings\n"
        "warnings.simplefilter('always')\n"
        "from pathlib import Path\n"
        "import torch, zero_offload as zo\n"
        "from zero_offload.hardware import native\n"
        "native.LIBRARY_PATH = Path('/nowhere/_native.so')\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))\n"
        "zo.offload(model, zo.OffloadConfig(precision='bf16'))\n"
        "optimizer = zo.AdamW(model.parameters())\n"
        "for _ in range(3):\n"
        "    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()\n"
        "    zo.clip_grad_norm_(model, 1.0)\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "zo.close(model)\n"
    )
    done = run_script(code)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "native library" in line]
    assert len(told) == 1 and "numba, with the same bits" in told[0] and "pip install -e ." in told[0], done.stderr
