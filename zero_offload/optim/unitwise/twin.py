"""A private copy of a program's optimizer, which steps a few parameters at a time with the bits of one joint step.

The copy has stand-ins for parameters: their shapes, in fp32, without memory. In a step each unit's stand-ins get values
and gradients, param groups hold these parameters alone, and states come from outside. Numbers that all parameters share
(`shared_numbers.py`) are put back before each unit, so that a counter counts once. All units must leave the same ones.

`Twin.capture` takes numbers of the program's object by value. `Twin.step` walks units with them, and `Walk.unit` steps
one. `Twin.publish` gives the program's object the numbers that the walk changed. Nothing here knows where values rest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ConfigError
from zero_offload.optim.unitwise.optimizer_copies import (
    SIZES,
    NotByUnitsError,
    check_class,
    copied,
    first_states,
    names_of_params,
    plain_step,
)
from zero_offload.optim.unitwise.shared_numbers import (
    ABSENT,
    GROUPS,
    NumberTree,
    Path,
    Values,
    changes,
    from_outline,
    is_same,
    outlined,
    told,
)
from zero_offload.optim.unitwise.state_rows import packages_of

Unit = Mapping[int, tuple[Tensor, Tensor | None, Any]]
"""By the parameter's number: its fp32 value, its gradient, and its state (None at first)."""


@dataclass(frozen=True)
class Numbers:
    """Hyperparameters and other numbers of an optimizer at one moment, and the members of its groups."""

    values: Values
    members: tuple[tuple[int, ...], ...]
    """Numbers of parameters, group by group."""


class Twin:
    """A copy of one optimizer. One thread uses it at a time; `capture` and `publish` belong to the program's."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[Tensor],
        *,
        kind: type[Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """`params` are all that its groups may have. `kind` is its class, where the object's has become another.
        `device`: where values, gradients and states are.

        Raises ConfigError, naming the class, for an optimizer that cannot be stepped so.
        """
        self.kind: type[Any] = type(optimizer) if kind is None else kind
        check_class(self.kind)
        self._optimizer = optimizer
        self._numbers_of = {id(param): number for number, param in enumerate(params)}
        self.device = torch.device(device)
        self._memory = torch.zeros((), dtype=torch.float32, device=device)
        self._stand_ins = [self._stand_in(param) for param in params]
        self._packages = packages_of(self.kind)
        self._call = self._step = plain_step(self.kind)
        for group in optimizer.param_groups:
            for param in group["params"]:
                self._number_of(param)
        self._copy = copied(optimizer, self.kind, list(zip(params, self._stand_ins, strict=True)))
        self._first_states = {
            self._number_of(param): state for param, state in first_states(optimizer, self.kind).items()
        }
        self._groups: list[dict[str, Any]] = list(self._copy.param_groups)
        ids = {id(stand_in) for stand_in in self._stand_ins}
        self._tree = NumberTree(self._groups, vars(self._copy), self._copy.state, ids, self._packages)
        self._walking = False
        for key, value, _ in self._tree.entries_of_params():
            if any(id(tensor) not in ids for tensor in _tensors_in(value)):
                raise self._refused(f"it keeps tensors of parameters beside `state` ({_named(key)})")

    def capture(self) -> Numbers:
        """Take the numbers of the program's object, which may change from here on."""
        optimizer = self._optimizer
        if entry := SIZES.get(self.kind.__module__.partition(".")[0]):
            for group in optimizer.param_groups:
                group.setdefault(entry, sum(param.numel() for param in group["params"]))
        members = tuple(tuple(map(self._number_of, group["params"])) for group in optimizer.param_groups)
        return Numbers(self._users().read(), members)

    @contextmanager
    def step(self, numbers: Numbers, call: Callable[[Any], object] | None = None) -> Iterator[Walk]:
        """Walk the units of one step with these numbers: each parameter is in one unit at most. `call`: another method
        of the class than its step, such as `eval`."""
        assert not self._walking, "one walk at a time"
        self._walking, self._call = True, self._step if call is None else call
        try:
            self._match_groups(numbers)
            self._tree.write(numbers.values)
            walk = Walk(self, numbers)
            yield walk
            self._tree.write_changes(walk.changed)
        finally:
            self._walking = False

    def publish(self, walk: Walk) -> None:
        """Give the program's object the numbers that a walk has changed, and no others."""
        if walk.changed:
            self._users().write_changes(walk.changed)

    def restore(self, values: Values) -> None:
        """Give the program's object these numbers. Raises LookupError where it has no place for one."""
        self._users().write_changes(values)

    def first_state(self, number: int) -> Any:
        """A copy of the state that the optimizer's constructor made of a parameter; None if it made none."""
        return copy.deepcopy(self._first_states.get(number), {}) if number in self._first_states else None

    def run(self, unit: Unit, numbers: Numbers) -> tuple[dict[int, Any], Values]:
        """Step one unit; return its states, and the numbers that changed, which are put back."""
        optimizer, before = self._copy, numbers.values
        active = []
        names: list[tuple[dict[str, Any], dict[str, list[str]]]] = []
        for group, members in zip(self._groups, numbers.members, strict=True):
            at = [position for position, number in enumerate(members) if number in unit]
            group["params"] = [self._stand_ins[members[position]] for position in at]
            if at:
                active.append(group)
                if found := names_of_params(group, len(members)):
                    names.append((group, found))
                    group.update((key, [texts[position] for position in at]) for key, texts in found.items())
        assert sum(len(group["params"]) for group in active) == len(unit), "each parameter is in one group"
        optimizer.param_groups[:] = active
        try:
            for number, (value, grad, state) in unit.items():
                stand_in = self._stand_ins[number]
                stand_in.data, stand_in.grad = value, grad
                state = self.first_state(number) if state is None else state
                if state is not None:
                    optimizer.state[stand_in] = state
            try:
                self._call(optimizer)
            finally:
                for group, texts in names:
                    group.update(texts)
            for number, (value, _, _) in unit.items():
                self._keep_value(number, value)
            states = {number: self._tree.apart(optimizer.state.pop(self._stand_ins[number], None)) for number in unit}
            self._check_states()
            now = self._tree.read()
            self._drop_entries(unit)
            changed = changes(before, now)
            if changed:
                self._tree.write(before, now)
            return states, changed
        finally:
            for number in unit:
                stand_in = self._stand_ins[number]
                stand_in.grad = None
                stand_in.data = self._memory.expand(stand_in.shape)
                optimizer.state.pop(stand_in, None)
            optimizer.param_groups[:] = self._groups

    def _stand_in(self, param: Tensor) -> nn.Parameter:
        made = nn.Parameter(self._memory.expand(param.shape))
        # Programs mark parameters by attributes, which some optimizers read.
        marks = {key: value for key, value in vars(param).items() if type(value) in (bool, int, float, str)}
        vars(made).update({key: value for key, value in marks.items() if not key.startswith("_")})
        return made

    def _number_of(self, param: Any) -> int:
        if (number := self._numbers_of.get(id(param))) is None:
            raise ConfigError(
                f"{self.kind.__name__} has a parameter of shape {tuple(param.shape)} that is not of this model; give "
                "it an optimizer of its own"
            )
        return number

    def _users(self) -> NumberTree:
        """The numbers of the program's object."""
        content: Any = vars(self._optimizer)
        return NumberTree(
            self._optimizer.param_groups, content, content["state"], self._numbers_of.keys(), self._packages
        )

    def _match_groups(self, numbers: Numbers) -> None:
        """Have as many groups as the program's object."""
        while len(self._groups) < len(numbers.members):
            self._groups.append({"params": []})
        del self._groups[len(numbers.members) :]
        self._copy.param_groups[:] = self._groups

    def _keep_value(self, number: int, value: Tensor) -> None:
        """Write a result to where the value is, if the optimizer has put another tensor there."""
        data = self._stand_ins[number].data
        if data.shape != value.shape or data.dtype != value.dtype:
            raise self._refused(
                f"its step makes a parameter of shape {tuple(value.shape)} and {value.dtype} one of shape "
                f"{tuple(data.shape)} and {data.dtype}"
            )
        if data.data_ptr() != value.data_ptr() or data.stride() != value.stride():
            value.copy_(data)

    def _check_states(self) -> None:
        for key in [key for key in self._copy.state if isinstance(key, Tensor)]:
            del self._copy.state[key]
            raise self._refused("its step makes states of parameters that are not in its groups then")

    def _drop_entries(self, unit: Unit) -> None:
        """Drop what the step has noted of parameters beside `state`: views of them, which are made anew."""
        memory = {
            tensor.untyped_storage().data_ptr()
            for number in unit
            for tensor in (self._stand_ins[number].data, self._stand_ins[number].grad, *unit[number][:2])
            if tensor is not None
        }
        for key, value in self._tree.drop_entries_of_params():
            for tensor in _tensors_in(value):
                if tensor.untyped_storage().data_ptr() not in memory:
                    raise self._refused(f"it keeps tensors of parameters beside `state` ({_named(key)})")
        for key, _, is_changed in self._tree.entries_of_params():
            if is_changed:
                raise self._refused(f"it keeps numbers of parameters beside `state` ({_named(key)})")

    def _refused(self, reason: str) -> NotByUnitsError:
        return NotByUnitsError(self.kind, reason)


class Walk:
    """One step of a twin, unit by unit."""

    def __init__(self, twin: Twin, numbers: Numbers) -> None:
        self._twin, self._numbers = twin, numbers
        self._of_groups: dict[int, Values] = {}
        self._of_all: Values | None = None
        self._stepped: set[int] = set()

    @property
    def changed(self) -> Values:
        """Numbers that the units have changed so far, by path."""
        found = dict(self._of_all or {})
        for values in self._of_groups.values():
            found.update(values)
        return found

    def unit(self, unit: Unit) -> dict[int, Any]:
        """Step these parameters: values change in place. Return their states, None where there is none.

        Raises ConfigError if this unit leaves other shared numbers than one before it: then they were not shared.
        """
        assert self._stepped.isdisjoint(unit), "a parameter is stepped once"
        self._stepped.update(unit)
        if not unit:
            return {}
        states, changed = self._twin.run(unit, self._numbers)
        parts: dict[int | None, Values] = {None: {}}
        for number, members in enumerate(self._numbers.members):
            if any(member in unit for member in members):
                parts[number] = {}
        for path, value in changed.items():
            parts.setdefault(path[1] if path[0] == GROUPS else None, {})[path] = value
        for group, values in parts.items():
            self._keep(group, values)
        return states

    def left(self) -> list[Any]:
        """The numbers that the units have left, of all and by group, as `state_rows.pack` takes them."""
        of_all: list[tuple[int | None, Values]] = [] if self._of_all is None else [(None, self._of_all)]
        left = []
        for group, values in (*of_all, *self._of_groups.items()):
            gone = [path for path, value in values.items() if value is ABSENT]
            left.append([group, gone, outlined({path: value for path, value in values.items() if value is not ABSENT})])
        return left

    def merge(self, others: Iterable[list[Any]]) -> None:
        """Take over what `left` gives where other units of this step are stepped. Raises ConfigError as `unit`."""
        for left in others:
            for group, gone, values in left:
                self._keep(group, from_outline(values) | dict.fromkeys(gone, ABSENT))

    def _keep(self, group: int | None, values: Values) -> None:
        known = self._of_all if group is None else self._of_groups.get(group)
        if known is not None:
            self._check_same(known, values)
        elif group is None:
            self._of_all = values
        else:
            self._of_groups[group] = values

    def _check_same(self, known: Values, values: Values) -> None:
        for path in {**known, **values}:
            one, other = (self._value(each, path) for each in (known, values))
            if not is_same(one, other):
                raise NotByUnitsError(
                    self._twin.kind,
                    f"one unit leaves {_short(one)} in {told(path)}, another {_short(other)}: its parameters depend on "
                    "each other",
                    only_together=True,
                )

    def _value(self, values: Values, path: Path) -> Any:
        return values[path] if path in values else self._numbers.values.get(path, ABSENT)


def _named(key: Any) -> str:
    return f"of a parameter of shape {tuple(key.shape)}" if isinstance(key, Tensor) else f"in {key}"


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


def _short(value: Any) -> str:
    return repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"
