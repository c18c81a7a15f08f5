"""The machine of `gpu.py`: its accelerator, by what torch has for all of them, and what can be said of it."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import itertools
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

from zero_offload.base.types import GIB, MIB, StateFormat
from zero_offload.hardware import native
from zero_offload.hardware.abi import STATE_BLOCK, Rule
from zero_offload.hardware.device import compute_device
from zero_offload.hardware.kernels.arguments import Segment, segment_array
from zero_offload.hardware.kernels.choice import has_device_update
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update
from zero_offload.hardware.probe import count_cores, memory_limits
from zero_offload.model.updates import update_threads
from zero_offload.storage.memory.arena import Arena

UPDATE_NUMEL = 1 << 26
VERSIONS = ("triton", "transformers", "peft", "deepspeed", "numpy", "safetensors")


@dataclass(frozen=True)
class Machine:
    """Where sections run; a rehearsal has toy sizes."""

    rehearses: bool

    @property
    def device(self) -> torch.device:
        found = torch.accelerator.current_accelerator()
        assert found is not None
        return found

    @property
    def module(self) -> Any:
        """torch.cuda, or what a device of another type has in its place."""
        return torch.get_device_module(self.device)

    def size(self, real: int, toy: int) -> int:
        return toy if self.rehearses else real

    def cap(self, nbytes: int) -> None:
        """From now on torch's allocator takes no more of the device's memory in this process."""
        if not self.rehearses:
            _, total = self.module.mem_get_info()
            self.module.set_per_process_memory_fraction(min(nbytes / total, 1.0))

    def reset_peak(self) -> None:
        """Freed memory goes back to the driver, that of cycles too, and peaks begin anew."""
        gc.collect()
        self.module.empty_cache()
        self.module.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Device memory that torch's allocator has held in this process since `reset_peak`, at its peak."""
        return int(self.module.max_memory_reserved())

    def seconds(self, call: Callable[[], object], rounds: int = 5) -> float:
        """The median; the first call does not count."""
        times = []
        for _ in range(1 + rounds):
            torch.accelerator.synchronize()
            start = time.perf_counter()
            call()
            torch.accelerator.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def use_all_cores(self) -> None:
        """torch takes half of them where it sees two threads to each; the rates take all, and so must an update.

        A rehearsal takes one: it shares the cores with other tests.
        """
        torch.set_num_threads(1 if self.rehearses else count_cores())

    def free_host_bytes(self) -> int:
        """Bytes that this process may still take, under every limit."""
        return min(limit.free_bytes for limit in memory_limits())

    def hardware(self, directory: Path) -> dict[str, Any]:
        """For the record."""
        disk = shutil.disk_usage(directory)
        free, total = self.module.mem_get_info()
        return {
            "gpu": self.module.get_device_name(),
            "gpu_memory_gib": total / GIB,
            "gpu_memory_free_gib": free / GIB,
            "driver": _nvidia_smi("driver_version"),
            "cpu": _cpu_model(),
            "cores": count_cores(),
            "update_threads": update_threads(count_cores(), overlaps=True, is_host=False),
            "ram_gib": psutil.virtual_memory().total / GIB,
            "ram_free_gib": self.free_host_bytes() / GIB,
            "disk_gib": disk.total / GIB,
            "disk_free_gib": disk.free / GIB,
        }

    def versions(self) -> dict[str, Any]:
        found = {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform()}
        found |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "kernels": host_kernels()}
        for name in VERSIONS:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found


def this_machine(rehearses: bool) -> Machine:
    """In a rehearsal the process gets the GPU of the tests, in host memory, which does everything late."""
    if rehearses:
        from tests.fake_gpu import device

        device.load()
        device.policy(device.Policy.LATE)
    return Machine(rehearses)


def races(machine: Machine) -> list[str]:
    """Memory that a rehearsal's device saw used before it was there, or after."""
    if not machine.rehearses:
        return []
    from tests.fake_gpu import device

    return device.take_races()


def gpu_name() -> str | None:
    """Without a context on the GPU, which would take memory from the sections."""
    return _nvidia_smi("name")


def _nvidia_smi(what: str) -> str | None:
    return _output("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader")


def commit() -> str | None:
    return _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40")


def _output(*command: str) -> str | None:
    """The output of a program; None where it is missing, or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def host_kernels() -> str:
    return "native" if native.available() else "numba"


def device_update(machine: Machine) -> dict[str, str]:
    """The code that updates states in the device's memory."""
    is_triton = has_device_update(torch.zeros(1, device=machine.device))
    return {"by": "Triton" if is_triton else "torch's operations", "host": host_kernels()}


def pin_and_copy(machine: Machine) -> dict[str, float]:
    """Through the library's own copy lanes, up and down again, and of pinning itself; each once.

    Raises AssertionError where bytes arrive changed.
    """
    device, nbytes = compute_device(), machine.size(GIB, MIB)
    seconds = [time.perf_counter()]
    out, back = Arena(0, pinner=device).array(torch.uint8, 2 * nbytes).split(nbytes)
    seconds.append(time.perf_counter())
    out.random_(generator=torch.Generator().manual_seed(0))
    there = torch.empty(nbytes, dtype=torch.uint8, device=machine.device)
    seconds.append(time.perf_counter())
    device.upload(there, out).take_on_host()
    seconds.append(time.perf_counter())
    device.download(back, there).take_on_host()
    seconds.append(time.perf_counter())
    assert torch.equal(out, back), "bytes that went up and came down are not the same"
    pin, _, up, down = (nbytes / (then - before) for before, then in itertools.pairwise(seconds))
    return {"pin_bytes_per_s": 2 * pin, "upload_bytes_per_s": up, "download_bytes_per_s": down}


def copy_host_memory(machine: Machine) -> dict[str, float]:
    """Bytes read and written per second by a copy on all cores."""
    source = torch.ones(machine.size(2 * GIB, MIB), dtype=torch.uint8)
    target = torch.empty_like(source)
    return {"bytes_per_s": 2 * source.nbytes / machine.seconds(lambda: target.copy_(source))}


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
