"""Programs between steps in 16 bits, with the bits of plain loops that keep fp32 masters themselves.

The loop has a master for each parameter, an fp32 gradient, and an ordinary bf16 model of values rounded from masters.
It changes masters, and reads values, as the page on parameters between steps says of an offloaded model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import NARROW, TinyLM, build, tokens_of
from tests.helpers.reference import nearest_bf16, read_masters


class Offloaded:
    """The parameters themselves."""

    def __init__(self, model: nn.Module, settings: dict[str, Any]) -> None:
        self.model = zo.offload(model, zo.OffloadConfig(precision="bf16", durability="scratch", **settings))
        self.changed = self.read = dict(model.named_parameters())

    def load(self, values: dict[str, Tensor]) -> None:
        self.model.load_state_dict(values)

    def copy_in(self, name: str, values: Tensor) -> None:
        self.changed[name].data.copy_(values)

    def round(self) -> None:
        """The library does it."""

    def masters(self) -> dict[str, Tensor]:
        return read_masters(self.model)


class WrittenOut:
    """The plain loop."""

    def __init__(self, model: nn.Module) -> None:
        self.changed = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
        self.model = model.bfloat16()
        self.read = dict(model.named_parameters())
        for name, param in self.read.items():
            param.register_post_accumulate_grad_hook(partial(self._widen, self.changed[name]))

    def _widen(self, master: nn.Parameter, value: nn.Parameter) -> None:
        assert value.grad is not None
        master.grad, value.grad = value.grad.float(), None

    def load(self, values: dict[str, Tensor]) -> None:
        for name, master in self.changed.items():
            master.data.copy_(values[name])

    def copy_in(self, name: str, values: Tensor) -> None:
        """Elements that the parameter has already keep their master."""
        master = self.changed[name]
        master.data.copy_(torch.where(nearest_bf16(master) == values, master.detach(), values.float()))

    def round(self) -> None:
        for name, param in self.read.items():
            param.data.copy_(nearest_bf16(self.changed[name]))

    def masters(self) -> dict[str, Tensor]:
        return {name: master.detach() for name, master in self.changed.items()}


Twin = Offloaded | WrittenOut
Program = Callable[[Twin, zo.AdamW], Iterator[float]]


def _loss(twin: Twin, seed: int) -> Tensor:
    twin.round()
    loss: Tensor = twin.model(tokens_of(seed))
    return loss


def prune_by_magnitude(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    masks: dict[str, Tensor] = {}
    for seed in range(4):
        _loss(twin, seed).backward()
        for name, mask in masks.items():
            grad = twin.changed[name].grad
            assert grad is not None
            grad.mul_(mask)
        optimizer.step()
        optimizer.zero_grad()
        twin.round()
        for name, param in twin.read.items() if seed == 1 else ():
            limit = torch.quantile(param.detach().float().abs().flatten(), 0.3)
            masks[name] = (param.detach().abs() > limit).float()
        with torch.no_grad():
            for name, mask in masks.items():
                twin.changed[name].mul_(mask)
        yield _loss(twin, 9).item()


def flat_vectors(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """All gradients as one vector, then all values."""
    for seed in range(3):
        _loss(twin, seed).backward()
        grads = [param.grad for param in twin.changed.values()]
        flat = torch.cat([grad.reshape(-1) for grad in grads if grad is not None]).mul_(0.3)
        for grad, part in zip(grads, flat.split([param.numel() for param in twin.changed.values()]), strict=True):
            assert grad is not None
            grad.copy_(part.view(grad.shape))
        optimizer.step()
        optimizer.zero_grad()
        twin.round()
        values = torch.cat([param.detach().reshape(-1) for param in twin.read.values()])
        values.sub_(values.mean() * 0.01)
        for name, part in zip(twin.read, values.split([each.numel() for each in twin.read.values()]), strict=True):
            twin.copy_in(name, part.view(twin.read[name].shape))
        yield _loss(twin, 9).item()


def train_a_copy(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """An ordinary copy is trained for a while by torch's optimizer, and loaded back."""
    twin.round()
    model = build(partial(TinyLM, NARROW)).bfloat16()
    model.load_state_dict(copy.deepcopy(twin.model).state_dict())
    its_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(3):
        model(tokens_of(seed)).backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
    twin.load(model.state_dict())
    for seed in range(3, 5):
        loss = _loss(twin, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


PROGRAMS = (prune_by_magnitude, flat_vectors, train_a_copy)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_the_bits_of_a_loop_over_masters(tier: str, program: Program, nvme: Path) -> None:
    settings = {"params": tier, "grads": tier, "optimizer": tier, "nvme": nvme}
    found = []
    for make in (WrittenOut, partial(Offloaded, settings=settings)):
        model = build(partial(TinyLM, NARROW))
        for param in model.parameters():
            param.data = param.data.bfloat16().float()
        twin = make(model)
        figures = list(program(twin, zo.AdamW(twin.changed.values(), lr=1e-2)))
        found.append((figures, {name: value.clone() for name, value in twin.masters().items()}))
    zo.close(twin.model)
    (figures, masters), (expected, its_masters) = found[1], found[0]
    assert figures == expected
    assert all(torch.equal(masters[name], value) for name, value in its_masters.items())


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_clip_by_value_has_a_limit_of_the_gradients_dtype(tier: str, nvme: Path) -> None:
    """As in a plain bf16 model. An edit makes the gradient fp32."""
    plain: Any = build(partial(TinyLM, NARROW)).bfloat16()
    settings = {"params": "cpu", "grads": tier, "optimizer": "cpu", "nvme": nvme}
    model: Any = Offloaded(build(partial(TinyLM, NARROW)), settings).model
    for edit, limit in ((lambda grad: grad, torch.tensor(0.01).bfloat16().item()), (lambda grad: grad.add_(0), 0.01)):
        found = []
        for each in (plain, model):
            each.zero_grad()
            each(tokens_of(0)).backward()
            grad = each.head.weight.grad
            assert grad.abs().max() > 0.011
            if each is model:
                edit(grad)
            nn.utils.clip_grad_value_(each.parameters(), 0.01)
            found.append(each.head.weight.grad.float().clone())
        assert found[1].max() == torch.tensor(limit)
        is_cut = found[0].abs() == torch.tensor(0.01).bfloat16().float()
        assert torch.equal(found[0][~is_cut], found[1][~is_cut])
        assert (found[1].abs()[is_cut] == torch.tensor(limit)).all()
    zo.close(model)
