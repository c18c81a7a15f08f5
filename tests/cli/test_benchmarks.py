"""The benchmarks: what they do where a GPU, a peer or a cgroup is missing, or time runs out. No timings."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_offload.base.types import Tier
from zero_offload.finetune.gpt_config import num_parameters
from zero_offload.hardware import native
from zero_offload.hardware.abi import Isa

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def run(benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a script in this process: exit code, and what it has written."""

    def run_script(script: str, *arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run_script


def test_the_page_has_every_comparison_and_every_section_of_a_gpu(benchmark: Any) -> None:
    page = (BENCHMARKS.parent / "docs" / "BENCHMARKS.md").read_text()
    scripts, _, half_an_hour = page.partition("## Half an hour")
    comparisons = [
        f"{path.name} {name}".strip()
        for path in sorted(BENCHMARKS.glob("*.py"))
        for name in getattr(benchmark(path.stem), "COMPARISONS", [""])
    ]
    assert sorted(re.findall(r"^\| `(\w+\.py.*?)`", scripts, re.M)) == sorted(comparisons)
    named = re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\| (`.*?) \|", half_an_hour, re.M)))
    sections = benchmark("harness.gpu.sections").SECTIONS
    assert sorted(named) == sorted(sections)
    commands = [
        line.partition("# ")[2]
        for line in half_an_hour.splitlines()
        if line.startswith("python3 benchmarks/gpu.py --until")
    ]
    in_turn = re.findall(r"[\w-]+", " ".join(commands).replace("then", ""))
    assert in_turn == [*sections]
    for command in commands[:-1]:
        assert sum(sections[name].limit_s for name in re.findall(r"[\w-]+", command)) <= 9 * 60


def test_every_module_finds_what_it_imports(benchmark: Any) -> None:
    for path in sorted((BENCHMARKS / "harness").rglob("*.py")):
        benchmark(".".join(path.relative_to(BENCHMARKS).with_suffix("").parts))


@pytest.mark.parametrize("script", ["train_step.py", "memory.py", "limits.py"])
def test_a_script_lists_its_comparisons_and_knows_no_other(script: str, benchmark: Any, run: Any) -> None:
    code, listed, _ = run(script, "--help")
    comparisons = benchmark(Path(script).stem).COMPARISONS
    assert code == 0 and re.findall(r"^  (\w+)  ", listed, re.M) == [*comparisons]
    code, _, error = run(script, "speed")
    assert code == 2 and f"Unknown comparison 'speed'; choose one of {', '.join(comparisons)}" in error
    code, _, error = run(script, "--quick", "--no-such-flag")
    assert code == 2 and "usage:" in error, "flags without a comparison are those of the first"


# gpu.py


class Bare:
    """In the place of a GPU's machine, where a section measures nothing."""

    rehearses = True

    def use_all_cores(self) -> None: ...

    def hardware(self, directory: Path) -> dict[str, Any]:
        return {"disk": directory.is_dir()}

    def versions(self) -> dict[str, Any]:
        return {"python": "any"}


def hang(bench: Any) -> None:
    started = subprocess.Popen(["sleep", "600"])
    bench.record.put("before", {"seconds": 1.5, "started": started.pid})
    time.sleep(600)


def fail(bench: Any) -> None:
    bench.record.put("before", {"seconds": 2.5})
    raise RuntimeError("this section is broken")


def work(bench: Any) -> None:
    bench.record.attempt("broken", lambda: {"never": 1 / 0})
    bench.record.put("whole", {"seconds": 3.5})


@pytest.fixture
def gpu(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script with three sections of ours, and `gpu.command(...)`: exit code and JSON of a rehearsal."""
    script, sections = benchmark("gpu"), benchmark("harness.gpu.sections")
    monkeypatch.setattr(script, "this_machine", lambda rehearses: Bare())
    monkeypatch.setattr(script, "races", lambda machine: [])
    monkeypatch.setattr(script, "REHEARSAL_LIMIT_S", 2)
    runs = {"hangs": (hang, 300), "fails": (fail, 30), "works": (work, 20)}
    monkeypatch.setattr(
        script, "SECTIONS", {name: sections.Section(limit_s, name, run) for name, (run, limit_s) in runs.items()}
    )

    def command(*arguments: object) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "gpu.json"
        options = ["gpu.py", "--rehearse", "--nvme", tmp_path, "--json", file, *arguments]
        monkeypatch.setattr(sys, "argv", list(map(str, options)))
        code = script.main()
        return code, json.loads(file.read_text())

    script.command = command
    return script


def test_what_hangs_or_fails_keeps_its_figures_and_the_rest_runs(gpu: Any, tmp_path: Path) -> None:
    code, written = gpu.command()
    sections = written["sections"]
    assert {name: each["status"] for name, each in sections.items()} == {
        "hangs": "killed",
        "fails": "failed",
        "works": "ok",
    }
    assert sections["hangs"]["figures"]["before"]["seconds"] == 1.5
    started = Path(f"/proc/{sections['hangs']['figures']['before']['started']}/stat")
    assert not started.exists() or ") Z " in started.read_text(), "all that it started was killed"
    assert "this section is broken" in sections["fails"]["figures"]["all"]["error"]
    assert "ZeroDivisionError" in sections["works"]["figures"]["broken"]["error"]
    assert sections["works"]["figures"]["whole"] == {"seconds": 3.5}
    rows = {row["name"]: row for row in written["rows"]}
    assert set(rows) == {f"rehearsal, {name}: parts that failed" for name in sections}
    assert not any(row["ok"] for row in rows.values()) and code == 0
    assert written["rehearsal"] and written["hardware"] == {"disk": True} and written["versions"] == {"python": "any"}
    assert list(tmp_path.iterdir()) == [tmp_path / "gpu.json"], "what was written to the disk is gone"


def test_a_second_command_goes_on(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, first = gpu.command("--sections", "works")
    _, second = gpu.command("--sections", "works,fails")
    assert second["sections"]["works"] == first["sections"]["works"], "not measured again"
    assert list(second["sections"]) == ["works", "fails"] and "works: in " in capsys.readouterr().out
    _, third = gpu.command("--sections", "works", "--again")
    assert third["sections"]["works"]["seconds"] != first["sections"]["works"]["seconds"]


def test_no_section_starts_that_might_not_end(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, written = gpu.command("--until", "0.6")
    assert list(written["sections"]) == ["fails", "works"], "the first may take 300 s"
    assert "left for a later loan, 300 s: hangs" in capsys.readouterr().out


def test_a_section_is_expected_to_take_what_it_took(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the newest record; it ends by `--until` all the same."""
    results = tmp_path / "results"
    results.mkdir()
    for date, seconds in (("01", 250.0), ("02", 1.5)):
        sections = {"hangs": {"status": "ok", "seconds": seconds}, "works": {"status": "killed", "seconds": 0.1}}
        (results / f"2026-01-{date}-gpu-h100.json").write_text(json.dumps({"sections": sections}))
    monkeypatch.setattr(gpu, "RESULTS", results)
    monkeypatch.setattr(gpu, "REHEARSAL_LIMIT_S", 60)
    began = time.perf_counter()
    _, written = gpu.command("--until", "0.1", "--sections", "hangs,works")
    assert written["sections"]["hangs"]["status"] == "killed" and time.perf_counter() - began < 30
    assert list(written["sections"]) == ["hangs"]
    assert "left for a later loan, 22 s: hangs, works" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "REHEARSAL_LIMIT_S", 2)
    gpu.command("--sections", "hangs")
    assert "hangs: in " not in capsys.readouterr().out, "it was cut, and runs again"
    gpu.command("--sections", "hangs")
    assert "hangs: in " in capsys.readouterr().out, "its own time was up"
    gpu.show_list(["hangs", "works"])
    out = capsys.readouterr().out
    assert re.search(r"hangs +took +2 s, +300 s at most", out) and re.search(r"works +not recorded, +20 s at most", out)
    assert "in all        22 s expected, 320 s at most" in out


def test_the_file_of_another_machine_or_of_a_rehearsal_is_refused(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.command("--sections", "works")
    file = tmp_path / "gpu.json"
    with pytest.raises(SystemExit, match="rehearsal=True, and this run False; name another"):
        gpu.open_document(gpu.parse(["--json", str(file)]))
    file.write_text(json.dumps({"rehearsal": False, "gpu": "NVIDIA H100"}))
    monkeypatch.setattr(gpu, "gpu_name", lambda: "NVIDIA H200")
    with pytest.raises(SystemExit, match="gpu=NVIDIA H100, and this run NVIDIA H200"):
        gpu.open_document(gpu.parse(["--json", str(file)]))


def test_a_rehearsal_is_not_written_among_results(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--rehearse", "--json", str(BENCHMARKS / "results" / "gpu.json")])
    assert "a rehearsal has none" in capsys.readouterr().err


def test_without_a_gpu_or_the_native_library_it_says_what_to_do(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(gpu.torch.accelerator, "is_available", lambda: False)
    assert gpu.main() == 3 and "no GPU here; --rehearse runs" in capsys.readouterr().out
    monkeypatch.setattr(gpu.torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(native, "available", lambda: False)
    assert gpu.main() == 3 and "setup.py -q build_ext --inplace builds it" in capsys.readouterr().out


def test_the_list_has_every_section_and_its_seconds(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gpu, sections = benchmark("gpu"), benchmark("harness.gpu.sections")
    gpu.show_list([*sections.SECTIONS])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [*sections.SECTIONS]
    assert str(sum(each.limit_s for each in sections.SECTIONS.values())) in lines[-1]
    assert max(each.limit_s for each in sections.SECTIONS.values()) <= 300, "two fit a command of ten minutes"
    assert (BENCHMARKS.parent / sections.TESTS / sections.KERNEL_TESTS).is_file()


def section_of(status: str = "ok", **figures: dict[str, Any]) -> dict[str, Any]:
    return {"status": status, "figures": {name.replace("_", " "): each for name, each in figures.items()}}


def step_of(tokens: int, step_s: float, numel: float = 8e9, **more: Any) -> dict[str, Any]:
    flops = 6.0 * numel * tokens
    peaks = {"device_peak_gib": 20.0, "host_peak_gib": 90.0}
    return {"tokens": tokens, "step_s": step_s, "numel": numel, "flops": flops, "flops_per_s": flops / step_s} | (
        peaks | more
    )


RATES = section_of(
    device={
        "upload_bytes_per_s": 50e9,
        "download_bytes_per_s": 40e9,
        "matmul_flops": {"bfloat16": 800e12},
    }
) | {"status": "ok"}


def rows_by_name(benchmark: Any, sections: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["name"], row["against"]): row for row in benchmark("harness.gpu.rows").rows_of(sections)}


def test_a_step_is_judged_by_the_largest_of_what_bounds_it(benchmark: Any) -> None:
    rates = json.loads(json.dumps(RATES))
    rates["figures"]["update on the host, fp32"] = {"s_per_parameter": 2.5e-10}
    ours = {"4096 tokens": step_of(4096, 2.1), "16384 tokens": step_of(16384, 3.0), "32768 tokens": step_of(32768, 6.0)}
    plain = {"8b: 4096 tokens": step_of(4096, 1.0), "8b: 16384 tokens": step_of(16384, 2.9)}
    profile = {"profile, 8192 tokens": {"step_s": 2.0, "busy": 0.98}}
    taken = {"loop, 4 x 4096 tokens": {"step_s": 5.0}, "accumulate, 4 x 4096 tokens": {"step_s": 4.0}}
    sections = {
        "rates": rates,
        "8b": {"status": "ok", "figures": ours | profile | taken},
        "plain": {"status": "ok", "figures": plain},
    }
    rows = rows_by_name(benchmark, sections)
    least = rows["8b: 8.0B, 4096 tokens", "update on the host"]
    assert least["theirs"] == 2.0 and least["ratio"] == pytest.approx(1.05) and least["ok"]
    assert rows["8b: 8.0B, 4096 tokens", "no offload"]["ok"] is None, "not what it is judged by"
    assert rows["8b: 8.0B, 16384 tokens", "no offload"]["ok"]
    # Not measured without offload: its arithmetic, as fast as the largest step that was.
    beyond = rows["8b: 8.0B, 32768 tokens", "arithmetic, as without offload"]
    assert beyond["theirs"] == pytest.approx(5.8) and beyond["ok"]
    mfu = rows["8b: 32768 tokens, 1 / MFU", "its FLOPs as one product"]
    assert mfu["theirs"] == pytest.approx(6 * 8e9 * 32768 / 800e12) and not mfu["ok"]
    assert rows["8b: profile, 8192 tokens, idle", "the step"]["ok"]
    assert rows["8b: zo.accumulate, 4 micro-batches", "a loop over them"]["ratio"] == 0.8
    free = rows["8b: tokens a step, the fewest measured at which offloading is free", "by rates"]
    assert free["ours"] == 16384 and free["theirs"] == pytest.approx(2.0 * 16384 / 2.9)


def test_bounds_of_disks_and_of_frozen_weights(benchmark: Any) -> None:
    moved = {"read_bytes": {"nvme": 60e9}, "written_bytes": {"nvme": 40e9}}
    on_disk = section_of(disk__bytes={}) | {
        "figures": {
            "4096 tokens": step_of(4096, 60.0, **moved),
            "disk, bytes/s": {"read_bytes_per_s": 2e9, "write_bytes_per_s": 1e9},
        }
    }
    lora = {"status": "ok", "figures": {"4096 tokens": step_of(4096, 3.0, 32e9)}}
    rows = rows_by_name(benchmark, {"rates": RATES, "8b-nvme": on_disk, "32b-lora": lora})
    assert rows["8b-nvme: 8.0B, 4096 tokens", "disk"]["theirs"] == 70.0
    assert rows["32b-lora: 32.0B, 4096 tokens", "link up"]["theirs"] == pytest.approx(2 * (64e9 - 8 * 2**30) / 50e9)
    assert rows["32b-lora: device memory", "24 less 1 GiB"]["ok"]


def test_pairs_and_peers_that_are_missing(benchmark: Any) -> None:
    ours = {"cpu: 4096 tokens": step_of(4096, 1.0, 2e9), "overlap backward: 4096 tokens": step_of(4096, 0.9, 2e9)}
    sections = {"2b": {"status": "ok", "figures": ours}, "deepspeed": {"status": "skipped", "figures": {}}}
    rows = rows_by_name(benchmark, sections)
    assert rows["2b: overlap backward, 4096 tokens", "overlap forward"]["ratio"] == 0.9
    assert rows["2b: in CPU memory, 4096 tokens", "DeepSpeed ZeRO-3, CPU"]["theirs"] is None
    assert len(rows) == 2, "FSDP2 was not asked for"
    sections["fsdp2"] = {"status": "ok", "figures": {"4096 tokens": step_of(4096, 2.0, 2e9)}}
    assert rows_by_name(benchmark, sections)["2b: in CPU memory, 4096 tokens", "FSDP2, CPU offload"]["ok"]


def test_mistakes_are_counted(benchmark: Any) -> None:
    losses = {f"bf16, {name}": {"losses": [1.0]} for name in ("plain", "cpu", "cpu, clipped", "all on nvme, clipped")}
    losses["bf16, cpu"] = {"losses": [1.5]}
    tests = {"tests": {"failed": 2, "summary": "2 failed"}}
    ranks = {"stage 1, cpu": {"losses": [1]}, "stage 1, device": {"losses": [1]}, "stage 2, cpu": {"losses": [2]}}
    sections = {"placements": losses, "tests": tests, "two-ranks": ranks}
    rows = rows_by_name(benchmark, {name: {"status": "ok", "figures": each} for name, each in sections.items()})
    counts = {name: (row["ours"], row["ok"]) for (name, _), row in rows.items()}
    assert counts == {
        "tests: tests that fail": (2, False),
        "placements: of 2 runs that differ, bf16": (1, False),
        "placements: of 2 runs that differ, bf16, clipped": (0, True),
        "two-ranks: tiers that differ, stage 1": (0, True),
        "two-ranks: tiers that differ, stage 2": (1, False),
    }


def test_what_the_device_did_in_a_step(benchmark: Any) -> None:
    training = benchmark("harness.gpu.training")
    kernels = [training.Interval(*each) for each in [(30.0, 60.0, "b"), (10.0, 40.0, "a"), (90.0, 100.0, "c")]]
    assert training.busy_us(kernels) == 60.0
    found = training.gaps(kernels, 0.0, 100.0)
    assert [(gap["ms"], gap["after"], gap["before"]) for gap in found] == [
        (0.03, "b", "c"),
        (0.01, "the step's begin", "a"),
    ]


def test_a_part_without_memory_or_time_says_so(benchmark: Any, tmp_path: Path) -> None:
    recording = benchmark("harness.gpu.record")
    record = recording.Record(tmp_path / "figures.json", time.perf_counter() + 100)

    def too_large() -> dict[str, Any]:
        raise torch.OutOfMemoryError("nothing left")

    assert record.attempt("large", too_large) is None
    assert record.attempt("slow", lambda: {"seconds": 1}, least_s=200) is None
    assert record.attempt("right", lambda: {"seconds": 1}, least_s=50) == {"seconds": 1}
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["large"] == {"out_of_memory": "nothing left"} and written["right"] == {"seconds": 1}
    assert written["slow"]["skipped"].startswith("it takes 200 s or more, and")


@pytest.mark.parametrize(("free_gib", "fits"), [(115, True), (95, False)])
def test_a_model_that_the_host_has_no_room_for_is_skipped(
    free_gib: int, fits: bool, benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 GiB by plan, and the process."""
    training, recording = benchmark("harness.gpu.training"), benchmark("harness.gpu.record")
    plan = argparse.Namespace(fits=True, reasons=(), used_bytes=lambda tier: (100 << 30) * (tier is Tier.CPU))
    monkeypatch.setattr(training.zo, "plan", lambda model, config: plan)
    machine = argparse.Namespace(size=lambda real, toy: real, free_host_bytes=lambda: free_gib << 30)
    record = recording.Record(tmp_path / "figures.json", time.perf_counter() + 100)
    model, bench = benchmark("harness.gpu.model"), training.Bench(machine, record, tmp_path)
    build, config = partial(model.Llama, model.SHAPES["toy"], 32), training.zo.OffloadConfig()
    if fits:
        training.ours(bench, build, config).close()
    else:
        with pytest.raises(recording.Skip, match="108.0 GiB of host memory are needed, 95.0 GiB are free"):
            training.ours(bench, build, config)


def test_tests_of_the_gpu_are_counted_and_share_its_kernels(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections, recording = benchmark("harness.gpu.sections"), benchmark("harness.gpu.record")
    record = recording.Record(tmp_path / "figures.json", time.perf_counter() + 100)
    commands = []

    def ran(command: list[str], **settings: Any) -> Any:
        commands.append(command)
        return argparse.Namespace(stdout="1 failed, 2 passed, 3 errors in 4s", stderr="", returncode=1)

    monkeypatch.setattr(sections.subprocess, "run", ran)
    sections.tests_of_kernels(argparse.Namespace(record=record, machine=argparse.Namespace(rehearses=False)))
    assert record.figures["tests"]["failed"] == 4 and record.figures["tests"]["counts"]["passed"] == 2
    assert "-n" in commands[0] and str(sections.TESTS / sections.KERNEL_TESTS) in commands[0]


def test_fewer_layers_where_the_disk_is_small_or_slow(benchmark: Any) -> None:
    sections, shape = benchmark("harness.gpu.sections"), benchmark("harness.gpu.model").SHAPES["2b"]
    fast, slow = (sections.Rates(rate, rate) for rate in (100e9, 1e9))
    room = int(24 * shape.numel * 0.7)
    fitting = sections.that_fits(shape, 12.0, 2, room, fast, 150.0)
    assert 0 < fitting.num_layers < shape.num_layers and 24 * fitting.numel <= 0.9 * room
    in_time = sections.that_fits(shape, 12.0, 2, room, slow, 150.0)
    # Of 12 and 4 bytes per parameter read, and 12 written, eight times in half of that.
    assert 0 < in_time.num_layers < fitting.num_layers and 8 * 28 * in_time.numel / 1e9 <= 75
    assert sections.that_fits(replace(shape, num_layers=2), 12.0, 2, room, fast, 150.0).num_layers == 2


# train_step.py systems


def answers(benchmark: Any, *, disk_bytes: int, peers: bool) -> Any:
    """As workers give them; a step of plain torch takes 1 s, the disk moves 1 GB/s."""
    systems, script = benchmark("harness.step.builders"), benchmark("harness.step.systems")
    names = ["plain", *systems.OURS, *(systems.PEERS if peers else ["fsdp2_cpu"])]
    step = {"step_s": 1.0, "forward_s": 0.3, "backward_s": 0.5, "loss": 2.0, "exposed_s": 0.01}
    step |= {"read_bytes": 0, "written_bytes": 0, "cores_s": 1.5}

    def answer(name: str) -> dict[str, Any]:
        moved = {"read_bytes": disk_bytes} if "disk" in name else {}
        slow = {"step_s": 3.0} if name in systems.PEERS else {}
        return {"steps": [step | moved | slow], "peak_rss_bytes": 10**9, "arena_growth": 0, "mappings_growth": 0}

    case = systems.Case("tiny", 64, "bf16", Path("nowhere"), 1)
    rates = benchmark("harness.disks").Rates(1e9, 1e9)
    beside = [({"steps": [step | {"step_s": 1.25}]}, rates)]
    return script.Found(case, {name: [answer(name)] for name in names}, rates, 1e10, 10**9, beside)


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("disk_bytes", [10**8, 2 * 10**9])
def test_bars_of_a_training_step(disk_bytes: int, peers: bool, benchmark: Any) -> None:
    found = answers(benchmark, disk_bytes=disk_bytes, peers=peers)
    rows = {
        (row["name"].partition(": ")[2], row["against"]): row
        for row in benchmark("harness.step.systems").compare(found)
    }
    on_disk = rows["on disk", "max(plain torch, bytes / disk rates)"]
    assert on_disk["theirs"] == max(1.0, disk_bytes / 1e9) and on_disk["ok"]
    assert rows["on disk with gradients", "max(plain torch, bytes / disk rates)"]["ok"]
    beside_forward_s = (disk_bytes - 2 * num_parameters(found.case.gpt)) / 1e9  # backward reads the weights
    clipped = rows["on disk", "what clipping allows: backward, then the update"]
    assert clipped["theirs"] == max(1.0, 0.5 + beside_forward_s) and clipped["ok"] is None
    beyond = rows.get(("waits for the update, on disk", "what the update's bytes take beyond a forward"))
    assert beyond["theirs"] == pytest.approx(beside_forward_s - 0.3) if beside_forward_s > 0.3 else beyond is None
    assert rows["peak RSS, on disk with gradients", "3 units and 64 MiB; ours is less plain's own work"]["ours"] == 0
    (beside,) = (row for (name, _), row in rows.items() if name == "plain torch beside the drive")
    assert beside["ratio"] == 1.25 and beside["ok"] is None
    assert rows["in CPU memory", "plain torch"]["ok"] and rows["ours, CPU memory", "FSDP2, CPU offload"]["ok"]
    bound = disk_bytes > 10**9
    waits = next(row for (name, _), row in rows.items() if name == "waits for the update, on disk")
    assert waits["ok"] is (None if bound else True)
    deepspeed = [row for (_, against), row in rows.items() if "DeepSpeed" in against]
    assert len(deepspeed) == 5
    if not peers:
        assert all(row["theirs"] is None and row["ok"] is None for row in deepspeed)
    else:
        exact = next(row for row in deepspeed if row["name"].endswith("ours, optimizer on disk"))
        assert exact["theirs"] == 3.0 and exact["ok"] is (None if bound else True)
    benchmark("harness.step.systems").show_systems(found)
    benchmark("harness.rows").show(list(rows.values()))


def test_what_is_held_is_the_byte_table(benchmark: Any) -> None:
    ours = benchmark("harness.step.builders").OURS
    assert ours["cpu"].held_bytes("bf16") == 14 and ours["cpu"].held_bytes("fp32") == 16
    assert ours["disk_grads"].held_bytes("bf16") == 0
    assert ours["disk"].held_bytes("bf16") == 2 and ours["optimizer_on_disk"].held_bytes("bf16") == 4
    assert ours["cpu_compact"].held_bytes("bf16") == pytest.approx(5.03 + 2, abs=0.01)


# memory.py small_memory


@pytest.fixture
def version2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that looks like the root of version 2, where a new group has its files."""
    (tmp_path / "cgroup.controllers").write_text("memory")
    mkdir = Path.mkdir

    def with_files(path: Path, *arguments: Any, **settings: Any) -> None:
        mkdir(path, *arguments, **settings)
        for name in ("memory.max", "memory.swap.max"):
            (path / name).touch()

    monkeypatch.setattr(Path, "mkdir", with_files)
    yield tmp_path
    monkeypatch.undo()


def test_a_group_of_version_2(benchmark: Any, version2: Path) -> None:
    with benchmark("harness.processes").memory_group(1 << 30, version2) as group:
        directory = group.directory
        assert (version2 / "cgroup.subtree_control").read_text() == "+memory"
        assert (directory / "memory.max").read_text() == str(1 << 30)
        assert (directory / "memory.swap.max").read_text() == "0"
        (directory / "memory.peak").write_text("123\n")
        (directory / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
        assert (group.group_peak_bytes, group.num_killed) == (123, 1)
        done = subprocess.run(group.command(["echo", "inside"]), capture_output=True, text=True, check=True)
        assert done.stdout == "inside\n" and int((directory / "cgroup.procs").read_text()) > 1
        for file in directory.iterdir():  # a real group's files go with it
            file.unlink()
    assert not directory.exists()


def test_where_no_group_can_be_made_rows_are_empty(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, memory_group = benchmark("harness.memory.small_memory"), benchmark("harness.processes").memory_group
    lives = benchmark("harness.memory.lives")
    monkeypatch.setattr(lives, "memory_group", lambda nbytes: memory_group(nbytes, tmp_path / "none"))
    monkeypatch.setattr(script, "disk_rates", lambda directory: benchmark("harness.disks").Rates(1.0, 1.0))
    result = tmp_path / "rows.json"
    assert script.main(["--quick", "--nvme", str(tmp_path), "--json", str(result)]) == 3
    assert "no memory cgroup can be made" in capsys.readouterr().out
    rows = json.loads(result.read_text())
    assert len(rows) == 2 and all(row["ok"] is None and row["theirs"] is None for row in rows)


# limits.py kernels


@pytest.mark.parametrize("isa", native.supported_isas(), ids=str)
def test_the_loops_beside_the_kernels_still_compile(isa: Isa, benchmark: Any) -> None:
    """They include the kernels' own files."""
    native.set_isa(isa)
    checked = [*benchmark("harness.limits.loops").compiler_call(), "-fsyntax-only", "-Werror"]
    done = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
