"""torch.func's transforms over an offloaded model: the numbers of a plain one, wherever parameters rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import zero_offload as zo
from tests.helpers.models import WIDE, Block, build
from tests.helpers.twins import assert_same


def blocks() -> nn.Module:
    return nn.Sequential(*(Block(WIDE) for _ in range(3)))


def x_of(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size((*shape, WIDE)).numel()).reshape(*shape, WIDE)


def few(model: nn.Module, x: Tensor) -> Tensor:
    """Of the elements of an input the first three, so that derivatives of it are small."""
    return model(torch.cat([x, x_of(1)[0, 3:]])).pow(3)[:4]  # type: ignore[no-any-return]


def of_samples(model: nn.Module) -> Tensor:
    return vmap(grad(lambda x: model(x).pow(2).sum()))(x_of(3))


def of_params(model: nn.Module) -> Tensor:
    """Per sample."""

    def loss(bias: Tensor, x: Tensor) -> Tensor:
        return functional_call(model, {"1.up.bias": bias}, (x,)).pow(2).sum()  # type: ignore[no-any-return]

    return vmap(grad(loss), (None, 0))(torch.ones(4 * WIDE), x_of(3))


FORWARD: dict[str, Callable[[nn.Module], Tensor]] = {
    "vmap": lambda model: vmap(model)(x_of(3, 2)),
    "vmap of vmap": lambda model: vmap(vmap(model))(x_of(3, 2)),
    "jvp": lambda model: jvp(model, (x_of(2),), (torch.ones(2, WIDE),))[1],
    "jacfwd": lambda model: jacfwd(partial(few, model))(torch.ones(3)),
}
"""No graph is kept: units come and go."""
REVERSE: dict[str, Callable[[nn.Module], Tensor]] = {
    "grad": lambda model: grad(lambda x: model(x).sum())(x_of(2)),
    "vjp": lambda model: vjp(model, x_of(2))[1](torch.ones(2, WIDE))[0],
    "jacrev": lambda model: jacrev(partial(few, model))(torch.ones(3)),
    "hessian": lambda model: hessian(lambda x: few(model, x).sum())(torch.ones(3)),
    "per sample": of_samples,
    "per sample, of parameters": of_params,
}
"""torch allows no hooks on what these save, so units stay until it is gone."""


def steps(compute: Callable[[nn.Module], Tensor], model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for _ in range(2):
        with torch.no_grad():
            yield compute(model).double().sum().item()
        loss = compute(model).square().mean()
        loss.backward()  # the transform's result has a graph to the parameters
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@pytest.mark.parametrize("name", FORWARD)
def test_without_a_graph_there_need_be_room_for_one_unit(name: str, nvme_config: zo.OffloadConfig) -> None:
    assert_same(partial(steps, FORWARD[name]), blocks, nvme_config)


@pytest.mark.filterwarnings("ignore:a view of")
@pytest.mark.parametrize("name", REVERSE)
def test_derivatives_keep_units_in_memory(name: str, nvme_config: zo.OffloadConfig) -> None:
    config = zo.OffloadConfig.from_dict(nvme_config.to_dict() | {"device_memory": None})
    assert_same(partial(steps, REVERSE[name]), blocks, config)


def test_derivatives_without_room_for_all_units_are_refused(nvme_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(blocks), nvme_config)
    with pytest.raises(zo.CapacityError, match=r"a view of .* is held.* Raise device_memory"):
        REVERSE["grad"](model)
    before = model(x_of(2)).detach()
    assert torch.equal(FORWARD["vmap"](model)[0], vmap(build(blocks))(x_of(3, 2))[0])
    assert torch.equal(before, model(x_of(2)))
    zo.close(model)
