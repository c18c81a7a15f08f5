"""What happens when: forwards, backwards and touches of one offloaded model, whatever order they come in.

Owns the uses of units. Hooks need not pair: recompute enters a forward inside backward, and any of them may
be left by an exception; so forwards push and pop a stack, backwards are counted, and the next outermost
forward starts from a clean state. Never moves bytes: it asks `Residency` for units and lets go of them.

[Note: when a unit is needed in backward]
A node of the graph reads a parameter only after unpacking it. While the model's forward runs, saved tensors
pass through `pack` and `unpack`, so unpacking a view of a unit's buffer fetches that unit first. What is
recomputed inside backward (torch.utils.checkpoint) is saved elsewhere, but its forward passes the hooks again.
A unit's backward ends when the gradient of an input is complete, or with the whole backward.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from zero_offload.errors import ZeroOffloadError
from zero_offload.memory.heap import HeapTrimmer
from zero_offload.runtime.grads import GradReducer
from zero_offload.runtime.guard import refuse_copy
from zero_offload.runtime.residency import Residency
from zero_offload.runtime.unit import Unit


class Saved(NamedTuple):
    """A tensor that autograd saved, the version it had, and the unit whose buffer it views."""

    tensor: Tensor
    version: int
    unit: Unit | None


@dataclass
class Scope:
    """One running forward of a hooked module."""

    units: tuple[Unit, ...]
    touched: list[Unit] = field(default_factory=list)


class InputsWatch:
    """A tensor hook of a forward's inputs: runs `then` in every backward, when that forward's own is over.

    It is over as soon as one input's gradient is complete, since autograd runs nodes in the reverse order of their
    making: the forward's are younger than all of its inputs. Others may have far to go, such as an encoder's output
    that every block of a decoder takes.

    torch's register_multi_grad_hook does this too, but its hooks hold the graph they sit in: every forward
    would stay in memory until Python's garbage collector has found it, one module at a time.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._backward = -1

    def __call__(self, grad: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            self._then()


def _tensors_in(inputs: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among the inputs, in containers, and in the attributes of other objects, such as dataclasses."""
    for leaf in tree_leaves(list(inputs)):
        values = [leaf] if isinstance(leaf, Tensor) else tree_leaves(list(getattr(leaf, "__dict__", {}).values()))
        yield from (value for value in values if isinstance(value, Tensor))


def in_backward() -> bool:
    """Whether autograd runs on this thread now."""
    return torch._C._current_graph_task_id() != -1


def _recomputed_later() -> bool:
    """Whether this forward runs under torch.utils.checkpoint, which saves nothing and runs it again in backward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == checkpoint.__name__


class Session:
    """Uses of units by forwards and backwards."""

    def __init__(self, units: Sequence[Unit], residency: Residency, grads: GradReducer) -> None:
        self._units = units
        self._residency = residency
        self._grads = grads
        self._stack: list[Scope] = []
        self._saving: saved_tensors_hooks | None = None
        self._backward_runs = False
        self._pid = os.getpid()
        # Memory is short where units are away from it: then some ms per step for the heap are well spent.
        self._trimmer = HeapTrimmer() if any(unit.on_host and not unit.resident for unit in units) else None
        # A view shares its base's storage object, whether memory is under it or not.
        self._unit_of_storage = {s.flat.untyped_storage()._cdata: unit for unit in units for s in unit.sections}

    def check_process(self) -> None:
        """A forked child has neither our pages nor our threads: it must not get as far as touching them."""
        if os.getpid() != self._pid:
            raise ZeroOffloadError(
                f"an offloaded model works in the process that offloaded it ({self._pid}), not in its forked child "
                f"({os.getpid()}). Keep the model out of DataLoader workers, or use the spawn start method"
            )

    __reduce_ex__ = refuse_copy

    @property
    def active(self) -> bool:
        """Whether parameters may be touched: a forward or backward of this model is running."""
        return bool(self._stack) or in_backward()

    # Forward

    def enter(self, units: tuple[Unit, ...], inputs: Iterable[Any]) -> None:
        """A hooked module's forward starts."""
        if in_backward():
            for unit in units:
                self._recompute(unit)
            return
        if any(scope.units is units for scope in self._stack):
            # No module runs inside itself: an earlier forward was left without its hooks, as Ctrl-C does.
            self._abandon()
        if not self._stack:
            self._begin()
        self._stack.append(Scope(units))
        for unit in units:
            self._use(unit)
        if units:
            self._watch_inputs(units, inputs)

    def exit(self) -> None:
        """That forward ended, with a result or an exception."""
        if in_backward() or not self._stack:
            return
        scope = self._stack.pop()
        for unit in (*scope.units, *scope.touched):
            unit.forward_uses = max(unit.forward_uses - 1, 0)
            unit.close()
        if not self._stack:
            self._stop_saving()

    def _abandon(self) -> None:
        self._stack.clear()
        self._stop_saving()
        for unit in self._units:
            unit.forward_uses = 0
            unit.close()

    def _stop_saving(self) -> None:
        if self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None

    def touch(self, unit: Unit) -> None:
        """An operation needs a unit's parameters outside of its modules; valid while `active`."""
        if in_backward():
            self._use_in_backward(unit)
        elif unit.forward_uses == 0:
            self._stack[-1].touched.append(unit)
            self._use(unit)

    def _use(self, unit: Unit) -> None:
        unit.forward_uses += 1
        if unit.forward_uses == 1:
            self._residency.acquire(unit)
            unit.open()

    def _begin(self) -> None:
        """The outermost forward: whatever the last step left behind is put right first."""
        self.check_process()
        if self._backward_runs or any(unit.runs for unit in self._units):
            self._recover()
        grad = torch.is_grad_enabled()
        self._residency.begin_cycle("grad" if grad else "no_grad")
        if grad and not _recomputed_later():
            self._saving = saved_tensors_hooks(self._pack, self._unpack)
            self._saving.__enter__()

    def _recover(self) -> None:
        broken = self._backward_runs
        self._backward_runs = False
        for unit in self._units:
            unit.forward_uses = unit.backward_uses = 0
            unit.close()
        if broken and self._grads.drop():
            warnings.warn(
                "the last backward was left by an exception: its gradients are dropped, no step used them",
                stacklevel=2,
            )

    # Backward

    def _watch_inputs(self, units: tuple[Unit, ...], inputs: Iterable[Any]) -> None:
        """Learn when the backward through this forward is over: when the gradient of an input is complete."""
        watch = InputsWatch(partial(self._leave_backward, units))
        for tensor in _tensors_in(inputs):
            # Inputs of the graph itself are left out: autograd.grad refuses to say when those are complete.
            if tensor.grad_fn is not None:
                tensor.register_hook(watch)

    def _leave_backward(self, units: tuple[Unit, ...]) -> None:
        for unit in units:
            unit.backward_uses = max(unit.backward_uses - 1, 0)
            unit.close()
            if self._trimmer is not None:
                self._trimmer.freed(unit.layout.nbytes)

    def _recompute(self, unit: Unit) -> None:
        # Counted per forward, so that a region which uses a unit twice keeps it until both are done.
        if unit.backward_uses > 0:
            unit.backward_uses += 1
        else:
            self._use_in_backward(unit)

    def _use_in_backward(self, unit: Unit) -> None:
        self.note_backward()
        if unit.backward_uses == 0:
            # Counted first: what is in use is not evicted to fetch what comes next.
            unit.backward_uses = 1
            self._residency.acquire(unit)
            unit.open()

    def note_backward(self) -> None:
        """Called on every sign of a backward: makes sure that its end is noticed."""
        if not self._backward_runs:
            self._backward_runs = True
            if self._trimmer is not None:
                self._trimmer.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._backward_runs = False
        for unit in self._units:
            unit.backward_uses = 0
            unit.close()
        self._grads.finish_backward()

    # Saved tensors

    def _pack(self, tensor: Tensor) -> Saved:
        # Detached: a node that saved its own output would hold itself in memory through it.
        return Saved(tensor.detach(), tensor._version, self._unit_of(tensor))

    def _unpack(self, saved: Saved) -> Tensor:
        # Autograd leaves this check to whoever packs.
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {tuple(saved.tensor.shape)} is at version "
                f"{saved.tensor._version}, backward expected version {saved.version}. An optimizer step "
                "between a forward and its backward does this too"
            )
        if saved.unit is not None:
            self._use_in_backward(saved.unit)
        return saved.tensor

    def _unit_of(self, tensor: Tensor) -> Unit | None:
        if tensor.layout is not torch.strided:
            return None
        return self._unit_of_storage.get(tensor.untyped_storage()._cdata)
