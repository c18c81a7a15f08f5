"""Whether an optimizer multiplies or factorizes matrices: such a step is faster on a GPU, though its bytes go there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero_offload.optim.unitwise.optimizer_copies import NotByUnitsError
from zero_offload.optim.unitwise.trials import TrialFailedError, UnitTrial, random_state, set_random_state, tinies_of

_STEPS = 3
"""Steps that are watched: some classes make states in the first one, and no update."""
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Products of two matrices, and where the first one is among their arguments."""


def multiplies_matrices(optimizer: torch.optim.Optimizer, *, kind: type[Any] | None = None) -> bool:
    """Watch steps of a copy over tiny parameters. The optimizer itself is not stepped. An outer product of two vectors,
    such as Adafactor's, does not count: it takes no longer than other arithmetic."""
    begun = random_state()
    watch = _ProductWatch()
    try:
        trial = UnitTrial(
            optimizer, type(optimizer) if kind is None else kind, tinies_of(optimizer), 1.0, in_order=True
        )
        with watch:
            for _ in range(_STEPS):
                trial.step()
    except (TrialFailedError, NotByUnitsError):
        pass  # what it has done so far counts
    finally:
        set_random_state(begun)
    return watch.found


class _ProductWatch(TorchDispatchMode):
    """Notes products of matrices with more than one term, and factorizations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("linalg_") and "norm" not in name:
            self.found = True
        elif (at := _PRODUCTS.get(name)) is not None and isinstance(args[at], Tensor):
            self.found = self.found or args[at].shape[-1] > 1
        return func(*args, **(kwargs or {}))
