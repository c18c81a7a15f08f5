"""A parameter's gradient that backward makes slice by slice, along its first dimension.

`WholeGrad` is one tensor on the compute device. `GradSlices` sends each slice of a GPU to host memory when it is made.
Autograd then gets a `SlicedGrad`: a tensor without memory, which it only passes on to the parameter. So hooks, sums and
`inputs=` are autograd's in both cases. Where an operation needs its elements, as the sum of two gradients of one
parameter does, it comes back to the GPU whole. The calls: `put` for each slice, then `finish`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zero_offload.storage.shards.grad_downloads import GradDownloads, StagedGrad


class WholeGrad:
    """A gradient of `num_slices` slices on the compute device; those that are not put are zeros."""

    def __init__(self, num_slices: int, like: Tensor) -> None:
        """`like` is a slice, (1, ...)."""
        self._whole = like.new_zeros((num_slices, *like.shape[1:]))

    def put(self, index: int, values: Tensor) -> None:
        """`values`, (1, ...), are slice `index`."""
        self._whole[index : index + 1] = values

    def finish(self) -> Tensor:
        """The gradient, (num_slices, ...)."""
        return self._whole


class GradSlices:
    """A gradient that leaves a GPU slice by slice. The calls are those of `WholeGrad`."""

    def __init__(self, num_slices: int, like: Tensor, downloads: GradDownloads) -> None:
        self._downloads = downloads
        self._device = like.device
        self._staged = downloads.open((num_slices, *like.shape[1:]), like.dtype)

    def put(self, index: int, values: Tensor) -> None:
        self._downloads.send(self._staged, index * values.numel(), values.reshape(-1))

    def finish(self) -> Tensor:
        return SlicedGrad.of(_Content(self._staged, self._downloads, self._device))


class _Content:
    """The common content of a gradient's tensors, which autograd may detach from one another."""

    def __init__(self, staged: StagedGrad, downloads: GradDownloads, device: torch.device) -> None:
        self.staged, self.device = staged, device
        self._downloads = downloads
        self._whole: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """True if it is on the GPU again, and maybe changed there."""
        return self._whole is not None

    def whole(self) -> Tensor:
        if self._whole is None:
            self._whole = self._downloads.upload(self.staged)
        return self._whole


class SlicedGrad(Tensor):
    """A gradient in staging."""

    __slots__ = ("_content",)

    _content: _Content
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(content: _Content) -> SlicedGrad:
        values, make = content.staged.values, Tensor._make_wrapper_subclass
        grad: SlicedGrad = make(SlicedGrad, values.size(), dtype=values.dtype, device=content.device)
        grad._content = content
        return grad

    def take_staged(self) -> StagedGrad | None:
        """The gradient in staging, for the step; None if it is on the GPU again."""
        if self._content.is_whole:
            return None
        self._content.staged.taken = True
        return self._content.staged

    def whole(self) -> Tensor:
        """The gradient on the GPU."""
        return self._content.whole()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return SlicedGrad.of(args[0]._content)
        args, kwargs = tree_map_only(SlicedGrad, SlicedGrad.whole, (args, kwargs or {}))
        return func(*args, **kwargs)
