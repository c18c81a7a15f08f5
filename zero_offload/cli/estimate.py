"""The printed forms of `zero-offload plan` for a model by its name or size.

Owns words and layout; every number is made elsewhere. Calls: `as_text`, `as_json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zero_offload.base.spans import Cause
from zero_offload.base.types import StateKind, Tier, format_bytes
from zero_offload.finetune.fit.request import Offer, Planned, Request, drive_wear, is_automatic
from zero_offload.plan.forecast import MEETS, Forecast
from zero_offload.plan.memory import PLACED_KINDS
from zero_offload.plan.table import PlanTable
from zero_offload.plan.wear import LIFE_DAYS, TB, Wear
from zero_offload.runs.number_format import format_duration, format_number

_CAUSES = {
    Cause.PARAMS: "parameters",
    Cause.ACTIVATIONS: "activations",
    Cause.UPDATE: "the update",
    Cause.GRADS: "gradients",
    Cause.COMMIT: "commits",
}
_ORDERS = {True: "all at a unit before the next", False: "one after the other"}


@dataclass(frozen=True)
class Report:
    """All that is printed."""

    request: Request
    planned: Planned
    found: Forecast | None
    """None where the plan does not fit."""
    ways: Sequence[str]
    """Ways to make it fit, where it does not."""
    offers: Sequence[Offer]
    tbw: float
    given_step_s: float | None
    recommended: int | None
    """Steps between generations that spare the drives; None where they make no difference."""

    @property
    def num_trained(self) -> int:
        return sum(each.numel.trained for each in self.request.work)

    @property
    def num_parameters(self) -> int:
        return self.num_trained + sum(each.numel.frozen for each in self.request.work)

    @property
    def table(self) -> PlanTable:
        return self.request.table(self.planned.memory)

    @property
    def step_s(self) -> float | None:
        """Seconds that wear is counted by."""
        if self.given_step_s is not None or self.found is None:
            return self.given_step_s
        return self.found.prediction.step_s

    @property
    def wear(self) -> Wear:
        return drive_wear(self.request, self.planned.memory).at(self.step_s)

    @property
    def outgrows(self) -> bool:
        """True if at the break-even activations need memory of the GPU that this placement uses."""
        request, found = self.request, self.found
        if not request.has_gpu or found is None or found.break_even_tokens is None:
            return False
        then = request.with_tokens(found.break_even_tokens).activation_bytes()
        free = self.planned.memory.budget.of(Tier.DEVICE) - self.planned.memory.used_bytes(Tier.DEVICE)
        return then - request.activation_bytes() > free


def as_text(report: Report) -> str:
    request, memory = report.request, report.planned.memory
    ranks = _count(request.cluster.ranks, "rank")
    where = f" in {_count(request.cluster.nodes, 'machine')}" if request.cluster.nodes > 1 else ""
    here = request.gpu_here
    automatic = [kind for kind in PLACED_KINDS if is_automatic(request.config, kind)]
    chosen = ", ".join(f"{kind.value} {_shares_text(_shares(report, kind))}" for kind in automatic)
    lora = f", {report.num_trained:,} of them trained (LoRA of rank {request.lora})" if request.lora else ""
    lines = [
        f"{request.model}: {report.num_parameters:,} parameters in {len(request.work)} units on {ranks}{where}{lora}",
        *([] if here is None else [f"on this machine's {here.name}, {format_bytes(here.free_bytes)} free"]),
        *([f"auto: {chosen}"] if automatic else []),
        *memory.lines(report.table, "of one rank:"),
        *report.ways,
        *_forecast_lines(report),
        *_wear_lines(report.wear, report.tbw, report.step_s),
        *_interval_lines(report),
    ]
    return "\n".join(lines)


def _shares(report: Report, kind: StateKind) -> dict[str, float]:
    """Shares of a kind's bytes, by tier."""
    sizes = [
        {
            StateKind.PARAMS: unit.params_bytes,
            StateKind.GRADS: unit.grads_bytes,
            StateKind.OPTIMIZER: unit.optimizer_bytes,
        }[kind]
        for unit in report.planned.job.units
    ]
    shares = dict.fromkeys(Tier, 0)
    for at, size in zip(report.planned.placement.tiers, sizes, strict=True):
        shares[at[kind]] += size
    return {tier.value: size / (sum(sizes) or 1) for tier, size in shares.items() if size}


def _shares_text(shares: dict[str, float]) -> str:
    if len(shares) == 1:
        return next(iter(shares))
    return " + ".join(f"{share:.0%} {tier}" for tier, share in shares.items())


def _forecast_lines(report: Report) -> Iterator[str]:
    found, machine = report.found, report.planned.machine
    if found is None:
        return
    step, batch = found.prediction, report.planned.job.batch
    tokens = batch.tokens * batch.micro_batches
    speed = f"{_speed(step.tokens_per_s)} tokens/s in all"
    micro = f" in {batch.micro_batches} micro-batches, {_ORDERS[batch.by_unit]}" if batch.micro_batches > 1 else ""
    yield f"predicted step: {_seconds(step.step_s)} for {tokens:,} tokens of a rank{micro}, {speed}"
    busy = ", ".join(f"{machine.title(lane)} {share:.0%}" for lane, share in step.busy.items() if share >= 0.005)
    yield f"  busy: {busy}"
    if waits := [
        f"{_seconds(s)} for {_CAUSES[cause]}" for cause, s in step.exposed_s.items() if s >= 0.01 * step.step_s
    ]:
        yield f"  compute waits {', '.join(waits)}"
    saved = (
        f"a tenth more of it saves {_seconds(found.bottleneck.saved_s)}" if found.bottleneck.saved_s > 0 else "alone"
    )
    yield f"  bound by {found.bottleneck.title}: {saved}"
    yield f"without offload, if it fitted: {_seconds(found.no_offload_s)}; {_break_even(report, found)}"
    for offer in report.offers:
        yield f"{offer.amount} {offer.title}: {_offer_text(offer, found)}"
    yield f"rates: {machine.source}"
    if "not measured" in machine.source and report.request.gpu is None:
        yield "  (--measure takes some seconds, and is remembered)"
    elif "not measured" in machine.source:
        yield "  (zero-offload bench --device measures such a GPU where it is, and is remembered there)"


def _break_even(report: Report, found: Forecast) -> str:
    percent = f"within {MEETS - 1:.0%} of that"
    if found.break_even_tokens is None:
        return f"no number of tokens per step comes {percent}"
    then = f"{percent} from {found.break_even_tokens:,} tokens of a rank per step on"
    if report.outgrows:
        then += f" (if their activations had room: see --tokens {found.break_even_tokens})"
    return then


def _offer_text(offer: Offer, found: Forecast) -> str:
    now, then = found.prediction, offer.prediction
    if then is None:
        return "no gain" if offer.amount == 1 else "no gain, nor of less"
    if "GPU" in offer.title:
        return f"{_speed(then.tokens_per_s)} tokens/s ({then.tokens_per_s / now.tokens_per_s:.2f}x)"
    each = f", {_seconds((now.step_s - then.step_s) / offer.amount)} for each" if offer.amount > 1 else ""
    return f"{_seconds(then.step_s)} a step ({_seconds(now.step_s - then.step_s)} less{each})"


def _seconds(seconds: float) -> str:
    if seconds >= 999.5:
        return format_duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 9.5 else format_number(tokens_per_s)


def _wear_lines(wear: Wear, tbw: float, step_s: float | None) -> list[str]:
    """Bytes written to each drive, and how long it lasts; empty where nothing is written."""
    if wear.bytes_per_step == 0:
        return []
    parts = []
    if wear.states_bytes:
        parts.append(f"{format_bytes(wear.states_bytes)} of states that rest on it")
    if wear.activation_bytes:
        parts.append(f"{format_bytes(wear.activation_bytes)} of activations")
    if wear.commit_bytes:
        how_often = f"of {format_bytes(wear.commit_bytes)} every {wear.commit_every} steps"
        if wear.is_bound:
            how_often = f"at most: commit_every={wear.commit_every} goes by time; each step is counted here"
        parts.append(f"{format_bytes(wear.commit_bytes_per_step)} of generations ({how_often})")
    lines = [f"each drive is written {format_bytes(wear.bytes_per_step)} per step: {', '.join(parts)}"]
    num_steps = wear.steps_to(tbw)
    if step_s is None:
        lines.append(
            f"that is {wear.bytes_per_step * 1000 / TB:.3g} TB per 1000 steps; {tbw:g} TBW last {num_steps:,} steps"
        )
    else:
        lines.append(
            f"that is {wear.tb_per_day(step_s):.3g} TB per day at {step_s:g} s per step; {tbw:g} TBW last "
            f"{_days(wear.days_to(tbw, step_s))}, {num_steps:,} steps (--tbw says another rating)"
        )
    return lines


def _interval_lines(report: Report) -> Iterator[str]:
    """How often to commit, and what else a drive lasts longer with."""
    wear, tbw, step_s, steps = report.wear, report.tbw, report.step_s, report.recommended
    if step_s is None or wear.bytes_per_step == 0:
        return
    if steps is not None and wear.commit_every != steps:
        days = replace(wear, commit_every=steps).days_to(tbw, step_s)
        if isinstance(wear.commit_every, str) or steps > wear.commit_every:
            yield f"--commit-every {steps} spares the drives: {tbw:g} TBW then last {_days(days)}"
    elif steps is not None and steps > 1:
        each = replace(wear, commit_every=1).days_to(tbw, step_s)
        yield (
            f"a generation every {steps} steps is chosen by that, and a crash costs as many at most: give train "
            f"--commit-every {steps}, or zo.OffloadConfig commit_every={steps}; with one in each step, their default, "
            f"{tbw:g} TBW last {_days(each)}"
        )
    if wear.states_bytes and replace(wear, commit_bytes=0.0).days_to(tbw, step_s) < LIFE_DAYS:
        compact = "" if report.request.config.numerics.states == "compact" else "--states compact writes fewer bytes, "
        yield f"  states that rest on drives are written in each step: {compact}what rests in RAM is not written"


def _days(days: float) -> str:
    return f"{days:.3g} days" if days < LIFE_DAYS * 2 else f"{days / 365:.3g} years"


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number:,} {what}s"


def as_json(report: Report) -> dict[str, Any]:
    memory, found = report.planned.memory, report.found
    tiers = {}
    for tier in Tier:
        kinds = {kind.value: memory.rest_bytes[tier, kind] for kind in PLACED_KINDS}
        tiers[tier.value] = kinds | {
            "in_flight": memory.staging_bytes[tier],
            "total": memory.used_bytes(tier),
            "available": memory.budget.of(tier),
        }
    wear, tbw, step_s = report.wear, report.tbw, report.step_s
    is_written = wear.bytes_per_step > 0
    batch = report.planned.job.batch
    life_days = wear.days_to(tbw, step_s) if is_written and step_s is not None else None
    return {
        "planned": report.table.to_dict(),
        "fits": memory.fits,
        "reasons": memory.shortages(report.table),
        "suggestions": list(report.ways),
        "bytes": tiers,
        "nvme_written_bytes_per_step": memory.nvme_written_bytes_per_step,
        "model": report.request.model,
        "parameters": report.num_parameters,
        "trained_parameters": report.num_trained,
        "tokens_per_step": batch.tokens * batch.micro_batches * report.request.cluster.ranks,
        "step_s": step_s,
        "tokens_per_s": found and found.prediction.tokens_per_s,
        "bottleneck": found and found.bottleneck.title,
        "rates": report.planned.machine.source,
        "written_bytes_per_step": wear.bytes_per_step * max(len(report.request.config.nvme_dirs), 1),
        "written_is_upper_bound": wear.is_bound,
        "drive_life_days": life_days,
        "placement": {kind.value: _shares(report, kind) for kind in PLACED_KINDS},
        "activation_bytes": report.request.activation_bytes(),
        "step": None if found is None else _step_json(report, found),
        "commit_every": report.request.config.commit_every,
        "recommended_commit_every": report.recommended,
        # Of each drive.
        "wear": {
            "states_bytes_per_step": int(wear.states_bytes),
            "activation_bytes_per_step": int(wear.activation_bytes),
            "commit_bytes_per_step": int(wear.commit_bytes_per_step),
            "is_upper_bound": wear.is_bound,
            "tbw": tbw,
            "steps_to_tbw": wear.steps_to(tbw) if is_written else None,
            "tb_per_day": None if step_s is None else wear.tb_per_day(step_s),
            "days_to_tbw": life_days,
        },
    }


def _step_json(report: Report, found: Forecast) -> dict[str, Any]:
    step, machine = found.prediction, report.planned.machine
    return {
        "predicted_s": step.step_s,
        "compute_s": step.compute_s,
        "tokens_per_s": step.tokens_per_s,
        "busy": {machine.title(lane): share for lane, share in step.busy.items()},
        "exposed_s": {cause.value: seconds for cause, seconds in step.exposed_s.items()},
        "bottleneck": found.bottleneck.title,
        "bottleneck_saves_s": found.bottleneck.saved_s,
        "no_offload_s": found.no_offload_s,
        "break_even_tokens": found.break_even_tokens,
        "offers": [
            {
                "amount": offer.amount,
                "what": offer.title,
                "step_s": offer.prediction and offer.prediction.step_s,
                "tokens_per_s": offer.prediction and offer.prediction.tokens_per_s,
            }
            for offer in report.offers
        ],
        "rates": machine.source,
    }
