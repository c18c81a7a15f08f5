"""`zero-offload report RUN`: the picture and the summary of a run, from its metrics file alone.

Owns what is drawn and how; the only importer of matplotlib. Never trains and never changes a metric.
Calls: `add_parser`, then `run`; `write_report(run_dir)` for the PNG, `summarize(read_run(run_dir))` for the figures.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_offload.base.errors import CapacityError, ConfigError, StorageError, ZeroOffloadError
from zero_offload.base.spans import Cause
from zero_offload.base.stats import update_overlap
from zero_offload.base.types import MIB, Tier, format_bytes
from zero_offload.checkpoint.metrics import Row
from zero_offload.checkpoint.run_dir import PICTURE_FILE, RunDir
from zero_offload.cli.recipes.run_dir import Run, read_run
from zero_offload.storage.files.system import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by colour-blind readers too.
_BLUE, _ORANGE, _GREEN = "#0072B2", "#E69F00", "#009E73"
_RED, _SKY, _GREY = "#D55E00", "#56B4E9", "#777777"
_TIER_COLORS = {Tier.DEVICE.value: _GREEN, Tier.CPU.value: _BLUE, Tier.NVME.value: _ORANGE}

WAITS = {
    "params": ("waiting for parameters", _RED),
    "update": ("waiting for the update", _ORANGE),
    "activations": ("waiting for activations", _GREEN),
    "grads": ("waiting for gradients", _BLUE),
    "commit": ("waiting for a commit", _GREY),
}
"""For each cause, words and a colour that is the same in every picture."""

_SHOWN_SHARE = 0.005
"""A share of the step: what never takes more is not drawn."""
_BINS_MAX = 120
_WARM_UP_STEPS = 2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "report",
        help="plots and summary of a run",
        description="Draw RUN/report.png from RUN/metrics.jsonl and print a summary; works while RUN trains.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory that `train` wrote")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = read_run(args.run_dir)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    summary, failure = summarize(found), None
    try:
        summary["report"] = str(write_report(args.run_dir))
    except ZeroOffloadError as error:
        summary["report"], failure = None, error  # the figures are there all the same
    _print(args, summary, found.description.get("identity", {}).get("ranks", 1))
    if failure is not None:
        raise failure
    return 0


def _print(args: argparse.Namespace, summary: Mapping[str, Any], num_ranks: int) -> None:
    if args.json:
        print(json.dumps(summary))
        return
    tables = ("step_time_s", "bytes_per_step", "memory", "traced_steps", "update_overlap")
    figures = {name: value for name, value in summary.items() if name not in tables}
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}")
    for line in _tables(summary, " of rank 0" if num_ranks > 1 else ""):
        print(line)


def _tables(summary: Mapping[str, Any], of_rank: str) -> Iterator[str]:
    """`of_rank` stands behind the titles of bytes and memory."""
    if times := summary["step_time_s"]:
        yield from ("", f"{'where the step went':<34}{'s per step':>12}{'share':>8}")
        yield _time_line("forward, backward and the rest", times["compute"], times["step"])
        yield from (_time_line(WAITS[cause][0], times[cause], times["step"]) for cause in Cause if times[cause])
        yield _time_line("step", times["step"], times["step"])
        if summary["update_overlap"] is not None:
            yield f"{summary['update_overlap']:.1%} of the update was hidden"
    if traced := summary["traced_steps"]:
        yield from ("", f"{'steps {first} to {last}, traced'.format(**traced):<34}{'s per step':>12}{'share':>8}")
        for name in ("forward", "backward", "waited", "other", "step"):
            yield _time_line(name, traced[f"{name}_s"], traced["step_s"])
        for name, words in (("update", "the update's time,"), ("transfer", "the time of transfers,")):
            seconds, overlap = traced[f"{name}_s"], traced[f"{name}_overlap"]
            yield f"of {words} {seconds:.4g} s per step, {overlap:.1%} lay beside compute"
    yield from ("", f"{'bytes per step' + of_rank:<34}{'read':>12}{'written':>12}")
    for tier, moved in summary["bytes_per_step"].items():
        if any(moved.values()):
            yield f"{tier:<34}{format_bytes(moved['read']):>12}{format_bytes(moved['written']):>12}"
    yield from ("", f"{'memory' + of_rank:<34}{'planned':>12}{'at most':>12}{'ratio':>10}")
    for place, each in summary["memory"].items():
        planned, measured = each["planned_bytes"], each["measured_bytes"]
        if planned or measured:
            ratio = f"{measured / planned:.2f}" if planned else "-"
            yield f"{place:<34}{format_bytes(planned):>12}{format_bytes(measured):>12} {ratio:>9}"
    yield "(process: its resident set, activations included, against what it was before the model and the plan)"


def _time_line(words: str, seconds: float, whole: float) -> str:
    return f"{words:<34}{seconds:>12.4g}{seconds / whole:>8.1%}"


def write_report(run_dir: Path) -> Path:
    """Draw loss, step time, traffic and memory of a run into one PNG; its path."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CapacityError("the report needs matplotlib, which is missing: pip install matplotlib") from error
    run = _require_rows(read_run(run_dir))
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    figure.suptitle(_title(run), fontsize=12)
    for axes, draw in zip(panels.flat, (_draw_loss, _draw_step_time, _draw_traffic, _draw_memory), strict=True):
        draw(axes, run)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, run_dir / PICTURE_FILE)


def _save(figure: Figure, path: Path) -> Path:
    """Replace the picture whole: a viewer may have the last one open."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    try:
        replace_file(path, picture.getvalue())
    except OSError as error:
        remedy = "free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
        raise StorageError(f"cannot write {path}: {error.strerror}; {remedy}, then: zero-offload report") from error
    return path


def summarize(run: Run) -> dict[str, Any]:
    """The figures a reader asks for first; medians leave out the first steps."""
    rows = _require_rows(run).rows
    steady = rows[_WARM_UP_STEPS:] or rows
    validation = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    total_s = sum(_whole_s(row) for row in steady)
    return {
        "steps": rows[-1]["step"],
        "steps_planned": run.description["identity"].get("steps"),
        "loss": rows[-1].get("loss"),
        "validation_loss": validation[-1] if validation else None,
        "unigram_nats": run.description.get("unigram_nats"),
        "step_s": statistics.median(row["step_s"] for row in steady),
        "tokens_per_s": _median(steady, "tokens_per_s"),
        "commit_wait_share": sum(row.get("commit_wait_s", 0.0) for row in steady) / total_s,
        "stall_share": sum(row["stall_s"] for row in steady) / total_s,
        "nvme_read_bytes_per_step": _median_bytes(steady, "read_bytes", Tier.NVME),
        "nvme_written_bytes_per_step": _median_bytes(steady, "written_bytes", Tier.NVME),
        "peak_rss_bytes": max(row["peak_rss_bytes"] for row in rows),
        "planned_rss_bytes": _planned_rss_bytes(run),
        "resumes": sum(1 for row in rows if row.get("resumed")),
        "step_time_s": _step_time(_of_last_start(steady)),
        "update_overlap": _update_overlap(_of_last_start(steady)),
        "bytes_per_step": {
            tier.value: {word: _median_bytes(steady, f"{word}_bytes", tier) for word in ("read", "written")}
            for tier in Tier
        },
        "memory": _memory(run),
        "traced_steps": _traced_steps(run),
    }


def _step_time(rows: Sequence[Row]) -> dict[str, float]:
    """Mean seconds: what compute waited for, the rest, and the whole of a step."""
    if not all("exposed_s" in row for row in rows):
        return {}  # an earlier build's run
    waits = {cause.value: _mean(rows, _exposed(cause.value)) for cause in Cause}
    whole = _mean(rows, _whole_s)
    return {"compute": max(0.0, whole - sum(waits.values())), **waits, "step": whole}


def _update_overlap(rows: Sequence[Row]) -> float | None:
    if not all("exposed_s" in row for row in rows):
        return None
    exposed_s = sum(row["exposed_s"][Cause.UPDATE.value] for row in rows)
    return update_overlap(sum(row["update_s"] for row in rows), exposed_s)


def _memory(run: Run) -> dict[str, dict[str, int]]:
    """Bytes that the plan gives a tier, and the most that states, buffers included, have taken there."""
    rows = _of_last_start(run.rows)
    plan, last = run.description["plan"], [row["resident_bytes"] for row in rows]
    places: dict[str, tuple[str, ...]] = {tier.value: (tier.value,) for tier in Tier}
    if run.description["device"] == "cpu":
        # Compute works on CPU memory: both tiers are that.
        places = {Tier.CPU.value: (Tier.DEVICE.value, Tier.CPU.value), Tier.NVME.value: (Tier.NVME.value,)}
    found = {
        name: {
            "planned_bytes": sum(plan[tier] for tier in tiers),
            "measured_bytes": max(sum(resident.get(tier, 0) for tier in tiers) for resident in last),
        }
        for name, tiers in places.items()
    }
    rss_bytes = max(row["peak_rss_bytes"] for row in rows)
    return found | {"process": {"planned_bytes": _planned_rss_bytes(run), "measured_bytes": rss_bytes}}


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


def _require_rows(run: Run) -> Run:
    if not run.rows:
        raise ConfigError(f"{run.path} has no finished step yet; try again after the first one")
    return run


def _title(run: Run) -> str:
    identity = run.description["identity"]
    tiers = ", ".join(
        f"{kind} on {_tier_text(identity.get(f'offload.{kind}'))}" for kind in ("params", "grads", "optimizer")
    )
    size = run.description["num_parameters"] / 1e6
    return f"{identity.get('model') or run.description.get('name')} ({size:.1f}M parameters): {tiers}"


def _tier_text(request: object) -> str:
    if isinstance(request, dict):
        return " + ".join(f"{fraction:.0%} {tier}" for tier, fraction in request.items())
    return str(request)


def _draw_loss(axes: Axes, run: Run) -> None:
    rows = run.rows
    known = [row for row in rows if row.get("loss") is not None]
    axes.plot([r["step"] for r in known], [r["loss"] for r in known], color=_SKY, lw=1, label="training")
    checked = [row for row in rows if row.get("val_loss") is not None]
    if checked:
        losses = [row["val_loss"] for row in checked]
        label = f"validation, now {losses[-1]:.3f}"
        axes.plot([row["step"] for row in checked], losses, color=_BLUE, lw=2, marker="o", ms=4, label=label)
    if (unigram := run.description.get("unigram_nats")) is not None:
        axes.axhline(unigram, color=_RED, ls="--", lw=1.5, label=f"unigram entropy, {unigram:.3f}")
    for index, row in enumerate(row for row in rows if row.get("resumed")):
        axes.axvline(row["step"], color=_GREY, ls=":", lw=1.5, label="resumed" if index == 0 else None)
    axes.set_title("Loss")
    axes.set_ylabel("nats per byte")
    axes.legend(frameon=False)


def _draw_step_time(axes: Axes, run: Run) -> None:
    bins = _bins(run.rows)
    steps = [part[-1]["step"] for part in bins]
    values = (_whole_s, _figure("update_s"), _figure("commit_s"))
    whole, update, commit = ([1000 * _mean(part, value) for part in bins] for value in values)
    waits = [(words, color, [1000 * _mean(part, of) for part in bins]) for words, color, of in _waits(run.rows)]
    compute = [max(0.0, ms - sum(wait[i] for _, _, wait in waits)) for i, ms in enumerate(whole)]
    stack = [("forward, backward and the rest", _SKY, compute), *waits]
    labels, colors, heights = zip(*stack, strict=True)
    axes.stackplot(steps, *heights, labels=labels, colors=colors, lw=0)
    axes.plot(steps, update, color="black", lw=1.3, label="update, whole")
    axes.plot(steps, commit, color="black", lw=1.3, ls=":", label="commit, in the background")
    # A few slow steps (the first one records the trace) may leave the picture, the others and the legend may not.
    axes.set_ylim(0, 1.35 * sorted(whole)[int(0.95 * (len(whole) - 1))])
    axes.set_title("Where a step's time goes")
    axes.set_ylabel("ms per step")
    axes.legend(edgecolor="none", framealpha=0.85, loc="upper right", ncols=2)


def _waits(rows: Sequence[Row]) -> list[tuple[str, str, Callable[[Row], float]]]:
    """What compute waited for, in words, a colour, and the seconds of a step."""
    if not all("exposed_s" in row for row in rows):
        return [("stall: waiting for parameters", _RED, _figure("stall_s"))]
    return [
        (words, color, _exposed(cause))
        for cause, (words, color) in WAITS.items()
        if any(row["exposed_s"][cause] > _SHOWN_SHARE * _whole_s(row) for row in rows)
    ]


def _draw_traffic(axes: Axes, run: Run) -> None:
    bins = _bins(run.rows)
    steps = [part[-1]["step"] for part in bins]
    for key, style, word in (("read_bytes", "-", "read from"), ("written_bytes", "--", "written to")):
        for tier, color in _TIER_COLORS.items():
            amounts = [_mean(part, _bytes_of(key, tier)) / MIB for part in bins]
            if any(amounts):
                axes.plot(steps, amounts, style, color=color, lw=1.8, label=f"{word} {tier}")
    axes.set_ylim(bottom=0)
    axes.set_title("Bytes moved per tier (validation reads too)")
    axes.set_ylabel("MiB per step")
    axes.legend(frameon=False)


def _draw_memory(axes: Axes, run: Run) -> None:
    steps = [row["step"] for row in run.rows]
    peak = [row["peak_rss_bytes"] / MIB for row in run.rows]
    axes.plot(steps, peak, color=_RED, lw=2, label="peak RSS, activations included")
    for tier, color in _TIER_COLORS.items():
        resident = [row["resident_bytes"].get(tier, 0) / MIB for row in run.rows]
        if any(resident):
            axes.plot(steps, resident, color=color, lw=1.5, label=f"states on {tier}")
    baseline, planned = run.description.get("baseline_rss_bytes", 0), _planned_rss_bytes(run)
    before = f"process before the model, {format_bytes(baseline)}"
    axes.axhline(baseline / MIB, color=_GREY, ls=":", lw=1.2, label=before)
    axes.axhline(planned / MIB, color="black", ls="--", lw=1.2, label=f"that and the plan, {format_bytes(planned)}")
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # the legend lies above all lines
    axes.set_title("Memory against the plan")
    axes.set_ylabel("MiB")
    axes.legend(edgecolor="none", framealpha=0.85, fontsize=8, loc="upper left", ncols=2)


def _planned_rss_bytes(run: Run) -> int:
    """The process before the model, and what the plan puts into its memory."""
    plan = run.description["plan"]
    in_memory: int = plan[Tier.CPU.value]
    if run.description["device"] == "cpu":
        in_memory += plan[Tier.DEVICE.value]
    return int(run.description.get("baseline_rss_bytes", 0)) + in_memory


def _bins(rows: Sequence[Row]) -> list[Sequence[Row]]:
    """Neighbouring steps together, so that a long run stays legible."""
    size = max(1, -(-len(rows) // _BINS_MAX))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _mean(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
    return statistics.fmean(value(row) for row in rows)


def _whole_s(row: Row) -> float:
    """From one `step()` to the next, in which waits are counted: validation is in there, and not in "step_s"."""
    seconds: float = row["whole_s"] if "whole_s" in row else row["step_s"]
    return seconds


def _of_last_start(rows: Sequence[Row]) -> Sequence[Row]:
    """Those since the run was resumed the last time, perhaps with other tiers."""
    begin = max((index for index, row in enumerate(rows) if row.get("resumed")), default=0)
    return rows[begin:]


def _figure(name: str) -> Callable[[Row], float]:
    return lambda row: float(row[name])


def _exposed(cause: str) -> Callable[[Row], float]:
    return lambda row: float(row["exposed_s"][cause])


def _bytes_of(key: str, tier: str) -> Callable[[Row], float]:
    return lambda row: float(row[key].get(tier, 0))


def _median(rows: Sequence[Row], name: str) -> float | None:
    found = [row[name] for row in rows if name in row]
    return statistics.median(found) if found else None


def _median_bytes(rows: Sequence[Row], key: str, tier: Tier) -> int:
    return int(statistics.median(row[key].get(tier.value, 0) for row in rows))
