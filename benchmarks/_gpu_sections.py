"""The sections of `gpu.py` that train nothing large: what is right, what links carry, and a peer."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _gpu_machine import (
    Machine,
    device_bytes_per_s,
    link_rates,
    matrix_flops_per_s,
    rates_of_disk,
    update_s_per_parameter,
)
from _gpu_model import SHAPES, Llama, batch_of
from _gpu_training import SEQ, SMALL_SEQ, SMALL_TOKENS, Report, speed, stepper, time_steps
from _rows import Row, missing, row
from _train_systems import Case, deepspeed_config, join_alone

import zero_offload as zo
from zero_offload.probe import count_cores

TESTS = Path(__file__).parent.parent / "tests" / "gpu"
TESTS_SHARE, TEST_WORKERS = 0.6, 8
"""Of the section's time; some hundred kernels are compiled, several minutes one after the other."""
END_S = 20
"""Of the tests' time, for pytest to say what has failed."""
OUTPUT_MAX = 1_000_000
"""Letters of what it says that are kept, the last ones."""
NUM_STEPS = 6
PLACEMENTS: dict[str, dict[str, Any]] = {
    "in CPU memory": {},
    "parameters on the device": {"params": "device"},
    "all on the device": {"params": "device", "grads": "device", "optimizer": "device"},
    "all on disk": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
    "fractions": {"params": {"device": 0.5, "cpu": 0.5}, "optimizer": {"device": 0.3, "cpu": 0.3, "nvme": 0.4}},
}
PEER_TOKENS = (4096, 16384)
REACH_DEEPSPEED = 1 / 2


def correctness(machine: Machine, directory: Path, limit_s: float, report: Report) -> Iterator[Row]:
    """`tests/gpu`, then losses of a small model with every placement `==` those of a plain one."""
    yield _tests(TESTS_SHARE * limit_s, report)
    # Some backwards on a GPU add in any order unless they are asked not to.
    torch.use_deterministic_algorithms(True, warn_only=True)
    for precision in ("fp32", "bf16"):
        expected = _plain_losses(machine, precision)
        again = _plain_losses(machine, precision)
        yield _differing(f"{precision}, plain, a second time", again, expected)
        clipped: list[float] = []
        for name, placement in PLACEMENTS.items():
            nvme = directory / f"{precision} {name}"
            found = _offloaded_losses(machine, precision, {"nvme": nvme, **placement}, clip=None)
            report(f"{precision}, {name}", {"losses": found, "plain": expected})
            yield _differing(f"{precision}, {name}", found, expected)
            found = _offloaded_losses(machine, precision, {"nvme": nvme, **placement}, clip=0.1)
            clipped = clipped or found
            yield _differing(f"{precision}, {name}, clipped", found, clipped)


def _tests(seconds: float, report: Report) -> Row:
    """Failures and errors of `tests/gpu`; 1 where pytest itself failed."""
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "-p", "no:cacheprovider", str(TESTS)]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(TEST_WORKERS, count_cores()))]
    if importlib.util.find_spec("pytest_timeout") is not None:
        # Killed at the end of its time, pytest would not say why tests fail.
        command.append(f"--session-timeout={seconds - END_S:.0f}")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds, cwd=TESTS.parent.parent
        )
        output, status = done.stderr + done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        told = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        output, status = f"{told}\nended after its {seconds:.0f} s", -1
    summary = output.strip().splitlines()[-1:]
    report("tests/gpu", {"exit code": status, "summary": summary, "output": output[-OUTPUT_MAX:]})
    print(*summary, flush=True)
    counted = sum(int(count) for count in re.findall(r"(\d+) (?:failed|error)", " ".join(summary)))
    return row("tests/gpu that fail", max(counted, int(status != 0)), "", "one; none is wanted", 1, 0.0)


def _differing(name: str, found: list[float], expected: list[float]) -> Row:
    count = sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))
    return row(f"losses that differ: {name}", count, "", "one; none is wanted", 1, 0.0)


def _small(machine: Machine) -> Llama:
    """With values that both precisions can hold, so that all masters begin alike."""
    return Llama(SHAPES["tiny" if machine.rehearses else "small"], SMALL_SEQ).float()


def _batches(machine: Machine, model: Llama) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(NUM_STEPS):
        yield batch_of(model.shape, SMALL_TOKENS[-1], SMALL_SEQ, machine.device, seed=step)


def _plain_losses(machine: Machine, precision: str) -> list[float]:
    model = _small(machine).to(machine.device)
    if precision == "bf16":
        model.to(torch.bfloat16)
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in _batches(machine, model):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _offloaded_losses(machine: Machine, precision: str, settings: dict[str, Any], clip: float | None) -> list[float]:
    model = _small(machine)
    zo.offload(model, zo.OffloadConfig(precision=precision, durability="scratch", **settings))
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in _batches(machine, model):
        loss = model(*batch)
        loss.backward()
        if clip is not None:
            zo.clip_grad_norm_(model, clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zo.close(model)
    return losses


def bandwidth(machine: Machine, directory: Path, limit_s: float, report: Report) -> Iterator[Row]:
    """What the machine can do; figures, no bars."""
    report("PCIe, bytes/s", asdict(link_rates(machine)))
    for states in ("fp32", "compact"):
        report(f"update on the host, {states}", {"ns_per_parameter": update_s_per_parameter(machine, states) * 1e9})
    report("disk, bytes/s", rates_of_disk(machine, directory)._asdict())
    report("GPU", {"flops_per_s": matrix_flops_per_s(machine), "memory_bytes_per_s": device_bytes_per_s(machine)})
    yield from ()


def deepspeed(machine: Machine, directory: Path, limit_s: float, report: Report) -> Iterator[Row]:
    """2B, exact, all states in CPU memory: DeepSpeed ZeRO-3 beside ours. Its row is empty where it is not installed."""
    shape = SHAPES["tiny" if machine.rehearses else "2b"]
    tokens, seq = (SMALL_TOKENS, SMALL_SEQ) if machine.rehearses else (PEER_TOKENS, SEQ)
    batches = {number: batch_of(shape, number, seq, machine.device) for number in tokens}
    ours: dict[int, float] = {}
    model = Llama(shape, seq)
    zo.checkpoint(model.blocks)
    zo.offload(model, zo.OffloadConfig())
    step = stepper(model, zo.AdamW(model.parameters(), lr=1e-5))
    for number, batch in batches.items():
        ours[number] = time_steps(step, machine, batch)["step_s"]
        report(f"ours, {number} tokens", speed(shape, seq, number, ours[number]))
    zo.close(model)
    del model, step
    machine.forget()
    try:
        engine = _deepspeed_engine(machine, Llama(shape, seq), Case("2b", seq, "bf16", directory, 0))
    except ImportError as error:
        report("deepspeed", {"missing": str(error)})
        for number, step_s in ours.items():
            yield missing(f"{number} tokens, 2B in CPU memory", step_s, "s", "DeepSpeed ZeRO-3, CPU", REACH_DEEPSPEED)
        return
    for number, batch in batches.items():
        theirs = time_steps(_engine_step(engine), machine, batch)["step_s"]
        report(f"DeepSpeed, {number} tokens", speed(shape, seq, number, theirs))
        name = f"{number} tokens, 2B in CPU memory"
        yield row(name, ours[number], "s", "DeepSpeed ZeRO-3, CPU", theirs, REACH_DEEPSPEED)


def _deepspeed_engine(machine: Machine, model: Llama, case: Case) -> Any:
    model.torch_checkpoint = True
    join_alone()
    os.environ["DS_ACCELERATOR"] = machine.device
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo" if machine.rehearses else "nccl")
    config = deepspeed_config(case, "cpu")
    stage3 = config["zero_optimization"] | {"overlap_comm": True}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config | {"zero_optimization": stage3}
    )
    engine.train()
    return engine


def _engine_step(engine: Any) -> Callable[[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
