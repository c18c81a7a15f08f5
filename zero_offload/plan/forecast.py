"""The meaning of a predicted step: its bottleneck, its break-even, and the gain of one more of something.

Owns the questions; each is answered by predicting again with one thing changed. Pure. The calls: `Plan.of` for what
`zo.plan` returns; `forecast` for what `zero-offload plan` prints, `next_memory` for what more of it would buy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from zero_offload.base.types import GIB, Tier
from zero_offload.hardware.machines import Machine, Resource
from zero_offload.plan.memory import PLACED_KINDS, Budget, MemoryPlan, Placement
from zero_offload.plan.step_time import Prediction, StepWorkload, predict
from zero_offload.plan.table import PlanTable
from zero_offload.plan.turns import BlockTurns, turns_text

SPEED_UP = 1.1
"""The bottleneck is the resource that shortens the step most when it is so much faster."""
MEETS = 1.05
"""A step meets the one without offload when it takes no longer than so many times as long."""
NOTICED = 0.999
"""A step that takes less than so many times as long as before is faster."""
TOKENS_MAX = 1 << 24
_ROUNDS = 10


@dataclass(frozen=True)
class Bottleneck:
    resource: Resource
    title: str
    saved_s: float
    """Seconds that the step gains if the resource is `SPEED_UP` times as fast."""


def find_bottleneck(workload: StepWorkload, placement: Placement, machine: Machine, step_s: float) -> Bottleneck:
    """Speeds up each resource in turn. Of equals it takes the first, so a step that waits for nothing is bound by
    compute."""
    faster = {
        resource: predict(workload, placement, machine.faster(resource, SPEED_UP)).step_s
        for resource in machine.resources()
    }
    resource = min(faster, key=lambda each: faster[each])
    return Bottleneck(resource, machine.title(resource), step_s - faster[resource])


def without_offload(workload: StepWorkload, machine: Machine) -> float:
    """Seconds of the same step with everything in the device's memory, if it were large enough, and nothing kept."""
    everything = dict.fromkeys(PLACED_KINDS, Tier.DEVICE)
    changes: dict[str, Any] = {"durability": "scratch", "generation": None, "publish": None}
    changes |= {"activations": "device", "overlap": "none"}
    plain = replace(workload, config=replace(workload.config, **changes))
    placement = Placement(tuple(everything for _ in workload.units), Budget(0, 0, 0, machine.is_host))
    return predict(plain, placement, machine).step_s


def break_even_tokens(workload: StepWorkload, placement: Placement, machine: Machine) -> int | None:
    """Tokens of a rank's step from which on it meets the one without offload; None if 2^24 are not enough.

    By bisection, to about 1%: more tokens are more compute for the same transfers of states.
    """

    def meets(tokens: int) -> bool:
        each = max(tokens // workload.batch.micro_batches, 1)
        larger = replace(workload, batch=replace(workload.batch, tokens=each))
        return predict(larger, placement, machine).step_s <= MEETS * without_offload(larger, machine)

    low, high = 0.0, math.log2(TOKENS_MAX)
    if not meets(TOKENS_MAX):
        return None
    if meets(1):
        return 1
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if meets(round(2**middle)) else (middle, high)
    return round(2**high)


def next_memory(
    step_s: float, with_more: Callable[[int], Prediction | None], gib_max: int
) -> tuple[int, Prediction | None]:
    """The first of 1, 2, 4, ... more GiB that makes the step faster (`NOTICED`), and the step then."""
    more = 1
    while more < gib_max:
        found = with_more(more * GIB)
        if found is not None and found.step_s < step_s * NOTICED:
            return more, found
        more *= 2
    found = with_more(gib_max * GIB)
    return gib_max, found if found is not None and found.step_s < step_s * NOTICED else None


@dataclass(frozen=True)
class Forecast:
    """All that is told of a step before it runs."""

    prediction: Prediction
    bottleneck: Bottleneck
    no_offload_s: float
    break_even_tokens: int | None


def forecast(workload: StepWorkload, placement: Placement, machine: Machine) -> Forecast:
    prediction = predict(workload, placement, machine)
    return Forecast(
        prediction,
        find_bottleneck(workload, placement, machine, prediction.step_s),
        without_offload(workload, machine),
        break_even_tokens(workload, placement, machine),
    )


def refusals(reasons: Iterable[str]) -> tuple[str, ...]:
    """Why `zo.offload` raises, which counts two states of each parameter, in the place of other states."""
    return tuple(f"zo.offload, with two states of each parameter: {reason}" for reason in reasons)


@dataclass(frozen=True)
class Plan(MemoryPlan):
    """Bytes per tier, and how long a step takes: what `zo.plan` returns."""

    predicted_step_s: float
    bottleneck: str
    """The resource that shortens the step most when it is a tenth faster."""
    rates: str
    """Where the machine's rates come from."""
    notes: tuple[str, ...] = ()
    """Parts of the model's configs that were not understood, and are guessed."""
    turns: BlockTurns | None = None
    """Set where a few blocks of the model live at a time."""
    most_live: int = 0
    """The largest number of them that fits; 0 where none does, or all are trained at once."""
    refused: tuple[str, ...] = ()
    """Why `zo.offload` raises, which counts two states of each parameter, where those of the plan fit."""

    @classmethod
    def of(cls, memory: MemoryPlan, workload: StepWorkload, placement: Placement, machine: Machine) -> Plan:
        step_s = predict(workload, placement, machine).step_s
        bottleneck = find_bottleneck(workload, placement, machine, step_s)
        return cls(**vars(memory), predicted_step_s=step_s, bottleneck=bottleneck.title, rates=machine.source)

    def shortages(self, table: PlanTable) -> tuple[str, ...]:
        return super().shortages(table) or refusals(self.refused)

    def table(self) -> str:
        seconds = f"predicted step: {self.predicted_step_s:.3g} s, bound by {self.bottleneck}\nrates: {self.rates}"
        lines = [super().table(), seconds, *self.notes]
        return "\n".join(lines if self.turns is None else [*lines, turns_text(self.turns, self.most_live)])
