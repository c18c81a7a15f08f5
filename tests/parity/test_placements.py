"""Where states rest never changes a bit: every placement == training on plain tensors."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.models import NARROW, WIDE, TinyLM
from tests.helpers.pairwise import Row, all_rows, label, pairwise
from tests.helpers.reference import Recipe, Trajectory, train_offloaded, train_plain
from zero_offload.storage.shards.grad_store import LARGE_BYTES

NUM_STEPS = 12
"""An fp16 run backs off, grows and backs off again."""
TIERS = {
    "device": "device",
    "cpu": "cpu",
    "nvme": "nvme",
    "mixed": {"cpu": 0.5, "nvme": 0.5},
    "thirds": {"device": 0.34, "cpu": 0.33, "nvme": 0.33},
}
MATRIX = {
    "params": list(TIERS),
    "grads": list(TIERS),
    "optimizer": list(TIERS),
    "precision": ["fp32", "bf16", "fp16"],
    "micro_batches": [1, 3],
    "max_norm": [None, 0.5],
}
VARIED = {
    **MATRIX,
    "dim": [NARROW, WIDE],
    "device_memory": ["8MiB", None],
    "durability": ["process", "scratch"],
    "overlap": ["auto", "forward", "none"],
    "large_bytes": [1, LARGE_BYTES],
}


@functools.cache
def plain(dim: int, precision: str, micro_batches: int, max_norm: float | None) -> Trajectory:
    return train_plain(recipe_of(dim, precision, micro_batches, max_norm))


def recipe_of(dim: int, precision: str, micro_batches: int, max_norm: float | None) -> Recipe:
    make = functools.partial(TinyLM, dim)
    return Recipe(make, precision, NUM_STEPS, micro_batches, max_norm)


def check(row: Row, nvme: Path) -> None:
    key = (row.get("dim", NARROW), row["precision"], row["micro_batches"], row["max_norm"])
    settings: dict[str, Any] = {kind: TIERS[row[kind]] for kind in ("params", "grads", "optimizer")} | {
        name: row[name] for name in ("precision", "device_memory", "durability", "overlap") if name in row
    }
    trajectory = train_offloaded(recipe_of(*key), zo.OffloadConfig(nvme=nvme, **settings))
    assert trajectory == plain(*key)
    assert len(set(trajectory.losses)) > 10


@pytest.mark.parametrize("row", pairwise(VARIED), ids=label)
def test_every_pair_of_settings_trains_to_the_bits_of_plain_tensors(
    row: Row, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero_offload.storage.shards.grad_store.LARGE_BYTES", row["large_bytes"])
    check(row, nvme)


@pytest.mark.full
@pytest.mark.parametrize("row", all_rows(MATRIX), ids=label)
def test_every_placement_trains_to_the_bits_of_plain_tensors(row: Row, nvme: Path) -> None:
    check(row, nvme)


def test_without_a_directory_too() -> None:
    for params, grads, optimizer in itertools.product(("device", "cpu"), repeat=3):
        config = zo.OffloadConfig(params=params, grads=grads, optimizer=optimizer, precision="bf16")
        assert train_offloaded(recipe_of(NARROW, "bf16", 1, 0.5), config) == plain(NARROW, "bf16", 1, 0.5)


@pytest.mark.parametrize("stage", [0, 3])
def test_both_stages_are_the_same_on_one_rank(stage: int, nvme: Path) -> None:
    config = zo.OffloadConfig(stage=stage, params="nvme", optimizer="nvme", precision="fp32", nvme=nvme)
    assert train_offloaded(recipe_of(NARROW, "fp32", 1, None), config) == plain(NARROW, "fp32", 1, None)


def test_states_striped_over_two_directories(tmp_path: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    config = zo.OffloadConfig(
        params="nvme", grads="nvme", optimizer="nvme", precision="bf16", nvme=directories, device_memory="8MiB"
    )
    assert train_offloaded(recipe_of(WIDE, "bf16", 3, 0.5), config) == plain(WIDE, "bf16", 3, 0.5)


def test_pairwise_covers_every_pair() -> None:
    rows = pairwise(VARIED)
    assert len(rows) < 60
    for a, b in itertools.combinations(VARIED, 2):
        met = {(str(row[a]), str(row[b])) for row in rows}
        assert len(met) == len(VARIED[a]) * len(VARIED[b])
