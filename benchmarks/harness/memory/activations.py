"""Tensors that backward needs of forward: kept in memory, computed again, or on disk, alone and together.

A GPT of 8 layers of width 256, bf16, 4096 tokens. Every system is a process of its own that steps in turns with the
others. Parameters, gradients and optimizer states are in memory in all of them. A system's memory is its peak RSS
during the steps less what it had once it was built.

The bars. Memory, against activations kept in memory: recomputed <= 0.5x; on disk <= 0.4x; both <= 0.5x. Both then have
one block's activations, the logits, and 48 MiB of buffers. Time: recomputed <= 1.35x (four thirds of the arithmetic);
with boundaries on disk <= 1.1x of recomputed. On disk without recompute the limit is the drive's time for the bytes
counted, at the rates of the same run, and 35% on top. Where the step in memory takes longer, its time takes the place
of the drive's.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from harness import command
from harness.processes import reset_peak, rss_bytes, take_turns
from harness.rows import Row, row, show, write
from torch import Tensor

import zero_offload as zo
from zero_offload.base.types import MIB
from zero_offload.finetune.gpt import GPT, next_token_loss
from zero_offload.finetune.gpt_config import GPTConfig
from zero_offload.hardware.probe import peak_resident_bytes
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engines import open_engine
from zero_offload.storage.files.swap_file import SwapFile
from zero_offload.storage.memory.arena import Arena

MODEL = GPTConfig(num_layers=8, width=256, num_heads=4, seq_max=256)
BATCH, SEQ = 16, 256
REACH_MEMORY, REACH_TIME, REACH_BOUNDARIES, REACH_DISK = (0.5, 0.4, 0.5), 1.35, 1.1, 1.35
SYSTEMS = ("kept", "recomputed", "recomputed, boundaries on disk", "saved tensors on disk")
RATE_BYTES = 256 * MIB


@dataclass(frozen=True)
class Figures:
    """Of one system's steps."""

    step_s: float
    peak_mib: float
    read_bytes: int
    written_bytes: int


def build(system: str, directory: Path) -> tuple[GPT, zo.AdamW]:
    model = GPT(MODEL)
    if "recomputed" in system:
        zo.checkpoint(model.blocks)
    activations = "nvme" if "disk" in system else "device"
    path = directory / system.replace(" ", "_").replace(",", "")
    zo.offload(model, zo.OffloadConfig(activations=activations, nvme=path, durability="scratch"))
    return model, zo.AdamW(model.parameters(), lr=1e-4)


def step(model: GPT, optimizer: zo.AdamW, tokens: Tensor) -> None:
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def serve(system: str, directory: Path, num_threads: int) -> None:
    """A worker's life: a step per line of input, answered with its figures so far."""
    torch.set_num_threads(num_threads)
    model, optimizer = build(system, directory)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (BATCH, SEQ + 1), generator=generator)
    # Gradients are made and libraries loaded by a step that saves next to nothing.
    step(model, optimizer, tokens[:1, :33])
    gc.collect()
    at_start = rss_bytes()
    reset_peak()
    for _ in sys.stdin:
        begin = time.perf_counter()
        step(model, optimizer, tokens)
        seconds, stats = time.perf_counter() - begin, zo.stats(model)
        peak_mib = (peak_resident_bytes() - at_start) / MIB
        figures = Figures(seconds, peak_mib, stats.read_bytes["nvme"], stats.written_bytes["nvme"])
        print(json.dumps(asdict(figures)), flush=True)
    zo.close(model)


class Drive:
    """Writes and reads a file as the store does, with nothing beside it."""

    def __init__(self, directory: Path) -> None:
        self._directory = RunDirectory.open(directory / "rates")
        self._engine = open_engine()
        self._file = SwapFile([self._directory], "rates", self._engine, 1)
        self._extent = self._file.allocate("rates", [MIB] * (RATE_BYTES // MIB))
        self._file.create_scratch()
        self._region = Arena(0).allocate(RATE_BYTES)
        self._region.tensor(torch.uint8, RATE_BYTES).fill_(1)

    def seconds_per_byte(self) -> tuple[float, float]:
        """To read, to write."""
        start = time.perf_counter()
        self._file.write(self._extent, slice(None), self._region.address).wait()
        middle = time.perf_counter()
        self._file.read(self._extent, slice(None), self._region.address).wait()
        return (time.perf_counter() - middle) / RATE_BYTES, (middle - start) / RATE_BYTES

    def close(self) -> None:
        self._engine.close()
        self._file.close()
        self._directory.close()


def measure(directory: Path, num_rounds: int, num_threads: int) -> tuple[dict[str, Figures], tuple[float, float]]:
    """Each system's median step and last peak; seconds per byte to read and to write."""
    options = ("--nvme", directory, "--threads", num_threads)
    commands = {system: command.worker_command("memory.py", "activations", system, *options) for system in SYSTEMS}
    samples: dict[str, list[Figures]] = {system: [] for system in SYSTEMS}
    rates = []
    drive = Drive(directory)
    try:
        for answers in take_turns(commands, num_rounds):
            for system, answer in answers.items():
                samples[system].append(Figures(**answer))
            rates.append(drive.seconds_per_byte())
    finally:
        drive.close()
    found = {
        system: replace(taken[-1], step_s=statistics.median(each.step_s for each in taken))
        for system, taken in samples.items()
    }
    return found, (statistics.median(read for read, _ in rates), statistics.median(write for _, write in rates))


def compare(found: dict[str, Figures], seconds_per_byte: tuple[float, float]) -> list[Row]:
    kept, recomputed, boundaries, stored = (found[system] for system in SYSTEMS)
    memory, base = REACH_MEMORY, "activations in memory"
    drive_s = stored.read_bytes * seconds_per_byte[0] + stored.written_bytes * seconds_per_byte[1]
    bound = max(kept.step_s, drive_s)
    limit = "its drive" if drive_s > kept.step_s else base
    return [
        row("peak, recomputed", recomputed.peak_mib, "MiB", base, kept.peak_mib, memory[0]),
        row("peak, on disk", stored.peak_mib, "MiB", base, kept.peak_mib, memory[1]),
        row("peak, recomputed, on disk", boundaries.peak_mib, "MiB", base, kept.peak_mib, memory[2]),
        row("time, recomputed", recomputed.step_s, "s", base, kept.step_s, REACH_TIME),
        row("time, recomputed, on disk", boundaries.step_s, "s", "recomputed", recomputed.step_s, REACH_BOUNDARIES),
        row("time, on disk", stored.step_s, "s", limit, bound, REACH_DISK),
    ]


def main(arguments: Sequence[str]) -> int:
    parser = command.parser(__name__, __doc__, "fewer rounds")
    command.add_workers(parser)
    args = parser.parse_args(arguments)
    if args.worker:
        serve(args.worker, args.nvme, args.threads)
        return 0
    with command.scratch_directory(args.nvme) as directory:
        found, seconds_per_byte = measure(directory, 3 if args.quick else 10, args.threads)
    rows = compare(found, seconds_per_byte)
    for system, each in found.items():
        moved = f"{each.written_bytes / MIB:.0f} MiB to disk and {each.read_bytes / MIB:.0f} MiB back"
        print(f"{system:<32} {each.step_s:7.3f} s {each.peak_mib:7.0f} MiB  {moved}")
    show(rows)
    write(rows, args.json)
    return 0
