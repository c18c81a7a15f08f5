"""program.py DRIVE STEPS STAGE [PAUSE [PUBLISH]]: trains on this machine's own drive, with a pause after each step.

Prints a line for each step, and how it ends. STAGE may be "hybrid": stage 3 inside of each machine, of which each has
all parameters. Each third step is published. With DIE_AT="RANK STEP NUMBER" in the environment that rank ends in this
step, before its file operation of this number. Number 0 is none of them: it says how many there were.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.disk import drain
from tests.helpers.ranks import Case
from tests.helpers.two_models import die_at


def say(line: str) -> None:
    """In one write: ranks may share a file."""
    os.write(1, f"{line}\n".encode())


def main(drive: str, num_steps: int, stage: str, pause_s: float, publish: str) -> None:
    torch.set_num_threads(1)
    zo.join()
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    settings: dict[str, Any] = {
        "params": "nvme",
        "optimizer": "nvme",
        "precision": "fp32",
        "stage": 3 if stage == "hybrid" else int(stage),
        "existing": "resume",
        "nvme": Path(drive, "run"),
    }
    if publish:
        settings |= {"publish": publish, "publish_every": 3}
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = tuple(range(size)[i : i + per_host] for i in range(0, size, per_host)) if stage == "hybrid" else None
    case = Case(settings, num_steps=num_steps, max_norm=1.0, mesh=mesh)
    model, optimizer = ranks.start(case)
    last = count = None
    victim, struck, operation = map(int, os.environ.get("DIE_AT", "-1 -1 0").split())
    for number in zo.steps(model, optimizer, num_steps, exit_code=75):
        step = number - 1
        if last is None:
            say(f"first {step} of {size} rank {rank}")
        last = step
        if step == struck:
            drain(model)  # the commit of the step before is over
            if rank == victim:
                count = die_at(operation)
        loss = model(ranks.rows_of(step, rank, size))
        loss.backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step} {loss.item().hex()} rank {rank}")
        time.sleep(pause_s)
    zo.close(model)
    if count is not None:
        say(f"operations {count()}")
    if dist.is_initialized():
        dist.destroy_process_group()


faulthandler.register(signal.SIGUSR2)
try:
    pause, publish, *_ = *sys.argv[4:], *("0", "")[len(sys.argv[4:]) :]
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(pause), publish)
except zo.ZeroOffloadError as error:
    say(f"{type(error).__name__} at {time.monotonic():.1f}: {error}")
    raise
