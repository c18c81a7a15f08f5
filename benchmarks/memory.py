"""Ways to take less memory, and their cost: activations, logits, states, whole models.

python benchmarks/memory.py [COMPARISON] [--quick] [--json FILE] ...
"""

from __future__ import annotations

from harness import command

COMPARISONS = {
    "activations": "kept, computed again, on disk: memory and time",
    "finetune": "zero-offload finetune of a 3B folder in a cgroup of 4 GiB, by LoRA and whole",
    "frozen": "LoRA of a 30B MoE model and of 8B in nf4 from the drive, in a cgroup of 4 GiB, killed and resumed",
    "inference": "tokens of a model on disk, against the disk's rate: time, bytes, memory",
    "logits": "chunked losses and tiled heads, against whole ones: memory and time",
    "small_memory": "1.5B and 3B models in a cgroup of 4 GiB, killed and resumed",
    "states": "losses with compact and bf16 states, against fp32 states, over seeds",
}

if __name__ == "__main__":
    raise SystemExit(command.run(__doc__, "memory", COMPARISONS))
