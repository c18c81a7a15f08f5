"""Safetensors files in the layout of Hugging Face folders: read in ranges, and matched with the tensors of a model.

Owns the words of the format (names of dtypes, header, names of files), reading, and the one error that lists everything
that does not fit. A file is 8 bytes with the length of the header, a JSON header (name -> dtype, shape, range of
bytes), and the tensors' bytes. A folder has one file `model.safetensors`, or shards and an index that says which file a
tensor is in; diffusers calls them `diffusion_pytorch_model`. The safetensors library says whether a header is right; a
name that stands twice is refused. Nothing is executed, and files are not mapped. A range is read into memory of its
own, so that a caller holds that range alone. The calls: `open_weights`, `match`, then `StoredTensor.read` as often as
wanted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zero_offload.base.errors import CheckpointError, IntegrityError, StorageError
from zero_offload.base.host import host_empty
from zero_offload.hardware.probe import is_remote
from zero_offload.plan.layout import CHUNK_NUMEL, ParamSlice, SectionLayout
from zero_offload.storage.files.base_file import HEADER_NBYTES_MAX, LENGTH_NBYTES, BaseSpan
from zero_offload.storage.files.base_files import BaseFiles

STEMS = ("model", "diffusion_pytorch_model")
"""How names of files begin: those of transformers, and those of diffusers."""
SINGLE_NAME = f"{STEMS[0]}.safetensors"
INDEX_NAME = f"{SINGLE_NAME}.index.json"
GGUF = ".gguf"
_VARIANTS = re.compile(rf"({'|'.join(STEMS)})\.(safetensors\.index\.\w+\.json|\w+\.safetensors)")
"""The same weights in another form beside them, or alone: `model.fp16.safetensors`."""
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Convert into each other; what is narrower is meaningless without scales."""
_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
"""Of a header's entry, in the library's order."""
NAMES_SHOWN = 10


def shard_name(number: int, count: int, stem: str = STEMS[0]) -> str:
    """The name of file `number`, from 1 on, of `count`."""
    return f"{stem}{'' if count == 1 else f'-{number:05d}-of-{count:05d}'}.safetensors"


class FileTensor:
    """A tensor of the model that files have."""

    dtype_name: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype | None:
        """None for a dtype that torch, or this module, does not have."""
        return DTYPES.get(self.dtype_name)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors that follow each other in it, in row-major order; empty where it is computed from them."""
        return ()

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) in row-major order: (end - begin,) of its dtype, host. Raises StorageError."""
        raise NotImplementedError


@dataclass(frozen=True)
class StoredTensor(FileTensor):
    """A tensor in an open file."""

    path: Path
    fd: int
    dtype_name: str
    shape: tuple[int, ...]
    offset: int
    """The offset of its first byte in the file."""

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (self,)

    def read(self, begin: int, end: int) -> torch.Tensor:
        assert self.dtype is not None
        out = host_empty(end - begin, self.dtype)
        if end > begin:
            _read_fully(self, out.view(torch.uint8).numpy().data, begin * self.dtype.itemsize)
        return out


@dataclass(frozen=True)
class JoinedTensor(FileTensor):
    """Tensors of the files that are one in the model: in row-major order their elements follow each other."""

    tensors: tuple[StoredTensor, ...]
    dtype_name: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[StoredTensor], per_entry: int | None) -> JoinedTensor:
        """`per_entry` parts, behind each other, make one entry of a new first dimension; None: all make the first one.

        Raises CheckpointError for parts whose shapes or dtypes do not go together.
        """
        first = parts[0]
        if any(part.shape[1:] != first.shape[1:] or part.dtype_name != first.dtype_name for part in parts):
            raise CheckpointError(
                f"{first.path} has tensors that are one in the model, such as {list(first.shape)} in "
                f"{first.dtype_name}, but not all of one shape and dtype. Get the folder again"
            )
        rows = [part.shape[0] for part in parts]
        if per_entry is None:
            return cls(tuple(parts), first.dtype_name, (sum(rows), *first.shape[1:]))
        entry, count = rows[:per_entry], len(parts) // per_entry
        if rows != entry * count:
            raise CheckpointError(f"{first.path} has experts of several sizes, or not all of one; get the folder again")
        return cls(tuple(parts), first.dtype_name, (count, sum(entry), *first.shape[1:]))

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.tensors

    def read(self, begin: int, end: int) -> torch.Tensor:
        assert self.dtype is not None
        out, at = host_empty(end - begin, self.dtype), 0
        for part in self.parts:
            low, high = max(begin, at), min(end, at + part.numel)
            if low < high:
                out[low - begin : high - begin] = part.read(low - at, high - at)
            at += part.numel
        return out


@dataclass(frozen=True, eq=False)
class NumberTensor(FileTensor):
    """One number that is made of what files have."""

    value: torch.Tensor
    """(1,) fp64."""
    dtype_name = "F64"
    shape = ()

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.value[begin:end]


_is_remote = functools.lru_cache(maxsize=64)(is_remote)


def rests_in_files(section: SectionLayout, sources: Mapping[ParamSlice, FileTensor | None]) -> bool:
    """True if a section can be read where files have it, byte for byte, and is worth it: files of another machine are
    read once."""
    found = [source for source in sources.values() if source is not None and source.parts]
    folders = {part.path.parent for source in found for part in source.parts}
    return (
        not section.trainable
        and len(found) == len(section.params) > 0
        and all(source.dtype == section.dtype for source in found)
        and not any(piece.spec.order for piece in section.params)
        and not any(map(_is_remote, folders))
    )


def base_spans(
    section: SectionLayout, sources: Mapping[ParamSlice, FileTensor | None], base: BaseFiles
) -> list[BaseSpan]:
    """Where files have the parameters of a section that `rests_in_files`. Raises StorageError and IntegrityError."""
    spans, files = [], {}
    for path, fd in {part.path: part.fd for source in sources.values() if source for part in source.parts}.items():
        files[path] = base.open(path)
        files[path].check_is(fd)
    for piece, source in sources.items():
        assert source is not None
        begin = piece.begin * section.dtype.itemsize
        for part in source.parts:
            nbytes = part.numel * section.dtype.itemsize
            if nbytes:
                spans.append(BaseSpan(begin, nbytes, files[part.path], part.offset))
            begin += nbytes
    return spans


def files_of(path: Path) -> dict[str, Path]:
    """The files of a folder, or one file, by their names. Raises CheckpointError where there are none."""
    return _files_of(path)[0]


def _read_fully(tensor: StoredTensor, target: memoryview, begin: int) -> None:
    done = 0
    while done < len(target):
        offset = tensor.offset + begin + done
        try:
            count = os.preadv(tensor.fd, [target[done:]], offset)
        except OSError as error:
            raise StorageError(f"reading {tensor.path} at offset {offset} failed: {error.strerror}") from error
        if count == 0:
            raise StorageError(f"{tensor.path} ends at offset {offset}: it has become shorter while it was read")
        done += count


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[dict[str, StoredTensor]]:
    """The tensors of a folder, of one `.safetensors` file, or of an index, by the names in the files; readable inside.

    Raises CheckpointError when a file is missing, IntegrityError when one is damaged.
    """
    paths, weight_map = _files_of(path)
    with contextlib.ExitStack() as cleanup:
        files = {name: _open(file, cleanup) for name, file in paths.items()}
        lost = [name for name, file in weight_map.items() if name not in files[file]]
        if lost:
            raise CheckpointError(
                f"the index of {path} puts {lost[0]!r} in {weight_map[lost[0]]}, which does not have it "
                f"({len(lost)} such names); get the folder again"
            )
        tensors = {name: tensor for file in files.values() for name, tensor in file.items()}
        yield tensors | {name: files[file][name] for name, file in weight_map.items()}


def _files_of(path: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Files by their names, and the name of each tensor's file; the latter is empty where there is no index."""
    file = path if path.is_file() else _main_file(path)
    if file.suffix == GGUF:
        raise CheckpointError(
            f"{file} is a GGUF file, which lacks parts of a model: give the folder of safetensors that it was made of"
        )
    if file.suffix in _PICKLED:
        raise CheckpointError(
            f"{file.name} of {file.parent} is pickled, and is not loaded{_training_checkpoint(file.parent)}. Give a "
            "folder of safetensors"
        )
    if file.suffix != ".json":
        return {file.name: file}, {}
    weight_map, folder = _read_index(file), file.parent
    names = list(dict.fromkeys(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(names)} files that {file.name} names: "
            f"{', '.join(missing[:10])}; get them, or copy the folder again"
        )
    return {name: folder / name for name in names}, weight_map


def _main_file(folder: Path) -> Path:
    """The file that has all weights of a folder, or their index. Of several variants one has to be named."""
    for ending in ("", ".index.json"):
        for stem in STEMS:
            if (file := folder / f"{shard_name(1, 1, stem)}{ending}").is_file():
                return file
    found = sorted(file.name for file in folder.iterdir() if _VARIANTS.fullmatch(file.name)) if folder.is_dir() else []
    if len(found) > 1:
        raise CheckpointError(f"{folder} has the weights as {', '.join(found)}: name one, as {folder / found[0]}")
    if not found:
        raise CheckpointError(
            f"{folder} {'holds' if folder.is_dir() else 'does not exist: there is'} neither {SINGLE_NAME} nor "
            f"{INDEX_NAME}{_what_else(folder)}. Name a folder that has one of them, or a single .safetensors file"
        )
    return folder / found[0]


_PICKLED = (".bin", ".pt", ".pth")


def _what_else(path: Path) -> str:
    """The weights that a folder has instead."""
    if not path.is_dir():
        return ""
    if known := _training_checkpoint(path):
        return known
    found = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".safetensors", *_PICKLED, GGUF))
    return f", but {', '.join(found[:3])} (pickled weights and GGUF are not loaded)" if found else ""


def _training_checkpoint(folder: Path) -> str:
    """The library whose checkpoint a folder is, and how its weights are had."""
    if (folder / ".metadata").is_file():
        return (
            ": it is a checkpoint of torch.distributed.checkpoint, which loads it: zo.offload the model, and call "
            "dcp.load({'model': model.state_dict()}, checkpoint_id=FOLDER), by the names that it was saved under"
        )
    if not any(folder.glob("*_model_states.pt")) and not (folder / _DEEPSPEED_SCRIPT).is_file():
        return ""
    if (folder / "zero").is_dir():
        return f": it is a universal checkpoint of DeepSpeed. Run {_DEEPSPEED_SCRIPT} of the one that it was made of"
    step = folder if (folder / _DEEPSPEED_SCRIPT).is_file() else folder.parent
    return (
        f": it is a checkpoint of DeepSpeed. python {step / _DEEPSPEED_SCRIPT} {step} OUT --safe_serialization makes a "
        "folder of it. Where that refuses tied weights, get_fp32_state_dict_from_zero_checkpoint and save_file make one"
    )


_DEEPSPEED_SCRIPT = "zero_to_fp32.py"

_NAME_LETTERS = 255
"""Of a file; a file system takes no more."""


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        entries = {str(name): file for name, file in weight_map.items()}
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{path} is not an index: it has no readable weight_map; get the folder again") from error
    for file in entries.values():
        # A name only: an index must not lead out of its folder.
        if not isinstance(file, str) or Path(file).name != file or len(file) > _NAME_LETTERS:
            raise IntegrityError(f"{path} names {file!r}, which is not the name of a file beside it")
    return entries


def _open(path: Path, cleanup: contextlib.ExitStack) -> dict[str, StoredTensor]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error.strerror}") from error
    cleanup.callback(os.close, fd)
    try:
        return _tensors_of(path, fd)
    except OSError as error:
        raise StorageError(f"reading the header of {path} failed: {error.strerror}") from error
    except ValueError as error:
        raise IntegrityError(f"{path} is not a safetensors file, or damaged: {error}; get it again") from error


def _tensors_of(path: Path, fd: int) -> dict[str, StoredTensor]:
    """Raises ValueError for anything that the format does not allow, and OSError."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, LENGTH_NBYTES, 0), "little")
    begin = LENGTH_NBYTES + length
    if size < LENGTH_NBYTES or length > HEADER_NBYTES_MAX or begin > size:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = os.pread(fd, length, LENGTH_NBYTES)
    try:
        _check_header(header, size)
    except SafetensorError as error:
        end = _last_byte(header)
        cut = (
            f", and the file is cut short: it should have {begin + end} bytes and has {size}"
            if begin + end > size
            else ""
        )
        raise ValueError(f"{error}{cut}") from error
    entries = json.loads(header, object_pairs_hook=_without_twins)
    entries.pop(_METADATA, None)
    tensors = {}
    for name, entry in entries.items():
        # The library takes an entry as the list of its values, too, and a dtype as the key of an object.
        fields = entry if isinstance(entry, dict) else dict(zip(_FIELDS, entry, strict=True))
        dtype, shape, (low, _) = (fields[field] for field in _FIELDS)
        tensors[name] = StoredTensor(path, fd, "".join(dtype), tuple(shape), begin + low)
    return tensors


def _check_header(header: bytes, size: int) -> None:
    """Raises SafetensorError where the safetensors library refuses a file of `size` bytes with this header.

    The library maps a file, and a drive that fails under a map ends the process. So it gets the header in a file in
    memory, whose data is a hole.
    """
    with open(os.memfd_create("safetensors"), "wb", buffering=0) as file:
        file.write(len(header).to_bytes(LENGTH_NBYTES, "little") + header)
        file.truncate(size)
        with safe_open(f"/proc/self/fd/{file.fileno()}", framework="np"):
            pass


def _last_byte(header: bytes) -> int:
    """Where the data ends by a header that may be wrong; 0 where it does not say."""
    try:
        return max(int(entry["data_offsets"][1]) for name, entry in json.loads(header).items() if name != _METADATA)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return 0


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two tensors of one name the library takes the later one. Raises ValueError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twins = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise ValueError(f"its header has the name {twins[0]!r} twice")
    return found


@dataclass(frozen=True)
class Wanted:
    """A parameter or buffer of the model."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    """Several when it is tied."""
    optional: bool = False
    """True if it may be missing in the files: none of its names is in a state dict."""


def match(
    wanted: Sequence[Wanted], stored: Mapping[str, FileTensor], prefix: str, where: Path
) -> list[FileTensor | None]:
    """The stored tensor of each wanted one; `prefix` is put before the names in the files.

    Changes nothing. Of a tied tensor that the files have twice both are compared, chunk by chunk. Raises
    CheckpointError that lists what is missing, unknown, of another shape or dtype, or tied and different.
    """
    named = {prefix + name: tensor for name, tensor in stored.items()}
    found = [[named[name] for name in want.names if name in named] for want in wanted]
    known = {name for want in wanted for name in want.names}
    missing = [want.names[0] for want, here in zip(wanted, found, strict=True) if not here and not want.optional]
    unknown = [name for name in stored if prefix + name not in known]
    pairs = [(want.tensor, named[name], name) for want in wanted for name in want.names if name in named]
    shapes = [f"{n} {list(t.shape)} (model: {list(w.shape)})" for w, t, n in pairs if t.shape != tuple(w.shape)]
    dtypes = [f"{n} {t.dtype_name} (model: {w.dtype})" for w, t, n in pairs if not converts(t.dtype, w.dtype)]
    problems = [
        *_listed("missing in the files", missing),
        *_listed("unknown to the model", unknown),
        *_listed("of another shape", shapes),
        *_listed("of a dtype that does not convert", dtypes),
    ]
    if not problems:
        ties = zip(wanted, found, strict=True)
        differ = [" and ".join(want.names) for want, here in ties if not all(same_values(here[0], t) for t in here[1:])]
        problems = _listed("tied in the model, with different values in the files", differ)
    if problems:
        remedy = (
            _prefix_hint(missing, unknown, prefix)
            or _loss_hint(wanted, missing, unknown, pairs)
            or "Build the model that the files belong to, or name its files"
        )
        if len(problems) == 1 and not (missing or unknown or shapes or dtypes):
            remedy = "Build the model without the tie, as by config.tie_word_embeddings = False"
        raise CheckpointError("\n".join([f"{where} does not fit this model; nothing was changed:", *problems, remedy]))
    return [here[0] if here else None for here in found]


def adapter_names(names: Iterable[str]) -> list[str]:
    """Those names that only a model with adapters of peft has."""
    return [name for name in names if ".base_layer." in name or name.startswith("base_model.")]


def _listed(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [f"  {len(names)} {what}: {', '.join(names[:NAMES_SHOWN])}{', ...' * (len(names) > NAMES_SHOWN)}"]


def converts(source: torch.dtype | None, target: torch.dtype) -> bool:
    """True if values of a file's dtype are values in the model's."""
    return source == target or (source in FLOATS and target in FLOATS)


_CODE_PARTS = ("_scale_inv", "_blocks", "_scales", ".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".absmax")
"""How names end of tensors that belong to a quantized weight."""
_SCALES = ".absmax"
"""Of bitsandbytes: one dimension, if no forward has repacked them."""


def _loss_hint(
    wanted: Sequence[Wanted],
    missing: Sequence[str],
    unknown: Sequence[str],
    pairs: Sequence[tuple[torch.Tensor, FileTensor, str]],
) -> str | None:
    """The door to take where a library has lost something when it wrote the files."""
    if any(name.endswith(_SCALES) and len(tensor.shape) > 1 for _, tensor, name in pairs):
        return (
            "bitsandbytes has saved this model after a forward in eval on a CPU, which reorders its scales. Quantize "
            "it again, and save it before such a forward"
        )
    if codes := [name for name in unknown if name.endswith(_CODE_PARTS)]:
        return (
            f"{codes[0]} is a part of a quantized weight, which this model does not have: give the folder of the model "
            "that was quantized. A dequantized model that transformers has saved has such parts too, and no "
            "quantization_config. Load it again from its own folder, and write it by zo.export_pretrained"
        )
    params = {want.names[0]: want.tensor for want in wanted if isinstance(want.tensor, torch.nn.Parameter)}
    trained = {name for name, param in params.items() if param.requires_grad}
    if missing and not unknown and trained and trained.isdisjoint(missing) and params.keys() >= {*missing}:
        return (
            "Only frozen parameters are missing: zero_to_fp32 of DeepSpeed leaves them out at stage 1. Add them from "
            "the folder that the run began with: safetensors.torch.save_file(load_file(BASE) | load_file(FILE), OUT)"
        )
    return None


def _prefix_hint(missing: Sequence[str], unknown: Sequence[str], prefix: str) -> str | None:
    """The prefix to type if it would make all unknown names known."""
    absent = set(missing)
    if prefix and set(unknown) <= absent:
        return f"The model has the names of the files as they are: leave prefix={prefix!r} out"
    for name in missing[:1] if prefix == "" else ():
        for other in unknown:
            if name.endswith(f".{other}"):
                found = name.removesuffix(other)
                if all(found + each in absent for each in unknown):
                    return f'The model has the names of the files behind {found!r}: pass prefix="{found}"'
    return None


def same_values(one: FileTensor, other: FileTensor) -> bool:
    """True if two tensors of one shape hold the same numbers."""
    for begin in range(0, one.numel, CHUNK_NUMEL):
        end = min(begin + CHUNK_NUMEL, one.numel)
        mine, theirs = one.read(begin, end), other.read(begin, end)
        if mine.dtype != theirs.dtype:
            mine, theirs = mine.double(), theirs.double()
        if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
            return False
    return True
