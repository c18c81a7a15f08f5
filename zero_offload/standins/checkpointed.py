"""The face that torch.distributed.checkpoint needs of a tensor whose values rest elsewhere: torch's `_Checkpointable`.

`Checkpointed` is the protocol. Such a tensor says which boxes this rank holds, and gives a `BoxTensor` for each of
them. That one has no memory either: it is read where it is pickled, and what is copied into it is written where the
values rest. torch keeps all tensors of a file until the file is complete, so only tensors without memory stream.

`dcp.async_save` makes copies first: see staged.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.plan.boxes import Box
from zero_offload.standins.part import Part, Put
from zero_offload.standins.standin import OnCopies, as_it_is, itself, wrapper

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem

_GETTER = "torch.distributed.checkpoint.state_dict"
_SAVERS = {
    ("transformers.modeling_utils", "save_pretrained"),
    ("transformers.trainer", "_save"),
    ("peft.peft_model", "save_pretrained"),
}
"""Functions of tools that write whole tensors, most often on rank 0 alone: their modules and names."""
INSTEAD = {
    "state_dict": "to write whole weights call zo.export_pretrained(model, folder) on all ranks; weights and states by "
    "zo.save_checkpoint(model, optimizer, folder) or torch.distributed.checkpoint.save",
    "load_state_dict": "to read files call zo.load_pretrained(model, folder) or zo.load_checkpoint(model, optimizer, "
    "folder) on all ranks, or torch.distributed.checkpoint.load",
}
"""The remedy for a call on one rank alone, where ranks divide the model."""
_LOADER = "torch.distributed.checkpoint.state_dict_loader"


class Checkpointed:
    """A tensor whose `part` torch.distributed.checkpoint saves and loads."""

    def part(self) -> Part:
        """Raises ZeroOffloadError where it can be neither saved nor loaded."""
        raise NotImplementedError

    def __create_write_items__(self, name: str, tensor: Tensor) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=tensor.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
            )
            for chunk in _chunks(self.part().boxes)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        part = self.part()
        if (call := loading_call()) is not None:
            part.plan_load(call)
        return _chunks(part.boxes)

    def __get_tensor_shard__(self, index: Any) -> BoxTensor:
        part = self.part()
        is_whole = len(part.boxes) == 1 and part.boxes[0].numel == cast(Any, self).numel()
        found = (box for box in part.boxes if index.offset is None or box.offsets == tuple(index.offset))
        return BoxTensor.made(part, next(found), is_whole=is_whole)


def _chunks(boxes: Iterable[Box]) -> list[ChunkStorageMetadata]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]


def loading_call() -> FrameType | None:
    """The frame of the `dcp.load` that asks now, if one does."""
    found, frame = None, cast("FrameType | None", sys._getframe(1))
    while frame is not None:
        if frame.f_globals.get("__name__") == _LOADER:
            found = frame
        frame = frame.f_back
    return found


def refuse_full(call: str) -> None:
    """Raise where `call` is asked for whole tensors of a model that ranks divide."""
    for frame in _callers():
        asked = frame.f_globals.get("__name__") == _GETTER and frame.f_locals.get("info")
        if asked and getattr(asked, "full_state_dict", False):
            raise ZeroOffloadError(
                f"{call} for StateDictOptions(full_state_dict=True): ranks divide this model, and all of it may not "
                "fit a rank's memory. Leave full_state_dict out and write the tensors by dcp.save; zo.save_checkpoint "
                "and zo.export_pretrained write whole ones, unit by unit"
            )


def refuse_savers(call: str) -> None:
    """Raise where a tool that writes whole tensors asks for those of a model that ranks divide.

    Such tools ask on one rank alone. So this is called before ranks wait for each other: the others would never come.
    """
    for frame in _callers():
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _SAVERS:
            raise ZeroOffloadError(
                f"{frame.f_code.co_name} asks for {call}, and ranks divide this model: none has whole tensors. Call "
                "zo.export_pretrained(model, folder) on all ranks. In a Trainer use OffloadTrainer, whose checkpoints "
                "are written by all ranks, or save_strategy='no'"
            )


def _callers() -> Iterator[FrameType]:
    frame = cast("FrameType | None", sys._getframe(2))
    while frame is not None:
        yield frame
        frame = frame.f_back


class BoxTensor(OnCopies):
    """A box of a tensor, or a rectangle in it. Operations get its values; what changes them changes those at rest."""

    _part: Part
    _box: Box
    _offsets: tuple[int, ...]
    """Of this rectangle in the box."""
    _is_whole: bool
    """True if the box is all of its tensor."""
    _kept: Tensor | None
    """The values in memory, once a writer has asked for their address."""

    @staticmethod
    def made(part: Part, box: Box, *, is_whole: bool) -> BoxTensor:
        return _rectangle(part, box, (0,) * len(box.sizes), box.sizes, is_whole)

    def read(self) -> Tensor:
        begin, end = self._enclosing()
        values = self._part.read(begin, end)
        return values.view(self.shape) if values.numel() == self.numel() else self._inside(values).clone()

    def write(self, values: Tensor) -> None:
        begin, end = self._enclosing()
        # Elements between its rows stay as they are.
        put = None if end - begin == self.numel() else lambda elements: self._inside(elements).copy_(values)
        self._part.write(begin, end, values, cast("Put | None", put))

    def describe(self) -> str:
        return "a tensor that torch.distributed.checkpoint saves or loads"

    def _narrowed(self, dim: int, start: int, length: int) -> BoxTensor:
        offsets = tuple(each + start * (number == dim) for number, each in enumerate(self._offsets))
        sizes = tuple(length if number == dim else size for number, size in enumerate(self.shape))
        return _rectangle(self._part, self._box, offsets, sizes, self._is_whole)

    def _enclosing(self) -> tuple[int, int]:
        """The elements of the part from its first to its last."""
        if self.numel() == 0:
            return self._box.begin, self._box.begin
        strides = self._box_strides()
        first = sum(offset * stride for offset, stride in zip(self._offsets, strides, strict=True))
        last = first + sum((size - 1) * stride for size, stride in zip(self.shape, strides, strict=True))
        return self._box.begin + first, self._box.begin + last + 1

    def _inside(self, values: Tensor) -> Tensor:
        """The rectangle in the elements that enclose it."""
        return values.as_strided(self.shape, self._box_strides())

    def _box_strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self._box.sizes[dim + 1 :]) for dim in range(len(self._box.sizes)))

    def _address(self) -> int:
        if not self._is_whole:
            raise ZeroOffloadError(
                "this writer of torch.distributed.checkpoint takes each rank's part of a tensor as one piece "
                "(safetensors), and an offloaded model's may be several. Save with dcp.FileSystemWriter, or write "
                "safetensors by zo.export_pretrained(model, folder)"
            )
        if self._kept is None:
            self._kept = self.read()
        return self._kept.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.read()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BoxTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def _rectangle(part: Part, box: Box, offsets: tuple[int, ...], sizes: tuple[int, ...], is_whole: bool) -> BoxTensor:
    made: BoxTensor = wrapper(BoxTensor, sizes, dtype=part.dtype, device="cpu")
    made._part, made._box, made._offsets, made._is_whole, made._kept = part, box, offsets, is_whole, None
    return made


def _narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoxTensor:
    return cast(BoxTensor, args[0]._narrowed(*args[1:], **kwargs))


def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoxTensor:
    box: BoxTensor = args[0]
    box.write(args[1].detach().expand(box.shape))
    return box


BoxTensor.own = {
    **dict.fromkeys((Tensor.detach, Tensor.cpu), itself),
    Tensor.narrow: _narrow,
    Tensor.copy_: _copy_,
    Tensor.data_ptr: lambda func, args, kwargs: args[0]._address(),
    Tensor.untyped_storage: as_it_is,
}
