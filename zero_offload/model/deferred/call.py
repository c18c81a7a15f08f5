"""One call of an operator, as torch's dispatcher hands it over: what it reads, writes, draws and returns.

Pure questions about a schema and its arguments; knows nothing of deferred tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten

FILLS = {
    *(aten.normal_, aten.uniform_, aten.random_, aten.exponential_, aten.cauchy_, aten.log_normal_),
    *(aten.geometric_, aten.zero_, aten.fill_, aten.copy_),
}
"""In-place operations whose result does not depend on what was there."""

MOVES_STORAGE = {aten.set_, aten.resize_, aten.resize_as_}


def has_storage(tensor: Tensor) -> bool:
    """Whether its elements lie in one storage, by strides."""
    return tensor.layout is torch.strided and not tensor.is_quantized


class Call:
    """An operator and its arguments."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        if self.func.overloadpacket is aten._to_copy and str(kwargs.get("device")) == "meta":
            # Asked to be where a deferred tensor is: in a plain program that is the CPU.
            self.kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        self.tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.written = self._written()
        """Tensors that it changes."""

    @property
    def name(self) -> str:
        return str(self.func.overloadpacket.__name__)

    def run(self, instead: dict[int, Tensor] | None = None) -> Any:
        """Do it, with other tensors in the place of some, by id."""
        stand_ins = instead or {}

        def real(leaf: Tensor) -> Tensor:
            return stand_ins.get(id(leaf), leaf)

        args, kwargs = tree_map_only(Tensor, real, (self.args, self.kwargs))
        return self.func(*args, **kwargs)

    def _written(self) -> list[Tensor]:
        found = []
        for index, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = self.args[index] if index < len(self.args) else self.kwargs.get(argument.name)
                found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        return found

    @property
    def targets(self) -> Any:
        """What an operation returns that returns what it has changed."""
        num_results = len(self.func._schema.returns)
        return (None, *self.written[:1])[num_results] if num_results < 2 else tuple(self.written)

    @property
    def moves_storage(self) -> bool:
        return self.func.overloadpacket in MOVES_STORAGE

    @property
    def only_renames(self) -> bool:
        """Whether it makes a view, or changes nothing but a tensor's shape: no element is read or written."""
        returns = self.func._schema.returns
        is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        return is_view or (torch.Tag.inplace_view in self.func.tags and not self.moves_storage)

    @property
    def only_casts(self) -> bool:
        """Whether it is a change of dtype on the same device."""
        return self.func.overloadpacket is aten._to_copy and self.kwargs.get("device") is None

    @property
    def gives_tensors(self) -> bool:
        return any("Tensor" in str(result.type) for result in self.func._schema.returns)

    def filled(self) -> list[Tensor]:
        """The tensor whose storage it fills from end to end without reading it, if there is one."""
        if self.func.overloadpacket not in FILLS:
            return []
        target = self.tensors[0]
        if not has_storage(target) or any(_share(target, other) for other in self.tensors[1:]):
            return []
        is_whole = target.is_contiguous() and target.nbytes == target.untyped_storage().nbytes()
        return [target] if is_whole else []

    def generator_state(self) -> Tensor | None:
        """Of the generator that it draws from."""
        given = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Generator)]
        if given:
            return given[0].get_state()
        draws = torch.Tag.nondeterministic_seeded in self.func.tags
        return torch.get_rng_state() if draws else None


def _share(tensor: Tensor, other: Tensor) -> bool:
    return has_storage(other) and tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
