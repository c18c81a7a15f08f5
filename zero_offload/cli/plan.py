"""`zero-offload plan`: bytes per tier and kind of state, whether they fit and how fast a step is, before it is tried.

Owns the flags; what they mean is `request.py`'s, the printed form `text.py`'s. Calls: `add_parser`, then `run`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.types import UpdateOverlap
from zero_offload.cli import fit
from zero_offload.cli.flags import with_states
from zero_offload.cli.parsers import PLAN_SETTINGS
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
from zero_offload.hardware.machines import Drives, find_gpu, parse_drives
from zero_offload.hardware.probe import resident_bytes
from zero_offload.plan.forecast import forecast
from zero_offload.plan.step_time import TOKENS_UNKNOWN, StepBatch


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
    given = {name: getattr(args, name) for name in PLAN_SETTINGS if getattr(args, name) is not None}
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
