"""Inputs are brought as a whole, in their containers; what need not move is what was given. On "meta", so by shape."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from zero_offload.runtime.bring import bring

THERE = torch.device("meta")
Pair = namedtuple("Pair", "first second")


class Named(OrderedDict[str, Any]):
    """As the outputs of transformers, which refuse `update`."""

    update = None  # type: ignore[assignment]


@pytest.mark.parametrize("make", [list, tuple, lambda each: Pair(*each), lambda each: [tuple(each)]])
def test_sequences(make: Any) -> None:
    here, there = torch.ones(2), torch.ones(2, device=THERE)
    found = bring(make([here, there]), THERE)
    assert type(found) is type(make([here, there]))
    first, second = found if len(found) == 2 else found[0]
    assert first.device == THERE and second is there


@pytest.mark.parametrize("kind", [dict, Named, UserDict])
def test_mappings(kind: Any) -> None:
    given = kind({"ids": torch.ones(2), "deep": {"mask": [torch.ones(2)]}, "flag": True})
    found = bring(given, THERE)
    assert type(found) is kind and list(found) == list(given)
    assert found["ids"].device == found["deep"]["mask"][0].device == THERE and found["flag"] is True
    assert given["ids"].device == given["deep"]["mask"][0].device == torch.device("cpu")


def test_a_packed_sequence_keeps_its_sizes_on_the_host() -> None:
    found = bring({"x": pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])}, THERE)["x"]
    assert isinstance(found, PackedSequence) and found.data.device == THERE
    assert found.batch_sizes.device == torch.device("cpu")


@pytest.mark.parametrize(
    "given",
    [
        {"cache": [], "x": torch.ones(1, device=THERE)},
        ([torch.ones(1, device=THERE)], None, "text", torch.Size([2])),
        [],
    ],
    ids=["dict", "tuple", "empty"],
)
def test_what_need_not_move_is_what_was_given(given: Any) -> None:
    """So a forward may fill a list of its caller's."""
    assert bring(given, THERE) is given
    assert bring(given, None) is given


def test_a_model_on_a_cpu_is_left_alone() -> None:
    x: Tensor = torch.ones(2)
    assert bring((x,), torch.device("cpu"))[0] is x
