"""Bytes that training writes to a drive, and how long a drive lasts: drives are sold for a number of bytes written
(TBW).

Pure arithmetic on the bytes of `memory`. States that rest on NVMe are written in every step, and a commit writes no
more of them. States that rest in memory are written for every generation. Activations count where the batch is known.
Left out are manifests (kilobytes) and what is written once: the states at the start, frozen parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zero_offload.base.types import parse_seconds

TB = 10**12
"""As drives are sold."""
TBW_USUAL = 600.0
"""The rating of many consumer drives of 1 TB."""
LIFE_DAYS = 365.0
"""How long a drive that trains day and night should last."""
COMMIT_SHARE = 0.1
"""The most that generations may add, as a share of the writes of states on a drive, where those alone wear it out
sooner.
"""
_DAY_S = 86400


@dataclass(frozen=True)
class Wear:
    """Bytes written to NVMe."""

    states_bytes: float
    """In every step."""
    commit_bytes: float
    """For every generation, beside that."""
    commit_every: int | str
    """Steps from one generation to the next. For a duration or "auto" each step is counted: it may be fewer."""
    grads_bytes: float = 0.0
    """The part of `states_bytes` for gradients, which are written in every backward."""
    activation_bytes: float = 0.0
    """In every step."""

    @property
    def commit_bytes_per_step(self) -> float:
        return self.commit_bytes / (self.commit_every if isinstance(self.commit_every, int) else 1)

    @property
    def bytes_per_step(self) -> float:
        return self.states_bytes + self.activation_bytes + self.commit_bytes_per_step

    @property
    def is_bound(self) -> bool:
        """True if it may be less."""
        return self.commit_bytes > 0 and not isinstance(self.commit_every, int)

    def at(self, step_s: float | None) -> Wear:
        """With a duration between generations counted in steps of this length, where it is known."""
        if step_s is None or isinstance(self.commit_every, int) or self.commit_every == "auto":
            return self
        return replace(self, commit_every=max(math.ceil(parse_seconds(self.commit_every) / step_s), 1))

    def of_one_drive(self, num_ranks: int, num_drives: int, fastest: float = 1.0) -> Wear:
        """From one rank's wear: what a drive gets when so many ranks stripe over so many, or `fastest` times that."""
        share = num_ranks / num_drives * fastest
        return replace(
            self,
            states_bytes=self.states_bytes * share,
            commit_bytes=self.commit_bytes * share,
            grads_bytes=self.grads_bytes * share,
            activation_bytes=self.activation_bytes * share,
        )

    def of_backwards(self, count: int) -> Wear:
        """The wear of a step in which gradients leave `count` times, not once."""
        return replace(self, states_bytes=self.states_bytes + (count - 1) * self.grads_bytes)

    def tb_per_day(self, step_s: float) -> float:
        return self.bytes_per_step * _DAY_S / step_s / TB

    def days_to(self, tbw: float, step_s: float) -> float:
        """Days until a drive has written `tbw` terabytes, at steps of this length. Something must be written."""
        return self.steps_to(tbw) * step_s / _DAY_S

    def interval(self, tbw: float, step_s: float) -> int:
        """Steps between generations with which a drive lasts `LIFE_DAYS`, or nearly as long as without any."""
        others = self.states_bytes + self.activation_bytes
        a_step = tbw * TB / LIFE_DAYS * step_s / _DAY_S
        return max(math.ceil(self.commit_bytes / max(a_step - others, COMMIT_SHARE * others)), 1)

    def steps_to(self, tbw: float) -> int:
        """Whole steps until a drive has written `tbw` terabytes. Something must be written."""
        return int(tbw * TB / self.bytes_per_step)
