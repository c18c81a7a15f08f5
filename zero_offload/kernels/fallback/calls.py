"""The kernels of the native library without it: the same calls, checks, chunks and bits over compiled or numpy passes.

Owns the order of a call: check everything, cut it into parts, run the passes. `PortableKernels` stands where
`native` stands otherwise.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Protocol

import numpy as np

from zero_offload import abi, crc32c
from zero_offload.abi import STATE_BLOCK, GradMode, Kind, Rule, StateFormat
from zero_offload.errors import ConfigError
from zero_offload.kernels.fallback.checks import (
    check_convert_kinds,
    check_dst_src,
    check_grad_kinds,
    check_master,
    check_origin,
    check_range,
    check_states,
    check_update,
)
from zero_offload.kernels.fallback.codec import random_key, turns
from zero_offload.kernels.fallback.elements import INFINITY
from zero_offload.kernels.fallback.parts import CHUNK, Body, in_parts, num_chunks
from zero_offload.kernels.fallback.rules import NUM_SCALARS, scalars_of
from zero_offload.native import StateArgs, SumOfSquares, UpdateArgs

_SEGMENT_DTYPE = np.dtype(abi.SegmentStruct)
_KIND_OF = {StateFormat.FP32: Kind.FP32, StateFormat.BF16: Kind.BF16}
READ = -1
"""Beside GradMode's: the mode of a sum that stores nothing."""


class Passes(Protocol):
    """What runs over memory; each call is one thread's part, and knows nothing of the others."""

    def update_part(
        self,
        rule: Rule,
        kinds: tuple[int, int, int],
        arrays: tuple[int, ...],
        line: tuple[Any, Any, Any, Any],
        begin: int,
        end: int,
    ) -> None:
        """Update places [begin, end) of the line on which all rows lie end to end; see `_line_of`.

        `kinds` are of value and gradient, and the format of states; `arrays` the addresses of value, residual, master,
        three states, their scales, gradient and value_out. Beside compact states `begin` starts a block.
        """

    def sum_part(
        self,
        kinds: tuple[int, int],
        mode: int,
        arrays: tuple[int, int],
        numel: int,
        found: tuple[Any, Any],
        first: int,
        last: int,
    ) -> None:
        """Chunks [first, last) of dst and src, (numel,) each: store src as `mode` says, and fill their rows of `found`:
        sums of squares (chunks,) fp64, the largest bits of a magnitude (chunks,) uint32."""

    def convert_part(self, kinds: tuple[int, int], arrays: tuple[int, int], begin: int, end: int) -> None:
        """`kinds` and `arrays` are of dst and src."""

    def split_part(self, master: int, half: int, residual: int, begin: int, end: int) -> None: ...

    def join_part(self, half: int, residual: int, master: int, begin: int, end: int) -> None: ...

    def short_split_part(self, master: int, half: int, residual: int, begin: int, end: int) -> None: ...

    def short_join_part(self, half: int, residual: int, master: int, begin: int, end: int) -> None: ...

    def decode_part(self, signed: bool, arrays: tuple[int, int, int], begin: int, end: int) -> None:
        """Of compact states: `arrays` are of codes, scales and fp32; `begin` starts a block."""

    def encode_part(self, signed: bool, arrays: tuple[int, int, int], begin: int, end: int) -> None:
        """As `decode_part`, the other way."""


class PortableKernels:
    """Each call is that of `native`, and returns its bits. The first call of a kind may take time to compile."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes

    def update(self, args: UpdateArgs) -> None:
        check_range("zo_update", args.num_segments, args.num_threads)
        check_origin(args)
        if args.num_segments == 0:
            return
        rows = (ctypes.c_char * (args.num_segments * _SEGMENT_DTYPE.itemsize)).from_address(args.segments)
        segments = np.frombuffer(memoryview(rows), _SEGMENT_DTYPE)
        check_update(args, segments)
        kinds = (int(args.value_kind), int(args.grad_kind), int(args.state_format))
        states, scales = ((*each, 0, 0, 0)[: abi.MAX_STATES] for each in (args.states, args.scales))
        arrays = (args.value, args.residual, args.master, *states, *scales, args.grad, args.value_out)
        line = _line_of(args, segments)
        total = int(line[0][-1])

        def update_chunks(first: int, last: int) -> None:
            self.passes.update_part(args.rule, kinds, arrays, line, first * CHUNK, min(last * CHUNK, total))

        in_parts(num_chunks(total), args.num_threads, update_chunks)

    def master_split(self, master: int, half: int, residual: int, numel: int, num_threads: int) -> None:
        check_master("zo_master_split", (master, half, residual), 2, numel, num_threads)
        _in_elements(numel, num_threads, lambda *part: self.passes.split_part(master, half, residual, *part))

    def master_join(self, half: int, residual: int, master: int, numel: int, num_threads: int) -> None:
        check_master("zo_master_join", (master, half, residual), 2, numel, num_threads)
        _in_elements(numel, num_threads, lambda *part: self.passes.join_part(half, residual, master, *part))

    def short_master_split(self, master: int, half: int, residual: int, numel: int, num_threads: int) -> None:
        check_master("zo_short_master_split", (master, half, residual), 1, numel, num_threads)
        _in_elements(numel, num_threads, lambda *part: self.passes.short_split_part(master, half, residual, *part))

    def short_master_join(self, half: int, residual: int, master: int, numel: int, num_threads: int) -> None:
        check_master("zo_short_master_join", (master, half, residual), 1, numel, num_threads)
        _in_elements(numel, num_threads, lambda *part: self.passes.short_join_part(half, residual, master, *part))

    def states_decode(self, args: StateArgs) -> None:
        check_states("zo_states_decode", args)
        if args.format is not StateFormat.COMPACT:
            self.convert(args.fp32, Kind.FP32, args.states, _KIND_OF[args.format], args.numel, args.num_threads)
            return
        arrays = (args.states, args.scales, args.fp32)
        _in_elements(args.numel, args.num_threads, lambda *part: self.passes.decode_part(args.signed, arrays, *part))

    def states_encode(self, args: StateArgs) -> None:
        check_states("zo_states_encode", args)
        if args.format is not StateFormat.COMPACT:
            self.convert(args.states, _KIND_OF[args.format], args.fp32, Kind.FP32, args.numel, args.num_threads)
            return
        arrays = (args.states, args.scales, args.fp32)
        _in_elements(args.numel, args.num_threads, lambda *part: self.passes.encode_part(args.signed, arrays, *part))

    def convert(self, dst: int, dst_kind: Kind, src: int, src_kind: Kind, numel: int, num_threads: int) -> None:
        check_range("zo_convert", numel, num_threads)
        check_dst_src("zo_convert", (dst_kind, src_kind), GradMode.OVERWRITE, dst, src, numel)
        check_convert_kinds(dst_kind, src_kind)
        kinds = (int(dst_kind), int(src_kind))
        _in_elements(numel, num_threads, lambda *part: self.passes.convert_part(kinds, (dst, src), *part))

    def grad_store(
        self, dst_kind: Kind, src_kind: Kind, mode: GradMode, num_threads: int, dst: int, src: int, numel: int
    ) -> SumOfSquares:
        check_range("zo_grad_store", numel, num_threads)
        check_dst_src("zo_grad_store", (dst_kind, src_kind), mode, dst, src, numel)
        check_grad_kinds(dst_kind, src_kind, mode)
        return self._sum((dst_kind, src_kind), int(mode), (dst, src), numel, num_threads)

    def sumsq(self, kind: Kind, values: int, numel: int, num_threads: int) -> SumOfSquares:
        check_range("zo_sumsq", numel, num_threads)
        if numel > 0 and not values:
            raise ConfigError("zo_sumsq: values is NULL")
        return self._sum((kind, kind), READ, (values, values), numel, num_threads)

    def crc32c(self, seed: int, address: int, nbytes: int) -> int:
        return crc32c.of_memory(seed, address, nbytes)

    def _sum(
        self, kinds: tuple[Kind, Kind], mode: int, arrays: tuple[int, int], numel: int, num_threads: int
    ) -> SumOfSquares:
        """See [Note: the tree] in csrc/reduce/reduce.h."""
        count = num_chunks(numel)
        sums, tops = np.zeros(count), np.zeros(count, dtype=np.uint32)
        plain = (int(kinds[0]), int(kinds[1]))

        def sum_chunks(first: int, last: int) -> None:
            self.passes.sum_part(plain, mode, arrays, numel, (sums, tops), first, last)

        in_parts(count, num_threads, sum_chunks)
        total = 0.0
        for each in sums.tolist():
            total += each
        return SumOfSquares(math.nan if math.isnan(total) else total, bool((tops < INFINITY).all()))


def _line_of(args: UpdateArgs, segments: Any) -> tuple[Any, Any, Any, Any]:
    """Chunks are cut from one line, so that many small segments share a part.

    A row of it is a segment, or as much of one as has one key: random words are numbered modulo 2^32, and which turn it
    is is a part of their key. (rows + 1,) where each begins on the line, beside compact states at a block; (rows, 3)
    how far from there its elements lie, where they end, and how far from there they are numbered; (rows, NUM_SCALARS)
    fp32 scalars; (rows, 2) uint32 keys.
    """
    scalars = np.zeros((len(segments), NUM_SCALARS), dtype=np.float32)
    with np.errstate(over="ignore"):
        for row, segment in zip(scalars, segments, strict=True):
            row[:] = scalars_of(args.rule, segment)
    grain = STATE_BLOCK if args.state_format is StateFormat.COMPACT else 1
    first, places, keys, of_segment = [0], [], [], []
    for index, (start, end, step) in enumerate(segments[["begin", "end", "step"]].tolist()):
        for begin, stop, turn in turns(args.origin, start, end):
            shift = begin - first[-1]
            places.append((shift, stop, (args.origin + shift) % (1 << 32)))
            keys.append(random_key(args.seed, step, turn))
            of_segment.append(index)
            first.append(first[-1] - (begin - stop) // grain * grain)
    return (
        np.array(first, dtype=np.int64),
        np.array(places, dtype=np.int64).reshape(-1, 3),
        scalars[of_segment],
        np.array(keys, dtype=np.uint32).reshape(-1, 2),
    )


def _in_elements(numel: int, num_threads: int, body: Body) -> None:
    """body(begin, end) for runs of whole chunks."""
    in_parts(num_chunks(numel), num_threads, lambda first, last: body(first * CHUNK, min(last * CHUNK, numel)))
