"""`zero-offload export RUN OUT`: the weights of a run or checkpoint as a Hugging Face folder, without its model's code.

Owns the flags, and which file tells what the model is. Changes nothing in RUN, which may be alive.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from zero_offload.base.types import parse_bytes
from zero_offload.checkpoint.format import Generation
from zero_offload.checkpoint.hf_export import export_saved
from zero_offload.checkpoint.saved import SavedGeneration, read_generation
from zero_offload.cli.saved import RUN_HELP, alone, described, find_home
from zero_offload.integrations.pretrained import EXPORT_DTYPES
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engines import open_engine

CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    generation: Generation
    user: str
    """The process that had the run meanwhile; empty without one."""
    num_tensors: int


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "export",
        help="a Hugging Face folder of a run's weights",
        description="Write the parameters of the newest generation of a run, or of a checkpoint, as safetensors files. "
        "Buffers are in no generation and so not in the folder. Runs of `train` get their model's sizes as "
        f"{CONFIG_NAME} too.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make; it must not exist, or be empty")
    parser.add_argument("--generation", type=int, metavar="N", help="this one (default: the newest)")
    parser.add_argument(
        "--dtype", choices=EXPORT_DTYPES, help="round the fp32 masters to this (default: what forward computes with)"
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default 5GB)")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    run_dir, out = args.run_dir.expanduser(), args.out.expanduser()
    max_shard_bytes = parse_bytes(args.max_shard_size)
    sizes = described(run_dir).get("gpt")
    texts = {CONFIG_NAME: json.dumps(sizes, indent=2) + "\n"} if isinstance(sizes, dict) else {}
    dtype = None if args.dtype is None else EXPORT_DTYPES[args.dtype]

    def write(generation: Generation, directories: list[RunDirectory], cleanup: contextlib.ExitStack) -> Exported:
        engine = open_engine(num_drives=len(directories))
        cleanup.callback(engine.close)
        saved = SavedGeneration(generation, directories, engine)
        cleanup.callback(saved.close)
        count = export_saved(saved, out, dtype, max_shard_bytes, texts)
        return Exported(generation, directories[0].user, count)

    done = read_generation(find_home(run_dir), alone(), args.generation, write)
    generation = done.generation
    if args.json:
        words = {"out": str(out), "number": generation.number, "step": generation.step, "tensors": done.num_tensors}
        print(json.dumps(words | {"in_use": done.user, "files": sorted(path.name for path in out.iterdir())}))
    else:
        if done.user:
            print(f"{run_dir} is in use by {done.user}: the run is alive, and was read beside it")
        print(f"{out}: {done.num_tensors} tensors of {generation}")
    return 0
