"""Inputs are brought as a whole, in their containers; what need not move is what was given. On "meta", so by shape."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
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


@dataclass
class Batch:
    ids: Tensor
    labels: Any = None
    size: int = field(default=0, init=False)


@dataclass(frozen=True)
class Fixed:
    """Whose constructor makes something else of what it gets."""

    ids: Tensor

    def __post_init__(self) -> None:
        assert self.ids.device.type == "cpu"


def test_dataclasses() -> None:
    given = Batch(torch.ones(2), [Fixed(torch.ones(3)), None])
    given.size = 7
    found: Any = bring((given,), THERE)[0]
    assert type(found) is Batch and found.size == 7 and found.labels[1] is None
    assert found.ids.device == found.labels[0].ids.device == THERE
    assert given.ids.device == given.labels[0].ids.device == torch.device("cpu")
    there = Batch(torch.ones(2, device=THERE))
    assert bring(there, THERE) is there and bring(Batch, THERE) is Batch


class Rows(list[Any]):
    source = "nowhere"


class Two(tuple[Any, ...]):
    source: str

    def __new__(cls, first: Any, second: Any) -> Two:
        return super().__new__(cls, (first, second))


@pytest.mark.parametrize("given", [Rows([torch.ones(2), 1]), Two(torch.ones(2), 1)], ids=["list", "tuple"])
def test_classes_of_sequences_keep_what_they_have(given: Any) -> None:
    given.source = "here"
    found = bring(given, THERE)
    assert type(found) is type(given) and found is not given and found.source == "here"
    assert found[0].device == THERE and found[1] == 1 and given[0].device.type == "cpu"


def test_what_torch_returns_keeps_its_names() -> None:
    found = bring(torch.ones(2, 2).max(0), THERE)
    assert type(found) is torch.return_types.max
    assert found.values.device == found.indices.device == THERE


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
