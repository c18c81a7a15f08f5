"""From gradients and hyperparameters to what the update pipeline runs: pure bookkeeping, no bytes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import STATES, Hyper, Segment, segment_array
from zero_offload.optim.pipeline import SectionUpdate
from zero_offload.runtime.grads.gradients import Gradients
from zero_offload.runtime.grads.section import GradSection


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
    grads: Gradients, sections: Iterable[GradSection], step: StepInput, param_steps: dict[str, int]
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
            grads=section.store,
            origin=step.shard_index * section.layout.shard_numel,
            segments={rule: segment_array(of_rule) for rule, of_rule in segments.items()},
            complete=sum(map(len, segments.values())) == len(section.layout.params),
        )
        found.setdefault(update.unit, []).append(update)
    busy = {unit for unit, updates in found.items() if any(update.segments for update in updates)}
    return [update for unit in step.order if unit in busy for update in found[unit]]


def _segments(
    grads: Gradients,
    section: GradSection,
    step: StepInput,
    param_steps: dict[str, int],
) -> dict[Rule, list[Segment]]:
    segments: dict[Rule, list[Segment]] = {}
    layout, states = section.layout, set(section.section.shard.states)
    for index in sorted(section.holding):
        piece, hyper = layout.params[index], step.hypers.get(section.params[index])
        if hyper is None:
            continue
        name = piece.spec.name
        param_steps[name] += 1
        begin, end = layout.in_shard(piece, step.shard_index)
        factor = grads.factor(section, index)
        if not states.issuperset(STATES[hyper.rule]):
            hyper = hyper.first()
        elif name in step.begun:
            hyper = hyper.going_on()
        segments.setdefault(hyper.rule, []).append(hyper.segment(begin, end, factor, param_steps[name]))
    return segments
