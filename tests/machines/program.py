"""program.py DRIVE STEPS STAGE: trains on this machine's own drive, prints a line for each step, and how it ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.ranks import Case


def main(drive: str, num_steps: int, stage: int) -> None:
    torch.set_num_threads(1)
    zo.join()
    rank, size = dist.get_rank(), dist.get_world_size()
    settings = {
        "params": "nvme",
        "optimizer": "nvme",
        "precision": "fp32",
        "stage": stage,
        "existing": "resume",
        "nvme": Path(drive, "run"),
    }
    case = Case(settings, num_steps=num_steps, max_norm=1.0)
    model, optimizer = ranks.start(case)
    last = None
    for number in zo.steps(model, optimizer, num_steps, exit_code=75):
        step = number - 1
        if last is None:
            print(f"first {step}")
        last = step
        loss = model(ranks.rows_of(step, rank, size))
        loss.backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} {loss.item().hex()}")
    zo.close(model)
    dist.destroy_process_group()


try:
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
except zo.ZeroOffloadError as error:
    print(f"{type(error).__name__} at {time.monotonic():.1f}: {error}")
    raise
