"""Drives of each machine: ranks keep their files where they run, and every commit is whole on all machines or on none.

Machines are names that ranks give themselves, with a directory each.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import Case, Failure, Outcome, RankPool, RankPools, gloo_group
from tests.helpers.trainer import fork_server
from zero_offload.checkpoint import generation, homes
from zero_offload.checkpoint.file_list import FileList
from zero_offload.checkpoint.generation import GenerationKeeper
from zero_offload.cli.main import main
from zero_offload.storage.files.directory import RunDirectory

ON_DISK = {"params": "nvme", "optimizer": "nvme", "precision": "fp32", "existing": "resume"}
STEPS, LIMIT_S = 5, 240


@contextmanager
def on_machine(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(homes, "machine_name", lambda: name)
        patch.setattr(socket, "gethostname", lambda: name)
        yield


def train_at(rank: int, world_size: int, case: Case, places: Sequence[Path]) -> Outcome:
    """`places`: the directory of each rank, whose name is its machine's."""
    with on_machine(places[rank].name):
        return ranks.train(rank, world_size, replace(case, settings=case.settings | {"nvme": places[rank]}))


def machines(folder: Path, *names: str) -> list[Path]:
    return [folder / name for name in names]


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(4)


@in_turn(stage=[3, 1, 2, 0], durability=["process", "commit"], where=["aabb", "abab", "abcd"])
def test_drives_of_each_machine_give_the_numbers_of_one_directory(
    stage: int, durability: str, where: str, pool: RankPool, tmp_path: Path
) -> None:
    case = Case(ON_DISK | {"stage": stage, "durability": durability}, num_steps=STEPS, max_norm=0.5)
    whole = pool.succeed(train_at, case, machines(tmp_path, *"1111"))
    places = machines(tmp_path, *where)
    pool.succeed(train_at, replace(case, num_steps=3), places)
    for rank, place in enumerate(places):
        assert (place / f"rank{rank}.swap").is_file() == (place / f"rank{rank}-1.json").is_file() is True
    resumed = pool.succeed(train_at, case, places)
    for found, expected in zip(resumed, whole, strict=True):
        assert found == Outcome(expected.losses[3:], expected.norms[3:], expected.params)
    scratch = replace(case, settings=case.settings | {"durability": "scratch"})
    assert pool.succeed(train_at, scratch, machines(tmp_path / "scratch", *where)) == whole


def test_machines_that_see_one_directory_share_it(pools: RankPools, tmp_path: Path) -> None:
    case = Case(ON_DISK, num_steps=2)
    places = machines(tmp_path, "a", "b")
    places[0].mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "name", property(lambda self: str(self).rpartition("/")[2]))
        pools.of(2).succeed(train_on_shared, case, places[0])
    assert {"rank0.swap", "rank1.swap"} <= {each.name for each in places[0].iterdir()}


def train_on_shared(rank: int, world_size: int, case: Case, place: Path) -> Outcome:
    with on_machine(f"machine {rank}"):
        return ranks.train(rank, world_size, replace(case, settings=case.settings | {"nvme": place}))


# Killed within a commit


def _kill() -> None:
    time.sleep(0.5)  # meanwhile the other ranks do their part
    os.kill(os.getpid(), signal.SIGKILL)


def _strike(where: str, number: int) -> None:
    """Kill this process at a place of the commit of generation `number`."""
    if where == "prepare":
        _before(GenerationKeeper, "_rank_payload", lambda keeper, *_: keeper._number + 1 == number)
    elif where in ("decide", "decided", "student"):
        write = generation.write_manifest

        def struck(home: Any, name: str, payload: dict[str, Any], *rest: Any) -> str:
            is_it = name.startswith("generation-") and payload["number"] == number
            if is_it and (where == "decide" or home.path.name == where):
                _kill()
            digest = write(home, name, payload, *rest)
            if is_it and where == "decided":
                _kill()
            return digest

        generation.write_manifest = struck  # type: ignore[attr-defined]
    elif where == "noted":
        calls = iter(range(1, 100))
        _before(FileList, "note_committed", lambda *_: next(calls) == number)


def _before(owner: object, name: str, applies: Callable[..., bool]) -> None:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if applies(*args):
            _kill()
        return original(*args, **kwargs)

    setattr(owner, name, call)


def run_rank(rank: int, size: int, case: Case, places: Sequence[Path], out: str, strike: tuple[int, str, int]) -> None:
    torch.set_num_threads(1)
    victim, where, number = strike
    if rank == victim:
        _strike(where, number)
    with on_machine(places[rank].name), gloo_group(rank, size, f"{out}/store{victim}{where}{number}"):
        case = replace(case, settings=case.settings | {"nvme": places[rank]})
        model, optimizer = ranks.start(case)
        resumed = zo.resume(model, optimizer)
        first = 0 if resumed is None else resumed.extra["next"]
        done = Outcome()
        ranks.steps(case, (rank, size), model, optimizer, range(first, case.num_steps), done)
        torch.save((first, done.losses, ranks.read_params(model)), f"{out}/ended{rank}.pt")
        zo.close(model)


def run_pair(rank: int, size: int, case: Case, places: Sequence[Path], out: str, strike: tuple[int, str, int]) -> None:
    """A student and an average of it, committed together."""
    torch.set_num_threads(1)
    victim, where, number = strike
    with on_machine(places[rank].name), gloo_group(rank, size, f"{out}/store{victim}{where}{number}"):
        case = replace(case, settings=case.settings | {"nvme": places[rank] / "student"})
        model, optimizer = ranks.start(case)
        average = ranks.make_model(case).requires_grad_(False)
        zo.offload(average, zo.OffloadConfig(**case.settings | {"nvme": places[rank] / "average"}))
        resumed = zo.resume(model, optimizer, also=[average])
        first = 0 if resumed is None else resumed.step
        if rank == victim:
            _strike(where, number)
        for step in range(first, case.num_steps):
            model(ranks.rows_of(step, rank, size)).backward()
            optimizer.step()
            optimizer.zero_grad()
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param.detach(), 0.25)
            zo.commit(model, optimizer, also=[average])
        torch.save((first, [], ranks.read_params(model) | ranks.read_params(average)), f"{out}/ended{rank}.pt")
        zo.close(average)
        zo.close(model)


def run(
    case: Case, places: Sequence[Path], out: Path, strike: tuple[int, str, int] = (-1, "", 0), job: Any = run_rank
) -> list[Any]:
    """First step, losses and parameters of each rank; None where it did not come to its end."""
    # A store that another start has left has its addresses.
    for left in (*out.glob("ended*"), *out.glob("store*")):
        left.unlink()
    args = [(rank, len(places), case, places, str(out), strike) for rank in range(len(places))]
    processes = [fork_server().Process(target=job, args=each) for each in args]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        assert not process.is_alive(), "a rank hangs"
    found = [out / f"ended{rank}.pt" for rank in range(len(places))]
    return [torch.load(path) if path.exists() else None for path in found]


CASE = Case(ON_DISK | {"stage": 3}, num_steps=STEPS, max_norm=1.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    out = tmp_path_factory.mktemp("whole")
    return run(CASE, machines(out, "a", "b"), out)


def check_resumed(found: list[Any], whole: list[Any], first: int) -> None:
    for (begin, losses, params), (_, all_losses, all_params) in zip(found, whole, strict=True):
        assert begin == first and losses == all_losses[first:]
        assert all(torch.equal(params[name], all_params[name]) for name in params)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("where", "first"), [("prepare", 2), ("decide", 2), ("decided", None), ("noted", 3)], ids=lambda each: str(each)
)
def test_a_kill_within_a_commit_leaves_one_generation_on_all_machines(
    where: str, first: int | None, victim: int, whole: list[Any], tmp_path: Path
) -> None:
    places = machines(tmp_path, "a", "b")
    assert run(CASE, places, tmp_path, (victim, where, 3)) == [None, None]
    found = run(CASE, places, tmp_path)
    # With both written, the generation is there though no rank has heard of it.
    check_resumed(found, whole, found[0][0] if first is None else first)
    assert found[0][0] in (2, 3)


def test_halves_of_two_commits_with_one_number_are_not_joined(whole: list[Any], tmp_path: Path) -> None:
    """The first machine writes generation 3 and the second does not; then the second does, and the first does not. A
    resume deletes such halves; here the first machine's comes back, as from a snapshot of its drive."""
    places = machines(tmp_path, "a", "b")
    run(CASE, places, tmp_path, (1, "decide", 3))
    assert [max(_numbers(place)) for place in places] == [3, 2]
    shutil.copytree(places[0], tmp_path / "snapshot")
    # Clipped otherwise, so another generation 3.
    run(replace(CASE, max_norm=0.1), places, tmp_path, (0, "decide", 3))
    assert [max(_numbers(place)) for place in places] == [2, 3]
    shutil.rmtree(places[0])
    shutil.move(tmp_path / "snapshot", places[0])
    assert [max(_numbers(place)) for place in places] == [3, 3]
    check_resumed(run(CASE, places, tmp_path), whole, 2)


def _numbers(place: Path) -> list[int]:
    return [json.loads(path.read_text())["payload"]["number"] for path in place.glob("generation-*.json")]


def test_the_first_commit_may_be_cut(whole: list[Any], tmp_path: Path) -> None:
    places = machines(tmp_path, "a", "b")
    run(CASE, places, tmp_path, (1, "decide", 1))
    assert [_numbers(place) for place in places] == [[1], []]
    check_resumed(run(CASE, places, tmp_path), whole, 0)


def test_two_models_have_one_step_on_all_machines(tmp_path: Path) -> None:
    """The first machine has the commit point of both models, and the second ends before it has."""
    case = replace(CASE, num_steps=3)
    whole = run(case, machines(tmp_path / "whole", "a", "b"), tmp_path, job=run_pair)
    places = machines(tmp_path, "a", "b")
    assert run(case, places, tmp_path, (1, "student", 2), job=run_pair) == [None, None]
    assert [max(_numbers(place / "average")) for place in places] == [2, 2]
    assert [max(_numbers(place / "student")) for place in places] == [2, 1]
    check_resumed(run(case, places, tmp_path, job=run_pair), whole, 1)


# Errors


def fails(pool: RankPool, case: Case, places: list[Path], kind: str, *words: str) -> None:
    for found in pool.call(train_at, case, places):
        assert isinstance(found, Failure) and found.kind == kind, found
        assert all(word in found.message for word in words), found.message


def discard_on_second(rank: int, world_size: int, case: Case, places: Sequence[Path]) -> Outcome:
    settings = case.settings | {"existing": "discard" if rank else "resume"}
    return train_at(rank, world_size, replace(case, settings=settings), places)


def test_a_machine_without_its_part_is_named(pools: RankPools, tmp_path: Path) -> None:
    pool, places = pools.of(2), machines(tmp_path, "a", "b")
    case = replace(CASE, num_steps=2)
    expected = pool.succeed(train_at, case, places)
    # A torn manifest may have been decided: it is not passed over.
    newest = places[1] / "generation-0.json"
    kept = newest.read_bytes()
    newest.write_bytes(kept[:-20])
    before = {path: path.read_bytes() for place in places for path in place.glob("*.json")}
    fails(pool, case, places, "IntegrityError", str(newest))
    assert before == {path: path.read_bytes() for place in places for path in place.glob("*.json")}
    newest.write_bytes(kept)
    # One machine goes on and the other starts over.
    for failure in pool.call(discard_on_second, case, places):
        assert failure.kind == "CheckpointError" and "existing='discard'" in failure.message, failure
    # A drive that was emptied.
    shutil.move(places[1], tmp_path / "kept")
    fails(
        pool, case, places, "CheckpointError", "lacks the files of rank 1, which were in",
        f"{places[0]} on a has 2, 1; {places[1]} on b has none", "discard",
    )  # fmt: skip
    shutil.rmtree(places[1])
    shutil.move(tmp_path / "kept", places[1])
    found = pool.succeed(train_at, case, places)
    assert [each.params.keys() for each in found] == [each.params.keys() for each in expected]
    # All files in one directory go on with any number of ranks.
    for path in places[1].iterdir():
        if not (places[0] / path.name).exists():
            shutil.copy2(path, places[0])
    one = pools.of(3).succeed(train_at, case, [places[0]] * 3)
    assert all(torch.equal(one[0].params[name], found[0].params[name]) for name in one[0].params)


def save_at(rank: int, world_size: int, case: Case, places: Sequence[Path]) -> None:
    """A checkpoint by a name that means another directory on each machine."""
    with on_machine(places[rank].name):
        model, optimizer = ranks.start(replace(case, settings={"precision": "fp32"}))
        try:
            zo.save_checkpoint(model, optimizer, places[rank] / "saved")
        finally:
            zo.close(model)


def test_a_checkpoint_goes_where_all_machines_see_it(pools: RankPools, tmp_path: Path) -> None:
    pool, places = pools.of(2), machines(tmp_path, "a", "b")
    for there in (False, True):
        for place in places if there else ():
            (place / "saved").mkdir(mode=0o700, parents=True, exist_ok=True)
        with RunDirectory.open(places[1] / "saved") if there else nullcontext():
            for failure in pool.call(save_at, CASE, places):
                assert failure.kind == "StorageError", failure
                assert f"{places[1] / 'saved'} on b is not the directory that rank 0 has made" in failure.message


def test_verify_says_which_ranks_are_here(pools: RankPools, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = machines(tmp_path, *"abb")
    pools.of(3).succeed(train_at, replace(CASE, num_steps=1), places)
    assert main(["verify", str(places[1])]) == 0
    assert "3 ranks, of which ranks 1 and 2 here: " in capsys.readouterr().out
    (places[1] / "rank2-1.json").unlink()
    assert main(["verify", str(places[1])]) != 0
