"""The inputs of a forward that will be run again: what is kept of them, and how they come back.

Owns nothing but them. The calls: `Boundary` when the forward begins, `keep` when it first saves a tensor (a forward
that saves none is never run again), `restore` in backward. Floating tensors pass through the saved-tensor hooks that
were in place around the forward, so hooks that store or recompute tensors have them too. Everything else, and
parameters, is kept as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.runtime.ranks.group import all_gather
from zero_offload.runtime.saved.tensors import KEPT_AS_IT_IS, SavingHooks, Unpack, VersionCheck

Group = dist.ProcessGroup


class _Kept(NamedTuple):
    """One tensor among the inputs."""

    packed: Any
    """What the hooks made of it, or of this rank's part."""
    unpack: Unpack
    check: VersionCheck
    requires_grad: bool
    parted: torch.Size | None
    """Its shape, if the ranks of a group have a part each."""


class Boundary:
    """The arguments of one forward."""

    def __init__(self, arguments: tuple[Any, ...], outer: SavingHooks | None, group: Group | None, label: str) -> None:
        """`outer` are the hooks around the forward; every rank of `group` has equal inputs."""
        self._leaves, self._tree = tree_flatten(arguments)
        self._outer = KEPT_AS_IT_IS if outer is None else outer
        self._group = group
        self._label = label
        self._checks = {i: VersionCheck(leaf) for i, leaf in enumerate(self._leaves) if _is_kept(leaf)}

    @property
    def device_types(self) -> set[str]:
        return {"cpu", *(leaf.device.type for leaf in self._leaves if isinstance(leaf, Tensor))}

    def keep(self) -> None:
        """Let go of the inputs themselves."""
        for index, check in self._checks.items():
            self._check(check)
            self._leaves[index] = self._keep(self._leaves[index], check)

    def restore(self) -> Any:
        """The arguments, their tensors detached from the graph."""
        leaves = [self._restore(leaf) if isinstance(leaf, _Kept) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._tree)

    def _keep(self, tensor: Tensor, check: VersionCheck) -> _Kept:
        requires_grad, parted = tensor.requires_grad, None
        # Put together again it is contiguous: what was laid out otherwise would not be what it was.
        if self._group is not None and tensor.is_floating_point() and tensor.is_contiguous() and tensor.numel():
            parted, tensor = tensor.shape, _part_of(tensor, self._group)
        pack, unpack = self._outer if tensor.is_floating_point() else KEPT_AS_IT_IS
        return _Kept(pack(tensor), unpack, check, requires_grad, parted)

    def _restore(self, kept: _Kept) -> Tensor:
        self._check(kept.check)
        tensor = kept.unpack(kept.packed)
        if kept.parted is not None:
            assert self._group is not None
            tensor = _whole(tensor, kept.parted, self._group)
        return tensor.detach().requires_grad_(kept.requires_grad)

    def _check(self, check: VersionCheck) -> None:
        if check.changed:
            raise ZeroOffloadError(
                f"an input of {self._label}, {check}, so its forward cannot be run again as it was. "
                "Leave out the change in place, or do not mark this module with zo.checkpoint"
            )


def _is_kept(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)


def _part_of(tensor: Tensor, group: Group) -> Tensor:
    """(k,), a copy of this rank's part of the elements; parts are equally long, the last ones padded with zeros."""
    numel = -(-tensor.numel() // group.size())
    part = tensor.detach().new_zeros(numel)
    mine = tensor.detach().view(-1)[group.rank() * numel : (group.rank() + 1) * numel]
    part[: mine.numel()] = mine
    return part


def _whole(part: Tensor, shape: torch.Size, group: Group) -> Tensor:
    """All ranks' parts together. Collective."""
    whole = part.new_empty(part.numel() * group.size())
    # Bytes, since not every backend gathers every dtype.
    all_gather(whole.view(torch.uint8), part.contiguous().view(torch.uint8), group=group)
    return whole[: shape.numel()].view(shape)
