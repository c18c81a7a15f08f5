"""`zo.commit(also=)`: a student and its teacher are one generation, and a kill anywhere leaves both or none of it."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.disk import drain, engine_of, runtime
from tests.helpers.fresh import run_script
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import Failure, RankPool, read_params
from tests.helpers.two_models import Two, plain, run
from zero_offload.checkpoint import joint
from zero_offload.hardware.abi import Fault

NUM = 4
SCRIPT = """
import sys
from pathlib import Path
from tests.helpers.ranks import Failure, RankPool, read_params
from tests.helpers.two_models import die_at, run
where, precision, tier, durability, every, number = sys.argv[1:]
count = die_at(int(number))
run(Path(where), 4, precision, tier, durability=durability, commit_every=int(every))
print(count())
"""


def _dies(where: Path, *case: object) -> int:
    """How many calls changed files; 0 where it died."""
    ended = run_script(SCRIPT, str(where), *map(str, case), environment=os.environ)
    assert ended.returncode in (0, 9), ended.stderr
    return int(ended.stdout) if ended.returncode == 0 else 0


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _kill_at(places: range, where: Path, precision: str, tier: str, durability: str, every: int) -> None:
    total = _dies(where / "whole", precision, tier, durability, every, 0)
    expected = plain(NUM, precision)
    begins = set()
    for number in places or range(1, total + 1):
        if number > total:
            break
        path = where / str(number)
        assert _dies(path, precision, tier, durability, every, number) == 0
        begin, found = run(path, NUM, precision, tier, durability=durability, commit_every=every)
        begins.add(begin)
        assert _equal(found, expected), f"killed at {number} of {total}, resumed from {begin}"
        shutil.rmtree(path)
    assert len(begins) > 1 or len(places) == 1


CASES = {"precision": ["fp32", "bf16"], "tier": ["nvme", "cpu"], "durability": ["process", "commit"], "every": [1, 2]}


@in_turn(**CASES)
def test_a_kill_leaves_both_or_none(precision: str, tier: str, durability: str, every: int, tmp_path: Path) -> None:
    _kill_at(range(30, 200, 53), tmp_path, precision, tier, durability, every)


@pytest.mark.full
@in_turn(**CASES)
def test_a_kill_at_every_call_leaves_both_or_none(
    precision: str, tier: str, durability: str, every: int, tmp_path: Path
) -> None:
    _kill_at(range(0), tmp_path, precision, tier, durability, every)


def _snapshot_between(monkeypatch: pytest.MonkeyPatch, where: Path, copy: Path) -> None:
    """From now on a commit leaves a copy of the directories as they are between the teacher's and the student's."""
    before = joint._Lead.before_point

    def and_copy(self: Any) -> dict[str, Any]:
        found = before(self)
        if type(self) is joint._Lead:
            shutil.copytree(where, copy)
        return found

    monkeypatch.setattr(joint._Lead, "before_point", and_copy)


def _killed_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int = 2) -> Path:
    """Directories of a run that was killed in its last commit, where the teacher has its generation already."""
    where, copy = tmp_path / "run", tmp_path / "copy"
    two = Two(where, "fp32", "nvme")
    for number in range(num):
        two.iterate(number)
        if number == num - 1:
            drain(two.student)
            drain(two.teacher)
            _snapshot_between(monkeypatch, where, copy)
        two.commit(number + 1)
    two.close()
    monkeypatch.undo()
    return copy


@pytest.mark.parametrize("num", [1, 2])
def test_a_generation_between_the_two_counts_for_neither(
    num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path that is recorded leads to the run that went on: the models beside each other are those that count."""
    copy = _killed_between(tmp_path, monkeypatch, num)
    begin, found = run(copy, NUM, "fp32", "nvme")
    assert begin == num - 1
    assert _equal(found, plain(NUM, "fp32"))


def test_a_number_that_was_given_again_is_another_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = _killed_between(tmp_path, monkeypatch)
    alone = Two(copy, "fp32", "nvme", only="student", generation=1)
    assert (found := zo.resume(alone.student, alone.optimizer)) is not None and found.step == 1
    alone.iterate(1)
    zo.commit(alone.student, alone.optimizer)
    zo.close(alone.student)
    two = Two(copy, "fp32", "nvme")
    assert (keeper := runtime(two.teacher).keeper) is not None and keeper.found is not None
    assert keeper.found.number == 1
    with pytest.raises(
        zo.CheckpointError, match=r"generation 2 \(step 2.*generation 1 \(step 1.*not committed together"
    ):
        two.resume()
    two.close()


def test_models_of_one_commit_do_not_go_on_alone(tmp_path: Path) -> None:
    run(tmp_path, 2, "fp32", "nvme")
    for only, other in (("student", "teacher"), ("teacher", "student")):
        two = Two(tmp_path, "fp32", "nvme", only=only)
        model, optimizer = (two.student, two.optimizer) if only == "student" else (two.teacher, None)
        with pytest.raises(zo.CheckpointError, match=rf"{tmp_path}/{only} goes.*{tmp_path}/{other}.*also=\[") as caught:
            zo.resume(model, optimizer)
        assert "generation=2" in str(caught.value)
        zo.close(model)
        two = Two(tmp_path, "fp32", "nvme", only=only, generation=2)
        model, optimizer = (two.student, two.optimizer) if only == "student" else (two.teacher, None)
        assert (found := zo.resume(model, optimizer)) is not None and found.step == 2
        zo.close(model)
    assert run(tmp_path, 3, "fp32", "nvme")[0] == 2


def test_models_of_two_commits_raise_and_name_both(tmp_path: Path) -> None:
    run(tmp_path, 2, "fp32", "nvme")
    shutil.copytree(tmp_path / "teacher", tmp_path / "before")
    run(tmp_path, 4, "fp32", "nvme")
    shutil.rmtree(tmp_path / "teacher")
    (tmp_path / "before").rename(tmp_path / "teacher")
    two = Two(tmp_path, "fp32", "nvme")
    with pytest.raises(zo.CheckpointError, match=rf"{tmp_path}/student.*step 4.*{tmp_path}/teacher.*step 2"):
        two.resume()
    two.close()


def test_going_back_takes_all_models_along(tmp_path: Path) -> None:
    run(tmp_path, 3, "fp32", "nvme")
    two = Two(tmp_path, "fp32", "nvme", generation=2)
    assert two.resume() == 2
    two.close()
    begin, found = run(tmp_path, NUM, "fp32", "nvme")
    assert begin == 2 and _equal(found, plain(NUM, "fp32"))


@pytest.mark.parametrize("first", ["student", "teacher"])
def test_the_last_step_is_kept_by_whichever_is_closed_first(first: str, tmp_path: Path) -> None:
    two = Two(tmp_path, "fp32", "cpu", commit_every=10)
    for number in range(2):
        two.iterate(number)
        two.commit(number + 1)
    expected = two.masters()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (first, "student", "teacher"):
            zo.close(getattr(two, each))
    again = Two(tmp_path, "fp32", "cpu")
    assert again.resume() == 2
    assert _equal(again.masters(), expected)
    again.close()


def test_a_model_that_went_on_leaves_the_other_uncommitted(tmp_path: Path) -> None:
    two = Two(tmp_path, "fp32", "cpu", commit_every=10)
    two.iterate(0)
    two.commit(1)
    zo.commit(two.teacher)
    with pytest.warns(UserWarning, match=r"step 1 of Sequential is not made a generation.*all or none"):
        two.close()
    two = Two(tmp_path, "fp32", "cpu")
    with pytest.raises(zo.CheckpointError, match=r"student goes on from its begin.*teacher goes on from generation 1"):
        two.resume()
    two.close()


def test_a_teacher_may_come_later(tmp_path: Path) -> None:
    alone = Two(tmp_path, "fp32", "nvme", only="student")
    alone.iterate(0)
    zo.commit(alone.student, alone.optimizer, {"next": 1})
    zo.close(alone.student)
    two = Two(tmp_path, "fp32", "nvme")
    with pytest.warns(UserWarning, match="begins anew, with the program's own values"):
        assert two.resume() == 1
    two.iterate(1)
    two.commit(2)
    two.close()
    assert run(tmp_path, 3, "fp32", "nvme")[0] == 2


def test_refusals(tmp_path: Path) -> None:
    two = Two(tmp_path, "fp32", "nvme")
    commit: Callable[..., None] = lambda **also: zo.commit(two.student, two.optimizer, **also)  # noqa: E731
    homeless = zo.offload(torch.nn.Linear(4, 4).requires_grad_(False), zo.OffloadConfig(params="cpu"))
    for also, words in (
        (two.teacher, "takes a list of models"),
        ([two.student], "twice"),
        ([homeless], "makes none.*directory of its own"),
        ([torch.nn.Linear(4, 4)], "was offloaded"),
    ):
        with pytest.raises(zo.ConfigError, match=words):
            commit(also=also)
    with pytest.raises(zo.ConfigError, match=r"\(model, optimizer\)"):
        zo.commit(two.teacher, also=[two.student])
    two.close()
    zo.close(homeless)
    lasting = Two(tmp_path / "lasting", "fp32", "nvme", durability="commit")
    brief = Two(tmp_path / "brief", "fp32", "nvme")
    with pytest.raises(zo.ConfigError, match="power loss"):
        zo.commit(lasting.student, lasting.optimizer, also=[brief.teacher])
    brief.close()
    lasting.close()


def test_two_trained_models(tmp_path: Path) -> None:
    """Of the second one hyperparameters and states are kept too, and its steps count as the first one's."""

    def open_both(where: Path) -> tuple[list[Any], int]:
        one, two = Two(where / "1", "fp32", "nvme", only="student"), Two(where / "2", "fp32", "cpu", only="student")
        pairs = [(each.student, each.optimizer) for each in (one, two)]
        found = zo.resume(*pairs[0], also=[pairs[1]])
        return [one, two], 0 if found is None else found.step

    def train(both: list[Any], numbers: range) -> None:
        one, two = both
        for number in numbers:
            one.iterate(number)
            for part in range(2):
                two.optimizer.param_groups[0]["lr"] = 1e-2 / (number + part + 1)
                two.iterate(10 * number + part)
            zo.commit(one.student, one.optimizer, also=[(two.student, two.optimizer)])

    whole, _ = open_both(tmp_path / "whole")
    train(whole, range(4))
    both, begin = open_both(tmp_path / "parts")
    assert begin == 0
    train(both, range(2))
    for each in both:
        zo.close(each.student)
    both, begin = open_both(tmp_path / "parts")
    assert begin == 2 and both[1].optimizer.param_groups[0]["lr"] == 1e-2 / 3
    assert zo.stats(both[1].student).step == 2
    train(both, range(2, 4))
    for mine, theirs in zip(both, whole, strict=True):
        assert _equal(mine.masters(), theirs.masters())
        zo.close(mine.student)
        zo.close(theirs.student)


def _on_ranks(rank: int, world_size: int, where: Path, num: int, stage: int, tier: str, failing: int = -1) -> Any:
    two = Two(where, "fp32", tier, stage=stage)
    begin = two.resume()
    for number in range(begin, num):
        two.step(number)
        # Ranks write whole models alone.
        state = {name: torch.full(param.shape, number + 0.5) for name, param in two.teacher.named_parameters()}
        two.teacher.load_state_dict(state)
        drain(two.student)
        if number == failing and rank == 1:
            engine_of(two.teacher).inject_fault(Fault.WRITE_EIO)
        two.commit(number + 1)
    found = [read_params(model) for model in (two.student, two.teacher)]
    two.close()
    return begin, found


@pytest.mark.parametrize("stage", [3, full(0), full(2)])
def test_two_ranks_commit_both_or_none(stage: int, pool: RankPool, tmp_path: Path) -> None:
    tier = "cpu"  # a commit writes then
    expected = pool.succeed(_on_ranks, tmp_path / "whole", 4, stage, tier)
    pool.succeed(_on_ranks, tmp_path / "parts", 2, stage, tier)
    failed = pool.call(_on_ranks, tmp_path / "parts", 4, stage, tier, 2)
    assert all(isinstance(each, Failure) and "teacher" in str(each) for each in failed), failed
    pool.close()
    pool.renew()
    again = pool.succeed(_on_ranks, tmp_path / "parts", 4, stage, tier)
    for (begin, found), (_, wanted) in zip(again, expected, strict=True):
        assert begin == 2
        assert all(_equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


class Apart:
    """Two models that are committed each by itself; the second makes `per` steps for one of the first."""

    def __init__(self, where: Path, existing: str, per: int = 1, **settings: Any) -> None:
        self.where, self.per = where, per
        self.pairs = []
        for name in ("first", "second"):
            tiers = {"params": "nvme", "optimizer": "nvme", "existing": existing} | settings.get(name, {})
            model = zo.offload(torch.nn.Linear(4, 4), zo.OffloadConfig(nvme=where / name, **tiers))
            self.pairs.append((model, zo.AdamW(model.parameters())))

    def iterate(self, copy_to: Path | None = None) -> None:
        """`copy_to`: a copy of the directories as a kill between the two commits would leave them."""
        for number, (model, optimizer) in enumerate(self.pairs):
            for _ in range(self.per if number else 1):
                model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            zo.commit(model, optimizer)
            drain(model)
            if copy_to is not None and number == 0:
                shutil.copytree(self.where, copy_to)

    def resume(self) -> list[int]:
        found = [zo.resume(*pair) for pair in self.pairs]
        return [0 if each is None else each.step for each in found]

    def close(self) -> None:
        for model, _ in self.pairs:
            zo.close(model)


@pytest.mark.parametrize(("per", "raises"), [(1, True), (3, False)])
def test_models_that_are_committed_apart(per: int, raises: bool, tmp_path: Path) -> None:
    """A kill between two commits is seen where the models keep pace."""
    both = Apart(tmp_path / "run", "refuse", per)
    for number in range(3):
        both.iterate(tmp_path / "torn" if number == 2 else None)
    both.close()
    whole = Apart(tmp_path / "run", "resume", per)
    assert whole.resume() == [3, 3 * per]
    whole.iterate()
    whole.close()
    torn = Apart(tmp_path / "torn", "resume", per)
    if raises:
        words = r"Linear in .*torn/first goes on from .*step 3.*Linear in .*torn/second goes on from .*step 2"
        with pytest.raises(zo.CheckpointError, match=words + r".*also=\[...\].*generation=3\) for Linear"):
            torn.resume()
        torn.close()
        torn = Apart(tmp_path / "torn", "resume", per, first={"generation": 3})
    assert torn.resume() == [3, 2 * per]
    torn.close()


@pytest.mark.parametrize("first", ["newer", "older"])
def test_a_model_behind_what_another_has_seen_raises(first: str, tmp_path: Path) -> None:
    both = Apart(tmp_path / "run", "refuse", per=3)
    for number in range(4):
        both.iterate()
        if number == 1:
            shutil.copytree(tmp_path / "run", tmp_path / "old")
    both.close()
    shutil.copytree(tmp_path / "run" / "first", tmp_path / "mixed" / "first")
    shutil.copytree(tmp_path / "old" / "second", tmp_path / "mixed" / "second")
    if first == "older":
        shutil.rmtree(tmp_path / "mixed")
        shutil.copytree(tmp_path / "old" / "first", tmp_path / "mixed" / "first")
        shutil.copytree(tmp_path / "run" / "second", tmp_path / "mixed" / "second")
    mixed = Apart(tmp_path / "mixed", "resume", per=3)
    with pytest.raises(zo.CheckpointError, match="a part of an iteration would be made twice or left out"):
        mixed.resume()
    mixed.close()


def test_models_that_stand_still_are_not_compared(tmp_path: Path) -> None:
    both = Apart(tmp_path, "refuse")
    both.pairs, stopped = both.pairs[:1], both.pairs[1]
    zo.commit(*stopped)
    for _ in range(4):
        both.iterate()
    both.pairs.append(stopped)
    both.close()
    again = Apart(tmp_path, "resume")
    assert again.resume() == [4, 0]
    again.close()


class Critic:
    """A critic that makes several steps in an iteration, kept with its actor by one commit."""

    def __init__(self, where: Path) -> None:
        self.pairs = []
        for name in ("actor", "critic"):
            config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=where / name, existing="resume")
            model = zo.offload(torch.nn.Linear(4, 4), config)
            self.pairs.append((model, zo.AdamW(model.parameters())))

    def resume(self) -> int:
        found = zo.resume(*self.pairs[0], also=[self.pairs[1]])
        return 0 if found is None else found.step

    def step(self, which: int) -> None:
        model, optimizer = self.pairs[which]
        model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def close(self, order: int = 1) -> None:
        for model, _ in self.pairs[::order]:
            zo.close(model)


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("order", [1, -1])
def test_steps_before_the_first_commit_make_no_generation(num_before: int, order: int, tmp_path: Path) -> None:
    """A process that ends in its first iteration leaves the generations of the last commit."""
    models = Critic(tmp_path)
    assert models.resume() == 0
    for _ in range(num_before):
        for which in (1, 1, 1, 0):
            models.step(which)
        zo.commit(*models.pairs[0], also=[models.pairs[1]])
    models.close()
    for _ in range(2):
        models = Critic(tmp_path)
        assert models.resume() == num_before
        for which in (1, 1, 0, 1, 1):
            models.step(which)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            models.close(order)
