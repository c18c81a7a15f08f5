"""What autograd saves in CPU memory beside a GPU, against the same step that keeps it on the GPU.

2B parameters, exact, in CPU memory; blocks are not marked, so all that they save leaves. One number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _gpu_machine import LinkRates, Machine, link_rates
from _gpu_model import SHAPES, Llama, Shape, batch_of
from _gpu_training import REACH, SEQ, SMALL_SEQ, Report, speed, stepper, time_steps, warm_up
from _rows import Row, row

import zero_offload as zo
from zero_offload.types import GIB

REACH_MEMORY = 1 / 2


@dataclass(frozen=True)
class Found:
    step_s: float
    peak_bytes: int
    moved_bytes: int
    """To the host in forward, and back in backward."""


def activations(machine: Machine, directory: Path, limit_s: float, report: Report) -> Iterator[Row]:
    shape, seq = (SHAPES["tiny"], SMALL_SEQ) if machine.rehearses else (SHAPES["2b"], SEQ)
    links = link_rates(machine)
    kept, away = (_measure(tier, machine, shape, seq, report) for tier in ("device", "cpu"))
    what = f"{shape.numel / 1e9:.1f}B, {seq} tokens, activations in CPU memory"
    bound_s, bound = _bound(kept, away, links)
    yield row(what, away.step_s, "s", bound, bound_s, REACH)
    if not machine.rehearses:
        peaks = away.peak_bytes / GIB, kept.peak_bytes / GIB
        yield row(f"{what}: GPU memory", peaks[0], "GiB", "on the GPU", peaks[1], REACH_MEMORY)


def _bound(kept: Found, away: Found, links: LinkRates) -> tuple[float, str]:
    """They leave in forward and come back in backward, one way after the other."""
    moving_s = away.moved_bytes / links.down + away.moved_bytes / links.up
    return (moving_s, "PCIe down, then up") if moving_s > kept.step_s else (kept.step_s, "on the GPU")


def _measure(tier: str, machine: Machine, shape: Shape, seq: int, report: Report) -> Found:
    with zo.deferred_init():
        model = Llama(shape, seq)
    zo.offload(model, zo.OffloadConfig(activations=tier))
    step = stepper(model, zo.AdamW(model.parameters(), lr=1e-5))
    batch = batch_of(shape, seq, seq, machine.device)
    warm_up(step, machine, batch)
    timed = time_steps(step, machine, batch)
    found = Found(timed["step_s"], machine.peak_bytes(), zo.stats(model).activation_bytes["cpu"])
    told: dict[str, Any] = timed | speed(shape, seq, seq, found.step_s)
    report(f"activations: {tier}", told | {"device_peak_bytes": found.peak_bytes, "moved_bytes": found.moved_bytes})
    zo.close(model)
    del model, step
    machine.forget()
    return found
