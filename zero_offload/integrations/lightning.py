"""A strategy of Lightning: `Trainer(strategy=OffloadStrategy(config))` trains a LightningModule that is offloaded.

Owns when Lightning's module is offloaded, how its steps enter it, Lightning's checkpoints as directories, and the end
of a fit by a signal (`EndBySignal`). Training itself stays Lightning's: loops, precision plugins, clipping by torch's
functions.

A checkpoint is a directory: `states` is what `zo.save_checkpoint` writes, `lightning.ckpt` the rest, which is small.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError
from zero_offload.base.inputs import check_config
from zero_offload.base.problems import warn_user
from zero_offload.checkpoint.extras import capture_rng, restore_rng
from zero_offload.model.api import need_runtime, no_sync, runtime_of
from zero_offload.model.checkpoints import load_checkpoint, save_checkpoint
from zero_offload.model.deferred.recorder import deferred_init
from zero_offload.model.offload import offload
from zero_offload.model.steps import check_end, stopping_of
from zero_offload.runtime.stop import EXIT_CODE, GRACE_S, StoppedBySignal, complain
from zero_offload.standins.owners import owner_of
from zero_offload.storage.files.own_files import STATES_NAME, delete, move_aside, of_kinds

# One package under two names, whose classes differ: the Trainer takes those of its own.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.strategies import DDPStrategy, ParallelStrategy
    from pytorch_lightning.trainer.states import TrainerFn
else:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn

_STATES, _REST = "states", "lightning.ckpt"
_SOURCE = "zero_offload"
"""The key of a loaded checkpoint that says where its states are."""
_PRECISIONS = {"32-true": None, "bf16-mixed": None, "16-mixed": None, "bf16-true": "bf16", "16-true": "fp16"}
"""Lightning's `precision=`, and the compute dtype that each asks for."""


class OffloadStrategy(ParallelStrategy):
    """Offloads the LightningModule as `config` says, on one rank or several.

    `configure_optimizers` runs after that, and makes optimizers of zero_offload. A training step is a forward of the
    module; with manual optimization only calls of modules are. Checkpoints are directories. `process_group_backend` and
    `timeout` are DDPStrategy's. Raises ConfigError for a config, a precision or a module that cannot be used.
    """

    # Between ranks this does what DDPStrategy does. A subclass of that would have the data of one rank shuffled.
    root_device, num_nodes, num_processes = DDPStrategy.root_device, DDPStrategy.num_nodes, DDPStrategy.num_processes
    distributed_sampler_kwargs, set_world_ranks = DDPStrategy.distributed_sampler_kwargs, DDPStrategy.set_world_ranks
    setup_distributed, _get_process_group_backend = (
        DDPStrategy.setup_distributed,
        DDPStrategy._get_process_group_backend,
    )
    barrier, broadcast, reduce = DDPStrategy.barrier, DDPStrategy.broadcast, DDPStrategy.reduce
    determine_ddp_device_ids, model_to_device = DDPStrategy.determine_ddp_device_ids, DDPStrategy.model_to_device
    _configure_launcher = DDPStrategy._configure_launcher

    def __init__(
        self,
        config: OffloadConfig,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        **plugins: Any,
    ) -> None:
        """`plugins` are `accelerator`, `cluster_environment`, `checkpoint_io` and `precision_plugin`."""
        super().__init__(**plugins)
        self.config = check_config("OffloadStrategy", config)
        if config.existing == "resume":
            raise ConfigError(
                "OffloadStrategy does not resume from generations, which do not have the place in the data. Pass a "
                "checkpoint of Lightning, trainer.fit(ckpt_path=...), and existing='discard' in place of "
                "existing='resume'"
            )
        self._num_nodes, self._start_method = 1, "popen"
        self._process_group_backend, self._timeout = process_group_backend, timeout

    @property
    def is_distributed(self) -> bool:
        """True if Lightning deals the data out to ranks."""
        return bool(self.num_nodes * self.num_processes > 1)

    # The module and its steps

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.is_distributed:
            self.setup_distributed()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules are built in host memory; by `zo.deferred_init` if a checkpoint is to fill them."""
        deferred = deferred_init(values="skip") if empty_init else nullcontext()
        with self.precision_plugin.tensor_init_context(), deferred:
            yield

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        module = self.lightning_module
        if self._layer_sync is not None and runtime_of(module) is None:
            self._layer_sync.apply(module)
        self._offload(module)
        self.model_to_device()
        self.model = _Forward(module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _offload(self, module: nn.Module) -> None:
        name, compute = self.precision_plugin.precision, self.config.numerics.compute
        if _PRECISIONS.get(name, "") not in (None, compute):
            raise ConfigError(
                f"Trainer(precision={name!r}) does not go with OffloadConfig(precision={compute!r}); leave the first "
                "out, or give 'bf16-mixed' or '16-mixed', which add autocast, or 'bf16-true' or '16-true' to both"
            )
        if any(owner_of(param) is None for param in module.parameters()):
            offload(module, self.config)
        if (owner := runtime_of(module)) is None:
            raise ConfigError(
                "the LightningModule has no parameters; make them before trainer.fit, or in configure_model"
            )
        if owner.config != self.config:
            raise ConfigError("the LightningModule is offloaded with another config; give OffloadStrategy the same one")
        if (device := owner.device.torch_device.type) != self.root_device.type:
            raise ConfigError(f"the model is offloaded beside {device}; give Trainer(accelerator={device!r})")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """With manual optimization no forward of the module: there are backwards and optimizer steps in it."""
        if self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with no_sync(self.lightning_module):
            yield

    def teardown(self) -> None:
        """The module stays offloaded and of use, until `zo.close`."""
        self.model = self.lightning_module
        for each in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            each.teardown()

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: `save_checkpoint` streams parameters and buffers."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Hyperparameters: `save_checkpoint` streams the states."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return {"param_groups": groups}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a directory beside `filepath`, which gets that name when it is whole. Every rank must call."""
        if "://" in str(filepath):
            raise ConfigError(f"{filepath} is elsewhere; states are written to a directory: give one of a file system")
        if not self.optimizers:
            raise ConfigError("a checkpoint has the states of an optimizer: save it in trainer.fit, or after it")
        target = Path(self.broadcast(str(filepath)))
        part = target.with_name(f"{target.name}.part")
        if self.is_global_zero:
            self.remove_checkpoint(part)
            move_aside(part)
            part.mkdir(parents=True)
            self.checkpoint_io.save_checkpoint(checkpoint, part / _REST, storage_options=storage_options)
        self.barrier()
        save_checkpoint(self.lightning_module, self.optimizers[0], part / _STATES)
        if self.is_global_zero:
            old = target.with_name(f"{target.name}.old")
            self.remove_checkpoint(old)
            move_aside(old)
            if target.exists():
                target.rename(old)  # there while the new one gets its name: deleting it takes long
            part.rename(target)
            self.remove_checkpoint(old)
        self.barrier()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint; of a directory what `save_checkpoint` has written there: what else is in it stays."""
        path = Path(filepath)
        if not path.is_dir() or path.is_symlink():
            if path.suffix not in (".part", ".old"):
                super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            states = [f"{_STATES}/{name}" for name in of_kinds(path / _STATES, STATES_NAME) if "/" not in name]
            if kept := delete(path, [_REST, *states]):
                warn_user(str(kept))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The small file of a directory; or the file of another strategy, which has all."""
        options = {} if weights_only is None else {"weights_only": weights_only}  # Lightning 2.5 has no such argument
        if not (rest := Path(checkpoint_path) / _REST).is_file():
            return dict(super().load_checkpoint(checkpoint_path, **options))
        return {**super().load_checkpoint(rest, **options), _SOURCE: str(rest.with_name(_STATES))}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if _SOURCE not in checkpoint:
            super().load_model_state_dict(checkpoint, strict)
            return
        fits, generators = self.lightning_module.trainer.state.fn == TrainerFn.FITTING, capture_rng()
        # Several optimizers of a fit step without an end of an iteration that this library is told of.
        step = checkpoint["global_step"] if len(self.optimizers) > 1 else None
        load_checkpoint(self.lightning_module, self.optimizers[0] if fits else None, checkpoint[_SOURCE], step=step)
        restore_rng(generators)  # Lightning leaves them alone, and where it draws is not the same in a fit that goes on

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if _SOURCE not in checkpoint:
                optimizer.load_state_dict(state)
            else:  # their states are there
                for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
                    group.update(saved)


class _Forward(nn.Module):
    """The module that Lightning calls for a step. The call becomes a forward of `module`, with its parameters here."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class EndBySignal(Callback):
    """The end of a fit by SIGTERM or SIGUSR1 to any rank, on all ranks behind the same step.

    The step's checkpoint is written to `path`, which all machines see. SystemExit is raised with `exit_code`.
    `trainer.fit(ckpt_path=path)` goes on from there. `grace` is as in `zo.steps`, and holds for the checkpoint too.
    While a fit trains, these signals are not Lightning's. Raises ConfigError for arguments that cannot be used.
    """

    def __init__(self, path: str | Path, *, exit_code: int = EXIT_CODE, grace: float | str = GRACE_S) -> None:
        self._path, self._end = Path(path), check_end("EndBySignal", exit_code, grace)
        self._open = ExitStack()
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self._step = trainer.global_step
        self._stop = self._open.enter_context(stopping_of(need_runtime(pl_module, "EndBySignal"), *self._end))
        self._stop.doing, self._stop.kept = "the step with its checkpoint", "the last checkpoint"

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *_: Any) -> None:
        if trainer.global_step == self._step:  # gradients add up
            return
        self._step = trainer.global_step
        stop, owner = self._stop, need_runtime(pl_module, "EndBySignal")
        # Lightning's own word about signals is rank 0's alone, so ranks agree once more.
        with stop.agreeing() as notice, owner.together("trainer.fit", notice=notice):
            pass
        if not stop.agreed:
            return
        trainer.save_checkpoint(self._path)
        if trainer.is_global_zero:
            complain(
                f"stopped by {stop.by} after step {self._step}: trainer.fit(ckpt_path={str(self._path)!r}) goes on "
                f"with step {self._step + 1}; all ranks end with exit code {stop.exit_code}"
            )
        raise StoppedBySignal(stop.exit_code, stop.by)

    def on_train_end(self, *_: Any) -> None:
        self._open.close()

    def on_exception(self, *_: Any) -> None:
        self._open.close()
