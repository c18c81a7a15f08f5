"""Gradients as backward has made them on a GPU: held until their section takes all of them in one copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from zero_offload.device import Device


class Fresh(NamedTuple):
    """A gradient that backward has made on a GPU, and that has not left with its section."""

    grad: torch.Tensor
    stream: Any
    """The one on which it is valid."""
    adds: bool = False
    """True if it adds to what the step holds."""
    is_sum: bool = False
    """True if it is a sum in fp32, in memory of its own."""


def use(device: Device, fresh: Iterable[Fresh]) -> None:
    """This thread's stream computes with these."""
    here = device.stream()
    for each in fresh:
        if each.stream != here:
            device.join([each.stream])
            device.use_here(each.grad)


def side_by_side(grads: Mapping[int, torch.Tensor], parts: Mapping[int, slice], numel: int) -> torch.Tensor:
    """One tensor, (numel,), in the widest of the gradients' dtypes: each lies at its part, with zeros between them.

    `parts` are in order. This is one launch, and one for the zeros: on a GPU a copy of each gradient by itself would
    cost the host more than the bytes cost the device.
    """
    found, gaps, at = list[torch.Tensor | int](), [0], 0
    for index, part in [*parts.items(), (-1, slice(numel, numel))]:
        if at < part.start:
            gaps.append(part.start - at)
            found.append(gaps[-1])
        if index >= 0:
            found.append(grads[index].reshape(-1))
        at = part.stop
    narrowest = min(grads.values(), key=lambda grad: grad.dtype.itemsize)
    zeros = narrowest.new_zeros(max(gaps)) if max(gaps) else narrowest
    return torch.cat([zeros[:each] if isinstance(each, int) else each for each in found])


def neighbours(indices: Iterable[int]) -> Iterator[list[int]]:
    """In order, together those between which there is no other."""
    run = list[int]()
    for index in sorted(indices):
        if run and index != run[-1] + 1:
            yield run
            run = []
        run.append(index)
    if run:
        yield run
