"""What the allocator of a device says about its memory, by the names that every device module of torch has.

A module without `memory_stats` measures nothing: `read_memory` returns None, as for a CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class DeviceMemory(NamedTuple):
    """Bytes of one device; all but the first two are of this process."""

    free: int
    """Not reserved by any process, and no more than this one may still take."""
    total: int
    """Of the device, or what `set_per_process_memory_fraction` leaves of it."""
    reserved: int
    """By torch's allocator: tensors and its cache."""
    peak: int
    """The most that it has reserved since `forget_peak`."""
    allocated: int
    """Of live tensors."""
    peak_allocated: int
    num_ooms: int
    """Out-of-memory errors so far; always 0 where the device type does not count them."""


def read_memory(device: torch.device) -> DeviceMemory | None:
    """What the allocator says now; None for a CPU, and where the device type does not say. Waits for nothing."""
    module = _module_of(device)
    if module is None:
        return None
    stats = module.memory_stats(device)
    free, total = module.mem_get_info(device)
    reserved = stats["reserved_bytes.all.current"]
    if hasattr(module, "get_per_process_memory_fraction"):
        total = int(total * module.get_per_process_memory_fraction(device))
        free = max(min(free, total - reserved), 0)
    return DeviceMemory(
        free,
        total,
        reserved,
        stats["reserved_bytes.all.peak"],
        stats["allocated_bytes.all.current"],
        stats["allocated_bytes.all.peak"],
        stats.get("num_ooms", 0),
    )


def forget_peak(device: torch.device) -> None:
    """Give the allocator's cache back, and begin peaks anew. Waits for the device."""
    module = _module_of(device)
    if module is not None:
        with torch.accelerator.device_index(device.index):
            module.empty_cache()
        module.reset_peak_memory_stats(device)


def is_capturing(device: torch.device) -> bool:
    """True if what this thread launches goes to a graph, to be run later, instead of to the device."""
    captures = None if device.type == "cpu" else getattr(_any_module(device), "is_current_stream_capturing", None)
    return captures is not None and bool(captures())


def _module_of(device: torch.device) -> Any:
    module = None if device.type == "cpu" else _any_module(device)
    return module if hasattr(module, "memory_stats") else None


def _any_module(device: torch.device) -> Any:
    return torch.get_device_module(device)
