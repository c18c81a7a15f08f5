"""`OffloadTrainer`, and `OffloadMixin` before any other Trainer class: transformers' Trainer over an offloaded model.

Trainer's loop runs as it is. The mixin answers where Trainer would need the whole model in memory or plain gradients.
It offloads the model in place of moving it to a device, builds our optimizers, and writes checkpoints piece by piece.
After each step and what Trainer does behind it (logs, evaluation, a checkpoint), `zo.commit` keeps Trainer's own state
in the generation. After a kill `train()` reads it back as Trainer reads a checkpoint's.

[Note: what a checkpoint is]
`checkpoint-N/` is a Hugging Face folder with Trainer's files, and `zero_offload/` in it has the states. All of it is
written below `tmp-checkpoint-N/` and renamed at its end. So a kill leaves a whole checkpoint, or a directory that
neither Trainer nor `get_last_checkpoint` takes for one; the next save deletes it.

[Note: where the data goes on]
Trainer counts steps, which have other samples on another number of ranks, and no epochs of data without a length. So
each saved state also says how many samples of which epoch the ranks have seen, and has the generators with which the
epoch began. Samplers draw its order from them (`TrainerState.stateful_callbacks`, under the mixin's name).
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, get_last_checkpoint
from transformers.training_args import OptimizerNames

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.problems import warn_user
from zero_offload.base.stats import DeviceParams, Stats
from zero_offload.base.types import format_bytes
from zero_offload.checkpoint.extras import capture_rng, from_json, restore_rng
from zero_offload.integrations.identity import first_difference
from zero_offload.integrations.peft import is_peft
from zero_offload.integrations.pretrained import export_pretrained, replace_weights
from zero_offload.model.about import adapter_values, config_values, plain
from zero_offload.model.api import close, need_runtime, no_sync, runtime_of, stats
from zero_offload.model.checkpoints import keep, load_checkpoint, resume, save_checkpoint
from zero_offload.model.offload import offload as offload_model
from zero_offload.model.run_log import RunLog
from zero_offload.model.steps import check_end, end_stopped, stopping_of
from zero_offload.optim.optimizer import FusedOptimizer
from zero_offload.optim.optimizers import SGD, Adagrad, AdamW, Lion
from zero_offload.optim.unitwise.optimizer import unitwise
from zero_offload.runtime.ranks.watch import Notice
from zero_offload.runtime.stop import GRACE_S, StopRequest
from zero_offload.storage.files.own_files import (
    LIST_NAME,
    MODEL_NAME,
    STATES_NAME,
    ForeignFiles,
    all_files,
    delete,
    drop_empty,
    listed,
    move_aside,
    names_in,
    of_kinds,
    read_list,
    write_list,
)
from zero_offload.storage.shards.shard import master_components, shard_bytes

_LOGGER = logging.getLogger(__name__)
STATES = "zero_offload"
"""The directory of our states in a checkpoint, and the mixin's name in Trainer's state."""
_SAFETENSORS = ("model.safetensors", "model-*-of-*.safetensors")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|adapter_model\.(safetensors|bin)")
_CHECKPOINT_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+")
_STAGING_NAME = re.compile(rf"tmp-{_CHECKPOINT_NAME.pattern}")
_CHECKPOINT_FILES = re.compile(
    rf"{MODEL_NAME.pattern}|{STATES_NAME.pattern}|trainer_state\.json|training_args\.bin|(scheduler|scaler)\.pt|"
    r"rng_state(_\d+)?\.pth|optimizer\.(pt|bin)"
)
"""The files of a checkpoint, where a kill has left it without its list."""
_ADAMS = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED, OptimizerNames.PAGED_ADAMW)
_LIONS = (OptimizerNames.LION, OptimizerNames.PAGED_LION)

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DECIDING = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "num_train_epochs", "max_steps"),
    *("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "train_sampling_strategy"),
    *("label_smoothing_factor", "neftune_noise_alpha"),
)

_Base: Any = object
"""To mypy: the Trainer class that comes behind."""


@dataclass(frozen=True)
class Position:
    """Where a run is in its data, and between two logs."""

    step: int
    epoch: int
    samples: int
    """Those of the epoch that the ranks have seen."""
    samples_per_step: int
    generators: str
    """JSON of `capture_rng` as the epoch began."""
    running: list[list[float]]
    """By rank, the loss and the operations since the last log."""
    total: float
    """The loss of all steps before that."""
    logged_at: int
    began_at: int
    """The step at which the run began."""

    def num_steps(self, samples_per_step: int) -> int:
        """As many steps of so many samples as have those that were seen in the epoch."""
        return math.ceil(self.samples / samples_per_step)


class OffloadMixin(_Base):  # type: ignore[misc]
    """Put it before a Trainer class: `class OffloadSFTTrainer(OffloadMixin, SFTTrainer): pass`.

    All arguments are those of the class behind it, and `offload`: how the model is offloaded. Without it the model has
    to be offloaded already. With `OffloadConfig(existing="resume")` a generation that is found goes on, whatever
    checkpoints there are; a checkpoint that is named, or is newer than it, replaces it.
    `offload_reference`: how a trainer of TRL offloads its reference model. It is frozen, and has no states.
    `exit_code` and `grace` are as in `zo.steps`: with the first, SIGTERM or SIGUSR1 to any rank ends the program behind
    the commit of a step. Without it a signal is Trainer's, or the program's.

    Raises ConfigError for what has no meaning here, and CapacityError when a checkpoint does not fit the disk.
    """

    def __init__(
        self,
        *args: Any,
        offload: OffloadConfig | None = None,
        offload_reference: OffloadConfig | None = None,
        exit_code: int | None = None,
        grace: float | str = GRACE_S,
        **kwargs: Any,
    ) -> None:
        self._offload, self._offload_reference = offload, offload_reference
        self._end = None if exit_code is None else check_end(type(self).__name__, exit_code, grace)
        self._stop: StopRequest | None = None
        self._generation: dict[str, Any] | None = None
        """The generation's record of Trainer, while `train` goes on from it."""
        self._seen: Position | None = None
        """Where the state that `train` goes on from was."""
        self._begins = True
        self._staging: Path | None = None
        self._history: list[str] = []
        self._generators = ""
        super().__init__(*args, **kwargs)
        self._offload_model(self.model)
        self._made_of = _made_of(self.model)
        if offload_reference is not None and getattr(self, "_reference", None) is None:
            raise ConfigError(
                f"{type(self).__name__} has no reference model that offload_reference= could offload; leave it out "
                "(with adapters of PEFT the model without them is the reference)"
            )
        computes_in = need_runtime(self.model, "Trainer").config.numerics.compute
        if computes_in == "fp16" and getattr(self.accelerator, "scaler", None) is None:
            warn_user(
                "OffloadConfig(precision='fp16') without TrainingArguments(fp16=True): the loss is not scaled, and "
                "small gradients become 0. Pass fp16=True, or precision='bf16'"
            )
        callbacks = self.callback_handler.callbacks
        callbacks.sort(key=lambda each: not isinstance(each, StatsCallback))  # before those that report the logs

    # The model and its optimizer

    def _offload_model(self, model: nn.Module) -> None:
        """Offload it, unless it is."""
        if self.args.bf16_full_eval or self.args.fp16_full_eval:
            raise ConfigError(
                "bf16_full_eval and fp16_full_eval cast the model, and an offloaded one keeps its dtype; leave them "
                "out: evaluation computes in OffloadConfig(precision=), too"
            )
        if runtime_of(model) is None:
            if self._offload is None:
                raise ConfigError(
                    f"{type(self).__name__} was given a model that is not offloaded; pass "
                    "offload=zo.OffloadConfig(...), or call zo.offload(model, config) first"
                )
            offload_model(model, self._offload)
        elif self._offload not in (None, need_runtime(model, "Trainer").config):
            raise ConfigError(
                f"the model of {type(self).__name__} is offloaded with another config than offload= says; leave "
                "offload= out, or the zo.offload before"
            )
        self.args._n_gpu = min(self.args.n_gpu, 1)  # ranks have a GPU each, and nothing is replicated over threads

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        self._offload_model(model)

    @property
    def ref_model(self) -> nn.Module | None:
        """TRL's reference model; it is offloaded when a trainer sets it, before it would move to a device."""
        return self._reference

    @ref_model.setter
    def ref_model(self, model: nn.Module | None) -> None:
        if model is not None and self._offload_reference is not None and runtime_of(model) is None:
            offload_model(model.requires_grad_(False), self._offload_reference)
        self._reference = model

    def call_model_init(self, trial: Any = None) -> nn.Module:
        if self.model is not None and runtime_of(self.model) is not None:
            close(self.model)
        if trial is not None and self._offload is not None and self._offload.existing == "resume":
            raise ConfigError("each trial of a search begins anew; pass OffloadConfig(existing='discard')")
        model: nn.Module = super().call_model_init(trial)
        self._offload_model(model)
        return model

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Ours, where the mathematics is that of `args.optim`; else Trainer's, which steps unit by unit."""
        if args.optim in _ADAMS or args.optim in _LIONS:
            betas = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
            return (AdamW, {**betas, "eps": args.adam_epsilon}) if args.optim in _ADAMS else (Lion, betas)
        ours: dict[OptimizerNames, type[torch.optim.Optimizer]] = {
            OptimizerNames.SGD: SGD,
            OptimizerNames.ADAGRAD: Adagrad,
        }
        if "layerwise" in args.optim.value or args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
            raise ConfigError(
                f"optim={str(args.optim.value)!r} steps inside of backward, where offloaded parameters have no "
                "gradients yet; use another, such as 'adamw_torch', and OffloadConfig(overlap='backward') to save the "
                "memory of gradients"
            )
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if "bitsandbytes" in str(kind) and settings.get("optim_bits") == 8:
            raise ConfigError(
                f"optim={str(args.optim.value)!r} of Trainer keeps states of embeddings in 32 bits, by settings of "
                "single parameters, which no step unit by unit finds; use 'adamw_torch_8bit', or 8-bit states of "
                "zo.AdamW by OffloadConfig(precision=zo.Precision(states='compact'))"
            )
        return ours.get(args.optim, kind), settings

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. An optimizer that is not ours steps unit by unit (`zo.unitwise`)."""
        was_given = self.optimizer is not None
        optimizer = super().create_optimizer(*args, **kwargs)
        return optimizer if was_given else self.taken(optimizer)

    @staticmethod
    def taken(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """An optimizer that this trainer has built, as it steps offloaded parameters."""
        return optimizer if isinstance(optimizer, FusedOptimizer) else unitwise(optimizer)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with nullcontext() if self.accelerator.sync_gradients else no_sync(self.model):
            loss: torch.Tensor = super().training_step(*args, **kwargs)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if need_runtime(model, "Trainer").config.overlap == "backward":
            return None  # gradients are gone
        return super()._get_grad_norm(model, grad_norm)

    # Going on

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. Where `zo.offload` has found a generation, training goes on from it."""
        if isinstance(resume_from_checkpoint, os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        source: Any = resume_from_checkpoint
        if source is True and os.path.isdir(self.args.output_dir):
            source = get_last_checkpoint(self.args.output_dir) or True  # type: ignore[no-untyped-call]
        with tempfile.TemporaryDirectory() as folder:
            self._generation = None if isinstance(resume_from_checkpoint, str) else self._found()
            if self._generation is not None and isinstance(source, str):
                is_older = self._generation["state"]["global_step"] < int(source.rpartition("-")[2])
                self._generation = None if is_older else self._generation
            if self._generation is not None:
                source = folder
                Path(folder, TRAINER_STATE_NAME).write_text(json.dumps(self._generation["state"]), encoding="utf-8")
            self._seen = _position_at(source) if isinstance(source, str) else None
            if self._seen is not None and self._syncs_reference:
                warn_user(
                    "sync_ref_model: no generation and no checkpoint keeps the reference model, with TRL as here. It "
                    "begins again with the weights that it was given, and losses are others than without the break"
                )
            with nullcontext() if self._end is None else self._stopping(*self._end):
                return super().train(source, *args, **kwargs)

    @contextmanager
    def _stopping(self, exit_code: int, grace_s: float) -> Iterator[None]:
        with stopping_of(need_runtime(self.model, "train()"), exit_code, grace_s) as stop:
            self.follow(stop)
            yield

    def follow(self, stop: StopRequest) -> None:
        """Training ends behind a step once all ranks agree on this request."""
        self._stop = stop

    @property
    def _syncs_reference(self) -> bool:
        """True if TRL moves the reference model towards the model."""
        return bool(getattr(self.args, "sync_ref_model", False))

    def _found(self) -> dict[str, Any] | None:
        """Trainer's record in the generation that zo.offload has found."""
        owner = need_runtime(self.model, "train()")
        if not owner.resume_pending or owner.keeper is None or owner.keeper.found is None:
            return None
        found = owner.keeper.found
        extra = from_json(found.payload.get("extra"))
        said = extra.get(STATES) if isinstance(extra, dict) else None
        if not isinstance(said, dict):
            raise ConfigError(
                f"{found} in {owner.config.nvme} was not made by an OffloadTrainer, so it does not say where Trainer "
                "was. Go on with the program that made it, or pass OffloadConfig(existing='discard')"
            )
        self._check_same(said, f"{found} in {owner.config.nvme}")
        history = json.loads(f"[{said['history']}]")
        return {**said, "state": json.loads(said["state"]) | {"log_history": history}}

    def _check_same(self, said: dict[str, Any], where: str) -> None:
        """Compare what decides numbers, but for the weights, with what was `said` when a step was kept.

        Raises ConfigError for another model, and warns of other arguments, which Trainer goes on with.
        """
        if "made_of" not in said:
            warn_user(f"{where} is from before configs were kept with it: the model's is not compared")
            return
        if found := first_difference(said["made_of"], self._made_of):
            raise ConfigError(
                f"{where} was made by a model with {found.name}={found.before}, and this one has "
                f"{found.name}={found.now}. Build the model as it was, or begin anew with "
                "OffloadConfig(existing='discard') and without resume_from_checkpoint"
            )
        if found := first_difference(said["args"], _deciding(self.args)):
            warn_user(
                f"{where} was made with TrainingArguments({found.name}={found.before}), and the run goes on with "
                f"{found.name}={found.now}: its numbers are others from here on"
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if self._generation is not None or (folder / STATES).is_dir():
            return  # weights come with the optimizer's states
        owner = need_runtime(self.model, "train()")
        if owner.resume_pending:
            raise ConfigError(
                f"{folder} and the generation of step {owner.step_count} in {owner.config.nvme} both have weights; "
                "pass OffloadConfig(existing='discard') to begin with the folder's"
            )
        if is_peft(self.model) or not _has_safetensors(folder):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            replace_weights(self.model, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if self._generation is not None:
            resume(self.model, self.optimizer)
            self.lr_scheduler.load_state_dict(self._generation["scheduler"])
            if self._generation["scaler"] is not None:
                self.accelerator.scaler.load_state_dict(self._generation["scaler"])
            self._save_rng_state(checkpoint)  # Trainer reads it when it has skipped the data
        elif (folder / STATES).is_dir():
            kept = load_checkpoint(self.model, self.optimizer, folder / STATES).extra
            self._check_same(kept, str(folder))
            self.lr_scheduler.load_state_dict(kept["scheduler"])
        else:
            if not (folder / OPTIMIZER_NAME).is_file():
                warn_user(f"{folder} has no states of an optimizer: they begin at zero")
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint or "")
        if (folder / STATES).is_dir():
            load_checkpoint(self.model, None, folder / STATES)
        elif not is_peft(self.model) and _has_safetensors(folder):
            replace_weights(self.model, folder)
        else:
            super()._load_best_model()

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        num_epochs, *values, max_steps = super().set_initial_training_values(args, dataloader)
        self._batches_per_epoch = values[4]
        if self._seen is not None and self._seen.samples_per_step != self._samples_per_step:
            if args.max_steps > 0:
                num_epochs += self._seen.epoch  # more than enough: the last step ends the training
            else:
                num_done = self._seen.epoch * values[0] + self._seen.num_steps(self._samples_per_step)
                max_steps = self._seen.step + max(max_steps - num_done, 0)
        return num_epochs, *values, max_steps

    def _init_training_state(self, max_steps: int, per_epoch: int, num_epochs: int, *args: Any) -> tuple[int, int]:
        epoch, num_batches = super()._init_training_state(max_steps, per_epoch, num_epochs, *args)
        self._history, self._begins = [], True
        if self._seen is not None:
            epoch, num_batches = self._seen.epoch, 0
            if not self.args.ignore_data_skip:
                num_batches = self._seen.num_steps(self._samples_per_step) * self.args.gradient_accumulation_steps
        return epoch, num_batches

    @property
    def _samples_per_step(self) -> int:
        return int(self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        begins, self._begins = self._begins, False
        if begins and self._seen is not None:
            running = self._seen.running
            same = len(running) == self.args.world_size
            mean = [sum(each) / len(running) for each in zip(*running, strict=True)]
            loss, self.current_flos = running[self.args.process_index] if same else mean
            self._tr_loss += loss
            self._globalstep_last_logged = self._seen.logged_at
            if self._generation is not None:  # the same run: its mean loss is over all steps
                self._total_loss_scalar, self._initial_global_step = self._seen.total, self._seen.began_at
            if self._seen.samples:
                restore_rng(json.loads(self._seen.generators))
        self._generators = json.dumps(capture_rng())
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)
        if self._stop is None or not self._stop.agreed:
            self._commit()

    # Keeping

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        # An epoch's end is to come, which may evaluate and save: a run that is killed before that repeats the step.
        if not (self.control.should_epoch_stop or self.control.should_training_stop or self.state.epoch % 1 == 0):
            self._commit()

    def _commit(self) -> None:
        """Let the step become a generation, with Trainer's state. All ranks end here where one was asked to stop."""
        owner, stop, step = need_runtime(self.model, "train()"), self._stop, self.state.global_step
        with nullcontext() if stop is None else stop.agreeing() as notice:
            if owner.keeper is not None:
                self._keep(notice)
            elif stop is not None:
                with owner.together("train()", notice=notice):
                    pass
        if stop is None:
            return
        stop.doing = f"step {step + 1}"
        if stop.agreed and self._end is not None:
            end_stopped(stop, [self.model], step)
        self.control.should_training_stop |= stop.agreed

    def _keep(self, notice: Notice | None) -> None:
        self._history += map(json.dumps, self.state.log_history[len(self._history) :])
        exported = [
            each for each in (*self.callback_handler.callbacks, self.control) if isinstance(each, ExportableState)
        ]
        state = replace(self.state, log_history=[], stateful_callbacks=exported)
        state.stateful_callbacks[STATES] = asdict(self._position())
        scaler = getattr(self.accelerator, "scaler", None)
        said = {
            "state": json.dumps(asdict(state)),
            "history": ",".join(self._history),
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "made_of": self._made_of,
            "args": _deciding(self.args),
        }
        keep("train()", self.model, self.optimizer, {STATES: said}, notice=notice)

    def _position(self) -> Position:
        epoch = int(self.state.epoch)
        num_batches = round((self.state.epoch - epoch) * self._batches_per_epoch)
        running = [[0.0, 0.0]] * self.args.world_size
        if self._globalstep_last_logged < self.state.global_step:
            own = torch.tensor(
                [[self._tr_loss.item(), self.current_flos]], dtype=torch.float64, device=self.args.device
            )
            running = self.accelerator.gather(own).tolist()
        return Position(
            step=self.state.global_step,
            epoch=epoch,
            samples=num_batches * self._train_batch_size * self.args.world_size,
            samples_per_step=self._samples_per_step,
            generators=self._generators,
            running=running,
            total=self._total_loss_scalar,
            logged_at=self._globalstep_last_logged,
            began_at=self._initial_global_step,
        )

    # Checkpoints

    def _prepare_for_training(self, max_steps: int, *args: Any) -> Any:
        self.accelerator.device_placement = False  # the optimizer's states stay on their tiers
        prepared = super()._prepare_for_training(max_steps, *args)
        epochs, every = self.state.num_train_epochs, self.state.save_steps
        kinds = {SaveStrategy.NO: 0, SaveStrategy.STEPS: max_steps // every, SaveStrategy.EPOCH: epochs}
        number = kinds.get(self.args.save_strategy, 2)
        if limit := self.args.save_total_limit:
            number = min(number, limit + 1)  # the oldest is deleted when the newest is complete
        with need_runtime(self.model, "train()").together("train()"):
            self._check_disk(number)
        return prepared

    def _check_disk(self, number: int) -> None:
        """State what a checkpoint takes. Raise CapacityError if one has no room, warn if so many do not."""
        if not number or not self.args.should_save:
            return
        owner, folder = need_runtime(self.model, "train()"), self.args.output_dir
        saved = [each for each in self.model.parameters() if each.requires_grad or not is_peft(self.model)]
        nbytes = sum(each.numel() * each.element_size() for each in saved)
        if not self.args.save_only_model:
            shards = [shard for shard in owner.store.shards if shard.base is None]
            kept = [shard_bytes(each.layout, (*master_components(each.layout), *each.states)) for each in shards]
            nbytes += sum(kept) * owner.ranks.world_size
        free = shutil.disk_usage(folder).free
        text = f"a checkpoint takes {format_bytes(nbytes)}, and {folder} has {format_bytes(free)} free"
        if nbytes > free:
            raise CapacityError(f"{text}; free space there, choose another output_dir, or pass save_only_model=True")
        if number * nbytes > free:
            warn_user(f"{text}, too little for the {number} that will be there; pass a smaller save_total_limit=")
        _LOGGER.info(text)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging or super()._get_output_dir(trial))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """See [Note: what a checkpoint is]."""
        together, state = need_runtime(self.model, "a checkpoint").together, self.state
        run_dir = Path(self._get_output_dir(trial))
        target = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self.store_flos()
        state.stateful_callbacks[STATES] = asdict(self._position())
        staging = run_dir / f"tmp-{target.name}"
        with together("a checkpoint"):
            self._make_staging(staging)
        self._staging = staging
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = None
        with together("a checkpoint"):
            pass  # every rank has written its files
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(target)
        with together("a checkpoint"):
            self._give_name(staging, target)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))

    def _make_staging(self, staging: Path) -> None:
        if self.args.should_save:
            for name in filter(_STAGING_NAME.fullmatch, names_in(staging.parent)):
                left = staging.parent / name
                _warn_of(delete(left, listed(left, _CHECKPOINT_NAME, _CHECKPOINT_FILES)))
            move_aside(staging)
            staging.mkdir(parents=True)
        self._check_disk(1)

    def _give_name(self, staging: Path, target: Path) -> None:
        """A checkpoint is whole: let it have its name, in the place of an older one."""
        if not self.args.should_save:
            return
        whole, best = staging / target.name, self.state.best_model_checkpoint
        self.state.save_to_json(str(whole / TRAINER_STATE_NAME))
        write_list(whole)
        replaced = staging / "replaced" / target.name  # its list counts under its own name
        if target.exists():
            replaced.parent.mkdir()
            os.rename(target, replaced)
        os.rename(whole, target)
        if kept := delete(replaced, listed(replaced)):
            for name in kept.names:  # as they lay in the older one
                move_aside(target / name)
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.rename(replaced / name, target / name)
        drop_empty(staging)
        self._rotate(target, best)

    def _rotate(self, newest: Path, best: str | None) -> None:
        """As Trainer's own, of the checkpoints whose files are listed, and file by file."""
        limit = self.args.save_total_limit
        if limit is None or limit <= 0:
            return
        found = {
            newest.parent / name: (newest.parent / name / LIST_NAME).stat().st_mtime_ns
            for name in filter(_CHECKPOINT_NAME.fullmatch, names_in(newest.parent))
            if read_list(newest.parent / name)
        }
        protected = {newest, *([] if best is None else [Path(best)])}
        num_to_go = len(found) - max(limit, len(protected))
        for each in sorted(found.keys() - protected, key=lambda path: found[path])[: max(num_to_go, 0)]:
            _warn_of(delete(each, listed(each)))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        kept = {"scheduler": self.lr_scheduler.state_dict(), "made_of": self._made_of, "args": _deciding(self.args)}
        save_checkpoint(self.model, self.optimizer, Path(output_dir, STATES), extra=kept)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Every rank calls `save_model`."""
        if state_dict is not None:
            super()._save(output_dir, state_dict)
            return
        folder, owner = Path(output_dir or self.args.output_dir), need_runtime(self.model, "save_model")
        exported = folder / "tmp-weights"
        with owner.together("save_model"):
            if owner.ranks.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                delete(exported, of_kinds(exported, MODEL_NAME))
                move_aside(exported)
        export_pretrained(self.model, exported)
        with owner.together("save_model"):
            if owner.ranks.rank == 0:
                delete(folder, filter(_WEIGHTS.fullmatch, names_in(folder)))
                folder.mkdir(exist_ok=True)
                for name in all_files(exported):  # of several adapters each has a folder
                    (folder / name).parent.mkdir(exist_ok=True)
                    os.replace(exported / name, folder / name)
                drop_empty(exported)
                words = self.processing_class or getattr(self.data_collator, "tokenizer", None)
                if words is not None:
                    words.save_pretrained(str(folder))
                torch.save(self.args, folder / TRAINING_ARGS_NAME)


def _made_of(model: Any) -> dict[str, Any]:
    """Class, config and adapters of a model. Trainer itself gives its config the tokenizer's special tokens."""
    base = model.get_base_model() if is_peft(model) else model
    found: dict[str, Any] = {"class": type(base).__name__}
    if isinstance(config := getattr(base, "config", None), PreTrainedConfig):
        values = config_values(config)
        found["config"] = {name: each for name, each in values.items() if name not in _SPECIAL_TOKENS}
    if is_peft(model):
        found["adapters"] = {name: adapter_values(each) for name, each in model.peft_config.items()}
    return found


def _deciding(args: Any) -> dict[str, Any]:
    """Arguments that decide numbers, by their names."""
    return {name: plain(getattr(args, name, None)) for name in _DECIDING}


def _warn_of(kept: ForeignFiles | None) -> None:
    if kept is not None:
        warn_user(str(kept))


def _has_safetensors(folder: Path) -> bool:
    return any(file for pattern in _SAFETENSORS for file in folder.glob(pattern))


def _position_at(folder: str) -> Position | None:
    """That of a state that OffloadTrainer has saved; None of another Trainer's."""
    file = Path(folder, TRAINER_STATE_NAME)
    state = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found = (state.get("stateful_callbacks") or {}).get(STATES)
    return None if found is None else Position(**found)


class StatsCallback(TrainerCallback):
    """Adds the numbers of `zo.stats` to what Trainer logs, so that `report_to` has them.

    Pass it to an OffloadTrainer: `callbacks=[StatsCallback()]`. In the list of another Trainer it has to stand before
    the callbacks that report: `trainer.callback_handler.callbacks.insert(0, StatsCallback())`.
    """

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        if logs is not None and model is not None and runtime_of(model) is not None:
            logs.update(scalars(stats(model)))


def scalars(found: Stats) -> dict[str, float]:
    """Numbers by name, "offload/step_s" and "offload/read_bytes/nvme"."""
    values: dict[str, float] = {}
    for name, value in vars(found).items():
        parts = (
            value._asdict() if isinstance(value, DeviceParams) else value if isinstance(value, dict) else {"": value}
        )
        numbers = {key: each for key, each in parts.items() if isinstance(each, int | float)}
        values |= {f"offload/{name}/{key}".rstrip("/"): each for key, each in numbers.items()}
    return values


class RunLogCallback(TrainerCallback):
    """Keeps a run directory for `zero-offload report PATH`: a row of each step that Trainer logs, by `zo.RunLog`.

    For any Trainer with an offloaded model: `callbacks=[RunLogCallback("runs/mine")]`. Rows have what is logged, the
    loss of evaluations as `val_loss`, and tokens per second where Trainer or TRL counts tokens. Every rank passes one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._log: RunLog | None = None
        self._step = 0
        self._row: dict[str, Any] | None = None
        """That step's, whose evaluation is to come."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self._log is not None:
            self._log.close()
        usual = {each.name: each.default for each in fields(args)}
        given = {name: each for name, each in args.to_dict().items() if not name.endswith("_token")}
        settings = {name: each for name, each in given.items() if each not in (None, "", [], usual.get(name))}
        accumulate = args.gradient_accumulation_steps
        self._log = RunLog(self._path, model, settings=settings | {"steps": state.max_steps}, micro_batches=accumulate)
        self._added = max(self._log.committed_step - state.global_step, 0)  # steps of an earlier `train`
        self._num_tokens = 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._log is None or logs is None or "loss" not in logs:
            return
        self._log.measure()
        numbers = {name: each for name, each in logs.items() if isinstance(each, int | float)}
        row = {name: each for name, each in numbers.items() if not name.startswith(("offload/", "train_", "num_"))}
        row["lr"] = row.pop("learning_rate", math.nan)
        before, self._num_tokens = self._num_tokens, logs.get("num_tokens", state.num_input_tokens_seen)
        if 0 < before < self._num_tokens:
            row["tokens"] = self._num_tokens - before
        self._step, self._row = state.global_step + self._added, row
        if not (control.should_evaluate or (args.eval_strategy == "epoch" and state.epoch % 1 == 0)):
            self._write()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if self._log is not None:
            self._step = state.global_step + self._added
            self._row = (self._row or {}) | {"val_loss": (metrics or {}).get("eval_loss")}
            self._write()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _write(self) -> None:
        row, self._row = self._row, None
        if row is not None and self._log is not None:
            self._log.step(self._step, **row)


class OffloadTrainer(OffloadMixin, Trainer):
    """transformers.Trainer over an offloaded model; see `OffloadMixin`."""
