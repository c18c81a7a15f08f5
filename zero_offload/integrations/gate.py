"""The gate for folders of others: a file of theirs becomes an object of a library, or one ConfigError that names it.

Owns what a file may hold before a library sees it: how deep JSON is, how large sizes are. And it says whose fault an
exception is. An exception of a drive, of memory or of this package is passed on; any other is about the file. Each call
stands around one library's call, never around a command. The calls: `read_object`, `check_sizes`, `reading`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from zero_offload.base.errors import ConfigError, StorageError, ZeroOffloadError
from zero_offload.base.types import MIB

MAX_DEPTH = 100
"""Objects and arrays inside of each other. Python takes about a thousand, libraries behind it less."""
MAX_NBYTES = 512 * MIB
"""Of a file of settings or words; the largest published tokenizer has some 30 MiB."""
MAX_LAYERS = 5_000
"""Units that planning and prefetch are made for; published models have up to some 130 layers."""
MAX_SIZE = 10**8
"""Of one dimension, of a vocabulary, of experts. Published models stay below 10^7 (positions)."""
MAX_WORDS = 10**7
"""Of a vocabulary: a rehearsal goes over it in parts of some thousand. Published ones stay below 10^6."""
_LAYERS = re.compile(r"(num|n)_(\w+_)?(layers?|blocks?)|(\w+_)?layers|depth|n_layer")
_SIZES = re.compile(
    r"(\w+_)?(size|dim|width|heads|experts|channels|positions|embeddings|length|rank|features|factor|groups?)"
    r"|[nd]_(embd|model|inner|ff|head|kv|positions|ctx)|r"
)
_SEARCH_S = 3.0
_ENTRIES_MAX = 64
"""Of a part that is searched, as a vocabulary is not."""
_PANIC = "PanicException"
"""The exception of libraries in Rust for a fault of their own; it does not derive from Exception."""
_WORDS_SHOWN = 300


def parse(text: str) -> Any:
    """The value of a JSON text. Raises ValueError where it is none, or deeper than `MAX_DEPTH`."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"objects and arrays lie in more than {MAX_DEPTH} others") from None
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [each for one in inner for each in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return
    raise ValueError(f"objects and arrays lie in more than {MAX_DEPTH} others")


def read_text(path: Path) -> str:
    """A file of UTF-8. Raises ConfigError, and StorageError where the drive fails."""
    try:
        nbytes = path.stat().st_size
        if nbytes > MAX_NBYTES:
            raise ConfigError(f"{path} has {nbytes:,} bytes, and {MAX_NBYTES:,} is the most that is read; get it again")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}; get it again") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}; check the drive and its permissions") from error


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ConfigError, and StorageError where the drive fails."""
    try:
        words = parse(read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; get it again") from error
    if not isinstance(words, dict):
        raise ConfigError(f"{path} holds no settings: it is a {type(words).__name__}; get it again")
    return words


def check_sizes(path: Path, words: Mapping[str, Any]) -> None:
    """Raise ConfigError for sizes that nothing can be planned for, before a library takes hours over them."""
    for name, value in _numbers(words):
        key = name.rpartition(".")[2]
        most = MAX_LAYERS if _LAYERS.fullmatch(key) else MAX_SIZE if _SIZES.fullmatch(key) else None
        most = MAX_WORDS if "vocab" in key and most else most
        if most is not None and abs(value) > most:
            shown = f"{value:,}" if isinstance(value, int) and abs(value) < 10**18 else f"{float(value):.3g}"
            raise ConfigError(f"{path}: {name} is {shown}, and {most:,} is the most that is planned; mend it")


def _numbers(words: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """Names with dots, and values."""
    for name, value in words.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int | float) and not isinstance(each, bool) and each == each:
                yield f"{prefix}{name}", each


@contextmanager
def reading(what: str, remedy: str, culprit: Callable[[], str] = str) -> Iterator[None]:
    """An exception of a library inside is a ConfigError about `what`, such as a file; `remedy` says what to do.

    `culprit` may find the field that it is about. Errors of a drive, of memory and of this package are passed on.
    """
    try:
        yield
    except (ZeroOffloadError, MemoryError):
        raise
    except BaseException as error:
        if not _is_of_library(error):
            raise
        # transformers raises an OSError without a number where a file is not as it wants it.
        if (isinstance(error, OSError) and error.errno is not None) or _is_ours(error.__traceback__):
            raise
        said = " ".join(str(error).split()) or "no reason given"
        name = culprit()
        raise ConfigError(
            f"{what}{f', {name}' if name else ''}: {_short(said)} ({type(error).__name__}); {remedy}"
        ) from error


def _is_of_library(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == _PANIC


def _is_ours(trace: TracebackType | None) -> bool:
    """True if the exception was raised by a line of this package."""
    last = ""
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        trace, last = trace.tb_next, name
    return last.partition(".")[0] == __name__.partition(".")[0] and last != __name__


def _short(text: str) -> str:
    return text if len(text) <= _WORDS_SHOWN else f"{text[:_WORDS_SHOWN]}..."


def culprit_of(
    words: Mapping[str, Any], usual: Mapping[str, Any], trial: Callable[[Any], object], end: float | None = None
) -> str:
    """The field of `words` with whose usual value `trial` does not raise: its name and its value; "" if none is found.

    Fields that have no usual value are left out, and come first. Fields whose value is the usual one are not tried. A
    config in a config is tried field by field alone: with all usual values it may be a large model. The search ends
    after some seconds.
    """
    end = time.monotonic() + _SEARCH_S if end is None else end
    known = {name: value for name, value in words.items() if name in usual}
    others = {name: value for name, value in words.items() if name not in usual}
    if found := part_of(others, lambda given: trial({**known, **given}), end):
        return found
    for name, value in known.items():
        inner = usual[name]
        if value == inner or time.monotonic() > end:
            continue

        def with_field(given: Any, name: str = name) -> object:
            return trial({**words, name: given})

        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            if deeper := culprit_of(value, inner, with_field, end):
                return f"{name}.{deeper}"
            if "model_type" in inner:
                continue
        if _passes(with_field, inner):
            return f"{name} is {_short(repr(value))}"
    return ""


def part_of(words: Any, trial: Callable[[Any], object], end: float | None = None, levels: int = 0) -> str:
    """The entry of an object or array without which `trial` does not raise: its name and value; "" if none is found.

    `levels`: of entries in entries, which are tried too. The search ends after some seconds.
    """
    end = time.monotonic() + _SEARCH_S if end is None else end
    entries = list(words.items() if isinstance(words, Mapping) else enumerate(words))

    def with_entry(given: Any, name: Any) -> object:
        kept = [(key, given if key == name else value) for key, value in entries]
        kept = [(key, value) for key, value in kept if value is not _LEFT_OUT]
        return trial(dict(kept) if isinstance(words, Mapping) else [value for _, value in kept])

    def inside(name: Any, value: Any) -> str:
        if not levels or not isinstance(value, Mapping | list) or len(value) > _ENTRIES_MAX:
            return ""
        found = part_of(value, partial(with_entry, name=name), end, levels - 1)
        return f"{name}.{found}" if found else ""

    for name, value in entries:
        if time.monotonic() > end:
            return ""
        if _passes(partial(with_entry, name=name), _LEFT_OUT):
            return inside(name, value) or f"{name} is {_short(repr(value))}"
    return next(filter(None, (inside(*entry) for entry in entries)), "")  # what is needed may be wrong inside


_LEFT_OUT = object()


def _passes(trial: Callable[[Any], object], value: Any) -> bool:
    try:
        trial(value)
    except BaseException as error:
        if not _is_of_library(error):
            raise
        return False
    return True
