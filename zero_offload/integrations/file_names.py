"""Names of a model's parameters in the files of a Hugging Face folder, and which of them are one parameter there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_offload.base.errors import CheckpointError, ConfigError


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


@dataclass(frozen=True)
class FileNames:
    """Names of a model's parameters and buffers in a folder's files."""

    known: Mapping[str, str] | None = None
    """The model's name of each tensor in the files; others are not read. None: the files' names behind `prefix`."""
    fresh: frozenset[str] = frozenset()
    """The model's names that may be in no file: they keep their values, or get them from their initialization."""
    prefix: str = ""
    joined: Mapping[str, Joined] = field(default_factory=dict)
    """By the model's name, with `known`: what the files have in parts."""
    adapter: AdapterFile | None = None


def transformers_names(
    base: Any,
    known: Iterable[str],
    stored: Iterable[str],
    path: Path,
    is_left: Callable[[str], bool] = lambda name: False,
) -> tuple[dict[str, str], dict[str, Joined]]:
    """As transformers renames and joins the tensors of a folder's files: names by those in the files, and what is
    joined by its name.

    `base` is a model of transformers, `known` has its names, `stored` those in the files. Of names that the model does
    not have, those for which `is_left` is true are left out, and buffers that old versions wrote. Raises
    CheckpointError where parts are missing, ConfigError for tensors that transformers makes from others in another way.
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
            new, pattern = rename_source_key(name, [], [], prefix, known)
        if pattern is not None:
            parts.setdefault(new, {}).setdefault(pattern, []).append(name)
        elif new in known or not (is_left(new) or any(old.search(new) for old in ignored)):
            of_files[name] = new
    return of_files, {new: _joined(path, of_pattern[next(iter(found))], found) for new, found in parts.items()}


def _joined(path: Path, converter: Any, found: Mapping[str, Sequence[str]]) -> Joined:
    """How the tensors of the files, by the converter's patterns, make one of the model."""
    steps = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
    columns = [found.get(pattern, []) for pattern in converter.source_patterns]
    if steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        if len({len(each) for each in columns}) > 1:
            counts = ", ".join(f"{len(each)} of {each[0]}" if each else "0" for each in columns)
            raise CheckpointError(f"{path} lacks experts: {counts} and its like; get the folder again")
        return Joined(tuple(name for entry in zip(*columns, strict=True) for name in entry), len(columns))
    elif steps == [("Concatenate", 0)]:
        return Joined(tuple(name for column in columns for name in column), None)
    what = " and ".join(name for name, _ in steps)
    raise ConfigError(
        f"{path} has {columns[0][0] if columns[0] else converter.source_patterns[0]}, which transformers "
        f"converts ({what}) in a way that is not streamed. Write the folder as it is loaded, once, where memory holds "
        f'the model: python -c "from transformers import AutoModelForCausalLM as A; '
        f"A.from_pretrained('{path}').save_pretrained('{path}-new', save_original_format=False)\""
    )


_OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$")
"""Buffers that older versions of transformers have saved, and new ones compute."""
