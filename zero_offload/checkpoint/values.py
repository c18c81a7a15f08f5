"""A shard's components as numbers people know: fp32 masters and moments, whatever the compute dtype.

Reads copy out, writes replace whole shards through `ShardStore.write_components`. Host memory only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from zero_offload.kernels.master import join_master, split_master
from zero_offload.plan.layout import ParamSlice
from zero_offload.shards.shard import Component, Shard, component_dtype
from zero_offload.shards.store import ShardStore

FillMaster = Callable[[int, int, torch.Tensor], None]
"""fill(begin, end, out): write the values of shard elements [begin, end) into `out`, (end - begin,)."""


def read_master(store: ShardStore, shard: Shard) -> torch.Tensor:
    """(shard_numel,) fp32 master of a trainable shard, or the value of a frozen one; a copy."""
    value = store.read_component(shard, Component.VALUE)
    if not shard.layout.trainable or shard.layout.dtype == torch.float32:
        return value.clone()
    master = torch.empty(shard.layout.shard_numel, dtype=torch.float32)
    residual = store.read_component(shard, Component.RESIDUAL)
    join_master(value.contiguous(), residual.contiguous(), master)
    return master


class ComponentSource:
    """Feeds `write_components`: values from `fill`, moments from `moments` or zero."""

    def __init__(self, shard: Shard, fill: FillMaster, moments: Mapping[Component, torch.Tensor] | None = None) -> None:
        """`moments` maps EXP_AVG and EXP_AVG_SQ to (shard_numel,) fp32."""
        self._shard = shard
        self._fill = fill
        self._moments = moments or {}
        self._range = (-1, -1)
        self._half = torch.empty(0)
        self._residual = torch.empty(0)

    def __call__(self, component: Component, begin: int, end: int) -> torch.Tensor:
        layout = self._shard.layout
        if component in (Component.EXP_AVG, Component.EXP_AVG_SQ):
            moments = self._moments.get(component)
            return torch.zeros(end - begin) if moments is None else moments[begin:end]
        if not layout.trainable or layout.dtype == torch.float32:
            return self._filled(begin, end, layout.dtype)
        if self._range != (begin, end):
            master = self._filled(begin, end, torch.float32)
            self._half = torch.empty(end - begin, dtype=layout.dtype)
            self._residual = torch.empty(end - begin, dtype=component_dtype(layout, Component.RESIDUAL))
            split_master(master, self._half, self._residual)
            self._range = (begin, end)
        return self._half if component is Component.VALUE else self._residual

    def _filled(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.zeros(end - begin, dtype=dtype)
        self._fill(begin, end, out)
        return out


def fill_from_params(shard: Shard, shard_index: int, params: Mapping[ParamSlice, torch.Tensor]) -> FillMaster:
    """A `FillMaster` that takes values from tensors of the parameters' shapes."""
    offset = shard_index * shard.layout.shard_numel

    def fill(begin: int, end: int, out: torch.Tensor) -> None:
        for piece, tensor in params.items():
            low, high = max(piece.begin, begin + offset), min(piece.end, end + offset)
            if low < high:
                source = tensor.detach().reshape(-1)[low - piece.begin : high - piece.begin]
                out[low - begin - offset : high - begin - offset].copy_(source)

    return fill


def fill_from_array(values: torch.Tensor) -> FillMaster:
    """A `FillMaster` that takes values from (shard_numel,)."""

    def fill(begin: int, end: int, out: torch.Tensor) -> None:
        out.copy_(values[begin:end])

    return fill
