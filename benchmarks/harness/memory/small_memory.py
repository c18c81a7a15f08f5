"""Models whose states are many times the memory: trained inside a memory cgroup, killed, and resumed.

Parameters, gradients and optimizer states on disk, clipping, recomputed blocks. A process starts in a cgroup of the
given size, so libraries and page cache count too; it is killed in a backward, a second one resumes in the same group,
and losses of steps that both made must be equal. By default 1.5B parameters with exact states, then 3B with
compact ones, each in 4 GiB. Needs root, for the cgroup, and 40 GB of disk. A processor without AVX-512 multiplies bf16
matrices by a plain loop: there use --dtype fp32, or few tokens.

The bars: the kernel ends nothing and the peak is within the limit; the kill loses two steps at most (the one that runs,
and the one whose commit runs beside it); losses go on bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from harness import command
from harness.disks import Rates, disk_rates
from harness.memory.lives import EndedEarlyError, live
from harness.processes import NoGroupError, memory_group, peak_rss_bytes
from harness.rows import Row, missing, row, show, ungraded, write

import zero_offload as zo
from zero_offload.base.types import MIB, format_bytes, parse_bytes
from zero_offload.cli.recipes.gpt import GPT, GPTConfig, next_token_loss, num_parameters

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
STEPS_MIN, STEPS_LOST_MAX, REACH_DISK = 3, 2, 1.10


@dataclass(frozen=True)
class Job:
    """What a process trains."""

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
    """The process in the group: prints, in JSON, where it begins, each step's loss, and each step when it is over."""
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
    optimizer = zo.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    resumed = zo.resume(model, optimizer)
    first = 0 if resumed is None else resumed.step
    print(json.dumps({"begins": first}), flush=True)
    for step in range(first, job.num_steps):
        tokens = torch.randint(job.gpt.vocab_size, (1, job.seq + 1), generator=torch.Generator().manual_seed(step))
        start = time.perf_counter()
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
        loss.backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer)
        stats = zo.stats(model)
        made = {"step": step, "step_s": time.perf_counter() - start}
        made |= {
            "files_bytes": stats.resident_bytes["nvme"],
            "read_bytes": stats.read_bytes["nvme"],
            "written_bytes": stats.written_bytes["nvme"],
        }
        print(json.dumps(made | {"peak_rss_bytes": peak_rss_bytes()}), flush=True)
    zo.close(model)


def measure(job: Job, limit_bytes: int, rates: Rates) -> list[Row]:
    """Train, kill, resume; the rows of one model. NoGroupError where no group can be made."""
    numel = num_parameters(job.gpt)
    limit = format_bytes(limit_bytes)
    print(f"{job.name} ({numel / 1e6:.0f}M parameters, {job.seq} tokens, {job.dtype}) in {limit}", flush=True)
    with memory_group(limit_bytes) as group:
        before = live(group, "small_memory", job, kill_in=max(job.num_steps // 2, 1))
        print("  killed; resuming", flush=True)
        after = live(group, "small_memory", job, kill_in=None)
        peak = group.peak_bytes
    lost = before.steps[-1]["step"] + 1 - after.begins
    changed = sum(after.losses[step] != loss for step, loss in before.losses.items() if step >= after.begins)
    settled = after.steps[1:] or after.steps
    step_s, read, written = (
        statistics.median(step[key] for step in settled) for key in ("step_s", "read_bytes", "written_bytes")
    )
    rss = max(step["peak_rss_bytes"] for step in before.steps + after.steps)
    moved = f"{format_bytes(int(read))} read and {format_bytes(int(written))} written"
    print(f"  {step_s:.1f} s a step, {moved}, {(read + written) / numel:.1f} bytes per parameter", flush=True)
    files = format_bytes(settled[-1]["files_bytes"])
    print(f"  {files} on disk; largest resident set {format_bytes(rss)}, shared libraries included", flush=True)
    return [
        row(f"{job.name}: peak in the group", peak / MIB, "MiB", f"its {limit}", limit_bytes / MIB, 1.0),
        row(f"{job.name}: steps lost by a kill", lost, "", "two", STEPS_LOST_MAX, 1.0),
        row(f"{job.name}: losses that changed", changed, "", "one; none is wanted", 1, 0.0),
        ungraded(
            f"{job.name}: step", step_s, "s", "bytes / disk rates, no bar", rates.seconds(read, written), REACH_DISK
        ),
    ]


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
    status = 0
    for size, _, states in args.jobs:
        with command.scratch_directory(args.nvme) as directory:
            settings = (args.seq, args.steps, args.dtype, args.activations, args.threads)
            job = Job(size, states, *settings, str(directory))
            try:
                rows += measure(job, args.limit_bytes, disk_rates(directory))
            except NoGroupError as error:
                print(error)
                rows.append(missing(f"{job.name}: peak in the group", 0.0, "MiB", format_bytes(args.limit_bytes), 1.0))
                status = command.PEER_MISSING_EXIT_CODE
            except EndedEarlyError as error:
                print(error)
                rows.append(row(f"{job.name}: ended early", 1, "", "one; none is wanted", 1, 0.0))
        write(rows, args.json)
    show(rows)
    return status
