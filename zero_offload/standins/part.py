"""The part of a tensor that this rank has, element by element: torch.distributed.checkpoint reads and writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
from torch import Tensor

from zero_offload.plan.boxes import Box, boxes_of

Put = Callable[[Tensor], None]
"""put(elements): change some of (n,) elements."""


class Part(Protocol):
    """This rank's part of a tensor: elements from `begin` on, in row-major order of what the rank has of it."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def boxes(self) -> Sequence[Box]:
        """Offsets are those in the whole tensor."""

    @property
    def span(self) -> tuple[int, int]:
        """The elements that are here, [begin, end)."""

    @property
    def folder(self) -> Path | None:
        """Where a copy has room; None for the system's folder of temporary files."""

    def read(self, begin: int, end: int) -> Tensor:
        """(end - begin,) of the dtype, host; a copy."""

    def plan_load(self, call: FrameType) -> None:
        """Called on every rank before anything is written of what `call`, a `dcp.load`, brings."""

    def write(self, begin: int, end: int, values: Tensor, put: Put | None) -> None:
        """Replace elements [begin, end) by `values`, of any dtype, host; or some of them, which `put` does in a copy
        of what is there."""


class Holder(Protocol):
    """The tensor that shows a part to the program."""

    def following(self) -> AbstractContextManager[None]:
        """It is to show what is written inside."""


class PlainPart:
    """A whole tensor in memory. Implements `Part`."""

    folder: Path | None = None

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self.dtype, self.span = values.dtype, (0, values.numel())
        self.boxes = boxes_of(values.shape, *self.span)

    def read(self, begin: int, end: int) -> Tensor:
        return self._values.detach().reshape(-1)[begin:end].clone()

    def plan_load(self, call: FrameType) -> None:
        pass

    def write(self, begin: int, end: int, values: Tensor, put: Put | None) -> None:
        elements = self._values.detach().view(-1)[begin:end]
        if put is None:
            elements.copy_(values.reshape(-1))
        else:
            put(elements)
