"""The end of the process and its forks: told once, to who is still there, and models leave nothing behind for them."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import zero_offload as zo
from tests.helpers.fresh import run_script
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.without_library import whole_run_without_library
from zero_offload.base.ends import ExitGate

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


GATED = """
import threading, time
import torch.distributed as dist
from zero_offload.base.ends import exit_gate
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set("key", "value")
def run():
    while True:
        with exit_gate.inside():
            store.get("key")
for _ in range(3):
    threading.Thread(target=run, daemon=True).start()
time.sleep(0.2)
print("over", flush=True)
"""


def test_a_program_whose_threads_ask_a_store_ends_as_it_should() -> None:
    ended = run_script(GATED)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "over\n", "")


def test_the_end_waits_for_no_thread_that_hangs() -> None:
    gate, came, goes_on = ExitGate(patience_s=0.2), threading.Event(), threading.Event()

    def hang() -> None:
        with gate.inside():
            came.set()
            goes_on.wait()

    threading.Thread(target=hang, daemon=True).start()
    assert came.wait(10)
    began = time.monotonic()
    gate.shut()
    assert 0.2 <= time.monotonic() - began < 10
    with gate.inside():  # the main thread just passes
        goes_on.set()


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
