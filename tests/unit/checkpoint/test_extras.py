"""Values that a program adds to a generation come back as they were."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import zero_offload as zo
from zero_offload.checkpoint.extras import capture_rng, from_json, restore_rng, to_json

NUMPY = st.sampled_from([np.float32(0.1), np.float64(0.1), np.float16(-2), np.int64(-3), np.uint8(200), np.bool_(True)])
PLAIN = st.none() | st.booleans() | st.integers() | st.text() | NUMPY
KEYS = PLAIN | st.sampled_from(["__pairs__", "__float__", "__tensor__", "__tuple__", "__numpy__"]) | st.tuples(PLAIN)
VALUES = st.recursive(
    PLAIN | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_what_is_written_is_read(value: Any) -> None:
    found = from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))
    assert found == value
    assert repr(found) == repr(value)  # of the same types, too


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_of_numpy_that_are_not_finite(number: float) -> None:
    found = from_json(json.loads(json.dumps(to_json(np.float32(number)), allow_nan=False)))
    assert type(found) is np.float32
    np.testing.assert_equal(found, np.float32(number))


def test_derived_classes_come_back_as_the_plain_one() -> None:
    given = {"size": torch.Size([2, 3]), "counter": Counter([4, 4])}
    found = from_json(json.loads(json.dumps(to_json(given), allow_nan=False)))
    assert found == given and type(found["size"]) is tuple and type(found["counter"]) is dict


def test_what_is_not_a_number_stays_none() -> None:
    assert math.isnan(from_json(json.loads(json.dumps(to_json(math.nan), allow_nan=False))))


@pytest.mark.parametrize("number", [0.1, -3, True, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_of_one_number(number: float, dtype: torch.dtype) -> None:
    value = torch.tensor(0 if number == math.inf and not dtype.is_floating_point else number).to(dtype)
    found = from_json(json.loads(json.dumps(to_json([value]), allow_nan=False)))[0]
    assert found.dtype == dtype and found.ndim == 0 and torch.equal(found, value)


def test_an_error_names_the_place() -> None:
    with pytest.raises(TypeError, match=r"extra\['a'\]\[1\]\['b'\] is of type Tensor of shape \(3,\)"):
        to_json({"a": [1, {"b": torch.zeros(3)}]}, "extra")


REFUSED = [{1, 2}, object(), {frozenset(): 3}, {(1, b""): 3}, {"a": [torch.zeros(1)]}, np.zeros(1), np.complex64(1)]


@pytest.mark.parametrize("value", REFUSED)
def test_what_has_no_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        to_json(value)


def test_what_was_written_before_there_was_a_form_is_read_as_it_is() -> None:
    assert from_json({"step": 3, "scheduler": {"milestones": {"2": 1}}}) == {
        "step": 3,
        "scheduler": {"milestones": {"2": 1}},
    }


@pytest.mark.parametrize("kind", ["steps", "plateau"])
@pytest.mark.parametrize("rate_is_tensor", [False, True])
def test_a_scheduler_goes_on(kind: str, rate_is_tensor: bool, nvme: Path) -> None:
    def start(existing: str) -> tuple[nn.Module, zo.AdamW, Any]:
        torch.manual_seed(0)
        model = zo.offload(nn.Linear(4, 4), zo.OffloadConfig(precision="fp32", nvme=nvme, existing=existing))
        optimizer = zo.AdamW(model.parameters(), lr=torch.tensor(0.7) if rate_is_tensor else 0.7)
        if kind == "steps":
            return model, optimizer, lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.1)
        return model, optimizer, lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=1)

    def train(model: nn.Module, optimizer: zo.AdamW, scheduler: Any, num_steps: int) -> list[float]:
        found = []
        for _ in range(num_steps):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            zo.commit(model, optimizer, extra={"scheduler": scheduler.state_dict()})
            scheduler.step(*([1.0] if kind == "plateau" else []))
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    whole = start("refuse")
    expected = train(*whole, 7)
    zo.close(whole[0])
    first = start("discard")
    before = train(*first, 1)
    zo.close(first[0])
    model, optimizer, scheduler = start("resume")
    resumed = zo.resume(model, optimizer)
    assert resumed is not None
    scheduler.load_state_dict(resumed.extra["scheduler"])
    scheduler.step(*([1.0] if kind == "plateau" else []))
    assert before + train(model, optimizer, scheduler, 6) == expected and expected[-1] < 0.5
    zo.close(model)


def _draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.randn(3), *torch.rand(3).tolist(), np.random.rand()]


def test_all_generators_go_on_from_the_same_place() -> None:
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    _draw()
    saved = json.loads(json.dumps(capture_rng()))
    first, second = _draw(), _draw()
    assert first != second
    restore_rng(saved)
    assert [_draw(), _draw()] == [first, second]


def test_a_gaussian_kept_for_the_next_call_is_kept() -> None:
    random.seed(1), np.random.seed(1)
    random.gauss(0, 1), np.random.randn()
    saved = capture_rng()
    expected = [random.gauss(0, 1), np.random.randn()]
    random.seed(2), np.random.seed(2)
    restore_rng(saved)
    assert [random.gauss(0, 1), np.random.randn()] == expected


def test_capturing_draws_nothing() -> None:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = _draw()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    capture_rng()
    assert _draw() == expected
