"""The units of a folder's model, as a run trains them: their bytes, and the activations of a micro-batch.

Owns all that is made once for a folder and used by plans with other settings. Never builds the model: it is made on
meta, and rehearsed. The calls: `FolderWork(folder)`; then `work` and `rehearsal` of a job.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.finetune.choices import LiveChoice
from zero_offload.finetune.classes import planned_optimizer
from zero_offload.finetune.fit.job import FolderJob
from zero_offload.finetune.fit.rehearsal import Rehearsal, rehearse
from zero_offload.finetune.fit.request import find_gpu_here
from zero_offload.finetune.model.build import blocks_of, drawn_heads, group_frozen_experts, meta_model
from zero_offload.finetune.model.folder import ModelFolder
from zero_offload.finetune.model.targets import adapted, not_adapted
from zero_offload.hardware.probe import is_remote
from zero_offload.model.planned_states import PlannedStates, planned_states
from zero_offload.plan.dtypes import resolve
from zero_offload.plan.layout import SectionLayout, UnitLayout, make_layout
from zero_offload.plan.memory import UnitNumel, numels_in_turns, value_bytes
from zero_offload.plan.model_spec import ModelSpec, ParamSpec
from zero_offload.plan.shapes import UnitWork, work_of
from zero_offload.runtime.hooks import experts_in

_INSIDE_WIDTHS = 50
"""Values of a token that a block keeps, over its width: 26 in Llama-8B, 40 in Qwen3, by rehearsals; and some more."""
_TOKENS_MAX = 1 << 17
"""Of a rehearsal: the loss takes some time for each thousand. More rows take as much more memory."""


class FolderWork:
    """Results that are made once for a folder, and used by plans with other settings."""

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self._work: dict[object, tuple[UnitWork, ...]] = {}
        self._kept: dict[object, tuple[UnitNumel, ...]] = {}
        self._in_turns: dict[object, nn.Module] = {}
        """The model whose blocks take turns, by all but how many of them live."""
        self._rehearsals: dict[object, Rehearsal] = {}
        self.adapted: dict[object, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        """By adapter and quantization, what has adapters and what has none."""
        self.notes: tuple[str, ...] = ()
        """Parts of the folder's config that were not understood."""

    def work(self, job: FolderJob, shards: int) -> tuple[UnitWork, ...]:
        """Of each unit, as `zo.offload` finds it."""
        folder, config = job.folder, job.offload
        key = self._key_of(job, shards)
        if key not in self._work:
            if job.live is not None:
                self._work[key] = self._work_in_turns(job, job.live, shards)
                return self._work[key]
            model = meta_model(folder, job.lora, getattr(torch, config.compute_dtype_name))
            group_frozen_experts(model, folder)
            self.adapted[job.lora, folder.quantize] = adapted(model), not_adapted(model)
            spec = ModelSpec.from_module(model, experts=experts_in(model))
            layout = make_layout(spec, resolve(model, config), shards)
            found = work_of(model, spec)
            self.notes, kept = found.notes, None
            if job.optimizer:
                optimizer = planned_optimizer(job.optimizer, model, job.lr, job.weight_decay)
                has_gpu = job.gpu is not None or find_gpu_here() is not None
                kept = planned_states(layout, dict(model.named_parameters()), optimizer, has_gpu=has_gpu)
                self.notes = (*found.notes, *kept.notes)
            placed = list(enumerate(zip(found.units, layout.units, strict=True)))
            self._work[key] = tuple(
                replace(each, numel=self._numel(each, unit, spec.in_use_with(index))) for index, (each, unit) in placed
            )
            self._kept[key] = tuple(
                self._numel(each, unit, spec.in_use_with(index), kept) for index, (each, unit) in placed if kept
            )
        return self._work[key]

    def kept(self, job: FolderJob, shards: int) -> tuple[UnitNumel, ...]:
        """The same units with the states of the job's own optimizer; none where that is AdamW."""
        self.work(job, shards)
        return self._kept.get(self._key_of(job, shards), ())

    def _key_of(self, job: FolderJob, shards: int) -> object:
        folder = job.folder
        key = (job.lora, job.live, folder.quantize, folder.group_size, str(job.offload.numerics), shards)
        return key, job.optimizer, job.optimizer and job.gpu is not None

    def blocks(self, job: FolderJob) -> list[nn.Module]:
        """The blocks that take turns, on meta, frozen as they are before their turn."""
        return list(blocks_of(self._model_in_turns(job)).values())

    def _model_in_turns(self, job: FolderJob) -> nn.Module:
        assert job.live is not None
        key = (job.live.trains_around, str(job.offload.numerics))
        if key not in self._in_turns:
            any_number = replace(job.live, num_live="auto")
            dtype = getattr(torch, job.offload.compute_dtype_name)
            self._in_turns[key] = meta_model(job.folder, None, dtype, any_number)
        return self._in_turns[key]

    def _work_in_turns(self, job: FolderJob, live: LiveChoice, shards: int) -> tuple[UnitWork, ...]:
        """When all blocks have been trained, and the largest live."""
        model, blocks = self._model_in_turns(job), self.blocks(job)
        turns, names = live.of(len(blocks)), {id(param): name for name, param in model.named_parameters()}
        named = [{names[id(param)] for param in block.parameters()} for block in blocks]
        spec = ModelSpec.from_module(model)
        layout = make_layout(spec, resolve(model, job.offload), shards)
        in_base = {each.index for each in layout.sections if not each.trainable and self._is_in_files(each)}
        numels = numels_in_turns(layout, spec, named, turns.num_live, in_base, turns.master)
        # Arithmetic is that of a step in which they live.
        largest = sorted(blocks, key=lambda block: sum(each.numel() for each in block.parameters()), reverse=True)
        for block in largest[: turns.num_live]:
            block.requires_grad_(True)
        found = work_of(model, ModelSpec.from_module(model))
        for block in blocks:
            block.requires_grad_(False)
        self.adapted[None, job.folder.quantize], self.notes = ((), ()), found.notes
        return tuple(replace(each, numel=numel) for each, numel in zip(found.units, numels, strict=True))

    def _numel(
        self,
        work: UnitWork,
        unit: UnitLayout,
        in_use_with: tuple[tuple[int, ...], ...],
        kept: PlannedStates | None = None,
    ) -> UnitNumel:
        """Bytes of a unit as it is laid out, and elements of the weights that quantized ones stand for. `kept`: states
        in the place of AdamW's."""
        frozen = [section for section in unit.sections if not section.trainable]
        in_base = {section.index for section in frozen if self._is_in_files(section)}
        states, walks = (None, None) if kept is None else (kept.nbytes, kept.walks)
        found = UnitNumel.of(unit, in_use_with, in_base, states_of=states, walks=walks)
        return replace(found, frozen=work.numel.frozen)

    def _is_in_files(self, section: SectionLayout) -> bool:
        """True if the folder's files have a frozen section as it is used."""

        def is_stored(spec: ParamSpec) -> bool:
            if spec.keeps_dtype:  # an offset is in the files' words on its weight, and no tensor of theirs
                return self._folder.quantization is not None and not spec.name.endswith("offset")
            return section.dtype == self._stored

        return self._stored is not None and all(is_stored(piece.spec) for piece in section.params)

    @functools.cached_property
    def drawn(self) -> tuple[str, ...]:
        """Modules that begin with random numbers."""
        return drawn_heads(self._folder)

    @functools.cached_property
    def _stored(self) -> torch.dtype | None:
        """The dtype of the folder's files, as its config says, if they are on a drive that is read each time."""
        dtype = getattr(self._folder.config, "dtype", None)
        return dtype if isinstance(dtype, torch.dtype) and not is_remote(self._folder.path) else None

    def rehearsal(self, job: FolderJob) -> Rehearsal:
        config, (rows, seq) = job.offload, job.shape
        few = min(rows, max(_TOKENS_MAX // seq, 1))
        key = (job.lora, job.folder.quantize, str(config.numerics), rows, seq, job.recompute)
        if key not in self._rehearsals:
            try:
                found = rehearse(job.folder, job.lora, config, few, seq, recompute=job.recompute).of_rows(rows)
            except ZeroOffloadError:
                raise
            except Exception as error:  # of any model's code: some asks for values, which there are none of
                found = _by_arithmetic(self.work(job, 1), job, type(error).__name__)
            self._rehearsals[key] = found
        return self._rehearsals[key]


def with_saved(work: Sequence[UnitWork], rehearsal: Rehearsal, nbytes: int, *, recompute: bool) -> tuple[UnitWork, ...]:
    """With what the rehearsal has saved for backward; what no unit has is the last one's."""
    tokens = rehearsal.rows * rehearsal.seq * nbytes
    found = []
    for index, unit in enumerate(work):
        saved = rehearsal.saved_bytes.get(unit.numel.name, 0) + rehearsal.saved_bytes[""] * (index == len(work) - 1)
        values = -(-saved // tokens)
        if unit.keeps_inputs(recompute):
            found.append(replace(unit, boundary_values=values))
        else:
            found.append(unit if unit.in_groups else replace(unit, inside_values=values))
    return tuple(found)


def _by_arithmetic(work: Sequence[UnitWork], job: FolderJob, problem: str) -> Rehearsal:
    """As much as models are known to keep at most, without experts."""
    rows, seq = job.shape
    nbytes = rows * seq * value_bytes(job.offload)
    inside = {unit.numel.name: _INSIDE_WIDTHS * unit.boundary_values * nbytes for unit in work}
    kept = {
        unit.numel.name: unit.boundary_values * nbytes if unit.keeps_inputs(job.recompute) else inside[unit.numel.name]
        for unit in work
    }
    tables = max((unit.numel.trained + unit.numel.frozen for unit in work if not unit.attention_width), default=0)
    return Rehearsal(rows, seq, sum(kept.values()) + max(inside.values()) + 8 * tables, {**kept, "": 0}, problem)
