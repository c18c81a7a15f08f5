"""How much memory this process has had resident, for tests that measure in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from zero_offload.base.types import MIB
from zero_offload.hardware.probe import peak_resident_bytes as peak_bytes
from zero_offload.storage.memory.heap import trim_heap


def measured_alone(module: str, *arguments: object) -> Any:
    """The JSON that a module prints, run in a process of its own. Raises AssertionError where it fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # A fixed threshold: glibc raises its own as blocks are freed, and then keeps freed tensors, more in some runs.
    environment |= {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def reset_peak() -> int:
    """Forget the peak; returns what is resident now."""
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()
