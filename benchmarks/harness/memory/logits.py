"""The head of a language model and its loss: whole logits against chunks of them, one weight against tiles.

Vocabulary 50257, width 768, bf16, forward and backward. Every system is a process of its own that steps in turns with
the others. Its memory is its peak RSS during the steps less what it had before it built anything: weights, gradients
and logits. The systems on disk have parameters, gradients and optimizer states there and make their update, too.

The bars: the chunked loss takes <= 0.5x the memory of plain torch. It takes <= 4/3x the time, as it makes the logits
twice (four products for three). With few tokens a head of 8 tiles on disk takes <= 0.75x the memory of a head in one
piece. These figures include the logits and chunks of the update, which are the same for both. With many tokens it saves
nothing: <= 1.25x plain torch in RAM. Whole logits outweigh the weight then, and are put together by a copy.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import command
from harness.processes import reset_peak, rss_bytes, take_turns
from harness.rows import Row, row, show, write
from torch import Tensor, nn

import zero_offload as zo
from zero_offload.base.types import MIB
from zero_offload.hardware.probe import peak_resident_bytes

VOCAB, WIDTH, TILES = 50257, 768, 8
LONG, SHORT = 2048, 64
"""Tokens: with many, logits are what takes memory; with few, the weight is."""
REACH_MEMORY, REACH_TIME, REACH_TILES, REACH_TILES_LONG = 0.5, 4 / 3, 0.75, 1.25
SYSTEMS: dict[str, int] = {"plain": LONG, "chunked": LONG, "tiles on disk, long": LONG}
SYSTEMS |= {"linear on disk": SHORT, "tiles on disk": SHORT}


class Head(nn.Module):
    """hidden (tokens, width), targets (tokens,) -> the loss of whole logits."""

    def __init__(self, tiled: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.head = zo.nn.TiledLinear(WIDTH, VOCAB, False, tiles=TILES) if tiled else nn.Linear(WIDTH, VOCAB, False)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(hidden)).float(), targets)


class ChunkedHead(Head):
    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return zo.nn.chunked_cross_entropy(self.norm(hidden), self.head.weight, targets)


def build(system: str, directory: Path) -> tuple[nn.Module, Callable[[], None]]:
    """A model and its update."""
    model = (ChunkedHead if system == "chunked" else Head)(tiled="tiles" in system)
    if "disk" not in system:
        model.bfloat16()
        return model, model.zero_grad
    away = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}
    # Room for a weight in one piece; tiles make do with a quarter.
    budget = 24 * MIB if "tiles" in system else 96 * MIB
    zo.offload(model, zo.OffloadConfig(**away, nvme=directory / system, device_memory=budget, durability="scratch"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-4)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return model, update


def serve(system: str, directory: Path, num_threads: int) -> None:
    """A worker's life: a step per line of input, answered with its seconds and the peak so far."""
    torch.set_num_threads(num_threads)
    # The first call of a kernel loads its library, which counts for no system.
    small = nn.Linear(64, 64, dtype=torch.bfloat16)
    F.cross_entropy(small(torch.zeros(64, 64).bfloat16()).float(), torch.zeros(64, dtype=torch.int64)).backward()
    at_start = rss_bytes()
    model, update = build(system, directory)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(SYSTEMS[system], WIDTH, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(VOCAB, (SYSTEMS[system],), generator=generator)
    gc.collect()
    # From here on the peak counts: the model was built in fp32.
    reset_peak()
    for _ in sys.stdin:
        begin = time.perf_counter()
        model(hidden, targets).backward()
        update()
        hidden.grad = None
        step_s, peak_bytes = time.perf_counter() - begin, peak_resident_bytes() - at_start
        print(json.dumps({"step_s": step_s, "peak_bytes": peak_bytes}), flush=True)


def measure(directory: Path, num_rounds: int, num_threads: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of a step and peak MiB, per system."""
    options = ("--nvme", directory, "--threads", num_threads)
    commands = {system: command.worker_command("memory.py", "logits", system, *options) for system in SYSTEMS}
    samples: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    for answers in take_turns(commands, num_rounds):
        for system, answer in answers.items():
            samples[system].append(answer)
    seconds = {system: statistics.median(each["step_s"] for each in taken) for system, taken in samples.items()}
    return seconds, {system: taken[-1]["peak_bytes"] / MIB for system, taken in samples.items()}


def compare(seconds: dict[str, float], peak: dict[str, float]) -> list[Row]:
    plain = "plain torch: nn.Linear, F.cross_entropy"
    return [
        row("peak, chunked loss", peak["chunked"], "MiB", plain, peak["plain"], REACH_MEMORY),
        row("time, chunked loss", seconds["chunked"], "s", plain, seconds["plain"], REACH_TIME),
        row(f"peak, {TILES} tiles on disk", peak["tiles on disk, long"], "MiB", plain, peak["plain"], REACH_TILES_LONG),
        row(
            f"peak, {TILES} tiles on disk, {SHORT} tokens",
            peak["tiles on disk"],
            "MiB",
            "nn.Linear on disk",
            peak["linear on disk"],
            REACH_TILES,
        ),
    ]


def main(arguments: Sequence[str]) -> int:
    parser = command.parser(__name__, __doc__, "fewer rounds")
    command.add_workers(parser)
    args = parser.parse_args(arguments)
    if args.worker:
        serve(args.worker, args.nvme, args.threads)
        return 0
    with command.scratch_directory(args.nvme) as directory:
        rows = compare(*measure(directory, 3 if args.quick else 10, args.threads))
    show(rows)
    write(rows, args.json)
    return 0
