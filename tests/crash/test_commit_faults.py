"""A commit that fails while the next update waits for it: everybody gets its error, and nothing hangs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.disk import drain, open_model, train
from tests.helpers.late_writes import Gate
from tests.helpers.models import tokens_of
from zero_offload.checkpoint import generation
from zero_offload.storage.shards.snapshot import Snapshots

PLACEMENTS: list[dict[str, Any]] = [{}, {"params": "cpu", "optimizer": "cpu"}]


@pytest.mark.parametrize("settings", PLACEMENTS, ids=["on disk", "in memory"])
def test_a_commit_that_fails_while_an_update_waits_for_it(
    settings: dict[str, Any], nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, write_manifest = threading.Event(), generation.write_manifest

    def fail(*args: Any) -> str:
        if fails.is_set():
            raise zo.StorageError("the drive is on fire")
        return write_manifest(*args)

    waits, wait_for_slots = threading.Event(), Snapshots.wait_for_slots

    def wait(snapshots: Snapshots) -> None:
        waits.set()
        wait_for_slots(snapshots)

    with monkeypatch.context() as patches:
        gate = Gate(patches)
        patches.setattr(generation, "write_manifest", fail)
        model, optimizer = open_model(nvme, **settings)
        train(model, optimizer, 0, 1)
        gate.let_pass()
        drain(model)
        train(model, optimizer, 1, 2)
        patches.setattr(Snapshots, "wait_for_slots", wait)
        model(tokens_of(2)).backward()
        optimizer.step()  # beside the commit that is held
        # States in memory wait for chunks, which need no commit to be complete.
        assert "optimizer" in settings or waits.wait(30)
        fails.set()
        gate.let_pass()
        for call in (lambda: drain(model), lambda: model(tokens_of(3)), lambda: zo.close(model)):
            with pytest.raises(zo.StorageError, match="on fire"):
                call()
    model, optimizer = open_model(nvme, **settings)
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and resumed.step == 1
    zo.close(model)
