"""Where gradients of a host come to rest: as autograd made them, or copied to one array per section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zero_offload as zo
from tests.helpers.models import NARROW, TinyLM, build, tokens_of
from tests.helpers.reference import read_masters
from zero_offload.storage.shards import grad_store
from zero_offload.storage.shards.grad_store import HostGrads


@pytest.fixture(autouse=True)
def gradients_are_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_store, "KEPT_MEAN_BYTES", 1)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[HostGrads]:
    """Shards whose gradients are written to an array, which is made for them."""
    found, open_array = [], HostGrads.writable_array

    def noted(shard: HostGrads) -> Tensor:
        found.append(shard)
        return open_array(shard)

    monkeypatch.setattr(HostGrads, "writable_array", noted)
    return found


def offloaded(**settings: Any) -> tuple[TinyLM, zo.AdamW]:
    model = zo.offload(build(lambda: TinyLM(NARROW)), zo.OffloadConfig(precision="bf16", **settings))
    return model, zo.AdamW(model.parameters())


def settings_of(place: str, nvme: Path) -> dict[str, Any]:
    if place == "memory":
        return {"params": "cpu", "optimizer": "cpu"}
    on_drive = {"optimizer": "nvme"} if place == "optimizer" else {"activations": "nvme"}
    return {"params": "cpu", "optimizer": "cpu", "nvme": nvme, "durability": "scratch"} | on_drive


@pytest.mark.parametrize(("place", "copies"), [("memory", False), ("optimizer", True), ("activations", True)])
def test_small_gradients_are_copied_where_memory_is_short(
    place: str, copies: bool, nvme: Path, copied: list[HostGrads]
) -> None:
    model, _ = offloaded(**settings_of(place, nvme))
    model(tokens_of(0)).backward()
    assert bool(copied) == copies


def test_kept_and_copied_gradients_make_the_same_steps(nvme: Path) -> None:
    """One micro-batch, then three that are added up, then one again."""
    found = []
    for place in ("memory", "optimizer"):
        model, optimizer = offloaded(**settings_of(place, nvme))
        for micro_batches in (1, 3, 1):
            for i in range(micro_batches):
                model(tokens_of(i)).backward()
            zo.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append(read_masters(model))
        zo.close(model)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_sections_of_many_small_gradients_are_updated_at_once(
    monkeypatch: pytest.MonkeyPatch, copied: list[HostGrads]
) -> None:
    monkeypatch.setattr(grad_store, "KEPT_MEAN_BYTES", 1 << 20)
    model, _ = offloaded(**settings_of("memory", Path()))
    model(tokens_of(0)).backward()
    assert copied


def test_kept_gradients_go_with_their_step() -> None:
    model, optimizer = offloaded(**settings_of("memory", Path()))
    made: list[StorageWeakRef] = []
    for param in model.parameters():
        param.register_hook(lambda grad: made.append(StorageWeakRef(grad.untyped_storage())))
    model(tokens_of(0)).backward()
    assert not all(grad.expired() for grad in made)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(tokens_of(0))  # waits for the update
    assert all(grad.expired() for grad in made)


def test_no_array_is_made_where_all_gradients_are_kept(copied: list[HostGrads]) -> None:
    """Of parameters between which nothing lies: an update reads what is kept, and nothing else."""
    model = zo.offload(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2))), zo.OffloadConfig())
    optimizer = zo.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not copied
    zo.close(model)
