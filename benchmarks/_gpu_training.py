"""Training steps on a GPU: with states offloaded, and the same step with no offload at all.

Owns what a training section measures and how it is judged. The calls: `train(job, machine, report)`, which measures
rates, the step without offload, then ours at each number of tokens; `report` is told after each figure, so that a
section that is ended keeps what it had.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from _disk_rates import Rates
from _gpu_machine import Machine, link_rates, rates_of_disk, update_s_per_parameter
from _gpu_model import SHAPES, Llama, Shape, batch_of
from _rows import Row, row
from _turns import peak_rss_bytes

import zero_offload as zo
from zero_offload.types import GIB, Tier

TOKENS, SEQ = (4096, 8192, 16384, 32768), 4096
SMALL_TOKENS, SMALL_SEQ = (32, 64), 32
RESIDENT_SHARE, RESIDENT_BYTES = 0.35, 8
"""Of the GPU's memory for layers without offload; per parameter: weight, gradient and two moments, 16 bits each."""
WARM_UP_STEPS, TIMED_STEPS, SLOW_STEP_S = 2, 3, 12.0
STATE_BYTES = {"fp32": 12.0, "compact": 5.03}
"""Per parameter, its value included."""
DISK_SHARE = 0.9
"""Of what is free; the rest is for rates."""
STEPS_AT_LEAST, STEPS_SHARE = 8, 0.5
"""Warm-up and two sizes, in so much of a section's time as their bytes take of the disk's."""
CONTEXT_BYTES = GIB
"""What a driver takes of a card, at most."""
PROCESS_BYTES = 8 * GIB
"""Of host memory beside what is planned: CUDA, torch, and what is on its way while the model is built."""
WEIGHTS_SHARE = 1 / 3
"""Of a device limit, for weights; activations, gradients and what is computed have the rest."""
MARGIN_S = 40.0
"""A section stops to measure so long before it is ended: 100 GiB that are pinned take a while to go."""
REACH, REACH_MEETS = 1.05, 1.05

Report = Callable[[str, Any], None]


@dataclass(frozen=True)
class Job:
    """One model, where its states rest, and within what."""

    shape: str
    states: str = "fp32"
    params: str = "cpu"
    optimizer: str = "cpu"
    durability: str = "scratch"
    device_limit: int | None = None
    host_limit: int | None = None

    @property
    def on_disk(self) -> bool:
        return "nvme" in (self.params, self.optimizer)

    def ordered(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The fewest and the most first: they tell the most if time runs out. What may not fit comes last."""
        return tokens if self.device_limit is not None else (tokens[0], *reversed(tokens[1:]))


JOBS = {
    "8b-cpu": Job("8b"),
    "8b-disk": Job("8b", "compact", "nvme", "nvme"),
    "2b-disk": Job("2b", "fp32", "nvme", "nvme", "process"),
    "13b-24g": Job("13b", "compact", device_limit=24 * GIB, host_limit=100 * GIB),
}


@dataclass
class Clock:
    """How long a section may still measure."""

    ends: float

    @property
    def left_s(self) -> float:
        return self.ends - MARGIN_S - time.perf_counter()

    def allows(self, seconds: float) -> bool:
        return seconds < self.left_s


@dataclass
class Limits:
    """What a step cannot be faster than, in seconds by what it is."""

    up_s: float
    down_s: float
    update_s: float
    disk_s: float = 0.0
    step_s: dict[int, float] = field(default_factory=dict)
    """Without offload, by tokens."""

    @property
    def fixed_s(self) -> float:
        """That do not depend on tokens."""
        return max(self.up_s, self.down_s, self.update_s, self.disk_s)

    def bound(self, num_tokens: int) -> tuple[float, str]:
        """The largest, and its name."""
        all_of_them = {
            "no offload": self.step_s[num_tokens],
            "PCIe up": self.up_s,
            "PCIe down": self.down_s,
            "DRAM update": self.update_s,
            "disk": self.disk_s,
        }
        name = max(all_of_them, key=all_of_them.__getitem__)
        return all_of_them[name], name


def train(job: Job, machine: Machine, directory: Path, clock: Clock, report: Report) -> Iterator[Row]:
    disk = rates_of_disk(machine, directory) if job.on_disk else None
    whole = SHAPES["tiny" if machine.rehearses else job.shape]
    shape = whole if disk is None else _that_fits(job, whole, directory, disk, clock.left_s)
    tokens, seq = (SMALL_TOKENS, SMALL_SEQ) if machine.rehearses else (TOKENS, SEQ)
    config = _config(job, machine, shape, seq, directory, report)
    if config is None:
        return
    if job.device_limit is not None:
        machine.cap(job.device_limit - CONTEXT_BYTES)
    limits = _limits(job, machine, shape, disk)
    report("rates", {"disk": disk and disk._asdict(), **asdict(limits)})
    limits.step_s = without_offload(job, machine, shape, tokens, seq, report)
    machine.forget()
    model, optimizer = _offload(config, shape, seq, report)
    measured: list[dict[str, Any]] = []
    step = stepper(model, optimizer)
    guess_s = warm_up(step, machine, batch_of(shape, seq, seq, machine.device))
    report("warm-up", {"step_s": guess_s})
    for num_tokens in job.ordered(tokens):
        if num_tokens not in limits.step_s:
            report(f"{num_tokens} tokens", {"skipped": "the step without offload is not known"})
            continue
        num_steps = TIMED_STEPS if guess_s < SLOW_STEP_S else 1
        if not clock.allows((num_steps + 1) * max(guess_s, limits.step_s[num_tokens])):
            report(f"{num_tokens} tokens", {"skipped": "no time is left"})
            continue
        try:
            timed = time_steps(step, machine, batch_of(shape, num_tokens, seq, machine.device), num_steps)
        except torch.OutOfMemoryError as error:
            report(f"{num_tokens} tokens", {"error": f"out of memory: {str(error)[:200]}"})
            continue  # the next forward drops the broken step's gradients
        found = timed | _tell(model, machine)
        measured.append(_judge(found, shape, seq, num_tokens, limits, disk))
        guess_s = found["step_s"]
        report(f"{num_tokens} tokens", measured[-1])
        name = f"{_name(job, shape)}, {num_tokens} tokens"
        yield row(name, guess_s, "s", measured[-1]["bound"], measured[-1]["bound_s"], REACH)
    report("meets the step without offload", _meets(measured, limits))
    yield from _memory(job, machine, shape, measured)
    zo.close(model)


def _that_fits(job: Job, shape: Shape, directory: Path, disk: Rates, left_s: float) -> Shape:
    """With fewer layers, where the disk has too little room for all, or is too slow for `STEPS_AT_LEAST`."""
    slots = 1 if job.durability == "scratch" else 2
    room = DISK_SHARE * shutil.disk_usage(directory).free / (slots * STATE_BYTES[job.states])
    in_time = STEPS_SHARE * left_s / STEPS_AT_LEAST / _disk_s(job, 1, disk)
    ends = shape.numel - shape.num_layers * shape.layer_numel
    num_layers = int((min(room, in_time) - ends) / shape.layer_numel)
    return replace(shape, num_layers=max(1, min(shape.num_layers, num_layers)))


def _disk_s(job: Job, numel: int, disk: Rates) -> float:
    """Seconds of a step's bytes; an estimate, until they are counted."""
    state_bytes = STATE_BYTES[job.states] * numel
    return disk.seconds(state_bytes + 2 * 2 * numel, state_bytes)


def _limits(job: Job, machine: Machine, shape: Shape, disk: Rates | None) -> Limits:
    """Parameters come up for forward and for backward, gradients go down; 2 bytes each."""
    links, update_s = link_rates(machine), update_s_per_parameter(machine, job.states)
    limits = Limits(2 * 2 * shape.numel / links.up, 2 * shape.numel / links.down, update_s * shape.numel)
    if disk is not None:
        limits.disk_s = _disk_s(job, shape.numel, disk)
    return limits


def without_offload(
    job: Job, machine: Machine, shape: Shape, tokens: tuple[int, ...], seq: int, report: Report
) -> dict[int, float]:
    """Seconds of a step whose layers are all in the GPU's memory, or as many as fit, passed through repeatedly."""
    room = RESIDENT_SHARE * min(job.device_limit or machine.device_bytes, machine.device_bytes)
    ends_bytes = RESIDENT_BYTES * (shape.numel - shape.num_layers * shape.layer_numel)
    resident = int((room - ends_bytes) / (RESIDENT_BYTES * shape.layer_numel))
    resident = max(1, min(resident, shape.num_layers))
    model = Llama(shape, seq, device=machine.device, resident=resident)
    zo.checkpoint(model.blocks)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-5, fused=True)

    def compute(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        model.zero_grad()
        model(*batch).backward()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    found: dict[int, float] = {}
    compute(batch_of(shape, seq, seq, machine.device))
    # The update of all layers takes so many times that of those that are there.
    update_s = machine.seconds(update, rounds=3) * shape.numel / sum(param.numel() for param in params)
    for num_tokens in tokens:
        batch = batch_of(shape, num_tokens, seq, machine.device)
        try:
            compute_s = machine.seconds(lambda batch=batch: compute(batch), rounds=2)
        except torch.OutOfMemoryError:
            report(f"no offload, {num_tokens} tokens", {"error": "out of memory"})
            break
        found[num_tokens] = compute_s + update_s
        report(f"no offload, {num_tokens} tokens", speed(shape, seq, num_tokens, found[num_tokens]))
    report("no offload", {"resident_layers": resident, "layers": shape.num_layers, "update_s": update_s})
    return found


def _config(
    job: Job, machine: Machine, shape: Shape, seq: int, directory: Path, report: Report
) -> zo.OffloadConfig | None:
    """What fits this machine now; None, with the reasons told, where nothing does."""
    settings: dict[str, Any] = {
        "params": job.params,
        "optimizer": job.optimizer,
        "nvme": directory / "states" if job.on_disk else None,
        "durability": job.durability,
        "cpu_memory": job.host_limit,
        # As weights they would fill whatever they are allowed.
        "device_memory": None if job.device_limit is None else int(WEIGHTS_SHARE * job.device_limit),
        "precision": zo.Precision(compute="bf16", states=job.states),
    }
    model, free_bytes = Llama(shape, seq, device="meta"), machine.free_host_bytes()
    beside = machine.size(PROCESS_BYTES, 0)
    # Where the host has no room for gradients as well, they stay on the GPU until their update.
    for grads in ("cpu", "device"):
        config = zo.OffloadConfig(grads=grads, **settings)
        plan = zo.plan(model, config)
        planned = {tier.value: plan.used_bytes(tier) for tier in Tier}
        needed = plan.used_bytes(Tier.CPU) + beside
        what = {name: getattr(job, name) for name in ("params", "optimizer", "states", "durability")}
        what |= {"grads": grads, "parameters": shape.numel, "planned_bytes": planned, "host_free_bytes": free_bytes}
        report("placement", what)
        if plan.fits and needed <= free_bytes:
            return config
    reason = f"{needed / GIB:.1f} GiB of host memory are needed, {free_bytes / GIB:.1f} GiB are free"
    report("skipped", "; ".join([*plan.reasons, reason]))
    return None


def _offload(config: zo.OffloadConfig, shape: Shape, seq: int, report: Report) -> tuple[Llama, zo.AdamW]:
    start = time.perf_counter()
    with zo.deferred_init():
        model = Llama(shape, seq)
    zo.checkpoint(model.blocks)
    built = time.perf_counter()
    zo.offload(model, config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-5)
    report("offload", {"build_s": built - start, "offload_s": time.perf_counter() - built})
    return model, optimizer


Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]


def stepper(model: Llama, optimizer: zo.AdamW) -> Step:
    """One step of ours; returns the loss."""

    def step(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(*batch)
        loss.backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def warm_up(step: Step, machine: Machine, batch: Batch) -> float:
    """The first step records the trace, the next ones fill pools; returns the seconds of the last."""
    for _ in range(WARM_UP_STEPS):
        began = time.perf_counter()
        step(batch)
        machine.wait()
        step_s = time.perf_counter() - began
        if step_s > SLOW_STEP_S:
            break
    return step_s


def time_steps(step: Step, machine: Machine, batch: Batch, num_steps: int = TIMED_STEPS) -> dict[str, float]:
    """The median of steps behind each other: each pays for the update of the one before, and some of the first ones
    look for changes of parameters.

    One more than is timed goes before them, for the allocators; not where only one is, since it is slow.
    """
    machine.forget()
    if num_steps > 1:
        step(batch)
        machine.wait()
    ends = [time.perf_counter()]
    for _ in range(num_steps):
        loss = step(batch)
        if len(ends) == num_steps:
            machine.wait()
        ends.append(time.perf_counter())
    step_s = statistics.median(then - before for before, then in itertools.pairwise(ends))
    return {"step_s": step_s, "steps": num_steps, "loss": loss.item()}


def _tell(model: Llama, machine: Machine) -> dict[str, Any]:
    """Of the last step, and the peaks so far."""
    stats = zo.stats(model)
    told = {name: getattr(stats, name) for name in ("exposed_s", "update_s", "read_bytes", "written_bytes")}
    peaks = {"device_peak_bytes": machine.peak_bytes(), "host_peak_bytes": peak_rss_bytes()}
    return told | peaks | {"registrations": stats.num_registrations}


def speed(shape: Shape, seq: int, num_tokens: int, step_s: float) -> dict[str, float]:
    return {
        "step_s": step_s,
        "tokens_per_s": num_tokens / step_s,
        "tflops": shape.flops(num_tokens, seq) / step_s / 1e12,
    }


def _judge(
    found: dict[str, Any], shape: Shape, seq: int, num_tokens: int, limits: Limits, disk: Rates | None
) -> dict[str, Any]:
    if disk is not None:
        limits.disk_s = disk.seconds(found["read_bytes"]["nvme"], found["written_bytes"]["nvme"])
    bound_s, bound = limits.bound(num_tokens)
    judged = {"tokens": num_tokens, "bound_s": bound_s, "bound": bound, "no_offload_s": limits.step_s[num_tokens]}
    return found | judged | speed(shape, seq, num_tokens, found["step_s"])


def _meets(measured: list[dict[str, Any]], limits: Limits) -> dict[str, Any]:
    """The fewest tokens measured at which a step takes no longer than without offload; and where rates say."""
    met = [each["tokens"] for each in measured if each["step_s"] <= REACH_MEETS * each["no_offload_s"]]
    per_token_s = min((step_s / num_tokens for num_tokens, step_s in limits.step_s.items()), default=None)
    return {
        "tokens_measured": min(met, default=None),
        "tokens_by_rates": None if per_token_s is None else round(limits.fixed_s / per_token_s),
    }


def _name(job: Job, shape: Shape) -> str:
    return f"{shape.numel / 1e9:.1f}B, {job.states}, optimizer on {job.optimizer}"


def _memory(job: Job, machine: Machine, shape: Shape, measured: list[dict[str, Any]]) -> Iterator[Row]:
    if not measured:
        return
    if job.device_limit is not None and not machine.rehearses:
        peak = max(each["device_peak_bytes"] for each in measured)
        limit = job.device_limit - CONTEXT_BYTES
        yield row(f"{_name(job, shape)}: GPU memory", peak / GIB, "GiB", "limit less 1 GiB", limit / GIB, 1.0)
    if job.host_limit is not None:
        peak = max(each["host_peak_bytes"] for each in measured)
        yield row(f"{_name(job, shape)}: host memory", peak / GIB, "GiB", "limit", job.host_limit / GIB, 1.0)
