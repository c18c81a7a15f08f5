"""Measured rates of this machine, remembered: CPU, drives and GPUs. Plans of this machine use it.

Owns the file, `rates.json` in the user's cache directory (`$XDG_CACHE_HOME/zero_offload`, by default
`~/.cache/zero_offload`), which says when each figure was taken. A file that cannot be read is as if it were not there.
Never measures. The calls: `load`, `save`; `with_measured` for a machine's GPU.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zero_offload.hardware.machines import Machine, gpu_of_device

_VERSION = 2

Table = dict[str, Any]


@dataclass(frozen=True)
class Rates:
    """The remembered rates."""

    host: Table = field(default_factory=dict)
    flops: Table = field(default_factory=dict)
    """FLOP/s of the CPU, by precision."""
    drives: Table = field(default_factory=dict)
    """Rates of drives, by the number of the file system."""
    devices: Table = field(default_factory=dict)
    """Rates of GPUs, by the name that torch gives."""

    def device(self, name: str) -> Table:
        """The rates of the GPU that torch, or `zero-offload plan --gpu`, names so; empty where it was not measured."""
        return next((dict(table) for known, table in self.devices.items() if name in (known, gpu_of_device(known))), {})


def cache_file() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "zero_offload" / "rates.json"


def load() -> Rates:
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
        if found["version"] == _VERSION:
            host, flops, drives = (dict(found[name]) for name in ("host", "flops", "drives"))
            return Rates(host, flops, drives, dict(found.get("devices", {})))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never written, of another version, or damaged: it is measured anew when asked for
    return Rates()


def save(rates: Rates) -> None:
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps({"version": _VERSION, **vars(rates)}, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def with_measured(machine: Machine, name: str, dtype_name: str, ranks_here: int = 1) -> Machine:
    """One rank's share of this machine with a GPU, by what `zero-offload bench --device` has measured here.

    As it is where that GPU was not measured in this precision. `name` is torch's or the plan's; `dtype_name` is what
    the model computes in, such as "bfloat16".
    """
    rates = load()
    table = rates.device(name)
    flops = table.get("training_flops", {}).get(dtype_name)
    if flops is None:
        return machine
    host_bytes = rates.host["bytes_per_s"] / ranks_here if rates.host else machine.host_bytes
    # All GPUs of a machine copy from the same memory; one was measured.
    limit = min(table["both_bytes_per_s"], machine.host_bytes if ranks_here > 1 else float("inf"))
    upload, download = (min(table[f"{way}_bytes_per_s"], limit) for way in ("upload", "download"))
    host = f"its host updates {host_bytes / 1e9:.3g} GB/s" if rates.host else "its host by data sheets, not measured"
    return replace(
        machine,
        flops=flops,
        device_bytes=table["memory_bytes_per_s"],
        upload_bytes=upload,
        download_bytes=download,
        host_bytes=host_bytes,
        host_bytes_beside=host_bytes,
        source=f"{name}, measured {table['taken']}: trains at {flops / 1e12:.3g} TFLOPS, copies {upload / 1e9:.3g} "
        f"GB/s up and {download / 1e9:.3g} GB/s down; {host}",
    )
