"""Hints of a model's config for plans: they are taken where they can be read, and are never an error.

The one reader of configs for plans and limits. A config is a foreign object: an attribute may raise, differ by layer,
or be of any type. A value that cannot be read counts as not said, and one line of `notes` says so. Calls:
`Hints.number` of one config, `ModelHints.of_param` for the configs around a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

LARGEST = 1 << 50
"""No size of a model is as large: it would overflow what is computed of it."""


class Hints:
    """Numbers that one config says, of the text's part of a model that has several."""

    def __init__(self, config: object) -> None:
        self._whole = config
        self._unread: dict[str, str] = {}
        """By name, why it was not understood."""
        self._config = self._text_config()

    def number(self, *names: str, layer: int | None = None) -> int:
        """The first of `names` that is a positive whole number; 0 if none is.

        Of a value that differs by layer it is that of `layer` (from 0), or without one the largest.
        """
        return next((found for name in names if (found := self._number(name, layer))), 0)

    @property
    def notes(self) -> tuple[str, ...]:
        """One line, if something has not been understood so far."""
        if not self._unread:
            return ()
        (first, why), kind = next(iter(self._unread.items())), type(self._whole).__name__
        others = f" (nor {', '.join(list(self._unread)[1:])})" if len(self._unread) > 1 else ""
        return (f"{kind}.{first}{others} is not understood, so widths and seconds are guessed from parameters: {why}",)

    def _text_config(self) -> object:
        if not callable(get := self._read(self._whole, "get_text_config")):
            return self._whole
        for end in ({}, {"decoder": True}):  # without, it raises where both an encoder and a decoder have text
            try:
                return get(**end)
            except Exception as error:
                why = _said(error)
        self._unread["get_text_config"] = why
        return self._whole

    def _number(self, name: str, layer: int | None) -> int:
        own = self._of_layer(layer)
        if isinstance(own, Mapping) and name in own:
            return self._checked(name, own[name], layer)
        where = self._config if own is None or isinstance(own, Mapping) else own
        try:
            value = getattr(where, name, None)
        except Exception as error:
            if layer is None and (count := self._num_layers()):
                return max(self._number(name, each) for each in range(count))  # it differs by layer
            self._unread.setdefault(name, _said(error))
            return 0
        return self._checked(name, value, layer)

    def _checked(self, name: str, value: Any, layer: int | None) -> int:
        if isinstance(value, Mapping):
            value = self._of_kind(value, layer)
        elif isinstance(value, Sequence) and not isinstance(value, str) and value:
            if layer is None:
                return max(self._checked(name, each, None) for each in value)
            value = value[layer] if layer < len(value) else value
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value < LARGEST):
            return max(value or 0, 0)
        self._unread.setdefault(name, f"it is {value!r:.60}")
        return 0

    def _of_layer(self, layer: int | None) -> object | None:
        """The config of one layer: whole, or what differs there; None where there is none."""
        if layer is None:
            return None
        each: Any = self._read(self._config, "per_layer_config")
        found: object = None
        try:
            if isinstance(each, Mapping):
                found = each.get(layer, each.get(str(layer)))
            elif each is not None:
                found = each[layer]
        except Exception:  # of a config without layers, or with fewer
            return None
        return found

    def _of_kind(self, values: Mapping[Any, Any], layer: int | None) -> object:
        """Of values by layer, or by the type of a layer, the one of this layer."""
        types = self._read(self._config, "layer_types")
        kinds = [] if layer is None else [layer, str(layer)]
        if layer is not None and isinstance(types, Sequence) and layer < len(types):
            kinds.append(types[layer])
        if layer is None:
            sizes = [each for each in values.values() if isinstance(each, int)]
            return max(sizes, default=values)
        return next((values[kind] for kind in kinds if kind in values), values)

    def _num_layers(self) -> int:
        count = self._read(self._config, "num_hidden_layers")
        return count if isinstance(count, int) and 0 < count < 1 << 16 else 0

    def _read(self, config: object, name: str) -> object:
        try:
            return getattr(config, name, None)
        except Exception as error:
            self._unread.setdefault(name, _said(error))
            return None


class ModelHints:
    """The configs of a model's modules, by the parameters below them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[str, Hints | None] = {}

    def of_param(self, name: str) -> Iterator[tuple[Hints, int | None]]:
        """Configs of the modules around a parameter, the nearest first, and the number of its layer there.

        A model of several parts has a config for each: a block of a vision tower is not as wide as the text's.
        """
        path = name.split(".")[:-1]
        for end in range(len(path), -1, -1):
            if (hints := self._of_module(".".join(path[:end]))) is not None:
                below = [int(part) for part in path[end:] if part.isdecimal()]
                above = [int(part) for part in path[:end] if part.isdecimal()]
                yield hints, below[0] if below else above[-1] if above else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Parts of the configs that were not understood, each line once."""
        found = (hints.notes for hints in self._found.values() if hints is not None)
        return tuple(dict.fromkeys(note for notes in found for note in notes))

    def _of_module(self, path: str) -> Hints | None:
        if path not in self._found:
            try:
                config: object = getattr(self._model.get_submodule(path), "config", None)
            except Exception:  # a property of any class, or the module of a parameter without memory
                config = None
            self._found[path] = None if config is None else Hints(config)
        return self._found[path]


def _said(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {str(error).partition('. ')[0].splitlines()[0] if str(error) else ''}".rstrip(": ")
