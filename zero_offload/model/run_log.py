"""`zo.RunLog`: the run directory of a training loop, for `zero-offload report`.

Owns what a row of `metrics.jsonl` says beside the loop's own figures, and what `run.json` says of the run. A row goes
out before the commit of its step. So a row of a committed step is never missing, and a resume drops one too many.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zero_offload.base.ends import at_exit
from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.base.problems import warn_user
from zero_offload.base.stats import Stats
from zero_offload.base.types import Tier, user_path
from zero_offload.checkpoint.metrics import MODEL_STEP, NUM_STEPS, Metrics, Row, is_count, show
from zero_offload.checkpoint.run_dir import METRICS_FILE, RUN_FILE, RunDir, offload_settings, refuse
from zero_offload.hardware.device import read_memory
from zero_offload.hardware.probe import peak_resident_bytes
from zero_offload.model.api import need_runtime, stats
from zero_offload.model.iterations import check_count
from zero_offload.model.runtime import ModelRuntime
from zero_offload.plan.memory import MemoryPlan, Placement, UnitNumel, estimate_memory, measure_units
from zero_offload.plan.table import PlanTable
from zero_offload.runtime.stop import StoppedBySignal
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.system import read_file

_TOOLS = ("transformers", "trl", "peft", "accelerate", "lightning", "datasets")
_STARTS_MAX = 100


class RunLog:
    """A run directory for any loop: `run.json` says what the run is, `metrics.jsonl` has a row per step.

        with zo.RunLog("runs/mine", model, settings={"lr": 3e-4}, tokens_per_step=8192) as log:
            for step in range(log.committed_step + 1, 1001):
                ...
                optimizer.step()
                log.step(step, loss=loss, lr=scheduler.get_last_lr()[0], grad_norm=norm)
                zo.commit(model, optimizer)

    `zero-offload report runs/mine` draws it, while it grows too. Make it after `zo.offload` and `zo.resume`, and call
    `step` before `zo.commit`. On a resume, rows of steps after the model's are dropped, a line that a crash has torn
    included. If the model is at step 0, rows of an earlier run are moved to `metrics.earlier`. Rows survive a killed
    process. Every rank makes one, and the first one's writes.

    `settings`: what is shown of the run; values that are not JSON's are shown as text. `tokens_per_step`: of all ranks,
    for tokens per second. `micro_batches` of a step are counted by the plan. `about` is for further entries of
    `run.json`, `warn` gets what was found damaged. `path` may be an open directory (`RunDir.held`), which stays open.

    Raises LockError when another run is at work in `path`, ConfigError when `path` holds something else or the model
    is not offloaded, StorageError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | RunDirectory,
        model: nn.Module,
        *,
        settings: Mapping[str, Any] | None = None,
        tokens_per_step: int | None = None,
        micro_batches: int = 1,
        about: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = warn_user,
    ) -> None:
        owner = need_runtime(model, "zo.RunLog")
        check_count("zo.RunLog", owner.uncounted)
        self._model, self._owner, self._pid = model, owner, os.getpid()
        self._is_first = owner.ranks.rank == 0
        self._tokens_per_step = tokens_per_step
        self._planned_bytes: dict[str, int] = {}
        """The total of the plan, by place."""
        self._figures: Row = {}
        """Measured, and not written yet."""
        self._metrics: Metrics | None = None
        self._place: RunDirectory | None = None
        self._held = ExitStack()
        self.committed_step = owner.step_count
        """The model's iterations when the log began: those of the generation or checkpoint that it goes on from."""
        self._row_step = self.committed_step
        """The step of the last row, or where rows go on; the same on all ranks."""
        owner.iterations.begin_rows()
        self._goes_on, self._is_closed, self._last_step = self.committed_step > 0, False, 0
        with owner.together("zo.RunLog"):
            _check_arguments(path, settings, about, tokens_per_step, micro_batches, warn)
            self.path = path.path if isinstance(path, RunDirectory) else user_path(path).absolute()
            if self._is_first:
                try:
                    self._open(path, settings or {}, micro_batches, about or {}, warn)
                except BaseException:
                    self._held.close()
                    raise
        self._restart_clock()
        at_exit(self._close_at_exit)

    def _open(
        self,
        path: str | os.PathLike[str] | RunDirectory,
        settings: Mapping[str, Any],
        micro_batches: int,
        about: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        owner = self._owner
        if self.path.resolve() in [each.resolve() for each in owner.config.nvme_dirs]:
            raise ConfigError(
                f"{self.path} is the model's NVMe directory too; both keep a {RUN_FILE}: give zo.RunLog another one"
            )
        run_dir = RunDir(self.path)
        self._place = path if isinstance(path, RunDirectory) else self._held.enter_context(run_dir.held())
        starts = _earlier_starts(self.path / RUN_FILE)
        self._started: dict[str, Any] = {"began_at": time.time(), "step": self.committed_step}
        self._description = _describe(owner, self._model, self.path, settings, micro_batches) | {
            "tokens_per_step": self._tokens_per_step,
            **about,
            "starts": [*starts[-_STARTS_MAX:], self._started] if self._goes_on else [self._started],
        }
        self._planned_bytes = PlanTable.from_dict(self._description["planned"]).total
        run_dir.create(self._description)
        if not self._goes_on:
            run_dir.remove_traces()
        self._metrics = Metrics.open(self.path / METRICS_FILE, self.committed_step)
        self._last_step = self._metrics.last_step
        for note in self._metrics.notes:
            warn(note)

    def measure(self) -> None:
        """Take the step's time and `zo.stats` now. The next `step` writes them.

        Between the two calls an evaluation may run: it is part of no step's time.
        """
        self._figures = self._measured()

    def step(self, step: int, **figures: Any) -> dict[str, Any]:
        """End an iteration, and write its row: numbers by name, and what `zo.stats` says; returns it.

        `loss`, `val_loss`, `lr` and `grad_norm` are drawn, and None is left out. `tokens`: those of all ranks since the
        last row, in place of `tokens_per_step`. A list of text, such as what the model writes, is kept. A row may stand
        for several steps. Raises ConfigError where `step` is not above the last row's or a figure is not a number.
        Raises StorageError when the row cannot be written, and LockError when another run could come in.
        """
        last, measured = self._last_step, self._figures or self._measured()
        if self._is_closed:
            raise ConfigError(f"zo.RunLog: the log in {self.path} is closed; make another one")
        if not is_count(step) or step <= last:
            raise ConfigError(f"zo.RunLog: step {step!r} after step {last}; steps are whole numbers that rise from 1")
        if known := sorted({*figures} & {*measured, *_OWN}):
            raise ConfigError(f"zo.RunLog measures {', '.join(known)} by itself; give that figure another name")
        row: Row = {"step": step}
        row |= {name: _figure(name, value) for name, value in figures.items() if value is not None}
        row |= measured | {"planned_bytes": self._planned_bytes}
        if (tokens := row.get("tokens")) is not None:
            row["tokens_per_s"] = tokens / (row["step_s"] * (step - last))
        elif self._tokens_per_step is not None:
            row["tokens_per_s"] = self._tokens_per_step / row["step_s"]
        if step - last > 1:
            row[NUM_STEPS] = step - last
        self._owner.end_row(max(step - self._row_step, 1))
        self._row_step = step
        if self._owner.step_count not in (0, step):
            row[MODEL_STEP] = self._owner.step_count
        if self._goes_on:
            row["resumed"] = True
        if self._metrics is not None and self._place is not None:
            self._place.check_in_place()
            self._metrics.append(row)
        self._goes_on, self._last_step = False, step
        self._restart_clock()
        return row

    def _measured(self) -> Row:
        now, num_steps = time.perf_counter(), self._owner.step_count - self._clock_step
        found, memory = stats(self._model), read_memory(self._owner.device.torch_device)
        return {
            "at": time.time(),
            "step_s": max(now - self._clock, 1e-9) / max(num_steps, 1),
            **_row_of(found),
            **({} if memory is None else {"peak_device_bytes": memory.peak_allocated}),
        }

    def _restart_clock(self) -> None:
        self._figures = {}
        self._clock, self._clock_step = time.perf_counter(), self._owner.step_count

    def close(self, error: str = "") -> None:
        """Say in `run.json` when the run ended, and by which `error`; let other runs come. Closing twice is allowed."""
        if not isinstance(error, str):
            raise ConfigError(f"zo.RunLog.close(error={error!r}): give a text, such as type(error).__name__")
        metrics, self._metrics = self._metrics, None
        self._is_closed = True
        if metrics is None or os.getpid() != self._pid:
            return
        metrics.close()
        self._started |= {"ended_at": time.time(), "last_step": metrics.last_step, "error": error}
        try:
            RunDir(self.path).write(RUN_FILE, json.dumps(self._description, indent=1))
        finally:
            self._held.close()

    def _close_at_exit(self) -> None:
        with suppress(ZeroOffloadError):
            self.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(ZeroOffloadError):  # the first error tells more
                self.close(error.by if isinstance(error, StoppedBySignal) else kind.__name__)


def _earlier_starts(file: Path) -> list[Any]:
    """Raise ConfigError where a `run.json` is not of a run: the one of an NVMe directory must not be replaced."""
    try:
        earlier = json.loads(read_file(file))
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(earlier, dict) or "identity" not in earlier:
        refuse(file, "it says nothing of a run", "name another directory")
    starts = earlier.get("starts")
    return starts if isinstance(starts, list) else []


_OWN = ("step", "planned_bytes", "tokens_per_s", "resumed", MODEL_STEP, NUM_STEPS)


def _row_of(found: Stats) -> Row:
    return {
        "whole_s": found.step_s,
        "stall_s": found.stall_s,
        "exposed_s": dict(found.exposed_s),
        "update_s": found.update_s,
        "commit_s": found.commit_s,
        "commit_wait_s": found.commit_wait_s,
        "read_bytes": dict(found.read_bytes),
        "written_bytes": dict(found.written_bytes),
        "activation_bytes": dict(found.activation_bytes),
        "resident_bytes": dict(found.resident_bytes),
        "peak_rss_bytes": found.peak_rss_bytes,
        "skipped_steps": found.skipped_steps,
    }


def _figure(name: str, value: Any) -> float | int | list[str]:
    """A number as JSON has it; NaN and infinities stay, and are null in the file. A list of text stays."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value) and name not in _NUMBERS:
        return value
    value = value.detach() if isinstance(value, torch.Tensor) else value
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("torch.bool", "bool")
    try:
        if not isinstance(value, str | bytes) and not is_bool:
            number = float(value)  # raises for whole numbers that no float is near to
            return value if isinstance(value, int) else number
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    hint = "; True and False are none: give int(...) where 1 and 0 are meant" if is_bool else ""
    raise ConfigError(f"zo.RunLog: {name}={show(value)} is not a number{hint}")


_NUMBERS = ("loss", "val_loss", "lr", "grad_norm", "tokens")
"""Names of numbers: a list of text is refused for them."""


def _check_arguments(
    path: object, settings: object, about: object, tokens_per_step: object, micro_batches: object, warn: object
) -> None:
    if not isinstance(path, str | os.PathLike | RunDirectory):
        raise ConfigError(f"zo.RunLog({path!r}): the first argument is the run's directory, a path")
    if not callable(warn):
        raise ConfigError(f"zo.RunLog(warn={warn!r}): give a function that takes a text, such as print")
    for name, value in (("settings", settings), ("about", about)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"zo.RunLog({name}=) takes a dict, not a {type(value).__name__}; vars(args) makes one")
    for name, number in (("tokens_per_step", tokens_per_step), ("micro_batches", micro_batches)):
        if number is not None and not is_count(number):
            raise ConfigError(f"zo.RunLog({name}={number!r}): give a whole number from 1 up")


def _describe(
    owner: ModelRuntime, model: nn.Module, path: Path, settings: Mapping[str, Any], micro_batches: int
) -> dict[str, Any]:
    """The content of `run.json`: plain values."""
    counts = {True: 0, False: 0}
    for param in model.parameters():
        counts[param.requires_grad] += param.numel()
    plan = planned_memory(owner, micro_batches)
    own = offload_settings(owner.config) | {"ranks": owner.ranks.world_size, "out": str(path)}
    return {
        "identity": {str(name): _plain(value) for name, value in settings.items()} | _plain(own),
        "name": type(model).__name__,
        "num_parameters": sum(counts.values()),
        "num_trained": counts[True],
        "num_frozen": counts[False],
        "device": owner.device.torch_device.type,
        "device_name": owner.device.name,
        "host": platform.node(),
        "plan": {tier.value: plan.used_bytes(tier) for tier in Tier},
        "planned": plan.as_table().to_dict(),
        "versions": _versions(),
        "run_id": None if owner.keeper is None else owner.keeper.run_id,
        "rss_bytes_at_start": peak_resident_bytes(),
    }


def _versions() -> dict[str, str]:
    names = ("zero_offload", "torch", *(name for name in _TOOLS if name in sys.modules))
    found = {name: getattr(sys.modules[name], "__version__", None) for name in names}
    return {"python": platform.python_version(), **{name: str(version) for name, version in found.items() if version}}


def _plain(value: Any) -> Any:
    """As JSON has it; what JSON lacks as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def planned_memory(owner: ModelRuntime, micro_batches: int) -> MemoryPlan:
    """The plan of one rank, with the placement that was made."""
    partition, config = owner.collectives.partition, owner.config
    in_base = {
        section.layout.index for unit in owner.units for section in unit.sections if section.shard.base is not None
    }
    numels = [UnitNumel.of(unit.layout, in_base=in_base) for unit in owner.units]
    unit_bytes = measure_units(numels, config, partition, micro_batches)
    return estimate_memory(
        unit_bytes, Placement(owner.sizes.placement.tiers, owner.sizes.plan.budget), config, partition
    )
