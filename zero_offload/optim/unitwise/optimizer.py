"""`unitwise`: an optimizer of others steps offloaded parameters, unit by unit.

Owns the optimizer as the program sees it: the same object, of a subclass whose steps are walks. A twin (`twin.py`)
steps whole parameters of one section after the other, with the bits of one joint step. States rest as rows of shards,
and `optimizer.state` reads and writes them there.
"""

from __future__ import annotations

import base64
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import cache, partial, wraps
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zero_offload.base.alike import Compared, word_of
from zero_offload.base.errors import CheckpointError, ConfigError
from zero_offload.base.host import host_reserved
from zero_offload.base.inputs import check_optimizer
from zero_offload.base.problems import warn_user
from zero_offload.optim.optimizer import FusedOptimizer, check_step, fill_group, zero_grads
from zero_offload.optim.param_groups import Names, PackedNumbers, group_records
from zero_offload.optim.unitwise import grades
from zero_offload.optim.unitwise.check import UnitCheck
from zero_offload.optim.unitwise.products import multiplies_matrices
from zero_offload.optim.unitwise.shared_numbers import GROUPS, Values, changes, from_outline, outlined, told
from zero_offload.optim.unitwise.state_rows import packages_of, packed, unpack
from zero_offload.optim.unitwise.state_sizes import state_sizes
from zero_offload.optim.unitwise.twin import Numbers, Twin
from zero_offload.optim.unitwise.walk_step import HOST, WalkStep, name_of
from zero_offload.standins.owners import by_owner, check_adopted, dropped_error, is_dropped, owner_of
from zero_offload.standins.sources import Owner

_WALK = "_zo_walker"
"""The attribute of an optimizer that holds its `_Walker`."""


_CHECKED = ("steps of the check",)
"""The path, among an optimizer's numbers, of `UnitCheck.steps`."""
UNITS = ("each", "all")
MODES = ("train", "eval")
"""Methods of schedule-free optimizers, which change every parameter."""


def unitwise(optimizer: torch.optim.Optimizer, units: str = "each") -> torch.optim.Optimizer:
    """Let an optimizer of torch or of another library step offloaded parameters; returns it, the same object.

        optimizer = zo.unitwise(torch.optim.Muon(model.parameters(), lr=1e-3))

    Schedulers, Trainer, accelerate and `GradScaler` go on with it; call this before a scheduler is built. In a step the
    optimizer gets fp32 masters, gradients and states of a few parameters at a time. In fp32 the weights have the bits
    of the same optimizer on plain parameters. With bf16 or fp16 they have those of a loop over fp32 masters. States
    rest where `optimizer=` of `OffloadConfig` places them, and generations and checkpoints keep them. `optimizer.state`
    shows copies: a change is assigned back.

    The class is tested first, on tiny parameters: whether steps of units are those of one joint step. The test takes up
    to 10 s of processor time, once for each class and its numbers. Where a period of the optimizer is longer than the
    test, a warning says so. Then copies of two units are compared in the run, at growing intervals and at that period.
    `units="all"` steps all parameters at once, for optimizers whose parameters depend on each other. Masters, gradients
    and states are all in memory then.

    Raises ConfigError, with what differed, for an optimizer that cannot be stepped unit by unit. So it does for an
    optimizer of `zero_offload`, which needs no such call. Parameters that are not offloaded, and DTensors that tensor
    parallelism divides, are refused. The same holds for overlap="backward", and for `units="all"` on
    several ranks that divide states.

    The host makes the steps. A GPU makes them where a class multiplies matrices, as Muon does, and where its states
    rest there.
    """
    return let_step("zo.unitwise", optimizer, units)


def let_step(
    call: str, optimizer: torch.optim.Optimizer, units: str = "each", known: grades.Graded | None = None
) -> torch.optim.Optimizer:
    """As `unitwise`, for `call`; without a test of the class where its result is `known`."""
    if not hasattr(optimizer, "param_groups"):
        given = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise ConfigError(
            f"{call} takes one optimizer that is built, not {given}; write "
            f"{call}(torch.optim.NAdam(model.parameters(), lr=1e-3)), or zo.AdamW(model.parameters()) without it"
        )
    optimizer = check_optimizer(call, optimizer)
    if units not in UNITS:
        raise ConfigError(f"{call}(units={units!r}): use 'each' or 'all'")
    if isinstance(optimizer, Unitwise):
        if optimizer.units != units:
            raise ConfigError(
                f"{call}(units={units!r}): this {type(optimizer).__name__} steps with units={optimizer.units!r} "
                "already; build another one"
            )
        return optimizer
    _check_optimizer(call, optimizer)
    owners = _owners_of(call, optimizer)
    for owner in owners:
        owner.check_unitwise(call, together=units == "all")
    _check_made_at_build(call, optimizer)
    if units == "all":
        _check_one_model(call, owners)
    check = None if units == "all" else UnitCheck(optimizer, known or _tested(call, optimizer))
    kind, before = type(optimizer), optimizer.state
    sizes = cache(lambda: state_sizes(optimizer).nbytes)
    for owner, params in owners.items():
        with owner.together(call):
            owner.states.check_rows(params, sizes, name_of(kind))
    held = {param: state for param, state in before.items() if isinstance(param, nn.Parameter)}
    vars(optimizer)["state"] = defaultdict(dict, _shared_of(optimizer))
    try:
        walker = _Walker(optimizer, kind, check)
    except BaseException:
        vars(optimizer)["state"] = before
        raise
    optimizer.__class__ = _class_of(cast(Any, kind))
    vars(optimizer)[_WALK] = walker
    for owner, params in owners.items():
        owner.states.add(params, ())
        owner.train_with(cast(Any, optimizer), params)
    for param, state in held.items():
        if param not in optimizer.state:  # else a generation has it, which the program goes on from
            optimizer.state[param] = state
    return optimizer


def _check_optimizer(call: str, optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, FusedOptimizer):
        raise ConfigError(f"{call}: zo.{name} steps offloaded parameters as it is; leave the call out")
    manager = getattr(optimizer, "mng", None)  # of bitsandbytes
    if any(getattr(manager, each, None) for each in ("pid2config", "index2config", "module_weight_config_triple")):
        raise ConfigError(
            f"{call}: bitsandbytes' GlobalOptimManager has settings of single parameters, which it finds by their ids "
            f"and places. A step unit by unit would use others. Leave them out, or give those parameters a {name} of "
            "their own with other arguments"
        )
    if "step" in vars(optimizer):
        raise ConfigError(
            f"{call}: a scheduler, or other code, has replaced step of this {name} already; call {call}(optimizer) "
            "first, and build the scheduler then"
        )


def _owners_of(call: str, optimizer: torch.optim.Optimizer) -> dict[Owner, list[nn.Parameter]]:
    """The offloaded models of an optimizer's parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in filter(is_dropped, params):
        raise dropped_error(param)
    check_adopted(call, params)
    owners = by_owner(params)
    if ordinary := owners.pop(None, []):
        raise ConfigError(
            f"{call}: {len(ordinary)} of {len(params)} parameters are not offloaded (the first has shape "
            f"{tuple(ordinary[0].shape)}). Call zo.offload(model, config) before the optimizer is built, and give "
            "other parameters an optimizer of their own"
        )
    return {owner: owned for owner, owned in owners.items() if owner is not None}


def _has_modes() -> bool:
    """True if this thread computes in another way than a new one: under autocast, with modes of torch, or without
    subnormal numbers."""
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    return modes > 0 or torch.is_autocast_enabled("cpu") or sys.float_info.min / 2 == 0.0


def _check_one_model(call: str, owners: Mapping[Owner, object]) -> None:
    """Raise where "all" parameters are those of several models, each of which would step by itself."""
    if len(owners) > 1:
        raise ConfigError(
            f"{call}(units='all') steps all parameters of one offloaded model together, and these are of "
            f"{len(owners)}. Offload one module that has them all"
        )


def _check_made_at_build(call: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise for states of a number other than 0 that were made beside 16-bit parameters. The number was rounded there,
    and beside fp32 masters it is not."""
    for param, state in optimizer.state.items():
        for name, value in state.items() if isinstance(state, Mapping) and isinstance(param, nn.Parameter) else ():
            if not isinstance(value, Tensor) or value.dtype != param.dtype or value.dtype == torch.float32:
                continue
            if value.numel() > 1 and (first := value.flatten()[0].item()) and bool((value == first).all()):
                raise ConfigError(
                    f"{call}: {type(optimizer).__name__} has filled {name} with {first:g} when it was built, in "
                    f"{value.dtype}; a loop over fp32 masters has the number in fp32. Build it without that number, "
                    "or offload with precision='fp32'"
                )


def _shared_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Entries of `state` whose keys are no parameters."""
    return {key: state for key, state in optimizer.state.items() if not isinstance(key, nn.Parameter)}


def _tested(call: str, optimizer: torch.optim.Optimizer) -> grades.Graded:
    """Raise for a class that cannot be stepped unit by unit."""
    name = type(optimizer).__name__
    verdict = grades.grade(_in_training(optimizer), seconds=grades.SECONDS)
    if verdict.grade is grades.Grade.UNPROVEN and optimizer.state:
        # States of steps on plain parameters say nothing of tiny ones.
        content: Any = vars(optimizer)
        held, content["state"] = content["state"], defaultdict(dict, _shared_of(optimizer))
        try:
            verdict = grades.grade(_in_training(optimizer), seconds=grades.SECONDS)
        finally:
            content["state"] = held
    if not verdict.may_walk:
        told, instead = verdict.reason, "one of zero_offload's, such as zo.AdamW"
        if verdict.together:
            told = verdict.describe()
            instead = f"{call}(optimizer, units='all') where masters, gradients and states of the whole model fit "
            instead += "into memory"
        raise ConfigError(f"{call}: {name} cannot be stepped unit by unit: {told}. Use another optimizer, or {instead}")
    if verdict.beyond:
        warn_user(
            f"{call}: steps of {name} unit by unit are unproven beyond step {verdict.steps} ({verdict.beyond}). Copies "
            "of two units are compared in the run then"
        )
    return verdict


def _in_training(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer; of those with `train`, a copy that trains. It has no state, so no parameter changes."""
    kind: Any = type(optimizer)
    if not callable(getattr(kind, "train", None)):
        return optimizer
    made: Any = object.__new__(kind)
    groups = [dict(group) for group in optimizer.param_groups]
    vars(made).update(vars(optimizer) | {"param_groups": groups, "state": defaultdict(dict)})
    made.train()
    return cast(torch.optim.Optimizer, made)


@cache
def _class_of(kind: Any) -> Any:
    """The class by which an optimizer of this class steps unit by unit: its subclass, and of the same name."""
    # An object takes another class only if that begins with its own: then the two lie alike in memory. So methods that
    # come before its own are entries of the class, and of no base: `super()` of its own must not find them.
    names = {name: value for name, value in vars(_Methods).items() if name not in ("__dict__", "__weakref__")}
    names |= {
        "plain_class": kind,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    names |= {name: _walked(kind, name) for name in MODES if callable(getattr(kind, name, None))}
    return type(kind.__name__, (kind, Unitwise), names)


def _walked(kind: Any, name: str) -> Any:
    """A method of an optimizer's class that changes its parameters, as a walk."""
    method = getattr(kind, name)

    @wraps(method)
    def walked(self: Unitwise, *args: Any, **kwargs: Any) -> None:
        vars(self)[_WALK].change(f"{kind.__name__}.{name}", lambda made: method(made, *args, **kwargs))

    return walked


class Unitwise(PackedNumbers, torch.optim.Optimizer):
    """An optimizer that `unitwise` has taken."""

    plain_class: Any
    """Its own class, whose methods step no units."""

    @property
    def _walker(self) -> _Walker:
        walker: _Walker = vars(self)[_WALK]
        return walker

    @property
    def units(self) -> str:
        """The argument of `unitwise`."""
        return self._walker.units


class _Methods(Unitwise):
    """The methods that stand before those of its own class."""

    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient, unit by unit; their gradients are used up."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._walker.step(f"{type(self).__name__}.step")
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `zo.AdamW.zero_grad`."""
        zero_grads(self._walker.params(), set_to_none=set_to_none)

    @property
    def state(self) -> Any:
        """The states of each parameter: copies of what rests on its tier. A change is assigned back."""
        return self._walker.states

    @state.setter
    def state(self, given: Mapping[Any, Any]) -> None:
        if given is not self._walker.states:
            self._walker.states.replace(given)

    def state_dict(self) -> dict[str, Any]:
        """As that of the optimizer on plain parameters. All states are in memory then, and every rank has all of them.

        bf16 parameters have a "residual" beside their states that completes them to their fp32 master, fp16 parameters
        their "master". With the model's own state dict nothing is lost.
        """
        return self._walker.state_dict(partial(self.plain_class.state_dict, self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a `state_dict` of this class: groups, and the states of each parameter as they are."""
        self._walker.load(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, for parameters of offloaded models."""
        before = len(self.param_groups)
        self.plain_class.add_param_group(self, param_group)
        if (walker := vars(self).get(_WALK)) is not None:
            walker.add_groups(self.param_groups[before:])

    def packed_numbers(self) -> str:
        return self._walker.packed_numbers()

    def restore_numbers(self, packed: str) -> None:
        self._walker.restore_numbers(packed)

    def compared(self) -> Compared:
        return self._walker.compared()

    def hypers(self) -> Mapping[nn.Parameter, Any]:
        return {}


class _Walker:
    """Twin, states and check of an optimizer that `unitwise` has taken."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type, check: UnitCheck | None) -> None:
        """`check`: None for steps of all parameters at once."""
        self._check = check
        self._reference = weakref.ref(optimizer)
        self._class = kind
        self.kind = name_of(kind)
        self.packages = packages_of(kind)
        self.states = RowStates(self)
        self._names = Names()
        self._params = self.params()
        self._twins: dict[torch.device, Twin] = {}
        """By where they step."""
        self._left: Values | None = None
        """The numbers that the last step has left, if no state took more room in it."""
        self._waits: list[Callable[[], None]] = []
        """For the end of the last step, which may go on beside the program."""
        owners = list(_owners_of("zo.unitwise", optimizer))
        on_host = all(owner.step_device == HOST for owner in owners)
        # Where all step together, copies of all would be on the GPU.
        may_move = not on_host and check is not None
        self._has_products = may_move and multiplies_matrices(_in_training(optimizer), kind=kind)
        self._twin_on(self._device(owners))

    @property
    def units(self) -> str:
        return UNITS[self._check is None]

    @property
    def _optimizer(self) -> Any:
        return self._reference()

    @property
    def shared(self) -> dict[Any, Any]:
        """Entries of `state` whose keys are no parameters."""
        kept: dict[Any, Any] = vars(self._optimizer)["state"]
        return kept

    def params(self) -> list[nn.Parameter]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def step(self, call: str) -> None:
        self.states.check_unchanged()
        owners = _owners_of(call, self._optimizer)
        self._wait()
        with ExitStack() as met:
            for owner in owners:
                met.enter_context(owner.together_in_step(call))
            check_step(owners)
            for owner in owners:
                owner.compare("optimizer", self.compared)
            if self._check is None:
                _check_one_model(call, owners)
        device = self._device(list(owners))
        twin = self._twin_on(device)
        captured = twin.capture()
        comparison = None if self._check is None else self._check.begin(partial(self._new_twin, device), captured)
        stepper = WalkStep(
            twin,
            captured,
            self._params,
            self._optimizer.param_groups,
            comparison=comparison,
            steps_all=self._check is None,
            may_go_on=comparison is None and len(owners) == 1 and self._is_settled(captured) and not _has_modes(),
            records=partial(self._records, owners),
        )
        try:
            for owner, params in owners.items():
                owner.walk(params, stepper, self._optimizer)
        except BaseException as error:
            self._left = None
            stepper.give_up(error)
            raise
        stepper.close()
        self._left = None if stepper.grew else {**captured.values, **stepper.changed}
        self._waits = [owner.wait_for_walk for owner in owners]

    def _is_settled(self, captured: Numbers) -> bool:
        """True if no state is expected to take more room in the step that begins. None has in the last one, and the
        program has switched nothing on or off since."""
        if self._check is None or not self._check.is_settled or self._left is None:
            return False
        changed = changes(self._left, captured.values)
        return all(path[-1] == "lr" or _are_on(self._left.get(path), value) for path, value in changed.items())

    def _records(self, owners: Iterable[Owner]) -> list[dict[str, Any]]:
        makes_generations = any(owner.makes_generations for owner in owners)
        return group_records(self._optimizer) if makes_generations else []

    def _wait(self) -> None:
        """Return when the twin is not stepped any more."""
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()

    def change(self, call: str, method: Callable[[Any], object]) -> None:
        """Let a method of the class change parameters between steps, one after the other."""
        self.states.check_unchanged()
        self._wait()
        twin, owners = self._twin_on(HOST), _owners_of(call, self._optimizer)
        numbers = {param: number for number, param in enumerate(self._params)}
        with twin.step(twin.capture(), method) as walk:
            for owner, params in owners.items():
                for param in params:
                    master = owner.access.read_value(param, master=True).to("cpu", torch.float32)
                    state = owner.states.read_row(param, self.packages)
                    value, before = master.clone(), packed(state)
                    (after,) = walk.unit({numbers[param]: (value, None, state)}).values()
                    if not torch.equal(value.view(torch.int32), master.view(torch.int32)):
                        owner.access.write_value(param, value)
                    if not torch.equal(packed(after), before):
                        owner.states.write_row(param, after, self.kind)
        twin.publish(walk)

    def _device(self, owners: Sequence[Owner]) -> torch.device:
        """Where steps are made: on a GPU that computes a model, if states rest there, or for products of matrices."""
        gpu = next((owner.step_device for owner in owners if owner.step_device.type != "cpu"), None)
        if gpu is not None and (self._has_products or any(owner.has_states_on_device for owner in owners)):
            return gpu
        return HOST

    def _any_twin(self) -> Twin:
        return self._twin_on(next(iter(self._twins), HOST))

    def _twin_on(self, device: torch.device) -> Twin:
        """The twin that steps there, anew where the param groups have other parameters."""
        if self._params != (params := self.params()):
            self._params, self._twins = params, {}
        if device not in self._twins:
            self._twins[device] = self._new_twin(device)
        return self._twins[device]

    def _new_twin(self, device: torch.device) -> Twin:
        return Twin(self._optimizer, self._params, kind=self._class, device=device)

    def add_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the last param groups."""
        try:
            owners = _owners_of("add_param_group", self._optimizer)
            for owner in owners:
                owner.check_unitwise("add_param_group", together=self._check is None)
        except BaseException:
            del self._optimizer.param_groups[-len(groups) or None :]
            raise
        mine = {param for group in groups for param in group["params"]}
        for owner, params in owners.items():
            if new := [param for param in params if param in mine]:
                owner.states.add(new, ())
                owner.train_with(self._optimizer, new)

    def state_dict(self, made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state dict as torch's method has `made` it, with the parts that complete masters."""
        self.states.check_unchanged()
        found = made()
        states = {key: _plain(state) for key, state in found["state"].items()}
        keys = (key for group in found["param_groups"] for key in group["params"])
        for key, param in zip(keys, self.params(), strict=True):
            owner = owner_of(param)
            if owner is not None and (parts := owner.states.read_beside(param)):
                states[key] = {**states.get(key, {}), **parts}
        found["state"] = states
        return found

    def load(self, state_dict: Mapping[str, Any]) -> None:
        given = dict(state_dict)
        for hook in vars(self._optimizer).get("_optimizer_load_state_dict_pre_hooks", {}).values():
            given = hook(self._optimizer, given) or given
        groups, own = given["param_groups"], self._optimizer.param_groups
        sizes, mine = [len(each["params"]) for each in groups], [len(each["params"]) for each in own]
        if sizes != mine:
            raise ConfigError(
                f"{self._class.__name__}.load_state_dict: the state dict has param groups of {sizes} parameters, this "
                f"optimizer has {mine}"
            )
        by_key = dict(zip((key for each in groups for key in each["params"]), self.params(), strict=True))
        states = {by_key.get(key, key): state for key, state in given["state"].items()}
        beside = {param: parts for param, state in states.items() if (parts := _beside(param, state))}
        for param, parts in beside.items():
            states[param] = {name: each for name, each in states[param].items() if name not in parts}
        self.states.replace(states)
        for param, parts in beside.items():
            if (owner := owner_of(param)) is not None:
                owner.states.write_beside(param, parts)
        for mine_group, theirs in zip(own, groups, strict=True):
            params = mine_group["params"]
            mine_group.update({key: tree_map(_copied, each) for key, each in theirs.items() if key != "params"})
            mine_group["params"] = params
            fill_group(mine_group, self._optimizer.defaults)
        for hook in vars(self._optimizer).get("_optimizer_load_state_dict_post_hooks", {}).values():
            hook(self._optimizer)

    def compared(self) -> Compared:
        """Class, groups and numbers, which ranks have alike."""
        groups = self._optimizer.param_groups
        members = [self._names.digest(group["params"]) for group in groups]
        return Compared(word_of((self.kind, members, self.packed_numbers())), self._texts)

    def _texts(self) -> dict[str, str]:
        groups = self._optimizer.param_groups
        texts = {"the optimizer": self._class.__name__, "the number of param groups": str(len(groups))}
        for number, group in enumerate(groups):
            texts[f"params of group {number}"] = self._names.describe(group["params"])
            texts |= {f"{name} of group {number}": repr(value) for name, value in group.items() if name != "params"}
        found = self._any_twin().capture().values
        return texts | {told(path): repr(value) for path, value in found.items() if path[0] != GROUPS}

    def packed_numbers(self) -> str:
        values = self._any_twin().capture().values
        row = packed(outlined(values if self._check is None else {**values, _CHECKED: self._check.steps}))
        return base64.b64encode(row.numpy().tobytes()).decode()

    def restore_numbers(self, packed: str) -> None:
        data = bytearray(base64.b64decode(packed))
        row = host_reserved([len(data)], torch.uint8)
        row.copy_(torch.frombuffer(data, dtype=torch.uint8))
        try:
            values = from_outline(unpack(row, self.packages))
            checked = values.pop(_CHECKED, 0)
            self._any_twin().restore(values)
            if self._check is not None:
                self._check.steps = checked
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._class.__name__} has no place for a number of the generation ({error!r}): another version of "
                "its package has written it. Install that one, or export the weights and start over from them"
            ) from error


class RowStates(MutableMapping[Any, Any]):
    """`optimizer.state` of parameters whose states rest as rows: entries are copies, and are assigned to be changed."""

    def __init__(self, walker: _Walker) -> None:
        self._walker = walker
        self._shown: list[tuple[weakref.ref[Tensor], int, nn.Parameter]] = []
        """Tensors that the program has, and their versions then."""

    def __getitem__(self, key: Any) -> Any:
        """An entry; empty where there is no state yet, as torch's is."""
        if not isinstance(key, nn.Parameter) or (owner := owner_of(key)) is None:
            return self._walker.shared[key]
        state = owner.states.read_row(key, self._walker.packages)
        return Shown({} if state is None else tree_map(partial(self._show, key), state))

    def _show(self, param: nn.Parameter, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._shown = [each for each in self._shown if each[0]() is not None]
            self._shown.append((weakref.ref(value), value._version, param))
        return value

    def check_unchanged(self) -> None:
        """Raise where the program has changed a copy: no step would see it."""
        for reference, version, param in self._shown:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                owner = owner_of(param)
                name = "a parameter" if owner is None else owner.places.name_of(param)
                raise ConfigError(
                    f"a tensor of optimizer.state of {name} was changed in place. It is a copy of what rests on its "
                    "tier, and the change would be lost. Assign it: entry = dict(optimizer.state[param]); change "
                    "entry; optimizer.state[param] = entry"
                )

    def __setitem__(self, key: Any, state: Any) -> None:
        if not isinstance(key, nn.Parameter):
            self._walker.shared[key] = state
            return
        if (owner := owner_of(key)) is None:
            raise ConfigError(
                f"optimizer.state of a parameter of shape {tuple(key.shape)}: an optimizer that zo.unitwise has taken "
                "keeps states of offloaded parameters there"
            )
        owner.states.write_row(key, _as_master(key, _plain(state)), self._walker.kind)
        self._shown = [each for each in self._shown if each[2] is not key]

    def replace(self, given: Mapping[Any, Any]) -> None:
        """Carry out `optimizer.state = given`."""
        kept = {key: _plain(state) for key, state in given.items()}
        for param in self._walker.params():
            if param in kept:
                self[param] = kept.pop(param)
            elif param in self:
                del self[param]
        for key, state in kept.items():
            self[key] = state

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        if not isinstance(key, nn.Parameter):
            del self._walker.shared[key]
            return
        owner = owner_of(key)
        assert owner is not None
        owner.states.reset([key])

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, nn.Parameter):
            return key in self._walker.shared
        owner = owner_of(key)
        return owner is not None and owner.states.has_row(key)

    def __iter__(self) -> Iterator[Any]:
        yield from list(self._walker.shared)
        yield from (param for param in self._walker.params() if param in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<states of {len(self)} parameters, which rest elsewhere>"


class Shown(dict[Any, Any]):
    """An entry of `optimizer.state`: a copy, which refuses changes that would be lost."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            "optimizer.state[param] is a copy of what rests on its tier, and this change would be lost. Assign the "
            "whole entry: entry = dict(optimizer.state[param]); change entry; optimizer.state[param] = entry"
        )

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = _refuse

    __ior__: Any = _refuse

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter(self.items())


def _are_on(before: Any, value: Any) -> bool:
    """True for two numbers, neither of which is 0: a momentum of 0 may have no state."""
    return all(isinstance(each, float) and each != 0 for each in (before, value))


def _plain(state: Any) -> Any:
    return dict(state) if isinstance(state, Mapping) else state


def _beside(param: Any, state: Any) -> dict[str, Tensor]:
    """The part of a state that completes a 16-bit value to its master."""
    if not isinstance(state, Mapping) or not isinstance(param, nn.Parameter):
        return {}
    name, dtype = {torch.bfloat16: ("residual", torch.int16), torch.float16: ("master", torch.float32)}.get(
        param.dtype, ("", torch.float32)
    )
    found = state.get(name)
    return {name: found} if isinstance(found, Tensor) and (found.dtype, found.shape) == (dtype, param.shape) else {}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _as_master(param: nn.Parameter, state: Any) -> Any:
    """A state that was made beside a 16-bit parameter, as it is made beside its fp32 master."""

    def wide(value: Any) -> Any:
        is_narrow = isinstance(value, Tensor) and value.dtype == param.dtype != torch.float32
        return value.float() if is_narrow and value.shape == param.shape else value

    return tree_map(wide, state)
