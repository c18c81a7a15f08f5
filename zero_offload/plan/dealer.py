"""Weights dealt to targets so that each gets its fraction, evenly all along: units to tiers, blocks to directories."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Target = TypeVar("Target", bound=Hashable)


class Dealer(Generic[Target]):
    """Gives one weight after the other to the target that lags its fraction most; of equals to the first."""

    def __init__(self, fractions: Mapping[Target, float]) -> None:
        self._fractions = dict(fractions)
        self._lag = dict.fromkeys(self._fractions, 0.0)

    def deal(self, weight: int) -> Target:
        for target, fraction in self._fractions.items():
            self._lag[target] += fraction * weight
        chosen = max(self._lag, key=lambda target: self._lag[target])
        self._lag[chosen] -= weight
        return chosen
