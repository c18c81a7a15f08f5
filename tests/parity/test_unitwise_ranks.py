"""`zo.unitwise` on several ranks: one of them steps each parameter whole, with the bits of one plain optimizer."""

from __future__ import annotations

import copy
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

import zero_offload as zo
from tests.crash.test_homes import machines, on_machine
from tests.crash.test_publish import wait_until_published
from tests.helpers.disk import runtime
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import UNEVEN, Failure, RankPools
from tests.helpers.reference import clip_factor, global_norm, nearest_bf16, read_masters
from tests.parity.test_unitwise import (
    DTYPES,
    MAKERS,
    TIERS,
    Averaged,
    Normalized,
    Remembering,
    assert_same,
    groups_of,
)
from zero_offload.base.types import StateKind, Tier
from zero_offload.storage.shards.shard import shard_bytes

Train = dict[str, Any]
"""`micro_batches` and `max_norm`."""


@pytest.fixture(autouse=True)
def _threads_of_a_rank() -> None:
    """A norm's gradient is summed by as many threads as there are."""
    torch.set_num_threads(1)


def model_of() -> nn.Module:
    return build(lambda: TinyLM(dim=UNEVEN))


class Failing(torch.optim.SGD):
    """Raises on one rank, if it should."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__([{"params": [*params], "fails": False}], lr)

    def step(self, closure: Any = None) -> None:
        if self.param_groups[0]["fails"] and torch.distributed.get_rank() == 1:
            raise ValueError("a matrix that is not finite")
        super().step()


OF_NUMBERS: dict[str, Any] = {"Remembering": Remembering, "Averaged": Averaged}
"""Their groups count steps, and a rank may step nothing of a group."""


def optimizers_of(name: str, params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    if name == "Failing":
        return [Failing(params)]
    if name in OF_NUMBERS:
        return [OF_NUMBERS[name]([{"params": [param]} for param in params])]
    if name != "Muon and AdamW":
        return [MAKERS[name](groups_of(params))]
    matrices = [param for param in params if param.dim() == 2]
    rest = [param for param in params if param.dim() != 2]
    return [torch.optim.Muon(matrices, 1e-2), torch.optim.AdamW(rest, 1e-2)]


NAMES = [*MAKERS, *OF_NUMBERS, "Muon and AdamW"]


class Written:
    """The same training in one process: gradients of each rank, their mean, and the plain optimizer's fp32 masters."""

    def __init__(self, name: str, precision: str, num_ranks: int, stage: int) -> None:
        self.precision, self.model, self.num_ranks, self.stage = precision, model_of(), num_ranks, stage
        self.masters = [nn.Parameter(param.detach().clone()) for param in self.model.parameters()]
        self.model.to(DTYPES[precision])
        self.optimizers = optimizers_of(name, self.masters)
        self.round()

    def round(self) -> None:
        for param, master in zip(self.model.parameters(), self.masters, strict=True):
            param.data.copy_(nearest_bf16(master) if self.precision == "bf16" else master.detach())

    def grads(self, number: int) -> dict[str, Tensor]:
        self.model(tokens_of(number)).backward()
        found = {}
        for key, param in self.model.named_parameters():
            assert param.grad is not None
            found[key], param.grad = param.grad, None
        return found

    def mean(self, of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        found = {}
        for key, first in of_ranks[0].items():
            total = first.float()
            for each in of_ranks[1:]:
                total = total + each[key].float()
            found[key] = total / self.num_ranks
        return found

    def train(self, begin: int, end: int, *, micro_batches: int = 1, max_norm: float | None = None) -> None:
        for step in range(begin, end):
            parts = range(step * micro_batches, (step + 1) * micro_batches)
            own = [[self.grads(part * self.num_ranks + rank) for rank in range(self.num_ranks)] for part in parts]
            if self.stage == 1:  # ranks add up the gradients of their own backwards first
                own = [[added(list(of_rank)) for of_rank in zip(*own, strict=True)]]
            sums = added([self.mean(of_ranks) for of_ranks in own])
            factor = 1.0 if max_norm is None else clip_factor(global_norm(self.model, sums), max_norm)
            for master, grad in zip(self.masters, sums.values(), strict=True):
                master.grad = grad.float().mul_(factor)
            for optimizer in self.optimizers:
                optimizer.step()
            self.round()

    def named(self) -> dict[str, Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        return {name: master.detach() for name, master in zip(names, self.masters, strict=True)}


def added(grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    total = grads[0]
    for each in grads[1:]:
        total = {key: total[key].float() + grad.float() for key, grad in each.items()}
    return total


def open_on_rank(name: str, settings: dict[str, Any]) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = model_of()
    zo.offload(model, zo.OffloadConfig(existing="resume", **settings))
    return model, [zo.unitwise(each) for each in optimizers_of(name, [*model.parameters()])]


def train(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    ranks: tuple[int, int],
    steps: range,
    *,
    micro_batches: int = 1,
    max_norm: float | None = None,
) -> None:
    rank, world_size = ranks
    for step in steps:
        for part in range(step * micro_batches, (step + 1) * micro_batches):
            model(tokens_of(part * world_size + rank)).backward()
        if max_norm is not None:
            zo.clip_grad_norm_(model, max_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        zo.commit(model, optimizers[0])


Found = tuple[dict[str, Tensor], list[dict[str, Any]]]
"""Masters, and state dicts of optimizers."""


def run(
    rank: int,
    world_size: int,
    name: str,
    settings: dict[str, Any],
    steps: range,
    how: Train,
    places: list[Path] | None = None,
    loads: Path | None = None,
    saves: Path | None = None,
) -> Found:
    """The outcome of these steps, from a checkpoint or the files that `nvme` has. `places`: a machine of each rank."""
    if places is not None:
        with on_machine(places[rank].name):
            return run(rank, world_size, name, settings | {"nvme": places[rank]}, steps, how)
    model, optimizers = open_on_rank(name, settings)
    call = zo.resume if loads is None else partial(zo.load_checkpoint, path=loads)
    resumed = call(model, optimizers[0])
    assert (0 if resumed is None else resumed.step) == steps.start
    train(model, optimizers, (rank, world_size), steps, **how)
    if saves is not None:
        zo.save_checkpoint(model, optimizers[0], saves)
    found = read_masters(model), [optimizer.state_dict() for optimizer in optimizers]
    zo.close(model)
    return found


def assert_found(found: Found, written: Written) -> None:
    assert_same(found[0], written.named())
    for mine, optimizer in zip(found[1], written.optimizers, strict=True):
        theirs = optimizer.state_dict()
        states = {key: state for key, state in theirs["state"].items() if state}
        assert tree_map(plain, states) == tree_map(plain, without_masters(mine["state"]))
        assert mine["param_groups"] == theirs["param_groups"]


def without_masters(states: dict[Any, Any]) -> dict[Any, Any]:
    """States alone, without what completes a 16-bit value."""
    found = {key: {name: each for name, each in state.items() if name != "residual"} for key, state in states.items()}
    return {key: state for key, state in found.items() if state}


def plain(value: Any) -> Any:
    return (value.dtype, value.tolist()) if isinstance(value, Tensor) else value


@in_turn(
    name=NAMES,
    num_ranks=[2, 3, 4],
    ranks=[{"stage": 3}, {"stage": 2}, {"stage": 1}, {"stage": 0}, {"branches": "any"}],
    tiers=[*TIERS],
    numbers=[
        ("fp32", {}),
        ("bf16", {"micro_batches": 2}),
        ("fp32", {"max_norm": 0.5}),
        ("bf16", {"max_norm": 0.5}),
    ],
)
def test_the_bits_of_one_plain_optimizer(
    name: str,
    num_ranks: int,
    ranks: dict[str, Any],
    tiers: str,
    numbers: tuple[str, Train],
    pools: RankPools,
    tmp_path: Path,
) -> None:
    precision, how = numbers
    written = Written(name, precision, num_ranks, ranks.get("stage", 1))
    written.train(0, 3, **how)
    settings = {**TIERS[tiers], "nvme": tmp_path, "precision": precision, **ranks}
    for found in pools.of(num_ranks).succeed(run, name, settings, range(3), how):
        assert_found(found, written)


@in_turn(
    name=["Muon and AdamW", "Adafactor", "Remembering", "NAdam", "SGD momentum"],
    before=[(2, 3), (4, 2), (3, 1), (1, 3), (2, 0)],
    after=[(4, 3), (1, 3), (2, 1), (3, 2), (3, 0), (2, 3)],
    tiers=["nvme", "split"],
    by=["files", "checkpoint", "files of machines"],
    precision=["fp32", "bf16"],
)
def test_another_number_of_ranks_goes_on(
    name: str,
    before: tuple[int, int],
    after: tuple[int, int],
    tiers: str,
    by: str,
    precision: str,
    pools: RankPools,
    tmp_path: Path,
) -> None:
    (ranks, stage), (other_ranks, other_stage) = before, after
    saved = tmp_path / "saved" if by == "checkpoint" else None
    places = machines(tmp_path, *"abab") if by == "files of machines" else None
    settings = {**TIERS[tiers], "nvme": tmp_path / "run", "precision": precision}
    written = Written(name, precision, ranks, stage)
    written.train(0, 2)
    for found in pools.of(ranks).succeed(run, name, settings | {"stage": stage}, range(2), {}, places, None, saved):
        assert_found(found, written)
    if saved is not None:
        settings |= {"nvme": tmp_path / "other"}
    written.num_ranks, written.stage = other_ranks, other_stage
    written.train(2, 4)
    job = (name, settings | {"stage": other_stage}, range(2, 4), {}, places, saved)
    for found in pools.of(other_ranks).succeed(run, *job):
        assert_found(found, written)


def run_on_mesh(rank: int, world_size: int, settings: dict[str, Any], steps: range) -> Found:
    model = model_of()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    zo.offload(model, zo.OffloadConfig(existing="resume", **settings), mesh)
    optimizer = zo.unitwise(Remembering(groups_of([*model.parameters()])))
    zo.resume(model, optimizer)
    train(model, [optimizer], (rank, world_size), steps)
    found = read_masters(model), [optimizer.state_dict()]
    zo.close(model)
    return found


def test_replicas_step_alike(pools: RankPools, tmp_path: Path) -> None:
    """Ranks of a hybrid mesh that hold the same part make the same step; their run goes on with two ranks."""
    settings = {**TIERS["split"], "nvme": tmp_path, "precision": "fp32"}
    whole = pools.of(4).succeed(run_on_mesh, settings | {"nvme": tmp_path / "whole"}, range(4))
    settings |= {"nvme": tmp_path / "run"}
    half = pools.of(4).succeed(run_on_mesh, settings, range(2))
    goes_on = pools.of(4).succeed(run_on_mesh, settings, range(2, 4))
    for each in (whole, half, goes_on):
        assert_same(each[0][0], each[3][0])
        assert tree_map(plain, each[0][1]) == tree_map(plain, each[3][1])
    assert_same(goes_on[0][0], whole[0][0])
    assert tree_map(plain, goes_on[0][1]) == tree_map(plain, whole[0][1])


def sent_in_steps(rank: int, world_size: int, settings: dict[str, Any], by_others: bool) -> tuple[int, int]:
    """Bytes that a rank sends in a step, and elements of parts that other ranks step."""
    model, params = model_of(), 0
    zo.offload(model, zo.OffloadConfig(**settings))
    make = torch.optim.SGD if by_others else zo.SGD
    optimizer = make(model.parameters(), 0.1)
    train(model, [zo.unitwise(optimizer) if by_others else optimizer], (rank, world_size), range(2))
    for section in runtime(model).layout.sections:
        for piece in section.params:
            begin, end = section.in_shard(piece, section.steppers[piece.begin])
            params += piece.spec.numel - (end - begin)
    found = sum(zo.stats(model).sent_bytes.values()), params
    zo.close(model)
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_cross_once_each_way(num_ranks: int, pools: RankPools, tmp_path: Path) -> None:
    """Of each element that another rank steps 12 bytes cross: gradient, master, new master. Numbers are few bytes."""
    settings = {**TIERS["memory"], "nvme": tmp_path, "precision": "fp32", "durability": "scratch"}
    theirs, ours = (pools.of(num_ranks).succeed(sent_in_steps, settings, by_others) for by_others in (True, False))
    more = sum(sent for sent, _ in theirs) - sum(sent for sent, _ in ours)
    assert theirs[0][1] > 0
    assert 0 < more - 12 * theirs[0][1] < num_ranks**2 * 300


def reload(rank: int, world_size: int, settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Masters before and after a step: of a model, then of another with its state dicts."""
    found, given = list[dict[str, Tensor]](), list[dict[str, Any]]()
    for name in ("one", "other"):
        model, (optimizer,) = open_on_rank("Adafactor", settings | {"nvme": settings["nvme"] / name})
        if given:
            model.load_state_dict(given[0], strict=False)  # one name of tied weights
            optimizer.load_state_dict(given[1])
        else:
            train(model, [optimizer], (rank, world_size), range(2))
            with zo.gathered(model) as params:
                values = {name: param.detach().clone() for name, param in params.items()}
            given = [values, copy.deepcopy(optimizer.state_dict())]
        found.append(read_masters(model))
        train(model, [optimizer], (rank, world_size), range(2, 3))
        found.append(read_masters(model))
        zo.close(model)
    return found


@pytest.mark.parametrize(("precision", "num_ranks"), [("bf16", 2), ("fp16", 3)])
def test_state_dicts_have_the_masters(precision: str, num_ranks: int, pools: RankPools, tmp_path: Path) -> None:
    for before, after, again, once_more in pools.of(num_ranks).succeed(
        reload, {**TIERS["nvme"], "nvme": tmp_path, "precision": precision}
    ):
        assert_same(again, before)
        assert_same(once_more, after)


def publish(rank: int, world_size: int, name: str, settings: dict[str, Any], steps: range) -> Found:
    """Each step is published, and the next one waits."""
    model, optimizers = open_on_rank(name, settings)
    resumed = zo.resume(model, optimizers[0])
    assert (0 if resumed is None else resumed.step) == steps.start
    for step in steps:
        train(model, optimizers, (rank, world_size), range(step, step + 1))
        wait_until_published(model)
    found = read_masters(model), [optimizer.state_dict() for optimizer in optimizers]
    zo.close(model)
    return found


@in_turn(
    name=["Muon and AdamW", "Remembering", "Adafactor"],
    before=[2, 1, 3],
    after=[1, 2, 2],
    stage=[3, 1],
    precision=["bf16", "fp32"],
)
def test_a_start_without_drives_goes_on_from_what_was_published(
    name: str, before: int, after: int, stage: int, precision: str, pools: RankPools, tmp_path: Path
) -> None:
    """Rows that grow while they are published, too."""
    settings = {**TIERS["nvme"], "precision": precision, "publish": tmp_path / "out", "publish_every": 1}
    written = Written(name, precision, before, stage)
    written.train(0, 2)
    for found in pools.of(before).succeed(
        publish, name, settings | {"nvme": tmp_path / "run", "stage": stage}, range(2)
    ):
        assert_found(found, written)
    written.num_ranks, written.stage = after, 3
    written.train(2, 4)
    for found in pools.of(after).succeed(publish, name, settings | {"nvme": tmp_path / "new"}, range(2, 4)):
        assert_found(found, written)


def planned_and_held(rank: int, world_size: int, settings: dict[str, Any]) -> tuple[int, int]:
    """Bytes of values, masters and states of this rank."""
    model, config = build(lambda: TinyLM(dim=192)), zo.OffloadConfig(**settings)
    planned = zo.plan(model, config, optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    zo.offload(model, config)
    train(model, [zo.unitwise(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))], (rank, world_size), range(1))
    shards = runtime(model).store.shards
    held = sum(shard_bytes(each.layout, each.components) for each in shards)
    zo.close(model)
    return sum(planned.rest_bytes[Tier.CPU, kind] for kind in (StateKind.PARAMS, StateKind.OPTIMIZER)), held


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_plan_has_the_states_of_the_rank_with_the_most(num_ranks: int, pools: RankPools, tmp_path: Path) -> None:
    settings = {"nvme": tmp_path, "durability": "scratch", "precision": "bf16", "params": "cpu", "optimizer": "cpu"}
    found = pools.of(num_ranks).succeed(planned_and_held, settings)
    assert {planned for planned, _ in found} == {found[0][0]}
    assert found[0][0] == pytest.approx(max(held for _, held in found), rel=0.1), "padding is not counted"


def walk_modes(rank: int, world_size: int, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, (optimizer,) = open_on_rank("Averaged", settings)
    train(model, [optimizer], (rank, world_size), range(2))
    optimizer.eval()  # type: ignore[attr-defined]
    averages = read_masters(model)
    optimizer.train()  # type: ignore[attr-defined]
    train(model, [optimizer], (rank, world_size), range(2, 3))
    found = averages, read_masters(model)
    zo.close(model)
    return found


@pytest.mark.parametrize(("stage", "tiers"), [(3, "memory"), (1, "nvme")])
def test_train_and_eval_walk_over_parameters(stage: int, tiers: str, pools: RankPools, tmp_path: Path) -> None:
    written = Written("Averaged", "fp32", 2, stage)
    written.train(0, 2)
    written.optimizers[0].eval()  # type: ignore[attr-defined]
    averages = {name: value.clone() for name, value in written.named().items()}
    written.optimizers[0].train()  # type: ignore[attr-defined]
    written.round()
    written.train(2, 3)
    settings = {**TIERS[tiers], "nvme": tmp_path, "precision": "fp32", "stage": stage}
    for found in pools.of(2).succeed(walk_modes, settings):
        assert_same(found[0], averages)
        assert_same(found[1], written.named())


def change_states(rank: int, world_size: int, settings: dict[str, Any], state_dict: dict[str, Any]) -> dict[str, Any]:
    model, (optimizer,) = open_on_rank("SGD momentum", settings)
    optimizer.load_state_dict(state_dict)
    first, second, *_ = model.parameters()
    entry = dict(optimizer.state[first])
    entry["momentum_buffer"] = entry["momentum_buffer"] * 2
    optimizer.state[first] = entry
    del optimizer.state[second]
    assert first in optimizer.state and second not in optimizer.state
    found = optimizer.state_dict()
    zo.close(model)
    return found


def test_states_are_read_assigned_and_deleted(pools: RankPools, tmp_path: Path) -> None:
    written = Written("SGD momentum", "fp32", 2, 3)
    written.train(0, 1)
    given = written.optimizers[0].state_dict()
    expected = {key: {name: each.clone() for name, each in state.items()} for key, state in given["state"].items()}
    keys = [key for group in given["param_groups"] for key in group["params"]]
    params = [param for group in written.optimizers[0].param_groups for param in group["params"]]
    first, second = (keys[[param is each for each in params].index(True)] for param in written.masters[:2])
    expected[first]["momentum_buffer"] *= 2
    del expected[second]
    settings = {**TIERS["nvme"], "nvme": tmp_path, "precision": "fp32"}
    for found in pools.of(2).succeed(change_states, settings, given):
        assert tree_map(plain, found["state"]) == tree_map(plain, expected)


def fail_alone(rank: int, world_size: int, settings: dict[str, Any], what: str) -> str:
    model, (optimizer,) = open_on_rank("Failing", settings)
    train(model, [optimizer], (rank, world_size), range(2))
    if what == "raises":
        optimizer.param_groups[0]["fails"] = True
    else:
        optimizer.param_groups[0]["lr"] = 0.1 + rank
    try:
        train(model, [optimizer], (rank, world_size), range(2, 3))
    except Exception as error:
        with suppress(Exception):
            zo.close(model)
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "raises",
            ["ZeroOffloadError: rank 1: a matrix that is not finite", "ValueError: a matrix that is not finite"],
        ),
        ("differs", ["ConfigError: .*lr of group 0.*0.1.*1.1"] * 2),
    ],
)
def test_a_rank_that_fails_stops_all(what: str, words: list[str], pools: RankPools, tmp_path: Path) -> None:
    settings = {**TIERS["nvme"], "nvme": tmp_path, "precision": "fp32"}
    try:
        found = pools.of(2).succeed(fail_alone, settings, what)
    finally:
        pools.of(2).renew()
    for each, expected in zip(found, words, strict=True):
        assert re.search(expected, each, re.DOTALL), each
    masters, _ = pools.of(2).succeed(run, "Failing", settings, range(2, 2), {})[0]
    written = Written("Failing", "fp32", 2, 3)
    written.train(0, 2)
    assert_same(masters, written.named())


def step_together(rank: int, world_size: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    model = model_of()
    zo.offload(model, zo.OffloadConfig(**settings))
    optimizer = zo.unitwise(Normalized(model.parameters()), units="all")
    train(model, [optimizer], (rank, world_size), range(2))
    found = read_masters(model)
    zo.close(model)
    return found


def test_steps_of_all_parameters_need_all_states(pools: RankPools, tmp_path: Path) -> None:
    settings = {**TIERS["memory"], "nvme": tmp_path, "precision": "fp32"}
    for failure in pools.of(2).call(step_together, settings | {"stage": 3}):
        assert isinstance(failure, Failure)
        assert "units='all' needs all of it on each rank, and 2 divide it" in failure.message
    written = Written("SGD", "fp32", 2, 0)
    written.optimizers = [Normalized(written.masters)]
    written.train(0, 2)
    for masters in pools.of(2).succeed(step_together, settings | {"stage": 0, "existing": "discard"}):
        assert_same(masters, written.named())
