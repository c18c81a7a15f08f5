"""An optimizer on tiny parameters: one joint step against units and against flat parts, bit for bit.

A `UnitTrial` has copies of a program's optimizer over the same tiny parameters. One copy is stepped jointly and one by
a twin, whose states go through rows. Two more have the parameters flat, cut at an odd place. `UnitTrial.step` takes one
step of each and says what differs first. Shapes come from the dimensions of the program's parameters, group by group.
"""

from __future__ import annotations

import copy
import enum
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zero_offload.optim.unitwise.optimizer_copies import (
    SIZES,
    Constant,
    copied,
    first_states,
    names_of_params,
    plain_step,
)
from zero_offload.optim.unitwise.shared_numbers import ABSENT, NumberTree, changes, is_same, told
from zero_offload.optim.unitwise.state_rows import StateOutline, packages_of, packed, unpack
from zero_offload.optim.unitwise.twin import Twin

_SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    0: ((), ()),
    1: ((24,), (40,), (136,)),
    2: ((24, 40), (40, 24), (128, 136)),
    3: ((6, 8, 5), (8, 4, 7), (16, 16, 18)),
    4: ((8, 4, 3, 3), (4, 6, 3, 3), (32, 16, 3, 3)),
}
"""By the number of dimensions: wide and tall ones, and one of enough elements for classes that pass small ones over.

Vectors are short, since some classes have a matrix for each.
"""
_GROUPS_MAX = 6
"""Groups of different kinds that a trial has at most."""
_TRIAL_LR = 1e-3
"""In place of a rate of 0, with which a scheduler begins: no weight would move."""


class TrialFailedError(Exception):
    """The optimizer's own step, or its copy, has raised an error on tiny parameters."""


@dataclass(frozen=True)
class Tiny:
    """A tiny parameter: which of the program's it stands for, and its shape."""

    param: Tensor
    group: int
    shape: tuple[int, ...]


DRAWS = "random numbers that all of the program shares are drawn, in the order of parameters"


@dataclass
class Outcome:
    """The results of steps so far."""

    difference: str = ""
    """Of units from a joint step; empty if there is none."""
    flat_difference: str = ""
    draws: bool = False
    """True if the last step has drawn random numbers that are not its own."""
    moved: set[int] = field(default_factory=set)
    """Numbers of the parameters whose weights have changed."""
    steps: int = 0
    grown: int = 0
    """The last step in which a state took more room than before."""


def tinies_of(optimizer: torch.optim.Optimizer) -> list[Tiny]:
    """Tiny parameters for each kind of group: those of its numbers of dimensions, in their order."""
    found: list[Tiny] = []
    kinds: set[Any] = set()
    for number, group in enumerate(optimizer.param_groups):
        by_dims: dict[int, Tensor] = {}
        for param in group["params"]:
            by_dims.setdefault(param.dim(), param)
        kind = (*sorted(by_dims), *sorted((key, repr(value)) for key, value in _settings(group)))
        if kind in kinds or len(kinds) == _GROUPS_MAX:
            continue
        kinds.add(kind)
        for dims, param in by_dims.items():
            found += [Tiny(param, number, shape) for shape in shapes_of(dims)]
    return found


def copy_over(
    optimizer: torch.optim.Optimizer, kind: type[Any], tinies: Sequence[Tiny], params: Sequence[nn.Parameter]
) -> Any:
    """A copy of a program's optimizer over other parameters, one for each of `tinies`; without states of parameters."""
    for param, tiny in zip(params, tinies, strict=True):
        marks = {key: value for key, value in vars(tiny.param).items() if type(value) in (bool, int, float, str)}
        vars(param).update({key: value for key, value in marks.items() if not key.startswith("_")})
    stand_ins = {id(tiny.param): param for tiny, param in zip(tinies, params, strict=True)}
    pairs = [
        (param, stand_ins.get(id(param), params[0])) for group in optimizer.param_groups for param in group["params"]
    ]
    made = copied(optimizer, kind, pairs)
    groups = []
    for number, group in enumerate(made.param_groups):
        members = [at for at, tiny in enumerate(tinies) if tiny.group == number]
        if members:
            _cut_lists(group, optimizer.param_groups[number]["params"], [tinies[at] for at in members])
            group["params"] = [params[at] for at in members]
            if entry := SIZES.get(kind.__module__.partition(".")[0]):
                group.setdefault(entry, sum(math.prod(tinies[at].shape) for at in members))
            if isinstance(group.get("lr"), float) and group["lr"] == 0:
                group["lr"] = _TRIAL_LR
            groups.append(group)
    made.param_groups[:] = groups
    return made


def begun_states(
    optimizer: torch.optim.Optimizer, kind: type[Any], tinies: Sequence[Tiny], shapes: Sequence[torch.Size]
) -> dict[int, Any]:
    """By the number of a parameter of these shapes: the state that a constructor has made, to be copied."""
    begun = first_states(optimizer, kind, [tiny.param for tiny in tinies])
    return {
        at: _resized(begun[tiny.param], tuple(tiny.param.shape), shape)
        for at, (tiny, shape) in enumerate(zip(tinies, shapes, strict=True))
        if tiny.param in begun
    }


def shapes_of(dims: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of tiny parameters of so many dimensions."""
    return _SHAPES.get(dims, ((2,) * dims, (3,) * dims))


def _settings(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Entries that make a group another kind: not its rate and decay, which differ layer by layer."""
    for key, value in group.items():
        if key not in ("params", "param_names") and not isinstance(value, float | Tensor):
            yield key, value


class UnitTrial:
    """Joint, walked and flat copies of one optimizer, with gradients of one scale."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, kind: type[Any], tinies: list[Tiny], scale: float, *, in_order: bool
    ) -> None:
        """`in_order` has units in the order of the groups, which random numbers may be drawn in."""
        self._kind, self._scale, self._tinies, self._in_order = kind, scale, tinies, in_order
        self._generator = torch.Generator("cpu").manual_seed(int(1e9 * scale) + 1)
        self._direction = [self._noise(tiny.shape) for tiny in tinies]
        values = [0.1 * self._noise(tiny.shape) for tiny in tinies]
        for value in values:
            # Even the smallest change of a zero is a change.
            value.view(-1)[::3] = 0
        self._begin = [value.clone() for value in values]
        self._joint, self._params = self._program(optimizer, values)
        self._program_of_twin, tiny_params = self._program(optimizer, values)
        self._twin = Twin(self._program_of_twin, tiny_params, kind=kind)
        self._values, self._rows = [value.clone() for value in values], [_EMPTY] * len(values)
        self._packages = packages_of(kind)
        cuts = [value.numel() // 3 for value in values]
        flat = [value.view(-1) for value in values]
        self._parts: list[tuple[Any, list[nn.Parameter]]] = []
        if all(cuts):
            firsts = self._program(optimizer, [value[:cut] for value, cut in zip(flat, cuts, strict=True)])
            lasts = self._program(optimizer, [value[cut:] for value, cut in zip(flat, cuts, strict=True)])
            self._parts = [firsts, lasts]
        self._cuts = cuts
        self._step_of = plain_step(kind)
        self.outcome = Outcome() if self._parts else Outcome(flat_difference="a parameter of few elements")

    def step(self) -> None:
        """Step all copies with the same gradients and the same random numbers, and compare them."""
        outcome = self.outcome
        outcome.steps += 1
        grads = [self._scale * (each + self._noise(each.shape)) for each in self._direction]
        with torch.random.fork_rng(devices=[]):
            begun = random_state()
            self._step_jointly(self._joint, self._params, grads)
            ended = random_state()
            set_random_state(begun)
            outcome.draws = not is_same(ended, begun)
            if outcome.draws and not self._in_order:
                outcome.difference = DRAWS
                return
            outcome.difference = self._walk(grads)
            if not outcome.difference and not is_same(random_state(), ended):
                outcome.difference = DRAWS
        if outcome.draws:
            outcome.flat_difference = DRAWS
        outcome.flat_difference = outcome.flat_difference or self._own_shape() or self._step_flat(grads)
        for number, (param, value) in enumerate(zip(self._params, self._begin, strict=True)):
            if number not in outcome.moved and not torch.equal(param, value):
                outcome.moved.add(number)

    def _noise(self, shape: Any) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def _program(
        self, optimizer: torch.optim.Optimizer, values: list[Tensor]
    ) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        """A copy of the program's optimizer over parameters of these values."""
        params = [nn.Parameter(value.clone()) for value in values]
        made = copy_over(optimizer, self._kind, self._tinies, params)
        shapes = [param.shape for param in params]
        for at, state in begun_states(optimizer, self._kind, self._tinies, shapes).items():
            made.state[params[at]] = copy.deepcopy(state)
        return made, params

    def _step_jointly(self, optimizer: Any, params: list[nn.Parameter], grads: list[Tensor]) -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        try:
            self._step_of(optimizer)
        except Exception as error:
            raise TrialFailedError(f"{type(error).__name__}: {error}") from error
        for param in params:
            param.grad = None

    def _walk(self, grads: list[Tensor]) -> str:
        """Step by units, the last parameters first unless in order; return the first difference from the joint step."""
        with self._twin.step(self._twin.capture()) as walk:
            units = _units(len(grads))
            for unit in reversed(units) if self._in_order else units:
                given = {at: (self._values[at], grads[at].clone(), self._state(at)) for at in unit}
                for at, state in walk.unit(given).items():
                    self._put_state(at, state)
        self._twin.publish(walk)
        for at, (param, value) in enumerate(zip(self._params, self._values, strict=True)):
            if not _is_equal(param.data, value):
                return f"the weights of a parameter of shape {self._tinies[at].shape}"
        numbers = [self._tree(each).read() for each in (self._joint, self._program_of_twin)]
        if changed := changes(*numbers):
            return told(next(iter(changed)))
        counters = list(walk.changed.values())
        return next(filter(None, (self._difference_of_state(at, counters) for at in range(len(grads)))), "")

    def _state(self, at: int) -> Any:
        return unpack(self._rows[at], self._packages) if self._rows[at].numel() else None

    def _put_state(self, at: int, state: Any) -> None:
        if state is None:
            self._rows[at] = _EMPTY
            return
        outline = StateOutline(state)
        if self._rows[at].numel() == outline.nbytes:
            outline.write(self._rows[at])
            return
        if outline.nbytes > self._rows[at].numel():
            self.outcome.grown = self.outcome.steps
        self._rows[at] = packed(state)

    def _difference_of_state(self, at: int, counters: list[Any]) -> str:
        state, walked = self._joint.state.get(self._params[at]), self._state(at)
        if state and torch.equal(packed(state), self._rows[at]):
            return ""
        place = difference_of_states(state or {}, walked or {}, counters)
        return place and f"{place} of a parameter of shape {self._tinies[at].shape}"

    def _tree(self, optimizer: Any) -> NumberTree:
        ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return NumberTree(optimizer.param_groups, vars(optimizer), optimizer.state, ids, self._packages)

    def _own_shape(self) -> str:
        """A state that does not go with the elements of its parameter; of a flat one it might be of any size."""
        for param, tiny in zip(self._params, self._tinies, strict=True):
            for place, tensor in _tensors_of(self._joint.state.get(param)):
                if tensor.numel() not in (0, 1, param.numel()):
                    return f"state{place} of a parameter of shape {tiny.shape} has shape {tuple(tensor.shape)}"
        return ""

    def _step_flat(self, grads: list[Tensor]) -> str:
        """Step flat parts of all parameters, apart; return the first difference from the joint step."""
        try:
            for (optimizer, params), first in zip(self._parts, (True, False), strict=True):
                flat = [
                    grad.view(-1)[:cut] if first else grad.view(-1)[cut:]
                    for grad, cut in zip(grads, self._cuts, strict=True)
                ]
                self._step_jointly(optimizer, params, flat)
        except TrialFailedError as error:
            return f"flat parameters are an error ({error})"
        for param, tiny, one, other in zip(self._params, self._tinies, *(each[1] for each in self._parts), strict=True):
            if not _is_equal(param.data.reshape(-1), torch.cat([one.data, other.data])):
                return f"the weights of flat parts of a parameter of shape {tiny.shape}"
        trees = [self._tree(each).read() for each in (self._joint, *(part[0] for part in self._parts))]
        for each in trees[1:]:
            if changed := changes(trees[0], each):
                return f"{told(next(iter(changed)))} with flat parts"
        return ""


_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


def _units(count: int) -> list[list[int]]:
    """Parameters from the last to the first, by one and by two."""
    units, at, size = [], count, 1
    while at > 0:
        units.append(list(range(max(0, at - size), at)))
        at -= size
        size = 3 - size
    if len(units) == 1:
        return [[at] for at in reversed(range(count))]
    return units


def _cut_lists(group: dict[str, Any], params: list[Tensor], tinies: list[Tiny]) -> None:
    """Lists that have an entry for each parameter of a group have one for each tiny one."""
    positions = {id(param): at for at, param in enumerate(params)}
    for key, names in names_of_params(group, len(params)).items():
        # A name stands for two tiny ones: it goes on differently.
        group[key] = [f"{names[positions[id(tiny.param)]]}{'.' * at}" for at, tiny in enumerate(tinies)]


def _resized(state: Any, shape: tuple[int, ...], to: Any) -> Any:
    """A constructor's state, for a parameter of another shape."""
    if isinstance(state, dict):
        return {key: _resized(value, shape, to) for key, value in state.items()}
    if isinstance(state, Constant):
        return Constant(state.value, tuple(to) if state.shape == shape else state.shape)
    if isinstance(state, Tensor) and state.numel() > 1:
        raise TrialFailedError(f"its constructor makes a state of shape {tuple(state.shape)}, of values of its own")
    return state


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """True for the same bits; one NaN is like another."""
    if torch.equal(one, other):
        return True
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and bool(((one == other) | (one.isnan() & other.isnan())).all())
    )


def _tensors_of(state: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a state with their places."""
    if isinstance(state, Tensor):
        yield place, state
    elif isinstance(state, list | tuple | deque):
        for at, each in enumerate(state):
            yield from _tensors_of(each, f"{place}[{at}]")
    elif isinstance(state, Mapping) or (hasattr(state, "__dict__") and not isinstance(state, type | enum.Enum)):
        for key, value in (state if isinstance(state, Mapping) else vars(state)).items():
            yield from _tensors_of(value, f"{place}[{key!r}]")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (type(value) is Tensor and value.numel() == 1)


def difference_of_states(one: Any, other: Any, counters: Iterable[Any]) -> str:
    """Where two states differ first, or nothing. `counters` are shared numbers that the step has changed.

    Some classes keep a counter of a group in the state of its first parameter too, which is another one in a unit.
    """
    for place, a, b in differences(one, other):
        alone = b if a is ABSENT else a
        is_copy = (
            (a is ABSENT or b is ABSENT)
            and _is_number(alone)
            and any(_is_number(each) and bool(alone == each) for each in counters)
        )
        if not is_copy:
            return f"state{place}"
    return ""


def differences(one: Any, other: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Places where two states have other values, with both; ABSENT where an entry is missing."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in (*one, *(key for key in other if key not in one)):
            yield from differences(one.get(key, ABSENT), other.get(key, ABSENT), f"{place}[{key!r}]")
    elif isinstance(one, list | tuple | deque) and type(one) is type(other) and len(one) == len(other):
        for at, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{place}[{at}]")
    elif type(one) is Tensor and type(other) is Tensor:
        if not _is_equal(one, other):
            yield place, one, other
    elif isinstance(one, Tensor) and type(one) is type(other) and hasattr(one, "__tensor_flatten__"):
        wrapped: Any = one
        for name in wrapped.__tensor_flatten__()[0]:
            yield from differences(getattr(one, name), getattr(other, name), f"{place}.{name}")
    elif hasattr(one, "__dict__") and type(one) is type(other) and not isinstance(one, Tensor | enum.Enum):
        yield from differences(vars(one), vars(other), place)
    elif not is_same(one, other):
        yield place, one, other


def random_state() -> tuple[Any, ...]:
    """States of the generators that all code shares: torch's, Python's, NumPy's."""
    return torch.get_rng_state(), random.getstate(), tuple(np.random.get_state(legacy=True))


def set_random_state(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
