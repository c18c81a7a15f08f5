"""Buffers that take their memory from torch's allocator and give it back."""

from __future__ import annotations

import pytest
import torch

from zero_offload.storage.memory.resizable import FrameBudget, ResizableBuffer


def test_a_buffer_without_memory_takes_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        raise torch.OutOfMemoryError("out of memory")

    budget = FrameBudget(1, 1)
    buffer = ResizableBuffer(budget, 100, torch.float32, torch.device("cpu"))
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch.UntypedStorage, "resize_", no_memory)
        buffer.attach()
    assert budget.free_frames == 1 and not buffer.attached
    assert buffer.attach() and budget.free_frames == 0
    buffer.detach()


def test_a_tensor_has_no_memory_before_its_buffer_is_attached() -> None:
    buffer = ResizableBuffer(FrameBudget(1 << 20, 1 << 20), 1 << 40, torch.bfloat16, torch.device("cpu"))
    assert buffer.tensor.shape == (1 << 40,) and buffer.tensor.untyped_storage().nbytes() == 0


def test_no_frame_comes_back_twice() -> None:
    budget = FrameBudget(4, 4)
    budget.take(2)
    with pytest.raises(AssertionError, match="3 frames come back, and 2 are taken"):
        budget.release(3)
