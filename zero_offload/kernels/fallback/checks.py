"""What csrc/abi.cpp and csrc/abi_update.cpp refuse, refused in the same words before anything is touched."""

from __future__ import annotations

import itertools
from typing import Any

from zero_offload.abi import STATE_BLOCK, GradMode, Kind, StateFormat
from zero_offload.errors import ConfigError
from zero_offload.kernels.fallback.rules import NUM_STATES
from zero_offload.native import StateArgs, UpdateArgs

_MAX_THREADS = 1024
_STATES = ("the first state", "the second state", "the third state")
_SCALES = tuple(f"{name}'s scales" for name in _STATES)
_STATE_BYTES = {StateFormat.FP32: 4, StateFormat.BF16: 2, StateFormat.COMPACT: 1}
ELEMENT_BYTES = {Kind.FP32: 4, Kind.BF16: 2, Kind.FP16: 2}


def check_range(call: str, numel: int, num_threads: int) -> None:
    if numel < 0:
        raise ConfigError(f"{call}: numel is {numel}, not 0 or more")
    if not 1 <= num_threads <= _MAX_THREADS:
        raise ConfigError(f"{call}: num_threads is {num_threads}, not 1 to {_MAX_THREADS}")


def check_dst_src(call: str, kinds: tuple[Kind, Kind], mode: GradMode, dst: int, src: int, numel: int) -> None:
    """From src to dst, element by element. Only what overwrites an element by one of its size works in place."""
    if numel == 0:
        return
    if not (dst and src):
        raise ConfigError(f"{call}: a buffer is NULL")
    if dst == src and kinds[0] is kinds[1] and mode is GradMode.OVERWRITE:
        return
    dst_bytes, src_bytes = (ELEMENT_BYTES[kind] for kind in kinds)
    check_apart(call, [("dst", dst, dst + numel * dst_bytes), ("src", src, src + numel * src_bytes)])


def check_grad_kinds(dst: Kind, src: Kind, mode: GradMode) -> None:
    if dst is not Kind.FP32 and (dst is not src or mode is GradMode.ACCUMULATE):
        raise ConfigError(
            f"gradients: dst kind {dst} from src kind {src} in mode {mode} is not offered; use an fp32 dst"
        )


def check_convert_kinds(dst: Kind, src: Kind) -> None:
    if dst is not src and Kind.FP32 not in (dst, src):
        raise ConfigError(f"zo_convert: kind {dst} from kind {src} is not offered; go through fp32")


def check_states(call: str, args: StateArgs) -> None:
    check_range(call, args.numel, args.num_threads)
    if args.numel == 0:
        return
    nbytes = {"states": args.numel * _STATE_BYTES[args.format], "fp32": 4 * args.numel}
    addresses = {"states": args.states, "fp32": args.fp32}
    if args.format is StateFormat.COMPACT:
        nbytes["scales"], addresses["scales"] = 4 * -(-args.numel // STATE_BLOCK), args.scales
    _check_pointers(call, addresses)
    check_apart(call, [(name, address, address + nbytes[name]) for name, address in addresses.items()])


def check_master(call: str, arrays: tuple[int, int, int], residual_bytes: int, numel: int, num_threads: int) -> None:
    """A master and its two parts, whichever way: `arrays` are of master, half and residual."""
    check_range(call, numel, num_threads)
    if numel == 0:
        return
    master, half, residual = arrays
    _check_pointers(call, {"master": master, "half": half, "residual": residual})
    ends = (master + 4 * numel, half + 2 * numel, residual + residual_bytes * numel)
    check_apart(call, list(zip(("master", "half", "residual"), arrays, ends, strict=True)))


def check_origin(args: UpdateArgs) -> None:
    grain = STATE_BLOCK if args.state_format is StateFormat.COMPACT else 1
    if args.origin < 0 or args.origin % grain:
        raise ConfigError(f"zo_update: origin is {args.origin}, not 0 or a multiple of {grain}")


def check_update(args: UpdateArgs, segments: Any) -> None:
    """`segments` are the rows at args.segments, at least one."""
    call, is_compact = "zo_update", args.state_format is StateFormat.COMPACT
    _check_segments(call, segments, is_compact)
    names = _STATES[: NUM_STATES[args.rule]]
    states = dict(zip(names, (*args.states, 0, 0, 0), strict=False))
    scales = dict(zip(_SCALES[: len(names)], (*args.scales, 0, 0, 0), strict=False)) if is_compact else {}
    needed = {"value": args.value}
    if args.value_kind is Kind.BF16:
        needed["residual of a bf16 value"] = args.residual
    if args.value_kind is Kind.FP16:
        needed["master of an fp16 value"] = args.master
    for name, of_scales in zip(names, _SCALES, strict=False):
        needed[name] = states[name]
        if is_compact:
            needed[of_scales] = scales[of_scales]
    needed["grad"] = args.grad
    _check_pointers(call, needed)
    value_bytes = ELEMENT_BYTES[args.value_kind]
    buffers = [
        ("value", args.value, value_bytes),
        ("value_out", args.value_out, value_bytes),
        ("grad", args.grad, ELEMENT_BYTES[args.grad_kind]),
        ("residual", args.residual if args.value_kind is Kind.BF16 else 0, 1 if is_compact else 2),
        ("master", args.master if args.value_kind is Kind.FP16 else 0, 4),
        *((name, address, _STATE_BYTES[args.state_format]) for name, address in states.items()),
    ]
    begin, end = int(segments[0]["begin"]), int(segments[-1]["end"])
    spans = [(name, address + size * begin, address + size * end) for name, address, size in buffers if address]
    for name, address in scales.items():
        spans.append((name, address + 4 * (begin // STATE_BLOCK), address + 4 * -(-end // STATE_BLOCK)))
    check_apart(call, spans)


def _check_pointers(call: str, needed: dict[str, int]) -> None:
    for name, address in needed.items():
        if not address:
            raise ConfigError(f"{call}: {name} is NULL")


def _check_segments(call: str, segments: Any, is_compact: bool) -> None:
    previous_end = 0
    for index, (begin, end, step) in enumerate(segments[["begin", "end", "step"]].tolist()):
        if begin < previous_end or end < begin:
            raise ConfigError(
                f"{call}: segment {index} is [{begin}, {end}) after one that ends at {previous_end}; sort them"
            )
        if is_compact and begin % STATE_BLOCK:
            raise ConfigError(
                f"{call}: segment {index} begins at {begin}; beside compact states it begins at a multiple of "
                f"{STATE_BLOCK}"
            )
        if step < 1:
            raise ConfigError(f"{call}: segment {index} has step {step}; the first step is 1")
        previous_end = end


def check_apart(call: str, spans: list[tuple[str, int, int]]) -> None:
    """No element of one buffer may lie in another: the pass would read what it has just written.

    A span is a name and the addresses of the first byte and of that behind the last.
    """
    for (a, a_first, a_last), (b, b_first, b_last) in itertools.combinations(spans, 2):
        if a_last > b_first and b_last > a_first:
            raise ConfigError(f"{call}: {a} and {b} overlap; give each memory of its own")
