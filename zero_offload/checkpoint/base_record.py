"""A generation's record of the base that frozen sections rest in: its files, their known bytes, and where in them each
section lies.

Owns the words of these records. The global manifest names files and places; a rank's has the checksums that this rank
knows. The calls: `base_record` and `base_hashes` for a commit; `base_sections` and `open_base` of a generation;
`look_at_base` for a command that reads little of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.checkpoint.format import BASE, Generation, reading
from zero_offload.storage.files.base_file import BaseFile, BaseSpan, fingerprint_of, missing_text
from zero_offload.storage.files.base_files import BaseFiles
from zero_offload.storage.shards.store import ShardStore


def base_record(store: ShardStore) -> dict[str, Any] | None:
    """The base of a model's shards; None without one."""
    files = store.base_files
    if not files:
        return None
    number = {file: place for place, file in enumerate(files)}
    return {
        "folder": str(files[0].path.parent),
        "fingerprint": fingerprint_of(files),
        "files": [file.record for file in files],
        "sections": {
            str(shard.layout.index): [
                [span.begin, span.nbytes, number[span.file], span.offset] for span in shard.base.spans
            ]
            for shard in store.shards
            if shard.base is not None
        },
    }


def base_hashes(store: ShardStore) -> list[dict[str, str]]:
    """The checksums that this rank knows, in the order of `base_record`'s files."""
    return [file.hashes for file in store.base_files]


@dataclass(frozen=True)
class BaseState:
    """The files of a base as they lie now."""

    folder: Path
    num_files: int
    nbytes: int
    problem: str
    """Why it cannot be read as it was, and what to do; empty where names, sizes, headers and samples are the same."""
    written: str
    """The first file that was written since, empty where none was; its bytes may be the same."""


def look_at_base(generation: Generation) -> BaseState | None:
    """Compare the base of a generation with what it has recorded; None without one. Two blocks of a file are read."""
    if (found := generation.payload.get(BASE)) is None:
        return None
    with reading(str(generation)):
        folder, files = Path(found["folder"]), [BaseFile.of_record(record) for record in found["files"]]
    lost, written = [], []
    for file in files:
        try:
            with contextlib.closing(file.open_at(file.path)) as there:
                written += [str(file.path)] * (there.mtime_ns != file.mtime_ns)
        except ZeroOffloadError as error:
            file.problem = str(error)
            lost.append(file)
    problem = missing_text(lost) if lost else ""
    return BaseState(folder, len(files), sum(file.nbytes for file in files), problem, "".join(written[:1]))


def base_sections(generation: Generation) -> dict[int, list[Any]]:
    """The places of sections that rest in its base, by their index."""
    found = generation.payload.get(BASE)
    with reading(str(generation)):
        return {} if found is None else {int(index): list(spans) for index, spans in found["sections"].items()}


def open_base(
    base: BaseFiles, generation: Generation, payloads: Iterable[Mapping[str, Any]]
) -> dict[int, list[BaseSpan]]:
    """Where each section lies that rests in a generation's base, by index. Its files are opened, if they are there,
    with the checksums in its ranks' manifests; see `BaseFiles.restore`."""
    found = generation.payload.get(BASE)
    with reading(str(generation)):
        files = [] if found is None else base.restore(found["files"], [payload[BASE] for payload in payloads])
        return {index: [_span(files, *each) for each in spans] for index, spans in base_sections(generation).items()}


def files_of(places: Mapping[int, Iterable[BaseSpan]]) -> list[BaseFile]:
    """The files that sections rest in."""
    return list(dict.fromkeys(span.file for spans in places.values() for span in spans))


def _span(files: Sequence[BaseFile], begin: int, nbytes: int, number: int, offset: int) -> BaseSpan:
    file = files[number]
    if min(begin, offset, nbytes - 1) < 0 or offset + nbytes > file.nbytes:
        raise ValueError(f"{nbytes} bytes at offset {offset} of {file.path}, which has {file.nbytes}")
    return BaseSpan(begin, nbytes, file, offset)
