"""Copies of state dicts that `dcp.async_save` makes: tensors whose values are in a file without a name.

torch copies a tensor subclass that has no memory by `new_empty` and by its attributes. So `staging` answers the stager,
and a tensor that is copied has the one attribute `source`, of which a copy is made, or none. A copy in host memory
would be as large as all that this rank has. A file takes memory only where the system has some to spare.
"""

from __future__ import annotations

import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.host import host_reserved
from zero_offload.plan.boxes import Box
from zero_offload.standins.checkpointed import Checkpointed
from zero_offload.standins.part import Part
from zero_offload.standins.standin import Absent, Answer, as_it_is, itself, wrapper
from zero_offload.storage.files.system import naming_errors

_COPY_NUMEL = 1 << 20
"""Elements that are copied at once."""
_STAGERS = ("torch.distributed.checkpoint._state_dict_stager", "torch.distributed._state_dict_utils")
"""Modules that copy state dicts."""
_ASKED = (Tensor.data_ptr, Tensor.new_empty, Tensor.to, torch.zeros_like)


class Staged(Absent, Checkpointed):
    """A copy of what this rank has of a tensor, to be saved."""

    source: StagedSource
    """Set by the stager, or by `copy_`."""

    def part(self) -> Part:
        return self.source.part

    def refuse(self, what: str) -> ZeroOffloadError:
        return ZeroOffloadError(f"{what} of a copy that dcp.async_save has made; it can only be saved")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For a checkpointer in a process of its own: the values, where this rank has all of them."""
        part = self.part()
        if len(part.boxes) != 1 or part.boxes[0].numel != self.numel():
            raise ZeroOffloadError(
                "AsyncCheckpointerType.PROCESS pickles whole tensors, and ranks divide those of this model; leave "
                "async_checkpointer_type out: a thread saves them then"
            )
        return part.read(*part.span).view(self.shape).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Staged(shape={tuple(self.shape)}, dtype={self.dtype})"


def _copy_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Staged:
    copy: Staged = args[0]
    if not isinstance(args[1], Checkpointed):
        raise copy.refuse("copy_")
    copy.source = StagedSource.of(args[1].part())
    return copy


Staged.own = {
    **dict.fromkeys((Tensor.detach, Tensor.cpu), itself),
    Tensor.copy_: _copy_,
    Tensor.untyped_storage: as_it_is,
}


def for_stager(otherwise: Answer, *functions: Any) -> dict[Any, Answer]:
    """Answers to what torch's stager asks, or to these `functions` of it; `otherwise` answers other code."""

    def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = staging(func, args)
        return otherwise(func, args, kwargs) if found is None else found

    return dict.fromkeys(functions or _ASKED, answer)


def staging(func: object, args: Sequence[Any]) -> Any:
    """The answer to torch's stager, which copies a state dict and asks `func` of a tensor without memory; None where
    other code asks."""
    tensor: Checkpointed = args[0]
    caller = sys._getframe(1)
    while (module := caller.f_globals.get("__name__", "")).startswith("zero_offload.standins."):
        caller = caller.f_back  # type: ignore[assignment]
    if module not in _STAGERS:
        return None
    if func is Tensor.to:
        return tensor if args[1:] == (torch.device("cpu"),) else None
    if func is Tensor.data_ptr:
        return 0
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype = tensor.shape, tensor.dtype  # type: ignore[attr-defined]
    copy: Staged = wrapper(Staged, shape, dtype=dtype, device="cpu")
    # The others' copies are given a source: by the attribute of that name, or by `copy_`.
    if func is Tensor.new_empty and not hasattr(tensor, "source"):
        copy.source = StagedSource.of(tensor.part())
    return copy


class StagedSource:
    """Where the values of a copy are."""

    def __init__(self, part: StagedPart) -> None:
        self.part = part

    @classmethod
    def of(cls, part: Part) -> StagedSource:
        """A copy of a part. Raises StorageError where there is no room for one."""
        return cls(_File.newest(part.folder).append(part))


@dataclass(eq=False)
class StagedPart:
    """A copy of a part, in a file."""

    dtype: torch.dtype
    boxes: Sequence[Box]
    span: tuple[int, int]
    folder: Path | None
    file: _File
    offset: int
    """Of its first byte in the file."""

    def read(self, begin: int, end: int) -> Tensor:
        out = host_reserved([end - begin], self.dtype)
        self.file.move(os.preadv, self.offset + (begin - self.span[0]) * self.dtype.itemsize, out)
        return out

    def plan_load(self, call: FrameType) -> None:
        self.write()

    def write(self, *_: Any) -> NoReturn:
        raise ZeroOffloadError("a copy that dcp.async_save has made is for saving; load into model.state_dict()")


class _File:
    """A file without a name, gone with its last user. It may be read from any thread."""

    _newest: weakref.ref[_File] | None = None

    def __init__(self, folder: Path | None) -> None:
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        with naming_errors("make a copy for dcp.async_save in", self._folder):
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        self._end = 0
        self._parts: weakref.WeakSet[StagedPart] = weakref.WeakSet()
        """Those that are in use."""
        self._num_parts = 0
        """All that were appended."""

    @classmethod
    def newest(cls, folder: Path | None) -> _File:
        """The file that copies go to now. A file of which most is out of use goes with its last user. A stager that is
        used again replaces its copies one by one, and otherwise no file would ever end.
        """
        found = None if cls._newest is None else cls._newest()
        is_old = found is not None and 2 * len(found._parts) <= found._num_parts
        if found is None or is_old or found._folder != (folder or found._folder):
            found = cls(folder)
            cls._newest = weakref.ref(found)
        return found

    def append(self, part: Part) -> StagedPart:
        begin, end = part.span
        staged = StagedPart(part.dtype, part.boxes, part.span, part.folder, self, self._end)
        self._end += (end - begin) * part.dtype.itemsize
        self._parts.add(staged)
        self._num_parts += 1
        for first in range(begin, end, _COPY_NUMEL):
            values = part.read(first, min(first + _COPY_NUMEL, end))
            self.move(os.pwritev, staged.offset + (first - begin) * part.dtype.itemsize, values)
        return staged

    def move(self, call: Callable[..., int], offset: int, values: Tensor) -> None:
        """Write `values` from `offset` on, or read them."""
        elements: Any = values.view(torch.uint8).numpy() if values.numel() else b""
        left = memoryview(elements)
        while left:
            with naming_errors("keep a copy for dcp.async_save in", self._folder):
                count = call(self._file.fileno(), [left], offset)
            if count == 0:
                raise ZeroOffloadError(f"a copy for dcp.async_save in {self._folder} ends too early, at byte {offset}")
            left, offset = left[count:], offset + count
