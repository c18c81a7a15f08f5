"""Which file engine moves the blocks of a run, and how fast directories are with it.

Owns each kind's settings, and a probe: a file without a name, written and read a few times. Never touches a file of a
run. The calls: `pick` and `open_engine`; `shares` for a run that is striped. `measure` gives rates to callers that
print or keep them. `lost_beside` tells the cost of transfers for a CPU that computes.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum

import numpy as np

from zero_offload.base.errors import CapacityError, ConfigError, StorageError
from zero_offload.base.types import GIB, MIB, EngineKind
from zero_offload.hardware import native
from zero_offload.hardware.abi import IoOp
from zero_offload.storage.files.directory import DataFile, RunDirectory
from zero_offload.storage.files.engine import BLOCK_DTYPE, BlockTable, EngineSettings, FileEngine, Lasting
from zero_offload.storage.files.system import remedy_of

THREADS = EngineSettings(EngineKind.THREADS, num_threads=4, depth=1, request_bytes=4 * MIB)
IO_URING = EngineSettings(EngineKind.IO_URING, num_threads=1, depth=16, request_bytes=MIB)
"""One thread is enough for most drives, checksums included; two move small blocks out of order, so later."""
AIOFILES = EngineSettings(EngineKind.AIOFILES, num_threads=4, depth=1, request_bytes=4 * MIB)
DEFAULTS = {EngineKind.THREADS: THREADS, EngineKind.IO_URING: IO_URING, EngineKind.AIOFILES: AIOFILES}

PROBE_BYTES = 128 * MIB
PROBE_S = 1.0
"""No further round is begun after so many seconds."""
PROBE_ROUNDS = 3
WORTH_BYTES = GIB
"""Less than this is moved sooner than directories are measured, and by any engine."""
FILL_MAX = 0.95
"""The share of a drive's free space that a stripe may take: manifests and others need some."""
_BLOCK_BYTES = 4 * MIB

_log = logging.getLogger("zero_offload")


def pick(request: str, moved_bytes: int = WORTH_BYTES) -> EngineSettings:
    """Of "auto" or a kind, for a run that moves so many bytes in a step. Raises ConfigError when that kind is not to be
    had here.

    "auto" is io_uring where much is moved and the system allows it, else threads; without the native library it is
    aiofiles. Kinds and depths differ by a few per cent on drives that were measured: less than their rates move between
    two runs.
    """
    if request != "auto":
        if request == EngineKind.IO_URING and (problem := io_uring_problem()):
            raise ConfigError(f"io_engine='io_uring': {problem}; use io_engine='auto'")
        return DEFAULTS[EngineKind(request)]
    if not native.available():
        return AIOFILES
    if moved_bytes < WORTH_BYTES:
        return THREADS
    if problem := io_uring_problem():
        _log.info("blocks are moved by threads: %s", problem)
        return THREADS
    return IO_URING


def open_engine(settings: EngineSettings = THREADS, num_drives: int = 1) -> FileEngine:
    """Start an engine. Raises ConfigError where the system does not offer that kind, CapacityError without threads."""
    if settings.kind is EngineKind.AIOFILES:
        from zero_offload.storage.files.aiofiles_engine import AiofilesEngine

        return AiofilesEngine(settings, num_drives)
    from zero_offload.storage.files.native_engine import NativeEngine

    return NativeEngine(settings, num_drives)


def io_uring_problem() -> str | None:
    """Why io_uring is not to be had; None where it is."""
    try:
        open_engine(IO_URING).close()
    except ConfigError as error:
        too_many = os.strerror(errno.EMFILE) in str(error)
        return f"{error}. {remedy_of(errno.EMFILE)}" if too_many else str(error)
    return None


class Pattern(Enum):
    """The kind of transfers that a probe measures."""

    WRITE = "write"
    READ = "read"
    MIXED = "mixed"  # half of the bytes are read while the other half is written


@dataclass(frozen=True)
class EngineRates:
    """The rates of one engine in one directory."""

    settings: EngineSettings
    bytes_per_s: Mapping[Pattern, float]
    cpu_s_per_gb: float
    """Processor time of this process, checksums included, per 10^9 bytes moved."""

    @property
    def seconds_per_byte(self) -> float:
        """To write a byte and to read it again."""
        return 1 / self.bytes_per_s[Pattern.WRITE] + 1 / self.bytes_per_s[Pattern.READ]


def shares(
    settings: EngineSettings, directories: Sequence[RunDirectory], needed_bytes: int, scratch: Lasting | None
) -> tuple[float, ...]:
    """The share of each directory in a stripe, in proportion to its speed; shares sum to 1. All are taken to be equally
    fast where no `scratch`, sector-aligned host memory, is given to measure them with.

    `needed_bytes` are those of all ranks in all directories.
    """
    speeds = [1.0] * len(directories)
    if scratch is not None and len(directories) > 1:
        try:
            found = [measure(each, [settings], scratch, PROBE_ROUNDS, PROBE_S)[0] for each in directories]
            speeds = [1 / rates.seconds_per_byte for rates in found]
        except (CapacityError, StorageError):
            pass  # an earlier run's files may fill the drive: to go on from them no room is needed
    return stripe_weights(speeds, [int(each.free_bytes * FILL_MAX) for each in directories], needed_bytes)


def stripe_weights(speeds: Sequence[float], room_bytes: Sequence[int], needed_bytes: int) -> tuple[float, ...]:
    """Shares in proportion to speed, of each directory no more than it has room for; they sum to 1."""
    shares = [0.0] * len(speeds)
    open_ones, rest = set(range(len(speeds))), 1.0
    while open_ones and rest > 0:
        total = sum(speeds[i] for i in open_ones)
        full = {i for i in open_ones if rest * speeds[i] / total * needed_bytes > room_bytes[i]}
        for i in full or open_ones:
            shares[i] = room_bytes[i] / needed_bytes if full else rest * speeds[i] / total
        open_ones -= full or open_ones
        rest = 1.0 - sum(shares)
    # Whatever is left has no room anywhere: the files' creation will say so.
    scale = sum(shares)
    return tuple(share / scale for share in shares) if scale else (1 / len(speeds),) * len(speeds)


def measure(
    directory: RunDirectory, candidates: Sequence[EngineSettings], scratch: Lasting, rounds: int, limit_s: float
) -> list[EngineRates]:
    """Write and read a file without a name with each candidate, in turns, and keep the median of the rounds."""
    file = directory.create_scratch(scratch.nbytes)
    trials: list[_Trial] = []
    try:
        trials = [_Trial(settings, file, scratch) for settings in candidates]
        trials[0].run(Pattern.WRITE)  # blocks that were reserved and never written take longer
        began = time.perf_counter()
        for round_number in range(rounds):
            if round_number and time.perf_counter() - began > limit_s:
                break
            for trial in trials:
                for pattern in Pattern:
                    trial.note(pattern, *trial.run(pattern))
        return [trial.rates() for trial in trials]
    finally:
        if not any(trial.is_stuck for trial in trials):
            file.close()


def lost_beside(
    directory: RunDirectory, settings: EngineSettings, scratch: Lasting, work: Callable[[], object], times: int
) -> float:
    """Seconds that `work` takes longer for each byte that a file engine reads or writes beside it.

    `work` uses all cores: its loops wait for the thread whose core the engine took. It runs `times` alone and as
    often beside the engine, in turns; the median of the differences, and at least 0.
    """
    file = directory.create_scratch(scratch.nbytes)
    trial = _Trial(settings, file, scratch)
    try:
        trial.run(Pattern.WRITE)
        work()
        return max(statistics.median(_lost_once(trial, work) for _ in range(times)), 0.0)
    finally:
        if not trial.is_stuck:
            file.close()


def _lost_once(trial: _Trial, work: Callable[[], object]) -> float:
    alone_s = seconds_of(work)
    ends, moved_bytes = threading.Event(), 0

    def move() -> None:
        nonlocal moved_bytes
        for pattern in itertools.cycle((Pattern.READ, Pattern.WRITE)):
            trial.run(pattern)
            moved_bytes += trial.nbytes
            if ends.is_set():
                return

    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(move)
        try:
            beside_s = seconds_of(work)
        finally:
            ends.set()
        # Bytes that move after the work has ended take nothing from it.
        began = time.perf_counter()
        moving.result()
        rest_s = time.perf_counter() - began
    return (beside_s - alone_s) / (moved_bytes * beside_s / (beside_s + rest_s))


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class _Trial:
    """One candidate's measurements."""

    def __init__(self, settings: EngineSettings, file: DataFile, scratch: Lasting) -> None:
        self._settings = settings
        self._file = file
        self._address = scratch.address
        self._blocks = _table(file, scratch.nbytes)
        self.is_stuck = False
        self._seconds: dict[Pattern, list[float]] = {pattern: [] for pattern in Pattern}
        self._cpu_s: list[float] = []

    @property
    def nbytes(self) -> int:
        return int(self._blocks["nbytes"].sum())

    def run(self, pattern: Pattern) -> tuple[float, float]:
        """Seconds and processor seconds."""
        engine = open_engine(self._settings)
        engine.name_file(self._file.fd, str(self._file.path))
        try:
            began, cpu = time.perf_counter(), time.process_time()
            _move(engine, pattern, self._blocks, self._address)
            return time.perf_counter() - began, time.process_time() - cpu
        finally:
            self.is_stuck = engine.is_stuck
            engine.close()

    def note(self, pattern: Pattern, seconds: float, cpu_s: float) -> None:
        self._seconds[pattern].append(seconds)
        self._cpu_s.append(cpu_s)

    def rates(self) -> EngineRates:
        speeds = {pattern: self.nbytes / statistics.median(taken) for pattern, taken in self._seconds.items()}
        return EngineRates(self._settings, speeds, statistics.mean(self._cpu_s) / self.nbytes * 1e9)


def _move(engine: FileEngine, pattern: Pattern, blocks: BlockTable, address: int) -> None:
    if pattern is Pattern.MIXED:
        # Even blocks are read, odd ones written.
        reads, writes = blocks[0::2].copy(), blocks[1::2].copy()
        tickets = [
            engine.submit(IoOp.READ_UNVERIFIED, reads, address),
            engine.submit(IoOp.WRITE, writes, address + int(reads["nbytes"].sum())),
        ]
    else:
        tickets = [engine.submit(IoOp.WRITE if pattern is Pattern.WRITE else IoOp.READ, blocks, address)]
    for ticket in tickets:
        engine.wait(ticket)


def _table(file: DataFile, nbytes: int) -> BlockTable:
    blocks = np.zeros(nbytes // _BLOCK_BYTES, dtype=BLOCK_DTYPE)
    blocks["offset"] = np.arange(len(blocks)) * _BLOCK_BYTES
    blocks["nbytes"], blocks["fd"] = _BLOCK_BYTES, file.fd
    return blocks
