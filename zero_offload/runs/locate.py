"""The meaning of a command's RUN: a run directory of `train`, an NVMe directory, or a checkpoint.

Owns how the manifests are found from it. Opens and changes nothing. The calls: `find_home`, or `states_home` of a run's
own record. `described` for the record that `train` wrote; `base_of` for files of others that it reads; `read_object`
for its other files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError
from zero_offload.base.types import format_bytes
from zero_offload.checkpoint.base_record import BaseState, look_at_base
from zero_offload.checkpoint.format import GENERATION_NAMES, History
from zero_offload.checkpoint.run_dir import RUN_FILE, RUN_HELP
from zero_offload.runtime.ranks.collectives import CommitGroup
from zero_offload.runtime.ranks.group import RankGroup
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.manifest import MAGIC
from zero_offload.storage.files.system import read_file

_OF_TRAINERS = ("zero_offload", "states")
"""Where checkpoints of OffloadTrainer and of OffloadStrategy have their states."""


def find_home(path: Path) -> Path:
    """The directory that has the manifests of the generations."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory; give a {RUN_HELP}")
    for place in (path, *(path / name for name in _OF_TRAINERS)):
        if place.is_dir() and has_generation(place):
            return place.absolute()
    identity = described(path).get("identity")
    home = states_home(path.absolute(), identity if isinstance(identity, dict) else {})
    if home is None:
        damaged = f", and its {RUN_FILE} does not say where the run's states are" * os.path.lexists(path / RUN_FILE)
        raise ConfigError(f"{path} holds no generation and no run{damaged}; give a {RUN_HELP}")
    if not home.is_dir() or not has_generation(home):
        raise ConfigError(f"the run in {path} has no generation in {home}: it has not committed, or was cleaned")
    return home


def states_home(path: Path, identity: Mapping[str, Any]) -> Path | None:
    """The directory of the generations of a run that lies in `path` now; None for a run that keeps none."""
    nvme = identity.get("offload.nvme")
    if not isinstance(nvme, list) or not nvme:
        return None
    home, out = Path(str(nvme[0])), Path(str(identity.get("out")))
    # Below the run directory they go where that is moved or copied to.
    return path / home.relative_to(out) if home.is_relative_to(out) else home


def base_of(path: Path) -> BaseState | None:
    """The base that the newest generation of a run rests in; None without one. Raises ConfigError where there is no
    run, and IntegrityError for a manifest that is damaged."""
    with RunDirectory.look(find_home(path)) as directory:
        newest = History.read(directory).newest
    return None if newest is None else look_at_base(newest)


def base_text(base: BaseState) -> str:
    """Where a base lies, and how large it is."""
    count = f"{base.num_files} file{'s' * (base.num_files > 1)}"
    return f"{base.folder}, {count} of {format_bytes(base.nbytes)}, read in place"


def described(path: Path) -> dict[str, Any]:
    """The record that `train` wrote about the run in this directory; empty where it wrote none."""
    return read_object(path / RUN_FILE)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where none can be read. Raises StorageError where it is a link, or no file."""
    try:
        value = json.loads(read_file(file).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def alone() -> CommitGroup:
    """This process, which reads by itself."""
    return CommitGroup(RankGroup.of(OffloadConfig()))


def has_generation(path: Path) -> bool:
    """True if a generation is here, or was; the caller says what is missing."""
    if any((path / name).is_file() for name in GENERATION_NAMES):
        return True
    if read_object(path / RUN_FILE).get("magic") != MAGIC:
        return False
    with RunDirectory.look(path) as directory:
        return not History.read(directory).is_empty
