"""From gradients and hyperparameters to what the update pipeline runs: pure bookkeeping, no bytes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from zero_offload.abi import Rule
from zero_offload.kernels.hyper import Hyper
from zero_offload.kernels.update import Segment, segment_array
from zero_offload.optim.pipeline import SectionUpdate
from zero_offload.runtime.grads.ledger import GradLedger
from zero_offload.runtime.grads.sections import SectionGrads


@dataclass(frozen=True)
class StepInput:
    """One step's values, captured when `step()` is called."""

    hypers: Mapping[nn.Parameter, Hyper]
    order: tuple[int, ...]
    """Units in order of first use."""
    shard_index: int
    begun: Container[str] = ()
    """Parameters that have states though no step is counted."""


def section_updates(
    grads: GradLedger, sections: Iterable[SectionGrads], step: StepInput, param_steps: dict[str, int]
) -> list[SectionUpdate]:
    """Which of `sections` to update, in the order of `step`; counts the step of each parameter in `param_steps`.

    A unit takes part with all its trainable sections or not at all, since its new values are delivered whole.
    """
    found: dict[int, list[SectionUpdate]] = {}
    for section in sections:
        segments = _segments(grads, section, step, param_steps)
        update = SectionUpdate(
            unit=section.unit.index,
            name=section.unit.name,
            position=section.unit.sections.index(section.section),
            shard=section.section.shard,
            grads=section.shard,
            origin=step.shard_index * section.layout.shard_numel,
            segments={rule: segment_array(of_rule) for rule, of_rule in segments.items()},
            complete=sum(map(len, segments.values())) == len(section.layout.params),
        )
        found.setdefault(update.unit, []).append(update)
    busy = {unit for unit, updates in found.items() if any(update.segments for update in updates)}
    return [update for unit in step.order if unit in busy for update in found[unit]]


def _segments(
    grads: GradLedger,
    section: SectionGrads,
    step: StepInput,
    param_steps: dict[str, int],
) -> dict[Rule, list[Segment]]:
    segments: dict[Rule, list[Segment]] = {}
    for index, (piece, param) in enumerate(zip(section.layout.params, section.params, strict=True)):
        hyper = step.hypers.get(param)
        if hyper is None or index not in section.holding:
            continue
        param_steps[piece.spec.name] += 1
        begin, end = section.layout.in_shard(piece, step.shard_index)
        factor = grads.factor(section, index)
        if not section.section.shard.keeps(hyper.states):
            hyper = hyper.first()
        elif piece.spec.name in step.begun:
            hyper = hyper.going_on()
        segment = hyper.segment(begin, end, factor, param_steps[piece.spec.name])
        segments.setdefault(hyper.rule, []).append(segment)
    return segments
