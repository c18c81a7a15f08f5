"""csrc/include/zero_offload.h in Python: every value, struct and signature; `native` calls them."""

from __future__ import annotations

import ctypes as C
from enum import IntEnum
from typing import Any

VERSION = 11


class Isa(IntEnum):
    """Instruction sets of the kernels; all return the same bits."""

    SCALAR = 0
    AVX2 = 1
    AVX512 = 2
    NEON = 3


class ElementType(IntEnum):
    """Element types. As an optimizer's value, BF16 is the half of a master that a residual completes, FP16 its copy."""

    FP32 = 0
    BF16 = 1
    FP16 = 2


class Rule(IntEnum):
    """The update of an optimizer."""

    ADAMW = 0
    ADAMW_AMSGRAD = 1
    ADAM = 2
    ADAM_AMSGRAD = 3
    ADAGRAD = 4
    LION = 5
    SGD = 6
    SGD_MOMENTUM = 7
    SGD_NESTEROV = 8


STATE_BLOCK = 256
"""Elements of a compact state that share a scale."""

MAX_STATES = 3
"""Arrays that a rule may keep beside the value."""


class GradMode(IntEnum):
    OVERWRITE = 0
    ACCUMULATE = 1


class IoKind(IntEnum):
    THREADS = 0
    URING = 1


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
    """The fault of the nth read or write that `io_fault` makes, for tests."""

    NONE = 0
    WRITE_EIO = 1
    READ_EIO = 2
    WRITE_ENOSPC = 3
    READ_FLIP = 4
    WRITE_FLIP = 5
    WRITE_SHORT = 6
    WRITE_DROP = 7
    READ_SHORT = 8
    STORM = 9
    STALL = 10


class AbiInfo(C.Structure):
    _fields_ = [
        ("size", C.c_uint32),
        ("version", C.c_uint32),
        ("sizeof_update_args", C.c_uint32),
        ("sizeof_segment", C.c_uint32),
        ("sizeof_grad_args", C.c_uint32),
        ("sizeof_io_config", C.c_uint32),
        ("sizeof_io_block", C.c_uint32),
        ("sizeof_io_result", C.c_uint32),
        ("sizeof_io_stats", C.c_uint32),
    ]


class SegmentStruct(C.Structure):
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


class UpdateArgsStruct(C.Structure):
    _fields_ = [
        ("size", C.c_uint32),
        ("rule", C.c_uint32),
        ("value_kind", C.c_uint32),
        ("grad_kind", C.c_uint32),
        ("num_threads", C.c_uint32),
        ("state_format", C.c_uint32),
        ("num_segments", C.c_int64),
        ("value", C.c_void_p),
        ("residual", C.c_void_p),
        ("master", C.c_void_p),
        ("states", C.c_void_p * MAX_STATES),
        ("scales", C.c_void_p * MAX_STATES),
        ("grad", C.c_void_p),
        ("value_out", C.c_void_p),
        ("segments", C.c_void_p),
        ("seed", C.c_uint64),
        ("origin", C.c_int64),
    ]


class GradArgsStruct(C.Structure):
    _fields_ = [
        ("size", C.c_uint32),
        ("dst_kind", C.c_uint32),
        ("src_kind", C.c_uint32),
        ("mode", C.c_uint32),
        ("num_threads", C.c_uint32),
        ("finite", C.c_int32),
        ("dst", C.c_void_p),
        ("src", C.c_void_p),
        ("numel", C.c_int64),
        ("sumsq", C.c_double),
    ]


class IoConfigStruct(C.Structure):
    _fields_ = [
        ("size", C.c_uint32),
        ("kind", C.c_uint32),
        ("num_lanes", C.c_uint32),
        ("threads_per_lane", C.c_uint32),
        ("depth", C.c_uint32),
        ("part_bytes", C.c_uint32),
    ]


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
        ("begin_ns", C.c_int64),
        ("end_ns", C.c_int64),
    ]


class IoStatsStruct(C.Structure):
    _fields_ = [
        ("size", C.c_uint32),
        ("jobs_running", C.c_uint32),
        ("jobs_queued", C.c_uint64),
        ("bytes_read", C.c_uint64),
        ("bytes_written", C.c_uint64),
    ]


# Name in the header -> its declaration here.
STRUCTS: dict[str, type[C.Structure]] = {
    "zo_abi_info": AbiInfo,
    "zo_segment": SegmentStruct,
    "zo_update_args": UpdateArgsStruct,
    "zo_grad_args": GradArgsStruct,
    "zo_io_config": IoConfigStruct,
    "zo_io_block": IoBlockStruct,
    "zo_io_result": IoResultStruct,
    "zo_io_stats_t": IoStatsStruct,
}

# Field of zo_abi_info -> the struct whose size it tells.
SIZED_STRUCTS = {
    "sizeof_update_args": "zo_update_args",
    "sizeof_segment": "zo_segment",
    "sizeof_grad_args": "zo_grad_args",
    "sizeof_io_config": "zo_io_config",
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
    "zo_update": (_INT, [C.POINTER(UpdateArgsStruct)]),
    "zo_master_split": (_INT, [_P, _P, _P, _I64, _U32]),
    "zo_master_join": (_INT, [_P, _P, _P, _I64, _U32]),
    "zo_short_master_split": (_INT, [_P, _P, _P, _I64, _U32]),
    "zo_short_master_join": (_INT, [_P, _P, _P, _I64, _U32]),
    "zo_states_decode": (_INT, [_U32, _U32, _P, _P, _P, _I64, _U32]),
    "zo_states_encode": (_INT, [_U32, _U32, _P, _P, _P, _I64, _U32]),
    "zo_convert": (_INT, [_U32, _P, _U32, _P, _I64, _U32]),
    "zo_grad_store": (_INT, [C.POINTER(GradArgsStruct)]),
    "zo_sumsq": (_INT, [_U32, _P, _I64, _U32, C.POINTER(C.c_double), C.POINTER(C.c_int32)]),
    "zo_crc32c": (_U32, [_U32, _P, _U64]),
    "zo_word_post": (_INT, [_P, _I64]),
    "zo_word_wait": (_INT, [_P, _I64, _I64]),
    "zo_io_open": (_INT, [C.POINTER(IoConfigStruct), C.POINTER(_P)]),
    "zo_io_stop": (_INT, [_P]),
    "zo_io_close": (_INT, [_P]),
    "zo_io_give_up": (_INT, [_P]),
    "zo_io_add_file": (_INT, [_P, C.c_int32, _U32]),
    "zo_io_add_memory": (_INT, [_P, _P, _U64]),
    "zo_io_abandon": (_INT, [_P]),
    "zo_io_submit": (_INT, [_P, _INT, _P, _U32, _P, _INT, C.POINTER(_U64)]),
    "zo_io_wait": (_INT, [_P, _U64, C.c_double, C.POINTER(IoResultStruct)]),
    "zo_io_done": (_INT, [_P, _U64]),
    "zo_io_stats": (_INT, [_P, C.POINTER(IoStatsStruct)]),
    "zo_io_fault": (_INT, [_P, _INT, _I64]),
}
