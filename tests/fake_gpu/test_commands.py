"""Commands on a machine with a GPU: it is measured, and plans and the doctor know it; torch.profiler shows its work."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import zero_offload as zo
from tests.fake_gpu import device
from tests.helpers.models import NARROW, TinyLM, build, tokens_of
from zero_offload.cli.main import main
from zero_offload.finetune.fit import measure
from zero_offload.hardware import rates

NAME = "fake GPU"
BENCH = ["bench", "--device", "--size", "16MiB"]


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's is touched, and sizes are small."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"ROUNDS": 1, "CALL_S": 0.0, "PRODUCT_MAX": 512, "WIDTH_MAX": 256}.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(measure, "_UPDATE_NUMEL", 1 << 20)


def said(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_a_gpu_is_measured_and_plans_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "tiny"]
    before = said(capsys, plan)
    assert re.search(rf"on this machine's {NAME}, (4|3\.\d+) GiB free\n", before), "less what earlier tests left"
    assert f"rates: {NAME} is not known here, so as if rtx4090 computes at 0.891 of its 165 TFLOPS" in before
    assert "fix: zero-offload bench --device\n" in said(capsys, ["doctor"])

    table = said(capsys, BENCH)
    assert table.startswith(f"{NAME}, measured 20") and "GB/s from registered host memory\n" in table
    for words in ("bfloat16  products of matrices ", "; a block trains at ", "memory ", "download ", "both "):
        assert words in table, words
    known = rates.load().device(NAME)
    assert all(rate > 0 for name in ("matmul_flops", "training_flops") for rate in known[name].values())
    assert set(known["training_flops"]) == {"bfloat16", "float16", "float32"}
    assert rates.load().host["bytes_per_s"] > 0

    after = said(capsys, plan)
    assert f"rates: {NAME}, measured {known['taken']}: trains at " in after and "data sheets" not in after
    assert f"device rates: measured {known['taken']}: trains at " in said(capsys, ["doctor"])


def test_zo_plan_takes_its_seconds_from_what_was_measured() -> None:
    model, config = build(partial(TinyLM, NARROW)), zo.OffloadConfig(params="cpu", optimizer="cpu")
    before = zo.plan(model, config)
    assert before.rates.startswith(f"{NAME} is not known here")
    assert main(["bench", "--device", "--json", "--size", "16MiB"]) == 0
    after = zo.plan(model, config)
    assert after.rates.startswith(f"{NAME}, measured 20") and after.table().endswith(f"\nrates: {after.rates}")
    assert after.predicted_step_s > before.predicted_step_s  # the fake is slow


def test_plan_measures_the_gpu_that_is_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_COPY_BYTES", 16 << 20)
    text = said(capsys, ["plan", "--model", "tiny", "--device-memory", "1GiB", "--measure"])
    assert f"rates: {NAME}, measured 20" in text
    assert rates.load().flops == {}  # not of the CPU


def test_copies_that_are_not_registered_are_said_to_be_so(capsys: pytest.CaptureFixture[str]) -> None:
    with device.refuse_pinning():
        assert "GB/s from pageable host memory\n" in said(capsys, BENCH)
    text = said(capsys, ["doctor"])
    assert "[WARNING] device rates: measured 20" in text and "; then zero-offload bench --device\n" in text


def test_a_gpu_without_room_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    module = torch.get_device_module(device.TYPE)
    module.empty_cache()
    with device.memory_limit(module.memory_reserved() + (8 << 20)):
        assert main(BENCH) == 3
    assert f"measuring {NAME} with copies of 16 MiB takes more than its free memory" in capsys.readouterr().err
    assert rates.load().devices == {}


def test_a_profile_has_the_ranges_of_backwards_thread(tmp_path: Path) -> None:
    model = zo.offload(build(partial(TinyLM, NARROW)), zo.OffloadConfig(params="cpu", optimizer="cpu"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        model(tokens_of(0)).backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
    zo.close(model)
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ours = {(event["tid"], event["name"]) for event in events if event["name"].startswith("zo ")}
    program = threading.get_native_id()
    assert {(program, f"zo {name}") for name in ("forward: blocks.0", "clip: norm", "step()")} <= ours
    gradients = {thread for thread, name in ours if name == "zo gradients: blocks.0"}
    assert len(gradients) == 1 and program not in gradients
