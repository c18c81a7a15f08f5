"""Ranks that use different units of one model: exact where it was asked for, a clear error where it was not."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import zero_offload as zo
from tests.helpers.models import Block, build
from tests.helpers.pairwise import Row, full, in_turn, label, pairwise
from tests.helpers.ranks import Failure, RankPool, RankPools, read_params
from tests.helpers.reference import clip_factor, global_norm
from zero_offload.model.api import runtime_of
from zero_offload.optim.pipeline import UpdatePipeline

DIM, NUM_BLOCKS, NUM_STEPS = 33, 5, 5


class Routed(nn.Module):
    """A router, experts of which the data chooses one per call and layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, NUM_BLOCKS)
        self.experts = nn.ModuleList(Block(DIM) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, steer: random.Random) -> Tensor:
        for _ in range(2):
            weights = self.router(x.mean((0, 1))).softmax(0)
            chosen = int(weights.argmax())
            x = x + weights[chosen] * self.experts[chosen](x)
        return self.head(x)  # type: ignore[no-any-return]


class Dropping(nn.Module):
    """Each block runs or does not; those that do may be recomputed in backward, or run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, steer: random.Random) -> Tensor:
        for block in self.blocks:
            for _ in range(steer.randrange(3)):
                x = checkpoint(block, x, use_reentrant=False) if steer.random() < 0.3 else block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Leaving(nn.Module):
    """Leaves by the exit of some block, the first included; each exit has a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(NUM_BLOCKS))
        self.exits = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor, steer: random.Random) -> Tensor:
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            if steer.random() < 0.3:
                return leave(x)  # type: ignore[no-any-return]
        return x


MODELS: dict[str, type[nn.Module]] = {"routed": Routed, "dropping": Dropping, "leaving": Leaving}


@dataclass(frozen=True)
class Case:
    model: str
    settings: dict[str, Any]
    micro_batches: int = 1
    max_norm: float | None = None
    no_sync: bool = False
    evaluates: bool = False
    """Between steps, each rank in its own way."""
    mesh: tuple[Any, ...] | None = None
    frozen: bool = False
    """A part of each block: what is frozen stays valid on the ranks that have it when the rest is updated."""


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Outcome)
        same = (self.losses, self.norms, list(self.params)) == (other.losses, other.norms, list(other.params))
        return same and all(torch.equal(self.params[name], other.params[name]) for name in self.params)


@pytest.fixture(params=[2, full(3)])
def pool(request: pytest.FixtureRequest, pools: RankPools) -> RankPool:
    return pools.of(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As each rank has: sums of a matrix product depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    """Of this rank's batch, on this rank's way through the model."""
    x = torch.randn(2, 4, DIM, generator=torch.Generator().manual_seed(100 * number + rank))
    x = x.to(next(model.parameters()).device)
    return model(x, random.Random(100 * number + rank)).square().mean()  # type: ignore[no-any-return]


def make_model(case: Case) -> nn.Module:
    model = build(MODELS[case.model])
    for name, param in model.named_parameters():
        param.requires_grad_(not (case.frozen and ".norm." in name))
    return model


def start(case: Case) -> tuple[nn.Module, zo.AdamW]:
    model = make_model(case)
    mesh = None if case.mesh is None else DeviceMesh("cpu", list(case.mesh))
    zo.offload(model, zo.OffloadConfig(precision="fp32", **case.settings), mesh)
    return model, zo.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(rank: int, world_size: int, case: Case) -> Outcome:
    model, optimizer = start(case)
    out, owner = Outcome(), runtime_of(model)
    assert owner is not None
    try:
        for step in range(NUM_STEPS):
            for micro in range(case.micro_batches):
                with zo.no_sync(model) if case.no_sync else torch.enable_grad():
                    loss = loss_of(model, step * case.micro_batches + micro, rank)
                    loss.backward()
                out.losses.append(loss.item())
            if case.max_norm is not None:
                with owner.together_and_reduce("a norm"):
                    pass
                out.norms.append(math.sqrt(owner.grad_access.squares(list(model.parameters()))))
                zo.clip_grad_norm_(model, case.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            if case.evaluates:
                with torch.no_grad():
                    out.losses.append(loss_of(model, 1000 + step, rank).item())
        out.params = read_params(model)
        return out
    finally:
        zo.close(model)


def train_plain(world_size: int, case: Case, norms: Sequence[float]) -> list[Outcome]:
    """One process, one plain model: what each rank computes, one after the other, and the mean of their gradients.

    `norms` are those that gradients are clipped by.
    """
    model = make_model(case)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    outs = [Outcome(norms=list(norms)) for _ in range(world_size)]
    for step in range(NUM_STEPS):
        total: dict[str, Tensor] = {}
        for rank, out in enumerate(outs):
            for micro in range(case.micro_batches):
                loss = loss_of(model, step * case.micro_batches + micro, rank)
                loss.backward()
                out.losses.append(loss.item())
            for name, param in model.named_parameters():
                if param.grad is not None:
                    total[name] = total[name] + param.grad if name in total else param.grad
                param.grad = None
        for name, param in model.named_parameters():
            if name in total:
                param.grad = total[name] / world_size
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        if case.max_norm is not None:
            assert global_norm(model, grads) == pytest.approx(norms[step], rel=1e-6)
            for grad in grads.values():
                grad.mul_(clip_factor(norms[step], case.max_norm))
        optimizer.step()
        optimizer.zero_grad()
        if case.evaluates:
            with torch.no_grad():
                for rank, out in enumerate(outs):
                    out.losses.append(loss_of(model, 1000 + step, rank).item())
    for out in outs:
        out.params = {name: param.detach().clone() for name, param in model.named_parameters()}
    return outs


def check(found: list[Outcome], expected: list[Outcome]) -> None:
    if len(found) == 2:
        assert found == expected
        return
    for mine, plain in zip(found, expected, strict=True):
        # Three summands have an order.
        assert mine.losses == pytest.approx(plain.losses, rel=1e-3)
        for name in plain.params:
            torch.testing.assert_close(mine.params[name], plain.params[name], rtol=1e-3, atol=1e-4)
            assert torch.equal(mine.params[name], found[0].params[name])


MATRIX: dict[str, Sequence[Any]] = {
    "model": list(MODELS),
    "stage": [3, 2, 1, 0],
    "params": ["cpu", "nvme"],
    "states": ["cpu", "nvme"],
    "device_memory": ["4MiB", None],
    "accumulate_and_clip": [(1, None), (2, 0.5), (2, None)],
    "no_sync": [False, True],
    "evaluates": [False, True],
    "frozen": [True, False],
}


@pytest.mark.parametrize("row", pairwise(MATRIX), ids=label)
def test_each_rank_may_go_its_own_way(row: Row, pool: RankPool, nvme: Path) -> None:
    settings = {key: row[key] for key in ("stage", "params", "device_memory")}
    settings |= {"grads": row["states"], "optimizer": row["states"], "nvme": nvme, "branches": "any"}
    micro_batches, max_norm = row["accumulate_and_clip"]
    case = Case(row["model"], settings, micro_batches, max_norm, row["no_sync"], row["evaluates"], frozen=row["frozen"])
    found = pool.succeed(train, case)
    check(found, train_plain(len(pool.processes), case, found[0].norms))


@pytest.mark.parametrize("device_memory", ["4MiB", full("6MiB")])
def test_a_unit_that_leaves_while_it_comes_stays_in_use(device_memory: str, pool: RankPool, nvme: Path) -> None:
    """A rank that brings one unit has to gather another first, and there is no room for both."""
    settings = {"stage": 2, "params": "nvme", "nvme": nvme, "device_memory": device_memory, "branches": "any"}
    case = Case("dropping", settings, micro_batches=2, max_norm=0.5)
    found = pool.succeed(train, case)
    check(found, train_plain(len(pool.processes), case, found[0].norms))


def test_the_ways_differ() -> None:
    """Or the tests above would show nothing."""
    used = []
    for name, make in MODELS.items():
        model = build(make)
        for rank in range(3):
            loss_of(model, 1, rank).backward()
            used.append((name, tuple(key for key, param in model.named_parameters() if param.grad is not None)))
            model.zero_grad()
    assert len(set(used)) >= 7


@pytest.mark.parametrize("stage", [full(1), 3])
def test_in_a_hybrid_mesh(stage: int, nvme: Path, pools: RankPools) -> None:
    settings = {"stage": stage, "branches": "any"}
    found = pools.of(4).succeed(train, Case("dropping", settings, mesh=((0, 1), (2, 3))))
    disk = settings | {"params": "nvme", "nvme": nvme, "device_memory": "8MiB"}
    assert pools.of(4).succeed(train, Case("dropping", disk, mesh=((0, 1), (2, 3)))) == found
    check(found, train_plain(4, Case("dropping", settings), []))


# Without being asked for


@in_turn(model=list(MODELS), stage=[3, 2])
def test_without_the_setting_all_ranks_raise(stage: int, model: str, pool: RankPool) -> None:
    for failure in pool.call(train, Case(model, {"stage": stage, "device_memory": "8MiB"})):
        assert isinstance(failure, Failure) and failure.kind == "ZeroOffloadError"
        assert "offload with branches='any'" in failure.message
        assert re.match(r"(rank 0 is|ranks 0 and \d are) at the .*, ranks? \d( and \d)? at the ", failure.message)
    # All have stopped at the same place: they can go on together.
    case = Case(model, {"stage": stage, "branches": "any"})
    found = pool.succeed(train, case)
    check(found, train_plain(len(pool.processes), case, []))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.both[which](x)  # type: ignore[no-any-return]


def train_beside_a_slow_update(
    rank: int, world_size: int, stage: int, branches: str, overlap: str
) -> dict[str, Tensor]:
    """Each rank has an expert of its own, the last rank a slow update of the other ones'."""
    update = UpdatePipeline._compute

    def slowly(self: UpdatePipeline, task: Any, delivery: Any) -> None:
        time.sleep(0.1 * (rank == world_size - 1 and task.section.name == "experts.0"))
        update(self, task, delivery)

    config = zo.OffloadConfig(stage=stage, precision="fp32", branches=branches, overlap=overlap, durability="scratch")
    model = zo.offload(build(Routed), config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(2, 4, DIM, generator=torch.Generator().manual_seed(rank))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(UpdatePipeline, "_compute", slowly)
            for step in range(3):
                with zo.no_sync(model):
                    (model.experts[rank](x) * (step + 1)).square().mean().backward()
                model.head(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return read_params(model)
    finally:
        zo.close(model)


@pytest.mark.parametrize(("stage", "branches"), [(0, "same"), full(0, "any"), full(1, "any"), (3, "any")])
def test_what_other_ranks_send_waits_for_the_update_of_the_step_before(
    stage: int, branches: str, pool: RankPool
) -> None:
    """Gradients of a unit that this rank does not use arrive while its update still reads the last ones."""
    expected = pool.succeed(train_beside_a_slow_update, stage, branches, "none")[0]
    for found in pool.succeed(train_beside_a_slow_update, stage, branches, "forward"):
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def use_parts_of_a_unit(rank: int, world_size: int, stage: int, branches: str) -> list[bool]:
    """All ranks use the one unit, but not the same of its parameters; says which change."""
    config = zo.OffloadConfig(stage=stage, precision="fp32", branches=branches)
    model = zo.offload(build(Two), config, units=[""])
    optimizer = zo.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    before = read_params(model)
    try:
        model(torch.ones(1, 8), min(rank, 1)).sum().backward()
        optimizer.step()
        after = read_params(model)
        return [not torch.equal(before[name], after[name]) for name in before]
    finally:
        zo.close(model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_agree_about_the_parameters_of_a_unit(stage: int, pool: RankPool) -> None:
    assert pool.succeed(use_parts_of_a_unit, stage, "any") == [[True] * 4] * len(pool.processes)
    for failure in pool.call(use_parts_of_a_unit, stage, "same"):
        assert isinstance(failure, Failure)
        assert re.search(
            r"both.0.weight, both.0.bias, (rank 1|ranks 1 and 2) at the reduction of gradients of", failure.message
        )


def evaluate_alone(rank: int, world_size: int, case: Case) -> str:
    """Rank 0 evaluates, the others go on; the error, after which all train."""
    model, optimizer = start(case)
    try:
        train_step(model, optimizer, 0)
        with pytest.raises(zo.ZeroOffloadError) as error:
            if rank == 0:
                with torch.no_grad():
                    loss_of(model, 7, 0)
            train_step(model, optimizer, 1)
        optimizer.zero_grad()
        for step in range(2, 4):
            train_step(model, optimizer, step)
        return str(error.value)
    finally:
        zo.close(model)


def train_step(model: nn.Module, optimizer: zo.AdamW, number: int) -> None:
    loss_of(model, number, 0).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:the last backward was left by an exception")
@pytest.mark.parametrize(
    ("branches", "hint"), [("same", "evaluation on some ranks only"), ("any", "as many forwards and backwards")]
)
def test_one_rank_cannot_evaluate_alone(branches: str, hint: str, pool: RankPool) -> None:
    case = Case("dropping", {"stage": 3, "branches": branches, "device_memory": "8MiB"})
    for message in pool.succeed(evaluate_alone, case):
        assert hint in message


def gather_apart(rank: int, world_size: int, nvme: Path) -> dict[str, Tensor]:
    """Whole parameters on all ranks, of which some have many units at hand and others few."""
    model, optimizer = start(Case("dropping", {"branches": "any", "params": "nvme", "nvme": nvme}))
    loss_of(model, rank, rank).backward()
    optimizer.step()
    with torch.no_grad():
        loss_of(model, 10 + rank, rank)
    with zo.gathered(model) as params:
        found = {name: param.detach().clone() for name, param in params.items()}
    zo.close(model)
    return found


def test_gathered_needs_no_equal_history(pool: RankPool, nvme: Path) -> None:
    found = pool.succeed(gather_apart, nvme)
    assert all(torch.equal(each[name], found[0][name]) for each in found for name in each)
    assert any(not torch.equal(found[0][name], param) for name, param in build(Dropping).named_parameters())


def resume(rank: int, world_size: int, case: Case, num_steps: int) -> dict[str, Tensor]:
    model, optimizer = start(case)
    resumed = zo.resume(model, optimizer)
    for step in range(0 if resumed is None else resumed.extra, num_steps):
        loss_of(model, step, rank).backward()
        zo.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer, extra=step + 1)
    params = read_params(model)
    zo.close(model)
    return params


def test_a_run_is_resumed(pool: RankPool, nvme: Path) -> None:
    case = Case("routed", {"branches": "any", "params": "nvme", "optimizer": "nvme", "nvme": nvme})
    whole = pool.succeed(resume, replace(case, settings={"branches": "any"}), 5)
    case = replace(case, settings=case.settings | {"existing": "resume"})
    pool.succeed(resume, case, 2)
    for found, expected in zip(pool.succeed(resume, case, 5), whole, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
