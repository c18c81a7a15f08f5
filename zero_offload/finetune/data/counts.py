"""Counts of rows of data on their way to a Trainer."""

from __future__ import annotations

import statistics
from array import array
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Counts:
    """Counts of the rows of one use, training or evaluation. Tokens are those of one epoch."""

    read: int
    samples: int
    rows: int
    """Rows as a Trainer counts them; where packed, a row is several samples."""
    truncated: int
    """Samples that were longer than `seq`, and are cut there."""
    divided: int
    """Texts that were longer than `seq`, and are several samples."""
    unfolded: int
    """Conversations that are several samples; see turns.py."""
    empty: int
    """Rows and samples that are left out: no token of them would be trained."""
    tokens: int
    trained: int
    """Tokens with loss; of mlm, those that may be masked."""
    median: int
    longest: int
    """Of the samples, in tokens."""
    cut: int = 0
    """Tokens that no step sees: behind `seq`, and of samples that are left out. Files of before have no such count."""

    def to_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)


@dataclass
class Tally:
    """Counts on the way."""

    read: int = 0
    rows: int = 0
    truncated: int = 0
    divided: int = 0
    unfolded: int = 0
    empty: int = 0
    trained: int = 0
    cut: int = 0
    lengths: array[int] = field(default_factory=lambda: array("q"))

    def counts(self) -> Counts:
        return Counts(
            read=self.read,
            samples=len(self.lengths),
            rows=self.rows,
            truncated=self.truncated,
            divided=self.divided,
            unfolded=self.unfolded,
            empty=self.empty,
            tokens=sum(self.lengths),
            trained=self.trained,
            median=int(statistics.median(self.lengths)) if self.lengths else 0,
            longest=max(self.lengths, default=0),
            cut=self.cut,
        )
