"""`torch.fakegpu`: what torch, and programs that use any accelerator, call on the module of a device."""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.fake_gpu.library import call

NUM_DEVICES = 4

_STATS = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "reserved_bytes.all.peak",
    "num_alloc_retries",
    "num_ooms",
)
"""In the order of the library's struct."""

Device = torch.device | int | str | None


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """Torch 2.11 takes a device whose module has no such function for an unused device: it waits for nothing."""


def device_count() -> int:
    return NUM_DEVICES


def current_device() -> int:
    return int(call("current_device"))


def set_device(device: Device) -> None:
    torch.accelerator.set_device_index(_index(device))


@contextlib.contextmanager
def device(which: Device) -> Iterator[None]:
    """Inside, the current device of this thread is this one."""
    before = current_device()
    call("set_current_device", _index(which))
    try:
        yield
    finally:
        call("set_current_device", before)


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


@contextlib.contextmanager
def stream(which: torch.Stream) -> Iterator[None]:
    """Inside, this stream is the current one of its device."""
    before = current_stream(which.device)
    torch.accelerator.set_stream(which)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_device_name(device: Device = None) -> str:
    return "fake GPU"


def get_device_properties(device: Device = None) -> Any:
    index = _index(device)
    total = int(call("memory_limit", index))
    return types.SimpleNamespace(name=get_device_name(index), total_memory=total, uuid=f"fake-gpu-{index}")


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


def is_current_stream_capturing() -> bool:
    return False


# Memory


def memory_stats(device: Device = None) -> dict[str, int]:
    values = (ctypes.c_int64 * len(_STATS))()
    call("memory_stats", _index(device), values)
    return dict(zip(_STATS, values, strict=True))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes: what is cached is not free."""
    total = int(call("memory_limit", _index(device)))
    return total - memory_stats(device)["reserved_bytes.all.current"], total


def memory_allocated(device: Device = None) -> int:
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Device = None) -> int:
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Device = None) -> int:
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: Device = None) -> int:
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device: Device = None) -> None:
    call("reset_peak", _index(device))


def empty_cache() -> None:
    call("empty_cache")


# Random numbers


def get_rng_state(device: Device = None) -> torch.Tensor:
    """(2,) uint64 as bytes: the seed, and how many draws were made."""
    seed, num_draws = ctypes.c_uint64(), ctypes.c_uint64()
    call("get_random", _index(device), seed, num_draws)
    with _disable_current_modes():  # as a generator's own calls, which no mode of dispatch sees
        return torch.tensor([seed.value, num_draws.value], dtype=torch.uint64, device="cpu").view(torch.uint8)


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    with _disable_current_modes():
        seed, num_draws = new_state.cpu().view(torch.uint64).tolist()
    call("set_random", _index(device), seed, num_draws)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(NUM_DEVICES)]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def initial_seed() -> int:
    return int(get_rng_state().view(torch.uint64)[0])


def manual_seed(seed: int) -> None:
    call("set_random", current_device(), seed % (1 << 64), 0)


def manual_seed_all(seed: int) -> None:
    for index in range(NUM_DEVICES):
        call("set_random", index, seed % (1 << 64), 0)


# torch.utils.checkpoint keeps the state of a device only if this is true.
_initialized = True
