"""The end of the process and its forks: told once, to who is still there, and models leave nothing behind for them."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import zero_offload as zo
from tests.helpers.fresh import run_script
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.without_library import whole_run_without_library

SCRIPT = """
import sys
from zero_offload.base.ends import at_exit, in_child
class Named:
    def __init__(self, name): self.name = name
    def end(self): print(self.name, flush=True)
    def fail(self): raise ValueError(self.name)
first, gone, failing, last = (Named(name) for name in ("first", "gone", "failing", "last"))
for method in (first.end, gone.end, failing.fail, last.end):
    METHOD(method)
del gone, method
"""


def said(code: str) -> list[str]:
    ended = run_script(code)
    assert ended.returncode == 0 and "ValueError: failing" in ended.stderr
    return ended.stdout.split()


def test_the_latest_is_told_first_and_an_error_stops_no_other() -> None:
    assert said(SCRIPT.replace("METHOD", "at_exit")) == ["last", "first"]


def test_a_child_is_told() -> None:
    fork = "import os\nif (pid := os.fork()) == 0: os._exit(0)\nos.waitpid(pid, 0)"
    assert said(SCRIPT.replace("METHOD", "in_child") + fork) == ["last", "first"]


def _train(nvme: Path, closes: bool) -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme))
    optimizer = zo.AdamW(model.parameters())
    model(tokens_of(0)).backward()
    optimizer.step()
    if closes:
        zo.close(model)


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("library", [True, False], ids=["library", "no library"])
def test_a_model_leaves_no_callback(closes: bool, library: bool, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**callbacks: Callable[[], None]) -> None:
        raise AssertionError("nothing takes back what is told to forks")

    def twice() -> None:
        _train(nvme / "first", closes)
        monkeypatch.setattr(os, "register_at_fork", refused)
        before = atexit._ncallbacks()  # type: ignore[attr-defined]
        _train(nvme / "second", closes)
        gc.collect()
        assert atexit._ncallbacks() == before  # type: ignore[attr-defined]

    if library:
        twice()
    else:
        with whole_run_without_library():
            twice()
