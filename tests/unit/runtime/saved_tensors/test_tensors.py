"""Whether a call still runs, on this thread or another one."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

import pytest

from zero_offload.runtime.saved_tensors.tensors import runs


def test_calls_of_this_thread_and_of_others() -> None:
    begun, ends = threading.Event(), threading.Event()
    found: list[FrameType] = []

    def other() -> None:
        found.append(sys._getframe())
        begun.set()
        assert ends.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(10)
    assert runs(sys._getframe()) and runs(found[0])
    ends.set()
    thread.join()
    assert not runs(found[0])


@pytest.mark.parametrize("collects", [True, False])
def test_no_collection_begins_while_python_lists_its_threads(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection that lets another thread end waits for ever there, in Python before 3.11.9."""
    seen = []
    listed = sys._current_frames

    def current_frames() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return listed()

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        stranger = compile("import sys; frame = sys._getframe()", "", "exec")
        scope: dict[str, FrameType] = {}
        exec(stranger, scope)
        assert not runs(scope["frame"])
        assert seen == [False] and gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
