"""The cost of offloading on a GPU, within the half hour that one may be lent for.

    python3 setup.py -q build_ext --inplace                       # once, unless zero_offload/_native.so is there
    PYTHONPATH=. python3 benchmarks/gpu.py --until 9 --json gpu.json

Sections run in order of worth (--list), each in a process of its own, which is killed when its time is up. FILE has
every figure as soon as it is measured: the same command again goes on with the sections that it does not have. With
--until MINUTES no section starts that is not expected to end by then, so three commands of ten minutes make a half
hour. A section is expected to take what it took in the newest record of benchmarks/results and a third more; without
one, its limit. At MINUTES it is killed. A shorter section that fits runs in its place, and the end says what is left
for a later loan. A part that fails has its traceback in FILE, and the next one runs.
A section that --until cut runs again.

Needs 128 GiB of memory and 64 GiB of disk for all of it. Where the host has less memory than a section plans, the
section says so and is skipped. Where the disk has less, its model has fewer layers. `--rehearse` runs every line of
every section at toy size, without a GPU; its figures are worth nothing, and its file says so.

DeepSpeed runs where it can be imported. For a machine without network, make the wheels on another one with the same
version of Python, and torch:

    DS_BUILD_OPS=0 pip wheel --no-deps --no-build-isolation -w wheels deepspeed==0.19.8 hjson
    pip download --only-binary=:all: -d wheels einops msgpack ninja packaging py-cpuinfo pydantic tqdm

Carry `wheels` (6 MB), `pip install --no-index --no-deps --target site wheels/*.whl` there, and run with
PYTHONPATH=.:site. It compiles its CPU kernel at the first start, with g++ and ninja.

Ends with 3 where there is no GPU or no native library, and where a peer's rows are empty.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness.gpu.machine import commit, gpu_name, races, this_machine
from harness.gpu.record import Record, Skip
from harness.gpu.rows import rows_of
from harness.gpu.sections import SECTIONS
from harness.gpu.training import Bench
from harness.rows import Row, show

from zero_offload.hardware import native

RESULTS = Path(__file__).parent / "results"
REHEARSAL_LIMIT_S = 300
ENDING_SHARE = 0.1
"""Of a section's time: it measures no longer, since 100 GiB that are pinned take a while to go."""
STDERR = 2
STDERR_LINES = 200
"""Lines that are kept of a failed section, the last of all."""
EXPECTED_SHARE = 4 / 3
"""Of the seconds in the record: machines differ."""
MACHINE = "machine"
"""Of the figures: what each section says of where it ran."""


def serve(name: str, rehearses: bool, directory: Path, seconds: float, result: Path) -> None:
    """In the section's own process: what it starts is in its session, and what it complains of in a file."""
    os.setsid()
    with result.with_suffix(".stderr").open("w") as stderr:
        os.dup2(stderr.fileno(), STDERR)
    faulthandler.enable(STDERR)
    # Products in an order that does not change, where a section asks for it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    record = Record(result, time.perf_counter() + (1 - ENDING_SHARE) * seconds)
    machine = this_machine(rehearses)
    machine.use_all_cores()
    record.put(MACHINE, {"hardware": machine.hardware(directory), "versions": machine.versions()})
    try:
        SECTIONS[name].run(Bench(machine, record, directory))
        if found := races(machine):
            raise AssertionError(f"{len(found)} races, the first {found[0]}")
    except Skip as reason:
        record.put("all", {"skipped": str(reason)})
    except Exception:
        record.put("all", {"error": traceback.format_exc()})
        sys.exit(1)


def run_apart(name: str, args: argparse.Namespace, directory: Path, left_s: float) -> dict[str, Any]:
    """One section in a process of its own, killed with all that it started when its time, or `left_s`, is up."""
    full_s = REHEARSAL_LIMIT_S if args.rehearse else SECTIONS[name].limit_s
    limit_s = min(left_s, full_s)
    result, states = directory / "result.json", directory / "states"
    states.mkdir()
    # CUDA bears no fork. Without it one saves the imports, most of a rehearsal's time.
    if args.rehearse:
        importlib.import_module("torch._dynamo")  # as the first optimizer of each section would
    context: Any = multiprocessing.get_context("fork" if args.rehearse else "spawn")
    began = time.perf_counter()
    child = context.Process(target=serve, args=(name, args.rehearse, states, limit_s, result))
    child.start()
    try:
        child.join(limit_s)
        status = {0: "ok", None: "killed"}.get(child.exitcode, "failed")
    finally:
        # Processes that the section started may have outlived it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
    figures = json.loads(result.read_text()) if result.exists() else {}
    if "skipped" in figures.get("all", {}):
        status = "skipped"
    found = {"status": status, "exit_code": child.exitcode, "seconds": time.perf_counter() - began}
    found |= {"is_cut": status == "killed" and limit_s < full_s}  # the next command takes it again
    found |= {"limit_s": limit_s, "date": _now(), "commit": args.commit, "figures": figures}
    stderr = result.with_suffix(".stderr")
    if status in ("failed", "killed") and stderr.exists():
        found["stderr"] = stderr.read_text(errors="replace").splitlines()[-STDERR_LINES:]
        print(*found["stderr"], sep="\n", flush=True)
    return found


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", metavar="A,B", help=f"only these, in this order: {', '.join(SECTIONS)}")
    parser.add_argument(
        "--until", type=float, metavar="MINUTES", help="end by then; start no section that is expected to take longer"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the sections, and the seconds that each took and may take"
    )
    parser.add_argument("--again", action="store_true", help="run sections that FILE has already")
    parser.add_argument("--json", type=Path, metavar="FILE", help="figures and rows; goes on where it exists")
    parser.add_argument("--nvme", type=Path, metavar="DIR", help="where the disk to use is (default: here)")
    parser.add_argument("--commit", help="of the code, where git cannot tell it")
    parser.add_argument("--quick", action="store_true", help="smoke and rates: within two minutes")
    parser.add_argument("--rehearse", action="store_true", help="every line at toy size, without a GPU")
    args = parser.parse_args(arguments)
    args.sections = args.sections.split(",") if args.sections else ["smoke", "rates"] if args.quick else [*SECTIONS]
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if args.rehearse and args.json is not None and args.json.resolve().is_relative_to(RESULTS):
        parser.error(f"{args.json} is among results, and a rehearsal has none; name another file")
    args.commit = args.commit or commit()
    return args


def open_document(args: argparse.Namespace) -> dict[str, Any]:
    """The file that `--json` names, to go on with, or a new document. Raises SystemExit for one of another machine or
    kind.
    """
    document: dict[str, Any] = {"rehearsal": args.rehearse, "gpu": None if args.rehearse else gpu_name()}
    if args.json is not None and args.json.exists():
        found: dict[str, Any] = json.loads(args.json.read_text())
        for what in ("rehearsal", "gpu"):
            if found.get(what) != document[what]:
                raise SystemExit(
                    f"{args.json} has {what}={found.get(what)}, and this run {document[what]}; name another --json file"
                )
        return found
    return document | {
        "date": _now(),
        "commit": args.commit,
        "hardware": {},
        "versions": {},
        "sections": {},
        "rows": [],
    }


def write(document: dict[str, Any], path: Path | None) -> None:
    rows = rows_of(document["sections"])
    document["rows"] = [_rehearsed(each) for each in rows] if document["rehearsal"] else rows
    if path is not None:
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
        unfinished.replace(path)


def _rehearsed(each: Row) -> Row:
    """Marked, and graded only where it counts mistakes: seconds and bytes of toy sizes say nothing."""
    return each | {"name": f"rehearsal, {each['name']}", "ok": each["ok"] if each["reach"] == 0.0 else None}


def recorded_s() -> dict[str, float]:
    """Seconds that sections took in the newest record of a GPU; of those that ended by themselves."""
    records = sorted(RESULTS.glob("*-gpu-*.json"))
    sections = json.loads(records[-1].read_text())["sections"] if records else {}
    return {name: each["seconds"] for name, each in sections.items() if each["status"] in ("ok", "failed")}


def expected_s(names: Sequence[str]) -> dict[str, float]:
    """Seconds that sections may take, by the newest record where it has them."""
    recorded = recorded_s()
    return {name: min(SECTIONS[name].limit_s, EXPECTED_SHARE * recorded.get(name, float("inf"))) for name in names}


def show_list(names: Sequence[str]) -> None:
    recorded, expected = recorded_s(), expected_s(names)
    for name in names:
        took = f"took {recorded[name]:3.0f} s," if name in recorded else "not recorded,"
        print(f"  {name:<13} {took:<13} {SECTIONS[name].limit_s:4d} s at most  {SECTIONS[name].what}")
    at_most = sum(SECTIONS[name].limit_s for name in names)
    print(f"  in all        {sum(expected.values()):.0f} s expected, {at_most} s at most", flush=True)


def main() -> int:
    started, args = time.perf_counter(), parse()
    if args.list:
        show_list(args.sections)
        return 0
    if not args.rehearse and (lack := _lacking()):
        print(lack)
        return 3
    document = open_document(args)
    expected, left = expected_s(args.sections), list[str]()
    for name in args.sections:
        known = document["sections"].get(name)
        if known is not None and not known.get("is_cut") and not args.again:
            print(f"{name}: in {args.json} already")
            continue
        left_s = float("inf") if args.until is None else 60 * args.until - (time.perf_counter() - started)
        if expected[name] > left_s:
            print(f"{name}: is expected to take {expected[name]:.0f} s, and {left_s:.0f} s are left")
            left.append(name)
            continue
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory(prefix="gpu_", dir=args.nvme or Path.cwd()) as directory:
            section = run_apart(name, args, Path(directory), left_s)
        document |= section["figures"].pop(MACHINE, {})
        document["sections"][name] = section
        write(document, args.json)
        left += [name] * section["is_cut"]
        print(f"{name}: {section['status']}, {section['seconds']:.0f} s", flush=True)
    show(document["rows"])
    if left:
        print(f"left for a later loan, {sum(expected[name] for name in left):.0f} s: {', '.join(left)}")
    return 3 if any(_lacks_peer(each) for each in document["rows"]) else 0


def _lacks_peer(row: Row) -> bool:
    return row["theirs"] is None


def _lacking() -> str | None:
    """The missing part without which there is nothing to measure, and a remedy."""
    if not torch.accelerator.is_available():
        return "no GPU here; --rehearse runs every section at toy size without one"
    if not native.available():
        return "no native library here; python3 setup.py -q build_ext --inplace builds it"
    return None


if __name__ == "__main__":
    raise SystemExit(main())
