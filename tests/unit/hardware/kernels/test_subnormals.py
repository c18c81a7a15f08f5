"""Threads that take subnormal numbers for 0, as torch.set_flush_denormal has them do, get the bits of every other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.helpers.any_bits import codes, floats, halves, image
from tests.helpers.pairwise import in_pairs
from tests.helpers.state_formats import Shard
from zero_offload.base.types import StateFormat
from zero_offload.hardware import native
from zero_offload.hardware.abi import Isa, Rule
from zero_offload.hardware.kernels.arguments import Segment, num_scales, state_dtype
from zero_offload.hardware.kernels.formats import convert, decode_states, encode_states, join_master, split_master
from zero_offload.hardware.kernels.grads import accumulate_grad, store_grad, sum_of_squares
from zero_offload.hardware.kernels.rules import STATES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NUMEL = 2 * 16384 + 77
SMALL = 1e-39
# Every number that is computed from these hyperparameters is subnormal somewhere.
SEGMENT = Segment(0, NUMEL, lr=1e-39, beta1=0.9, beta2=0.99, eps=1e-40, weight_decay=0.1, grad_scale=0.5, step=3)


@pytest.fixture(params=native.supported_isas(), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    native.set_isa(request.param)
    return request.param


def flushes() -> bool:
    return not (torch.tensor([SMALL]) * torch.tensor([0.5])).view(torch.int32).any()


def in_a_flushing_thread(call: Callable[[], None]) -> None:
    """In one of its own, which has a pool of its own, too, whose threads inherit how it computes."""
    seen = []

    def body() -> None:
        assert torch.set_flush_denormal(True)
        seen.append(flushes())
        call()
        seen.append(flushes())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [True, True] and not flushes()


def check(run: Callable[[int], Callable[[], list[bytes]]]) -> None:
    """`run(threads)` makes arrays and returns what computes on them, which is compared."""
    expected = run(1)()
    for threads in (1, 2):
        found: list[bytes] = []
        compute = run(threads)
        in_a_flushing_thread(lambda compute=compute, found=found: found.extend(compute()))
        assert found == expected, threads


def small(seed: int) -> torch.Tensor:
    """(NUMEL,) fp32, most of them subnormal."""
    return torch.from_numpy(floats(NUMEL, seed).numpy().copy()).nan_to_num(1.0, 1.0, -1.0).clamp(-1, 1) * SMALL


@in_pairs(isa=native.supported_isas(), rule=list(Rule), format=list(StateFormat))
def test_updates(isa: Isa, rule: Rule, format: StateFormat) -> None:
    native.set_isa(isa)
    for dtype in (FP32, BF16, FP16):

        def run(threads: int, dtype: torch.dtype = dtype) -> Callable[[], list[bytes]]:
            shard = Shard.of(rule, format, small(1), small(2), dtype)
            shard.set_states([small(3 + k).abs() for k in range(len(STATES[rule]))])

            def compute() -> list[bytes]:
                shard.update([SEGMENT], threads=threads)
                return image(shard.arrays)

            return compute

        check(run)


def test_gradients_and_their_sums(isa: Isa) -> None:
    def run(threads: int) -> Callable[[], list[bytes]]:
        source = small(1)
        sources = [source, source.to(BF16), (source * 1e32).to(FP16)]
        targets = [torch.zeros(NUMEL, dtype=each.dtype) for each in sources]
        wide = small(2)

        def compute() -> list[bytes]:
            sums = []
            for dst, src in zip(targets, sources, strict=True):
                addresses = (dst.data_ptr(), dst.dtype, src.data_ptr(), src.dtype, NUMEL)
                sums.append(store_grad(*addresses, num_threads=threads))
                sums.append(accumulate_grad(wide.data_ptr(), *addresses[2:], num_threads=threads))
                sums.append(sum_of_squares(*addresses[2:], num_threads=threads))
            return [*image([*targets, wide]), repr(sums).encode()]

        return compute

    check(run)


def test_masters_and_conversions(isa: Isa) -> None:
    def run(threads: int) -> Callable[[], list[bytes]]:
        master, half = small(1), halves(NUMEL, 2)
        made = [torch.zeros(NUMEL, dtype=dtype) for dtype in (BF16, torch.int16, FP32, BF16, FP32, FP16, FP32)]
        near_fp16, fp16 = master * 1e32, halves(NUMEL, 3, FP16)

        def compute() -> list[bytes]:
            split_master(master, made[0], made[1], num_threads=threads)
            join_master(made[0], made[1], made[2], num_threads=threads)
            for dst, src in zip(made[3:], (master, half, near_fp16, fp16), strict=True):
                convert(dst, src, num_threads=threads)
            return image(made)

        return compute

    check(run)


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_codes(isa: Isa, signed: bool) -> None:
    def run(threads: int) -> Callable[[], list[bytes]]:
        x = small(1) * 10 if signed else small(1).abs()
        states = torch.zeros(NUMEL, dtype=state_dtype(StateFormat.COMPACT, signed=signed))
        scales, back, decoded = (
            torch.zeros(num_scales(StateFormat.COMPACT, NUMEL)),
            torch.zeros(NUMEL),
            torch.zeros(NUMEL),
        )
        any_codes, low = codes(NUMEL, 2, states.dtype), torch.full_like(scales, 2.0**-66)

        def compute() -> list[bytes]:
            encode_states(StateFormat.COMPACT, x, states, scales, signed=signed, num_threads=threads)
            decode_states(StateFormat.COMPACT, states, scales, back, signed=signed, num_threads=threads)
            decode_states(StateFormat.COMPACT, any_codes, low, decoded, signed=signed, num_threads=threads)
            return image([states, scales, back, decoded])

        return compute

    check(run)
