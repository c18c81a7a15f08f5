"""Update kernels and the file engine, against peers and against what memory, cores and drive allow.

python benchmarks/limits.py [COMPARISON] [--quick] [--json FILE] ...
"""

from __future__ import annotations

from harness import command

COMPARISONS = {
    "kernels": "AdamW and the other kernels, against torch, DeepSpeed, streaming and arithmetic",
    "ranks": "Python's cost of a step against the number of ranks, to 16",
    "files": "the file engine, the update pass and stripes, against fio and DeepSpeed",
}

if __name__ == "__main__":
    raise SystemExit(command.run(__doc__, "limits", COMPARISONS))
