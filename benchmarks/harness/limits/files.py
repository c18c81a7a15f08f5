"""The file engine against fio and DeepSpeed's, the update pass against its limit, a stripe against its drives.

All on the same file system, in turns, huge pages in both, medians of the rounds. Ours computes and verifies checksums
all the time; fio does not, so it is also run beside a thread that sums as many bytes. Where processors and drive share
a cache, as on a virtual machine, that slows the drive down, for ours and for fio. Seconds per 10^9 bytes are compared,
so less is better.

The bars: reads, writes and a 50/50 mix of requests of 4 to 64 MiB at 97 % of fio's best engine and depth or better.
They are no slower than DeepSpeed's aio at its best setting. Processor time per byte is at most fio's and that of a
checksum. The update pass takes at most 1.05 times the larger of its transfers at fio's rates and its arithmetic. Two
directories of different speed reach 95 % of their sum or better.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import command, fio
from harness.limits import paced_disks
from harness.rows import Row, missing, row, show, write
from torch import nn

import zero_offload as zo
from zero_offload.base.types import MIB
from zero_offload.hardware.abi import IoOp
from zero_offload.hardware.kernels.checksums import crc32c
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engine import BLOCK_DTYPE, BlockTable, FileEngine, Ticket
from zero_offload.storage.files.engines import PROBE_BYTES, THREADS, WORTH_BYTES, open_engine, pick, shares
from zero_offload.storage.files.swap_file import SwapFile
from zero_offload.storage.memory.arena import Arena, Region

FILE_BYTES = 512 * MIB
SIZES = (4 * MIB, 16 * MIB, 64 * MIB)
OPS = ("read", "write", "mixed")
FIO_NAMES = {"read": "read", "write": "write", "mixed": "rw"}
REACH_FIO, REACH_DEEPSPEED, REACH_CPU, REACH_UPDATE, REACH_STRIPE = 1 / 0.97, 1.0, 1.0, 1.05, 1 / 0.95
BUFFERS = (2, 3, 4)
"""That are tried, beside as many as fio's best has: the drive has one, the checksum another, and so on."""
SLOW, FAST = 200_000_000, 600_000_000
_STRIPE_BLOCK = 4 * MIB
SUMMED_BYTES = MIB
"""By one call of the thread beside fio."""
WAKE_S = 6e-5
"""Seconds that a short sleep takes longer than asked for."""
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
FIO_ENGINES = (("io_uring", 4), ("io_uring", 8), ("libaio", 4), ("libaio", 8), ("psync", 1))
"""With their depths."""
DEEPSPEED_GRID = ((MIB, 8 * MIB), (16, 32), (1, 2))
"""Block sizes, queue depths, threads."""
DEEPSPEED_ROUNDS = 3
DEEPSPEED_INSTALL = "apt-get install libaio-dev; DS_BUILD_OPS=0 pip install deepspeed ninja"
WIDTH, LAYERS = 3584, 8
NUM_PARAMS = LAYERS * WIDTH * WIDTH
"""Of the update pass: 100M."""
BYTES_PER_PARAM = 12
"""Read, and as many written: bf16 value, 16-bit residual, two fp32 moments."""


class Ours:
    """Our engine on one file of blocks, through the best number of buffers, as fio has its best depth."""

    def __init__(self, engine: FileEngine, fd: int, region: Region) -> None:
        self._engine = engine
        self._fd = fd
        self._address = region.address
        engine.name_file(fd, "the benchmark's file")
        engine.add_memory(region)
        # Every block has the same bytes, whatever its size: one table does not make another's checksums wrong.
        self._tables = {size: self._table(size) for size in SIZES}

    def _table(self, block_bytes: int) -> BlockTable:
        """The file's blocks, written, so that their checksums are known."""
        count = FILE_BYTES // block_bytes
        blocks = np.zeros(count, dtype=BLOCK_DTYPE)
        blocks["offset"], blocks["nbytes"] = np.arange(count) * block_bytes, block_bytes
        blocks["fd"] = self._fd
        self._stream("write", blocks, 3, blocks)
        return blocks

    def best_buffers(self, op: str, block_bytes: int, seconds: float, counts: Iterable[int]) -> int:
        """The fastest of `counts`, by the better of two short trials each, in turns."""
        trials = [(self.run(op, block_bytes, seconds / 2, count)[0], count) for count in [*counts] * 2]
        return max(trials)[1]

    def run(self, op: str, block_bytes: int, seconds: float, num_buffers: int) -> tuple[float, float]:
        """Bytes per second and processor seconds per 10^9 bytes, for about so long."""
        began, cpu = time.perf_counter(), time.process_time()
        goes_on = iter(lambda: time.perf_counter() - began < seconds, False)
        moved = block_bytes * self._stream(op, self._tables[block_bytes], num_buffers, goes_on)
        return moved / (time.perf_counter() - began), (time.process_time() - cpu) / moved * 1e9

    def _stream(self, op: str, blocks: BlockTable, num_buffers: int, times: Iterable[object]) -> int:
        """Block after block, over and over, as often as `times` has elements; returns how many. Mixed: every
        other one is read, the rest written."""
        engine, under_way, count = self._engine, deque[Ticket](), 0
        for count, _ in enumerate(times, 1):
            if len(under_way) == num_buffers:
                engine.wait(under_way.popleft())
            row = (count - 1) % len(blocks)
            address = self._address + count % num_buffers * int(blocks["nbytes"][row])
            reads = op == "read" or (op == "mixed" and row % 2 == 0)
            under_way.append(engine.submit(IoOp.READ if reads else IoOp.WRITE, blocks[row : row + 1], address))
        for ticket in under_way:
            engine.wait(ticket)
        return count


@contextlib.contextmanager
def huge_pages(nbytes: int) -> Iterator[bool]:
    """Reserve huge pages for fio's buffers, if this user may; True if they are there."""
    before = HUGE_PAGES.read_text()
    try:
        HUGE_PAGES.write_text(str(int(before) + -(-nbytes // (2 * MIB))))
    except OSError:
        yield False
        return
    try:
        yield int(HUGE_PAGES.read_text()) * 2 * MIB >= nbytes
    finally:
        HUGE_PAGES.write_text(before)


class FioResult(NamedTuple):
    bytes_per_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True)
class FioJob:
    """A job of fio: "read", "write" or "rw" (half of each)."""

    rw: str
    block_bytes: int
    engine: str
    depth: int

    def run(self, file: Path, seconds: float, *, huge: bool) -> FioResult:
        """On all of the file, for so long."""
        settings: dict[str, object] = {"size": file.stat().st_size, "time_based": 1, "runtime": seconds}
        settings |= {"iomem": "mmaphuge"} if huge else {}
        (found,) = fio.run(fio.job(file, self.rw, self.block_bytes, self.engine, self.depth, **settings))
        directions = [found["read"], found["write"]]
        nbytes = sum(each["io_bytes"] for each in directions)
        taken_s = max(each["runtime"] for each in directions) / 1e3
        cpu_s = (found["usr_cpu"] + found["sys_cpu"]) / 100 * found["job_runtime"] / 1e3
        return FioResult(nbytes / taken_s, cpu_s / nbytes * 1e9)


def best_job(file: Path, rw: str, block_bytes: int, seconds: float, *, huge: bool) -> FioJob:
    """The fastest of `FIO_ENGINES`, by the better of two short trials each, in turns."""
    jobs = [FioJob(rw, block_bytes, engine, depth) for engine, depth in FIO_ENGINES]
    trials = [(job.run(file, seconds / 2, huge=huge).bytes_per_s, job) for job in jobs * 2]
    return max(trials, key=lambda trial: trial[0])[1]


class ChecksumsBeside:
    """While entered: a thread sums `nbytes` of memory at `address`, over and over, so many bytes per second."""

    def __init__(self, address: int, nbytes: int, bytes_per_s: float) -> None:
        self._address = address
        self._nbytes = nbytes
        self._bytes_per_s = bytes_per_s
        self._cpu_s, self._summed = 0.0, 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checksums beside")

    def __enter__(self) -> ChecksumsBeside:
        self._thread.start()
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def cpu_s_per_gb(self) -> float:
        """Processor time of the sums alone, per 10^9 bytes; after the end."""
        return self._cpu_s / self._summed * 1e9

    def _run(self) -> None:
        began = time.perf_counter()
        while not self._ends.is_set():
            cpu = time.thread_time()
            crc32c(self._address + self._summed % self._nbytes, SUMMED_BYTES)
            self._cpu_s += time.thread_time() - cpu
            self._summed += SUMMED_BYTES
            ahead_s = self._summed / self._bytes_per_s - (time.perf_counter() - began)
            if ahead_s > WAKE_S:
                time.sleep(ahead_s - WAKE_S)


def deepspeed_rates(file: Path, nbytes: int) -> dict[str, float] | None:
    """Bytes per second of DeepSpeed's asynchronous I/O, "write" and "read". They are for whole files from its locked
    buffers, the median of the rounds at the fastest setting of a grid. None if it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder
    except ImportError:
        return None
    module: Any = AsyncIOBuilder().load(verbose=False)
    best = {"write": 0.0, "read": 0.0}
    for block, depth, threads in itertools.product(*DEEPSPEED_GRID):
        handle = module.aio_handle(block, depth, False, True, threads)
        buffer = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        seconds: dict[str, list[float]] = {"write": [], "read": []}
        for _ in range(DEEPSPEED_ROUNDS):
            for op, call in (("write", handle.async_pwrite), ("read", handle.async_pread)):
                began = time.perf_counter()
                call(buffer, str(file), 0)
                handle.wait()
                seconds[op].append(time.perf_counter() - began)
        handle.free_cpu_locked_tensor(buffer)
        for op, taken in seconds.items():
            best[op] = max(best[op], nbytes / statistics.median(taken))
    file.unlink()
    return best


Rates = dict[str, float]
"""Bytes per second, by `OPS`."""


def engine_rows(directory: Path, rounds: int, seconds: float) -> tuple[list[Row], dict[str, Rates]]:
    """Against fio and DeepSpeed; also fio's best rates, alone and beside checksums."""
    file = directory / "fio.bin"
    _allocate(file)
    _allocate(directory / "engine.bin")
    fd = os.open(directory / "engine.bin", os.O_RDWR | os.O_DIRECT)
    region = Arena(0).allocate(FILE_BYTES)
    ctypes.memset(region.address, 1, FILE_BYTES)
    with huge_pages(9 * 64 * MIB) as huge:
        settings = pick("auto")
        print(f"our engine: {settings}")
        engine = open_engine(settings)
        ours = Ours(engine, fd, region)
        print(f"huge pages for fio: {'yes' if huge else 'no: not allowed here'}")
        pairs = [(op, size) for op in OPS for size in SIZES]
        jobs = {pair: best_job(file, FIO_NAMES[pair[0]], pair[1], seconds, huge=huge) for pair in pairs}
        buffers = {pair: ours.best_buffers(*pair, seconds, {*BUFFERS, job.depth}) for pair, job in jobs.items()}
        for (op, size), job in jobs.items():
            ours_has = f"{buffers[op, size]} buffers"
            print(f"{op} of {size // MIB} MiB: fio's best is {job.engine}, depth {job.depth}; ours has {ours_has}")
        peer = _Peer(file, jobs, seconds, region.address, huge=huge)
        samples = _in_turns(ours, buffers, peer, rounds, (file, directory / "engine.bin"))
        engine.close()
    os.close(fd)
    rows = [each for op in OPS for size in SIZES for each in _speed_rows(op, size, samples[op, size])]
    rows += [_cpu_row(op, samples[op, 16 * MIB]) for op in OPS]
    # Buffers of 64 MiB and more, as the update pass has: what stays in the cache is another drive.
    large = {op: _medians(samples[op, SIZES[-1]]) for op in OPS}
    rates = {
        "larger of the two": {op: each.theirs for op, each in large.items()},
        "the same beside checksums": {op: each.theirs_beside for op, each in large.items()},
    }
    rows += _deepspeed_rows(directory, {op: max(_medians(samples[op, size]).ours for size in SIZES) for op in OPS[:2]})
    for each in directory.glob("*.bin"):
        each.unlink()
    return rows, rates


def _allocate(file: Path) -> None:
    """In one piece, and written: what never was is read without the drive."""
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, FILE_BYTES)
        for _ in range(FILE_BYTES // (16 * MIB)):
            opened.write(bytes(16 * MIB))
        opened.flush()
        os.fsync(opened.fileno())


class Sample(NamedTuple):
    """Bytes per second, and processor seconds per 10^9 bytes."""

    ours: float
    theirs: float
    theirs_beside: float
    """fio's while a thread sums as many bytes."""
    our_cpu: float
    their_cpu: float
    """fio's and the thread's."""


@dataclass(frozen=True)
class _Peer:
    """fio on its own file, alone and beside checksums."""

    file: Path
    jobs: dict[tuple[str, int], FioJob]
    seconds: float
    address: int
    """Of memory to sum: a request's worth, so that what is in the cache for one is for the other."""
    _: KW_ONLY
    huge: bool
    paces: dict[tuple[str, int], float] = field(default_factory=dict)
    """How fast fio was beside checksums the last time: as many bytes are summed."""

    def run(self, op: str, block_bytes: int) -> tuple[float, float, float]:
        """Bytes per second alone and beside; processor seconds per 10^9 bytes of both."""
        job = self.jobs[op, block_bytes]
        alone = job.run(self.file, self.seconds, huge=self.huge)
        pace = self.paces.get((op, block_bytes), alone.bytes_per_s)
        with ChecksumsBeside(self.address, block_bytes, pace) as sums:
            beside = job.run(self.file, self.seconds, huge=self.huge)
        self.paces[op, block_bytes] = beside.bytes_per_s
        return alone.bytes_per_s, beside.bytes_per_s, beside.cpu_s_per_gb + sums.cpu_s_per_gb


def _in_turns(
    ours: Ours, buffers: dict[tuple[str, int], int], peer: _Peer, rounds: int, files: Sequence[Path]
) -> dict[tuple[str, int], list[Sample]]:
    samples: dict[tuple[str, int], list[Sample]] = {}
    for _ in range(rounds):
        for op in OPS:
            for size in SIZES:
                for file in files:
                    _read_once(file)
                speed, cpu = ours.run(op, size, peer.seconds, buffers[op, size])
                alone, beside, their_cpu = peer.run(op, size)
                sample = Sample(speed, alone, beside, cpu, their_cpu)
                samples.setdefault((op, size), []).append(sample)
    return samples


def _read_once(file: Path) -> None:
    """A host that lends its cache for a drive may have put the file out of it: a first pass is of another drive."""
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, 16 * MIB) as buffer:
        while os.readv(fd, [buffer]):
            pass
    os.close(fd)


def _medians(samples: list[Sample]) -> Sample:
    return Sample(*(statistics.median(column) for column in zip(*samples, strict=True)))


def _speed_rows(op: str, size: int, samples: list[Sample]) -> list[Row]:
    middle, name = _medians(samples), f"{op}, requests of {size // MIB} MiB"
    ours = 1e9 / middle.ours
    return [
        row(name, ours, "s/GB", "fio's best", 1e9 / middle.theirs, REACH_FIO),
        row(name, ours, "s/GB", "fio beside as many checksums", 1e9 / middle.theirs_beside, REACH_FIO),
    ]


def _cpu_row(op: str, samples: list[Sample]) -> Row:
    middle = _medians(samples)
    return row(f"processor time, {op}", middle.our_cpu, "s/GB", "fio + as many checksums", middle.their_cpu, REACH_CPU)


def _deepspeed_rows(directory: Path, ours: dict[str, float]) -> list[Row]:
    theirs = deepspeed_rates(directory / "deepspeed.bin", FILE_BYTES)
    rows = []
    for op, speed in ours.items():
        name, against = f"{op}, best request size", "DeepSpeed aio's best setting"
        if theirs is None:
            rows.append(missing(name, 1e9 / speed, "s/GB", against, REACH_DEEPSPEED))
        else:
            rows.append(row(name, 1e9 / speed, "s/GB", against, 1e9 / theirs[op], REACH_DEEPSPEED))
    return rows


class UpdatePass:
    """A model whose step does nothing but update: no work is done beside it, none is overlapped."""

    def __init__(self, nvme: Path | None) -> None:
        tier = "cpu" if nvme is None else "nvme"
        self._model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        settings: dict[str, Any] = {"nvme": nvme, "existing": "discard"} if nvme else {}
        zo.offload(
            self._model,
            zo.OffloadConfig(params=tier, optimizer=tier, grads="cpu", overlap="none", **settings),
        )
        self._optimizer = zo.AdamW(self._model.parameters(), lr=1e-4)
        self._seconds: list[float] = []

    def step(self) -> None:
        self._model(torch.ones(1, WIDTH)).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._seconds.append(zo.stats(self._model).update_s)

    def median_s(self) -> float:
        """Without the first two, which fill pools."""
        return statistics.median(self._seconds[2:])

    def close(self) -> None:
        zo.close(self._model)


def update_rows(directory: Path, limits: dict[str, Rates], steps: int) -> list[Row]:
    """The update pass, states on disk and in memory in turns."""
    on_disk, in_memory = UpdatePass(directory / "update"), UpdatePass(None)
    for _ in range(steps + 2):
        on_disk.step()
        in_memory.step()
    pass_s, arithmetic_s = on_disk.median_s(), in_memory.median_s()
    on_disk.close()
    in_memory.close()
    rows = []
    for name, rates in limits.items():
        limit_s = max(_transfers_s(NUM_PARAMS * BYTES_PER_PARAM, rates), arithmetic_s)
        rows.append(row("update pass, states on disk", pass_s, "s", name, limit_s, REACH_UPDATE))
    print(f"update pass: arithmetic {arithmetic_s:.3f} s")
    return rows


def _transfers_s(nbytes: int, rates: Rates) -> float:
    """To read and write so much, whichever is faster on this drive: one after the other, or both at once."""
    return min(nbytes / rates["read"] + nbytes / rates["write"], 2 * nbytes / rates["mixed"])


def stripe_rows(directory: Path, nbytes: int) -> list[Row]:
    """Two drives of different speed, as a run stripes them, against the sum of what each does alone."""
    with paced_disks.mounted(directory, 2 * WORTH_BYTES, (SLOW, FAST)) as disks, contextlib.ExitStack() as stack:
        names = [f"{op}, two directories of 1:3" for op in ("write", "read")]
        if disks is None:
            return [missing(name, 0.0, "s", paced_disks.NEEDS, REACH_STRIPE) for name in names]
        homes = [stack.enter_context(RunDirectory.open(disk / "run")) for disk in disks]
        region = Arena(0).allocate(nbytes)
        ctypes.memset(region.address, 1, nbytes)
        weights = shares(pick("auto"), homes, 2 * WORTH_BYTES, Arena(0).allocate(PROBE_BYTES))
        print(f"shares of the two directories: {', '.join(f'{weight:.3f}' for weight in weights)}")
        rows = []
        # Alone each moves what it moves of the stripe: limits of control groups let a short burst pass.
        parts = [round(weight * nbytes / _STRIPE_BLOCK) * _STRIPE_BLOCK for weight in weights]
        alone = [_swap_seconds([home], None, region, part) for home, part in zip(homes, parts, strict=True)]
        together = _swap_seconds(homes, weights, region, nbytes)
        for i, name in enumerate(names):
            sum_of_speeds = sum(part / seconds[i] for part, seconds in zip(parts, alone, strict=True))
            rows.append(row(name, together[i], "s", "sum of both alone", nbytes / sum_of_speeds, REACH_STRIPE))
        return rows


def _swap_seconds(
    homes: list[RunDirectory], weights: tuple[float, ...] | None, region: Region, nbytes: int
) -> tuple[float, float]:
    """Seconds to write and to read a swap file of 4 MiB blocks."""
    engine = open_engine(THREADS, len(homes))
    swap = SwapFile(homes, "bench", engine, 1, weights)
    extent = swap.allocate("all", [_STRIPE_BLOCK] * (nbytes // _STRIPE_BLOCK))
    swap.create_scratch()
    calls: list[Callable[[], None]] = [
        lambda: swap.launch_write(extent, slice(None), region.address).wait(),
        lambda: swap.launch_read(extent, slice(None), region.address).wait(),
    ]
    calls[0]()
    seconds = []
    for call in calls:
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    engine.close()
    swap.close()
    return seconds[0], seconds[1]


def main(arguments: Sequence[str]) -> int:
    parser = command.parser(__name__, __doc__, "fewer rounds")
    command.add_nvme(parser)
    args = parser.parse_args(arguments)
    if not fio.is_installed():
        print(f"fio is not installed; type: {fio.INSTALL}")
        return command.PEER_MISSING_EXIT_CODE
    rounds, seconds, steps = (3, 0.6, 8) if args.quick else (7, 1.5, 15)
    with command.scratch_directory(args.nvme) as directory:
        rows, rates = engine_rows(directory, rounds, seconds)
        rows += update_rows(directory, rates, steps)
        rows += stripe_rows(directory, 512 * MIB)
    show(rows)
    write(rows, args.json)
    if any(each["ok"] is None for each in rows):
        print(f"what was not measured: {DEEPSPEED_INSTALL}; stripes: {paced_disks.NEEDS}")
        return command.PEER_MISSING_EXIT_CODE
    return 0
