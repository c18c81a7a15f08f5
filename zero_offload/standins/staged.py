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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.host import host_reserved
from zero_offload.plan.boxes import Box
from zero_offload.standins.checkpointed import METADATA, Checkpointed, Part, wrapper
from zero_offload.storage.files.system import naming_errors

_COPY_NUMEL = 1 << 20
"""Elements that are copied at once."""
_STAGERS = ("torch.distributed.checkpoint._state_dict_stager", "torch.distributed._state_dict_utils")
"""Modules that copy state dicts."""
_ASKED = (Tensor.data_ptr, Tensor.new_empty, Tensor.to, torch.zeros_like)


class Staged(Checkpointed, Tensor):
    """A copy of what this rank has of a tensor, to be saved."""

    source: StagedSource
    """Set by the stager, or by `copy_`."""

    def part(self) -> Part:
        return self.source.part

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if args and isinstance(copy := args[0], Staged):
            if func is Tensor.copy_ and isinstance(args[1], Checkpointed):
                copy.source = StagedSource.of(args[1].part())
                return copy
            if func in (Tensor.detach, Tensor.cpu):
                return copy
        raise _only_saved(func)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _only_saved(func)

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


def _only_saved(func: object) -> ZeroOffloadError:
    name = getattr(func, "__name__", func)
    return ZeroOffloadError(f"{name} of a copy that dcp.async_save has made; it can only be saved")


def staging(func: object, args: Sequence[Any]) -> Any:
    """The answer to torch's stager, which copies a state dict and asks `func` of a tensor without memory; None where
    other code asks. To be called by `__torch_function__` itself: the stager is its caller."""
    if func not in _ASKED or not args or not isinstance(tensor := args[0], Checkpointed):
        return None
    if sys._getframe(2).f_globals.get("__name__") not in _STAGERS:
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
