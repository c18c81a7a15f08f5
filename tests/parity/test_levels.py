"""Four ranks as two of each of two machines: words cross between first ranks alone, units once per machine, and no bit
is another."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.agreeing import record, simulate
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.parting import ENOUGH_S, WAYS, Way, part
from tests.helpers.parting import Outcome as Parting
from tests.helpers.ranks import Case, Outcome, RankPool, RankPools
from zero_offload.base.types import STAGES, Branches
from zero_offload.model.api import runtime_of
from zero_offload.runtime.ranks import agreement, levels, neighbours
from zero_offload.runtime.ranks.agreement import Agreement
from zero_offload.runtime.ranks.group import RankGroup, gather_few
from zero_offload.runtime.ranks.watch import RankProcess

WORLD_SIZE = 4
MACHINES = {"pairs": "aabb", "in turns": "abab", "one and three": "abbb", "three and one": "aaab"}
"""The machine of each rank."""


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(WORLD_SIZE)


def on_machines(patch: pytest.MonkeyPatch, machines: str) -> None:
    name = machines[dist.get_rank()]
    patch.setattr(neighbours.RankProcess, "here", lambda: RankProcess(name, "pid:[1]", os.getpid()))


def train(rank: int, world_size: int, case: Case, machines: str) -> tuple[Any, Counter[str]]:
    """`ranks.train`, and how often this rank took part in a round between machines, and in one inside of its own."""
    counts: Counter[str] = Counter()

    def counting(name: str, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        on_machines(patch, machines)
        patch.setattr(levels, "gather_few", counting("between", levels.gather_few))
        patch.setattr(neighbours.Channel, "post", counting("inside", neighbours.Channel.post))
        patch.setattr(agreement.Agreement, "_ask", counting("rounds", agreement.Agreement._ask))
        return ranks.train(rank, world_size, case), counts


@pytest.mark.parametrize("machines", MACHINES.values(), ids=MACHINES)
def test_words_go_by_first_ranks_and_bits_are_those_of_one_machine(machines: str, pool: RankPool) -> None:
    case = Case({"stage": 3, "precision": "bf16"}, num_steps=5, max_norm=0.5)
    found, expected = pool.succeed(train, case, machines), pool.succeed(ranks.train, case)
    assert [outcome for outcome, _ in found] == expected
    firsts = {machines.index(name) for name in machines}
    for rank, (_, counts) in enumerate(found):
        assert counts["rounds"] > 0 and counts["rounds"] == found[0][1]["rounds"]
        assert counts["between"] == (counts["rounds"] if rank in firsts else 0)
        assert counts["inside"] == (2 * counts["rounds"] if machines.count(machines[rank]) > 1 else 0)


def agree(
    rank: int, world_size: int, machines: str, counts: Sequence[int], on_host: bool, apart: bool
) -> list[list[list[float]]]:
    """Numbers that ranks tell each other in turns; `apart`, after a call in which rank 1 alone told some."""
    with pytest.MonkeyPatch.context() as patch:
        on_machines(patch, machines)
        group = RankGroup.of(zo.OffloadConfig(stage=1))
        agreement = Agreement(group, Branches.SAME, on_host=on_host)
        if apart:
            with pytest.raises(zo.ZeroOffloadError, match=r"rank 1 at a norm \(1 numbers\)"):
                agreement.numbers([1.0], "a norm") if rank == 1 else agreement.same("a look")
            agreement.begin()
        return [agreement.numbers([rank + i / 2 for i in range(count)], "numbers") for count in counts]


@pytest.mark.parametrize(("machines", "on_host"), [("aaaa", True), ("aaaa", False), ("aabb", True), ("abbb", False)])
@pytest.mark.parametrize("apart", [False, True])
def test_numbers_of_all_ranks_are_in_their_order(machines: str, on_host: bool, apart: bool, pool: RankPool) -> None:
    """Few ride with the words between machines, and many have a round of their own."""
    counts = [1, 2, 0, 126, 127, 5000, 3]
    expected = [[[rank + i / 2 for i in range(count)] for rank in range(WORLD_SIZE)] for count in counts]
    assert pool.succeed(agree, machines, counts, on_host, apart) == [expected] * WORLD_SIZE


def few(rank: int, world_size: int, numel: int) -> list[list[int]]:
    every = torch.empty(world_size * numel, dtype=torch.int64)
    for turn in range(3):
        gather_few(every, torch.arange(numel) + 100 * rank + turn, group=None)
    return every.view(world_size, numel).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_few_words_of_all_ranks_are_in_their_order(size: int, pools: RankPools) -> None:
    expected = [[100 * rank + 2 + i for i in range(3)] for rank in range(size)]
    assert pools.of(size).succeed(few, 3) == [expected] * size


def test_many_ranks_agree_in_as_many_rounds_as_two(pools: RankPools) -> None:
    """They take as many hops as the number of machines doubles. Numbers of norms ride with words."""
    steps = pools.of(2).succeed(record, 3, 4)[0]
    two, pairs, many = (simulate(steps, *each)[-1] for each in [(2, 1), (33, 1), (64, 8)])
    assert two.rounds == pairs.rounds == many.rounds == 3
    assert (two.most_messages, pairs.most_messages, many.most_messages) == (3, 3 * 6, 3 * 3)
    assert two.seconds < many.seconds < 4.5 * two.seconds


# Bytes: docs/STAGES.md has the formulas


class Sent(NamedTuple):
    """Bytes of one rank's last step."""

    near: int
    far: int
    gathered: int
    whole: int
    """Elements of all shards, padding included."""


def send(rank: int, world_size: int, case: Case, machines: str) -> tuple[Outcome, Sent]:
    with pytest.MonkeyPatch.context() as patch:
        on_machines(patch, machines)
        model, optimizer = ranks.start(case)
        found = Outcome()
        ranks.steps(case, (rank, world_size), model, optimizer, range(case.num_steps), found)
        stats, owner = zo.stats(model), runtime_of(model)
        assert owner is not None
        numel = sum(section.numel for section in owner.layout.sections)
        zo.close(model)
    return found, Sent(*stats.sent_bytes.values(), stats.communicated_bytes["gathered"], numel)


@in_turn(
    stage=STAGES,
    machines=["aabb", "aaaa", "abab", "abbb", "abcd"],
    reduce=["fp32", "bf16"],
    micro_batches=[1, 2],
)
def test_bytes_over_each_link_are_those_of_the_formulas(
    stage: int, machines: str, reduce: str, micro_batches: int, pool: RankPool
) -> None:
    precision = zo.Precision("bf16", reduce=reduce)
    case = Case({"stage": stage, "precision": precision}, 4, micro_batches=micro_batches, max_norm=0.5)
    found, expected = pool.succeed(send, case, machines), pool.succeed(send, case, "aaaa")
    assert [outcome for outcome, _ in found] == [outcome for outcome, _ in expected]
    sizes = list(Counter(machines).values())
    numel, gathered = found[0][1].whole, found[0][1].gathered
    # The paper's: all-gathers and reductions of 2 bytes per element. Sums of several backwards, and those that stage 0
    # gathers, are fp32, unless the setting rounds them.
    sums = 2 if reduce == "bf16" else 4
    if stage == 3:
        assert 2 * numel <= gathered <= 4 * micro_batches * numel
    else:
        assert gathered == (2 * numel if stage else 0)
    parts = {0: 2 * micro_batches, 1: 2 if micro_batches == 1 else sums}.get(stage, 2 * micro_batches) * numel
    gathered += sums * micro_batches * numel if stage == 0 else 0
    num_pairs = sum(size * size for size in sizes)
    far = (len(sizes) - 1) * gathered + parts * (WORLD_SIZE**2 - num_pairs) // WORLD_SIZE
    near = (WORLD_SIZE - len(sizes)) * gathered + parts * (num_pairs - WORLD_SIZE) // WORLD_SIZE
    assert sum(sent.far for _, sent in found) == far
    assert sum(sent.near for _, sent in found) == near
    if len(set(sizes)) == 1:
        assert len({(sent.near, sent.far) for _, sent in found}) == 1


@in_turn(stage=[3, 1, 2], reduce=["fp32", "bf16"], micro_batches=[1, 2])
def test_bytes_of_sums_by_levels_are_those_of_the_formulas(
    stage: int, reduce: str, micro_batches: int, pool: RankPool
) -> None:
    """The machines are replicas: each adds up its own ranks' gradients, and sums alone cross."""
    precision = zo.Precision("bf16", reduce=reduce)
    settings = {"stage": stage, "precision": precision}
    case = Case(settings, 4, micro_batches=micro_batches, max_norm=0.5, mesh=((0, 1), (2, 3)))
    found = [sent for _, sent in pool.succeed(send, case, "aabb")]
    num_machines, per_machine = 2, WORLD_SIZE // 2
    sums, num_sums = 2 if reduce == "bf16" else 4, 1 if stage == 1 else micro_batches
    parts = sums if stage == 1 else 2 * micro_batches
    gathered, numel = found[0].gathered, found[0].whole
    assert sum(sent.far for sent in found) == 2 * (num_machines - 1) * sums * num_sums * numel
    assert sum(sent.near for sent in found) == num_machines * (per_machine - 1) * (gathered + parts * numel)


def sum_up(rank: int, world_size: int, stage: int, mesh: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gradients of this rank alone, by the plain model; and sums of all ranks."""
    numbers = tokens_of(rank)
    plain = build(TinyLM)
    plain(numbers).backward()
    own = {name: param.grad for name, param in plain.named_parameters()}
    model: Any = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(stage=stage, precision="fp32", grad_reduction="sum"), DeviceMesh("cpu", mesh))
    model(numbers).backward()
    with zo.gathered(model, kind="grads") as grads:
        found = {name: grad.clone() for name, grad in grads.items()}
    zo.close(model)
    return own, found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sums_by_levels_are_those_of_machines_and_then_of_all(stage: int, pool: RankPool) -> None:
    found = pool.succeed(sum_up, stage, [[0, 1], [2, 3]])
    differ = False
    for name in found[0][0]:
        first, second, third, fourth = (own[name] for own, _ in found)
        expected = (first + second) + (third + fourth)
        assert all(torch.equal(sums[name], expected) for _, sums in found), name
        differ |= not torch.equal(((first + second) + third) + fourth, expected)
    assert differ, "one order of ranks has other bits"


def part_on_machines(rank: int, world_size: int, way: Way, machines: str, num_before: int, on: int) -> Parting:
    with pytest.MonkeyPatch.context() as patch:
        on_machines(patch, machines)
        return part(rank, world_size, way, {"stage": 3}, num_before=num_before, on=on, by_sockets=True)


@in_turn(way=WAYS, machines=["aabb", "abbb"], num_before=[5, 0], on=[1, 0, 3])
def test_all_raise(way: Way, machines: str, num_before: int, on: int, pool: RankPool) -> None:
    found = pool.succeed(part_on_machines, way, machines, num_before, on)
    for each in found:
        assert each.error and each.error == found[0].error and each.seconds < ENOUGH_S
    pool.renew()
