"""Reductions of gradients over ranks, behind backward: launched when a section is complete, waited for later.

Owns what is under way. Small sections share a reduction: they wait in a bucket until there are `BUCKET_BYTES` of them.
At most `REDUCTIONS_IN_FLIGHT` run while backward fills the next section. Launches come in the order in which sections
are complete, which is the same on every rank. The calls: `add` per section, `finish` before the gradients are used.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from zero_offload.base.spans import Cause
from zero_offload.base.types import MIB
from zero_offload.plan.memory import GRADS_IN_FLIGHT
from zero_offload.runtime.grads.section import GradSection
from zero_offload.runtime.ranks.collectives import Collectives

REDUCTIONS_IN_FLIGHT = GRADS_IN_FLIGHT - 1
"""Beside the section that backward fills."""
BUCKET_BYTES = 1 * MIB
"""Smaller sections share a collective: its start would take longer than its transfer."""

Done = Callable[[GradSection, torch.Tensor], None]
"""done(section, its reduced shard): what the section lent is its own again."""


def is_small(grads: GradSection) -> bool:
    """Whether a section goes into a bucket."""
    return grads.layout.numel * 4 < BUCKET_BYTES


class Reductions:
    """Idle where a rank is alone."""

    def __init__(self, collectives: Collectives, lend: Callable[[GradSection], torch.Tensor], done: Done) -> None:
        """`lend` gives a section's `partial`, for what this thread launches."""
        self._collectives = collectives
        self._lend = lend
        # Weak: the receiver of the results holds this object, and a cycle would outlive a dropped model.
        self._done = weakref.WeakMethod(done)
        self._bucket: list[GradSection] = []
        self._flying: deque[tuple[Sequence[GradSection], Callable[[], list[torch.Tensor]]]] = deque()

    def add(self, grads: GradSection) -> None:
        """The section's `partial` is complete: reduce it, alone or with others."""
        if not is_small(grads):
            self._launch([grads])
            return
        self._bucket.append(grads)
        if sum(each.layout.numel * 4 for each in self._bucket) >= BUCKET_BYTES:
            self._launch_bucket()

    def has(self, grads: GradSection) -> bool:
        """Whether the section's `partial` is lent."""
        return any(grads is each for each in self._bucket) or any(
            grads is each for sections, _ in self._flying for each in sections
        )

    def finish(self) -> None:
        """Return when nothing is under way."""
        if self._bucket:
            # Its sections were announced, but not that no more of them come.
            self._collectives.agreement.same("the reduction of the last gradients of a backward")
        self._launch_bucket()
        while self._flying:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        """Wait for one reduction, if there is one."""
        if self._flying:
            sections, wait = self._flying.popleft()
            done = self._done()
            assert done is not None
            with self._collectives.counters.waiting(Cause.GRADS, sections[-1].unit.name):
                shards = wait()
            for grads, shard in zip(sections, shards, strict=True):
                done(grads, shard)

    def drop(self) -> None:
        """Drop the results. What is launched is waited for, since it reads what the sections lent."""
        self._bucket.clear()
        while self._flying:
            self._flying.popleft()[1]()

    def _launch_bucket(self) -> None:
        if self._bucket:
            bucket, self._bucket = self._bucket, []
            self._launch(bucket)

    def _launch(self, sections: Sequence[GradSection]) -> None:
        while len(self._flying) >= REDUCTIONS_IN_FLIGHT:
            self.finish_oldest()
        partials = [self._lend(grads) for grads in sections if grads.partial is not None]
        self._flying.append((sections, self._collectives.launch_reduce(partials, sections[-1].unit.name)))
