"""Run directory: what a run is (`run.json`), what happened (`metrics.jsonl`), what to clean (`files.json`).

Owns the names of these files. The directory is guarded as the storage directory is: private, locked, and a name of ours
that is a link or no file is refused. Never touches the NVMe tier, which may lie below it and guards itself.

Calls, in order: `RunDir.held` around the whole run; `RunDir.create` once the tier's lock is held; `Metrics.open` with
the committed step.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError, StorageError
from zero_offload.checkpoint.metrics import DAMAGED_FILE, EARLIER_FILE, refuse_constant
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.system import (
    REAL,
    check_ours,
    naming_errors,
    read_file,
    refuse_other_kinds,
    replace_file,
)

RUN_HELP = "run directory of `train` or `finetune`, NVMe directory, or checkpoint"
RUN_FILE, METRICS_FILE, FILES_FILE = "run.json", "metrics.jsonl", "files.json"
PAGE_FILE, PICTURE_FILE, SAMPLE_FILE = "report.html", "report.png", "sample.txt"
TRACE_FILE = "trace.json"
"""With several ranks: `_RANK_TRACE`, one each."""
_RANK_TRACE = re.compile(r"trace\.rank\d+\.json")
_SHOWN = (PAGE_FILE, PICTURE_FILE, SAMPLE_FILE, TRACE_FILE)
"""Files that others have too; in a directory without a run they are theirs."""
_FILES = (
    RUN_FILE,
    METRICS_FILE,
    DAMAGED_FILE,
    EARLIER_FILE,
    FILES_FILE,
    PAGE_FILE,
    PICTURE_FILE,
    SAMPLE_FILE,
    TRACE_FILE,
)


@dataclass(frozen=True)
class RunDir:
    """One run's directory."""

    path: Path

    @contextmanager
    def held(self) -> Iterator[RunDirectory]:
        """Make the directory if need be, and keep other runs out of it; a directory that stays empty is removed again.

        Raises LockError, and StorageError where it is not private or a name of ours is not a file's.
        """
        with RunDirectory.open(self.path) as directory:
            there = {*directory.names()}
            for name in there.intersection((*_FILES, *self._rank_traces())):
                with suppress(FileNotFoundError):
                    check_ours(self.path / name, REAL.lstat(name, directory.dir_fd))
            if there.isdisjoint((RUN_FILE, FILES_FILE, METRICS_FILE)) and (others := there.intersection(_SHOWN)):
                raise ConfigError(
                    f"{self.path} holds no run, and {' and '.join(sorted(others))}, which a run writes; give another "
                    "directory, or move that away"
                )
            try:
                yield directory
            finally:
                with suppress(OSError, StorageError):
                    directory.close_and_remove()

    def _rank_traces(self) -> list[str]:
        try:
            return sorted(filter(_RANK_TRACE.fullmatch, os.listdir(self.path)))
        except FileNotFoundError:
            return []

    def create(self, description: Mapping[str, Any]) -> None:
        """Write what this run is, and list every file the run puts here."""
        ranks = description.get("identity", {}).get("ranks", 1)
        files = [*_FILES, *(f"trace.rank{rank}.json" for rank in range(ranks) if ranks > 1)]
        # Those of a start with more ranks.
        files += [name for name in self._rank_traces() if name not in files]
        with naming_errors("create", self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.write(FILES_FILE, json.dumps({"files": files}, indent=1))
        self.write(RUN_FILE, json.dumps(description, indent=1))

    def write(self, name: str, content: str | bytes) -> Path:
        """Replace one of the files, whole: a reader may have the last one open. Its path. Raises StorageError."""
        path = self.path / name
        try:
            replace_file(path, content.encode() if isinstance(content, str) else content)
        except OSError as error:
            remedy = "free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
            raise StorageError(
                f"cannot write {path}: {error.strerror}; {remedy}, or choose another directory"
            ) from error
        return path

    def remove_traces(self) -> None:
        """A new run begins: what is here shows another one."""
        for path in (self.path / name for name in (TRACE_FILE, *self._rank_traces())):
            refuse_other_kinds(path)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StorageError(f"cannot delete {path}: {error.strerror}; choose another directory") from error

    def read_trace(self) -> tuple[Path, dict[str, Any]] | None:
        """The first rank's trace, if there is one; of two, of starts with one rank and with several, the newer."""
        found = [path for name in (TRACE_FILE, "trace.rank0.json") if (path := self.path / name).is_file()]
        if not found:
            return None
        path = max(found, key=lambda path: path.stat().st_mtime_ns)
        return path, read_json(path, "delete it, or trace again with --trace")


def offload_settings(config: OffloadConfig) -> dict[str, Any]:
    """A config in `run.json`, flat: "offload.params" and so on. How a run starts is not part of what it is."""
    values = asdict(config) | {"nvme": [str(path.absolute()) for path in config.nvme_dirs]}
    return {f"offload.{name}": value for name, value in values.items() if name not in ("existing", "generation")}


def read_json(path: Path, remedy: str = "") -> dict[str, Any]:
    """The JSON object in a file of a run directory. Raises ConfigError, with `remedy`, where it is none."""
    try:
        content = json.loads(read_file(path).decode(), parse_constant=refuse_constant)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    except (ValueError, RecursionError) as error:
        refuse(path, str(error), remedy)
    if not isinstance(content, dict):
        refuse(path, "it holds no object", remedy)
    return content


def refuse(path: Path, why: str, remedy: str = "") -> NoReturn:
    """Raise ConfigError: `path` is damaged, or not of a run."""
    remedy = remedy or "put it back from a copy, give another --out, or start over with --discard"
    raise ConfigError(f"{path} is not what the run wrote: {why}; {remedy}")
