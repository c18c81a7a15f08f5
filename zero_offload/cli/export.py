"""`zero-offload export RUN OUT`: the model of a run or checkpoint as a folder that `from_pretrained` loads, without the
script that trained it.

Owns the flags and what is printed.
"""

from __future__ import annotations

import argparse
import json

from zero_offload.base.types import parse_bytes, user_path
from zero_offload.integrations.pretrained import EXPORT_DTYPES
from zero_offload.runs.export import export_run


def run(args: argparse.Namespace) -> int:
    run_dir, out = user_path(args.run_dir), user_path(args.out)
    dtype = None if args.dtype is None else EXPORT_DTYPES[args.dtype]
    done = export_run(run_dir, out, args.generation, dtype, args.adapters, parse_bytes(args.max_shard_size))
    generation = done.generation
    if args.json:
        words = {"out": str(out), "number": generation.number, "step": generation.step, "tensors": done.num_tensors}
        files = sorted(path.name for path in out.iterdir())
        print(json.dumps(words | {"in_use": done.user, "files": files, "notes": done.notes}))
        return 0
    if done.user:
        print(f"{run_dir} is in use by {done.user}: the run is alive, and was read beside it")
    print(f"{out}: {done.num_tensors} tensors of {generation}")
    for note in done.notes:
        print(f"note: {note}")
    return 0
