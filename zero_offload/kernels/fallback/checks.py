"""What csrc/abi.cpp refuses, refused in the same words before anything is touched."""

from __future__ import annotations

import itertools
from typing import Any

from zero_offload.abi import GradMode, Kind
from zero_offload.errors import ConfigError
from zero_offload.kernels.fallback.rules import NUM_STATES
from zero_offload.native import UpdateArgs

_MAX_THREADS = 1024
_STATES = ("the first state", "the second state", "the third state")
ELEMENT_BYTES = {Kind.FP32: 4, Kind.BF16: 2, Kind.FP16: 2}


def check_range(call: str, numel: int, num_threads: int) -> None:
    if numel < 0:
        raise ConfigError(f"{call}: numel is {numel}, not 0 or more")
    if not 1 <= num_threads <= _MAX_THREADS:
        raise ConfigError(f"{call}: num_threads is {num_threads}, not 1 to {_MAX_THREADS}")


def check_buffers(call: str, numel: int, *addresses: int) -> None:
    if numel > 0 and not all(addresses):
        raise ConfigError(f"{call}: a buffer is NULL")


def check_grad_kinds(dst: Kind, src: Kind, mode: GradMode) -> None:
    if dst is not Kind.FP32 and (dst is not src or mode is GradMode.ACCUMULATE):
        raise ConfigError(
            f"gradients: dst kind {dst} from src kind {src} in mode {mode} is not offered; use an fp32 dst"
        )


def check_convert_kinds(dst: Kind, src: Kind) -> None:
    if dst is not src and Kind.FP32 not in (dst, src):
        raise ConfigError(f"zo_convert: kind {dst} from kind {src} is not offered; go through fp32")


def check_update(args: UpdateArgs, segments: Any) -> None:
    """`segments` are the rows at args.segments, at least one."""
    call = "zo_update"
    _check_segments(call, segments)
    states = args.states[: NUM_STATES[args.rule]]
    needed = {"value": args.value}
    if args.value_kind is Kind.BF16:
        needed["residual of a bf16 value"] = args.residual
    if args.value_kind is Kind.FP16:
        needed["master of an fp16 value"] = args.master
    needed |= {_STATES[k]: states[k] if k < len(states) else 0 for k in range(NUM_STATES[args.rule])}
    needed["grad"] = args.grad
    for name, address in needed.items():
        if not address:
            raise ConfigError(f"{call}: {name} is NULL")
    value_bytes = ELEMENT_BYTES[args.value_kind]
    buffers = [
        ("value", args.value, value_bytes),
        ("value_out", args.value_out, value_bytes),
        ("grad", args.grad, ELEMENT_BYTES[args.grad_kind]),
        ("residual", args.residual if args.value_kind is Kind.BF16 else 0, 2),
        ("master", args.master if args.value_kind is Kind.FP16 else 0, 4),
        *((name, address, 4) for name, address in zip(_STATES, states, strict=False)),
    ]
    _check_apart(call, [each for each in buffers if each[1]], int(segments[0]["begin"]), int(segments[-1]["end"]))


def _check_segments(call: str, segments: Any) -> None:
    previous_end = 0
    for index, (begin, end, step) in enumerate(segments[["begin", "end", "step"]].tolist()):
        if begin < previous_end or end < begin:
            raise ConfigError(
                f"{call}: segment {index} is [{begin}, {end}) after one that ends at {previous_end}; sort them"
            )
        if step < 1:
            raise ConfigError(f"{call}: segment {index} has step {step}; the first step is 1")
        previous_end = end


def _check_apart(call: str, buffers: list[tuple[str, int, int]], begin: int, end: int) -> None:
    """No element of one buffer may lie in another: the pass would read what it has just written."""
    for (a, a_address, a_bytes), (b, b_address, b_bytes) in itertools.combinations(buffers, 2):
        if a_address + a_bytes * end > b_address + b_bytes * begin and (
            b_address + b_bytes * end > a_address + a_bytes * begin
        ):
            raise ConfigError(f"{call}: {a} and {b} overlap; give each memory of its own")
