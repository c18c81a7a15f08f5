"""Parameters that are divided over other ranks already: DTensors, as torch's tensor parallelism makes them.

Such a rank holds a part of the model, and the ranks that see other data hold the same part. For all that follows, the
part is the parameter. Owns what may be known of a DTensor without communication. Never imports torch's DTensor, which
takes half a second: a program that has one has imported it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

PLAIN = (Tensor, nn.Parameter)
"""Plain types. A test for them is cheaper than `is_dtensor`, and runs for each tensor."""


def _placement_types() -> Any:
    return sys.modules.get("torch.distributed.tensor")


def is_dtensor(tensor: object) -> bool:
    """True if the tensor is this rank's view of a tensor that several ranks hold."""
    module = None if type(tensor) in PLAIN else _placement_types()
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of it: the tensor itself, or a DTensor's part, in the same memory, outside of any graph."""
    if type(tensor) in PLAIN or not is_dtensor(tensor):
        return tensor
    dtensor: Any = tensor
    part: Tensor = dtensor._local_tensor
    return part


def replace_part(dtensor: Any, part: Tensor) -> None:
    """Give a DTensor this part: torch has no function for it."""
    dtensor._local_tensor = part


def mesh_of(params: Iterable[Tensor]) -> DeviceMesh | None:
    """The mesh of the first DTensor."""
    dtensors: Iterator[Any] = filter(is_dtensor, params)
    return next((each.device_mesh for each in dtensors), None)


def division(tensor: Any) -> str:
    """How its parts lie, the same on all ranks of its mesh; empty for a plain tensor."""
    return f"{tensor.placements[0]} of {tensor.device_mesh.size()}" if is_dtensor(tensor) else ""


_SHARDED = re.compile(r"S\((-?\d+)\) of (\d+)")


def parts_along(division: str, shape: Sequence[int]) -> tuple[int, int]:
    """The dimension along which the parts of a tensor lie, and their number; (0, 1) where each rank has the whole. By
    its `division` and the shape of a part."""
    found = _SHARDED.fullmatch(division)
    return (0, 1) if found is None else (int(found[1]) % len(shape), int(found[2]))


def whole_shape(division: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor of which a part has this one."""
    dim, count = parts_along(division, shape)
    return tuple(size * count if at == dim else size for at, size in enumerate(shape))


def num_copies(tensor: Any, mesh: DeviceMesh | None) -> int:
    """How many ranks of the model's mesh hold the same values."""
    divided = is_dtensor(tensor) and tensor.placements[0].is_shard()
    return 1 if mesh is None or divided else mesh.size()


def dtensor_problems(name: str, param: Any, mesh: DeviceMesh) -> Iterator[str]:
    """Reasons why a DTensor parameter cannot be offloaded in a model over `mesh`."""
    own, placements = param.device_mesh, param.placements
    if own != mesh:
        yield f"{name} is divided over {own}, other parameters over {mesh}; use one mesh for all of them"
    elif own.ndim != 1:
        yield f"{name} is divided over a mesh of {own.ndim} dimensions; use one of one dimension, as mesh['tp']"
    elif type(placements[0]) not in (_placement_types().Shard, _placement_types().Replicate):
        yield f"{name} has the placement {placements[0]}; only Shard and Replicate can be offloaded"
    elif placements[0].is_shard() and param.shape[placements[0].dim] % own.size():
        dim = placements[0].dim
        yield (
            f"dimension {dim} of {name} has {param.shape[dim]} rows, which {own.size()} ranks cannot divide evenly; "
            "pad it to a multiple"
        )
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        yield f"{name} has hooks, which a DTensor loses when it moves; register them after zo.offload"
