"""Forwards that are run again in backward instead of what they saved: `zo.checkpoint`. Offloaded or not.

Owns the marked modules' forwards. While one runs, each tensor that autograd saves becomes a `Slot`, an empty place;
the first slot that a backward asks for runs the forward again, with the generators and autocast it had, and fills them
all. Every later hook of the module runs again with it. The calls: `Recompute.enter` and `exit` around each forward;
`Region.pack` and `unpack` by autograd; `drop_stale` when a forward may have been left without its hooks.

[Note: early stop]
Once all slots are full, what is left of the forward computes nothing that is wanted: `_Refilled` leaves it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.hardware.device import device_rng_states, set_device_rng_states
from zero_offload.runtime.saved.boundary import Boundary, Group
from zero_offload.runtime.saved.frames import runs
from zero_offload.runtime.saved.tensors import KEPT_AS_IT_IS, saver_of, saving_hooks
from zero_offload.storage.shards.registry import owner_of


class _Refilled(Exception):
    """All slots of a region are full."""

    def __init__(self, region: Region) -> None:
        super().__init__("what zero_offload runs again in backward ends here; let this exception pass")
        self.region = region


class Slot:
    """The place of one saved tensor; filled between a recompute and its use."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.value: Tensor | None = None
        self.backward = -1
        """The backward that the value was computed for."""


class _Form(NamedTuple):
    """What must be alike when a tensor is saved again."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype} on {self.device}"


class Autocast(NamedTuple):
    """What torch.autocast is called with."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cache_enabled: bool

    @classmethod
    def of(cls, device_type: str) -> Autocast:
        dtype, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
        return cls(device_type, dtype, enabled, torch.is_autocast_cache_enabled())


class _Entered(NamedTuple):
    """A forward that runs, and the hooks it entered for a region, if any."""

    caller: FrameType
    region: Region | None
    hooks: saved_tensors_hooks | None
    thread: int
    """Forwards of micro-batches run on threads of their own, and take turns."""


class Recompute:
    """One marked module."""

    def __init__(self, label: str, group: Group | None) -> None:
        """`group`: ranks with equal inputs, which keep a part of them each."""
        self._label = label
        self.group = group
        self.again: Region | None = None
        """Its forward is the next one."""
        self._entered: list[_Entered] = []

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward begins."""
        drop_stale()
        self._entered = [entered for entered in self._entered if runs(entered.caller)]
        region, self.again = self.again, None
        hooks = None
        if region is not None:
            region.restart_generators()
            hooks = saved_tensors_hooks(region.refill, KEPT_AS_IT_IS[1])
        elif torch.is_grad_enabled() and module.training:
            region = Region(module, self, (args, kwargs), f"{self._label}{_name_of(module)}")
            hooks = saved_tensors_hooks(region.pack, region.unpack)
        caller = sys._getframe(1)
        if region is not None and hooks is not None:
            region.caller = caller
            hooks.__enter__()
        self._entered.append(_Entered(caller, region, hooks, threading.get_ident()))

    def exit(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """That forward ended, with a result or an exception."""
        thread = threading.get_ident()
        latest = next((i for i in reversed(range(len(self._entered))) if self._entered[i].thread == thread), None)
        if latest is None:
            return
        _, region, hooks, _ = self._entered.pop(latest)
        if region is not None and hooks is not None:
            region.caller = None  # a frame keeps what it worked on
            hooks.__exit__(None, None, None)


class Region:
    """One forward, and what it takes to run it again."""

    def __init__(self, module: nn.Module, recompute: Recompute, arguments: tuple[Any, ...], label: str) -> None:
        self._module = module
        self._recompute = recompute
        self._label = label
        self._outer = saving_hooks()
        self._boundary = Boundary(arguments, self._outer, recompute.group, label)
        self._generators = generators()
        self._autocasts = [Autocast.of(kind) for kind in sorted(self._boundary.device_types)]
        self.caller: FrameType | None = None
        """Runs as long as the forward does, the first or again."""
        # Weak: a slot lives as long as the node that has it, and keeps the region.
        self._slots: list[weakref.ref[Slot]] = []
        self._forms: list[_Form] = []
        self._num_refilled = 0
        self._backward = -1

    # Forward

    def pack(self, tensor: Tensor) -> Slot:
        """Autograd saves a tensor."""
        if not self._slots:
            self._boundary.keep()
        slot = Slot(self)
        self._slots.append(weakref.ref(slot))
        self._forms.append(_Form.of(tensor))
        return slot

    # Backward

    def unpack(self, slot: Slot) -> Tensor:
        """Autograd wants it back."""
        backward = torch._C._current_graph_task_id()
        twice = torch.is_grad_enabled()
        if slot.value is None or backward == -1 or slot.backward != backward:
            self._run_again(backward)
        value, slot.value = slot.value, None
        assert value is not None
        if twice and self._outer is not None and saver_of(self._outer) is not None:
            # The node saves for a backward through it: parameters among that must be known to the tracker.
            # Never popped: autograd gives every node the hooks of the thread that called backward.
            torch._C._autograd._push_saved_tensors_default_hooks(*self._outer)
        return value

    def _run_again(self, backward: int) -> None:
        if backward not in (-1, self._backward):
            # What is not asked for after all must not stay until the graph goes.
            torch.autograd.Variable._execution_engine.queue_callback(self._empty)
        self._backward, self._num_refilled = backward, 0
        args, kwargs = self._boundary.restore()
        before = generators()
        self._recompute.again = self
        try:
            with contextlib.ExitStack() as contexts:
                for autocast in self._autocasts:
                    contexts.enter_context(torch.autocast(*autocast))
                contexts.enter_context(torch.enable_grad())
                self._module(*args, **kwargs)
        except _Refilled as end:
            if end.region is not self:
                raise
        finally:
            self._recompute.again = None
            set_generators(before)
        if self._num_refilled < len(self._forms):
            raise self._differs(f"saved {len(self._forms)} tensors in forward and {self._num_refilled} when run again")

    def restart_generators(self) -> None:
        set_generators(self._generators)

    def refill(self, tensor: Tensor) -> Tensor:
        """Autograd saves a tensor of the forward that is run again."""
        index, form = self._num_refilled, _Form.of(tensor)
        if index < len(self._forms):
            if form != self._forms[index]:
                raise self._differs(f"saved {self._forms[index]} in forward and {form} when run again")
            self._num_refilled += 1
            if (slot := self._slots[index]()) is not None:
                slot.value, slot.backward = tensor.detach(), self._backward
        if self._num_refilled == len(self._forms):
            raise _Refilled(self)
        return tensor.detach()

    def _empty(self) -> None:
        for reference in self._slots:
            if (slot := reference()) is not None:
                slot.value = None

    def _differs(self, how: str) -> ZeroOffloadError:
        return ZeroOffloadError(
            f"{self._label} {how}: its forward depends on something that has changed since, such as a counter, a "
            "cache or a global. Make it a function of its inputs, parameters and torch's generators, or do not mark "
            "it with zo.checkpoint"
        )


def drop_stale() -> None:
    """Leave the hooks of forwards that were left without theirs, as Ctrl-C does."""
    while (hooks := saving_hooks()) is not None and isinstance(region := getattr(hooks[0], "__self__", None), Region):
        if region.caller is not None and runs(region.caller):
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()


Generators = tuple[Tensor, list[Tensor]]
"""States of torch's generators: the CPU's, and those of the devices in use."""


def generators() -> Generators:
    return torch.get_rng_state(), device_rng_states()


def set_generators(states: Generators) -> None:
    torch.set_rng_state(states[0])
    set_device_rng_states(states[1])


def _name_of(module: nn.Module) -> str:
    """What tells it from its like: the name of its first parameter, which an offloaded model knows."""
    for param in module.parameters():
        owner = owner_of(param)
        return "" if owner is None else f" (with the parameter {owner.places.name_of(param)})"
    return ""
