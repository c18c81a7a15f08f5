"""loop.py DRIVE STEPS CODE GRACE: a loop around `zo.steps` on this machine's own drive; prints what each step has seen.

A step whose number is in `DRIVE/slow` takes a minute.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import zero_offload as zo
from tests.helpers.loops import BATCH, Samples
from tests.helpers.models import TinyLM, build


def main(drive: str, num_steps: int, exit_code: int, grace: str) -> None:
    torch.set_num_threads(1)
    zo.join()
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=Path(drive, "run"), existing="resume"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    sampler = torch.utils.data.DistributedSampler(Samples(""))
    loader = torch.utils.data.DataLoader(Samples(""), batch_size=BATCH, sampler=sampler, num_workers=1)
    loop = zo.steps(model, optimizer, num_steps, loader=loader, scheduler=scheduler, exit_code=exit_code, grace=grace)
    slow = Path(drive, "slow")
    for step, batch in loop:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        # One write, or lines of two ranks mix.
        sys.stdout.write(f"step {step} {batch[:, 0].tolist()} {loss.item().hex()}\n")
        if slow.exists() and step >= int(slow.read_text()):
            print("slow")
            time.sleep(60)
    zo.close(model)
    dist.destroy_process_group()


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
