"""Hugging Face models on the fake GPU, offloaded: the bits of the same model that is all in the device's memory."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.fake_gpu.training import SOME, check_run, run
from tests.helpers.architectures import ARCHITECTURES

pytest.importorskip("transformers")
PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"params": "nvme", "optimizer": "nvme"},
    {"grads": "device", "activations": "cpu"},
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", ["llama"])
def test_a_model_trains_the_same_wherever_its_states_rest(name: str, placement: dict[str, Any]) -> None:
    architecture = ARCHITECTURES[name]

    def body(model: nn.Module, tokens: Tensor, step: int) -> Tensor:
        batch = {key: value.to(TYPE) for key, value in architecture.batch(step).items()}
        loss: Tensor = model(**batch).loss
        loss.backward()
        return loss

    device.policy(Policy.EAGER)
    expected = run(body, architecture.build, precision="bf16")
    assert len({float(loss) for loss in expected[:3]}) == 3
    check_run(expected, body, architecture.build, schedules=SOME, precision="bf16", **placement)
