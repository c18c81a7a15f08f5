"""Buffers that take their memory from torch's allocator and give it back."""

from __future__ import annotations

import pytest
import torch

from zero_offload.storage.memory.resizable import FrameBudget, ResizableBuffer


def test_a_buffer_without_memory_takes_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        raise torch.OutOfMemoryError("out of memory")

    budget = FrameBudget(1, 1)
    buffer = ResizableBuffer(budget, torch.zeros(100))
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch.UntypedStorage, "resize_", no_memory)
        buffer.attach()
    assert budget.free_frames == 1 and not buffer.attached
    assert buffer.attach() and budget.free_frames == 0
    buffer.detach()


def test_what_is_addressable_goes_when_its_use_breaks_off() -> None:
    tensor = torch.zeros(100)
    buffer = ResizableBuffer(FrameBudget(1, 1), tensor)
    with pytest.raises(KeyboardInterrupt), buffer.addressable():
        raise KeyboardInterrupt
    assert tensor.untyped_storage().nbytes() == 0
