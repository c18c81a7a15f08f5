"""A model dropped without `zo.close` is closed when its last graph is gone; what a forked child may not do."""

from __future__ import annotations

import gc
import os
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import NARROW, TinyLM, build, tokens_of

TIERS = ["cpu", "nvme"]


class Shifted(TinyLM):
    """Differentiable in an input."""

    def forward(self, tokens: Tensor, shift: Tensor | None = None) -> Tensor:
        if shift is None:
            return super().forward(tokens)
        return self.norm(self.run_blocks(self.embedding(tokens) + shift)).float().square().sum()


def start(nvme: Path, params: str) -> tuple[nn.Module, zo.AdamW, int]:
    model = build(Shifted)
    zo.offload(model, zo.OffloadConfig(params=params, optimizer="nvme", nvme=nvme, existing="resume"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    resumed = zo.resume(model, optimizer)
    return model, optimizer, 0 if resumed is None else resumed.step


def step(model: nn.Module, optimizer: zo.AdamW, number: int) -> float:
    loss = model(tokens_of(number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()  # type: ignore[no-any-return]


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("params", TIERS)
def test_its_directory_can_be_offloaded_into_at_once(
    params: str, commits: bool, nvme: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether an update or a commit was still under way. Committed steps are there; another step is named."""
    other = tmp_path / "other"
    model, optimizer, _ = start(other, params)
    want = [step(model, optimizer, number) for number in range(6)]
    zo.close(model)
    for run in range(3):
        model, optimizer, begin = start(nvme, params)
        # Without zo.commit the next backward makes a step a generation.
        assert begin == (2 * run if commits else run)
        for number in range(begin, begin + 2):
            assert step(model, optimizer, number) == want[number]
            if commits:
                zo.commit(model, optimizer)
        del model, optimizer
        assert ("is not made a generation: the model was dropped" in capfd.readouterr().err) is not commits


class Ring(TinyLM):
    """Refers to itself: only the garbage collector frees it."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks_of_mine = [self.forward]


def test_a_model_in_a_reference_cycle_lets_go_too(nvme: Path) -> None:
    model = build(Ring)
    config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme, existing="resume")
    zo.offload(model, config)
    step(model, zo.AdamW(model.parameters()), 0)
    del model
    start(nvme, "nvme")


@pytest.mark.parametrize("params", TIERS)
def test_a_backward_after_the_model_is_dropped(params: str, nvme: Path) -> None:
    model, optimizer, _ = start(nvme, params)
    grads = []
    for drop in (False, True):
        shift = torch.ones(NARROW, requires_grad=True)
        loss = model(tokens_of(0), shift)
        if drop:
            del model
            gc.collect()
        loss.backward()
        optimizer.zero_grad()
        assert shift.grad is not None and shift.grad.any()
        grads.append(shift.grad)
    assert torch.equal(*grads)
    with pytest.raises(zo.ZeroOffloadError, match="belonged to an offloaded model that was dropped"):
        optimizer.step()
    del loss
    start(nvme, params)


@pytest.mark.parametrize("params", TIERS)
def test_parameters_without_their_model_are_not_read(params: str, nvme: Path) -> None:
    model, _, _ = start(nvme, params)
    weight = model.embedding.weight
    shape = weight.shape
    del model, _
    assert weight.shape == shape
    with pytest.raises(zo.ZeroOffloadError, match="belonged to an offloaded model that was dropped"):
        weight.sum()


@pytest.mark.parametrize("params", TIERS)
def test_close_in_a_forked_child_raises(params: str, nvme: Path) -> None:
    model, optimizer, _ = start(nvme, params)
    step(model, optimizer, 0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            zo.close(model)
        except zo.ZeroOffloadError as error:
            code = 0 if "not in its forked child" in str(error) else 2
        del model, optimizer
        gc.collect()  # what is dropped there is not closed either
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    step(model, optimizer, 1)
    zo.close(model)


def drop_inside_of_threading(nvme: Path) -> None:
    model, optimizer, _ = start(nvme, "cpu")
    step(model, optimizer, 0)
    lock = getattr(threading, "_shutdown_locks_lock", threading.Lock())
    with lock:  # as where a thread starts, and its list of locks is the allocation that begins a collection
        del model, optimizer
        gc.collect()
    deadline = time.monotonic() + 30
    while True:
        try:
            model, *_ = start(nvme, "cpu")
        except zo.ZeroOffloadError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            break
    zo.close(model)


def test_the_garbage_collector_may_drop_it_while_python_starts_a_thread(nvme: Path) -> None:
    """It ends later then. To wait for its threads there took a lock of Python's twice, and hung."""
    process = get_context("spawn").Process(target=drop_inside_of_threading, args=(nvme,))
    process.start()
    process.join(90)
    process.kill()
    process.join()
    assert process.exitcode == 0
