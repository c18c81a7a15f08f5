"""The machine of `gpu.py`: its accelerator by `torch.accelerator`, and the rates of links, memory, arithmetic and disk.

Where there is no accelerator the CPU stands in, so that `--rehearse` runs everywhere.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from zero_offload.abi import STATE_BLOCK, Rule, StateFormat
from zero_offload.device import compute_device
from zero_offload.kernels.choice import find, has_device_update
from zero_offload.kernels.update import Segment, UpdateBuffers, fused_update, segment_array
from zero_offload.memory.arena import Arena
from zero_offload.probe import count_cores, memory_limits
from zero_offload.types import GIB, MIB
from zero_offload.updates import update_threads

UPDATE_NUMEL = 1 << 26
MATRIX = 8192
VERSIONS = ("triton", "transformers", "peft", "deepspeed", "numpy", "safetensors")


@dataclass(frozen=True)
class Machine:
    """Where sections run; a rehearsal has toy sizes."""

    rehearses: bool

    @property
    def device(self) -> torch.device:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    @property
    def has_accelerator(self) -> bool:
        return self.device.type != "cpu"

    @property
    def module(self) -> Any:
        """torch.cuda, or what a device of another type has in its place."""
        return torch.get_device_module(self.device)

    @property
    def device_bytes(self) -> int:
        return int(self.module.get_device_properties(0).total_memory)

    @property
    def collectives(self) -> str:
        """torch's backend of collectives on the device."""
        return dist.Backend.default_device_backend_map.get(self.device.type, "gloo")

    def size(self, real: int, toy: int) -> int:
        return toy if self.rehearses else real

    def cap(self, nbytes: int) -> None:
        """From now on torch's allocator takes no more of the device's memory in this process."""
        if not self.rehearses:
            self.module.set_per_process_memory_fraction(min(nbytes / self.device_bytes, 1.0))

    def wait(self) -> None:
        """Return when all that was launched is done."""
        if self.has_accelerator:
            torch.accelerator.synchronize()

    def forget(self) -> None:
        """Freed memory goes back to the driver, that of cycles too, and peaks begin anew."""
        gc.collect()
        if self.has_accelerator:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Device memory that torch's allocator has held in this process since `forget`, at its peak."""
        return torch.accelerator.max_memory_reserved() if self.has_accelerator else 0

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """A new stream of the device, to launch on inside a `with`."""
        return torch.Stream(self.device) if self.has_accelerator else contextlib.nullcontext()

    def seconds(self, call: Callable[[], object], rounds: int = 5) -> float:
        """The median; the first call does not count."""
        times = []
        for _ in range(1 + rounds):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def use_all_cores(self) -> None:
        """torch takes half of them where it sees two threads to each; the rates take all, and so must an update.

        A rehearsal takes one: it shares the cores with other tests.
        """
        torch.set_num_threads(1 if self.rehearses else count_cores())

    def free_host_bytes(self) -> int:
        """What this process may still take, under every limit."""
        return min(limit.free_bytes for limit in memory_limits())

    def hardware(self, directory: Path) -> dict[str, Any]:
        """For the record."""
        disk = shutil.disk_usage(directory)
        found: dict[str, Any] = {
            "device": self.device.type,
            "cpu": _cpu_model(),
            "cores": count_cores(),
            "update_threads": update_threads(count_cores(), overlaps=True, is_host=not self.has_accelerator),
            "ram_gib": psutil.virtual_memory().total / GIB,
            "ram_free_gib": self.free_host_bytes() / GIB,
            "disk_gib": disk.total / GIB,
            "disk_free_gib": disk.free / GIB,
        }
        if self.has_accelerator and not self.rehearses:
            found |= {"gpu": self.module.get_device_name(), "gpu_memory_gib": self.device_bytes / GIB}
            found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        return found

    def versions(self) -> dict[str, Any]:
        found = {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform()}
        found |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "kernels": find().name}
        for name in VERSIONS:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found


def this_machine(rehearses: bool) -> Machine:
    return Machine(rehearses)


def gpu_name() -> str | None:
    """Without a context on the GPU, which would take its memory from the sections."""
    return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def commit() -> str | None:
    return _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40")


def _output(*command: str) -> str | None:
    """What a program prints; None where it is not there, or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def device_update(machine: Machine) -> dict[str, str]:
    """What updates states in the device's memory."""
    is_triton = has_device_update(torch.zeros(1, device=machine.device))
    return {"by": "Triton" if is_triton else "torch's operations", "host": find().name}


def links(machine: Machine) -> dict[str, float]:
    """Bytes per second between pinned host memory and the device: each way alone, both at once, and of pinning itself.

    Raises AssertionError where bytes arrive changed. The memory is pinned as the library does it: torch's own pinned
    memory is rounded up, and kept when it is freed.
    """
    nbytes = machine.size(GIB, MIB)
    arena, start = Arena(0, pinner=compute_device()), time.perf_counter()
    sources = [arena.array(torch.uint8, nbytes) for _ in range(2)]
    pin_s = time.perf_counter() - start
    targets = [torch.empty(nbytes, dtype=torch.uint8, device=machine.device) for _ in range(2)]
    lanes = [machine.stream() for _ in range(2)]

    def up() -> None:
        with lanes[0]:
            targets[0].copy_(sources[0], non_blocking=True)

    def down() -> None:
        with lanes[1]:
            sources[1].copy_(targets[1], non_blocking=True)

    def both() -> None:
        up()
        down()

    sources[0].random_(generator=torch.Generator().manual_seed(0))
    targets[1].fill_(7)
    up_s, down_s, both_s = (machine.seconds(call) for call in (up, down, both))
    assert torch.equal(targets[0].cpu(), sources[0]), "an upload changed bytes"
    assert bool((sources[1] == 7).all()), "a download changed bytes"
    return {"up": nbytes / up_s, "down": nbytes / down_s, "both": 2 * nbytes / both_s, "pin": 2 * nbytes / pin_s}


def update_s_per_parameter(machine: Machine, states: str) -> float:
    """AdamW's kernel alone on all cores: bf16 value and gradient, exact or compact, in memory."""
    numel, arena = machine.size(UPDATE_NUMEL, 1 << 16), Arena(0)
    state_format = StateFormat[states.upper()]
    is_compact = state_format is StateFormat.COMPACT
    value, grad = (arena.array(torch.bfloat16, numel).fill_(0.02) for _ in range(2))
    residual = arena.array(torch.int8 if is_compact else torch.bfloat16, numel)
    moments = [arena.array(torch.int8 if is_compact else torch.float32, numel) for _ in range(2)]
    scales = [arena.array(torch.float32, numel // STATE_BLOCK) for _ in range(2)] if is_compact else []
    buffers = UpdateBuffers(
        value=value.data_ptr(),
        residual=residual.data_ptr(),
        master=0,
        states=tuple(moment.data_ptr() for moment in moments),
        grad=grad.data_ptr(),
        value_out=0,
        value_dtype=torch.bfloat16,
        grad_dtype=torch.bfloat16,
        scales=tuple(scale.data_ptr() for scale in scales),
        state_format=state_format,
    )
    segments = segment_array([Segment(0, numel, 1e-6, 0.9, 0.999, 1e-8, 0.01, 1.0, 100)])
    return machine.seconds(lambda: fused_update(Rule.ADAMW, buffers, segments, count_cores())) / numel


def arithmetic(machine: Machine) -> dict[str, float]:
    """Of the device: operations of a large bf16 product per second, and bytes of its own memory, read or written."""
    size = machine.size(MATRIX, 64)
    left, right = (torch.randn(size, size).to(machine.device, torch.bfloat16) for _ in range(2))
    source = torch.ones(machine.size(GIB, MIB), dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    product_s, copy_s = machine.seconds(lambda: left @ right), machine.seconds(lambda: target.copy_(source))
    return {"flops_per_s": 2 * size**3 / product_s, "memory_bytes_per_s": 2 * source.nbytes / copy_s}
