"""Calls of one rank's step, and the calls that the next step is expected to make.

A step is expected to be as it was when it last followed on such a step as the one before. All ranks decide at a step's
end whether they expect the same. Only then do they `follow` a script, and say nothing before each call. Communicates
nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

_STEPS_KEPT = 64
"""Steps of different kinds (accumulation, evaluation now and then) that are remembered."""
FORECAST_BITS = 20


class Place(NamedTuple):
    """How far a rank is. Any thread may look at it."""

    step: int
    texts: Sequence[str]
    """The calls of this step, of which `num_calls` have been made."""
    num_calls: int
    follows: bool
    """True if all of them were expected by all ranks."""


class Script:
    """The calls of one rank, and those that all expect."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._expected: list[str] = []
        self._after: dict[int, list[str]] = {}
        """The calls of the step that followed last, by the word of the step before."""
        self._before = 0
        self.place = Place(0, self._texts, 0, False)

    def expects(self, call: str) -> bool:
        """True if all ranks make this call next, unless some departs."""
        at = self.place.num_calls
        return self.place.follows and at < len(self._expected) and self._expected[at] == call

    def note(self, call: str) -> bool:
        """This rank makes the call. True if it departs by that from the script that all ranks follow."""
        follows = self.expects(call)
        departs = self.place.follows and not follows
        self._texts.append(call)
        self.place = Place(self.place.step, self._texts, len(self._texts), follows)
        return departs

    def forecast(self) -> int:
        """A number for the calls that follow on this step, whose last call is noted; 0 if none are known."""
        while len(self._after) >= _STEPS_KEPT:
            del self._after[next(iter(self._after))]
        self._after[self._before] = self._texts
        expected = self._after.get(_word(self._texts))
        return 0 if expected is None else 1 + _word(expected) % ((1 << FORECAST_BITS) - 1)

    def end(self, *, alike: bool) -> None:
        """The step is over on all ranks; `alike`: they expect the same of the next one."""
        self._before = _word(self._texts)
        self._expected = self._after[self._before] if alike else []
        self._texts = []
        self.place = Place(self.place.step + 1, self._texts, 0, alike)

    def forget(self) -> None:
        """Ranks have parted: all begin anew."""
        self._after, self._before, self._expected, self._texts = {}, 0, [], []
        self.place = Place(self.place.step + 1, self._texts, 0, False)


def _word(calls: Sequence[str]) -> int:
    return zlib.crc32("\n".join(calls).encode())
