"""Text as bytes: where it comes from, how it is split, and which bytes a given step reads.

Owns the corpus and its sampling. Every batch is a pure function of (seed, step, rank, micro-batch), so the
data position of a run is just its step. Never tokenizes, never downloads.

Calls, in order: `load_corpus(paths, seq)` once, then `train_batch` / `validation_batch` for each micro-batch.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import format_bytes

Text = npt.NDArray[np.uint8]

_VALIDATION_SHARE = 0.05
_BINARY_PROBE_BYTES = 8192
_MAP_FROM_BYTES = 16 << 20  # smaller files are read: mappings are a limited resource
_HISTOGRAM_CHUNK = 1 << 24
_TRAIN, _VALIDATION = 0, 1
_SKIPPED_DIRS = frozenset({"__pycache__", "site-packages", "dist-packages"})
_TEST_DIRS = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, and what is known about it."""

    train: Text
    validation: Text
    description: str
    unigram_nats: float
    """Entropy of single bytes: the loss of the best model that ignores context."""
    fingerprint: str
    """Changes when a file's name, size or byte counts change; what runs of before have alone."""
    content: str
    """Changes with any byte of either text."""

    @property
    def unigram_bits(self) -> float:
        return self.unigram_nats / math.log(2)


class Batch(NamedTuple):
    inputs: Tensor  # (batch, seq) int64, CPU
    targets: Tensor  # (batch, seq) int64, CPU: inputs moved on by one byte


@dataclass(frozen=True)
class BatchShape:
    batch: int
    seq: int
    seed: int


class _TextFile(NamedTuple):
    name: str
    path: Path


def load_corpus(paths: Sequence[Path], seq: int) -> Corpus:
    """Read the given files and directories; none means the Python standard library of this interpreter."""
    sources = _find_sources(paths) if paths else _standard_library()
    texts = [_read(source.path) for source in sources]
    if len(sources) == 1:
        train, validation = _split_by_position(texts[0])
        split = f"the last {_VALIDATION_SHARE:.0%} of the file is the validation text"
    else:
        train, validation = _split_by_file(sources, texts)
        split = "split by file"
        if min(len(train), len(validation)) <= seq:
            train, validation = _split_by_position(_join(texts))
            split = f"too few files to split by file: the last {_VALIDATION_SHARE:.0%} is the validation text"
    _require_sequence(train, validation, seq, sources)
    counts = _histogram(train) + _histogram(validation)
    origin = "the Python standard library" if not paths else ", ".join(str(path) for path in paths)
    total = format_bytes(int(counts.sum()))
    return Corpus(
        train=train,
        validation=validation,
        description=f"{total} of text in {len(sources)} files from {origin}; {split}",
        unigram_nats=_entropy_nats(counts),
        fingerprint=_fingerprint(sources, texts, counts),
        content=_content(train, validation),
    )


def train_batch(corpus: Corpus, shape: BatchShape, step: int, rank: int, micro: int) -> Batch:
    """The micro-batch number `micro` that `rank` trains on in `step`."""
    return _windows(corpus.train, shape, np.array([0, step, rank, micro], dtype=np.uint64), _TRAIN)


def validation_batch(corpus: Corpus, shape: BatchShape, index: int) -> Batch:
    """One of a fixed, numbered set of validation batches; the same for every step."""
    return _windows(corpus.validation, shape, np.array([0, index, 0, 0], dtype=np.uint64), _VALIDATION)


def _windows(text: Text, shape: BatchShape, counter: npt.NDArray[np.uint64], stream: int) -> Batch:
    # The generator counts up in the counter's first word; the others name the batch, so streams never meet.
    key = np.array([shape.seed, stream], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(counter=counter, key=key))
    starts = generator.integers(0, len(text) - shape.seq, size=shape.batch)
    rows = np.stack([text[start : start + shape.seq + 1] for start in starts])
    tokens = torch.from_numpy(rows.astype(np.int64))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _standard_library() -> list[_TextFile]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = _SKIPPED_DIRS | _TEST_DIRS
    found = [_TextFile(name.as_posix(), root / name) for name in _walk(root, skipped) if name.suffix == ".py"]
    if not found:
        raise ConfigError(f"no Python sources in {root}; give your own text with --data FILE or DIR")
    return found


def _find_sources(paths: Sequence[Path]) -> list[_TextFile]:
    found: list[_TextFile] = []
    problems = []
    for path in paths:
        if path.is_dir():
            names = [name for name in _walk(path, _SKIPPED_DIRS) if _is_text(path / name)]
            found += [_TextFile(name.as_posix(), path / name) for name in names]
            if not names:
                problems.append(f"--data {path}: the directory holds no text file")
        elif path.is_file():
            found.append(_TextFile(path.name, path))
            if path.stat().st_size == 0:
                problems.append(f"--data {path}: the file is empty")
        else:
            what = "neither a file nor a directory" if path.exists() else "no such file or directory"
            problems.append(f"--data {path}: {what}")
    if problems:
        raise ConfigError("; ".join(problems))
    return found


def _walk(root: Path, skipped_dirs: frozenset[str]) -> list[Path]:
    """Relative paths of the visible regular files below `root`, sorted: the same on every machine."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped_dirs and not name.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [path.relative_to(root) for path in paths if path.is_file()]
    return sorted(found, key=Path.as_posix)


def _is_text(path: Path) -> bool:
    # A file with a NUL byte near its start is taken as binary.
    try:
        with path.open("rb") as file:
            start = file.read(_BINARY_PROBE_BYTES)
    except OSError as error:
        raise ConfigError(f"--data {path}: cannot be read: {error.strerror}") from error
    return bool(start) and b"\0" not in start


def _read(path: Path) -> Text:
    try:
        if path.stat().st_size < _MAP_FROM_BYTES:
            return np.fromfile(path, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise ConfigError(f"--data {path}: cannot be read: {error.strerror}") from error


def _join(texts: Sequence[Text]) -> Text:
    return np.concatenate(texts) if texts else np.empty(0, dtype=np.uint8)


def _split_by_position(text: Text) -> tuple[Text, Text]:
    cut = len(text) - math.ceil(len(text) * _VALIDATION_SHARE)
    return text[:cut], text[cut:]


def _split_by_file(sources: Sequence[_TextFile], texts: Sequence[Text]) -> tuple[Text, Text]:
    """A file's side depends on its name alone, so adding files moves no other file."""
    held_out = [_name_fraction(source.name) < _VALIDATION_SHARE for source in sources]
    train = [text for text, held in zip(texts, held_out, strict=True) if not held]
    validation = [text for text, held in zip(texts, held_out, strict=True) if held]
    return _join(train), _join(validation)


def _name_fraction(name: str) -> float:
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") / 2**64


def _require_sequence(train: Text, validation: Text, seq: int, sources: Sequence[_TextFile]) -> None:
    where = f"{len(sources)} files" if len(sources) > 1 else str(sources[0].path)
    if min(len(train), len(validation)) <= seq:
        least_bytes = math.ceil((seq + 1) / _VALIDATION_SHARE)
        raise ConfigError(
            f"the text is too short: {len(train)} bytes to train and {len(validation)} to validate "
            f"({where}). A sequence takes {seq} + 1 of each: "
            f"give {least_bytes} bytes or more, or a smaller --seq"
        )


def _histogram(text: Text) -> npt.NDArray[np.int64]:
    counts = np.zeros(256, dtype=np.int64)
    for start in range(0, len(text), _HISTOGRAM_CHUNK):
        counts += np.bincount(text[start : start + _HISTOGRAM_CHUNK], minlength=256)
    return counts


def _entropy_nats(counts: npt.NDArray[np.int64]) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _fingerprint(sources: Sequence[_TextFile], texts: Sequence[Text], counts: npt.NDArray[np.int64]) -> str:
    digest = hashlib.sha256(counts.astype("<i8").tobytes())
    for source, text in zip(sources, texts, strict=True):
        digest.update(os.fsencode(f"{source.name}:{len(text)}\n"))  # names need not be text
    return digest.hexdigest()[:16]


def _content(*texts: Text) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        for start in range(0, len(text), _HISTOGRAM_CHUNK):
            digest.update(text[start : start + _HISTOGRAM_CHUNK].tobytes())
    return digest.hexdigest()
