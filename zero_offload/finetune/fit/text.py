"""The printed form of a fine-tuning run's plan, and the command of the run; as JSON too.

Never plans. The calls: `as_text`, `as_json` and `command` for a `FolderPlan`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from typing import Any

from zero_offload.base.types import format_bytes
from zero_offload.finetune.fit.figures import FolderPlan
from zero_offload.finetune.fit.job import FolderJob
from zero_offload.plan.table import TIER_PLACES, Row, table_lines
from zero_offload.runs.number_format import format_duration, format_number, format_written

_DAY_S = 86400
_CLOCK_S_MAX = 100 * 365 * _DAY_S
"""No run ends later, and calendars of machines do."""


def command(plan: FolderPlan) -> str:
    """The command line of the run, quoted for a shell."""
    job = plan.job
    launcher = ["zero-offload"]
    if job.ranks > 1:
        launcher = ["torchrun", "--nproc-per-node", str(job.ranks // job.nodes), "-m", "zero_offload"]
    return shlex.join([*launcher, "finetune", *job.words])


def as_text(plan: FolderPlan) -> str:
    """The text that `finetune` prints before its first step."""
    return "\n".join(_lines(plan))


def _lines(plan: FolderPlan) -> Iterator[str]:
    yield from _what_lines(plan)
    yield from plan.table.lines("of one rank:" if plan.job.ranks > 1 else "")
    yield from _disk_lines(plan)
    if plan.fits:
        yield "it fits"
        yield from _time_lines(plan)
        yield from _wear_lines(plan)
        yield from _token_lines(plan)
        if plan.ways:
            yield "drives are written less:"
            yield from _way_lines(plan)
        return
    yield "it does not fit"
    yield from plan.shortages
    if any(place.total > place.free_bytes for place in plan.places) and plan.job.drives is None:
        yield "a larger disk: --nvme DIR for swap files, --out OUT for outputs"
    if plan.ways:
        yield "what would fit:"
        yield from _way_lines(plan)
    else:
        yield "nothing that was tried fits: LoRA, compact states, smaller batches, shorter sequences"


def _what_lines(plan: FolderPlan) -> Iterator[str]:
    job, units = plan.job, plan.planned.job.work
    trained = sum(each.numel.trained for each in units)
    whole = trained + sum(each.numel.frozen for each in units)
    what = f"{job.folder.path.name}: {whole:,} parameters in {len(units)} units"
    if trained < whole:
        rank = f"LoRA of rank {job.lora.rank}" if job.lora is not None else "an adapter"
        what += f", {trained:,} of them trained ({rank})"
    if job.ranks > 1:
        what += f", on {job.ranks} ranks"
    yield what
    if plan.adapted:
        yield f"  adapters on {', '.join(plan.adapted)}"
    if plan.not_adapted and job.lora is not None and not job.lora.targets:
        yield f"  none on other linear layers: {', '.join(plan.not_adapted)}"
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
        yield f"  from {hidden:,} tokens of a micro-batch on (now {tokens:,}) compute hides all transfers"
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
    yield f"{text}; at this rate a drive of {plan.job.tbw:g} TBW lasts {_life(plan)}"
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


def _way_lines(plan: FolderPlan) -> Iterator[str]:
    what = ("a step writes",) if plan.run_s is None else ("in all", "written")
    rows = [("a step", "tokens/s", *what, f"{plan.job.tbw:g} TBW last", "with")]
    for way in plan.ways:
        each = way.plan
        rows.append(
            (
                format_duration(each.step_s),
                format_number(each.prediction.tokens_per_s),
                *([] if each.run_s is None else [format_duration(each.run_s)]),
                format_written(each.written_per_step if each.written_bytes is None else each.written_bytes),
                _life(each),
                " ".join(way.flags),
            )
        )
    yield from table_lines(rows, left=len(what) + 3)


def as_json(plan: FolderPlan) -> dict[str, Any]:
    job, wear = plan.job, plan.wear
    units = plan.planned.job.work
    return {
        "fits": plan.fits,
        "reasons": list(plan.shortages),
        "model": str(job.folder.path),
        "parameters": sum(each.numel.trained + each.numel.frozen for each in units),
        "trained_parameters": sum(each.numel.trained for each in units),
        "adapted": list(plan.adapted),
        "planned": plan.table.to_dict(),
        "bytes": {name: _by_tier(row) for name, row in plan.table.rows.items()},
        "used_bytes": plan.used,
        "available_bytes": plan.available,
        "disks": [{"name": each.name, "needed": each.needed, "free_bytes": each.free_bytes} for each in plan.places],
        "tokens_per_step": job.tokens_per_step,
        "step_s": plan.step_s,
        "tokens_per_s": plan.prediction.tokens_per_s,
        "bottleneck": plan.bottleneck.title,
        "hidden_from_tokens": plan.hidden_tokens,
        "one_more_drive_step_s": plan.one_more_drive and plan.one_more_drive.step_s,
        "rates": plan.planned.machine.source,
        "notes": list(plan.notes),
        "steps": job.steps or None,
        "run_s": plan.run_s,
        "written_bytes_per_step": plan.written_per_step,
        "nvme_written_bytes_per_step": plan.planned.memory.nvme_written_bytes_per_step,
        "written_bytes": plan.written_bytes,
        "written_is_upper_bound": wear.is_bound,
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
                "flags": list(way.flags),
                "step_s": way.plan.step_s,
                "run_s": way.plan.run_s,
                "written_bytes": way.plan.written_bytes,
            }
            for way in plan.ways
        ],
    }
