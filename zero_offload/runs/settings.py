"""Settings of a run that trains, as far as all of them have them: tables of a TOML file, where it writes, rates.

Owns the rules that do not depend on what is trained. The calls: `read_tables` for a file; `with_offload` for both of
its tables, with all of their problems at once; `out_problems` and `place_problems` among them.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError
from zero_offload.base.problems import list_problems, unknown_names
from zero_offload.base.types import UpdateOverlap

RUNS = Path("runs")
PORT = 8320
"""Of the page of a run that trains."""


def with_offload(
    cls: type[Any],
    settings: Mapping[str, Any],
    make: Callable[[], OffloadConfig],
    problems: Sequence[str],
    find_problems: Callable[[Any], Iterator[str]],
    words: str,
) -> dict[str, Any]:
    """Settings of a config class, and the `OffloadConfig` that `make` gives.

    Raises one ConfigError with `problems`, under `words`, with those of the settings, and with those of `make`.
    """
    found, messages = dict(settings), []
    try:
        found["offload"] = make()
    except ConfigError as error:
        messages.append(str(error))
    values = {each.name: found.get(each.name, each.default) for each in fields(cls)}
    if problems := [*problems, *find_problems(SimpleNamespace(**values))]:
        messages.insert(0, list_problems(words, problems))
    if messages:
        raise ConfigError("\n".join(messages))
    return found


def read_tables(path: Path, name: str = "train") -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables of this name and [offload] of a TOML file; either may be absent."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give a TOML file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    problems = unknown_names(document, [name, "offload"])
    problems += [
        f"{key} is not a table; write [{key}]" for key, table in document.items() if not isinstance(table, dict)
    ]
    if problems:
        raise ConfigError(f"{path}: " + "; ".join(problems))
    return document.get(name, {}), document.get("offload", {})


_RATE_MIN, _RATE_MAX = 1e-9, 0.05
"""AdamW moves a weight by about the rate in a step. Weights are about 0.02, of which fp32 tells apart steps of 2e-9."""


def rate_warnings(lr: float, usual: float) -> Iterator[str]:
    """A line for a peak learning rate that trains no model."""
    moves = "AdamW, which moves each weight by about that much in a step"
    if lr > _RATE_MAX:
        yield f"warning: --lr {lr:g} is far too high for {moves}: the model will be destroyed; usual is --lr {usual:g}"
    elif lr < _RATE_MIN:
        yield f"warning: --lr {lr:g} is far too low for {moves}: most will not change; usual is --lr {usual:g}"


def out_problems(out: Path) -> Iterator[str]:
    """Where a run cannot write."""
    # Of a place that may not be looked at, `os.path` says no, and pathlib raises.
    if os.path.exists(out) and not os.path.isdir(out):
        yield f"out={str(out)!r} is a file; name a directory"


def place_problems(offload: OffloadConfig, out: Path, clip: object) -> Iterator[str]:
    """Problems of tiers and storage for a run that clips gradients and writes to `out`."""
    if offload.overlap == UpdateOverlap.BACKWARD:
        yield f"overlap='backward' updates before gradients can be clipped (clip={clip!r}); use overlap='forward'"
    if out.resolve() in [path.resolve() for path in offload.nvme_dirs]:
        yield f"nvme={str(out)!r} is the run directory too; both keep a run.json: name one inside it, or another"


def is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
