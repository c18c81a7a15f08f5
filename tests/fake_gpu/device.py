"""A GPU in host memory, for tests: what it does late, what it found, what it counted, and what it shall refuse.

`load` registers it with torch as "fakegpu", with four devices. Only a process that has run no backward yet can do this:
torch starts the threads of autograd, one per device, at the first backward. So the tests of this folder run in a
process of their own (see conftest.py). All else here needs a loaded device.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
from collections import Counter
from collections.abc import Iterator

import torch

from tests.fake_gpu import library
from tests.fake_gpu.build import build
from tests.fake_gpu.library import call, is_loaded
from zero_offload.hardware.accelerators import ACCELERATORS, Accelerator, HostMemory
from zero_offload.hardware.device import HostDevice

__all__ = [
    "LATE",
    "TYPE",
    "Policy",
    "counting",
    "counts",
    "current",
    "is_loaded",
    "load",
    "memory_limit",
    "num_queued",
    "on_host",
    "policy",
    "refuse_pinning",
    "reset",
    "synchronize",
    "take_error",
    "take_races",
]

TYPE = "fakegpu"
STREAMS_PER_DEVICE = 20
"""As in csrc/device.h."""


class Policy(enum.IntEnum):
    """When operations run that nothing waits for."""

    LATE = 0
    """Never."""
    EAGER = 1
    """At once: the reference."""
    SIDE_EARLY = 2
    """On other streams than the default one as soon as what they wait for is done; on the default one never."""
    SIDE_LATE = 3
    """The other way round."""
    RANDOM = 4
    """As the seed says: some streams get ahead, and others stay behind."""


LATE = (Policy.LATE, Policy.SIDE_EARLY, Policy.SIDE_LATE, Policy.RANDOM)
"""All that differ from the reference."""


def load() -> None:
    """Build the device where that is due, and register it with torch. Raises BuildError."""
    if is_loaded():
        return
    torch.utils.rename_privateuse1_backend(TYPE)
    library.load(build())
    from tests.fake_gpu import operations, torch_module

    torch._register_device_module(TYPE, torch_module)
    torch.utils.generate_methods_for_privateuse1_backend()
    operations.register()
    _tell_zero_offload()
    if torch.distributed.is_available():
        from tests.fake_gpu import collectives

        collectives.register()


class _HostMemory(HostMemory):
    """Registration of host memory, as zero_offload calls it on every accelerator."""

    advice = "let the test allow it"

    def register(self, address: int, nbytes: int) -> int:
        return 0 if call("register_host", address, nbytes) else 2

    def unregister(self, address: int) -> None:
        call("unregister_host", address)


def _tell_zero_offload() -> None:
    ACCELERATORS[TYPE] = Accelerator(
        collectives=TYPE, visible_devices="FAKEGPU_VISIBLE_DEVICES", host_memory=_HostMemory()
    )


def policy(name: Policy, seed: int = 0) -> None:
    """From now on; the seed is that of RANDOM."""
    call("set_policy", int(name), seed)


def reset(current: int = 0) -> None:
    """Run what is queued, drop races, errors and counts, and allow everything again.

    The device `current` is this thread's current one then: a rank has one of its own.
    """
    policy(Policy.EAGER)
    call("reset")
    call("refuse_registration", 0)
    for index in range(torch.accelerator.device_count()):
        call("set_memory_limit", index, 0)
    call("set_current_device", current)
    torch.fakegpu.manual_seed_all(0)


def take_races() -> list[str]:
    """Run what is queued; then the races found since the last reset or call, each kind once. They are dropped then."""
    synchronize()
    return list(filter(None, call("take_races").decode().split("\n")))


def synchronize() -> None:
    """Wait for both devices."""
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


def take_error() -> str:
    """The error of an operation that ran late, or ""."""
    return str(call("take_error").decode())


def num_queued() -> int:
    """Of operations, waits and events that have not run."""
    return int(call("num_queued"))


def counts() -> Counter[str]:
    """By name, since the last reset; those of `COUNTS` in csrc/device.h."""
    return Counter({call("count_name", i).decode(): call("counted", i) for i in range(call("num_counts"))})


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Holds after the block what was counted in it."""
    before, found = counts(), Counter[str]()
    yield found
    found.update(counts() - before)


@contextlib.contextmanager
def memory_limit(nbytes: int, index: int = 0) -> Iterator[None]:
    """Inside, a device has so much memory."""
    before = call("memory_limit", index)
    call("set_memory_limit", index, nbytes)
    try:
        yield
    finally:
        call("set_memory_limit", index, before)


@contextlib.contextmanager
def refuse_pinning() -> Iterator[None]:
    """Inside, no host memory can be registered."""
    call("refuse_registration", 1)
    try:
        yield
    finally:
        call("refuse_registration", 0)


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Models that are offloaded inside compute on the CPU."""
    module = importlib.import_module("zero_offload.model.offload")
    before, module.compute_device = module.compute_device, HostDevice
    try:
        yield
    finally:
        module.compute_device = before


@contextlib.contextmanager
def current(index: int) -> Iterator[None]:
    """Inside, this device is the thread's current one."""
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)
