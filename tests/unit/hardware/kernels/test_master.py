from __future__ import annotations

import numpy as np
import pytest
import torch

from zero_offload.base.errors import ConfigError
from zero_offload.hardware import abi, native
from zero_offload.hardware.kernels.formats import convert, join_master, split_master

LOWS = [0x0000, 0x0001, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFE, 0xFFFF]


def all_highs(low: int) -> torch.Tensor:
    """(65536,) fp32: every upper half with this lower half."""
    words = (np.arange(1 << 16, dtype=np.uint32) << 16) | low
    return torch.from_numpy(words.view(np.float32))


def split_and_join(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    half = torch.empty(master.numel(), dtype=torch.bfloat16)
    residual = torch.empty(master.numel(), dtype=torch.int16)
    back = torch.empty(master.numel())
    split_master(master, half, residual, num_threads=2)
    join_master(half, residual, back, num_threads=2)
    return half, residual, back


def check_round_trip(master: torch.Tensor) -> None:
    half, residual, back = split_and_join(master)
    nan = master.isnan()
    assert torch.equal(back.view(torch.int32)[~nan], master.view(torch.int32)[~nan])
    assert half[nan].isnan().all() and back[nan].isnan().all()
    assert torch.equal(half[nan].signbit(), master[nan].signbit())
    assert not residual[nan].any()
    # The half is the nearest bf16: exactly torch's, except that ties go away from zero.
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    nearest = master.to(torch.bfloat16)
    assert torch.equal(half[~nan & ~tie], nearest[~nan & ~tie])
    assert (half[~nan & tie].float().abs() > master[~nan & tie].abs()).all()


@pytest.mark.parametrize("low", LOWS)
def test_round_trip_of_every_upper_half(low: int) -> None:
    check_round_trip(all_highs(low))


@pytest.mark.full
def test_round_trip_of_every_float() -> None:
    step = 1 << 22
    for begin in range(0, 1 << 32, step):
        words = np.arange(begin, begin + step, dtype=np.uint64).astype(np.uint32)
        back = split_and_join(torch.from_numpy(words.view(np.float32)))[2].numpy()
        same = back.view(np.uint32) == words
        assert same.all() or np.isnan(words.view(np.float32)[~same]).all() and np.isnan(back[~same]).all()


def test_a_nan_of_all_ones_does_not_become_zero() -> None:
    """Rounding its bits up would carry into the sign."""
    master = torch.from_numpy(np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], dtype=np.uint32).view(np.float32))
    half, residual, _ = split_and_join(master)
    assert [bits & 0xFFFF for bits in half.view(torch.int16).tolist()] == [0x7FFF, 0xFFFF, 0x7FC0]
    assert residual.tolist() == [0, 0, 0]


def test_a_finite_master_whose_half_is_infinite_comes_back() -> None:
    master = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    half, _, back = split_and_join(master)
    assert half.isinf().all()
    assert torch.equal(back, master)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("low", LOWS)
def test_convert_rounds_as_torch(low: int, dtype: torch.dtype) -> None:
    source = all_highs(low)
    narrow, wide = torch.empty(1 << 16, dtype=dtype), torch.empty(1 << 16)
    convert(narrow, source, num_threads=2)
    expected = source.to(dtype)
    nan = source.isnan()
    assert torch.equal(narrow.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])
    assert narrow[nan].isnan().all()
    convert(wide, narrow)
    assert torch.equal(wide[~nan], expected.float()[~nan])


@pytest.mark.parametrize("isa", native.supported_isas(), ids=str)
def test_fp16_rounds_as_torch_around_every_fp16_number(isa: abi.Isa) -> None:
    """Each fp16 number, the middles between neighbours, and what lies just beside those."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    numbers = numbers[numbers.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    edges = torch.tensor([65519.996, 65520.0, 2.0**-25, -(2.0**-25), 1e-40])
    source = torch.cat([numbers, middles, torch.nextafter(middles, numbers[1:]), torch.nextafter(middles, -middles)])
    source = torch.cat([source, edges])
    native.set_isa(isa)
    narrow = torch.empty(len(source), dtype=torch.float16)
    convert(narrow, source)
    assert torch.equal(narrow.view(torch.int16), source.half().view(torch.int16))


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="through fp32"):
        convert(torch.zeros(4, dtype=torch.float16), torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"\[4, 3\]"):
        convert(torch.zeros(4), torch.zeros(3))
    with pytest.raises(ConfigError, match="contiguous"):
        convert(torch.zeros(4), torch.zeros(8)[::2])
    with pytest.raises(ConfigError, match="int16"):
        split_master(torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize("residual_dtype", [torch.int16, torch.int8], ids=str)
def test_refuses_parts_that_overlap_and_touches_nothing(residual_dtype: torch.dtype) -> None:
    memory = torch.ones(256)
    master, halves = memory[:128], memory.view(torch.bfloat16)
    half, residual = torch.ones(128, dtype=torch.bfloat16), torch.ones(128, dtype=residual_dtype)
    calls = [split_master, lambda a, b, c: join_master(b, c, a)]
    for call in calls:
        with pytest.raises(ConfigError, match="master and half overlap; give each memory of its own"):
            call(master, halves[255:383], residual)
        with pytest.raises(ConfigError, match="master and residual overlap"):
            call(master, half, memory.view(residual_dtype)[:128])
        with pytest.raises(ConfigError, match="half and residual overlap"):
            call(master, halves[256:384], memory[128:].view(residual_dtype)[127:255])
    assert (memory == 1).all() and (half == 1).all() and (residual == 1).all()
    for call in calls:  # one after the other
        call(master, halves[256:384], memory[192:].view(residual_dtype)[:128])


def test_a_conversion_in_place_keeps_its_kind() -> None:
    memory = torch.ones(256)
    for dst, src in [
        *((memory[1:], memory[:-1]), (memory[:-1], memory[1:])),
        *((memory[:128], memory[:64].view(torch.bfloat16)), (memory.view(torch.float16)[:256], memory)),
    ]:
        with pytest.raises(ConfigError, match="dst and src overlap; give each memory of its own"):
            convert(dst, src)
    assert (memory == 1).all()
    convert(memory, memory)
    assert (memory == 1).all()
