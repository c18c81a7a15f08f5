from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from zero_offload.base.errors import ConfigError
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import Segment, segment_array
from zero_offload.hardware.kernels.formats import join_master, split_master
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update

F32 = np.float32
SEGMENT = Segment(0, 1, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, grad_scale=0.5, step=3)


class State:
    """A shard in memory: fp32 values, bf16 halves with residuals, or fp16 copies of masters."""

    def __init__(self, master: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype) -> None:
        numel = master.numel()
        self.value = torch.empty(numel, dtype=dtype)
        self.residual = torch.zeros(numel, dtype=torch.int16)
        self.beside = master.clone()
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
        self.grad = grad.clone()
        if dtype is torch.bfloat16:
            split_master(master, self.value, self.residual)
        else:
            self.value.copy_(master)

    @property
    def buffers(self) -> UpdateBuffers:
        return UpdateBuffers(
            value=self.value.data_ptr(),
            residual=self.residual.data_ptr() if self.value.dtype is torch.bfloat16 else 0,
            master=self.beside.data_ptr() if self.value.dtype is torch.float16 else 0,
            states=(self.exp_avg.data_ptr(), self.exp_avg_sq.data_ptr()),
            grad=self.grad.data_ptr(),
            value_out=0,
            value_dtype=self.value.dtype,
            grad_dtype=self.grad.dtype,
        )

    @property
    def master(self) -> torch.Tensor:
        if self.value.dtype is torch.float32:
            return self.value
        if self.value.dtype is torch.float16:
            return self.beside
        master = torch.empty(self.value.numel())
        join_master(self.value, self.residual, master)
        return master


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a * b + c in exact arithmetic, then rounded once to nearest, ties to even."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = F32(float(exact))
    around = [np.nextafter(near, F32(-np.inf)), near, np.nextafter(near, F32(np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


def reference_step(p: F32, m: F32, v: F32, g: F32, s: Segment) -> tuple[F32, F32, F32]:
    """One element by the documented list of roundings."""
    g = g * F32(s.grad_scale)
    p = p * F32(1 - s.lr * s.weight_decay)
    m = fma(F32(1 - s.beta1), g - m, m)
    v = fma(F32(s.beta2), v, F32(1 - s.beta2) * (g * g))
    denominator = fma(np.sqrt(v), F32(1 / np.sqrt(1 - s.beta2**s.step)), F32(s.eps))
    return fma(F32(-(s.lr / (1 - s.beta1**s.step))), m / denominator, p), m, v


def test_bits_equal_the_documented_roundings() -> None:
    numel = 200
    torch.manual_seed(0)
    state = State(torch.randn(numel), torch.randn(numel), torch.float32)
    state.exp_avg.normal_(0, 0.1)
    state.exp_avg_sq.uniform_(0, 0.1)
    arrays = [t.clone().numpy() for t in (state.value, state.exp_avg, state.exp_avg_sq, state.grad)]
    segment = replace(SEGMENT, end=numel)
    expected = np.array([reference_step(*row, segment) for row in zip(*arrays, strict=True)], dtype=F32)
    fused_update(Rule.ADAMW, state.buffers, [segment], 1)
    actual = np.stack([state.value.numpy(), state.exp_avg.numpy(), state.exp_avg_sq.numpy()], axis=1)
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def test_every_nan_is_stored_as_the_same_one() -> None:
    """Processors differ in the sign and payload that arithmetic gives a NaN."""
    state = State(torch.ones(40), torch.ones(40), torch.float32)
    state.grad.view(torch.int32).fill_(-0x3FFFFF)  # a negative NaN with a payload
    fused_update(Rule.ADAMW, state.buffers, [replace(SEGMENT, end=40)], 1)
    for tensor in (state.value, state.exp_avg, state.exp_avg_sq):
        assert tensor.view(torch.int32).unique().tolist() == [0x7FC00000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_twenty_steps_follow_torch(dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """The split master trains as an fp32 master does, not as a bf16 parameter; so does the one beside its copy."""
    numel = 3000
    torch.manual_seed(1)
    start = torch.randn(numel)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    ours = State(start, torch.zeros(numel, dtype=grad_dtype), dtype)
    for step in range(1, 21):
        ours.grad.copy_(torch.randn(numel))
        theirs.grad = ours.grad.float() * SEGMENT.grad_scale
        optimizer.step()
        fused_update(Rule.ADAMW, ours.buffers, [replace(SEGMENT, end=numel, step=step)], 2)
    torch.testing.assert_close(ours.master, theirs.data, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.exp_avg, optimizer.state[theirs]["exp_avg"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.exp_avg_sq, optimizer.state[theirs]["exp_avg_sq"], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_segments_equal_separate_calls_and_gaps_stay(dtype: torch.dtype) -> None:
    numel = 40_000
    torch.manual_seed(2)
    master, grad = torch.randn(numel), torch.randn(numel)
    ranges = [(0, 5), (5, 5), (300, 17_001), (17_001, 17_002), (33_333, 39_999)]
    segments = [replace(SEGMENT, begin=b, end=e, lr=0.01 * i, step=i + 1) for i, (b, e) in enumerate(ranges)]
    together, apart = State(master, grad, dtype), State(master, grad, dtype)
    fused_update(Rule.ADAMW, together.buffers, segment_array(segments), 3)
    for segment in segments:
        fused_update(Rule.ADAMW, apart.buffers, [segment], 1)
    inside = torch.zeros(numel, dtype=torch.bool)
    for begin, end in ranges:
        inside[begin:end] = True
    assert torch.equal(together.master, apart.master)
    assert torch.equal(together.exp_avg, apart.exp_avg)
    assert torch.equal(together.master[~inside], master[~inside])
    assert not together.exp_avg[~inside].any() and not together.exp_avg_sq[~inside].any()
    assert together.exp_avg_sq[inside].all()


def test_an_fp16_value_is_the_master_rounded_as_torch_rounds() -> None:
    torch.manual_seed(4)
    master, grad = torch.randn(5000) * 2.0 ** torch.randint(-30, 18, (5000,)), torch.randn(5000)
    copied, whole = State(master, grad, torch.float16), State(master, grad, torch.float32)
    for state in (copied, whole):
        fused_update(Rule.ADAMW, state.buffers, [replace(SEGMENT, begin=7, end=5000)], 2)
    assert torch.equal(copied.beside, whole.value)
    assert torch.equal(copied.value, whole.value.half()) and copied.value.isinf().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_value_out_is_a_second_copy_of_the_new_value(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    state = State(torch.randn(1000), torch.randn(1000), dtype)
    copy = torch.zeros(1000, dtype=dtype)
    fused_update(
        Rule.ADAMW, replace(state.buffers, value_out=copy.data_ptr()), [replace(SEGMENT, begin=10, end=990)], 1
    )
    assert torch.equal(copy[10:990], state.value[10:990])
    assert not copy[:10].any() and not copy[990:].any()


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([replace(SEGMENT, begin=5, end=9), replace(SEGMENT, begin=0, end=5)], "sort"),
        ([replace(SEGMENT, begin=0, end=6), replace(SEGMENT, begin=5, end=9)], "sort"),
        ([replace(SEGMENT, begin=3, end=2)], "segment 0"),
        ([replace(SEGMENT, begin=-1, end=2)], "segment 0"),
        ([replace(SEGMENT, step=0)], "first step is 1"),
    ],
)
def test_refuses_segments_that_cannot_work(segments: list[Segment], message: str) -> None:
    state = State(torch.ones(10), torch.ones(10), torch.float32)
    with pytest.raises(ConfigError, match=message):
        fused_update(Rule.ADAMW, state.buffers, segments, 1)
    assert torch.equal(state.value, torch.ones(10))


def test_refuses_what_is_missing_or_of_another_type() -> None:
    state = State(torch.ones(10), torch.ones(10), torch.bfloat16)
    with pytest.raises(ConfigError, match="residual"):
        fused_update(Rule.ADAMW, replace(state.buffers, residual=0), [SEGMENT], 1)
    beside = State(torch.ones(10), torch.ones(10), torch.float16)
    with pytest.raises(ConfigError, match="master of an fp16 value"):
        fused_update(Rule.ADAMW, replace(beside.buffers, master=0), [SEGMENT], 1)
    with pytest.raises(ConfigError, match="float64"):
        fused_update(Rule.ADAMW, replace(state.buffers, grad_dtype=torch.float64), [SEGMENT], 1)
    with pytest.raises(ConfigError, match="num_threads is 0"):
        fused_update(Rule.ADAMW, state.buffers, [SEGMENT], 0)
    with pytest.raises(ConfigError, match="segment_array"):
        fused_update(Rule.ADAMW, state.buffers, np.zeros(3), 1)


def test_refuses_buffers_that_overlap() -> None:
    """The second half of one in the first of the other; segments that do not reach there are welcome."""
    state = State(torch.ones(8), torch.ones(8), torch.bfloat16)
    both = torch.zeros(12)
    shared = replace(state.buffers, states=(both.data_ptr(), both[4:].data_ptr()))
    with pytest.raises(ConfigError, match="the first state and the second state overlap"):
        fused_update(Rule.ADAMW, shared, [replace(SEGMENT, end=2), replace(SEGMENT, begin=4, end=8)], 1)
    with pytest.raises(ConfigError, match="value and value_out overlap"):
        fused_update(Rule.ADAMW, replace(state.buffers, value_out=state.value.data_ptr()), [SEGMENT], 1)
    assert not both.any() and torch.equal(state.master, torch.ones(8))
    fused_update(Rule.ADAMW, shared, [replace(SEGMENT, end=4)], 1)


def test_no_segment_is_nothing_to_do() -> None:
    state = State(torch.ones(10), torch.ones(10), torch.float32)
    fused_update(Rule.ADAMW, state.buffers, [], 2)
    assert torch.equal(state.value, torch.ones(10))
