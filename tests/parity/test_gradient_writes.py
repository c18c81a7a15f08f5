"""Gradients on a drive: backward goes on while they are written, and changes no bit of what is being written."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers.accumulating import loop
from tests.helpers.late_writes import make_writes_late
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.pairwise import full, in_pairs
from tests.helpers.reference import Recipe, Trajectory, read_masters, train_offloaded, train_plain
from zero_offload.model.api import runtime_of
from zero_offload.plan.layout import CHUNK_NUMEL
from zero_offload.plan.memory import GRADS_IN_FLIGHT
from zero_offload.storage.memory.arena import FRAME
from zero_offload.storage.shards import grad_store
from zero_offload.storage.shards.drive_grads import STREAM_CHUNKS, DriveGrads

MIXED = {"cpu": 0.5, "nvme": 0.5}


def recipe_of(micro_batches: int, max_norm: float | None, precision: str = "bf16") -> Recipe:
    make = functools.partial(TinyLM, WIDE, 4)
    return Recipe(make, precision, 6, micro_batches, max_norm, skipped=frozenset({2}))


@functools.cache
def plain(micro_batches: int, max_norm: float | None, precision: str) -> Trajectory:
    return train_plain(recipe_of(micro_batches, max_norm, precision))


@in_pairs(of=[(1, "bf16"), (3, "bf16"), (2, "fp32")], device_memory=["13MiB", None], overlap=["forward", "none"])
def test_what_is_written_late_is_what_was_made(
    of: tuple[int, str], device_memory: str | None, overlap: str, nvme: Path, monkeypatch: Any
) -> None:
    micro_batches, precision = of
    make_writes_late(monkeypatch)
    config = zo.OffloadConfig(
        params="nvme",
        grads="nvme",
        optimizer=MIXED,
        precision=precision,
        overlap=overlap,
        device_memory=device_memory,
        nvme=nvme,
        durability="scratch",
    )
    recipe = recipe_of(micro_batches, 0.5, precision)
    assert train_offloaded(recipe, config) == plain(micro_batches, 0.5, precision)


def test_clipped_by_value_and_looked_at_between(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that moves gradients where they rest waits for their writes."""
    make_writes_late(monkeypatch)
    found = []
    for settings in ({}, {"grads": "nvme", "nvme": nvme, "durability": "scratch"}):
        model = build(functools.partial(TinyLM, WIDE))
        zo.offload(model, zo.OffloadConfig(precision="bf16", **settings))
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            loss = model(tokens_of(step))
            loss.backward()
            zo.clip_grad_value_(model, 1e-3)
            with zo.gathered(model, kind="grads") as grads:
                losses += [loss.item(), *(grad.abs().sum().item() for grad in grads.values())]
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
        zo.close(model)
    assert found[0] == found[1] and len(set(found[0])) > 10


class LargeLM(nn.Module):
    """Its embedding is a unit of one parameter, three chunks long, as are its blocks and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9000, 256)
        self.blocks = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))
        self.head = nn.Linear(256, 9000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


LARGE_ALONE = [("bf16", False), ("bf16", True), ("fp32", True)]


@pytest.mark.parametrize(
    ("micro_batches", "precision", "accumulates"),
    [(3, "bf16", False), (3, "bf16", True), (1, "fp32", False), *(full(1, *each) for each in LARGE_ALONE)],
)
def test_a_large_gradient_is_written_chunk_by_chunk(
    micro_batches: int, precision: str, accumulates: bool, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory is taken for a copy of it, late as the writes are, unless a second one is added to it."""
    make_writes_late(monkeypatch)
    monkeypatch.setattr(grad_store, "LARGE_BYTES", 1 << 20)
    streamed = []
    stream = DriveGrads.stream
    monkeypatch.setattr(DriveGrads, "stream", lambda pages, grad: (streamed.append(grad.numel()), stream(pages, grad)))
    found = []
    for settings in ({}, {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": nvme}):
        model = build(LargeLM)
        zo.offload(model, zo.OffloadConfig(precision=precision, **settings))
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        found.append([])
        for step in range(3):
            batches = [tokens_of(10 * step + i) for i in range(micro_batches)]
            for loss in (zo.accumulate if accumulates else loop)(model, batches, lambda m, tokens: m(tokens)):
                found[-1].append(loss.item())
            found[-1].append(zo.clip_grad_norm_(model, 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        found[-1] += read_masters(model).values()
        if settings:
            taken = runtime_of(model).store.arena.frame_bytes
        zo.close(model)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*found, strict=True))
    assert len({value for value in found[0] if isinstance(value, float)}) > 3
    # Of several, the first one until sums have made the section fp32.
    assert (streamed.count(9000 * 256) == 2 * 3) if micro_batches == 1 else streamed
    if micro_batches == 1:
        size = 2 if precision == "bf16" else 4
        units = 2 * 9000 * 256 + 256 * 256
        assert taken <= units * size + 2 * STREAM_CHUNKS * CHUNK_NUMEL * size + 4 * FRAME


def test_a_unit_is_waited_for_when_its_pages_are_wanted(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward fills one buffer while the one before is written; the last ones are given back by the next forward."""
    model = build(functools.partial(TinyLM, WIDE, 4))
    config = zo.OffloadConfig(grads="nvme", nvme=nvme, precision="bf16", durability="scratch", overlap="forward")
    zo.offload(model, config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    events: list[str] = []
    launch_write, detach_pages = DriveGrads.launch_write, DriveGrads.detach_pages

    def told_write(shard: DriveGrads) -> None:
        events.append(f"write {shard.layout.unit}")
        launch_write(shard)

    def told_detach(shard: DriveGrads) -> None:
        events.append(f"wait {shard.layout.unit}")
        detach_pages(shard)

    monkeypatch.setattr(DriveGrads, "launch_write", told_write)
    monkeypatch.setattr(DriveGrads, "detach_pages", told_detach)
    for step in range(2):
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(tokens_of(0))
    order = [int(event.split()[1]) for event in events if event.startswith("write")]
    assert len(order) >= 2 * 4 and order[: len(order) // 2] == order[len(order) // 2 :]
    for at, event in enumerate(events):
        verb, unit = event.split()
        if verb == "wait":
            written = [e for e in events[:at] if e.startswith("write")]
            assert f"write {unit}" in written[-GRADS_IN_FLIGHT:], f"{events}: waited too late"
    # The first unit's write is waited for when the third opens: the second has been made, and written, in between.
    assert events[:3] == [f"write {order[0]}", f"write {order[1]}", f"wait {order[0]}"]
    assert [event.split()[0] for event in events].count("wait") == len(order)
    zo.close(model)


def test_what_was_clipped_where_it_rests_leaves_before_the_next_forward(nvme: Path) -> None:
    """Gradients of the last unit that was clipped keep no pages: a forward has them for parameters."""
    model = build(functools.partial(TinyLM, WIDE, 4))
    zo.offload(model, zo.OffloadConfig(grads="nvme", nvme=nvme, durability="scratch", overlap="forward"))
    held: list[bool] = []
    model.blocks[0].register_forward_pre_hook(lambda *_: held.append(_holds_pages(model)))
    model(tokens_of(0)).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    assert _holds_pages(model)
    model(tokens_of(1))
    assert held == [False, False]
    zo.close(model)


def _holds_pages(model: nn.Module) -> bool:
    """True if gradients that rest on a drive are in memory."""
    stores = [section.store for section in runtime_of(model).grads.ledger.sections]
    return any(store._pages is not None and store._pages.attached for store in stores)
