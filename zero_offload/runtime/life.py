"""Whether a model can be used: in its own process, until it is closed, with the states of one whole step."""

from __future__ import annotations

import os

import torch

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.base.threads import FirstError


def in_backward() -> bool:
    """True if autograd runs on this thread now."""
    return torch._C._current_graph_task_id() != -1


class ModelLife:
    """Of one model."""

    def __init__(self, errors: FirstError) -> None:
        """`errors` has what the model's work has met."""
        self._errors = errors
        self._pid = os.getpid()
        self.is_closed = False
        """True if nothing but the model's figures can be asked for any more."""
        self.lacks_weights = False
        """True if values were left out, and none have been loaded in their place."""
        self.half_loaded = ""
        """The checkpoint of which only a part was loaded, if there is one."""
        self.half_updated = ""
        """What a backward has updated that has not ended, or was left by an exception (overlap="backward")."""

    @property
    def is_in_own_process(self) -> bool:
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """A forked child has neither our pages nor our threads: it must not get as far as touching them."""
        if not self.is_in_own_process:
            raise ZeroOffloadError(
                f"an offloaded model works in the process that offloaded it ({self._pid}), not in its forked child "
                f"({os.getpid()}). Keep the model out of DataLoader workers, or use the spawn start method"
            )

    def check_alive(self) -> None:
        """Raise in a forked child, and for a model that was closed."""
        self.check_process()
        if self.is_closed:
            raise ZeroOffloadError(
                "this model was closed by zo.close; build and offload it again (existing='resume' goes on from the "
                "last generation)"
            )

    def check_usable(self) -> None:
        """Raise where there is nothing to compute with or to read."""
        self.check_alive()
        self._errors.check_whole()
        if self.half_updated and not in_backward():
            raise ZeroOffloadError(
                f"a backward with overlap='backward' was left by an exception when {self.half_updated}, so this "
                "model's states are a mix of two steps. Load a whole checkpoint by zo.load_checkpoint, or start again "
                "with zo.offload (existing='resume' goes on from the last generation)"
            )
        if self.half_loaded:
            raise ZeroOffloadError(
                f"loading {self.half_loaded} failed half-way, so this model's states are a mix of two. Load a whole "
                "checkpoint by zo.load_checkpoint, or start again with zo.offload (existing='resume' goes on from the "
                "last generation)"
            )
        if self.lacks_weights:
            raise ConfigError(
                'this model was built by zo.deferred_init(values="skip") and has no weights yet. Load them by '
                'zo.load_pretrained(model, "folder/") or zo.load_checkpoint, or build it by zo.deferred_init()'
            )
