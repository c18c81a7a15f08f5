"""A model takes memory within bounds, and gives it back: nothing grows with steps, and a dropped model is gone."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import NARROW, WIDE, TinyLM, build, tokens_of
from tests.helpers.offloaded_player import Offloaded
from tests.helpers.pairwise import full, in_turn
from tests.helpers.reference import param_groups, placed
from tests.helpers.schedules import Pass, Script
from tests.helpers.twins import train
from zero_offload.base.types import MIB
from zero_offload.model.api import runtime_of
from zero_offload.storage.memory import arena as pages


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Only objects without a reference are freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def one_step(what: Pass) -> Script:
    return [("forward", what), ("backward", 0, 1.0, False, True), ("clip", 0.5), ("step",), ("zero_grad",)]


USES: dict[str, Script] = {
    "steps": one_step(Pass(0)) + one_step(Pass(1, route=(0, 3, 3))),
    "recompute": one_step(Pass(0, recompute="reentrant")) + one_step(Pass(1, recompute="saved")),
    "eval": [*one_step(Pass(0)), ("evaluate", Pass(1), torch.inference_mode), ("generate", Pass(2), 3)],
    "gathered": [*one_step(Pass(0)), ("read", "master", "embedding"), ("write", "params", "blocks.1", 0.5)],
    "a graph that is left": [*one_step(Pass(0)), ("forward", Pass(1)), ("backward", 0, 1.0, True, True)],
    "files": [*one_step(Pass(0)), ("commit", 1), ("save", 0), ("load", 0), ("read_states",)],
}


def test_states_in_memory_leave_with_a_model_that_makes_generations(tmp_path: Path) -> None:
    imported_for("files")
    with no_garbage_collection():
        config = zo.OffloadConfig(nvme=tmp_path / "again")
        model = zo.offload(build(TinyLM), config)
        optimizer = zo.AdamW(model.parameters())
        model(tokens_of(0)).backward()
        optimizer.step()
        zo.commit(model, optimizer)
        zo.close(model)
        runtime = runtime_of(model)
        left = [weakref.ref(each) for each in (runtime.store, runtime.store.arena, runtime.store.snapshots)]
        left += [weakref.ref(array) for shard in runtime.store.shards for array in shard.memory.values()]
        del model, optimizer, runtime
        assert [each() for each in left if each() is not None] == []


@functools.cache
def imported_for(use: str) -> None:
    """torch's own imports make garbage."""
    with tempfile.TemporaryDirectory() as folder:
        Offloaded(NARROW, zo.OffloadConfig(precision="fp32"), Path(folder)).play(USES[use])


@in_turn(use=list(USES), fp32_config=["cpu", "nvme"], indirect=["fp32_config"])
def test_a_dropped_model_leaves_memory_at_once(use: str, fp32_config: zo.OffloadConfig, tmp_path: Path) -> None:
    """Not when Python's garbage collector comes by: it counts objects, and a model is few objects of many bytes."""
    imported_for(use)
    with no_garbage_collection():
        player = Offloaded(WIDE, fp32_config, tmp_path / "again")
        player.play(USES[use])
        player.close()
        runtime: Any = runtime_of(player.model)
        parts = [runtime, runtime.store, runtime.store.arena, *player.model.parameters()]
        left = [weakref.ref(part) for part in parts]
        del player, runtime, parts
        assert [reference() for reference in left if reference() is not None] == []


# Steps


WARM, STEPS = 10, 200
HEAP_NOISE = 6 * MIB
"""Bytes by which glibc's heap and torch's own caches move; one gradient kept per step would be several times that."""
PLACEMENTS = {
    "cpu": ("cpu", "cpu", "cpu"),
    "nvme": ("nvme", "nvme", "nvme"),
    "fractions": ({"device": 0.34, "cpu": 0.33, "nvme": 0.33}, "nvme", {"cpu": 0.5, "nvme": 0.5}),
}


@dataclass(frozen=True)
class Taken:
    """Resources that this process and our package hold now."""

    descriptors: int
    threads: int
    objects: Counter[str]
    arena_bytes: int
    files_bytes: int
    ranges: int
    """Address ranges that the package has taken so far."""
    num_mappings: int
    """Those of them that the model's statistics tell of."""
    mappings: int
    rss_bytes: int


def our_objects() -> Counter[str]:
    kinds = [type(each) for each in gc.get_objects()]
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("zero_offload"))


def taken(model: nn.Module, ranges: list[int], than: Counter[str] | None = None) -> Taken:
    """Where there are more objects `than` these it looks again for a while. A thread tells that a job is done a moment
    before it lets go of it.
    """
    runtime: Any = runtime_of(model)
    runtime.drain()
    time.sleep(0.1)
    ours, ends = our_objects(), time.monotonic() + 30
    while than is not None and ours - than and time.monotonic() < ends:
        time.sleep(0.1)
        ours = our_objects()
    resident = zo.stats(model).resident_bytes
    return Taken(
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=len(list(Path("/proc/self/task").iterdir())),
        objects=ours,
        arena_bytes=resident["cpu"],
        files_bytes=resident["nvme"],
        ranges=len(ranges),
        num_mappings=zo.stats(model).num_mappings,
        mappings=len(Path("/proc/self/maps").read_text().splitlines()),
        rss_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


def steps_with_eval(model: nn.Module, optimizer: zo.AdamW, span: range) -> None:
    for step in span:
        list(train(model, optimizer, [step]))
        zo.commit(model, optimizer, extra={"step": step})
        if step % 5 == 0:
            with torch.inference_mode():
                model(tokens_of(step))
    zo.stats(model)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every address range that the package takes."""
    found: list[int] = []
    pages.moves_pages()  # tries it on ranges of its own, once per process
    original = pages._map
    monkeypatch.setattr(pages, "_map", lambda *arguments: found.append(arguments[0]) or original(*arguments))
    return found


@pytest.mark.parametrize(
    ("where", "precision"),
    [
        ("fractions", "bf16"),
        full("cpu", "bf16"),
        full("nvme", "fp32"),
        full("cpu", "fp32"),
        full("nvme", "bf16"),
        full("fractions", "fp32"),
    ],
)
def test_nothing_grows_with_steps(where: str, precision: str, nvme: Path, ranges: list[int]) -> None:
    gc.collect()  # what other tests have left
    model = zo.offload(build(TinyLM), placed(precision, PLACEMENTS[where], nvme, "8MiB"))
    optimizer = zo.AdamW(param_groups(model), lr=1e-4)
    steps_with_eval(model, optimizer, range(2))
    after_two = taken(model, ranges)
    steps_with_eval(model, optimizer, range(2, WARM))
    before = taken(model, ranges)
    with no_garbage_collection():
        steps_with_eval(model, optimizer, range(WARM, STEPS))
        after = taken(model, ranges, before.objects)
    assert (after.ranges, after.arena_bytes) == (after_two.ranges, after_two.arena_bytes)
    assert after.num_mappings == after_two.num_mappings == after.ranges
    assert after.files_bytes == before.files_bytes
    assert after.objects - before.objects == Counter()
    assert (after.descriptors, after.threads) == (before.descriptors, before.threads)
    # Neighbouring ranges merge and split as pages move.
    assert after.mappings - before.mappings < 10
    assert after.rss_bytes - before.rss_bytes < HEAP_NOISE
    zo.close(model)


def hook_counts(model: nn.Module) -> Counter[str]:
    """Of every kind, over all modules and parameters."""
    found: Counter[str] = Counter()
    for thing in [*model.modules(), *model.parameters()]:
        hooks = {name: value for name in dir(thing) if "hooks" in name and (value := getattr(thing, name, None))}
        found.update({name: len(value) for name, value in hooks.items() if isinstance(value, dict)})
    return found


def test_hooks_stay_as_many(fp32_config: zo.OffloadConfig, tmp_path: Path) -> None:
    player = Offloaded(WIDE, fp32_config, tmp_path)
    before = hook_counts(player.model)
    for script in USES.values():
        player.play(script)
    player.play([("break_forward", Pass(0), 1), ("break_backward", Pass(0), 2, False), *one_step(Pass(1))])
    assert hook_counts(player.model) == before != Counter()
    player.close()
