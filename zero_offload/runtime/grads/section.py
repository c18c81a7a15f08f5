"""One section's gradients in this step: which have arrived, where they go, and who holds them.

A value that the rest of this folder shares: `Gradients` enters what arrives and ends it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from zero_offload.plan.layout import SectionLayout
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.storage.memory.arena import MovableBuffer
from zero_offload.storage.shards.grad_store import GradStore


class GradEntry(Protocol):
    """Where gradients of a section go as they arrive: a store, or on a GPU `FreshGrads`."""

    def add(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Take a parameter's gradient: it `adds` to the one at rest, or is the first."""

    def flush(self) -> None:
        """The section is complete."""

    def land(self) -> None:
        """Return when all that has arrived is where it rests."""

    def cancel(self) -> None:
        """What is on its way is not wanted."""


@dataclass
class GradSection:
    """One section's gradients in this step."""

    unit: Unit
    section: Section
    store: GradStore
    """Where they rest; several ranks: this rank's part of their sum."""
    local: GradStore | None
    """Several ranks: this rank's own sums of backwards that were not reduced, over the whole section."""
    entry: GradEntry
    """On one rank of `store`, else of `local`."""
    params: list[nn.Parameter] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    """Parameters with a gradient in `local`."""
    aside: bool = False
    """True if this backward has left sums in `local`, on one rank at least."""
    joined: set[int] | None = None
    """Those of `waiting` that this backward's reduction took along, while other ranks do not know of them yet; None
    where it has reduced nothing of the section beside such."""
    reduced: set[int] = field(default_factory=set)
    """Several ranks: parameters with a gradient in `store`."""
    arrived: set[int] = field(default_factory=set)
    """Parameters that this backward has delivered."""
    num_expected: int = 0
    """How many it will deliver at most."""
    awaits_more: bool = False
    """True if it has delivered all of one micro-batch, and was to bring those of others; some never come."""
    whole: bool = False
    """True if this backward, if it updates, has delivered all of them, reduced."""
    holding: set[int] = field(default_factory=set)
    """Parameters with a gradient that no step has consumed."""
    exposed: set[int] = field(default_factory=set)
    """Parameters whose gradient the user has in hand, and may have changed."""
    is_gathered: bool = False
    """Several ranks: True from this backward's first gradient until their sum over ranks is at rest."""
    partial: torch.Tensor | None = None
    """Their sum on this rank alone, (numel,), in the section's dtype or fp32; on a GPU only when they are complete."""
    pages: MovableBuffer | None = None
    """On a CPU, the memory of `partial`."""

    @property
    def layout(self) -> SectionLayout:
        return self.section.layout

    @property
    def device_bytes(self) -> int:
        """Of the compute device's own memory, under gradients at rest."""
        return self.store.device_bytes + (0 if self.local is None else self.local.device_bytes)

    def forget_zeros(self) -> None:
        """Of a section without gradients nothing is kept: not what a reduction has made of none either."""
        if not self.holding:
            self.store.sums.clear()
            self.reduced.clear()
            self.store.held = False
            self.store.drop()
