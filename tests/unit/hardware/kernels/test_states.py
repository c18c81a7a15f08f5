"""The formats of states alone: what encodes to what, and comes back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import STATE_BLOCK, Rule
from zero_offload.hardware.kernels.arguments import num_scales, state_dtype
from zero_offload.hardware.kernels.formats import decode_states, encode_states, join_master, split_master
from zero_offload.hardware.kernels.rules import SIGNED, STATES

COMPACT = StateFormat.COMPACT
SMALLEST = 2.0**-63
SIGNS = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def encode(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    codes = torch.full((x.numel(),), 99, dtype=state_dtype(COMPACT, signed=signed))
    scales = torch.full((num_scales(COMPACT, x.numel()),), 99.0)
    encode_states(COMPACT, x, codes, scales, signed=signed, num_threads=2)
    return codes, scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    x = torch.empty(codes.numel())
    decode_states(COMPACT, codes, scales, x, signed=codes.dtype is torch.int8, num_threads=2)
    return x


def all_codes(*, signed: bool) -> Tensor:
    """(256,) that contain the largest; int8 has -128 too, which no value encodes to."""
    numbers = torch.arange(-127, 129) if signed else torch.arange(256)
    return numbers.clamp(max=127 if signed else 255).to(state_dtype(COMPACT, signed=signed))


@SIGNS
def test_all_codes_with_many_scales_come_back(signed: bool) -> None:
    """Any scale that an encoding makes: of every size, and with every end of its digits that matters."""
    rng = np.random.default_rng(1)
    largest = 127 if signed else 255
    mantissas = np.concatenate([np.arange(1 << 12), (1 << 23) - 1 - np.arange(1 << 10), rng.integers(0, 1 << 23, 5000)])
    exponents = rng.integers(127 - 56, 127 + 60, len(mantissas))
    numbers = ((exponents << 23) | mantissas).astype(np.uint32).view(np.float32)
    tiny = np.array([1e-45, 1e-40, 1.2e-38, 1e-35, SMALLEST**2, 3 * SMALLEST**2], dtype=np.float32)
    tops = torch.from_numpy(np.concatenate([numbers, tiny]))
    _, scales = encode(torch.repeat_interleave(tops, STATE_BLOCK), signed=signed)
    scales = scales[scales > 0]  # signed denormals are zeros
    assert (scales >= SMALLEST).all() and (scales.view(torch.int32) & 1).all() and len(scales) > 10_000
    # A block of tiny values has the smallest scale and need not reach the largest code.
    codes = all_codes(signed=signed).repeat(len(scales))
    x = decode(codes, scales)
    assert (
        x.isfinite().all()
        and (x.abs().view(-1, STATE_BLOCK).max(dim=1).values >= (largest * scales) ** 2 * 0.999).all()
    )
    again, same_scales = encode(x, signed=signed)
    assert torch.equal(same_scales, scales)
    assert torch.equal(again, codes)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    signed=st.booleans(),
    values=st.lists(st.floats(-1.0, 1.0, width=32), min_size=1, max_size=600),
    exponent=st.integers(-140, 120),
)
def test_encoding_is_near_and_happens_once(signed: bool, values: list[float], exponent: int) -> None:
    x = torch.tensor(values, dtype=torch.float64).mul(2.0**exponent).float()
    if not signed:
        x = x.abs()
    codes, scales = encode(x, signed=signed)
    back = decode(codes, scales)
    again, same_scales = encode(back, signed=signed)
    assert torch.equal(again, codes) and torch.equal(same_scales, scales)
    assert torch.equal(x.sign() * back.sign() >= 0, torch.ones_like(x, dtype=torch.bool))
    # Between two codes: half of (c + 1)^2 - c^2 units of the square of the scale; up to one for codes raised from 0.
    unit = torch.repeat_interleave(scales.double(), STATE_BLOCK)[: len(x)]
    allowed = (codes.double().abs() + 0.5) * unit**2 * (1 + 1e-5) + SMALLEST**2 * (scales == 0).any()
    error = (back.double() - x.double()).abs()
    raised = (codes == 1) & (x.abs() < unit.float() ** 2) if not signed else torch.zeros_like(x, dtype=torch.bool)
    assert (error <= torch.where(raised, unit**2 * (1 + 1e-6), allowed)).all()


def test_the_nearest_code_is_taken() -> None:
    """Against all codes, in double."""
    torch.manual_seed(0)
    x = torch.randn(STATE_BLOCK * 20) * torch.logspace(-4, 4, STATE_BLOCK * 20)
    codes, scales = encode(x, signed=True)
    numbers = torch.arange(-127, 128, dtype=torch.float64)
    for block, scale in enumerate(scales.double()):
        part = slice(block * STATE_BLOCK, (block + 1) * STATE_BLOCK)
        distances = (x[part, None].double() - numbers * numbers.abs() * scale**2).abs()
        ours = distances.gather(1, codes[part, None].long() + 127).squeeze(1)
        assert (ours <= distances.min(dim=1).values * (1 + 1e-4) + 1e-6 * scale**2).all()


def test_what_is_above_zero_does_not_become_zero() -> None:
    x = torch.logspace(-37, 3, STATE_BLOCK)
    x[3] = 0.0
    codes, scales = encode(x, signed=False)
    assert codes[3] == 0 and (codes[x > 0] > 0).all()
    assert (decode(codes, scales)[x > 0] > 0).all()
    assert (encode(x, signed=True)[0] == 0).any()


@SIGNS
def test_zeros_are_exact(signed: bool) -> None:
    x = torch.zeros(300)
    x[5] = -0.0
    codes, scales = encode(x, signed=signed)
    assert not codes.any() and scales.tolist() == [0.0, 0.0]
    assert decode(codes, scales).view(torch.int32).unique().tolist() == [0]


@SIGNS
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, -1.0], ids=str)
def test_a_block_that_is_not_finite_decodes_to_nan(signed: bool, odd: float) -> None:
    """So does a negative value where there are none; the blocks beside it are as they were."""
    if signed and odd == -1.0:
        return
    x = torch.rand(3 * STATE_BLOCK)
    x[STATE_BLOCK + 77] = odd
    codes, scales = encode(x, signed=signed)
    assert scales.isnan().tolist() == [False, True, False]
    back = decode(codes, scales)
    assert back[STATE_BLOCK : 2 * STATE_BLOCK].isnan().all()
    alone = torch.cat([x[:STATE_BLOCK], x[2 * STATE_BLOCK :]])
    expected = decode(*encode(alone, signed=signed))
    assert torch.equal(torch.cat([back[:STATE_BLOCK], back[2 * STATE_BLOCK :]]), expected)


@SIGNS
def test_the_smallest_and_the_largest_numbers(signed: bool) -> None:
    """Denormal maxima divide nothing by zero; the largest may decode to infinity, not to much less."""
    for top in (1e-45, 1e-40, 1.2e-38, 1e-30, 1e30, 3.4e38, torch.finfo(torch.float32).max):
        x = torch.full((STATE_BLOCK,), top)
        codes, scales = encode(x, signed=signed)
        back = decode(codes, scales)
        assert scales.isfinite().all() and (codes > 0).all() != (signed and top < 1e-38)
        assert (back >= 0.95 * x).all() or (signed and top < 1e-38)


@pytest.mark.parametrize("format", [StateFormat.FP32, StateFormat.BF16], ids=lambda format: format.name)
def test_formats_without_scales(format: StateFormat) -> None:
    x = torch.randn(1000)
    states, back = torch.empty(1000, dtype=state_dtype(format, signed=True)), torch.empty(1000)
    encode_states(format, x, states, None, signed=True)
    decode_states(format, states, None, back, signed=True)
    assert torch.equal(states, x.to(states.dtype))
    assert torch.equal(back, x.to(states.dtype).float())


@settings(derandomize=True, deadline=None, max_examples=200)
@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100))
def test_a_short_master_is_the_nearest_of_24_bits(words: list[int]) -> None:
    master = torch.from_numpy(np.array(words, dtype=np.uint32).view(np.float32))
    half, residual = torch.empty(len(words), dtype=torch.bfloat16), torch.empty(len(words), dtype=torch.int8)
    back = torch.empty(len(words))
    split_master(master, half, residual, num_threads=2)
    join_master(half, residual, back, num_threads=2)
    nan = master.isnan().numpy()
    expected = ((np.array(words, dtype=np.uint64) + 0x80) & 0xFFFFFF00).astype(np.uint32)
    assert np.array_equal(back.numpy().view(np.uint32)[~nan], expected[~nan])
    assert np.isnan(back.numpy()[nan]).all() and not residual.numpy()[nan].any()
    # The half is that of an exact master with the same bits, and so is what a second split makes.
    exact_half, exact_residual = torch.empty_like(half), torch.empty(len(words), dtype=torch.int16)
    split_master(back, exact_half, exact_residual)
    assert torch.equal(exact_half.view(torch.int16), half.view(torch.int16))
    assert torch.equal(exact_residual, residual.to(torch.int16) << 8)
    split_master(back, exact_half, residual_again := torch.empty_like(residual))
    assert torch.equal(residual_again, residual)


def test_refuses_what_does_not_fit_and_touches_nothing() -> None:
    x, codes, scales = torch.ones(300), torch.zeros(300, dtype=torch.uint8), torch.zeros(2)
    with pytest.raises(ConfigError, match="2 scales, got 300 and 3"):
        encode_states(COMPACT, x, codes, torch.zeros(3), signed=False)
    with pytest.raises(ConfigError, match="2 scales, got 300 and 0"):
        encode_states(COMPACT, x, codes, None, signed=False)
    with pytest.raises(ConfigError, match="0 scales, got 300 and 2"):
        encode_states(StateFormat.FP32, x, torch.zeros(300), scales, signed=False)
    with pytest.raises(ConfigError, match="got 299 and 2"):
        encode_states(COMPACT, x, codes[1:], scales, signed=False)
    with pytest.raises(ConfigError, match="int8"):
        encode_states(COMPACT, x, codes, scales, signed=True)
    with pytest.raises(ConfigError, match="contiguous"):
        decode_states(COMPACT, codes, scales, torch.zeros(600)[::2], signed=False)
    with pytest.raises(ConfigError, match="float64"):
        decode_states(COMPACT, codes, scales.double(), x, signed=False)
    with pytest.raises(ConfigError, match="meta"):
        decode_states(COMPACT, codes, scales, x.to("meta"), signed=False)
    with pytest.raises(ConfigError, match="num_threads is 0"):
        encode_states(COMPACT, x, codes, scales, signed=False, num_threads=0)
    assert not codes.any() and not scales.any() and torch.equal(x, torch.ones(300))


@pytest.mark.parametrize("format", StateFormat, ids=lambda format: format.name)
def test_refuses_states_that_overlap_and_touches_nothing(format: StateFormat) -> None:
    memory, room = torch.ones(1024), torch.ones(512)
    dtype = state_dtype(format, signed=True)
    inside, beside = memory.view(dtype)[:512], room.view(dtype)[:512]
    compact = format is StateFormat.COMPACT
    spare = torch.ones(2) if compact else None
    for call in (
        encode_states,
        lambda format, x, states, *rest, **named: decode_states(format, states, *rest, x, **named),
    ):
        with pytest.raises(ConfigError, match="states and fp32 overlap; give each memory of its own"):
            call(format, memory[:512], inside, spare, signed=True)
        if compact:
            with pytest.raises(ConfigError, match="states and scales overlap"):
                call(format, memory[:512], beside, room[127:129], signed=True)
            with pytest.raises(ConfigError, match="fp32 and scales overlap"):
                call(format, memory[:512], beside, memory[511:513], signed=True)
    assert (memory == 1).all() and (room == 1).all()
    encode_states(format, memory[:512], beside, memory[512:514] if compact else None, signed=True)


def test_every_state_has_a_sign_or_none() -> None:
    names = {name for rule in Rule for name in STATES[rule]}
    assert names > SIGNED
    assert all("sq" in name or name == "sum" for name in names - SIGNED)
