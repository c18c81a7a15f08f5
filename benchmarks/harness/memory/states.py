"""Training with compact and bf16 states against fp32 states: the main job's model, its text, several seeds.

Each run is `zero-offload train` with its states in memory, and goes on where it was stopped. The seed decides weights
and batches, so runs of one seed differ by the format alone. `--jobs` runs train at once and share the cores. For a
model this small two runs of one thread each do more steps than one run of two threads. Reach: the mean of the final
validation losses is near that of fp32 states, within the standard deviation of these over seeds. With one seed the
spread is not known, and nothing is claimed. `--quick` starts anew each time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from harness import command
from harness.rows import missing, row, show, write

from zero_offload.base.config import OffloadConfig, Precision
from zero_offload.finetune.pretrain.settings import TrainConfig
from zero_offload.finetune.pretrain.train import train

FORMATS = ("fp32", "bf16", "compact")
EVALUATED = 512
"""Sequences of the validation loss, whatever the batch is."""


def final_loss(states: str, seed: int, steps: int, batch: int, out: Path) -> float:
    """Validation loss, nats per byte, after the last step."""
    done = out / "loss.json"
    if not done.exists():
        precision = Precision(compute="bf16", states=states)
        # A generation now and then, so that a run that was stopped goes on.
        config = OffloadConfig(params="cpu", optimizer="cpu", nvme=out / "nvme", precision=precision, commit_every=100)
        with (out.parent / f"{out.name}.log").open("a") as log:
            run = TrainConfig(out=out, steps=steps, seed=seed, batch=batch, eval_every=steps, offload=config)
            run = replace(run, eval_batches=max(EVALUATED // batch, 1), sample_bytes=1)
            loss = train(run, stream=log).validation_loss
        if loss is None:
            raise SystemExit(f"stopped; the same command goes on: {out}")
        done.write_text(json.dumps(loss))
    return float(json.loads(done.read_text()))


def train_all(runs: list[tuple[str, int]], steps: int, batch: int, jobs: int, out: Path) -> dict[str, list[float]]:
    """Final losses of each format in the order of its seeds."""
    out.mkdir(parents=True, exist_ok=True)
    threads = max(len(os.sched_getaffinity(0)) // jobs, 1)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # before a worker loads the native update
    spawn = multiprocessing.get_context("spawn")
    losses: dict[str, list[float]] = {states: [] for states in FORMATS}
    with ProcessPoolExecutor(jobs, spawn, initializer=torch.set_num_threads, initargs=(threads,)) as workers:
        at = [out / f"{states}-{seed}-{steps}x{batch}" for states, seed in runs]
        formats, seeds = zip(*runs, strict=True)
        results = workers.map(final_loss, formats, seeds, itertools.repeat(steps), itertools.repeat(batch), at)
        for (states, seed), loss in zip(runs, results, strict=True):
            losses[states].append(loss)
            print(f"seed {seed}, {states:<8} {loss:.4f} nats per byte after {steps} steps", flush=True)
    return losses


def main(arguments: Sequence[str]) -> int:
    parser = command.parser(__name__, __doc__, "one seed of 12 steps of 4 sequences, in a directory that is deleted")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/states"))
    args = parser.parse_args(arguments)
    steps, seeds, batch = (12, 1, 4) if args.quick else (args.steps, args.seeds, args.batch)
    runs = [(states, seed) for seed in range(seeds) for states in FORMATS]
    with command.scratch_directory(None) if args.quick else contextlib.nullcontext(args.out) as out:
        losses = train_all(runs, steps, batch, args.jobs, out)
    spread = statistics.stdev(losses["fp32"]) if seeds > 1 else 0.0
    rows = []
    for states in FORMATS[1:]:
        apart = statistics.mean(losses[states]) - statistics.mean(losses["fp32"])
        name, against = f"{states} states, {steps} steps", f"spread of fp32 over {seeds} seeds"
        if spread:
            rows.append(row(name, abs(apart), "nat", against, spread, 1.0))
        else:
            rows.append(missing(name, abs(apart), "nat", against, 1.0))
    show(rows)
    write(rows, args.json)
    return 0
