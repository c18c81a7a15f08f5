"""The owners of values that are elsewhere, as stand-ins and optimizers see them: the one place where calls go up.

Stand-ins call these abstract classes, which classes of `model/` and `runtime/` implement. There is one for parameters
(`ParamSource`, with `ParamPlaces`), gradients (`GradSource`), states of optimizers (`StateSource`) and pieces of
checkpoints (`PartSource`). `Owner` has them, and the calls that optimizers make.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from zero_offload.base.alike import Compared
from zero_offload.base.errors import ZeroOffloadError
from zero_offload.hardware.kernels.arguments import Hyper
from zero_offload.standins.part import Holder, Part
from zero_offload.standins.readers import Readers


class Touched(Enum):
    """The state in which an operation finds parameters at rest."""

    OPEN = "they are plain: a forward or backward runs"
    FOR_READING = "their data is here, and a change would be lost"
    AWAY = "their data is not here"


class ParamPlaces(ABC):
    """Where parameters of a model are."""

    @abstractmethod
    def name_of(self, param: nn.Parameter) -> str:
        """The parameter's name in its model."""

    @abstractmethod
    def describe(self, param: nn.Parameter) -> str:
        """Where the parameter rests, for repr and messages."""

    @abstractmethod
    def is_frozen(self, param: nn.Parameter) -> bool:
        """True if it has been frozen since it was offloaded."""

    @abstractmethod
    def check_frozen(self, params: Iterable[nn.Parameter]) -> None:
        """Raise where no step of these may be taken, before any part of it is."""


class ParamSource(ABC):
    """Questions that a guarded parameter may be asked."""

    @abstractmethod
    def touch(self, params: Sequence[nn.Parameter]) -> Touched:
        """Make the data of `params` readable for an operation, where that may be; says what may be done with it."""

    @abstractmethod
    def is_in_use(self, param: nn.Parameter) -> bool:
        """True if a forward or backward uses its unit now."""

    @abstractmethod
    def is_gathered(self, param: nn.Parameter) -> bool:
        """True if it may be read now as it stands, inside of `zo.gathered`."""

    @property
    @abstractmethod
    def is_shared(self) -> bool:
        """True if other ranks have the model too."""

    @abstractmethod
    def read_value(self, param: nn.Parameter, *, master: bool = False) -> torch.Tensor:
        """A copy of its values after a pending update, on its device, with its strides; of the fp32 master with
        `master`. Of a DTensor this rank's part. Collective where ranks divide it. Raises ZeroOffloadError where the
        model cannot be used."""

    @abstractmethod
    def keeps_master(self, param: nn.Parameter) -> bool:
        """True if its value is rounded from an fp32 master."""

    @abstractmethod
    def obstacle_to_writing(self, param: nn.Parameter) -> str:
        """A clause that says why its values cannot be changed now; empty where they can."""

    @abstractmethod
    def note_rounding(self, param: nn.Parameter) -> None:
        """A parameter without an fp32 master is changed by little: in 16 bits that may be lost."""

    @abstractmethod
    def write_value(
        self, param: nn.Parameter, values: torch.Tensor, *, of_16_bits: bool = False, is_drawn: bool = False
    ) -> None:
        """Replace its values, of its shape (that of the part of a DTensor), between steps: by fp32, or by its dtype.
        Of its dtype, or where fp32 came
        `of_16_bits`, elements that are what they were keep their master. Collective: all ranks give the same values,
        or random ones, `is_drawn`, of which rank 0's are written."""

    @abstractmethod
    def note_assigned(self, param: nn.Parameter, values: torch.Tensor | None) -> None:
        """The program has assigned this tensor to `.data`, which is a copy: changes of it would be missed. None: the
        tensor of before is of no account."""

    @property
    @abstractmethod
    def is_divided(self) -> bool:
        """True if ranks divide parameters, so that all of them make the same walks."""

    @abstractmethod
    def begin_walk(self, module: nn.Module, call: FrameType) -> None:
        """Called before `state_dict` or `load_state_dict` of a module goes over its parameters; `call` is its frame."""

    @abstractmethod
    def end_walk(self, module: nn.Module) -> None:
        """Called after that."""

    @abstractmethod
    def write_param(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Replace a parameter's values, as `load_state_dict` does."""

    @property
    @abstractmethod
    def walking(self) -> bool:
        """True if state_dict or load_state_dict is walking over the model."""

    @abstractmethod
    def copy_out(self, param: nn.Parameter) -> torch.Tensor:
        """A copy of the data."""

    @abstractmethod
    def read_number(self, param: nn.Parameter) -> float:
        """The data, of one element. Collective where ranks divide parameters."""

    @abstractmethod
    def copy_in(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Replace the data."""

    @abstractmethod
    def read_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """The value of `param.grad`."""

    @abstractmethod
    def write_grad(self, param: nn.Parameter, grad: torch.Tensor | None) -> None:
        """Carry out `param.grad = grad`."""

    @abstractmethod
    def holds_grad(self, param: nn.Parameter) -> bool:
        """True if an earlier backward has left a gradient."""

    @abstractmethod
    def drop_grads(self, params: Collection[nn.Parameter]) -> None:
        """Carry out `param.grad = None`, for several."""

    @abstractmethod
    def zero_grads(self, params: Collection[nn.Parameter]) -> None:
        """Carry out `param.grad.zero_()` for those that would have a gradient in torch, where a step keeps it."""


class GradLife:
    """A gradient that is held, from its first element to its end."""

    assignments = 0
    """Of `.data`, by which plain torch gives the gradient other memory."""
    kept: torch.Tensor | None = None
    """Its values, in host memory, where the program has dropped it and has a handle still: then they are the handle's.
    """


class GradSource(ABC):
    """Questions that a `GradHandle` may be asked of a gradient that is held."""

    @abstractmethod
    def name_of(self, param: nn.Parameter) -> str:
        """The parameter's name in its model."""

    @abstractmethod
    def refuse(self, param: nn.Parameter, what: str) -> ZeroOffloadError:
        """The error for `what`, which goes to a gradient's memory."""

    @abstractmethod
    def check_held(self, param: nn.Parameter, life: GradLife) -> None:
        """Raise where this gradient is over, or is not complete."""

    @abstractmethod
    def note_given(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """The program has assigned this tensor, of which the gradient is a copy: changes of it would be missed."""

    @abstractmethod
    def norm(self, param: nn.Parameter, order: float) -> torch.Tensor:
        """A scalar, fp32."""

    @abstractmethod
    def is_finite(self, param: nn.Parameter) -> bool:
        """True if each element is a finite number."""

    @abstractmethod
    def is_zeroed(self, param: nn.Parameter) -> bool:
        """True if the program has set it to zeros, and no backward has added to it since."""

    @abstractmethod
    def scale(self, param: nn.Parameter, factor: float | torch.Tensor, *, divides: bool = False) -> None:
        """Multiply it by `factor`, or divide it."""

    @abstractmethod
    def clamp(self, params: Collection[nn.Parameter], low: float | None, high: float | None) -> None:
        """Clip its elements to [low, high]; None sets no limit on that side."""

    @abstractmethod
    def zero(self, params: Collection[nn.Parameter]) -> None:
        """Let them be zeros, to which the next backward adds."""

    @abstractmethod
    def read(self, param: nn.Parameter) -> torch.Tensor:
        """A copy as the next step would use it, of the parameter's shape, fp32, on the compute device. Collective where
        ranks divide it."""

    @abstractmethod
    def write(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Replace it by `values` of the parameter's shape, the same on all ranks."""

    @abstractmethod
    def span(self, param: nn.Parameter) -> slice | None:
        """This rank's elements of the flat parameter; None where it has all."""

    @abstractmethod
    def read_part(self, param: nn.Parameter) -> torch.Tensor:
        """As `read`, of these elements alone, (elements,)."""

    @abstractmethod
    def write_part(self, param: nn.Parameter, values: torch.Tensor, what: str) -> None:
        """Replace them by (elements,); `what` all ranks do. The next step raises where it differs."""


class StateSource(ABC):
    """Optimizer states of offloaded parameters, by torch's names: "step", the states, and the part that completes a
    value to the master. That is the "residual" of bf16 and the "master" of fp16.
    """

    readers: Readers

    @abstractmethod
    def add(self, params: Iterable[nn.Parameter], names: Sequence[str]) -> None:
        """Keep these states for a new optimizer: those that were loaded, else zero. Raises CapacityError."""

    @abstractmethod
    def check_rows(self, params: Collection[nn.Parameter], sizes: Callable[[], Mapping[Any, int]], kind: str) -> None:
        """Raise CapacityError where states of an optimizer of this class, which is one of others, exceed a budget.
        `sizes` finds the bytes of each parameter's, and is called where they are in question."""

    @abstractmethod
    def step_of(self, param: nn.Parameter) -> int | None:
        """How many updates the states have had; None where there are none yet."""

    @abstractmethod
    def kept(self, param: nn.Parameter, names: Sequence[str]) -> dict[str, torch.dtype]:
        """The dtypes of these states and of the parts beside them that may be read; empty where there are none yet."""

    @abstractmethod
    def check_usable(self) -> None:
        """Raise ZeroOffloadError where there is nothing to read."""

    @abstractmethod
    def read(self, param: nn.Parameter, name: str) -> torch.Tensor:
        """A copy of one of them, of the parameter's shape, host; "step" as a scalar. Raises ZeroOffloadError where
        ranks divide the parameter."""

    @abstractmethod
    def edit(self, param: nn.Parameter, name: str, values: torch.Tensor) -> None:
        """Replace one of them."""

    @abstractmethod
    def write(
        self,
        param: nn.Parameter,
        step: int,
        states: Mapping[str, torch.Tensor | None],
        beside: Mapping[str, torch.Tensor],
    ) -> None:
        """Replace all of them: states of the parameter's shape, or None for zeros; `beside` the value what completes
        it. Those that rest there already are not moved."""

    @abstractmethod
    def has_row(self, param: nn.Parameter) -> bool:
        """True if an optimizer of others has made a state of the parameter."""

    @abstractmethod
    def read_row(self, param: nn.Parameter, packages: Collection[str]) -> Any:
        """A copy of a parameter's state that an optimizer of others has made; None where there is none. Its classes may
        be of these `packages`."""

    @abstractmethod
    def write_row(self, param: nn.Parameter, state: Any, kind: str) -> None:
        """Replace it, by the state of an optimizer of this class; None drops it. Raises CapacityError."""

    @abstractmethod
    def read_beside(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        """The part that completes a parameter's value to the master, by name, of its shape; a copy. Empty beside fp32,
        and where no step has been. Collective where ranks divide the parameter."""

    @abstractmethod
    def write_beside(self, param: nn.Parameter, beside: Mapping[str, torch.Tensor]) -> None:
        """Replace it."""

    @abstractmethod
    def reset(self, params: Iterable[nn.Parameter]) -> None:
        """Drop the states of these parameters: their next step is the first."""


class PartSource(ABC):
    """This rank's parts of parameters and states."""

    @abstractmethod
    def is_divided(self, param: nn.Parameter) -> bool:
        """True if that is not all of the parameter."""

    @abstractmethod
    def of(self, param: nn.Parameter, name: str, dtype: torch.dtype, holder: Holder) -> Part:
        """Of a parameter's "value", or of what `StateSource` keeps of it; `holder` shows it to the program."""


class ParamTensors(NamedTuple):
    """A parameter as an optimizer gets it."""

    master: torch.Tensor
    """Of the parameter's shape and strides, fp32, where the step is made; the step changes it in place."""
    grad: torch.Tensor
    """A copy, fp32, there."""
    state: Any
    """As the last step left it, its tensors views of where it rests; None before the first."""


class UnitStep(ABC):
    """One step of an optimizer that steps some of its parameters at a time."""

    kind: str
    """Its class: module and name. A state of another class is not its own."""
    packages: Collection[str]
    """Packages whose classes its states may have."""
    is_still: bool
    """True if all learning rates are 0."""
    steps_all: bool
    """True if it steps all parameters of a model at once."""
    device: torch.device
    """Where it steps them."""
    groups: Sequence[Collection[nn.Parameter]]
    """Its param groups: parameters of one leave the same numbers."""
    may_go_on: bool
    """True if it may go on beside the program when its numbers are known: no state is expected to grow."""

    @abstractmethod
    def step(self, given: Mapping[nn.Parameter, ParamTensors]) -> Mapping[nn.Parameter, Any]:
        """Step these parameters; return their new states, None for those that have none."""

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """The param groups for generations, as the step leaves them. The program's object has their numbers then."""

    @abstractmethod
    def pack_numbers(self) -> torch.Tensor:
        """Numbers of the optimizer as the steps on this rank have left them, (n,) uint8, host."""

    @abstractmethod
    def merge_numbers(self, rows: Sequence[torch.Tensor]) -> None:
        """Take those of all ranks. Raises ConfigError where they differ."""

    @abstractmethod
    def note_growth(self) -> None:
        """A state needs more room than before. Raises ConfigError beside the program, whose thread alone takes room."""

    @abstractmethod
    def go_on(self) -> None:
        """The rest is stepped beside the program, and `end` is called there."""

    @abstractmethod
    def end(self) -> None:
        """All of its parameters are stepped."""


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


class Owner(ABC):
    """One offloaded model, as parameters and optimizers see it."""

    places: ParamPlaces
    access: ParamSource
    parts: PartSource

    @property
    @abstractmethod
    def states(self) -> StateSource: ...

    @property
    @abstractmethod
    def makes_generations(self) -> bool:
        """True if it keeps param groups with its steps."""

    @abstractmethod
    def together(self, call: str, instead: str = "") -> AbstractContextManager[None]:
        """A block at the beginning of `call`, which all ranks make, succeeds on all of them, or all raise. Collective.

        `instead`: what to do instead of the call on one rank alone.
        """

    @abstractmethod
    def together_in_step(self, call: str) -> AbstractContextManager[None]:
        """A block at the beginning of a step succeeds on all ranks, or all raise. Collective."""

    @abstractmethod
    def release(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Let a parameter be an ordinary one with these values, of another shape. The next call of `zo.offload` adopts
        it anew, and what rests of it goes then. Collective. Raises ZeroOffloadError inside of a step."""

    @abstractmethod
    def check_copies(self, param: nn.Parameter, memo: dict[int, Any]) -> None:
        """Raise CapacityError where what `copy.deepcopy` copies beside this parameter has no room. `memo` is its
        argument: the objects that are copied are in it."""

    @abstractmethod
    def thaw(self, param: nn.Parameter) -> None:
        """Let a parameter require a gradient that was frozen when it was offloaded. Collective. Raises where it cannot
        be trained, where there is no room, and inside of a forward or backward."""

    @abstractmethod
    def drop_masters(self, params: Iterable[nn.Parameter]) -> None:
        """Round the fp32 masters of parameters that are frozen again to their values. Sections of which nothing is
        trained give up the room. Collective. Raises inside of a forward or backward."""

    @abstractmethod
    def compare(self, name: str, compared: Callable[[], Compared]) -> None:
        """The next call that all ranks make compares this too; they raise where they differ. Where there are others."""

    @abstractmethod
    def check_unitwise(self, call: str, *, together: bool) -> None:
        """Raise ConfigError where no optimizer of others can step this model, for `call`; of all parameters
        `together`."""

    @property
    @abstractmethod
    def step_device(self) -> torch.device:
        """A GPU that may make the steps of an optimizer of others; else the host."""

    @property
    @abstractmethod
    def has_states_on_device(self) -> bool:
        """True if states of some parameters rest in the memory of the compute device, where those are updated."""

    @abstractmethod
    def check_step(self) -> None:
        """Raise where no step can be made now."""

    @abstractmethod
    def update(
        self, hypers: Mapping[nn.Parameter, Hyper], groups: Sequence[dict[str, Any]], optimizer: Trainer
    ) -> None:
        """Launch one step of `optimizer` over the parameters that have gradients, after `check_step`; `groups` goes
        into generations.

        A step with a gradient that is not finite, here or where `unscale` was told so, changes no state.
        """

    @abstractmethod
    def walk(self, params: Collection[nn.Parameter], stepper: UnitStep, optimizer: Trainer) -> None:
        """As `update`, by an optimizer of others that steps some of its parameters at a time. Returns when the numbers
        that they share are known; the rest may go on beside the program."""

    @abstractmethod
    def wait_for_walk(self) -> None:
        """Return when no such step goes on beside the program."""

    @abstractmethod
    def train_with(self, optimizer: Trainer, params: Iterable[nn.Parameter]) -> None:
        """An optimizer has these parameters. It is held weakly."""

    @abstractmethod
    def unscale(self, scaler: LossScaler, overflowed: bool) -> bool:
        """Let the next step divide by the loss scale; returns True if it must be skipped, on every rank. Collective.

        `overflowed` says so of gradients that are not this owner's. Generations carry the scaler's state from now on.
        """

    @abstractmethod
    def check_ordinary(self, call: str, squares: Callable[[], float]) -> None:
        """Raise where gradients that are used beside this model's differ over ranks; `squares` adds up theirs.
        Collective."""

    @abstractmethod
    def live_roots(self) -> Iterator[nn.Module]:
        """The modules that were given to zo.offload, the first one first."""

    @abstractmethod
    def instead_of(self, optimizer: torch.optim.Optimizer) -> str | None:
        """The call that makes an optimizer of this kind for offloaded parameters; None for our own optimizers."""

    @abstractmethod
    def added_since(self) -> dict[nn.Parameter, str]:
        """Trained parameters that its modules have got since `zo.offload`, with their names."""
