"""A generation's model as a folder for `from_pretrained`, without the script that trained it.

Owns the objects that are made of "about" in a manifest. These are a config whose words are those of the weights, and
the model on meta, which knows peft's names and merges. Values are read piece by piece; of layers that are merged one is
in memory. transformers and peft are imported where a model is asked for. The calls: `config_words`, `meta_model`; then
`write_separate` or `write_merged` for a model with adapters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_offload.base.errors import CapacityError, CheckpointError, ConfigError
from zero_offload.base.host import host_empty
from zero_offload.checkpoint.hf_export import FolderWriter, TensorEntry, new_folder, plan_files, written_dtype
from zero_offload.checkpoint.saved_generation import SavedGeneration
from zero_offload.integrations.adapter_kinds import BASE_INITS, FILE_INITS, plain_init
from zero_offload.integrations.file_names import file_form
from zero_offload.integrations.peft import base_names, merge_layer, merged_tensors, write_adapters
from zero_offload.integrations.pretrained import saved_tensors, usual_dtype
from zero_offload.plan.layout import CHUNK_NUMEL, ParamSlice, SectionLayout
from zero_offload.storage.memory.heap import trim_heap

_OF_TRAINING = ("use_cache",)
"""Words of a config that a training sets for itself; without them a class has its own."""


Complete = Callable[[Path, Sequence[TensorEntry]], None]
"""Writes what belongs beside the weights into their folder, before it gets its name."""


def config_words(about: Mapping[str, Any], entries: Iterable[TensorEntry]) -> dict[str, Any]:
    """`config.json` beside these tensors: their usual dtype, and a tie only where one of its ends is written."""
    entries = list(entries)
    words = {name: value for name, value in about["config"].items() if name not in _OF_TRAINING}
    words["architectures"] = [about["class"]]
    words.pop("torch_dtype", None)
    if (dtype := usual_dtype(entries)) is not None:
        words["dtype"] = str(dtype).removeprefix("torch.")
    written = {entry.name for entry in entries}
    if words.get("tie_word_embeddings") and any(name in written for name in _tied_names(about)):
        words["tie_word_embeddings"] = False
    return words


def _tied_names(about: Mapping[str, Any]) -> list[str]:
    """Names that files of this class lack where they are tied."""
    try:
        return [*(getattr(_class_of(about), "_tied_weights_keys", None) or ())]
    except (ConfigError, CapacityError):
        return ["lm_head.weight"]


def _class_of(about: Mapping[str, Any]) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise CapacityError(
            "transformers knows the model's classes, and is missing: pip install transformers"
        ) from error
    found = getattr(transformers, str(about.get("class")), None) if about.get("package") == "transformers" else None
    if found is None:
        raise ConfigError(
            f"the model is a {about.get('class', 'class that its generation does not name')}, which transformers "
            f"{transformers.__version__} does not have"
        )
    return found


def meta_model(about: Mapping[str, Any]) -> nn.Module:
    """The model with its adapters, on meta. Raises ConfigError where transformers or peft have no such classes."""
    kind = _class_of(about)
    with torch.device("meta"):
        base = config_model(kind, about["config"])
        return _with_adapters(base, about["adapters"]) if about.get("adapters") else base


def config_model(kind: Any, words: Mapping[str, Any]) -> Any:
    """A model of a class of transformers by the words of its config."""
    return kind._from_config(kind.config_class.from_dict(_with_floats(words)))


def _with_floats(words: Any) -> Any:
    """A config's words with numbers for the objects that transformers writes for infinite ones."""
    if isinstance(words, Mapping):
        number = words.get("__float__") if len(words) == 1 else None
        return {key: _with_floats(value) for key, value in words.items()} if number is None else float(number)
    return [_with_floats(each) for each in words] if isinstance(words, list) else words


def _with_adapters(base: Any, adapters: Mapping[str, Mapping[str, Any]]) -> nn.Module:
    try:
        from peft import PeftType, get_peft_model
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    except ImportError as error:
        raise CapacityError("peft knows the model's adapters, and is missing: pip install peft") from error
    model: Any = None
    for name, words in adapters.items():
        config: Any = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(words["peft_type"])](**words)
        base.name_or_path = words.get("base_model_name_or_path") or ""  # what peft writes into the adapter's folder
        with plain_init(config):
            if model is None:
                model = get_peft_model(base, config, adapter_name=name)
            else:
                model.add_adapter(name, config)
        config.modules_to_save = words.get("modules_to_save")  # peft has put its own there once more
    return model  # type: ignore[no-any-return]


class GenerationValues:
    """Parameters of a generation, by their names."""

    def __init__(self, saved: SavedGeneration, read: Any) -> None:
        self._read = read
        self.places = {piece.spec.name: (section, piece) for section in saved.sections for piece in section.params}
        self._where = str(saved.generation)

    def dtype(self, name: str) -> torch.dtype:
        section: SectionLayout = self._place(name)[0]
        return section.dtype

    def _place(self, name: str) -> tuple[SectionLayout, ParamSlice]:
        if name not in self.places:
            raise CheckpointError(
                f"{self._where} has no parameter {name!r}, which transformers and peft make from the generation's "
                "config. Export the model in the script that trained it: zo.export_pretrained(model, path)"
            )
        return self.places[name]

    def check_mergeable(self, name: str, param: torch.Tensor) -> None:
        """Raise ConfigError for a weight that is not as the model's class has it, but quantized."""
        section, piece = self._place(name)
        if tuple(piece.spec.shape) != tuple(param.shape) or not section.dtype.is_floating_point or piece.spec.held_by:
            raise ConfigError(
                f"adapters are not merged into quantized weights ({name}), which would be quantized again. Export with "
                "--adapters separate, and merge into the weights as they were before"
            )

    def chunks(self, name: str, dtype: torch.dtype | None) -> Iterable[tuple[int, torch.Tensor]]:
        """(first element, values), in `dtype` or the compute dtype, or in a wider one."""
        section, piece = self._place(name)
        for begin in range(piece.begin, piece.end, CHUNK_NUMEL):
            yield begin - piece.begin, self._read(section, (begin, min(begin + CHUNK_NUMEL, piece.end)), dtype)

    def whole(self, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        section, piece = self._place(name)
        out = host_empty(piece.spec.shape, written_dtype(section.dtype, dtype))
        for begin, values in self.chunks(name, dtype):
            out.view(-1)[begin : begin + values.numel()].copy_(values)
        return out


def write_separate(
    values: GenerationValues,
    about: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    path: Path,
    dtype: torch.dtype | None,
    complete: Complete,
) -> int:
    """Adapters as peft writes them, to a new folder; returns the number of their tensors.

    Raises ConfigError for an adapter that has left other weights of the base than its load will make.
    """
    for name, words in about["adapters"].items():
        init = words.get("init_lora_weights", True)
        if init not in (*FILE_INITS, *BASE_INITS):
            raise ConfigError(
                f"adapter {name!r} has init_lora_weights={init!r}, which has changed the base's weights, and an "
                "adapter's folder does not have that change. Export with --adapters merged"
            )
    model = meta_model(about)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    base_name = base_names(model)
    num_uses = Counter(map(base_name, names))
    own = [name for name in names if base_name(name) is None or num_uses[base_name(name)] > 1]
    read = {name: values.whole(name, dtype) for name in own}
    with new_folder(path) as folder:
        write_adapters(model, read | dict(buffers), lambda name: values.whole(name, dtype), folder)
        complete(folder, [])
    return len(own)


def write_merged(
    values: GenerationValues,
    about: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    path: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    complete: Complete,
) -> int:
    """The base with its adapters merged into it, to a new folder; returns the number of tensors."""
    model = meta_model(about)
    name_of = {id(param): name for name, param in model.named_parameters()}
    entries: dict[int, TensorEntry] = {}
    layers: dict[str, nn.Module] = {}
    merged: dict[str, int] = {}
    kept: dict[TensorEntry, torch.Tensor] = {}
    # Entries of all tensors by peft's structure of the model, which has no values.
    for name, tensor, place in merged_tensors(model, saved_tensors):
        if not isinstance(tensor, nn.Parameter):
            source = next((each for each in buffers if each == name or each.endswith(f".{name}")), None)
            if source is not None:
                kept[TensorEntry(name, buffers[source].dtype, tuple(buffers[source].shape))] = buffers[source]
            continue
        values.check_mergeable(name_of[id(tensor)], tensor)
        entry = TensorEntry(name, written_dtype(values.dtype(name_of[id(tensor)]), dtype), tuple(tensor.shape))
        entries.setdefault(id(tensor), entry)
        if place is not None:
            layers.setdefault(*place)
            merged[name] = id(tensor)
    # Unmerged values go through in chunks, then layers to merge one at a time: one layer is in memory.
    form = file_form(model)
    written = form.entries([*entries.values(), *kept])
    with new_folder(path) as folder, FolderWriter(folder, plan_files(written, max_shard_bytes), form) as writer:
        for key in entries.keys() - set(merged.values()):
            for begin, part in values.chunks(name_of[key], dtype):
                writer.write(entries[key].name, begin, part.to(entries[key].dtype))
        for layer_name, layer in layers.items():
            own = dict(layer.named_parameters())
            read = {
                id(param): nn.Parameter(
                    values.whole(name_of[id(param)], None if dtype is None else torch.float32), requires_grad=False
                )
                for param in own.values()
            }
            for name, left in merge_layer(layer, read).items():
                entry = entries[merged[f"{layer_name}.{name}"]]
                if left.shape != entry.shape:
                    raise ConfigError(f"peft makes {entry.name}, {list(entry.shape)}, one of {list(left.shape)}")
                writer.write(entry.name, 0, left.to(entry.dtype).reshape(-1))
            trim_heap()
        for entry, buffer in kept.items():
            writer.write(entry.name, 0, buffer.reshape(-1))
        writer.finish()
        complete(folder, [*entries.values(), *kept])
    return len(written)
