"""A wrapper of torch that divides or copies a model is refused, before and after zo.offload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DataParallel, DistributedDataParallel

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import placed
from tests.helpers.twins import train

Wrap = Callable[[nn.Module], object]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0])


AROUND: dict[str, Wrap] = {
    "fully_shard": lambda model: fully_shard(model, mesh=mesh()),
    "fully_shard of a block": lambda model: fully_shard(model.blocks[1], mesh=mesh()),
    "fully_shard around": lambda model: fully_shard(nn.Sequential(model, nn.Linear(2, 2)), mesh=mesh()),
    "DistributedDataParallel": DistributedDataParallel,
    "DistributedDataParallel without a look": partial(DistributedDataParallel, init_sync=False),
    "FullyShardedDataParallel": partial(FullyShardedDataParallel, device_id=torch.device("cpu")),
}
DIVIDED: dict[str, Wrap] = {
    "columns": lambda model: parallelize_module(model.blocks[0], mesh(), {"up": ColwiseParallel()}),
    "rows": lambda model: parallelize_module(model.blocks[0].down, mesh(), RowwiseParallel()),
    "sequence": lambda model: parallelize_module(model, mesh(), {"norm": SequenceParallel()}),
}


def twin_steps(model: nn.Module) -> list[list[float]]:
    models = (model, build(TinyLM))
    return [list(train(each, zo.AdamW(each.parameters()), range(2))) for each in models]


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("name", [*AROUND, *DIVIDED])
def test_around_an_offloaded_model(name: str, tier: str, nvme: Path) -> None:
    """The model works afterwards."""
    model = zo.offload(build(TinyLM), placed("fp32", (tier,) * 3, nvme if tier == "nvme" else None))
    with pytest.raises(zo.ZeroOffloadError, match=rf"torch's .* cannot take parameter .*, offloaded to {tier}.*stage="):
        (AROUND | DIVIDED)[name](model)
    found, expected = twin_steps(model)
    assert found == expected


@pytest.mark.parametrize("name", [*AROUND, "DataParallel", "replicate"])
def test_before_zo_offload(name: str) -> None:
    model = build(TinyLM)
    wrapped = (AROUND | {"DataParallel": DataParallel, "replicate": replicate})[name](model)
    with pytest.raises(zo.ConfigError, match="is wrapped by torch's .*plain model"):
        zo.offload(wrapped if name != "fully_shard of a block" else model, zo.OffloadConfig(precision="fp32"))


def test_what_wraps_without_a_look_is_refused_in_forward() -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32"))
    replicate(model)
    for _ in range(2):
        with pytest.raises(zo.ZeroOffloadError, match="torch's replicate cannot take an offloaded TinyLM"):
            model(tokens_of(0))


def test_others_of_torch_distributed_may_ask() -> None:
    model, plain = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32")), build(TinyLM)
    state = get_model_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    set_model_state_dict(model, {name: value * 2 for name, value in state.items()})
    assert all(torch.equal(model.state_dict()[name], value * 2) for name, value in plain.state_dict().items())
