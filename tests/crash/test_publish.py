"""Checkpoints that a run publishes while it trains: a start without its drives goes on from them, `==`."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem

import zero_offload as zo
from tests.crash.test_homes import ON_DISK, machines, on_machine, train_at
from tests.helpers import ranks
from tests.helpers.bases import Adapted, opened, settings, write_base
from tests.helpers.bases import steps as base_steps
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import Case, Failure, Outcome, RankPools
from tests.helpers.trainer import fork_server
from tests.unit.storage.files.test_base_files import flip
from zero_offload.checkpoint import published
from zero_offload.model.api import need_runtime

LIMIT_S = 240


def case_of(place: str | Path, nvme: Path | None = None, **settings: Any) -> Case:
    """Each step is published; a start waits for the one before."""
    given = ON_DISK | {"publish": place, "publish_every": 1} | settings
    return Case(given if nvme is None else given | {"nvme": nvme}, max_norm=0.5)


def wait_until_published(model: nn.Module) -> None:
    keeper = need_runtime(model, "the test").keeper
    assert keeper is not None and keeper.publisher is not None
    need_runtime(model, "the test").drain()
    publisher = keeper.publisher
    ranks.wait_until(lambda: not publisher.is_busy, LIMIT_S)


def train_slowly(rank: int, size: int, case: Case, places: Sequence[Path] | None = None) -> tuple[int, Outcome]:
    """Train; each step waits until the one before is published. Gives the first step, too."""
    if places is not None:
        with on_machine(places[rank].name):
            return train_slowly(rank, size, replace(case, settings=case.settings | {"nvme": places[rank]}))
    model, optimizer = ranks.start(case)
    try:
        resumed, out = zo.resume(model, optimizer), Outcome()
        first = 0 if resumed is None else resumed.step
        for step in range(first, case.num_steps):
            ranks.steps(case, (rank, size), model, optimizer, range(step, step + 1), out)
            wait_until_published(model)
        out.params = ranks.read_params(model)
        return first, out
    finally:
        zo.close(model)


def names(place: Path) -> list[str]:
    """Steps of the checkpoints there, in order."""
    return [each.name.split("-")[2] for each in sorted(place.iterdir()) if (each / ".metadata").exists()]


@in_turn(
    precision=["fp32", "bf16", "fp16", "compact"],
    settings=[{}, {"stage": 1, "params": "cpu", "optimizer": "cpu"}, {"stage": 0}, {"params": "cpu"}],
    then=[2, 1, 4, 2],
)
def test_a_start_without_drives_goes_on_from_what_was_published(
    precision: str, settings: dict[str, Any], then: int, pools: RankPools, tmp_path: Path
) -> None:
    """Two ranks, then as many; against a start from a checkpoint of zo.save_checkpoint."""
    kind = zo.Precision(states="compact") if precision == "compact" else precision
    case = replace(case_of(tmp_path / "out", tmp_path / "run", precision=kind, **settings), num_frozen=1)
    pools.of(2).succeed(save_at_end, replace(case, num_steps=3), str(tmp_path / "saved"))
    assert names(tmp_path / "out") == ["2", "3"], "two are kept"
    lost = replace(case, settings=case.settings | {"nvme": tmp_path / "new"}, num_steps=4)
    found = pools.of(then).succeed(train_slowly, lost)
    loaded = replace(case, settings={**settings, "params": "cpu", "optimizer": "cpu", "precision": kind}, num_steps=3)
    expected = pools.of(then).succeed(load_and_step, loaded, str(tmp_path / "saved"))
    assert found == [(3, each) for each in expected]
    # The run is the same one.
    assert names(tmp_path / "out") == ["3", "4"]


def save_at_end(rank: int, size: int, case: Case, path: str) -> None:
    model, optimizer = ranks.start(case)
    for step in range(case.num_steps):
        ranks.steps(case, (rank, size), model, optimizer, range(step, step + 1), Outcome())
        wait_until_published(model)
    zo.save_checkpoint(model, optimizer, path)
    zo.close(model)


def load_and_step(rank: int, size: int, case: Case, path: str) -> Outcome:
    model, optimizer = ranks.start(case)
    zo.load_checkpoint(model, optimizer, path)
    out = Outcome()
    ranks.steps(case, (rank, size), model, optimizer, range(case.num_steps, case.num_steps + 1), out)
    out.params = ranks.read_params(model)
    zo.close(model)
    return out


def test_torch_reads_what_was_published(tmp_path: Path) -> None:
    case = replace(case_of(tmp_path / "out", tmp_path / "run"), num_steps=2)
    _, out = train_slowly(0, 1, case)
    newest = max((tmp_path / "out").iterdir())
    plain = ranks.make_model(case)
    state = {f"model.{name}": value for name, value in plain.state_dict().items()}
    state |= {f"optimizer.state.{name}.exp_avg": torch.zeros_like(p) for name, p in plain.named_parameters()}
    dcp.load(state, checkpoint_id=str(newest), no_dist=True)
    plain.load_state_dict({name.removeprefix("model."): each for name, each in state.items() if name[0] == "m"})
    assert all(torch.equal(out.params[name], param) for name, param in plain.named_parameters())
    assert any(each.any() for name, each in state.items() if name.endswith("exp_avg"))


def test_training_goes_on_while_a_generation_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place as slow as five steps: commits wait, training does not, and the bytes are those of the step."""
    going, read = threading.Event(), published._TensorRows.resolve_data

    def slow(self: Any, item: Any) -> torch.Tensor:
        assert going.wait(LIMIT_S)
        return read(self, item)

    monkeypatch.setattr(published._TensorRows, "resolve_data", slow)
    case = case_of(tmp_path / "out", tmp_path / "run", publish_every=100)
    reference = replace(case, num_steps=1, settings=case.settings | {"nvme": tmp_path / "one", "publish": None})
    expected = ranks.train(0, 1, reference).params
    case = replace(case, settings=case.settings | {"publish_every": 1})
    model, optimizer = ranks.start(case)
    for step in range(6):
        ranks.steps(case, (0, 1), model, optimizer, range(step, step + 1), Outcome())
        keeper = need_runtime(model, "the test").keeper
        assert keeper is not None and keeper.publisher is not None
        if step == 0:
            need_runtime(model, "the test").drain()
            assert keeper.publisher.is_busy
    assert keeper._number == 1, "no slot is free for a second generation but one"
    # A generation that the program insists on takes the other slot; an update after it would wait.
    going.set()
    wait_until_published(model)
    ranks.steps(case, (0, 1), model, optimizer, range(6, 7), Outcome())
    wait_until_published(model)
    zo.close(model)
    assert names(tmp_path / "out") == ["1", "7"]
    first = min((tmp_path / "out").iterdir())
    state = {f"model.{name}": torch.empty_like(value) for name, value in expected.items()}
    dcp.load(state, checkpoint_id=str(first), no_dist=True)
    assert all(torch.equal(state[f"model.{name}"], expected[name]) for name in expected)


def test_updates_wait_for_slots_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits that do not ask: the held generation's slots are not written all the same."""
    going, read = threading.Event(), published._TensorRows.resolve_data

    def slow(self: Any, item: Any) -> torch.Tensor:
        assert going.wait(LIMIT_S)
        return read(self, item)

    monkeypatch.setattr(published._TensorRows, "resolve_data", slow)
    case = case_of(tmp_path / "out", tmp_path / "run", publish_keep=9)
    model, optimizer = ranks.start(case)
    commits = need_runtime(model, "the test")._commits
    monkeypatch.setattr(commits, "_may", True)
    monkeypatch.setattr(commits, "note_due", lambda _: None)
    steps = threading.Thread(
        target=lambda: ranks.steps(case, (0, 1), model, optimizer, range(4), Outcome()), name="zero_offload-test"
    )
    steps.start()
    steps.join(3)
    assert steps.is_alive(), "the third update needs the slots of the first generation"
    going.set()
    steps.join(LIMIT_S)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wait_until_published(model)
        zo.close(model)
    assert "1" in names(tmp_path / "out")


def test_a_lost_machine_is_filled_from_what_was_published(pools: RankPools, tmp_path: Path) -> None:
    pool, places = pools.of(2), machines(tmp_path, *"ab")
    case = replace(case_of(tmp_path / "out"), num_steps=2)
    pool.succeed(train_at, replace(case, settings=case.settings | {"publish": None}), places)
    shutil.rmtree(places[1])
    for failure in pool.call(train_at, case, places):
        assert isinstance(failure, Failure) and failure.kind == "CheckpointError", failure
        assert "lacks the files of rank 1" in failure.message and "has no whole checkpoint either" in failure.message
    for place in (places[0], tmp_path / "out"):
        shutil.rmtree(place, ignore_errors=True)
    pool.succeed(train_slowly, replace(case, num_steps=3), places)
    whole = pool.succeed(train_at, replace(case, num_steps=4), machines(tmp_path / "whole", *"ab"))
    shutil.rmtree(places[1])
    found = pool.succeed(train_at, replace(case, num_steps=4), places)
    for each, expected in zip(found, whole, strict=True):
        assert each == Outcome(expected.losses[3:], expected.norms[3:], expected.params)


# Mishaps


def test_a_full_place_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(case_of(tmp_path / "out", tmp_path / "run"), num_steps=1)
    train_slowly(0, 1, case)
    create = filesystem.FileSystem.create_stream

    @contextmanager
    def full(self: Any, path: Any, mode: str) -> Iterator[Any]:
        with create(self, path, mode) as stream:
            if mode == "wb":
                stream.write(b"some")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield stream

    with monkeypatch.context() as patch:
        patch.setattr(filesystem.FileSystem, "create_stream", full)
        with pytest.warns(UserWarning, match="step 2 is not published: .*No space left.*publish_keep=2"):
            train_slowly(0, 1, replace(case, num_steps=2))
    assert names(tmp_path / "out") == ["1"] and len(list((tmp_path / "out").iterdir())) == 1
    first, out = train_slowly(0, 1, replace(case, num_steps=3))
    assert first == 2 and len(out.losses) == 1
    assert names(tmp_path / "out") == ["1", "3"]


def test_bytes_that_come_back_otherwise_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that changes what it is given, in silence."""
    case = replace(case_of(tmp_path / "out", tmp_path / "run"), num_steps=1)
    train_slowly(0, 1, case)
    write = published._TensorRows.resolve_data
    monkeypatch.setattr(published._TensorRows, "resolve_data", lambda self, item: write(self, item) + 1)
    with pytest.warns(UserWarning, match="step 2 is not published: .* came back with other bytes than were written"):
        train_slowly(0, 1, replace(case, num_steps=2))
    assert names(tmp_path / "out") == ["1"]


OPERATIONS: dict[str, tuple[Any, str]] = {
    "mkdir": (os, "makedirs"),
    "open": (filesystem.FileSystem, "create_stream"),
    "fsync": (os, "fsync"),
    "rename": (filesystem.FileSystem, "rename"),
    "unlink": (os, "unlink"),
    "rmdir": (os, "rmdir"),
}


def publish_and_die(case: Case, out: str, at: int) -> None:
    """Count the operations in the publishing of step 3, and end before number `at`."""
    torch.set_num_threads(1)
    model, optimizer = ranks.start(case)
    zo.resume(model, optimizer)
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if threading.current_thread().name == "zero_offload-publish":
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for owner, name in OPERATIONS.values():
        setattr(owner, name, counted(getattr(owner, name)))
    ranks.steps(case, (0, 1), model, optimizer, range(2, 3), Outcome())
    wait_until_published(model)
    Path(out).write_text(str(count))
    os._exit(0)


@pytest.mark.parametrize("part", range(1, 5))
def test_a_kill_at_each_operation_leaves_a_whole_checkpoint(part: int, tmp_path: Path) -> None:
    case = replace(case_of(tmp_path / "out", tmp_path / "run", publish_keep=1), num_steps=2)
    train_slowly(0, 1, case)
    shutil.copytree(tmp_path / "out", tmp_path / "before")
    shutil.copytree(tmp_path / "run", tmp_path / "run before")

    def live(at: int) -> None:
        for name, kept in (("out", "before"), ("run", "run before")):
            shutil.rmtree(tmp_path / name)
            shutil.copytree(tmp_path / kept, tmp_path / name)
        process = fork_server().Process(target=publish_and_die, args=(case, str(tmp_path / "count"), at))
        process.start()
        process.join(LIMIT_S)
        assert process.exitcode == (0 if at == 0 else -signal.SIGKILL)

    live(0)
    assert names(tmp_path / "out") == ["3"]
    expected = {step: params_of(case, tmp_path, step) for step in ("2", "3")}
    last, seen = int((tmp_path / "count").read_text()), set()
    assert last > 12
    for at in (*range(part, last, 4), last):
        live(at)
        newest = names(tmp_path / "out")[-1]
        seen.add(newest)
        first, params = params_of(case, tmp_path, "")
        assert first == int(newest)
        assert all(torch.equal(params[name], expected[newest][1][name]) for name in params)
    assert seen == {"2", "3"}


def params_of(case: Case, tmp_path: Path, step: str) -> tuple[int, dict[str, torch.Tensor]]:
    """The first step and parameters of a start from the newest checkpoint; or from those of `step`."""
    place = tmp_path / ("before" if step == "2" else "out")
    settings = case.settings | {"nvme": tmp_path / "elsewhere", "publish": place, "publish_every": "1h"}
    first, out = train_slowly(0, 1, replace(case, settings=settings, num_steps=0))
    shutil.rmtree(tmp_path / "elsewhere")
    return first, out.params


def test_a_damaged_checkpoint_is_not_believed(tmp_path: Path) -> None:
    case = replace(case_of(tmp_path / "out", tmp_path / "run"), num_steps=2)
    train_slowly(0, 1, case)
    elsewhere = replace(case, settings=case.settings | {"nvme": tmp_path / "other"})
    newest = max((tmp_path / "out").iterdir())
    values = newest / "__0_0_0.distcp"
    kept = values.read_bytes()
    flip(values, kept.index(b"PK") + 2000)
    with pytest.raises(zo.IntegrityError, match=r"is not what was written, from its element|could not read"):
        train_slowly(0, 1, elsewhere)
    values.write_bytes(kept)
    text = newest / "__zero_offload_0.distcp"
    flip(text, text.read_bytes().index(b"param_steps"))
    with pytest.raises((zo.IntegrityError, zo.StorageError)):
        train_slowly(0, 1, elsewhere)
    shutil.rmtree(newest)
    assert train_slowly(0, 1, elsewhere)[0] == 1


def test_others_checkpoints_stay(tmp_path: Path) -> None:
    """Two runs publish to one place; a start that refuses, or begins anew, takes neither."""
    case = replace(case_of(tmp_path / "out", tmp_path / "run", publish_keep=1), num_steps=2)
    train_slowly(0, 1, case)
    anew = case.settings | {"nvme": tmp_path / "other", "existing": "discard"}
    assert train_slowly(0, 1, replace(case, settings=anew))[0] == 0
    assert names(tmp_path / "out") == ["2", "2"] and len({each.name[-8:] for each in (tmp_path / "out").iterdir()}) == 2
    refuses = case.settings | {"nvme": tmp_path / "third", "existing": "refuse"}
    with pytest.raises(zo.ConfigError, match="publish= holds a generation: step 2"):
        train_slowly(0, 1, replace(case, settings=refuses))


def test_a_place_that_is_newer_than_the_drives_is_told_of(tmp_path: Path) -> None:
    case = replace(case_of(tmp_path / "out", tmp_path / "run"), num_steps=1)
    train_slowly(0, 1, case)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    train_slowly(0, 1, replace(case, num_steps=3))
    old = replace(case, settings=case.settings | {"nvme": tmp_path / "old"})
    with pytest.warns(UserWarning, match=r"000003-step-3-\w+ is newer than generation 1 "):
        train_slowly(0, 1, old)


def test_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    place = f"memory://{tmp_path.name}"
    case = replace(case_of(place, tmp_path / "run", publish_keep=1), num_steps=2)
    train_slowly(0, 1, case)
    other = replace(case, settings=case.settings | {"nvme": tmp_path / "other"}, num_steps=2)
    first, out = train_slowly(0, 1, other)
    assert first == 2
    same = ranks.train(0, 1, replace(case, settings=case.settings | {"publish": None}))
    assert all(torch.equal(out.params[name], same.params[name]) for name in same.params)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(zo.ConfigError, match=r"fsspec is not installed. Type: pip install fsspec"):
        ranks.start(other)


def test_twins_on_two_machines_publish_what_each_has(pools: RankPools, tmp_path: Path) -> None:
    """Each reads its own drive; parameters are divided among them."""
    pool, places = pools.of(2), machines(tmp_path, *"ab")
    case = case_of(tmp_path / "out", stage=0)
    first = pool.succeed(train_slowly, replace(case, num_steps=2), places)
    assert names(tmp_path / "out") == ["1", "2"]
    assert {each.name.split("_")[2] for each in (tmp_path / "out").glob("*/__[01]_*")} == {"0", "1"}
    found = pool.succeed(train_slowly, replace(case, num_steps=2), machines(tmp_path / "new", *"ab"))
    assert [each.params.keys() for _, each in found] == [each.params.keys() for _, each in first]
    for (begin, after), (_, before) in zip(found, first, strict=True):
        assert begin == 2 and all(torch.equal(after.params[name], before.params[name]) for name in before.params)


@pytest.mark.parametrize("changes", [False, True])
def test_a_base_in_its_files_is_found_or_missed(changes: bool, tmp_path: Path) -> None:
    """It is not published. A model that lies otherwise than then could not be pointed at it."""
    given = {"existing": "resume", "publish": str(tmp_path / "out"), "publish_every": 1}
    model, optimizer = opened(write_base(tmp_path / "base"), settings(tmp_path / "run", **given))
    if changes:
        del model.blocks[0]
        model.scales = nn.ParameterList(list(model.scales)[1:])
        zo.offload(model)
        optimizer = zo.AdamW(model.scales, lr=1e-2)
    base_steps(model, optimizer, 0, 1)
    wait_until_published(model)
    expected = ranks.read_params(model)
    zo.close(model)
    with zo.deferred_init(values="skip"):
        model = Adapted()
    if changes:
        del model.blocks[0]
        model.scales = nn.ParameterList(list(model.scales)[1:])
        with pytest.raises(zo.IntegrityError, match="rest in files of others are not published"):
            zo.offload(model, settings(tmp_path / "new", **given))
        return
    zo.offload(model, settings(tmp_path / "new", **given))
    found = ranks.read_params(model)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    zo.close(model)
