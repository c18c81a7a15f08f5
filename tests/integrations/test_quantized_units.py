"""Units of weights that bitsandbytes and torchao have quantized leave between forward and backward, with equal bits."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.pairwise import in_turn
from tests.helpers.quantized_models import BITSANDBYTES, quantize_by_torchao
from tests.models.test_quantized_views import HIDDEN, Model, offloaded, saved_of, train
from zero_offload.model.api import runtime_of
from zero_offload.runtime.units.unit import UnitState
from zero_offload.standins.derived import Step

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
def test_autocast_of_inputs_without_gradients(kind: str, nvme: Path) -> None:
    """bitsandbytes computes these by one operation, inside of which products are cast."""
    x = torch.randn(2, 8, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (model(x) for model in (model_of(kind), offloaded(model_of(kind), nvme, "12MiB")))
    assert torch.equal(expected, found)


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


@in_turn(kind=KINDS, what=["model", "blocks"], backend=["eager", "aot_eager"])
def test_a_compiled_model_trains_exactly(
    kind: str, what: str, backend: str, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler leaves operations on quantized weights alone, and does not try our code again and again."""
    torch._dynamo.reset()
    expected = train(model_of(kind))
    model = offloaded(model_of(kind), nvme, "12MiB")
    with caplog.at_level(logging.WARNING, logger="torch._dynamo"):
        for module in [model] if what == "model" else model.blocks:
            module.compile(backend=backend)
        found = train(model)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert not [record for record in caplog.records if "recompile" in record.getMessage()]


def test_gradients_of_weights_that_consist_of_others_can_be_dropped(nvme: Path) -> None:
    model = offloaded(model_of("torchao int8"), nvme, "12MiB")
    model(torch.randn(2, 8, HIDDEN)).square().mean().backward()
    for param in model.parameters():
        param.grad = None
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_muon_steps_matrices_beside_quantized_ones(kind: str, nvme: Path) -> None:
    model = offloaded(model_of(kind), nvme, "12MiB")
    optimizer = zo.Muon(model.parameters(), use_muon=lambda name, param: param.requires_grad)
    trained = [param for param in model.parameters() if param.requires_grad and param.dim() == 2]
    assert [param for group in optimizer.param_groups if group["use_muon"] for param in group["params"]] == trained
    before = [param.detach().clone() for param in trained]
    by_itself = zo.Muon(model.parameters())
    model(torch.randn(2, 8, HIDDEN)).square().mean().backward()
    by_itself.step()
    assert trained and not any(torch.equal(*pair) for pair in zip(before, trained, strict=True))
    zo.close(model)
