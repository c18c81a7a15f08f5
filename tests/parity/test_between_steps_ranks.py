"""Parameters at rest on several ranks are read and changed as on one, at every stage and on every tier."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import signal
import time
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import swa_utils

import zero_offload as zo
from tests.helpers.bases import opened, steps, write_base
from tests.helpers.between_steps import (
    CHANGES,
    WIDTH,
    Offloaded,
    Pair,
    Plain,
    program,
    resume_on_rank,
    run,
    run_and_die,
    run_on_rank,
)
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import RankPools
from tests.helpers.reference import read_masters
from tests.helpers.trainer import fork_server
from zero_offload.model.api import runtime_of
from zero_offload.runtime.ranks import collectives

TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"params": "cpu"},
    "nvme": {"params": "nvme", "optimizer": "nvme"},
    "mixed": {"params": "cpu", "grads": "nvme", "optimizer": {"cpu": 0.5, "nvme": 0.5}},
    "device": {"params": "device", "grads": "device", "optimizer": "device"},
}


def check(
    seed: int,
    num_ranks: int,
    stage: int,
    tier: str,
    precision: str,
    pools: RankPools,
    nvme: Path,
    length: int = 12,
    **more: Any,
) -> None:
    calls = program(seed, length, precision=precision, num_ranks=num_ranks)
    plain = Plain(precision, num_ranks, width=WIDTH, defers=stage == 1)
    expected = run(plain, calls)
    settings = {"precision": precision, "stage": stage, "nvme": nvme, **TIERS[tier], **more}
    for rank, (found, masters) in enumerate(pools.of(num_ranks).succeed(run_on_rank, settings, calls)):
        assert [a == b for a, b in zip(found, expected, strict=True)].count(False) == 0, rank
        assert all(torch.equal(masters[name], master) for name, master in plain.masters().items()), rank


@in_turn(
    num_ranks=[2],
    stage=[0, 1, 2, 3, 3, 2, 1, 0],
    tier=[*TIERS],
    precision=["fp32", "bf16"],
    seed=[0, 1, 2, 3, 4, 5, 6, 7],
)
def test_a_random_program(
    num_ranks: int, stage: int, tier: str, precision: str, seed: int, pools: RankPools, nvme: Path
) -> None:
    check(seed, num_ranks, stage, tier, precision, pools, nvme)


@pytest.mark.parametrize("seed", [full(seed) for seed in range(100, 160)])
def test_many_random_programs(seed: int, pools: RankPools, nvme: Path) -> None:
    number = seed // 4
    check(
        seed, 2 + number % 3, seed % 4, [*TIERS][number % 4], ("fp32", "bf16")[number // 4 % 2], pools, nvme, length=16
    )


@in_turn(num_ranks=[3, 4], stage=[3, 1, 0, 2], tier=["cpu", "nvme"], seed=[20, 21, 22, 23])
def test_three_and_four_ranks(num_ranks: int, stage: int, tier: str, seed: int, pools: RankPools, nvme: Path) -> None:
    check(seed, num_ranks, stage, tier, "fp32", pools, nvme)


@in_turn(stage=[0, 1, 2, 3], tier=["cpu", "nvme"], seed=[30, 31])
def test_fp16_is_that_of_one_rank(stage: int, tier: str, seed: int, pools: RankPools, nvme: Path) -> None:
    calls = program(seed, 12, precision="fp16", num_ranks=2)
    settings = {"precision": "fp16", "stage": stage, **TIERS[tier]}
    expected, masters = run_on_rank(0, 1, settings | {"nvme": nvme / "alone"}, calls)
    for found, others in pools.of(2).succeed(run_on_rank, settings | {"nvme": nvme / "ranks"}, calls):
        assert found == expected and all(torch.equal(others[name], master) for name, master in masters.items())


@in_turn(stage=[3, 1, 2], tier=["nvme", "cpu"], mesh=[((0, 1), (2, 3)), ((0, 2), (1, 3))], seed=[40, 41, 42])
def test_hybrid_sharding(stage: int, tier: str, mesh: Any, seed: int, pools: RankPools, nvme: Path) -> None:
    check(seed, 4, stage, tier, "bf16", pools, nvme, mesh=mesh)


@in_turn(sizes=[(2, 1), (1, 2), (2, 3)], stage=[3, 1], change=["average", "rows", "init"])
def test_a_change_is_in_the_generation_of_other_ranks(
    sizes: tuple[int, int], stage: int, change: str, pools: RankPools, nvme: Path
) -> None:
    first, then = sizes
    settings = {"precision": "fp32", "stage": stage, "nvme": nvme, **TIERS["nvme"]}
    calls: list[tuple[str, Any]] = [("step", 0), ("change", change), ("commit", 0)]
    look: list[tuple[str, Any]] = [("read", 0)]
    plain = Plain("fp32", first, width=WIDTH, defers=stage == 1)
    run(plain, calls)
    expected, masters = run(plain, look), plain.masters()
    pools.of(first).succeed(run_on_rank, settings, calls)
    for found, others in pools.of(then).succeed(run_on_rank, settings, look):
        assert found == expected and all(torch.equal(others[name], masters[name]) for name in masters)


# One rank alone, or otherwise


def offloaded(rank: int, world_size: int, stage: int, **settings: Any) -> Offloaded:
    return Offloaded({"precision": "fp32", "stage": stage, "params": "cpu", **settings}, rank, world_size, width=WIDTH)


def read_alone(rank: int, world_size: int, stage: int, other: str) -> tuple[str, list[str]]:
    """Rank 0 reads, the other one steps, reads something else, ends or comes late: the error and warnings."""
    twin, message = offloaded(rank, world_size, stage), ""
    weight, bias = twin.model.student[0].weight, twin.model.student[0].bias
    with mock.patch.object(collectives, "WARN_S", 0.2), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            if rank == 0:
                weight.norm()
                if other == "writes":
                    bias.norm()
            elif other == "is late":
                time.sleep(0.6)
                weight.norm()
            elif other == "steps":
                twin.loss(0)(rank)
            elif other == "reads":
                bias.norm()
            elif other == "writes":
                weight.detach().zero_()
            else:
                time.sleep(0.6)
                zo.close(twin.model)
        except zo.ZeroOffloadError as error:
            message = str(error)
    return message, [str(each.message) for each in told]


@pytest.mark.parametrize("other", ["is late", "steps", "reads", "writes", "ends"])
def test_a_rank_that_reads_alone(other: str, pools: RankPools) -> None:
    pool = pools.of(2)
    (message, told), (others, _) = pool.succeed(read_alone, 3, other)
    pool.renew()
    read = "a read of parameter student.0.weight, which all ranks make (so not under 'if rank == 0:')"
    if other in ("is late", "ends"):
        assert told == [f"rank 0 has waited 0.2 s for rank 1 in {read}"]
    if other == "is late":
        assert message == others == ""
    elif other == "ends":
        assert "rank 1" in message and f"in {read}" in message
    else:
        mine, others_place = {
            "steps": ("a read of parameter student.0.weight", "the gather of parameters of "),
            "reads": ("a read of parameter student.0.weight", "a read of parameter student.0.bias"),
            "writes": ("a read of parameter student.0.bias", "a change of parameter student.0.weight"),
        }[other]
        assert f"rank 0 is at {mine}" in message and f"rank 1 at {others_place}" in message and message == others


def write_otherwise(rank: int, world_size: int, stage: int, which: str) -> tuple[str, bool]:
    """Ranks give a parameter other values: the error, and whether the model has its values of before, and trains. It
    is of no more use where a block has changed them in place."""
    twin = offloaded(rank, world_size, stage)
    before, weight = twin.masters(), twin.model.student[0].weight
    message = ""
    try:
        with torch.no_grad():
            if which == "a number":
                weight.add_(0.5 + rank)
            elif which == "a tensor":
                weight.copy_(torch.full_like(weight, float(rank)))
            elif which == "noise":
                torch.manual_seed(rank)
                weight.add_(torch.randn_like(weight))
            elif which == "data":
                weight.data = torch.full(weight.shape, float(rank))
            elif which == "a block":
                with zo.gathered(twin.model.student, mode="write"):
                    weight[rank] = 0.5
    except zo.ConfigError as error:
        message = str(error)
    if which == "a block" and stage == 0:
        with pytest.raises(zo.ZeroOffloadError, match="states are a mix of two"):
            twin.backward(twin.loss(0))
        zo.close(twin.model)
        return message, True
    found = twin.masters()
    is_same = all(torch.equal(found[name], before[name]) for name in before)
    twin.backward(twin.loss(0))
    twin.step()
    zo.close(twin.model)
    return message, is_same


@pytest.mark.parametrize("which", ["a number", "a tensor", "noise", "data", "a block"])
@pytest.mark.parametrize("stage", [0, 3, *map(full, (1, 2))])
def test_ranks_that_write_other_values(stage: int, which: str, pools: RankPools) -> None:
    for message, is_same in pools.of(2).succeed(write_otherwise, stage, which):
        what = "the checksum of new values of student.0.weight is"
        assert what in message and "on rank 0" in message and "on rank 1" in message
        assert is_same


def write_failing(rank: int, world_size: int, stage: int) -> tuple[str, dict[str, Tensor]]:
    """Rank 1 has no room for what a frozen parameter needs to be changed."""
    nvme = [None]
    dist.broadcast_object_list(nvme)
    twin = offloaded(rank, world_size, stage)
    message = ""
    states = runtime_of(twin.model).states
    reserve = states.reserve

    def refuse(places: Any) -> None:
        reserve(places)
        if rank == 1:
            raise zo.CapacityError("no room")

    with mock.patch.object(states, "reserve", refuse):
        try:
            twin.change(CHANGES["average"])
        except zo.CapacityError as error:
            message = str(error)
    masters = twin.masters()
    zo.close(twin.model)
    return message, masters


@pytest.mark.parametrize("stage", [0, 3])
def test_an_error_of_one_rank_is_that_of_all(stage: int, pools: RankPools) -> None:
    (first, masters), (second, others) = pools.of(2).succeed(write_failing, stage)
    assert first == "rank 1: no room" and second == "no room"
    plain = Plain("fp32", width=WIDTH).masters()
    assert all(torch.equal(masters[name], plain[name]) and torch.equal(others[name], plain[name]) for name in plain)


# Random numbers


def draw(params: list[Any]) -> None:
    nn.init.kaiming_uniform_(params[0])
    params[1].bernoulli_(0.25)
    F.dropout(params[2], 0.5, inplace=True)
    nn.init.orthogonal_(params[2])
    nn.init.sparse_(params[0], 0.5)
    nn.init.trunc_normal_(params[0], std=0.5)
    params[3].uniform_(generator=torch.Generator().manual_seed(_seed()))


def _seed() -> int:
    return 7 + (dist.get_rank() if dist.is_initialized() else 0)


def draw_on_ranks(rank: int, world_size: int, stage: int) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Masters, and what each rank draws next; also on a plain model of its own."""
    twin, plain = offloaded(rank, world_size, stage), build(lambda: Pair(WIDTH))
    after = []
    for model in (twin.model, plain):
        torch.manual_seed(20 + rank)
        with torch.no_grad():
            draw(list(model.student.parameters()))
        after.append(torch.rand(3).tolist())
    masters = twin.masters()
    zo.close(twin.model)
    return masters, *after


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_random_numbers_are_those_of_rank_0(stage: int, pools: RankPools) -> None:
    """Each rank's generator goes on where the plain function would have left it."""
    plain = build(lambda: Pair(WIDTH))
    torch.manual_seed(20)
    with torch.no_grad():
        draw(list(plain.student.parameters()))
    for masters, after, expected in pools.of(2).succeed(draw_on_ranks, stage):
        assert after == expected
        assert all(torch.equal(masters[name], param) for name, param in plain.named_parameters())


# Two models


def follow_on_ranks(rank: int, world_size: int, stage: int, in_blocks: bool) -> list[str]:
    """Names of a teacher's parameters that are not those of a plain one."""
    models = [build(lambda: Pair(WIDTH)), build(lambda: Pair(WIDTH), 1).requires_grad_(False)]
    student, teacher = models
    plain_student, plain_teacher = map(copy.deepcopy, models)
    for model in models:
        zo.offload(model, zo.OffloadConfig(precision="fp32", stage=stage))

    def follow(teacher: nn.Module, student: nn.Module) -> None:
        for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
            t.mul_(0.9).add_(s, alpha=0.1)
            t.data.lerp_(s.data, 0.5)
            t.add_(s.detach().clone())
            t.data.add_(s.data)

    with torch.no_grad():
        follow(plain_teacher, plain_student)
        if in_blocks:
            with zo.gathered(student), zo.gathered(teacher, mode="write"):
                follow(teacher, student)
        else:
            follow(teacher, student)
    found = read_masters(teacher)
    copies = copy.deepcopy(teacher).state_dict()
    wrong = [
        name
        for name, param in plain_teacher.named_parameters()
        if not torch.equal(found[name], param) or not torch.equal(copies[name], param)
    ]
    for model in models:
        zo.close(model)
    return wrong


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_teacher_follows_a_student_of_another_model(stage: int, in_blocks: bool, pools: RankPools) -> None:
    assert pools.of(2).succeed(follow_on_ranks, stage, in_blocks) == [[], []]


def break_off(rank: int, world_size: int, stage: int, nvme: Path) -> tuple[int, bool]:
    """Rank 1 leaves a block that writes by an exception: the step of a resume after that."""
    twin = offloaded(rank, world_size, stage, nvme=nvme, params="nvme", optimizer="nvme", commit_every=1)
    twin.backward(twin.loss(0))
    twin.step()
    twin.backward(twin.loss(1))
    twin.step()
    with contextlib.suppress(KeyError), zo.gathered(twin.model.teacher, mode="write"), torch.no_grad():
        twin.model.teacher[0].weight.fill_(2.0)
        if rank == 1:
            raise KeyError
    assert twin.model.teacher[0].weight.eq(2.0).all()
    zo.close(twin.model)
    again = offloaded(rank, world_size, stage, nvme=nvme, params="nvme", optimizer="nvme")
    resumed = zo.resume(again.model, again.optimizer)
    assert resumed is not None
    is_filled = bool(again.model.teacher[0].weight.eq(2.0).all())
    zo.close(again.model)
    return resumed.step, is_filled


@pytest.mark.parametrize("stage", [0, 3])
def test_a_block_that_breaks_off_on_one_rank(stage: int, pools: RankPools, nvme: Path) -> None:
    assert pools.of(2).succeed(break_off, stage, nvme) == [(1, False)] * 2


# Other forms of a parameter at rest


def change_base(rank: int, world_size: int, folder: Path, nvme: Path, settings: dict[str, Any]) -> list[float]:
    """Frozen weights rest in files of others until they are changed; losses of a later step, and after a resume."""
    given = {"nvme": nvme, "precision": "bf16", **settings}
    model, optimizer = opened(folder, zo.OffloadConfig(**given))
    steps(model, optimizer, 0, 1)
    weights = [model.blocks[1].up.weight, model.embedding.weight]
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(0.5)
            weight[3] = 0.25
    for weight, values in zip(weights, before, strict=True):
        values.mul_(0.5)[3] = 0.25
        assert torch.equal(weight, values)
    losses = steps(model, optimizer, 1, 2)
    zo.close(model)
    model, optimizer = opened(None, zo.OffloadConfig(existing="resume", **given))
    zo.resume(model, optimizer)
    losses += steps(model, optimizer, 2, 3)
    zo.close(model)
    return losses


@pytest.mark.parametrize("tier", [{"params": "nvme"}, {"params": "cpu"}], ids=["nvme", "cpu"])
@pytest.mark.parametrize("stage", [3, 1, *map(full, (0, 2))])
def test_weights_that_rest_in_files_of_others(
    stage: int, tier: dict[str, Any], pools: RankPools, tmp_path: Path
) -> None:
    folder = write_base(tmp_path / "base")
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    settings = {"optimizer": "nvme", "stage": stage, **tier}
    expected = change_base(0, 1, folder, tmp_path / "alone", settings)
    assert pools.of(2).succeed(change_base, folder, tmp_path / "run", settings) == [expected] * 2
    assert all(path.read_bytes() == content for path, content in kept.items())


def penalize(rank: int, world_size: int, settings: dict[str, Any]) -> tuple[int, list[str]]:
    """A penalty over all parameters: how many copies of them lived at once, and names whose gradients are wrong."""
    model, plain = build(TinyLM), build(TinyLM)
    zo.offload(model, zo.OffloadConfig(precision="fp32", **settings))
    access, most, known = runtime_of(model).access, 0, list[Any]()
    read = access.read_value

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal most
        values = read(*args, **kwargs)
        known.append(weakref.ref(values.untyped_storage()))
        most = max(most, sum(each() is not None for each in known))
        return values

    with mock.patch.object(access, "read_value", counted):
        for each in (model, plain):
            sum((param.square().sum() + param.norm() for param in each.parameters()), torch.zeros(())).backward()
    times = world_size if settings.get("grad_reduction") == "sum" else 1
    with zo.gathered(model, kind="grads") as grads:
        wrong = [name for name, param in plain.named_parameters() if not torch.equal(grads[name], param.grad * times)]
    count = zo.stats(model).param_reads
    zo.close(model)
    return most, [*wrong, *([] if count.num_reads else ["no reads are counted"])]


@in_turn(stage=[3, 2, 1], tier=["nvme", "cpu"], reduction=["mean", "sum"])
def test_a_penalty_outside_of_forward(stage: int, tier: str, reduction: str, pools: RankPools, nvme: Path) -> None:
    settings = {"stage": stage, "grad_reduction": reduction, "nvme": nvme, "durability": "scratch", **TIERS[tier]}
    for most, wrong in pools.of(2).succeed(penalize, settings):
        assert most <= 2 and wrong == []


def average(rank: int, world_size: int, stage: int) -> list[str]:
    """`AveragedModel` of torch, a saved parameter and arrays: names that are wrong."""
    averages, wrong = [], []
    for is_offloaded in (False, True):
        model = build(TinyLM)
        if is_offloaded:
            zo.offload(model, zo.OffloadConfig(precision="fp32", stage=stage))
        optimizer = zo.SGD(model.parameters(), lr=0.5)
        kept = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        for step in range(3):
            model(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.update_parameters(model)
        torch.save({"param": model.norm.weight}, file := io.BytesIO())
        file.seek(0)
        saved = torch.load(file, weights_only=True)["param"]
        wrong += [] if torch.equal(saved, model.norm.weight) else ["saved"]
        wrong += [] if np.array_equal(model.norm.weight.detach().numpy(), saved.detach().numpy()) else ["array"]
        averages.append(kept)
    zo.close(model)
    plain, found = averages
    pairs = zip(plain.named_parameters(), found.parameters(), strict=True)
    return wrong + [name for (name, a), b in pairs if not torch.equal(a, b)]


@pytest.mark.parametrize("stage", [0, 3])
def test_copies_are_ordinary(stage: int, pools: RankPools) -> None:
    assert pools.of(2).succeed(average, stage) == [[], []]


# Kills


@in_turn(stage=[3, 0, 1, 2], tier=["nvme", "mixed"], precision=["fp32", "bf16"], seed=[60, 61, 62, 63])
def test_a_rank_is_killed_within_a_change(
    stage: int, tier: str, precision: str, seed: int, pools: RankPools, tmp_path: Path
) -> None:
    """A resume has all of a change, or nothing of it, on both ranks; the rest of the program gives the same bits."""
    draw = random.Random(seed)
    kinds = ["average", "average at once", "copy", "clip", "decay", "rows"]
    calls: list[tuple[str, Any]] = [("step", 0)]
    for index in range(1, 9):
        calls.append(("change", draw.choice(kinds)) if index % 2 else ("step", index))
    plain = Plain(precision, 2, width=WIDTH, defers=stage == 1)
    run(plain, calls)
    settings = {"precision": precision, "stage": stage, "nvme": tmp_path / "run", **TIERS[tier]}
    for kill in range(2):
        args = (str(tmp_path / f"store{kill}"), settings, calls, draw.randrange(1, 8))
        both = [fork_server().Process(target=run_and_die, args=(rank, *args)) for rank in (0, 1)]
        for process in both:
            process.start()
        for process in both:
            process.join(120)
        assert both[1].exitcode == -signal.SIGKILL and both[0].exitcode == 0
    (begin, masters), (other, others) = pools.of(2).succeed(resume_on_rank, settings, calls)
    assert begin == other
    for name, master in plain.masters().items():
        assert torch.equal(masters[name], master) and torch.equal(others[name], master), name


# Collectives of the program


def call_collectives(rank: int, world_size: int, settings: dict[str, Any]) -> list[str]:
    """Collectives on what is at rest do to it what they do to plain tensors. Returns the names of those that do not."""
    twin = Offloaded(settings, rank, world_size, width=WIDTH)
    model = twin.model
    weight, bias = model.student[0].weight, model.student[0].bias
    twin.backward(twin.loss(0))
    wrong = list[str]()

    def compare(name: str, call: Any, *tensors: Tensor) -> None:
        plain = [tensor.clone() for tensor in tensors]
        call(*plain), call(*tensors)
        if not all(map(torch.equal, tensors, plain)):
            wrong.append(name)

    noise = torch.full_like(bias, 1.0 + rank)
    compare("gradient", dist.all_reduce, weight.grad)
    compare("gradient from one", partial(dist.broadcast, src=1), bias.grad)
    compare("values", dist.all_reduce, weight.data)
    compare("parameter", partial(dist.broadcast, src=1), weight)
    compare("under way", lambda tensor: dist.all_reduce(tensor, async_op=True).wait(), weight.data)
    compare("view", dist.all_reduce, weight.data[1])
    compare("scattered", lambda tensor: dist.scatter(tensor, [noise, noise] if rank == 0 else None), bias.data)
    if settings["stage"] == 0:
        compare("state", dist.all_reduce, model.state_dict()["student.0.weight"])
        before = bias.detach().clone()
        dist.all_reduce(model.state_dict()["student.0.bias"])
        if not torch.equal(bias, before * 2):
            wrong.append("state of the model")
    into = torch.empty(2 * bias.numel(), dtype=bias.dtype)
    dist.all_gather_into_tensor(into, bias.detach())
    if not torch.equal(into, torch.cat([bias.detach(), bias.detach()])):
        wrong.append("read")
    own = torch.full_like(bias, 3.0 + rank)

    def gather(*tensors: Tensor) -> None:
        dist.all_gather(list(tensors), own.to(tensors[0].dtype))

    bias.data.mul_(1.001)  # fp32 masters get bits that 16 do not have
    compare("list", gather, bias.data, torch.empty_like(own))
    compare("of a group", lambda tensor: dist.group.WORLD.allreduce([tensor]).wait(), bias.data)
    bias.data.mul_(1.001)
    compare("exchanged", lambda *tensors: dist.all_to_all(list(tensors), [own] * 2), bias.data, torch.empty_like(own))
    with torch.no_grad():
        compare("list of parameters", gather, bias, torch.empty_like(own))
    compare("list of gradients", gather, bias.grad, torch.empty_like(bias.grad.detach().clone()))
    if not torch.equal(twin.masters()["student.0.bias"], bias.detach().float()):
        wrong.append("master")
    with contextlib.suppress(zo.ConfigError):
        dist.reduce(weight.data, dst=0)
        wrong.append("values of one rank alone")
    zo.close(model)
    return wrong


@in_turn(stage=[0, 3, 1, 2], tier=["cpu", "nvme"], precision=["fp32", "bf16"])
def test_collectives_of_the_program(stage: int, tier: str, precision: str, pools: RankPools, nvme: Path) -> None:
    settings = {"precision": precision, "stage": stage, "nvme": nvme, **TIERS[tier]}
    assert pools.of(2).succeed(call_collectives, settings) == [[], []]
