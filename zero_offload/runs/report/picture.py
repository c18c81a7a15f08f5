"""`report.png`: the picture of a run for a terminal; the only importer of matplotlib.

The call: `write_picture(run)`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zero_offload.base.errors import CapacityError
from zero_offload.base.types import MIB, Tier, format_bytes
from zero_offload.checkpoint.metrics import Row
from zero_offload.checkpoint.run_dir import PICTURE_FILE, RunDir
from zero_offload.runs.reader import Run
from zero_offload.runs.report.summary import (
    WAITS,
    bytes_of,
    exposed,
    figure,
    mean,
    planned_rss_bytes,
    title_of,
    whole_s,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours: told apart by colour-blind readers too.
_BLUE, _ORANGE, _GREEN = "#0072B2", "#E69F00", "#009E73"
_RED, _SKY, _GREY = "#D55E00", "#56B4E9", "#777777"
_TIER_COLORS = {Tier.DEVICE.value: _GREEN, Tier.CPU.value: _BLUE, Tier.NVME.value: _ORANGE}

_WAIT_COLORS = {"params": _RED, "update": _ORANGE, "activations": _GREEN, "grads": _BLUE, "commit": _GREY}
_SHOWN_SHARE = 0.005
"""A share of the step: what never takes more is not drawn."""
_BINS_MAX = 120


def write_picture(run: Run, out: Path | None = None) -> Path:
    """Draw loss, step time, traffic and memory into one PNG, by default beside the run's metrics; its path.

    Raises CapacityError without matplotlib, and StorageError.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CapacityError(f"{PICTURE_FILE} needs matplotlib, which is missing: pip install matplotlib") from error
    drawn = Figure(figsize=(13, 8.5), layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(2, 2)
    drawn.suptitle(title_of(run), fontsize=12)
    for axes, draw in zip(panels.flat, (_draw_loss, _draw_step_time, _draw_traffic, _draw_memory), strict=True):
        draw(axes, run)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    drawn.savefig(content, dpi=110, format="png")
    return RunDir(out or run.path).write(PICTURE_FILE, content.getvalue())


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
    axes.set_ylabel("nats per byte" if unigram is not None else "loss")
    if known or checked:
        axes.legend(frameon=False)


def _draw_step_time(axes: Axes, run: Run) -> None:
    bins = _bins(run.rows)
    steps = [part[-1]["step"] for part in bins]
    values = (whole_s, figure("update_s"), figure("commit_s"))
    whole, update, commit = ([1000 * mean(part, value) for part in bins] for value in values)
    waits = [(words, color, [1000 * mean(part, of) for part in bins]) for words, color, of in _waits(run.rows)]
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
    """Causes that compute waited for, in words, a colour, and the seconds of a step."""
    if not all("exposed_s" in row for row in rows):
        return [("waiting for parameters", _RED, figure("stall_s"))]
    return [
        (words, _WAIT_COLORS[cause], exposed(cause))
        for cause, words in WAITS.items()
        if any(row["exposed_s"][cause] > _SHOWN_SHARE * whole_s(row) for row in rows)
    ]


def _draw_traffic(axes: Axes, run: Run) -> None:
    bins = _bins(run.rows)
    steps = [part[-1]["step"] for part in bins]
    for key, style, word in (("read_bytes", "-", "read from"), ("written_bytes", "--", "written to")):
        for tier, color in _TIER_COLORS.items():
            amounts = [mean(part, bytes_of(key, tier)) / MIB for part in bins]
            if any(amounts):
                axes.plot(steps, amounts, style, color=color, lw=1.8, label=f"{word} {tier}")
    axes.set_ylim(bottom=0)
    axes.set_title("Bytes moved per tier (validation reads too)")
    axes.set_ylabel("MiB per step")
    if axes.lines:
        axes.legend(frameon=False)


def _draw_memory(axes: Axes, run: Run) -> None:
    steps = [row["step"] for row in run.rows]
    peak = [row["peak_rss_bytes"] / MIB for row in run.rows]
    axes.plot(steps, peak, color=_RED, lw=2, label="peak RSS, activations included")
    for tier, color in _TIER_COLORS.items():
        resident = [row["resident_bytes"].get(tier, 0) / MIB for row in run.rows]
        if any(resident):
            axes.plot(steps, resident, color=color, lw=1.5, label=f"states on {tier}")
    if (planned := planned_rss_bytes(run)) is not None:
        baseline = run.description["baseline_rss_bytes"]
        before = f"process before the model, {format_bytes(baseline)}"
        axes.axhline(baseline / MIB, color=_GREY, ls=":", lw=1.2, label=before)
        axes.axhline(planned / MIB, color="black", ls="--", lw=1.2, label=f"that and the plan, {format_bytes(planned)}")
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # the legend lies above all lines
    axes.set_title("Memory against the plan")
    axes.set_ylabel("MiB")
    axes.legend(edgecolor="none", framealpha=0.85, fontsize=8, loc="upper left", ncols=2)


def _bins(rows: Sequence[Row]) -> list[Sequence[Row]]:
    """Neighbouring steps together, so that a long run stays legible."""
    size = max(1, -(-len(rows) // _BINS_MAX))
    return [rows[start : start + size] for start in range(0, len(rows), size)]
