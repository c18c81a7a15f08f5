"""Which runtime a parameter belongs to, or how its values will be made: the only module-level state of parameters.

`sources.py` lists what may be asked of an `Owner`. Nothing is ever hung on a parameter or a module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.plan.quantized import is_wrapper
from zero_offload.standins.sources import Owner


class AtRest:
    """The class of a parameter at rest is a subclass; see guard.py."""

    __slots__ = ()


class RecipeSource(Protocol):
    """A tensor of files: one, or several that are joined."""

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end): (end - begin,) of the file's dtype, host. Raises StorageError."""


class Recipe(Protocol):
    """How the values of a parameter on meta are made."""

    @property
    def is_skipped(self) -> bool:
        """True if they were left out."""

    @property
    def value(self) -> object | None:
        """None where `make` cannot make them."""

    @property
    def source(self) -> RecipeSource | None:
        """The tensor of files that has the values, in row-major order; None where they are computed."""

    def drawn(self) -> bytes:
        """Digests of the generators that the values are drawn from: with the program they determine the values."""

    def make(self) -> torch.Tensor:
        """The values, a new tensor of the parameter's shape, host."""


_entries: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
"""By id, a parameter and a weak reference to its owner, which the model's hooks keep alive; before that, its recipe.

Each operation on a parameter at rest asks. torch's WeakIdKeyDictionary takes five calls of Python to answer."""


_owners: dict[int, weakref.ref[Owner]] = {}
"""By id, each runtime that is alive: a step asks for the others."""


_REMOVED = object()
"""In the place of an owner: the model that offloaded the parameter has it no more."""


def _found(param: torch.Tensor) -> Any:
    entry = _entries.get(id(param))
    return None if entry is None or entry[0]() is not param else entry[1]


def _keep(param: torch.Tensor, found: Any) -> None:
    # With the parameter its entry goes. The callback is a method of C: Python drops what a signal's handler raises in
    # one of its own.
    _entries[id(param)] = weakref.ref(param, partial(_entries.pop, id(param))), found


def owner_of(param: torch.Tensor) -> Owner | None:
    """The runtime that offloads `param`, or None."""
    entry = _entries.get(id(param))
    if entry is None or entry[0]() is not param:
        return None
    found: Owner | None = entry[1]() if isinstance(entry[1], weakref.ref) else None
    return found


def describe(param: nn.Parameter) -> str:
    """Where a parameter rests, for messages."""
    owner = owner_of(param)
    return "a parameter" if owner is None else owner.places.describe(param)


def by_owner(params: Iterable[nn.Parameter]) -> dict[Owner | None, list[nn.Parameter]]:
    """Parameters by the runtime that offloads them, under None the ordinary ones. Each once, in the order given.

    Left out are parameters that have neither gradients nor states: quantized ones, which consist of others, and those
    that their model has no more.
    """
    grouped: dict[Owner | None, list[nn.Parameter]] = {}
    for param in dict.fromkeys(params):
        # As `owner_of`, without a call: a step groups its parameters five times.
        entry = _entries.get(id(param))
        found = entry[1] if entry is not None and entry[0]() is param else None
        owner: Owner | None = found() if isinstance(found, weakref.ref) else None
        if owner is None:
            if found is _REMOVED:
                continue
        elif hasattr(type(param), "__tensor_flatten__") and is_wrapper(param):
            continue
        grouped.setdefault(owner, []).append(param)
    return grouped


def live_owners() -> list[Owner]:
    """The runtimes of this process, closed ones too."""
    # A copy in one call: a collection of garbage on the way would take entries out under an iterator.
    return [owner for ref in _owners.copy().values() if (owner := ref()) is not None]


def check_adopted(call: str, params: Iterable[nn.Parameter]) -> None:
    """Raise ConfigError if some of these are trained parameters that an offloaded model has got since `zo.offload`."""
    ordinary = {id(param) for param in by_owner(params).get(None, ()) if param.requires_grad}
    if not ordinary:
        return
    for owner in live_owners():
        added = owner.added_since()
        if names := [name for param, name in added.items() if id(param) in ordinary]:
            raise not_adopted(call, names)


def not_adopted(call: str, names: Sequence[str]) -> ConfigError:
    """The error for `call`: these parameters of an offloaded model are not adopted."""
    some = ", ".join([*names[:3], *([f"and {len(names) - 3} more"] if len(names) > 3 else [])])
    return ConfigError(
        f"{call}: {len(names)} trained parameters were added to the model after zo.offload ({some}). No rank reduces "
        "their gradients, and no generation keeps them. Call zo.offload(model) again, which adopts them, and then this"
    )


def is_dropped(param: nn.Parameter) -> bool:
    """True if the model that offloaded `param` is gone, and with it the values."""
    found = _found(param)
    return isinstance(found, weakref.ref) and found() is None


def note_removed(param: nn.Parameter) -> None:
    """The model that offloaded `param` has it no more, and no values of it."""
    _keep(param, _REMOVED)


def is_removed(param: torch.Tensor) -> bool:
    return _found(param) is _REMOVED


def dropped_error(param: nn.Parameter) -> ZeroOffloadError:
    if param.is_meta:
        return ZeroOffloadError(
            f"a parameter of shape {tuple(param.shape)} of an offloaded model has no values in this process: a process "
            "that is started gets the model's modules alone. Send it what it needs: values (.clone()), or results"
        )
    return ZeroOffloadError(
        f"a parameter of shape {tuple(param.shape)} belonged to an offloaded model that was dropped, or was in no "
        "module of it when zo.offload was called again. zo.offload has put another of its name in its place, or let it "
        "go. Its values are gone. Keep a reference to the model while its parameters or its optimizer are used"
    )


def register(param: nn.Parameter, owner: Owner) -> None:
    if id(owner) not in _owners:
        _owners[id(owner)] = weakref.ref(owner, partial(_owners.pop, id(owner)))
    _keep(param, weakref.ref(owner))


def unregister(param: torch.Tensor) -> None:
    _entries.pop(id(param), None)


def recipe_of(param: torch.Tensor) -> Recipe | None:
    """How the values of `param` are made, where `deferred_init` has left that to `offload`."""
    found = _found(param)
    recipe: Recipe | None = None if isinstance(found, weakref.ref) or found is _REMOVED else found
    return recipe


def keep_recipe(param: torch.Tensor, recipe: Recipe) -> None:
    _keep(param, recipe)
