"""pair.py STAGE STEPS [ODD]: two ranks on this machine, on gloo, which train in memory.

Each prints the bits of its losses, and per step how often it took part in a round between machines. In step ODD the
last rank of all goes another way than the others.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.ranks import Case, Outcome
from zero_offload.runtime.ranks import levels

PER_MACHINE = 2


def say(line: str) -> None:
    """In one write: two processes have one file, and print writes the end of a line by itself."""
    os.write(1, f"{line}\n".encode())


def run(place: int, stage: int, num_steps: int, odd: int) -> None:
    machine, machines = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank, size = machine * PER_MACHINE + place, machines * PER_MACHINE
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(place),
        "LOCAL_WORLD_SIZE": str(PER_MACHINE),
    }
    torch.set_num_threads(1)
    zo.join()
    count, between = [0], levels.gather_few

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return between(*args, **kwargs)

    levels.gather_few = counted
    case = Case({"stage": stage, "precision": "fp32"}, num_steps=num_steps, max_norm=1.0)
    model, optimizer = ranks.start(case)
    try:
        for step in range(num_steps):
            done, count[0] = Outcome(), 0
            if step == odd and rank == size - 1:
                with torch.no_grad():
                    model(ranks.rows_of(step, rank, size))
            ranks.steps(case, (rank, size), model, optimizer, range(step, step + 1), done)
            say(f"rank {rank} step {step} rounds {count[0]} loss {done.losses[0].hex()}")
        zo.close(model)
    except zo.ZeroOffloadError as error:
        say(f"rank {rank} {type(error).__name__} at {time.monotonic():.1f}: {error}")
        os._exit(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    chosen = (int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else -1)
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=run, args=(place, *chosen)) for place in range(PER_MACHINE)]
    for each in started:
        each.start()
    for each in started:
        each.join()
    sys.exit(max(each.exitcode or 0 for each in started))
