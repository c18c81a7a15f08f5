"""States that are in their rows already are told from those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zero_offload.optim.unitwise.packing import content_of
from zero_offload.optim.unitwise.state_rows import packed, unpack

State = dict[str, Any]


def opened() -> State:
    """As an optimizer gets it: tensors are views of a row."""
    row = packed({"step": torch.tensor(3.0), "exp_avg": torch.ones(4, 6), "count": 3, "kind": "wide", "none": None})
    found: State = unpack(row)
    return found


def test_a_step_in_place_leaves_a_state_in_its_row() -> None:
    state = opened()
    before = content_of(state)
    state["exp_avg"].mul_(0.5)
    state["step"] += 1
    assert content_of(state) == before
    assert content_of(dict(state)) == before, "another dict of the same"


CHANGES: dict[str, Callable[[State], object]] = {
    "a number": lambda state: state.update(count=4),
    "a number of another type": lambda state: state.update(count=3.0),
    "a text": lambda state: state.update(kind="tall"),
    "none no more": lambda state: state.update(none=0),
    "a new tensor": lambda state: state.update(exp_avg=torch.ones(4, 6)),
    "a view": lambda state: state.update(exp_avg=state["exp_avg"].t()),
    "a part": lambda state: state.update(exp_avg=state["exp_avg"][:2]),
    "other memory": lambda state: state["exp_avg"].set_(torch.ones(4, 6)),
    "another dtype": lambda state: state.update(exp_avg=state["exp_avg"].view(torch.int32)),
    "an entry": lambda state: state.update(more=1),
    "one less": lambda state: state.pop("none"),
    "another order": lambda state: state.update(step=state.pop("step")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_no_longer_is_as_in_its_row_is_told(name: str) -> None:
    state = opened()
    before = content_of(state)
    CHANGES[name](state)
    assert content_of(state) != before


@pytest.mark.parametrize("state", [[1, 2], {"nested": {}}, {"values": [1]}, {"set": {1}}], ids=str)
def test_of_states_with_other_things_nothing_is_told(state: Any) -> None:
    assert content_of(state) is None
