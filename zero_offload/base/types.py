"""Words shared by every layer: tiers, state kinds, byte sizes. Values only; no I/O.

`parse_bytes` and `format_bytes` are the only places that read or write a size as text.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path

from zero_offload.base.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
STAGES = (0, 1, 2, 3)
"""The stages of ZeRO; `plan.partition` says what each divides."""
ADAPTERS = ("separate", "merged")
"""The folder of a model with adapters: theirs alone, or the base with them in its weights."""
SECTOR = 4096
"""Bytes that O_DIRECT takes whole, on drives with sectors of 512 bytes too."""
FRAME = 2 * MIB
"""The grain of host memory under units: huge pages make O_DIRECT reads twice as fast as 4 KiB pages."""


_NAME_NBYTES, _PATH_NBYTES = 255, 4096
"""The longest name and path that Linux takes."""


def user_path(given: str | os.PathLike[str], what: str = "a path") -> Path:
    """The path of a user, with ~ expanded. Raises ConfigError where no file can have it."""
    text = os.fspath(given)
    if not text:
        raise ConfigError(f"{what} is empty; give a path ('.' is the current directory)")
    try:
        names = os.fsencode(text).split(b"/")
    except UnicodeEncodeError:
        raise ConfigError(f"{what}, {text[:40]!r}, has half of a character") from None
    if len(text) >= _PATH_NBYTES or max(map(len, names)) > _NAME_NBYTES:
        raise ConfigError(f"{what}, {text[:40]!r}..., is longer than a file system takes")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{what}, {text!r}, names the home of a user that this machine does not have") from error


def whole_sectors(nbytes: int) -> int:
    """So many bytes, rounded up to a multiple of `SECTOR`."""
    return -(-nbytes // SECTOR) * SECTOR


class Tier(StrEnum):
    """Where a shard rests."""

    DEVICE = "device"
    CPU = "cpu"
    NVME = "nvme"


class StateKind(StrEnum):
    """Kinds of bytes in a shard; each kind is placed on its own tier."""

    PARAMS = "params"
    GRADS = "grads"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"


class Durability(StrEnum):
    """Ends of a program that a generation survives."""

    COMMIT = "commit"  # power loss
    PROCESS = "process"  # kill -9
    SCRATCH = "scratch"  # nothing, and leaves nothing behind


class Existing(StrEnum):
    """The treatment of a generation already in the directory."""

    REFUSE = "refuse"
    RESUME = "resume"
    DISCARD = "discard"


class GradReduction(StrEnum):
    """The reduction of the gradients of several ranks."""

    MEAN = "mean"
    SUM = "sum"


class Branches(StrEnum):
    """Which units of the model the ranks use."""

    SAME = "same"  # all use the same ones in the same order; anything else raises
    ANY = "any"  # each its own, such as the experts that its data chooses


class UpdateOverlap(StrEnum):
    """The pass beside which the optimizer's update runs."""

    AUTO = "auto"  # the next forward, where that gains anything
    FORWARD = "forward"
    BACKWARD = "backward"  # the backward that makes the gradients: unit by unit, as they are complete
    NONE = "none"


class EngineKind(StrEnum):
    """Engines that move the blocks of files."""

    IO_URING = "io_uring"  # Linux's; many requests in flight from one thread
    THREADS = "threads"  # pread and pwrite on native threads: on every Linux, in every container
    AIOFILES = "aiofiles"  # pread and pwrite from Python: without the native library


@dataclass(frozen=True)
class HardwareProfile:
    """Resources of a machine, in bytes and counts; read once by `probe.probe_hardware`."""

    num_cores: int
    cpu_memory_bytes: int
    """Memory this process may still take: the smallest of host, cgroup and rlimit."""
    device_name: str
    device_memory_bytes: int
    """Free memory of the compute device; on a CPU device the same as `cpu_memory_bytes`."""
    nvme_free_bytes: int
    """Free bytes summed over the configured directories; 0 without one."""


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", re.IGNORECASE)
_BINARY = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(value: int | str) -> int:
    """Read a size: an int is bytes; text takes B, KB, KiB, ... TiB ("KB" is 1000 B, "KiB" is 1024 B).

    Raises ConfigError when the text is not a size, is a small number without a unit, or the size is not positive.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"a size is an integer or text such as '16GiB', not {value!r}")
    if isinstance(value, int):
        result = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None or len(match[1]) > 30:
            raise ConfigError(f"cannot read {value!r} as a size; write for example '16GiB'")
        if not match[2] and float(match[1]) < MIB:
            raise ConfigError(f"{value!r} has no unit: write '{value.strip()}GiB', or '{value.strip()}B' for bytes")
        unit = match[2].lower().removesuffix("b")
        base = 1024 if unit.endswith("i") else 1000
        result = int(float(match[1]) * base ** _BINARY[unit.removesuffix("i")])
    if result <= 0:
        raise ConfigError(f"a size is positive, got {value!r}")
    return result


_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|sec|seconds?|min|minutes?|h|hours?)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_seconds(text: str) -> float:
    """Read a duration such as "30s", "2 min" or "1.5h" in seconds; case and spaces do not count.

    Raises ConfigError when the text is not a duration above 0.
    """
    match = _DURATION.fullmatch("".join(text.split()).lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"cannot read {text!r} as a duration; write for example '30s', '2min' or '1h'")
    return float(match[1]) * _SECONDS[match[2][0]]


def format_bytes(nbytes: float, *, at_least: bool = False) -> str:
    """Write a size with a binary unit and three significant digits (four from 1000 on): 1.46 GiB. `at_least` rounds
    it up."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(nbytes) >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    if at_least and nbytes >= 1:
        decimals = 0 if units[0] == "B" else max(2 - math.floor(math.log10(nbytes)), 0)
        nbytes = math.ceil(nbytes * 10**decimals) / 10**decimals
    if units[0] == "B":
        return f"{nbytes:.0f} B"
    return f"{nbytes:.{4 if abs(nbytes) >= 999.5 else 3}g} {units[0]}"


class StateFormat(IntEnum):
    """How an optimizer's states rest in memory: whole, in 16 bits, or as 8-bit codes with scales."""

    FP32 = 0
    BF16 = 1
    COMPACT = 2
