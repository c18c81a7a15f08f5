"""One section's gradients in this step: which have arrived, where they are, and what they add up to.

A value that the rest of this folder shares: the keeper enters what arrives, `GradLedger` reads and ends it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from zero_offload.device import Handoff
from zero_offload.kernels.grads import GradSum
from zero_offload.memory.arena import MovableBuffer
from zero_offload.plan.layout import SectionLayout
from zero_offload.runtime.grads.fresh import Fresh
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.shards.grad_shard import GradShard


class ComingSum(NamedTuple):
    """The sum of squares of a gradient that a GPU has summed up, on its way."""

    chunks: torch.Tensor
    """(chunks,) fp64, on the host when it has arrived."""
    arrival: Handoff
    number: int
    """Of the download: those before it are over when it is."""


@dataclass
class SectionGrads:
    """One section's gradients in this step."""

    unit: Unit
    section: Section
    shard: GradShard
    local: GradShard | None = None
    """Several ranks: this rank's own sums of backwards that were not reduced, over the whole section."""
    waiting: set[int] = field(default_factory=set)
    """Parameters with a gradient in `local`."""
    aside: bool = False
    """Whether this backward has left sums in `local`, on one rank at least."""
    joined: set[int] | None = None
    """Those of `waiting` that this backward's reduction took along, while other ranks do not know of them yet; None
    where it has reduced nothing of the section beside such."""
    params: list[nn.Parameter] = field(default_factory=list)
    sums: dict[int, GradSum] = field(default_factory=dict)
    """Per parameter that has a gradient; several ranks: of this rank's part."""
    coming: dict[int, ComingSum] = field(default_factory=dict)
    """Sums that a GPU has made, newer than those in `sums`."""
    fresh: dict[int, Fresh] = field(default_factory=dict)
    """On a GPU: gradients of this backward that leave together when the section is complete."""
    factors: dict[int, float] = field(default_factory=dict)
    """See [Note: factors]; what has none is used as it is."""
    reduced: set[int] = field(default_factory=set)
    """Several ranks: parameters with a gradient in `shard`."""
    arrived: set[int] = field(default_factory=set)
    """Parameters that this backward has delivered."""
    num_expected: int = 0
    """How many it will deliver at most."""
    awaits_more: bool = False
    """Whether it has delivered all of one micro-batch, and was to bring those of others; some never come."""
    whole: bool = False
    """Whether this backward, if it updates, has delivered all of them, reduced."""
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
        return self.shard.device_bytes + (0 if self.local is None else self.local.device_bytes)

    def set_sum(self, index: int, found: GradSum) -> None:
        """The sum of a gradient is known."""
        self.coming.pop(index, None)
        self.sums[index] = found
