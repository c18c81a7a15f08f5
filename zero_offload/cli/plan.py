"""`zero-offload plan`: bytes per tier and kind of state, whether they fit and how fast a step is, before it is tried.

Owns the flags; what they mean is `request.py`'s, the printed form `text.py`'s. Calls: `add_parser`, then `run`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.types import UpdateOverlap
from zero_offload.cli import fit
from zero_offload.cli.flags import flag_values, steps_or_duration, with_states
from zero_offload.finetune.fit import measure
from zero_offload.finetune.fit.figures import ModelPlan
from zero_offload.finetune.fit.request import (
    SEQUENCE_USUAL,
    GpuHere,
    Request,
    by_wear,
    find_gpu_here,
    find_work,
    offers,
    plan_request,
    suggestions_of,
)
from zero_offload.finetune.fit.text import as_json, as_text
from zero_offload.hardware.machines import GPUS, Drives, find_gpu, parse_drives
from zero_offload.hardware.probe import resident_bytes
from zero_offload.plan.forecast import forecast
from zero_offload.plan.step_time import TOKENS_UNKNOWN, StepBatch
from zero_offload.plan.wear import TBW_USUAL

_SETTINGS = {
    "stage": "ZeRO stage: 0, 1, 2 or 3",
    "params": "tier of the parameters: device, cpu, nvme or auto; where --gpu is given and no tier, all three are auto",
    "grads": "tier of the gradients",
    "optimizer": "tier of the optimizer states",
    "activations": "tier of what forward keeps for backward",
    "precision": "bf16, fp16 or fp32",
    "states": "optimizer states: fp32, bf16 or compact",
    "device_memory": "plan for a GPU with this memory, such as 24GiB (default: the GPU that is here, else the CPU)",
    "cpu_memory": "CPU memory of one rank, for example 48GiB",
    "nvme_capacity": "disk space of one rank, for example 400GiB",
    "durability": "commit, process or scratch",
    "commit_every": "between generations: optimizer steps, a duration such as 2min, or auto; where not given, as many "
    "steps as spare the drives",
}


_TYPES: dict[str, Callable[[str], object]] = {"stage": int, "commit_every": steps_or_duration}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="will it fit, and how fast: bytes per tier, seconds and SSD bytes per step",
        description="Plan a run without starting it, on this machine or on another. Of a Hugging Face folder it is a "
        "run of `finetune`, with its flags and defaults, and the command is printed. Sizes that are given replace what "
        "this machine has. For a model by its name, tiers that are not given are cpu, those of zo.OffloadConfig. "
        "`train` puts parameters and optimizer states on nvme: give it the same flags. Exit code 3 when the plan does "
        "not fit.",
    )
    # The model, and where its states rest.
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="a Hugging Face folder, or an adapter's")
    parser.add_argument(
        "--model",
        help="preset, a known model such as llama-8b, a number of parameters such as 8B, or a folder (default small)",
    )
    parser.add_argument(
        "--nvme",
        nargs="+",
        metavar="DIR",
        help="directories of the NVMe tier; or drives that are not here, such as 2x7GB/s, or 7GB/s/5GB/s (read/write)",
    )
    defaults = flag_values(OffloadConfig())
    for name, text in _SETTINGS.items():
        if defaults[name] is not None and name != "commit_every":
            text = f"{text} (default {defaults[name]})"
        parser.add_argument(fit.flag_of(name), dest=name, help=text, type=_TYPES.get(name, str))
    # The machine.
    parser.add_argument("--gpu", help=f"plan for such GPUs, one for each rank: {', '.join(GPUS)}")
    parser.add_argument("--ram", metavar="SIZE", help="memory of each machine, for example 64GiB, for all of its ranks")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the model (default 1)")
    parser.add_argument("--nodes", type=int, default=1, help="machines that the ranks are on (default 1)")
    parser.add_argument(
        "--network",
        metavar="RATE",
        help="of each machine, per direction, such as 10Gbit/s (default: that of the GPU's host)",
    )
    parser.add_argument(
        "--hybrid",
        action="store_true",
        help="ranks of a machine divide the states, and all machines hold the same: a mesh of (replicate, shard)",
    )
    # The step.
    parser.add_argument("--tokens", type=int, help="tokens of one rank in a step (default 2048)")
    parser.add_argument("--sequence", type=int, help="tokens that attend to each other (default 4096, or all)")
    parser.add_argument("--accumulate", type=int, help="micro-batches per step (default 1; of a folder, as finetune)")
    parser.add_argument(
        "--loop",
        action="store_true",
        default=None,
        help="micro-batches one after the other; without it as zo.accumulate has them",
    )
    parser.add_argument(
        "--recompute", choices=("block", "none"), help="what backward runs again (default: as the model)"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine, its GPU if it has one, and --nvme, and remember it",
    )
    parser.add_argument(
        "--step-time", type=float, metavar="S", help="seconds of a step, in place of the predicted ones"
    )
    parser.add_argument(
        "--tbw",
        type=float,
        default=TBW_USUAL,
        metavar="TB",
        help=f"terabytes that each drive is rated to be written (default {TBW_USUAL:g}: many consumer drives of 1 TB)",
    )
    # Flags of a run of `finetune`, and the form of the output.
    fit.add_flags(parser.add_argument_group("a folder, as finetune has them"))
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    folder = fit.folder_of(args)
    gpu_here = find_gpu_here() if args.gpu is None else None
    _check(args, has_gpu=gpu_here is not None)
    drives = parse_drives(args.nvme or [])
    if folder is not None:
        if args.hybrid:
            raise ConfigError(
                f"--hybrid {folder}: finetune divides states over all ranks. A program gives zo.offload a mesh of "
                "(replicate, shard); plan it by --model NAME or a number of parameters such as --model 8B"
            )
        return fit.run(args, folder, drives, with_states(_given(args, drives)))
    args.model, args.accumulate = args.folder or args.model or "small", args.accumulate or 1
    config = _config(args, drives)
    request = _request(args, config, drives, gpu_here)
    if args.measure:
        measure.measure(config, () if drives else config.nvme_dirs)
    recommended = by_wear(request, args.tbw, args.step_time)
    if args.commit_every is None and recommended is not None:
        request = replace(request, config=replace(request.config, commit_every=recommended))
    planned = plan_request(request)
    found = None
    more = []
    if planned.memory.fits:
        found = forecast(planned.workload, planned.placement, planned.machine)
        more = list(offers(request, planned, found.prediction))
    plan = ModelPlan(
        request, planned, found, suggestions_of(request, planned), more, args.tbw, args.step_time, recommended
    )
    print(json.dumps(as_json(plan), indent=2) if args.json else as_text(plan))
    return 0 if planned.memory.fits else CapacityError.exit_code


def _check(args: argparse.Namespace, *, has_gpu: bool) -> None:
    counts = {name: getattr(args, name) for name in ("ranks", "accumulate", "tokens", "sequence")}
    counts["lora"] = args.finetune_lora or None  # 0 is finetune's word for none
    if wrong := [f"--{name} {value}" for name, value in counts.items() if value is not None and value < 1]:
        raise ConfigError(f"{' '.join(wrong)}: give 1 or more")
    if not (args.tbw > 0 and (args.step_time is None or args.step_time > 0)):
        raise ConfigError(f"--tbw {args.tbw:g} --step-time {args.step_time}: both must be more than 0")
    if args.nodes < 1 or args.ranks % args.nodes:
        raise ConfigError(f"--ranks {args.ranks} --nodes {args.nodes}: give each machine as many ranks as the others")
    if args.nodes == 1 and (args.network is not None or args.hybrid):
        flag = "--hybrid" if args.hybrid else f"--network {args.network}"
        raise ConfigError(f"{flag} is for several machines: say how many by --nodes, or leave it out")
    if args.ram is not None and args.cpu_memory is not None:
        raise ConfigError("--ram is a machine's memory and --cpu-memory one rank's: give one of them")
    if args.measure and (args.gpu is not None or (args.device_memory is not None and not has_gpu)):
        other = f"--gpu {args.gpu}" if args.gpu is not None else f"--device-memory {args.device_memory}"
        raise ConfigError(
            f"--measure takes the rates of this machine and its drives, and {other} plans for a GPU that is not "
            "measured. Leave one of them out: what was measured before is remembered"
        )


def _given(args: argparse.Namespace, drives: Drives | None) -> dict[str, Any]:
    """Settings of `OffloadConfig` that the user typed."""
    given = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    if drives is not None:
        given["nvme"] = [f"drive {index + 1}" for index in range(drives.count)]
    elif args.nvme is not None:
        given["nvme"] = args.nvme
    return given


def _config(args: argparse.Namespace, drives: Drives | None) -> OffloadConfig:
    given = _given(args, drives)
    if args.gpu is not None and not any(name in given for name in ("params", "grads", "optimizer")):
        given |= dict.fromkeys(("params", "grads", "optimizer"), "auto")
    return OffloadConfig.from_dict(with_states(given))


def _request(
    args: argparse.Namespace, config: OffloadConfig, drives: Drives | None, gpu_here: GpuHere | None
) -> Request:
    lora = args.finetune_lora or 0
    work, vocab, recompute = find_work(args.model, lora)
    if args.recompute is not None:
        recompute = args.recompute == "block"
    tokens = args.tokens or TOKENS_UNKNOWN
    micro = max(tokens // args.accumulate, 1)
    sequence = min(args.sequence or SEQUENCE_USUAL, micro)
    # As `train` does it, unless a loop is asked for.
    by_unit = args.accumulate > 1 and recompute and not args.loop and config.overlap != UpdateOverlap.BACKWARD
    batch = StepBatch(micro, args.accumulate, sequence, recompute, by_unit)
    cluster, gpu = fit.cluster_of(args), None if args.gpu is None else find_gpu(args.gpu)[0]
    if cluster.is_hybrid and config.stage == 0:
        raise ConfigError("--hybrid --stage 0: every rank has all states at stage 0; leave --hybrid out")
    gpu_here = None if gpu else gpu_here
    program = resident_bytes()[0] if args.ram is None else 0
    found = Request(args.model, work, vocab, config, cluster, batch, gpu, gpu_here, drives, lora, program)
    return found.with_budgets(args.ram)
