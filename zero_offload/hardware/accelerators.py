"""The accelerators on which a model can compute, and what torch's calls for all of them leave open.

`torch.accelerator`, `torch.Stream`, `torch.Event` and the module of the device type (`torch.get_device_module`) name
devices, streams, memory and generators alike on every type: `device.py` uses those. The table has the rest, an entry
for each device type; on a type that it does not have the CPU computes. The only file that says `torch.cuda`. Nothing is
initialised at import.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class HostMemory:
    """Registers host memory with the driver, which then copies to and from it beside compute: by CUDA's runtime, or
    ROCm's under the same names."""

    # The driver pins pages by itself: RLIMIT_MEMLOCK (`ulimit -l`, docker's --ulimit memlock) is not asked.
    advice = (
        "Free CPU memory, or place fewer states on the cpu tier. Under WSL the limit is Windows': pinned memory is a "
        "part of the machine's, whatever 'ulimit -l' says"
    )
    """The remedy where the driver refuses."""
    _PORTABLE = 1
    """cudaHostRegisterPortable: pinned for every context of the process."""

    def register(self, address: int, nbytes: int) -> int:
        """Register memory for all devices of the process. Returns the driver's error code, 0 for success."""
        # Not torch's pinned allocator: that rounds to powers of two, up to twice what is asked for.
        status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, self._PORTABLE))
        if status:
            # CUDA keeps the error of a failed call, and the next kernel launch would report it as its own.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, dtype=torch.uint8, device="cuda")
        return status

    def unregister(self, address: int) -> None:
        """End the registration of this address, once no copy uses it."""
        torch.cuda.cudart().cudaHostUnregister(address)


def _generic_event(device: torch.device, timed: bool) -> torch.Event:
    # torch up to 2.14 ignores `blocking` here.
    return torch.Event(device, enable_timing=timed, blocking=True)


@dataclass(frozen=True)
class Accelerator:
    """One device type. Its module has `is_available`, `is_initialized`, `device_count`, `current_device`,
    `mem_get_info`, `get_device_name`, `get_device_properties`, `get_rng_state_all` and `set_rng_state`, as torch.cuda.
    """

    collectives: str
    """The backend of torch.distributed for tensors in its memory."""
    visible_devices: str
    """The environment variable that chooses devices of the machine, a name for each."""
    host_memory: HostMemory | None = None
    """None: host memory cannot be registered, and copies pass through the driver's own."""
    has_triton: bool = False
    """True if updates and sums may be compiled by Triton; torch's operations make the same bits in many launches."""
    has_aliases: bool = True
    """True if a storage that is made from a DLPack capsule is like any other."""
    make_stream: Callable[[torch.device], Any] = torch.Stream
    current_stream: Callable[[torch.device], Any] = torch.accelerator.current_stream
    make_event: Callable[[torch.device, bool], Any] = _generic_event
    """Makes an event, timed with True. A host that waits for it sleeps where the device type can do that."""


ACCELERATORS: dict[str, Accelerator] = {
    # NVIDIA's and AMD's: torch calls ROCm's devices "cuda", too. A generic event would spin a core of the host, which
    # updates need. Events and streams must both be CUDA's: each kind reads fields of its own in the other.
    "cuda": Accelerator(
        collectives="nccl",
        visible_devices="CUDA_VISIBLE_DEVICES" if torch.version.hip is None else "HIP_VISIBLE_DEVICES",
        host_memory=HostMemory(),
        has_triton=True,
        make_stream=lambda device: torch.cuda.Stream(device),
        current_stream=lambda device: torch.cuda.current_stream(device),
        make_event=lambda device, timed: torch.cuda.Event(enable_timing=timed, blocking=True),
    ),
    # Intel's.
    "xpu": Accelerator(collectives="xccl", visible_devices="ZE_AFFINITY_MASK"),
    # Huawei's Ascend, by torch_npu, which has a storage class of its own.
    "npu": Accelerator(collectives="hccl", visible_devices="ASCEND_RT_VISIBLE_DEVICES", has_aliases=False),
}
"""Accelerators by device type."""


def present_type() -> str | None:
    """The device type that is here and in the table."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in ACCELERATORS else None
