"""`report.html`: one page with all of a run's plots, which needs no other file and no network.

Owns what the page shows; `page.js` draws it, and knows no figure by name. Everything of the run goes into the page as
one JSON object, and from there into text nodes. So no file of a run can put markup into it. The calls:
`page_data(run)`, then `page_of(data)`; `write_page` does both.
"""

from __future__ import annotations

import html
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from zero_offload.base.spans import Cause
from zero_offload.base.types import Tier, format_bytes
from zero_offload.checkpoint.metrics import NUM_STEPS, Row
from zero_offload.checkpoint.run_dir import PAGE_FILE, RunDir
from zero_offload.plan.table import ACTIVATIONS, MEMORY, TIER_PLACES
from zero_offload.plan.wear import TB, TBW_USUAL
from zero_offload.runs.number_format import format_duration, format_written
from zero_offload.runs.reader import Run
from zero_offload.runs.report.summary import (
    WAITS,
    host_tiers,
    of_last_start,
    planned_rss_bytes,
    planned_table,
    summarize,
    tables,
    title_of,
    whole_s,
)

POINTS_MAX = 20_000
"""Of a longer run neighbouring rows are one point: a page has a few megabytes at most."""
_EVENTS_MAX = 300
_TEXTS_MAX = 60
_DAY_S = 86400

_BLUE, _ORANGE, _GREEN, _RED, _SKY, _PURPLE, _GREY = "blue", "orange", "green", "red", "sky", "purple", "grey"
_PALETTE = (_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _SKY, _GREY)
_WAIT_COLORS = {"params": _RED, "update": _ORANGE, "activations": _PURPLE, "grads": _BLUE, "commit": _GREY}
_TIER_COLORS = {"device": _GREEN, "cpu": _BLUE, "nvme": _ORANGE}
_PLACES = {"device": "GPU memory", "cpu": "host memory", "nvme": "drives"}
_DRAWN = {
    *("loss", "val_loss", "lr", "grad_norm", "tokens_per_s", "step", "at", "step_s", "whole_s", "stall_s", "update_s"),
    *("commit_s", "commit_wait_s", "peak_rss_bytes", "peak_device_bytes", "skipped_steps", "resumed", "tokens"),
    *(NUM_STEPS, "model_step", "loss_scale", "epoch"),
}

_DIGITS = {"training": 6, "validation": 6}
"""Of most numbers four are shown, and enough."""

Series = dict[str, Any]
Panel = dict[str, Any]
Values = list[float | None]


def write_page(run: Run, tbw: float = TBW_USUAL, out: Path | None = None) -> Path:
    """Write the page, by default beside the run's metrics; its path. Raises StorageError."""
    return RunDir(out or run.path).write(PAGE_FILE, page_of(page_data(run, tbw)))


def page_of(data: Mapping[str, Any], follow_s: float = 0.0) -> str:
    """The page. With `follow_s` it asks its server for newer data so often, in seconds."""
    here = Path(__file__).parent
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # In a script element nothing but "<" can begin markup.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; connect-src 'self'; img-src data:">
<link rel="icon" href="data:,">
<title>{html.escape(str(data["title"]))}</title>
<style>
{style}</style>
</head>
<body data-follow="{1000 * follow_s:.0f}">
<noscript>This page draws its plots by a script. The figures are in metrics.jsonl, and in: zero-offload report RUN
</noscript>
<script type="application/json" id="data">{text}</script>
<script>
{script}</script>
</body>
</html>
"""


def page_data(run: Run, tbw: float = TBW_USUAL) -> dict[str, Any]:
    """All that the page shows. Raises ConfigError where the run has no finished step."""
    summary = summarize(run)
    rows = _thinned(run.rows)
    steps = [row["step"] for row in rows]
    wear = _DriveWear.of(run, tbw)
    panels = [
        _loss_panel(run, rows),
        _line_panel("learning rate", rows, "lr", _BLUE),
        _line_panel("gradient norm", rows, "grad_norm", _PURPLE, smooth=True),
        _line_panel("tokens per second", rows, "tokens_per_s", _GREEN, smooth=True, zero=True),
        _step_panel(rows),
        _waits_panel(rows),
        _host_panel(run, rows),
        *_tier_panels(run, rows),
        _traffic_panel(rows),
        _wear_panel(wear, rows),
        *_other_panels(rows),
    ]
    events = list(_events(run))
    return {
        "title": title_of(run),
        "path": str(run.path.absolute()),
        "state": state_of(run),
        "written_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        "headline": list(_headline(run, summary, wear)),
        "steps": steps
        if steps != list(range(steps[0], steps[0] + len(steps)))
        else {"first": steps[0], "count": len(steps)},
        "per_point": len(run.rows) / len(rows),
        "panels": [panel for panel in panels if panel is not None],
        "lanes": _lanes(run, rows, events),
        "events": [event for event in events if event["kind"] not in ("commit", "evaluation")][-_EVENTS_MAX:],
        "tables": list(_tables(run, summary)),
        "notes": list(run.notes),
    }


# Columns


def _thinned(rows: Sequence[Row]) -> list[Row]:
    """At most `POINTS_MAX` rows: of neighbours the means, and whatever only one of them has."""
    size = max(1, -(-len(rows) // POINTS_MAX))
    return [_merged(rows[start : start + size]) for start in range(0, len(rows), size)] if size > 1 else list(rows)


def _merged(rows: Sequence[Row]) -> Row:
    merged: Row = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) is not None]
        if name in ("step", "at", "skipped_steps", "model_step") or not values or isinstance(values[0], list):
            merged[name] = values[-1] if values else None
        elif name in (NUM_STEPS, "tokens"):
            merged[name] = sum(values)
        elif isinstance(values[0], dict):
            merged[name] = {key: statistics.fmean(value.get(key, 0) for value in values) for key in values[-1]}
        else:
            merged[name] = True if values[0] is True else statistics.fmean(values)
    return merged


def _column(values: Sequence[float | None], digits: int = 4) -> Any:
    """Numbers of so many digits; runs of one value as the value and how often."""
    short: list[float | int | None] = []
    for value in values:
        if value is None or not math.isfinite(value):
            short.append(None)
        else:
            rounded = float(f"{value:.{digits}g}")
            short.append(int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded)
    runs: list[Any] = []
    for each in short:
        if runs and runs[-2] == each:
            runs[-1] += 1
        else:
            runs += [each, 1]
    return {"runs": runs} if len(runs) < len(short) else short


def _numbers(rows: Sequence[Row], name: str) -> Values:
    return [row.get(name) for row in rows]


def _part(rows: Sequence[Row], table: str, *names: str) -> Values:
    return [sum(row[table].get(name, 0) for name in names) if table in row else None for row in rows]


def _series(name: str, values: Sequence[float | None], color: str, **more: Any) -> Series:
    return {"name": name, "values": _column(values, _DIGITS.get(name, 4)), "color": color, **more}


# Panels


def _panel(title: str, series: Sequence[Series], **more: Any) -> Panel | None:
    """None where nothing was measured."""
    return {"title": title, "series": list(series), **more} if series else None


def _line_panel(
    title: str, rows: Sequence[Row], name: str, color: str, smooth: object = False, **more: Any
) -> Panel | None:
    values = _numbers(rows, name)
    is_known = any(value is not None for value in values)
    return _panel(title, [_series(title, values, color, smooth=smooth)] if is_known else [], clips=True, **more)


def _loss_panel(run: Run, rows: Sequence[Row]) -> Panel | None:
    train, validation = _numbers(rows, "loss"), _numbers(rows, "val_loss")
    series, marks, levels = [], [], []
    if any(value is not None for value in train):
        series.append(_series("training", train, _BLUE, smooth=True))
    checked = [(row["step"], value) for row, value in zip(rows, validation, strict=True) if value is not None]
    if checked:
        series.append(_series("validation", validation, _ORANGE, sparse=True, width=2))
        step, best = min(checked, key=lambda each: each[1])
        marks.append({"step": step, "value": best, "color": _ORANGE, "text": f"best, {best:.4g} at step {step:,}"})
    if (unigram := run.description.get("unigram_nats")) is not None:
        levels.append({"name": "unigram entropy", "value": unigram, "color": _GREY})
    note = "nats per byte" if levels else ""
    return _panel("loss", series, marks=marks, levels=levels, wide=True, note=note)


def _step_panel(rows: Sequence[Row]) -> Panel | None:
    series = [_series("whole step", [whole_s(row) for row in rows], _BLUE)]
    for words, name, color in (
        ("update, most of it beside compute", "update_s", _ORANGE),
        ("commit, in the background", "commit_s", _GREY),
    ):
        values = _numbers(rows, name)
        if any(values):
            series.append(_series(words, values, color))
    return _panel("seconds per step", series, unit="s", zero=True, clips=True)


def _waits_panel(rows: Sequence[Row]) -> Panel | None:
    """Shares of the step, of what compute waited for: beside compute itself a few percent would not be seen."""
    if not any("exposed_s" in row for row in rows):
        return None

    def shares(cause: str) -> Values:
        return [100 * row["exposed_s"][cause] / whole_s(row) if "exposed_s" in row else None for row in rows]

    waits = {cause.value: shares(cause.value) for cause in Cause}
    series = [_series(WAITS[cause], values, _WAIT_COLORS[cause]) for cause, values in waits.items() if any(values)]
    waited = [sum(values[i] or 0 for values in waits.values()) for i in range(len(rows))]
    compute = [max(0.0, 100 - share) for share in waited]
    series.append(_series("compute, and the rest", compute, _SKY, hidden=bool(series)))
    note = "compute waited for nothing" if len(series) == 1 else "click on the compute above to add it to the stack"
    return _panel("where the step's time went: waits", series, unit="%", kind="stack", clips=True, note=note)


def _host_panel(run: Run, rows: Sequence[Row]) -> Panel | None:
    """The process's memory in parts, so that what is above the plan has a name."""
    tiers, baseline, table = host_tiers(run), run.description.get("baseline_rss_bytes"), planned_table(run)
    states = _part(rows, "resident_bytes", *tiers)
    peak = _numbers(rows, "peak_rss_bytes")
    before = min(baseline or 0, min(value for value in peak if value is not None))
    rest = [max(0, (top or 0) - (held or 0) - before) for top, held in zip(peak, states, strict=True)]
    series = [_series("process before the model", [before] * len(rows), _GREY)] if baseline is not None else []
    series.append(_series("states and buffers", states, _BLUE))
    what = "activations, autograd and the rest" if baseline is not None else "process, activations and the rest"
    series.append(_series(what, rest, _SKY))
    level = planned_rss_bytes(run) or table.states[MEMORY] + before
    words = "plan" if table.has_program else "plan of states and buffers"
    most = max(value for value in peak if value is not None)
    note = "" if ACTIVATIONS in table.rows else "the plan has no activations; "
    note += f"the whole, {format_bytes(most)}, is the largest resident set so far"
    if table.has_program and most > level:
        note += f", {format_bytes(most - level)} above the plan"
    return _panel(
        "host memory",
        series,
        unit="bytes",
        kind="stack",
        levels=[{"name": f"{words}, {format_bytes(level)}", "value": level, "color": "ink"}],
        note=note,
    )


def _tier_panels(run: Run, rows: Sequence[Row]) -> Iterator[Panel | None]:
    tiers = [tier.value for tier in Tier if tier.value not in host_tiers(run)]
    for tier in tiers:
        planned = planned_table(run).states.get(TIER_PLACES[Tier(tier)], 0)
        series = []
        states = _part(rows, "resident_bytes", tier)
        if any(states):
            series.append(_series("states and buffers", states, _TIER_COLORS[tier]))
        kept = _part(rows, "activation_bytes", tier)
        if tier == Tier.NVME.value and any(kept):
            series.append(_series("activations of a step", kept, _PURPLE))
        peak = _numbers(rows, "peak_device_bytes")
        if tier == Tier.DEVICE.value and any(peak):
            series.append(_series("peak, with activations", peak, _PURPLE))
        level = {"name": f"plan, {format_bytes(planned)}", "value": planned, "color": "ink"}
        levels = [level] if planned else []
        yield _panel(_PLACES[tier], series, unit="bytes", zero=True, levels=levels)


def _traffic_panel(rows: Sequence[Row]) -> Panel | None:
    series = []
    for tier, color in _TIER_COLORS.items():
        for table, words, dash in (("read_bytes", "read from", False), ("written_bytes", "written to", True)):
            values = _part(rows, table, tier)
            if any(values):
                series.append(_series(f"{words} {tier}", values, color, dash=dash))
    note = "what an evaluation reads is in the step after it"
    return _panel("bytes moved per step", series, unit="bytes", zero=True, clips=True, note=note)


def _other_panels(rows: Sequence[Row]) -> Iterator[Panel | None]:
    """Figures that a loop of one's own, or a Trainer, has logged; names with one beginning are in one panel."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for row in rows for name, value in row.items() if _is_figure(name, value)):
        groups.setdefault(name.rpartition("/")[0] or name, []).append(name)
    for title, names in list(groups.items())[:24]:
        series = [
            _series(name, values, color, sparse=any(value is None for value in values))
            for name, color in zip(names, _PALETTE, strict=False)
            if (values := _numbers(rows, name))
        ]
        yield _panel(title, series, clips=True)


def _is_figure(name: str, value: object) -> bool:
    return name not in _DRAWN and isinstance(value, int | float) and not isinstance(value, bool)


# Drives


@dataclass(frozen=True)
class _DriveWear:
    """Bytes that rank 0 has written to its drives: as far as the rows tell, and at the rate of the last start."""

    total: float
    per_day: float
    num_drives: int
    tbw: float

    @classmethod
    def of(cls, run: Run, tbw: float) -> _DriveWear | None:
        written = [_written(row) for row in run.rows]
        if not any(written):
            return None
        last = of_last_start(run.rows)
        seconds = sum(row["step_s"] * row.get(NUM_STEPS, 1) for row in last)
        if "at" in last[0] and last[-1]["at"] > last[0]["at"]:
            last, seconds = last[1:], last[-1]["at"] - last[0]["at"]  # evaluations take their time, too
        drives = run.description["identity"].get("offload.nvme")
        per_day = sum(map(_written, last)) / seconds * _DAY_S
        return cls(sum(written), per_day, max(len(drives) if isinstance(drives, list) else 1, 1), tbw)

    def text(self) -> str:
        """In words, for one drive of those that are striped over."""
        drive = "each drive" if self.num_drives > 1 else "a drive"
        per_day = self.per_day / self.num_drives
        life = format_duration(self.tbw * TB / per_day * _DAY_S) if per_day else ""
        rest = f"; {drive} rated for {self.tbw:g} TB lasts {life}" if life else ""
        over = f" over {self.num_drives} directories" if self.num_drives > 1 else ""
        return f"{format_written(self.total)} written{over}, {format_written(self.per_day)} per day at this rate{rest}"


def _written(row: Row) -> float:
    """The row's bytes are those of its last step."""
    return float(row["written_bytes"].get(Tier.NVME.value, 0)) * int(row.get(NUM_STEPS, 1))


def _wear_panel(wear: _DriveWear | None, rows: Sequence[Row]) -> Panel | None:
    if wear is None:
        return None
    total, values = 0.0, []
    for row in rows:
        total += _written(row)
        values.append(total)
    return _panel(
        "written to drives, in all", [_series("written", values, _ORANGE)], unit="B", zero=True, note=wear.text()
    )


# Events


def state_of(run: Run) -> str:
    """ "running", "finished", "stopped" or "ended abruptly", as by a kill."""
    start = _starts(run)[-1] if _starts(run) else {}
    if run.is_running:
        return "running"
    planned = run.description["identity"].get("steps")
    if planned is not None and run.rows and run.rows[-1]["step"] >= planned:
        return "finished"
    if "ended_at" not in start:
        return "ended abruptly" if start else "stopped"
    return "stopped" if start.get("error") or planned is not None else "finished"


def _starts(run: Run) -> list[dict[str, Any]]:
    found = run.description.get("starts")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _events(run: Run) -> Iterator[dict[str, Any]]:
    """Events of the run, in order of steps."""
    yield from sorted([*_events_of_starts(run), *_events_of_rows(run)], key=lambda event: event["step"])


def _event(kind: str, step: float, text: str, at: object = None) -> dict[str, Any]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if isinstance(at, int | float) and at < 1e11 else ""
    return {"kind": kind, "step": step, "text": text, "at": when}


def _events_of_starts(run: Run) -> Iterator[dict[str, Any]]:
    starts = _starts(run)
    for number, start in enumerate(starts):
        is_last, step = number == len(starts) - 1, start.get("step") or 0
        if step:
            yield _event("resume", step, f"resumed from step {step:,}", start.get("began_at"))
        else:
            yield _event("start", 0, "started", start.get("began_at"))
        if "ended_at" in start:
            end, error = start.get("last_step") or step, start.get("error")
            words = f"stopped by {error}" if error else "ended"
            yield _event("stop", end, f"{words} after step {end:,}", start.get("ended_at"))
        elif not (is_last and run.is_running):
            # The next start tells what was committed.
            end = run.rows[-1]["step"] if is_last else starts[number + 1].get("step") or 0
            words = "after" if is_last else "with commits up to"
            yield _event("stop", end, f"ended abruptly {words} step {end:,}, as by a kill")


def _events_of_rows(run: Run) -> Iterator[dict[str, Any]]:
    has_starts = bool(_starts(run))
    skipped, best = 0, math.inf
    for row in run.rows:
        step, at = row["step"], row.get("at")
        if row.get("resumed") and not has_starts:
            yield _event("resume", step, f"resumed before step {step:,}", at)
        if row.get("resumed") or row.get("skipped_steps", 0) < skipped:
            skipped = 0  # each process counts its own
        if (count := row.get("skipped_steps", 0) - skipped) > 0:
            words = "skipped: a gradient was NaN or infinite" + (f" ({count} steps)" if count > 1 else "")
            yield _event("skip", step, words, at)
        skipped = row.get("skipped_steps", 0)
        if row.get("commit_s"):
            yield _event("commit", step, "", at)
        if (loss := row.get("val_loss")) is not None:
            yield _event("evaluation", step, f"validation loss {loss:.4g}" + " (best)" * (loss < best), at)
            best = min(best, loss)


_LANES = (
    ("start", "starts and resumes", _GREEN),
    ("commit", "commits", _BLUE),
    ("evaluation", "evaluations", _ORANGE),
    ("skip", "skipped steps", _RED),
    ("stop", "ends", _PURPLE),
)


def _lanes(run: Run, rows: Sequence[Row], events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each kind's steps, as distances from one to the next."""
    found = []
    for kind, words, color in _LANES:
        kinds = (kind, "resume") if kind == "start" else (kind,)
        steps = sorted({max(event["step"], rows[0]["step"]) for event in events if event["kind"] in kinds})
        if steps:
            distances = [steps[0], *(high - low for low, high in pairwise(steps))]
            lines = kind in ("skip", "stop", "start")
            places = _column(distances, digits=15)
            found.append({"name": words, "color": color, "lines": lines, "steps": places, "count": len(steps)})
    return found


# Figures and tables


def _headline(run: Run, summary: Mapping[str, Any], wear: _DriveWear | None) -> Iterator[tuple[str, str, str]]:
    """A label, a figure and what belongs to it."""
    step, planned = summary["steps"], summary["steps_planned"]
    state = state_of(run)
    words = state
    if state == "running" and planned is not None and planned > step:
        words = f"{words}, {format_duration((planned - step) * summary['step_s'])} left"
    yield "step", f"{step:,}", (f"of {planned:,}, " if planned is not None else "") + words
    if summary["loss"] is not None:
        yield "training loss", f"{summary['loss']:.4g}", _range_of(run.rows, "loss")
    checked = [(row["val_loss"], row["step"]) for row in run.rows if row.get("val_loss") is not None]
    if checked:
        best, at = min(checked)
        yield "best validation loss", f"{best:.4g}", f"at step {at:,}; the last is {checked[-1][0]:.4g}"
    if summary["tokens_per_s"] is not None:
        yield "tokens/s", f"{summary['tokens_per_s']:,.0f}", f"{summary['step_s']:.3g} s per step"
    else:
        yield "seconds per step", f"{summary['step_s']:.3g}", "median"
    if times := summary["step_time_s"]:
        waits = {cause: times[cause] for cause in WAITS}
        most = max(waits, key=lambda cause: waits[cause])
        hidden = summary["update_overlap"]
        about = [f"most of it {WAITS[most]}"] * bool(waits[most])
        about += [f"{hidden:.0%} of the update beside compute"] if hidden is not None else []
        yield "waited", f"{sum(waits.values()) / times['step']:.1%}", "; ".join(about)
    plan = summary["planned_rss_bytes"]
    peak = summary["peak_rss_bytes"]
    yield "peak memory", format_bytes(peak), f"plan {format_bytes(plan)}" if plan else "of the process"
    if wear is not None:
        yield "written to drives", format_written(wear.total), f"{format_written(wear.per_day)} per day at this rate"


def _range_of(rows: Sequence[Row], name: str) -> str:
    values = [row[name] for row in rows if row.get(name) is not None]
    return f"from {values[0]:.4g}; the least is {min(values):.4g}" if values else ""


def _tables(run: Run, summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for table in tables(run, summary):
        rows = [["", *table.head], *map(list, table.rows), *([note] for note in table.notes)]
        yield {"title": table.title, "rows": rows, "open": True}
    yield from _texts(run)
    description = run.description
    yield {"title": "settings", "rows": [[name, _text(value)] for name, value in description["identity"].items()]}
    counts = {"parameters": "num_parameters", "trained": "num_trained", "frozen": "num_frozen"}
    rows = [[words, f"{description[name]:,}"] for words, name in counts.items() if _is_count(description.get(name))]
    rows += [[name, _text(description[key])] for name, key in _MACHINE.items() if description.get(key) is not None]
    versions = description.get("versions")
    rows += [[name, _text(version)] for name, version in versions.items()] if isinstance(versions, dict) else []
    yield {"title": "model, machine and versions", "rows": rows}


def _texts(run: Run) -> Iterator[dict[str, Any]]:
    """Texts that a loop has logged, such as those that the model writes; the latest first."""
    found: dict[str, list[list[str]]] = {}
    for row in reversed(run.rows):
        for name, value in row.items():
            if isinstance(value, list):
                found.setdefault(name, []).extend([f"step {row['step']:,}", str(each)] for each in value)
    for name, rows in found.items():
        yield {"title": name, "rows": rows[:_TEXTS_MAX], "open": True}


_MACHINE = {"data": "data", "device": "device_name", "computes on": "device", "host": "host"}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: object) -> str:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
