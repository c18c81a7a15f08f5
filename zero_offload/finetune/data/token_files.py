"""Rows of data as files of tokens, one per use.

[Note: the file of tokens]
Rows are tokenized once, a few at a time, into an Arrow file that `datasets` maps into memory: no data need fit memory.
Its name comes from the data's bytes, the tokenizer and the settings. So a file that is there holds the same tokens, at
each start and on each rank. One process at a time works in the folder, under a lock; the others find the file. It is
renamed when it is whole, and deletes those before it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_offload.base.errors import ConfigError
from zero_offload.finetune.data.counts import Counts, Tally
from zero_offload.finetune.data.methods import Maker
from zero_offload.finetune.data.packing import pack
from zero_offload.finetune.data.rows import Form, row_at
from zero_offload.finetune.data.sources import Known, Row, RowSource
from zero_offload.storage.files.own_files import add_to_list, delete, read_list, write_list
from zero_offload.storage.files.system import naming_errors

if TYPE_CHECKING:
    from datasets import Dataset

_VERSION = 1
"""Of the tokens that this code makes of the same data."""
_LOCK = "lock"
_BATCH = 1000
"""Rows at once; so many samples does TRL pack at once, too."""


@dataclass(frozen=True)
class RowSplit:
    """Which rows a use takes: of every 1 / split one is kept for evaluation, which one is drawn."""

    split: float
    seed: int
    is_kept: bool
    """True if the use takes those that are kept."""

    def takes(self) -> Iterator[bool]:
        """Of each row in order, True if the use takes it."""
        if not self.split:
            while True:
                yield True
        draw, begin, block = random.Random(f"split {self.seed}"), 0, 0
        while True:
            block += 1
            end = math.ceil(block / self.split)
            kept = draw.randrange(begin, end)
            for number in range(begin, end):
                yield (number == kept) == self.is_kept
            begin = end


@dataclass(frozen=True)
class Use:
    """The purpose of rows, and the choice of rows for it."""

    name: str
    known: Sequence[Known]
    part: RowSplit
    is_packed: bool

    def rows(self) -> Iterator[tuple[str, Row, Form]]:
        takes = self.part.takes()
        for each in self.known:
            for place, row in each.source.rows():
                if next(takes):
                    yield place, row, each.form


class TokenFiles:
    """The folder of such files; see [Note: the file of tokens]."""

    def __init__(self, folder: Path, maker: Maker, seq: int) -> None:
        self._folder, self._maker, self._seq = folder, maker, seq
        self._words = [_VERSION, type(maker).__name__, seq, maker.labels, _tokenizer_digest(maker.tokenizer)]
        self._digests: dict[RowSource, str] = {}

    def key(self, use: Use) -> str:
        """The name of a use's file."""
        data = []
        for each in use.known:
            if each.source not in self._digests:
                self._digests[each.source] = each.source.digest()
            data.append([each.form.kind, each.form.columns, self._digests[each.source]])
        words = [*self._words, use.is_packed, asdict(use.part) if use.part.split else None, data]
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]

    def of(self, use: Use) -> tuple[Dataset, Counts]:
        """The dataset of a use; its file is made, unless it is there."""
        from datasets import Dataset

        path = self._folder / f"{use.name}-{self.key(use)}.arrow"
        said = path.with_suffix(".json")
        with naming_errors("write the data's tokens to", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(self._folder / _LOCK):
                if not _is_whole(path, said):
                    self._make_way(use, path, said)
                    try:
                        self._write(path, said, use)
                    except BaseException:
                        path.with_suffix(".tmp").unlink(missing_ok=True)  # it may be as large as the disk
                        raise
            return Dataset.from_file(str(path)), Counts(**_read(said)["counts"])

    def _make_way(self, use: Use, path: Path, said: Path) -> None:
        """Delete the tokens before of this use, as far as they are ours, and list what is about to be made."""
        known = read_list(self._folder)
        old = [name for name in known if name.startswith(f"{use.name}-")]
        delete(self._folder, old)
        write_list(self._folder, [_LOCK, *(name for name in known if name not in old)])
        add_to_list(self._folder, [path.name, said.name, path.with_suffix(".tmp").name])

    def _write(self, path: Path, said: Path, use: Use) -> None:
        import pyarrow

        tally, temporary = Tally(), path.with_suffix(".tmp")
        rows, writer = self._made(use, tally), None
        with temporary.open("wb") as file:
            while batch := list(islice(rows, _BATCH)):
                table = pyarrow.Table.from_pylist(batch, _schema(batch[0]))
                table = pack(table, self._seq) if use.is_packed else table
                writer = writer or pyarrow.ipc.new_stream(file, table.schema)
                writer.write_table(table)
                tally.rows += len(table)
            if writer is None:
                raise ConfigError(_nothing(use, tally, self._seq))
            writer.close()
            num_bytes = file.tell()
            os.fsync(file.fileno())
        temporary.rename(path)
        with temporary.open("w", encoding="utf-8") as words:
            json.dump({"bytes": num_bytes, "counts": tally.counts().to_dict()}, words)
            words.flush()
            os.fsync(words.fileno())
        temporary.rename(said)

    def _made(self, use: Use, tally: Tally) -> Iterator[Row]:
        for place, row, form in use.rows():
            tally.read += 1
            with row_at(place):
                made = self._maker.make(row, form, tally)
            yield from made


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; a link is not followed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _read(said: Path) -> dict[str, Any]:
    words: dict[str, Any] = json.loads(said.read_text(encoding="utf-8"))
    return words


def _is_whole(path: Path, said: Path) -> bool:
    """True if the file is there as it was written."""
    return path.is_file() and said.is_file() and path.stat().st_size == _read(said)["bytes"]


def _schema(row: Row) -> Any:
    import pyarrow

    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])

    def kind(value: Any) -> Any:
        if isinstance(value, list):
            return pyarrow.list_(message if isinstance(value[0], dict) else pyarrow.int32())
        return pyarrow.string() if isinstance(value, str) else pyarrow.int64()

    return pyarrow.schema([(name, kind(value)) for name, value in row.items()])


def _tokenizer_digest(tokenizer: Any) -> str:
    words = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    for setting in ("truncation", "padding"):  # of the last call
        words.pop(setting, None)
    said = [words, tokenizer.chat_template, {name: str(value) for name, value in tokenizer.special_tokens_map.items()}]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _nothing(use: Use, tally: Tally, seq: int) -> str:
    names = ", ".join(each.source.name for each in use.known)
    if not tally.read:
        return f"split={use.part.split} leaves no row of {names} for evaluation; give a larger one, or --eval-data"
    return (
        f"no row of {names} has a token to train on. All {tally.read} are left out: they are empty, or the text before "
        f"the assistant's words fills seq={seq}"
    )
