"""Other settings with which a fine-tuning run fits, or spares its drives; and with other numbers of tokens in a step.

Owns what is tried, in which order, and the flags that say it. Never plans: what it is given does. The calls:
`find_alternatives` and `by_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from zero_offload.base.config import OffloadConfig
from zero_offload.base.precision import INT8, NF4
from zero_offload.base.types import GIB, Tier
from zero_offload.finetune.choices import LiveChoice, Lora
from zero_offload.finetune.fit.figures import Alternative, FolderPlan
from zero_offload.finetune.fit.job import FolderJob
from zero_offload.finetune.fit.request import find_gpu_here, is_automatic
from zero_offload.integrations.quantize import find_missing
from zero_offload.plan.memory import PLACED_KINDS

_LORA = Lora(16, 32.0)
_QUANTIZED = (INT8, NF4)
"""Quantizations to try, the least change first."""
_SEQ_LEAST = 128
_TOKEN_FACTORS = (0.25, 0.5, 1, 2, 4, 8)
"""Micro-batches of a step, over those that were asked for."""
_MORE = "MORE"
"""Stands for a size that follows from a plan."""

PlanOf = Callable[[FolderJob], FolderPlan]
"""Plans a job."""


@dataclass(frozen=True)
class _SettingsChange:
    """Other settings of a job and of its `offload`, and the flags that give them."""

    flags: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    offload: dict[str, Any] = field(default_factory=dict)

    def __add__(self, other: _SettingsChange) -> _SettingsChange:
        return _SettingsChange(
            self.flags + other.flags, {**self.settings, **other.settings}, {**self.offload, **other.offload}
        )

    def of(self, job: FolderJob) -> FolderJob:
        return replace(job, **self.settings, offload=replace(job.offload, **self.offload))


def find_alternatives(job: FolderJob, plan_of: PlanOf) -> Iterator[Alternative]:
    """Other settings under which the run fits, each as near to what was asked as it can be."""
    for changes in _changes(job):
        tried = ((change.flags, _first_that_fits(change.of(job), plan_of)) for change in changes)
        if (found := next(((flags, *fitting) for flags, fitting in tried if fitting is not None), None)) is not None:
            flags, smaller, plan = found
            states = f"{-(-plan.states_bytes // GIB)}GiB"
            yield Alternative((*(states if word == _MORE else word for word in flags), *smaller), plan)


def _changes(job: FolderJob) -> Iterator[list[_SettingsChange]]:
    """Kinds of change, the least first. Of a kind the first that makes the run fit is taken."""
    config, folder = job.offload, job.folder
    is_adapter = job.lora is not None or folder.adapter is not None
    tiers = _automatic_tiers(config)

    def also_with_tiers(change: _SettingsChange) -> list[_SettingsChange]:
        return [change, tiers + change] if tiers.flags else [change]

    yield [_SettingsChange()]
    if tiers.flags:
        yield [tiers]
    if config.cpu_memory is not None:
        yield [_SettingsChange(("--cpu-memory", _MORE), offload={"cpu_memory": None})]
    if folder.has_experts and folder.group_size != 1 and is_adapter:
        yield [_SettingsChange(("--group-size", "1"), {"folder": replace(folder, group_size=1)})]
    activations = "cpu" if job.gpu is not None or find_gpu_here() is not None else "nvme"
    if set(config.activation_fractions) == {Tier.DEVICE} and (activations == "cpu" or config.nvme_dirs):
        yield [_SettingsChange(("--activations-tier", activations), offload={"activations": activations})]
    compact = replace(config.numerics, states="compact")
    if config.numerics != compact and not job.optimizer:
        yield also_with_tiers(_SettingsChange(("--states", "compact"), offload={"precision": compact}))
    if not is_adapter and not job.optimizer and (job.live is None or job.live.num_live != 1):
        yield also_with_tiers(_SettingsChange(("--live-blocks", "1"), {"live": LiveChoice(1, "random", 0, 0)}))
    if job.live is not None:
        return
    lora = _SettingsChange() if is_adapter else _SettingsChange(("--lora", str(_LORA.rank)), {"lora": _LORA})
    kinds = () if folder.is_quantized or find_missing(NF4) else _QUANTIZED
    quantized = [_SettingsChange(("--quantize", kind), {"folder": replace(folder, quantize=kind)}) for kind in kinds]
    # Quantized where adapters alone do not fit.
    if less := [*([] if is_adapter else also_with_tiers(lora)), *(lora + each for each in quantized)]:
        yield less


def _automatic_tiers(config: OffloadConfig) -> _SettingsChange:
    """The tiers that were given are left to the plan. No change without drives: none is better then."""
    given = [kind.value for kind in PLACED_KINDS if not is_automatic(config, kind)] if config.nvme_dirs else []
    flags = tuple(word for kind in given for word in (f"--{kind}-tier", "auto"))
    return _SettingsChange(flags, offload=dict.fromkeys(given, "auto"))


def _first_that_fits(job: FolderJob, plan_of: PlanOf) -> tuple[tuple[str, ...], FolderPlan] | None:
    """The job itself, or with a smaller batch in more micro-batches, or with shorter sequences."""
    flags: dict[str, str] = {}
    while True:
        plan = plan_of(job)
        if plan.fits:
            return tuple(word for pair in flags.items() for word in pair), plan
        tokens, share = math.prod(job.shape), plan.activations_share
        if not 0 < share < 1:
            return None
        # Activations of half the tokens take half the bytes at least: what cannot fit is passed over.
        while math.prod(job.shape) == tokens or math.prod(job.shape) > tokens * share:
            if job.batch > 1:
                job = replace(job, batch=job.batch // 2, accumulate=job.accumulate * 2)
                flags |= {"--batch": str(job.batch), "--accumulate": str(job.accumulate)}
            elif job.seq > _SEQ_LEAST:
                job = job.shorter(max(job.seq // 2, _SEQ_LEAST))
                flags |= {"--seq": str(job.seq)}
            else:
                return None


def by_tokens(plan: FolderPlan, plan_of: PlanOf) -> Iterator[FolderPlan]:
    """In each step so many times as many tokens, over the same data."""
    job = plan.job
    for factor in _TOKEN_FACTORS:
        accumulate = round(job.accumulate * factor)
        if factor == 1:
            yield plan
        elif accumulate >= 1 and accumulate == job.accumulate * factor:
            steps = math.ceil(job.steps / factor)
            found = plan_of(replace(job, accumulate=accumulate, steps=steps))
            if found.fits:
                yield found
