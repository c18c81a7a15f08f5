"""One training step, without a GPU: against other systems and against its own limits.

python benchmarks/train_step.py [COMPARISON] [--quick] [--json FILE] ...
"""

from __future__ import annotations

from harness import command

COMPARISONS = {
    "systems": "a step in memory and on disk, against plain torch, DeepSpeed, FSDP2 and the disk's rates",
    "commits": "steps with commits, against steps without",
    "overheads": "hooks, two ranks against FSDP2, the import",
    "stages": "what ranks hold and send at each ZeRO stage, against the plan",
    "peers": "steps of 2 and 4 ranks in memory, against FSDP2 with CPU offload and DDP",
    "machines": "steps of two machines with two ranks each, 1 ms apart, against one machine with four",
    "optimizers": "optimizers of others by zo.unitwise, against plain torch, zo.AdamW and the drive: time, memory",
    "losses": "losses of a script that was moved from DeepSpeed and FSDP2, against its own there",
    "predictions": "predicted step times, against measured ones",
}

if __name__ == "__main__":
    raise SystemExit(command.run(__doc__, "step", COMPARISONS))
