"""Collectives that happen as late as their waits permit, on poisoned targets: the bits of those that do not wait."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import ranks
from tests.helpers.pairwise import full, in_pairs
from tests.helpers.ranks import Case, Outcome, RankPool, RankPools
from zero_offload.base.types import STAGES
from zero_offload.runtime.grads import section
from zero_offload.runtime.grads.gradients import Gradients
from zero_offload.runtime.prefetcher import ParamPrefetcher
from zero_offload.runtime.ranks import collectives
from zero_offload.runtime.ranks.exchange import HostExchange, NativeExchange
from zero_offload.runtime.ranks.group import Group, RankGroup

GATHER, REDUCE = "gather", "reduce"


@pytest.fixture(scope="module", params=[2, full(3)])
def pool(request: pytest.FixtureRequest, pools: RankPools) -> RankPool:
    return pools.of(request.param)


@pytest.fixture(scope="module")
def at_once(pool: RankPool) -> Any:
    return functools.cache(lambda stage: pool.succeed(ranks.train, case_of(stage)))


def case_of(stage: int, **settings: Any) -> Case:
    return Case({"stage": stage, "precision": "bf16"} | settings, num_steps=4, max_norm=0.5, num_frozen=1)


class LateExchange:
    """Nothing happens before the wait; until then the target is poisoned, and the source must stay as it is."""

    def __init__(self, exchange: HostExchange, outstanding: dict[str, int]) -> None:
        self._exchange = exchange
        self._open = 0
        self._most = outstanding

    def _late(self, kind: str, source: torch.Tensor, run: Callable[[], Any]) -> Callable[[], Any]:
        before = source.clone()
        self._open += 1
        self._most[kind] = max(self._most[kind], self._open)

        def wait() -> Any:
            self._open -= 1
            assert torch.equal(source, before), "the source has changed under way"
            return run()

        return wait

    def gather(self, flat: torch.Tensor) -> Callable[[], None]:
        parts = flat.tensor_split(self._exchange.num_ranks)
        for rank, part in enumerate(parts):
            if rank != self._exchange.index:
                part.fill_(float("nan"))
        return self._late(GATHER, parts[self._exchange.index], lambda: self._exchange.gather(flat)())

    def reduce_scatter(self, flat: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        return self._late(REDUCE, flat, lambda: self._exchange.reduce_scatter(flat, dtype)())

    def all_reduce(self, flat: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        return self._late(REDUCE, flat, lambda: self._exchange.all_reduce(flat, dtype)())


def train_with(
    rank: int, world_size: int, case: Case, make: Callable[..., Any], bucket_bytes: int
) -> tuple[Outcome, dict[str, int]]:
    """`ranks.train` with other exchanges; and how many gathers and reductions were under way at once."""
    outstanding = {GATHER: 0, REDUCE: 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "exchange_of", lambda group, of, *_: make(group, of, outstanding))
        patch.setattr(section, "BUCKET_BYTES", bucket_bytes)
        return ranks.train(rank, world_size, case), outstanding


def late(group: RankGroup, of: Group, outstanding: dict[str, int]) -> LateExchange:
    return LateExchange(HostExchange(group.copy_of(of)), outstanding)


def native(group: RankGroup, of: Group, outstanding: dict[str, int]) -> NativeExchange:
    return NativeExchange(group.copy_of(of))


@in_pairs(stage=STAGES, params=["cpu", "nvme"], bucket_bytes=[0, 20_000, 1 << 20])
def test_late_collectives_change_no_bit(
    stage: int, params: str, bucket_bytes: int, pool: RankPool, at_once: Any, nvme: Path
) -> None:
    case = case_of(stage, params=params, optimizer="nvme", nvme=nvme, durability="scratch", device_memory="4MiB")
    found = pool.succeed(train_with, case, late, bucket_bytes)
    assert [outcome for outcome, _ in found] == at_once(stage)
    for _, outstanding in found:
        assert outstanding[REDUCE] == 1


def test_gathers_of_several_small_units_are_under_way_at_once(pool: RankPool) -> None:
    for _, outstanding in pool.succeed(train_with, case_of(3, params="cpu"), late, 1 << 20):
        assert outstanding[GATHER] > 1


def test_gathers_run_ahead_and_reductions_behind(pool: RankPool) -> None:
    for gathers, reductions_ in pool.succeed(count_ahead, case_of(3, params="cpu")):
        assert gathers > 0 and reductions_ > 0


def count_ahead(rank: int, world_size: int, case: Case) -> tuple[int, int]:
    """How many gathers and reductions were waited for at a later use or gradient than they were launched at."""
    counts, events = {GATHER: 0, REDUCE: 0}, [0]

    def watched(self: Any, launch: Any, exchange: Any, what: str, *moved: Any) -> Any:
        wait, began = original(self, launch, exchange, what, *moved), events[0]

        def counted() -> Any:
            counts[GATHER if "gather" in what else REDUCE] += events[0] > began
            return wait()

        return counted

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            events[0] += 1
            return call(*args)

        return counted

    original = collectives.Collectives._watched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives.Collectives, "_watched", watched)
        patch.setattr(ParamPrefetcher, "acquire", counting(ParamPrefetcher.acquire))
        patch.setattr(Gradients, "arrive", counting(Gradients.arrive))
        patch.setattr(section, "BUCKET_BYTES", 0)
        ranks.train(rank, world_size, case)
    return counts[GATHER], counts[REDUCE]


@pytest.mark.parametrize("stage", STAGES)
def test_native_collectives_give_the_same_bits_on_two_ranks(stage: int, pool: RankPool, at_once: Any) -> None:
    """Two terms have one sum, in whatever order."""
    if len(pool.processes) == 2:
        found = pool.succeed(train_with, case_of(stage), native, 1 << 20)
        assert [outcome for outcome, _ in found] == at_once(stage)
