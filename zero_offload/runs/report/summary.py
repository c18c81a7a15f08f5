"""The figures of a run that a report prints and shows, from its metrics alone.

Never draws. The calls: `summarize(read_run(run_dir))`, then `tables`; `WAITS` has the words for what compute waits for;
the functions below read one figure of rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_offload.base.errors import ConfigError
from zero_offload.base.spans import Cause
from zero_offload.base.stats import update_overlap
from zero_offload.base.types import Tier, format_bytes
from zero_offload.checkpoint.metrics import Row
from zero_offload.checkpoint.run_dir import RunDir
from zero_offload.plan.table import IN_FLIGHT, MEMORY, PROGRAM, TIER_PLACES, PlanTable, by_place
from zero_offload.runs.reader import Run, waited_s

WAITS = {
    "params": "waiting for parameters",
    "update": "waiting for the update",
    "activations": "waiting for activations",
    "grads": "waiting for gradients",
    "commit": "waiting for a commit",
}
"""For each cause."""

IN_TABLES = ("planned", "step_time_s", "update_overlap", "bytes_per_step", "memory", "traced_steps")
"""Entries of a summary that are in `tables`."""
_WARM_UP_STEPS = 2


def summarize(run: Run) -> dict[str, Any]:
    """The figures a reader asks for first; medians leave out the first steps."""
    rows = require_rows(run).rows
    steady = rows[_WARM_UP_STEPS:] or rows
    validation = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    total_s = sum(whole_s(row) for row in steady)
    return {
        "steps": rows[-1]["step"],
        "steps_planned": run.description["identity"].get("steps"),
        "loss": next((row["loss"] for row in reversed(rows) if "loss" in row), None),
        "validation_loss": validation[-1] if validation else None,
        "unigram_nats": run.description.get("unigram_nats"),
        "step_s": statistics.median(row["step_s"] for row in steady),
        "tokens_per_s": _median(steady, "tokens_per_s"),
        "commit_wait_share": sum(row.get("commit_wait_s", 0.0) for row in steady) / total_s,
        "waited_share": sum(map(waited_s, steady)) / total_s,
        "nvme_read_bytes_per_step": _median_bytes(steady, "read_bytes", Tier.NVME),
        "nvme_written_bytes_per_step": _median_bytes(steady, "written_bytes", Tier.NVME),
        "peak_rss_bytes": max(row["peak_rss_bytes"] for row in rows),
        "planned_rss_bytes": planned_rss_bytes(run),
        "planned": planned_table(run).to_dict() if "planned" in run.description else None,
        "resumes": sum(1 for row in rows if row.get("resumed")),
        "step_time_s": _step_time(of_last_start(steady)),
        "update_overlap": _update_overlap(of_last_start(steady)),
        "bytes_per_step": {
            tier.value: {word: _median_bytes(steady, f"{word}_bytes", tier) for word in ("read", "written")}
            for tier in Tier
        },
        "memory": _memory(run),
        "traced_steps": _traced_steps(run),
    }


@dataclass(frozen=True)
class Table:
    """Figures that belong together, as text."""

    title: str
    head: Sequence[str]
    """Of the columns behind the first."""
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def tables(run: Run, summary: Mapping[str, Any]) -> Iterator[Table]:
    """The results of `summarize`, beside single figures."""
    shares = ("s per step", "share")
    if times := summary["step_time_s"]:
        words = {"compute": "forward, backward and the rest", **WAITS, "step": "step"}
        rows = [_time_row(words[name], s, times["step"]) for name, s in times.items() if s or name not in WAITS]
        overlap = summary["update_overlap"]
        notes = (
            [] if overlap is None else [f"{overlap:.1%} of the update ran beside compute, which did not wait for it"]
        )
        yield Table("where the step went", shares, rows, notes)
    if traced := summary["traced_steps"]:
        names = ("forward", "backward", "waited", "other", "step")
        rows = [_time_row(name, traced[f"{name}_s"], traced["step_s"]) for name in names]
        notes = [
            f"of {words}, {traced[f'{name}_s']:.4g} s per step, {traced[f'{name}_overlap']:.1%} lay beside compute"
            for name, words in (("update", "the update's time"), ("transfer", "the time of transfers"))
        ]
        yield Table("steps {first} to {last}, traced".format(**traced), shares, rows, notes)
    ranks = run.description["identity"].get("ranks", 1)
    of_rank = " of rank 0" if isinstance(ranks, int) and ranks > 1 else ""
    moved = [
        (tier, format_bytes(each["read"]), format_bytes(each["written"]))
        for tier, each in summary["bytes_per_step"].items()
        if any(each.values())
    ]
    yield Table("bytes per step" + of_rank, ("read", "written"), moved)
    memory = [
        _memory_row(place, each["planned_bytes"], each["measured_bytes"])
        for place, each in summary["memory"].items()
        if any(each.values())
    ]
    note = "process: its resident set, against all that is planned in its memory"
    yield Table("memory" + of_rank, ("planned", "at most", "ratio"), memory, [note])
    if summary["planned"] is not None:
        head, *planned = PlanTable.from_dict(summary["planned"]).cells()
        yield Table("plan" + of_rank, head[1:], planned)


def _time_row(words: str, seconds: float, whole: float) -> Sequence[str]:
    return words, f"{seconds:.4g}", f"{seconds / whole:.1%}"


def _memory_row(place: str, planned: int, measured: int) -> Sequence[str]:
    return place, format_bytes(planned), format_bytes(measured), f"{measured / planned:.2f}" if planned else "-"


def _step_time(rows: Sequence[Row]) -> dict[str, float]:
    """Mean seconds: what compute waited for, the rest, and the whole of a step."""
    if not all("exposed_s" in row for row in rows):
        return {}  # an earlier build's run
    waits = {cause.value: mean(rows, exposed(cause.value)) for cause in Cause}
    whole = mean(rows, whole_s)
    return {"compute": max(0.0, whole - sum(waits.values())), **waits, "step": whole}


def _update_overlap(rows: Sequence[Row]) -> float | None:
    if not all("exposed_s" in row for row in rows):
        return None
    exposed_s = sum(row["exposed_s"][Cause.UPDATE.value] for row in rows)
    return update_overlap(sum(row["update_s"] for row in rows), exposed_s)


def _memory(run: Run) -> dict[str, dict[str, int]]:
    """Bytes that the plan gives a tier, and the most that states, buffers included, have taken there."""
    rows = of_last_start(run.rows)
    states, last = planned_table(run).states, [row["resident_bytes"] for row in rows]
    places = {tier.value: (tier.value,) for tier in Tier} | {Tier.CPU.value: host_tiers(run)}
    if run.description["device"] == "cpu":
        del places[Tier.DEVICE.value]
    found = {
        name: {
            "planned_bytes": states.get(TIER_PLACES[Tier(name)], 0),
            "measured_bytes": max(sum(resident.get(tier, 0) for tier in tiers) for resident in last),
        }
        for name, tiers in places.items()
    }
    rss_bytes = max(row["peak_rss_bytes"] for row in rows)
    return found | {"process": {"planned_bytes": planned_rss_bytes(run) or 0, "measured_bytes": rss_bytes}}


def _traced_steps(run: Run) -> dict[str, Any] | None:
    """Means of the steps in the run's trace."""
    trace = RunDir(run.path).read_trace()
    if trace is None:
        return None
    try:
        return _means(trace[1].get("steps", []))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{trace[0]} is not what --trace wrote ({type(error).__name__}: {error}); delete it, or trace again"
        ) from error


def _means(steps: Sequence[Any]) -> dict[str, Any] | None:
    if not steps:
        return None
    waited_s = statistics.fmean(sum(step["exposed_s"].values()) for step in steps)
    names = ("forward_s", "backward_s", "other_s", "step_s", "update_s", "transfer_s")
    found = {name: statistics.fmean(step[name] for step in steps) for name in names} | {"waited_s": waited_s}
    for name in ("update", "transfer"):
        beside_s = sum((step[f"{name}_overlap"] or 0.0) * step[f"{name}_s"] for step in steps)
        whole_s = sum(step[f"{name}_s"] for step in steps)
        found[f"{name}_overlap"] = beside_s / whole_s if whole_s else 0.0
    return {"first": steps[0]["step"], "last": steps[-1]["step"], **found}


def require_rows(run: Run) -> Run:
    if not run.rows:
        raise ConfigError(f"{run.path} has no finished step yet; try again after the first one")
    return run


def title_of(run: Run) -> str:
    identity = run.description["identity"]
    tiers = ", ".join(
        f"{kind} on {_tier_text(identity.get(f'offload.{kind}'))}" for kind in ("params", "grads", "optimizer")
    )
    count = run.description["num_parameters"]
    size = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    return f"{identity.get('model') or run.description.get('name')} ({size} parameters): {tiers}"


def _tier_text(request: object) -> str:
    if isinstance(request, dict):
        return " + ".join(f"{fraction:.0%} {tier}" for tier, fraction in request.items())
    return str(request)


def planned_rss_bytes(run: Run) -> int | None:
    """Bytes that the plan gives the process, itself included; None where the plan does not know them."""
    table = planned_table(run)
    return table.total[MEMORY] if table.has_program else None


def planned_table(run: Run) -> PlanTable:
    """The plan, as the run was told it. Of earlier builds: their sums, and the process before the model."""
    if (planned := run.description.get("planned")) is not None:
        return PlanTable.from_dict(planned)
    is_shared = run.description["device"] == "cpu"
    sizes = by_place({tier: int(run.description["plan"][tier.value]) for tier in Tier}, shared_memory=is_shared)
    before = int(run.description.get("baseline_rss_bytes") or 0)
    return PlanTable.of({IN_FLIGHT: sizes, PROGRAM: {MEMORY: before}}, {})


def host_tiers(run: Run) -> tuple[str, ...]:
    """The tiers in host memory: where a CPU computes, both of them that are memory."""
    return ("device", "cpu") if run.description["device"] == "cpu" else ("cpu",)


def mean(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
    return statistics.fmean(value(row) for row in rows)


def whole_s(row: Row) -> float:
    """From one `step()` to the next, in which waits are counted: validation is in there, and not in "step_s"."""
    seconds: float = row.get("whole_s") or row["step_s"]  # 0 before the model's first step
    return seconds


def of_last_start(rows: Sequence[Row]) -> Sequence[Row]:
    """Those since the run was resumed the last time, perhaps with other tiers."""
    begin = max((index for index, row in enumerate(rows) if row.get("resumed")), default=0)
    return rows[begin:]


def figure(name: str) -> Callable[[Row], float]:
    return lambda row: float(row[name])


def exposed(cause: str) -> Callable[[Row], float]:
    return lambda row: float(row["exposed_s"][cause])


def bytes_of(key: str, tier: str) -> Callable[[Row], float]:
    return lambda row: float(row[key].get(tier, 0))


def _median(rows: Sequence[Row], name: str) -> float | None:
    found = [row[name] for row in rows if name in row]
    return statistics.median(found) if found else None


def _median_bytes(rows: Sequence[Row], key: str, tier: Tier) -> int:
    return int(statistics.median(row[key].get(tier.value, 0) for row in rows))
