"""The update that runs beside backward: random delays, a full ring and a commit under way change no bit."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.late_writes import make_writes_late
from tests.helpers.models import WIDE, TinyLM, tokens_of
from tests.helpers.reference import Recipe, read_masters, train_plain
from tests.parity.test_backward_updates import offloaded, train
from zero_offload.base.threads import UnitUpdate
from zero_offload.model.api import runtime_of
from zero_offload.optim.pipeline import UpdatePipeline
from zero_offload.runtime.grads.gradients import Gradients
from zero_offload.storage.shards.ring_grads import LAUNCHED_MAX
from zero_offload.storage.shards.snapshot import Snapshots

WIDE_LM = partial(TinyLM, WIDE, 4)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_random_delays_change_nothing(tier: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the update, of backward, and of reads in between."""
    delays = random.Random(0)

    def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
        def late(*arguments: Any, **named: Any) -> Any:
            time.sleep(delays.choice([0, 0, 0, 0.001, 0.004]))
            return call(*arguments, **named)

        return late

    recipe = Recipe(WIDE_LM, num_steps=4, micro_batches=2)
    expected = train_plain(recipe)
    for owner, name in ((UpdatePipeline, "_compute"), (UpdatePipeline, "run"), (Gradients, "arrive")):
        monkeypatch.setattr(owner, name, delayed(getattr(owner, name)))
    memory = "10MiB" if tier == "nvme" else None
    config = zo.OffloadConfig(
        precision="fp32", params=tier, grads=tier, optimizer=tier, nvme=nvme, device_memory=memory, overlap="backward"
    )
    assert train(recipe, config) == expected


def test_backward_waits_when_the_ring_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that does not get on holds backward up before there are more gradients than the ring has room for."""
    go, num_launched = threading.Event(), 0
    run = UpdatePipeline.run

    def stuck(self: UpdatePipeline, *arguments: Any) -> None:
        assert go.wait(20)
        run(self, *arguments)

    monkeypatch.setattr(UpdatePipeline, "run", stuck)
    model, optimizer = offloaded(partial(TinyLM, WIDE, 8))
    units, wait = runtime_of(model).units, UnitUpdate.wait

    def watched(update: UnitUpdate) -> None:
        nonlocal num_launched
        if not update.is_done:
            num_launched = max(num_launched, sum(unit.is_updating for unit in units))
            go.set()
        wait(update)

    monkeypatch.setattr(UnitUpdate, "wait", watched)
    model(tokens_of(0)).backward()
    assert go.is_set() and num_launched == LAUNCHED_MAX + 1
    optimizer.step()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_the_commit_of_the_step_before_has_its_states(tier: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that is under way while backward updates: what is resumed is the step that it is of."""
    make_writes_late(monkeypatch)
    model, optimizer = offloaded(WIDE_LM, optimizer=tier, nvme=nvme)
    for step in range(2):
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = read_masters(model)
    begins, write = threading.Event(), Snapshots.write

    def waits(self: Snapshots, snapshot: Any) -> None:
        assert begins.wait(20)
        write(self, snapshot)

    monkeypatch.setattr(Snapshots, "write", waits)
    zo.commit(model, optimizer)
    threading.Timer(0.2, begins.set).start()
    model(tokens_of(2)).backward()
    zo.close(model)  # the backward's step was never made
    again, its_optimizer = offloaded(WIDE_LM, optimizer=tier, nvme=nvme, existing="resume")
    resumed = zo.resume(again, its_optimizer)
    assert resumed is not None and resumed.step == 2
    found = read_masters(again)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    zo.close(again)
