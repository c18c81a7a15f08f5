"""Units of weights that bitsandbytes and torchao have quantized leave between forward and backward, with equal bits."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.pairwise import in_turn
from tests.helpers.quantized_models import BITSANDBYTES, quantize_by_torchao
from tests.models.test_quantized_views import HIDDEN, Model, offloaded, saved_of, train
from zero_offload.model.api import runtime_of
from zero_offload.runtime.units.derived import Step
from zero_offload.runtime.units.unit import UnitState

KINDS = ("nf4", "nf4 nested", "int8", "torchao int8", "torchao fp8")


def model_of(kind: str, reentrant: bool | None = None) -> Model:
    def layer(outputs: int, inputs: int) -> nn.Module:
        linear = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        if kind in BITSANDBYTES:
            return BITSANDBYTES[kind](linear).to("cpu")
        quantize_by_torchao(linear, kind)
        return linear.requires_grad_(False)

    return Model(layer, reentrant)


@in_turn(kind=KINDS, reentrant=[None, False, True])
def test_training_is_exact(kind: str, reentrant: bool | None, nvme: Path) -> None:
    expected = train(model_of(kind, reentrant))
    found = train(offloaded(model_of(kind, reentrant), nvme, "12MiB"))
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_in_gathered_is_an_ordinary_layer(kind: str, nvme: Path) -> None:
    model, plain = offloaded(model_of(kind), nvme, "12MiB"), model_of(kind)
    with zo.gathered(model.blocks[0]):
        copied = copy.deepcopy(model.blocks[0])
    zo.close(model)
    x = torch.randn(2, 8, HIDDEN)
    assert torch.equal(copied(x), plain.blocks[0](x))


@pytest.mark.parametrize("kind", KINDS)
def test_units_leave_and_no_values_stay(kind: str, nvme: Path) -> None:
    model = offloaded(model_of(kind), nvme, "12MiB")
    owner = runtime_of(model)
    assert owner is not None
    frozen = [unit for unit in owner.units if not any(param.requires_grad for param in unit.params)]
    for _ in range(2):
        loss = model(torch.randn(2, 8, HIDDEN)).square().mean()
        assert len(frozen) == 4
        assert not any(unit.lent for unit in frozen)
        assert sum(unit.state is UnitState.AWAY for unit in frozen) >= 1
        kept = [each.kept for each in saved_of(loss) if not isinstance(each, Step) and getattr(each, "unit", 0) is None]
        assert not any(tensor.numel() >= HIDDEN * HIDDEN for tensor in kept if isinstance(tensor, Tensor))
        loss.backward()
