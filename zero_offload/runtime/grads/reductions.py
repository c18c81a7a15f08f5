"""Reductions of gradients over ranks, behind backward: launched when a section is complete, waited for later.

Owns what is under way. Small sections share a reduction: they wait in a bucket until there are `BUCKET_BYTES` of them.
At most `REDUCTIONS_IN_FLIGHT` run while backward fills the next section. A section of experts is reduced piece by
piece. Launches come in the order in which sections are complete, which is the same on every rank. The calls: `add` per
section, `finish` before the gradients are used.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from zero_offload.base.spans import Cause
from zero_offload.plan.memory import GRADS_IN_FLIGHT
from zero_offload.runtime.grads.section import GradSection, StagedPartial, is_small
from zero_offload.runtime.ranks.agreement import Said
from zero_offload.runtime.ranks.collectives import Collectives

REDUCTIONS_IN_FLIGHT = GRADS_IN_FLIGHT - 1
"""Reductions in flight beside the section that backward fills."""

Done = Callable[[GradSection, int, torch.Tensor], None]
"""done(section, begin, its reduced shard, or what begins there of it): nothing reads that of the partial sum any more.
"""


class Reductions:
    """Idle where a rank is alone."""

    def __init__(self, collectives: Collectives, done: Done) -> None:
        self._collectives = collectives
        # Weak: the receiver of the results holds this object, and a cycle would outlive a dropped model.
        self._done = weakref.WeakMethod(done)
        self._bucket: list[GradSection] = []
        self._flying: deque[tuple[Said, Sequence[GradSection], int, Callable[[], list[torch.Tensor]]]] = deque()

    def add(self, grads: GradSection) -> None:
        """The section's partial sum is complete: reduce it, alone or with others."""
        if isinstance(grads.partial, StagedPartial) or not is_small(grads.layout.numel):
            for begin, piece in grads.partial.pieces():
                self._launch([grads], [piece], begin)
            return
        self._bucket.append(grads)
        if not is_small(sum(each.layout.numel for each in self._bucket)):
            self._launch_bucket()

    def has(self, grads: GradSection) -> bool:
        """True if a reduction reads the section's partial sum, or will."""
        return any(grads is each for each in self._bucket) or any(
            grads is each for _, sections, *_ in self._flying for each in sections
        )

    def finish(self) -> None:
        """Return when nothing is under way."""
        if self._bucket:
            # Its sections were announced, but not that no more of them come.
            self._collectives.agreement.announce("the reduction of the last gradients of a backward")
        self._launch_bucket()
        while self._flying:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        """Wait for one reduction, if there is one."""
        if self._flying:
            _, sections, begin, wait = self._flying.popleft()
            done = self._done()
            assert done is not None
            with self._collectives.counters.waiting(Cause.GRADS, sections[-1].unit.name):
                shards = wait()
            for grads, shard in zip(sections, shards, strict=True):
                done(grads, begin, shard)

    def drop(self) -> None:
        """Drop the results. Wait for launched reductions first, since they read the partial sums."""
        self._bucket.clear()
        while self._flying:
            said, *_, wait = self._flying.popleft()
            if not self._collectives.agreement.is_void(said):
                wait()

    def _launch_bucket(self) -> None:
        if self._bucket:
            bucket, self._bucket = self._bucket, []
            self._launch(bucket, [piece for grads in bucket for _, piece in grads.partial.pieces()])

    def _launch(self, sections: Sequence[GradSection], pieces: Sequence[torch.Tensor], begin: int = 0) -> None:
        while len(self._flying) >= REDUCTIONS_IN_FLIGHT:
            self.finish_oldest()
        wait = self._collectives.launch_reduce(pieces, sections[-1].unit.name)
        self._flying.append((self._collectives.agreement.said, sections, begin, wait))
