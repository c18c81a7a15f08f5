"""Where rows of data come from: files, folders of files, datasets of the hub; each row with its place, for errors.

JSON and CSV are read by the standard library, so text stays as the file has it. Arrow and pandas would make dates,
numbers or missing values of some. Parquet is read by pyarrow: `datasets` takes a name with *, ? or [ for a pattern, and
reads other files too. Datasets of the hub are read by `datasets`. Rows come one at a time, so that a file may be larger
than memory; a JSON file that is one array is read whole.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from zero_offload.base.errors import ConfigError
from zero_offload.base.problems import did_you_mean
from zero_offload.base.types import user_path
from zero_offload.finetune.data.rows import COLUMNS, Form, form_of, is_row
from zero_offload.integrations.gate import parse

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?")
_PARQUET_ROWS = 1000
"""In memory at once."""
_FOR_EVALUATION = {"test", "eval", "evaluation", "valid", "validation", "val", "dev"}

Row = dict[str, Any]


@dataclass(frozen=True)
class RowSource:
    """One file, or one dataset of the hub, whose rows are in its split "train"."""

    name: str
    path: Path | None

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Every row, and where it is. Raises ConfigError for what cannot be read."""
        try:
            yield from self._rows()
        except OSError as error:
            raise ConfigError(f"{self.name} cannot be read: {error}") from error

    def _rows(self) -> Iterator[tuple[str, Row]]:
        if self.path is None:
            yield from self._numbered(_of_hub(self.name))
        elif _ending(self.path) in (".jsonl", ".json"):
            yield from _of_json(self.path)
        elif _ending(self.path) == ".csv":
            yield from _of_csv(self.path)
        elif _ending(self.path) == ".txt":
            yield str(self.path), {"text": _text_of(self.path)}
        else:
            yield from self._numbered(_of_parquet(self.path))

    def digest(self) -> str:
        """Changes when a byte of the data does."""
        if self.path is None:
            return str(_of_hub(self.name)._fingerprint)
        info = self.path.stat()
        return _digest_of(self.path, (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns))

    def _numbered(self, rows: Any) -> Iterator[tuple[str, Row]]:
        number = 0
        try:
            for number, row in enumerate(rows, 1):
                yield f"{self.name}, row {number}", row
        except ConfigError:
            raise
        except Exception as error:  # of several libraries
            said = " ".join(str(error).split())
            raise ConfigError(f"{self.name} cannot be read behind row {number}: {said}") from error


@cache
def _digest_of(path: Path, state: tuple[int, ...]) -> str:
    """Of a file, once in a `state` of it: a start asks twice."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def digests(words: Sequence[str]) -> list[str]:
    """Of each source that `words` name, in order; wherever it lies. Raises ConfigError as `find_sources` does."""
    return [source.digest()[:32] for source in find_sources(words)[0]]


def find_sources(words: Sequence[str]) -> tuple[list[RowSource], list[str]]:
    """The files that `words` name, in order, and those of folders that are left out: their names say evaluation."""
    found, left = [], []
    for word in words:
        path = user_path(word, "the name of data")
        if path.is_dir():
            inside, out = _of_folder(path)
            found += inside
            left += out
        elif path.exists():
            if _ending(path) not in SUFFIXES:
                raise ConfigError(f"{path} has none of the endings {', '.join(SUFFIXES)}; convert it to one of them")
            found.append(RowSource(str(path), path))
        elif _ending(path) in SUFFIXES or not _HUB_NAME.fullmatch(word):
            what = f"give a file ({', '.join(SUFFIXES)}) or a folder of such files"
            raise ConfigError(f"{path} does not exist; {_near(word) or what}")
        else:
            found.append(RowSource(word, None))
    return found, left


def _ending(path: Path) -> str:
    """In small letters: some systems write .CSV."""
    return path.suffix.lower()


def _near(word: str) -> str:
    """A question that offers a file of almost this name, or of this name with an ending; empty if there is none."""
    path = user_path(word)
    beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    named = [name for name in beside if name.removesuffix(Path(name).suffix) == path.name and name != path.name]
    return did_you_mean(named[0] if named else path.name, beside, word.removesuffix(path.name)).strip()


def _of_folder(folder: Path) -> tuple[list[RowSource], list[str]]:
    paths = [path for path in sorted(folder.rglob("*")) if _ending(path) in SUFFIXES and path.is_file()]
    paths = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not paths:
        raise ConfigError(f"the folder {folder} has no file with one of the endings {', '.join(SUFFIXES)}")
    words = {path: set(re.split(r"[^a-z]+", str(path.relative_to(folder)).lower())) for path in paths}
    left = [path for path in paths if words[path] & _FOR_EVALUATION and "train" not in words[path]]
    if len(left) == len(paths):
        left = []
    return [RowSource(str(path), path) for path in paths if path not in left], [str(path) for path in left]


@dataclass(frozen=True)
class Known:
    """A source, and how its rows are read."""

    source: RowSource
    form: Form
    columns: tuple[str, ...]


def read_forms(words: Sequence[str]) -> tuple[list[Known], list[str]]:
    sources, left = find_sources(words)
    if not sources:
        raise ConfigError("there are no data; give files, folders of files, or the name of a dataset")
    known = []
    for source in sources:
        _, first = next(source.rows(), (None, None))
        if first is None:
            raise ConfigError(f"{source.name} has no row")
        known.append(Known(source, form_of(tuple(first), source.name), tuple(first)))
    return known, left


def kinds_of(known: Sequence[Known]) -> str:
    return " and ".join(dict.fromkeys(each.form.kind for each in known))


# Formats


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}; convert it") from error


def _of_json(path: Path) -> Iterator[tuple[str, Row]]:
    """One object per line, one array of objects, or one object that holds such an array."""
    with path.open("rb") as file:
        first = [*islice((line for line in file if line.strip()), 2)]
    if not first:
        raise ConfigError(f"{path} is empty")
    if _ending(path) == ".json" and not (len(first) > 1 and _is_object(first[0])):
        yield from _of_array(path)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}, line {number}", _object_of(line, f"{path}, line {number}")


def _is_object(line: bytes) -> bool:
    """True if a line is an object of its own, as in JSON lines."""
    try:
        return isinstance(parse(line.decode("utf-8-sig")), dict)
    except ValueError:
        return False


def _object_of(line: bytes, place: str) -> Row:
    try:
        row = parse(line.decode("utf-8-sig"))
    except ValueError as error:
        is_part = line.strip() in (b"[", b"{")
        hint = "a file of one array has the ending .json" if is_part else "mend the line, or delete it"
        why = f"{error.msg}, at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        raise ConfigError(f"{place}: not JSON: {why}; {hint}") from error
    if not isinstance(row, dict):
        raise ConfigError(f'{place}: {_kind(row)}, not an object such as {{"messages": [...]}}')
    return row


def _of_array(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        whole = parse(_text_of(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if isinstance(whole, dict) and not is_row(whole):
        arrays = [value for value in whole.values() if isinstance(value, list) and value]
        whole = arrays[0] if len(arrays) == 1 else [whole]
    elif isinstance(whole, dict):
        whole = [whole]
    if not isinstance(whole, list):
        raise ConfigError(f"{path} holds {_kind(whole)}, not an array of rows; give one, or JSON lines")
    for number, row in enumerate(whole, 1):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, row {number}: {_kind(row)}, not an object")
        yield f"{path}, row {number}", row


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def _of_csv(path: Path) -> Iterator[tuple[str, Row]]:
    """All of it is text: 007 stays 007, and NA is not a missing value."""
    csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            lines = filter(None, reader)
            header = next(lines, [])
            _check_twins(header, path)
            for fields in lines:
                place = f"{path}, line {reader.line_num}"
                if len(fields) != len(header):
                    raise ConfigError(f"{place}: {len(fields)} fields, and the header has {len(header)}")
                yield place, dict(zip(header, fields, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as CSV in UTF-8, with commas: {error}") from error


def _of_parquet(path: Path) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path, page_checksum_verification=True) as file:
        _check_twins(file.schema_arrow.names, path)
        for batch in file.iter_batches(_PARQUET_ROWS):
            yield from batch.to_pylist()


def _check_twins(columns: Sequence[str], path: Path) -> None:
    """Raise ConfigError where two columns that are used have one name: a row would have the values of one of them."""
    if twins := [name for name, count in Counter(columns).items() if count > 1 and name in COLUMNS]:
        raise ConfigError(f"{path} has the column {twins[0]!r} twice; rename one of them")


def _of_hub(name: str) -> Any:
    from datasets import load_dataset

    dataset, _, config = name.partition(":")
    try:
        _check_network(dataset)
        return load_dataset(dataset, config or None, split="train")
    except ValueError as error:  # a config or split that it lacks
        raise ConfigError(f"{name}: {error}") from error
    except Exception as error:  # of several libraries
        first = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{name} is not a file or folder here, and the hub has no such dataset or cannot be reached ({first}); "
            f"{_near(dataset) or 'give a file, or download the dataset where there is a network'}"
        ) from error


def _check_network(dataset: str) -> None:
    """Raise OSError where the hub has no address: its library would try again for half a minute."""
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub.constants import ENDPOINT

    is_cached = Path(HF_DATASETS_CACHE, dataset.replace("/", "___")).is_dir()
    if not is_cached and not getproxies():
        socket.getaddrinfo(urlsplit(ENDPOINT).hostname, None)
