"""States in bf16 and in codes without the native library: the bits of its scalar kernels, and what it refuses."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.any_bits import image
from tests.helpers.pairwise import in_turn
from tests.helpers.state_formats import Shard
from tests.helpers.without_library import without_library
from tests.parity import test_isa_formats as isas
from zero_offload.base.errors import ConfigError
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import STATE_BLOCK, Isa, Rule
from zero_offload.hardware.kernels.arguments import Segment, num_scales, state_dtype
from zero_offload.hardware.kernels.choice import kernels
from zero_offload.hardware.kernels.formats import decode_states, encode_states, join_master, split_master
from zero_offload.hardware.kernels.rules import STATES
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEGMENT = Segment(0, 600, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, grad_scale=0.5, step=3)
LARGE = 3 * 16384 + 5

formats = pytest.mark.parametrize("format", [StateFormat.BF16, StateFormat.COMPACT], ids=lambda format: format.name)


@in_turn(format=[StateFormat.BF16, StateFormat.COMPACT], rule=list(Rule))
def test_updates(format: StateFormat, rule: Rule) -> None:
    """Each value dtype with each gradient dtype; segments that end inside blocks; the turn of the numbers."""
    sizes = itertools.cycle([(31, True), (257, False), (4096 + 3, True), (255, False), (1, True), (4096 + 3, False)])
    for dtypes, threads in itertools.product(isas.DTYPES, (2, 3)):
        numel, ordinary = next(sizes)
        expected = isas.run_update(Isa.SCALAR, rule, format, numel, dtypes, threads, ordinary=ordinary)
        with without_library():
            found = isas.run_update(Isa.SCALAR, rule, format, numel, dtypes, threads, ordinary=ordinary)
        assert found == expected, (dtypes, numel, ordinary)


@formats
def test_updates_of_several_chunks_on_several_threads(format: StateFormat) -> None:
    for ordinary in (True, False):
        expected = isas.run_update(Isa.SCALAR, Rule.ADAMW, format, LARGE, (BF16, BF16), 1, ordinary=ordinary)
        with without_library():
            for threads in (1, 2, 1024):
                found = isas.run_update(Isa.SCALAR, Rule.ADAMW, format, LARGE, (BF16, BF16), threads, ordinary=ordinary)
                assert found == expected, (threads, ordinary)


@formats
def test_places_far_into_a_section(format: StateFormat) -> None:
    """Random words of another turn have another key, whatever elements came before."""
    grain = STATE_BLOCK if format is StateFormat.COMPACT else 1
    for origin in (0, grain, (1 << 32) - 512, 1 << 32, (5 << 32) + 7 * grain, (1 << 62) - 512):
        images = []
        for place in (contextlib.nullcontext(), without_library()):
            with place:
                shard = Shard.of(Rule.LION, format, torch.linspace(-1, 1, 1100), torch.linspace(-3, 1, 1100), BF16)
                shard.update([replace(SEGMENT, end=1100)], seed=(1 << 64) - 3, origin=origin, threads=2)
                images.append(image(shard.arrays))
        assert images[0] == images[1], origin


def test_conversions() -> None:
    for numel in [*isas.SIZES, LARGE]:
        expected = isas.run_conversions(Isa.SCALAR, numel, 1)
        with without_library():
            for threads in (1, 3):
                assert isas.run_conversions(Isa.SCALAR, numel, threads) == expected, (numel, threads)


def test_every_half_with_every_short_residual() -> None:
    """And every master of 24 bits back, with what lies half-way to the next one and beside that."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16).repeat_interleave(8)
    residuals = torch.arange(256, dtype=torch.int16).to(torch.int8).repeat(len(halves) // 256)
    residuals = (residuals.view(torch.uint8) + torch.arange(len(halves)) // 2048).to(torch.uint8).view(torch.int8)
    lower = torch.tensor([0, 0x7F, 0x80, 0x81, 0xFF], dtype=torch.int32).repeat(-(-len(halves) // 5))[: len(halves)]

    def run() -> list[bytes]:
        master, half, residual = torch.empty(len(halves)), torch.empty_like(halves), torch.empty_like(residuals)
        join_master(halves, residuals, master, num_threads=2)
        joined = image([master])
        split_master((master.view(torch.int32) | lower).view(FP32), half, residual, num_threads=2)
        return [*joined, *image([half, residual])]

    expected = run()
    with without_library():
        assert run() == expected


@given(seed=st.integers(0, 1 << 32), exponent=st.integers(-149, 127), spread=st.integers(0, 60), signed=st.booleans())
@settings(max_examples=60, deadline=None)
def test_blocks_of_any_size_there_and_back(seed: int, exponent: int, spread: int, signed: bool) -> None:
    """From denormals to infinity; what was decoded is encoded to the same codes."""
    rng = np.random.default_rng(seed)
    numel = 2 * STATE_BLOCK + 7
    x = rng.standard_normal(numel) * 2.0 ** (exponent - rng.integers(0, spread + 1, numel))
    with np.errstate(over="ignore"):
        values = torch.from_numpy((x if signed else abs(x)).astype(np.float32))

    def run() -> list[bytes]:
        dtype = state_dtype(StateFormat.COMPACT, signed=signed)
        codes, again = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
        scales, rescaled = torch.zeros(num_scales(StateFormat.COMPACT, numel)), torch.zeros(3)
        back = torch.zeros(numel)
        encode_states(StateFormat.COMPACT, values, codes, scales, signed=signed)
        decode_states(StateFormat.COMPACT, codes, scales, back, signed=signed)
        encode_states(StateFormat.COMPACT, back, again, rescaled, signed=signed)
        assert torch.equal(codes, again) and image([scales]) == image([rescaled])
        return image([codes, scales, back])

    expected = run()
    with without_library():
        assert run() == expected


@given(
    rule=st.sampled_from(Rule),
    format=st.sampled_from([StateFormat.BF16, StateFormat.COMPACT]),
    seed=st.integers(0, (1 << 64) - 1),
    rates=st.tuples(st.floats(0, 1e3), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 10)),
    grad_scale=st.floats(-1e40, 1e40),
    step=st.integers(1, 1 << 40),
)
@settings(max_examples=40, deadline=None)
def test_any_hyperparameters(
    rule: Rule,
    format: StateFormat,
    seed: int,
    rates: tuple[float, float, float, float, float],
    grad_scale: float,
    step: int,
) -> None:
    numel = STATE_BLOCK + 44
    segment = Segment(0, numel, *rates, grad_scale, step)

    def run() -> list[bytes]:
        rng = np.random.default_rng(seed)
        value, grad = (torch.from_numpy(rng.standard_normal(numel).astype(np.float32)) for _ in range(2))
        shard = Shard.of(rule, format, value, grad, BF16)
        shard.set_states([torch.from_numpy(rng.random(numel, dtype=np.float32)) for _ in STATES[rule]])
        shard.update([segment], seed=seed)
        shard.update([replace(segment, step=step + 1)], seed=seed)
        return image(shard.arrays)

    expected = run()
    with without_library():
        assert run() == expected


def refusals() -> dict[str, Any]:
    """Calls that cannot work, and the arrays that they must leave alone."""
    compact, halved = (
        Shard.of(Rule.ADAMW, format, torch.ones(600), torch.ones(600), BF16)
        for format in (StateFormat.COMPACT, StateFormat.BF16)
    )
    good, half, room = compact.buffers(), halved.buffers(), torch.zeros(8192, dtype=torch.uint8)
    codes, scales, free = good.states, good.scales, room.data_ptr()
    whole_master = compact.master
    master, halves, short = torch.ones(8), torch.ones(8, dtype=BF16), torch.ones(8, dtype=torch.int8)
    addresses = (master.data_ptr(), halves.data_ptr(), short.data_ptr())

    def update(buffers: UpdateBuffers, *segments: Segment, threads: int = 1) -> Any:
        return lambda: fused_update(Rule.ADAMW, buffers, list(segments), threads)

    def whole(**changes: Any) -> Any:
        return update(replace(good, **changes), SEGMENT)

    def states(**changes: Any) -> dict[str, Any]:
        args = {"format": StateFormat.COMPACT, "signed": True, "states": codes[0], "scales": scales[0]}
        args |= {"fp32": whole_master.data_ptr(), "numel": 600, "num_threads": 1}
        wrong: Any = args | changes
        return {"decode": lambda: kernels().states_decode(**wrong), "encode": lambda: kernels().states_encode(**wrong)}

    def masters(*wrong: int) -> dict[str, Any]:
        a, b, c, numel, threads = wrong
        return {
            "split": lambda: kernels().master_split(True, a, b, c, numel, threads),
            "join": lambda: kernels().master_join(True, b, c, a, numel, threads),
        }

    calls = {
        "no scales": whole(scales=()),
        "one state's scales": whole(scales=(scales[0],)),
        "one state": whole(states=(codes[0],)),
        "no states, no scales": whole(states=(), scales=()),
        "residual": whole(residual=0),
        "origin below 0": whole(origin=-256),
        "origin in a block": whole(origin=100),
        "origin of no segment": update(replace(good, origin=-256)),
        "threads before origin": update(replace(good, origin=-256), SEGMENT, threads=0),
        "origin of bf16 states": update(replace(half, origin=-1), SEGMENT),
        "begin": update(good, replace(SEGMENT, begin=128)),
        "begin before step": update(good, replace(SEGMENT, begin=128, step=0)),
        "order before begin": update(good, SEGMENT, replace(SEGMENT, begin=300)),
        "codes": whole(states=(free, free + 599)),
        "scales": whole(scales=(free, free + 8)),
        "codes in scales": whole(states=(free, codes[1]), scales=(free + 596, scales[1])),
        "the other's scales": whole(states=(codes[0], free), scales=(free + 12, scales[1])),
        "residual in value": whole(value=free, residual=free + 1199),
        "value in residual": whole(value=free + 599, residual=free),
        "bf16 states": update(replace(half, states=(free, free + 1199)), SEGMENT),
    }
    for name, wrong in {
        "no states": {"states": 0},
        "no scales": {"scales": 0},
        "no fp32": {"fp32": 0},
        "nothing": {"states": 0, "fp32": 0, "scales": 0},
        "numel": {"numel": -1},
        "threads": {"num_threads": 1025},
        "no halves": {"format": StateFormat.BF16, "states": 0},
        "no thread for none": {"numel": 0, "num_threads": 0},
        "codes in fp32": {"states": whole_master.data_ptr() + 2399},
        "scales in codes": {"states": free, "scales": free + 596},
        "scales in fp32": {"scales": whole_master.data_ptr() - 8},
        "bf16 in fp32": {"format": StateFormat.BF16, "states": whole_master.data_ptr()},
        "fp32 in place": {"format": StateFormat.FP32, "states": whole_master.data_ptr()},
    }.items():
        calls |= {f"{way}: {name}": call for way, call in states(**wrong).items()}
    for index, wrong_call in enumerate(
        [(0, *addresses[1:], 8, 1), (addresses[0], 0, addresses[2], 8, 1), (*addresses[:2], 0, 8, 1)]
        + [(*addresses, -1, 1), (*addresses, 8, 0), (0, 0, 0, 8, 1)]
        + [
            (free, free + 31, addresses[2], 8, 1),
            (free, addresses[1], free + 31, 8, 1),
            (free, free + 40, free + 47, 8, 1),
        ]
    ):
        calls |= {f"{way}: {index}": call for way, call in masters(*wrong_call).items()}
    return calls | {"keep": [*compact.arrays, *halved.arrays, room, whole_master, master, halves, short]}


@pytest.mark.parametrize("name", [name for name in refusals() if name != "keep"])
def test_what_cannot_work_is_refused_before_anything_is_touched(name: str) -> None:
    """Buffers of an update that overlap are, without the library, refused in the same words."""
    calls = refusals()
    before = image(calls["keep"])
    with pytest.raises(ConfigError) as native_words:
        calls[name]()
    if str(native_words.value).startswith("zo_update") and "overlap" in str(native_words.value):
        with without_library(), pytest.raises(ConfigError) as words:
            calls[name]()
        assert str(words.value) == str(native_words.value)
    assert image(calls["keep"]) == before


def test_what_only_looks_wrong_is_welcome() -> None:
    """Nothing to convert at no address; codes and scales that touch; what follows the last segment in its block."""
    memory = torch.zeros(2 * 512 + 16, dtype=torch.uint8)
    base = memory.data_ptr()
    shard = Shard.of(Rule.ADAMW, StateFormat.COMPACT, torch.ones(512), torch.ones(512), BF16)
    touching = replace(shard.buffers(), states=(base, base + 512), scales=(base + 1024, base + 1032))
    with without_library():
        for call in (kernels().states_decode, kernels().states_encode):
            call(StateFormat.COMPACT, True, 0, 0, 0, 0, 1)
        kernels().master_split(True, 0, 0, 0, 0, 1)
        fused_update(Rule.ADAMW, touching, [replace(SEGMENT, end=500)], 1)
    assert memory[:500].all() and memory[512:1012].all() and memory[1024:].any()
    assert not memory[500:512].any() and not memory[1012:1024].any()
    assert (shard.value[:500] != 1).all() and (shard.value[500:] == 1).all()
