"""A host whose memory ends where micro-batches are added up; on a CPU and on the fake GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.reference import param_groups, read_masters
from zero_offload.hardware import probe
from zero_offload.hardware.probe import MemoryLimit
from zero_offload.model.api import runtime_of
from zero_offload.storage.memory import arena


@contextmanager
def memory_left(nbytes: int, model: nn.Module) -> Iterator[None]:
    """The host has so much left for what the model takes from now on, and each allocation is compared with it."""
    before = _taken(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "LOOK_BYTES", 0)
        patch.setattr(arena, "SPARE_BYTES", 0)
        patch.setattr(probe, "memory_limits", lambda: (MemoryLimit("host", nbytes + before - _taken(model)),))
        yield


def _taken(model: nn.Module) -> int:
    owner = runtime_of(model)
    assert owner is not None
    return owner.store.arena.allocated_bytes + owner.store.arena.frame_bytes


def open_model(nvme: Path, **settings: Any) -> tuple[nn.Module, zo.AdamW]:
    model = zo.offload(build(lambda: TinyLM(WIDE)), zo.OffloadConfig(nvme=nvme, **settings))
    return model, zo.AdamW(param_groups(model), lr=1e-2)


def step(model: nn.Module, optimizer: zo.AdamW, number: int, micro_batches: int) -> list[float]:
    """Its losses."""
    losses = []
    for micro_batch in range(micro_batches):
        loss = model(tokens_of(10 * number + micro_batch))
        loss.backward()
        losses.append(loss.item())
    zo.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    zo.commit(model, optimizer)
    return losses


def steps(model: nn.Module, optimizer: zo.AdamW, begin: int, end: int) -> list[float]:
    """Steps [begin, end): of one micro-batch, and from the step 2 on of three."""
    return [loss for number in range(begin, end) for loss in step(model, optimizer, number, 1 if number < 2 else 3)]


def undisturbed(nvme: Path, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and masters of four steps."""
    model, optimizer = open_model(nvme, **settings)
    losses = steps(model, optimizer, 0, 4)
    masters = read_masters(model)
    zo.close(model)
    return losses, masters


def check_sums_without_memory(path: Path, *, left: int, resumes: bool, **settings: Any) -> None:
    """With so many bytes left the second micro-batch raises one error. The step can be repeated once there is memory,
    and the last generation is whole."""
    losses, masters = undisturbed(path / "plain", **settings)
    model, optimizer = open_model(path / "run", **settings)
    found = steps(model, optimizer, 0, 2)
    with memory_left(left, model), pytest.raises(zo.CapacityError) as caught:
        steps(model, optimizer, 2, 3)
    for words in ("fp32 sums of the gradients of ", " are left (host)", "micro_batches=2", "grads=", "compact"):
        assert words in str(caught.value), caught.value
    if resumes:
        zo.close(model)
        model, optimizer = open_model(path / "run", existing="resume", **settings)
        resumed = zo.resume(model, optimizer)
        assert resumed is not None and resumed.step == 2
    else:
        with pytest.warns(UserWarning, match="the last backward was left by an exception: its gradients are dropped"):
            zo.clip_grad_norm_(model, 0.5)
        optimizer.step()  # of nothing
        optimizer.zero_grad()
    assert found + steps(model, optimizer, 2, 4) == losses
    assert all(torch.equal(value, masters[name]) for name, value in read_masters(model).items())
    zo.close(model)
