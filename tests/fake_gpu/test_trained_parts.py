"""Adapters and their states stay on the device while frozen weights stream past them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.fake_gpu.device import TYPE, Policy, policy
from tests.fake_gpu.training import SOME, check
from tests.helpers.models import adapted_lm, build, tokens_of
from tests.helpers.reference import Recipe, train_plain
from tests.parity.test_backward_updates import spy_on_launches, train
from zero_offload.base.types import StateKind, Tier
from zero_offload.model.api import need_runtime
from zero_offload.runtime.units.unit import UnitState

CPU_MEMORY = {"fp32": "16MiB", "bf16": "8MiB"}
"""Half of the blocks have room."""


def settings(precision: str, nvme: Path) -> dict[str, Any]:
    kinds = dict.fromkeys(("params", "grads", "optimizer"), "auto")
    budgets = {"device_memory": "32MiB", "cpu_memory": CPU_MEMORY[precision]}
    return {"nvme": nvme, "durability": "scratch", **kinds, **budgets}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_auto_trains_them_to_the_bits_of_plain_tensors(precision: str, micro_batches: int, nvme: Path) -> None:
    check(Recipe(adapted_lm, precision, 3, micro_batches, 0.5), SOME, **settings(precision, nvme))


def test_backward_updates_each_behind_its_unit(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy(Policy.LATE)
    launched: list[Any] = []
    spy_on_launches(monkeypatch, launched)
    recipe = Recipe(adapted_lm, num_steps=2)
    config = zo.OffloadConfig(precision="fp32", overlap="backward", **settings("fp32", nvme))
    assert train(recipe, config) == train_plain(recipe)
    # Units are the leftovers, then each block and its adapters. Behind the last two comes the end itself.
    assert launched == [(8,), (6,), ("end", 2, 4)] * 2


def test_the_device_has_them_at_all_times_and_their_updates_write_nothing(nvme: Path) -> None:
    policy(Policy.LATE)
    model = build(adapted_lm)
    zo.offload(model, zo.OffloadConfig(precision="bf16", **settings("bf16", nvme)))
    owner = need_runtime(model, "the test")
    parts = [unit for unit in owner.units if unit.layout.is_trained_part]
    tiers = [owner.sizes.placement.tiers[unit.index] for unit in parts]
    assert len(parts) == 4 and all(set(at.values()) == {Tier.DEVICE} for at in tiers)
    others = [owner.sizes.placement.tiers[unit.index] for unit in owner.units if unit not in parts]
    assert Tier.NVME in {at[StateKind.PARAMS] for at in others}
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    zo.stats(model)
    for step in range(3):
        loss = model(tokens_of(step).to(TYPE))
        assert all(unit.state is UnitState.PRESENT for unit in parts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert zo.stats(model).written_bytes["nvme"] == 0
