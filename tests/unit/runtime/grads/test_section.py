"""Gradients of one backward that a rank gathers before they cross ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zero_offload.plan.dtypes import ComputeDtypes
from zero_offload.plan.layout import make_layout
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.runtime.grads import section as module
from zero_offload.runtime.grads.section import GRAD_TRANSITIONS, GradSection, GradState, HostPartial
from zero_offload.storage.memory.arena import Arena, MovableBuffer


def attach(buffer: MovableBuffer) -> None:
    assert buffer.attach()


class Gathering:
    """Three parameters that do not fill their places."""

    def __init__(self) -> None:
        model = nn.Bilinear(30, 31, 301)
        model.register_parameter("other", nn.Parameter(torch.ones(77)))
        layout = make_layout(ModelSpec.from_module(model), ComputeDtypes(torch.bfloat16), 1)
        self.layout = next(section for unit in layout.units for section in unit.sections)
        assert len(self.layout.params) == 3 and self.layout.params[-1].end < self.layout.numel
        self.partial = HostPartial(self.layout, Arena(16), attach)
        self.arrived: set[int] = set()
        self.partial.begin()
        self.partial.here().fill_(float("nan"))

    def put(self, index: int, grad: torch.Tensor) -> None:
        self.partial.put(index, grad, again=index in self.arrived)
        self.arrived.add(index)

    def part(self, index: int) -> torch.Tensor:
        piece = self.layout.params[index]
        return self.partial.here()[piece.begin : piece.end]

    def random_grad(self, index: int, seed: int) -> torch.Tensor:
        spec = self.layout.params[index].spec
        return torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(params=["pages", "heap"])
def gathering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gathering:
    monkeypatch.setattr(module, "is_small", lambda numel: request.param == "heap")
    return Gathering()


def test_gradients_keep_their_dtype_and_the_rest_is_zero(gathering: Gathering) -> None:
    values = {index: gathering.random_grad(index, index) for index in (2, 0)}
    for index, value in values.items():
        gathering.put(index, value)
    partial = gathering.partial
    partial.fill(gathering.arrived)
    assert partial.here().dtype == torch.bfloat16 and not partial.is_wide
    for index, value in values.items():
        assert torch.equal(gathering.part(index), value.view(-1))
    assert not gathering.part(1).any() and not partial.here()[gathering.layout.params[2].end :].any()
    partial.drop()
    assert partial.sum is None and not partial.has_begun


def test_a_second_gradient_in_one_backward_is_added_in_fp32(gathering: Gathering) -> None:
    first, second = gathering.random_grad(0, 1), gathering.random_grad(0, 2) * 1e-3
    other = gathering.random_grad(1, 3)
    gathering.put(1, other)
    gathering.put(0, first)
    gathering.put(0, second)
    assert gathering.partial.is_wide
    assert torch.equal(gathering.part(0), first.view(-1).float() + second.view(-1).float())
    assert torch.equal(gathering.part(1), other.view(-1).float())


def test_a_wider_gradient_is_not_rounded(gathering: Gathering) -> None:
    narrow, wide = gathering.random_grad(0, 1), torch.randn(gathering.layout.params[1].spec.shape)
    gathering.put(0, narrow)
    gathering.put(1, wide)
    assert torch.equal(gathering.part(0), narrow.view(-1).float()) and torch.equal(gathering.part(1), wide.view(-1))


def test_with_nothing_arrived_all_is_zero(gathering: Gathering) -> None:
    gathering.partial.fill(gathering.arrived)
    assert not gathering.partial.here().any()


def _section() -> GradSection:
    fake: Any = SimpleNamespace(layout=None, name="blocks.0")
    return GradSection(fake, fake, fake, None, None, fake)


@pytest.mark.parametrize(("defers", "then"), [(False, GradState.HELD), (True, GradState.WAITING)])
def test_a_backward_leaves_what_it_has_delivered_at_rest_or_for_a_later_one(defers: bool, then: GradState) -> None:
    section = _section()
    section.begin()
    section.arrived.add(0)
    section.holding.add(0)
    section.complete(defers=defers)
    assert section.state is then and not section.arrived
    assert section.remove([0], GradState.TAKEN) == {0}
    assert section.state is GradState.TAKEN


def test_gradients_that_wait_are_held_only_after_they_arrive_again() -> None:
    assert set(GRAD_TRANSITIONS) == set(GradState)
    section = _section()
    for state in (GradState.ARRIVING, GradState.HELD, GradState.WAITING):
        section.move_to(state)
    with pytest.raises(AssertionError, match="blocks.0: waiting gradients are held"):
        section.move_to(GradState.HELD)
