"""Tokens of a model that rests on disk, against the time that the disk takes to read what does not fit.

A model of equal blocks in bf16 writes one token after the other, with memory for a third of it and for all of it. Each
forward is of one token, without a cache of keys, so that all time is that of weights. The disk's rate is measured
between rounds, in turns with them.

The bars: a token reads <= 1.3x of the bytes that do not fit. It takes <= 1.3x of the longer of two times: that of
reading its bytes, and that of a token when all fits. Memory is <= 1.1x of the budget and what the process had before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import command
from harness.disks import disk_rates
from harness.processes import reset_peak, rss_bytes
from harness.rows import Row, row, show, write
from torch import Tensor, nn

import zero_offload as zo
from zero_offload.base.types import MIB
from zero_offload.hardware.probe import peak_resident_bytes

WIDTH, SHARE = 1536, 3
"""A block of this width has 27 MiB in bf16; one part in `SHARE` of the model fits."""
REACH_BYTES, REACH_TIME, REACH_MEMORY = 1.3, 1.3, 1.1


class Block(nn.Module):
    """A feed-forward block, (tokens, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def build(num_blocks: int, directory: Path, device_memory: int) -> nn.Module:
    with zo.deferred_init():
        model = nn.Sequential(*(Block() for _ in range(num_blocks)))
    model.eval().requires_grad_(False)
    config = zo.OffloadConfig(params="nvme", nvme=directory, durability="scratch", device_memory=device_memory)
    return zo.offload(model, config)


def token_seconds(model: nn.Module, num_tokens: int) -> tuple[float, float]:
    """Seconds and bytes read of a token, by the mean of so many."""
    x, before, begin = torch.ones(1, WIDTH), zo.stats(model).read_bytes["nvme"], time.perf_counter()
    with torch.no_grad():
        for _ in range(num_tokens):
            model(x)
    seconds = (time.perf_counter() - begin) / num_tokens
    return seconds, (zo.stats(model).read_bytes["nvme"] - before) / num_tokens


def measure(directory: Path, num_blocks: int, num_rounds: int) -> Sequence[Row]:
    small = build(2, directory / "small", 64 * MIB)  # libraries are loaded by the first calls
    token_seconds(small, 2)
    zo.close(small)
    at_start = rss_bytes()
    nbytes = num_blocks * 2 * sum(param.numel() for param in Block().parameters())
    budget = nbytes // SHARE
    model = build(num_blocks, directory / "third", budget)
    reset_peak()
    token_seconds(model, 3)
    taken: list[tuple[float, float, float]] = []
    for _ in range(num_rounds):
        seconds, read = token_seconds(model, 6)
        taken.append((seconds, read, disk_rates(directory).read_bytes_per_s))
    peak = peak_resident_bytes() - at_start
    zo.close(model)
    whole = build(num_blocks, directory / "whole", 2 * nbytes)
    token_seconds(whole, 3)
    in_memory = statistics.median(token_seconds(whole, 6)[0] for _ in range(num_rounds))
    zo.close(whole)
    read = statistics.mean(each[1] for each in taken)
    seconds = statistics.median(each[0] for each in taken)
    limit = statistics.median(max(each[1] / each[2], in_memory) for each in taken)
    return [
        row("read for a token", read / MIB, "MiB", "what does not fit", (nbytes - budget) / MIB, REACH_BYTES),
        row("a token", seconds, "s", "reading it, or a token in memory", limit, REACH_TIME),
        row("peak memory", peak / MIB, "MiB", "device_memory", budget / MIB, REACH_MEMORY),
    ]


def main(arguments: Sequence[str]) -> int:
    made = command.parser(__name__, __doc__, "a quarter of the blocks, fewer rounds")
    command.add_nvme(made)
    chosen = made.parse_args(arguments)
    num_blocks, num_rounds = (24, 3) if chosen.quick else (96, 7)
    with command.scratch_directory(chosen.nvme) as directory:
        rows = measure(directory, num_blocks, num_rounds)
    show(rows)
    write(rows, chosen.json)
    return 0
