"""How much of a device's own memory parameters may take.

Owns the limit of the units' frames, and why it has fallen; moves nothing. A `device_memory` that is given stands, until
the device runs out of memory. Without one, a first step keeps only the units in flight, so that the peak of everything
else can be measured. From the next step on parameters take what is free beside that peak and a margin. From then on the
limit only falls:

* inputs are larger than before: by what the measured activations grow in proportion, before the forward runs;
* the allocator reserves more than half of the margin, or another process does: until the margin is whole;
* a step departs from the schedule: half of what was gained goes, since its peak may be another one;
* the device runs out of memory: all of it goes; where only a prefetch did, what leaves a margin again.

Parameters that are only evaluated are measured by one forward; training measures anew. Ranks that gather from each
other evict alike, so they agree on the least of their limits as each forward of training begins.

The calls: `begin` with each outermost forward; `stepped` at each update. `reset_peaks` follows once the units above a
fallen limit have left. `ran_out` where memory for a unit was refused; `measure` when units are added.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from zero_offload.base.stats import DeviceParams
from zero_offload.base.types import FRAME, format_bytes
from zero_offload.hardware.device import DeviceMemory, read_memory, reset_peak
from zero_offload.plan.memory import margin_bytes
from zero_offload.runtime.graphs import refuse_capture
from zero_offload.runtime.ranks.agreement import Agreement
from zero_offload.runtime.units.unit import Unit
from zero_offload.storage.memory.resizable import FrameBudget


class DeviceLimit:
    """The limit of one model's frames on a device."""

    def __init__(
        self,
        device: torch.device,
        budget: FrameBudget,
        units: Sequence[Unit],
        agreement: Agreement | None,
        num_ranks: int,
        *,
        grows: bool,
    ) -> None:
        """`agreement`: of the ranks that evict alike, if others do. `grows`: no limit was given."""
        self._device = device
        self._budget = budget
        self._units = units
        self._agreement = agreement
        self._num_ranks = num_ranks
        self._grows = grows
        memory = read_memory(device)
        self._num_ooms = 0 if memory is None else memory.num_ooms
        self._reason = ""
        """Why the limit has fallen last; empty if it has not."""
        self._kind = ""
        """The kind of cycles whose peak the limit comes from, or will."""
        self._last_kind = ""
        self._is_new = False
        """True if this cycle begins to measure."""
        self._has_grown = False
        self._num_steps = 0
        """Since the measuring began."""
        self._allocated = 0
        """Bytes when it began."""
        self._activations = 0
        """Bytes allocated above those at the peak of the largest inputs so far, which had so many elements:"""
        self._num_elements = 0

    @property
    def params(self) -> DeviceParams:
        return DeviceParams(self._budget.taken * FRAME, self._budget.frame_limit * FRAME, self._reason)

    def refuse_capture(self) -> None:
        """Raise ConfigError where what is launched is recorded: the addresses of units change."""
        refuse_capture(self._device)

    def measure(self) -> None:
        """Begin anew: units were added, which none of the peaks knows."""
        self._kind = ""

    def stepped(self) -> None:
        """An update begins."""
        self._num_steps += 1

    def begin(self, kind: str, num_elements: int, *, has_departed: bool) -> bool:
        """A forward starts, with inputs of so many elements; `has_departed`: the cycle before left its schedule.

        True if units above the limit are to leave now; `reset_peaks` follows.
        """
        has_departed = has_departed and self._last_kind == self._kind
        self._last_kind = kind
        self.refuse_capture()  # which allows no question about memory either
        memory = read_memory(self._device)
        # An evaluation may be one rank's affair.
        if memory is None or (self._agreement is not None and kind != "grad"):
            return False
        before, self._is_new = self._budget.frame_limit, False
        limit = self._limit(memory, kind, num_elements, has_departed=has_departed)
        if self._agreement is not None:
            least = self._agreement.least(limit, "an agreement about the memory of devices")
            if least < min(limit, before):
                self._reason = "another rank has room for no more"
            limit = least
        self._budget.limit_to(limit)
        if limit > before:
            reset_peak(self._device)
        return self._budget.frame_limit < before or self._is_new

    def reset_peaks(self) -> None:
        """The peaks from now on are the new limit's."""
        reset_peak(self._device)
        if not self._has_grown and (memory := read_memory(self._device)) is not None:
            self._allocated = memory.allocated

    def ran_out(self) -> None:
        """Memory for a unit was refused, and nothing was lost by it; units above the limit are to leave now.

        Memory that is not free any more is missing for activations, too, which cannot wait.
        """
        memory, count = read_memory(self._device), self._budget.taken
        if memory is not None:
            self._num_ooms = memory.num_ooms
            count -= _frames(margin_bytes(memory.total, self._num_ranks, is_measured=True))
        self._budget.limit_to(self._fall(count, "the device ran out of memory in a prefetch", is_told=True))

    def _limit(self, memory: DeviceMemory, kind: str, num_elements: int, *, has_departed: bool) -> int:
        """Frames."""
        budget = self._budget
        if memory.num_ooms > self._num_ooms:
            self._num_ooms = memory.num_ooms
            if self._has_grown or not self._grows:
                return self._fall(budget.least, "the device ran out of memory", is_told=True)
            self._kind = ""  # the peak is of a step that failed
        if not self._grows:
            return budget.frame_limit
        if not self._kind or (kind == "grad" and self._kind != "grad"):
            self._kind, self._has_grown, self._is_new = kind, False, True
            self._num_steps, self._num_elements = 0, num_elements
            return budget.least
        margin = margin_bytes(memory.total, self._num_ranks, is_measured=True)
        spare = memory.free + memory.reserved - memory.peak - margin
        if not self._has_grown:
            if kind == self._kind and (kind != "grad" or self._num_steps):
                self._has_grown = True
                self._activations = memory.peak_allocated - self._allocated
                most = sum(unit.num_frames for unit in self._units)
                return max(min(budget.frame_limit + spare // FRAME, most), budget.least)
            if kind == self._kind:
                self._num_elements = max(num_elements, self._num_elements)
            return budget.frame_limit
        if has_departed and budget.frame_limit > budget.least:
            gained = budget.frame_limit - budget.least
            return self._fall(budget.least + gained // 2, "a step departed from the schedule")
        more = self._more_bytes(num_elements) if kind == self._kind else 0
        if more > max(spare, 0):
            return self._fall(budget.frame_limit - _frames(more - spare), "inputs are larger than before")
        if spare < -margin // 2:
            return self._fall(budget.frame_limit - _frames(-spare), "less memory is free than after the first step")
        return budget.frame_limit

    def _more_bytes(self, num_elements: int) -> int:
        """Bytes that activations take beyond those of the largest inputs before; 0 for inputs that are not larger."""
        if num_elements <= self._num_elements:
            return 0
        more = self._activations * num_elements // max(self._num_elements, 1) - self._activations
        self._activations += more
        self._num_elements = num_elements
        return more

    def _fall(self, count: int, reason: str, *, is_told: bool = False) -> int:
        count = max(count, self._budget.least)
        if count < self._budget.frame_limit:
            is_first, self._reason = not self._reason, reason
            if is_told and is_first:
                before = format_bytes(self._budget.frame_limit * FRAME)
                warnings.warn(
                    f"{reason}: parameters keep at most {format_bytes(count * FRAME)} of it from now on, not {before}, "
                    "and are fetched more often. zo.stats(model).device_params has the figures; a smaller batch, "
                    "zo.checkpoint or activations='cpu' leaves them more",
                    stacklevel=2,
                )
        return count


def _frames(nbytes: int) -> int:
    return -(-nbytes // FRAME)
