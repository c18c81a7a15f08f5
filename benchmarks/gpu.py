"""What offloading costs on a GPU: correctness, rates, and training steps against the same steps with no offload.

Each section is a process of its own with a time limit, so that none takes the figures of another with it; the JSON file
is written after each. The sections come in groups of eight minutes at most: a machine may be lent for ten at a time,
and what a section that was ended has pinned, up to 100 GiB, must be freed within them. Build first, in a command of its
own:

    python3 setup.py -q build_ext --inplace
    PYTHONPATH=. python3 benchmarks/gpu.py [--group 1|2|3|4 | --only NAME,NAME] [--nvme DIR] [--json FILE] [--plan]
                                           [--rehearse]

* correctness: tests/gpu; losses of a small model with every placement `==` those of a plain one on the GPU.
* bandwidth: PCIe, pinning, the update on the host, the disk, the GPU.
* activations: 2B exact in CPU memory, what autograd saves kept on the GPU and in CPU memory: time and GPU memory.
* 8b-cpu: 8B exact in CPU memory. 13b-24g: 13B parameters in compact states within 24 GB of GPU memory and 100 GiB of
  the host's.
* 2b-disk: 2B exact on disk, with generations (two slots). 8b-disk: 8B in compact states on disk (`scratch`).
* deepspeed: 2B exact in CPU memory, beside DeepSpeed ZeRO-3 with CPU offload, where that is installed.

A training section has tokens/s and TFLOP/s (each multiplication of the model counted once, those of recompute not) at
4k to 32k tokens a step, in sequences of 4k. The bar: a step is <= 1.05x the largest of the same step with no offload (a
few layers in the GPU's memory, passed through as often as the model has layers, and the update of all by torch's fused
AdamW with states in bf16), what PCIe takes for the parameters twice and the gradients once, the host's update, and the
disk's bytes, all at rates of the same process. It prints the tokens per step from which on offloading costs nothing,
measured and by those rates.

--quick takes the rates only; --rehearse runs everything on the CPU with tiny sizes. Wants 128 GiB of memory and 64 GiB
of disk: where less memory is free than a plan says, its section is left out and says so; where less disk is, models on
it have fewer layers. Ends with 3 where there is no GPU, no native library, or no DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _gpu_activations import activations
from _gpu_machine import Machine
from _gpu_sections import bandwidth, correctness, deepspeed
from _gpu_training import JOBS, Clock, Report, train
from _rows import Row, missing, row, show
from _train_systems import INSTALL

from zero_offload.kernels.choice import find

REHEARSAL_LIMIT_S = 240


@dataclass(frozen=True)
class Section:
    group: int
    limit_s: int


SECTIONS = {
    "correctness": Section(1, 270),
    "bandwidth": Section(1, 60),
    "activations": Section(1, 150),
    "8b-cpu": Section(2, 220),
    "13b-24g": Section(2, 260),
    "2b-disk": Section(3, 190),
    "8b-disk": Section(3, 290),
    "deepspeed": Section(4, 200),
}
GROUPS = sorted({section.group for section in SECTIONS.values()})


def limit_of(name: str, machine: Machine) -> float:
    return machine.size(SECTIONS[name].limit_s, REHEARSAL_LIMIT_S)


def run_section(name: str, machine: Machine, directory: Path, limit_s: float, report: Report) -> Iterator[Row]:
    """In the section's own process; a row as soon as it is known."""
    if name in JOBS:
        return train(JOBS[name], machine, directory, Clock(time.perf_counter() + limit_s), report)
    others: dict[str, Callable[[Machine, Path, float, Report], Iterator[Row]]] = {
        "correctness": correctness,
        "bandwidth": bandwidth,
        "activations": activations,
        "deepspeed": deepspeed,
    }
    return others[name](machine, directory, limit_s, report)


def serve(name: str, machine: Machine, directory: Path, limit_s: float, result: Path) -> None:
    """Writes what is found as it is found."""
    found: dict[str, Any] = {"found": {}, "rows": []}

    def write() -> None:
        unfinished = result.with_suffix(".part")
        unfinished.write_text(json.dumps(found, indent=1))
        unfinished.replace(result)

    def report(what: str, figures: Any) -> None:
        found["found"][what] = figures
        print(f"  {what}: {_short(figures)}", flush=True)
        write()

    machine.use_all_cores()
    report("machine", machine.describe())
    for each in run_section(name, machine, directory, limit_s, report):
        found["rows"].append(each)
        write()


def _short(figures: Any) -> str:
    if not isinstance(figures, dict):
        return str(figures)
    plain = {key: value for key, value in figures.items() if isinstance(value, int | float | str)}
    shown = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in plain.items())
    return ", ".join(text for text in shown if len(text) < 300)


def run_apart(name: str, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One section in a process of its own, ended with all that it started when its time is up."""
    limit_s = limit_of(name, Machine(args.rehearse))
    result = directory / "result.json"
    command = [sys.executable, __file__, "--section", name, "--result", str(result), "--nvme", str(directory)]
    environment = dict(os.environ)
    if args.rehearse:
        command.append("--rehearse")
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # Products in an order that does not change, where a section asks for it.
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    began = time.perf_counter()
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        status: int | str = child.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        status = f"ended after its {limit_s:.0f} s"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    told = json.loads(result.read_text()) if result.exists() else {"found": {}, "rows": []}
    return {"status": status, "seconds": time.perf_counter() - began, **told}


def show_section(name: str, section: dict[str, Any]) -> None:
    status = "" if section["status"] == 0 else f"; {section['status']}"
    print(f"{name}: {section['seconds']:.0f} s{status}", flush=True)


def rows_of(name: str, section: dict[str, Any]) -> list[Row]:
    rows: list[Row] = [each | {"name": f"{name}: {each['name']}"} for each in section["rows"]]
    if section["status"] != 0:
        rows.append(row(f"{name}: ended early", 1, "", "one; none is wanted", 1, 0.0))
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"sections, with commas: {', '.join(SECTIONS)}")
    parser.add_argument("--group", type=int, choices=GROUPS, help="the sections of one group")
    parser.add_argument("--quick", action="store_true", help="rates only; within three minutes")
    parser.add_argument("--plan", action="store_true", help="print what would run, and how long at most")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--nvme", type=Path, help="directory on the disk to use (default: a new one here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, figures and rows here")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    chosen = args.only.split(",") if args.only else ["bandwidth"] if args.quick else [*SECTIONS]
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    args.sections = [name for name in chosen if args.group in (None, SECTIONS[name].group)]
    return args


def show_plan(names: Sequence[str]) -> None:
    for name in names:
        print(f"  {name:<12} group {SECTIONS[name].group}, {SECTIONS[name].limit_s:.0f} s at most")
    print(f"  in all {sum(SECTIONS[name].limit_s for name in names):.0f} s at most", flush=True)


def main() -> int:
    args = parse()
    machine = Machine(args.rehearse)
    if args.section:
        serve(args.section, machine, args.nvme, limit_of(args.section, machine), args.result)
        return 0
    show_plan(args.sections)
    if args.plan:
        return 0
    if not args.rehearse and (lacking := _lacking()) is not None:
        what, remedy = lacking
        _write(args.json, {}, {}, [missing(name, 0.0, "s", what, 1.05) for name in args.sections])
        print(f"{what}; {remedy}")
        return 3
    sections: dict[str, dict[str, Any]] = {}
    rows: list[Row] = []
    for name in args.sections:
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory(prefix="gpu_", dir=args.nvme or Path.cwd()) as directory:
            sections[name] = run_apart(name, args, Path(directory))
        show_section(name, sections[name])
        rows += rows_of(name, sections[name])
        _write(args.json, sections[name]["found"].get("machine", {}), sections, rows)
    show(rows)
    if any(each["theirs"] is None for each in rows):
        print(f"a peer is missing: {INSTALL.partition(', then')[0]}")
        return 3
    return 0


def _lacking() -> tuple[str, str] | None:
    """What is not here without which there is nothing to measure, and what to do."""
    if not torch.cuda.is_available():
        return "no CUDA device here", "--rehearse runs everything on the CPU, with tiny sizes"
    if find().name != "native":
        return "no native library here", "python setup.py -q build_ext --inplace builds it"
    return None


def _write(path: Path | None, machine: dict[str, Any], sections: dict[str, Any], rows: list[Row]) -> None:
    if path is not None:
        path.write_text(json.dumps({"machine": machine, "sections": sections, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
