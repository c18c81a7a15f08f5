"""Gradients whose tier is NVMe: which sections have pages, and which give theirs back first.

Owns the two lists. Backward fills the pages of a section while those of the unit before are written; sections that wait
for their last gradients (some never come) rest on their drive until those arrive. The calls: `open` before a gradient
is put in its place, `leave` when the section is complete or `drop`, `settle` when the pages are wanted elsewhere. What
happens depends on the order of the calls alone, never on what is complete, so that it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from zero_offload.plan.memory import GRADS_IN_FLIGHT
from zero_offload.runtime.grads.sections import SectionGrads
from zero_offload.shards.grad_shard import GradShard
from zero_offload.telemetry.events import Counters
from zero_offload.telemetry.spans import Cause
from zero_offload.types import Tier


class GradsToDrives:
    """Of one model. Sections of other tiers pass without effect."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._open: list[SectionGrads] = []
        """The longest unused first."""
        self._leaving: list[SectionGrads] = []
        """The oldest first."""

    def open(self, grads: SectionGrads) -> None:
        """There is room for this section's pages."""
        if grads.shard.tier is not Tier.NVME:
            return
        self._forget(grads)
        while _num_units([*self._open, grads]) > GRADS_IN_FLIGHT:
            self.leave(self._open[0])
        while _num_units(self._leaving) >= GRADS_IN_FLIGHT:
            self._settle_oldest()
        self._open.append(grads)

    def leave(self, grads: SectionGrads) -> None:
        """Launch its writes."""
        if grads.shard.tier is Tier.NVME:
            self._forget(grads)
            for shard in _shards(grads):
                shard.leave()
            self._leaving.append(grads)

    def drop(self) -> None:
        """Nobody wants what has not left."""
        while self._open:
            for shard in _shards(self._open[-1]):
                shard.close(changed=False)
            self._open.pop()

    def settle(self) -> bool:
        """Wait for what was launched; says whether anything was."""
        found = bool(self._leaving)
        while self._leaving:
            self._settle_oldest()
        return found

    def _settle_oldest(self) -> None:
        grads = self._leaving[0]
        with self._counters.waiting(Cause.GRADS, grads.unit.name):
            for shard in _shards(grads):
                shard.settle()
        self._leaving.pop(0)

    def _forget(self, grads: SectionGrads) -> None:
        self._open = [each for each in self._open if each is not grads]
        self._leaving = [each for each in self._leaving if each is not grads]


def _num_units(sections: Iterable[SectionGrads]) -> int:
    return len({each.unit.index for each in sections})


def _shards(grads: SectionGrads) -> list[GradShard]:
    return [grads.shard] if grads.local is None else [grads.shard, grads.local]
