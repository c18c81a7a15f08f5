"""Choices of a run for the model of a folder: its task, adapters of it, blocks that take turns.

Words and values alone. Flags and settings of `finetune` use them, so this imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_offload.base.errors import ConfigError
from zero_offload.plan.turns import BlockTurns

CAUSAL, MASKED, CLASSIFY = KINDS = ("causal", "masked", "classify")
"""Tasks of a model."""


@dataclass(frozen=True)
class Lora:
    """Adapters of rank `rank`, their product scaled by `alpha / rank`."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    """As `Targets` takes them; () is what peft calls "all-linear"."""


@dataclass(frozen=True)
class LiveChoice:
    """Blocks of a model that take turns; the fields are `BlockTurns`'."""

    num_live: int | str
    """Or "auto", until a plan has found how many fit."""
    order: str
    every: int
    seed: int
    master: str = "keep"

    @property
    def trains_around(self) -> bool:
        """True if what is around the blocks is trained in all steps."""
        return self.order == "random"

    def of(self, num_blocks: int) -> BlockTurns:
        """Raises ConfigError where the model has too few blocks for it."""
        assert isinstance(self.num_live, int), "the plan says how many"
        try:
            return BlockTurns(num_blocks, self.num_live, self.order, self.every, self.seed, self.master)
        except ConfigError as error:
            raise ConfigError(f"--live-blocks {self.num_live}: {error}") from error
