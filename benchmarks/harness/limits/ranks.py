"""Python's cost of a step against the number of ranks, to 16 on this machine.

Stages 1 and 3 of 1.2M parameters in CPU memory (fp32, gloo, clipped, 64 tokens per rank, one thread each). More ranks
than cores wait for each other, so seconds on the clock would say nothing. Counted is one rank's main thread in a step:
its seconds on a core, and its calls of Python functions. Seconds in which it waits for others' words are left out.
Operators of torch are in them. These are the same with any number of ranks but for the update, of which each rank does
its part.

The slope is that of a line through all numbers of ranks, by least squares. Rows of one number have the ratio to two
ranks. One row is graded: 16 ranks take at most twice the seconds of two.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from harness import command
from harness.rows import Row, row, show, ungraded, write
from harness.step.peers import BATCH, LENGTH, VOCABULARY, WARM_UP, WIDTHS, ours

from zero_offload.hardware import native

RANKS, STAGES = (2, 4, 8, 16), (3, 1)
REACH = 2.0
"""Seconds of 16 ranks over those of two."""


class Waits:
    """Seconds that this thread was on a core while it waited for other ranks' words: it spins a little."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._wait: Any = native.word_wait
        native.word_wait = self._timed

    def _timed(self, *arguments: Any) -> bool:
        begin = time.thread_time()
        try:
            return bool(self._wait(*arguments))
        finally:
            self.cpu_s += time.thread_time() - begin


def num_calls(step: Any, tokens: torch.Tensor) -> int:
    """Python functions that this thread calls in a step."""
    counts: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, argument: object) -> None:
        counts[event] += 1

    sys.setprofile(seen)
    try:
        step(tokens)
    finally:
        sys.setprofile(None)
    return counts["call"]


def run(rank: int, num_ranks: int, stage: int, num_steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    step, waits = ours(WIDTHS["1.2M"], stage), Waits()
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(rank))
    cpu_s = []
    for _ in range(WARM_UP + num_steps):
        begin, waited = time.thread_time(), waits.cpu_s
        step(tokens)
        cpu_s.append(time.thread_time() - begin - (waits.cpu_s - waited))
    found = {"cpu_s": statistics.median(cpu_s[WARM_UP:]), "calls": num_calls(step, tokens)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # models stay open, whose close would be no part of this


def measure(num_ranks: int, stage: int, num_steps: int) -> dict[str, float]:
    """Of one rank's step, in the mean of all."""
    context = multiprocessing.get_context("fork")  # sixteen starts of Python would take minutes
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=run, args=(rank, num_ranks, stage, num_steps, folder)) for rank in range(num_ranks)
        ]
        for each in started:
            each.start()
        for each in started:
            each.join()
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    assert len(found) == num_ranks, f"{num_ranks - len(found)} of {num_ranks} ranks have failed"
    return {name: statistics.fmean(each[name] for each in found) for name in found[0]}


def main(arguments: Sequence[str]) -> int:
    args = command.parser(__name__, __doc__, "20 steps in the place of 100").parse_args(arguments)
    rows: list[Row] = []
    for stage in STAGES:
        found = {num_ranks: measure(num_ranks, stage, 20 if args.quick else 100) for num_ranks in RANKS}
        for name, unit, factor in (("cpu_s", "ms", 1e3), ("calls", "", 1.0)):
            values = {num_ranks: factor * each[name] for num_ranks, each in found.items()}
            what = {"cpu_s": "seconds on a core", "calls": "Python calls"}[name]
            for num_ranks, value in values.items():
                make = row if name == "cpu_s" and num_ranks == RANKS[-1] else ungraded
                rows.append(
                    make(f"stage {stage}, {num_ranks} ranks, {what}", value, unit, "2 ranks", values[RANKS[0]], REACH)
                )
            slope = statistics.linear_regression(list(values), list(values.values())).slope
            rows.append(ungraded(f"stage {stage}, per rank more, {what}", slope, unit, "2 ranks", values[2], REACH))
    show(rows)
    write(rows, args.json)
    return int(any(each["ok"] is False for each in rows))
