"""Decisions of `ModelRuntime` by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_offload as zo
from zero_offload.hardware import probe
from zero_offload.model.updates import update_threads
from zero_offload.optim.pipeline import UpdatePipeline


@pytest.mark.parametrize(
    ("available", "overlaps", "is_host", "expected"),
    [(16, False, True, 16), (16, True, True, 8), (16, True, False, 15), (1, True, True, 1), (1, True, False, 1)],
)
def test_threads_of_an_update(available: int, overlaps: bool, is_host: bool, expected: int) -> None:
    assert update_threads(available, overlaps, is_host) == expected


def test_an_update_takes_no_more_threads_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's quota is less than what torch counts."""
    monkeypatch.setattr(probe, "cores_at_start", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    model = nn.Linear(8, 8)
    zo.offload(model, zo.OffloadConfig())
    optimizer = zo.SGD(model.parameters())
    found: list[int] = []
    monkeypatch.setattr(
        UpdatePipeline, "run", lambda pipeline, sections, updates, num_threads: found.append(num_threads)
    )
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert found == [1]
