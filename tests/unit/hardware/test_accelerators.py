"""The calls of the table to CUDA, with stand-ins for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero_offload.hardware.accelerators import ACCELERATORS, present_type

CUDA = ACCELERATORS["cuda"]


def test_the_host_sleeps_while_it_waits_for_an_event_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.Event ignores that it is asked to, up to 2.14, and a core would spin."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **settings: asked.append(settings))
    for timed in (True, False):
        CUDA.make_event(torch.device("cuda", 1), timed)
    assert asked == [{"enable_timing": True, "blocking": True}, {"enable_timing": False, "blocking": True}]


@pytest.mark.parametrize("status", [0, 2])
def test_registration_leaves_no_error_behind(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would report it with whatever is launched next: a launch of ours takes it."""
    calls: list[Any] = []

    def register(address: int, nbytes: int, flags: int) -> int:
        calls.append((address, nbytes, flags))
        return status

    def launch(*_: Any, device: str, **__: Any) -> None:
        calls.append(device)
        raise RuntimeError("CUDA error: out of memory")

    runtime = SimpleNamespace(cudaHostRegister=register)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", launch)
    assert CUDA.host_memory is not None
    assert (
        CUDA.host_memory.register(
            4096,
            100,
        )
        == status
    )
    assert calls == [(4096, 100, 1), *(["cuda"] if status else [])]


@pytest.mark.parametrize(("found", "expected"), [("cuda", "cuda"), ("xpu", "xpu"), ("mps", None), (None, None)])
def test_a_device_type_that_the_table_lacks_is_not_used(
    found: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = None if found is None else torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    assert present_type() == expected
