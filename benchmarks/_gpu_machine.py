"""The machine of `gpu.py`: its GPU, or the CPU in a rehearsal, and the rates of its links, memory and disk."""

from __future__ import annotations

import gc
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from _disk_rates import Rates, disk_rates

from zero_offload.abi import STATE_BLOCK, Rule, StateFormat
from zero_offload.device import compute_device
from zero_offload.kernels.choice import find
from zero_offload.kernels.update import Segment, UpdateBuffers, fused_update, segment_array
from zero_offload.memory.arena import Arena
from zero_offload.probe import count_cores, memory_limits
from zero_offload.types import GIB, MIB
from zero_offload.updates import update_threads

UPDATE_NUMEL = 1 << 26
MATRIX = 8192


@dataclass(frozen=True)
class Machine:
    """Where sections run; a rehearsal is on the CPU and small, and makes no call of CUDA."""

    rehearses: bool

    @property
    def device(self) -> str:
        return "cpu" if self.rehearses else "cuda"

    @property
    def device_bytes(self) -> int:
        return 3 * MIB if self.rehearses else torch.cuda.get_device_properties(0).total_memory

    def size(self, real: int, small: int) -> int:
        return small if self.rehearses else real

    def cap(self, nbytes: int) -> None:
        """From now on this process gets no more of the GPU's memory."""
        if not self.rehearses:
            torch.cuda.set_per_process_memory_fraction(min(nbytes / self.device_bytes, 1.0))

    def wait(self) -> None:
        """For all that was launched."""
        if not self.rehearses:
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Freed memory goes back, that of cycles too, and peaks begin anew."""
        gc.collect()
        if not self.rehearses:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Of the GPU's memory in this process, what the allocator keeps included."""
        return 0 if self.rehearses else torch.cuda.max_memory_reserved()

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
        """torch takes half of them where it sees two threads to each; the bounds take all, and so must an update."""
        torch.set_num_threads(count_cores())

    def free_host_bytes(self) -> int:
        """What this process may still take, under every limit."""
        return min(limit.free_bytes for limit in memory_limits())

    def describe(self) -> dict[str, Any]:
        """For the record."""
        found: dict[str, Any] = {
            "processor": platform.processor() or platform.machine(),
            "cores": count_cores(),
            "torch_threads": torch.get_num_threads(),
            "update_threads": update_threads(torch.get_num_threads(), overlaps=True, is_host=self.rehearses),
            "memory_gib": psutil.virtual_memory().total / GIB,
            "memory_available_gib": self.free_host_bytes() / GIB,
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "kernels": find().name,
            "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        }
        if not self.rehearses:
            properties = torch.cuda.get_device_properties(0)
            found |= {"gpu": properties.name, "gpu_memory_gib": properties.total_memory / GIB}
            found |= {"cuda": torch.version.cuda}
            found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        return found


def _output(*command: str) -> str | None:
    """What a program prints; None where it is not there, or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second between host and GPU, pinned: each way alone, and both at once."""

    up: float
    down: float
    both: float
    pin: float
    """Of taking memory, its pages and their registration."""


def link_rates(machine: Machine) -> LinkRates:
    nbytes = machine.size(GIB, MIB)
    # Not torch's pinned memory, which is kept when it is freed.
    arena, start = Arena(0, pinner=compute_device()), time.perf_counter()
    sources = [arena.array(torch.uint8, nbytes) for _ in range(2)]
    pin_s = time.perf_counter() - start
    targets = [torch.ones(nbytes, dtype=torch.uint8, device=machine.device) for _ in range(2)]
    streams = [None, None] if machine.rehearses else [torch.cuda.Stream(), torch.cuda.Stream()]

    def up() -> None:
        with torch.cuda.stream(streams[0]):
            targets[0].copy_(sources[0], non_blocking=True)

    def down() -> None:
        with torch.cuda.stream(streams[1]):
            sources[1].copy_(targets[1], non_blocking=True)

    def both() -> None:
        up()
        down()

    each_s = [machine.seconds(call) for call in (up, down, both)]
    return LinkRates(nbytes / each_s[0], nbytes / each_s[1], 2 * nbytes / each_s[2], 2 * nbytes / pin_s)


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


def matrix_flops_per_s(machine: Machine) -> float:
    size = machine.size(MATRIX, 64)
    left, right = (torch.randn(size, size, device=machine.device).bfloat16() for _ in range(2))
    return 2 * size**3 / machine.seconds(lambda: left @ right)


def device_bytes_per_s(machine: Machine) -> float:
    """Of its own memory, read or written."""
    source = torch.ones(machine.size(GIB, MIB), dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / machine.seconds(lambda: target.copy_(source))


def rates_of_disk(machine: Machine, directory: Path) -> Rates:
    return disk_rates(directory, machine.size(2 * GIB, 16 * MIB))
