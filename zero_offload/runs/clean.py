"""Deletes a run's files, and nothing else.

Owns which files belong to a run. These are named by `files.json` in the run directory, by the lists in directories that
it names, and by the manifests in its NVMe directories. Anything else stays and is listed. Refuses a directory that a
run has locked. The call: `clean`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.checkpoint.format import History
from zero_offload.checkpoint.run_dir import FILES_FILE
from zero_offload.runs.locate import described, read_object
from zero_offload.storage.files import own_files
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.manifest import read_manifest

NVME_SETTING = "offload.nvme"


@dataclass(frozen=True)
class Cleaned:
    """The result for one directory."""

    path: str
    freed_bytes: int
    """Bytes that are freed; with `--dry-run`, that would be freed."""
    deleted: tuple[str, ...]
    left: tuple[str, ...]
    """Names that no manifest of the run lists."""
    file_bytes: dict[str, int]
    """Bytes that each deleted file took on the disk."""
    generations: dict[str, str]
    """Names from the deleted manifests."""
    is_gone: bool
    """True if nothing is left in the directory, which is then deleted too."""


def clean(run_dir: Path, dry_run: bool = False) -> list[Cleaned]:
    """Delete the run's files and the directories that are then empty; or only say which files those are."""
    opened = RunDirectory.look if dry_run else RunDirectory.open
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a directory; give the run directory that `train` or `finetune` wrote")
    if not any(run_dir.glob("*.json")):
        # Before the lock, which would leave its file in a stranger's directory.
        raise _no_run(run_dir)
    with contextlib.ExitStack() as locks:
        # Everything is locked and read before anything is deleted. The tier goes first, so that an interrupted clean
        # can still find it through the run directory.
        home = locks.enter_context(opened(run_dir))
        tier = [locks.enter_context(opened(path)) for path in _tier_paths(home)]
        # The manifests of a striped tier lie in one directory and name the files of all.
        tier_names = {name for directory in (*tier, home) for name in _manifest_names(directory)}
        home_names = tier_names if not tier else set(_manifest_names(home))
        listed = read_object(home.path / FILES_FILE)
        home_names |= {*_strings(listed.get("files"))}
        below = {name: own_files.listed(home.path / name) for name in _folders(home, listed)}
        if not tier_names | home_names and not any(below.values()):
            raise _no_run(run_dir)
        # A path in a directory that goes is gone when its turn comes.
        gone: list[Path] = []
        results = []
        for directory, names in (*((each, tier_names) for each in tier), (home, home_names)):
            results.append(_measure(directory, names, below if directory is home else {}, gone))
            if results[-1].is_gone:
                gone.append(directory.path)
            if not dry_run:
                directory.check_removable(names)
                for name, files in below.items() if directory is home else ():
                    own_files.delete(home.path / name, files)
                directory.remove(sorted(names))
                directory.close_and_remove()
        return results


def _no_run(path: Path) -> ConfigError:
    return ConfigError(f"{path} holds neither {FILES_FILE} nor a manifest; give a run directory")


def _tier_paths(home: RunDirectory) -> list[Path]:
    """The other directories of the run, as it recorded them, as far as they still exist.

    A copy records the directories of its original, which are none of its own: those beside it are not touched.
    """
    paths = []
    identity = described(home.path).get("identity")
    if isinstance(identity, dict):
        out = Path(str(identity.get("out", home.path)))
        for path in map(Path, _strings(identity.get(NVME_SETTING))):
            if path.is_relative_to(out):
                paths.append(home.path / path.relative_to(out))
            elif _is_same(out, home):
                paths.append(path)
    for payload in _manifests(home).values():
        recorded = _strings(payload.get("directories"))
        paths += map(Path, recorded if recorded and _is_same(Path(recorded[0]), home) else [])
    return [path for path in dict.fromkeys(paths) if path.is_dir() and not path.samefile(home.path)]


def _is_same(path: Path, directory: RunDirectory) -> bool:
    return path.is_dir() and path.samefile(directory.path)


def _manifests(directory: RunDirectory) -> dict[str, dict[str, Any]]:
    """The payloads of the directory's manifests; what is not ours, or is damaged, is passed over."""
    found = {}
    for name in directory.names():
        if name.endswith(".json"):
            with contextlib.suppress(ZeroOffloadError):
                found[name] = read_manifest(directory, name) or {}
    return found


def _manifest_names(directory: RunDirectory) -> Iterator[str]:
    for manifest, payload in _manifests(directory).items():
        for name in (manifest, *_strings(payload.get("files"))):
            yield name
            if name.endswith(".json"):
                yield f"{name}.tmp"  # a crash can leave the one being written


def _strings(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _folders(home: RunDirectory, listed: dict[str, Any]) -> list[str]:
    """Directories of `home` that a run names, and no links."""
    names = _strings(listed.get("directories"))
    return [name for name in dict.fromkeys(names) if (path := home.path_of(name)).is_dir() and not path.is_symlink()]


def _measure(
    directory: RunDirectory, names: set[str], below: Mapping[str, Sequence[str]], gone: Sequence[Path]
) -> Cleaned:
    """The entries of a directory that go, and of those `below` it; `gone` are directories that go before it."""
    there = [name for name in directory.names() if directory.path / name not in gone]
    own = {name: [name] for name in there if name in names}
    own |= {name: [f"{name}/{each}" for each in files] for name, files in below.items() if name in there}
    left = [name for name in there if name not in own]
    for name in below:
        others = own_files.all_names(directory.path / name)
        left += [f"{name}/{each}" for each in others if f"{name}/{each}" not in own[name]]
    present = tuple(each for name in there for each in own.get(name, ()))
    file_bytes = {name: (directory.path / name).lstat().st_blocks * 512 for name in present}
    steps = {name: str(each) for name, each in History.read(directory).generations.items() if name in present}
    return Cleaned(
        str(directory.path), sum(file_bytes.values()), present, tuple(sorted(left)), file_bytes, steps, not left
    )
