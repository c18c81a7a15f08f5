"""The benchmarks: what they do where a GPU, a peer or a cgroup is missing, or time runs out. No timings."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_offload import native
from zero_offload.abi import Isa
from zero_offload.recipes.gpt import num_parameters
from zero_offload.types import Tier

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def told() -> tuple[dict[str, Any], Any]:
    """What a section reports, and the function that it reports with."""
    found: dict[str, Any] = {}
    return found, found.__setitem__


# gpu.py


def test_a_rehearsal_writes_machine_figures_and_rows(tmp_path: Path) -> None:
    result = tmp_path / "gpu.json"
    done = run("gpu.py", "--rehearse", "--only", "bandwidth", "--nvme", tmp_path, "--json", result)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(result.read_text())
    assert {"torch", "date", "commit", "kernels", "update_threads"} <= set(written["machine"])
    assert written["machine"]["torch_threads"] == written["machine"]["cores"]
    section = written["sections"]["bandwidth"]
    assert section["status"] == 0 and section["found"]["PCIe, bytes/s"]["up"] > 0
    assert written["rows"] == []
    assert list(tmp_path.iterdir()) == [result], "what was written to the disk is gone"


@pytest.mark.full
def test_a_whole_rehearsal(tmp_path: Path) -> None:
    done = run("gpu.py", "--rehearse", "--nvme", tmp_path, "--json", tmp_path / "gpu.json")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [section["status"] for section in written["sections"].values()] == [0] * 8, done.stdout
    different = [row for row in written["rows"] if "losses that differ" in row["name"]]
    assert len(different) == 22 and all(row["ok"] for row in different)


@pytest.mark.parametrize("name", ["13b-24g", "2b-disk"])
def test_training_sections_measure_every_number_of_tokens(name: str, benchmark: Any, tmp_path: Path) -> None:
    training, machines = benchmark("_gpu_training"), benchmark("_gpu_machine")
    found, report = told()
    clock = training.Clock(time.perf_counter() + 600)
    rows = list(training.train(training.JOBS[name], machines.Machine(True), tmp_path, clock, report))
    steps = [row for row in rows if "tokens" in row["name"]]
    assert len(steps) == len(training.SMALL_TOKENS)
    for num_tokens in training.SMALL_TOKENS:
        figures = found[f"{num_tokens} tokens"]
        assert figures["bound_s"] >= figures["no_offload_s"] > 0 and figures["tflops"] > 0
        assert (figures["written_bytes"]["nvme"] > 0) == (name == "2b-disk")
    assert found["no offload"]["resident_layers"] < found["no offload"]["layers"], "passed through more than once"
    assert ("host memory" in rows[-1]["name"]) == (name == "13b-24g")
    json.dumps([found, rows])


def test_a_section_without_time_says_what_it_left_out(benchmark: Any, tmp_path: Path) -> None:
    training, machines = benchmark("_gpu_training"), benchmark("_gpu_machine")
    found, report = told()
    clock = training.Clock(time.perf_counter() + training.MARGIN_S)
    assert list(training.train(training.JOBS["8b-cpu"], machines.Machine(True), tmp_path, clock, report)) == []
    assert all(found[f"{num} tokens"] == {"skipped": "no time is left"} for num in training.SMALL_TOKENS)


class FullAt:
    """Memory runs out in the backward of so many tokens, when half of the layers are through."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def __call__(self, block: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        if out.requires_grad and out[..., 0].numel() == self._num_tokens:
            out.register_hook(self._raise)

    def _raise(self, grad: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("nothing left")


@pytest.mark.filterwarnings("ignore:the last backward was left by an exception")
def test_memory_that_runs_out_costs_one_figure(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, machines = benchmark("_gpu_training"), benchmark("_gpu_machine")
    found, report = told()
    fewest, most = training.SMALL_TOKENS
    offload = training._offload

    def too_large(config: Any, *others: Any) -> Any:
        model, optimizer = offload(config, *others)
        model.blocks[2].register_forward_hook(FullAt(fewest))
        return model, optimizer

    monkeypatch.setattr(training, "_offload", too_large)
    monkeypatch.setattr(training, "warm_up", lambda step, machine, batch: 0.1)
    clock = training.Clock(time.perf_counter() + 600)
    rows = list(training.train(training.JOBS["8b-cpu"], machines.Machine(True), tmp_path, clock, report))
    assert "out of memory" in found[f"{fewest} tokens"]["error"]
    assert [f"{most} tokens" in row["name"] for row in rows] == [True] and rows[0]["ours"] > 0


def test_what_may_not_fit_is_tried_last(benchmark: Any) -> None:
    training = benchmark("_gpu_training")
    assert training.JOBS["13b-24g"].ordered(training.TOKENS) == (4096, 8192, 16384, 32768)
    assert training.JOBS["8b-cpu"].ordered(training.TOKENS) == (4096, 32768, 16384, 8192)


def test_a_device_limit_is_the_plans_too(benchmark: Any, tmp_path: Path) -> None:
    training, machines, gib = benchmark("_gpu_training"), benchmark("_gpu_machine"), 1 << 30
    _, report = told()
    job, tiny = training.JOBS["13b-24g"], training.SHAPES["tiny"]
    config = training._config(job, machines.Machine(True), tiny, 32, tmp_path, report)
    assert config.device_memory == 8 * gib and config.cpu_memory == 100 * gib
    assert training._config(training.JOBS["8b-cpu"], machines.Machine(True), tiny, 32, tmp_path, report).grads == "cpu"


@pytest.mark.parametrize(("free_gib", "grads"), [(115, "cpu"), (105, "device"), (95, None)])
def test_a_section_without_memory_is_left_out(
    free_gib: int, grads: str | None, benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8B of 14 bytes, or of 12 with gradients on the GPU, and the process."""
    training, machines = benchmark("_gpu_training"), benchmark("_gpu_machine")
    found, report = told()
    plan = argparse.Namespace(fits=True, reasons=())
    held = {"cpu": 14, "device": 12}

    def planned(model: Any, config: Any) -> Any:
        nbytes = held[config.grads] * training.SHAPES["8b"].numel
        return argparse.Namespace(**vars(plan), used_bytes=lambda tier: nbytes if tier is Tier.CPU else 0)

    monkeypatch.setattr(training.zo, "plan", planned)
    monkeypatch.setattr(machines.Machine, "free_host_bytes", lambda machine: free_gib << 30)
    monkeypatch.setattr(machines.Machine, "size", lambda machine, real, small: real)
    shape = training.SHAPES["tiny"]
    config = training._config(training.JOBS["8b-cpu"], machines.Machine(True), shape, 32, tmp_path, report)
    assert found["placement"]["grads"] == (grads or "device")
    if grads is None:
        assert config is None
        assert found["skipped"] == "97.7 GiB of host memory are needed, 95.0 GiB are free"
        clock = training.Clock(time.perf_counter() + 600)
        assert list(training.train(training.JOBS["8b-cpu"], machines.Machine(True), tmp_path, clock, report)) == []
    else:
        assert config.grads == grads and "skipped" not in found


def test_activations_are_compared(benchmark: Any, tmp_path: Path) -> None:
    section, machines = benchmark("_gpu_activations"), benchmark("_gpu_machine")
    found, report = told()
    rows = list(section.activations(machines.Machine(True), tmp_path, 600, report))
    assert len(rows) == 1 and rows[0]["against"] == "on the GPU" and rows[0]["theirs"] > 0
    assert found["activations: device"]["loss"] == found["activations: cpu"]["loss"]
    links = benchmark("_gpu_machine").LinkRates(up=10.0, down=5.0, both=1.0, pin=1.0)
    kept, away = section.Found(2.0, 0, 0), section.Found(9.0, 0, 10)
    assert section._bound(kept, away, links) == (3.0, "PCIe down, then up")


@pytest.mark.parametrize("has_xdist", [True, False])
def test_tests_of_the_gpu_share_its_kernels_among_workers(
    has_xdist: bool, benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections, (found, report) = benchmark("_gpu_sections"), told()
    commands = []

    def ran(command: list[str], **settings: Any) -> Any:
        commands.append(command)
        return argparse.Namespace(stdout="1 failed, 2 passed, 3 errors in 4s", stderr="", returncode=1)

    monkeypatch.setattr(sections.subprocess, "run", ran)
    monkeypatch.setattr(sections.importlib.util, "find_spec", lambda name: has_xdist or None)
    assert sections._tests(100, report)["ours"] == 4 and found["tests/gpu"]["exit code"] == 1
    assert ("-n" in commands[0]) == has_xdist


def test_fewer_layers_where_the_disk_is_small_or_slow(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, model = benchmark("_gpu_training"), benchmark("_gpu_model")
    shape, job = model.SHAPES["2b"], training.JOBS["2b-disk"]
    free = int(24 * shape.numel * 0.7)
    monkeypatch.setattr(training.shutil, "disk_usage", lambda path: argparse.Namespace(free=free))
    fast, slow = (training.Rates(rate, rate) for rate in (100e9, 1e9))
    fitting = training._that_fits(job, shape, tmp_path, fast, 150.0)
    assert 0 < fitting.num_layers < shape.num_layers and 24 * fitting.numel <= 0.9 * free
    in_time = training._that_fits(job, shape, tmp_path, slow, 150.0)
    # Of 12 and 4 bytes per parameter read, and 12 written, eight times in half of that.
    assert 0 < in_time.num_layers < fitting.num_layers and 8 * 28 * in_time.numel / 1e9 <= 75
    whole = training._that_fits(job, replace(shape, num_layers=2), tmp_path, fast, 150.0)
    assert whole.num_layers == 2


def test_a_section_whose_time_is_up_is_ended_and_leaves_a_row(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = benchmark("gpu")
    monkeypatch.setattr(gpu, "limit_of", lambda name, machine: 0.01)
    section = gpu.run_apart("bandwidth", gpu.parse(["--rehearse"]), tmp_path)
    assert "ended after" in section["status"]
    assert [row["ok"] for row in gpu.rows_of("bandwidth", section)] == [False]


def test_without_a_gpu_it_says_so(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, result = benchmark("gpu"), tmp_path / "gpu.json"
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--group", "3", "--json", str(result)])
    assert gpu.main() == 3
    rows = json.loads(result.read_text())["rows"]
    assert [row["name"] for row in rows] == ["2b-disk", "8b-disk"]
    assert all(row["ok"] is None and row["theirs"] is None for row in rows)


def test_without_the_native_library_it_says_how_to_build_it(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = benchmark("gpu")
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "find", lambda: argparse.Namespace(name="numba"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--group", "2", "--json", str(tmp_path / "gpu.json")])
    assert gpu.main() == 3
    assert "no native library here; python setup.py -q build_ext --inplace builds it" in capsys.readouterr().out


def test_groups_fit_a_machine_that_is_lent_for_ten_minutes(benchmark: Any) -> None:
    gpu = benchmark("gpu")
    for group in gpu.GROUPS:
        names = gpu.parse(["--group", str(group)]).sections
        assert names and sum(gpu.SECTIONS[name].limit_s for name in names) <= 8 * 60
    assert set(gpu.parse([]).sections) == set(gpu.SECTIONS)


# train_step.py


def answers(benchmark: Any, *, disk_bytes: int, peers: bool) -> Any:
    """As workers give them; a step of plain torch takes 1 s, the disk moves 1 GB/s."""
    systems, script = benchmark("_train_systems"), benchmark("train_step")
    names = ["plain", *systems.OURS, *(systems.PEERS if peers else ["fsdp2_cpu"])]
    step = {"step_s": 1.0, "forward_s": 0.3, "backward_s": 0.5, "loss": 2.0, "exposed_s": 0.01}
    step |= {"read_bytes": 0, "written_bytes": 0, "cores_s": 1.5}

    def answer(name: str) -> dict[str, Any]:
        moved = {"read_bytes": disk_bytes} if "disk" in name else {}
        slow = {"step_s": 3.0} if name in systems.PEERS else {}
        return {"steps": [step | moved | slow], "peak_rss_bytes": 10**9, "arena_growth": 0, "mappings_growth": 0}

    case = systems.Case("tiny", 64, "bf16", Path("nowhere"), 1)
    rates = benchmark("_disk_rates").Rates(1e9, 1e9)
    beside = [({"steps": [step | {"step_s": 1.25}]}, rates)]
    return script.Found(case, {name: [answer(name)] for name in names}, rates, 1e10, 10**9, beside)


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("disk_bytes", [10**8, 2 * 10**9])
def test_bars_of_a_training_step(disk_bytes: int, peers: bool, benchmark: Any) -> None:
    found = answers(benchmark, disk_bytes=disk_bytes, peers=peers)
    rows = {(row["name"].partition(": ")[2], row["against"]): row for row in benchmark("train_step").compare(found)}
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
    benchmark("train_step").show_systems(found)
    benchmark("_rows").show(list(rows.values()))


def test_what_is_held_is_the_byte_table(benchmark: Any) -> None:
    ours = benchmark("_train_systems").OURS
    assert ours["cpu"].held_bytes("bf16") == 14 and ours["cpu"].held_bytes("fp32") == 16
    assert ours["disk_grads"].held_bytes("bf16") == 0
    assert ours["disk"].held_bytes("bf16") == 2 and ours["optimizer_on_disk"].held_bytes("bf16") == 4
    assert ours["cpu_compact"].held_bytes("bf16") == pytest.approx(5.03 + 2, abs=0.01)


# small_memory.py


@pytest.fixture
def version2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What looks like the root of version 2, where a new group has its files."""
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
    cgroup = benchmark("_cgroup")
    directory = cgroup._make(1 << 30, version2)
    assert (version2 / "cgroup.subtree_control").read_text() == "+memory"
    assert (directory / "memory.max").read_text() == str(1 << 30)
    assert (directory / "memory.swap.max").read_text() == "0"
    (directory / "memory.peak").write_text("123\n")
    (directory / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    group = cgroup.MemoryGroup(directory)
    assert (group.peak_bytes, group.num_killed) == (123, 1)
    done = subprocess.run(group.command(["echo", "inside"]), capture_output=True, text=True, check=True)
    assert done.stdout == "inside\n" and int((directory / "cgroup.procs").read_text()) > 1


def test_where_no_group_can_be_made_rows_are_empty(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, cgroup = benchmark("small_memory"), benchmark("_cgroup")
    monkeypatch.setattr(script, "memory_group", lambda nbytes: cgroup.memory_group(nbytes, tmp_path / "none"))
    monkeypatch.setattr(script, "disk_rates", lambda directory: benchmark("_disk_rates").Rates(1.0, 1.0))
    result = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["small_memory.py", "--quick", "--nvme", str(tmp_path), "--json", str(result)])
    assert script.main() == 3
    assert "no memory cgroup can be made" in capsys.readouterr().out
    rows = json.loads(result.read_text())
    assert len(rows) == 2 and all(row["ok"] is None and row["theirs"] is None for row in rows)


# adam.py


@pytest.mark.parametrize("isa", native.supported_isas(), ids=str)
def test_the_loops_beside_the_kernels_still_compile(isa: Isa, benchmark: Any) -> None:
    """They include the kernels' own files."""
    native.set_isa(isa)
    checked = [*benchmark("_adam_loops").compiler_call(), "-fsyntax-only", "-Werror"]
    done = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
