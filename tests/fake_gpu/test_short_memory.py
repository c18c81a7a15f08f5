"""As tests/parity/test_short_memory.py: sums are added up on the host, from staging, when their download is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.models import WIDE, TinyLM
from tests.helpers.short_memory import check_sums_without_memory, open_model, steps
from zero_offload.base.types import KIB, MIB, Tier
from zero_offload.model.api import runtime_of
from zero_offload.storage.memory.arena import Arena, Region

PLACES: dict[str, dict[str, Any]] = {"cpu": {}, "streamed": {"params": "nvme", "optimizer": "nvme"}}


@pytest.mark.parametrize("resumes", [False, True], ids=["again", "resumed"])
@pytest.mark.parametrize("place", PLACES)
def test_sums_of_micro_batches_without_memory_are_one_error(place: str, resumes: bool, tmp_path: Path) -> None:
    check_sums_without_memory(tmp_path, left=6 * MIB, resumes=resumes, **PLACES[place])


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("resumes", [False, True], ids=["again", "resumed"])
def test_sums_that_land_late_are_no_less_an_error(resumes: bool, tmp_path: Path) -> None:
    check_sums_without_memory(tmp_path, left=6 * MIB, resumes=resumes)


def test_narrow_gradients_go_as_sums_get_wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At no time is more there than what the plan says, and one section's narrow gradients."""
    sizes = list[int]()
    allocate = Arena.allocate

    def noted(arena: Arena, *args: Any, **settings: Any) -> Region:
        region = allocate(arena, *args, **settings)
        sizes.append(arena.allocated_bytes)
        return region

    settings: dict[str, Any] = {"durability": "scratch"}
    model, optimizer = open_model(tmp_path, **settings)
    steps(model, optimizer, 0, 2)
    monkeypatch.setattr(Arena, "allocate", noted)
    steps(model, optimizer, 2, 4)
    one, three = (
        zo.plan(TinyLM(WIDE), zo.OffloadConfig(**settings), micro_batches=count).used_bytes(Tier.CPU)
        for count in (1, 3)
    )
    owner = runtime_of(model)
    assert owner is not None
    sections = [section for section in owner.layout.sections if section.trainable]
    most, narrow = max(sizes), max(section.nbytes for section in sections)
    rounding = 64 * KIB * len(sections)
    assert one + narrow < most <= three + narrow + rounding, (one, three, most)
    assert owner.store.arena.allocated_bytes <= three + rounding
    zo.close(model)
