"""Parameters that forward changes past torch's versions: the device sees them by words that it computes itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.helpers.models import Block, TinyLM, build, tokens_of
from zero_offload.hardware.kernels.checksums import device_fingerprints
from zero_offload.runtime.units import unit as unit_module

pytestmark = pytest.mark.usefixtures("late")


class Negating(Block):
    """From a certain call on, it changes a weight past torch's versions."""

    calls, first = 0, 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls >= self.first:
            self.up.weight.data.neg_()
        return super().forward(x)


def test_a_change_through_data_is_seen() -> None:
    model: Any = build(TinyLM)
    model.blocks[1] = Negating(32)
    zo.offload(model, zo.OffloadConfig())
    for number in range(3):
        model(tokens_of(number))
    with pytest.raises(zo.ZeroOffloadError, match=r"forward has changed blocks\.1\.up\.weight in place"):
        model(tokens_of(3))
    zo.close(model)


def test_fingerprints_are_downloaded_once_per_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download waits for the compute before it, so there is none at the beginning of a use and one at its end."""
    model = zo.offload(build(TinyLM), zo.OffloadConfig(params="device"))
    tokens, taken = tokens_of(0).to(device.TYPE), []

    def take(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        taken.append(tensors)
        return device_fingerprints(tensors)

    monkeypatch.setattr(unit_module, "fingerprints", take)
    with torch.no_grad():
        model(tokens)  # weights of the words are uploaded
        taken.clear()
        with device.counting() as counts:
            model(tokens)
    uses = len(taken) // 2
    assert uses >= 4 and counts["downloads"] == uses
    assert counts["stream_syncs"] + counts["items"] == uses
    zo.close(model)
