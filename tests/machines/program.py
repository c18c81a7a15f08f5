"""program.py DRIVE STEPS: trains on this machine's own drive, prints a line for each step, and how it ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.ranks import Case, Outcome


def main(drive: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    zo.join()
    rank, size = dist.get_rank(), dist.get_world_size()
    settings = {
        "params": "nvme",
        "optimizer": "nvme",
        "precision": "fp32",
        "existing": "resume",
        "nvme": Path(drive, "run"),
    }
    case = Case(settings, num_steps=num_steps, max_norm=1.0)
    model, optimizer = ranks.start(case)
    resumed = zo.resume(model, optimizer)
    first = 0 if resumed is None else resumed.step
    print(f"first {first}")
    for step in range(first, num_steps):
        done = Outcome()
        ranks.steps(case, (rank, size), model, optimizer, range(step, step + 1), done)
        print(f"step {step} {done.losses[0].hex()}")
    zo.close(model)
    dist.destroy_process_group()


try:
    main(sys.argv[1], int(sys.argv[2]))
except zo.ZeroOffloadError as error:
    print(f"{type(error).__name__} at {time.monotonic():.1f}: {error}")
    raise
