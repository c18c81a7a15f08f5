"""The storage of a parameter is its own: what asks for it by strides and offsets gets the values of this one alone."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import NARROW, StridedBlock, TinyLM, build
from tests.helpers.reference import placed
from tests.helpers.twins import assert_same, train

PLACEMENTS: dict[str, tuple[Any, ...]] = {"cpu": ("cpu",) * 3, "nvme": ("nvme",) * 3}
Strided = partial(TinyLM, NARROW, 3, StridedBlock)
BYTES = 3 * NARROW * NARROW * 4
"""Of one weight of `Plain`."""


def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    yield from train(model, optimizer, range(3))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_forward_with_strides_of_its_own(precision: str, placement: str, nvme: Path) -> None:
    assert_same(script, Strided, placed(precision, PLACEMENTS[placement], nvme))


def stacked() -> nn.Module:
    return nn.Sequential(nn.Linear(NARROW, 3 * NARROW), nn.Linear(3 * NARROW, NARROW))


def bytes_of(tensor: Tensor) -> tuple[int, int, int]:
    file = io.BytesIO()
    torch.save(tensor, file)
    return tensor.storage_offset(), tensor.untyped_storage().nbytes(), len(file.getvalue())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_questions_in_a_forward(placement: str, nvme: Path) -> None:
    """Answers are those of a plain model: offset, bytes, bounds, and a file without the neighbours."""

    def ask(module: nn.Module, inputs: Any, output: Any) -> None:
        weight = module.weight
        for view in (weight, weight.detach(), weight.t(), weight.view(-1)[2:]):
            found.append(bytes_of(view.detach()))
        with pytest.raises(RuntimeError, match="out of bounds for storage of size") as error:
            weight.as_strided((2,), (1,), weight.numel() - 1)
        found.append(str(error.value))
        if offloads:
            with pytest.raises(RuntimeError, match="not resizable"):
                weight.untyped_storage().resize_(0)

    model, runs = build(stacked), []
    for offloads in (False, True):
        found: list[Any] = []
        if offloads:
            zo.offload(model, placed("fp32", PLACEMENTS[placement], nvme))
        handles = [layer.register_forward_hook(ask) for layer in model]
        model(torch.ones(1, NARROW))
        runs.append(found)
        for handle in handles:
            handle.remove()
    assert runs[0] == runs[1] and runs[0][0][:2] == (0, BYTES)
    for name, param in model.named_parameters():
        assert (param.storage_offset(), param.nbytes) == (0, param.numel() * 4), name
    zo.close(model)


def test_a_view_from_a_forward_outlives_the_model(nvme: Path) -> None:
    """Its memory is the parameter's part of what the model has reserved."""
    model = build(stacked)
    expected = model[0].weight.detach().clone()
    zo.offload(model, placed("fp32", PLACEMENTS["nvme"], nvme))
    kept: list[Tensor] = []
    model[0].register_forward_hook(lambda module, inputs, output: kept.append(module.weight.detach()))
    with torch.no_grad():
        model(torch.ones(1, NARROW))
    del model
    gc.collect()
    assert torch.equal(kept[0], expected)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_memory_that_is_exchanged_under_a_parameter(placement: str, nvme: Path) -> None:
    """torch puts the values into shared memory, and that under the storage: no update would reach it."""
    model = zo.offload(build(stacked), placed("fp32", PLACEMENTS[placement], nvme))
    model[0].register_forward_hook(lambda module, inputs, output: (module.bias.share_memory_(), None)[1])
    with pytest.raises(zo.ZeroOffloadError, match=r"the memory of 0\.bias was exchanged.*\.clone\(\)"):
        model(torch.ones(1, NARROW))
