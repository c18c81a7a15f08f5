"""Checkpoints that a run publishes: directories in the format of torch.distributed.checkpoint, at a place of their own.

Owns that format, and its names in the place: a number that counts up, the step, the beginning of the run's id. Weights
are `model.NAME`, masters of trained ones; states of optimizers are `optimizer.state.NAME.STATE`, fp32. States of an
optimizer of others are `optimizer.row.NAME`, bytes. The rest of a generation is the text `zero_offload`, with a
checksum of each part. A part is at most a chunk. Elements that lie in memory in another order are flat, `flat.NAME`. Of
a DTensor each tensor-parallel rank writes its part of the whole, and a start with another mesh finds its own parts
there. A checkpoint is there once `.metadata` is, which torch writes last. Where models were published together, it
counts if those of all are whole. Knows no thread and no clock. The calls: `PublishPlace.of`; `write_parts` on each
rank, `finish` on the first; `find_newest`, and `PublishedGeneration.open`, which a run reads as it reads a
`SavedGeneration`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zero_offload.base.errors import ConfigError, IntegrityError, StorageError
from zero_offload.base.host import host_empty, host_reserved, host_zeros
from zero_offload.base.types import MIB
from zero_offload.checkpoint.base_record import base_sections, open_base
from zero_offload.checkpoint.format import (
    BASE,
    HOMES,
    Generation,
    is_divided_otherwise,
    lies_elsewhere,
    reading,
    tell_conversion,
)
from zero_offload.checkpoint.saved_generation import SavedGeneration
from zero_offload.checkpoint.values import master_parts
from zero_offload.hardware.kernels.checksums import crc32c_of_tensor
from zero_offload.plan.layout import CHUNK_NUMEL, ParamSlice, SectionLayout, ShardLayout
from zero_offload.plan.tensor_parallel import parts_along
from zero_offload.storage.files.base_file import BaseSpan
from zero_offload.storage.files.base_files import BaseFiles
from zero_offload.storage.memory.heap import HeapTrimmer
from zero_offload.storage.shards.rows import lay, room
from zero_offload.storage.shards.shard import (
    Component,
    array_range,
    component_dtype,
    encode_array,
    is_state,
    named_states,
    shard_bytes,
)
from zero_offload.storage.shards.store import ChunkSource

NAME = re.compile(r"(\d{6})-step-(\d+)-([0-9a-f]{8})")
_ENTRY, _METADATA = "zero_offload", ".metadata"
_RUN_DIGITS = 8
ROW_PART_BYTES = CHUNK_NUMEL * 4
"""The most bytes of a part of a row."""
FILE_BYTES = 128 * MIB
"""The most bytes of a file, but for a part."""
_TRIM_BYTES = 32 * MIB
"""Of parts that were written or read between two trims: glibc keeps pages of blocks of their size."""


@dataclass(frozen=True)
class PublishedName:
    """The name of a checkpoint."""

    sequence: int
    step: int
    run: str
    """The beginning of the run's id."""

    @classmethod
    def of(cls, sequence: int, generation: Generation) -> PublishedName:
        return cls(sequence, generation.step, generation.run_id[:_RUN_DIGITS])

    @classmethod
    def parse(cls, text: str) -> PublishedName | None:
        found = NAME.fullmatch(text)
        return None if found is None else cls(int(found[1]), int(found[2]), found[3])

    def is_of(self, run_id: str) -> bool:
        return self.run == run_id[:_RUN_DIGITS]

    def __str__(self) -> str:
        return f"{self.sequence:06d}-step-{self.step}-{self.run}"


@dataclass(frozen=True)
class PublishPlace:
    """A directory, or a URL that fsspec opens."""

    root: str

    @classmethod
    def of(cls, root: str) -> PublishPlace:
        """Raises ConfigError where nothing here opens such a URL."""
        place = cls(root)
        if place._is_url and importlib.util.find_spec("fsspec") is None:
            raise ConfigError(
                f"publish={root!r} is a URL, which fsspec opens, and fsspec is not installed. Type: pip install fsspec "
                "and the package of that kind of URL (s3fs, gcsfs, ...). Or name a directory"
            )
        return place

    @property
    def _is_url(self) -> bool:
        return "://" in self.root

    @functools.cached_property
    def _remote(self) -> Any:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped, import-not-found, unused-ignore]

        return url_to_fs(self.root)[0]

    @property
    def absolute(self) -> str:
        """One text for each place."""
        return self.root.rstrip("/") if self._is_url else os.path.abspath(self.root)

    @property
    def _kind(self) -> str:
        return self.root.partition("://")[0] if self._is_url else ""

    def beside(self, other: PublishPlace) -> str:
        """The way from here to another place; empty where that is of another kind."""
        mine, theirs = (each.absolute.removeprefix(f"{each._kind}://") for each in (self, other))
        return os.path.relpath(theirs, mine) if self._kind == other._kind else ""

    def at(self, beside: str) -> PublishPlace:
        """The place at the end of such a way."""
        begin = f"{self._kind}://" if self._is_url else ""
        return PublishPlace(begin + os.path.normpath(f"{self.absolute.removeprefix(begin)}/{beside}"))

    def path_of(self, name: object) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def names(self) -> list[PublishedName]:
        """Names of checkpoints, whole or not, the newest first."""
        with self.naming("list"):
            if not self._is_url:
                there = os.listdir(self.root) if Path(self.root).is_dir() else []
            else:
                there = self._remote.ls(self.root, detail=False) if self._remote.exists(self.root) else []
        found = (PublishedName.parse(os.path.basename(each.rstrip("/"))) for each in there)
        return sorted(filter(None, found), key=lambda each: -each.sequence)

    def is_whole(self, name: PublishedName) -> bool:
        path = f"{self.path_of(name)}/{_METADATA}"
        with self.naming("look at"):
            return bool(self._remote.exists(path)) if self._is_url else os.path.exists(path)

    def newest(self) -> PublishedName | None:
        """The newest checkpoint that is whole."""
        return next(filter(self.is_whole, self.names()), None)

    def remove(self, name: PublishedName) -> None:
        """Delete a checkpoint; first what makes it whole."""
        path = self.path_of(name)
        with self.naming("delete from"):
            if self._is_url:
                if self._remote.exists(f"{path}/{_METADATA}"):
                    self._remote.rm(f"{path}/{_METADATA}")
                if self._remote.exists(path):
                    self._remote.rm(path, recursive=True)
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{path}/{_METADATA}")
            self._sync(path)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)

    def make(self, name: PublishedName) -> None:
        """Make the directory of a checkpoint."""
        with self.naming("write to"):
            if self._is_url:
                self._remote.makedirs(self.path_of(name), exist_ok=True)
            else:
                os.makedirs(self.path_of(name), mode=0o700)

    def check_there(self, name: PublishedName) -> None:
        """Raise StorageError where another machine's directory is not this one."""
        if not self._is_url and not os.path.isdir(self.path_of(name)):
            raise StorageError(
                f"publish={self.root} is not the directory that rank 0 sees. Name one that all machines see, such as a "
                "mount of a network file system, or a URL"
            )

    def flush(self, name: PublishedName) -> None:
        """Make names survive power loss."""
        for path in (self.path_of(name), self.root):
            self._sync(path)

    def _sync(self, path: str) -> None:
        if self._is_url or not os.path.isdir(path):
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """An error of the place's own library says where and what."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(f"could not {what} publish={self.root}: {type(error).__name__}: {error}") from error

    def writer(self, name: PublishedName) -> Any:
        # One part in memory at a time, and files that are flushed.
        options: dict[str, Any] = {"sync_files": True, "thread_count": 1, "per_thread_copy_ahead": 0}
        if self._is_url:
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            return FsspecWriter(self.path_of(name), **options)
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(self.path_of(name), **options)

    def reader(self, name: PublishedName) -> Any:
        if self._is_url:
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            return FsspecReader(self.path_of(name))
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        return FileSystemReader(self.path_of(name))


@dataclass(frozen=True)
class PublishedPartner:
    """The checkpoint of another model, which was published together with one."""

    place: str
    beside: str
    """Its place from that one's, for places that have moved together; empty where there is no such way."""
    name: str

    @classmethod
    def of(cls, mine: PublishPlace, place: PublishPlace, name: PublishedName) -> PublishedPartner:
        return cls(place.absolute, mine.beside(place), str(name))

    def is_whole(self, mine: PublishPlace) -> bool:
        """`mine`: the place of the checkpoint that it was published with."""
        name = PublishedName.parse(self.name)
        near = mine.at(self.beside) if self.beside else None
        # Of a copy, the recorded place is the original's.
        place = near if near is not None and near.names() else PublishPlace(self.place)
        return name is not None and place.is_whole(name)

    def __str__(self) -> str:
        return f"{self.place.rstrip('/')}/{self.name}"


def missing_beside(place: PublishPlace, name: PublishedName) -> list[str]:
    """Checkpoints of other models that this whole one was published with, and that are not whole."""
    partners = PublishedGeneration.open(place, name).partners
    return [str(each) for each in partners if not each.is_whole(place)]


def find_newest(place: PublishPlace) -> tuple[PublishedName | None, str]:
    """The newest checkpoint that is whole, and with it those of the models that it was published with. Of the newest
    that is left out, what is missing; or empty."""
    lack = ""
    for name in filter(place.is_whole, place.names()):
        missing = missing_beside(place, name)
        if not missing:
            return name, lack
        lack = lack or f"{place.path_of(name)} was published together with {' and '.join(missing)}, which is not whole"
    return None, lack


# Parts


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of boxes whose elements, in order, are [begin, end) of a tensor of this shape."""
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, ahead = divmod(begin, inner)
    last, rest = divmod(end, inner)
    if first == last:
        for offsets, sizes in boxes(shape[1:], ahead, rest) if ahead < rest else ():
            yield (first, *offsets), (1, *sizes)
        return
    if ahead:
        for offsets, sizes in boxes(shape[1:], ahead, inner):
            yield (first, *offsets), (1, *sizes)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    for offsets, sizes in boxes(shape[1:], 0, rest) if rest else ():
        yield (last, *offsets), (1, *sizes)


def begin_of(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """The number of a box's first element in its tensor."""
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))


@dataclass(frozen=True)
class PublishedTensor:
    """A tensor in a checkpoint, of which a rank holds a part: all of it, unless it is a DTensor."""

    key: str
    shape: tuple[int, ...]
    part: tuple[int, ...]
    """The shape of the part."""
    offsets: tuple[int, ...]
    """Of the part in the tensor."""

    @classmethod
    def of(cls, piece: ParamSlice, state: Component | None, column: int) -> PublishedTensor:
        """`column`: which of the tensor-parallel ranks."""
        spec = piece.spec
        is_plain = not (spec.order or spec.record or spec.held_by) and math.prod(spec.shape) == spec.numel
        root = "" if is_plain else "flat."
        key = f"{root}model.{spec.name}" if state is None else f"{root}optimizer.state.{spec.name}.{state}"
        dim, count = parts_along(spec.division, spec.shape)
        dim, part = (dim, tuple(spec.shape)) if is_plain else (0, (spec.numel,))
        shape = tuple(size * count if at == dim else size for at, size in enumerate(part))
        offsets = tuple(size * column if at == dim and count > 1 else 0 for at, size in enumerate(part))
        return cls(key, shape, part, offsets)

    @classmethod
    def of_row(cls, piece: ParamSlice, nbytes: int) -> PublishedTensor:
        """The row of a parameter: bytes."""
        return cls(f"optimizer.row.{piece.spec.name}", (nbytes,), (nbytes,), (0,))

    @property
    def is_divided(self) -> bool:
        return self.part != self.shape

    def boxes(self, begin: int, end: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Of boxes whose elements, in order, are [begin, end) of the part: the first element, offsets in the tensor,
        and sizes."""
        for offsets, sizes in boxes(self.part, begin, end):
            at = tuple(first + offset for first, offset in zip(self.offsets, offsets, strict=True))
            yield begin_of(self.part, offsets), at, sizes


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor, which one rank writes."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    section: int
    state: Component | None
    """None for the master, or a frozen value."""
    row: tuple[int, int]
    """The elements of the section that are read at once; of rows of states, bytes of this rank's."""
    begin: int
    """Its first element, in these."""

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def parts_of(saved: SavedGeneration, rank: int, num_columns: int) -> Iterator[TensorPart]:
    """The parts that a rank writes of a generation: what its shard has, of sections that take turns among twins. So do
    tensor-parallel ranks for what each has whole."""
    generation, in_base = saved.generation, base_sections(saved.generation)
    column, place = divmod(rank, generation.world_size // num_columns)
    twin, shard = divmod(place, generation.num_shards)
    num_twins = generation.world_size // num_columns // generation.num_shards
    for section in saved.rank(rank).sections:
        if section.index in in_base or not section.params or section.index % num_twins != twin:
            continue
        first = shard * section.shard_numel
        states = [each for each in saved.kept(section, rank) if is_state(each) and not each.is_rows]
        for state in (None, *states):
            dtype = torch.float32 if section.trainable or state is not None else section.dtype
            for low, high in section.chunks():
                row = first + low, first + high
                for piece in section.params:
                    begin, end = max(row[0], piece.begin), min(row[1], piece.end)
                    if begin >= end or piece.is_gone:
                        continue
                    whole = PublishedTensor.of(piece, state, column)
                    if whole.is_divided or section.index % num_columns == column:
                        for at, offsets, sizes in whole.boxes(begin - piece.begin, end - piece.begin):
                            at += piece.begin - row[0]
                            yield TensorPart(
                                whole.key, whole.shape, offsets, sizes, dtype, section.index, state, row, at
                            )


def row_parts_of(saved: SavedGeneration, rank: int) -> Iterator[tuple[TensorPart, str]]:
    """The rows of states that a rank writes, each with the class of its optimizer."""
    generation = saved.generation
    twin, num_twins = rank // generation.num_shards, generation.world_size // generation.num_shards
    for section in saved.rank(rank).sections:
        found = saved.rows_of_rank(section, rank) if section.index % num_twins == twin else None
        for piece in section.params if found is not None else ():
            assert found is not None
            if piece.is_gone or (row := found.directory.get(piece.begin)) is None:
                continue
            whole = PublishedTensor.of_row(piece, row.nbytes)
            for at in range(0, row.nbytes, ROW_PART_BYTES):
                size = min(ROW_PART_BYTES, row.nbytes - at)
                span = row.begin + at, row.begin + at + size
                part = TensorPart(
                    whole.key, whole.shape, (at,), (size,), torch.uint8, section.index, found.component, span, 0
                )
                yield part, row.kind


class _TensorRows:
    """Gives torch's writer the tensors of parts; reads a row of a section at a time."""

    def __init__(self, saved: SavedGeneration, rank: int, parts: Mapping[Any, TensorPart]) -> None:
        """`parts` by torch's index of each."""
        self._saved, self._rank, self._parts = saved, rank, parts
        self._at: tuple[int, Component | None, tuple[int, int]] | None = None
        self._row = host_empty(0, torch.float32)
        self._trimmer = HeapTrimmer(_TRIM_BYTES)
        self.crcs: dict[str, dict[str, int]] = {}
        """The checksum of each part, by key and first element."""

    def resolve_data(self, item: Any) -> torch.Tensor:
        part = self._parts[item.index]
        if self._at != (at := (part.section, part.state, part.row)):
            self._at, self._row = at, self._read(part)
        values = self._row[part.begin : part.begin + part.numel].to(part.dtype, copy=True)
        first = str(begin_of(part.shape, part.offsets))
        self.crcs.setdefault(part.key, {})[first] = crc32c_of_tensor(values)
        self._trimmer.freed(values.nbytes)
        return values.view(part.sizes)

    def _read(self, part: TensorPart) -> torch.Tensor:
        if part.state is None or not part.state.is_rows:
            return self._saved.values(part.section, part.state, *part.row)
        found = self._saved.rows_of_rank(self._saved.rank(self._rank).sections[part.section], self._rank)
        assert found is not None
        return found.read(*part.row)


@dataclass(frozen=True)
class Written:
    """The word of a rank that has written its parts."""

    results: Sequence[Any]
    """As torch's writer gives them."""
    tensors: Mapping[str, tuple[str, Sequence[int], Sequence[tuple[Sequence[int], Sequence[int]]]]]
    """Of each tensor: dtype, shape, and offsets and sizes of the parts."""
    crcs: Mapping[str, Mapping[str, int]]
    kinds: Mapping[str, str]
    """Of each row of states, the class of the optimizer that made it."""
    rng: Any
    base: Any


def write_parts(place: PublishPlace, name: PublishedName, saved: SavedGeneration, who: tuple[int, int]) -> Written:
    """Write this rank's parts, and read them back. `who`: the rank, and how many columns ranks are numbered in."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    parts, items, tensors = dict[Any, TensorPart](), [], dict[str, Any]()
    rank, num_columns = who
    kinds = dict[str, str]()
    rows = list(row_parts_of(saved, rank))
    kinds.update((part.key, kind) for part, kind in rows)
    for part in (*parts_of(saved, rank, num_columns), *(part for part, _ in rows)):
        index = MetadataIndex(part.key, torch.Size(part.offsets))
        chunk = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=part.dtype), torch.Size(part.shape))
        parts[index] = part
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        dtype = str(part.dtype).removeprefix("torch.")
        tensors.setdefault(part.key, (dtype, part.shape, []))[2].append((part.offsets, part.sizes))
    source, results = _TensorRows(saved, rank, parts), list[Any]()
    if items:
        with place.naming("write to"):
            writer = place.writer(name)
            writer.set_up_storage_writer(is_coordinator=rank == 0)
            for number, batch in enumerate(_batches(items)):
                plan = _named(writer, SavePlan(batch), f"__{rank}_{number}_")
                results += writer.write_data(plan, source).wait()
        _check_written(place, name, results, source.crcs, parts)
    payload = saved.payload(rank)
    return Written(results, tensors, source.crcs, kinds, payload.get("rng"), payload.get(BASE))


def _batches(items: Sequence[Any]) -> Iterator[list[Any]]:
    """Items in the order of files. torch's writer keeps the last part of each tensor until its file is complete."""
    batch, nbytes = list[Any](), 0
    for item in items:
        chunk = item.tensor_data.chunk
        nbytes += math.prod(chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        batch.append(item)
        if nbytes >= FILE_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _named(writer: Any, plan: Any, prefix: str) -> Any:
    """The plan of a file whose name begins so."""
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(plan)])
    return replace(plan, storage_data=type(plan.storage_data)(prefix))


def _check_written(
    place: PublishPlace,
    name: PublishedName,
    results: Sequence[Any],
    crcs: Mapping[str, Any],
    parts: Mapping[Any, TensorPart],
) -> None:
    """Raise IntegrityError unless each part comes back as it was written."""
    reader = place.reader(name)
    reader.storage_data = {each.index: each.storage_data for each in results}
    trimmer = HeapTrimmer(_TRIM_BYTES)
    for index, part in parts.items():
        with place.naming("read back from"):
            values = _read(reader, index, part.sizes, part.dtype)
        trimmer.freed(2 * values.nbytes)
        if crc32c_of_tensor(values) != crcs[part.key][str(begin_of(part.shape, part.offsets))]:
            raise IntegrityError(f"{place.path_of(name)}: {part.key} came back with other bytes than were written")


def _read(reader: Any, index: Any, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """(numel,) of one part."""
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    target, zeros = _Target(host_empty(list(sizes), dtype)), torch.Size([0] * len(sizes))
    item = ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, torch.Size(sizes))
    reader.read_data(LoadPlan([item]), target).wait()
    return target.tensor.reshape(-1)


class _Target:
    """Takes what torch's reader reads."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.text = ""

    def resolve_tensor(self, item: Any) -> torch.Tensor:
        return self.tensor

    def commit_tensor(self, item: Any, tensor: torch.Tensor) -> None: ...

    def load_bytes(self, item: Any, value: io.BytesIO) -> None:
        self.text = torch.load(value, weights_only=True)


class _Text:
    """Gives torch's writer the text of a checkpoint."""

    def __init__(self, text: str) -> None:
        self._text = text

    def resolve_data(self, item: Any) -> io.BytesIO:
        out = io.BytesIO()
        torch.save(self._text, out)
        return out


def finish(
    place: PublishPlace,
    name: PublishedName,
    generation: Generation,
    written: Sequence[Written],
    aliases: Mapping[str, Sequence[str]],
    partners: Sequence[PublishedPartner],
) -> None:
    """All ranks have written: write the text, and what makes the checkpoint whole; read the text back. `aliases`:
    further names of tied parameters, which lead to the same bytes. `partners` are published together with this one."""
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, WriteItem, WriteItemType

    found = dict[str, Any]()
    for each in written:
        for key, (dtype, shape, chunks) in each.tensors.items():
            properties = TensorProperties(dtype=getattr(torch, dtype))
            tensor = found.setdefault(key, TensorStorageMetadata(properties, torch.Size(shape), []))
            tensor.chunks += [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in chunks]
    crcs = dict[str, dict[str, int]]()
    for each in written:
        for key, of_key in each.crcs.items():
            crcs.setdefault(key, {}).update(of_key)
    payload = {key: value for key, value in generation.payload.items() if key != HOMES} | {"directories": []}
    ranks = [{"rng": each.rng, BASE: each.base} for each in written]
    document = {"payload": payload, "ranks": ranks, "crcs": crcs, "partners": list(map(asdict, partners))}
    kinds = {key: kind for each in written for key, kind in each.kinds.items()}
    text = json.dumps(document | ({"kinds": kinds} if kinds else {}))
    text = f"{hashlib.sha256(text.encode()).hexdigest()} {text}"
    index = MetadataIndex(_ENTRY)
    item = WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(len(text)))
    same = {f"model.{name}": [f"model.{each}" for each in others] for name, others in aliases.items()}
    found |= {other: found[key] for key in same.keys() & found.keys() for other in same[key]}
    copies = [
        replace(each, index=MetadataIndex(other, each.index.offset))
        for of_rank in written
        for each in of_rank.results
        for other in same.get(each.index.fqn, ())
    ]
    mapping = {key: tuple(key.split(".", 1)) if key.startswith("model.") else (key,) for key in (*found, _ENTRY)}
    metadata = Metadata({**found, _ENTRY: BytesStorageMetadata()}, planner_data=mapping)
    with place.naming("write to"):
        writer = place.writer(name)
        writer.set_up_storage_writer(is_coordinator=True)
        results = writer.write_data(_named(writer, SavePlan([item]), f"__{_ENTRY}_"), _Text(text)).wait()
        writer.finish(metadata, [*(each.results for each in written), copies, results])
        place.flush(name)
    PublishedGeneration.open(place, name)


class PublishedGeneration:
    """A published checkpoint that a run goes on from; read as a `SavedGeneration` of other ranks is."""

    def __init__(
        self,
        place: PublishPlace,
        name: PublishedName,
        generation: Generation,
        document: Mapping[str, Any],
        reader: Any,
        column: int,
    ) -> None:
        """`document`: its text; see `open`. `column`: which of the tensor-parallel ranks reads."""
        self.generation = generation
        self._column = column
        self.where = place.path_of(name)
        self.lies_elsewhere = False
        self._place, self._reader, self._document = place, reader, document
        self._tensors: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        self._spans: dict[str, list[tuple[int, int, Any]]] = {}
        """Of each tensor that was read, the first and the last element of its parts, in order."""
        self._last: tuple[str, int, torch.Tensor] | None = None
        self._rows: tuple[int, torch.Tensor] = -1, host_empty(0, torch.uint8)
        """The rows that were read last, by the section of the model."""

    @classmethod
    def open(cls, place: PublishPlace, name: PublishedName, column: int = 0) -> PublishedGeneration:
        """Raises IntegrityError unless its text is what was written."""
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

        where, nothing = place.path_of(name), torch.Size([])
        with place.naming("read"):
            reader = place.reader(name)
            reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=False)
            target, index = _Target(host_empty(0, torch.uint8)), MetadataIndex(_ENTRY)
            item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
            reader.read_data(LoadPlan([item]), target).wait()
        digest, _, text = target.text.partition(" ")
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise IntegrityError(f"{where}: its text is not what was written; delete this directory for the one before")
        with reading(where):
            document = json.loads(text)
            return cls(place, name, Generation.parse(document["payload"], where), document, reader, column)

    @property
    def partners(self) -> list[PublishedPartner]:
        """The checkpoints of other models that were published together with it; none of earlier versions."""
        with reading(self.where):
            return [PublishedPartner(**each) for each in self._document.get("partners", ())]

    def look_in(self, layout: ShardLayout) -> None:
        self.lies_elsewhere = lies_elsewhere(self.generation, layout) or is_divided_otherwise(self.generation, layout)

    def tell_conversion(self, layout: ShardLayout) -> None:
        tell_conversion(self.generation, layout)

    def exchanging(self) -> AbstractContextManager[None]:
        """Each rank reads what it needs by itself."""
        return nullcontext()

    def has(self, rank: int) -> bool:
        return True

    def rng_of(self, rank: int) -> dict[str, Any] | None:
        with reading(self.where):
            rng: dict[str, Any] | None = self._document["ranks"][rank]["rng"]
            return rng

    def base_places(self, base: BaseFiles) -> dict[int, list[BaseSpan]]:
        return open_base(base, self.generation, self._document["ranks"])

    def states(self, layout: SectionLayout, shard_index: int) -> list[Component]:
        """The states of a shard of a model that optimizers keep."""
        keys = ((each, PublishedTensor.of(piece, each, 0).key) for each in named_states() for piece in layout.params)
        named = dict.fromkeys(state for state, key in keys if key in self._tensors)
        sizes = self._row_sizes(layout, shard_index)
        return [*named, *([Component.rows(room(sizes), len(layout.chunks()))] if sizes else [])]

    def _row_sizes(self, layout: SectionLayout, shard_index: int) -> dict[int, tuple[int, str]]:
        """Bytes and optimizer's class of the rows of a shard, by the parameter's first element."""
        found = dict[int, tuple[int, str]]()
        for piece in layout.params:
            key = PublishedTensor.of_row(piece, 0).key
            if not piece.is_gone and layout.steppers[piece.begin] == shard_index and key in self._tensors:
                with reading(self.where):
                    found[piece.begin] = int(self._tensors[key].size[0]), str(self._document["kinds"][key])
        return found

    def _rows_of(self, layout: SectionLayout, shard_index: int, nbytes: int) -> torch.Tensor:
        """The rows of a shard, in an array of so many bytes."""
        if self._rows[0] != layout.index:
            rows = lay(host_reserved([nbytes], torch.uint8), self._row_sizes(layout, shard_index))
            for piece in layout.params:
                if piece.begin in rows:
                    row = rows[piece.begin]
                    self._fill(row, PublishedTensor.of_row(piece, row.numel()), 0)
            self._rows = layout.index, rows.array
        return self._rows[1]

    def source(self, layout: SectionLayout, shard_index: int) -> ChunkSource:
        """Feeds `ShardStore.write_components` with elements of the shard `shard_index` of a section."""
        offset = shard_index * layout.shard_numel

        def source(component: Component, begin: int, end: int) -> torch.Tensor:
            if component.is_rows:
                part = array_range(layout, component, begin, end)
                return self._rows_of(layout, shard_index, shard_bytes(layout, [component]))[part]
            state = component if is_state(component) else None
            values = self._elements(layout, state, offset + begin, offset + end)
            return encode_array(layout, component, values) if state else master_parts(layout, values)[component]

        return source

    def _elements(self, layout: SectionLayout, state: Component | None, begin: int, end: int) -> torch.Tensor:
        """(end - begin,) of masters, frozen values, or a state; zeros between parameters."""
        dtype = torch.float32 if layout.trainable or state else component_dtype(layout, Component.VALUE)
        out = host_zeros(end - begin, dtype)
        for piece in layout.params:
            low, high = max(piece.begin, begin), min(piece.end, end)
            if low >= high or piece.is_gone:
                continue
            tensor = PublishedTensor.of(piece, state, self._column)
            if tensor.key in self._tensors:
                self._fill(out[low - begin : high - begin], tensor, low - piece.begin)
            elif state is None:
                raise IntegrityError(
                    f"{self.where} has no {tensor.key}: values that rest in files of others are not published, and the "
                    "model has changed since. Build it as it was when it was offloaded first, with these files"
                )
        return out

    def _fill(self, out: torch.Tensor, tensor: PublishedTensor, begin: int) -> None:
        """Fill `out`, (numel,), with elements of this rank's part of a tensor, from `begin` on. Raises
        IntegrityError."""
        num_found = 0
        for first, offsets, sizes in tensor.boxes(begin, begin + out.numel()):
            target = out[first - begin : first - begin + math.prod(sizes)].view(sizes)
            for at, chunk in self._chunks(tensor, offsets, sizes):
                spans = list(zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True))
                lows = [max(mine, its) for mine, _, its, _ in spans]
                highs = [min(mine + size, its + its_size) for mine, size, its, its_size in spans]
                if any(low >= high for low, high in zip(lows, highs, strict=True)):
                    continue
                values = self._part(tensor.key, at, chunk).view(tuple(chunk.sizes))
                mine, its = (
                    tuple(slice(low - at, high - at) for low, high, at in zip(lows, highs, origin, strict=True))
                    for origin in (offsets, chunk.offsets)
                )
                target[mine] = values[its]
                num_found += target[mine].numel()
        if num_found != out.numel():
            raise IntegrityError(
                f"{self.where}: {out.numel() - num_found} of elements {begin} to {begin + out.numel()} of {tensor.key} "
                "are missing"
            )

    def _chunks(
        self, tensor: PublishedTensor, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[int, Any]]:
        """The parts that may have elements of a box, and where each begins."""
        shape = tensor.shape

        def span(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
            last = [offset + size - 1 for offset, size in zip(offsets, sizes, strict=True)]
            return begin_of(shape, offsets), begin_of(shape, last)

        if tensor.key not in self._spans:
            chunks = ((*span(each.offsets, each.sizes), each) for each in self._tensors[tensor.key].chunks)
            self._spans[tensor.key] = sorted(chunks, key=lambda each: each[0])
        begin, end = span(offsets, sizes)
        for first, last, chunk in self._spans[tensor.key]:
            if first > end:
                return
            if last >= begin:
                yield first, chunk

    def _part(self, key: str, first: int, chunk: Any) -> torch.Tensor:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        if self._last is not None and self._last[:2] == (key, first):
            return self._last[2]
        dtype = self._tensors[key].properties.dtype
        with self._place.naming("read"):
            values = _read(self._reader, MetadataIndex(key, chunk.offsets), chunk.sizes, dtype)
        if crc32c_of_tensor(values) != self._document["crcs"].get(key, {}).get(str(first)):
            raise IntegrityError(
                f"{self.where}: {key} is not what was written, from its element {first} on. Delete this directory to "
                "go on from the one before"
            )
        self._last = key, first, values
        return values

    def close(self) -> None:
        self._last = None
