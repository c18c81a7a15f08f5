"""The trainers of `finetune`: TRL's and transformers' loops, with what a run logs, evaluates, keeps and stops by.

Owns the order between a step and its commit: the figures, the evaluation with its texts and the best weights, the row
of metrics. So what a generation has seen is never missing from the metrics. Results of evaluations are in Trainer's
history, which is part of the generation. The best evaluation, and the end of patience, follow from it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import EvalLoopOutput
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import zero_offload as zo
from zero_offload.base.errors import NonFiniteError
from zero_offload.checkpoint.extras import capture_rng, restore_rng
from zero_offload.checkpoint.format import History
from zero_offload.finetune.choices import CAUSAL, LiveChoice
from zero_offload.finetune.classes import arguments_of, optimizer_class
from zero_offload.finetune.data.prepare import Prepared
from zero_offload.finetune.data.rendering import Renderer
from zero_offload.finetune.learning import Learning
from zero_offload.finetune.model.build import blocks_of
from zero_offload.finetune.model.folder import ModelFolder
from zero_offload.finetune.model.text_generation import write_text
from zero_offload.finetune.outputs import Weights
from zero_offload.finetune.scores import has_loss, loss_of_labels, mean_loss
from zero_offload.finetune.settings import FinetuneConfig
from zero_offload.integrations.transformers import OffloadMixin
from zero_offload.model.api import need_runtime
from zero_offload.runs.progress import Progress
from zero_offload.runs.ranks import Ranks
from zero_offload.storage.files.directory import RunDirectory

_NON_FINITE_STEPS_MAX = 3
_PROMPT_TOKENS, _NEW_TOKENS, _SHOWN = 128, 64, 160
_RENAMED = {"learning_rate": "lr"}
_LEFT_OUT = ("num_tokens", "num_input_tokens_seen", "train_runtime", "train_tokens_per_second")
_NUM_TOKENS = "num_tokens"
_Base: Any = object
"""To mypy: the Trainer class that comes behind."""


@dataclass(frozen=True)
class FinetuneContext:
    """The values that are the same in the whole run."""

    config: FinetuneConfig
    folder: ModelFolder
    prepared: Prepared
    ranks: Ranks
    made_of: Mapping[str, Any]
    """Everything beside the settings that decides numbers; see identity.py."""
    live: LiveChoice | None = None
    """Blocks that take turns, if some do; their number may be "auto" until there is a plan."""
    shrinks: bool = True
    """True if warm-up of less than a step is none; False of a run that began when it was one, of rate 0."""

    def with_live(self, num_live: object) -> FinetuneContext:
        """With so many blocks alive at a time, as a plan or the run's first start has it."""
        assert self.live is not None
        return replace(self, live=replace(self.live, num_live=num_live)) if isinstance(num_live, int) else self

    @property
    def weights(self) -> Weights:
        return Weights(self.config.out)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run on so many ranks."""
        return self.config.num_steps(len(self.prepared.train), self.ranks.size)

    @property
    def eval_every(self) -> int:
        """Steps between evaluations."""
        return self.config.eval_steps(self.num_steps)

    @property
    def counts(self) -> dict[str, int]:
        """Counts of the tokens that the data gave; without those that earlier files lack."""
        return {name: each for name, each in self.prepared.counts.to_dict().items() if name != "cut"}

    @property
    def learning(self) -> Learning:
        return Learning.of(self.config, self.prepared, self.ranks.size, shrinks=self.shrinks)


def best_of(evaluations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The first of those with the lowest loss; None where none has a finite one."""
    finite = [each for each in evaluations if math.isfinite(each["loss"])]
    return min(finite, key=lambda each: each["loss"], default=None)


class FinetuneMixin(OffloadMixin):
    """Before a Trainer class; `context`, `log` and `progress` are the run's."""

    def __init__(self, *args: Any, context: FinetuneContext, log: zo.RunLog, progress: Progress, **kwargs: Any) -> None:
        self._context, self._log, self._progress = context, log, progress
        self._row: dict[str, Any] = {}
        """The figures of the last step, until they are written."""
        self._tokens_before = 0
        self._num_non_finite = 0
        self._live: zo.LiveBlocks | None = None
        super().__init__(*args, **kwargs)
        if name := context.config.optimizer:
            self.optimizer_cls_and_kwargs: Any = optimizer_class(name), arguments_of(name, context.config.lr)
        if (live := context.live) is not None:
            blocks = blocks_of(self.model)
            turns, self._block_names = live.of(len(blocks)), list(blocks)
            self._live = zo.LiveBlocks(
                blocks.values(),
                turns.num_live,
                order=turns.order,
                every=turns.every,
                seed=turns.seed,
                master=turns.master,
            )
            self.add_callback(_SwitchesBlocks(self._live))
        self.remove_callback(PrinterCallback)
        self.add_callback(_EvaluatesAtTheEnd())

    def _check_same(self, said: Any, where: str) -> None:
        """The run has compared more, and said what changed, before the model was built."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Trainer leaves out what is frozen now; here blocks that rest are parts of the groups."""
        if self._live is None or self.optimizer is not None:
            return super().create_optimizer(model)
        of_blocks = {id(param) for block in self._live.blocks for param in block.parameters()}
        decayed = {*self.get_decay_parameter_names(self.model)}
        named = [
            (name, each) for name, each in self.model.named_parameters() if each.requires_grad or id(each) in of_blocks
        ]
        groups = [
            {"params": [each for name, each in named if (name in decayed) is decays], "weight_decay": weight_decay}
            for decays, weight_decay in ((True, self.args.weight_decay), (False, 0.0))
        ]
        kind, settings = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer: Any = self.taken(kind(groups, **settings))
        return self.optimizer

    # The order of a start and of a step

    def _prepare_for_training(self, *args: Any) -> Any:
        prepared = super()._prepare_for_training(*args)
        # The rate asked for now, of which a generation may have another one.
        scheduler, config = self.lr_scheduler, self._context.config
        scheduler.base_lrs = [config.lr] * len(scheduler.base_lrs)
        for group, factor in zip(self.optimizer.param_groups, scheduler.lr_lambdas, strict=True):
            group["lr"] = config.lr * factor(scheduler.last_epoch)
        self._tokens_before = self.state.num_input_tokens_seen
        return prepared

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.has_no_patience:  # a generation of the run's end goes on
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "loss" in logs:
            self._tr_loss.zero_()  # Trainer subtracts it from itself: one NaN would be in the losses of all later steps
            self.state.log_history.pop()  # metrics.jsonl has it; a generation need not
            self._log.measure()
            tokens = self.state.num_input_tokens_seen - self._tokens_before
            self._tokens_before += tokens
            named = {_RENAMED.get(name, name): value for name, value in logs.items() if name not in _LEFT_OUT}
            self._row = {**named, "tokens": tokens}
            if self._live is not None:
                self._row["live"] = [self._block_names[index] for index in self._live.at(self.state.global_step - 1)]

    def _commit(self) -> None:
        row, self._row = self._row, {}
        if row:
            self._progress.step(self._log.step(self.state.global_step, **row))
        super()._commit()
        if row:
            self._check_finite(row)

    def _check_finite(self, row: Mapping[str, Any]) -> None:
        if not math.isfinite(row.get("val_loss", 0.0)):
            best = best_of(self.evaluations)
            kept = (
                f"OUT/best has the weights of step {best['step']}" if best else "no evaluation before had a finite one"
            )
            raise NonFiniteError(
                f"the evaluation's loss at step {self.state.global_step} is {row['val_loss']}; {kept}. Go on with a "
                f"smaller --lr (now {self._context.config.lr:g}) from an earlier --generation "
                f"(zero-offload verify {self._context.config.out} lists them), or begin anew with --precision fp32 and "
                "another --out"
            )
        is_finite = math.isfinite(row["loss"]) and math.isfinite(row.get("grad_norm", 0.0))
        scaler = getattr(self.accelerator, "scaler", None)
        if is_finite:
            self._num_non_finite = 0
        elif scaler is None or scaler.get_scale() <= 1:  # until then, an overflow is how the scaler finds its scale
            self._num_non_finite += 1
        if self._num_non_finite == _NON_FINITE_STEPS_MAX:
            step = self.state.global_step
            raise NonFiniteError(
                f"loss or gradients were not finite in steps {step + 1 - _NON_FINITE_STEPS_MAX} to {step}; none of "
                f"them changed the parameters. Go on with a smaller --lr (now {self._context.config.lr:g}), which may "
                "change from start to start. If that does not help, take an earlier --generation "
                f"(zero-offload verify {self._context.config.out} lists them), or begin anew with --precision fp32 and "
                "another --out"
            )

    def _get_learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    # Evaluation

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """All of the run: step, loss, and perplexity where the loss is per word."""
        rows = [each for each in self.state.log_history if "eval_loss" in each]
        return [
            {"step": each["step"], "loss": each["eval_loss"]} | self._perplexity(each["eval_loss"]) for each in rows
        ]

    def _perplexity(self, loss: float) -> dict[str, float]:
        """Of a loss per word."""
        return {"perplexity": math.exp(min(loss, 700.0))} if self._context.config.method in ("sft", "mlm") else {}

    @property
    def has_no_patience(self) -> bool:
        """True if so many evaluations as `patience` says were not better than the best."""
        found, patience = self.evaluations, self._context.config.patience
        best = best_of(found)
        return bool(patience and best and sum(each["step"] > best["step"] for each in found) >= patience)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As Trainer's. Training draws the same numbers with and without it."""
        generators = capture_rng()
        torch.manual_seed(self._context.config.seed)  # each one masks the same words
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        newest = self.evaluations[-1]
        self._row |= {"val_loss" if name == "loss" else name: value for name, value in newest.items() if name != "step"}
        self._row |= {f"val_{name}": metrics[f"eval_{name}"] for name in ("accuracy",) if f"eval_{name}" in metrics}
        if texts := self._texts():
            self._row["samples"] = texts
            self._progress.note("\n".join(f"  {each}" for each in texts))
        best = best_of(self.evaluations)
        if best is not None and best["step"] == newest["step"]:
            self._context.weights.write(self.model, newest["step"], self._still_needed())
        self.control.should_training_stop |= self.has_no_patience
        restore_rng(generators)
        return metrics

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        """Trainer's counts each batch's mean alike, whatever its tokens; see scores.py. Of preferences it is right."""
        if self._context.config.method == "dpo":
            return super().evaluation_loop(dataloader, description, *args, **kwargs)
        self.model.eval()
        rows: Any = self._context.prepared.evaluation
        collate = self._context.prepared.collator or self.data_collator
        score = mean_loss(rows, collate, self._context.config.batch, self._measured, self.args.device)
        metrics = {"eval_loss": score.loss}
        if self._context.config.method == "classify":
            metrics["eval_accuracy"] = score.num_correct / score.count
        none: Any = None
        return EvalLoopOutput(predictions=none, label_ids=None, metrics=metrics, num_samples=len(rows))

    def _measured(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int, int]:
        """The loss of a batch, how many labels have one, and how many classes are right."""
        labels, classifies, num_correct = inputs["labels"], self._context.config.method == "classify", 0
        with torch.no_grad(), self.compute_loss_context_manager():
            # Not by `prediction_step`, which divides by the labels of all ranks.
            found = self.compute_loss(self.model, self._prepare_inputs(inputs), return_outputs=classifies)
        if classifies:
            found, outputs = found
            num_correct = int((outputs["logits"].argmax(-1).cpu() == labels).sum())
        return found, int(has_loss(labels, predicts_next=self._context.folder.task == CAUSAL).sum()), num_correct

    def _still_needed(self) -> list[int]:
        """The step of the weights that a resume from the newest generation would look for."""
        owner = need_runtime(self.model, "finetune")
        with owner.together("finetune"):
            owner.drain()  # a generation that is being written would become the newest while the export runs
        if owner.keeper is None or not self._context.ranks.is_first:
            return []
        with RunDirectory.look(owner.config.nvme_dirs[0]) as home:
            newest = History.read(home).newest
        before = [each for each in self.evaluations[:-1] if newest is not None and each["step"] <= newest.step]
        best = best_of(before)
        return [] if best is None else [best["step"]]

    def _texts(self) -> list[str]:
        """Texts that the model writes now, to the first prompts of the evaluation's data."""
        context, tokenizer, texts = self._context, self._context.folder.tokenizer, []
        for prompt in _prompts(context):
            ids = torch.tensor([prompt], dtype=torch.long, device=self.args.device)
            # Every rank writes the same, with as many forwards: all of them have to run each.
            settings = {"max_new_tokens": _NEW_TOKENS, "do_sample": False, "use_cache": True}
            written = write_text(self.model, tokenizer, ids, **settings)
            both = tokenizer.batch_decode([prompt, written.tolist()], skip_special_tokens=True)
            texts.append(" -> ".join(map(_in_a_line, both)))
        return texts


def _prompts(context: FinetuneContext) -> list[list[int]]:
    """Of the evaluation's first rows, what comes before the words that are learned; of text, its beginning."""
    rows, tokenizer = context.prepared.evaluation, context.folder.tokenizer
    if rows is None or context.folder.task != CAUSAL:
        return []
    found, renderer = [], Renderer(tokenizer)
    for row in rows.select(range(min(len(rows), context.config.samples))):
        if "input_ids" in row:
            learned = [label != -100 for label in row["labels"]]
            begin = learned.index(True) if True in learned else 0
            ids = row["input_ids"][: begin if begin > 1 else _PROMPT_TOKENS // 4]
        elif isinstance(row["prompt"], str):
            ids = tokenizer(row["prompt"])["input_ids"]
        else:
            ids = renderer.apply(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        found.append(ids[-_PROMPT_TOKENS:])
    return found


def _in_a_line(text: str) -> str:
    """Make one line of a young model's text, which must not steer a terminal."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."


class _SwitchesBlocks(TrainerCallback):
    """Lets the blocks of each step live, before its first micro-batch."""

    def __init__(self, live: zo.LiveBlocks) -> None:
        self._live = live

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self._live.begin_step(state.global_step, optimizer)


class _EvaluatesAtTheEnd(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps and args.eval_strategy != "no":
            control.should_evaluate = True


class FinetuneTrainer(FinetuneMixin, Trainer):
    """Of encoders: masked words, or classes."""


class FinetuneMasked(FinetuneTrainer):
    """Which words of a batch are masked follows from its rows and the epoch.

    Drawn from torch's generators they would change with a resume: a batch is made before the step before it commits.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(data_collator=self._masked, **kwargs)

    def _masked(self, rows: list[Any]) -> Any:
        return masked(self._context.prepared.collator, rows, self._context.config.seed, int(self.state.epoch or 0))


def masked(collator: Any, rows: list[Any], seed: int, epoch: int) -> Any:
    """A batch of `rows` by transformers' collator for masked words, which are drawn by the other arguments alone."""
    drawn_by = seed, epoch, [row["input_ids"] for row in rows]
    collate = copy(collator)
    collate.generator = torch.Generator("cpu").manual_seed(
        int.from_bytes(hashlib.blake2b(repr(drawn_by).encode(), digest_size=7).digest())
    )
    return collate(rows)


class FinetuneSFT(FinetuneMixin, SFTTrainer):
    pass


class FinetunePacked(FinetuneSFT):
    """Of packed rows: no attention mask says how many tokens are theirs and which fill a row up, so a batch does."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(data_collator=self._counted, **kwargs)

    def _counted(self, rows: list[Any]) -> Any:
        lengths = [len(row["input_ids"]) for row in rows]
        return self._context.prepared.collator(rows) | {
            _NUM_TOKENS: torch.tensor(lengths, dtype=torch.long, device="cpu")
        }

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._num_tokens = inputs.pop(_NUM_TOKENS)  # no input of a model
        return super().training_step(model, inputs, *args, **kwargs)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        track: Any = super()._track_num_input_tokens
        track(inputs | {"attention_mask": self._num_tokens})


class FinetuneDPO(FinetuneMixin, DPOTrainer):  # type: ignore[misc, unused-ignore]
    pass


class FinetuneAdapterDPO(FinetuneMixin, DPOTrainer):  # type: ignore[misc, unused-ignore]
    """The reference is the model without its adapters: TRL would copy them while they are away."""

    @property
    def ref_model(self) -> Any:
        return None

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        pass


def make_trainer(
    context: FinetuneContext, model: nn.Module, reference: nn.Module | None, log: zo.RunLog, progress: Progress
) -> Any:
    """The trainer of the run's method."""
    config, data, tokenizer = context.config, context.prepared, context.folder.tokenizer
    is_host = need_runtime(model, "finetune").device.is_host
    args: dict[str, Any] = {
        "output_dir": str(config.out),
        "per_device_train_batch_size": config.batch,
        "per_device_eval_batch_size": config.batch,
        "gradient_accumulation_steps": config.accumulate,
        "learning_rate": config.lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": config.warmup_of(context.num_steps, shrinks=context.shrinks),
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.clip,
        "seed": config.seed,
        "max_steps": config.steps or -1,
        "num_train_epochs": config.epochs,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "eval_strategy": "no" if data.evaluation is None else "steps",
        "eval_steps": context.eval_every,
        "bf16": False,  # no autocast: the model computes in its own precision
        "fp16": config.offload.numerics.compute == "fp16",
        "use_cpu": is_host,
        "gradient_checkpointing": False,  # the model runs its blocks again by itself
        "include_num_input_tokens_seen": "non_padding",
        "dataloader_pin_memory": False,  # tokens are few bytes
    }
    if context.ranks.size > 1 and args["use_cpu"]:
        args["ddp_backend"] = "gloo"
    given: dict[str, Any] = {
        "model": model,
        "processing_class": tokenizer,
        "train_dataset": data.train,
        "eval_dataset": data.evaluation,
        "context": context,
        "log": log,
        "progress": progress,
    }
    if config.method == "sft":
        given |= {"args": SFTConfig(**args, **data.trainer_settings)}
        if "seq_lengths" in data.train.column_names:
            return FinetunePacked(**given)
        return FinetuneSFT(data_collator=data.collator, **given)
    if config.method == "dpo":
        kind = FinetuneDPO if reference is not None else FinetuneAdapterDPO
        base: Any = reference.get_base_model() if isinstance(reference, PeftModel) else reference
        made = kind(args=DPOConfig(**args, **data.trainer_settings), ref_model=base or nn.Module(), **given)
        made.ref_model = reference  # TRL has given the base another forward, as in the model that is trained
        return made
    given |= {"args": TrainingArguments(**args), "compute_loss_func": loss_of_labels}
    return FinetuneMasked(**given) if config.method == "mlm" else FinetuneTrainer(data_collator=data.collator, **given)
