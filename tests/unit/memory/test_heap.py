from __future__ import annotations

import pytest
import torch

from zero_offload.memory import heap
from zero_offload.memory.heap import HeapTrimmer
from zero_offload.types import MIB


class FakeProcess:
    """A trim gives all but 50 MiB back."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.resident = 100 * MIB
        self.num_trims = 0
        patch.setattr(heap, "trim_heap", self._trim)
        patch.setattr(heap, "_resident_bytes", lambda: self.resident)

    def _trim(self) -> None:
        self.num_trims += 1
        self.resident = 50 * MIB


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> FakeProcess:
    return FakeProcess(monkeypatch)


def test_trims_by_what_is_freed(process: FakeProcess) -> None:
    trimmer = HeapTrimmer(10 * MIB)
    for _ in range(7):
        trimmer.freed(5 * MIB)
    assert process.num_trims == 3
    trimmer.begin()
    trimmer.freed(5 * MIB)
    assert process.num_trims == 3


def test_trims_only_a_process_that_has_grown_since_it_was_smallest(process: FakeProcess) -> None:
    trimmer = HeapTrimmer(10 * MIB, growth_bytes=20 * MIB)
    trims_at = []
    for resident in (100, 90, 105, 109, 110, 50, 69, 70, 60):
        process.resident = resident * MIB
        before = process.num_trims
        trimmer.freed(10 * MIB)
        if process.num_trims > before:
            trims_at.append(resident)
    assert trims_at == [110, 70]


def test_resident_memory_is_what_the_system_says() -> None:
    before = heap._resident_bytes()
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    grown = heap._resident_bytes() - before
    assert 60 * MIB < grown < 80 * MIB
    del tensor
