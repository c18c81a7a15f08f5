"""What a rank gathers of one backward's gradients before they cross ranks."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from zero_offload.plan.dtypes import ComputeDtypes
from zero_offload.plan.layout import make_layout
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.runtime.grads import partials as module
from zero_offload.runtime.grads.partials import HostPartials
from zero_offload.runtime.grads.section import GradSection
from zero_offload.storage.memory.arena import Arena, MovableBuffer


def attach(buffer: MovableBuffer) -> None:
    assert buffer.attach()


@pytest.fixture(params=["pages", "heap"])
def partials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HostPartials:
    monkeypatch.setattr(module, "is_small", lambda grads: request.param == "heap")
    return HostPartials(Arena(16), attach)


@pytest.fixture
def grads() -> GradSection:
    """Of three parameters that do not fill their places."""
    model = nn.Bilinear(30, 31, 301)
    model.register_parameter("other", nn.Parameter(torch.ones(77)))
    layout = make_layout(ModelSpec.from_module(model), ComputeDtypes(torch.bfloat16), 1)
    section = next(section for unit in layout.units for section in unit.sections)
    assert len(section.params) == 3 and section.params[-1].end < section.numel

    class FakeSection:
        layout = section

    nothing = cast(Any, None)
    return GradSection(unit=nothing, section=cast(Any, FakeSection()), store=nothing, local=None, entry=nothing)


def part(grads: GradSection, index: int) -> torch.Tensor:
    piece = grads.layout.params[index]
    assert grads.partial is not None
    return grads.partial[piece.begin : piece.end]


def put(partials: HostPartials, grads: GradSection, index: int, grad: torch.Tensor) -> None:
    partials.put(grads, index, grad)
    grads.arrived.add(index)


def random_grad(grads: GradSection, index: int, seed: int) -> torch.Tensor:
    spec = grads.layout.params[index].spec
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_gradients_keep_their_dtype_and_the_rest_is_zero(partials: HostPartials, grads: GradSection) -> None:
    partials.open(grads)
    partials.here(grads).fill_(float("nan"))
    values = {index: random_grad(grads, index, index) for index in (2, 0)}
    for index, value in values.items():
        put(partials, grads, index, value)
    partials.fill(grads)
    assert grads.partial is not None and grads.partial.dtype == torch.bfloat16
    for index, value in values.items():
        assert torch.equal(part(grads, index), value.view(-1))
    assert not part(grads, 1).any() and not grads.partial[grads.layout.params[2].end :].any()
    partials.drop(grads)
    assert grads.partial is None


def test_a_second_gradient_in_one_backward_is_added_in_fp32(partials: HostPartials, grads: GradSection) -> None:
    partials.open(grads)
    first, second, other = random_grad(grads, 0, 1), random_grad(grads, 0, 2) * 1e-3, random_grad(grads, 1, 3)
    put(partials, grads, 1, other)
    put(partials, grads, 0, first)
    put(partials, grads, 0, second)
    assert torch.equal(part(grads, 0), first.view(-1).float() + second.view(-1).float())
    assert torch.equal(part(grads, 1), other.view(-1).float())


def test_a_wider_gradient_is_not_rounded(partials: HostPartials, grads: GradSection) -> None:
    partials.open(grads)
    narrow, wide = random_grad(grads, 0, 1), torch.randn(grads.layout.params[1].spec.shape)
    put(partials, grads, 0, narrow)
    put(partials, grads, 1, wide)
    assert torch.equal(part(grads, 0), narrow.view(-1).float()) and torch.equal(part(grads, 1), wide.view(-1))


def test_with_nothing_arrived_all_is_zero(partials: HostPartials, grads: GradSection) -> None:
    partials.open(grads)
    partials.here(grads).fill_(float("nan"))
    partials.fill(grads)
    assert grads.partial is not None and not grads.partial.any()
