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
from zero_offload.abi import GradMode, Kind, Rule, StateFormat
from zero_offload.errors import ConfigError
from zero_offload.kernels.fallback.checks import (
    check_buffers,
    check_convert_kinds,
    check_grad_kinds,
    check_range,
    check_update,
)
from zero_offload.kernels.fallback.elements import INFINITY
from zero_offload.kernels.fallback.parts import CHUNK, Body, in_parts, num_chunks
from zero_offload.kernels.fallback.rules import NUM_SCALARS, scalars_of
from zero_offload.native import StateArgs, SumOfSquares, UpdateArgs

_SEGMENT_DTYPE = np.dtype(abi.SegmentStruct)
READ = -1
"""Beside GradMode's: the mode of a sum that stores nothing."""


class Passes(Protocol):
    """What runs over memory; each call is one thread's part, and knows nothing of the others."""

    def update_part(
        self,
        rule: Rule,
        kinds: tuple[int, int],
        arrays: tuple[int, ...],
        line: tuple[Any, Any, Any],
        begin: int,
        end: int,
    ) -> None:
        """Update elements [begin, end) of the line on which all segments lie end to end.

        `kinds` are of value and gradient; `arrays` the addresses of value, residual, master, three states, gradient
        and value_out; `line` is (segments + 1,) where each begins on the line, (segments,) how far from there its
        elements lie, (segments, NUM_SCALARS) fp32 scalars.
        """

    def sum_part(
        self,
        kinds: tuple[int, int],
        mode: int,
        scale: np.float32,
        arrays: tuple[int, int],
        numel: int,
        found: tuple[Any, Any],
        first: int,
        last: int,
    ) -> None:
        """Chunks [first, last) of dst and src, (numel,) each: store src * scale as `mode` says, and fill their rows of
        `found`: sums of squares (chunks,) fp64, the largest bits of a magnitude (chunks,) uint32."""

    def convert_part(self, kinds: tuple[int, int], arrays: tuple[int, int], begin: int, end: int) -> None:
        """`kinds` and `arrays` are of dst and src."""

    def split_part(self, master: int, half: int, residual: int, begin: int, end: int) -> None: ...

    def join_part(self, half: int, residual: int, master: int, begin: int, end: int) -> None: ...


class PortableKernels:
    """Each call is that of `native`, and returns its bits. The first call of a kind may take time to compile."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes

    def update(self, args: UpdateArgs) -> None:
        if args.state_format is not StateFormat.FP32:
            raise _needs_library(args.state_format)
        check_range("zo_update", args.num_segments, args.num_threads)
        if args.num_segments == 0:
            return
        rows = (ctypes.c_char * (args.num_segments * _SEGMENT_DTYPE.itemsize)).from_address(args.segments)
        segments = np.frombuffer(memoryview(rows), _SEGMENT_DTYPE)
        check_update(args, segments)
        kinds = (int(args.value_kind), int(args.grad_kind))
        states = (*args.states, 0, 0, 0)[: abi.MAX_STATES]
        arrays = (args.value, args.residual, args.master, *states, args.grad, args.value_out)
        line = _line_of(args.rule, segments)
        total = int(line[0][-1])

        def update_chunks(first: int, last: int) -> None:
            self.passes.update_part(args.rule, kinds, arrays, line, first * CHUNK, min(last * CHUNK, total))

        in_parts(num_chunks(total), args.num_threads, update_chunks)

    def master_split(self, master: int, half: int, residual: int, numel: int, num_threads: int) -> None:
        check_range("zo_master_split", numel, num_threads)
        check_buffers("zo_master_split", numel, master, half, residual)
        _in_elements(numel, num_threads, lambda *part: self.passes.split_part(master, half, residual, *part))

    def master_join(self, half: int, residual: int, master: int, numel: int, num_threads: int) -> None:
        check_range("zo_master_join", numel, num_threads)
        check_buffers("zo_master_join", numel, half, residual, master)
        _in_elements(numel, num_threads, lambda *part: self.passes.join_part(half, residual, master, *part))

    def short_master_split(self, master: int, half: int, residual: int, numel: int, num_threads: int) -> None:
        raise _needs_library(StateFormat.COMPACT)

    def short_master_join(self, half: int, residual: int, master: int, numel: int, num_threads: int) -> None:
        raise _needs_library(StateFormat.COMPACT)

    def states_decode(self, args: StateArgs) -> None:
        raise _needs_library(args.format)

    def states_encode(self, args: StateArgs) -> None:
        raise _needs_library(args.format)

    def convert(self, dst: int, dst_kind: Kind, src: int, src_kind: Kind, numel: int, num_threads: int) -> None:
        check_range("zo_convert", numel, num_threads)
        check_buffers("zo_convert", numel, dst, src)
        check_convert_kinds(dst_kind, src_kind)
        kinds = (int(dst_kind), int(src_kind))
        _in_elements(numel, num_threads, lambda *part: self.passes.convert_part(kinds, (dst, src), *part))

    def grad_store(
        self,
        dst_kind: Kind,
        src_kind: Kind,
        mode: GradMode,
        num_threads: int,
        scale: float,
        dst: int,
        src: int,
        numel: int,
    ) -> SumOfSquares:
        check_range("zo_grad_store", numel, num_threads)
        check_buffers("zo_grad_store", numel, dst, src)
        check_grad_kinds(dst_kind, src_kind, mode)
        return self._sum((dst_kind, src_kind), int(mode), scale, (dst, src), numel, num_threads)

    def sumsq(self, kind: Kind, values: int, numel: int, num_threads: int) -> SumOfSquares:
        check_range("zo_sumsq", numel, num_threads)
        if numel > 0 and not values:
            raise ConfigError("zo_sumsq: values is NULL")
        return self._sum((kind, kind), READ, 1.0, (values, values), numel, num_threads)

    def crc32c(self, seed: int, address: int, nbytes: int) -> int:
        return crc32c.of_memory(seed, address, nbytes)

    def _sum(
        self,
        kinds: tuple[Kind, Kind],
        mode: int,
        scale: float,
        arrays: tuple[int, int],
        numel: int,
        num_threads: int,
    ) -> SumOfSquares:
        """See [Note: the tree] in csrc/reduce/reduce.h."""
        count = num_chunks(numel)
        sums, tops = np.zeros(count), np.zeros(count, dtype=np.uint32)
        with np.errstate(over="ignore"):  # a scale beyond fp32 is an infinity, as in C
            factor = np.float32(scale)
        plain = (int(kinds[0]), int(kinds[1]))

        def sum_chunks(first: int, last: int) -> None:
            self.passes.sum_part(plain, mode, factor, arrays, numel, (sums, tops), first, last)

        in_parts(count, num_threads, sum_chunks)
        total = 0.0
        for each in sums.tolist():
            total += each
        return SumOfSquares(math.nan if math.isnan(total) else total, bool((tops < INFINITY).all()))


def _needs_library(format: StateFormat) -> ConfigError:
    return ConfigError(
        f"states in {format.name.lower()} need the native library, which is missing here; build it with a C++17 "
        "compiler (pip install --force-reinstall), or use Precision(states='fp32')"
    )


def _line_of(rule: Rule, segments: Any) -> tuple[Any, Any, Any]:
    """See `Passes.update_part`: chunks are cut from one line, so that many small segments share a part."""
    first = np.zeros(len(segments) + 1, dtype=np.int64)
    np.cumsum(segments["end"] - segments["begin"], out=first[1:])
    scalars = np.zeros((len(segments), NUM_SCALARS), dtype=np.float32)
    with np.errstate(over="ignore"):
        for row, segment in zip(scalars, segments, strict=True):
            row[:] = scalars_of(rule, segment)
    return first, segments["begin"] - first[:-1], scalars


def _in_elements(numel: int, num_threads: int, body: Body) -> None:
    """body(begin, end) for runs of whole chunks."""
    in_parts(num_chunks(numel), num_threads, lambda first, last: body(first * CHUNK, min(last * CHUNK, numel)))
