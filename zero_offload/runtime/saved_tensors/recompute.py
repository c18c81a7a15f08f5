"""Forwards that are run again in backward instead of what they saved: `zo.checkpoint`. Offloaded or not.

Owns the marked modules' forwards. While one runs, each tensor that autograd saves becomes a `RecomputedTensor`, an
empty place. The first place that a backward asks for runs the forward again, with its generators and autocast. That
fills all places. Every later hook of the module runs again with it. The calls: `RecomputedModule.enter` and `exit`
around each forward; `RecomputedForward.pack` and `unpack` by autograd; `drop_stale` when a forward may have been left
without its hooks.

[Note: kept inputs]
A forward that saves nothing is never run again, so its inputs are kept when it first saves a tensor. Floating tensors
pass through the saved-tensor hooks that were in place around the forward: hooks that store or recompute tensors have
them too. Everything else, and parameters, is kept as it is.

[Note: kept results]
A part of a forward that is costly, and needs nothing that it would save, may be left out of the second run:
`keep_result` has a copy of what it gave, and `kept_result` gives that. Where the forward saves nothing behind it, the
second run does not come so far, and the copy goes at the end of the first.

[Note: early stop]
Once all places are full, the rest of the forward computes nothing that is wanted: `_Refilled` leaves it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.hardware.accelerators import present_type
from zero_offload.hardware.device import device_rng_states, set_device_rng_states
from zero_offload.runtime.ranks.group import all_gather
from zero_offload.runtime.saved_tensors.activations import VersionCheck
from zero_offload.runtime.saved_tensors.tensors import KEPT_AS_IT_IS, Unpack, runs, runs_again, saver_of, saving_hooks
from zero_offload.standins.owners import owner_of

Group = dist.ProcessGroup


class _Refilled(Exception):
    """All places of a recomputed forward are full."""

    def __init__(self, recomputed: RecomputedForward) -> None:
        super().__init__("what zero_offload runs again in backward ends here; let this exception pass")
        self.recomputed = recomputed


class RecomputedTensor:
    """The place of one saved tensor; filled between a recompute and its use."""

    def __init__(self, recomputed: RecomputedForward) -> None:
        self.recomputed = recomputed
        self.value: Tensor | None = None
        self.backward = -1
        """The backward that the value was computed for."""


_Form = tuple[tuple[int, ...], torch.dtype, torch.device]
"""The properties that must be alike when a tensor is saved again."""


def _form_of(tensor: Tensor) -> _Form:
    return tuple(tensor.shape), tensor.dtype, tensor.device


class Autocast(NamedTuple):
    """The arguments of torch.autocast."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cache_enabled: bool

    @classmethod
    def of(cls, device_type: str) -> Autocast:
        dtype, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
        return cls(device_type, dtype, enabled, torch.is_autocast_cache_enabled())


class _Entered(NamedTuple):
    """A forward that runs, and the hooks it entered for a recomputed forward, if any."""

    caller: FrameType
    recomputed: RecomputedForward | None
    hooks: saved_tensors_hooks | None
    thread: int
    """Forwards of micro-batches run on threads of their own, and take turns."""


class RecomputedModule:
    """One marked module."""

    def __init__(self, label: str, group: Group | None) -> None:
        """`group`: ranks with equal inputs, which keep a part of them each."""
        self._label = label
        self.group = group
        self.again: RecomputedForward | None = None
        """Its forward is the next one."""
        self._entered: list[_Entered] = []

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward begins."""
        drop_stale()
        self._entered = [entered for entered in self._entered if runs(entered.caller)]
        recomputed, self.again = self.again, None
        hooks = None
        if recomputed is not None:
            recomputed.restart_generators()
            hooks = saved_tensors_hooks(recomputed.refill, KEPT_AS_IT_IS[1])
        elif torch.is_grad_enabled() and module.training:
            recomputed = RecomputedForward(module, self, (args, kwargs), f"{self._label}{_name_of(module)}")
            hooks = saved_tensors_hooks(recomputed.pack, recomputed.unpack)
        caller = sys._getframe(1)
        if recomputed is not None and hooks is not None:
            recomputed.caller = caller
            hooks.__enter__()
        self._entered.append(_Entered(caller, recomputed, hooks, threading.get_ident()))

    def exit(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The forward ended, with a result or an exception."""
        thread = threading.get_ident()
        latest = next((i for i in reversed(range(len(self._entered))) if self._entered[i].thread == thread), None)
        if latest is None:
            return
        _, recomputed, hooks, _ = self._entered.pop(latest)
        if recomputed is not None and hooks is not None:
            recomputed.caller = None  # a frame keeps what it worked on
            recomputed.end_run()
            hooks.__exit__(None, None, None)


class _KeptInput(NamedTuple):
    """One tensor among the inputs."""

    packed: Any
    """The hooks' result for it, or for this rank's part."""
    unpack: Unpack
    check: VersionCheck
    requires_grad: bool
    parted: torch.Size | None
    """Its shape, if the ranks of a group have a part each."""


class RecomputedForward:
    """One forward, and what it takes to run it again."""

    def __init__(self, module: nn.Module, recompute: RecomputedModule, arguments: tuple[Any, ...], label: str) -> None:
        self._module = module
        self._recompute = recompute
        self._label = label
        self._outer = saving_hooks()
        """Those around the forward."""
        self._inputs, self._tree = tree_flatten(arguments)
        self._checks = {
            index: VersionCheck(leaf)
            for index, leaf in enumerate(self._inputs)
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
        }
        device_types = {"cpu", *(leaf.device.type for leaf in self._inputs if isinstance(leaf, Tensor))}
        if (computes_on := present_type()) is not None:
            device_types.add(computes_on)  # of an offloaded model the inputs may come from the host
        self._autocasts = [Autocast.of(kind) for kind in sorted(device_types)]
        self._generators = generators()
        self.caller: FrameType | None = None
        """Runs as long as the forward does, the first or again."""
        # Weak: a place lives as long as the node that has it, and keeps this forward.
        self._places: list[weakref.ref[RecomputedTensor]] = []
        self._forms: list[_Form] = []
        self._num_refilled = 0
        self._results: list[tuple[_KeptInput | None, int]] = []
        """See [Note: kept results]; each with the number of tensors that were saved before."""
        self._num_given = 0
        self._backward = -1

    # Forward

    def keep(self, result: Tensor) -> None:
        copy = result.detach().clone()
        self._results.append((self._keep(copy, VersionCheck(copy)), len(self._places)))

    def end_run(self) -> None:
        """A run of the forward is over."""
        if self._backward == -1:
            num_places = len(self._places)
            self._results = [(kept if before < num_places else None, before) for kept, before in self._results]

    def pack(self, tensor: Tensor) -> RecomputedTensor:
        """Autograd saves a tensor."""
        if not self._places:
            for index, check in self._checks.items():
                self._inputs[index] = self._keep(self._inputs[index], check)
        place = RecomputedTensor(self)
        self._places.append(weakref.ref(place))
        self._forms.append(_form_of(tensor))
        return place

    def _keep(self, tensor: Tensor, check: VersionCheck) -> _KeptInput:
        """See [Note: kept inputs]."""
        self._check(check)
        requires_grad, parted, group = tensor.requires_grad, None, self._recompute.group
        # Put together again it is contiguous: what was laid out otherwise would not be what it was.
        if group is not None and tensor.is_floating_point() and tensor.is_contiguous() and tensor.numel():
            parted, tensor = tensor.shape, _part_of(tensor, group)
        pack, unpack = self._outer if self._outer is not None and tensor.is_floating_point() else KEPT_AS_IT_IS
        return _KeptInput(pack(tensor), unpack, check, requires_grad, parted)

    def _check(self, check: VersionCheck) -> None:
        if check.changed:
            raise ZeroOffloadError(
                f"an input of {self._label}, {check}, so its forward cannot be run again as it was. "
                "Leave out the change in place, or do not mark this module with zo.checkpoint"
            )

    # Backward

    def unpack(self, place: RecomputedTensor) -> Tensor:
        """Autograd wants it back."""
        backward = torch._C._current_graph_task_id()
        twice = torch.is_grad_enabled()
        if place.value is None or backward == -1 or place.backward != backward:
            self._run_again(backward)
        value, place.value = place.value, None
        assert value is not None
        if twice and self._outer is not None and saver_of(self._outer) is not None:
            # The node saves for a backward through it: parameters among that must be known to the tracker.
            # Never popped: autograd gives every node the hooks of the thread that called backward.
            torch._C._autograd._push_saved_tensors_default_hooks(*self._outer)
        return value

    def _run_again(self, backward: int) -> None:
        if backward not in (-1, self._backward):
            # Refilled places that backward does not ask for must not stay until the graph goes.
            torch.autograd.Variable._execution_engine.queue_callback(self._empty)
        self._backward, self._num_refilled, self._num_given = backward, 0, 0
        inputs = [self._restore(leaf) if isinstance(leaf, _KeptInput) else leaf for leaf in self._inputs]
        args, kwargs = tree_unflatten(inputs, self._tree)
        before = generators()
        self._recompute.again = self
        try:
            with contextlib.ExitStack() as contexts:
                for autocast in self._autocasts:
                    contexts.enter_context(torch.autocast(*autocast))
                contexts.enter_context(torch.enable_grad())
                self._module(*args, **kwargs)
        except _Refilled as end:
            if end.recomputed is not self:
                raise
        finally:
            self._recompute.again = None
            set_generators(before)
        if self._num_refilled < len(self._forms):
            raise self._differs(f"saved {len(self._forms)} tensors in forward and {self._num_refilled} when run again")

    def _restore(self, kept: _KeptInput) -> Tensor:
        """Detached from the graph."""
        self._check(kept.check)
        tensor = kept.unpack(kept.packed)
        if kept.parted is not None:
            assert self._recompute.group is not None
            tensor = _whole(tensor, kept.parted, self._recompute.group)
        return tensor.detach().requires_grad_(kept.requires_grad)

    def give(self) -> Tensor | None:
        """The next result that the first run has kept."""
        if self._num_given == len(self._results):
            return None
        kept, _ = self._results[self._num_given]
        self._num_given += 1
        return None if kept is None else self._restore(kept)

    def restart_generators(self) -> None:
        set_generators(self._generators)

    def refill(self, tensor: Tensor) -> Tensor:
        """Autograd saves a tensor of the forward that is run again."""
        index, form = self._num_refilled, _form_of(tensor)
        if index < len(self._forms):
            if form != self._forms[index]:
                raise self._differs(
                    "saved {} {} on {} in forward and {} {} on {} when run again".format(*self._forms[index], *form)
                )
            self._num_refilled += 1
            if (place := self._places[index]()) is not None:
                place.value, place.backward = tensor.detach(), self._backward
        if self._num_refilled == len(self._forms):
            raise _Refilled(self)
        return tensor.detach()

    def _empty(self) -> None:
        for reference in self._places:
            if (place := reference()) is not None:
                place.value = None

    def _differs(self, how: str) -> ZeroOffloadError:
        return ZeroOffloadError(
            f"{self._label} {how}: its forward depends on something that has changed since, such as a counter, a "
            "cache or a global. Make it a function of its inputs, parameters and torch's generators, or do not mark "
            "it with zo.checkpoint"
        )


def drop_stale() -> None:
    """Leave the hooks of forwards that were left without theirs, as Ctrl-C does."""
    while (hooks := saving_hooks()) is not None and isinstance(
        recomputed := getattr(hooks[0], "__self__", None), RecomputedForward
    ):
        if recomputed.caller is not None and runs(recomputed.caller):
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()


def keep_result(result: Tensor) -> None:
    """A part of a forward has this result, and is not to run again with it."""
    if (recomputed := _running()) is not None and not runs_again(saving_hooks()):
        recomputed.keep(result)


def kept_result() -> Tensor | None:
    """In the second run of a forward, the result of a part that is not to run again; asked for in the same order."""
    recomputed = _running()
    return recomputed.give() if recomputed is not None and runs_again(saving_hooks()) else None


def _running() -> RecomputedForward | None:
    """The innermost marked forward that runs and saves here."""
    hooks = saving_hooks()
    recomputed = None if hooks is None else getattr(hooks[0], "__self__", None)
    return recomputed if isinstance(recomputed, RecomputedForward) else None


Generators = tuple[Tensor, list[Tensor]]
"""States of torch's generators: the CPU's, and those of the devices in use."""


def generators() -> Generators:
    return torch.get_rng_state(), device_rng_states()


def set_generators(states: Generators) -> None:
    torch.set_rng_state(states[0])
    set_device_rng_states(states[1])


def _name_of(module: nn.Module) -> str:
    """The name of the module's first parameter, which tells it from its like and which an offloaded model knows."""
    for param in module.parameters():
        owner = owner_of(param)
        return "" if owner is None else f" (with the parameter {owner.places.name_of(param)})"
    return ""


def _part_of(tensor: Tensor, group: Group) -> Tensor:
    """(k,), a copy of this rank's part of the elements; parts are equally long, the last ones padded with zeros."""
    numel = -(-tensor.numel() // group.size())
    part = tensor.detach().new_zeros(numel)
    mine = tensor.detach().view(-1)[group.rank() * numel : (group.rank() + 1) * numel]
    part[: mine.numel()] = mine
    return part


def _whole(part: Tensor, shape: torch.Size, group: Group) -> Tensor:
    """All ranks' parts together. Collective."""
    whole = part.new_empty(part.numel() * group.size())
    # Bytes, since not every backend gathers every dtype.
    all_gather(whole.view(torch.uint8), part.contiguous().view(torch.uint8), group=group)
    return whole[: shape.numel()].view(shape)
