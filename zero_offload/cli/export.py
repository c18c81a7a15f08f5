"""`zero-offload export RUN OUT`: the model of a run or checkpoint as a folder that `from_pretrained` loads, without the
script that trained it.

Owns the flags and what is printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from zero_offload.base.types import parse_bytes, user_path
from zero_offload.integrations.pretrained import ADAPTERS, EXPORT_DTYPES
from zero_offload.runs.export import export_run
from zero_offload.runs.locate import RUN_HELP


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "export",
        help="a Hugging Face folder of a run's model",
        description="Write the model of a run's newest generation, or of a checkpoint, as a folder that "
        "from_pretrained loads. It has weights as safetensors, config, generation config, tokenizer and card. Of a "
        "model with adapters of peft the adapters, or the base with them merged. Non-persistent buffers are in no "
        "generation.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make; it must not exist, or be empty")
    parser.add_argument("--generation", type=int, metavar="N", help="this one (default: the newest)")
    parser.add_argument(
        "--dtype", choices=EXPORT_DTYPES, help="round the fp32 masters to this (default: what forward computes with)"
    )
    parser.add_argument(
        "--adapters", choices=ADAPTERS, help="of a model with adapters: their folder, or the base with them (separate)"
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default 5GB)")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


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
