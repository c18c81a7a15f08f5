"""DTensors of a tensor-parallel model between steps are read and changed as torch's own, which are not offloaded."""

from __future__ import annotations

import copy
import io
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import zero_offload as zo
from tests.helpers.pairwise import full
from tests.helpers.ranks import RankPool, RankPools
from tests.helpers.reference import nearest_bf16
from tests.parity.test_tensor_parallel import (
    FP32,
    Case,
    at,
    divided,
    loss_of,
    message_of,
    start,
)
from tests.parity.test_tensor_parallel import pool as pool
from zero_offload.model.api import runtime_of


def up(model: nn.Module, block: int = 0) -> Any:
    """Divided by rows."""
    return model.get_submodule(f"blocks.{block}.up").weight


def down(model: nn.Module) -> Any:
    """Divided by columns."""
    return model.get_submodule("blocks.1.down").weight


def norm(model: nn.Module) -> Any:
    """The same on all tensor-parallel ranks."""
    return model.get_parameter("norm.weight")


def saved(tensor: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def from_local(model: nn.Module) -> Tensor:
    weight = up(model)
    made: Tensor = DTensor.from_local(weight.data.to_local(), weight.device_mesh, weight.placements)
    return made.mul_(2)


def kept_views(model: nn.Module) -> list[Tensor]:
    """They follow the parameter."""
    view, part = up(model).detach(), up(model).to_local()
    up(model).mul_(2)
    return [view.sum(), part.sum()]


def squares(params: Any) -> Any:
    return sum(param.square().sum().full_tensor() for param in params)


def reduce_parts(model: nn.Module) -> None:
    part = norm(model).to_local().detach()
    dist.all_reduce(part, op=dist.ReduceOp.MAX)


READS: dict[str, Callable[[nn.Module], Any]] = {
    "norms": lambda model: [param.norm() for param in model.parameters()],
    "whole": lambda model: [param.full_tensor() for param in model.parameters()],
    "parts": lambda model: [param.to_local().clone() for param in model.parameters()],
    "views": lambda model: [
        up(model).detach().t().sum(),
        up(model).data.view(-1)[:5],
        up(model)[0],
        up(model).to_local()[1:3].sum(),
        down(model).data.flatten().std(),
    ],
    "histogram": lambda model: torch.histc(up(model).to_local().float(), 10),
    "foreach": lambda model: torch._foreach_norm(list(model.parameters())),
    "total": lambda model: torch.nn.utils.get_total_norm(list(model.parameters())),
    "redistributed": lambda model: [
        up(model).redistribute(placements=[Shard(1)]),
        norm(model).redistribute(placements=[Replicate()]),
    ],
    "copies": lambda model: [copy.deepcopy(up(model)), saved(up(model)), saved(up(model).detach())],
    "dtypes": lambda model: [up(model).double().sum(), up(model).to(torch.float64), up(model).cpu()],
    "products": lambda model: up(model).detach() @ up(model).detach().t(),
    "like": lambda model: [torch.zeros_like(up(model)), torch.ones_like(up(model).data)],
    "derivative": lambda model: torch.autograd.grad((up(model) * up(model)).sum(), [up(model)]),
}

CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": lambda model: up(model).mul_(0.9),
    "data": lambda model: up(model).data.mul_(0.9),
    "detached": lambda model: up(model).detach().add_(0.1),
    "part": lambda model: up(model).to_local().mul_(3),
    "row of a part": lambda model: up(model).data.to_local()[1].zero_(),
    "elements of a part": lambda model: up(model).data.to_local().__setitem__(0, 5.0),
    "clamp": lambda model: [param.clamp_(-0.1, 0.1) for param in model.parameters()],
    "lerp": lambda model: up(model).lerp_(up(model, 1), 0.3),
    "average": lambda model: up(model).mul_(0.99).add_(up(model, 1), alpha=0.01),
    "copy": lambda model: up(model).copy_(up(model, 2)),
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 0.5),
    "foreach of data": lambda model: torch._foreach_add_([param.data for param in model.parameters()], 0.5),
    "foreach lerp": lambda model: torch._foreach_lerp_([up(model), norm(model)], [up(model, 1), norm(model)], 0.5),
    "init": lambda model: [nn.init.constant_(up(model), 0.25), nn.init.zeros_(norm(model))],
    "from_local": from_local,
    "replicated": lambda model: norm(model).full_tensor().mul_(2),
    "kept views": kept_views,
    "collective": reduce_parts,
}


def shown(found: Any) -> list[Tensor]:
    """Whole tensors, apart from what they were read from."""
    if isinstance(found, list | tuple):
        return [each for one in found for each in shown(one)]
    if not isinstance(found, Tensor):
        return []
    return [(found.full_tensor() if isinstance(found, DTensor) else found).detach().float().clone()]


def masters_of(model: nn.Module, params: Iterable[Any]) -> list[Tensor]:
    """This rank's parts, in fp32."""
    if (owner := runtime_of(model)) is None:
        return [param.to_local().detach().clone() for param in params]
    return [owner.access.read_value(param, master=owner.access.keeps_master(param)) for param in params]


def compare(rank: int, world_size: int, case: Case) -> None:
    """Reads and changes on an offloaded model, and on a plain one in fp32."""
    plain, _, _ = divided(case)
    model, _ = start(case)
    is_narrow = case.settings["precision"] == "bf16"
    for name, read in READS.items():
        found = shown(read(model))
        if is_narrow:
            assert found and all(each.isfinite().all() for each in found), name
            continue
        expected = shown(read(plain))
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), name
    for name, change in CHANGES.items():
        with torch.no_grad():
            change(plain), change(model)
        found, expected = (masters_of(each, [up(each), norm(each)]) for each in (model, plain))
        assert all(map(torch.equal, found, expected)), name
    found, expected = (masters_of(each, each.parameters()) for each in (model, plain))
    assert all(map(torch.equal, found, expected))
    for found, whole in zip(shown(list(model.parameters())), shown(list(plain.parameters())), strict=True):
        assert torch.equal(found, nearest_bf16(whole).float() if is_narrow else whole)
    zo.close(model)


@pytest.mark.parametrize(
    ("shape", "stage", "precision", "tier"),
    [
        ((2, 2), 3, "fp32", "cpu"),
        ((1, 2), 0, "bf16", "cpu"),
        ((2, 2), 0, "bf16", "nvme"),
        *(full(shape, stage, "fp32", "nvme") for shape in ((1, 4), (2, 1)) for stage in (0, 1, 2)),
        *(full((2, 2), stage, "bf16", "cpu") for stage in (1, 2, 3)),
    ],
)
def test_reads_and_changes_are_those_of_plain_dtensors(
    shape: tuple[int, ...], stage: int, precision: str, tier: str, pools: RankPools, nvme: Path
) -> None:
    case = at(FP32, precision=precision, stage=stage, params=tier, optimizer=tier, nvme=nvme)
    pools.of(math.prod(shape)).succeed(compare, replace(case, shape=shape))


def train(rank: int, world_size: int, case: Case, is_plain: bool) -> tuple[list[float], list[Tensor]]:
    """Steps, between which DTensors are read and changed; a penalty on them is a part of the loss. All ranks see the
    same data."""
    if is_plain:
        model, _, _ = divided(case)
        parts = [nn.Parameter(part) for part in masters_of(model, model.parameters())]
        optimizer, resumed = zo.AdamW(parts, lr=1e-2, weight_decay=0.1), None
    else:
        model, optimizer = start(case)
        resumed = zo.resume(model, optimizer)
    losses, kept = list[float](), up(model).detach()
    params: list[Any] = list(model.parameters())
    for step in range(0 if resumed is None else resumed.extra, case.num_steps):
        penalty = squares([up(model), norm(model)]) * 1e-3 + (kept * kept).sum().full_tensor()
        loss = loss_of(model, step, slice(None)) + penalty
        losses.append(loss.item())
        loss.backward()
        for param, part in zip(params, parts, strict=True) if is_plain else ():
            part.data.copy_(param.to_local())
            part.grad = param.grad.redistribute(placements=param.placements).to_local().contiguous()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param, part in zip(params, parts, strict=True) if is_plain else ():
                param.to_local().copy_(part)
                param.grad = None
            for param in params:
                param.clamp_(-0.2, 0.2)
            up(model).lerp_(up(model, 1), 0.1)
        if not is_plain:
            zo.commit(model, optimizer, extra=step + 1)
    found = shown(params)
    zo.close(model) if not is_plain else None
    return losses, found


@pytest.mark.parametrize(("shape", "stage"), [((2, 2), 3), full((1, 2), 1), full((2, 2), 0)])
def test_training_with_changes_between_steps(shape: tuple[int, ...], stage: int, pools: RankPools, nvme: Path) -> None:
    pool = pools.of(math.prod(shape))
    case = replace(at(FP32, stage=stage, params="nvme", optimizer="nvme", nvme=nvme, existing="resume"), shape=shape)
    expected = pool.succeed(train, case, True)
    pool.succeed(train, replace(case, num_steps=2), False)  # a change is a part of the generation of its step
    for (losses, params), (its_losses, its_params) in zip(pool.succeed(train, case, False), expected, strict=True):
        assert losses == its_losses[2:]
        assert all(map(torch.equal, params, its_params))


def go_wrong(rank: int, world_size: int, case: Case) -> dict[str, str]:
    """The errors of an offloaded model, which then has its values of before."""
    model, optimizer = start(case)
    frozen, weight, other = norm(model), up(model), rank // case.shape[-1]
    frozen.requires_grad_(False)
    before, all_reduce = shown([frozen, weight]), torch.ops._c10d_functional.all_reduce_
    squares([weight]).backward()
    with torch.no_grad():
        messages = {
            "other values": message_of(partial(weight.mul_, 2.0 + other)),
            "data": message_of(partial(setattr, weight, "data", torch.zeros_like(weight))),
            "half": message_of(model.half),
            "shared": message_of(weight.share_memory_),
            "under way": message_of(partial(all_reduce, weight.to_local(), "sum", dist.group.WORLD.group_name)),
            "optimizer": message_of(torch.optim.SGD(model.parameters(), lr=0.1).step),
        }
    messages["recorded"] = message_of(partial(frozen.add_, frozen * up(model).sum()))
    assert all(map(torch.equal, before, shown([frozen, weight])))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        weight.mul_(2)
    total = weight.square().sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    part, gone = weight.to_local(), weakref.ref(weight)
    zo.close(model)
    messages["closed"] = message_of(part.sum)
    del model, optimizer, weight, frozen, total, part
    assert gone() is None  # its part does not keep it
    return messages


@pytest.mark.parametrize("shape", [(2, 1), full((2, 2))])
def test_errors(shape: tuple[int, ...], pools: RankPools) -> None:
    for found in pools.of(math.prod(shape)).succeed(go_wrong, replace(at(FP32, stage=3), shape=shape)):
        assert "the checksum of new values of blocks.0.up.weight" in found["other values"]
        assert "blocks.0.up.weight, offloaded to cpu, a DTensor. torch's own DTensor keeps its part" in found["data"]
        assert "an offloaded model keeps its dtype" in found["half"] and "keeps its dtype" in found["shared"]
        assert "all_reduce_ needs the memory of parameter blocks.0.up.weight" in found["under way"]
        assert "torch's SGD cannot step parameter" in found["optimizer"]
        assert "a result that autograd records" in found["recorded"] and "closed by zo.close" in found["closed"]


def draw(rank: int, world_size: int, case: Case) -> Tensor:
    model, _ = start(case)
    torch.manual_seed(rank)
    nn.init.normal_(up(model))
    drawn: Tensor = up(model).to_local().detach().clone()
    zo.close(model)
    return drawn


def test_random_numbers_are_those_of_the_first_rank_with_a_part(pool: RankPool) -> None:
    found = pool.succeed(draw, at(FP32, stage=3))  # ranks 0 and 1 have the first model, 2 and 3 the second
    assert torch.equal(found[2], found[0]) and torch.equal(found[3], found[1])
    assert torch.equal(found[0], torch.empty_like(found[0]).normal_(generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(found[0], found[1])
