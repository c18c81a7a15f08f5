"""One run of `finetune`: a folder's model, trained by TRL's and transformers' own loops over an offloaded model.

Owns the order of a run's start and end. Losses, schedules and batches are those of the trainers; where generations are,
and how they go on, is `OffloadMixin`'s.

A run, in order: read the data -> check the run directory -> plan -> build the model (takes the NVMe directory's lock)
-> train -> weights -> close, which makes the last step a generation -> OUT gets the model. What a kill interrupts of
the end is repeated by the same command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from torch import nn

import zero_offload as zo
from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import CapacityError, ConfigError, IntegrityError
from zero_offload.base.types import Existing
from zero_offload.checkpoint.metrics import read_lines
from zero_offload.checkpoint.run_dir import FILES_FILE, METRICS_FILE, RUN_FILE, RunDir, read_json
from zero_offload.finetune.choices import CAUSAL
from zero_offload.finetune.data.prepare import prepare
from zero_offload.finetune.fit.job import FolderJob
from zero_offload.finetune.fit.plan import plan_job
from zero_offload.finetune.fit.text import as_json, as_text
from zero_offload.finetune.identity import (
    MADE_OF,
    check_folder,
    check_outputs,
    check_ranks,
    data_of,
    made_of,
    places_that_may_change,
)
from zero_offload.finetune.model.build import build_model, recompute_blocks
from zero_offload.finetune.model.folder import ModelFolder, check_training, open_folder
from zero_offload.finetune.outputs import (
    BEST,
    CARD,
    MERGED,
    is_published,
    model_card,
    published,
    reading,
    strangers,
)
from zero_offload.finetune.settings import TASKS, FinetuneConfig
from zero_offload.finetune.trainers import FinetuneContext, best_of, make_trainer
from zero_offload.hardware.probe import peak_resident_bytes
from zero_offload.integrations.identity import first_difference
from zero_offload.model.api import need_runtime
from zero_offload.runs.locate import described, has_generation
from zero_offload.runs.progress import Progress
from zero_offload.runs.ranks import Ranks, joined_ranks
from zero_offload.runs.resume import check_generation_asked, check_last_step, earlier_identity, find_existing
from zero_offload.runs.stop import Ending, closed_on_error, requested_stop_of
from zero_offload.storage.files.directory import RunDirectory

SETTINGS_FILE, TOKENS = "run.toml", "tokens"
SHRINKS = "warmup_shrinks"
"""The entry of `run.json` that says by which rule the run's warm-up is counted, in the words of `FinetuneContext`."""
LIVE = "live_blocks"
"""The entry that says how many blocks live at a time, which a plan may have chosen."""
COUNTS = "tokens"
"""The entry that has the counts of its data."""
MAY_CHANGE = ("epochs", "patience", "samples", "merge")
"""Settings with which a run may go on, beside those that every run may change."""
_TOLD_BY_DATA = ("method", "text")
_HOW_FAR = ("steps", "epochs", "patience")


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a run."""

    ending: Ending
    step: int
    best: Mapping[str, float] | None
    """The best evaluation: its step, loss and, where that is per word, perplexity."""
    out: Path
    plan: Mapping[str, Any] | None = None
    """With `dry_run`."""
    learning: Mapping[str, Any] | None = None
    """The plan of learning; see learning.py."""


def finetune(
    config: FinetuneConfig,
    existing: Existing = Existing.RESUME,
    stream: TextIO | None = None,
    *,
    dry_run: bool = False,
) -> FinetuneResult:
    """Train to the last step, or to the first Ctrl-C; a second call with an equal config continues.

    `existing=Existing.DISCARD` deletes what an earlier run left in the same place. With `dry_run` nothing is written.
    Raises CapacityError where the plan does not fit.
    """
    with joined_ranks() as ranks:
        stream = (stream or sys.stdout) if ranks.is_first else None
        progress, run_dir = Progress(stream, 0), RunDir(config.out)
        with run_dir.held() if ranks.is_first and not dry_run else nullcontext() as place:
            if not dry_run:
                ranks.check_shared(config.out)
            config, folder = _open(config)
            _refuse_strangers(run_dir)
            for line in check_outputs(folder, trains=True):
                progress.note(line)
            made = made_of(folder, config.adapters()) | data_of(config)
            check_ranks(ranks.of_first(made), made, folder)
            if existing is not Existing.DISCARD:
                for line in _refuse_another(config, folder, made, run_dir):
                    progress.note(line)
            context = _read(config, folder, made, ranks, None if dry_run else config.out / TOKENS)
            progress.note(context.prepared.note)
            existing = _look(context, run_dir, existing)
            ranks.wait()  # every rank has looked before the first one writes
            earlier = earlier_identity(run_dir) if existing is Existing.RESUME else None
            outputs = _outputs(run_dir) if existing is Existing.RESUME else {}
            if _is_finished(context, outputs) and config.offload.generation is None:
                if ranks.is_first and not dry_run:
                    context.weights.clear()  # a kill may have come before
                progress.note(f"this run is finished: {config.out} has the model of step {outputs['step']}")
                _say_if_untrained(context, progress)
                return FinetuneResult(Ending.FINISHED, outputs["last_step"], outputs["best"], config.out)
            begins = existing is not Existing.RESUME
            context = replace(context, shrinks=begins or described(config.out).get(SHRINKS) is True)
            if not begins and context.live is not None:
                context = context.with_live(described(config.out).get(LIVE))
            plan, offload = _plan(context, progress if begins or dry_run else None)
            if begins and plan["live"] is not None:
                context = context.with_live(plan["live"]["blocks"])
            learning = context.learning.to_dict()
            if begins:
                context.learning.check()
            elif not dry_run:
                for line in context.learning.warnings():
                    progress.note(line)
            if dry_run:
                return FinetuneResult(Ending.PLANNED, 0, None, config.out, plan, learning)
            if begins and not plan["fits"]:
                raise CapacityError("nothing was begun, as the run does not fit: see what would, above")
            if existing is Existing.DISCARD and ranks.is_first:
                context.weights.withdraw()
                context.weights.clear()
            for line in _changes(earlier or {}, _identity(context)):
                progress.note(line)
            offload = replace(offload, existing=existing.value)
            steps = Progress(stream, context.num_steps)
            result = _train(context, offload, plan["planned"], outputs, place, progress, steps)
            return replace(result, learning=learning)


def _open(config: FinetuneConfig) -> tuple[FinetuneConfig, ModelFolder]:
    task = TASKS.get(config.method, TASKS["sft"])
    folder = open_folder(config.model, task, quantize=config.quantize or None, group_size=config.group_size)
    in_turns = bool(config.live_blocks)
    check_training(folder, has_adapter=_is_adapter(config, folder), merge=config.merge, in_turns=in_turns)
    if task == CAUSAL and _generates(config):
        folder.check_generation(do_sample=False)
    return config.with_length(folder.num_positions), folder


def _generates(config: FinetuneConfig) -> bool:
    """True if texts are written at evaluations."""
    return config.samples > 0 and bool(config.eval_data or config.split)


def _is_adapter(config: FinetuneConfig, folder: ModelFolder) -> bool:
    return config.lora > 0 or folder.adapter is not None


def _refuse_another(config: FinetuneConfig, folder: ModelFolder, made: Mapping[str, Any], run_dir: RunDir) -> list[str]:
    """Lines to say of a run that goes on. Raise ConfigError for an OUT that this run may not write to, as far as the
    data need not be tokenized for it.

    Tokens of other data would replace those of the run that is there.
    """
    may_change = (*MAY_CHANGE, *_TOLD_BY_DATA, *places_that_may_change(config.out, made))
    lines: list[str] = []
    # A length may follow from the model's config, which is to be named then.
    if _goes_on(config, run_dir, (*may_change, "seq")):
        lines += check_folder(config.out, folder, made, generates=_generates(config))
    if _goes_on(config, run_dir, may_change):
        return lines
    if is_published(run_dir.path):
        raise ConfigError(
            f"{run_dir.path} holds a model, and no run that could go on; give another --out, or --discard to replace it"
        )
    nvme = config.offload.nvme_dirs[0] if config.offload.nvme_dirs else None
    if nvme is not None and has_generation(nvme):
        raise ConfigError(
            f"{nvme} holds the states of a run, and {run_dir.path} none that goes on from them. Give another --nvme, "
            "or the --out of that run, or --discard to delete them"
        )
    return lines


def _refuse_strangers(run_dir: RunDir) -> None:
    """Raise ConfigError for an OUT that has what a run writes, and no run: this one's would take its place."""
    own = [name for name in (CARD, SETTINGS_FILE) if (run_dir.path / name).exists()]
    if not (run_dir.path / RUN_FILE).is_file() and (names := [*dict.fromkeys([*own, *strangers(run_dir.path)])]):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ConfigError(
            f"{run_dir.path} holds no run, and {' and '.join(names[:3])}{more}, which a run writes; give another "
            "--out, or move that away: --discard deletes what a run has made"
        )


def _goes_on(config: FinetuneConfig, run_dir: RunDir, may_change: Sequence[str]) -> bool:
    try:
        return find_existing(run_dir, config.arguments(), may_change) is Existing.RESUME
    except IntegrityError:
        return True  # states are missing: `_look` knows whether the run is finished, and needs none


def _read(
    config: FinetuneConfig, folder: ModelFolder, made: Mapping[str, Any], ranks: Ranks, tokens: Path | None
) -> FinetuneContext:
    """The data; `tokens` is where their tokens are kept for the next start."""
    prepared = prepare(config.data, folder, **config.of_data(), cache=tokens)
    if prepared.labels:
        folder = folder.with_labels(prepared.labels)
    config = config.with_method(prepared.method, is_adapter=_is_adapter(config, folder))
    return FinetuneContext(config, folder, prepared, ranks, made, config.turns())


def _look(context: FinetuneContext, run_dir: RunDir, existing: Existing) -> Existing:
    """How this start meets what lies in OUT."""
    if existing is not Existing.DISCARD:
        try:
            may_change = (*MAY_CHANGE, "text", *places_that_may_change(context.config.out, context.made_of))
            existing = find_existing(run_dir, _identity(context), may_change)
        except IntegrityError:
            if not _is_finished(context, _outputs(run_dir)):
                raise
            existing = Existing.RESUME  # `clean` has deleted what a run would go on from
        if existing is Existing.RESUME and (earlier_identity(run_dir) or {}).get("text") != context.prepared.key:
            raise ConfigError(
                f"the tokens of the run in {run_dir.path} are others: its data, their columns or the tokenizer have "
                "changed since it began. Put back what was there, or give another --out, or --discard to start over"
            )
        before = described(run_dir.path).get(COUNTS) if existing is Existing.RESUME else None
        if isinstance(before, dict) and (found := first_difference(before, context.counts)):
            raise ConfigError(
                f"the same data gave the run in {run_dir.path} {found.name}={found.before}, and now give {found.now}. "
                "The chat template writes today's date, or a package makes other tokens. Put back its tokens/, go back "
                "to the versions of the run, or give another --out, or --discard to start over"
            )
    check_generation_asked(run_dir.path, context.config.offload, existing)
    return existing


def _changes(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Differences from the run's last start that change numbers."""
    for name in ("ranks", "steps", "lr", "clip"):
        if (before := earlier.get(name, now[name])) != now[name]:
            yield f"the run had {name}={before:g} and now has {name}={now[name]:g}"


def _identity(context: FinetuneContext) -> dict[str, Any]:
    """The settings that decide the run, and how far it goes."""
    facts = {"steps": context.num_steps, "eval_every": context.eval_every, "ranks": context.ranks.size}
    return context.config.arguments() | facts | {"text": context.prepared.key}


def _plan(context: FinetuneContext, progress: Progress | None) -> tuple[dict[str, Any], OffloadConfig]:
    """The plan of the run, told to `progress`, and the settings that it is planned with: the first rank's."""
    config = context.config
    found: tuple[dict[str, Any], OffloadConfig] | None = None
    if context.ranks.is_first:
        plan = plan_job(
            replace(FolderJob.of(config, context.folder, context.prepared, context.ranks.size), live=context.live),
            config.out,
            tries=progress is not None,
        )
        if progress is not None:
            progress.note("\n".join([*context.learning.lines(), as_text(plan)]))
        found = as_json(plan), plan.offload if plan.fits else config.offload
    planned: tuple[dict[str, Any], OffloadConfig] = context.ranks.of_first(found)
    return planned


def _train(
    context: FinetuneContext,
    offload: OffloadConfig,
    planned: Mapping[str, Any],
    outputs: Mapping[str, Any],
    place: RunDirectory | None,
    progress: Progress,
    steps: Progress,
) -> FinetuneResult:
    config = context.config
    # The smaller one first: what is left is the other's.
    has_reference = config.method == "dpo" and not config.lora
    beside = reading(context.folder, offload, is_first=context.ranks.is_first) if has_reference else nullcontext()
    baseline_bytes = peak_resident_bytes()
    with (
        beside as reference,
        closed_on_error(
            build_model(context.folder, offload, config.adapters(), config.seed, live=context.live)
        ) as model,
    ):
        if config.recompute == "block":
            recompute_blocks(model)
        if need_runtime(model, "finetune").resume_pending:
            _say_where(context, model, progress)
        if outputs and outputs["step"] > need_runtime(model, "finetune").step_count:
            outputs = {}  # OUT has weights of a step that is made again
        # Until its end the run is not finished, whatever it was before.
        outputs = {name: value for name, value in outputs.items() if name != "asked"}
        with zo.RunLog(
            place or config.out,
            model,
            settings=_identity(context),
            micro_batches=config.accumulate,
            about={
                "outputs": outputs,
                "published": published(config.out),
                "baseline_rss_bytes": baseline_bytes,
                MADE_OF: context.made_of,
                COUNTS: context.counts,
                SHRINKS: context.shrinks,
                LIVE: context.live and context.live.num_live,
                "planned": planned,
            },
            warn=progress.note,
        ) as log:
            if context.ranks.is_first:
                RunDir(config.out).write(SETTINGS_FILE, config.to_toml())
                _list_files(config.out, is_finished=False)
            trainer = make_trainer(context, model, reference, log, steps)
            # Until here a signal ends the process at once: a start may take minutes, and has no step to finish.
            with requested_stop_of(context.ranks) as stop:
                trainer.follow(stop)
                trainer.train()
                steps.close()
                step = trainer.state.global_step
                if stop.agreed:
                    zo.close(model)
                    progress.note(f"stopped after step {step}; it is committed, and the same command continues")
                    return FinetuneResult(Ending.INTERRUPTED, step, best_of(trainer.evaluations), config.out)
                chosen = _keep(context, trainer, outputs)
                evaluations = trainer.evaluations
                zo.close(model)  # the last step is a generation: whatever happens now, the same command completes it
    return _publish(context, chosen, step, evaluations, progress)


def _say_where(context: FinetuneContext, model: nn.Module, progress: Progress) -> None:
    """Which step the run goes on from. Raises ConfigError where that is beyond its last."""
    owner, steps = need_runtime(model, "finetune"), context.config.steps
    if steps:
        check_last_step(owner.step_count, steps)
    found = owner.keeper.found if owner.keeper is not None else None
    progress.note(f"resuming from {found} in {', '.join(map(str, owner.config.nvme_dirs))}")


# The end


def _keep(context: FinetuneContext, trainer: Any, outputs: Mapping[str, Any]) -> int:
    """See that the weights which OUT gets are in OUT/best; the step that they are of."""
    best = best_of(trainer.evaluations)
    step: int = trainer.state.global_step if best is None else best["step"]
    is_there = context.weights.has(step) or outputs.get("step") == step
    context.ranks.wait()  # all have looked
    if best is None and not is_there:
        context.weights.write(trainer.model, step)
    elif not is_there:
        raise IntegrityError(
            f"the best evaluation was that of step {step}, and {context.weights.folder(step)}, which has its weights, "
            "is missing. Put it back, or go on from an earlier --generation"
        )
    return step


def _publish(
    context: FinetuneContext,
    chosen: int,
    last_step: int,
    evaluations: list[dict[str, Any]],
    progress: Progress,
) -> FinetuneResult:
    """Give OUT the model; what is there of an earlier end that was broken off is completed."""
    config, weights, best = context.config, context.weights, best_of(evaluations)
    outputs = {"step": chosen, "last_step": last_step, "best": best, "merged": config.merge}
    if context.ranks.is_first:
        facts: dict[str, Any] = {"optimizer steps": last_step, "weights of step": chosen}
        if best is not None:
            facts["evaluation loss"] = f"{best['loss']:.4f}"
            facts |= {"perplexity": f"{best['perplexity']:.2f}"} if "perplexity" in best else {}
        card = model_card(config, context.folder, evaluations, facts)
        weights.publish(chosen, card, context.folder)
    context.ranks.wait()
    if config.merge and not _has_merged(config.out):
        context.ranks.wait()
        weights.merge(config.offload, context.folder.task, is_first=context.ranks.is_first)
    context.ranks.wait()
    if context.ranks.is_first:
        run_dir = RunDir(config.out)
        description = read_json(config.out / RUN_FILE)
        outputs |= {"asked": {name: getattr(config, name) for name in _HOW_FAR}}
        outputs |= {MADE_OF: made_of(open_folder(config.out, context.folder.task))}
        run_dir.write(RUN_FILE, json.dumps(description | {"outputs": outputs}, indent=1))
        _list_files(config.out, is_finished=True)
        weights.clear()
    _say_if_untrained(context, progress)
    merged = f", and merged into its base in {config.out / MERGED}" if config.merge else ""
    progress.note(f"the model of step {chosen} is in {config.out}{merged}")
    return FinetuneResult(Ending.FINISHED, last_step, best, config.out)


def _say_if_untrained(context: FinetuneContext, progress: Progress) -> None:
    rows = (line.row for line in read_lines(context.config.out / METRICS_FILE) if line.row is not None)
    if context.ranks.is_first and not any((row.get("lr") or 0) > 0 and (row.get("grad_norm") or 0) > 0 for row in rows):
        progress.note(
            "warning: in no step were learning rate and gradient above 0, so the weights are those that the run began "
            f"with. {METRICS_FILE} has both of each step. Look at --lr, --warmup and the data, and begin anew with "
            "--discard"
        )


def _list_files(out: Path, *, is_finished: bool) -> None:
    """Say what `clean` deletes: of a finished run what it would go on from, and nothing that tells of the model."""
    listed = read_json(out / FILES_FILE)
    files = [FILES_FILE] if is_finished else [*listed["files"], SETTINGS_FILE]
    RunDir(out).write(FILES_FILE, json.dumps({"files": files, "directories": [BEST, TOKENS]}, indent=1))


def _outputs(run_dir: RunDir) -> dict[str, Any]:
    """The outputs that the end of an earlier start has written into OUT; empty where it did not come to its end."""
    file = run_dir.path / RUN_FILE
    found = read_json(file).get("outputs") if file.is_file() and is_published(run_dir.path) else None
    return found if isinstance(found, dict) else {}


def _is_finished(context: FinetuneContext, outputs: Mapping[str, Any]) -> bool:
    asked = {name: getattr(context.config, name) for name in _HOW_FAR}
    return outputs.get("asked") == asked and (not context.config.merge or _has_merged(context.config.out))


def _has_merged(out: Path) -> bool:
    return any(name.startswith(f"{MERGED}/") and (out / name).is_file() for name in published(out))
