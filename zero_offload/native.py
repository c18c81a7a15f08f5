"""The border to C++: every struct and signature of csrc/include/zero_offload.h, and typed calls over them.

Owns loading `_native.so`, which no other file does, and turning a status into an exception. Takes integers,
addresses included, and never a tensor: `kernels/` and `storage/` know those. Importing this module loads
nothing; the first call does, and refuses a library whose version or struct sizes differ from these.

The calls in order: `available()` or `lib()`, then any of the functions below. ctypes releases the interpreter
lock while a call runs.
"""

from __future__ import annotations

import ctypes as C
import functools
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from zero_offload.errors import CapacityError, ConfigError, StorageError, ZeroOffloadError

ABI_VERSION = 2
LIBRARY_PATH = Path(__file__).resolve().with_name("_native.so")


class Isa(IntEnum):
    """Instruction sets of the kernels; all return the same bits."""

    SCALAR = 0
    AVX2 = 1
    AVX512 = 2
    NEON = 3


class Kind(IntEnum):
    """Element types. As an AdamW value, BF16 is the half of a master that a residual completes, FP16 a copy of one."""

    FP32 = 0
    BF16 = 1
    FP16 = 2


class GradMode(IntEnum):
    OVERWRITE = 0
    ACCUMULATE = 1


class IoOp(IntEnum):
    READ = 0
    WRITE = 1
    READ_UNVERIFIED = 2


class IoStatus(IntEnum):
    DONE = 0
    OS_ERROR = 1
    TRUNCATED = 2
    CHECKSUM = 3
    TIMEOUT = 4


class Fault(IntEnum):
    """What `io_fault` makes the nth read or write do, for tests."""

    NONE = 0
    WRITE_EIO = 1
    READ_EIO = 2
    WRITE_ENOSPC = 3
    READ_FLIP = 4
    WRITE_FLIP = 5
    WRITE_SHORT = 6


class AbiInfo(C.Structure):
    _fields_ = [
        ("size", C.c_uint32),
        ("version", C.c_uint32),
        ("sizeof_adamw_args", C.c_uint32),
        ("sizeof_adamw_segment", C.c_uint32),
        ("sizeof_grad_args", C.c_uint32),
        ("sizeof_io_block", C.c_uint32),
        ("sizeof_io_result", C.c_uint32),
        ("sizeof_io_stats", C.c_uint32),
    ]


class AdamWSegmentStruct(C.Structure):
    _fields_ = [
        ("begin", C.c_int64),
        ("end", C.c_int64),
        ("lr", C.c_double),
        ("beta1", C.c_double),
        ("beta2", C.c_double),
        ("eps", C.c_double),
        ("weight_decay", C.c_double),
        ("grad_scale", C.c_double),
        ("step", C.c_int64),
    ]


class AdamWArgsStruct(C.Structure):
    _fields_ = [
        ("size", C.c_uint32),
        ("value_kind", C.c_uint32),
        ("grad_kind", C.c_uint32),
        ("num_threads", C.c_uint32),
        ("num_segments", C.c_int64),
        ("value", C.c_void_p),
        ("residual", C.c_void_p),
        ("master", C.c_void_p),
        ("exp_avg", C.c_void_p),
        ("exp_avg_sq", C.c_void_p),
        ("grad", C.c_void_p),
        ("value_out", C.c_void_p),
        ("segments", C.c_void_p),
    ]


class GradArgsStruct(C.Structure):
    _fields_ = [
        ("size", C.c_uint32),
        ("dst_kind", C.c_uint32),
        ("src_kind", C.c_uint32),
        ("mode", C.c_uint32),
        ("num_threads", C.c_uint32),
        ("scale", C.c_float),
        ("dst", C.c_void_p),
        ("src", C.c_void_p),
        ("numel", C.c_int64),
        ("sumsq", C.c_double),
        ("finite", C.c_int32),
        ("reserved", C.c_uint32),
    ]


_GRAD_ARGS_SIZE = C.sizeof(GradArgsStruct)


class IoBlockStruct(C.Structure):
    _fields_ = [
        ("offset", C.c_uint64),
        ("nbytes", C.c_uint32),
        ("crc", C.c_uint32),
        ("fd", C.c_int32),
        ("seed", C.c_uint32),
    ]


class IoResultStruct(C.Structure):
    _fields_ = [
        ("size", C.c_uint32),
        ("status", C.c_int32),
        ("sys_errno", C.c_int32),
        ("op", C.c_int32),
        ("block", C.c_uint32),
        ("expected_crc", C.c_uint32),
        ("actual_crc", C.c_uint32),
        ("reserved", C.c_uint32),
        ("bytes_done", C.c_uint64),
    ]


class IoStatsStruct(C.Structure):
    _fields_ = [
        ("size", C.c_uint32),
        ("num_threads", C.c_uint32),
        ("jobs_queued", C.c_uint64),
        ("bytes_read", C.c_uint64),
        ("bytes_written", C.c_uint64),
        ("busy_read_s", C.c_double),
        ("busy_write_s", C.c_double),
    ]


# Name in the header -> its declaration here.
STRUCTS: dict[str, type[C.Structure]] = {
    "zo_abi_info": AbiInfo,
    "zo_adamw_segment": AdamWSegmentStruct,
    "zo_adamw_args": AdamWArgsStruct,
    "zo_grad_args": GradArgsStruct,
    "zo_io_block": IoBlockStruct,
    "zo_io_result": IoResultStruct,
    "zo_io_stats_t": IoStatsStruct,
}

# Field of zo_abi_info -> the struct whose size it tells.
SIZED_STRUCTS = {
    "sizeof_adamw_args": "zo_adamw_args",
    "sizeof_adamw_segment": "zo_adamw_segment",
    "sizeof_grad_args": "zo_grad_args",
    "sizeof_io_block": "zo_io_block",
    "sizeof_io_result": "zo_io_result",
    "sizeof_io_stats": "zo_io_stats_t",
}

# Function -> (result, arguments). Pointers to buffers and to the engine are plain addresses.
_P, _U32, _U64, _I64, _INT = C.c_void_p, C.c_uint32, C.c_uint64, C.c_int64, C.c_int
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "zo_abi": (_INT, [C.POINTER(AbiInfo)]),
    "zo_last_error": (C.c_char_p, []),
    "zo_isa_supported_mask": (_U32, []),
    "zo_isa": (_INT, []),
    "zo_set_isa": (_INT, [_INT]),
    "zo_adamw": (_INT, [C.POINTER(AdamWArgsStruct)]),
    "zo_master_split": (_INT, [_P, _P, _P, _I64, _U32]),
    "zo_master_join": (_INT, [_P, _P, _P, _I64, _U32]),
    "zo_convert": (_INT, [_U32, _P, _U32, _P, _I64, _U32]),
    "zo_grad_store": (_INT, [C.POINTER(GradArgsStruct)]),
    "zo_sumsq": (_INT, [_U32, _P, _I64, _U32, C.POINTER(C.c_double), C.POINTER(C.c_int32)]),
    "zo_crc32c": (_U32, [_U32, _P, _U64]),
    "zo_io_open": (_INT, [_U32, C.POINTER(_P)]),
    "zo_io_close": (_INT, [_P]),
    "zo_io_submit": (_INT, [_P, _INT, _P, _U32, _P, _INT, C.POINTER(_U64)]),
    "zo_io_wait": (_INT, [_P, _U64, C.c_double, C.POINTER(IoResultStruct)]),
    "zo_io_done": (_INT, [_P, _U64]),
    "zo_io_stats": (_INT, [_P, C.POINTER(IoStatsStruct)]),
    "zo_io_fault": (_INT, [_P, _INT, _I64]),
}

# zo_status -> what to raise; anything else is a defect of ours.
_ERRORS = {-1: ConfigError, -2: ConfigError, -3: CapacityError, -4: CapacityError, -5: StorageError}


@dataclass(frozen=True)
class AdamWArgs:
    """Addresses and counts of one `zo_adamw` call; `segments` is the address of `zo_adamw_segment` rows."""

    value: int
    residual: int
    master: int
    exp_avg: int
    exp_avg_sq: int
    grad: int
    value_out: int
    value_kind: Kind
    grad_kind: Kind
    segments: int
    num_segments: int
    num_threads: int


@dataclass(frozen=True)
class IoSubmission:
    """One `zo_io_submit` call; `blocks` is the address of `zo_io_block` rows, `base` that of their memory."""

    op: IoOp
    blocks: int
    num_blocks: int
    base: int
    urgency: int


class SumOfSquares(NamedTuple):
    sumsq: float
    finite: bool


def available() -> bool:
    """Whether the library is there and fits these declarations."""
    try:
        lib()
    except CapacityError:
        return False
    return True


@functools.cache
def lib() -> C.CDLL:
    """The library, loaded once. Raises CapacityError with the fix when it is missing or another version."""
    # torch brings an OpenMP runtime; ours must find that one, or two thread pools compete for the cores.
    import torch  # noqa: F401

    try:
        library = C.CDLL(str(LIBRARY_PATH))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise CapacityError(
            f"the native library does not load: {error}. Build it with 'pip install -e .' or 'make native' "
            "in the source tree (needs a C++17 compiler, for example g++)"
        ) from error
    info = AbiInfo(size=C.sizeof(AbiInfo))
    status = library.zo_abi(C.byref(info))
    sizes = {name: getattr(info, field) for field, name in SIZED_STRUCTS.items()}
    ours = {name: C.sizeof(STRUCTS[name]) for name in sizes}
    if info.version != ABI_VERSION or sizes != ours:
        raise CapacityError(
            f"{LIBRARY_PATH} is another build: version {info.version} with struct sizes {sizes}, expected "
            f"version {ABI_VERSION} with {ours}. Rebuild it with 'pip install -e .' or 'make native'"
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


def adamw(args: AdamWArgs) -> None:
    struct = AdamWArgsStruct(size=C.sizeof(AdamWArgsStruct), **vars(args))
    _check(lib().zo_adamw(C.byref(struct)))


def master_split(master: int, half: int, residual: int, numel: int, num_threads: int) -> None:
    _check(lib().zo_master_split(master, half, residual, numel, num_threads))


def master_join(half: int, residual: int, master: int, numel: int, num_threads: int) -> None:
    _check(lib().zo_master_join(half, residual, master, numel, num_threads))


def convert(dst: int, dst_kind: Kind, src: int, src_kind: Kind, numel: int, num_threads: int) -> None:
    _check(lib().zo_convert(dst_kind, dst, src_kind, src, numel, num_threads))


def grad_store(
    dst_kind: Kind, src_kind: Kind, mode: GradMode, num_threads: int, scale: float, dst: int, src: int, numel: int
) -> SumOfSquares:
    """There is one call for every gradient, so nothing is built for it but the struct, whose order this is."""
    struct = GradArgsStruct(_GRAD_ARGS_SIZE, dst_kind, src_kind, mode, num_threads, scale, dst, src, numel)
    _check(lib().zo_grad_store(C.byref(struct)))
    return SumOfSquares(struct.sumsq, bool(struct.finite))


def sumsq(kind: Kind, values: int, numel: int, num_threads: int) -> SumOfSquares:
    total, finite = C.c_double(), C.c_int32()
    _check(lib().zo_sumsq(kind, values, numel, num_threads, C.byref(total), C.byref(finite)))
    return SumOfSquares(total.value, bool(finite.value))


def crc32c(seed: int, address: int, nbytes: int) -> int:
    return int(lib().zo_crc32c(seed, address, nbytes))


def io_open(num_threads: int) -> int:
    """Start an engine; the result is its handle for the other `io_` calls."""
    handle = C.c_void_p()
    _check(lib().zo_io_open(num_threads, C.byref(handle)))
    assert handle.value is not None
    return handle.value


def io_close(handle: int) -> None:
    """Wait for everything submitted, then stop the threads; the handle is dead afterwards."""
    _check(lib().zo_io_close(handle))


def io_submit(handle: int, submission: IoSubmission) -> int:
    """Launch; the result is the ticket to wait for."""
    s, ticket = submission, C.c_uint64()
    _check(lib().zo_io_submit(handle, s.op, s.blocks, s.num_blocks, s.base, s.urgency, C.byref(ticket)))
    return ticket.value


def io_wait(handle: int, ticket: int, timeout_s: float) -> IoResultStruct:
    result = IoResultStruct(size=C.sizeof(IoResultStruct))
    _check(lib().zo_io_wait(handle, ticket, timeout_s, C.byref(result)))
    return result


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
        raise _ERRORS.get(status, ZeroOffloadError)(lib().zo_last_error().decode(errors="replace"))
    return status
