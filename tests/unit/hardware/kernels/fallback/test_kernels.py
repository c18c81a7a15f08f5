"""Without the native library: the bits of its scalar kernels, by numba, whatever comes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.without_library import without_library
from tests.parity import test_isa as isas
from zero_offload.base.errors import ConfigError
from zero_offload.hardware.abi import Isa, Rule
from zero_offload.hardware.kernels.arguments import Segment
from zero_offload.hardware.kernels.choice import kernels
from zero_offload.hardware.kernels.formats import convert, join_master, split_master
from zero_offload.hardware.kernels.grads import accumulate_grad, store_grad, sum_of_squares
from zero_offload.hardware.kernels.rules import STATES
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [(value, grad) for value in (FP32, BF16, FP16) for grad in (FP32, BF16, FP16)]
SIZES = [0, 1, 7, 31, 4096 + 3]
LARGE = 3 * 16384 + 5
SEGMENT = Segment(0, 8, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, grad_scale=0.5, step=3)


@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name)
def test_updates(rule: Rule) -> None:
    for numel in SIZES:
        for dtypes in DTYPES:
            copy = "copy" if numel % 2 else "in place"
            expected = isas.run_update(Isa.SCALAR, rule, numel, dtypes, copy, 1)
            with without_library():
                assert isas.run_update(Isa.SCALAR, rule, numel, dtypes, copy, 2) == expected, (numel, dtypes)


def test_updates_of_several_chunks_on_several_threads() -> None:
    expected = isas.run_update(Isa.SCALAR, Rule.ADAMW, LARGE, (BF16, BF16), "copy", 1)
    with without_library():
        for threads in (1, 2, 3, 1024):
            assert isas.run_update(Isa.SCALAR, Rule.ADAMW, LARGE, (BF16, BF16), "copy", threads) == expected


def any_bits(rng: np.random.Generator, numel: int) -> torch.Tensor:
    """(numel,) fp32 of near sizes, but for one in eight of any bits."""
    near = (rng.standard_normal(numel) * 2.0 ** rng.integers(-20, 4, numel)).astype(np.float32)
    rare = rng.integers(0, 1 << 32, numel, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return torch.from_numpy(np.where(rng.random(numel) < 0.125, rare, near))


def update_of_any_bits(rule: Rule, seed: int, segment: Segment) -> list[bytes]:
    rng = np.random.default_rng(seed)
    value, grad, *states = (any_bits(rng, segment.end) for _ in range(2 + len(STATES[rule])))
    addresses = tuple(state.data_ptr() for state in states)
    buffers = UpdateBuffers(value.data_ptr(), 0, 0, addresses, grad.data_ptr(), 0, FP32, FP32)
    fused_update(rule, buffers, [segment], 1)
    return isas.image([value, *states])


@given(
    rule=st.sampled_from(Rule),
    seed=st.integers(0, 1 << 32),
    betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    rates=st.tuples(st.floats(0, 1e3), st.floats(0, 1), st.floats(0, 10)),
    grad_scale=st.floats(-1e40, 1e40),
    step=st.integers(1, 1 << 40),
)
@settings(max_examples=60, deadline=None)
def test_any_values_and_hyperparameters(
    rule: Rule,
    seed: int,
    betas: tuple[float, float],
    rates: tuple[float, float, float],
    grad_scale: float,
    step: int,
) -> None:
    lr, eps, weight_decay = rates
    segment = Segment(0, 40, lr, *betas, eps, weight_decay, grad_scale, step)
    expected = update_of_any_bits(rule, seed, segment)
    with without_library():
        assert update_of_any_bits(rule, seed, segment) == expected


def test_adagrad_adds_its_initial_sum_in_the_first_step() -> None:
    total = torch.zeros(8)
    value, grad = torch.ones(8), torch.full((8,), 2.0)
    buffers = UpdateBuffers(value.data_ptr(), 0, 0, (total.data_ptr(),), grad.data_ptr(), 0, FP32, FP32)
    segment = replace(SEGMENT, beta2=0.5, weight_decay=0.0, grad_scale=1.0, step=1)
    with without_library():
        for step, expected in ((1, 4.5), (2, 8.5)):
            fused_update(Rule.ADAGRAD, buffers, [replace(segment, step=step)], 1)
            assert total.unique().tolist() == [expected]


def test_gradients_and_their_sums() -> None:
    for numel in [*SIZES, LARGE]:
        expected = isas.run_grads(Isa.SCALAR, numel, 1)
        with without_library():
            for threads in (1, 3):
                assert isas.run_grads(Isa.SCALAR, numel, threads) == expected, (numel, threads)


def test_conversions_and_split_masters() -> None:
    for numel in [*SIZES, LARGE]:
        expected = isas.run_conversions(Isa.SCALAR, numel, 1)
        with without_library():
            for threads in (1, 3):
                assert isas.run_conversions(Isa.SCALAR, numel, threads) == expected, (numel, threads)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_half_and_what_lies_between_two(dtype: torch.dtype) -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = halves.float()[halves.isfinite()].sort().values
    middles = (finite[1:].double() + finite[:-1].double()).div(2).float()
    between = torch.cat([middles, torch.nextafter(middles, finite[1:]), torch.nextafter(middles, finite[:-1])])
    kept, wide, narrow = torch.empty_like(halves), torch.empty(1 << 16), torch.empty(len(between), dtype=dtype)

    def run() -> list[bytes]:
        convert(kept, halves)
        convert(wide, halves)
        convert(narrow, between)
        return isas.image([kept, wide, narrow])

    expected = run()
    with without_library():
        assert run() == expected


def refusals() -> dict[str, Any]:
    """Calls that cannot work, on arrays of eight ones each, and the bytes that they must leave alone."""
    arrays = [torch.ones(8) for _ in range(5)]
    value, first, second, grad, out = (each.data_ptr() for each in arrays)
    half, residual, spare = torch.ones(8, dtype=BF16), torch.ones(8, dtype=torch.int16), torch.ones(8, dtype=FP16)
    good = UpdateBuffers(value, 0, 0, (first, second), grad, 0, FP32, FP32)

    def update(buffers: UpdateBuffers, *segments: Segment, threads: int = 1) -> Any:
        return lambda: fused_update(Rule.ADAMW, buffers, list(segments), threads)

    def whole(**changes: Any) -> Any:
        return update(replace(good, **changes), SEGMENT)

    return {
        "order": update(good, replace(SEGMENT, begin=4), replace(SEGMENT, end=4)),
        "reach": update(good, replace(SEGMENT, end=5), replace(SEGMENT, begin=4)),
        "backwards": update(good, replace(SEGMENT, begin=3, end=2)),
        "before": update(good, replace(SEGMENT, begin=-1)),
        "step": update(good, SEGMENT, replace(SEGMENT, begin=8, step=0)),
        "no thread": update(good, SEGMENT, threads=0),
        "threads": update(good, SEGMENT, threads=1025),
        "value": whole(value=0),
        "residual": whole(value=half.data_ptr(), value_dtype=BF16),
        "master": whole(value=half.data_ptr(), value_dtype=FP16),
        "grad": whole(grad=0),
        "no states": whole(states=()),
        "a state": whole(states=(first, 0)),
        "grad in value": whole(grad=value + 28),
        "value_out in value": whole(value_out=value),
        "states": whole(states=(first, first + 16)),
        "residual in value": whole(value=half.data_ptr(), residual=half.data_ptr() + 8, value_dtype=BF16),
        "master in state": whole(value=half.data_ptr(), master=second, value_dtype=FP16),
        "split": lambda: split_master(arrays[0], half, residual, num_threads=0),
        "narrow": lambda: store_grad(half.data_ptr(), BF16, value, FP32, 8),
        "other half": lambda: store_grad(half.data_ptr(), BF16, value, FP16, 8),
        "no dst": lambda: store_grad(0, FP32, value, FP32, 8),
        "no src": lambda: accumulate_grad(out, 0, FP32, 8),
        "numel": lambda: sum_of_squares(value, FP32, -1),
        "no values": lambda: sum_of_squares(0, FP32, 8),
        "halves": lambda: convert(spare, half),
        "no residual": lambda: kernels().master_split(False, value, half.data_ptr(), 0, 8, 1),
        "half in master": lambda: split_master(arrays[0], arrays[0].view(BF16)[8:], residual),
        "master in half": lambda: join_master(arrays[0].view(BF16)[:8], residual, arrays[0]),
        "residual in half": lambda: split_master(arrays[0], half, half.view(torch.int16)),
        "a word on": lambda: accumulate_grad(value + 4, value, FP32, 7),
        "a word back": lambda: store_grad(value, FP32, value + 4, FP32, 7),
        "added to itself": lambda: accumulate_grad(value, value, FP32, 8),
        "widened in place": lambda: store_grad(value, FP32, value, BF16, 8),
        "other half in place": lambda: store_grad(half.data_ptr(), BF16, half.data_ptr(), FP16, 8),
        "narrowed in place": lambda: convert(arrays[0].view(BF16)[8:], arrays[0]),
        "half in place": lambda: convert(half.view(FP16), half),
        "keep": [*arrays, half, residual, spare],
    }


@pytest.mark.parametrize("name", [name for name in refusals() if name != "keep"])
def test_what_cannot_work_is_refused_before_anything_is_touched(name: str) -> None:
    """Buffers of an update that overlap are, without the library, refused in the same words."""
    calls = refusals()
    before = isas.image(calls["keep"])
    with pytest.raises(ConfigError) as native_words:
        calls[name]()
    if str(native_words.value).startswith("zo_update") and "overlap" in str(native_words.value):
        with without_library(), pytest.raises(ConfigError) as words:
            calls[name]()
        assert str(words.value) == str(native_words.value)
    assert isas.image(calls["keep"]) == before


def test_what_only_looks_wrong_is_welcome() -> None:
    """No segment; addresses of nothing; buffers that would overlap further on; spare states; what works in place."""
    arrays = [torch.ones(8) for _ in range(3)]
    value, both, grad = (each.data_ptr() for each in arrays)
    buffers = UpdateBuffers(value, 0, 0, (both, both + 16, value), grad, 0, FP32, FP32)
    with without_library():
        fused_update(Rule.ADAMW, replace(buffers, value=0, grad=0, states=()), [], 1)
        assert sum_of_squares(0, FP32, 0) == (0.0, True)
        assert accumulate_grad(grad, grad, FP32, 0) == (0.0, True)
        assert store_grad(grad, FP32, grad, FP32, 8) == (8.0, True)
        convert(arrays[2], arrays[2])
        fused_update(Rule.ADAMW, buffers, [replace(SEGMENT, end=4)], 1)
    assert (arrays[0][:4] != 1).all() and (arrays[0][4:] == 1).all()
