"""Training steps of `gpu.py`: ours, plain torch's, FSDP2's and DeepSpeed's, timed the same way.

A `Trainer` is built, stepped and closed; `measure` times it at several numbers of tokens. `profile` gives the share of
one step that the device computes, and the operations around the largest gaps.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness.gpu.machine import Machine
from harness.gpu.model import Batch, Shape, batch_of
from harness.gpu.record import Figures, Record, Skip
from harness.step.builders import Case, deepspeed_config, join_alone
from torch import Tensor, nn

import zero_offload as zo
from zero_offload.base.types import GIB, Tier
from zero_offload.hardware.accelerators import ACCELERATORS
from zero_offload.hardware.device import collectives_of
from zero_offload.hardware.probe import peak_resident_bytes

LEARNING_RATE, CLIP = 1e-5, 1.0
TIMED_STEPS, SLOW_STEP_S = 3, 12.0
PROCESS_BYTES = 8 * GIB
"""Of host memory beside what is planned: the driver, torch, and what is on its way while the model is built."""
GAPS = 8
"""How many of the largest gaps are kept."""

Forward = Callable[[Batch], Tensor]
Build = Callable[[], nn.Module]


class Bench(NamedTuple):
    """Arguments of a section."""

    machine: Machine
    record: Record
    directory: Path
    """Empty, on the disk to use; it is deleted with the section."""


@dataclass(frozen=True)
class Trainer:
    step: Callable[[Batch], Tensor]
    """Forward, backward and update; returns the loss, without waiting for the device."""
    tell: Callable[[], Figures] = dict
    """Figures of the last step beside its time."""
    close: Callable[[], None] = lambda: None
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    """Of an offloaded model."""
    return zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=LEARNING_RATE)


def muon_of(model: nn.Module) -> torch.optim.Optimizer:
    """Of an offloaded model: torch's Muon for matrices of blocks, AdamW for the rest."""
    return zo.Muon(model.named_parameters(), LEARNING_RATE, use_muon=_is_muons, adamw={"lr": LEARNING_RATE})


def _is_muons(name: str, param: Tensor) -> bool:
    return name.startswith("blocks.") and param.dim() == 2


def ours(
    bench: Bench,
    build: Build,
    config: zo.OffloadConfig,
    *,
    clips: bool = True,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = adamw_of,
) -> Trainer:
    """Raises Skip where the host has too little memory for the plan."""
    started = time.perf_counter()
    with zo.deferred_init():
        model: Any = build()
    zo.checkpoint(model.blocks)
    plan = zo.plan(model, config)
    needed = plan.used_bytes(Tier.CPU) + bench.machine.size(PROCESS_BYTES, 0)
    free = bench.machine.free_host_bytes()
    if not plan.fits or needed > free:
        room = f"{needed / GIB:.1f} GiB of host memory are needed, {free / GIB:.1f} GiB are free"
        raise Skip("; ".join([*plan.reasons, room]))
    zo.offload(model, config)
    optimizer = optimizer_of(model)
    ready_s = time.perf_counter() - started

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        if clips:
            zo.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def tell() -> Figures:
        stats = zo.stats(model)
        told = {name: getattr(stats, name) for name in ("update_s", "exposed_s", "read_bytes", "written_bytes")}
        told |= {"activation_bytes": stats.activation_bytes, "registrations": stats.num_registrations}
        return told | {"planned_host_gib": plan.used_bytes(Tier.CPU) / GIB, "ready_s": ready_s}

    return Trainer(step, tell, partial(zo.close, model), model, optimizer)


def plain(bench: Bench, build: Build, *, has_masters: bool, has_muon: bool = False) -> Trainer:
    """Everything in the device's memory: bf16 weights, and fp32 masters and moments, or all of it in bf16.

    `has_muon`: torch's Muon steps the matrices of blocks, and AdamW the rest.
    """
    model = build().to(bench.machine.device)
    weights = list(model.parameters())
    masters = [weight.detach().float().requires_grad_() for weight in weights] if has_masters else weights
    is_muons = [has_muon and _is_muons(name, param) for name, param in model.named_parameters()]
    matrices, rest = list(itertools.compress(masters, is_muons)), masters
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        rest = [master for master, each in zip(masters, is_muons, strict=True) if not each]
        optimizers.append(torch.optim.Muon(matrices, lr=LEARNING_RATE))
    optimizers.append(torch.optim.AdamW(rest, lr=LEARNING_RATE, fused=True))

    @torch.no_grad()
    def update() -> None:
        if has_masters:
            for master, weight in zip(masters, weights, strict=True):
                if weight.grad is not None:
                    master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if has_masters:
            torch._foreach_copy_(weights, masters)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        update()
        return loss.detach()

    return Trainer(step)


def fsdp2(bench: Bench, build: Build) -> Trainer:
    """One rank, exact states in CPU memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    # In a rehearsal on the CPU: torch lets no parameter move to a device type that it does not bring.
    device = torch.device("cpu") if bench.machine.rehearses else bench.machine.device
    backends = "gloo" if bench.machine.rehearses else collectives_of(device)
    dist.init_process_group(backends, init_method=f"file://{bench.directory}/store", rank=0, world_size=1)
    model: Any = build().float()
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    model.rotation = model.rotation.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(*(part.to(device) for part in batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(step, close=dist.destroy_process_group)


def deepspeed(bench: Bench, build: Build, seq: int) -> Trainer:
    """ZeRO-3, one rank, exact states in CPU memory. Raises Skip where it is not installed, and in a rehearsal."""
    if bench.machine.rehearses:
        raise Skip("DeepSpeed does not know the GPU of a rehearsal")
    os.environ["DS_ACCELERATOR"] = bench.machine.device.type
    join_alone()
    try:
        import deepspeed
    except ImportError as error:
        raise Skip(f"no DeepSpeed here ({error}); gpu.py --help says how to carry its wheel") from None
    deepspeed.init_distributed(dist_backend=ACCELERATORS[bench.machine.device.type].collectives)
    config = deepspeed_config(Case("2b", seq, "bf16", bench.directory, 0), "cpu")
    stage3 = config["zero_optimization"] | {"overlap_comm": True}
    model = build()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config | {"zero_optimization": stage3}
    )
    engine.train()

    def step(batch: Batch) -> Tensor:
        loss: Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainer(step)


def measure(
    bench: Bench,
    trainer: Trainer,
    shape: Shape,
    tokens: Iterable[int],
    seq: int,
    *,
    prefix: str = "",
    is_frozen: bool = False,
) -> None:
    """Time `trainer` at each number of tokens; a figure each, named by `prefix` and the tokens.

    The first step records the trace and the second one fills pools: neither counts.
    """
    machine, record = bench.machine, bench.record
    last_s = 0.0

    def at(num_tokens: int) -> Figures:
        machine.reset_peak()
        timed = time_steps(trainer.step, machine, batch_of(shape, num_tokens, seq, machine.device))
        flops = shape.flops(num_tokens, seq, is_frozen=is_frozen)
        rates = {"tokens_per_s": num_tokens / timed["step_s"], "flops_per_s": flops / timed["step_s"], "flops": flops}
        peaks = {"device_peak_gib": machine.peak_bytes() / GIB, "host_peak_gib": peak_resident_bytes() / GIB}
        return {"tokens": num_tokens, "numel": shape.numel} | timed | rates | peaks | trainer.tell()

    def warm_up() -> Figures:
        batch = batch_of(shape, seq, seq, machine.device)
        return {"step_s": [_seconds(trainer.step, machine, batch) for _ in range(2)]}

    warm = record.attempt(f"{prefix}warm-up", warm_up)
    if warm is None:
        return
    last_s = warm["step_s"][-1]
    for num_tokens in tokens:
        found = record.attempt(f"{prefix}{num_tokens} tokens", partial(at, num_tokens), 2 * last_s)
        last_s = found["step_s"] if found else last_s


def _seconds(step: Callable[[Batch], Tensor], machine: Machine, batch: Batch) -> float:
    began = time.perf_counter()
    step(batch)
    torch.accelerator.synchronize()
    return time.perf_counter() - began


def time_steps(step: Callable[[Batch], Tensor], machine: Machine, batch: Batch) -> dict[str, float]:
    """The median of steps behind each other: each pays for the update of the one before.

    One more goes before them, for the allocators; where that one is slow, one step is timed.
    """
    first_s = _seconds(step, machine, batch)
    num_steps = machine.size(TIMED_STEPS, 1) if first_s < SLOW_STEP_S else 1
    ends = [time.perf_counter()]
    for _ in range(num_steps):
        loss = step(batch)
        if len(ends) == num_steps:
            torch.accelerator.synchronize()
        ends.append(time.perf_counter())
    step_s = statistics.median(then - before for before, then in itertools.pairwise(ends))
    return {"step_s": step_s, "steps": num_steps, "loss": loss.item()}


class Interval(NamedTuple):
    """Work of the device at a time; microseconds."""

    begin: float
    end: float
    name: str


def profile(trainer: Trainer, machine: Machine, batch: Batch) -> Figures:
    """Two steps, the second one taken apart: its update runs beside the next forward, so one step has both."""
    activities, marks = torch.profiler.supported_activities(), ("before", "profiled")
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for name in marks:
            with torch.profiler.record_function(name):
                trainer.step(batch)
                torch.accelerator.synchronize()
    events = profiler.events() or []
    (whole,) = (each.time_range for each in events if each.name == "profiled" and _is_on_host(each))
    computes, copies = [], []
    for each in events:
        # Ranges that programs mark are not kernels. The GPU of a rehearsal tells a profiler nothing: operators of the
        # host stand in.
        is_asked = _is_on_host(each) == machine.rehearses and not each.is_user_annotation
        if not is_asked or each.time_range.start < whole.start:
            continue
        interval = Interval(each.time_range.start, each.time_range.end, each.name)
        (copies if each.name.startswith(("Memcpy", "Memset")) else computes).append(interval)
    step_us = whole.end - whole.start
    return {
        "step_s": step_us / 1e6,
        "kernels": len(computes),
        "busy": busy_us(computes) / step_us,
        "copying": busy_us(copies) / step_us,
        "gaps": gaps(computes, whole.start, whole.end)[:GAPS],
    }


def _is_on_host(event: Any) -> bool:
    return bool(event.device_type == torch.autograd.DeviceType.CPU)


def busy_us(intervals: Sequence[Interval]) -> float:
    """Of their union."""
    busy, reached = 0.0, float("-inf")
    for each in sorted(intervals):
        busy += max(each.end - max(each.begin, reached), 0.0)
        reached = max(reached, each.end)
    return busy


def gaps(intervals: Sequence[Interval], begin: float, end: float) -> list[dict[str, Any]]:
    """Times between `begin` and `end` in which none of them runs, the largest first, and the kernels around each."""
    found = []
    reached, after = begin, "the step's begin"
    for each in [*sorted(intervals), Interval(end, end, "the step's end")]:
        if each.begin > reached:
            gap = {"ms": (each.begin - reached) / 1e3, "at_ms": (reached - begin) / 1e3}
            found.append(gap | {"after": after[:80], "before": each.name[:80]})
        if each.end > reached:
            reached, after = each.end, each.name
    return sorted(found, key=lambda gap: -gap["ms"])


def in_turn(
    bench: Bench, name: str, make: Callable[[], Trainer], then: Callable[[Trainer], None], least_s: float = 0.0
) -> None:
    """Build a trainer, do `then` with it, and release its memory; a failure is a figure, and the next one can run."""

    def whole() -> Figures:
        started = time.perf_counter()
        trainer = make()
        ready_s = time.perf_counter() - started
        try:
            then(trainer)
        finally:
            trainer.close()
        return {"ready_s": ready_s}

    bench.record.attempt(name, whole, least_s)
    bench.machine.reset_peak()
