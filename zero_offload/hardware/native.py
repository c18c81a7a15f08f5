"""The border to C++: typed calls over what `abi` declares.

Owns loading `_native.so`, which no other file does, and turning a status into an exception. Takes integers,
addresses included, and never a tensor: `kernels/` and `storage/` know those. Importing this module loads
nothing; the first call does, and refuses a library whose version or struct sizes differ from `abi`.

The calls in order: `available()` or `lib()`, then any of the functions below. ctypes releases the interpreter
lock while a call runs.
"""

from __future__ import annotations

import ctypes as C
import errno
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from zero_offload.base.errors import CapacityError, ConfigError, StorageError, ZeroOffloadError
from zero_offload.base.threads import NO_THREAD
from zero_offload.base.types import StateFormat
from zero_offload.hardware import abi
from zero_offload.hardware.abi import (
    ElementType,
    Fault,
    GradMode,
    IoConfigStruct,
    IoKind,
    IoOp,
    IoResultStruct,
    IoStatsStruct,
    IoStatus,
    Isa,
    UpdateArgsStruct,
)

LIBRARY_PATH = Path(__file__).resolve().parents[1] / "_native.so"

# zo_status -> what to raise; anything else is a defect of ours.
_ERRORS = {-1: ConfigError, -2: ConfigError, -3: CapacityError, -4: CapacityError, -5: StorageError}
_GRAD_ARGS_SIZE = C.sizeof(abi.GradArgsStruct)


class GradSum(NamedTuple):
    """The sum of squares in double, and whether every value is finite."""

    sumsq: float
    finite: bool


class LibraryMissing(CapacityError):
    """No library that fits these declarations is here; `kernels/` and `storage/` know what else to use."""


def available() -> bool:
    """True if the library is there and fits these declarations."""
    return missing() is None


@functools.cache
def missing() -> str | None:
    """Why the library cannot be used, and what to type; None where it can.

    Raises for other reasons than its absence: no descriptor is left to open it with, ZERO_OFFLOAD_ISA cannot be.
    """
    try:
        lib()
    except LibraryMissing as error:
        return str(error)
    return None


@functools.cache
def lib() -> C.CDLL:
    """The library, loaded once. Raises LibraryMissing with the fix when it is missing or another version."""
    # torch loads an OpenMP runtime; ours must find that one, or two thread pools compete for the cores.
    import torch  # noqa: F401

    try:
        library = C.CDLL(str(LIBRARY_PATH))
        for name, (result, arguments) in abi.SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        if os.strerror(errno.EMFILE) in str(error):
            raise CapacityError(f"the native library does not load: {error}. See 'ulimit -n', and raise it") from error
        raise LibraryMissing(
            f"the native library does not load: {error}. Build it with 'pip install -e .' or 'make native' "
            "in the source tree (needs a C++17 compiler, for example g++)"
        ) from error
    info = abi.AbiInfo(size=C.sizeof(abi.AbiInfo))
    status = library.zo_abi(C.byref(info))
    sizes = {name: getattr(info, field) for field, name in abi.SIZED_STRUCTS.items()}
    ours = {name: C.sizeof(abi.STRUCTS[name]) for name in sizes}
    if info.version != abi.VERSION or sizes != ours:
        raise LibraryMissing(
            f"{LIBRARY_PATH} is another build: version {info.version} with struct sizes {sizes}, expected "
            f"version {abi.VERSION} with {ours}. Rebuild it with 'pip install -e .' or 'make native'"
        )
    if status != 0:
        raise ConfigError(library.zo_last_error().decode(errors="replace"))
    return library


def supported_isas() -> list[Isa]:
    """The instruction sets that run here, narrowest first."""
    mask = lib().zo_isa_supported_mask()
    return [isa for isa in Isa if mask >> isa & 1]


def isa() -> Isa:
    """The instruction set the kernels use now."""
    return Isa(lib().zo_isa())


def set_isa(isa: Isa) -> None:
    """Use another instruction set from the next kernel call on."""
    _check(lib().zo_set_isa(isa))


def update(args: UpdateArgsStruct) -> None:
    _check(lib().zo_update(C.byref(args)))


def master_split(short: bool, master: int, half: int, residual: int, numel: int, num_threads: int) -> None:
    """`short`: of 24 bits, with a residual of 8."""
    split = lib().zo_short_master_split if short else lib().zo_master_split
    _check(split(master, half, residual, numel, num_threads))


def master_join(short: bool, half: int, residual: int, master: int, numel: int, num_threads: int) -> None:
    join = lib().zo_short_master_join if short else lib().zo_master_join
    _check(join(half, residual, master, numel, num_threads))


def states_decode(
    format: StateFormat, signed: bool, states: int, scales: int, fp32: int, numel: int, num_threads: int
) -> None:
    _check(lib().zo_states_decode(format, signed, states, scales, fp32, numel, num_threads))


def states_encode(
    format: StateFormat, signed: bool, states: int, scales: int, fp32: int, numel: int, num_threads: int
) -> None:
    _check(lib().zo_states_encode(format, signed, fp32, states, scales, numel, num_threads))


def convert(dst: int, dst_kind: ElementType, src: int, src_kind: ElementType, numel: int, num_threads: int) -> None:
    _check(lib().zo_convert(dst_kind, dst, src_kind, src, numel, num_threads))


def grad_store(
    dst_kind: ElementType, src_kind: ElementType, mode: GradMode, num_threads: int, dst: int, src: int, numel: int
) -> GradSum:
    """There is one call for every gradient, so nothing is built for it but the struct, whose order this is."""
    struct = abi.GradArgsStruct(_GRAD_ARGS_SIZE, dst_kind, src_kind, mode, num_threads, 0, dst, src, numel)
    if (status := lib().zo_grad_store(C.byref(struct))) < 0:
        raise _error(status)
    return GradSum(struct.sumsq, bool(struct.finite))


def sumsq(kind: ElementType, values: int, numel: int, num_threads: int) -> GradSum:
    total, finite = C.c_double(), C.c_int32()
    _check(lib().zo_sumsq(kind, values, numel, num_threads, C.byref(total), C.byref(finite)))
    return GradSum(total.value, bool(finite.value))


def crc32c(seed: int, address: int, nbytes: int) -> int:
    found: int = lib().zo_crc32c(seed, address, nbytes)
    return found


def crc32c_each(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """The checksum of each of these ranges (address, bytes), from seed 0."""
    checksum = lib().zo_crc32c
    return [checksum(0, address, nbytes) for address, nbytes in ranges]


def word_post(word: int, value: int) -> None:
    _check(lib().zo_word_post(word, value))


def word_wait(word: int, at_least: int, timeout_s: float) -> bool:
    """True if the word came in time."""
    return _check(lib().zo_word_wait(word, at_least, int(timeout_s * 1e6))) == 1


def io_open(kind: IoKind, num_lanes: int, threads_per_lane: int, depth: int, part_bytes: int) -> int:
    """Start an engine; the result is its handle for the other `io_` calls."""
    handle = C.c_void_p()
    config = IoConfigStruct(C.sizeof(IoConfigStruct), kind, num_lanes, threads_per_lane, depth, part_bytes)
    try:
        _check(lib().zo_io_open(C.byref(config), C.byref(handle)))
    except CapacityError as error:
        num_threads = num_lanes * threads_per_lane
        raise CapacityError(f"cannot start the file engine's {num_threads} threads: {error}. {NO_THREAD}") from error
    assert handle.value is not None
    return handle.value


def io_stop(handle: int) -> None:
    """Wait for everything submitted, then end the threads."""
    _check(lib().zo_io_stop(handle))


def io_give_up(handle: int) -> None:
    """Start nothing more, and leave the memory of what has started alone."""
    _check(lib().zo_io_give_up(handle))


def io_close(handle: int) -> None:
    """Stop, and free the engine; no other call may be under way."""
    _check(lib().zo_io_close(handle))


def io_add_file(handle: int, fd: int, lane: int) -> None:
    """Which drive a file is on."""
    _check(lib().zo_io_add_file(handle, fd, lane))


def io_add_memory(handle: int, address: int, nbytes: int) -> None:
    """Memory that stays where it is for as long as the engine lives."""
    _check(lib().zo_io_add_memory(handle, address, nbytes))


def io_abandon(handle: int) -> None:
    """Release, in a forked child, what it has inherited."""
    _check(lib().zo_io_abandon(handle))


# The result of these two is in the caller's hands even where a signal's handler raises as the call returns.


def io_submit(handle: int, op: IoOp, blocks: int, num_blocks: int, base: int, urgency: int, ticket: C.c_uint64) -> None:
    """Launch; `ticket` is what to wait for, not 0. `blocks` is the address of rows, `base` that of their memory."""
    if (status := lib().zo_io_submit(handle, op, blocks, num_blocks, base, urgency, C.byref(ticket))) < 0:
        raise _error(status)


def io_result() -> IoResultStruct:
    """A result struct for `io_wait`."""
    return IoResultStruct(size=C.sizeof(IoResultStruct), status=IoStatus.TIMEOUT)


def io_wait(handle: int, ticket: int, timeout_s: float, result: IoResultStruct) -> None:
    if (status := lib().zo_io_wait(handle, ticket, timeout_s, C.byref(result))) < 0:
        raise _error(status)


def io_done(handle: int, ticket: int) -> bool:
    return _check(lib().zo_io_done(handle, ticket)) == 1


def io_stats(handle: int) -> IoStatsStruct:
    stats = IoStatsStruct(size=C.sizeof(IoStatsStruct))
    _check(lib().zo_io_stats(handle, C.byref(stats)))
    return stats


def io_fault(handle: int, fault: Fault, nth: int) -> None:
    _check(lib().zo_io_fault(handle, fault, nth))


def _check(status: int) -> int:
    if status < 0:
        raise _error(status)
    return status


def _error(status: int) -> ZeroOffloadError:
    return _ERRORS.get(status, ZeroOffloadError)(lib().zo_last_error().decode(errors="replace"))
