"""Machines with drives of their own that are others at the next start: more, fewer, in another order, without a drive.

Each start equals a start from a checkpoint of the same step, `==`.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.crash.test_homes import CASE, ON_DISK, _numbers, machines, on_machine, run, run_rank, train_at
from tests.helpers import ranks
from tests.helpers.ranks import Case, Failure, Outcome, RankPools
from tests.unit.storage.files.test_base_files import flip
from zero_offload.checkpoint.homes import Homes
from zero_offload.checkpoint.pieces import Piece, PieceExchange


def step_at(
    rank: int, size: int, case: Case, places: Sequence[Path], loads: Path | None, saves: Path | None
) -> tuple[int, Outcome]:
    """One step from the generation on the drives, or from a checkpoint that all machines see. Then a checkpoint."""
    with on_machine(places[rank].name):
        settings = case.settings | ({"nvme": places[rank]} if loads is None else {"existing": "refuse"})
        if loads is not None:
            settings |= {"params": "cpu", "optimizer": "cpu"}
        model, optimizer = ranks.start(replace(case, settings=settings))
        try:
            if loads is not None:
                zo.load_checkpoint(model, optimizer, loads)
                first = case.num_steps
            else:
                resumed = zo.resume(model, optimizer)
                first = 0 if resumed is None else resumed.step
            out = Outcome()
            ranks.steps(case, (rank, size), model, optimizer, range(case.num_steps, case.num_steps + 1), out)
            out.params = ranks.read_params(model)
            if saves is not None:
                zo.save_checkpoint(model, optimizer, saves)
            return first, out
        finally:
            zo.close(model)


CHAINS = {
    "stage 3": ({"stage": 3}, ["ab", "ba", "bbaa", "cab", "dcba", "abcd"]),
    "bf16, stage 2": ({"stage": 2, "precision": "bf16"}, ["a", "ab", "bba"]),
    "stage 0": ({"stage": 0}, ["abcd", "cb", "b", "db", "d"]),
    "memory": ({"stage": 1, "params": "cpu", "optimizer": "cpu"}, ["ab", "bca", "acb"]),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_goes_on_with_other_machines(chain: str, pools: RankPools, tmp_path: Path) -> None:
    settings, starts = CHAINS[chain]
    case = Case(ON_DISK | settings, max_norm=0.5, num_frozen=1)
    for number, names in enumerate(starts):
        pool, places, saved = pools.of(len(names)), machines(tmp_path, *names), tmp_path / f"saved{number}"
        case = replace(case, num_steps=number)
        found = pool.succeed(step_at, case, places, None, saved)
        assert [first for first, _ in found] == [number] * len(names)
        if number:
            assert found == pool.succeed(step_at, case, places, tmp_path / f"saved{number - 1}", None)
    for name in set("".join(starts)) - set(starts[-1]):
        assert any((tmp_path / name).glob("*.swap"))  # of a machine that is not here, nothing is touched


def test_a_lost_drive_is_filled_from_a_twin(pools: RankPools, tmp_path: Path) -> None:
    """Two machines with a replica each; one comes without its files, then alone, then both."""
    pool, places = pools.of(4), machines(tmp_path, *"aabb")
    case = Case(ON_DISK | {"stage": 3}, num_steps=2, max_norm=0.5, mesh=((0, 1), (2, 3)))
    pool.succeed(train_at, case, places)
    whole = pool.succeed(train_at, replace(case, num_steps=3), machines(tmp_path / "other", *"aabb"))
    shutil.rmtree(places[0])
    found = pool.succeed(train_at, replace(case, num_steps=3), places)
    for each, expected in zip(found, whole, strict=True):
        assert each == Outcome(expected.losses[2:], expected.norms[2:], expected.params)
    assert {path.name for path in places[0].glob("*.swap")} == {"rank0.1.swap", "rank1.1.swap"}
    # One replica alone has all shards.
    (first, one), *_ = pools.of(2).succeed(step_at, replace(case, num_steps=3, mesh=None), places[2:], None, None)
    assert first == 3 and one.losses


def test_shards_that_are_nowhere_are_named(pools: RankPools, tmp_path: Path) -> None:
    places = machines(tmp_path, *"abc")
    pools.of(3).succeed(train_at, replace(CASE, num_steps=2), places)
    before = {path: path.read_bytes() for place in places for path in place.glob("*.json")}
    for names, lacking in (("ac", "rank 1, which were in {b}"), ("a", "ranks 1 and 2, which were in {b} and {c}"),
                           ("dac", "rank 1, which were in {b}")):  # fmt: skip
        lacking = lacking.format(b=f"{places[1]} on b", c=f"{places[2]} on c")
        for failure in pools.of(len(names)).call(train_at, CASE, machines(tmp_path, *names)):
            assert isinstance(failure, Failure) and failure.kind == "CheckpointError", failure
            assert f"lacks the files of {lacking}. " in failure.message
    assert before == {path: path.read_bytes() for place in places for path in place.glob("*.json")}


def test_a_machine_that_was_left_out_comes_back(pools: RankPools, tmp_path: Path) -> None:
    """Its generations are older, or newer than those of machines that went on without it: then nothing is deleted."""
    case = replace(CASE, settings=ON_DISK | {"stage": 0})
    pools.of(2).succeed(train_at, replace(case, num_steps=1), machines(tmp_path, *"ab"))
    pools.of(1).succeed(train_at, replace(case, num_steps=3), machines(tmp_path, "a"))
    shutil.copytree(tmp_path / "b", tmp_path / "kept")
    [(first, _), _] = pools.of(2).succeed(step_at, replace(case, num_steps=3), machines(tmp_path, *"ba"), None, None)
    assert first == 3
    shutil.rmtree(tmp_path / "b")
    shutil.move(tmp_path / "kept", tmp_path / "b")
    ahead = max(_numbers(tmp_path / "a"))
    pools.of(1).succeed(train_at, replace(case, num_steps=ahead - 1), machines(tmp_path, "b"))
    assert max(_numbers(tmp_path / "b")) == ahead, "as many generations as on the other"
    for failure in pools.of(2).call(train_at, case, machines(tmp_path, *"ab")):
        assert isinstance(failure, Failure) and "gone on apart from each other" in failure.message, failure
    # Another run's.
    pools.of(1).succeed(train_at, replace(case, num_steps=1), machines(tmp_path, "x"))
    for failure in pools.of(2).call(train_at, case, machines(tmp_path, *"ax")):
        assert isinstance(failure, Failure) and "generations of 2 runs" in failure.message, failure


@pytest.mark.parametrize("where", ["piece", "prepare", "decide", "noted"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_while_files_are_cut_anew_loses_nothing(where: str, victim: int, tmp_path: Path) -> None:
    whole = run(CASE, machines(tmp_path / "whole", *"ab"), tmp_path)
    places = machines(tmp_path, *"ab")
    run(replace(CASE, num_steps=2), places, tmp_path)
    # Generation 3 is that of the cut, and the first that the process makes.
    number = 1 if where == "noted" else 3
    assert run(CASE, places[::-1], tmp_path, (victim, where, number), job=run_cut) == [None, None]
    found = run(CASE, places[::-1], tmp_path)
    for (first, losses, params), (_, all_losses, all_params) in zip(found, whole, strict=True):
        assert first == 2 and losses == all_losses[2:]
        assert all(torch.equal(params[name], all_params[name]) for name in params)


def run_cut(rank: int, *args: Any) -> None:
    strike = args[-1]
    if rank == strike[0] and strike[1] == "piece":
        fetch, calls = PieceExchange.fetch, iter(range(100))

        def killed(self: PieceExchange, pieces: Any) -> Any:
            if next(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return fetch(self, pieces)

        PieceExchange.fetch = killed  # type: ignore[method-assign]
    run_rank(rank, *args)


def test_a_bad_block_on_another_machine_ends_the_start_on_all(pools: RankPools, tmp_path: Path) -> None:
    pool, places = pools.of(2), machines(tmp_path, *"ab")
    pool.succeed(train_at, replace(CASE, num_steps=1), places)
    before = {path: path.read_bytes() for place in places for path in place.glob("*.swap")}
    for offset in range(0, before[places[1] / "rank1.swap"].__len__(), 4096):
        flip(places[1] / "rank1.swap", offset + 8)
    found = pool.call(train_at, CASE, places[::-1])
    assert [each.kind for each in found] == ["IntegrityError"] * 2, found
    assert all("rank1.swap" in each.message for each in found)
    for path, content in before.items():
        path.write_bytes(content)
    pool.succeed(train_at, CASE, places[::-1])


def exchange(rank: int, size: int, case: str) -> Any:
    """Rank 1 asks for what rank 0's machine has of rank 7."""
    from zero_offload.model.api import need_runtime

    model, _ = ranks.start(Case({"precision": "fp32"}))
    group = need_runtime(model, "the test").ranks
    pieces = PieceExchange(Homes(group, (0, 1), ("a", "b"), ("/a", "/b")), {7: 0})
    wanted = Piece(7, 2, "master", 0, 3, 8)

    def read(piece: Piece) -> torch.Tensor:
        assert piece == wanted
        if case == "unreadable":
            raise zo.StorageError("the drive is gone")
        return torch.arange(5, dtype=torch.float32)

    ship = group.ship
    if case == "flipped" and rank == 0:
        group.ship = lambda wanted, sent: ship(wanted, ((r, n, _flipped(each)) for r, n, each in sent))  # type: ignore
    try:
        with pieces.open(read):
            if rank == 1:
                found = pieces.fetch([(wanted, torch.float32)])
                if case == "full":
                    raise zo.CapacityError("this drive is full")
                return found[wanted].tolist()
    finally:
        zo.close(model)
    return None


def _flipped(message: torch.Tensor) -> torch.Tensor:
    message[-1] ^= 1
    return message


def test_pieces_come_from_the_machine_that_has_them(pools: RankPools) -> None:
    pool = pools.of(2)
    assert pool.succeed(exchange, "") == [None, [0, 1, 2, 3, 4]]
    for case, kind, word in (
        ("unreadable", "StorageError", "the drive is gone"),
        ("flipped", "IntegrityError", "came from rank 0 with other bytes"),
        ("full", "CapacityError", "this drive is full"),
    ):
        found = pool.call(exchange, case)
        assert [each.kind for each in found] == [kind] * 2, found
        assert all(word in each.message for each in found), found


def test_memory_of_an_exchange_is_that_of_a_chunk(
    pools: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, places = pools.of(2), machines(tmp_path, *"ab")
    pool.succeed(train_at, replace(CASE, num_steps=1), places)
    counts = pool.succeed(count_pieces, replace(CASE, num_steps=1), places[::-1])
    assert all(0 < most <= 2**20 for most in counts)


def count_pieces(rank: int, size: int, case: Case, places: Sequence[Path]) -> int:
    """The most elements that a rank was brought at once."""
    most, fetch = 0, PieceExchange.fetch

    def counted(self: PieceExchange, pieces: Any) -> Any:
        nonlocal most
        most = max(most, sum(piece.end - piece.begin for piece, _ in pieces))
        return fetch(self, pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PieceExchange, "fetch", counted)
        train_at(rank, size, case, places)
    return most
