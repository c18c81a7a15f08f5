"""A clipped step of two machines with two ranks each (gloo, CPU, fp32, stage 3), against one machine with four.

The machines are network namespaces of this one, with a relay between them: 1 ms later, 10 Gbit/s from each. The model
of 4.8M parameters is in memory. With 64 tokens per rank a step of one machine takes 0.2 s on two cores.
Three systems take turns: two machines, the same ranks with a relay that delivers at once, and one machine. The relay
and the sockets take processor time of the same cores, so a second row says what is due to the delay alone.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from harness import command
from harness.rows import row, show, write
from harness.step.peers import VOCABULARY, WIDTHS, ours

ROOT = Path(__file__).resolve().parents[3]
SIZE, BATCH, LENGTH, WARM_UP = "4.8M", 2, 32, 5
DELAY_S, RATE, REACH, LIMIT_S = 0.001, "10gbit", 1.15, 600
LATE, AT_ONCE, ONE = "two machines, 1 ms", "two machines, 0 ms", "one machine"


def run(name: str, folder: Path) -> None:
    """One rank of a system: rank 0 makes a step for each file that comes, and leaves its seconds."""
    import zero_offload as zo

    torch.set_num_threads(1)
    zo.join()
    rank, step = dist.get_rank(), ours(WIDTHS[SIZE], 3)
    for turn in range(sys.maxsize):
        if rank == 0:
            while not (folder / f"{name} {turn}").exists():
                time.sleep(0.001)
        dist.barrier()
        if (folder / "end").exists():
            os._exit(0)  # the model stays open, whose close would be no part of this
        generator = torch.Generator().manual_seed(1000 * turn + rank)
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
        begin = time.perf_counter()
        step(tokens)
        dist.barrier()
        if rank == 0:
            (folder / f"{name} {turn} took").write_text(f"{time.perf_counter() - begin}\n")


def ask(folder: Path, name: str, turn: int) -> float:
    """The seconds of that step of a system, which makes it now."""
    (folder / f"{name} {turn}").touch()
    answer, deadline = folder / f"{name} {turn} took", time.monotonic() + LIMIT_S
    while not (answer.exists() and answer.read_text().endswith("\n")):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} makes no step: see the files rank*.txt in {folder}")
        time.sleep(0.001)
    return float(answer.read_text())


def measure(num_turns: int) -> dict[str, list[float]]:
    from tests.machines.hosts import hosts_of

    step_s: dict[str, list[float]] = {LATE: [], AT_ONCE: [], ONE: []}
    with tempfile.TemporaryDirectory() as name, hosts_of(Path(name), 3, delay_s=DELAY_S, rate=RATE) as hosts:
        folder, program = Path(name), Path(__file__)
        path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
        for system, order, per_host in (("two", (0, 1), 2), ("one", (2,), 4)):
            hosts.start(program, system, folder, order=order, per_host=per_host, environment=path)
        for turn in range(WARM_UP + num_turns):
            hosts.delay(False)
            step_s[AT_ONCE].append(ask(folder, "two", 2 * turn))
            step_s[ONE].append(ask(folder, "one", turn))
            hosts.delay(True)
            step_s[LATE].append(ask(folder, "two", 2 * turn + 1))
        (folder / "end").touch()
        (folder / f"one {turn + 1}").touch()
        (folder / f"two {2 * turn + 2}").touch()
        time.sleep(1)
    return {name: each[WARM_UP:] for name, each in step_s.items()}


def main(arguments: Sequence[str]) -> int:
    args = command.parser(__name__, __doc__, "20 turns in the place of 60").parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    from tests.machines.hosts import unsupported

    if why := unsupported():
        print(f"not measured: {why}")
        write([], args.json)
        return command.PEER_MISSING_EXIT_CODE
    step_s = measure(20 if args.quick else 60)
    rows = []
    for peer in (ONE, AT_ONCE):
        ratio = statistics.median(a / b for a, b in zip(step_s[LATE], step_s[peer], strict=True))
        here, there = (1000 * statistics.median(step_s[name]) for name in (LATE, peer))
        each = row(f"{LATE}, {SIZE} parameters, stage 3", here, "ms", peer, there, REACH)
        rows.append(each | {"ratio": ratio, "ok": ratio <= REACH})
    show(rows)
    write(rows, args.json)
    return int(any(each["ok"] is False for each in rows))


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
