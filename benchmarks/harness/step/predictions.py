"""Predictions against this machine: predicted over measured step times of a small GPT, under a dozen placements.

Rates are taken beside each placement, before and after it. They are the plain model's forward and backward, unit by
unit, and the drive under the engine that a run would choose. AdamW in memory is measured on all cores, and on those
that it has beside forward. In fp32, since some processors have no instructions for bf16 products. Medians of steps are
compared with predictions.

The bar: predicted / measured between 1 / 1.1 and 1.1, on eight placements or more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import command
from harness.rows import Row, show, write

import zero_offload as zo
from zero_offload.finetune.fit.measure import drive_rates, update_rates
from zero_offload.finetune.gpt import GPT, next_token_loss
from zero_offload.finetune.gpt_config import GPTConfig
from zero_offload.hardware.machines import Machine
from zero_offload.hardware.probe import probe_hardware
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.plan.partition import ONE_RANK
from zero_offload.plan.placement import assign_tiers, tier_budget
from zero_offload.plan.shapes import work_of
from zero_offload.plan.step_time import StepBatch, StepWorkload
from zero_offload.plan.step_time import predict as predict_step

MODEL = GPTConfig(num_layers=8, width=512, num_heads=8, vocab_size=1024, seq_max=128)
TOKENS = 128
REACH = 1.1
WARM_UP_STEPS = 4  # the first records the trace, the next ones fill pools

HALF = {"cpu": 0.5, "nvme": 0.5}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all in memory": {},
    "all in memory, beside forward": {"overlap": "forward"},
    "optimizer on disk": {"optimizer": "nvme"},
    "optimizer on disk, serial": {"optimizer": "nvme", "overlap": "none"},
    "half the optimizer on disk": {"optimizer": HALF},
    "params and optimizer on disk": {"params": "nvme", "optimizer": "nvme"},
    "params and optimizer, serial": {"params": "nvme", "optimizer": "nvme", "overlap": "none"},
    "params on disk": {"params": "nvme"},
    "gradients on disk": {"grads": "nvme"},
    "everything on disk": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
    "half of everything on disk": {"params": HALF, "grads": HALF, "optimizer": HALF},
    "activations on disk": {"activations": "nvme"},
    "a generation every step": {"durability": "process"},
}


class Rates(NamedTuple):
    """Taken at one moment."""

    units_s: dict[str, tuple[float, float]]
    """Forward and backward of each unit's modules, of the plain model."""
    step_s: float
    """Of forward, loss and backward of the plain model."""
    update: dict[str, float]
    drive: dict[str, Any]


class Plain:
    """The model without offload, and a clock in its units."""

    def __init__(self) -> None:
        self.model = GPT(MODEL)
        self._times: dict[str, list[float]] = {}
        for index, block in enumerate(self.model.blocks):
            block.register_forward_pre_hook(self._begin(f"f{index}"))
            block.register_forward_hook(self._end(f"f{index}"))
            block.register_full_backward_pre_hook(self._begin(f"b{index}"))
            block.register_full_backward_hook(self._end(f"b{index}"))

    def _begin(self, name: str) -> Callable[..., None]:
        return lambda *_: self._times.setdefault(name, []).append(-time.perf_counter())

    def _end(self, name: str) -> Callable[..., None]:
        def end(*_: Any) -> None:
            self._times[name][-1] += time.perf_counter()

        return end

    def measure(self, num_steps: int) -> tuple[dict[str, tuple[float, float]], float]:
        """Of each block, and the whole step; medians."""
        self._times.clear()
        steps = []
        for _ in range(num_steps):
            began = time.perf_counter()
            forward_backward(self.model)
            steps.append(time.perf_counter() - began)
            self.model.zero_grad()
        middle = {name: statistics.median(times[1:]) for name, times in self._times.items()}
        blocks = {f"blocks.{i}": (middle[f"f{i}"], middle[f"b{i}"]) for i in range(MODEL.num_layers)}
        return blocks, statistics.median(steps[1:])


def forward_backward(model: GPT) -> None:
    tokens = torch.arange(TOKENS + 1)[None] * 7 % MODEL.vocab_size
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()


def take_rates(plain: Plain, directory: Path, num_steps: int) -> Rates:
    blocks, step_s = plain.measure(num_steps)
    return Rates(blocks, step_s, update_rates("float32"), drive_rates(directory))


def measure_offloaded(settings: dict[str, Any], directory: Path, num_steps: int) -> tuple[float, int]:
    """Seconds of a step, and bytes of activations that leave in one."""
    model = GPT(MODEL)
    zo.offload(model, config_of(settings, directory))
    optimizer = zo.AdamW(model.parameters(), lr=1e-4)
    times = []
    for _ in range(WARM_UP_STEPS + num_steps):
        began = time.perf_counter()
        forward_backward(model)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    away = sum(nbytes for tier, nbytes in zo.stats(model).activation_bytes.items() if tier != "device")
    zo.close(model)
    return statistics.median(times[WARM_UP_STEPS:]), away


def config_of(settings: dict[str, Any], directory: Path) -> zo.OffloadConfig:
    usual = {"precision": "fp32", "nvme": directory, "durability": "scratch", "existing": "discard"}
    return zo.OffloadConfig(**usual | settings)


def predict(settings: dict[str, Any], directory: Path, rates: Sequence[Rates], activation_bytes: int) -> float:
    config, model = config_of(settings, directory), GPT(MODEL)
    spec = ModelSpec.from_module(model)
    work = list(work_of(model, spec))
    blocks_s = [sum(sum(pair) for pair in each.units_s.values()) for each in rates]
    rest_s = statistics.mean(each.step_s - blocks for each, blocks in zip(rates, blocks_s, strict=True))
    others = [unit.numel.name for unit in work if not unit.numel.name.startswith("blocks.")]
    seconds = []
    for unit in work:
        name = unit.numel.name
        if name in others:  # embedding, norm, head and loss: a third of what is left is forward's
            seconds.append((rest_s / 3 / len(others), rest_s * 2 / 3 / len(others)))
        else:
            pairs = [each.units_s[name] for each in rates]
            seconds.append((statistics.mean(p[0] for p in pairs), statistics.mean(p[1] for p in pairs)))
    values = activation_bytes / 4 / TOKENS / len(work)
    work = [replace(unit, inside_values=round(values), boundary_values=0) for unit in work]
    batch = StepBatch(TOKENS, 1, TOKENS, recompute=False)
    job = replace(StepWorkload.of(work, config, ONE_RANK, batch), measured_s=tuple(seconds))
    placement = assign_tiers(job.units, config, tier_budget(config, probe_hardware([directory])), ONE_RANK)
    return predict_step(job, placement, machine_of(rates)).step_s


def machine_of(rates: Sequence[Rates]) -> Machine:
    def mean(table: str, name: str) -> float:
        return statistics.mean(getattr(each, table)[name] for each in rates)

    return Machine(
        is_host=True,
        flops=1.0,  # the units' seconds are given
        device_bytes=mean("update", "bytes_per_s"),
        upload_bytes=0.0,
        download_bytes=0.0,
        host_bytes=mean("update", "bytes_per_s"),
        host_bytes_beside=mean("update", "bytes_per_s_beside"),
        read_bytes=mean("drive", "read_bytes_per_s"),
        write_bytes=mean("drive", "write_bytes_per_s"),
        drive_takes_turns=all(each.drive["takes_turns"] for each in rates),
        network_bytes=0.0,
        drive_lost_s=mean("drive", "lost_s_per_byte"),
    )


def main(arguments: Sequence[str]) -> int:
    parser = command.parser(__name__, __doc__, "fewer steps")
    command.add_nvme(parser)
    args = parser.parse_args(arguments)
    num_steps = 5 if args.quick else 25
    rows: list[Row] = []
    plain = Plain()
    plain.measure(3)
    with command.scratch_directory(args.nvme) as directory:
        before = take_rates(plain, directory, num_steps)
        for name, settings in PLACEMENTS.items():
            measured_s, away = measure_offloaded(settings, directory / "run", num_steps)
            after = take_rates(plain, directory, num_steps)
            predicted_s = predict(settings, directory / "run", (before, after), away)
            before = after
            made: Row = {"name": name, "ours": predicted_s, "unit": "s", "against": "measured", "theirs": measured_s}
            ratio = predicted_s / measured_s
            rows.append(made | {"ratio": ratio, "reach": REACH, "ok": 1 / REACH <= ratio <= REACH})
            show(rows[-1:])
    write(rows, args.json)
    met = sum(bool(each["ok"]) for each in rows)
    print(f"{met} of {len(rows)} placements within {REACH - 1:.0%}")
    return 0
