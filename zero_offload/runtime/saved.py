"""Tensors that autograd saves in a model's forward: which are views of parameters, and who is told when they are read.

Owns the saved-tensor hooks. Never moves bytes: before a view of a unit's buffer is given back, its unit is asked for.
Who is asked is known to the graph, not here: a cycle would keep a dropped model until the garbage collector comes by.
Hooks of the user's, around the forward or inside of it, get every other tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from zero_offload.runtime.unit import Unit

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
SavingHooks = tuple[Pack, Unpack]
Use = Callable[[Unit], None]
"""Brings a unit that a backward is about to read."""


class Saved(NamedTuple):
    """A tensor that autograd saved, the version it had, and the unit whose buffer it views."""

    tensor: Tensor
    version: int
    unit: Unit | None


class SavedByUser(NamedTuple):
    """What the user's own hooks made of a tensor, and how they give it back."""

    packed: Any
    unpack: Unpack


def _saving_hooks() -> SavingHooks | None:
    """The hooks that saved tensors pass through now."""
    hooks: SavingHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def _recomputed_later(hooks: SavingHooks | None) -> bool:
    """Whether they are those of torch.utils.checkpoint, which saves nothing and runs its forward again in backward."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__


class SavedTensors:
    """Packs and unpacks what the forwards of one model save."""

    def __init__(self, units: Sequence[Unit]) -> None:
        # A view shares its base's storage object, whether memory is under it or not.
        self._unit_of_storage = {s.flat.untyped_storage()._cdata: unit for unit in units for s in unit.sections}

    def hooks(self, use: Use) -> saved_tensors_hooks | None:
        """For a forward that begins: entered hooks, unless ours are in place or nothing is saved."""
        hooks = _saving_hooks()
        if not torch.is_grad_enabled() or self._is_ours(hooks) or _recomputed_later(hooks):
            return None
        entered = saved_tensors_hooks(partial(self._pack, hooks), partial(self._unpack, use))
        entered.__enter__()
        return entered

    def unit_of(self, tensor: Tensor) -> Unit | None:
        """The unit whose buffer the tensor views."""
        if tensor.layout is not torch.strided:
            return None
        return self._unit_of_storage.get(tensor.untyped_storage()._cdata)

    def _save_in_backward(self, use: Use) -> None:
        """The node that runs now saves what it uses, for a backward through it (create_graph=True)."""
        hooks = _saving_hooks()
        if not self._is_ours(hooks) and not _recomputed_later(hooks):
            # Never popped: autograd gives every node the hooks of the thread that called backward.
            unpack = partial(self._unpack, use)
            torch._C._autograd._push_saved_tensors_default_hooks(partial(self._pack, hooks), unpack)

    def _is_ours(self, hooks: SavingHooks | None) -> bool:
        return hooks is not None and getattr(hooks[0], "func", None) == self._pack

    def _pack(self, users: SavingHooks | None, tensor: Tensor) -> Saved | SavedByUser:
        unit = self.unit_of(tensor)
        if unit is None and users is not None:
            return SavedByUser(users[0](tensor), users[1])
        # Detached: a node that saved its own output would hold itself in memory through it.
        return Saved(tensor.detach(), tensor._version, unit)

    def _unpack(self, use: Use, saved: Saved | SavedByUser) -> Tensor:
        if isinstance(saved, SavedByUser):
            return saved.unpack(saved.packed)
        # Autograd leaves this check to whoever packs.
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {tuple(saved.tensor.shape)} is at version "
                f"{saved.tensor._version}, backward expected version {saved.version}. An optimizer step "
                "between a forward and its backward does this too"
            )
        if saved.unit is not None:
            use(saved.unit)
            if torch.is_grad_enabled():
                self._save_in_backward(use)
        return saved.tensor
