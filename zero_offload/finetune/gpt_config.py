"""Sizes of the small GPT of gpt.py: its presets and their parameter counts.

Pure functions of a `GPTConfig`. The command's flags name the presets, so this imports no torch.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from enum import StrEnum

from zero_offload.base.errors import ConfigError

NUM_BYTES = 256


class RecomputeMode(StrEnum):
    """The part of a forward that backward computes again instead of keeping its tensors."""

    NONE = "none"
    BLOCK = "block"


class Head(StrEnum):
    """Where the output projection's weight comes from."""

    TIED = "tied"
    OWN = "own"


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of one model."""

    num_layers: int
    width: int
    num_heads: int
    vocab_size: int = NUM_BYTES
    seq_max: int = 1024
    head: Head = Head.TIED
    recompute: RecomputeMode = RecomputeMode.NONE

    def __post_init__(self) -> None:
        # As text in a file, such as the config.json of an export.
        object.__setattr__(self, "head", Head(self.head))
        object.__setattr__(self, "recompute", RecomputeMode(self.recompute))


# From gpt125m on, the name is the size with a vocabulary of about 50 000; with bytes it is a little less.
PRESETS: dict[str, GPTConfig] = {
    "tiny": GPTConfig(num_layers=5, width=128, num_heads=4),
    "small": GPTConfig(num_layers=6, width=256, num_heads=4),
    "gpt25m": GPTConfig(num_layers=8, width=512, num_heads=8),
    "gpt125m": GPTConfig(num_layers=12, width=768, num_heads=12),
    "gpt350m": GPTConfig(num_layers=24, width=1024, num_heads=16, recompute=RecomputeMode.BLOCK),
    "gpt760m": GPTConfig(num_layers=24, width=1536, num_heads=16, recompute=RecomputeMode.BLOCK),
    "gpt1b3": GPTConfig(num_layers=24, width=2048, num_heads=16, recompute=RecomputeMode.BLOCK),
}


def preset(name: str, vocab_size: int = NUM_BYTES, seq_max: int = 1024) -> GPTConfig:
    """The preset of this name, for this vocabulary and longest sequence."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"no model preset {name!r}; did you mean {near!r}? There are: {', '.join(PRESETS)}")
    return replace(PRESETS[name], vocab_size=vocab_size, seq_max=seq_max)


def unit_numels(config: GPTConfig) -> list[tuple[str, int]]:
    """Parameters of each unit, in order of use; a tied head is counted with the embedding it shares."""
    embedding = config.vocab_size * config.width
    block = 12 * config.width**2 + 2 * config.width
    head = config.width + (embedding if config.head is Head.OWN else 0)
    blocks = [(f"blocks.{index}", block) for index in range(config.num_layers)]
    return [("embedding", embedding), *blocks, ("head", head)]


def num_parameters(config: GPTConfig) -> int:
    """Parameters of the whole model, each counted once."""
    return sum(numel for _, numel in unit_numels(config))
