"""How much memory this process has had resident, for tests that measure in a process of their own."""

from __future__ import annotations

from pathlib import Path

from zero_offload.storage.memory.heap import trim_heap


def peak_bytes() -> int:
    """The most since `reset_peak`."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def reset_peak() -> int:
    """Forget it; returns what is resident now."""
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()
