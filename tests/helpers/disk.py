"""Small models on disk, their engine, and damage done to their files."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import param_groups, read_masters
from zero_offload.model.api import runtime_of
from zero_offload.model.runtime import ModelRuntime
from zero_offload.storage.files.native_engine import NativeEngine

SWAP = "rank0.swap"


def open_model(nvme: Path | str, model: nn.Module | None = None, **settings: Any) -> tuple[nn.Module, zo.AdamW]:
    """Parameters and optimizer on NVMe; resumes what is there."""
    model = build(TinyLM) if model is None else model
    choices = {"params": "nvme", "optimizer": "nvme", "existing": "resume", "device_memory": "8MiB"} | settings
    zo.offload(model, zo.OffloadConfig(nvme=nvme, **choices))
    return model, zo.AdamW(param_groups(model), lr=1e-2)


def train(model: nn.Module, optimizer: zo.AdamW, begin: int, end: int) -> list[float]:
    """Steps [begin, end), each committed; returns their losses."""
    losses = []
    for step in range(begin, end):
        loss = model(tokens_of(step))
        loss.backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        zo.commit(model, optimizer, extra={"next": step + 1})
    return losses


def runtime(model: nn.Module) -> ModelRuntime:
    owner = runtime_of(model)
    assert owner is not None
    return owner


def drain(model: nn.Module) -> None:
    """Return when every commit is complete. Raises what went wrong in one."""
    runtime(model).drain()


@functools.cache
def reference(num_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and masters of a run in memory that nothing has disturbed."""
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig())
    losses = train(model, zo.AdamW(param_groups(model), lr=1e-2), 0, num_steps)
    masters = read_masters(model)
    zo.close(model)
    return losses, masters


def assert_finishes(nvme: Path | str, num_steps: int, **settings: Any) -> int:
    """Resume, train to the end, compare with a run that nothing has disturbed; returns where it went on."""
    model, optimizer = open_model(nvme, **settings)
    resumed = zo.resume(model, optimizer)
    begin = 0 if resumed is None else resumed.step
    assert resumed is None or resumed.extra == {"next": begin}
    losses, masters = reference(num_steps)
    assert train(model, optimizer, begin, num_steps) == losses[begin:]
    found = read_masters(model)
    zo.close(model)
    assert list(found) == list(masters)
    assert all(torch.equal(found[name], masters[name]) for name in masters)
    return begin


def write_run(nvme: Path | str, num_steps: int, **settings: Any) -> None:
    """A directory with the generation of a run that was closed after so many steps."""
    model, optimizer = open_model(nvme, **settings)
    train(model, optimizer, 0, num_steps)
    zo.close(model)


def engine_of(model: nn.Module) -> NativeEngine:
    swap = runtime(model).store.swap
    assert swap is not None
    engine = swap._engine
    assert isinstance(engine, NativeEngine)
    return engine


def close_broken(model: nn.Module) -> None:
    """Close a model that cannot be closed in order any more."""
    with contextlib.suppress(zo.ZeroOffloadError):
        zo.close(model)


def generation_file(nvme: Path, number: int | None = None) -> Path:
    """The manifest of the newest generation, or of the one with this number."""
    found = {json.loads(path.read_text())["payload"]["number"]: path for path in nvme.glob("generation-*.json")}
    return found[max(found) if number is None else number]


def committed_blocks(nvme: Path, number: int | None = None) -> list[tuple[int, str]]:
    """(offset, component) of the first block of every array that the generation names."""
    generation = json.loads(generation_file(nvme, number).read_text())["payload"]
    manifest = json.loads((nvme / generation["ranks"][0]["manifest"]).read_text())["payload"]
    return [
        (entry["offset"][0], component)
        for section in manifest["sections"]
        for component, entry in section["components"].items()
    ]


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))
        os.fsync(file.fileno())


@contextlib.contextmanager
def sharing_disk(path: Path, kind: str) -> Iterator[Path]:
    """A file system whose files can share blocks, "btrfs" or "xfs"; skips the test where there is none to be had."""
    maker = shutil.which(f"mkfs.{kind}")
    if os.geteuid() != 0 or maker is None:
        pytest.skip(f"needs root and mkfs.{kind}")
    image = path.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(1 << 30)  # the smallest that XFS takes is 300 MiB; the file is sparse
    path.mkdir(mode=0o700)
    subprocess.run([maker, "-q", str(image)], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(path)], check=False, capture_output=True).returncode != 0:
        pytest.skip(f"{kind} cannot be mounted here")
    try:
        path.chmod(0o700)
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A file system of its own; skips the test where none may be mounted."""
    path.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
