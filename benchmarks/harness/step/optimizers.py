"""Optimizers of others over tiers, by `zo.unitwise`, against the same ones on plain parameters.

* In memory: whole steps of a GPT, fp32, with activations recomputed. Muon has the matrices of its blocks, and AdamW
  the rest. An update is waited for before the next system's turn.
* The update alone: `torch.optim.AdamW(fused=True)` by `zo.unitwise`, against `zo.AdamW`, on large matrices. The walk
  moves 40 bytes per parameter between memory and cores, and `zo.AdamW` 26 in bf16.
* On a drive: the same GPT with parameters, gradients and states there. The bar is of the longer one of two. These are
  the plain step, and the step's bytes at the drive's rates. As root the drive is a loop device that a control group
  holds to one rate. Else it is the drive itself, whose rates are taken between rounds.
* Memory: a process of its own that steps large matrices with everything on the drive. Its peak inside of steps, less
  what it held before the first one, against three units' masters, gradients and states. The first step makes states.

The systems of a comparison live in one process and step in turns. Medians are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness import command
from harness.disks import Rates, disk_rates, median_rates
from harness.limits import paced_disks
from harness.processes import Worker, reset_peak, rss_bytes
from harness.rows import Row, row, show, write
from torch import nn

import zero_offload as zo
from zero_offload.base.types import GIB, MIB
from zero_offload.finetune.gpt import GPT, next_token_loss
from zero_offload.finetune.gpt_config import GPTConfig, RecomputeMode
from zero_offload.hardware.probe import peak_resident_bytes

MODEL = GPTConfig(num_layers=8, width=512, num_heads=8, vocab_size=8192, seq_max=128, recompute=RecomputeMode.BLOCK)
BATCH = 4
WIDTH, LAYERS = 1536, 8
"""Of the matrices of the update alone."""
WIDE, NUM_WIDE = 2048, 8
"""Of those of the memory's process."""
WARM_UP_STEPS = 3  # the first records the trace and makes states, the next ones fill pools
REACH_STEP, REACH_MUON, REACH_UPDATE, REACH_DRIVE, REACH_MEMORY = 1.15, 1.05, 1.7, 1.2, 1.05
PACE_BYTES_PER_S = 800 * 10**6
PACED_BYTES = 4 * GIB

Optimizers = list[torch.optim.Optimizer]


def adamw(model: nn.Module) -> Optimizers:
    return [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)]


def muon(model: nn.Module) -> Optimizers:
    named = list(model.named_parameters())
    matrices = [param for name, param in named if param.dim() == 2 and name.startswith("blocks.")]
    others = [param for name, param in named if not (param.dim() == 2 and name.startswith("blocks."))]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-4, fused=True)]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizers]] = {
    "AdamW(fused)": adamw,
    "Muon and AdamW(fused)": muon,
    "Adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=1e-3)],
    "SGD(momentum)": lambda model: [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)],
}


@dataclass
class System:
    """One model with its optimizers, and the seconds of its steps."""

    model: nn.Module
    optimizers: Optimizers
    loss: Callable[[nn.Module], torch.Tensor]
    commits: bool = False
    """True where an iteration ends with a commit."""
    steps_s: list[float] = field(default_factory=list)
    updates_s: list[float] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)
    """Bytes that steps have read from drives and written there."""

    def step(self) -> None:
        began = time.perf_counter()
        self.loss(self.model).backward()
        computed = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        ended = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.commits:
            zo.commit(self.model, self.optimizers[-1])
        self.steps_s.append(time.perf_counter() - began)
        self.updates_s.append(ended - computed)

    def count(self) -> None:
        """Note the bytes of the last step; of offloaded models."""
        stats = zo.stats(self.model)
        self.moved.append((stats.read_bytes["nvme"], stats.written_bytes["nvme"]))

    def begin_turn(self) -> None:
        """A step whose time does not count: one of another system was before it."""
        self.step()
        self.steps_s.pop()
        self.updates_s.pop()


def gpt_loss(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(MODEL.vocab_size, (BATCH, MODEL.seq_max + 1), generator=torch.Generator().manual_seed(0))
    return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])


def new_system(make: Callable[[nn.Module], Optimizers], config: zo.OffloadConfig | None) -> System:
    """A GPT; offloaded with `config`, or plain."""
    torch.manual_seed(0)
    model = GPT(MODEL)
    if config is None:
        return System(model, make(model), gpt_loss)
    zo.offload(model, config)
    return System(model, [zo.unitwise(each) for each in make(model)], gpt_loss, commits=bool(config.nvme))


def take_turns(systems: Sequence[System], num_rounds: int, num_steps: int) -> None:
    """Steps of each system in each round, in another order each time."""
    for system in systems:
        for _ in range(WARM_UP_STEPS):
            system.begin_turn()
    for number in range(num_rounds):
        for system in systems[number % len(systems) :] + systems[: number % len(systems)]:
            system.begin_turn()
            for _ in range(num_steps):
                system.step()


def memory_rows(num_rounds: int) -> list[Row]:
    rows = []
    for name, make in OPTIMIZERS.items():
        plain, ours = new_system(make, None), new_system(make, zo.OffloadConfig(precision="fp32"))
        take_turns([plain, ours], num_rounds, 4)
        reach = REACH_MUON if "Muon" in name else REACH_STEP
        step_s, plain_s = (statistics.median(system.steps_s) for system in (ours, plain))
        rows.append(row(f"step in memory, {name}", step_s, "s", "plain torch", plain_s, reach))
        update_s, plain_update_s = (statistics.median(system.updates_s) for system in (ours, plain))
        of_update = row(f"its update, {name}", update_s, "s", "plain torch's update", plain_update_s, reach)
        rows.append(of_update | {"ok": None})
        zo.close(ours.model)
        show(rows[-2:])
    return rows


def linears(width: int, count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def matrices_loss(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(torch.ones(8, next(iter(model.parameters())).shape[1])).square().mean()
    return found


def update_rows(num_rounds: int) -> list[Row]:
    systems = []
    for make in (adamw, lambda model: [zo.AdamW(model.parameters(), lr=1e-4)]):
        model = linears(WIDTH, LAYERS)
        zo.offload(model, zo.OffloadConfig(precision="fp32", overlap="none"))
        optimizers = [zo.unitwise(each) if make is adamw else each for each in make(model)]
        systems.append(System(model, optimizers, matrices_loss))
    take_turns(systems, num_rounds, 4)
    ours_s, fused_s = (statistics.median(system.updates_s) for system in systems)
    for system in systems:
        zo.close(system.model)
    found = [row("update, AdamW(fused) by the walk", ours_s, "s", "zo.AdamW", fused_s, REACH_UPDATE)]
    show(found)
    return found


@contextlib.contextmanager
def drive(folder: Path) -> Iterator[tuple[Path, Callable[[], Rates]]]:
    """A directory on a drive, and what tells its rates."""
    with paced_disks.mounted(folder, PACED_BYTES, (PACE_BYTES_PER_S,)) as disks:
        if disks is None:
            print(f"the drive is not paced: {paced_disks.NEEDS}")
            yield folder, lambda: disk_rates(folder)
        else:
            yield disks[0], lambda: Rates(PACE_BYTES_PER_S, PACE_BYTES_PER_S)


def config_on(folder: Path) -> zo.OffloadConfig:
    return zo.OffloadConfig(
        params="nvme", grads="nvme", optimizer="nvme", nvme=folder, precision="fp32", existing="discard"
    )


def drive_rows(parent: Path, num_rounds: int) -> list[Row]:
    rows = []
    with drive(parent) as (folder, rates):
        for name, make in OPTIMIZERS.items():
            plain, ours = new_system(make, None), new_system(make, config_on(folder / "run"))
            taken = [rates()]
            for number in range(num_rounds):
                take_turns([plain, ours] if number % 2 else [ours, plain], 1, 2)
                ours.count()
                taken.append(rates())
            zo.close(ours.model)
            step_s, plain_s = (statistics.median(system.steps_s) for system in (ours, plain))
            read, written = (statistics.median(each[at] for each in ours.moved) for at in (0, 1))
            found = median_rates(taken)
            # The kernel holds reads and writes to the pace separately: both at once take as long as the longer one.
            is_paced = folder != parent
            drive_s = (
                max(found.seconds(read, 0), found.seconds(0, written)) if is_paced else found.seconds(read, written)
            )
            print(
                f"{name}: {read / MIB:.0f} MiB read, {written / MIB:.0f} written, {drive_s:.3f} s at the drive's "
                f"rates; plain step {plain_s:.3f} s",
                flush=True,
            )
            against = "the plain step, or bytes / drive's rates"
            rows.append(row(f"step on a drive, {name}", step_s, "s", against, max(plain_s, drive_s), REACH_DRIVE))
            show(rows[-1:])
    return rows


def serve(folder: Path) -> None:
    """The worker: steps of large matrices with everything on a drive. Answers with the peak of its steps, less what was
    held before the first one."""
    model = linears(WIDE, NUM_WIDE)
    zo.offload(model, config_on(folder / "memory"))
    (optimizer,) = (zo.unitwise(each) for each in adamw(model))
    for _ in range(WARM_UP_STEPS):  # pools of forward and backward fill
        matrices_loss(model).backward()
        optimizer.zero_grad()
    before = 0
    for line in sys.stdin:
        peak = 0
        for _ in range(int(line)):
            matrices_loss(model).backward()
            before = before or rss_bytes()
            reset_peak()
            optimizer.step()
            peak = max(peak, peak_resident_bytes())
            optimizer.zero_grad()
        print(json.dumps({"peak_bytes": peak - before}), flush=True)
    zo.close(model)


def peak_rows(folder: Path) -> list[Row]:
    worker = Worker(command.worker_command("train_step.py", "optimizers", "memory", "--nvme", folder))
    peaks = {"its first step": worker.step(1)["peak_bytes"], "later steps": worker.step(4)["peak_bytes"]}
    worker.close()
    held = 3 * 4 * 4 * (WIDE * WIDE + WIDE) / MIB
    against = "three units' masters, gradients and states"
    rows = [
        row(f"memory of a walk, {name}", peak / MIB, "MiB", against, held, REACH_MEMORY) for name, peak in peaks.items()
    ]
    show(rows)
    return rows


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.parser(__name__, __doc__, "fewer rounds")
    command.add_workers(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    if args.worker:
        serve(args.nvme)
        return 0
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    rows = update_rows(4 if args.quick else 12)
    with command.scratch_directory(args.nvme) as folder:
        rows += peak_rows(folder)
        write(rows, args.json)
        rows += memory_rows(4 if args.quick else 12)
        write(rows, args.json)
        rows += drive_rows(folder, 2 if args.quick else 5)
    show(rows)
    write(rows, args.json)
    return 0
