"""The content of a disk, the part of it that is only in caches, and the rest after power loss or a kill.

Adversarial, as SQLite's test VFS is: nothing that was not flushed reaches the medium by itself, and of what was not
flushed any part may. Flushed bytes stay.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

ROOT = 1
"""The folder that everything is in."""


@dataclass(frozen=True)
class Op:
    """One operation on the file or folder `ino`."""

    ino: int


@dataclass(frozen=True)
class Write(Op):
    offset: int
    data: bytes


@dataclass(frozen=True)
class Resize(Op):
    nbytes: int


@dataclass(frozen=True)
class Link(Op):
    """A new file or folder gets its name in the folder."""

    name: str
    target: int
    is_folder: bool


@dataclass(frozen=True)
class Unlink(Op):
    name: str


@dataclass(frozen=True)
class Rename(Op):
    source: str
    name: str
    target: int


@dataclass(frozen=True)
class Sync(Op):
    """fsync or fdatasync; of a folder it makes names durable, of a file bytes and size, and never the other."""


@dataclass(frozen=True)
class FailedSync(Op):
    """A flush that returned an error: Linux then calls the pages clean, so a later one has nothing to do for them."""

    seed: int


Change = Write | Resize | Link | Unlink | Rename


@dataclass
class Disk:
    """The content of the medium, and behind it, in order, the operations that were issued and not flushed."""

    files: dict[int, bytearray] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    pending: list[Op] = field(default_factory=list)

    def copy(self) -> Disk:
        files = {ino: bytearray(content) for ino, content in self.files.items()}
        return Disk(files, {ino: dict(names) for ino, names in self.folders.items()}, list(self.pending))

    def issue(self, op: Op) -> None:
        """One operation more; it is done when this returns."""
        self._make_room(op)
        if isinstance(op, Sync | FailedSync):
            mine = [each for each in self.pending if each.ino == op.ino]
            self.pending = [each for each in self.pending if each.ino != op.ino]
            fates = random.Random(op.seed) if isinstance(op, FailedSync) else None
            for each in mine:
                if fates is None or fates.random() < 0.5:
                    self.apply(each)
        else:
            self.pending.append(op)

    def _make_room(self, op: Op) -> None:
        """A new file is there at once; after a crash it can be found only if its name is durable."""
        if isinstance(op, Link):
            self.folders.setdefault(op.target, {}) if op.is_folder else self.files.setdefault(op.target, bytearray())

    def apply(self, op: Op) -> None:
        """Have a change on the medium."""
        self._make_room(op)
        if isinstance(op, Write):
            content = self.files[op.ino]
            content.extend(bytes(max(op.offset - len(content), 0)))
            content[op.offset : op.offset + len(op.data)] = op.data
        elif isinstance(op, Resize):
            content = self.files[op.ino]
            content.extend(bytes(max(op.nbytes - len(content), 0)))
            del content[op.nbytes :]
        elif isinstance(op, Link):
            self.folders[op.ino][op.name] = op.target
        elif isinstance(op, Unlink):
            self.folders[op.ino].pop(op.name, None)
        elif isinstance(op, Rename):
            names = self.folders[op.ino]
            if names.get(op.source) == op.target:
                del names[op.source]
            names[op.name] = op.target

    def settled(self) -> Disk:
        """As running programs see it: all that was issued is there."""
        disk = self.copy()
        for op in disk.pending:
            disk.apply(op)
        disk.pending = []
        return disk

    def killed(self, underway: Op | None, seed: int) -> Disk:
        """After a kill -9 within `underway`: what was issued goes on to be in the machine's memory."""
        disk = self.copy()
        rng = random.Random(seed)
        if underway is not None and seed > 0:
            if isinstance(underway, Write) and seed > 1:
                disk.issue(_torn(underway, rng))
            elif not isinstance(underway, FailedSync):
                disk.issue(underway)
        return disk

    def without_power(self, underway: Op | None, seed: int) -> Disk:
        """After a loss of power within `underway`; the seeds below 4 are the extremes, the others draw."""
        rng = random.Random(seed)
        disk = self.copy()
        unsure: list[Op] = list(disk.pending)
        if isinstance(underway, Change):
            unsure.append(underway)
        disk.pending = []
        lost = rng.randrange(len(unsure)) if unsure else 0
        for i, op in enumerate(unsure):
            names = isinstance(op, Link | Unlink | Rename)
            if seed < 5:
                kept = (False, True, names, not names, i != lost)[seed]
                if kept:
                    disk.apply(op)
            elif isinstance(op, Write):
                for piece in _remains(op, rng):
                    disk.apply(piece)
            elif rng.random() < 0.5:
                disk.apply(op)
        return disk._without_nameless()

    def _without_nameless(self) -> Disk:
        named = {ROOT}.union(*(names.values() for names in self.folders.values()))
        files = {ino: content for ino, content in self.files.items() if ino in named}
        return Disk(files, {ino: names for ino, names in self.folders.items() if ino in named})

    def digest(self) -> bytes:
        """Equal for disks with the same state."""
        state = hashlib.sha1(repr((sorted(self.folders.items()), self.pending)).encode())
        for ino, content in sorted(self.files.items()):
            state.update(b"%d:%d" % (ino, len(content)))
            state.update(content)
        return state.digest()


def _sectors(op: Write, rng: random.Random) -> list[tuple[int, int]]:
    size = rng.choice((512, 4096))
    edges = [0, *range(size - op.offset % size, len(op.data), size), len(op.data)]
    return list(zip(edges, edges[1:], strict=False))


def _torn(op: Write, rng: random.Random) -> Write:
    """The first sectors."""
    sectors = _sectors(op, rng)
    return replace(op, data=op.data[: sectors[rng.randrange(len(sectors))][0]])


def _remains(op: Write, rng: random.Random) -> Iterator[Write]:
    """The remains of an unflushed write: all, none, some of its sectors, zeros or anything."""
    fate = rng.choice(("all", "none", "head", "tail", "holes", "garbage", "zeros"))
    sectors = _sectors(op, rng)
    cut = rng.randrange(len(sectors) + 1)
    for i, (begin, end) in enumerate(sectors):
        data = op.data[begin:end]
        if fate == "garbage" and rng.random() < 0.5:
            data = rng.randbytes(end - begin)
        if fate == "zeros":
            data = bytes(end - begin)
        holes = fate == "holes" and rng.random() < 0.5
        if fate == "none" or (fate == "head" and i >= cut) or (fate == "tail" and i < cut) or holes:
            continue
        yield replace(op, offset=op.offset + begin, data=data)
