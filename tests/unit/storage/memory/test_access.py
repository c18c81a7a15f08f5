"""Storages that torch may not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_offload.storage.memory import access
from zero_offload.storage.memory.access import StorageAccess

USES: dict[str, Callable[[Tensor], Any]] = {
    "read": lambda tensor: tensor.sum(),
    "write": lambda tensor: tensor.add_(1),
    "address": lambda tensor: tensor.data_ptr(),
    "array": lambda tensor: tensor.numpy(),
    "view": lambda tensor: tensor.view(2, 2) * 1,
}


@pytest.mark.parametrize("use", USES)
def test_a_closed_storage_raises_and_an_open_one_is_as_before(use: str) -> None:
    tensor, twin = torch.arange(4.0), torch.arange(4.0)
    storage = StorageAccess([tensor.untyped_storage()])
    for _ in range(2):
        storage.close()
        with pytest.raises(RuntimeError, match="is invalid"):
            USES[use](tensor)
        with storage.opened():
            assert torch.equal(tensor, twin)
        assert not storage.is_open
        storage.open()
        USES[use](tensor), USES[use](twin)
        assert torch.equal(tensor, twin)


def test_views_from_before_are_closed_and_other_tensors_are_not() -> None:
    tensor, other = torch.arange(4.0), torch.arange(4.0)
    view = tensor[1:]
    StorageAccess([tensor.untyped_storage()]).close()
    with pytest.raises(RuntimeError, match="is invalid"):
        view.sum()
    assert view.shape == (3,) and view.detach().stride() == (1,) and other.sum() == 6


@pytest.mark.parametrize("name", ["_set_throw_on_mutable_data_ptr", "_set_warn_deprecated_on_mutable_data_ptr"])
def test_flags_that_are_elsewhere_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setter that does something else than expected: nothing is written."""
    monkeypatch.setattr(torch._C, name, lambda tensor: tensor.untyped_storage().resize_(8))
    access.flags_at.cache_clear()
    try:
        tensor = torch.arange(4.0)
        StorageAccess([tensor.untyped_storage()]).close()
        assert tensor.sum() == 6
    finally:
        access.flags_at.cache_clear()
