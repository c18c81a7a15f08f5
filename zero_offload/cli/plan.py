"""`zero-offload plan`: bytes per tier and kind of state, and whether they fit, before anything is allocated.

Owns the flags and the printed form; the numbers are `zero_offload.plan`'s. Calls: `add_parser`, then `run`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_offload.checkpoint.file_list import count_reusable
from zero_offload.config import OffloadConfig
from zero_offload.errors import CapacityError, ConfigError
from zero_offload.plan.memory import PLACED_KINDS, MemoryPlan, UnitNumel, estimate_memory, measure_units
from zero_offload.plan.partition import Partition
from zero_offload.plan.placement import assign_tiers, tier_budget, ways_to_fit
from zero_offload.plan.wear import TB, TBW_USUAL, Wear
from zero_offload.probe import probe_hardware
from zero_offload.types import HardwareProfile, Tier, format_bytes

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([MB])", re.IGNORECASE)
_MULTIPLE = {"m": 10**6, "b": 10**9}
BLOCKS_OF_A_COUNT = 32
"""A model known by its size alone is planned as this many equal units."""

_SETTINGS = {
    "stage": "ZeRO stage: 0, 1, 2 or 3",
    "params": "tier of the parameters: device, cpu, nvme or auto",
    "grads": "tier of the gradients",
    "optimizer": "tier of the optimizer states",
    "precision": "bf16, fp16 or fp32",
    "states": "optimizer states: fp32, bf16 or compact",
    "device_memory": "plan for a GPU with this memory, for example 24GiB (default: the CPU computes)",
    "cpu_memory": "CPU memory of one rank, for example 48GiB",
    "nvme_capacity": "disk space of one rank, for example 400GiB",
    "durability": "commit, process or scratch",
    "commit_every": "optimizer steps between generations, or auto",
}
_TIERS = ("params", "grads", "optimizer")


def steps_or_auto(text: str) -> int | str:
    """The text of --commit-every; `OffloadConfig` says what is wrong with it."""
    return int(text) if text.isdecimal() else text


def with_states(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which `states`, which has a flag of its own, is a part of `precision`."""
    merged = dict(settings)
    if (states := merged.pop("states", None)) is not None:
        precision = merged.get("precision", {})
        table = precision if isinstance(precision, Mapping) else {"compute": precision}
        merged["precision"] = {**table, "states": states}
    return merged


_TYPES: dict[str, Callable[[str], object]] = {"stage": int, "commit_every": steps_or_auto}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="will it fit: bytes per tier, SSD bytes per step",
        description="Plan a run without starting it. Sizes that are given replace what this machine has. "
        "Exit code 3 when the plan does not fit.",
    )
    parser.add_argument("--model", default="small", help="preset, or a number of parameters such as 8B or 350M")
    parser.add_argument("--nvme", nargs="+", metavar="DIR", help="directories of the NVMe tier")
    for name, text in _SETTINGS.items():
        flag = f"--{name.replace('_', '-')}" + ("-tier" if name in _TIERS else "")
        parser.add_argument(flag, dest=name, help=text, type=_TYPES.get(name, str))
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the model (default 1)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step (default 1)")
    parser.add_argument("--step-time", type=float, metavar="S", help="seconds of a step: TB written per day")
    parser.add_argument(
        "--tbw",
        type=float,
        default=TBW_USUAL,
        metavar="TB",
        help=f"terabytes that each drive is rated to be written (default {TBW_USUAL:g}: many consumer drives of 1 TB)",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name) for name in (*_SETTINGS, "nvme") if getattr(args, name) is not None}
    config = OffloadConfig.from_dict(with_states(given))
    if min(args.ranks, args.accumulate) < 1:
        raise ConfigError(f"--ranks {args.ranks} --accumulate {args.accumulate}: both must be 1 or more")
    if not (args.tbw > 0 and (args.step_time is None or args.step_time > 0)):
        raise ConfigError(f"--tbw {args.tbw:g} --step-time {args.step_time}: both must be more than 0")
    numels = find_units(args.model)
    partition = Partition(config.stage, args.ranks)
    units = measure_units(numels, config, partition, args.accumulate)
    hardware = _hardware_of_one_rank(config, args.ranks)
    placement = assign_tiers(units, config, tier_budget(config, hardware), partition)
    plan = estimate_memory(units, placement, config, partition)
    ways = [] if plan.fits else ways_to_fit(units, config, hardware, partition)
    num_parameters = sum(unit.trained for unit in numels)
    wear = plan.wear.of_one_drive(args.ranks, max(len(config.nvme_dirs), 1))
    if args.json:
        found = _as_json(plan, ways) | {"model": args.model, "parameters": num_parameters}
        print(json.dumps(found | {"wear": _wear_json(wear, args.tbw, args.step_time)}, indent=2))
    else:
        print(f"{args.model}: {num_parameters:,} parameters in {len(units)} units on {_count(args.ranks)}")
        print("bytes of one rank:")
        print("\n".join([plan.table(), *ways, *_wear_lines(wear, args.tbw, args.step_time)]))
    return 0 if plan.fits else CapacityError.exit_code


def find_units(model: str) -> list[UnitNumel]:
    """The units of a preset, or of a model of which only the size is known."""
    from zero_offload.recipes import gpt

    if model in gpt.PRESETS:
        return [UnitNumel(name, numel) for name, numel in gpt.unit_numels(gpt.PRESETS[model])]
    if match := _COUNT.fullmatch(model):
        block = int(float(match[1]) * _MULTIPLE[match[2].lower()]) // BLOCKS_OF_A_COUNT
        return [UnitNumel(f"block {i}", block) for i in range(BLOCKS_OF_A_COUNT)]
    raise ConfigError(f"--model {model!r} is no preset; use {', '.join(gpt.PRESETS)}, or a size such as 8B")


def _hardware_of_one_rank(config: OffloadConfig, num_ranks: int) -> HardwareProfile:
    """This machine's share of one rank; sizes the user gives stand in for it, larger or smaller."""
    machine = count_reusable(probe_hardware(config.nvme_dirs), config.nvme_dirs)
    cpu_memory = config.budget_bytes(Tier.CPU) or machine.cpu_memory_bytes // num_ranks
    return HardwareProfile(
        num_cores=max(machine.num_cores // num_ranks, 1),
        cpu_memory_bytes=cpu_memory,
        # Without a device's size the CPU computes, in the same memory.
        device_name="cpu" if config.device_memory is None else "device",
        device_memory_bytes=config.budget_bytes(Tier.DEVICE) or cpu_memory,
        nvme_free_bytes=config.budget_bytes(Tier.NVME) or machine.nvme_free_bytes // num_ranks,
    )


def _wear_lines(wear: Wear, tbw: float, step_s: float | None) -> list[str]:
    """What each drive is written, and how long it lasts; nothing where nothing is written."""
    if wear.bytes_per_step == 0:
        return []
    parts = []
    if wear.states_bytes:
        parts.append(f"{format_bytes(wear.states_bytes)} of states that rest on it")
    if wear.commit_bytes:
        how_often = f"of {format_bytes(wear.commit_bytes)} every {wear.commit_every} steps"
        if wear.is_bound:
            how_often = "at most: auto measures how often; every step is counted here"
        parts.append(f"{format_bytes(wear.commit_bytes_per_step)} of generations ({how_often})")
    lines = [f"each drive is written {format_bytes(wear.bytes_per_step)} per step: {', '.join(parts)}"]
    num_steps = wear.steps_to(tbw)
    if step_s is None:
        lines.append(
            f"that is {wear.bytes_per_step * 1000 / TB:.3g} TB per 1000 steps; {tbw:g} TBW last {num_steps:,} steps "
            "(--step-time S says how many days, --tbw another rating)"
        )
    else:
        lines.append(
            f"that is {wear.tb_per_day(step_s):.3g} TB per day at {step_s:g} s per step; {tbw:g} TBW last "
            f"{num_steps * step_s / 86400:.3g} days, {num_steps:,} steps (--tbw says another rating)"
        )
    return lines


def _wear_json(wear: Wear, tbw: float, step_s: float | None) -> dict[str, Any]:
    """Of each drive."""
    written = wear.bytes_per_step > 0
    num_steps = wear.steps_to(tbw) if written else None
    return {
        "states_bytes_per_step": int(wear.states_bytes),
        "commit_bytes_per_step": int(wear.commit_bytes_per_step),
        "is_upper_bound": wear.is_bound,
        "tbw": tbw,
        "steps_to_tbw": num_steps,
        "tb_per_day": None if step_s is None else wear.tb_per_day(step_s),
        "days_to_tbw": None if step_s is None or num_steps is None else num_steps * step_s / 86400,
    }


def _count(num_ranks: int) -> str:
    return "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"


def _as_json(plan: MemoryPlan, ways: Sequence[str]) -> dict[str, Any]:
    tiers = {}
    for tier in Tier:
        kinds = {kind.value: plan.rest_bytes[tier, kind] for kind in PLACED_KINDS}
        tiers[tier.value] = kinds | {
            "in_flight": plan.staging_bytes[tier],
            "total": plan.used_bytes(tier),
            "available": plan.budget.of(tier),
        }
    return {
        "fits": plan.fits,
        "reasons": plan.reasons,
        "suggestions": list(ways),
        "bytes": tiers,
        "nvme_written_bytes_per_step": plan.nvme_written_bytes_per_step,
    }
