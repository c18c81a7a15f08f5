"""Every instruction set returns the bits of the scalar kernels in every format of states, for any number of threads."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.any_bits import codes, floats, halves, image, random_segments
from tests.helpers.state_formats import Shard
from zero_offload.base.types import StateFormat
from zero_offload.hardware import abi, native
from zero_offload.hardware.abi import STATE_BLOCK, Rule
from zero_offload.hardware.kernels.arguments import num_scales, state_dtype
from zero_offload.hardware.kernels.formats import decode_states, encode_states, join_master, split_master
from zero_offload.hardware.kernels.rules import SIGNED, STATES
from zero_offload.hardware.kernels.update import fused_update

SIZES = [0, 1, 7, 31, 255, 256, 257, 4096 + 3, 50021]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [(v, g) for v in (FP32, BF16, FP16) for g in (FP32, BF16, FP16)]
FORMATS = [StateFormat.BF16, StateFormat.COMPACT]
SEED = 0x123456789ABCDEF0


@pytest.fixture(params=[isa for isa in native.supported_isas() if isa is not abi.Isa.SCALAR], ids=str)
def isa(request: pytest.FixtureRequest) -> abi.Isa:
    return request.param


def states_of(rule: Rule, format: StateFormat, numel: int, *, ordinary: bool) -> tuple[list[torch.Tensor], ...]:
    """The states of a rule and their scales: any bits, or those of ordinary values."""
    states, scales = [], []
    for k, name in enumerate(STATES[rule]):
        signed = name in SIGNED
        dtype = state_dtype(format, signed=signed)
        state = halves(numel, 10 + k) if format is StateFormat.BF16 else codes(numel, 10 + k, dtype)
        scale = floats(num_scales(format, numel), 20 + k, 1e-3)
        if ordinary:
            generator = torch.Generator().manual_seed(k)
            x = torch.randn(numel, generator=generator) * torch.logspace(-9, 0, numel)
            encode_states(format, x if signed else x**2, state, scale if scale.numel() else None, signed=signed)
        states.append(state)
        scales.append(scale)
    return states, scales


def run_update(
    isa: abi.Isa,
    rule: Rule,
    format: StateFormat,
    numel: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    threads: int,
    *,
    ordinary: bool,
) -> list[bytes]:
    native.set_isa(isa)
    value_dtype, grad_dtype = dtypes
    value = floats(numel, 1) if value_dtype is FP32 else halves(numel, 1, value_dtype)
    grad = floats(numel, 5) if grad_dtype is FP32 else halves(numel, 5, grad_dtype)
    if ordinary:
        value, grad = value.nan_to_num(0.0, 1.0, -1.0), grad.nan_to_num(0.0, 1.0, -1.0)
    compact = format is StateFormat.COMPACT
    residual = codes(numel, 2, torch.int8) if compact else halves(numel, 2).view(torch.int16)
    states, scales = states_of(rule, format, numel, ordinary=ordinary)
    shard = Shard(rule, format, value, residual, floats(numel, 7), grad, states, scales)
    value_out = torch.zeros(numel, dtype=value_dtype)
    # Random words begin anew at 2^32 elements, in the middle of these.
    grain = STATE_BLOCK if compact else 1
    origin = (1 << 32) - numel // 2 // grain * grain
    buffers = shard.buffers(seed=SEED, origin=origin, value_out=value_out if threads != 3 else None)
    if numel > 0:
        fused_update(rule, buffers, random_segments(numel, 6, grain), threads)
    return image([*shard.arrays, *([value_out] if threads != 3 else [])])


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("ordinary", [True, False], ids=["ordinary", "any bits"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_adamw(isa: abi.Isa, format: StateFormat, ordinary: bool, numel: int) -> None:
    for dtypes in DTYPES:
        expected = run_update(abi.Isa.SCALAR, Rule.ADAMW, format, numel, dtypes, 1, ordinary=ordinary)
        assert run_update(isa, Rule.ADAMW, format, numel, dtypes, 1, ordinary=ordinary) == expected
        assert run_update(isa, Rule.ADAMW, format, numel, dtypes, 2, ordinary=ordinary) == expected
        assert run_update(isa, Rule.ADAMW, format, numel, dtypes, 3, ordinary=ordinary) == expected[:-1]


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule is not Rule.ADAMW], ids=lambda rule: rule.name)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_rules(isa: abi.Isa, rule: Rule, format: StateFormat) -> None:
    for dtypes in DTYPES:
        for numel in (31, 4096 + 3):
            for ordinary in (True, False):
                expected = run_update(abi.Isa.SCALAR, rule, format, numel, dtypes, 1, ordinary=ordinary)
                assert run_update(isa, rule, format, numel, dtypes, 2, ordinary=ordinary) == expected, (dtypes, numel)


def run_conversions(isa: abi.Isa, numel: int, threads: int) -> list[bytes]:
    native.set_isa(isa)
    made = []
    for format in StateFormat:
        for signed in (True, False):
            dtype = state_dtype(format, signed=signed)
            for x in (floats(numel, 1), floats(numel, 1).nan_to_num(0.0, 1.0, -1.0), floats(numel, 2).abs()):
                state, scales, back = torch.zeros(numel, dtype=dtype), None, torch.zeros(numel)
                if format is StateFormat.COMPACT:
                    scales = torch.zeros(num_scales(format, numel))
                encode_states(format, x, state, scales, signed=signed, num_threads=threads)
                decode_states(format, state, scales, back, signed=signed, num_threads=threads)
                made += [state, back, *([] if scales is None else [scales])]
    half, residual, master = torch.zeros(numel, dtype=BF16), torch.zeros(numel, dtype=torch.int8), torch.zeros(numel)
    split_master(floats(numel, 1), half, residual, num_threads=threads)
    join_master(halves(numel, 2), codes(numel, 3, torch.int8), master, num_threads=threads)
    return image([*made, half, residual, master])


@pytest.mark.parametrize("numel", SIZES)
def test_conversions(isa: abi.Isa, numel: int) -> None:
    expected = run_conversions(abi.Isa.SCALAR, numel, 1)
    for threads in (1, 2, 3):
        assert run_conversions(isa, numel, threads) == expected
