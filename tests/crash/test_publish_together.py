"""Models of one commit that publish: a start without drives has all of them at one step, or says what it lacks."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem

import zero_offload as zo
from tests.crash.test_publish import OPERATIONS, names, wait_until_published
from tests.helpers.disk import runtime
from tests.helpers.models import build
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import RankPools
from tests.helpers.two_models import Two, plain
from zero_offload.checkpoint import published

LIMIT_S = 240
MODELS = ("student", "teacher")


def wait(two: Two) -> None:
    for model in (two.student, two.teacher):
        wait_until_published(model)


def open_two(tmp_path: Path, nvme: str = "run", out: str = "out", precision: str = "fp32", **settings: Any) -> Two:
    given = {"publish_every": 1, "tier": "nvme"} | settings
    return Two(tmp_path / nvme, precision, given.pop("tier"), out=tmp_path / out, **given)


def train(two: Two, num: int) -> tuple[int, dict[str, Tensor]]:
    """Go on until so many iterations are done, each of them published; where it began, and the masters."""
    try:
        begin = two.resume()
        for number in range(begin, num):
            two.iterate(number)
            two.commit(number + 1)
            wait(two)
        return begin, two.masters()
    finally:
        two.close()


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def steps(out: Path) -> list[list[str]]:
    return [names(out / each) for each in MODELS]


@in_turn(precision=["fp32", "bf16"], tier=["nvme", "cpu"], keep=[2, 1])
def test_a_start_without_drives_goes_on_with_both(precision: str, tier: str, keep: int, tmp_path: Path) -> None:
    train(open_two(tmp_path, precision=precision, tier=tier, publish_keep=keep), 3)
    assert steps(tmp_path / "out") == [["2", "3"][2 - keep :]] * 2
    begin, found = train(open_two(tmp_path, "new", precision=precision, tier=tier), 4)
    assert begin == 3 and equal(found, plain(4, precision))
    assert steps(tmp_path / "out") == [["3", "4"]] * 2


def _on_ranks(rank: int, size: int, tmp_path: Path, nvme: str, num: int) -> tuple[int, dict[str, Tensor]]:
    """All ranks have the same rows, so that the mean of their gradients is each one's."""
    return train(open_two(tmp_path, nvme), num)


def test_other_ranks_go_on_with_both(pools: RankPools, tmp_path: Path) -> None:
    pools.of(2).succeed(_on_ranks, tmp_path, "run", 2)
    assert steps(tmp_path / "out") == [["1", "2"]] * 2
    begin, found = train(open_two(tmp_path, "new"), 3)
    assert begin == 2 and equal(found, plain(3, "fp32"))


def _pair(where: Path, nvme: str) -> list[tuple[nn.Module, zo.AdamW]]:
    """A generator and a critic."""
    pairs = []
    for name in ("generator", "critic"):
        model = build(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
        places = {"nvme": where / nvme / name, "publish": where / f"out {nvme[0]}" / name}
        tiers = {"params": "nvme", "optimizer": "nvme", "precision": "fp32", "existing": "resume"}
        zo.offload(model, zo.OffloadConfig(**places, **tiers, publish_every=1))
        pairs.append((model, zo.AdamW(model.parameters(), lr=1e-2)))
    return pairs


def _adversarial(where: Path, nvme: str, num: int) -> tuple[list[int], list[Tensor]]:
    """Steps made here; parameters and states of both. The critic makes two steps in an iteration."""
    generator, critic = pairs = _pair(where, nvme)
    made = []
    for step in zo.steps(*generator, num, also=[critic]):
        for model, _ in pairs:
            wait_until_published(model)
        made.append(step)
        for part, (model, optimizer) in enumerate((critic, critic, generator)):
            model(torch.full((2, 4), float(step + part))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [param.detach().clone() for model, _ in pairs for param in model.parameters()]
    found += [optimizer.state[param]["exp_avg"].clone() for model, optimizer in pairs for param in model.parameters()]
    for model, _ in pairs:
        zo.close(model)
    return made, found


def test_two_trained_models_in_a_loop_in_one_line(tmp_path: Path) -> None:
    _adversarial(tmp_path, "a", 3)
    published_steps = [names(tmp_path / "out a" / each) for each in ("generator", "critic")]
    assert published_steps[0] == published_steps[1] and published_steps[0][-1] in ("2", "3")
    made, found = _adversarial(tmp_path, "a again", 5)
    _, whole = _adversarial(tmp_path, "whole", 5)
    assert made == list(range(int(published_steps[0][-1]) + 1, 6))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, whole, strict=True))


def snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> int:
    """Make and publish iteration `number`; a copy of what is published as it is before each operation, which is what a
    kill would leave."""
    count, copying = 0, False

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count, copying
            if threading.current_thread().name == "zero_offload-publish" and not copying:
                count, copying = count + 1, True
                shutil.copytree(tmp_path / "out", tmp_path / f"at {count}")
                copying = False
            return real(*args, **kwargs)

        return call

    two = open_two(tmp_path, publish_keep=1)
    assert two.resume() == number - 1
    with monkeypatch.context() as patch:
        for owner, name in OPERATIONS.values():
            patch.setattr(owner, name, counted(getattr(owner, name)))
        two.iterate(number - 1)
        two.commit(number)
        wait(two)
    two.close()
    return count


def test_a_kill_at_each_operation_leaves_both_of_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(open_two(tmp_path, publish_keep=1), 1)
    count = snapshots(tmp_path, monkeypatch, 2)
    assert count > 24 and steps(tmp_path / "out") == [["2"], ["2"]]
    expected, begins = [plain(each, "fp32") for each in range(3)], list[int]()
    for at in range(1, count + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            two = open_two(tmp_path, f"drives {at}", f"at {at}")
        begins.append(two.resume())
        assert begins[-1] > 0 and equal(two.masters(), expected[begins[-1]]), f"{at} of {count}"
        two.close()
    assert begins == sorted(begins) and set(begins) == {1, 2}


# Missing parts


def test_a_checkpoint_without_the_others_does_not_count(tmp_path: Path) -> None:
    train(open_two(tmp_path), 3)
    newest = max((tmp_path / "out" / "teacher").iterdir())
    (newest / ".metadata").rename(tmp_path / "lost")
    with pytest.warns(UserWarning, match=rf"student/000003-step-3-\w+ was published together with {newest}, which"):
        two = open_two(tmp_path, "new")
    assert two.resume() == 2 and equal(two.masters(), plain(2, "fp32"))
    two.close()
    shutil.rmtree(tmp_path / "out" / "teacher")
    with pytest.raises(zo.CheckpointError, match=rf"published together with {newest}, which is not whole.*Put it back"):
        open_two(tmp_path, "third")
    anew = open_two(tmp_path, "fourth", existing="discard")
    assert anew.resume() == 0
    anew.close()


def test_a_model_without_its_drive_needs_the_other_from_there(tmp_path: Path) -> None:
    train(open_two(tmp_path, publish_every=2), 3)
    assert steps(tmp_path / "out") == [["2"], ["2"]]
    shutil.rmtree(tmp_path / "run" / "teacher")
    two = open_two(tmp_path)
    with pytest.raises(zo.CheckpointError, match=r"step 3.*step 2.*not committed together.*000001-step-2.*empty dir"):
        two.resume()
    two.close()
    begin, found = train(open_two(tmp_path, "empty"), 3)
    assert begin == 2 and equal(found, plain(3, "fp32"))


def test_places_move_together(tmp_path: Path) -> None:
    train(open_two(tmp_path), 2)
    (tmp_path / "out").rename(tmp_path / "moved")
    begin, found = train(open_two(tmp_path, "new", "moved"), 2)
    assert begin == 2 and equal(found, plain(2, "fp32"))


def test_each_model_has_a_place_of_its_own(tmp_path: Path) -> None:
    two = open_two(tmp_path)
    place = tmp_path / "out" / "teacher"
    with pytest.raises(zo.ConfigError, match=rf"publish={place} is where another model .* of its own, as publish="):
        zo.offload(torch.nn.Linear(4, 4), zo.OffloadConfig(nvme=tmp_path / "other", publish=place))
    silent = zo.offload(torch.nn.Linear(4, 4).requires_grad_(False), zo.OffloadConfig(nvme=tmp_path / "silent"))
    two.iterate(0)
    with pytest.raises(zo.ConfigError, match=r"student has publish= and Linear in .*silent has none.*or none of them"):
        zo.commit(two.student, two.optimizer, also=[silent])
    zo.close(silent)
    two.commit(1)
    two.close()


def test_a_full_place_of_one_publishes_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(open_two(tmp_path), 1)
    create = filesystem.FileSystem.create_stream

    @contextmanager
    def full(self: Any, path: Any, mode: str) -> Iterator[Any]:
        if mode == "wb" and "teacher" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with create(self, path, mode) as stream:
            yield stream

    with monkeypatch.context() as patch:
        patch.setattr(filesystem.FileSystem, "create_stream", full)
        with pytest.warns(UserWarning, match="step 2 is not published: .*out/teacher.*No space left"):
            train(open_two(tmp_path), 2)
    assert [len(list((tmp_path / "out" / each).iterdir())) for each in MODELS] == [1, 1]
    assert train(open_two(tmp_path), 3)[0] == 2
    assert steps(tmp_path / "out") == [["1", "3"]] * 2


# Training meanwhile


@pytest.fixture
def going(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A place that takes bytes only once this is set."""
    event, read = threading.Event(), published._TensorRows.resolve_data

    def slow(self: Any, item: Any) -> Tensor:
        assert event.wait(LIMIT_S)
        return read(self, item)

    monkeypatch.setattr(published._TensorRows, "resolve_data", slow)
    yield event
    event.set()


@pytest.mark.parametrize("order", [1, -1])
def test_commits_of_both_wait_and_training_does_not(order: int, going: threading.Event, tmp_path: Path) -> None:
    two = open_two(tmp_path)
    for number in range(6):
        two.iterate(number)
        two.commit(number + 1)
        if number == 0:
            runtime(two.student).drain()
            runtime(two.teacher).drain()
    keepers = [runtime(each).keeper for each in (two.student, two.teacher)]
    assert all(each is not None and each._number == 1 and each.publisher.is_busy for each in keepers)  # type: ignore[union-attr]
    going.set()
    # Whichever is closed first waits for what is read of both. The last step is a generation of both then.
    for model in (two.student, two.teacher)[::order]:
        zo.close(model)
    assert steps(tmp_path / "out")[0][0] == "1" and steps(tmp_path / "out")[0] == steps(tmp_path / "out")[1]
    begin, found = train(open_two(tmp_path, "new"), 6)
    assert begin in (1, 6) and equal(found, plain(6, "fp32"))
