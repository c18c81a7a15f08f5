"""`OffloadedModel`: what parameters, optimizers and the public functions talk to once a model is offloaded.

Owns the step: which gradients an update takes, its clip factor, and which generation is due. Moves no bytes: it
asks the runtime, the update pipeline and the keeper of generations, which know nothing of each other.
Order of a step: backward fills `grads`; `clip_grad_norm` sets the factor; `update` captures everything by value
and launches; `commit` follows it on the same worker, so generations and updates can never overlap.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zero_offload.checkpoint.format import Generation, StepRecord
from zero_offload.checkpoint.generation import GenerationKeeper
from zero_offload.config import OffloadConfig, UpdateOverlap
from zero_offload.errors import ConfigError, ZeroOffloadError
from zero_offload.kernels.adamw import AdamWSegment, segment_array
from zero_offload.optim.pipeline import SectionUpdate, UpdatePipeline
from zero_offload.plan.layout import ParamSlice
from zero_offload.runtime.collectives import Collectives
from zero_offload.runtime.grads import GradReducer, SectionGrads
from zero_offload.runtime.residency import Residency
from zero_offload.runtime.session import Session
from zero_offload.runtime.unit import Section, Unit
from zero_offload.shards.registry import AdamWHyper
from zero_offload.shards.store import ShardStore
from zero_offload.shards.update_board import UpdateBoard
from zero_offload.telemetry.stats import Stats, StatsKeeper

CLIP_EPS = 1e-6
"""As torch.nn.utils.clip_grad_norm_ adds it to the norm."""


@dataclass(frozen=True)
class Parts:
    """What `offload()` has built for one model."""

    config: OffloadConfig
    collectives: Collectives
    store: ShardStore
    board: UpdateBoard
    units: tuple[Unit, ...]
    residency: Residency
    keeper: GenerationKeeper | None
    close_files: Callable[[], None]


@dataclass(frozen=True)
class Place:
    """Where a parameter is."""

    unit: Unit
    section: Section
    piece: ParamSlice


class OffloadedModel:
    """Ties one model's pieces together; implements `shards.registry.Owner`."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.grads = GradReducer(
            parts.units, parts.store, parts.residency, parts.board, parts.collectives
        )
        self.session = Session(
            parts.units, parts.residency, self.grads.finish_backward, self._drop_grads
        )
        self._places = {
            id(param): Place(unit, section, piece)
            for unit in parts.units
            for section, piece, param in unit.placed_params()
        }
        self.param_steps = {place.piece.spec.name: 0 for place in self._places.values()}
        self.step_count = 0
        self.skipped_steps = 0
        self._clip_factor = 1.0
        self._groups: list[dict[str, Any]] = []
        self._due: StepRecord | None = None
        self._stats = StatsKeeper(parts.store.counters)
        self._pipeline = UpdatePipeline(parts.store, parts.board)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zero_offload-update")
        self._jobs: list[Future[None]] = []

    # Parameters

    def place(self, param: nn.Parameter) -> Place:
        return self._places[id(param)]

    def describe(self, param: nn.Parameter) -> str:
        """Name and tier, for repr and messages."""
        place = self.place(param)
        return f"{place.piece.spec.name}, offloaded to {place.section.shard.placement.params.value}"

    def touch(self, params: list[nn.Parameter], func: object) -> None:
        """Let an operation read parameters: always inside a forward or backward; outside if they are here."""
        for unit in {self.place(param).unit.index: self.place(param).unit for param in params}.values():
            if self.session.active:
                self.session.touch(unit)
            elif unit.resident and not _writes(func):
                self.parts.board.wait(unit.index)
            else:
                raise ZeroOffloadError(
                    f"{getattr(func, '__name__', func)} needs the data of parameter "
                    f"{self.describe(params[0])}, outside of the model's forward. Use "
                    "'with zo.gathered(module):' to read, zo.gathered(module, mode=\"write\") to change it"
                )

    def check_requires_grad(self, param: nn.Parameter, value: object) -> None:
        """`requires_grad` may be set to what it is; a change needs another layout."""
        place = self.place(param)
        if bool(value) != place.section.layout.trainable:
            raise ConfigError(
                f"requires_grad of {place.piece.spec.name} cannot change after zo.offload: frozen parameters "
                "have no optimizer state. Set it before, then call zo.offload"
            )

    # Gradients

    def grad_ready(self, param: nn.Parameter) -> None:
        """Autograd has a parameter's gradient."""
        self.session.note_backward()
        self.grads.arrive(param)

    def read_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        if not self.place(param).section.layout.trainable or not self.grads.held(param):
            return None
        view = self.grads.view(param)
        if view is None:
            raise ZeroOffloadError(
                f"the gradient of {self.describe(param)} rests on "
                f"{self.place(param).section.shard.placement.grads.value} and waits for the optimizer's step. "
                "Clip with zo.clip_grad_norm_(model, max_norm), step with zo.AdamW, drop it with "
                "optimizer.zero_grad(), or read it with zo.gathered(module, kind=\"grads\")"
            )
        return view

    def write_grad(self, param: nn.Parameter, grad: torch.Tensor | None) -> None:
        if not self.place(param).section.layout.trainable:
            return
        if grad is None:
            self.grads.forget(param)
            return
        raise ZeroOffloadError(
            f"the gradient of {self.describe(param)} cannot be assigned; only None, which drops it"
        )

    def _drop_grads(self) -> bool:
        held = self.grads.any_held
        self.grads.drop()
        return held

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Set the next update's clip factor as torch.nn.utils.clip_grad_norm_ would; returns the norm."""
        norm, _ = self.grads.norm()
        self._clip_factor = min(1.0, max_norm / (norm + CLIP_EPS)) if math.isfinite(norm) else 1.0
        return torch.tensor(norm)

    # The step

    def update(self, hypers: Mapping[nn.Parameter, AdamWHyper], groups: Sequence[dict[str, Any]]) -> None:
        """One AdamW step over the parameters of `hypers` that have gradients; returns when it is launched."""
        self._commit_due()
        if not self.grads.any_held:
            return
        self.step_count += 1
        self._groups = list(groups)
        if self.grads.norm()[1]:
            self._launch(self._section_updates(hypers), hypers)
        else:
            self._skip()
        self._clip_factor = 1.0
        self._stats.close_step()
        if self.parts.keeper is not None and self.step_count % self.parts.config.commit_every == 0:
            self._due = self._record(None, None)

    def _skip(self) -> None:
        self.skipped_steps += 1
        self.grads.drop()
        if self.skipped_steps == 1:
            warnings.warn(
                f"step {self.step_count}: a gradient is NaN or infinite; the step is skipped and the states "
                "stay as they are. zo.stats(model).skipped_steps counts such steps",
                stacklevel=4,
            )

    def _section_updates(self, hypers: Mapping[nn.Parameter, AdamWHyper]) -> list[SectionUpdate]:
        """Sections to update in order of first use; all trainable sections of a unit, or none."""
        wanted = {id(param): hyper for param, hyper in hypers.items()}
        found: dict[int, list[SectionUpdate]] = {}
        for grads in self.grads.sections:
            segments = self._segments(grads, wanted)
            section = SectionUpdate(
                unit=grads.unit.index,
                position=grads.unit.sections.index(grads.section),
                shard=grads.section.shard,
                grads=grads.shard,
                segments=segment_array(segments),
                complete=len(segments) == len(grads.layout.params),
            )
            found.setdefault(grads.unit.index, []).append(section)
        order = self.parts.residency.schedule.first_uses("grad", len(self.parts.units))
        with_work = {unit for unit, sections in found.items() if any(len(s.segments) for s in sections)}
        return [section for unit in order if unit in with_work for section in found[unit]]

    def _segments(self, grads: SectionGrads, wanted: Mapping[int, AdamWHyper]) -> list[AdamWSegment]:
        """The section's updated parameters as element ranges of this rank's shard."""
        shard_numel = grads.layout.shard_numel
        offset = self.parts.collectives.shard_index * shard_numel
        segments = []
        for index, (piece, param) in enumerate(zip(grads.layout.params, grads.params, strict=True)):
            hyper = wanted.get(id(param))
            if hyper is None or index not in grads.holding:
                continue
            self.param_steps[piece.spec.name] += 1
            low = min(max(piece.begin - offset, 0), shard_numel)
            high = min(max(piece.end - offset, 0), shard_numel)
            segments.append(
                AdamWSegment(
                    low,
                    high,
                    hyper.lr,
                    hyper.beta1,
                    hyper.beta2,
                    hyper.eps,
                    hyper.weight_decay,
                    -self._clip_factor if hyper.maximize else self._clip_factor,
                    self.param_steps[piece.spec.name],
                )
            )
        return segments

    def _launch(self, sections: list[SectionUpdate], hypers: Mapping[nn.Parameter, AdamWHyper]) -> None:
        units = list(dict.fromkeys(section.unit for section in sections))
        for unit in units:
            self.parts.board.wait(unit)
        self.parts.board.queue(units)
        self.parts.residency.begin_update(units)
        # A backward through weights that are about to change must fail as it does in plain torch.
        torch.autograd.graph.increment_version([p for u in units for p in self.parts.units[u].params])
        self.grads.consume(hypers)
        threads = torch.get_num_threads()
        if self._overlaps(sections):
            # Forward computes on the same cores meanwhile, and one core nearly saturates the update.
            self._submit(lambda: self._pipeline.run(sections, max(1, threads // 2)))
        else:
            self.drain()
            self._pipeline.run(sections, threads)

    def _overlaps(self, sections: Sequence[SectionUpdate]) -> bool:
        """Whether the update runs beside forward: pointless where it is arithmetic in memory alone."""
        if self.parts.config.update_overlap == UpdateOverlap.AUTO.value:
            return any(section.shard.on_disk or section.grads.on_disk for section in sections)
        return self.parts.config.update_overlap == UpdateOverlap.FORWARD.value

    # Generations

    def adopt_generation(self, found: Generation) -> None:
        """The shards are a generation's: so are the counts."""
        self.step_count = found.step
        steps = found.payload.get("param_steps", {})
        self.param_steps = {name: int(steps.get(name, 0)) for name in self.param_steps}

    def _record(self, rng: dict[str, Any] | None, extra: Any) -> StepRecord:
        return StepRecord(self.step_count, dict(self.param_steps), self._groups, rng, extra)

    def commit(self, capture_rng: Callable[[], dict[str, Any]], extra: Any) -> None:
        """Complete the generation that is due with what only the caller knows, and launch it."""
        if self._due is not None:
            self._due = replace(self._due, rng=capture_rng(), extra=extra)
            self._commit_due()

    def _commit_due(self) -> None:
        record, self._due = self._due, None
        keeper = self.parts.keeper
        if record is not None and keeper is not None:
            self._submit(lambda: self._timed_commit(keeper, record))

    def _timed_commit(self, keeper: GenerationKeeper, record: StepRecord) -> None:
        try:
            with self.parts.store.counters.timed("commit_s"):
                keeper.commit(record)
        except BaseException as error:
            self.parts.board.fail(error)
            raise

    # Life

    def _submit(self, job: Callable[[], None]) -> None:
        self.parts.board.check()
        self._jobs = [each for each in self._jobs if not each.done()]
        try:
            self._jobs.append(self._worker.submit(job))
        except RuntimeError:
            # The interpreter is shutting down and takes no new work in threads.
            self.drain()
            job()

    def drain(self) -> None:
        """Wait until updates and commits launched so far are complete. Raises their error."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()
        self.parts.board.check()

    def stats(self) -> Stats:
        store = self.parts.store
        resident = {
            "device": 0,
            "cpu": store.arena.allocated_bytes + store.arena.frame_bytes,
            "nvme": store.swap.nbytes if store.swap is not None else 0,
        }
        return self._stats.stats(self.step_count, self.skipped_steps, resident)

    def close(self) -> None:
        """Finish updates and the generation that is due, then release files and locks."""
        try:
            self._commit_due()
            self.drain()
        finally:
            self._worker.shutdown()
            self.parts.close_files()


def _writes(func: object) -> bool:
    """Whether a tensor function changes its operand or hands out an alias that could."""
    name = getattr(func, "__name__", "")
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__set__", "__setitem__", "__delete__") or owner == "data"
