"""What parameters need of torch: to lie in our buffers on any device, DTensors too, and gradients that lie as they do.

A DTensor keeps its identity, hooked modules and placement; its plain part becomes a view of a section's buffer. May
communicate with the other ranks of its mesh, which run the same operations in the same order. Imports DTensor late:
it takes half a second, and a program that has one has imported it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from zero_offload.plan.tensor_parallel import is_dtensor, local_part


def move_to(param: nn.Parameter, place: Tensor) -> None:
    """Make a parameter a view of `place`, which holds its (local) values in the compute dtype."""
    if not is_dtensor(param):
        if torch._has_compatible_shallow_copy_type(param, place):
            param.data = place
        else:  # between the host and device types that torch does not bring itself
            made = made_at(place, param.requires_grad)
            if param.grad_dtype != param.dtype:  # as the program has set it, None for any
                made.grad_dtype = param.grad_dtype
            swap_tensors(param, made)
        return
    from torch.distributed.tensor import DTensor

    old: Any = param
    new = DTensor.from_local(
        place, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
    )
    # As Module.to does; setting data would leave its dtype and its part as they were.
    swap_tensors(param, nn.Parameter(new, requires_grad=param.requires_grad))


def made_at(place: Tensor, requires_grad: bool) -> nn.Parameter:
    """A new parameter that is a view of `place` and counts its own versions: writing to `place` does not
    count for it."""
    made = nn.Parameter(torch.empty(0, dtype=place.dtype, device=place.device), requires_grad)
    made.data = place
    return made


def local_grad(param: nn.Parameter, grad: Tensor) -> Tensor:
    """This rank's part of a gradient, plain, divided as its parameter is: sums that are due are made. Collective."""
    if not is_dtensor(grad):
        return grad
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    whole: Any = grad
    dtensor: Any = param
    with torch.no_grad():
        part = local_part(whole.redistribute(placements=dtensor.placements))
        waited: Tensor = part.wait() if isinstance(part, AsyncCollectiveTensor) else part
    return waited
