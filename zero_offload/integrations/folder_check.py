"""Checks what a Hugging Face folder lacks before `from_pretrained` can load it, as `zero-offload verify` tells.

Owns the list of required parts. They are a config, weights that are whole by their headers and index, and each tensor
of the model that the config names. A model of words needs a tokenizer too. Reads headers and JSON only, and writes
nothing. transformers is imported if it is there; without it tensors are not compared with the model. The call:
`check_folder`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.checkpoint.hf_files import INDEX_NAME, SINGLE_NAME, StoredTensor, converts, open_weights
from zero_offload.integrations.file_names import transformers_names
from zero_offload.integrations.generation_models import config_model
from zero_offload.integrations.pretrained import state_names
from zero_offload.storage.files.system import read_file

CONFIG_NAME, ADAPTER_CONFIG_NAME, ADAPTER_NAME = "config.json", "adapter_config.json", "adapter_model.safetensors"
TOKENIZER_NAMES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
"""One of these is a tokenizer."""
_SHOWN = 5


@dataclass(frozen=True)
class FolderVerdict:
    """The result for one folder."""

    num_tensors: int
    nbytes: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    """Parts that could not be compared."""


def is_model_folder(path: Path) -> bool:
    """True if a folder has, or should have, a model for from_pretrained."""
    names = (CONFIG_NAME, ADAPTER_CONFIG_NAME, ADAPTER_NAME, SINGLE_NAME, INDEX_NAME)
    return any((path / name).is_file() for name in names) or any(path.glob("model-*-of-*.safetensors"))


def check_folder(path: Path) -> FolderVerdict:
    """Raises nothing for a folder that is damaged: that is a problem of it."""
    problems: list[str] = []
    notes: list[str] = []
    is_adapter = (path / ADAPTER_CONFIG_NAME).is_file() or (path / ADAPTER_NAME).is_file()
    config = _read_object(path, ADAPTER_CONFIG_NAME if is_adapter else CONFIG_NAME, problems)
    weights = path / ADAPTER_NAME if is_adapter else path
    num_tensors = nbytes = 0
    try:
        with open_weights(weights) as stored:
            num_tensors = len(stored)
            nbytes = sum(file.stat().st_size for file in {each.path for each in stored.values()})
            if config is not None and not is_adapter:
                problems += _against_model(path, config, stored, notes)
    except ZeroOffloadError as error:
        problems.append(str(error))
    if is_adapter and config is not None and not config.get("base_model_name_or_path"):
        notes.append(f"{ADAPTER_CONFIG_NAME} does not name the model that the adapters belong to")
    if (
        config is not None
        and not is_adapter
        and config.get("model_type")
        and _has_words(config)
        and not _has_tokenizer(path)
    ):
        problems.append(f"no tokenizer (none of {', '.join(TOKENIZER_NAMES)}): tokenizer.save_pretrained writes it")
    return FolderVerdict(num_tensors, nbytes, tuple(problems), tuple(notes))


def _has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in TOKENIZER_NAMES)


def _has_words(config: dict[str, Any]) -> bool:
    text = config.get("text_config")
    return "vocab_size" in (text if isinstance(text, dict) else config)


def _read_object(path: Path, name: str, problems: list[str]) -> dict[str, Any] | None:
    try:
        words = json.loads(read_file(path / name))
    except FileNotFoundError:
        problems.append(f"no {name}, so nothing says what model it is")
        return None
    except (OSError, ValueError, RecursionError, ZeroOffloadError) as error:
        problems.append(f"{name} cannot be read: {error}")
        return None
    if not isinstance(words, dict):
        problems.append(f"{name} holds no settings: it is a {type(words).__name__}")
        return None
    return words


def _against_model(
    path: Path, config: dict[str, Any], stored: Mapping[str, StoredTensor], notes: list[str]
) -> Iterator[str]:
    """Tensors of the model that the config names and that the files lack."""
    classes = config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    if not config.get("model_type") and {"num_layers", "width", "seq_max"} <= config.keys():
        notes.append(
            "it is of `zero-offload train`, for whose model transformers has no class: zo.load_pretrained loads it"
        )
        return
    if not config.get("model_type"):
        yield f"{CONFIG_NAME} has no model_type, so from_pretrained does not know its class"
        return
    try:
        import transformers
    except ImportError:
        notes.append("transformers is not installed: tensors were not compared with the model of the config")
        return
    # A class that is missing here, or quantized weights, cannot be compared: notes, not problems.
    kind: Any = getattr(transformers, name, None)
    if kind is None:
        notes.append(
            f"transformers {transformers.__version__} has no class {name!r}: tensors were not compared with it"
        )
        return
    if config.get("quantization_config"):
        notes.append("its weights are quantized: tensors were not compared with the model of the config")
        return
    try:
        with torch.device("meta"):
            model = config_model(kind, config)
        of_files, made = transformers_names(model, state_names(model), stored, path)
    except ZeroOffloadError as error:
        yield str(error)
        return
    except Exception as error:  # whatever a class makes of a config
        yield f"{CONFIG_NAME} does not make a {name}: {type(error).__name__}: {error}"
        return
    # A tied tensor is there under any of its names.
    there = {*of_files.values(), *made}
    state = dict(model.state_dict(keep_vars=True))
    tied: dict[int, list[str]] = {}
    for each, tensor in state.items():
        tied.setdefault(id(tensor), []).append(each)
    missing = [names[0] for names in tied.values() if there.isdisjoint(names)]
    if missing:
        yield f"{len(missing)} tensors of {name} are in no file: {_few(missing)}"
    shapes = {new: stored[old].shape for old, new in of_files.items()}
    others = [each for each, shape in shapes.items() if each in state and tuple(shape) != tuple(state[each].shape)]
    if others:
        shown = [f"{each} {list(shapes[each])}, not {list(state[each].shape)}" for each in others]
        yield f"{len(others)} tensors have another shape than in {name}: {_few(shown)}"
    codes = {
        new: stored[old].dtype_name
        for old, new in of_files.items()
        if new in state and not converts(stored[old].dtype, state[new].dtype)
    }
    if codes:
        shown = [f"{each} {dtype}" for each, dtype in codes.items()]
        yield (
            f"{len(codes)} tensors hold codes, and {CONFIG_NAME} has no quantization_config: {_few(shown)}. Write the "
            "model by zo.export_pretrained"
        )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
