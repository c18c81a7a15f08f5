"""The store of activations with small models: everything counts as large, blocks are few and small."""

from __future__ import annotations

import pytest
from torch import nn

from zero_offload.api import runtime_of
from zero_offload.runtime import activation_tiers, activations
from zero_offload.runtime.activations import Activations

SMALLEST_BYTES = 4096


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", SMALLEST_BYTES)
    monkeypatch.setattr(activations, "AHEAD_BYTES", 64 << 10)
    monkeypatch.setattr(activation_tiers, "ACTIVATION_BLOCK_BYTES", 16 << 10)
    monkeypatch.setattr(activation_tiers, "ACTIVATION_BLOCKS_OUT", 2)
    monkeypatch.setattr(activation_tiers, "ACTIVATION_BLOCKS_BACK", 3)
    monkeypatch.setattr(activation_tiers, "_SLAB_BLOCKS", 4)


def activations_of(model: nn.Module) -> Activations:
    owner = runtime_of(model)
    assert owner is not None and owner.parts.activations is not None
    return owner.parts.activations
