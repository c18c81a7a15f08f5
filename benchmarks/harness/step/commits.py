"""The cost of commits: steps without them against one every 1, 10 and 100 steps, and as "auto" chooses.

A GPT of 29M parameters, bf16 with fp32 master, makes steps of 4 sequences of 128 tokens, with activations recomputed.
Its states are once on disk, and once in CPU memory, where a commit has to write them out (12 B/param). The models of
one kind of states live in one process and train in turns, each round in another order. A turn is a block of as many
steps as are between two commits (at least 10). The first step of a block is committed, and a block ends when nothing is
under way. So all costs of a commit are in its own block. Times are the medians of blocks. Each row's ratio is that of
times, to be at most 1.02: 2% of a step. Bytes written to NVMe per step are counted, and compared with
the plan's arithmetic.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import command
from harness.rows import Row, row, show, write

import zero_offload as zo
from zero_offload.base.types import MIB
from zero_offload.finetune.gpt import GPT, next_token_loss
from zero_offload.finetune.gpt_config import GPTConfig, RecomputeMode
from zero_offload.model.api import runtime_of

MODEL = GPTConfig(num_layers=8, width=512, num_heads=8, vocab_size=8192, seq_max=128, recompute=RecomputeMode.BLOCK)
BATCH = 4
STATES = {"on disk": {"params": "nvme", "optimizer": "nvme"}, "in memory": {"params": "cpu", "optimizer": "cpu"}}
NEVER = 10**9
BLOCK_STEPS = 10
"""Of runs without commits, and of those that choose for themselves."""
REACH, REACH_BYTES = 1.02, 1.01
NO_REACH = math.inf


class Run:
    """One model and its figures."""

    def __init__(self, states: str, every: int | str, folder: Path) -> None:
        torch.manual_seed(0)
        self.every = every
        self.model = GPT(MODEL)
        config = zo.OffloadConfig(nvme=folder / str(every), commit_every=every, **STATES[states])
        self.planned_bytes = zo.plan(self.model, config).wear.bytes_per_step
        zo.offload(self.model, config)
        owner = runtime_of(self.model)
        assert owner is not None
        self.owner = owner
        self.optimizer = zo.AdamW(self.model.parameters(), lr=1e-4)
        self.block_steps = every if isinstance(every, int) and every < NEVER else BLOCK_STEPS
        self.block_steps = max(self.block_steps, BLOCK_STEPS)
        self.num_steps = 0
        self.step_s: list[float] = []
        """Per block."""
        # Up to the step before a committed one; the first steps record, and fill pools.
        self.steps(self.block_steps - 1)
        self.bytes_before = self.written_bytes()
        self.steps_before = self.num_steps

    def steps(self, count: int) -> None:
        for _ in range(count):
            generator = torch.Generator().manual_seed(self.num_steps)
            tokens = torch.randint(MODEL.vocab_size, (BATCH, MODEL.seq_max + 1), generator=generator)
            next_token_loss(self.model(tokens[:, :-1]), tokens[:, 1:]).backward()
            zo.clip_grad_norm_(self.model, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.num_steps += 1
            zo.commit(self.model, self.optimizer, extra={"step": self.num_steps})
        self.owner.drain()

    def block(self) -> None:
        start = time.perf_counter()
        self.steps(self.block_steps)
        self.step_s.append((time.perf_counter() - start) / self.block_steps)

    def written_bytes(self) -> float:
        return self.owner.store.counters.snapshot().get("written.nvme", 0.0)

    @property
    def bytes_per_step(self) -> float:
        return (self.written_bytes() - self.bytes_before) / (self.num_steps - self.steps_before)

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def measure(states: str, intervals: list[int | str], num_rounds: int, folder: Path) -> list[Row]:
    runs = [Run(states, every, folder) for every in (NEVER, *intervals)]
    for number in range(num_rounds):
        for run in runs[number % len(runs) :] + runs[: number % len(runs)]:
            run.block()
    rows = [each for run in runs[1:] for each in compare(states, run, runs[0])]
    for run in runs:
        zo.close(run.model)
    return rows


def compare(states: str, run: Run, without: Run) -> list[Row]:
    cost = run.median_s / without.median_s - 1
    print(
        f"| {states} | {run.every} | {without.median_s:.3f} | {run.median_s:.3f} | {cost:+.1%} | "
        f"{run.bytes_per_step / MIB:.1f} | {run.planned_bytes / MIB:.1f} |",
        flush=True,
    )
    name = f"commit_every={run.every}, {states}"
    # Every single step: what the drive takes, not what we promise.
    reach = NO_REACH if run.every == 1 and states == "in memory" else REACH
    rows = [row(name, run.median_s, "s", "no commits", without.median_s, reach)] if reach < NO_REACH else []
    if isinstance(run.every, int):
        found = row(f"bytes, {name}", run.bytes_per_step / MIB, "MiB", "plan", run.planned_bytes / MIB, REACH_BYTES)
        rows.append(found)
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = command.parser(__name__, __doc__, "fewer rounds, and without commit_every=100")
    command.add_nvme(parser)
    args = parser.parse_args(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    intervals: list[int | str] = [1, 10, "auto"] if args.quick else [1, 10, 100, "auto"]
    print("| states | commit_every | s/step without | with | cost | MiB written per step | planned |")
    print("|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    for states in STATES:
        with command.scratch_directory(args.nvme) as folder:
            rows += measure(states, intervals, 3 if args.quick else 7, folder)
    show(rows)
    write(rows, args.json)
    return 0
