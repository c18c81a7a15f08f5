"""Which files of a folder are ours, where others put theirs too: a list in the folder, by which alone they are deleted.

Owns that list, and every deletion outside of run directories: weights, tokens, models, checkpoints of trainers. A file
goes if the list names it and it is a regular file; a directory goes if it is empty then. Unlisted files stay, and the
caller says so. A folder that was copied or renamed is its owner's: the list names its folder. No link is followed.

The calls: `write_list` when a folder is whole, or `add_to_list` before each file where files come one by one. Then
`listed`, and `delete`; `move_aside` where a name is taken.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from zero_offload.base.errors import StorageError
from zero_offload.storage.files.system import naming_errors, read_file, replace_file

LIST_NAME = "zero_offload-files.json"
UNLISTED_NAME = re.compile(r"\.(.+)\.partial-[0-9a-f]{12}|step-\d+|merged")
"""A folder of weights that is being written, or has just got its name: a kill may leave it without a list."""
MODEL_NAME = re.compile(
    r"(model|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5})?\.safetensors|"
    r"(model|diffusion_pytorch_model)\.safetensors\.index\.json|"
    r"(adapter_|generation_)?config\.json|README\.md|"
    r"tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|chat_template\.(jinja|json)|"
    r"vocab\.(json|txt)|merges\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model|(pre)?processor_config\.json"
)
"""Files that exports, and the libraries that they call, write into a folder of weights."""
STATES_NAME = re.compile(r"LOCK|run\.json|generation-[01]\.json|rank\d+-[01]\.json|rank\d+(\.\d+)?\.swap")
"""The files of a checkpoint of states."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SHOWN = 5


def write_list(folder: Path, names: Iterable[str] | None = None) -> None:
    """Say that these files, by default all that are there now, are ours. Raises StorageError."""
    listed = all_files(folder) if names is None else names
    text = json.dumps({"folder": folder.name, "files": sorted({*listed} - {LIST_NAME})}, indent=1)
    with naming_errors("write", folder / LIST_NAME):
        replace_file(folder / LIST_NAME, text.encode())


def add_to_list(folder: Path, names: Iterable[str]) -> None:
    """Say that these files, which are about to be made, are ours too. Raises StorageError where one is there already
    and is not."""
    known = read_list(folder)
    new = [name for name in names if name not in known]
    if strange := [name for name in new if os.path.lexists(folder / name)]:
        raise StorageError(
            f"{folder / strange[0]} is there, and {folder / LIST_NAME} does not list it: it is not ours and stays. "
            "Move it away, then start again"
        )
    if new:
        write_list(folder, [*known, *new])


def read_list(folder: Path) -> list[str]:
    """The names that the list of a folder has; none without a list, and of a folder that was copied or renamed."""
    return _read(folder) or []


def _read(folder: Path) -> list[str] | None:
    try:
        words = json.loads(read_file(folder / LIST_NAME))
    except (OSError, ValueError, RecursionError, StorageError):
        return None
    if not isinstance(words, dict) or words.get("folder") != folder.name or not isinstance(words.get("files"), list):
        return None
    return [name for name in words["files"] if isinstance(name, str) and _is_inside(name)]


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def listed(folder: Path, unlisted: re.Pattern[str] = UNLISTED_NAME, kinds: re.Pattern[str] = MODEL_NAME) -> list[str]:
    """Files in a folder that are ours: by its list, and by those of folders in it; the list itself is the last one.

    In folders of `unlisted` names, which a kill may leave without one, it is files of `kinds`. A list that counts for
    nothing, such as that of a copy, still says that no kill has left the folder.
    """
    if folder.is_symlink() or not folder.is_dir():
        return []
    names = _read(folder)
    own = {*(names or ())}
    for name in subfolders(folder):
        below = folder / name
        own |= {f"{name}/{each}" for each in listed(below, unlisted, kinds)}
        if unlisted.fullmatch(name) and not os.path.lexists(below / LIST_NAME):
            own |= {f"{name}/{each}" for each in of_kinds(below, kinds)}
    found = [name for name in all_files(folder) if name in own and name != LIST_NAME]
    return found if names is None else [*found, LIST_NAME]


def of_kinds(folder: Path, kinds: re.Pattern[str]) -> list[str]:
    """Names of files of these kinds in a folder and below it."""
    return [name for name in all_files(folder) if kinds.fullmatch(PurePosixPath(name).name)]


def all_files(folder: Path) -> list[str]:
    """Names of the regular files in a folder and below it, relative to it; links are neither followed nor named."""
    return sorted(_walk(folder, regular=True))


def all_names(folder: Path) -> list[str]:
    """The same of all kinds of files, links included."""
    return sorted(_walk(folder, regular=False))


def _walk(folder: Path, *, regular: bool) -> Iterator[str]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            below = list(_walk(folder / entry.name, regular=regular))
            yield from (f"{entry.name}/{each}" for each in below)
        elif entry.is_file(follow_symlinks=False) or not regular:
            yield entry.name


def subfolders(folder: Path) -> list[str]:
    """Names of the directories in a folder; none where it is none."""
    return [name for name in names_in(folder) if (folder / name).is_dir() and not (folder / name).is_symlink()]


def names_in(folder: Path) -> list[str]:
    """Names of all that is in a folder; none where it is none."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


@dataclass(frozen=True)
class ForeignFiles:
    """Entries that stay in a folder, since they are not ours."""

    folder: Path
    names: tuple[str, ...]

    def __str__(self) -> str:
        count = len(self.names)
        shown = ", ".join(self.names[:_SHOWN]) + f" and {count - _SHOWN} more" * (count > _SHOWN)
        return f"{self.folder}: {count} file{'s' * (count > 1)} that no list names stay{'s' * (count == 1)}: {shown}"


def delete(folder: Path, names: Iterable[str]) -> ForeignFiles | None:
    """Delete these files of a folder, in this order, then directories of theirs that are empty, itself included.


    Returns what stays; None where nothing does, or where the folder is none. Raises StorageError.
    """
    if folder.is_symlink() or not folder.is_dir():
        return None
    own = [PurePosixPath(name) for name in names if _is_inside(name)]
    empty = [name for name in subfolders(folder) if UNLISTED_NAME.fullmatch(name)]
    with naming_errors("delete", folder):
        root = os.open(folder, _DIRECTORY)
        try:
            for name in own:
                _unlink(root, name)
            _prune(root, {parent for name in own for parent in name.parents} | {*map(PurePosixPath, empty)})
        finally:
            os.close(root)
        with contextlib.suppress(OSError):
            folder.rmdir()
    left = tuple(all_names(folder))
    return ForeignFiles(folder, left) if left else None


def drop_empty(folder: Path) -> None:
    """Remove a folder of ours, and those in it, as far as they are empty."""
    for name in subfolders(folder):
        drop_empty(folder / name)
    with contextlib.suppress(OSError):
        folder.rmdir()


def move_aside(path: Path) -> Path | None:
    """Give what is not ours another name beside it, where something of ours gets its name; None where nothing is."""
    if not os.path.lexists(path):
        return None
    names = (path.with_name(f"{path.name}.kept{number or ''}") for number in itertools.count())
    free = next(name for name in names if not os.path.lexists(name))
    with naming_errors("rename", path):
        path.rename(free)
    return free


def _unlink(root: int, name: PurePosixPath) -> None:
    """Unlink a regular file; whatever else has its name, or is on the way to it, stays."""
    with _opened(root, name.parent) as place, contextlib.suppress(FileNotFoundError):
        if place is not None and stat.S_ISREG(os.stat(name.name, dir_fd=place, follow_symlinks=False).st_mode):
            os.unlink(name.name, dir_fd=place)


def _prune(root: int, directories: Iterable[PurePosixPath]) -> None:
    """Remove those that are empty, the deepest first."""
    for each in sorted(directories, key=lambda path: -len(path.parts)):
        if each.parts:
            with _opened(root, each.parent) as place, contextlib.suppress(OSError):
                if place is not None:
                    os.rmdir(each.name, dir_fd=place)


@contextlib.contextmanager
def _opened(root: int, path: PurePosixPath) -> Iterator[int | None]:
    """A directory below `root`, reached through no link; None where there is none."""
    fd = os.dup(root)
    try:
        for part in path.parts:
            try:
                below = os.open(part, _DIRECTORY, dir_fd=fd)
            except OSError:
                yield None
                return
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)
