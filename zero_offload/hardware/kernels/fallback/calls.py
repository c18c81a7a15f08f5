"""The kernels of the native library without it: the same calls, chunks and bits over passes that numba compiles.

This module stands where `native` stands otherwise: each call cuts its work into parts and runs the passes. Arguments
are the package's own, and not checked again, except that buffers of an update, which may be a user's, lie apart. The
first call of a kind may take time to compile.

The loop over parts is the only parallel one: a pass is serial, and a call hands it a range. The caller takes parts too,
and returns, even by Ctrl-C, only when no thread works on its memory any more. Parts are whole chunks counted from the
start of the call, so results never depend on the number of threads.
"""

from __future__ import annotations

import _thread
import ctypes
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from zero_offload.base.threads import Monitor
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import STATE_BLOCK, ElementType, GradMode, Rule, UpdateArgsStruct
from zero_offload.hardware.kernels.arguments import CHUNK, SEGMENT_DTYPE, check_apart
from zero_offload.hardware.kernels.fallback import numba_passes as passes
from zero_offload.hardware.kernels.fallback.codec import INFINITY, random_key, turns
from zero_offload.hardware.kernels.rules import NUM_SCALARS, STATES, scalars_of_row
from zero_offload.hardware.native import GradSum

Body = Callable[[int, int], None]

_KIND_OF = {StateFormat.FP32: ElementType.FP32, StateFormat.BF16: ElementType.BF16}
_STATE_BYTES = {StateFormat.FP32: 4, StateFormat.BF16: 2, StateFormat.COMPACT: 1}


def update(args: UpdateArgsStruct) -> None:
    if args.num_segments == 0:
        return
    rows = (ctypes.c_char * (args.num_segments * SEGMENT_DTYPE.itemsize)).from_address(args.segments)
    segments = np.frombuffer(memoryview(rows), SEGMENT_DTYPE)
    rule = Rule(args.rule)
    _check_update(args, rule, segments)
    kinds = (args.value_kind, args.grad_kind, args.state_format)
    addresses = (args.value, args.residual, args.master, *args.states, *args.scales, args.grad, args.value_out)
    arrays = tuple(address or 0 for address in addresses)
    line, run = _line_of(args, rule, segments), passes.update_of(rule)
    _in_elements(int(line[0][-1]), args.num_threads, lambda *part: run(kinds, arrays, line, *part))


def master_split(short: bool, master: int, half: int, residual: int, numel: int, num_threads: int) -> None:
    split = passes.short_split if short else passes.split
    _in_elements(numel, num_threads, lambda *part: split(master, half, residual, *part))


def master_join(short: bool, half: int, residual: int, master: int, numel: int, num_threads: int) -> None:
    join = passes.short_join if short else passes.join
    _in_elements(numel, num_threads, lambda *part: join(half, residual, master, *part))


def states_decode(
    format: StateFormat, signed: bool, states: int, scales: int, fp32: int, numel: int, num_threads: int
) -> None:
    if format is StateFormat.COMPACT:
        arrays = (states, scales, fp32)
        _in_elements(numel, num_threads, lambda *part: passes.decode(signed, arrays, *part))
    else:
        convert(fp32, ElementType.FP32, states, _KIND_OF[format], numel, num_threads)


def states_encode(
    format: StateFormat, signed: bool, states: int, scales: int, fp32: int, numel: int, num_threads: int
) -> None:
    if format is StateFormat.COMPACT:
        arrays = (states, scales, fp32)
        _in_elements(numel, num_threads, lambda *part: passes.encode(signed, arrays, *part))
    else:
        convert(states, _KIND_OF[format], fp32, ElementType.FP32, numel, num_threads)


def convert(dst: int, dst_kind: ElementType, src: int, src_kind: ElementType, numel: int, num_threads: int) -> None:
    kinds = (int(dst_kind), int(src_kind))
    _in_elements(numel, num_threads, lambda *part: passes.convert(kinds, (dst, src), *part))


def grad_store(
    dst_kind: ElementType, src_kind: ElementType, mode: GradMode, num_threads: int, dst: int, src: int, numel: int
) -> GradSum:
    return _sum((int(dst_kind), int(src_kind)), int(mode), (dst, src), numel, num_threads)


def sumsq(kind: ElementType, values: int, numel: int, num_threads: int) -> GradSum:
    return _sum((int(kind), int(kind)), passes.READ, (values, values), numel, num_threads)


def crc32c(seed: int, address: int, nbytes: int) -> int:
    """`seed` is the register's start, so that equal bytes in other places have other checksums."""
    return int(passes.crc32c(np.uint32(seed ^ 0xFFFFFFFF), address, nbytes, passes.crc_tables())) ^ 0xFFFFFFFF


def crc32c_each(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return [crc32c(0, address, nbytes) for address, nbytes in ranges]


def _sum(kinds: tuple[int, int], mode: int, arrays: tuple[int, int], numel: int, num_threads: int) -> GradSum:
    """See [Note: the tree] in csrc/reduce/reduce.h."""
    count = num_chunks(numel)
    found = sums, tops = np.zeros(count), np.zeros(count, dtype=np.uint32)
    in_parts(count, num_threads, lambda *chunks: passes.sum_chunks(kinds, mode, arrays, numel, found, *chunks))
    total = 0.0
    for each in sums.tolist():
        total += each
    return GradSum(math.nan if math.isnan(total) else total, bool((tops < INFINITY).all()))


def _check_update(args: UpdateArgsStruct, rule: Rule, segments: Any) -> None:
    """Raises ConfigError, in the words of csrc/abi_update.cpp, where buffers overlap."""
    begin, end = int(segments[0]["begin"]), int(segments[-1]["end"])
    value_bytes, grad_bytes = (4 if kind == ElementType.FP32 else 2 for kind in (args.value_kind, args.grad_kind))
    sizes = [("value", args.value, value_bytes), ("value_out", args.value_out, value_bytes)]
    sizes.append(("grad", args.grad, grad_bytes))
    if args.value_kind == ElementType.BF16:
        sizes.append(("residual", args.residual, 1 if args.state_format == StateFormat.COMPACT else 2))
    if args.value_kind == ElementType.FP16:
        sizes.append(("master", args.master, 4))
    names = ("the first state", "the second state", "the third state")[: len(STATES[rule])]
    sizes += [(name, at, _STATE_BYTES[args.state_format]) for name, at in zip(names, args.states, strict=False)]
    spans = [(name, at + size * begin, at + size * end) for name, at, size in sizes if at]
    for name, at in zip(names, args.scales, strict=False):
        if at:
            spans.append((f"{name}'s scales", at + 4 * (begin // STATE_BLOCK), at + 4 * -(-end // STATE_BLOCK)))
    check_apart("zo_update", spans)


def _line_of(args: UpdateArgsStruct, rule: Rule, segments: Any) -> tuple[Any, Any, Any, Any]:
    """Chunks are cut from one line, so that many small segments share a part.

    A row of it is a segment, or as much of a segment as has one key. Random words are numbered modulo 2^32, and the
    number of the turn is a part of their key. Returned are four arrays. (rows + 1,) has where each row begins on the
    line, beside compact states at a block. (rows, 3) has how far from there its elements lie, where they end, and how
    far from there they are numbered. (rows, NUM_SCALARS) has fp32 scalars, (rows, 2) uint32 keys.
    """
    scalars = np.zeros((len(segments), NUM_SCALARS), dtype=np.float32)
    with np.errstate(over="ignore"):
        for row, segment in zip(scalars, segments, strict=True):
            row[:] = scalars_of_row(rule, segment)
    grain = STATE_BLOCK if args.state_format == StateFormat.COMPACT else 1
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


def num_chunks(numel: int) -> int:
    return -(-numel // CHUNK)


def in_parts(count: int, num_threads: int, body: Body) -> None:
    """Call body(begin, end) for contiguous runs that make up [0, count), one for each thread."""
    team = min(num_threads, count)
    if team <= 1:
        if count:
            body(0, count)
        return
    loop = ParallelFor(body, [(count * i // team, count * (i + 1) // team) for i in range(team)])
    try:
        for _ in range(team - 1):
            try:
                # Not `threading.Thread`: its `start` takes a lock in Python, which a Ctrl-C may leave taken.
                _thread.start_new_thread(loop.help, ())
            except RuntimeError:  # the system gives no more, or the interpreter is going down
                break
        loop.work()
    finally:
        loop.end()


class ParallelFor:
    """Parts that are waiting, and how many helpers are at work on one."""

    def __init__(self, body: Body, parts: list[tuple[int, int]]) -> None:
        self._body, self._parts = body, parts
        self._changed = Monitor()
        self._num_helping = 0
        self._failure: BaseException | None = None

    def work(self) -> None:
        """Take parts in the calling thread until none is left."""
        while part := self._take():
            self._body(*part)

    def help(self) -> None:
        """Take parts in another thread, which may come when all is over."""
        while part := self._take(helping=1):
            try:
                self._body(*part)
            except BaseException as error:
                self._failure = error
            finally:
                with self._changed.lock:
                    self._num_helping -= 1
                    self._changed.notify()

    def end(self) -> None:
        """Give out no more parts, and return when no helper has one. Raises what went wrong in one."""
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed.lock:
                    self._parts.clear()
                self._changed.wait_for(lambda: self._num_helping == 0)
                break
            except BaseException as error:  # a signal's handler: the memory is still in use
                interrupt = error
        if failure := interrupt or self._failure:
            raise failure

    def _take(self, helping: int = 0) -> tuple[int, int] | None:
        with self._changed.lock:
            if not self._parts:
                return None
            self._num_helping += helping
            return self._parts.pop()
