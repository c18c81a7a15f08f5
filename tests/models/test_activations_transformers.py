"""Architectures of transformers with activations on disk: marked, with checkpointing of their own, plain."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.activations import make_small
from tests.helpers.architectures import ARCHITECTURES, Architecture
from tests.helpers.reference import read_masters
from zero_offload.runtime.saved_tensors import activations

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'zero_offload[hf]'")

NAMES = ("gpt2", "llama", "bert", "t5", "vit", "qwen2_moe")
CHOSEN = [ARCHITECTURES[name] for name in NAMES]


def mark_layers(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            zo.checkpoint(module)


def own_checkpointing(model: nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def nothing(model: nn.Module) -> None:
    pass


def train(model: nn.Module, each: Architecture) -> list[float]:
    torch.manual_seed(1)
    optimizer = zo.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    losses = []
    for seed in range(3):
        loss = model(**each.batch(seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mark", [mark_layers, own_checkpointing, nothing], ids=lambda mark: mark.__name__)
@pytest.mark.parametrize("each", CHOSEN, ids=lambda each: each.name)
def test_trains_as_the_plain_model(
    each: Architecture, mark: Callable[[nn.Module], None], nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 2048)
    plain = each.build(use_cache=False) if each.name not in ("bert", "vit") else each.build()
    model = copy.deepcopy(plain)
    if mark is own_checkpointing:
        mark(plain)  # some models compute in another order with it
    expected = train(plain, each)
    zo.offload(model, zo.OffloadConfig(activations="nvme", precision="fp32", nvme=nvme, durability="scratch"))
    mark(model)
    assert train(model, each) == expected
    assert zo.stats(model).activation_bytes["nvme"] > 0
    masters = read_masters(model)
    zo.close(model)
    assert [name for name, p in plain.named_parameters() if not torch.equal(p.detach(), masters[name])] == []
