"""late.py STEPS [RANK:STEP:HOW:SECONDS ...]: trains in memory, on gloo; a rank is late in a step.

HOW is "compute", without the interpreter's lock, or "hold", with it. Prints a line for each step, and how it ends.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

import torch
import torch.distributed as dist

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.ranks import Case, Outcome


def say(line: str) -> None:
    """In one write."""
    os.write(1, f"{line}\n".encode())


def main(num_steps: int, late: list[list[str]]) -> None:
    torch.set_num_threads(1)
    zo.join()
    rank, size = dist.get_rank(), dist.get_world_size()
    case = Case({"stage": 3, "precision": "fp32"}, num_steps=num_steps, max_norm=1.0)
    model, optimizer = ranks.start(case)
    try:
        for step in range(num_steps):
            for _, _, how, seconds in (each for each in late if each[:2] == [str(rank), str(step)]):
                say(how)
                # PyDLL keeps the lock, as some C code does.
                (time.sleep if how == "compute" else ctypes.PyDLL(None).sleep)(int(seconds))
                say(f"{how} is over")
            done = Outcome()
            ranks.steps(case, (rank, size), model, optimizer, range(step, step + 1), done)
            say(f"step {step} loss {done.losses[0].hex()}")
        zo.close(model)
    except zo.ZeroOffloadError as error:
        say(f"{type(error).__name__} at {time.monotonic():.1f}: {error}")
        os._exit(3)
    dist.destroy_process_group()


main(int(sys.argv[1]), [each.split(":") for each in sys.argv[2:]])
