"""`zo.offload` that fails, at whatever step, leaves the model, its directory and the process as they were."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.failing import fail_at, hooks_of
from tests.helpers.models import TinyLM, build, tokens_of
from zero_offload.checkpoint.run_files import RunFiles
from zero_offload.model import assembly, move_in
from zero_offload.optim import worker
from zero_offload.runtime import hooks
from zero_offload.runtime.units.unit import Unit
from zero_offload.standins.owners import owner_of

OFFLOAD = importlib.import_module("zero_offload.model.offload")  # the package's attribute is the function
BEFORE_VALUES_MOVE = [
    (OFFLOAD, "check_same_model", 1),
    (OFFLOAD, "Arena", 1),
    (OFFLOAD, "ShardStore", 1),
    (RunFiles, "create", 1),
    (OFFLOAD, "_make_unit", 2),
    (OFFLOAD, "HostParamLoader", 1),
    (OFFLOAD, "move_buffers", 1),
    (OFFLOAD, "open_activations", 1),
    (OFFLOAD, "ParamPrefetcher", 1),
    (worker, "start", 1),
    (worker, "start", 2),
    (RunFiles, "fill", 1),
    (OFFLOAD, "move_in", 1),
]
AFTER = [
    (move_in.MovedTensor, "become", 5),
    (OFFLOAD, "ModelRuntime", 1),
    (assembly, "Commits", 1),
    (OFFLOAD, "register", 3),
    (Unit, "seal", 2),
    (Unit, "guard", 2),
    (OFFLOAD, "install_hooks", 1),
    (hooks, "_WeakCall", 4),
    (OFFLOAD, "install_walk_hooks", 1),
    (RunFiles, "finish_resume", 1),
    (OFFLOAD, "trim_heap", 1),
]


def threads() -> set[threading.Thread]:
    """Those that run now. Compare by `<=`: threads of a model that an earlier test dropped may end at any time."""
    return set(threading.enumerate())


@pytest.mark.parametrize(
    ("place", "name", "nth"), BEFORE_VALUES_MOVE + AFTER, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_failure_at_any_step_is_undone(
    place: Any, name: str, nth: int, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values_moved = (place, name, nth) in AFTER
    error = KeyboardInterrupt("injected") if values_moved else RuntimeError("injected")
    model = build(TinyLM)
    if not values_moved:
        model.blocks[0].requires_grad_(False)
    model.register_buffer("scale", torch.ones(3))
    params, before = list(model.parameters()), [param.detach().clone() for param in model.parameters()]
    buffer, running = model.scale, threads()
    config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme)
    fail_at(monkeypatch, place, name, nth, error)
    with pytest.raises(type(error), match="injected"):
        zo.offload(model, config)
    monkeypatch.undo()

    assert list(map(id, model.parameters())) == list(map(id, params)) and model.scale is buffer
    for param, value in zip(params, before, strict=True):
        assert type(param) is nn.Parameter and owner_of(param) is None
        assert param.dtype == value.dtype and torch.equal(param, value)
    assert hooks_of(model) == [] and threads() <= running
    model(tokens_of(0)).backward()
    model.zero_grad()
    zo.offload(model, config)  # the directory is free
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    model(tokens_of(0)).backward()
    optimizer.step()
    zo.close(model)


def test_a_failure_that_rounds_frozen_parameters_says_so(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their fp32 values are kept nowhere once they have moved: a second copy would double the model's memory."""
    model = build(TinyLM)
    model.blocks[0].requires_grad_(False)
    before = model.blocks[0].up.weight.detach().clone()
    fail_at(monkeypatch, OFFLOAD, "install_hooks", 1, RuntimeError("injected"))
    with (
        pytest.raises(RuntimeError, match="injected"),
        pytest.warns(UserWarning, match="blocks.0.*rounded to bfloat16"),
    ):
        zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme))
    assert torch.equal(model.blocks[0].up.weight, before.bfloat16().float())


@pytest.mark.parametrize("engine", ["threads", "aiofiles"])
def test_a_thread_that_does_not_start(engine: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name in ("zero_offload-commit", "zero_offload-io-loop"):
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    model, running = build(TinyLM), threads()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(zo.CapacityError, match=r"cannot start thread zero_offload-.*see 'ulimit -u'"):
        zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme, io_engine=engine))
    assert all(map(torch.equal, model.parameters(), before))
    for thread in threads() - running:
        thread.join(5)
    assert threads() <= running
