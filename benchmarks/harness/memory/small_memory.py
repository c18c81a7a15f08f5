"""Models whose states are many times the memory: trained inside a memory cgroup, killed, and resumed.

Parameters, gradients and optimizer states on disk, clipping, recomputed blocks. A process starts in a cgroup of the
given size, so libraries and page cache count too. It is killed in a backward, and a second one resumes in the same
group. Losses of steps that both made must be equal. By default 1.5B parameters with exact states, then 3B with compact
ones, each in 4 GiB. Needs root, for the cgroup, and 40 GB of disk. A processor without AVX-512 multiplies bf16 matrices
by a plain loop: there use --dtype fp32, or few tokens.

The bars: the kernel ends nothing and the peak is within the limit. The kill loses two steps at most: the running step,
and the step whose commit runs beside it. Losses go on bit for bit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from harness import command
from harness.disks import Rates, disk_rates
from harness.memory.lives import STEPS_MIN, exit_code, killed_and_resumed, rows_or_failure, train_steps
from harness.rows import Row, row, show, write

import zero_offload as zo
from zero_offload.base.types import format_bytes, parse_bytes
from zero_offload.finetune.gpt import GPT, next_token_loss
from zero_offload.finetune.gpt_config import GPTConfig, num_parameters

SIZES = {
    "91m": (12, 768, 12, 8192),  # with the small vocabulary of quick runs, since an embedding is one unit
    "350m": (24, 1024, 16, 50257),
    "760m": (24, 1536, 16, 50257),
    "1b5": (48, 1600, 25, 50257),
    "3b": (36, 2560, 20, 50257),
}
"""Layers, width, heads, vocabulary."""
STATES = ("fp32", "bf16", "compact")
MODELS, LIMIT, STEPS = "1b5:fp32,3b:compact", "4GiB", 6
QUICK_MODELS, QUICK_LIMIT, QUICK_STEPS = "91m:fp32,91m:compact", "576MiB", 4
STEPS_LOST_MAX = 2


@dataclass(frozen=True)
class Job:
    """The model and settings that a process trains with."""

    model: str
    states: str
    seq: int
    num_steps: int
    dtype: str
    activations: str
    num_threads: int
    directory: str

    @property
    def gpt(self) -> GPTConfig:
        layers, width, heads, vocab = SIZES[self.model]
        return GPTConfig(layers, width, heads, vocab, seq_max=self.seq)

    @property
    def name(self) -> str:
        return f"{self.model}, {'exact' if self.states == 'fp32' else self.states} states"


def train(job: Job) -> None:
    """The process in the group."""
    torch.set_num_threads(job.num_threads)
    with zo.deferred_init():
        model = GPT(job.gpt)
    zo.checkpoint(model.blocks)
    zo.offload(
        model,
        zo.OffloadConfig(
            params="nvme",
            grads="nvme",
            optimizer="nvme",
            activations=job.activations,
            nvme=job.directory,
            existing="resume",
            precision=zo.Precision(compute=job.dtype, states=job.states),
        ),
    )

    def loss_of(step: int) -> torch.Tensor:
        tokens = torch.randint(job.gpt.vocab_size, (1, job.seq + 1), generator=torch.Generator().manual_seed(step))
        return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])

    train_steps(model, 1e-4, job.num_steps, loss_of)


def measure(job: Job, limit_bytes: int, rates: Rates) -> list[Row]:
    """Train, kill, resume; the rows of one model. NoGroupError where no group can be made."""
    numel = num_parameters(job.gpt)
    limit = format_bytes(limit_bytes)
    print(f"{job.name} ({numel / 1e6:.0f}M parameters, {job.seq} tokens, {job.dtype}) in {limit}", flush=True)
    lives = killed_and_resumed("small_memory", job, limit_bytes)
    lost = lives.before.steps[-1]["step"] + 1 - lives.after.begins
    step_s, read, written = map(lives.median, ("step_s", "read_bytes", "written_bytes"))
    moved = f"{format_bytes(int(read))} read and {format_bytes(int(written))} written"
    print(f"  {step_s:.1f} s a step, {moved}, {(read + written) / numel:.1f} bytes per parameter", flush=True)
    files, rss = lives.settled[-1]["resident_bytes"]["nvme"], lives.peak_rss_bytes
    print(f"  {format_bytes(files)} on disk; largest resident set {format_bytes(rss)}, shared libraries included")
    return lives.rows(job.name, rates, row(f"{job.name}: steps lost by a kill", lost, "", "two", STEPS_LOST_MAX, 1.0))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.parser(__name__, __doc__, f"{QUICK_MODELS} in {QUICK_LIMIT}")
    command.add_workers(parser)
    parser.add_argument("--model", help=f"SIZE:STATES of {', '.join(SIZES)} and {', '.join(STATES)}, with commas")
    parser.add_argument("--limit", help=f"of the group (default: {LIMIT})")
    parser.add_argument("--seq", type=int, help="tokens (default: 128; quick: 16)")
    parser.add_argument("--steps", type=int, help=f"in all (default: {STEPS}; quick: {QUICK_STEPS})")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--activations", choices=["device", "cpu", "nvme"], default="device")
    args = parser.parse_args(arguments)
    args.jobs = [each.partition(":") for each in (args.model or (QUICK_MODELS if args.quick else MODELS)).split(",")]
    for size, _, states in args.jobs:
        if size not in SIZES or states not in STATES:
            parser.error(f"no model {size}:{states}; write SIZE:STATES of {', '.join(SIZES)} and {', '.join(STATES)}")
    args.limit_bytes = parse_bytes(args.limit or (QUICK_LIMIT if args.quick else LIMIT))
    args.steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    if args.steps < STEPS_MIN:
        parser.error(f"--steps {args.steps} leaves none before the kill or behind it; take {STEPS_MIN} or more")
    args.seq = args.seq or (16 if args.quick else 128)
    return args


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    if args.worker:
        train(Job(**json.loads(args.worker)))
        return 0
    rows: list[Row] = []
    for size, _, states in args.jobs:
        with command.scratch_directory(args.nvme) as directory:
            settings = (args.seq, args.steps, args.dtype, args.activations, args.threads)
            job = Job(size, states, *settings, str(directory))
            found = partial(measure, job, args.limit_bytes, disk_rates(directory))
            rows += rows_or_failure(job.name, args.limit_bytes, found)
        write(rows, args.json)
    show(rows)
    return exit_code(rows)
