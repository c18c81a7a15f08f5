"""One training step: ours against plain PyTorch in RAM, and against DeepSpeed and FSDP2 with the same placement.

The systems live in processes of their own and step in turns, so that all of them see the same moods of the machine.
Rates of disk and memory are taken between the rounds, the disk's in the directory that the states rest in. All start
before the first round, two at a time. Where not all fit the memory at once, each is started anew for its turn. Medians
are compared. GPTs of 125M and 350M parameters, micro-batch 1, AdamW, clipping, activations recomputed in backward, bf16
with fp32 master. A processor without AVX-512 multiplies bf16 matrices by a plain loop: there use --dtype fp32.

The bars:
* parameters and optimizer on disk, exact and compact, and gradients there too, exact: <= 1.10x max(plain step, bytes
  counted / disk rates);
* everything in CPU memory: <= 1.00x plain torch with fused AdamW, <= 1/2 of DeepSpeed ZeRO-3 CPU, <= 1/1.5 of FSDP2
  with CPU offload;
* optimizer on disk, against DeepSpeed's: exact <= 1/2 where the disk is not the bound, compact <= 1/2.5;
* peak RSS, less what plain forward and backward need beside weights and gradients, 3 units and 64 MiB: <= 1.05x the
  byte table, so nothing where all is on disk; all of it <= 0.5x DeepSpeed's;
* after step 2 the arena grows by nothing, and no range of memory is taken or registered;
* <= 5% of the step waits for the update: in CPU memory, and on disk where the disk is not the bound.

The reach of each system with its own bytes is printed. It is the largest of plain compute, its disk's bytes at the
disk's rates, and its update's bytes at the memory's. For a step on disk the reach with clipping is printed, too. An
update begins with the norm, so its bytes have the next forward to move beside and not the backward. The cost of a
drive's work for the compute beside it is printed as well. There plain torch's step runs while fio moves the bytes of
our step on disk at its pace, and nothing waits for any of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
from harness import command, fio
from harness.disks import Rates, busy_disk, disk_rates, median_rates, memory_rate
from harness.processes import Worker, WorkerEndedError
from harness.rows import Row, missing, row, show, ungraded, write
from harness.step.builders import DTYPES, INSTALL, LABELS, MODELS, OURS, PEERS, Case, serve

from zero_offload.base.types import GIB, MIB
from zero_offload.finetune.gpt_config import num_parameters, unit_numels

WARM_UP_STEPS = 2  # and one more, as in each turn: the first records the trace, the next ones fill pools
STARTS_AT_ONCE = 2  # most of a start runs on one core
REACH_DISK, REACH_CPU, REACH_RSS, REACH_PEER_RSS, REACH_EXPOSED = 1.10, 1.00, 1.05, 0.5, 0.05
REACH_DEEPSPEED, REACH_FSDP2, REACH_NVME_EXACT, REACH_NVME_COMPACT = 1 / 2, 1 / 1.5, 1 / 2, 1 / 2.5
PROCESS_BYTES, PLAIN_BYTES = GIB // 2, 20
"""Of a process with torch in it; per parameter of plain torch."""
MEMORY_SHARE = 0.9

Answer = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """The results of the rounds of one case."""

    case: Case
    answers: dict[str, list[Answer]]
    disk: Rates
    memory_bytes_per_s: float
    plain_work_bytes: int
    """Peak of plain forward and backward, less its weights and gradients."""
    beside: list[tuple[Answer, Rates]]
    """Of plain torch while fio moves what ours does on disk, and the rates that it kept; empty without fio."""

    def of_steps(self, system: str, key: str) -> float:
        """The median."""
        return statistics.median(step[key] for answer in self.answers[system] for step in answer["steps"])

    def step_s(self, system: str) -> float | None:
        """None of a peer that is not installed."""
        return self.of_steps(system, "step_s") if system in self.answers else None

    def peak_bytes(self, system: str) -> int | None:
        found = (answer["peak_rss_bytes"] for answer in self.answers.get(system, []))
        return max(found, default=None)

    def disk_s(self, system: str) -> float:
        return self.disk.seconds(self.of_steps(system, "read_bytes"), self.of_steps(system, "written_bytes"))

    def limit_s(self, system: str) -> float:
        """Compute and disk, one beside the other."""
        return max(self.of_steps("plain", "step_s"), self.disk_s(system))

    def compute_s(self) -> float:
        """Of plain torch: forward and backward."""
        return self.of_steps("plain", "forward_s") + self.of_steps("plain", "backward_s")

    def update_disk_s(self, system: str) -> float:
        """Seconds of the disk's work between a backward and the end of the next forward, where all is on disk. Its
        bytes are those of a step less those of backward, which reads weights and writes gradients.
        """
        backwards = self.case.itemsize * num_parameters(self.case.gpt)
        written = backwards * (OURS[system].grads == "nvme")
        read_bytes = self.of_steps(system, "read_bytes") - backwards
        return self.disk.seconds(read_bytes, self.of_steps(system, "written_bytes") - written)

    def clipped_limit_s(self, system: str) -> float:
        """Seconds of an exact step that clips and holds no states in memory but those in flight. The norm ends backward
        and begins the update, whose values the next forward needs. Compute and update have the same cores.
        """
        in_memory = "cpu_compact" if OURS[system].states == "compact" else "cpu"
        update_beside_forward_s = self.of_steps("plain", "backward_s") + self.update_disk_s(system)
        return max(self.disk_s(system), self.of_steps(in_memory, "step_s"), update_beside_forward_s)

    def is_disk_bound(self, system: str) -> bool:
        return self.disk_s(system) > self.of_steps("plain", "step_s")


class Turns:
    """The systems of one case: alive together where memory allows, else each for its turn."""

    _alive: dict[str, Future[Worker]] | None = None
    """None where each is started for its turn."""

    def __init__(self, case: Case, peer_python: str, has_deepspeed: bool) -> None:
        self._case = case
        self._peer_python = peer_python
        self.names = ["plain", *OURS, *(name for name in PEERS if has_deepspeed or not name.startswith("deepspeed"))]
        if self._all_fit():
            with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
                self._alive = {name: pool.submit(self._start, name, self._directory_of(name)) for name in self.names}

    def _all_fit(self) -> bool:
        per_parameter = PLAIN_BYTES + sum(
            OURS[name].held_bytes(self._case.dtype) if name in OURS else PEERS[name].held_bytes
            for name in self.names[1:]
        )
        needed = num_parameters(self._case.gpt) * per_parameter + len(self.names) * PROCESS_BYTES
        return needed < MEMORY_SHARE * psutil.virtual_memory().available

    def take(self, name: str, num_steps: int) -> Answer:
        """A turn, on a worker that is warm."""
        if self._alive is None:
            # Its files on the drive go with it: those of all turns together would fill the drive.
            with tempfile.TemporaryDirectory(prefix=f"{name}_", dir=self._case.directory) as directory:
                worker = self._start(name, directory)
                answer = worker.step(num_steps)
                worker.close()
            return answer
        return self._alive[name].result().step(num_steps)

    def _directory_of(self, name: str) -> str:
        return tempfile.mkdtemp(prefix=f"{name}_", dir=self._case.directory)

    def drop(self, name: str) -> None:
        """No further turns."""
        self.names.remove(name)
        if self._alive is not None:
            self._alive.pop(name, None)

    def plain_work_bytes(self) -> int:
        worker = self._new_worker("forward_backward", str(self._case.directory))
        peak: int = worker.step(1)["peak_rss_bytes"]
        worker.close()
        return peak - 2 * self._case.itemsize * num_parameters(self._case.gpt)

    def _start(self, name: str, directory: str) -> Worker:
        """A worker that is warm."""
        worker = self._new_worker(name, directory)
        worker.step(WARM_UP_STEPS)
        return worker

    def _new_worker(self, name: str, directory: str) -> Worker:
        case = self._case
        python = self._peer_python if name in PEERS else sys.executable
        options = ["--nvme", directory, "--threads", case.num_threads, "--model", case.model, "--seq", case.seq]
        options += ["--dtype", case.dtype]
        again = command.worker_command("train_step.py", "systems", name, *options, python=python)
        # All of them compute on the CPU.
        return Worker(again, os.environ | {"CUDA_VISIBLE_DEVICES": ""})

    def close(self) -> None:
        for started in (self._alive or {}).values():
            if started.exception() is None:
                started.result().close()


def measure(turns: Turns, case: Case, num_rounds: int, steps_per_round: int) -> Found:
    plain_work_bytes = turns.plain_work_bytes()
    answers: dict[str, list[Answer]] = {name: [] for name in turns.names}
    disk, memory, beside = [], [], []
    for _ in range(num_rounds):
        disk.append(disk_rates(case.directory))
        memory.append(memory_rate())
        for name in list(turns.names):
            try:
                answers[name].append(turns.take(name, steps_per_round))
            except WorkerEndedError as error:
                if name not in PEERS:
                    raise SystemExit(f"{LABELS[name]}: {error}") from None
                print(f"{LABELS[name]} is left out: {error}", flush=True)
                turns.drop(name)
                del answers[name]
        if fio.is_installed():
            with busy_disk(case.directory, _pace(answers["disk"][-1])) as kept:
                answer = turns.take("plain", steps_per_round)
            beside.append((answer, kept[0]))
    return Found(case, answers, median_rates(disk), statistics.median(memory), plain_work_bytes, beside)


def _pace(answer: Answer) -> Rates:
    """At which a turn's steps have moved their bytes, had it been even."""
    in_all = {key: sum(step[key] for step in answer["steps"]) for key in ("step_s", "read_bytes", "written_bytes")}
    return Rates(in_all["read_bytes"] / in_all["step_s"], in_all["written_bytes"] / in_all["step_s"])


def show_systems(found: Found) -> None:
    """Every system's step, its bytes, and what these allow."""
    numel = num_parameters(found.case.gpt)
    compute_s = found.compute_s()
    print(f"\nGPT {found.case.model} ({numel / 1e6:.0f}M), {found.case.seq} tokens, {found.case.dtype}; disk "
          f"{found.disk.read_bytes_per_s / 1e9:.2f} and {found.disk.write_bytes_per_s / 1e9:.2f} GB/s, memory "
          f"{found.memory_bytes_per_s / 1e9:.1f} GB/s")  # fmt: skip
    print(f"{'':<34}  s/step  cores s  peak MiB  disk B/param  its bytes allow   loss")
    for name in found.answers:
        moved = (found.of_steps(name, "read_bytes") + found.of_steps(name, "written_bytes")) / numel
        allowed_s = max(compute_s, found.disk_s(name))
        if name in PEERS:
            allowed_s = max(allowed_s, PEERS[name].dram_bytes * numel / found.memory_bytes_per_s)
        peak_mib = (found.peak_bytes(name) or 0) / MIB
        figures = f"{found.step_s(name):7.3f} {found.of_steps(name, 'cores_s'):8.3f} {peak_mib:9.0f} {moved:13.1f}"
        print(f"{LABELS[name]:<34} {figures} {allowed_s:14.3f} s {found.of_steps(name, 'loss'):8.4f}")


def compare(found: Found) -> list[Row]:
    return [
        *_against_limits(found),
        *_against_peers(found),
        *_memory(found),
        *_growth(found),
        *_exposed(found),
    ]


def _name(found: Found, what: str) -> str:
    return f"{found.case.model}, {found.case.seq}: {what}"


def _against_limits(found: Found) -> list[Row]:
    plain_s, against = found.of_steps("plain", "step_s"), "max(plain torch, bytes / disk rates)"
    clipped = "what clipping allows: backward, then the update"
    rows = [row(_name(found, "in CPU memory"), found.of_steps("cpu", "step_s"), "s", "plain torch", plain_s, REACH_CPU)]
    for system in ("disk", "disk_compact", "disk_grads"):
        name = _name(found, LABELS[system].removeprefix("ours, "))
        step_s = found.of_steps(system, "step_s")
        rows.append(row(name, step_s, "s", against, found.limit_s(system), REACH_DISK))
        rows.append(ungraded(name, step_s, "s", clipped, found.clipped_limit_s(system), REACH_DISK))
    if found.beside:
        beside_s = statistics.median(step["step_s"] for answer, _ in found.beside for step in answer["steps"])
        kept = median_rates([rates for _, rates in found.beside])
        pace = f"{kept.read_bytes_per_s / 1e9:.2f} and {kept.write_bytes_per_s / 1e9:.2f} GB/s"
        against = f"plain torch alone; fio moves {pace}, the bytes of our step on disk at its pace"
        name = _name(found, "plain torch beside the drive")
        rows.append(ungraded(name, beside_s, "s", against, plain_s, REACH_DISK))
    return rows


def _against_peers(found: Found) -> list[Row]:
    exact = "optimizer_on_disk"
    return [
        _against(found, "cpu", "deepspeed_cpu", REACH_DEEPSPEED),
        _against(found, "cpu", "fsdp2_cpu", REACH_FSDP2),
        _against(found, exact, "deepspeed_nvme", REACH_NVME_EXACT, graded=not found.is_disk_bound(exact)),
        _against(found, "optimizer_on_disk_compact", "deepspeed_nvme", REACH_NVME_COMPACT),
    ]


def _against(found: Found, system: str, peer: str, reach: float, *, graded: bool = True) -> Row:
    name, ours, theirs = _name(found, LABELS[system]), found.of_steps(system, "step_s"), found.step_s(peer)
    if theirs is None:
        return missing(name, ours, "s", LABELS[peer], reach)
    if not graded:
        return ungraded(name, ours, "s", f"{LABELS[peer]}; the disk is the bound", theirs, reach)
    return row(name, ours, "s", LABELS[peer], theirs, reach)


def _memory(found: Found) -> list[Row]:
    case, rows = found.case, []
    numel = num_parameters(case.gpt)
    in_flight = case.itemsize * sum(sorted(numel for _, numel in unit_numels(case.gpt))[-3:]) + 64 * MIB
    for system, placement in OURS.items():
        table, peak = placement.held_bytes(case.dtype) * numel, found.peak_bytes(system)
        assert peak is not None
        ours, name = peak - found.plain_work_bytes, _name(found, f"peak RSS, {LABELS[system].removeprefix('ours, ')}")
        if table == 0:
            against = "3 units and 64 MiB; ours is less plain's own work"
            rows.append(row(name, ours / MIB, "MiB", against, in_flight / MIB, 1.0))
        else:
            against = "byte table; ours is less plain's own work, 3 units and 64 MiB"
            rows.append(row(name, (ours - in_flight) / MIB, "MiB", against, table / MIB, REACH_RSS))
    for system, peer in (("cpu", "deepspeed_cpu"), ("optimizer_on_disk", "deepspeed_nvme")):
        name = _name(found, f"peak RSS in all, {LABELS[system].removeprefix('ours, ')}")
        peak, theirs = found.peak_bytes(system), found.peak_bytes(peer)
        assert peak is not None
        if theirs is None:
            rows.append(missing(name, peak / MIB, "MiB", LABELS[peer], REACH_PEER_RSS))
        else:
            rows.append(row(name, peak / MIB, "MiB", LABELS[peer], theirs / MIB, REACH_PEER_RSS))
    return rows


def _growth(found: Found) -> list[Row]:
    """Of the placement that grows the most."""
    last = [found.answers[system][-1] for system in OURS]
    grown_mib = max(answer["arena_growth"] for answer in last) / MIB
    taken = max(answer["mappings_growth"] for answer in last)
    return [
        row(_name(found, "arena growth after step 2"), grown_mib, "MiB", "1 MiB; none is wanted", 1.0, 0.0),
        row(_name(found, "ranges taken after step 2"), taken, "", "one; none is wanted", 1.0, 0.0),
    ]


def _exposed(found: Found) -> list[Row]:
    rows = []
    for system, where in (("cpu", "in CPU memory"), ("disk", "on disk")):
        ours, theirs = found.of_steps(system, "exposed_s"), found.of_steps(system, "step_s")
        name = _name(found, f"waits for the update, {where}")
        if system == "disk" and found.is_disk_bound(system):
            rows.append(ungraded(name, ours, "s", "the step; the disk is the bound", theirs, REACH_EXPOSED))
        else:
            rows.append(row(name, ours, "s", "the step", theirs, REACH_EXPOSED))
    beyond_s = found.update_disk_s("disk") - found.of_steps("plain", "forward_s")
    if beyond_s > 0:
        against = "what the update's bytes take beyond a forward"
        rows.append(ungraded(_name(found, "waits for the update, on disk"), ours, "s", against, beyond_s, 1.0))
    return rows


def has_deepspeed(python: str) -> bool:
    return subprocess.run([python, "-c", "import deepspeed"], capture_output=True, check=False).returncode == 0


def run(case: Case, args: argparse.Namespace, deepspeed: bool) -> list[Row]:
    with contextlib.closing(Turns(case, args.peer_python, deepspeed)) as turns:
        found = measure(turns, case, args.rounds or (2 if args.quick else 8), 2 if args.quick else 3)
    show_systems(found)
    return compare(found)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.parser(__name__, __doc__, "125M and 128 tokens, fewer rounds and steps")
    command.add_workers(parser)
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each system (default: 8, or 2 with --quick)")
    parser.add_argument("--model", help=f"of {', '.join(MODELS)}; several with commas between them")
    parser.add_argument("--seq", help="tokens; several with commas between them")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="of DeepSpeed's environment")
    args = parser.parse_args(arguments)
    args.models = (args.model or ("125m" if args.quick else "125m,350m")).split(",")
    args.seqs = [int(seq) for seq in (args.seq or ("128" if args.quick else "128,512")).split(",")]
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    return args


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    if args.worker:
        serve(args.worker, Case(args.models[0], args.seqs[0], args.dtype, args.nvme, args.threads))
        return 0
    deepspeed = has_deepspeed(args.peer_python)
    rows: list[Row] = []
    for model in args.models:
        for seq in args.seqs:
            with command.scratch_directory(args.nvme) as directory:
                rows += run(Case(model, seq, args.dtype, directory, args.threads), args, deepspeed)
            write(rows, args.json)
    show(rows)
    if not deepspeed:
        print(f"a peer is missing: {INSTALL}")
    return 0 if deepspeed else command.PEER_MISSING_EXIT_CODE
