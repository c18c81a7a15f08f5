"""States that are in memory whole are updated by few calls of the kernel, with the bits and bytes of single chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import build
from tests.helpers.pairwise import in_pairs
from zero_offload.model.api import runtime_of
from zero_offload.optim import pipeline
from zero_offload.plan.layout import CHUNK_NUMEL
from zero_offload.storage.shards import grad_store
from zero_offload.storage.shards.store import ShardStore

WIDTH = 1300
NUM_CHUNKS = 4
"""Of the one unit; the last one is short."""


class Wide(nn.Module):
    """A weight over two chunks, small ones, and one more over chunks: the last two are another optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.relu(self.first(x)))).float().square().mean()  # type: ignore[no-any-return]


def train(config: zo.OffloadConfig) -> tuple[dict[str, Any], list[tuple[dict[str, int], dict[str, int]]]]:
    """Masters and states after steps of two rules, of which the third leaves some parameters alone; bytes of each."""
    model = build(Wide)
    groups = [
        {"params": [model.first.weight], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [model.first.bias, model.norm.weight], "lr": 3e-2},
    ]
    zo.offload(model, config, units=[""])
    adam, lion = zo.AdamW(groups), zo.Lion([model.norm.bias, model.last.weight], lr=1e-3)
    moved = []
    for step in range(4):
        model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))).backward()
        zo.clip_grad_norm_(model, 0.5)
        for each in (adam, lion)[: 1 + (step != 2)]:
            each.step()
        runtime_of(model).drain()
        moved.append((zo.stats(model).read_bytes, zo.stats(model).written_bytes))
        for optimizer in (adam, lion):
            optimizer.zero_grad()
    found = {f"{name} {kind}": values for name, kinds in _states(model).items() for kind, values in kinds.items()}
    zo.close(model)
    return found, moved


def _states(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    store = runtime_of(model).store
    return {
        str(shard.layout.index): {str(each): store.read_component(shard, each).clone() for each in shard.components}
        for shard in store.shards
    }


class Calls:
    """Of the kernel."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._update = pipeline.fused_update
        patches.setattr(pipeline, "fused_update", self)

    def __call__(self, *args: Any) -> None:
        self.count += 1
        self._update(*args)


@in_pairs(precision=["bf16", "fp32", "fp16"], states=["fp32", "bf16", "compact"], adopts=[False, True])
def test_all_chunks_at_once_are_the_same_update(
    precision: str, states: str, adopts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = zo.OffloadConfig(precision=zo.Precision(compute=precision, states=states), overlap="none")
    monkeypatch.setattr(grad_store, "KEPT_MEAN_BYTES", 1 if adopts else 1 << 40)
    calls = Calls(monkeypatch)
    found, moved = train(config)
    together, calls.count = calls.count, 0
    monkeypatch.setattr(ShardStore, "may_open_all", lambda self, shard: False)
    expected, expected_moved = train(config)
    assert all(torch.equal(found[name], expected[name]) for name in expected) and found.keys() == expected.keys()
    assert moved == expected_moved
    if states == "compact":
        assert together == calls.count, "each chunk has scales of its own"
    else:
        assert together < calls.count and (adopts or together == 4 + 3), "one for each rule of a step"


def test_a_commit_under_way_is_waited_for_chunk_by_chunk(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_store, "KEPT_MEAN_BYTES", 1 << 40)
    model = zo.offload(build(Wide), zo.OffloadConfig(overlap="none", nvme=nvme, commit_every=100), units=[""])
    optimizer = zo.AdamW(model.parameters())
    (shard,) = (store := runtime_of(model).store).shards
    assert -(-shard.layout.shard_numel // CHUNK_NUMEL) == NUM_CHUNKS
    calls = Calls(monkeypatch)
    for is_under_way, expected in ((False, 1), (True, NUM_CHUNKS), (False, 1)):
        calls.count = 0
        model(torch.ones(1, WIDTH)).backward()
        snapshot = store.snapshots.take() if is_under_way else None
        assert store.may_open_all(shard) == (not is_under_way)
        optimizer.step()
        assert calls.count == expected
        if snapshot is not None:
            store.snapshots.write(snapshot)
            store.snapshots.end()
        optimizer.zero_grad()
    zo.close(model)
