"""The plan of learning, beside that of memory: how many steps, of which tokens, at which rates; and what is never seen.

Owns its figures, text and JSON, and what of them a user should change. Rates are those of Trainer's cosine. The calls:
`Learning.of` for a run's settings and data; then `lines`, `to_dict`, and `check` before step 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zero_offload.base.errors import ConfigError
from zero_offload.finetune.data.counts import Counts
from zero_offload.finetune.settings import FinetuneConfig, usual_rate
from zero_offload.runs.settings import rate_warnings

if TYPE_CHECKING:
    from zero_offload.finetune.data.prepare import Prepared  # brings datasets


_SHORT = 34
"""Steps from which on the usual warm-up, 3%, is more than one."""


@dataclass(frozen=True)
class Learning:
    """The plan of a run's learning, with its rates."""

    config: FinetuneConfig
    counts: Counts
    rows: int
    """A Trainer's counts of an epoch."""
    is_packed: bool
    steps: int
    epochs: float
    eval_every: int
    """Steps between evaluations; 0 without any."""
    warmup_steps: int
    """Steps until the highest rate; 0: the first one has it."""
    repeated: int = 0
    """Of `rows`, those that come once more in an epoch."""

    @classmethod
    def of(cls, config: FinetuneConfig, prepared: Prepared, num_ranks: int, *, shrinks: bool = True) -> Learning:
        """`shrinks`: see `FinetuneConfig.warmup_of`."""
        rows = len(prepared.train)
        steps = config.num_steps(rows, num_ranks)
        return cls(
            config,
            prepared.counts,
            rows,
            "seq_lengths" in prepared.train.column_names,
            steps,
            config.epochs_of(steps, rows, num_ranks),
            config.eval_steps(steps) if prepared.evaluation is not None else 0,
            config.warmup_steps(steps, shrinks=shrinks),
            config.repeated_rows(rows, num_ranks),
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        done, warmup = step - 1, self.warmup_steps
        if done < warmup:
            return self.config.lr * (done / max(1, warmup))
        share = (done - warmup) / max(1, self.steps - warmup)
        return self.config.lr * max(0.0, 0.5 * (1 + math.cos(math.pi * share)))

    @property
    def highest_at(self) -> int:
        """The step with the highest rate."""
        return min(self.warmup_steps + 1, self.steps)

    def check(self) -> None:
        """Raise ConfigError where no step has a rate above 0."""
        if not self.rate(self.highest_at):
            raise ConfigError(
                f"the run has 1 step, and --warmup {self.config.warmup:g} begins there with learning rate 0: nothing "
                "would be trained. Give --warmup 0, or more --steps or --epochs"
            )

    # Text

    def lines(self) -> Iterator[str]:
        steps, epochs, many = self.steps, f"{self.epochs:.3g}", "sequences" if self.is_packed else "samples"
        length = f"{steps:,} step{'s'[: steps != 1]}, {epochs} epoch{'s'[: epochs != '1']} of {self.rows:,} "
        length += many if self.rows != 1 else many[:-1]
        evaluated = f"; evaluated every {self.eval_every:,}" if self.eval_every else ""
        yield f"{self.config.method}: {length}{evaluated}"
        yield self._data_line()
        if self.repeated:
            yield f"{self.repeated:,} of the {many} come once more in an epoch: every rank gets as many"
        first, highest = self.rate(1), self.rate(self.highest_at)
        up = f"{first:g} at step 1, up to " if self.highest_at > 1 else ""
        down = ", then down to 0 by a cosine" if self.highest_at < self.steps else ""
        yield f"learning rate {up}{highest:g} at step {self.highest_at:,}{down}"
        yield from self.warnings()

    def _data_line(self) -> str:
        counts = self.counts
        verb, noun = {"mlm": ("masks some of", ""), "classify": ("trains", " labels")}.get(
            self.config.method, ("trains", "")
        )
        text = f"{verb} {counts.trained:,}{noun} of {counts.tokens + counts.cut:,} tokens read in an epoch"
        text += f", of {counts.read:,} row{'s'[: counts.read != 1]}"
        lost = [f"{counts.truncated:,} cut off at --seq {self.config.seq}"] if counts.truncated else []
        lost += [f"{counts.empty:,} left out"] if counts.empty else []
        unseen = f", with {counts.cut:,} tokens that no step sees" if counts.cut else ""
        return f"{text}; {' and '.join(lost)}{unseen}" if lost else f"{text}; nothing is cut off"

    def warnings(self) -> Iterator[str]:
        """Settings that train little, and flags to type."""
        config, steps, warmup = self.config, self.steps, self.warmup_steps
        if 0 < config.warmup < 1 and not warmup:
            yield (
                f"no warm-up: {config.warmup:.0%} of {steps:,} step{'s'[: steps != 1]} is less than one, and would "
                f"train nothing in step 1{'; --warmup STEPS gives some' if steps > 1 else ''}"
            )
        elif warmup >= steps:
            yield (
                f"warning: warm-up takes {warmup:,} steps, as many as the run has: the rate reaches "
                f"{self.rate(steps):g} of {config.lr:g}; give --warmup 0, or more --steps"
            )
        elif warmup and config.warmup >= 1 and steps < _SHORT:
            yield f"step 1 of {steps:,} has rate 0 and trains nothing, as warm-up begins there; --warmup 0 trains it"
        yield from rate_warnings(config.lr, usual_rate(config.method, is_adapter=config.lora > 0))
        if self.counts.truncated * 2 > self.counts.samples:
            yield "warning: most samples are cut off; give a larger --seq"

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Tokens and rows are those of one epoch."""
        counts = self.counts
        return {
            "method": self.config.method,
            "rows": self.rows,
            "rows_repeated": self.repeated,
            "rows_read": counts.read,
            "samples": counts.samples,
            "samples_cut": counts.truncated,
            "left_out": counts.empty,
            "tokens_read": counts.tokens + counts.cut,
            "tokens_trained": counts.trained,
            "tokens_cut": counts.cut,
            "steps": self.steps,
            "epochs": self.epochs,
            "warmup_steps": self.warmup_steps,
            "first_rate": self.rate(1),
            "highest_rate": self.rate(self.highest_at),
            "highest_rate_at": self.highest_at,
            "last_rate": self.rate(self.steps),
            "warnings": list(self.warnings()),
        }
