"""`zo.accumulate` beside a device with memory of its own, on lanes that copy as late as the waits permit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.accumulating import batches_of, loop, third
from tests.helpers.activations import make_small
from tests.helpers.late_device import LateDevice
from tests.helpers.models import WIDE, AttentionBlock, TinyLM, build
from tests.helpers.pairwise import Row, label, pairwise
from tests.helpers.ranks import Case, RankPool
from tests.helpers.reference import param_groups
from tests.overlap.test_late_ranks import train_late
from zero_offload.device import Device, HostDevice

offload_module: Any = importlib.import_module("zero_offload.offload")

MATRIX: dict[str, Any] = {
    "params": ["cpu", "nvme", {"device": 0.3, "cpu": 0.3, "nvme": 0.4}],
    "grads": ["cpu", "device", "nvme"],
    "optimizer": ["cpu", "nvme"],
    "activations": ["device", "cpu", "nvme"],
    "precision": ["fp32", "bf16"],
    "is_marked": [True, False],
}


def train(run: Any, device: Device, is_marked: bool, config: zo.OffloadConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(offload_module, "compute_device", lambda: device)
    model = zo.offload(build(lambda: TinyLM(64, 3, AttentionBlock)), config)
    if is_marked:
        zo.checkpoint(model.blocks)
    optimizer, results = zo.AdamW(param_groups(model), lr=1e-2), []
    for step in range(3):
        results += run(model, batches_of(3, 3 * step), third)
        results.append(zo.clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    zo.close(model)
    return results


@pytest.mark.parametrize("row", pairwise(MATRIX), ids=label)
def test_late_lanes_give_the_bits_of_the_loop_on_a_host(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    settings, is_marked = {**row}, row["is_marked"]
    del settings["is_marked"]
    on_host = zo.OffloadConfig(precision=row["precision"])
    expected = train(loop, HostDevice(), is_marked, on_host, monkeypatch)
    device = LateDevice()
    away = zo.OffloadConfig(**settings, nvme=tmp_path / "nvme", durability="scratch", device_memory="8MiB")
    assert train(zo.accumulate, device, is_marked, away, monkeypatch) == expected
    assert device.uploads.launched > 0


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_a_late_device_each(stage: int, nvme: Path) -> None:
    pool = RankPool(2)
    try:
        settings: dict[str, Any] = {"stage": stage, "precision": "bf16", "durability": "scratch"}
        case = Case(settings, 3, 3, 0.5, num_frozen=1)
        expected = pool.succeed(ranks.train, case)
        settings = settings | {"params": "cpu", "optimizer": "nvme", "nvme": nvme, "device_memory": "4MiB"}
        found = pool.succeed(train_late, Case(settings, 3, 3, 0.5, num_frozen=1, by_unit=True))
        assert [outcome for outcome, _ in found] == expected
        assert all(uploads > 0 for _, uploads in found)
    finally:
        pool.close()


def test_every_micro_batch_finds_the_unit_there(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads of a step do not grow with their number."""
    found = []
    for count in (1, 5):
        device = LateDevice()
        monkeypatch.setattr(offload_module, "compute_device", lambda device=device: device)
        config = zo.OffloadConfig(params="cpu", precision="fp32", device_memory="19MiB")
        model = zo.offload(build(lambda: TinyLM(WIDE, 4)), config)
        optimizer = zo.AdamW(param_groups(model), lr=1e-2)
        for step in range(3):
            before = device.uploads.launched
            zo.accumulate(model, batches_of(count, 5 * step), third)
            optimizer.step()
            optimizer.zero_grad()
        found.append(device.uploads.launched - before)
        zo.close(model)
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("grads", ["cpu", "nvme"])
def test_gradients_leave_once_per_step(grads: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Added up on the device, however many micro-batches there are; a loop has each of them leave."""
    found = {}
    for run, count in ((zo.accumulate, 1), (zo.accumulate, 2), (zo.accumulate, 5), (loop, 2)):
        device = LateDevice()
        monkeypatch.setattr(offload_module, "compute_device", lambda device=device: device)
        config = zo.OffloadConfig(
            params="cpu", grads=grads, precision="fp32", nvme=nvme / str(len(found)), durability="scratch"
        )
        model = zo.offload(build(lambda: TinyLM(WIDE, 4)), config)
        optimizer = zo.AdamW(param_groups(model), lr=1e-2)
        for step in range(2):
            before = device.downloads.nbytes
            run(model, batches_of(count, 5 * step), third)
            found[run, count] = device.downloads.nbytes - before
            optimizer.step()
            optimizer.zero_grad()
        zo.close(model)
    once = found[zo.accumulate, 1]
    numel = sum(param.numel() for param in TinyLM(WIDE, 4).parameters())
    assert 4 * numel <= once < 4 * numel * 1.01
    assert found[zo.accumulate, 2] == found[zo.accumulate, 5] == once
    assert 8 * numel <= found[loop, 2] < 8 * numel * 1.01


def test_a_round_that_breaks_off_leaves_no_sums_behind(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    monkeypatch.setattr(offload_module, "compute_device", lambda: device)
    results = []
    for breaks in (True, False):
        model = zo.offload(build(lambda: TinyLM(WIDE, 3)), zo.OffloadConfig(precision="bf16", device_memory="14MiB"))
        optimizer = zo.AdamW(param_groups(model), lr=1e-2)
        if breaks:
            hook = model.blocks[0].up.register_full_backward_hook(fail_at_the_second(backwards := []))
            with pytest.raises(ZeroDivisionError):
                zo.accumulate(model, batches_of(3), third)
            hook.remove()
            assert len(backwards) == 2
        zo.accumulate(model, batches_of(2, 7), third)
        results.append(zo.clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        zo.accumulate(model, batches_of(2, 9), third)
        results.append(zo.clip_grad_norm_(model, 0.5).item())
        zo.close(model)
    assert results[:2] == results[2:]


def fail_at_the_second(calls: list[int]) -> Any:
    def hook(*arguments: Any) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise ZeroDivisionError

    return hook
