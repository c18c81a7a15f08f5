"""The numbers of optimizer states, and the arrays they rest in."""

from __future__ import annotations

import torch

from zero_offload.base.host import host_empty, host_zeros
from zero_offload.base.types import StateFormat
from zero_offload.hardware.kernels.arguments import SIGNED, num_scales, state_dtype
from zero_offload.hardware.kernels.formats import decode_states, encode_states
from zero_offload.plan.layout import SectionLayout
from zero_offload.storage.shards.shard import Component, array_numel, component_dtype


def encode(layout: SectionLayout, component: Component, values: torch.Tensor) -> torch.Tensor:
    """A chunk's array of what is nearest to `values`, (numel,) fp32, host; of fp32 states `values` itself."""
    if layout.state_format is StateFormat.FP32:
        return values
    numel = array_numel(layout, component, values.numel())
    array = host_zeros(numel, component_dtype(layout, component))
    codes, scales = _parts(layout, component, array, values.numel())
    encode_states(layout.state_format, values.contiguous(), codes, scales, signed=component.value in SIGNED)
    return array


def decode(layout: SectionLayout, component: Component, array: torch.Tensor, numel: int) -> torch.Tensor:
    """(numel,) fp32, host, that a chunk's array stands for; of fp32 states the array itself."""
    if layout.state_format is StateFormat.FP32:
        return array
    values = host_empty(numel, torch.float32)
    codes, scales = _parts(layout, component, array, numel)
    decode_states(layout.state_format, codes, scales, values, signed=component.value in SIGNED)
    return values


def _parts(
    layout: SectionLayout, component: Component, array: torch.Tensor, numel: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views of the states' elements, and of their scales if they have any."""
    count = num_scales(layout.state_format, numel)
    if not count:
        return array, None
    codes = array[:numel].view(state_dtype(layout.state_format, signed=component.value in SIGNED))
    return codes, array[numel : numel + 4 * count].view(torch.float32)
