"""Writes Hugging Face folders of safetensors files piece by piece: no tensor needs to be in memory whole.

Owns which tensor goes into which file and where. The folder appears under its name only when it is complete. Until then
everything is in a directory beside it, which an error removes. Where each byte lies is known before the first is
written, so pieces may come in any order. The calls: `export_saved` for a generation, without its model; else
`plan_files`, then inside of `new_folder` a `FolderWriter`: `write` until every element has been written, `finish`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from zero_offload.base.errors import ConfigError, StorageError
from zero_offload.base.host import host_empty
from zero_offload.base.types import format_bytes
from zero_offload.checkpoint.extras import decoded
from zero_offload.checkpoint.format import reading
from zero_offload.checkpoint.hf_files import DTYPES, STEMS, adapter_names, shard_name
from zero_offload.checkpoint.saved_generation import SavedGeneration
from zero_offload.checkpoint.values import master_of
from zero_offload.plan.layout import CHUNK_NUMEL, ParamSlice, SectionLayout
from zero_offload.storage.files.base_file import LENGTH_NBYTES
from zero_offload.storage.shards.shard import Component, component_dtype

HEADER_ALIGN = 8
"""The data begins at a multiple of it, so that readers may map tensors of any dtype."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class FileForm:
    """How files have the tensors of a model: here under its names, as they are."""

    def entries(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Of the files, for those of the model. The first call; then `parts` for all values."""
        return list(entries)

    def parts(self, name: str, begin: int, values: torch.Tensor) -> Iterable[tuple[str, int, torch.Tensor]]:
        """Parts that may be written now: elements of the model's tensor `name`, from `begin` on, have come."""
        return [(name, begin, values)]


AS_NAMED = FileForm()
"""That of models which no library has a form for."""


@dataclass(frozen=True)
class FilePlan:
    """One file: its tensors in the order of their bytes."""

    name: str
    entries: tuple[TensorEntry, ...]

    @property
    def data_nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def header(self) -> bytes:
        """The file up to its data."""
        words: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in self.entries:
            words[entry.name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [offset, offset + entry.nbytes],
            }
            offset += entry.nbytes
        text = json.dumps(words, separators=(",", ":")).encode()
        text += b" " * (-len(text) % HEADER_ALIGN)
        return len(text).to_bytes(LENGTH_NBYTES, "little") + text


def plan_files(entries: Sequence[TensorEntry], nbytes_max: int, stem: str = STEMS[0]) -> tuple[FilePlan, ...]:
    """Fill files in order, up to `nbytes_max` of data each; a larger tensor gets one of its own.

    Their names begin with `stem`. Raises ConfigError for a dtype that the format does not have.
    """
    foreign = [f"{entry.name} is {entry.dtype}" for entry in entries if entry.dtype not in _NAMES]
    if foreign:
        raise ConfigError(
            f"safetensors files have no place for {len(foreign)} of {len(entries)} tensors: {', '.join(foreign[:10])}; "
            "convert these buffers first, or register them with persistent=False"
        )
    groups: list[list[TensorEntry]] = [[]]
    filled = 0
    for entry in entries:
        if groups[-1] and filled + entry.nbytes > nbytes_max:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry.nbytes
    # The widest first: then each lies at a multiple of its width.
    ordered = [tuple(sorted(group, key=lambda entry: -entry.dtype.itemsize)) for group in groups]
    return tuple(FilePlan(shard_name(i, len(ordered), stem), group) for i, group in enumerate(ordered, 1))


def written_dtype(own: torch.dtype, target: torch.dtype | None) -> torch.dtype:
    """The dtype of a parameter in the files: floating ones are rounded to `target`, unless it is None."""
    return target if target is not None and own.is_floating_point else own


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A directory beside `path` to fill; at the end it becomes `path`, or, after an exception, is removed.

    Raises ConfigError if there is something at `path` already, StorageError if it cannot be made or renamed.
    """
    if path.is_dir():
        found = sorted(entry.name for entry in path.iterdir())
        if found:
            raise ConfigError(
                f"{path} is not empty: it holds {', '.join(found[:3])}{', ...' * (len(found) > 3)} ({len(found)} "
                "entries). Export to another path, or remove that directory first"
            )
    elif path.exists():
        raise ConfigError(f"{path} is a file; name a directory that does not exist, or an empty one")
    target = path.resolve()
    partial = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:12]}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        _fail("making", partial, error)
    try:
        yield partial
        _publish(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _publish(partial: Path, target: Path) -> None:
    try:
        _sync(partial)
        os.rename(partial, target)  # over an empty directory too
    except OSError as error:
        _fail("naming", target, error)
    with contextlib.suppress(OSError):
        _sync(target.parent)  # it is there; only a power cut within seconds could still undo it


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fail(doing: str, path: Path, error: OSError) -> NoReturn:
    raise StorageError(
        f"{doing} {path} failed: {error.strerror}; nothing of the export is left. "
        "Free space or name another path, and export again"
    ) from error


class FolderWriter:
    """The files of a plan, open for writing in an existing directory."""

    def __init__(self, folder: Path, plans: Sequence[FilePlan], form: FileForm = AS_NAMED) -> None:
        """Makes every file at its full size. Raises StorageError when the disk is too small for them."""
        self._folder, self._form = folder, form
        self._plans = tuple(plans)
        self._fds: dict[str, int] = {}
        self._places: dict[str, tuple[str, int, TensorEntry]] = {}
        """Tensor -> file, offset of its first byte there, and what it is."""
        self._missing_nbytes = sum(plan.data_nbytes for plan in plans)

    def __enter__(self) -> FolderWriter:
        try:
            for plan in self._plans:
                self._create(plan)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _create(self, plan: FilePlan) -> None:
        path, header = self._folder / plan.name, plan.header()
        offset = len(header)
        try:
            fd = self._fds[plan.name] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            # A disk that is too small says so now, not after hours of writing.
            os.posix_fallocate(fd, 0, offset + plan.data_nbytes)
        except OSError as error:
            size = format_bytes(offset + plan.data_nbytes)
            _fail(f"reserving {size} for", path, error)
        self._write(plan.name, header, 0)
        for entry in plan.entries:
            self._places[entry.name] = (plan.name, offset, entry)
            offset += entry.nbytes

    def write(self, name: str, begin: int, values: torch.Tensor) -> None:
        """Elements of the model's tensor `name` from `begin` on, in row-major order: (n,) of its dtype, host."""
        for known_as, first, part in self._form.parts(name, begin, values):
            file, offset, entry = self._places[known_as]
            assert part.dtype == entry.dtype and first * entry.dtype.itemsize + part.nbytes <= entry.nbytes
            raw = part.detach().contiguous().view(torch.uint8).numpy().data
            self._write(file, raw, offset + first * entry.dtype.itemsize)
            self._missing_nbytes -= part.nbytes

    def _write(self, file: str, data: bytes | memoryview, offset: int) -> None:
        left = memoryview(data)
        try:
            while left:
                count = os.pwrite(self._fds[file], left, offset)
                left, offset = left[count:], offset + count
        except OSError as error:
            _fail(f"writing at offset {offset} of", self._folder / file, error)

    def finish(self) -> None:
        """Everything is written: flush it, and write the index if there are several files."""
        assert self._missing_nbytes == 0, f"{self._missing_nbytes} bytes were never written"
        try:
            for fd in self._fds.values():
                os.fsync(fd)
            if len(self._plans) > 1:
                stem = self._plans[0].name.partition("-")[0]
                (self._folder / f"{shard_name(1, 1, stem)}.index.json").write_text(self._index())
        except OSError as error:
            _fail("finishing", self._folder, error)

    def _index(self) -> str:
        weight_map = {entry.name: plan.name for plan in self._plans for entry in plan.entries}
        total_nbytes = sum(plan.data_nbytes for plan in self._plans)
        words = {"metadata": {"total_size": total_nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        return json.dumps(words, indent=2) + "\n"


def export_saved(
    saved: SavedGeneration,
    path: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    complete: Callable[[Path, Sequence[TensorEntry]], None] = lambda folder, entries: None,
    form: FileForm = AS_NAMED,
) -> int:
    """Write every parameter, and every persistent buffer as it is, to a new folder `path`; returns how many tensors.

    `dtype` is what floating parameters are rounded to, from the fp32 masters; None is the compute dtype. Quantized
    weights are written as they are, with the records that their library reads. `complete` writes what belongs beside
    these tensors. Raises ConfigError, StorageError, and IntegrityError when a block is damaged; after an error
    nothing is left.
    """
    specs = [piece.spec for section in saved.sections for piece in section.params]
    # Models that from_pretrained could not read are refused before a file is made.
    if divided := [spec.name for spec in specs if spec.division]:
        raise ConfigError(
            f"{saved.generation} is of a tensor-parallel run. Each of its ranks has a part of {divided[0]!r} and of "
            f"{len(divided) - 1} more parameters; how they make up the whole is not in its files. Load it in the "
            "script that trained it, and gather the parameters there"
        )
    if names := adapter_names(spec.name for spec in specs):
        raise ConfigError(
            f"{saved.generation} is of a model with adapters of peft. from_pretrained does not know {len(names)} "
            f"of its names, such as {names[0]!r}, and which adapters these are is not in its files. In the script that "
            "trained it call zo.export_pretrained(model, path): that writes a folder for PeftModel.from_pretrained"
        )
    if held := [spec for spec in specs if spec.held_by]:
        raise ConfigError(f"{saved.generation}: {no_folder_text(held[0].name, held[0].held_by)}")
    # Entries have the shapes and dtypes that the headers need: sizes are known before a value is read.
    numbers = {spec.record.number for spec in specs if spec.record}
    entries = {
        piece: TensorEntry(piece.spec.name, written_dtype(section.dtype, _target(piece, dtype)), piece.spec.shape)
        for section in saved.sections
        for piece in section.params
        if piece.spec.name not in numbers
    }
    buffers = saved_buffers(saved)
    with reading(str(saved.generation)):
        buffers |= _records(saved)
    kept = [TensorEntry(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()]
    written = form.entries([*entries.values(), *kept])
    # Values go through chunk by chunk, so one chunk is in memory.
    with new_folder(path) as folder, FolderWriter(folder, plan_files(written, max_shard_bytes), form) as writer:
        for section in saved.sections:
            for piece, entry in ((piece, entries[piece]) for piece in section.params if piece in entries):
                for begin in range(piece.begin, piece.end, CHUNK_NUMEL):
                    span = begin, min(begin + CHUNK_NUMEL, piece.end)
                    values = read_values(saved, section, span, _target(piece, dtype))
                    writer.write(entry.name, begin - piece.begin, values.to(entry.dtype))
        for name, buffer in buffers.items():
            writer.write(name, 0, buffer.reshape(-1))
        writer.finish()
        complete(folder, [*entries.values(), *kept])
    return len(written)


def saved_buffers(saved: SavedGeneration) -> dict[str, torch.Tensor]:
    """Persistent buffers by name. Raises IntegrityError."""
    with reading(str(saved.generation)):
        return {name: decoded(each) for name, each in saved.generation.payload.get("buffers", {}).items()}


def no_folder_text(name: str, held_by: str) -> str:
    """Why a tensor of a parameter without memory is not written, and what to do."""
    return (
        f"{name.rpartition('.')[0]} is a {held_by}: from_pretrained looks for its tensors under names that only its "
        "library knows, so no folder is written. To keep the weights call torch.save(model.state_dict(), FILE) in "
        "the script of the model. To keep adapters alone call zo.export_pretrained(peft_model, path)"
    )


def _target(piece: ParamSlice, dtype: torch.dtype | None) -> torch.dtype | None:
    return None if piece.spec.keeps_dtype else dtype


def _records(saved: SavedGeneration) -> dict[str, torch.Tensor]:
    """Records that libraries read beside the tensors of quantized weights, by name."""
    places = {piece.spec.name: (section, piece) for section in saved.sections for piece in section.params}
    found = {}
    for record in [piece.spec.record for _, piece in places.values() if piece.spec.record]:
        number = 0.0
        if record.number:
            section, piece = places[record.number]
            number = read_values(saved, section, (piece.begin, piece.end), None).item()
        found[record.name] = record.pack(number)
    return found


def read_values(
    saved: SavedGeneration, section: SectionLayout, span: tuple[int, int], dtype: torch.dtype | None
) -> torch.Tensor:
    """Elements of a section, in the dtype asked for or a wider one."""

    def read(component: Component) -> torch.Tensor:
        out = host_empty(span[1] - span[0], component_dtype(section, component))
        saved.read(section.index, component, span[0], out)
        return out

    return read(Component.VALUE) if dtype in (None, section.dtype) else master_of(section, read)
