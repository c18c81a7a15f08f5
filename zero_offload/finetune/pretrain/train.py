"""The training loop of a causal language model whose ZeRO shards rest where the config says.

Owns the order of a step and of a run's start and end. Never knows how a shard moves: that is
`zero_offload.model.offload`'s; nor how a run directory is written: that is `zo.RunLog`'s.

A run, in order: check the run directory -> offload the model (takes the directory's lock) -> resume -> per step:
micro-batches, clip, update, metrics line, commit -> validation loss and sample -> close, which makes the last step a
generation. The metrics line goes out before the commit. So what a generation has seen is never missing from the file,
and a line too many is dropped on resume.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.optim.lr_scheduler import LambdaLR

import zero_offload as zo
from zero_offload.base.errors import CheckpointError, ConfigError, NonFiniteError, ZeroOffloadError
from zero_offload.base.host import host_empty
from zero_offload.base.types import Durability, Existing
from zero_offload.checkpoint.metrics import Row
from zero_offload.checkpoint.run_dir import SAMPLE_FILE, TRACE_FILE, RunDir
from zero_offload.finetune.fit.request import GpuHere, Request, find_work
from zero_offload.finetune.gpt import GPT, generate, next_token_loss
from zero_offload.finetune.gpt_config import GPTConfig, RecomputeMode
from zero_offload.finetune.pretrain.corpus import BatchShape, Corpus, load_corpus, train_batch, validation_batch
from zero_offload.finetune.pretrain.settings import TrainConfig
from zero_offload.hardware.machines import Cluster
from zero_offload.hardware.probe import peak_resident_bytes
from zero_offload.integrations.identity import first_difference
from zero_offload.model.api import need_runtime
from zero_offload.model.checkpoints import keep
from zero_offload.model.run_log import planned_memory
from zero_offload.plan.step_time import StepBatch
from zero_offload.plan.table import MEMORY, PlanTable
from zero_offload.runs.locate import described
from zero_offload.runs.progress import Progress
from zero_offload.runs.ranks import Ranks, joined_ranks
from zero_offload.runs.resume import check_generation_asked, check_last_step, earlier_identity, find_existing
from zero_offload.runs.settings import rate_warnings
from zero_offload.runs.stop import Ending, closed_on_error, requested_stop_of
from zero_offload.runs.terminal import printable
from zero_offload.runs.trace import StepTrace
from zero_offload.runtime.stop import StopRequest

_BETAS = (0.9, 0.95)
_LR_FLOOR = 0.1
_NON_FINITE_STEPS_MAX = 3
_SAMPLE_PROMPT = b"def "


@dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    ending: Ending
    step: int
    validation_loss: float | None
    unigram_nats: float
    sample: str
    out: Path


@dataclass(frozen=True)
class _PretrainContext:
    """The objects that every step needs."""

    config: TrainConfig
    corpus: Corpus
    ranks: Ranks
    model: GPT
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    scaler: zo.GradScaler
    """Disabled unless the model computes in fp16."""

    @property
    def device(self) -> torch.device:
        """Where the model computes: its buffers are there, wherever its parameters are."""
        return self.model.rotation.device

    @property
    def shape(self) -> BatchShape:
        return BatchShape(self.config.batch, self.config.seq, self.config.seed)

    @property
    def tokens_per_step(self) -> int:
        config = self.config
        return config.batch * config.seq * config.accumulate * self.ranks.size


def train(config: TrainConfig, existing: Existing = Existing.RESUME, stream: TextIO | None = None) -> TrainResult:
    """Train to the last step, or to the first Ctrl-C; a second call with an equal config continues.

    `existing=Existing.DISCARD` deletes what an earlier run left in the same place.
    """
    with joined_ranks() as ranks:
        progress = Progress((stream or sys.stdout) if ranks.is_first else None, config.steps)
        corpus = load_corpus(config.data, config.seq)
        progress.note(f"data: {corpus.description}")
        progress.note(f"unigram entropy: {corpus.unigram_nats:.4f} nats ({corpus.unigram_bits:.4f} bits) per byte")
        run_dir = RunDir(config.out)
        with run_dir.held() if ranks.is_first else nullcontext() as place:
            ranks.check_shared(config.out)
            before = {} if existing is Existing.DISCARD else earlier_identity(run_dir) or {}
            context, identity, about = _set_up(config, corpus, ranks, existing)
            progress.note("\n".join(PlanTable.from_dict(about["planned"]).lines("plan")))
            with closed_on_error(context.model):
                progress.note(_schedule_text(context))
                _resume(context, progress, before)
                log = zo.RunLog(
                    place or config.out,
                    context.model,
                    settings=identity,
                    tokens_per_step=context.tokens_per_step,
                    micro_batches=config.accumulate,
                    about=about,
                    warn=progress.note,
                )
                # Until here a signal ends the process at once: a start may take minutes, and has no step to finish.
                with log, requested_stop_of(context.ranks) as stop:
                    with StepTrace(context.model, config.out / TRACE_FILE, config.trace, progress.note) as trace:
                        last_step, val_loss = _train_steps(context, log, stop, trace, progress)
                    return _finish(context, last_step, val_loss, stop, progress)


def _set_up(
    config: TrainConfig, corpus: Corpus, ranks: Ranks, existing: Existing
) -> tuple[_PretrainContext, dict[str, Any], dict[str, Any]]:
    """Build and offload the model; nothing is written before the storage tier's lock is held.

    Also returns what the run is, and what else `run.json` says of it.
    """
    facts = {"text": corpus.fingerprint, "content": corpus.content, "ranks": ranks.size}
    identity = config.arguments() | facts
    gpt = config.gpt()
    if existing is not Existing.DISCARD:
        existing = find_existing(RunDir(config.out), identity, _told_by_text(config.out, corpus))
        _check_model(config.out, existing, gpt)
    check_generation_asked(config.out, config.offload, existing)
    ranks.wait()  # every rank has looked before the first one writes
    baseline_bytes = peak_resident_bytes()
    with zo.deferred_init():
        model = GPT(replace(gpt, recompute=RecomputeMode.NONE), config.seed)
    if gpt.recompute is RecomputeMode.BLOCK:
        zo.checkpoint(model.blocks)
    # Without a directory for generations a second start begins anew, whatever lies in the run's.
    has_generations = existing is not Existing.RESUME or config.offload.nvme_dirs
    zo.offload(model, replace(config.offload, existing=existing.value) if has_generations else config.offload)
    # Norms and biases do not decay.
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = zo.AdamW(groups, lr=config.lr, betas=_BETAS, eps=1e-8)
    scheduler = LambdaLR(optimizer, partial(_lr_factor, warmup=config.warmup, steps=config.steps))
    scaler = zo.GradScaler(enabled=config.offload.numerics.compute == "fp16")
    context = _PretrainContext(config, corpus, ranks, model, optimizer, scheduler, scaler)
    about = {
        "gpt": asdict(gpt),
        "unigram_nats": corpus.unigram_nats,
        "data": corpus.description,
        "baseline_rss_bytes": baseline_bytes,
        "planned": _planned(config, model, ranks, baseline_bytes).to_dict(),
    }
    return context, identity, about


def _told_by_text(out: Path, corpus: Corpus) -> tuple[str, ...]:
    """Settings that say where the text of the run in `out` lies, which may change where it is the same text."""
    before = (earlier_identity(RunDir(out)) or {}).get("content")
    if before is None:  # of before: names and counts are all that is known
        return ("content", "data")
    return ("data", "text") if before == corpus.content else ()


def _check_model(out: Path, existing: Existing, gpt: GPTConfig) -> None:
    """Raise ConfigError where a preset was another model when the run in `out` began."""
    before = described(out).get("gpt") if existing is Existing.RESUME else None
    if isinstance(before, dict) and (found := first_difference(before | {"recompute": gpt.recompute}, asdict(gpt))):
        raise ConfigError(
            f"{out} holds a run of a model with {found.name}={found.before}, which this version makes with "
            f"{found.name}={found.now}. Go on with the version that began it, give another --out, or --discard"
        )


def _schedule_text(context: _PretrainContext) -> str:
    """How long the run is, and at which rates it learns."""
    config = context.config
    highest_at = min(max(config.warmup, 1), config.steps)
    first, highest, last = (
        config.lr * _lr_factor(step - 1, config.warmup, config.steps) for step in (1, highest_at, config.steps)
    )
    text = f"{config.steps:,} step{'s'[: config.steps != 1]} of {context.tokens_per_step:,} tokens; "
    text += f"learning rate {first:g} at step 1, {highest:g} at step {highest_at:,}, {last:g} at the last"
    warnings = [*rate_warnings(config.lr, TrainConfig.lr)]
    if config.warmup > config.steps:
        warnings.append(
            f"warning: warm-up takes {config.warmup:,} steps, more than the run has: give --warmup 0, or more --steps"
        )
    return "\n".join([text, *warnings])


def _planned(config: TrainConfig, model: GPT, ranks: Ranks, program_bytes: int) -> PlanTable:
    """One rank's plan, as `zero-offload plan --model` says it, of the model that is here."""
    owner = need_runtime(model, "train")
    work, vocab, _ = find_work(config.model)
    recompute = config.gpt().recompute is RecomputeMode.BLOCK
    by_unit = config.accumulate > 1 and recompute
    batch = StepBatch(config.batch * config.seq, config.accumulate, config.seq, recompute, by_unit)
    gpu = None if owner.device.is_host else GpuHere(owner.device.name, 0)
    request = Request(config.model, work, vocab, config.offload, Cluster(ranks.size), batch, None, gpu, None)
    memory = planned_memory(owner, config.accumulate)
    if config.offload.cpu_memory is None:  # what the machine has is for activations too
        beside = request.activations(shared_memory=owner.device.is_host)[MEMORY]
        memory = replace(memory, budget=replace(memory.budget, cpu_bytes=max(memory.budget.cpu_bytes - beside, 0)))
    return replace(request, program_bytes=program_bytes).table(memory)


def _resume(context: _PretrainContext, progress: Progress, before: Mapping[str, Any]) -> None:
    """Restore the generation found, of a run that was `before`."""
    resumed = zo.resume(context.model, context.optimizer, context.scaler)
    if resumed is None:
        return
    if "scheduler" not in (resumed.extra or {}):
        raise CheckpointError(
            f"the generation of step {resumed.step} in {context.config.offload.nvme_dirs[0]} was not "
            "committed by this recipe; start over with --discard, or name another --nvme directory"
        )
    step, last_step = int(resumed.extra["step"]), context.config.steps
    check_last_step(step, last_step)
    _restore_schedule(context, resumed.extra["scheduler"])
    where = ", ".join(map(str, context.config.offload.nvme_dirs))
    progress.note(
        f"resuming from step {step} (generation {resumed.number}, committed {resumed.committed_at}, in {where})"
    )
    for name in ("lr", "clip"):
        if (value := getattr(context.config, name)) != (former := before.get(name, value)):
            progress.note(f"the run had {name}={former:g} and now has {value:g}")
    if (last_before := before.get("steps", last_step)) != last_step:
        progress.note(
            f"the run was to end at step {last_before} and now ends at {last_step}, as does its learning rate"
        )
    if (num_ranks_before := before.get("ranks", context.ranks.size)) != context.ranks.size:
        progress.note(
            f"the run had {num_ranks_before} ranks and now has {context.ranks.size}: its files were cut anew, and a "
            f"step reads {context.tokens_per_step} tokens from here on"
        )


def _restore_schedule(context: _PretrainContext, state: dict[str, Any]) -> None:
    """Go on at that step of this run's curve, which may have another height or last step than the state's had."""
    scheduler = context.scheduler
    scheduler.load_state_dict(state | {"base_lrs": [context.config.lr] * len(context.optimizer.param_groups)})
    for group, base, factor in zip(
        context.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(scheduler.last_epoch)


def _train_steps(
    context: _PretrainContext, log: zo.RunLog, stop: StopRequest, trace: StepTrace, progress: Progress
) -> tuple[int, float | None]:
    """Run the steps still to do; the number of the last one done, and the validation loss where measured after it."""
    non_finite_steps = 0
    step, val_loss = log.committed_step, None
    while step < context.config.steps and not stop.agreed:
        step += 1
        stop.doing = f"step {step}"
        trace.begin_step()
        figures = _train_step(context, step)
        log.measure()  # a step's time holds its predecessor's commit, and no validation
        is_measured = step % context.config.eval_every == 0 or step == context.config.steps
        val_loss = _validation_loss(context) if is_measured else None
        try:
            row = log.step(step, **figures, val_loss=val_loss)
        except ZeroOffloadError:
            if step == log.committed_step + 1:
                # `zo.close` makes it a generation, as nothing has said yet that this run completes its records:
                # without this one a resume would refuse it.
                _commit(context, step, stop)
            raise
        _commit(context, step, stop)
        trace.end_step()
        progress.step(row)
        if val_loss is not None and not math.isfinite(val_loss):
            raise NonFiniteError(
                f"the validation loss at step {step} is {val_loss}. Go on with a smaller --lr "
                f"(now {context.config.lr:g}) from an earlier --generation, "
                "or begin anew with --precision fp32 and another --out"
            )
        if math.isfinite(figures["grad_norm"]):
            non_finite_steps = 0
        elif context.scaler.get_scale() <= 1:  # until then, an overflow is how the scaler finds its scale
            non_finite_steps += 1
        if non_finite_steps == _NON_FINITE_STEPS_MAX:
            raise NonFiniteError(
                f"the gradient norm was not finite in steps {step - non_finite_steps + 1} to {step}. "
                "None of them changed the parameters; a warning at the first skipped step names gradients. "
                f"Go on with a smaller --lr (now {context.config.lr:g}), which may change from start to start, or "
                "begin anew with --precision fp32 and another --out"
            )
    progress.close()
    return step, val_loss


def _train_step(context: _PretrainContext, step: int) -> Row:
    """Forward, backward and update on this step's micro-batches; numbers are means over ranks."""
    losses = _micro_batches(context, step)
    lr = context.optimizer.param_groups[0]["lr"]
    context.scaler.unscale_(context.optimizer)
    grad_norm = zo.clip_grad_norm_(context.model, context.config.clip)
    context.scaler.step(context.optimizer)
    context.scaler.update()
    if math.isfinite(grad_norm):  # a step that was skipped uses up nothing of the schedule
        context.scheduler.step()
    context.optimizer.zero_grad()
    return {
        "loss": context.ranks.mean(sum(losses) / len(losses)),
        "lr": lr,
        "grad_norm": float(grad_norm),
        "loss_scale": context.scaler.get_scale(),
    }


def _micro_batches(context: _PretrainContext, step: int) -> list[float]:
    """Forward and backward of this step's micro-batches; their losses."""
    losses = [host_empty(0, torch.float32)] * context.config.accumulate

    def loss_of(model: torch.nn.Module, micro: int) -> torch.Tensor:
        batch = train_batch(context.corpus, context.shape, step, context.ranks.rank, micro)
        loss = next_token_loss(model(batch.inputs.to(context.device)), batch.targets.to(context.device))
        losses[micro] = loss.detach()
        return context.scaler.scale(loss / context.config.accumulate)

    if context.config.gpt().recompute is RecomputeMode.BLOCK:
        zo.accumulate(context.model, range(context.config.accumulate), loss_of)
    else:  # one micro-batch's activations at a time
        for micro in range(context.config.accumulate):
            loss_of(context.model, micro).backward()
    return [loss.item() for loss in losses]


def _commit(context: _PretrainContext, step: int, stop: StopRequest) -> None:
    # The data position is the step: a batch is a function of (seed, step, rank, micro-batch).
    extra = {"step": step, "scheduler": context.scheduler.state_dict()}
    with stop.agreeing() as notice:
        keep("train", context.model, context.optimizer, extra, notice=notice)


@torch.no_grad()
def _validation_loss(context: _PretrainContext) -> float:
    """Mean loss over a fixed set of validation batches, dealt to the ranks."""
    context.model.eval()
    losses = []
    for index in range(context.config.eval_batches):
        batch = validation_batch(context.corpus, context.shape, index * context.ranks.size + context.ranks.rank)
        logits = context.model(batch.inputs.to(context.device))
        losses.append(next_token_loss(logits, batch.targets.to(context.device)).item())
    context.model.train()
    return context.ranks.mean(sum(losses) / len(losses))


def _finish(
    context: _PretrainContext, last_step: int, val_loss: float | None, stop: StopRequest, progress: Progress
) -> TrainResult:
    config, unigram_nats = context.config, context.corpus.unigram_nats
    # A sample of a large model takes as many forwards as it has bytes: a run that is asked to stop does not write it.
    if stop.agreed or last_step < config.steps:
        zo.close(context.model)
        progress.note(f"stopped after step {last_step}; {_what_goes_on(config, last_step)}")
        return TrainResult(Ending.INTERRUPTED, last_step, None, unigram_nats, "", config.out)
    loss = _validation_loss(context) if val_loss is None else val_loss  # a run found finished has it to measure
    context.model.eval()
    text = generate(context.model, _SAMPLE_PROMPT, config.sample_bytes, seed=config.seed)
    sample = printable(text.decode("utf-8", errors="replace"))
    zo.close(context.model)
    if context.ranks.is_first:
        RunDir(config.out).write(SAMPLE_FILE, sample)
    progress.note(f"validation loss {loss:.4f} nats per byte; unigram entropy {unigram_nats:.4f}")
    progress.note(f"a sample of what the model writes:\n{sample}")
    return TrainResult(Ending.FINISHED, last_step, loss, unigram_nats, sample, config.out)


def _what_goes_on(config: TrainConfig, last_step: int) -> str:
    """A clause about a second start."""
    command = "the same command" + " without --generation" * (config.offload.generation is not None)
    if not config.offload.nvme_dirs or config.offload.effective_durability is Durability.SCRATCH:
        return f"nothing is kept of it (durability='scratch', or no --nvme): {command} begins anew"
    return f"it is committed, and {command} continues from there" if last_step else f"{command} begins with step 1"


def _lr_factor(step: int, warmup: int, steps: int) -> float:
    """Linear warm-up, then a cosine from 1 down to the floor at the last step."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return _LR_FLOOR + (1 - _LR_FLOOR) * 0.5 * (1 + math.cos(math.pi * done))
