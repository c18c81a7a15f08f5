"""Which runtime a parameter belongs to, or how its values will be made: the only module-level state of parameters.

`Owner` lists what the guard class, the optimizers and the public functions may ask of the runtime. The object behind it
is made one layer up. Nothing is ever hung on a parameter or a module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.plan.quantized import is_wrapper

if TYPE_CHECKING:
    from types import FrameType

    import torch
    from torch import nn

    from zero_offload.base.alike import Compared
    from zero_offload.hardware.kernels.arguments import Hyper
    from zero_offload.standins.checkpointed import Holder, Part


class AtRest:
    """The class of a parameter at rest is a subclass; see guard.py."""

    __slots__ = ()


class Touched(Enum):
    """The state in which an operation finds parameters at rest."""

    OPEN = "they are plain: a forward or backward runs"
    FOR_READING = "their data is here, and a change would be lost"
    AWAY = "their data is not here"


class ParamPlaces(Protocol):
    """Where parameters of a model are."""

    def name_of(self, param: nn.Parameter) -> str:
        """The parameter's name in its model."""

    def describe(self, param: nn.Parameter) -> str:
        """Where the parameter rests, for repr and messages."""

    def check_requires_grad(self, param: nn.Parameter, value: object) -> None:
        """Raise unless the layout allows `requires_grad` to be `value`."""

    def check_frozen(self, params: Iterable[nn.Parameter]) -> None:
        """Raise where no step of these may be taken, before any part of it is."""


class ParamAccess(Protocol):
    """Questions that a guarded parameter may be asked."""

    def touch(self, params: Sequence[nn.Parameter]) -> Touched:
        """Make the data of `params` readable for an operation, where that may be; says what may be done with it."""

    def is_in_use(self, param: nn.Parameter) -> bool:
        """True if a forward or backward uses its unit now."""

    def is_gathered(self, param: nn.Parameter) -> bool:
        """True if it may be read now as it stands, inside of `zo.gathered`."""

    @property
    def is_divided(self) -> bool:
        """True if ranks divide parameters, so that all of them make the same walks."""

    def begin_walk(self, module: nn.Module, call: FrameType) -> None:
        """Called before `state_dict` or `load_state_dict` of a module goes over its parameters; `call` is its frame."""

    def end_walk(self, module: nn.Module) -> None:
        """Called after that."""

    def write_param(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Replace a parameter's values, as `load_state_dict` does."""

    @property
    def walking(self) -> bool:
        """True if state_dict or load_state_dict is walking over the model."""

    def copy_out(self, param: nn.Parameter) -> torch.Tensor:
        """A copy of the data."""

    def read_number(self, param: nn.Parameter) -> float:
        """The data, of one element. Collective where ranks divide parameters."""

    def copy_in(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Replace the data."""

    def read_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """The value of `param.grad`."""

    def write_grad(self, param: nn.Parameter, grad: torch.Tensor | None) -> None:
        """Carry out `param.grad = grad`."""

    def holds_grad(self, param: nn.Parameter) -> bool:
        """True if an earlier backward has left a gradient."""

    def drop_grads(self, params: Collection[nn.Parameter]) -> None:
        """Carry out `param.grad = None`, for several."""


class StateReaders(Protocol):
    """The objects that show states which the program has in hand; see `optim.state.Readers`."""

    def add(self, reader: Any) -> None: ...

    def discard(self, reader: Any) -> None: ...

    def before_edit(self, state: Any) -> None: ...

    def before_loading(self, states: Iterable[Any]) -> None: ...

    def before_replacing(self, params: Iterable[nn.Parameter], names: Collection[str] | None = None) -> None: ...


class GradSource(Protocol):
    """Questions that a `GradHandle` may be asked of a gradient that is held."""

    def name_of(self, param: nn.Parameter) -> str:
        """The parameter's name in its model."""

    def refuse(self, param: nn.Parameter, what: str) -> ZeroOffloadError:
        """The error for `what`, which needs the elements of a gradient."""

    def check_held(self, param: nn.Parameter, life: object) -> None:
        """Raise where this gradient is over, or is not complete."""

    def norm(self, param: nn.Parameter, order: float) -> torch.Tensor:
        """A scalar, fp32."""

    def is_finite(self, param: nn.Parameter) -> bool:
        """True if each element is a finite number."""

    def is_zeroed(self, param: nn.Parameter) -> bool:
        """True if the program has set it to zeros, and no backward has added to it since."""

    def scale(self, param: nn.Parameter, factor: float | torch.Tensor, *, divides: bool = False) -> None:
        """Multiply it by `factor`, or divide it."""

    def clamp(self, params: Collection[nn.Parameter], low: float | None, high: float | None) -> None:
        """Clip its elements to [low, high]; None sets no limit on that side."""

    def zero(self, param: nn.Parameter) -> None:
        """Let it be zeros, to which the next backward adds."""


class OptimizerStates(Protocol):
    """Optimizer states of offloaded parameters, by torch's names: "step", the states, and the part that completes a
    value to the master. That is the "residual" of bf16 and the "master" of fp16.
    """

    @property
    def readers(self) -> StateReaders: ...

    def add(self, params: Iterable[nn.Parameter], names: Sequence[str]) -> None:
        """Keep these states for a new optimizer: those that were loaded, else zero. Raises CapacityError."""

    def step_of(self, param: nn.Parameter) -> int | None:
        """How many updates the states have had; None where there are none yet."""

    def kept(self, param: nn.Parameter, names: Sequence[str]) -> dict[str, torch.dtype]:
        """The dtypes of these states and of the parts beside them that may be read; empty where there are none yet."""

    def check_usable(self) -> None:
        """Raise ZeroOffloadError where there is nothing to read."""

    def read(self, param: nn.Parameter, name: str) -> torch.Tensor:
        """A copy of one of them, of the parameter's shape, host; "step" as a scalar. Raises ZeroOffloadError where
        ranks divide the parameter."""

    def edit(self, param: nn.Parameter, name: str, values: torch.Tensor) -> None:
        """Replace one of them."""

    def write(
        self,
        param: nn.Parameter,
        step: int,
        states: Mapping[str, torch.Tensor | None],
        beside: Mapping[str, torch.Tensor],
    ) -> None:
        """Replace all of them: states of the parameter's shape, or None for zeros; `beside` the value what completes
        it. Those that rest there already are not moved."""

    def reset(self, params: Iterable[nn.Parameter]) -> None:
        """Drop the states of these parameters: their next step is the first."""


class Parts(Protocol):
    """This rank's parts of parameters and states."""

    def is_divided(self, param: nn.Parameter) -> bool:
        """True if that is not all of the parameter."""

    def of(self, param: nn.Parameter, name: str, dtype: torch.dtype, holder: Holder) -> Part:
        """Of a parameter's "value", or of what `OptimizerStates` keeps of it; `holder` shows it to the program."""


class LossScaler(Protocol):
    """The part of a `GradScaler` that generations and the step need."""

    def get_scale(self) -> float: ...

    def settings(self) -> dict[str, Any]:
        """The scale, and what it becomes; the same on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values. Raises between `step` and `update`."""


class Trainer(Protocol):
    """An optimizer, for a model that is updated before its `step`."""

    def compared(self) -> Compared:
        """Its class, groups and hyperparameters, which ranks have alike."""

    def hypers(self) -> Mapping[nn.Parameter, Hyper]:
        """Hyperparameters of its offloaded parameters, by value."""

    def __hash__(self) -> int: ...


class Owner(Protocol):
    """One offloaded model, as parameters and optimizers see it."""

    @property
    def places(self) -> ParamPlaces: ...

    @property
    def access(self) -> ParamAccess: ...

    @property
    def states(self) -> OptimizerStates: ...

    @property
    def parts(self) -> Parts: ...

    @property
    def makes_generations(self) -> bool:
        """True if it keeps param groups with its steps."""

    def together(self, call: str, instead: str = "") -> AbstractContextManager[None]:
        """A block at the beginning of `call`, which all ranks make, succeeds on all of them, or all raise. Collective.

        `instead`: what to do instead of the call on one rank alone.
        """

    def together_in_step(self, call: str) -> AbstractContextManager[None]:
        """A block at the beginning of a step succeeds on all ranks, or all raise. Collective."""

    def compare(self, name: str, compared: Callable[[], Compared]) -> None:
        """The next call that all ranks make compares this too; they raise where they differ. Where there are others."""

    def check_step(self) -> None:
        """Raise where no step can be made now."""

    def update(self, hypers: Mapping[nn.Parameter, Hyper], groups: Sequence[dict[str, Any]]) -> None:
        """Launch one step over the parameters that have gradients, after `check_step`; `groups` goes into generations.

        A step with a gradient that is not finite, here or where `unscale` was told so, changes no state.
        """

    def train_with(self, optimizer: Trainer) -> None:
        """An optimizer has some of the parameters. It is held weakly."""

    def unscale(self, scaler: LossScaler, overflowed: bool) -> bool:
        """Let the next step divide by the loss scale; returns True if it must be skipped, on every rank. Collective.

        `overflowed` says so of gradients that are not this owner's. Generations carry the scaler's state from now on.
        """

    def check_ordinary(self, call: str, squares: Callable[[], float]) -> None:
        """Raise where gradients that are used beside this model's differ over ranks; `squares` adds up theirs.
        Collective."""

    def instead_of(self, optimizer: torch.optim.Optimizer) -> str | None:
        """The call that makes an optimizer of this kind for offloaded parameters; None for our own optimizers."""

    def added_since(self) -> dict[nn.Parameter, str]:
        """Trained parameters that its modules have got since `zo.offload`, with their names."""


class RecipeSource(Protocol):
    """A tensor of files: one, or several that are joined."""

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end): (end - begin,) of the file's dtype, host. Raises StorageError."""


class Recipe(Protocol):
    """How the values of a parameter on meta are made."""

    @property
    def is_skipped(self) -> bool:
        """True if they were left out."""

    @property
    def value(self) -> object | None:
        """None where `make` cannot make them."""

    @property
    def source(self) -> RecipeSource | None:
        """The tensor of files that has the values, in row-major order; None where they are computed."""

    def drawn(self) -> bytes:
        """Digests of the generators that the values are drawn from: with the program they determine the values."""

    def make(self) -> torch.Tensor:
        """The values, a new tensor of the parameter's shape, host."""


_entries: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
"""By id, a parameter and a weak reference to its owner, which the model's hooks keep alive; before that, its recipe.

Each operation on a parameter at rest asks. torch's WeakIdKeyDictionary takes five calls of Python to answer."""


def _found(param: torch.Tensor) -> Any:
    entry = _entries.get(id(param))
    return None if entry is None or entry[0]() is not param else entry[1]


def _keep(param: torch.Tensor, found: Any) -> None:
    # With the parameter its entry goes. The callback is a method of C: Python drops what a signal's handler raises in
    # one of its own.
    _entries[id(param)] = weakref.ref(param, partial(_entries.pop, id(param))), found


def owner_of(param: torch.Tensor) -> Owner | None:
    """The runtime that offloads `param`, or None."""
    entry = _entries.get(id(param))
    if entry is None or entry[0]() is not param:
        return None
    found: Owner | None = entry[1]() if isinstance(entry[1], weakref.ref) else None
    return found


def describe(param: nn.Parameter) -> str:
    """Where a parameter rests, for messages."""
    owner = owner_of(param)
    return "a parameter" if owner is None else owner.places.describe(param)


def by_owner(params: Iterable[nn.Parameter]) -> dict[Owner | None, list[nn.Parameter]]:
    """Parameters by the runtime that offloads them, under None the ordinary ones. Each once, in the order given.

    Offloaded parameters that consist of others are left out: they are quantized, and have neither gradients nor states.
    """
    grouped: dict[Owner | None, list[nn.Parameter]] = {}
    for param in dict.fromkeys(params):
        # As `owner_of`, without a call: a step groups its parameters five times.
        entry = _entries.get(id(param))
        found = entry[1] if entry is not None and entry[0]() is param else None
        owner: Owner | None = found() if isinstance(found, weakref.ref) else None
        if owner is not None and hasattr(type(param), "__tensor_flatten__") and is_wrapper(param):
            continue
        grouped.setdefault(owner, []).append(param)
    return grouped


def _owner(found: object) -> Owner | None:
    owner: Owner | None = found() if isinstance(found, weakref.ref) else None
    return owner


def check_adopted(call: str, params: Iterable[nn.Parameter]) -> None:
    """Raise ConfigError if some of these are trained parameters that an offloaded model has got since `zo.offload`."""
    ordinary = {id(param) for param in by_owner(params).get(None, ()) if param.requires_grad}
    if not ordinary:
        return
    owners = {id(each): each for each in (_owner(found) for _, found in list(_entries.values())) if each is not None}
    for owner in owners.values():
        added = owner.added_since()
        if names := [name for param, name in added.items() if id(param) in ordinary]:
            raise not_adopted(call, names)


def not_adopted(call: str, names: Sequence[str]) -> ConfigError:
    """The error for `call`: these parameters of an offloaded model are not adopted."""
    some = ", ".join([*names[:3], *([f"and {len(names) - 3} more"] if len(names) > 3 else [])])
    return ConfigError(
        f"{call}: {len(names)} trained parameters were added to the model after zo.offload ({some}). No rank reduces "
        "their gradients, and no generation keeps them. Call zo.offload(model) again, which adopts them, and then this"
    )


def is_dropped(param: nn.Parameter) -> bool:
    """True if the model that offloaded `param` is gone, and with it the values."""
    found = _found(param)
    return isinstance(found, weakref.ref) and found() is None


def dropped_error(param: nn.Parameter) -> ZeroOffloadError:
    return ZeroOffloadError(
        f"a parameter of shape {tuple(param.shape)} belonged to an offloaded model that was dropped; its values went "
        "with the model. Keep a reference to the model while its parameters or its optimizer are used"
    )


def register(param: nn.Parameter, owner: Owner) -> None:
    _keep(param, weakref.ref(owner))


def unregister(param: torch.Tensor) -> None:
    _entries.pop(id(param), None)


def recipe_of(param: torch.Tensor) -> Recipe | None:
    """How the values of `param` are made, where `deferred_init` has left that to `offload`."""
    found = _found(param)
    recipe: Recipe | None = None if isinstance(found, weakref.ref) else found
    return recipe


def keep_recipe(param: torch.Tensor, recipe: Recipe) -> None:
    _keep(param, recipe)
