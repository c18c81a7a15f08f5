"""Generations that are written while the next step runs: they hold their own step, and training does not notice.

A gate keeps each commit from writing anything before the next step was taken. Writes take place only when they are
waited for. So any state of the next step that could get into a generation does.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.disk import close_broken, drain, runtime
from tests.helpers.late_writes import Gate, make_writes_late
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.reference import param_groups, read_masters
from zero_offload.storage.shards.snapshot import Snapshots
from zero_offload.storage.shards.store import OpenChunks

STEPS = 5
HALVES = {"cpu": 0.5, "nvme": 0.5}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "in memory": {"params": "cpu", "optimizer": "cpu"},
    "on disk": {"params": "nvme", "optimizer": "nvme"},
    "values in memory": {"params": "cpu", "optimizer": "nvme"},
    "cached": {"params": "nvme", "optimizer": "cpu"},
    "mixed": {"params": HALVES, "optimizer": HALVES},
}


def start(nvme: Path, **settings: Any) -> tuple[nn.Module, zo.AdamW]:
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(nvme=nvme, existing="resume", **settings))
    return model, zo.AdamW(param_groups(model), lr=1e-2)


def step(model: nn.Module, optimizer: zo.AdamW, number: int) -> float:
    loss = model(tokens_of(number))
    loss.backward()
    zo.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def plain(precision: str) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses, and the masters after each step, of a run without generations."""
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(precision=precision))
    optimizer = zo.AdamW(param_groups(model), lr=1e-2)
    losses, masters = [], []
    for number in range(STEPS):
        losses.append(step(model, optimizer, number))
        masters.append({name: master.clone() for name, master in read_masters(model).items()})
    zo.close(model)
    return losses, masters


def train_with_late_commits(nvme: Path, gate: Gate, settings: dict[str, Any]) -> list[float]:
    """Each generation is written after the next step was taken.

    The directory is copied as a kill would leave it, before that and after.
    """
    model, optimizer = start(nvme, **settings)
    losses = [step(model, optimizer, 0)]
    zo.commit(model, optimizer, extra=1)
    for number in range(1, STEPS):
        losses.append(step(model, optimizer, number))
        shutil.copytree(nvme, nvme.with_name(f"before {number}"))
        gate.let_pass()
        drain(model)
        shutil.copytree(nvme, nvme.with_name(f"after {number}"))
        zo.commit(model, optimizer, extra=number + 1)
    gate.let_pass()
    zo.close(model)
    return losses


def assert_are_generations(nvme: Path, masters: list[dict[str, torch.Tensor]], settings: dict[str, Any]) -> None:
    """Of all copies: an unfinished commit leaves the one before it."""
    assert not any(nvme.with_name("before 1").glob("generation-*.json"))
    for number in range(1, STEPS):
        assert_is_generation(nvme.with_name(f"after {number}"), number, masters[number - 1], settings)
        if number > 1:
            assert_is_generation(nvme.with_name(f"before {number}"), number - 1, masters[number - 2], settings)


def assert_is_generation(nvme: Path, number: int, masters: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    model, optimizer = start(nvme, **settings)
    try:
        resumed = zo.resume(model, optimizer)
        assert resumed is not None and (resumed.step, resumed.extra) == (number, number)
        found = read_masters(model)
        assert all(torch.equal(found[name], masters[name]) for name in masters)
        assert all(float(state["step"]) == number for state in optimizer.state_dict()["state"].values())
    finally:
        close_broken(model)


@in_turn(placement=list(PLACEMENTS), precision=["fp32", "bf16", "fp16"])
def test_a_generation_has_its_step_while_the_next_one_runs(
    placement: str, precision: str, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PLACEMENTS[placement] | {"precision": precision}
    losses, masters = plain(precision)
    with monkeypatch.context() as patches:
        make_writes_late(patches)
        assert train_with_late_commits(nvme, Gate(patches), settings) == losses
    assert_are_generations(nvme, masters, settings)
    assert_is_generation(nvme, STEPS, masters[-1], settings)


def _reads_only(chunk: OpenChunks) -> None:
    for read in chunk.reads:
        read.wait()


class Skipping(TinyLM):
    """Leaves its second block out."""

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[0](x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_no_update_has_written_yet_is_in_the_generation(placement: str, precision: str, nvme: Path) -> None:
    """Units without a gradient, and all of them when the first step is skipped."""
    settings = {**PLACEMENTS[placement], "precision": precision, "nvme": nvme}
    for is_skipped in (True, False):
        model = zo.offload(build(Skipping), zo.OffloadConfig(existing="discard", **settings))
        optimizer = zo.AdamW(param_groups(model), lr=1e-2)
        (model(tokens_of(0)) * (float("nan") if is_skipped else 1.0)).backward()
        with pytest.warns(match="NaN or infinite") if is_skipped else nullcontext():
            optimizer.step()
        expected = {name: master.clone() for name, master in read_masters(model).items()}
        zo.close(model)
        again = zo.offload(build(Skipping, seed=1), zo.OffloadConfig(existing="resume", **settings))
        resumed = zo.resume(again, zo.AdamW(param_groups(again), lr=1e-2))
        assert resumed is not None and resumed.step == 1
        found = read_masters(again)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        zo.close(again)


@pytest.mark.parametrize("missing", ["chunk", "slot"])
def test_a_missing_wait_is_seen(missing: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = "in memory" if missing == "chunk" else "on disk"
    settings = PLACEMENTS[placement] | {"precision": "fp32"}
    _, masters = plain("fp32")
    with monkeypatch.context() as patches:
        make_writes_late(patches)
        if missing == "chunk":
            patches.setattr(OpenChunks, "wait", _reads_only)
        else:
            patches.setattr(Snapshots, "wait_for_slots", lambda self: None)
        train_with_late_commits(nvme, Gate(patches), settings)
    with pytest.raises((AssertionError, zo.IntegrityError)):
        assert_are_generations(nvme, masters, settings)


def test_steps_that_wait_for_a_commit_say_so(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patches:
        make_writes_late(patches)
        gate = Gate(patches)
        model, optimizer = start(nvme, params="cpu", optimizer="cpu")
        step(model, optimizer, 0)
        zo.commit(model, optimizer)
        assert zo.stats(model).commit_wait_s == 0
        step(model, optimizer, 1)
        waited = zo.stats(model)
        assert 0 < waited.commit_wait_s < waited.step_s and waited.commit_s == 0
        gate.let_pass()
        zo.close(model)


def test_a_step_without_commit_is_written_behind_the_next_backward(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the program never calls `zo.commit`, the write does not wait for that call."""
    model, optimizer = start(nvme, params="cpu", optimizer="cpu")
    step(model, optimizer, 0)
    assert runtime(model).store.snapshots.num_ended == 0
    model(tokens_of(1)).backward()
    drain(model)
    assert runtime(model).store.snapshots.num_ended == 1
    zo.close(model)


def test_states_that_the_program_replaces_are_in_the_generation_of_the_next_step(nvme: Path) -> None:
    """And in none of the step before, which they are not the states of, though that step was due."""
    model, optimizer = start(nvme, params="cpu", optimizer="cpu", commit_every=2)
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    for param in model.parameters():
        optimizer.state[param]["exp_avg"].mul_(0.5)
    model(tokens_of(2)).backward()
    optimizer.step()
    drain(model)
    assert runtime(model).store.snapshots.num_ended == 0
    step(model, optimizer, 3)
    drain(model)
    assert runtime(model).store.snapshots.num_ended == 1
    zo.close(model)
