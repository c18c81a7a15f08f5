"""Every method of a tool that a class of `zero_offload/integrations` overrides exists there, as we expect it.

A release of the tool that drops or changes one is found here, by name, before a run finds it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator

import pytest

import zero_offload.integrations as integrations
from tests.helpers import tools as tools

TOOLS = ("transformers", "accelerate", "trl", "lightning", "peft")

MIXINS: dict[str, str] = {"OffloadMixin": "transformers.trainer.Trainer"}
"""Mixins of `zero_offload.integrations`, each with the class of the tool that it stands before."""

OVERRIDES: dict[str, str] = {
    "accelerate.accelerator.Accelerator.load_state": "self input_dir load_kwargs load_model_func_kwargs",
    "accelerate.accelerator.Accelerator.no_sync": "self model",
    "accelerate.accelerator.Accelerator.save_state": "self output_dir safe_serialization save_model_func_kwargs",
    "transformers.trainer.Trainer._get_grad_norm": "self model grad_norm",
    "transformers.trainer.Trainer._get_output_dir": "self trial",
    "transformers.trainer.Trainer._init_training_state": (
        "self max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial"
    ),
    "transformers.trainer.Trainer._load_best_model": "self",
    "transformers.trainer.Trainer._load_from_checkpoint": "self resume_from_checkpoint model",
    "transformers.trainer.Trainer._load_optimizer_and_scheduler": "self checkpoint",
    "transformers.trainer.Trainer._maybe_log_save_evaluate": (
        "self tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate"
    ),
    "transformers.trainer.Trainer._move_model_to_device": "self model device",
    "transformers.trainer.Trainer._prepare_for_training": "self max_steps train_dataloader resume_from_checkpoint",
    "transformers.trainer.Trainer._push_from_checkpoint": "self checkpoint_folder",
    "transformers.trainer.Trainer._run_epoch": (
        "self model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial "
        "ignore_keys_for_eval start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch"
    ),
    "transformers.trainer.Trainer._save": "self output_dir state_dict",
    "transformers.trainer.Trainer._save_checkpoint": "self model trial",
    "transformers.trainer.Trainer._save_optimizer_and_scheduler": "self output_dir",
    "transformers.trainer.Trainer.call_model_init": "self trial",
    "transformers.trainer.Trainer.create_optimizer": "self model",
    "transformers.trainer.Trainer.get_optimizer_cls_and_kwargs": "args model",
    "transformers.trainer.Trainer.set_initial_training_values": "self args dataloader",
    "transformers.trainer.Trainer.train": "self resume_from_checkpoint trial ignore_keys_for_eval",
    "transformers.trainer.Trainer.training_step": "self model inputs num_items_in_batch",
    **{
        f"transformers.trainer_callback.TrainerCallback.{name}": "self args state control kwargs"
        for name in ("on_evaluate", "on_log", "on_step_begin", "on_train_begin", "on_train_end")
    },
    "lightning.pytorch.callbacks.callback.Callback.on_exception": "self trainer pl_module exception",
    "lightning.pytorch.callbacks.callback.Callback.on_train_batch_end": (
        "self trainer pl_module outputs batch batch_idx"
    ),
    "lightning.pytorch.callbacks.callback.Callback.on_train_end": "self trainer pl_module",
    "lightning.pytorch.callbacks.callback.Callback.on_train_start": "self trainer pl_module",
    "lightning.pytorch.strategies.parallel.ParallelStrategy.block_backward_sync": "self",
    "lightning.pytorch.strategies.parallel.ParallelStrategy.distributed_sampler_kwargs": "",
    "lightning.pytorch.strategies.parallel.ParallelStrategy.root_device": "",
    "lightning.pytorch.strategies.parallel.ParallelStrategy.teardown": "self",
    "lightning.pytorch.strategies.strategy.Strategy._configure_launcher": "self",
    "lightning.pytorch.strategies.strategy.Strategy.barrier": "self name",
    "lightning.pytorch.strategies.strategy.Strategy.broadcast": "self obj src",
    "lightning.pytorch.strategies.strategy.Strategy.lightning_module_state_dict": "self",
    "lightning.pytorch.strategies.strategy.Strategy.load_checkpoint": "self checkpoint_path weights_only",
    "lightning.pytorch.strategies.strategy.Strategy.load_model_state_dict": "self checkpoint strict",
    "lightning.pytorch.strategies.strategy.Strategy.load_optimizer_state_dict": "self checkpoint",
    "lightning.pytorch.strategies.strategy.Strategy.model_to_device": "self",
    "lightning.pytorch.strategies.strategy.Strategy.optimizer_state": "self optimizer",
    "lightning.pytorch.strategies.strategy.Strategy.reduce": "self tensor group reduce_op",
    "lightning.pytorch.strategies.strategy.Strategy.remove_checkpoint": "self filepath",
    "lightning.pytorch.strategies.strategy.Strategy.restore_checkpoint_after_setup": "",
    "lightning.pytorch.strategies.strategy.Strategy.save_checkpoint": "self checkpoint filepath storage_options",
    "lightning.pytorch.strategies.strategy.Strategy.setup": "self trainer",
    "lightning.pytorch.strategies.strategy.Strategy.setup_environment": "self",
    "lightning.pytorch.strategies.strategy.Strategy.tensor_init_context": "self empty_init",
    "lightning.pytorch.strategies.strategy.Strategy.training_step": "self args kwargs",
}
"""Methods of tools, each with its parameters, by name and in order. A property has none."""


def found(dotted: str) -> object:
    """A class, a method or a property by its full name."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            value = inspect.getattr_static(value, name)
        return value
    raise LookupError(dotted)


def parameters_of(dotted: str) -> str:
    value = found(dotted)
    if isinstance(value, property):
        return ""
    value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    assert isinstance(value, Callable)
    return " ".join(inspect.signature(value).parameters)


def classes() -> Iterator[type]:
    for module in pkgutil.iter_modules(integrations.__path__, f"{integrations.__name__}."):
        inside = vars(importlib.import_module(module.name)).values()
        yield from (each for each in inside if isinstance(each, type) and each.__module__ == module.name)


def overridden_by(ours: type, mixins: dict[str, str] = MIXINS) -> Iterator[str]:
    """Full names of what a class overrides of tools, as the nearest class of the tool has them."""
    bases = [base for base in ours.__mro__ if base.__module__.split(".")[0] in TOOLS]
    if (beside := mixins.get(ours.__name__)) is not None:
        target = found(beside)
        assert isinstance(target, type)
        bases += target.__mro__[:-1]
    for name, value in vars(ours).items():
        is_code = callable(value) or isinstance(value, property | classmethod | staticmethod)
        if is_code and not name.startswith("__"):
            theirs = next((base for base in bases if name in vars(base)), None)
            if theirs is not None:
                yield f"{theirs.__module__}.{theirs.__qualname__}.{name}"


@pytest.mark.parametrize("method", OVERRIDES)
def test_an_overridden_method_is_as_expected(method: str) -> None:
    assert parameters_of(method) == OVERRIDES[method]


def test_every_overridden_method_is_listed() -> None:
    assert {name for ours in classes() for name in overridden_by(ours)} == set(OVERRIDES)


def test_the_rules_find_what_they_look_for() -> None:
    method = "transformers.trainer.Trainer.create_optimizer"
    mixin = type("OurMixin", (), {"create_optimizer": lambda self: None, "own": lambda self: None})
    assert list(overridden_by(mixin, {"OurMixin": "transformers.trainer.Trainer"})) == [method]
    assert parameters_of(method).split()[0] == "self"
    with pytest.raises(AttributeError):
        found("transformers.trainer.Trainer.gone")
