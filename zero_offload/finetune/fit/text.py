"""The printed form of a plan, of a fine-tuning run or of a model by its name or size; as JSON too.

Owns words and layout; every number is made elsewhere. The calls: `as_text` and `as_json`; `command` for a run's.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from zero_offload.base.spans import Cause
from zero_offload.base.types import StateKind, Tier, format_bytes
from zero_offload.finetune.fit.figures import FolderPlan, ModelPlan
from zero_offload.finetune.fit.job import FolderJob
from zero_offload.finetune.fit.request import Planned, Upgrade, is_automatic
from zero_offload.plan.forecast import MEETS, Forecast
from zero_offload.plan.memory import PLACED_KINDS
from zero_offload.plan.table import TIER_PLACES, Row, table_lines
from zero_offload.plan.turns import turns_text
from zero_offload.plan.wear import LIFE_DAYS, TB, Wear
from zero_offload.runs.number_format import format_duration, format_number, format_written

_DAY_S = 86400
_CLOCK_S_MAX = 100 * 365 * _DAY_S
"""No run ends later, and calendars of machines do."""


def command(plan: FolderPlan) -> str:
    """The command line of the run, quoted for a shell."""
    job = plan.job
    launcher = ["zero-offload"]
    if job.ranks > 1:
        launcher = ["torchrun", "--nproc-per-node", str(job.cluster.ranks_per_node), "-m", "zero_offload"]
    return shlex.join([*launcher, "finetune", *job.words])


def as_text(plan: FolderPlan | ModelPlan) -> str:
    return "\n".join(_folder_lines(plan) if isinstance(plan, FolderPlan) else _model_lines(plan))


def _counts(planned: Planned) -> tuple[int, int]:
    """Parameters that are trained, and all."""
    trained = sum(each.numel.trained for each in planned.workload.work)
    return trained, trained + sum(each.numel.frozen for each in planned.workload.work)


# A run of `finetune`


def _folder_lines(plan: FolderPlan) -> Iterator[str]:
    yield from _what_lines(plan)
    yield from plan.table.lines("of one rank:" if plan.job.ranks > 1 else "")
    yield from _disk_lines(plan)
    if plan.fits:
        yield "it fits"
        yield from _time_lines(plan)
        yield from _wear_lines(plan)
        yield from _token_lines(plan)
        if plan.alternatives:
            yield "drives are written less:"
            yield from _alternative_lines(plan)
        return
    yield "it does not fit"
    yield from plan.shortages
    if any(place.total > place.free_bytes for place in plan.places) and plan.job.drives is None:
        yield "a larger disk: --nvme DIR for swap files, --out OUT for outputs"
    if plan.alternatives:
        yield "what would fit:"
        yield from _alternative_lines(plan)
    else:
        fewer = "fewer live blocks" if plan.turns is not None else "live blocks, LoRA"
        yield f"nothing that was tried fits: {fewer}, compact states, smaller batches, shorter sequences"


def _what_lines(plan: FolderPlan) -> Iterator[str]:
    job, units = plan.job, plan.planned.workload.work
    trained, whole = _counts(plan.planned)
    what = f"{job.folder.path.name}: {whole:,} parameters in {len(units)} units"
    if plan.turns is not None:
        what += f", {trained:,} of them trained at a time"
    elif trained < whole:
        rank = f"LoRA of rank {job.lora.rank}" if job.lora is not None else "an adapter"
        what += f", {trained:,} of them trained ({rank})"
    if job.ranks > 1:
        what += f", on {job.ranks} ranks"
    yield what
    if plan.turns is not None:
        yield f"  {turns_text(plan.turns, plan.most_live)}"
        if plan.job.steps and (never := plan.turns.never_live(plan.job.steps)):
            yield (
                f"  warning: {plan.job.steps:,} steps are too few for all: {len(never)} of {plan.turns.num_blocks} "
                "blocks are never trained; give a smaller --live-every, more --live-blocks or more steps"
            )
    if plan.adapted:
        yield f"  adapters on {', '.join(plan.adapted)}"
    if plan.not_adapted and job.lora is not None and not job.lora.targets:
        yield f"  none on other linear layers: {', '.join(plan.not_adapted)}"
    if job.optimizer:
        kept = sum(each.optimizer_bytes for each in plan.planned.workload.units) * job.ranks / max(trained, 1)
        yield f"  stepped by {job.optimizer}: {kept:.1f} bytes per trained parameter, value and master among them"
    if plan.drawn:
        yield f"  in no file, and so drawn by the seed: {', '.join(plan.drawn)}"
    if job.folder.is_quantized:
        quantized = round(sum(each.quantized_numel for each in units))
        others = f"the other {whole - trained - quantized:,} frozen ones"
        others += ", those of experts among them," * job.folder.has_experts
        yield f"  {quantized:,} parameters of linear layers are quantized; {others} stay {job.offload.numerics.compute}"
    yield f"a step: {_step_text(job)}"


def _step_text(job: FolderJob) -> str:
    one, many = ("pair of samples", "pairs of samples") if job.method == "dpo" else ("sample", "samples")
    if job.is_packed:
        one, many = "sequence", "sequences"
    length = f"of {job.seq:,} tokens" if job.is_packed else f"of {format_number(job.mean_length)} tokens on average"
    text = f"{job.batch} {one if job.batch == 1 else many} {length}"
    if job.accumulate > 1:
        text += f", {job.accumulate} times"
    if job.ranks > 1:
        text += f", on {job.ranks} ranks"
    return f"{text}: {job.tokens_per_step:,} tokens"


def _by_tier(row: Row) -> dict[str, int]:
    """Bytes by the tiers' names; where the CPU computes, all memory is its tier's."""
    return {tier.value: row[place] for tier, place in TIER_PLACES.items() if place in row}


def _disk_lines(plan: FolderPlan) -> Iterator[str]:
    if plan.problem:
        yield f"activations are estimated: the model does not run on tensors without values ({plan.problem})"
    for place in plan.places:
        parts = ", ".join(f"{format_bytes(nbytes)} {name}" for name, nbytes in place.needed.items() if nbytes)
        if parts:
            yield f"{place.name}: {parts}; {format_bytes(place.free_bytes)} free"


def _time_lines(plan: FolderPlan) -> Iterator[str]:
    speed = format_number(plan.prediction.tokens_per_s)
    yield f"a step takes {format_duration(plan.step_s)}, {speed} tokens/s, bound by {plan.bottleneck.title}"
    yield from _drive_lines(plan)
    if plan.run_s is not None:
        has_end = not plan.job.is_elsewhere and plan.run_s < _CLOCK_S_MAX
        ends = f", until {_clock(plan.run_s)}" if has_end else ""
        verb = "step takes" if plan.job.steps == 1 else "steps take"
        yield f"{plan.job.steps:,} {verb} {format_duration(plan.run_s)}{ends}"
    yield f"rates: {plan.planned.machine.source}"
    yield from plan.notes


def _drive_lines(plan: FolderPlan) -> Iterator[str]:
    """Lines about the tokens or drives that would hide transfers."""
    hidden, tokens = plan.hidden_tokens, plan.job.tokens
    if hidden is not None and hidden > tokens:
        yield f"  from {hidden:,} tokens of a micro-batch on (now {tokens:,}) transfers cost no time"
    if plan.one_more_drive is not None:
        then = plan.one_more_drive
        speed = format_number(then.tokens_per_s)
        yield f"  with one more such drive a step takes {format_duration(then.step_s)}, {speed} tokens/s"


def _clock(seconds: float) -> str:
    """When so many seconds are over, by the clock here."""
    days = seconds / 86400
    form = "%H:%M" if days < 0.5 else "%a %d %b, %H:%M" if days < 180 else "%d %b %Y"
    return time.strftime(form, time.localtime(time.time() + seconds))


def _wear_lines(plan: FolderPlan) -> Iterator[str]:
    if not plan.written_per_step:
        if plan.offload.nvme_dirs:
            yield "a step writes nothing to drives"
        return
    most = "up to " if plan.wear.is_bound else ""
    text = f"written to drives: {most}{format_written(plan.written_per_step)} per step"
    if plan.written_bytes is not None:
        share = plan.endured_share or 0.0
        text += f", {most}{format_written(plan.written_bytes)} in the run ({_percent(share)} of what a drive endures)"
    yield f"{text}; at this rate a drive rated for {plan.job.tbw:g} TB lasts {_life(plan)}"
    if plan.chosen_every is not None and plan.chosen_every > 1:
        yield f"a commit every {plan.chosen_every} steps spares the drives; a crash loses the steps since the last one"


def _life(plan: FolderPlan) -> str:
    return "" if plan.life_days is None else format_duration(plan.life_days * _DAY_S)


def _token_lines(plan: FolderPlan) -> Iterator[str]:
    """The cost of a step with fewer or more tokens, as lines."""
    if len(plan.by_tokens) < 2:
        return
    job = plan.job
    yield "tokens per step decide how often states are read and written:"
    what = "an epoch writes" if job.rows else "1M tokens write"
    rows = [("--accumulate", "tokens", "a step", "tokens/s", what, "a drive lasts")]
    for each in plan.by_tokens:
        tokens = each.job.tokens_per_step
        steps = job.rows / (job.batch * job.ranks * each.job.accumulate) if job.rows else 1e6 / tokens
        rows.append(
            (
                ("> " if tokens == job.tokens_per_step else "") + str(each.job.accumulate),
                f"{tokens:,}",
                format_duration(each.step_s),
                format_number(each.prediction.tokens_per_s),
                format_written(steps * each.written_per_step),
                _life(each),
            )
        )
    yield from table_lines(rows)


def _percent(share: float) -> str:
    return f"{format_number(100 * share)}%" if share >= 1e-4 else "less than 0.01%"


def _alternative_lines(plan: FolderPlan) -> Iterator[str]:
    what = ("a step writes",) if plan.run_s is None else ("in all", "written")
    rows = [("a step", "tokens/s", *what, f"a {plan.job.tbw:g} TB drive lasts", "with")]
    for alternative in plan.alternatives:
        each = alternative.plan
        rows.append(
            (
                format_duration(each.step_s),
                format_number(each.prediction.tokens_per_s),
                *([] if each.run_s is None else [format_duration(each.run_s)]),
                format_written(each.written_per_step if each.written_bytes is None else each.written_bytes),
                _life(each),
                " ".join(alternative.flags),
            )
        )
    yield from table_lines(rows, left=len(what) + 3)


# A model by its name or size


_CAUSES = {
    Cause.PARAMS: "parameters",
    Cause.ACTIVATIONS: "activations",
    Cause.UPDATE: "the update",
    Cause.GRADS: "gradients",
    Cause.COMMIT: "commits",
}
_ORDERS = {True: "all at a unit before the next", False: "one after the other"}


def _model_lines(plan: ModelPlan) -> Iterator[str]:
    request, here = plan.request, plan.request.gpu_here
    trained, whole = _counts(plan.planned)
    ranks = _count(request.cluster.ranks, "rank")
    where = f" in {_count(request.cluster.nodes, 'machine')}" if request.cluster.nodes > 1 else ""
    where += ", each of which has all states" if request.cluster.is_hybrid else ""
    lora = f", {trained:,} of them trained (LoRA of rank {request.lora})" if request.lora else ""
    yield f"{request.model}: {whole:,} parameters in {len(request.work)} units on {ranks}{where}{lora}"
    if here is not None:
        yield f"on this machine's {here.name}, {format_bytes(here.free_bytes)} free"
    if automatic := [kind for kind in PLACED_KINDS if is_automatic(request.config, kind)]:
        yield f"auto: {', '.join(f'{kind.value} {_shares_text(_shares(plan, kind))}' for kind in automatic)}"
    yield from plan.planned.memory.lines(plan.table, "of one rank:")
    yield from plan.suggestions
    yield from _forecast_lines(plan)
    yield from _model_wear_lines(plan.wear, plan.tbw, plan.step_s)
    yield from _interval_lines(plan)


def _shares(plan: ModelPlan, kind: StateKind) -> dict[str, float]:
    """Shares of a kind's bytes, by tier."""
    sizes = [getattr(unit, f"{kind.value}_bytes") for unit in plan.planned.workload.units]
    shares = dict.fromkeys(Tier, 0)
    for at, size in zip(plan.planned.placement.tiers, sizes, strict=True):
        shares[at[kind]] += size
    return {tier.value: size / (sum(sizes) or 1) for tier, size in shares.items() if size}


def _shares_text(shares: dict[str, float]) -> str:
    if len(shares) == 1:
        return next(iter(shares))
    return " + ".join(f"{share:.0%} {tier}" for tier, share in shares.items())


def _forecast_lines(plan: ModelPlan) -> Iterator[str]:
    found, machine = plan.found, plan.planned.machine
    if found is None:
        return
    step, batch = found.prediction, plan.planned.workload.batch
    tokens = batch.tokens * batch.micro_batches
    speed = f"{format_number(step.tokens_per_s)} tokens/s in all"
    micro = f" in {batch.micro_batches} micro-batches, {_ORDERS[batch.by_unit]}" if batch.micro_batches > 1 else ""
    yield f"predicted step: {format_duration(step.step_s)} for {tokens:,} tokens of a rank{micro}, {speed}"
    busy = ", ".join(
        f"{machine.title(resource)} {share:.0%}" for resource, share in step.busy.items() if share >= 0.005
    )
    yield f"  busy: {busy}"
    if waits := [
        f"{format_duration(s)} for {_CAUSES[cause]}" for cause, s in step.exposed_s.items() if s >= 0.01 * step.step_s
    ]:
        yield f"  compute waits {', '.join(waits)}"
    saved = (
        f"a tenth more of it saves {format_duration(found.bottleneck.saved_s)}"
        if found.bottleneck.saved_s > 0
        else "alone"
    )
    yield f"  bound by {found.bottleneck.title}: {saved}"
    yield f"without offload, if it fitted: {format_duration(found.no_offload_s)}; {_break_even(plan, found)}"
    for offer in plan.offers:
        amount = "" if offer.amount is None else f"{offer.amount} "
        yield f"{amount}{offer.title}: {_offer_text(offer, found)}"
    yield f"rates: {machine.source}"
    if "not measured" in machine.source and plan.request.gpu is None:
        yield "  (--measure takes some seconds, and is remembered)"
    elif "not measured" in machine.source:
        yield "  (zero-offload bench --device measures such a GPU where it is, and is remembered there)"


def _break_even(plan: ModelPlan, found: Forecast) -> str:
    percent = f"within {MEETS - 1:.0%} of that"
    if found.break_even_tokens is None:
        return f"no number of tokens per step comes {percent}"
    then = f"{percent} from {found.break_even_tokens:,} tokens of a rank per step on"
    if plan.outgrows:
        then += f" (if their activations had room: see --tokens {found.break_even_tokens})"
    return then


def _offer_text(offer: Upgrade, found: Forecast) -> str:
    now, then = found.prediction, offer.prediction
    if then is None:
        return "no gain, nor of less" if offer.amount and offer.amount > 1 else "no gain"
    if "GPU" in offer.title:
        return f"{format_number(then.tokens_per_s)} tokens/s ({then.tokens_per_s / now.tokens_per_s:.2f}x)"
    each = (
        f", {format_duration((now.step_s - then.step_s) / offer.amount)} for each"
        if offer.amount and offer.amount > 1
        else ""
    )
    return f"{format_duration(then.step_s)} a step ({format_duration(now.step_s - then.step_s)} less{each})"


def _model_wear_lines(wear: Wear, tbw: float, step_s: float | None) -> list[str]:
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
        parts.append(f"{format_bytes(wear.commit_bytes_per_step)} of commits ({how_often})")
    lines = [f"each drive is written {format_bytes(wear.bytes_per_step)} per step: {', '.join(parts)}"]
    num_steps, drive = wear.steps_to(tbw), f"a drive rated for {tbw:g} TB lasts"
    if step_s is None:
        lines.append(f"that is {wear.bytes_per_step * 1000 / TB:.3g} TB per 1000 steps; {drive} {num_steps:,} steps")
    else:
        lines.append(
            f"that is {wear.tb_per_day(step_s):.3g} TB per day at {step_s:g} s per step; {drive} "
            f"{format_duration(wear.days_to(tbw, step_s) * _DAY_S)}, {num_steps:,} steps (--tbw says another rating)"
        )
    return lines


def _interval_lines(plan: ModelPlan) -> Iterator[str]:
    """How often to commit, and what else a drive lasts longer with."""
    wear, tbw, step_s, steps = plan.wear, plan.tbw, plan.step_s, plan.recommended
    if step_s is None or wear.bytes_per_step == 0:
        return
    if steps is not None and wear.commit_every != steps:
        days = replace(wear, commit_every=steps).days_to(tbw, step_s)
        if isinstance(wear.commit_every, str) or steps > wear.commit_every:
            life = format_duration(days * _DAY_S)
            yield f"--commit-every {steps} spares the drives: a drive rated for {tbw:g} TB then lasts {life}"
    elif steps is not None and steps > 1:
        each = replace(wear, commit_every=1).days_to(tbw, step_s)
        yield (
            f"a commit every {steps} steps is chosen by that, and a crash costs as many at most: give train "
            f"--commit-every {steps}, or zo.OffloadConfig commit_every={steps}. With one in each step, the default, "
            f"a drive rated for {tbw:g} TB lasts {format_duration(each * _DAY_S)}"
        )
    if wear.states_bytes and replace(wear, commit_bytes=0.0).days_to(tbw, step_s) < LIFE_DAYS:
        compact = "" if plan.request.config.numerics.states == "compact" else "--states compact writes fewer bytes, "
        yield f"  states that rest on drives are written in each step: {compact}what rests in RAM is not written"


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number:,} {what}s"


# As JSON


def as_json(plan: FolderPlan | ModelPlan) -> dict[str, Any]:
    planned = plan.planned
    trained, whole = _counts(planned)
    both = {
        "planned": plan.table.to_dict(),
        "parameters": whole,
        "trained_parameters": trained,
        "step_s": plan.step_s,
        "rates": planned.machine.source,
        "nvme_written_bytes_per_step": planned.memory.nvme_written_bytes_per_step,
        "written_is_upper_bound": plan.wear.is_bound,
    }
    return both | (_folder_json(plan) if isinstance(plan, FolderPlan) else _model_json(plan))


def _folder_json(plan: FolderPlan) -> dict[str, Any]:
    job = plan.job
    return {
        "fits": plan.fits,
        "reasons": list(plan.shortages),
        "model": str(job.folder.path),
        "adapted": list(plan.adapted),
        "live": None
        if plan.turns is None
        else {
            "blocks": plan.turns.num_live,
            "of": plan.turns.num_blocks,
            "order": plan.turns.order,
            "every": plan.turns.period,
            "most": plan.most_live,
        },
        "bytes": {name: _by_tier(row) for name, row in plan.table.rows.items()},
        "used_bytes": plan.used,
        "available_bytes": plan.available,
        "disks": [{"name": each.name, "needed": each.needed, "free_bytes": each.free_bytes} for each in plan.places],
        "tokens_per_step": job.tokens_per_step,
        "tokens_per_s": plan.prediction.tokens_per_s,
        "bottleneck": plan.bottleneck.title,
        "hidden_from_tokens": plan.hidden_tokens,
        "one_more_drive_step_s": plan.one_more_drive and plan.one_more_drive.step_s,
        "notes": list(plan.notes),
        "drawn": list(plan.drawn),
        "steps": job.steps or None,
        "run_s": plan.run_s,
        "written_bytes_per_step": plan.written_per_step,
        "written_bytes": plan.written_bytes,
        "drive_life_days": plan.life_days,
        "commit_every": plan.offload.commit_every,
        "command": command(plan),
        "by_tokens": [
            {
                "accumulate": each.job.accumulate,
                "step_s": each.step_s,
                "tokens_per_s": each.prediction.tokens_per_s,
                "written_bytes_per_step": each.written_per_step,
                "drive_life_days": each.life_days,
            }
            for each in plan.by_tokens
        ],
        "ways": [
            {
                "flags": list(alternative.flags),
                "step_s": alternative.plan.step_s,
                "run_s": alternative.plan.run_s,
                "written_bytes": alternative.plan.written_bytes,
            }
            for alternative in plan.alternatives
        ],
    }


def _model_json(plan: ModelPlan) -> dict[str, Any]:
    memory, found = plan.planned.memory, plan.found
    tiers = {}
    for tier in Tier:
        kinds = {kind.value: memory.rest_bytes[tier, kind] for kind in PLACED_KINDS}
        tiers[tier.value] = kinds | {
            "in_flight": memory.staging_bytes[tier],
            "total": memory.used_bytes(tier),
            "available": memory.budget.of(tier),
        }
    # Wear needs seconds of a step, which may be unknown.
    wear, tbw, step_s = plan.wear, plan.tbw, plan.step_s
    is_written = wear.bytes_per_step > 0
    batch = plan.planned.workload.batch
    life_days = wear.days_to(tbw, step_s) if is_written and step_s is not None else None
    return {
        "fits": memory.fits,
        "reasons": memory.shortages(plan.table),
        "suggestions": list(plan.suggestions),
        "bytes": tiers,
        "model": plan.request.model,
        "tokens_per_step": batch.tokens * batch.micro_batches * plan.request.cluster.ranks,
        "tokens_per_s": found and found.prediction.tokens_per_s,
        "bottleneck": found and found.bottleneck.title,
        "written_bytes_per_step": wear.bytes_per_step * max(len(plan.request.config.nvme_dirs), 1),
        "drive_life_days": life_days,
        "placement": {kind.value: _shares(plan, kind) for kind in PLACED_KINDS},
        "activation_bytes": plan.request.activation_bytes(),
        "step": None if found is None else _step_json(plan, found),
        "commit_every": plan.request.config.commit_every,
        "recommended_commit_every": plan.recommended,
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


def _step_json(plan: ModelPlan, found: Forecast) -> dict[str, Any]:
    step, machine = found.prediction, plan.planned.machine
    return {
        "predicted_s": step.step_s,
        "compute_s": step.compute_s,
        "tokens_per_s": step.tokens_per_s,
        "busy": {machine.title(resource): share for resource, share in step.busy.items()},
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
            for offer in plan.offers
        ],
        "rates": machine.source,
    }
