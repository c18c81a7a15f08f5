"""A step that waits to become a generation: `zo.close` makes it one only while the states are its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.disk import drain, open_model, reference, runtime, train
from tests.helpers.late_writes import Gate
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import in_pairs
from tests.helpers.reference import param_groups, read_masters
from zero_offload.optim import pipeline

SELDOM: dict[str, Any] = {"commit_every": 2}
"""Steps 1, 3, ... wait."""


def _resumed(nvme: Path) -> tuple[int, dict[str, torch.Tensor]]:
    model, optimizer = open_model(nvme)
    found = zo.resume(model, optimizer)
    masters = read_masters(model)
    zo.close(model)
    return (0 if found is None else found.step), masters


def _assert_same(found: dict[str, torch.Tensor], masters: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(masters) and all(torch.equal(found[name], masters[name]) for name in masters)


def _assert_resumes(nvme: Path, step: int) -> None:
    """At this step, with the states that plain training has then."""
    found, masters = _resumed(nvme)
    assert found == step
    _assert_same(masters, reference(step)[1])


def _assert_refused(uses: Iterable[Callable[[], object]], match: str) -> None:
    for use in uses:
        with pytest.raises(zo.ZeroOffloadError, match=match):
            use()


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
def test_a_step_that_breaks_off_after_its_update_began(tier: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = open_model(nvme, params=tier, optimizer=tier, **SELDOM)
    train(model, optimizer, 0, 3)
    prefetcher = runtime(model).prefetcher
    original = prefetcher.refresh_kept

    def interrupted() -> None:
        original()
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(prefetcher, "refresh_kept", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 3, 4)
    zo.close(model)
    _assert_resumes(nvme, 2)


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
@pytest.mark.parametrize("place", ["before the update", "in the update"])
def test_a_program_that_goes_on_after_an_interrupt(
    place: str, tier: str, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = open_model(nvme, params=tier, optimizer=tier, overlap="none")
    train(model, optimizer, 0, 3)
    struck = {
        "before the update": (torch.autograd.graph, "increment_version"),
        "in the update": (pipeline, "fused_update"),
    }
    owner, name = struck[place]
    original, calls = getattr(owner, name), iter(range(10))

    def interrupted(*args: object) -> None:
        if next(calls) == (2 if place == "in the update" else 0):
            raise KeyboardInterrupt
        original(*args)

    with monkeypatch.context() as patches:
        patches.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 3, 4)
    uses: list[Callable[[], object]] = [
        lambda: model(tokens_of(3)),
        lambda: zo.commit(model, optimizer),
        model.state_dict,
        optimizer.step,
        optimizer.state_dict,
        lambda: zo.load_checkpoint(model, optimizer, nvme),
    ]
    _assert_refused(uses, "a mix of two.*existing='resume'")
    zo.close(model)
    _assert_resumes(nvme, 3)


def test_an_interrupt_while_the_commit_of_the_step_before_has_not_begun(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to its end: with several ranks the others are in it."""
    model, optimizer = open_model(nvme, params="cpu", optimizer="cpu", overlap="none")
    train(model, optimizer, 0, 2)
    drain(model)
    committer, gate = runtime(model)._commits._commit_worker, threading.Event()
    assert committer is not None
    committer.submit(lambda: None if gate.wait(30) else pytest.fail("the gate did not open"))
    train(model, optimizer, 2, 3)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(pipeline, "fused_update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 3, 4)
    gate.set()
    zo.close(model)
    _assert_resumes(nvme, 3)


def test_an_interrupt_before_a_step_changes_nothing(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program may commit the step before, and take the interrupted step."""
    model, optimizer = open_model(nvme, **SELDOM)
    train(model, optimizer, 0, 3)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr("zero_offload.model.updates.segment_array", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 3, 4)
    zo.commit(model, optimizer)
    optimizer.step()
    zo.commit(model, optimizer)
    zo.close(model)
    _assert_resumes(nvme, 4)


def test_a_step_that_breaks_off_before(nvme: Path) -> None:
    model, optimizer = open_model(nvme, **SELDOM)
    train(model, optimizer, 0, 3)
    model(tokens_of(3)).backward()
    zo.close(model)
    _assert_resumes(nvme, 3)


def _damaged_checkpoint(path: Path) -> None:
    """Its last block cannot be read."""
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig())
    optimizer = zo.AdamW(param_groups(model), lr=1e-2)
    train(model, optimizer, 5, 6)
    zo.save_checkpoint(model, optimizer, path)
    zo.close(model)
    swap = path / "rank0.swap"
    data = bytearray(swap.read_bytes())
    last = max(place for place, byte in enumerate(data) if byte)
    data[last] ^= 1
    swap.write_bytes(data)


def test_a_checkpoint_that_loads_half_way(nvme: Path, tmp_path: Path) -> None:
    _damaged_checkpoint(tmp_path / "damaged")
    model, optimizer = open_model(nvme, **SELDOM)
    train(model, optimizer, 0, 3)
    zo.save_checkpoint(model, optimizer, tmp_path / "whole")
    with pytest.raises(zo.IntegrityError):
        zo.load_checkpoint(model, optimizer, tmp_path / "damaged")
    uses = (
        lambda: model(tokens_of(3)),
        lambda: model.state_dict(),
        lambda: zo.save_checkpoint(model, optimizer, tmp_path / "mix"),
    )
    _assert_refused(uses, "damaged failed half-way")
    zo.close(model)
    _assert_resumes(nvme, 2)


def test_a_whole_checkpoint_mends_a_half_loaded_one(nvme: Path, tmp_path: Path) -> None:
    _damaged_checkpoint(tmp_path / "damaged")
    model, optimizer = open_model(nvme, **SELDOM)
    train(model, optimizer, 0, 3)
    zo.save_checkpoint(model, optimizer, tmp_path / "whole")
    with pytest.raises(zo.IntegrityError):
        zo.load_checkpoint(model, optimizer, tmp_path / "damaged")
    assert zo.load_checkpoint(model, optimizer, tmp_path / "whole").step == 3
    train(model, optimizer, 3, 4)
    zo.close(model)
    _assert_resumes(nvme, 4)


@pytest.mark.filterwarnings("error")
def test_a_loaded_checkpoint_needs_no_resume(nvme: Path, tmp_path: Path) -> None:
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 2)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    zo.close(model)
    model, optimizer = open_model(nvme)
    zo.load_checkpoint(model, optimizer, tmp_path / "saved")
    train(model, optimizer, 2, 3)
    zo.close(model)
    assert _resumed(nvme)[0] == 3


def _rolled_back(nvme: Path, what: str) -> tuple[torch.nn.Module, zo.AdamW]:
    """At step 3, which waits, with states of step 1."""
    model, optimizer = open_model(nvme, **SELDOM)
    train(model, optimizer, 0, 1)
    states, values = optimizer.state_dict(), model.state_dict()
    train(model, optimizer, 1, 3)
    if what != "moments":
        model.load_state_dict(values)
    if what != "values":
        optimizer.load_state_dict(states)
    return model, optimizer


@pytest.mark.parametrize("what", ["moments", "values", "both"])
def test_states_of_the_program_are_not_taken_for_the_step(what: str, nvme: Path) -> None:
    model, _ = _rolled_back(nvme, what)
    with pytest.warns(UserWarning, match="step 3 is not made a generation"):
        zo.close(model)
    _assert_resumes(nvme, 2)


@pytest.mark.filterwarnings("error")
def test_a_commit_takes_states_of_the_program(nvme: Path) -> None:
    model, optimizer = _rolled_back(nvme, "both")
    values = model.state_dict()
    zo.commit(model, optimizer)
    zo.close(model)
    model, optimizer = open_model(nvme)
    assert zo.resume(model, optimizer) is not None
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {1.0}
    found = model.state_dict()
    assert all(torch.equal(found[name], values[name]) for name in values)
    zo.close(model)


@pytest.mark.filterwarnings("error")
def test_reading_states_and_changing_parameters_keep_the_step(nvme: Path) -> None:
    model, optimizer = open_model(nvme, **SELDOM)
    train(model, optimizer, 0, 3)
    optimizer.state_dict(), model.state_dict()
    with zo.gathered(model, mode="write", kind="master") as masters:
        for master in masters.values():
            master.zero_()
    zo.close(model)
    step, found = _resumed(nvme)
    assert step == 3 and all(not master.any() for master in found.values())


def _replace(how: str, model: torch.nn.Module, optimizer: zo.AdamW, saved: Path) -> None:
    if how == "loaded":
        zo.load_checkpoint(model, optimizer, saved)
    elif how == "written":
        with zo.gathered(model, mode="write") as params, torch.no_grad():
            for param in params.values():
                param.fill_(0.5)
    else:
        model.load_state_dict({name: torch.full_like(each, 0.5) for name, each in model.state_dict().items()})


@in_pairs(
    how=["loaded", "written", "state dict"], tier=["nvme", "cpu"], commit_every=[1, "auto"], commits=[True, False]
)
def test_a_step_that_is_committed_can_be_replaced(
    how: str, tier: str, commit_every: int | str, commits: bool, nvme: Path, tmp_path: Path
) -> None:
    """By a further commit; without it the generation stays, and the program hears of it."""
    model, optimizer = open_model(nvme, params=tier, optimizer=tier, commit_every=commit_every)
    train(model, optimizer, 0, 1)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    train(model, optimizer, 1, 4)
    committed = read_masters(model)
    zo.close(model)
    model, optimizer = open_model(nvme, params=tier, optimizer=tier, commit_every=commit_every)
    assert zo.resume(model, optimizer) is not None
    _replace(how, model, optimizer, tmp_path / "saved")
    replaced = read_masters(model)
    assert any(not torch.equal(replaced[name], committed[name]) for name in committed)
    if commits:
        zo.commit(model, optimizer)
        zo.close(model)
    else:
        with pytest.warns(UserWarning, match="goes on from the generation committed last: after it .*zo.commit"):
            zo.close(model)
    step, found = _resumed(nvme)
    assert step == (1 if how == "loaded" and commits else 4)
    _assert_same(found, replaced if commits else committed)


def test_a_further_commit_of_a_step_has_its_own_extra(nvme: Path) -> None:
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 2)
    zo.commit(model, optimizer, extra="second")
    zo.close(model)
    model, optimizer = open_model(nvme)
    found = zo.resume(model, optimizer)
    assert found is not None and (found.step, found.extra) == (2, "second")
    train(model, optimizer, 2, 3)
    zo.close(model)
    _assert_resumes(nvme, 3)


@pytest.mark.filterwarnings("error")
def test_a_further_commit_between_backward_and_step_changes_nothing(nvme: Path) -> None:
    """It would say that the program is further than its states are."""
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 2)
    zo.commit(model, optimizer, extra="first")
    model(tokens_of(2)).backward()
    zo.commit(model, optimizer, extra="second")
    optimizer.zero_grad()
    zo.close(model)
    model, optimizer = open_model(nvme)
    found = zo.resume(model, optimizer)
    assert found is not None and (found.step, found.extra) == (2, "first")
    zo.close(model)


def test_a_commit_before_the_first_step(nvme: Path) -> None:
    model, optimizer = open_model(nvme)
    zo.commit(model, optimizer, extra="begin")
    zo.close(model)
    model, optimizer = open_model(nvme)
    found = zo.resume(model, optimizer)
    assert found is not None and (found.step, found.extra) == (0, "begin")
    train(model, optimizer, 0, 2)
    zo.close(model)
    _assert_resumes(nvme, 2)


def test_half_of_a_change_is_not_committed(nvme: Path) -> None:
    model, optimizer = open_model(nvme, **SELDOM)
    train(model, optimizer, 0, 3)
    with pytest.raises(RuntimeError), zo.gathered(model, mode="write", kind="master") as masters:
        name = list(masters)[-1]
        masters[name] = masters[name].to("meta")  # has nothing to write
    with pytest.warns(UserWarning, match="step 3 is not made a generation"):
        zo.close(model)
    assert _resumed(nvme)[0] == 2


def test_a_close_in_an_exception_asks_for_the_others_when_the_commit_is_over(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both talk on one group."""
    model, optimizer = open_model(nvme)
    owner = runtime(model)
    gate = Gate(monkeypatch)
    train(model, optimizer, 0, 1)
    ended: list[int] = []
    original = owner._commits.drain

    def drain_after_gate() -> None:
        gate.let_pass()
        original()

    def all_come(what: str, *, surely: bool) -> bool:
        assert not surely
        ended.append(owner.store.snapshots.num_ended)
        return True

    monkeypatch.setattr(owner._commits, "drain", drain_after_gate)
    monkeypatch.setattr(owner.ranks, "all_come", all_come)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        zo.close(model)
    assert ended == [1]


def test_ranks_that_were_struck_at_different_steps_commit_none(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = open_model(nvme, **SELDOM)
    train(model, optimizer, 0, 3)
    drain(model)
    monkeypatch.setattr(runtime(model).ranks, "gather_digests", lambda word: [word, f"{2:016x}"])
    zo.close(model)
    monkeypatch.undo()
    assert _resumed(nvme)[0] == 2
