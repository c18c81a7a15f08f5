"""Units of weights that bitsandbytes and torchao have quantized leave between forward and backward, with equal bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.reference import placed
from tests.models.test_quantized_views import HIDDEN, Model, Packed, saved_of, train
from zero_offload.model.api import runtime_of
from zero_offload.runtime.units.derived import Step
from zero_offload.runtime.units.unit import UnitState

bnb = pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")


def _linear(outputs: int, inputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    linear.weight.requires_grad_(False)
    return linear


def _four_bit(outputs: int, inputs: int, *, nested: bool) -> nn.Module:
    weight = _linear(outputs, inputs).weight.data
    layer: nn.Module = bnb.nn.Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.weight = bnb.nn.Params4bit(
        weight, requires_grad=False, quant_type="nf4", compress_statistics=nested, module=layer
    )
    return layer.to("cpu")


def _eight_bit(outputs: int, inputs: int) -> nn.Module:
    weight = _linear(outputs, inputs).weight.data
    layer: nn.Module = bnb.nn.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return layer.to("cpu")


def _torchao(outputs: int, inputs: int, config: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao import quantization

        layer = _linear(outputs, inputs)
        quantization.quantize_(layer, getattr(quantization, config)())
    layer.weight.requires_grad_(False)
    return layer


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "nf4": lambda outputs, inputs: _four_bit(outputs, inputs, nested=False),
    "double": lambda outputs, inputs: _four_bit(outputs, inputs, nested=True),
    "int8": _eight_bit,
    "torchao int8": lambda outputs, inputs: _torchao(outputs, inputs, "Int8WeightOnlyConfig"),
    "torchao fp8": lambda outputs, inputs: _torchao(outputs, inputs, "Float8WeightOnlyConfig"),
    "packed": Packed,
}


def offloaded(model: Model, nvme: Path) -> Model:
    return zo.offload(model, placed("fp32", ("nvme", "cpu", "cpu"), nvme, "12MiB"))


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["none", "plain", "reentrant"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_training_is_exact(layer: Callable[[int, int], nn.Module], reentrant: bool | None, nvme: Path) -> None:
    expected = train(Model(layer, reentrant))
    found = train(offloaded(Model(layer, reentrant), nvme))
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_units_leave_and_no_values_stay(layer: Callable[[int, int], nn.Module], nvme: Path) -> None:
    model = offloaded(Model(layer), nvme)
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
