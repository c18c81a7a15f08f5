"""Hints of configs of any kind for a plan: by layer where layers differ, and never an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import NARROW, TinyLM, build
from zero_offload.base.errors import CapacityError
from zero_offload.plan import placement
from zero_offload.plan.hints import LARGEST, Hints
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.plan.shapes import work_of


class Raising:
    """Whatever is asked of it, it raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is not for you.\nIt differs.")


class ByLayer:
    """As configs of transformers whose layers differ."""

    num_hidden_layers = 3

    @property
    def head_dim(self) -> int:
        raise RuntimeError("ambiguous")

    def __repr__(self) -> str:
        return "by layer"

    @property
    def per_layer_config(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(head_dim=8 * (1 + layer)) for layer in range(3)]


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (SimpleNamespace(head_dim=16), (16, 16, 16)),
        (SimpleNamespace(head_dim=16.0), (16, 16, 16)),
        (SimpleNamespace(head_dim=np.int64(16)), (16, 16, 16)),
        (SimpleNamespace(head_dim=[np.float32(8), np.uint8(32), 16]), (8, 16, 32)),
        (ByLayer(), (8, 24, 24)),
        (SimpleNamespace(head_dim=[8, 32, 16]), (8, 16, 32)),
        (SimpleNamespace(head_dim={0: 8, "2": 16, 1: 32}), (8, 16, 32)),
        (SimpleNamespace(head_dim={"full": 32, "near": 8}, layer_types=["near", "near", "full"]), (8, 32, 32)),
        (SimpleNamespace(head_dim=16, per_layer_config={"2": {"head_dim": 32}}), (16, 32, 16)),
        (SimpleNamespace(head_dim=None), (0, 0, 0)),
        (SimpleNamespace(head_dim=-1), (0, 0, 0)),
        (SimpleNamespace(), (0, 0, 0)),
        (None, (0, 0, 0)),
    ],
    ids=str,
)
def test_a_number_is_that_of_its_layer(config: Any, found: tuple[int, int, int]) -> None:
    """Of the first layer, the third, and of no layer in particular, which is the largest."""
    hints = Hints(config)
    assert tuple(hints.number("head_dim", layer=layer) for layer in (0, 2, None)) == found
    assert hints.notes == ()


@pytest.mark.parametrize(
    "value",
    ["64", True, float("nan"), 1 << 2000, LARGEST, [[]], {"full": 8}, {}, object(), torch.ones(2), (1, 2)],
    ids=lambda value: f"{value!r:.20}",
)
def test_what_is_not_understood_is_one_line(value: Any) -> None:
    hints = Hints(SimpleNamespace(head_dim=value))
    assert hints.number("head_dim", layer=5) == 0
    (note,) = hints.notes
    assert note.startswith("SimpleNamespace.head_dim is not understood") and "\n" not in note and len(note) < 250


def test_a_config_that_raises_is_one_line() -> None:
    hints = Hints(Raising())
    assert hints.number("head_dim", "num_heads", layer=0) == 0
    (note,) = hints.notes
    assert note.startswith("Raising.get_text_config (nor ") and note.endswith(
        "RuntimeError: get_text_config is not for you."
    )


def test_a_model_with_such_a_config_trains_as_without(tmp_path: Path) -> None:
    def losses(config: Any) -> list[float]:
        model: Any = build(lambda: TinyLM(NARROW))
        if config is not None:
            model.config = config
        told = zo.plan(model, zo.OffloadConfig())
        assert bool(told.notes) == (config is not None) and str(told).endswith("".join(told.notes))
        zo.offload(model, zo.OffloadConfig(precision="fp32"))
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        found = []
        for _ in range(2):
            loss = model(torch.arange(8)[None])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        zo.close(model)
        return found

    assert losses(Raising()) == losses(None)


def test_a_part_has_its_own_config() -> None:
    model: Any = nn.ModuleDict(
        {name: nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]) for name in ("eye", "text")}
    )
    model.config = SimpleNamespace(hidden_size=64, num_attention_heads=[2, 4])
    model.eye.config = SimpleNamespace(hidden_size=32, num_attention_heads=2)
    spec = ModelSpec.from_module(model, ["eye.0", "eye.1", "text.0", "text.1"])
    assert [work.attention_width for work in work_of(model, spec).units] == [32, 32, 64, 64]


def test_modules_that_raise_are_planned_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(nn.Linear):
        @property
        def config(self) -> object:
            raise ValueError("none")

    model = nn.Sequential(Odd(64, 64), Odd(64, 64))
    spec = ModelSpec.from_module(model)
    assert work_of(model, spec).notes == ()
    monkeypatch.setattr(Odd, "named_modules", lambda *_: 1 / 0)
    monkeypatch.setattr(nn.Sequential, "named_modules", lambda *_: 1 / 0)
    work = work_of(model, spec)
    assert sum(each.numel.trained for each in work.units) == 2 * (64 * 64 + 64)
    assert work.notes == (
        "Sequential is planned by the number of its parameters alone: ZeroDivisionError: division by zero",
    )


def test_a_prediction_that_fails_stops_no_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "of_unit", lambda *_: 1 / 0)
    config = zo.OffloadConfig(params="auto", grads="auto", optimizer="auto")
    with pytest.warns(
        UserWarning, match="could not be predicted .ZeroDivisionError: division by zero., so 'auto' is 'cpu'"
    ):
        model = zo.offload(build(lambda: TinyLM(NARROW)), config)
    zo.close(model)
    with pytest.raises(CapacityError), pytest.warns(UserWarning):
        zo.offload(build(lambda: TinyLM(NARROW)), zo.OffloadConfig(optimizer="auto", cpu_memory="1KiB"))
