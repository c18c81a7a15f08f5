"""An `Accelerator` for offloaded models. Most of accelerate's works as it is; this has the rest.

With accelerate's own, gradients of every micro-batch cross the ranks, and `save_state` on several ranks raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from zero_offload.base.errors import ConfigError
from zero_offload.base.inputs import check_optimizer
from zero_offload.model.api import no_sync
from zero_offload.model.checkpoints import load_checkpoint, save_checkpoint
from zero_offload.standins.owners import owner_of

_FOLDER = "offloaded_{}"
"""A checkpoint of one offloaded model and its optimizer, in the folder of `save_state`."""


class OffloadAccelerator(Accelerator):  # type: ignore[misc]
    """An `Accelerator` whose `no_sync`, `accumulate`, `save_state` and `load_state` know offloaded models.

    The folder that `save_state` makes has a checkpoint of `zo.save_checkpoint` for each offloaded model and its
    optimizer, on one rank and on several. It loads on another number of ranks too. Everything else in it is
    accelerate's own. Each call is made by all ranks.
    """

    _models: list[nn.Module]
    _optimizers: list[torch.optim.Optimizer]

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Gradients stay on their rank; the next backward outside, or the step, reduces the sum once."""
        with no_sync(model) if _is_offloaded(model) else super().no_sync(model):
            yield

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> Any:
        """As accelerate's. Raises CheckpointError where the folder holds a checkpoint of ours, and StorageError."""
        pairs = self._pairs()
        with self._without(pairs):
            folder = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        for index, (model, optimizer) in enumerate(pairs):
            save_checkpoint(model, optimizer, Path(folder) / _FOLDER.format(index))
        return folder

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        """As accelerate's. Raises CheckpointError and IntegrityError as `zo.load_checkpoint` does."""
        pairs, found = self._pairs(), []
        with self.register_load_state_pre_hook(lambda _, folder: found.append(folder)), self._without(pairs):
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        for index, (model, optimizer) in enumerate(pairs):
            load_checkpoint(model, optimizer, Path(found[0]) / _FOLDER.format(index))

    def _pairs(self) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        """Prepared models that are offloaded and trained, each with its optimizer."""
        optimizers = [check_optimizer("accelerator.prepare", each) for each in self._optimizers]
        pairs = []
        for model in filter(_is_offloaded, self._models):
            trained = {id(param) for param in model.parameters() if param.requires_grad}
            own = [
                each for each in optimizers if trained & {id(p) for group in each.param_groups for p in group["params"]}
            ]
            if trained and len(own) != 1:
                raise ConfigError(
                    f"an offloaded {type(model).__name__} has {len(own)} optimizers among those that were prepared, "
                    "and its checkpoint takes one. Call accelerator.prepare(model, optimizer) with the one that trains "
                    "it, built over all parameters"
                )
            pairs += [(model, optimizer) for optimizer in own]
        return pairs

    @contextmanager
    def _without(self, pairs: list[tuple[nn.Module, torch.optim.Optimizer]]) -> Iterator[None]:
        """accelerate's own part of a checkpoint: what is not offloaded."""
        models, optimizers = self._models, self._optimizers
        ours = [optimizer for _, optimizer in pairs]
        self._models = [each for each in models if not _is_offloaded(each)]
        self._optimizers = [each for each in optimizers if check_optimizer("accelerator.prepare", each) not in ours]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers


def _is_offloaded(model: nn.Module) -> bool:
    return any(owner_of(param) is not None for param in model.parameters())
