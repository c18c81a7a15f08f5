"""The common part of all optimizers: for offloaded parameters a launch, for ordinary ones one fused pass on the spot.

Owns hyperparameters (param groups) and the states of ordinary parameters; the states of offloaded ones are
their runtime's. `step` captures hyperparameters by value, so that a scheduler may change them while the update
is still running. A subclass says which rule its groups follow, and what torch does where there is no kernel.
"""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.alike import Compared, word_of
from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.base.host import host_tensor, host_zeros
from zero_offload.hardware.kernels.arguments import Hyper, Segment, UpdateTensors, address_of, kind_of
from zero_offload.hardware.kernels.choice import has_device_update
from zero_offload.hardware.kernels.grads import sum_of_squares
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update, update_on_device
from zero_offload.hardware.probe import kernel_threads
from zero_offload.optim.param_groups import Names, group_records, plain
from zero_offload.optim.state import (
    BESIDE,
    Entry,
    State,
    States,
    assign,
    check_assigned,
    check_shapes,
    reset,
    settled,
    tensors_of,
    write_offloaded,
)
from zero_offload.plan.tensor_parallel import is_dtensor
from zero_offload.standins.checkpointed import INSTEAD, refuse_full
from zero_offload.standins.owners import by_owner, check_adopted, dropped_error, is_dropped, is_removed, owner_of
from zero_offload.standins.sources import Owner
from zero_offload.standins.state_tensor import STEP


class ArgumentError(ConfigError, ValueError, RuntimeError):
    """An argument that torch's optimizer refuses too, by ValueError or RuntimeError: programs may catch those."""


class FusedOptimizer(torch.optim.Optimizer):
    """On offloaded parameters master and states are kept as the model's `Precision` says, wherever they rest. The
    master is fp32 (bf16 compute: the bf16 half and a residual); states are fp32, bf16 or compact. They begin at zero
    with each optimizer that is built; after a resume or a load they are what was loaded.

    On ordinary parameters it is a plain optimizer. Contiguous fp32 and bf16 parameters are updated in one fused pass
    each. A CPU uses the kernels of offloaded parameters. A GPU that Triton compiles for uses the same arithmetic. That
    is launched on the device's current stream, and the host waits for nothing, unless a learning rate is a tensor
    there. States are fp32, and bf16 parameters get an fp32 master by the same means as offloaded ones, kept in `state`.
    All other parameters, DTensors among them, and all on a GPU without Triton, are updated by torch's functions, with
    states in the parameter's dtype.

    `foreach`, `fused` and `capturable` choose between torch's loops for one update, and are without effect here: the
    update is fused as it is. `differentiable=True` makes `step` raise: no graph goes through an update in place. Torch
    raises there too, for parameters that are leaves.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._check(defaults)
        self._versions: dict[nn.Parameter, int] = {}
        """Versions of ordinary bf16 parameters after their last update. Another version means that the program has
        changed the value, and the residual no longer completes it.
        """
        self._is_built = False
        self._names = Names()
        self._states = States(self)
        super().__init__(params, defaults)
        self._is_built = True
        _register(self, self.param_groups)

    # Methods of a subclass

    @abstractmethod
    def _problems(self, group: Mapping[str, Any]) -> Iterator[str]:
        """Problems of a group's hyperparameters, each with a remedy."""

    @abstractmethod
    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        """A group's rule and its numbers, by value."""

    @abstractmethod
    def _torch_update(self, param: nn.Parameter, state: State, group: Mapping[str, Any], is_new: bool) -> None:
        """Update in torch's own way, for layouts and dtypes without a kernel. Missing entries of `state` are zero."""

    def _count_step(self, state: State, is_new: bool) -> int:
        """Number, from 1 on, of the step that an ordinary parameter takes now; kept in `state` as torch does."""
        state["step"] = steps_of(state) + 1
        return int(state["step"])

    counts_steps = True
    """True if torch's optimizer of this name keeps `step`."""

    # Calls of users

    @property
    def state(self) -> States:
        """The states of each parameter. The entry of an offloaded one shows what rests on its tier. Reading takes the
        memory of one parameter. A change, a replacement or a deletion takes place on the tier.

        Raises ConfigError, and changes nothing, for entries that the optimizer could not go on with. Values of
        parameters that several ranks divide are not read: ZeroOffloadError; entries are deleted there on all ranks.
        """
        return self._states

    @state.setter
    def state(self, given: Mapping[Any, Any]) -> None:
        if given is self._states:
            return
        away = list(self.hypers()) if self._is_built else []
        entries = {param: given[param] for param in away if param in given}
        for param, entry in entries.items():
            check_assigned(self, param, entry)
        entries = {
            param: entry if isinstance(entry, Entry) and entry.rests_at(param) else settled(entry, param)
            for param, entry in entries.items()
        }
        self._use_states({key: entry for key, entry in given.items() if key not in entries})
        reset(param for param in away if param not in entries)
        for param, entry in entries.items():
            assign(self, param, entry)

    def _use_states(self, ordinary: Mapping[Any, Any]) -> None:
        """Keep states in another mapping. The one before is torch's dict as it was, for a program that holds it."""
        before = weakref.ref(self._states)
        self._states, states = States(self), self._states
        del states
        if (held := before()) is not None:
            held.keep()
        dict.update(self._states, ordinary)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for removed in filter(is_removed, group["params"]):
                raise dropped_error(removed)
            self._check(group)
            if self._is_built:
                _register(self, [group])
        except BaseException:
            self.param_groups.pop()
            raise

    def _check(self, group: Mapping[str, Any]) -> None:
        if problems := [*self._problems(group), *_loop_problems(group)]:
            raise ArgumentError(f"{type(self).__name__}: " + "; ".join(problems))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Offloaded ones may still be updated after it returns, and their
        gradients are used up.

        Raises ConfigError for what no update takes (sparse gradients, states of another shape), before anything is
        updated.
        """
        if any(group.get("differentiable") for group in self.param_groups):
            raise ArgumentError(
                f"{type(self).__name__}(differentiable=True): no graph goes through a step, which changes parameters "
                "in place; build it without, and differentiate torch.func.functional_call instead"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        owners, others = self._by_owner()
        with ExitStack() as met:
            for owner in owners:
                met.enter_context(owner.together_in_step(f"{type(self).__name__}.step"))
            hypers = self.hypers()
            ordinary = self._ordinary_with_grads(hypers)
            check_step(owners)
            groups = group_records(self) if any(owner.makes_generations for owner in owners) else []
            for owner in owners:
                owner.compare("optimizer", self.compared)
        if owners and others:
            grads = [param.grad for param, _, _ in ordinary if param.grad is not None]
            # Ranks that train apart are wrong on all of them, without any other sign.
            next(iter(owners)).check_ordinary(f"{type(self).__name__}.step", lambda: squares_of(grads))
        for of_ordinary in ordinary:
            self._update_ordinary(*of_ordinary)
        self._hand_over(hypers)
        for owner, params in owners.items():
            owner.update({param: hypers[param] for param in params}, groups, self)
        return loss

    def _ordinary_with_grads(self, offloaded: Container[nn.Parameter]) -> list[tuple[nn.Parameter, Hyper, Any]]:
        """The ordinary parameters that a step updates, each with its hyperparameters and its group."""
        found = []
        for group in self.param_groups:
            hyper = self._hyper(group)
            for param in group["params"]:
                if param not in offloaded and param.grad is not None:
                    self._check_ordinary(param, hyper)
                    found.append((param, hyper, group))
        check_adopted(f"{type(self).__name__}.step", (param for param, _, _ in found))
        return found

    def compared(self) -> Compared:
        """Facts that ranks must have alike: this class, the parameters of its groups, and their hyperparameters."""
        groups = [(self._names.digest(g["params"]), *vars(self._hyper(g)).values()) for g in self.param_groups]
        return Compared(word_of((type(self).__name__, groups)), self._texts)

    def _texts(self) -> dict[str, str]:
        texts = {"the optimizer": type(self).__name__, "the number of param groups": str(len(self.param_groups))}
        names = [*self.defaults, "decoupled_weight_decay"]
        for number, group in enumerate(self.param_groups):
            texts[f"params of group {number}"] = self._names.describe(group["params"])
            values = {name: plain(name, group[name]) for name in names if name in group}
            texts |= {
                f"{name} of group {number}": repr(tuple(value) if isinstance(value, list) else value)
                for name, value in values.items()
            }
        return texts

    def hyper_of(self, param: nn.Parameter) -> Hyper | None:
        """Hyperparameters by value; None for a parameter of another optimizer."""
        found = (group for group in self.param_groups if any(param is each for each in group["params"]))
        return next(map(self._hyper, found), None)

    def hypers(self) -> dict[nn.Parameter, Hyper]:
        """Hyperparameters of offloaded parameters, by value. Raises ZeroOffloadError where their model was dropped."""
        found: dict[nn.Parameter, Hyper] = {}
        for group in self.param_groups:
            hyper = self._hyper(group)
            for owner, params in by_owner(group["params"]).items():
                if owner is not None:
                    found |= dict.fromkeys(params, hyper)
                    continue
                for param in filter(is_dropped, params):
                    raise dropped_error(param)
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients. Without `set_to_none` they become zeros, also those that a step has used, as in torch. A
        parameter that gets none afterwards still moves then, by its states and its weight decay.
        """
        zero_grads(self._params(), set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As that of torch's optimizer. States of offloaded parameters are tensors that are read from their tiers when
        their values are asked for, or just before those change. Where ranks divide the parameters every rank calls, and
        the tensors are for torch.distributed.checkpoint: their values are on several ranks.

        bf16 parameters have a "residual" that completes them to their fp32 master. Offloaded fp16 parameters have their
        "master". With the model's own state dict nothing is lost.
        """
        hypers = self.hypers()
        self._hand_over(hypers)
        with self._together("state_dict", self._states.away()) as is_divided:
            if is_divided:
                refuse_full("optimizer.state_dict()")
            for owner in by_owner(self._states.away()):
                assert owner is not None
                owner.states.check_usable()

        def read_later(_: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
            """Runs before the program's own hooks."""
            for group in packed["param_groups"]:
                fill_group(group, _torch_settings(type(self).__name__))
            entries: dict[Any, Any] = packed["state"]
            for key, entry in entries.items():
                if isinstance(entry, Entry):
                    entries[key] = tensors_of(entry.param, hypers[entry.param], owner_of(entry.param))

        hook = self.register_state_dict_post_hook(read_later, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a `state_dict`, this class's or that of torch's optimizer: hyperparameters, and all states.

        Raises ConfigError, and takes nothing, for hyperparameters out of range and states of another shape.
        """
        entries: dict[nn.Parameter, State] = {}

        def keep_ours(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
            """Keep ours of what the hooks before this one returned."""
            if [len(group["params"]) for group in given["param_groups"]] != [
                len(g["params"]) for g in self.param_groups
            ]:
                return None  # torch says so
            entries.update({param: settled(entry, param) for param, entry in entries_of(self._params(), given).items()})
            self._check_loaded(given, entries)
            return {**given, "state": ordinary_entries(self._params(), given)}

        hook = self.register_load_state_dict_pre_hook(keep_ours)
        try:
            with self._together("load_state_dict", self._params()):
                super().load_state_dict(state_dict)
        finally:
            hook.remove()
        for group in self.param_groups:
            hyper = self._hyper(group)
            for param in group["params"]:
                entry = entries.get(param, {})
                if owner_of(param) is not None:
                    write_offloaded(param, hyper, entry)
                elif entry and _has_kernel(param):
                    # torch has cast the states to the parameter's dtype; the kernel's are fp32.
                    kept = {name: entry[name] for name in hyper.states if entry.get(name) is not None}
                    restore_exact(param, self.state[param], kept, entry.get("residual"))

    @staticmethod
    @contextmanager
    def _together(name: str, params: Iterable[nn.Parameter]) -> Iterator[bool]:
        """`Owner.together`, for this method, of those whose parameters ranks divide; True if there are any."""
        with ExitStack() as met:
            owners = [
                owner
                for owner, owned in by_owner(params).items()
                if owner is not None and any(map(owner.parts.is_divided, owned))
            ]
            for owner in owners:
                met.enter_context(owner.together(f"optimizer.{name}()", INSTEAD[name]))
            yield bool(owners)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state from a copy, a pickle, or torch's part of a load."""
        super().__setstate__({name: each for name, each in state.items() if name != "state"})
        self._is_built = True
        if "_states" not in self.__dict__:
            self._states = States(self)
        self._use_states(state["state"])
        self._versions, self._names = {}, Names()
        for group in self.param_groups:
            fill_group(group, self.defaults)

    def _check_loaded(self, given: Mapping[str, Any], entries: Mapping[nn.Parameter, State]) -> None:
        number = 0
        for own, saved in zip(self.param_groups, given["param_groups"], strict=True):
            group = fill_group(dict(saved), self.defaults)
            self._check(group)
            names = (*self._hyper(group).states, *BESIDE)
            for param in own["params"]:
                check_shapes(param, entries.get(param, {}), names, f"{type(self).__name__}: parameter {number}")
                number += 1

    def hand_over(self) -> None:
        """Called before a generation or a checkpoint is made of what the runtimes have."""
        if self._states:
            self._hand_over(self.hypers())

    def _hand_over(self, hypers: Mapping[nn.Parameter, Hyper]) -> None:
        """States of steps before the parameters were offloaded go to their runtime."""
        for param in [each for each in hypers if dict.__contains__(self._states, each)]:
            write_offloaded(param, hypers[param], self._states[param])
            dict.__delitem__(self._states, param)

    def _by_owner(self) -> tuple[dict[Owner, list[nn.Parameter]], list[nn.Parameter]]:
        """The offloaded models, each with its parameters in this optimizer; and the ordinary parameters."""
        found = by_owner(self._params())
        ordinary = found.pop(None, [])
        return {owner: params for owner, params in found.items() if owner is not None}, ordinary

    def _params(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    def _check_ordinary(self, param: nn.Parameter, hyper: Hyper) -> None:
        """Raise for what no update takes, before one is made."""
        grad, state, kind = param.grad, self.state.get(param, {}), type(self).__name__
        assert grad is not None
        if grad.is_sparse:
            raise ConfigError(
                f"zo.{kind} takes no sparse gradients, and a parameter of shape {tuple(param.shape)} has one. Build "
                "the embedding with sparse=False, or give its parameters to torch.optim.SparseAdam, torch.optim.SGD or "
                "torch.optim.Adagrad"
            )
        check_shapes(param, {"gradient": grad, **state}, ("gradient", *hyper.states, "residual"), kind)
        if not _has_kernel(param):
            return
        kind_of(grad.dtype)
        for name in hyper.states:
            if (kept := state.get(name)) is not None and (
                kept.dtype != torch.float32 or kept.device != param.device or not kept.is_contiguous()
            ):
                raise ConfigError(
                    f"{kind}: {name} is {kept.dtype} with strides {kept.stride()} on {kept.device}, and an update of a "
                    f"parameter on {param.device} takes contiguous torch.float32 there. Move a model before the first "
                    "step of its optimizer, or load the optimizer's state dict after it has moved"
                )

    def _update_ordinary(self, param: nn.Parameter, hyper: Hyper, group: Mapping[str, Any]) -> None:
        grad, state = param.grad, self.state[param]
        assert grad is not None
        names, exact = hyper.states, _has_kernel(param)
        is_new = any(state.get(name) is None for name in names)
        for name in names:
            if state.get(name) is None:
                state[name] = torch.zeros_like(param, dtype=torch.float32 if exact else param.dtype)
        if not exact:
            self._torch_update(param, state, group, is_new)
            return
        step = self._count_step(state, is_new)
        if param.numel() == 0:
            return
        if param.dtype == torch.bfloat16:
            is_changed = self._versions.get(param, param._version) != param._version
            if is_changed or "residual" not in state:
                state["residual"] = torch.zeros_like(param, dtype=torch.int16)
        update_dense(param, grad.resolve_neg().contiguous(), state, hyper, step)
        if param.dtype == torch.bfloat16:
            self._versions[param] = param._version


def check_step(owners: Mapping[Owner, Sequence[nn.Parameter]]) -> None:
    """Raise for a step that offloaded models cannot make, of these parameters."""
    if owners and torch._C._current_graph_task_id() != -1:
        raise ZeroOffloadError(
            "a step inside of backward finds no gradients of offloaded parameters yet. Call step after backward. "
            "A step in hooks saves memory for gradients, and these leave memory by themselves as they come"
        )
    for owner, params in owners.items():
        owner.check_step()
        owner.places.check_frozen(params)


def zero_grads(params: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
    """Drop gradients of parameters, offloaded or not; or let them be zeros."""
    for owner, owned in by_owner(params).items():
        if owner is not None:
            (owner.access.drop_grads if set_to_none else owner.access.zero_grads)(owned)
            continue
        for param in owned:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()


def _register(optimizer: FusedOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Keep states for parameters of these groups, which are checked: what an earlier optimizer made goes."""
    check_adopted(type(optimizer).__name__, (param for group in groups for param in group["params"]))
    taken = [
        (owner.states, owner, params, optimizer._hyper(group).states)
        for group in groups
        for owner, params in by_owner(group["params"]).items()
        if owner is not None
    ]
    for states, owner, params, names in taken:
        states.add(params, names)
        owner.train_with(optimizer, params)


@cache
def _torch_settings(name: str) -> dict[str, Any]:
    """All settings of torch's optimizer of this name: loading by torch.distributed.checkpoint, it asks for each."""
    kind = getattr(torch.optim, name, None)
    return {} if kind is None else dict(kind([nn.Parameter(host_zeros(1, torch.float32))]).defaults)


def fill_group(group: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters that there were not when a state dict was saved; an option was off then, as torch has it."""
    for name, default in defaults.items():
        group.setdefault(name, False if isinstance(default, bool) else default)
    return group


def entries_of(params: Iterable[nn.Parameter], given: Mapping[str, Any]) -> dict[nn.Parameter, State]:
    """The entries of a state dict for each parameter, by its place in the groups. Entries without a step yet are left
    out; torch's Adagrad keeps its initial sum there.
    """
    found = {param: given["state"].get(key, {}) for param, key in zip(params, _keys(given), strict=True)}
    return {param: entry for param, entry in found.items() if entry.get(STEP, 1) != 0}


def ordinary_entries(params: Iterable[nn.Parameter], given: Mapping[str, Any]) -> dict[Any, State]:
    """A state dict's states but for those of offloaded parameters: torch's part of a load."""
    away = {key for param, key in zip(params, _keys(given), strict=True) if owner_of(param) is not None}
    return {key: each for key, each in given["state"].items() if key not in away and each.get(STEP, 1) != 0}


def _keys(given: Mapping[str, Any]) -> list[Any]:
    return [key for group in given["param_groups"] for key in group["params"]]


def restore_exact(param: nn.Parameter, state: State, kept: Mapping[str, Tensor], residual: Tensor | None) -> None:
    """Take states and residual bit for bit; torch's state dict has no residual: then the value is the master."""
    for name, values in kept.items():
        state[name] = values.detach().to(param.device, torch.float32, copy=True).contiguous()
    if isinstance(step := state.get(STEP), Tensor):
        state[STEP] = step.cpu()  # torch's fused optimizers count on the device, where each look would wait for it
    if param.dtype == torch.bfloat16:
        if residual is None:
            residual = torch.zeros_like(param, dtype=torch.int16)
        state["residual"] = residual.to(param.device, copy=True)


def steps_of(state: State) -> Tensor:
    """How many steps a state counts, as torch counts them: () fp32, on the host.

    A dtype of fewer bits stops counting: bf16 has no number after 256 that is one more. A state dict may have such.
    """
    step = state.get("step", 0.0)
    is_fp32 = isinstance(step, Tensor) and step.dtype == torch.float32 and step.device.type == "cpu"
    return step if is_fp32 else host_tensor(float(step), torch.float32)


def number(group: Mapping[str, Any], name: str) -> float:
    """A hyperparameter by value, of a number or of a tensor with one element. Raises ConfigError for anything else."""
    value = group[name]
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        what = (
            f"a tensor of {value.numel()} elements" if isinstance(value, Tensor) else f"{value!r}, not a finite number"
        )
        raise ConfigError(f"a param group's {name} is {what}; use a number, or a tensor with one element") from None


def numbers(group: Mapping[str, Any], *names: str) -> list[float]:
    """Several, as `number`."""
    return [number(group, name) for name in names]


def negatives(group: Mapping[str, Any], *names: str) -> Iterator[str]:
    """Problems of hyperparameters that must be 0 or more."""
    for name in names:
        try:
            value = number(group, name)
        except ConfigError as error:
            yield str(error)
            continue
        if not math.isfinite(value):
            yield f"{name}={group[name]!r} is not a finite number"
        elif value < 0:
            yield f"{name}={group[name]} is negative; use 0 or more"


def _loop_problems(group: Mapping[str, Any]) -> Iterator[str]:
    """Problems of arguments that choose torch's loop."""
    yield from (
        f"fused=True and {other}=True exclude each other; leave one out"
        for other in ("foreach", "differentiable")
        if group.get("fused") and group.get(other)
    )


def not_decays(group: Mapping[str, Any]) -> Iterator[str]:
    """Problems of `betas`."""
    for i, beta in enumerate(group["betas"]):
        if not 0 <= beta < 1:
            yield f"betas[{i}]={beta} is outside [0, 1)"


def _has_kernel(param: nn.Parameter) -> bool:
    """True if a fused kernel updates this parameter; its states are fp32 then."""
    # The memory of a DTensor, or of another wrapper, is not its own.
    plain = param.dtype in (torch.float32, torch.bfloat16) and param.is_contiguous() and type(param.data) is Tensor
    return plain and (param.device.type == "cpu" or has_device_update(param))


def update_dense(param: Tensor, grad: Tensor, state: State, hyper: Hyper, step: int) -> None:
    """Take a step of a parameter by a kernel, with contiguous gradient and states. Nothing waits for a device."""
    launch = _update_on_host if param.device.type == "cpu" else _update_on_device
    launch(param, grad, state, hyper, hyper.segment(0, param.numel(), 1.0, step))
    torch.autograd.graph.increment_version(param)


def _update_on_host(param: Tensor, grad: Tensor, state: State, hyper: Hyper, segment: Segment) -> None:
    buffers = UpdateBuffers(
        value=param.data_ptr(),
        residual=address_of(state["residual"], torch.int16) if "residual" in state else 0,
        master=0,
        states=tuple(address_of(state[name], torch.float32) for name in hyper.states),
        grad=grad.data_ptr(),
        value_out=0,
        value_dtype=param.dtype,
        grad_dtype=grad.dtype,
    )
    fused_update(hyper.rule, buffers, [segment], kernel_threads())


def _update_on_device(param: Tensor, grad: Tensor, state: State, hyper: Hyper, segment: Segment) -> None:
    states = tuple(state[name] for name in hyper.states)
    residual = state["residual"] if param.dtype == torch.bfloat16 else None
    update_on_device(hyper.rule, UpdateTensors(param.detach(), residual, states, grad), segment)


def squares_of(grads: Iterable[Tensor]) -> float:
    """The sum of squares of all of them; of a DTensor the whole. Collective with DTensors."""
    return sum(map(_squares, grads), 0.0)


def _squares(grad: Tensor) -> float:
    grad = grad.detach()
    if grad.layout is torch.sparse_coo:
        grad = grad.coalesce()._values()
    if (
        type(grad) is Tensor
        and grad.device.type == "cpu"
        and grad.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and grad.is_contiguous()
    ):
        return sum_of_squares(grad.data_ptr(), grad.dtype, grad.numel(), num_threads=kernel_threads()).sumsq
    dtype = torch.complex128 if grad.is_complex() else torch.float64
    norm: Any = torch.linalg.vector_norm(grad, dtype=dtype)
    return float(norm.full_tensor() if is_dtensor(norm) else norm) ** 2
