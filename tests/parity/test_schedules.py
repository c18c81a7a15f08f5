"""Random scripts of operations: an offloaded model does what the plain model does, bit for bit, in whatever order.

Derandomised: the same scripts every time. To try others, raise `FEW` or take `derandomize` out.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import zero_offload as zo
from tests.helpers.models import NARROW, WIDE
from tests.helpers.offloaded_player import Offloaded, play_on_ranks
from tests.helpers.plain_player import Plain, play_plain
from tests.helpers.ranks import UNEVEN, RankPool, RankPools
from tests.helpers.schedules import NUM_BLOCKS, PARTS, Operation, Pass, Script
from zero_offload.base.types import STAGES
from zero_offload.storage.shards import grad_store
from zero_offload.storage.shards.grad_store import LARGE_BYTES

FEW, MANY = 30, 3000
FEW_ON_RANKS, MANY_ON_RANKS = 6, 300
PROFILE = settings(
    max_examples=FEW, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

SEEDS = st.integers(0, 9)
ROUTES = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=6).map(tuple)
WHOLE = tuple(range(NUM_BLOCKS))
PASSES = st.builds(
    Pass, SEEDS, st.just(WHOLE) | ROUTES, st.sampled_from(["none", "none", "reentrant", "saved"]), st.integers(3, 9)
)
FACTORS = st.sampled_from([0.5, 0.9, 1.5])
SLOTS = st.integers(0, 2)
NORMS = st.sampled_from([0.01, 0.5, 1e6])


def _operation(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Operation]]:
    return st.tuples(st.just(name), *arguments).map(lambda operation: [operation])


@st.composite
def training_steps(draw: Any) -> list[Operation]:
    """As most scripts do it: micro-batches, perhaps clipping and a commit."""
    script: list[Operation] = []
    micro_batches = draw(st.integers(1, 3))
    for number in range(micro_batches):
        script += [("forward", draw(PASSES)), ("backward", 0, 1 / micro_batches, False, number == micro_batches - 1)]
    script += draw(st.just([]) | _operation("clip", NORMS))
    script += [("step",), ("zero_grad",)]
    return script + draw(st.just([]) | _operation("commit", SEEDS))


RUNS = [
    _operation("forward", PASSES),
    _operation("backward", st.integers(0, 3), FACTORS, st.booleans(), st.booleans()),
    _operation("backward_of_all"),
    _operation("evaluate", PASSES, st.sampled_from([torch.no_grad, torch.inference_mode])),
    _operation("generate", PASSES, st.integers(1, 4)),
    _operation("drop_losses"),
]
STEPS = [
    _operation("clip", NORMS),
    _operation("step"),
    _operation("zero_grad"),
    _operation("set_lr", st.sampled_from([0.0, 1e-3, 3e-2])),
]
FAILURES = [
    _operation("break_forward", PASSES, st.integers(0, 3)),
    _operation("break_backward", PASSES, st.integers(0, 3), st.booleans()),
    _operation("explode", PASSES),
]
FILES = [
    _operation("commit", SEEDS),
    _operation("reopen"),
    _operation("save", SLOTS),
    _operation("load", SLOTS),
]
OF_ONE_RANK = [
    _operation("restart", st.sampled_from([None, "fp32", "bf16"])),
    _operation("read", st.sampled_from(["params", "master", "grads"]), st.sampled_from(PARTS)),
    _operation("write", st.sampled_from(["params", "master"]), st.sampled_from(PARTS), FACTORS),
    _operation("read_states"),
    _operation("write_states", FACTORS),
]

OF_RANKS = [
    _operation("restart", st.none()),
    _operation("read", st.just("params"), st.sampled_from(PARTS)),
]
"""Operations that take every rank and work with several shards."""


def scripts(*groups: list[st.SearchStrategy[list[Operation]]]) -> st.SearchStrategy[Script]:
    """Every group, and training steps, are as likely."""
    choice = st.one_of(training_steps(), *(st.one_of(*group) for group in groups))
    return st.lists(choice, min_size=1, max_size=12).map(lambda parts: sum(parts, []))


TIERS = st.sampled_from(
    ["device", "cpu", "nvme", {"cpu": 0.5, "nvme": 0.5}, {"device": 0.34, "cpu": 0.33, "nvme": 0.33}]
)
PLACEMENTS: dict[str, st.SearchStrategy[Any]] = {
    "params": TIERS,
    "grads": TIERS,
    "optimizer": TIERS,
    "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
    "device_memory": st.sampled_from(["8MiB", None]),
    "commit_every": st.integers(1, 3),
    "durability": st.sampled_from(["process", "scratch"]),
    "overlap": st.sampled_from(["auto", "forward", "backward", "none"]),
}


def legal(choices: dict[str, Any]) -> dict[str, Any]:
    """fp16 wants its overflows known before the update."""
    return (
        choices | {"precision": "bf16"}
        if (choices["overlap"], choices["precision"]) == ("backward", "fp16")
        else choices
    )


def check_same(script: Script, found: list[Any], expected: list[Any]) -> None:
    """Both have reported the same, operation by operation."""
    for number, (operation, mine, theirs) in enumerate(zip(script, found, expected, strict=True)):
        assert mine == theirs, f"operation {number}, {operation}"


def check(script: Script, choices: dict[str, Any], dim: int, large_bytes: int) -> None:
    before, grad_store.LARGE_BYTES = grad_store.LARGE_BYTES, large_bytes
    with tempfile.TemporaryDirectory() as folder:
        config = zo.OffloadConfig(nvme=Path(folder, "nvme"), **choices)
        offloaded = Offloaded(dim, config, Path(folder))
        try:
            script = [*script, ("read_states",), *(("read", "master", part) for part in PARTS)]
            check_same(script, offloaded.play(script), Plain(dim, config).play(script))
        finally:
            grad_store.LARGE_BYTES = before
            offloaded.close()


OF_ONE = {
    "script": scripts(RUNS, STEPS, FAILURES, FILES, OF_ONE_RANK),
    "choices": st.fixed_dictionaries(PLACEMENTS).map(legal),
    "dim": st.sampled_from([NARROW, NARROW, WIDE]),
    "large_bytes": st.sampled_from([1, LARGE_BYTES]),
}


@settings(PROFILE)
@given(**OF_ONE)
def test_any_script_gives_the_bits_of_plain_tensors(**drawn: Any) -> None:
    check(**drawn)


@pytest.mark.full
@settings(PROFILE, max_examples=MANY)
@given(**OF_ONE)
def test_many_scripts_give_the_bits_of_plain_tensors(**drawn: Any) -> None:
    check(**drawn)


# Several ranks


SHARED = ("stage", "precision", "commit_every", "durability", "overlap")
"""Settings that a run in memory has in common with a run whose states are placed."""


def check_ranks(script: Script, choices: dict[str, Any], dim: int, pool: RankPool, *, as_one: bool) -> None:
    """`as_one`: all ranks have the data of one, so that their mean gradient is its gradient. Else: states in memory."""
    script = [*script, *(("read", "params", part) for part in PARTS)]
    streams = 1 if as_one else len(pool.processes)
    with tempfile.TemporaryDirectory() as placed, tempfile.TemporaryDirectory() as in_memory:
        found = pool.succeed(play_on_ranks, script, dim, choices, placed, streams)
        if as_one:
            expected = pool.succeed(play_plain, script, dim, choices, placed)
        else:
            shared = {name: choices[name] for name in SHARED}
            expected = pool.succeed(play_on_ranks, script, dim, shared, in_memory, streams)
    for mine, theirs in zip(found, expected, strict=True):
        check_same(script, mine, theirs)
    for mine in found[1:]:
        assert mine[-len(PARTS) :] == found[0][-len(PARTS) :], "the ranks have different parameters"


ON_RANKS = {
    "script": scripts(RUNS, STEPS, FAILURES, FILES, OF_RANKS),
    "choices": st.fixed_dictionaries({"stage": st.sampled_from(STAGES), **PLACEMENTS}).map(legal),
    "dim": st.sampled_from([NARROW, UNEVEN]),
}
# A pool that a failure has left out of step fails for every smaller script too.
ON_RANKS_PROFILE = settings(PROFILE, phases=[Phase.generate])


@settings(ON_RANKS_PROFILE, max_examples=FEW_ON_RANKS)
@given(**ON_RANKS)
def test_two_ranks_with_the_same_data_give_the_bits_of_plain_tensors(pools: RankPools, **drawn: Any) -> None:
    check_ranks(**drawn, pool=pools.of(2), as_one=True)


@settings(ON_RANKS_PROFILE, max_examples=FEW_ON_RANKS)
@given(**ON_RANKS)
def test_three_ranks_give_the_bits_of_ranks_in_memory(pools: RankPools, **drawn: Any) -> None:
    check_ranks(**drawn, pool=pools.of(3), as_one=False)


@pytest.mark.full
@settings(ON_RANKS_PROFILE, max_examples=MANY_ON_RANKS)
@given(**ON_RANKS)
def test_many_scripts_on_two_ranks(pools: RankPools, **drawn: Any) -> None:
    check_ranks(**drawn, pool=pools.of(2), as_one=True)
    check_ranks(**drawn, pool=pools.of(2), as_one=False)


@pytest.mark.full
@settings(ON_RANKS_PROFILE, max_examples=MANY_ON_RANKS)
@given(**ON_RANKS)
def test_many_scripts_on_three_ranks(pools: RankPools, **drawn: Any) -> None:
    check_ranks(**drawn, pool=pools.of(3), as_one=False)
