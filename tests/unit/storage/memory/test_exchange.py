"""Two storages that exchange their memory, in any torch."""

from __future__ import annotations

import ctypes

import pytest
import torch

from zero_offload.hardware.device import aliased
from zero_offload.storage.memory.exchange import by_bytes, exchanger


@pytest.mark.parametrize("make", [exchanger, by_bytes])
def test_tensors_and_views_have_the_memory_of_the_other_storage(make: object) -> None:
    assert callable(make)
    swap = make()
    assert swap is not None
    one, other = torch.arange(6.0), torch.full((6,), 7.0)
    view, addresses = one[2:4], (one.data_ptr(), other.data_ptr())
    swap(one.untyped_storage(), other.untyped_storage())
    assert (one.data_ptr(), other.data_ptr()) == addresses[::-1]
    assert view.tolist() == [7.0, 7.0] and torch.equal(other, torch.arange(6.0))
    swap(one.untyped_storage(), one.new_empty(0).untyped_storage())
    assert one.untyped_storage().nbytes() == 0


def test_memory_is_freed_once_and_by_its_own_function() -> None:
    """An alias holds the tensor that it shows, also where its memory is another storage's by now."""
    swap = by_bytes()
    assert swap is not None
    for _ in range(1000):
        base = torch.arange(4096.0)
        part = aliased(base[1024:2048])
        holder = torch.empty(0)
        swap(holder.untyped_storage(), part.untyped_storage())
        del base, part
        assert holder.untyped_storage().nbytes() == 4096
        del holder


def test_an_exchange_that_does_nothing_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "memmove", lambda *_: None)
    assert by_bytes() is None


def test_a_storage_that_lies_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.UntypedStorage, "nbytes", lambda storage: 8)
    assert by_bytes() is None
