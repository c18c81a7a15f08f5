"""Optimizer kernels: against torch's fused AdamW and DeepSpeedCPUAdam, and against what memory and arithmetic allow.

All things compared take turns in one process, on the same arrays on huge pages, in another order each round. A figure
is the median of its rounds, a ratio the median of the rounds' ratios. `torch` and `DeepSpeed` update fp32 parameters,
and copy them to bf16 for the model. The limit of a kernel is the larger of two loops (loops.cpp). One only streams the
same bytes, and one does the same arithmetic in the first-level cache. The peer runs where it is installed:

    PYTHONPATH=. DS_ACCELERATOR=cpu PEER_ENVIRONMENT/bin/python benchmarks/limits.py kernels --quick
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from harness import command
from harness.limits.loops import arithmetic, stream
from harness.rows import Row, missing, row, show, write

from zero_offload.base.types import StateFormat
from zero_offload.hardware import native
from zero_offload.hardware.abi import STATE_BLOCK, Rule
from zero_offload.hardware.kernels.arguments import Segment, kind_of, segment_array
from zero_offload.hardware.kernels.formats import convert
from zero_offload.hardware.kernels.grads import accumulate_grad, sum_of_squares
from zero_offload.hardware.kernels.rules import STATES
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update
from zero_offload.storage.memory.arena import Arena

M = 10**6
SIZES, QUICK_SIZES = [1 * M, 10 * M, 100 * M, 400 * M], [1 * M, 100 * M]
ROUND_S = 0.02
"""One turn of a small size is as many calls as fill this."""
HYPER = {"lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
REACH_PEERS, REACH_TORCH_CACHED, REACH_DEEPSPEED_CACHED, REACH_LIMIT = 1 / 1.35, 1 / 2.5, 1 / 1.25, 1 / 0.95
REACH_SMALL_LIMIT, REACH_EXACT = 1 / 0.9, 1 / 1.3
INSTALL = "pip install deepspeed==0.19.8 (DS_BUILD_OPS=0, needs g++ and ninja), then run this with its python"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

Call = Callable[[], object]


@dataclass(frozen=True)
class Format:
    """The dtypes, rule and formats of a kernel's call."""

    name: str
    rule: Rule
    value: torch.dtype
    grad: torch.dtype
    states: StateFormat = StateFormat.FP32


EXACT = Format("AdamW, bf16 half and residual", Rule.ADAMW, BF16, BF16)
FORMATS = [
    EXACT,
    Format("AdamW, fp32", Rule.ADAMW, FP32, FP32),
    Format("AdamW, fp16 and master", Rule.ADAMW, FP16, FP16),
    Format("Adam with AMSGrad, bf16", Rule.ADAM_AMSGRAD, BF16, BF16),
    Format("Adagrad, bf16", Rule.ADAGRAD, BF16, BF16),
    Format("Lion, bf16", Rule.LION, BF16, BF16),
    Format("SGD with momentum, bf16", Rule.SGD_MOMENTUM, BF16, BF16),
    Format("SGD, bf16", Rule.SGD, BF16, BF16),
]
SMALL_FORMATS = [
    Format("AdamW, states in bf16", Rule.ADAMW, BF16, BF16, StateFormat.BF16),
    Format("AdamW, compact", Rule.ADAMW, BF16, BF16, StateFormat.COMPACT),
    Format("Lion, compact", Rule.LION, BF16, BF16, StateFormat.COMPACT),
]


class Arrays:
    """The memory that all share: (numel,) each."""

    def __init__(self, numel: int) -> None:
        self.arena = arena = Arena(0)
        self.numel = numel
        self.fp32 = [arena.array(FP32, numel) for _ in range(5)]
        """A master or parameter, three states, a gradient."""
        self.halves = [arena.array(BF16, numel) for _ in range(4)]
        """A half, a residual, a gradient, a copy."""
        for begin in range(0, numel, M):
            end = min(numel, begin + M)
            for array in (self.fp32[0], self.fp32[4], self.halves[0], self.halves[2]):
                array[begin:end].normal_(std=0.02)

    def of(self, dtype: torch.dtype, fp32: int, half: int) -> torch.Tensor:
        return self.fp32[fp32] if dtype is FP32 else self.halves[half].view(dtype)

    @cached_property
    def small(self) -> list[torch.Tensor]:
        """Memory for two states in 16 bits or 8."""
        return [self.arena.array(BF16, self.numel) for _ in range(2)]

    @cached_property
    def scales(self) -> list[torch.Tensor]:
        return [self.arena.array(FP32, -(-self.numel // STATE_BLOCK)) for _ in range(2)]

    def states(self, form: Format) -> list[torch.Tensor]:
        count = len(STATES[form.rule])
        if form.states is StateFormat.FP32:
            return self.fp32[1 : 1 + count]
        dtype = torch.int8 if form.states is StateFormat.COMPACT else BF16
        return [each.view(dtype)[: self.numel] for each in self.small[:count]]

    def update(self, form: Format, threads: int) -> Call:
        """The kernel, without a second copy of the value."""
        value, grad = self.of(form.value, 0, 0), self.of(form.grad, 4, 2)
        buffers = UpdateBuffers(
            value=value.data_ptr(),
            residual=self.halves[1].data_ptr() if form.value is BF16 else 0,
            master=self.fp32[0].data_ptr() if form.value is FP16 else 0,
            states=tuple(state.data_ptr() for state in self.states(form)),
            grad=grad.data_ptr(),
            value_out=0,
            value_dtype=form.value,
            grad_dtype=form.grad,
            scales=tuple(each.data_ptr() for each in self.scales) if form.states is StateFormat.COMPACT else (),
            state_format=form.states,
        )
        segment = Segment(0, self.numel, 1e-6, 0.9, 0.999, 1e-8, 0.01, 1.0, 100)
        segments = segment_array([segment])
        return lambda: fused_update(form.rule, buffers, segments, threads)

    def stream_of(self, form: Format, threads: int) -> Call:
        """A loop over the same bytes."""
        changed = [self.of(form.value, 0, 0), *self.states(form)]
        if form.value is BF16:
            residual_dtype = torch.int8 if form.states is StateFormat.COMPACT else BF16
            changed.append(self.halves[1].view(residual_dtype)[: self.numel])
        elif form.value is FP16:
            changed.append(self.fp32[0])
        read = [self.of(form.grad, 4, 2)]
        return lambda: stream(read, changed, self.numel, threads)

    def clear(self) -> None:
        """After streams, which leave any bits."""
        small = [*self.small, *self.scales] if "small" in vars(self) else []
        for array in (*self.fp32[1:4], self.halves[1], *small):
            array.zero_()
        for array in (self.fp32[0], self.halves[0]):
            array.fill_(0.02)


def take_turns(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds per call, round by round."""
    counts = {}
    for name, call in calls.items():
        call()
        begin = time.perf_counter()
        call()
        counts[name] = max(1, round(ROUND_S / (time.perf_counter() - begin)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            begin = time.perf_counter()
            for _ in range(counts[name]):
                calls[name]()
            times[name].append((time.perf_counter() - begin) / counts[name])
    return times


def compare(name: str, ours: Sequence[float], against: str, theirs: Sequence[float], numel: int, reach: float) -> Row:
    """In nanoseconds per parameter; the ratio is the median of the rounds'."""
    scale = 1e9 / numel
    made = row(name, statistics.median(ours) * scale, "ns", against, statistics.median(theirs) * scale, reach)
    ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
    return made | {"ratio": ratio, "ok": ratio <= reach}


def peers(arrays: Arrays) -> dict[str, Call]:
    """Their updates of fp32 parameters, each with a copy to bf16; DeepSpeed where it is installed."""
    param = torch.nn.Parameter(arrays.fp32[0])
    param.grad = arrays.fp32[4]
    copy = arrays.halves[3]
    moments = {"exp_avg": arrays.fp32[1], "exp_avg_sq": arrays.fp32[2]}
    found: dict[str, torch.optim.Optimizer] = {"torch": torch.optim.AdamW([param], fused=True, **HYPER)}
    found["torch"].state[param].update(moments | {"step": torch.tensor(100.0)})
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found["DeepSpeed"] = DeepSpeedCPUAdam([param], adamw_mode=True, **HYPER)
        found["DeepSpeed"].state[param].update(moments | {"step": 100})
    except ImportError:
        pass

    def with_copy(optimizer: torch.optim.Optimizer) -> Call:
        def call() -> None:
            optimizer.step()
            copy.copy_(param.detach())

        return call

    return {name: with_copy(optimizer) for name, optimizer in found.items()}


def rows_of_peers(arrays: Arrays, threads: int, rounds: int) -> list[Row]:
    numel = arrays.numel
    calls = {"ours": arrays.update(EXACT, threads)} | peers(arrays)
    times = take_turns(calls, rounds)
    cached = numel <= M
    made = []
    for peer, reach in (
        ("torch", REACH_TORCH_CACHED if cached else REACH_PEERS),
        ("DeepSpeed", REACH_DEEPSPEED_CACHED if cached else REACH_PEERS),
    ):
        name, against = f"AdamW exact, {numel // M}M", f"{peer}, fused, and a copy"
        if peer in times:
            made.append(compare(name, times["ours"], against, times[peer], numel, reach))
        else:
            made.append(missing(name, statistics.median(times["ours"]) * 1e9 / numel, "ns", against, reach))
    return made


def rows_of_limits(arrays: Arrays, threads: int, rounds: int) -> list[Row]:
    made = []
    for form in (*FORMATS, *SMALL_FORMATS):
        kinds = kind_of(form.value), kind_of(form.grad)
        arrays.clear()
        update, streaming = arrays.update(form, threads), arrays.stream_of(form, threads)

        def alone(form: Format = form, kinds: tuple[int, int] = kinds) -> None:
            arithmetic(form.rule, *kinds, form.states, arrays.numel, threads)

        times = take_turns({"ours": update, "streaming": streaming, "arithmetic": alone}, rounds)
        limit = max(("streaming", "arithmetic"), key=lambda name: statistics.median(times[name]))
        reach = REACH_LIMIT if form.states is StateFormat.FP32 else REACH_SMALL_LIMIT
        made.append(compare(form.name, times["ours"], f"{limit} alone", times[limit], arrays.numel, reach))
    return made


def rows_of_small_states(arrays: Arrays, threads: int, rounds: int) -> list[Row]:
    """Each rule's smaller states against its whole ones."""
    made = []
    for form in SMALL_FORMATS:
        arrays.clear()
        whole = replace(form, states=StateFormat.FP32)
        times = take_turns(
            {"ours": arrays.update(form, threads), "whole": arrays.update(whole, threads)},
            rounds,
        )
        made.append(compare(form.name, times["ours"], "states in fp32", times["whole"], arrays.numel, REACH_EXACT))
    return made


def rows_of_passes(arrays: Arrays, threads: int, rounds: int) -> list[Row]:
    """Accumulation, norm and conversions."""
    numel, fp32, half = arrays.numel, arrays.fp32[4], arrays.halves[2]
    arrays.clear()
    passes: dict[str, tuple[Call, Call]] = {
        "fp32 += bf16, with its norm": (
            lambda: accumulate_grad(fp32.data_ptr(), half.data_ptr(), BF16, numel, num_threads=threads),
            lambda: stream([half], [fp32], numel, threads),
        ),
        "norm of fp32": (
            lambda: sum_of_squares(fp32.data_ptr(), FP32, numel, num_threads=threads),
            lambda: stream([fp32], [], numel, threads),
        ),
        "norm of bf16": (
            lambda: sum_of_squares(half.data_ptr(), BF16, numel, num_threads=threads),
            lambda: stream([half], [], numel, threads),
        ),
        "fp32 to bf16": (
            lambda: convert(half, fp32, num_threads=threads),
            lambda: stream([fp32], [], numel, threads, written=[half]),
        ),
        "bf16 to fp32": (
            lambda: convert(fp32, half, num_threads=threads),
            lambda: stream([half], [], numel, threads, written=[fp32]),
        ),
    }
    made = []
    for name, (ours, limit) in passes.items():
        fp32.fill_(0.02)
        half.fill_(0.02)
        times = take_turns({"ours": ours, "limit": limit}, rounds)
        made.append(compare(name, times["ours"], "streaming alone", times["limit"], numel, REACH_LIMIT))
    return made


def main(arguments: Sequence[str]) -> int:
    parser = command.parser(__name__, __doc__, "1M and 100M only, fewer rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    rounds = 9 if args.quick else 25
    print(f"{native.isa().name}, {args.threads} threads, ns per parameter")
    rows: list[Row] = []
    for numel in QUICK_SIZES if args.quick else SIZES:
        arrays = Arrays(numel)
        rows += rows_of_peers(arrays, args.threads, rounds)
        if numel == 100 * M:
            rows += rows_of_limits(arrays, args.threads, rounds) + rows_of_passes(arrays, args.threads, rounds)
            rows += rows_of_small_states(arrays, args.threads, rounds)
    show(rows)
    write(rows, args.json)
    if any(each["ok"] is None for each in rows):
        print(f"a peer is missing: {INSTALL}")
        return command.PEER_MISSING_EXIT_CODE
    return 0
