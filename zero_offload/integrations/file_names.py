"""Names of a model's tensors in the files of a Hugging Face folder, and what the files have of them.

Owns the way from transformers' conversion mapping to sources of a load, and to the tensors of an export. A mapping
renames, and converts: joins experts, splits what one tensor has of several, transposes, interleaves. Joined rows are
read in parts. Whatever else a converter does runs on whole tensors, those of one conversion at a time. Imports
transformers when it is needed.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_offload.base.errors import CheckpointError
from zero_offload.base.host import host_empty
from zero_offload.base.problems import warn_user
from zero_offload.checkpoint.hf_export import AS_NAMED, FileForm, TensorEntry
from zero_offload.checkpoint.hf_files import DTYPES, FileTensor, JoinedTensor, StoredTensor, same_values
from zero_offload.model.deferred.from_files import deferred
from zero_offload.standins.owners import keep_recipe, recipe_of


@dataclass(frozen=True)
class AdapterFile:
    """The values of an adapter of PEFT, which the model has."""

    path: Path
    known: Mapping[str, str]
    """The model's name of each tensor in the file; see `peft.adapter_file_names`."""


@dataclass(frozen=True)
class Joined:
    """Names in the files whose tensors are one in the model; see `JoinedTensor.of`."""

    names: tuple[str, ...]
    per_entry: int | None

    def source(self, stored: Mapping[str, StoredTensor]) -> FileTensor:
        return JoinedTensor.of([stored[name] for name in self.names], self.per_entry)


class Conversion:
    """A run of one of transformers' converters: it makes tensors of the model of whole tensors of the files."""

    def __init__(self, converter: Any, base: Any, layer: str, names: Mapping[str, Sequence[str]]) -> None:
        """`layer`: the name that transformers calls the run by. `names` in the files, by the converter's patterns."""
        self._converter, self._base, self._layer, self._names = converter, base, layer, names

    @property
    def names(self) -> list[str]:
        """In the files."""
        return [name for names in self._names.values() for name in names]

    def run(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's tensors, by name. On meta this takes no memory. Raises what the converter raises."""
        converter = copy.deepcopy(self._converter)
        for pattern, names in self._names.items():
            for name in names:
                converter.add_tensor(self._layer, name, pattern, tensors[name])
        made = converter.convert(self._layer, model=self._base, config=self._base.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


class Latest:
    """The tensors that the last conversion of a load has made. The next one takes its place."""

    def __init__(self) -> None:
        self._conversion: Conversion | None = None
        self._made: dict[str, torch.Tensor] = {}

    def of(self, conversion: Conversion, stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
        if self._conversion is not conversion:
            self._conversion, self._made = None, {}
            whole = {
                each: stored[each].read(0, stored[each].numel).view(stored[each].shape) for each in conversion.names
            }
            self._made = {name: made.contiguous() for name, made in conversion.run(whole).items()}
            self._conversion = conversion
        return self._made


@dataclass(frozen=True, eq=False)
class ConvertedTensor(FileTensor):
    """A tensor of the model that a conversion makes."""

    conversion: Conversion
    latest: Latest
    stored: Mapping[str, StoredTensor]
    name: str
    dtype_name: str
    shape: tuple[int, ...]

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.latest.of(self.conversion, self.stored)[self.name].view(-1)[begin:end].clone()


@dataclass(frozen=True)
class Converted:
    """The model's tensor `name`, which a conversion makes."""

    conversion: Conversion
    latest: Latest
    name: str

    def source(self, stored: Mapping[str, StoredTensor]) -> FileTensor:
        found = self.conversion.run(_on_meta({name: stored[name] for name in self.conversion.names}))[self.name]
        dtype_name = next(name for name, dtype in DTYPES.items() if dtype == found.dtype)
        return ConvertedTensor(self.conversion, self.latest, stored, self.name, dtype_name, tuple(found.shape))


def _on_meta(stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in stored.items()}


@dataclass(frozen=True)
class FileNames:
    """Names of a model's parameters and buffers in a folder's files."""

    known: Mapping[str, str] | None = None
    """The model's name of each tensor in the files; others are not read. None: the files' names behind `prefix`."""
    fresh: frozenset[str] = frozenset()
    """The model's names that may be in no file: they keep their values, or get them from their initialization."""
    prefix: str = ""
    made: Mapping[str, Joined | Converted] = field(default_factory=dict)
    """By the model's name, with `known`: what is made of several tensors of the files, or of parts of one."""
    adapter: AdapterFile | None = None


def transformers_names(
    base: Any,
    known: Iterable[str],
    stored: Mapping[str, StoredTensor],
    path: Path,
    is_left: Callable[[str], bool] = lambda name: False,
) -> tuple[dict[str, str], dict[str, Joined | Converted]]:
    """As transformers renames and converts the tensors of a folder's files. Returns the model's name of each tensor in
    the files, and what is made of them, by its name.

    `base` is a model of transformers, `known` has its names. Of names that the model does not have, those for which
    `is_left` is true are left out, and buffers that old versions wrote. Raises CheckpointError where parts are missing.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    prefix, known = base.base_model_prefix, dict.fromkeys(known, True)
    changes = get_model_conversion_mapping(base)
    renamings = [each for each in changes if isinstance(each, WeightRenaming)]
    converters = [each for each in changes if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    ignored = [re.compile(pattern) for pattern in (*(base._keys_to_ignore_on_load_unexpected or ()), *_OLD_BUFFERS)]
    of_files: dict[str, str] = {}
    parts: dict[str, dict[str, list[str]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        new, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if new not in known:  # perhaps its name is right, and what was renamed only resembles an old one
            plain, _ = rename_source_key(name, [], [], prefix, known)
            if plain in known:
                new, pattern = plain, None
        if pattern is not None:
            parts.setdefault(new, {}).setdefault(pattern, []).append(name)
        elif new in known or not (is_left(new) or any(old.search(new) for old in ignored)):
            of_files[name] = new
    made: dict[str, Joined | Converted] = {}
    latest = Latest()
    for layer, found in parts.items():
        made |= _made(base, path, of_pattern[next(iter(found))], layer, found, stored, latest)
    return of_files, made


def _made(
    base: Any,
    path: Path,
    converter: Any,
    layer: str,
    found: Mapping[str, Sequence[str]],
    stored: Mapping[str, StoredTensor],
    latest: Latest,
) -> dict[str, Joined | Converted]:
    """The tensors that a converter makes of those in the files, by its patterns."""
    steps = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
    columns = [found.get(pattern, []) for pattern in converter.source_patterns]
    if steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)], [("Concatenate", 0)]):
        if len({len(each) for each in columns}) > 1:
            counts = ", ".join(f"{len(each)} of {each[0]}" if each else "0" for each in columns)
            raise CheckpointError(f"{path} lacks parts of a tensor: {counts} and its like; get the folder again")
        if steps == [("Concatenate", 0)]:
            return {layer: Joined(tuple(name for column in columns for name in column), None)}
        return {layer: Joined(tuple(name for entry in zip(*columns, strict=True) for name in entry), len(columns))}
    conversion = Conversion(converter, base, layer, found)
    try:
        names = conversion.run(_on_meta({name: stored[name] for name in conversion.names}))
    except Exception as error:  # whatever an operation makes of shapes that do not fit
        what = " and ".join(name for name, _ in steps)
        raise CheckpointError(
            f"{path} has {conversion.names[0]}, which transformers converts ({what}), and cannot here: {error}; get "
            "the folder again"
        ) from error
    return {name: Converted(conversion, latest, name) for name in names}


def computed_names(base: Any, known: Iterable[str]) -> frozenset[str]:
    """Names that files of a class lack, since it makes their values: they begin as it says."""
    lacking = [*(base._keys_to_ignore_on_save or ()), *(base._keys_to_ignore_on_load_missing or ())]
    return frozenset(name for name in known if any(re.search(each, name) for each in lacking))


def untie(base: Any, of_files: Mapping[str, str], stored: Mapping[str, StoredTensor], path: Path) -> ExitStack:
    """Give tied parameters that the files have twice, with two values, one each, as transformers does.

    `base` is a model of transformers without values, whose config says that they are one. It says so no more then.
    Returns a stack whose exit ties them again.
    """
    undo = ExitStack()
    sources = {known: stored[name] for name, known in of_files.items()}
    for name, other in (getattr(base, "all_tied_weights_keys", None) or {}).items():
        if name not in sources or other not in sources:
            continue
        mine, theirs = sources[name], sources[other]
        if mine.shape != theirs.shape or same_values(mine, theirs):
            continue
        where, _, own = name.rpartition(".")
        tied = base.get_parameter(name)
        recipe = recipe_of(tied)
        if recipe is None:  # on meta, or still inside of deferred_init, which then records it
            apart = nn.Parameter(torch.empty_like(tied), tied.requires_grad)
        else:
            apart = nn.Parameter(torch.empty(tied.shape, dtype=tied.dtype, device="meta"), tied.requires_grad)
            apart = deferred(apart, tied.requires_grad)
            keep_recipe(apart, recipe)
        undo.callback(setattr, base.get_submodule(where), own, tied)
        setattr(base.get_submodule(where), own, apart)
        for config in (base.config, base.config.get_text_config()):
            undo.callback(setattr, config, "tie_word_embeddings", config.tie_word_embeddings)
            config.tie_word_embeddings = False
        warn_user(
            f"{path} has two values for {name} and {other}, which its config ties: they are two parameters here, as in "
            'transformers. "tie_word_embeddings": false in its config.json says so'
        )
    return undo


_OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$")
"""Buffers that older versions of transformers have saved, and new ones compute."""


class TransformersForm(FileForm):
    """The names and tensors that `save_pretrained` of transformers writes: its conversion mapping backwards.

    A tensor that is only renamed passes. One of a conversion waits for the others of it, so these are in memory.
    """

    def __init__(self, base: Any) -> None:
        """`base`: a model of transformers; its values are not used."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        backwards = [each.reverse_transform() for each in reversed(_conversions(base))]
        self._base = base
        self._renamings = [each for each in backwards if isinstance(each, WeightRenaming)]
        self._converters = [each for each in backwards if isinstance(each, WeightConverter)]
        self._left_out = [re.compile(each) for each in base._keys_to_ignore_on_save or ()]
        self._renamed: dict[str, str] = {}
        self._groups: dict[str, tuple[Conversion, dict[str, TensorEntry]]] = {}
        """By the name of each tensor that is converted, its conversion with all tensors of that."""
        self._waiting: dict[str, torch.Tensor] = {}
        self._left: dict[str, int] = {}
        """Elements that a waiting tensor has not got yet."""

    def entries(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        from transformers.core_model_loading import apply_converters, apply_renamings, dot_natural_key

        by_layer: dict[str, dict[str, str]] = {}
        given = {entry.name: entry for entry in entries}
        tied = getattr(self._base, "all_tied_weights_keys", None) or {}
        for name in given:
            if any(each.search(name) for each in self._left_out):
                continue
            layer, pattern = apply_converters(name, self._converters)
            if pattern is None:
                # A tied tensor is written under the name that it is tied to.
                kept = name if tied.get(name) in given else tied.get(name, name)
                self._renamed[name] = apply_renamings(kept, self._renamings)
            else:
                by_layer.setdefault(layer, {})[name] = pattern
        found = [replace(given[name], name=new) for name, new in self._renamed.items()]
        of_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        for layer, patterns in by_layer.items():
            names: dict[str, list[str]] = {}
            for name in sorted(patterns, key=dot_natural_key):
                names.setdefault(patterns[name], []).append(name)
            conversion = Conversion(of_pattern[next(iter(names))], self._base, layer, names)
            group = {name: given[name] for name in conversion.names}
            self._groups |= dict.fromkeys(group, (conversion, group))
            empty = {each.name: torch.empty(each.shape, dtype=each.dtype, device="meta") for each in group.values()}
            made = self._run(conversion, empty)
            found += [TensorEntry(name, each.dtype, tuple(each.shape)) for name, each in made.items()]
        return found

    def parts(self, name: str, begin: int, values: torch.Tensor) -> Iterable[tuple[str, int, torch.Tensor]]:
        if name in self._renamed:
            return [(self._renamed[name], begin, values)]
        if name not in self._groups:
            return []  # the class leaves it out
        conversion, group = self._groups[name]
        if name not in self._waiting:
            self._waiting[name] = host_empty(group[name].shape, group[name].dtype)
            self._left[name] = self._waiting[name].numel()
        self._waiting[name].view(-1)[begin : begin + values.numel()].copy_(values)
        self._left[name] -= values.numel()
        if any(self._left.get(each, 1) for each in group):
            return []
        made = self._run(conversion, {each: self._waiting.pop(each) for each in group})
        return [(known_as, 0, each.reshape(-1)) for known_as, each in made.items()]

    def _run(self, conversion: Conversion, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import apply_renamings

        return {apply_renamings(name, self._renamings): made for name, made in conversion.run(tensors).items()}


def _conversions(base: Any) -> list[Any]:
    """The conversions that a save of a model of transformers runs backwards."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    # A model that from_pretrained has made says what was converted. If it was dequantized, a way back would quantize it
    # again, or write values under the names of codes: transformers does so.
    loaded: list[Any] | None = getattr(base, "_weight_conversions", None)
    if loaded is not None and vars(base).get("is_quantized") is not False:
        return loaded
    prefixes = [each.source_patterns for each in loaded or () if isinstance(each, PrefixChange)]
    found = get_model_conversion_mapping(base, add_legacy=False)
    return [each for each in found if not isinstance(each, PrefixChange) or each.source_patterns in prefixes]


def file_form(model: Any) -> FileForm:
    """How the files of a model are written: that of its own library."""
    transformers = sys.modules.get("transformers")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if transformers is None or not isinstance(base, transformers.PreTrainedModel):
        return AS_NAMED
    try:
        return TransformersForm(base)
    except (NotImplementedError, ValueError):  # what a quantizer has converted has no way back: it stays as it is
        return AS_NAMED
