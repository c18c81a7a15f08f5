"""`load_pretrained()` and `export_pretrained()`: weights from and to local Hugging Face folders, streamed.

Owns the way between a model's names and its shards. Neither ever holds the model: values pass chunk by chunk, from the
files into this rank's shards (each rank reads what it holds), and from the shards, or with several ranks unit by unit
from the compute device, into the files, which rank 0 writes. Formats and files are `checkpoint/hf_*`'s. The calls
of a load: check everything, write every section, forget the copies on the device. Of an export: plan the files, make
them beside the target, fill them, rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.base.host import host_empty
from zero_offload.base.types import parse_bytes
from zero_offload.checkpoint.hf_export import FolderWriter, TensorEntry, check_target, new_folder, plan_files
from zero_offload.checkpoint.hf_files import StoredTensor, open_weights
from zero_offload.checkpoint.hf_match import Wanted, adapter_names, match
from zero_offload.checkpoint.values import (
    ComponentSource,
    ReadElements,
    fill_from_readers,
    read_master,
    read_master_chunk,
)
from zero_offload.integrations.peft import base_names, check_adapters, is_peft, write_adapters
from zero_offload.model.api import need_runtime
from zero_offload.model.gathered import gathered
from zero_offload.model.runtime import ModelRuntime
from zero_offload.plan.layout import CHUNK_NUMEL, ParamSlice
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.storage.memory.heap import trim_heap
from zero_offload.storage.shards.registry import Recipe
from zero_offload.storage.shards.shard import Component
from zero_offload.storage.shards.store import ShardStore

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONFIGS = ("config", "generation_config")
"""Attributes of a model that, where they have a `save_pretrained`, are written beside the weights."""


def load_pretrained(model: nn.Module, path: str | Path, prefix: str = "") -> None:
    """Replace the weights of an offloaded model by those of a local folder of safetensors. Every rank must call.

    `path` holds `model.safetensors`, or `model.safetensors.index.json` and its shards, or is one such file; fp32, bf16
    and fp16 become fp32 masters. Buffers in the files are loaded too; a tied parameter is there under any of its names.
    `prefix` is put before the names in the files: "model." for the files of a base model. In a model with adapters of
    PEFT these are the names of the base; adapters keep their values, and get fresh ones after
    `zo.deferred_init(values="skip")`.

    Call it after `zo.offload` and before the first step: it starts a training, with moments of zero; gradients that no
    step has used are dropped. After a step it raises ConfigError (`zo.gathered(mode="write")` changes weights and keeps
    moments). Where existing="resume" has found a generation, its weights stay and a warning says so.

    Raises CheckpointError with everything that does not fit, before anything is changed, IntegrityError when a file is
    damaged, and StorageError when one cannot be read; weights may then be part old and part new: load again.
    """
    owner = need_runtime(model, "zo.load_pretrained")
    with owner.together("zo.load_pretrained"):
        _check_whole(model, owner, "zo.load_pretrained")
        if not owner.resume_pending:
            _check_untrained(owner)
            owner.drain()
    if owner.resume_pending:
        warnings.warn(
            f"the generation of step {owner.step_count} is resumed, so {path} is not loaded. Write "
            "'if zo.resume(model, optimizer) is None: zo.load_pretrained(...)' to say so",
            stacklevel=2,
        )
        return
    exchange = owner.ranks.exchange
    with contextlib.ExitStack() as files:
        with exchange.together():
            stored = files.enter_context(open_weights(Path(path)))
            params, buffers = _match(model, stored, prefix, Path(path))
            fresh = _fresh(model, owner, params)
        _check_same_draws(owner, fresh)
        owner.grads.drop()
        try:
            with exchange.together(), _saying_what_is_left(path):
                _write_params(owner, params, fresh)
                _write_buffers(buffers)
        finally:
            torch.autograd.graph.increment_version([param for unit in owner.units for param in unit.params])
            for unit in owner.units:
                owner.prefetcher.forget(unit)
    owner.life.lacks_weights = False
    owner.left_out.clear()


def export_pretrained(
    model: nn.Module, path: str | Path, max_shard_size: int | str = "5GB", dtype: str | None = None
) -> None:
    """Write the weights of an offloaded model as a Hugging Face folder of safetensors. Every rank must call.

    One file, or several of at most `max_shard_size` and their index. `dtype` is "fp32", "bf16" or "fp16" for floating
    parameters, rounded from the fp32 masters; None is the compute dtype: what forward uses. A tied parameter is written
    once, under its first name; persistent buffers as they are. A `model.config` with `save_pretrained` is saved too.
    Of a `peft.PeftModel` the adapters are written, as its `save_pretrained` does, for `PeftModel.from_pretrained`.

    `path` must not exist or be empty, and gets its name when everything is written; after an error nothing is left.
    Raises ConfigError and StorageError.
    """
    owner = need_runtime(model, "zo.export_pretrained")
    with owner.together("zo.export_pretrained"):
        _check_whole(model, owner, "zo.export_pretrained")
        owner.life.check_usable()
        target = _export_dtype(dtype)
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper adds a prefix to every name
        owner.drain()
    if is_peft(model):
        _export_adapters(model, owner, Path(path), target)
        return
    with owner.together("zo.export_pretrained"):
        if names := adapter_names(name for name, _ in model.named_parameters()):
            raise ConfigError(
                f"{len(names)} parameters are an adapter's or wrapped by one ({names[0]}); from_pretrained does not "
                "know their names. Export the peft.PeftModel, which writes its adapters, or merge and unload the "
                "adapters first"
            )
        entries = _entries(model, owner, target)
        plans = plan_files([*entries.params.values(), *entries.buffers], parse_bytes(max_shard_size))
    exchange, is_writer = owner.ranks.exchange, owner.ranks.rank == 0
    with contextlib.ExitStack() as files:
        writer = None
        with exchange.together():
            if is_writer:
                check_target(Path(path))
                folder = files.enter_context(new_folder(Path(path)))
                writer = files.enter_context(FolderWriter(folder, plans))
                _save_configs(model, folder, _usual_dtype(entries.params.values()))
        for unit in owner.units:
            with _whole(owner, unit, target) as read, exchange.together():
                if writer is not None:
                    _write_unit(unit, read, entries.params, writer)
                    trim_heap()
        with exchange.together():
            if writer is not None:
                for entry, buffer in entries.buffers.items():
                    writer.write(entry.name, 0, buffer.detach().reshape(-1).cpu())
                writer.finish()
            files.close()
    owner.store.staging.drop()


def _check_whole(model: nn.Module, owner: ModelRuntime, call: str) -> None:
    """Raise unless all parameters of the model, and no others, are those of its runtime."""
    if owner.ranks.num_columns > 1:
        raise ConfigError(
            f"{call} does not know the files of a model whose parameters are DTensors; load and export the model "
            "before parallelize_module, and use zo.save_checkpoint and zo.load_checkpoint after it"
        )
    offloaded = {id(param) for unit in owner.units for param in unit.params}
    given = {id(param) for param in model.parameters()}
    if offloaded != given:
        raise ConfigError(
            f"{call} takes the whole model that was given to zo.offload: {len(offloaded - given)} of its "
            f"{len(offloaded)} parameters are not in this {type(model).__name__}, {len(given - offloaded)} here were "
            "never offloaded with it"
        )


# Load


@contextlib.contextmanager
def _saying_what_is_left(path: str | Path) -> Iterator[None]:
    try:
        yield
    except ZeroOffloadError as error:
        raise type(error)(
            f"{error}. The weights are now part old and part those of {path}: call zo.load_pretrained again when it "
            "can be read, or build and offload the model again"
        ) from error


def _check_untrained(owner: ModelRuntime) -> None:
    num_steps = max([owner.step_count, *owner.states.param_steps.values()])
    if num_steps > 0:
        raise ConfigError(
            f"zo.load_pretrained starts a training, but this one has made {num_steps} steps: its moments belong to "
            'other weights. Load right after zo.offload; with zo.gathered(model, mode="write") weights change and '
            "moments stay; zo.load_checkpoint replaces both"
        )


BufferSources = list[tuple[torch.Tensor, StoredTensor]]


def _match(
    model: nn.Module, stored: Mapping[str, StoredTensor], prefix: str, path: Path
) -> tuple[dict[int, StoredTensor], BufferSources]:
    """What each parameter (by id) and each buffer is read from; adapters are in no file."""
    check_adapters(model)
    params = _as_files_say(_named_params(model), base_names(model))
    buffers = _as_files_say(_named_buffers(model), base_names(model))
    wanted = [
        Wanted(each.names, tuple(each.tensor.shape), each.tensor.dtype, each.optional) for each in params + buffers
    ]
    found = match(wanted, stored, prefix, path)
    of_param = {id(each.tensor): source for each, source in zip(params, found, strict=False) if source is not None}
    rest = zip(buffers, found[len(params) :], strict=True)
    return of_param, [(each.tensor, source) for each, source in rest if source is not None]


def _as_files_say(named: Sequence[_Named], base_name: Callable[[str], str | None]) -> list[_Named]:
    """Under the names of the base model's files; without what is an adapter's own."""
    renamed = [replace(each, names=tuple(filter(None, map(base_name, each.names)))) for each in named]
    return [each for each in renamed if each.names]


def _fresh(model: nn.Module, owner: ModelRuntime, sources: Mapping[int, StoredTensor]) -> dict[int, Recipe]:
    """By id: parameters in no file, of which `deferred_init` has left the values out."""
    named = {id(param): name for name, param in model.named_parameters()}
    missing = {key: recipe for key, recipe in owner.left_out.items() if key not in sources}
    if lost := [named[key] for key, recipe in missing.items() if recipe.value is None]:
        raise ConfigError(
            f"{len(lost)} parameters are in no file, and begin with numbers that are computed from others, which "
            f'zo.deferred_init(values="skip") has left out ({lost[0]}); use zo.deferred_init()'
        )
    return missing


def _check_same_draws(owner: ModelRuntime, fresh: Mapping[int, Recipe]) -> None:
    drawn = hashlib.sha256(b"".join(recipe.drawn() for recipe in fresh.values())).hexdigest()
    if len(set(owner.ranks.exchange.gather_digests(drawn))) > 1:
        raise ConfigError(
            f"ranks would draw different values for {len(fresh)} parameters that are in no file. Call "
            "torch.manual_seed(0) before the model is built, with the same seed on all ranks"
        )


def _write_params(owner: ModelRuntime, sources: Mapping[int, StoredTensor], fresh: Mapping[int, Recipe]) -> None:
    """Every section of this rank with something new, chunk by chunk; moments become zero."""
    store, index = owner.store, owner.collectives.shard_index
    for unit in owner.units:
        placed: dict[int, dict[ParamSlice, nn.Parameter]] = {}
        for section, piece, param in unit.placed_params:
            placed.setdefault(section.layout.index, {})[piece] = param
        for section in unit.sections:
            params = placed[section.layout.index]
            if not any(id(param) in sources or id(param) in fresh for param in params.values()):
                continue
            kept = _Kept(store, section, index)
            readers = {
                piece: sources[id(param)].read
                if id(param) in sources
                else _reader_of(fresh[id(param)].make())
                if id(param) in fresh
                else partial(kept.read, piece)
                for piece, param in params.items()
            }
            fill = fill_from_readers(section.shard, index, readers)
            store.write_components(section.shard, ComponentSource(section.shard, fill))
            trim_heap()  # chunks of many sizes come and go: their holes would grow to several units
    store.staging.drop()


def _reader_of(values: torch.Tensor) -> ReadElements:
    flat = values.reshape(-1)
    return lambda begin, end: flat[begin:end]


class _Kept:
    """This rank's values of a section, for the parameters that keep theirs beside others that are replaced."""

    def __init__(self, store: ShardStore, section: Section, shard_index: int) -> None:
        self._store, self._section = store, section
        self._begin = shard_index * section.layout.shard_numel

    @cached_property
    def _master(self) -> torch.Tensor:
        return read_master(self._store, self._section.shard)

    def read(self, piece: ParamSlice, begin: int, end: int) -> torch.Tensor:
        offset = piece.begin - self._begin
        return self._master[offset + begin : offset + end]


@torch.no_grad()
def _write_buffers(sources: BufferSources) -> None:
    for buffer, source in sources:
        buffer.copy_(source.read(0, source.numel).view(source.shape))


# Export


def _export_adapters(model: nn.Module, owner: ModelRuntime, path: Path, target: torch.dtype | None) -> None:
    """As PEFT saves them. Ranks read the same parameters in the same order."""
    names = dict(model.named_parameters(remove_duplicate=False))
    base_name, num_uses = base_names(model), Counter(map(base_names(model), names))
    wanted = [name for name in names if base_name(name) is None or num_uses[base_name(name)] > 1]
    exchange, is_writer = owner.ranks.exchange, owner.ranks.rank == 0
    if owner.ranks.world_size > 1 and any("modules_to_save" in module._modules for module in model.modules()):
        raise ConfigError(
            "zo.export_pretrained of adapters with modules_to_save works on one rank: peft asks these modules for a "
            "state_dict(). Write zo.save_checkpoint(model, optimizer, path), load that on one rank, and export there"
        )
    owner.drain()
    values = _values_of(owner, {name: names[name] for name in wanted}, target)
    values |= {name: each.tensor for each in _named_buffers(model) if not each.optional for name in each.names}
    with contextlib.ExitStack() as files:
        folder = None
        with exchange.together():
            if is_writer:
                check_target(path)
                folder = files.enter_context(new_folder(path))
        with exchange.together():
            write_adapters(
                model, values, lambda name: _values_of(owner, {name: names[name]}, target)[name], folder, gathered
            )
            files.close()
    owner.store.staging.drop()


def _values_of(
    owner: ModelRuntime, params: Mapping[str, nn.Parameter], target: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Whole parameters on the host, in `target` or the compute dtype. Collective."""
    wanted = {id(param) for param in params.values()}
    found: dict[int, torch.Tensor] = {}
    for unit in owner.units:
        places = [place for place in unit.placed_params if id(place[2]) in wanted]
        if not places:
            continue
        with _whole(owner, unit, target) as read:
            for section in {id(place[0]): place[0] for place in places}.values():
                pieces = {piece: param for at, piece, param in places if at is section}
                dtype = (
                    target if target is not None and section.layout.dtype.is_floating_point else section.layout.dtype
                )
                for piece, param in pieces.items():
                    found[id(param)] = host_empty(piece.end - piece.begin, dtype)
                for begin, values in read(section):
                    for piece, param in pieces.items():
                        low, high = max(piece.begin, begin), min(piece.end, begin + values.numel())
                        if low < high:
                            out = found[id(param)][low - piece.begin : high - piece.begin]
                            out.copy_(values[low - begin : high - begin])
                for piece, param in pieces.items():
                    found[id(param)] = found[id(param)].view(piece.spec.shape)
    return {name: found[id(param)] for name, param in params.items()}


def _export_dtype(name: str | None) -> torch.dtype | None:
    """What floating parameters are rounded to; None leaves each as forward uses it."""
    if name is None:
        return None
    if name not in EXPORT_DTYPES:
        raise ConfigError(f"dtype={name!r} is none of {', '.join(EXPORT_DTYPES)}; None is the compute dtype")
    return EXPORT_DTYPES[name]


@dataclass(frozen=True)
class _Entries:
    """What is written: parameters by their place in the layout, and buffers."""

    params: dict[ParamSlice, TensorEntry]
    buffers: dict[TensorEntry, torch.Tensor]


def _entries(model: nn.Module, owner: ModelRuntime, target: torch.dtype | None) -> _Entries:
    names = {id(each.tensor): each.names[0] for each in _named_params(model)}
    params = {}
    for unit in owner.units:
        for section, piece, param in unit.placed_params:
            own = section.layout.dtype
            dtype = target if target is not None and own.is_floating_point else own
            params[piece] = TensorEntry(names[id(param)], dtype, piece.spec.shape)
    buffers = {
        TensorEntry(each.names[0], each.tensor.dtype, tuple(each.tensor.shape)): each.tensor
        for each in _named_buffers(model)
        if not each.optional
    }
    return _Entries(params, buffers)


def _usual_dtype(entries: Iterable[TensorEntry]) -> torch.dtype | None:
    """Of most floating elements."""
    numel: Counter[torch.dtype] = Counter()
    for entry in entries:
        if entry.dtype.is_floating_point:
            numel[entry.dtype] += entry.nbytes // entry.dtype.itemsize
    return max(numel, key=numel.__getitem__, default=None)


def _save_configs(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    """`dtype` is what from_pretrained is to load; a config says what the model had before."""
    for attribute in CONFIGS:
        save = getattr(getattr(model, attribute, None), "save_pretrained", None)
        if callable(save):
            save(folder)
    file = folder / "config.json"
    if dtype is not None and file.is_file():
        words: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        words["dtype" if "dtype" in words else "torch_dtype"] = str(dtype).removeprefix("torch.")
        file.write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")


Pieces = Iterator[tuple[int, torch.Tensor]]
"""A section, chunk by chunk: (first element, values on the host, valid until the next)."""


@contextlib.contextmanager
def _whole(owner: ModelRuntime, unit: Unit, target: torch.dtype | None) -> Iterator[Callable[[Section], Pieces]]:
    """How to read the sections of a unit; where it is spread over ranks, it is gathered on each first. Collective."""
    if owner.collectives.num_shards == 1:
        yield lambda section: _rested(owner, section, target)
    elif any(_needs_master(section, target) for section in unit.sections):
        masters = _gather_masters(owner, unit)
        yield lambda section: _cut(masters[section.layout.index])
    else:
        unit.gathered_uses += 1
        try:
            owner.prefetcher.bring(unit)
            owner.prefetcher.meet(f"the export of {unit.name}")
            yield lambda section: _cut(section.flat)
        finally:
            unit.gathered_uses -= 1
            unit.close()


def _write_unit(
    unit: Unit,
    read: Callable[[Section], Pieces],
    entries: Mapping[ParamSlice, TensorEntry],
    writer: FolderWriter,
) -> None:
    for section in unit.sections:
        for begin, values in read(section):
            for piece in section.layout.params:
                low, high = max(piece.begin, begin), min(piece.end, begin + values.numel())
                if low < high:
                    part = values[low - begin : high - begin].to(entries[piece].dtype)
                    writer.write(entries[piece].name, low - piece.begin, part)


def _gather_masters(owner: ModelRuntime, unit: Unit) -> dict[int, torch.Tensor]:
    """By section, (numel,) on the compute device."""
    collectives = owner.collectives
    with owner.ranks.exchange.together():
        mine = [read_master(owner.store, section.shard) for section in unit.sections]
    gathered = {}
    for section, part in zip(unit.sections, mine, strict=True):
        flat = torch.empty(section.layout.numel, dtype=part.dtype, device=owner.device.torch_device)
        collectives.agreement.same(f"the gather of masters of {unit.name}")
        flat.view(collectives.num_shards, -1)[collectives.shard_index].copy_(part)
        collectives.launch_gather(flat, unit.name)()
        gathered[section.layout.index] = flat
    return gathered


def _needs_master(section: Section, target: torch.dtype | None) -> bool:
    """Whether the value that forward uses is not what is to be written, and there is a better one."""
    return section.layout.trainable and target not in (None, section.layout.dtype)


def _rested(owner: ModelRuntime, section: Section, target: torch.dtype | None) -> Pieces:
    """From where it rests."""
    store, shard = owner.store, section.shard
    for row, (begin, _) in enumerate(section.layout.chunks()):
        if _needs_master(section, target):
            yield begin, read_master_chunk(store, shard, row)
        else:
            yield begin, store.read_chunk(shard, Component.VALUE, row)


def _cut(flat: torch.Tensor) -> Pieces:
    """From the compute device, where the whole section is."""
    for begin in range(0, flat.numel(), CHUNK_NUMEL):
        yield begin, flat[begin : begin + CHUNK_NUMEL].detach().cpu()


# Names


@dataclass(frozen=True)
class _Named:
    """A tensor of the model under all its names; `optional` ones belong to no state dict."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    optional: bool


def _named_params(model: nn.Module) -> list[_Named]:
    return _group([(name, param, True) for name, param in model.named_parameters(remove_duplicate=False)])


def _named_buffers(model: nn.Module) -> list[_Named]:
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            persistent = name not in module._non_persistent_buffers_set
            found.append((f"{path}.{name}" if path else name, buffer, persistent))
    # The name that a state dict has comes first.
    return _group(sorted(found, key=lambda each: not each[2]))


def _group(found: Sequence[tuple[str, torch.Tensor, bool]]) -> list[_Named]:
    names: dict[int, list[str]] = {}
    persistent: dict[int, bool] = {}
    tensors = {}
    for name, tensor, persists in found:
        names.setdefault(id(tensor), []).append(name)
        persistent[id(tensor)] = persistent.get(id(tensor), False) or persists
        tensors[id(tensor)] = tensor
    return [_Named(tensors[key], tuple(texts), not persistent[key]) for key, texts in names.items()]
