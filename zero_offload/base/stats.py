"""Figures of one optimizer step: `Stats`, the difference of two counter snapshots."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from zero_offload.base.events import Counters
from zero_offload.base.spans import Cause, Track
from zero_offload.base.types import Tier


class DeviceParams(NamedTuple):
    """Parameters in the memory of a GPU, those that pass through included; in frames of 2 MiB."""

    nbytes: int
    """There now."""
    limit: int
    """Bytes that they may take, by `device_memory` or by what is free."""
    reason: str
    """Why the limit has fallen last; empty if it has not."""


class ParamReads(NamedTuple):
    """Parameters that operations of the program have read or changed outside of the forwards of their modules: hooks
    that log values, `generate`, averages of weights. Parameters that are in memory cost nothing, and do not count."""

    num_reads: int
    """Of single parameters, and of units that were fetched for an operation inside of a forward or backward."""
    nbytes: int
    seconds: float
    """Seconds that the program has waited for them."""


@dataclass(frozen=True)
class Stats:
    """Figures of one rank between the last two calls of `step()`; before the first one, since `zo.offload`.

    So of a model that is only read, the difference of two calls of `zo.stats` is what was done between them.
    """

    step: int
    """Steps so far, skipped ones included."""
    step_s: float
    stall_s: float
    """Seconds that forward and backward waited for parameters, activations and gradients."""
    update_s: float
    """Seconds of update passes, most of them beside forward."""
    commit_s: float
    """Seconds of commits that became complete, beside forward and backward."""
    commit_wait_s: float
    """Seconds that updates, and calls that change states, waited for a commit."""
    read_bytes: dict[str, int]
    """Per tier."""
    written_bytes: dict[str, int]
    communicated_bytes: dict[str, int]
    """Of whole buffers: "gathered" from all ranks, "reduced" over them. Nothing on one rank."""
    sent_bytes: dict[str, int]
    """Parameters and gradients that this rank has sent: "near", to ranks of its machine, and "far", to others. Counted
    where a CPU computes."""
    activation_bytes: dict[str, int]
    """Per tier, of tensors that forwards gave it to keep for backward; none where `activations` is on the device."""
    num_departures: int
    """Uses of units that the schedule did not predict."""
    skipped_steps: int
    """Steps not applied because a gradient was NaN or infinite, in all."""
    resident_bytes: dict[str, int]
    """Bytes that rest on each tier now; on the host and on drives with buffers, on a GPU without units in use."""
    device_params: DeviceParams | None
    """Parameters in a GPU's own memory; None where a CPU computes."""
    num_mappings: int
    """Ranges of host memory asked of the system, in all; these and the next stand still once training has settled."""
    num_registrations: int
    """Those of them that were registered with a GPU, in all."""
    peak_rss_bytes: int
    """The largest resident set of this process so far, without that of the program that started it."""
    param_reads: ParamReads
    """Costs of reads of single parameters."""
    exposed_s: dict[str, float]
    """Seconds that compute stood still, by what it waited for: "params", "activations", "update", "grads", "commit".
    An update that runs inside of `step()` is such a wait."""

    @property
    def update_overlap(self) -> float | None:
        """The share of `update_s` that was hidden: nothing waited for it. None without an update."""
        return update_overlap(self.update_s, self.exposed_s["update"])


def update_overlap(update_s: float, exposed_s: float) -> float | None:
    """The share of an update's seconds that ran beside something else."""
    return max(0.0, 1 - exposed_s / update_s) if update_s else None


_STALLS = (Cause.PARAMS, Cause.ACTIVATIONS, Cause.GRADS)


class StatsKeeper:
    """Cuts the counters into steps."""

    def __init__(self, counters: Counters, taken: Callable[[], tuple[int, int]]) -> None:
        """`taken` tells how many ranges of host memory were taken, and how many of them registered, so far."""
        self._counters = counters
        self._taken = taken
        self._start = time.perf_counter()
        self._before: dict[str, float] = {}
        self._delta: dict[str, float] = {}
        self._cut: dict[str, float] | None = None

    def cut(self) -> None:
        """Count for the next step from here on: an update begins that runs beside it."""
        self._cut = self._counters.snapshot()

    def end_step(self, step: int) -> dict[str, float]:
        """This step ends here; returns what every counter has grown by in it, and its "step_s"."""
        now, totals = time.perf_counter(), self._counters.snapshot()
        totals, self._cut = self._cut or totals, None
        self._delta = {name: total - self._before.get(name, 0) for name, total in totals.items()}
        self._delta["step_s"] = now - self._start
        if (spans := self._counters.spans).on:
            spans.put(Track.STEPS, str(step), max(int(self._start * 1e9), spans.begin_ns), int(now * 1e9))
        self._start, self._before = now, totals
        return self._delta

    def _since_start(self) -> dict[str, float]:
        """No step has ended yet."""
        return {**self._counters.snapshot(), "step_s": time.perf_counter() - self._start}

    def stats(
        self,
        step: int,
        skipped_steps: int,
        resident_bytes: dict[str, int],
        device_params: DeviceParams | None,
        peak_rss_bytes: int,
    ) -> Stats:
        delta, (num_mappings, num_registrations) = self._delta or self._since_start(), self._taken()
        return Stats(
            step=step,
            step_s=delta.get("step_s", 0.0),
            stall_s=sum(delta.get(f"exposed.{cause.value}", 0.0) for cause in _STALLS),
            update_s=delta.get("update_s", 0.0),
            commit_s=delta.get("commit_s", 0.0),
            commit_wait_s=delta.get("commit_wait_s", 0.0),
            read_bytes={tier.value: int(delta.get(f"read.{tier.value}", 0)) for tier in Tier},
            written_bytes={tier.value: int(delta.get(f"written.{tier.value}", 0)) for tier in Tier},
            communicated_bytes={name: int(delta.get(name, 0)) for name in ("gathered", "reduced")},
            sent_bytes={name: int(delta.get(f"sent.{name}", 0)) for name in ("near", "far")},
            activation_bytes={tier.value: int(delta.get(f"activations.{tier.value}", 0)) for tier in Tier},
            num_departures=int(delta.get("departures", 0)),
            skipped_steps=skipped_steps,
            resident_bytes=resident_bytes,
            device_params=device_params,
            num_mappings=num_mappings,
            num_registrations=num_registrations,
            peak_rss_bytes=peak_rss_bytes,
            param_reads=ParamReads(
                int(delta.get("param_reads", 0)),
                int(delta.get("param_reads_bytes", 0)),
                delta.get("param_reads_s", 0.0),
            ),
            exposed_s={cause.value: delta.get(f"exposed.{cause.value}", 0.0) for cause in Cause},
        )
