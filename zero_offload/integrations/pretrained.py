"""`load_pretrained()` and `export_pretrained()`: weights from and to local Hugging Face folders, streamed.

Owns the way between a model's names and its shards. Neither ever holds the model. A load passes values chunk by chunk
from the files into this rank's shards; each rank reads what it holds. An export passes them from the shards into the
files, which rank 0 writes. With several ranks they come unit by unit from the compute device. Formats and files are
`checkpoint/hf_*`'s. The calls of a load: check everything, write every section, invalidate the copies on the device.
Those of an export: plan the files, make them beside the target, fill them, rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_offload.base.alike import Compared, word_of
from zero_offload.base.errors import CheckpointError, ConfigError, IntegrityError, ZeroOffloadError
from zero_offload.base.host import host_empty
from zero_offload.base.precision import TORCH_NAMES
from zero_offload.base.problems import warn_user
from zero_offload.base.types import ADAPTERS, parse_bytes
from zero_offload.checkpoint.hf_export import (
    FolderWriter,
    TensorEntry,
    new_folder,
    no_folder_text,
    plan_files,
    written_dtype,
)
from zero_offload.checkpoint.hf_files import (
    STEMS,
    FileTensor,
    NumberTensor,
    StoredTensor,
    Wanted,
    adapter_names,
    base_spans,
    files_of,
    match,
    open_weights,
    rests_in_files,
)
from zero_offload.checkpoint.values import (
    ComponentSource,
    ReadElements,
    fill_from_readers,
    read_master,
    read_master_chunk,
)
from zero_offload.integrations.adapter_kinds import ResidualRecipe, TakenOut, residuals
from zero_offload.integrations.file_names import (
    AdapterFile,
    FileNames,
    computed_names,
    file_form,
    transformers_names,
    untie,
)
from zero_offload.integrations.peft import (
    base_names,
    check_adapters,
    has_adapters,
    is_peft,
    kinds_of,
    merge_layer,
    merged_tensors,
    write_adapters,
)
from zero_offload.integrations.quantize import (
    PartRecipe,
    check_zero_points,
    need_library,
    quantize_layers,
    refuse_unknown_method,
    stored_layers,
    stored_quantization,
    zero_point_words,
)
from zero_offload.model.api import need_runtime, runtime_of
from zero_offload.model.deferred.from_files import FileRecipe, PlannedFiles
from zero_offload.model.move_in import check_same_base
from zero_offload.model.runtime import NOT_ALONE, ModelRuntime
from zero_offload.plan.layout import CHUNK_NUMEL, ParamSlice
from zero_offload.plan.quantized import offloaded_tensors, ordinary_buffers_of, records, slots
from zero_offload.runtime.ranks.watch import Notice
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.standins.owners import Recipe, keep_recipe, recipe_of
from zero_offload.storage.files.base_file import BaseFile, fingerprint_of
from zero_offload.storage.files.system import naming_errors
from zero_offload.storage.memory.heap import trim_heap
from zero_offload.storage.shards.shard import Component

EXPORT_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, long) for name, long in TORCH_NAMES.items()}
CONFIGS = ("config", "generation_config")
"""Attributes of a model that, where they have a `save_pretrained`, are written beside the weights."""


def load_pretrained(model: nn.Module, path: str | Path, prefix: str = "", quantize: str | None = None) -> None:
    """Give a model the weights of a local folder of safetensors. Every rank must call.

    `path` holds `model.safetensors`, or `model.safetensors.index.json` and its shards, or is one such file. In folders
    of diffusers these are `diffusion_pytorch_model`; of variants (`.fp16`) one may be there alone, or be named. fp32,
    bf16 and fp16 become fp32 masters. Buffers in the files are loaded too; a tied parameter is there under any of its
    names. Experts that the files have one by one are joined, as transformers joins them. `prefix` is put before the
    names in the files: "model." for the files of a base model. In a model with adapters of PEFT these are the names of
    the base; adapters keep their values, and get fresh ones after `zo.deferred_init(values="skip")`.

    Before `zo.offload`, of a model built in `zo.deferred_init(values="skip")`, everything is checked and nothing read:
    `zo.offload` reads each weight when it moves in, unless existing="resume" finds a generation. With `quantize`
    linear layers become quantized ones, those that transformers chooses: "nf4", "nf4-double" (its scales are quantized
    too) and "int8" are bitsandbytes', "fp8" is torchao's. A weight is quantized from its values in the dtype that the
    model is built in. Of a folder that bitsandbytes has quantized already the layers become such ones too, with the
    weights of the files. Call `peft.get_peft_model` after it.

    After `zo.offload`, before the first step, it replaces the weights. It starts a training, with moments of zero;
    gradients that no step has used are dropped. After a step it raises ConfigError (`zo.gathered(mode="write")` changes
    weights and keeps moments). Where existing="resume" has found a generation, its weights stay and a warning says so.

    Frozen parameters are not copied if files on a drive of this machine have them in their compute dtype. Each use
    reads them where they are (docs/STORAGE.md), so the folder must stay as it is. Where it has moved, `path` is its new
    place, also where a generation is resumed.

    Raises CheckpointError with everything that does not fit, before anything is changed. Raises IntegrityError when a
    file is damaged, and StorageError when it cannot be read. Weights may then be part old and part new: load again.
    Raises ConfigError for an unknown `quantize` and for a folder that is quantized in an unknown way. Raises
    CapacityError where its library is not installed.
    """
    names = FileNames(prefix=prefix)
    # An offloaded model gets values; a deferred model gets sources that `zo.offload` reads.
    if not _is_deferred(model):
        if quantize is not None:
            raise ConfigError(
                f"zo.load_pretrained(quantize={quantize!r}) comes before zo.offload, of a model that is built in "
                "'with zo.deferred_init(values=\"skip\"):'"
            )
        refuse_unknown_method(Path(path))
        check_zero_points(model, Path(path))
        load_weights(model, path, names)
        return
    with contextlib.ExitStack() as undo:
        config = stored_quantization(Path(path))
        if quantize is not None:
            if config is not None:
                raise ConfigError(f"{path} is quantized already; leave quantize={quantize!r} out, to load it as it is")
            need_library(quantize)
            quantize_layers(model, quantize, undo)
        elif config is not None:
            with open_weights(Path(path)) as stored:
                stored_layers(model, config, stored, undo)
        plan_weights(model, path, names)
        undo.pop_all()


def _is_deferred(model: object) -> bool:
    """True if it is not offloaded, and has parameters whose values are to be made."""
    if not isinstance(model, nn.Module) or runtime_of(model) is not None:
        return False
    return any(recipe_of(param) is not None for _, param in offloaded_tensors(model))


def plan_weights(model: nn.Module, path: str | Path, names: FileNames) -> None:
    """Let `zo.offload` read the weights of a deferred model, whose files have other names than it.

    Raises what `load_pretrained` raises, before anything is changed.
    """
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as undo:
        stored = opened.enter_context(open_weights(Path(path)))
        names = _as_transformers_does(model, stored, names, Path(path))
        if names.known is not None and not is_peft(model):
            undo.enter_context(untie(model, names.known, stored, Path(path)))
        sources, buffers = _sources(model, stored, names, Path(path))
        taken_out: Mapping[int, TakenOut] = {}
        if names.adapter is not None:
            values = opened.enter_context(open_weights(names.adapter.path))
            saved = _adapter_sources(model, values, names.adapter)
            taken_out = residuals(model, sources, saved)
            sources |= saved
        recipes = {id(tensor): recipe_of(tensor) for _, tensor in offloaded_tensors(model)}
        lacking = {key: each for key, each in recipes.items() if each is not None and each.is_skipped}
        fresh = _fresh(model, lacking, sources)
        with torch.no_grad():
            for buffer, source in buffers:
                buffer.copy_(source.read(0, source.numel).view(source.shape))
        files = PlannedFiles(model, opened.pop_all())
        undo.pop_all()
    for _, tensor in offloaded_tensors(model):
        recipe: Any = recipe_of(tensor)
        is_part = isinstance(recipe, PartRecipe)
        found = sources.get(id(recipe.weight.original if is_part else tensor))
        if id(tensor) in fresh:
            keep_recipe(tensor, replace(recipe, is_skipped=False))
        elif found is not None and is_part:
            keep_recipe(tensor, replace(recipe, values=found, files=files))
        elif found is not None and recipe is not None:
            made = FileRecipe(found, tuple(tensor.shape), files)
            layers = taken_out.get(id(tensor))
            keep_recipe(tensor, made if layers is None else ResidualRecipe(made, layers))
        elif found is not None:
            with torch.no_grad():
                tensor.copy_(found.read(0, found.numel).view(found.shape))


def load_weights(model: nn.Module, path: str | Path, names: FileNames) -> None:
    """As `load_pretrained`, of files with other names than the model's."""
    owner = need_runtime(model, "zo.load_pretrained")
    with owner.together("zo.load_pretrained"):
        _check_whole(model, owner, "zo.load_pretrained")
        if owner.life.lost_base or owner.resume_pending:
            is_base = _take_base(owner, Path(path))
        else:
            is_base = False
            _check_untrained(owner)
            owner.drain()
    if is_base:
        return
    if owner.resume_pending:
        warnings.warn(
            f"the generation of step {owner.step_count} is resumed, so {path} is not loaded. Write "
            "'if zo.resume(model, optimizer) is None: zo.load_pretrained(...)' to say so",
            stacklevel=3,
        )
        return
    _replace(model, owner, path, names)


def _take_base(owner: ModelRuntime, path: Path) -> bool:
    """True if a folder has the base that the generation resumed rests in, which is read there from now on. Raises
    IntegrityError where that is nowhere else, and not there."""
    store, lost = owner.store, owner.life.lost_base
    if not store.base_files:
        return False
    try:
        store.base.move(store.base_files, files_of(path))
        store.read_base()
    except ZeroOffloadError as error:
        if not lost:
            return False
        raise IntegrityError(f"{path} is not the base that the generation rests in: {error}. {lost}") from error
    owner.note_lost_base()
    return True


def replace_weights(model: nn.Module, path: str | Path) -> None:
    """As `load_pretrained`, between any two steps: an optimizer's states begin at zero again. Every rank must call."""
    call = "the load of weights"
    owner = need_runtime(model, call)
    with owner.together(call):
        _check_whole(model, owner, call)
        owner.check_between_steps(call)
        owner.drain()
        owner.states.readers.before_replacing(param for unit in owner.units for param in unit.params)
    owner.note_written(whole=False)
    # Such a folder may go, since a training has written it.
    _replace(model, owner, path, FileNames(), may_rest=False)
    owner.states.adopt({})


def _replace(
    model: nn.Module, owner: ModelRuntime, path: str | Path, names: FileNames, *, may_rest: bool = True
) -> None:
    ranks, notice = owner.ranks, Notice()
    with contextlib.ExitStack() as files:
        with ranks.together("a load of weights", notice):
            stored = files.enter_context(open_weights(Path(path)))
            if ranks.world_size > 1:  # on another machine the same path may hold others
                paths = [Path(path)] if names.adapter is None else [Path(path), names.adapter.path]
                digests = [_identity(each) for each in paths]
                notice.compared.append(Compared(word_of(digests), lambda: _told_identities(paths, digests)))
            params, buffers = _sources(model, stored, names, Path(path))
            fresh = _fresh(model, owner.without_values, params)
        _check_same_draws(owner, fresh)
        resting, written = _divide(owner, params, fresh, may_rest=may_rest)
        with ranks.together():
            owner.take_room([section.shard for section in written])
        owner.grads.drop()
        try:
            with ranks.together(), _saying_what_is_left(path):
                for section, found in resting.items():
                    spans = base_spans(section.layout, found, owner.store.base)
                    owner.store.rest_in_base(section.shard, spans, owner.collectives.shard_index)
                for section, placed in written.items():
                    _write_section(owner, section, placed, params, fresh)
                    trim_heap()  # chunks of many sizes come and go: their holes would grow to several units
                owner.store.staging.drop()
                with torch.no_grad():
                    for buffer, source in buffers:
                        buffer.copy_(source.read(0, source.numel).view(source.shape))
            check_same_base(owner.store, owner.ranks)
        finally:
            torch.autograd.graph.increment_version([param for unit in owner.units for param in unit.params])
            for unit in owner.units:
                owner.prefetcher.invalidate(unit)
    owner.life.lacks_weights = False
    owner.without_values.clear()


def export_pretrained(
    model: nn.Module,
    path: str | Path,
    max_shard_size: int | str = "5GB",
    dtype: str | None = None,
    adapters: str = "separate",
) -> None:
    """Write the weights of an offloaded model as a Hugging Face folder of safetensors. Every rank must call.

    One file, or several of at most `max_shard_size` and their index. `dtype` is "fp32", "bf16" or "fp16" for floating
    parameters, rounded from the fp32 masters; None is the compute dtype: what forward uses. A tied parameter is written
    once, under its first name; persistent buffers as they are. A `model.config` with `save_pretrained` is saved too. A
    model of diffusers gets files that its `from_pretrained` loads.
    Of a `peft.PeftModel` the adapters are written, as its `save_pretrained` does, for `PeftModel.from_pretrained`. So
    are those of a model of diffusers, for `load_lora_adapter`. With
    `adapters="merged"` the base is written, with the active adapters merged into it as `merge_and_unload` does, unit by
    unit; the model stays as it is. Given a `dtype`, fp32 values are merged and then rounded.

    `path` must not exist or be empty, and gets its name when everything is written; after an error nothing is left.
    Raises ConfigError and StorageError.
    """
    owner = need_runtime(model, "zo.export_pretrained")
    with owner.together("zo.export_pretrained", NOT_ALONE):
        _check_whole(model, owner, "zo.export_pretrained")
        owner.life.check_usable()
        target = _export_dtype(dtype)
        if adapters not in ADAPTERS:
            raise ConfigError(f"adapters={adapters!r} is none of {', '.join(ADAPTERS)}")
        settings = {"dtype": dtype, "adapters": adapters, "max_shard_size": max_shard_size}
        owner.compare("export", lambda: Compared.of(settings))
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper adds a prefix to every name
        owner.drain()
    # Adapters alone need no values of the base.
    if has_adapters(model) and adapters == "separate":
        _export_adapters(model, owner, Path(path), target)
        return
    with owner.together("zo.export_pretrained"):
        if adapters == "separate" and (wrapped := adapter_names(name for name, _ in model.named_parameters())):
            raise ConfigError(
                f"{len(wrapped)} parameters are an adapter's or wrapped by one ({wrapped[0]}); from_pretrained does "
                'not know their names. Export the peft.PeftModel, which writes adapters, or pass adapters="merged", '
                "which writes the base with its adapters merged into it"
            )
        contents = _Contents(model, owner, target)
    # Collective reads come between the blocks in which each rank works by itself.
    contents.read_records(model)
    with owner.together("zo.export_pretrained"):
        form = file_form(model)
        plans = plan_files(
            form.entries([*contents.params.values(), *contents.buffers]),
            parse_bytes(max_shard_size),
            STEMS[_is_of_diffusers(model)],
        )
    ranks, is_writer = owner.ranks, owner.ranks.rank == 0
    with contextlib.ExitStack() as files:
        writer = None
        with ranks.together():
            if is_writer:
                folder = files.enter_context(new_folder(Path(path)))
                writer = files.enter_context(FolderWriter(folder, plans, form))
                _save_configs(model, folder, contents)
        for unit in owner.units:
            contents.write_unit(unit, writer)
        with ranks.together():
            if writer is not None:
                for entry, buffer in contents.buffers.items():
                    writer.write(entry.name, 0, buffer.detach().reshape(-1).cpu())
                writer.finish()
            files.close()
    owner.store.staging.drop()


def _check_whole(model: nn.Module, owner: ModelRuntime, call: str) -> None:
    """Raise unless all parameters of the model, and no others, are those of its runtime. peft may delete adapters."""
    if owner.ranks.num_columns > 1:
        raise ConfigError(
            f"{call} does not know the files of a model whose parameters are DTensors. Load and export the model "
            "before parallelize_module, and use zo.save_checkpoint and zo.load_checkpoint after it"
        )
    offloaded = {id(place.param): place.name for place in owner.places.listed()}
    tensors = dict(offloaded_tensors(model))
    given = {id(tensor): name for name, tensor in tensors.items()}
    more, fewer = given.keys() - offloaded.keys(), offloaded.keys() - given.keys()
    replaced = sorted({given[each] for each in more} & {offloaded[each] for each in fewer})
    if replaced := [name for name in replaced if not isinstance(tensors[name], nn.Parameter)]:
        kind = type(model.get_submodule(replaced[0].rpartition(".")[0])).__name__
        raise ConfigError(
            f"{call} finds {len(replaced)} tensors of this model replaced by others after zo.offload, as a layer of "
            f"quantized weights does in a forward in another dtype: the first is {replaced[0]} of {kind}. Call the "
            "model once before zo.offload, in the dtype that it trains in; or load it in the dtype of its folder"
        )
    if more or (fewer and not is_peft(model)):
        raise ConfigError(
            f"{call} takes the whole model that was given to zo.offload. {len(fewer)} of its {len(offloaded)} "
            f"parameters are not in this {type(model).__name__}, {len(more)} here were never offloaded with it"
        )


# Load


@contextlib.contextmanager
def _saying_what_is_left(path: str | Path) -> Iterator[None]:
    try:
        yield
    except ZeroOffloadError as error:
        raise type(error)(
            f"{error}. The weights are now part old and part those of {path}. Call zo.load_pretrained again when it "
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


def _sources(
    model: nn.Module, stored: Mapping[str, StoredTensor], names: FileNames, path: Path
) -> tuple[dict[int, FileTensor], list[tuple[torch.Tensor, FileTensor]]]:
    """The source of each parameter (by id) and of each buffer; adapters are in no file."""
    if names.adapter is None:
        check_adapters(model)
    if held := [slot for slot in slots(model) if slot.held_by and not isinstance(recipe_of(slot.tensor), PartRecipe)]:
        raise CheckpointError(
            f"{path} is not read into {held[0].name.rpartition('.')[0]}, a {held[0].held_by}: only its library reads "
            "such a parameter from files. Nothing was changed. Build the model by from_pretrained, and call zo.offload "
            "then"
        )
    base_name = base_names(model)
    names = _as_transformers_does(model, stored, names, path)

    def as_files_say(named: Iterable[Wanted]) -> list[Wanted]:
        """Under the names of the base model's files; without what is an adapter's own."""
        renamed = (replace(each, names=tuple(filter(None, map(base_name, each.names)))) for each in named)
        return [each for each in renamed if each.names]

    params, buffers = as_files_say(_named_params(model)), as_files_say(_named_buffers(model))
    saved = {id(param) for param in _saved_with(model, names.adapter)}
    wanted = [
        replace(each, optional=each.optional or id(each.tensor) in saved or names.fresh.issuperset(each.names))
        for each in params + buffers
    ]
    sources: dict[str, FileTensor] = dict(stored)
    if names.known is not None:
        sources = {known: stored[name] for name, known in names.known.items()}
        sources |= {known: made.source(stored) for known, made in names.made.items()}
    _take_records(model, sources, lambda name: (base_name(name) or "").removeprefix(names.prefix), path)
    found = [
        (each.tensor, source) for each, source in zip(wanted, match(wanted, sources, names.prefix, path), strict=True)
    ]
    of_param = {id(param): source for param, source in found[: len(params)] if source is not None}
    return of_param, [(buffer, source) for buffer, source in found[len(params) :] if source is not None]


def _as_transformers_does(
    model: nn.Module, stored: Mapping[str, StoredTensor], names: FileNames, path: Path
) -> FileNames:
    """The names of a model of transformers, where nothing else is said."""
    base: Any = model.get_base_model() if is_peft(model) else model  # type: ignore[operator]
    transformers = sys.modules.get("transformers")
    if names.known is not None or names.prefix or transformers is None:
        return names
    if not isinstance(base, transformers.PreTrainedModel):
        return names
    known = list(filter(None, map(base_names(model), state_names(model))))
    of_files, made = transformers_names(base, known, stored, path)
    return replace(names, known=of_files, made=made, fresh=names.fresh | computed_names(base, known))


def _take_records(
    model: nn.Module, sources: dict[str, FileTensor], name_in_files: Callable[[str], str], path: Path
) -> None:
    """Put the numbers that records have into the place of the records."""
    for record in records(model).values():
        if (taken := sources.pop(name_in_files(record.name), None)) is not None:
            try:
                number = record.unpack(taken.read(0, taken.numel))
            except (ConfigError, ValueError) as error:
                raise CheckpointError(f"{path} does not fit this model; nothing was changed: {error}") from error
            if record.number:
                sources[name_in_files(record.number)] = NumberTensor(number)


def _adapter_sources(model: nn.Module, values: Mapping[str, StoredTensor], file: AdapterFile) -> dict[int, FileTensor]:
    """The source of each parameter of an adapter, by id. Raises ConfigError for a parameter that is not in its file: a
    build has drawn other values for it than the saved ones.
    """
    known, kinds = {id(param) for param in _saved_with(model, file)}, ", ".join(kinds_of(model))
    base_name = base_names(model)
    own = ((name, param) for name, param in offloaded_tensors(model) if base_name(name) is None)
    if lost := [name for name, param in own if id(param) not in known]:
        raise ConfigError(
            f"{file.path} lacks {len(lost)} parameters of its adapter ({kinds}), which peft leaves out of files "
            f"({lost[0]}). Merge the adapter by peft, in memory, and give the merged folder"
        )
    wanted = [Wanted(param, (name,)) for name, param in zip(file.known.values(), _saved_with(model, file), strict=True)]
    named = {file.known.get(name, name): source for name, source in values.items()}
    sources = match(wanted, named, "", file.path)
    return {id(each.tensor): source for each, source in zip(wanted, sources, strict=True) if source is not None}


def _saved_with(model: nn.Module, file: AdapterFile | None) -> list[nn.Parameter]:
    """The parameters that an adapter's file has."""
    return [] if file is None else [model.get_parameter(name) for name in file.known.values()]


def _fresh(model: nn.Module, lacking: Mapping[int, Recipe], sources: Mapping[int, FileTensor]) -> dict[int, Recipe]:
    """By id: parameters in no file, of which `deferred_init` has left the values out."""
    named = {id(param): name for name, param in offloaded_tensors(model)}
    missing = {key: recipe for key, recipe in lacking.items() if key not in sources}
    if lost := [named[key] for key, recipe in missing.items() if recipe.value is None]:
        raise ConfigError(
            f"{len(lost)} parameters are in no file ({lost[0]}), and their first values depend on values that "
            'zo.deferred_init(values="skip") leaves out; use zo.deferred_init()'
        )
    return missing


def _identity(path: Path) -> str:
    """Facts of a folder's files that are known without reading all of them."""
    with contextlib.ExitStack() as opened:
        files = [BaseFile.open(file) for file in files_of(path).values()]
        for file in files:
            opened.callback(file.close)
        return fingerprint_of(files)[:8]


def _told_identities(paths: Sequence[Path], found: Sequence[str]) -> dict[str, str]:
    described = [f"{path} (digest {each})" for path, each in zip(paths, found, strict=True)]
    return dict(zip(("the folder of weights", "the folder of the adapter"), described, strict=False))


def _check_same_draws(owner: ModelRuntime, fresh: Mapping[int, Recipe]) -> None:
    drawn = hashlib.sha256(b"".join(recipe.drawn() for recipe in fresh.values())).hexdigest()
    if len(set(owner.ranks.gather_digests(drawn))) > 1:
        raise ConfigError(
            f"ranks would draw different values for {len(fresh)} parameters that are in no file. Call "
            "torch.manual_seed(0) before the model is built, with the same seed on all ranks"
        )


def _divide(
    owner: ModelRuntime, sources: Mapping[int, FileTensor], fresh: Mapping[int, Recipe], *, may_rest: bool
) -> tuple[dict[Section, dict[ParamSlice, FileTensor]], dict[Section, dict[ParamSlice, nn.Parameter]]]:
    """Frozen sections that files have as they are, with what they rest in; and all others with something new, with
    their parameters."""
    resting, written = {}, {}
    for unit in owner.units:
        for section in unit.sections:
            params = {piece: param for at, piece, param in unit.placed_params if at is section}
            found = {piece: sources[id(param)] for piece, param in params.items() if id(param) in sources}
            if may_rest and rests_in_files(section.layout, found):
                resting[section] = found
            elif found or any(id(param) in fresh for param in params.values()):
                written[section] = params
    return resting, written


def _write_section(
    owner: ModelRuntime,
    section: Section,
    params: Mapping[ParamSlice, nn.Parameter],
    sources: Mapping[int, FileTensor],
    fresh: Mapping[int, Recipe],
) -> None:
    """This rank's part of a section, chunk by chunk; moments become zero."""
    store, shard, index = owner.store, section.shard, owner.collectives.shard_index

    @cache
    def kept() -> torch.Tensor:
        """This rank's values, for parameters that keep theirs beside others that are replaced: (shard_numel,)."""
        return read_master(store, shard)

    def reader(piece: ParamSlice, param: nn.Parameter) -> ReadElements:
        if id(param) in sources:
            return sources[id(param)].read
        if id(param) in fresh:
            values = fresh[id(param)].make().reshape(-1)
            return lambda begin, end: values[begin:end]
        offset = piece.begin - index * section.layout.shard_numel
        return lambda begin, end: kept()[offset + begin : offset + end]

    readers = {piece: reader(piece, param) for piece, param in params.items()}
    store.write_components(shard, ComponentSource(shard, fill_from_readers(shard, index, readers)))


# Export


def _check_merges(model: nn.Module) -> None:
    """Raise where adapters would be merged into quantized weights: what is left would be quantized again."""
    for path, module in model.named_modules() if is_peft(model) else ():
        if hasattr(module, "adapter_layer_names") and any(slot.keeps_dtype for slot in slots(module)):
            raise ConfigError(
                f"adapters are not merged into quantized weights ({path}), which would be quantized again. Export with "
                'adapters="separate", and merge into the weights as they were before: peft.PeftModel.from_pretrained('
                "base, path).merge_and_unload(), with a base that is not quantized"
            )


class _Contents:
    """The tensors of an export of a model, with its adapters merged into the base. Tied parameters have one entry."""

    def __init__(self, model: nn.Module, owner: ModelRuntime, target: torch.dtype | None) -> None:
        self._owner, self._target = owner, target
        self.params: dict[int, TensorEntry] = {}
        """By the parameters' ids."""
        self.buffers: dict[TensorEntry, torch.Tensor] = {}
        self._layers: dict[int, dict[str, nn.Module]] = {}
        """Layers to merge by their names, by the index of the unit that their weights are in."""
        self._merged: dict[str, int] = {}
        """All names of their parameters, with the ids."""
        _check_merges(model)
        kept = {id(slot.tensor): slot for slot in slots(model) if slot.keeps_dtype}
        if held := [slot for slot in kept.values() if slot.held_by]:
            raise ConfigError(no_folder_text(held[0].name, held[0].held_by))
        numbers = {record.number for record in records(model).values()}
        self._kept = frozenset(kept)
        for name, tensor, layer in merged_tensors(model, saved_tensors):
            if not isinstance(tensor, nn.Parameter):
                self.buffers[TensorEntry(name, tensor.dtype, tuple(tensor.shape))] = tensor
                continue
            if id(tensor) in kept and kept[id(tensor)].name in numbers:
                continue
            dtype = tensor.dtype if id(tensor) in kept else written_dtype(tensor.dtype, target)
            self.params.setdefault(id(tensor), TensorEntry(name, dtype, tuple(tensor.shape)))
            if layer is not None:
                self._merged[name] = id(tensor)
                home = owner.places[next(layer[1].parameters())].unit.index
                self._layers.setdefault(home, {}).setdefault(*layer)

    def read_records(self, model: nn.Module) -> None:
        """Collective."""
        base_name = base_names(model)
        tensors: dict[str, Any] = {slot.name: slot.tensor for slot in slots(model)}
        for record in records(model).values():
            if (known_as := base_name(record.name)) is not None:
                number = tensors.get(record.number)
                packed = record.pack(0.0 if number is None else self._owner.access.read_number(number))
                self.buffers[TensorEntry(known_as, packed.dtype, tuple(packed.shape))] = packed

    @property
    def has_quantized(self) -> bool:
        """True if tensors of quantized weights are among them."""
        return bool(self._kept)

    def rounded(self) -> list[TensorEntry]:
        """Those of parameters that the compute dtype applies to."""
        return [entry for key, entry in self.params.items() if key not in self._kept]

    def write_unit(self, unit: Unit, writer: FolderWriter | None) -> None:
        """Collective. A rank that writes nothing has no `writer`."""
        owner, merged = self._owner, set(self._merged.values())
        entries = {
            piece: self.params[id(param)]
            for _, piece, param in unit.placed_params
            if id(param) in self.params and id(param) not in merged
        }
        sections = [section for section in unit.sections if not entries.keys().isdisjoint(section.layout.params)]
        if sections:
            with _whole(owner, unit, self._target) as read, owner.ranks.together():
                for section in sections if writer is not None else ():
                    for piece, begin, values in _parts(section, read):
                        if writer is not None and piece in entries:
                            writer.write(entries[piece].name, begin, values.to(entries[piece].dtype))
                trim_heap()
        if layers := self._layers.get(unit.index):
            self._write_merged(layers, writer)

    def _write_merged(self, layers: Mapping[str, nn.Module], writer: FolderWriter | None) -> None:
        params = {str(id(param)): param for layer in layers.values() for param in layer.parameters()}
        read = _values_of(self._owner, params, None if self._target is None else torch.float32)
        with self._owner.ranks.together():
            if writer is None:
                return
            device, found = self._owner.device.torch_device, dict[int, torch.Tensor]()
            values = {int(key): nn.Parameter(read.pop(key).to(device), requires_grad=False) for key in params}
            for path, layer in layers.items():
                found |= {self._merged[f"{path}.{name}"]: left for name, left in merge_layer(layer, values).items()}
            for key, left in found.items():
                entry = self.params[key]
                if left.shape != entry.shape:
                    raise ConfigError(f"peft makes {entry.name}, {list(entry.shape)}, one of {list(left.shape)}")
                writer.write(entry.name, 0, left.to(entry.dtype).cpu().reshape(-1))
            trim_heap()


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters under all names, and buffers that a state dict has."""
    yield from offloaded_tensors(module, remove_duplicate=False)
    yield from ((each.names[0], each.tensor) for each in _named_buffers(module) if not each.optional)


def _export_adapters(model: nn.Module, owner: ModelRuntime, path: Path, target: torch.dtype | None) -> None:
    """As PEFT saves them. Ranks read the same parameters in the same order."""
    names = dict(model.named_parameters(remove_duplicate=False))
    base_name, num_uses = base_names(model), Counter(map(base_names(model), names))
    wanted = [name for name in names if base_name(name) is None or num_uses[base_name(name)] > 1]
    ranks, is_writer = owner.ranks, owner.ranks.rank == 0
    values = _values_of(owner, {name: names[name] for name in wanted}, target)
    values |= {name: each.tensor for each in _named_buffers(model) if not each.optional for name in each.names}
    with contextlib.ExitStack() as files:
        folder = None
        with ranks.together():
            if is_writer:
                folder = files.enter_context(new_folder(path))
        with ranks.together():
            write_adapters(model, values, lambda name: _values_of(owner, {name: names[name]}, target)[name], folder)
            files.close()
    owner.store.staging.drop()


def _values_of(
    owner: ModelRuntime, params: Mapping[str, nn.Parameter], target: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Whole parameters on the host, in `target` or the compute dtype. Collective."""
    wanted = {id(param) for param in params.values()}
    found: dict[int, torch.Tensor] = {}
    for unit in owner.units:
        places = [(section, piece, id(param)) for section, piece, param in unit.placed_params if id(param) in wanted]
        if not places:
            continue
        found |= {
            key: host_empty(piece.spec.shape, written_dtype(at.layout.dtype, target)) for at, piece, key in places
        }
        keys = {piece: key for _, piece, key in places}
        with _whole(owner, unit, target) as read:
            for section in unit.sections:
                if keys.keys().isdisjoint(section.layout.params):
                    continue
                for piece, begin, values in _parts(section, read):
                    if piece in keys:
                        found[keys[piece]].view(-1)[begin : begin + values.numel()].copy_(values)
    return {name: found[id(param)] for name, param in params.items()}


def _export_dtype(name: str | None) -> torch.dtype | None:
    """The dtype to which floating parameters are rounded; None leaves each as forward uses it."""
    if name is None:
        return None
    if name not in EXPORT_DTYPES:
        raise ConfigError(f"dtype={name!r} is none of {', '.join(EXPORT_DTYPES)}; None is the compute dtype")
    return EXPORT_DTYPES[name]


def usual_dtype(entries: Iterable[TensorEntry]) -> torch.dtype | None:
    """The dtype of most floating elements."""
    numel: Counter[torch.dtype] = Counter()
    for entry in entries:
        if entry.dtype.is_floating_point:
            numel[entry.dtype] += entry.nbytes // entry.dtype.itemsize
    return max(numel, key=numel.__getitem__, default=None)


def _is_of_diffusers(model: nn.Module) -> bool:
    """True if the model writes its config itself."""
    return callable(getattr(model, "save_config", None))


def _save_configs(model: nn.Module, folder: Path, contents: _Contents) -> None:
    """Save the configs for from_pretrained. A config may still say what the model had before: it is corrected."""
    if _is_of_diffusers(model):
        with naming_errors("write", folder):
            model.save_config(folder)  # type: ignore[operator]
        return
    base = model.get_base_model() if is_peft(model) else model  # type: ignore[operator]
    if (inner := _owner_of_config(base)) is not None:
        warn_user(
            f"the config of this {type(base).__name__} is that of its {inner!r}, and is not written: from_pretrained "
            "would look for that model's names, and find none. zo.load_pretrained reads the folder into the same "
            "class; on one rank the class's own save writes its own folder"
        )
        return
    for attribute in CONFIGS:
        save = getattr(getattr(base, attribute, None), "save_pretrained", None)
        if callable(save):
            with naming_errors("write", folder):
                save(folder)
    file, dtype = folder / "config.json", usual_dtype(contents.rounded())
    if dtype is not None and file.is_file():
        words: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if "model_type" in words:
            words["architectures"] = [type(base).__name__]
        words["dtype" if "dtype" in words else "torch_dtype"] = str(dtype).removeprefix("torch.")
        if words.get("tie_word_embeddings") and _are_both_written(base, contents):
            words["tie_word_embeddings"] = False
        if isinstance(said := words.get("quantization_config"), dict):
            words["quantization_config"] = zero_point_words(base, said)
        if not contents.has_quantized:
            words.pop("quantization_config", None)  # a model read from GGUF keeps it, whose weights are plain ones
        with naming_errors("write", file):
            file.write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")


def _owner_of_config(base: nn.Module) -> str | None:
    """The model of transformers inside of another one, whose config the outer one shows as its own."""
    transformers, config = sys.modules.get("transformers"), getattr(base, "config", None)
    if transformers is None or config is None or isinstance(base, transformers.PreTrainedModel):
        return None
    models = ((path, each) for path, each in base.named_modules() if isinstance(each, transformers.PreTrainedModel))
    return next((path for path, each in models if each.config is config), None)


def _are_both_written(base: Any, contents: _Contents) -> bool:
    """True if both ends of a tie of the class are tensors in the files, as adapters may leave them."""
    written = {entry.name for entry in contents.params.values()}
    tied = getattr(base, "all_tied_weights_keys", None) or {}
    return any({name, other} <= written for name, other in tied.items())


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
            owner.prefetcher.fetch_for_access(unit)
            owner.prefetcher.meet(f"the export of {unit.name}")
            yield lambda section: _cut(section.flat)
        finally:
            unit.gathered_uses -= 1
            assert unit.gathered_uses >= 0, unit.name
            unit.guard()


def _parts(section: Section, read: Callable[[Section], Pieces]) -> Iterator[tuple[ParamSlice, int, torch.Tensor]]:
    """A section's parameters in parts: (parameter, first element of it, values on the host, valid until the next)."""
    for first, values in read(section):
        for piece in section.layout.params:
            low, high = max(piece.begin, first), min(piece.end, first + values.numel())
            if low < high:
                yield piece, low - piece.begin, values[low - first : high - first]


def _gather_masters(owner: ModelRuntime, unit: Unit) -> dict[int, torch.Tensor]:
    """By section, (numel,) on the compute device."""
    collectives = owner.collectives
    with owner.ranks.together():
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
    """True if what is written is rounded from the fp32 master: forward uses a value of another dtype."""
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
        # A copy: a view that a caller still has would keep the unit in memory.
        yield begin, flat[begin : begin + CHUNK_NUMEL].detach().to("cpu", copy=True)


# Names


def state_names(model: nn.Module) -> list[str]:
    """The names that files may have: all of each parameter, and those of buffers that a state dict has."""
    return [name for name, _ in saved_tensors(model)]


def _named_params(model: nn.Module) -> list[Wanted]:
    found: dict[tuple[str, int], tuple[str, torch.Tensor, bool]] = {}
    for name, tensor in offloaded_tensors(model, remove_duplicate=False):
        part = recipe_of(tensor)
        if isinstance(part, PartRecipe):  # files have the weight that it is made from
            name, tensor = name.removesuffix(part.name) + "weight", part.weight.original
        found[name, id(tensor)] = (name, tensor, True)
    return _under_all_names(found.values())


def _named_buffers(model: nn.Module) -> list[Wanted]:
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in ordinary_buffers_of(module):
            persists = name not in module._non_persistent_buffers_set
            found.append((f"{path}.{name}" if path else name, buffer, persists))
    # The name that a state dict has comes first.
    return _under_all_names(sorted(found, key=lambda each: not each[2]))


def _under_all_names(found: Iterable[tuple[str, torch.Tensor, bool]]) -> list[Wanted]:
    """Each tensor once, of (name, tensor, True if a state dict has it under this name)."""
    groups: dict[int, list[tuple[str, torch.Tensor, bool]]] = {}
    for each in found:
        groups.setdefault(id(each[1]), []).append(each)
    return [
        Wanted(group[0][1], tuple(name for name, _, _ in group), not any(persists for _, _, persists in group))
        for group in groups.values()
    ]
