"""Views, signals and other threads, while an update or a move is under way."""

from __future__ import annotations

import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.disk import drain
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.reference import placed, read_masters
from zero_offload.base.types import MIB, EngineKind
from zero_offload.hardware.abi import IoOp
from zero_offload.model.api import runtime_of
from zero_offload.optim import pipeline
from zero_offload.runtime.units.param_loader import HostParamLoader
from zero_offload.storage.files import aiofiles_engine
from zero_offload.storage.files.engine import BLOCK_DTYPE, EngineSettings
from zero_offload.storage.memory import arena

Model = partial(TinyLM, WIDE)


@pytest.fixture
def slow_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step returns long before its update is over."""
    update = pipeline.fused_update

    def slowly(*args: Any) -> None:
        time.sleep(0.05)
        update(*args)

    monkeypatch.setattr(pipeline, "fused_update", slowly)


class Lends(torch.autograd.Function):
    """Keeps a view of a weight past torch's saved tensors."""

    seen: list[bool] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight, ctx.was = weight, weight.clone()
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(0.2)
        Lends.seen.append(torch.equal(ctx.weight, ctx.was))
        return grad @ ctx.weight.t(), None


class Borrows(TinyLM):
    """A node before the first block reads the last block's weight."""

    def __init__(self) -> None:
        super().__init__(WIDE, 3)

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(x + 0.1 * Lends.apply(x, self.blocks[2].down.weight.detach()[:, :WIDE]))


def test_an_update_in_backward_waits_for_views_of_weights_in_place() -> None:
    masters = []
    for overlap in ("none", "backward"):
        model = zo.offload(build(Borrows), zo.OffloadConfig(precision="fp32", overlap=overlap))
        optimizer = zo.AdamW(model.parameters(), lr=0.1)
        Lends.seen.clear()
        model(tokens_of(0)).backward()
        optimizer.step()
        assert Lends.seen == [True], overlap
        masters.append(read_masters(model))
        zo.close(model)
    assert all(torch.equal(masters[0][name], masters[1][name]) for name in masters[0])


def test_a_view_of_a_weight_in_place_shows_new_values_after_a_step(slow_updates: None, nvme: Path) -> None:
    model = zo.offload(build(Model), placed("fp32", ("cpu", "cpu", "nvme"), nvme, "64MiB"))
    optimizer = zo.AdamW(model.parameters(), lr=0.1)
    view = model.blocks[2].up.weight.detach()[:2]
    before = view.clone()
    model(tokens_of(0)).backward()
    optimizer.step()
    shown = view.clone()
    model.state_dict()  # waits for the update
    assert torch.equal(shown, view) and not torch.equal(shown, before)
    zo.close(model)


@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_a_forward_waits_for_the_update_of_each_unit(params: str, slow_updates: None, nvme: Path) -> None:
    """Memory for few units: each is evicted while its update is still to come."""

    def losses(overlap: str) -> list[float]:
        where = {"params": params, "optimizer": "nvme", "nvme": nvme / overlap}
        config = zo.OffloadConfig(**where, device_memory="4MiB", overlap=overlap)
        model = zo.offload(build(Model), config)
        optimizer, found = zo.AdamW(model.parameters(), lr=0.1), []
        for seed in range(3):
            loss = model(tokens_of(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        zo.close(model)
        return found

    assert losses("forward") == losses("none")


@pytest.mark.parametrize("strike", range(1, 9))
def test_a_ctrl_c_while_pages_move_loses_no_weight(strike: int, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It strikes as a call of the system returns, in any eviction of a forward."""
    detach, move_frame, left = arena.MovableBuffer.detach, arena.move_frame, 0

    def move(source: int, target: int) -> None:
        nonlocal left
        move_frame(source, target)
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    def leaving(self: arena.MovableBuffer) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(arena, "move_frame", move)
            detach(self)

    monkeypatch.setattr(arena.MovableBuffer, "detach", leaving)
    with torch.no_grad():
        expected = build(Model)(tokens_of(1)).item()
        model = zo.offload(build(Model), placed("fp32", ("nvme", "cpu", "nvme"), nvme, "4MiB"))
        model(tokens_of(0))
        left = strike
        with pytest.raises(KeyboardInterrupt):
            for _ in range(8):
                model(tokens_of(0))
        left = 0
        assert [model(tokens_of(1)).item() for _ in range(2)] == [expected] * 2
        zo.close(model)


def test_a_call_of_another_thread_at_the_end_of_a_backward_drops_nothing(nvme: Path) -> None:
    threads: list[threading.Thread] = []

    class Beside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            threads.append(threading.Thread(target=model.state_dict))
            threads[-1].start()
            time.sleep(0.1)
            return grad

    class Watched(TinyLM):
        def run_blocks(self, x: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                x = block(Beside.apply(x) if number == 1 else x)
            return x

    model = zo.offload(build(partial(Watched, WIDE)), placed("fp32", ("nvme", "cpu", "nvme"), nvme))
    optimizer = zo.AdamW(model.parameters(), lr=0.1)
    plain = zo.offload(build(Model), placed("fp32", ("cpu",) * 3, None))
    its_optimizer = zo.AdamW(plain.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens_of(0)).backward()
        threads[0].join()
        optimizer.step()
    plain(tokens_of(0)).backward()
    its_optimizer.step()
    found, expected = read_masters(model), read_masters(plain)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    zo.close(model)


def test_a_step_while_values_are_written_is_refused() -> None:
    model = zo.offload(build(Model), zo.OffloadConfig(precision="fp32"))
    optimizer = zo.AdamW(model.parameters(), lr=0.1)
    model(tokens_of(0)).backward()
    with (
        zo.gathered(model.blocks[2], mode="write"),
        pytest.raises(
            zo.ZeroOffloadError, match="step\\(\\) inside of zo.gathered.*blocks.2.*call step\\(\\) after it"
        ),
    ):
        optimizer.step()
    optimizer.step()
    assert zo.stats(model).step == 1
    zo.close(model)


def test_a_parameter_read_by_another_thread_during_a_forward_raises(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[str] = []
    armed, finish = False, HostParamLoader.finish

    def read() -> None:
        for block in model.blocks:
            try:
                block.up.weight.sum()
            except zo.ZeroOffloadError as error:
                errors.append(str(error))

    def finish_beside(self: HostParamLoader, unit: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
        finish(self, unit)

    monkeypatch.setattr(HostParamLoader, "finish", finish_beside)
    model = zo.offload(build(Model), placed("fp32", ("nvme", "cpu", "nvme"), nvme, "8MiB"))
    with torch.no_grad():
        first = model(tokens_of(0)).item()
        armed = True
        assert model(tokens_of(0)).item() == first
    assert errors and not armed
    zo.close(model)


def test_a_commit_that_a_ctrl_c_kept_from_beginning_is_not_waited_for(nvme: Path) -> None:
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, commit_every="auto", overlap="none")
    model = zo.offload(build(Model), config)
    optimizer = zo.AdamW(model.parameters())
    worker = runtime_of(model).base.update_worker
    submit = worker.submit

    def once(job: Callable[[], None]) -> None:
        worker.submit = submit  # type: ignore[method-assign]
        raise KeyboardInterrupt

    worker.submit = once  # type: ignore[method-assign]
    num_struck = 0

    def train() -> None:
        nonlocal num_struck
        for seed in range(16):
            model(tokens_of(seed)).backward()
            optimizer.step()
            try:
                zo.commit(model, optimizer)
            except KeyboardInterrupt:
                num_struck += 1

    thread = threading.Thread(target=train, daemon=True)  # a wait for ever would hold the tests up
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and num_struck == 1
    drain(model)
    assert runtime_of(model).store.snapshots.num_ended > 0, "commits came to an end"
    zo.close(model)


def test_a_transfer_that_a_ctrl_c_kept_from_beginning_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    engine = aiofiles_engine.AiofilesEngine(EngineSettings(EngineKind.AIOFILES, 2, 1, MIB))
    monkeypatch.setattr(aiofiles_engine, "itertools", SimpleNamespace(accumulate=strike, count=itertools.count))
    with pytest.raises(KeyboardInterrupt):
        engine.submit(IoOp.READ, np.zeros(1, BLOCK_DTYPE), 4096)
    thread = threading.Thread(target=engine.close, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_states_of_half_a_step_are_not_given_out() -> None:
    class Breaks(nn.Module):
        error: type[BaseException] | None = None

        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyLM(WIDE, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            if self.error is not None:
                self.inner.embedding.weight.register_hook(self._break)
            loss: Tensor = self.inner(tokens)
            return loss

        def _break(self, grad: Tensor) -> Tensor:
            assert self.error is not None
            raise self.error

    model = zo.offload(build(Breaks), zo.OffloadConfig(precision="fp32", overlap="backward"))
    optimizer = zo.AdamW(model.parameters())
    model(tokens_of(0)).backward()
    optimizer.step()
    model.error = RuntimeError
    with pytest.raises(RuntimeError):
        model(tokens_of(1)).backward()
    with pytest.raises(zo.ZeroOffloadError, match="a mix of two steps"):
        optimizer.state_dict()


def test_a_forked_child_unmaps_nothing_that_it_does_not_have() -> None:
    """Addresses of ours are holes there, which its own memory may fill."""
    region = arena.Arena(1).array(torch.uint8, 8 * MIB)
    child = os.fork()
    if child == 0:
        os._exit(0 if arena._mapped.nbytes == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert arena._mapped.nbytes >= region.nbytes
