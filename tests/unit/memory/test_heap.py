from __future__ import annotations

import pytest

from zero_offload.memory import heap
from zero_offload.memory.heap import HeapTrimmer
from zero_offload.types import MIB


def test_trims_whenever_so_much_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[None] = []
    monkeypatch.setattr(heap, "trim_heap", lambda: trims.append(None))
    trimmer = HeapTrimmer(10 * MIB)
    for _ in range(7):
        trimmer.freed(5 * MIB)
    assert len(trims) == 3
    trimmer.begin()
    trimmer.freed(5 * MIB)
    assert len(trims) == 3
