"""Updates over states in bf16 and in codes: their rounding, whatever way the work is cut, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.any_bits import image
from tests.helpers.state_formats import Shard, bf16_of, codes_of, random_words, short_master_of
from zero_offload.base.errors import ConfigError
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import STATE_BLOCK, Rule
from zero_offload.hardware.kernels.arguments import Segment
from zero_offload.hardware.kernels.rules import SIGNED, STATES
from zero_offload.hardware.kernels.update import fused_update

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEGMENT = Segment(0, 1, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, grad_scale=0.5, step=3)
FORMATS = pytest.mark.parametrize("format", [StateFormat.BF16, StateFormat.COMPACT], ids=lambda format: format.name)
RULES = pytest.mark.parametrize("rule", list(Rule), ids=lambda rule: rule.name)
SEED, ORIGIN = 0xFEDCBA9876543210, (1 << 32) - 1024


def random_shard(rule: Rule, format: StateFormat, numel: int, dtype: torch.dtype = BF16) -> Shard:
    """States as some steps leave them; the same for the same arguments."""
    generator = torch.Generator().manual_seed(numel)
    sizes = torch.logspace(-4, 0, numel)[torch.randperm(numel, generator=generator)]
    shard = Shard.of(
        rule, format, torch.randn(numel, generator=generator), torch.randn(numel, generator=generator) * sizes, dtype
    )
    values = [torch.randn(numel, generator=generator) * sizes for _ in STATES[rule]]
    shard.set_states([x if name in SIGNED else x**2 for name, x in zip(STATES[rule], values, strict=True)])
    return shard


@RULES
@FORMATS
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_a_step_in_fp32_then_the_documented_rounding(rule: Rule, format: StateFormat, dtype: torch.dtype) -> None:
    """The new value is that of whole states, which are rounded afterwards, by the words of seed, step and index."""
    numel, compact = 2000, format is StateFormat.COMPACT
    shard = random_shard(rule, format, numel, dtype)
    whole = Shard.of(rule, StateFormat.FP32, shard.master.clone(), shard.grad, FP32)
    whole.states = shard.decoded()
    shard.update([replace(SEGMENT, end=numel)], seed=SEED, origin=ORIGIN, threads=2)
    whole.update([replace(SEGMENT, end=numel)])
    words = random_words(SEED, SEGMENT.step, np.arange(ORIGIN, ORIGIN + numel, dtype=np.uint64))
    expected = whole.value.numpy()
    if compact and dtype is BF16:
        expected = short_master_of(expected, words)
    assert np.array_equal(shard.master.numpy(), expected)
    for k, name in enumerate(STATES[rule]):
        x = whole.states[k].numpy()
        if compact:
            codes, scales = codes_of(x, words, k, signed=name in SIGNED)
            assert np.array_equal(shard.scales[k].numpy(), scales)
            assert np.array_equal(shard.states[k].numpy(), codes)
        else:
            assert np.array_equal(shard.states[k].view(torch.int16).numpy().view(np.uint16), bf16_of(x, words, k))


@FORMATS
@pytest.mark.parametrize("rule", [Rule.ADAMW_AMSGRAD, Rule.LION], ids=lambda rule: rule.name)
def test_no_way_to_cut_the_work_changes_a_bit(format: StateFormat, rule: Rule) -> None:
    """One segment, many, many calls over parts of the buffers, any number of threads."""
    numel = 60_000
    cuts = [0, 256, 16_384, 16_640, 40_960, numel]
    if format is StateFormat.BF16:
        cuts = [0, 1, 300, 16_383, 16_400, 40_961, numel]
    whole, threads, segments, calls = (random_shard(rule, format, numel) for _ in range(4))
    whole.update([replace(SEGMENT, end=numel)], seed=SEED, origin=ORIGIN)
    threads.update([replace(SEGMENT, end=numel)], seed=SEED, origin=ORIGIN, threads=3)
    pairs = list(zip(cuts[:-1], cuts[1:], strict=True))
    segments.update([replace(SEGMENT, begin=b, end=e) for b, e in pairs], seed=SEED, origin=ORIGIN, threads=2)
    for begin, end in reversed(pairs):
        buffers = calls.buffers(seed=SEED, origin=ORIGIN, skip=begin)
        fused_update(rule, buffers, [replace(SEGMENT, end=end - begin)], 1)
    for other in (threads, segments, calls):
        assert image(other.arrays) == image(whole.arrays)


@FORMATS
def test_only_seed_step_and_index_choose_the_rounding(format: StateFormat) -> None:
    def states(**differences: int) -> Tensor:
        shard = random_shard(Rule.SGD_MOMENTUM, format, 1024)
        step = differences.pop("step", 3)
        shard.update([replace(SEGMENT, end=1024, step=step)], **({"seed": 1, "origin": 512} | differences))
        return shard.states[0].view(torch.uint8)

    first = states()
    assert torch.equal(states(), first)
    for other in ({"seed": 2}, {"seed": 1 + (1 << 40)}, {"step": 4}, {"origin": 768}, {"origin": 512 + (1 << 32)}):
        assert not torch.equal(states(**other), first), other


@FORMATS
def test_rounding_keeps_the_mean(format: StateFormat) -> None:
    """Many elements of one value, many values: a momentum of 0 makes the state the gradient; Adagrad's its square."""
    numel, sigmas = STATE_BLOCK * 256, 4.5
    for x in (0.9, 0.31, 0.0123, 3e-4, 1e-5):
        for rule, sign in ((Rule.SGD_MOMENTUM, -1.0), (Rule.ADAGRAD, 1.0)):
            grad = torch.full((numel,), sign * x)
            grad[::STATE_BLOCK] = 1.0  # of every block the largest
            shard = Shard.of(rule, format, torch.zeros(numel), grad, FP32)
            plain = replace(SEGMENT, end=numel, beta1=0.0, beta2=0.0, weight_decay=0.0, grad_scale=1.0)
            shard.update([plain], seed=7)
            inside = torch.arange(numel) % STATE_BLOCK != 0
            state = shard.decoded()[0].double()[inside]
            rounded = np.float32(x)
            exact = float(-rounded if rule is Rule.SGD_MOMENTUM else rounded * rounded)
            if rule is Rule.ADAGRAD and format is StateFormat.COMPACT and exact < 1 / 65025:
                assert state.min() == state.max() > exact  # code 1, which 0 is not an alternative to
                continue
            error = (state.mean() - exact).abs()
            assert len(state.unique()) == 2
            assert error <= sigmas * state.std() / math.sqrt(len(state)) + 2.0**-13 * (state.max() - state.min())


def test_rounding_of_a_short_master_keeps_the_mean() -> None:
    numel = 1 << 16
    for x in (1.0 + 2.0**-20, 0.3, 1e-3):
        grad = torch.full((numel,), -x)
        shard = Shard.of(Rule.SGD, StateFormat.COMPACT, torch.zeros(numel), grad, BF16)
        shard.update([replace(SEGMENT, end=numel, lr=1.0, weight_decay=0.0, grad_scale=1.0)], seed=3)
        master = shard.master.double()
        assert len(master.unique()) == 2 and not (shard.master.view(torch.int32) & 0xFF).any()
        assert (master.mean() - float(np.float32(x))).abs() <= 4.5 * master.std() / math.sqrt(numel)


def test_bits_of_two_states_and_of_neighbours_are_independent() -> None:
    """Correlations of what is rounded up, of 65536 elements: 4.5 standard deviations of none are 0.018."""
    numel = 1 << 16
    grad = torch.full((numel,), 0.3)
    grad[::STATE_BLOCK] = 1.0
    ups = []
    for step in (5, 6):
        shard = Shard.of(Rule.ADAMW, StateFormat.COMPACT, torch.zeros(numel), grad, BF16)
        shard.update([replace(SEGMENT, end=numel, beta1=0.0, beta2=0.0, grad_scale=1.0, step=step)], seed=11)
        for state in shard.states:
            numbers = state.double()
            numbers[::STATE_BLOCK] = numbers[1]
            ups += [numbers, numbers.roll(1), numbers.roll(16)]
    correlations = torch.corrcoef(torch.stack(ups)) - torch.eye(len(ups))
    assert correlations.abs().max() < 0.018


@pytest.mark.parametrize("rule", [Rule.SGD_MOMENTUM, Rule.ADAGRAD], ids=lambda rule: rule.name)
@FORMATS
def test_what_nothing_changes_stays(format: StateFormat, rule: Rule) -> None:
    """Every code with many scales, bf16 halves, and masters of 24 bits: no random word moves them."""
    numel = STATE_BLOCK * 400
    signed = rule is Rule.SGD_MOMENTUM
    largest = torch.logspace(-30, 30, numel // STATE_BLOCK).repeat_interleave(STATE_BLOCK)
    roots = torch.arange(STATE_BLOCK).repeat(numel // STATE_BLOCK) - (128 if signed else 0)
    shard = Shard.of(rule, format, torch.randn(numel), torch.zeros(numel), BF16)
    shard.set_states([roots * roots.abs() * largest])
    before = image(shard.arrays)
    still = replace(SEGMENT, end=numel, lr=0.0, beta1=1.0, beta2=0.0, weight_decay=0.0)
    for step in range(2, 12):
        shard.update([replace(still, step=step)], seed=5, threads=2)
        assert image(shard.arrays) == before


@FORMATS
def test_what_is_not_finite_stays_visible(format: StateFormat) -> None:
    """In codes all of its block, which has one scale."""
    for odd in (math.nan, math.inf):
        shard = random_shard(Rule.ADAMW, format, 3 * STATE_BLOCK)
        shard.grad[STATE_BLOCK + 5] = odd
        shard.update([replace(SEGMENT, end=3 * STATE_BLOCK)])
        lost = torch.zeros(3 * STATE_BLOCK, dtype=torch.bool)
        lost[slice(STATE_BLOCK, 2 * STATE_BLOCK) if format is StateFormat.COMPACT else STATE_BLOCK + 5] = True
        for state in shard.decoded():
            assert torch.equal(~state.isfinite(), lost)
        assert shard.master[STATE_BLOCK + 5].isnan() and shard.master.isnan().sum() == 1


def test_a_segment_may_end_inside_a_block() -> None:
    """Elements behind the segment's end are not touched, and have no part in the scale."""
    numel, end = 700, 300
    shard, alone = (random_shard(Rule.ADAMW, StateFormat.COMPACT, numel) for _ in range(2))
    for state in shard.states:
        state[end:] = 101
    rest = [array[end:].clone() for array in (shard.value, shard.residual, *shard.states)]
    for each in (shard, alone):
        each.update([replace(SEGMENT, end=end)], seed=1)
    assert all(torch.equal(a, b[end:]) for a, b in zip(rest, (shard.value, shard.residual, *shard.states), strict=True))
    for ours, theirs in zip(shard.scales, alone.scales, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(shard.value[:end], alone.value[:end])


@FORMATS
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_value_out_is_a_second_copy(format: StateFormat, dtype: torch.dtype) -> None:
    shard = random_shard(Rule.ADAMW, format, 1000, dtype)
    copy = torch.zeros(1000, dtype=dtype)
    fused_update(Rule.ADAMW, shard.buffers(value_out=copy), [replace(SEGMENT, end=900)], 2)
    assert torch.equal(copy[:900], shard.value[:900]) and not copy[900:].any()


def test_refuses_what_cannot_work_and_touches_nothing() -> None:
    compact, halved = (random_shard(Rule.ADAMW, format, 600) for format in (StateFormat.COMPACT, StateFormat.BF16))
    before = image(compact.arrays + halved.arrays)
    buffers, segment = compact.buffers(), replace(SEGMENT, end=600)
    codes, scales = buffers.states, buffers.scales
    room = torch.zeros(8192, dtype=torch.uint8)  # its own memory: the error names the two that overlap
    free = room.data_ptr()
    refused = [
        (replace(buffers, scales=()), segment, "the first state's scales is NULL"),
        (replace(buffers, scales=(scales[0],)), segment, "the second state's scales is NULL"),
        (replace(buffers, states=(codes[0],)), segment, "the second state is NULL"),
        (replace(buffers, residual=0), segment, "residual of a bf16 value is NULL"),
        (replace(buffers, origin=-256), segment, "origin is -256"),
        (replace(buffers, origin=100), segment, "origin is 100, not 0 or a multiple of 256"),
        (buffers, replace(segment, begin=128), "begins at 128.*multiple of 256"),
        (replace(buffers, states=(free, free + 599)), segment, "the first state and the second state overlap"),
        (replace(buffers, scales=(free, free + 8)), segment, "the first state's scales and .* overlap"),
        (
            replace(buffers, states=(free, codes[1]), scales=(free + 596, scales[1])),
            segment,
            "the first state and .* scales overlap",
        ),
        (replace(buffers, value=free, residual=free + 1199), segment, "value and residual overlap"),
        (replace(halved.buffers(), states=(free, free + 1199)), segment, "the first state and the second"),
        (replace(halved.buffers(), origin=-1), segment, "origin is -1"),
    ]
    for wrong, wrong_segment, message in refused:
        with pytest.raises(ConfigError, match=message):
            fused_update(Rule.ADAMW, wrong, [wrong_segment], 1)
    assert image(compact.arrays + halved.arrays) == before and not room.any()


def test_neighbours_in_memory_do_not_overlap() -> None:
    """Codes and scales that touch, as in one buffer."""
    shard = random_shard(Rule.ADAMW, StateFormat.COMPACT, 512)
    memory = torch.zeros(2 * 512 + 16, dtype=torch.uint8)
    base = memory.data_ptr()
    touching = replace(shard.buffers(), states=(base, base + 512), scales=(base + 1024, base + 1032))
    fused_update(Rule.ADAMW, touching, [replace(SEGMENT, end=512)], 1)
    assert memory[:512].any() and memory[512:1024].all() and memory[1024:].any()
