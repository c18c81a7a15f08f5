"""What happens when: forwards, backwards and touches of one offloaded model, whatever order they come in.

Owns the uses of units. Hooks need not pair: recompute enters a forward inside backward, and any of them may
be left by an exception; so forwards push and pop a stack, backwards are counted, and the next outermost
forward starts from a clean state. Never moves bytes: it asks `ParamPrefetcher` for units and lets go of them.

[Note: when a unit is needed in backward]
A node of the graph reads a parameter only after unpacking it. While the model's forward runs, saved tensors
pass through `SavedTensors`, so unpacking a view of a unit's buffer fetches that unit first. What is
recomputed inside backward (torch.utils.checkpoint) is saved elsewhere, but its forward passes the hooks again.
A unit's backward ends when the gradient of an input is complete, or with the whole backward.

[Note: backwards inside of a backward]
A node may run forwards and a backward of its own (reversible networks, adjoints, reentrant checkpoints). Such a forward
is one like any other: its uses end with it, and what it saves asks for units. What the inner backward begins to use
ends with the inner backward. Autograd numbers backwards, so an inner one is told by its number.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.spans import Lane
from zero_offload.base.types import MIB, format_bytes
from zero_offload.runtime.grads.gradients import Gradients
from zero_offload.runtime.inputs import tensors_in, watch_inputs
from zero_offload.runtime.life import ModelLife, in_backward
from zero_offload.runtime.prefetcher import ParamPrefetcher
from zero_offload.runtime.saved.frames import module_call, runs
from zero_offload.runtime.saved.recompute import drop_stale
from zero_offload.runtime.saved.tensors import SavedTensors, TensorStore, leave_hooks, runs_again, saving_hooks
from zero_offload.runtime.scope import Round, Scope, changed_in_forward, end_use
from zero_offload.runtime.units.guard import refuse_copy
from zero_offload.runtime.units.unit import Unit, UpdatesInBackward
from zero_offload.storage.memory.heap import HeapRoom, HeapTrimmer

_IN_ANOTHER_THREAD = (
    "of this model runs in another thread; what starts now could take its parameters out of memory. Run one forward at "
    "a time, and none beside a backward"
)


_NO_BACKWARD = weakref.ref(set[None]())

TOLD_CASTS_BYTES = 64 * MIB
"""From so many bytes on that autocast's cache keeps, a warning says so."""


def _lives(ending: Callable[[], object | None]) -> bool:
    """Whether a backward does. A GPU's thread may let go of one that broke off a moment after its error is here."""
    for _ in range(50):
        if ending() is None:
            return False
        time.sleep(0.01)
    return True


class PassTracker:
    """Uses of units by forwards and backwards."""

    def __init__(
        self,
        units: Sequence[Unit],
        prefetcher: ParamPrefetcher,
        grads: Gradients,
        activations: TensorStore | None,
        room: HeapRoom | None,
        life: ModelLife,
        updates: UpdatesInBackward | None,
    ) -> None:
        """`updates`: if gradients are used by the backward that makes them."""
        self._units = units
        self._life = life
        self._prefetcher = prefetcher
        self._spans = prefetcher.spans
        self._grads = grads
        self.forwards: list[Scope] = []
        """That run now, the outermost first."""
        self._thread = 0
        """Runs the forwards on the stack."""
        self._pushing = threading.Lock()
        """So that of two threads one is first."""
        self.round: Round | None = None
        """The forwards that take turns, while they do; their owner begins and ends the cycle."""
        self._num_cycles = {"grad": 0, "no_grad": 0}
        """Outermost forwards, or rounds, that have begun."""
        self._has_told_casts = False
        self._watches = False
        """Whether changes of parameters by this one are looked for beyond torch's versions."""
        self._backward_runs = False
        """Or was left by an exception, and nothing has come since."""
        self._task = -1
        """Autograd's number of it; -1 until it is known. See [Note: backwards inside of a backward]."""
        self._inner_forwards: list[Scope] = []
        """That nodes of a backward run now, the outermost first."""
        self._inner_uses: dict[int, list[Unit]] = {}
        """What backwards inside of it have begun to use, by their numbers."""
        self.ending: Callable[[], object | None] = _NO_BACKWARD
        """A weak reference to what is called at the end of the backward that runs; None is its answer where none runs,
        or an exception has left it. It is asked on every sign of a backward, and then `note_backward` if need be."""
        self.any_leaves = False
        """Whether it matters that a use ends, and who holds views of parameters."""
        self._trimmer: HeapTrimmer | None = None
        self._room = room
        self._updates = updates
        self._saved = SavedTensors((), activations, always=grads.passing)
        self.grow(units)

    def grow(self, units: Sequence[Unit]) -> None:
        """These are used too; the list that this object was given has them already."""
        self.any_leaves = self.any_leaves or not all(unit.resident for unit in units)
        # Memory is short where units are away from it: then some ms per step for the heap are well spent.
        if self._trimmer is None and any(unit.on_host and not unit.resident for unit in units):
            self._trimmer = HeapTrimmer()
        self._saved.grow(units)

    @property
    def looks_for_graphs(self) -> bool:
        """True if a graph of a device's work would be seen only by looking for it, and this forward does."""
        return self._watches and self._prefetcher.room is not None

    __reduce_ex__ = refuse_copy

    @property
    def active(self) -> bool:
        """Whether parameters may be touched: a forward or backward of this model is running on this thread."""
        return (bool(self.forwards) and threading.get_ident() == self._thread) or in_backward()

    # Forward

    def enter(self, units: tuple[Unit, ...], inputs: Iterable[Any], runtime: object) -> None:
        """A hooked module's forward starts. Its graph keeps `runtime`: backward may come after the model is dropped."""
        if in_backward():
            self._enter_in_backward(Scope(units, module_call()), inputs, runtime)
            return
        if self.round is not None:
            self.round.enter(units, inputs)
        thread = threading.get_ident()
        if any((scope.units is units or thread != self._thread) and not runs(scope.caller) for scope in self.forwards):
            # No module that calls itself: an earlier forward was left without its hooks, as Ctrl-C does.
            self.abandon()
        scope = Scope(units, module_call())
        with self._pushing:
            is_outermost = not self.forwards
            if is_outermost and torch._C._is_tracing():
                raise ZeroOffloadError(
                    "torch.jit.trace makes code that reads parameters where no hook sees it; trace the model before "
                    "zo.offload, or use torch.compile"
                )
            if not is_outermost and thread != self._thread:
                raise ZeroOffloadError(f"a forward {_IN_ANOTHER_THREAD}")
            self._thread = thread
            self.forwards.append(scope)
        if is_outermost and self.round is None:
            try:
                self.begin(inputs)
            except BaseException:
                self.forwards.clear()
                raise
        self.forwards[-1].saving = self._saved.hooks(
            partial(self._use_in_backward, runtime=runtime), self._prefetcher.use
        )
        whole = len(self.forwards) == 1 and self.round is None
        if whole:
            scope.opened = self._spans.open(Lane.FORWARD, scope.name(whole=True))  # with its waits
        for unit in units:
            self._use(unit)
        if units and not whole:
            scope.opened = self._spans.open(Lane.FORWARD, scope.name(whole=False))
        if units and (self.any_leaves or self._updates is not None) and self.round is None:
            # Learn when the backward through this forward is over.
            watch_inputs(inputs, partial(self.leave_backward, units))

    def exit(self, output: Any = None) -> Any:
        """That forward ended, with a result or an exception; returns what replaces the result, or None."""
        if in_backward():
            return self._exit_in_backward(module_call(), output)
        if not self.forwards:
            return None
        if threading.get_ident() != self._thread:
            return None
        scope = self.forwards.pop()
        if scope.saving is not None:
            scope.saving.__exit__(None, None, None)
        replaced = self._keep_views(output, self.forwards) if self.any_leaves else None
        changed = self._end_uses(scope, self.forwards)
        whole = not self.forwards and self.round is None
        if whole:
            self._prefetcher.meet("the end of a forward")
            self._tell_casts()
        self._spans.close(scope.opened)
        if changed:
            raise changed_in_forward(changed)
        return replaced

    def _tell_casts(self) -> None:
        """Autocast's cache cannot be emptied for one unit: gradients of weights that are used twice would add up
        otherwise."""
        nbytes, kinds = self._saved.cast_bytes, {unit.sections[0].flat.device.type for unit in self._units}
        cached = torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, kinds))
        if nbytes >= TOLD_CASTS_BYTES and cached and not self._has_told_casts:
            self._has_told_casts = True
            warnings.warn(
                f"torch.autocast keeps {format_bytes(nbytes)} of casts of fp32 weights in memory until its block ends, "
                "though the weights leave. torch.autocast(..., cache_enabled=False) keeps none; or offload with "
                "precision='bf16'",
                stacklevel=4,
            )

    def _end_uses(self, scope: Scope, around: Sequence[Scope]) -> list[str]:
        """Names of parameters that the forward has changed."""
        changed: list[str] = []
        for unit in (*scope.units, *scope.touched):
            changed += end_use(unit, self._prefetcher.holds_value)
            if unit.forward_uses and self.round is None:
                unit.passing = not any(unit in each.units for each in around)
        return changed

    def _keep_views(self, output: Any, around: Sequence[Scope]) -> Any:
        """Views of parameters among the results outlive this forward: they keep their unit, or become copies."""
        found = [x for x in tensors_in([output]) if not isinstance(x, nn.Parameter)]
        # Those of a buffer that may go.
        views = [x for x in found if (unit := self._saved.unit_of(x)) is not None and not unit.resident]
        if not views:
            return None
        if not around:
            ids = set(map(id, views))
            return tree_map_only(Tensor, lambda x: x.clone() if id(x) in ids else x, output)
        for unit in filter(None, map(self._saved.unit_of, views)):
            unit.forward_uses += 1
            around[-1].touched.append(unit)
        return None

    def abandon(self) -> None:
        """Forwards were left without their hooks: nothing of them runs any more."""
        drop_stale()
        while self.forwards:
            saving = self.forwards.pop().saving
            if saving is not None:
                leave_hooks(saving)
        for unit in self._units:
            unit.forward_uses = 0
            unit.close()

    def touch(self, units: Sequence[Unit]) -> None:
        """An operation needs parameters of these units outside of their modules; valid while `active`."""
        passing = [unit for unit in units if unit.passing or not unit.runs]
        for unit in units:
            unit.passing = False  # none of them goes while another one comes
        recomputed = in_backward() and runs_again(saving_hooks())
        for unit in units:
            if recomputed or (in_backward() and not self._inner_forwards):
                self._use_in_backward(unit)
            elif unit.forward_uses == 0:
                (self._inner_forwards if in_backward() else self.forwards)[-1].touched.append(unit)
                self._use(unit)
        for unit in passing:
            # What is recomputed saves without asking us.
            unit.passing = not recomputed

    def _use(self, unit: Unit) -> None:
        unit.forward_uses += 1
        unit.num_uses += not in_backward()
        unit.passing = False
        if unit.forward_uses > 1:
            self._prefetcher.use(unit)
        else:
            self._prefetcher.acquire(unit)
            unit.open()
            if self._watches or unit.is_set:
                unit.watch()
            if self.round is not None and not in_backward():
                self.round.hold(unit)

    def resume(self, stack: list[Scope]) -> None:
        """In a round: the forwards on `stack` go on, on this thread."""
        self.forwards, self._thread = stack, threading.get_ident()

    def begin(self, inputs: Iterable[Any] = ()) -> None:
        """The outermost forward: whatever the last step left behind is put right first."""
        self._life.check_usable()
        if self._backward_runs or any(unit.runs for unit in self._units):
            self._recover()
        kind = "grad" if torch.is_grad_enabled() else "no_grad"
        self._num_cycles[kind] += 1
        if self._room is not None and kind == "grad":
            self._room.begin()
        # The first, second, fourth, eighth and so on, so that it costs nothing in the long run; all uses of it, since
        # a unit may be used by several modules in turn.
        self._watches = self._num_cycles[kind].bit_count() == 1
        self._saved.begin(checks=self._watches)
        self._grads.begin_forward()
        sizes = () if self._prefetcher.room is None else (tensor.numel() for tensor in tensors_in(inputs))
        self._prefetcher.begin_cycle(kind, sum(sizes))

    def settle(self) -> None:
        """Before a norm, a step, or values read or written from outside: of a backward that broke off, some gradients
        are not whole, and none may be used; units that it used are at rest then."""
        self._life.check_alive()
        if self._backward_runs and not self.active:
            self._recover()

    def _recover(self, *, in_forward: bool = False) -> None:
        """Of a backward, or forwards, that an exception has left; with `in_forward` there are others that run."""
        broken = self._backward_runs
        if broken and _lives(self.ending):
            raise ZeroOffloadError(f"a backward {_IN_ANOTHER_THREAD}")
        if broken and not self._backward_runs:
            return  # it has come to its end meanwhile, in another thread
        self._backward_runs = False
        for scope in self._inner_forwards:
            self._end_uses(scope, ())
        self._forget_inner()
        for unit in self._units:
            if not in_forward:
                unit.forward_uses = 0
            unit.backward_uses = unit.num_uses = 0
            unit.close()
        dropped = broken and self._grads.abandon()
        if self._updates is not None:
            self._updates.abandon()
        if dropped:
            warnings.warn(
                "the last backward was left by an exception: its gradients are dropped, no step used them",
                stacklevel=2,
            )

    # Backward

    def leave_backward(self, units: tuple[Unit, ...]) -> None:
        """The backward through a forward with these units is over."""
        if self._spans.on:
            self._spans.backward.pause()
        for unit in units:
            unit.backward_uses = max(unit.backward_uses - 1, 0)
            unit.close()
            if self._trimmer is not None:
                self._trimmer.freed(unit.layout.nbytes)
        if self._updates is not None:
            self._updates.advance()

    def _enter_in_backward(self, scope: Scope, inputs: Iterable[Any], runtime: object) -> None:
        """A node runs a forward: a checkpoint's once more, or one with a graph, if any, and a backward of its own."""
        if runs_again(saving_hooks()):
            for unit in scope.units:
                self._recompute(unit)
            return
        if self.ending() is None:
            self.note_backward()
        self._inner_forwards.append(scope)
        scope.saving = self._saved.hooks(partial(self._use_in_backward, runtime=runtime), self._prefetcher.use)
        for unit in scope.units:
            if self._updates is not None:
                self._updates.before_use(unit)
            self._use(unit)
        if scope.units and (self.any_leaves or self._updates is not None):
            watch_inputs(inputs, partial(self._leave_inner, scope.units))

    def _exit_in_backward(self, call: FrameType, output: Any) -> Any:
        # After an exception the frame that called the first hook is gone.
        scopes = self._inner_forwards
        if not scopes or not (scopes[-1].caller is call or not runs(scopes[-1].caller)):
            return None
        scope = scopes.pop()
        if scope.saving is not None:
            scope.saving.__exit__(None, None, None)
        replaced = self._keep_views(output, scopes) if self.any_leaves else None
        if changed := self._end_uses(scope, scopes):
            raise changed_in_forward(changed)
        return replaced

    def _note_inner(self, unit: Unit) -> None:
        """A backward begins to use the unit: one inside of another ends that use at its own end."""
        task = torch._C._current_graph_task_id()
        if self._task == -1:
            self._task = task
        if task == self._task:
            return
        if task not in self._inner_uses:
            self._inner_uses[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_inner, task))
        self._inner_uses[task].append(unit)

    def _leave_inner(self, units: Sequence[Unit]) -> None:
        """The part of an inner backward through a forward with these units is over."""
        begun = self._inner_uses.get(torch._C._current_graph_task_id(), [])
        self.leave_backward(tuple(unit for unit in units if unit in begun))

    def _end_inner(self, task: int) -> None:
        begun = self._inner_uses.pop(task, [])
        for unit in begun:
            unit.backward_uses = min(unit.backward_uses, 1)
        self.leave_backward(tuple(begun))

    def _forget_inner(self) -> None:
        self._inner_forwards.clear()
        self._inner_uses.clear()

    def _recompute(self, unit: Unit) -> None:
        if self._updates is not None:
            self._updates.before_use(unit)
        # Counted per forward, so that a region which uses a unit twice keeps it until both are done.
        if unit.backward_uses > 0:
            unit.backward_uses += 1
            self._prefetcher.use(unit)
        else:
            self._use_in_backward(unit)
        # What is saved in a recomputed forward passes no hook of ours, so no unpack asks for it.
        unit.passing = False

    def _use_in_backward(self, unit: Unit, *, runtime: object = None) -> None:
        """Backward is about to read the unit. `runtime` is only held: a graph has this call, and needs the model."""
        if self.ending() is None:
            self.note_backward()
        if self._updates is not None:
            self._updates.before_use(unit)
        if self._spans.on:
            self._spans.backward.uses(unit.name)
        if unit.backward_uses > 0:
            self._prefetcher.use(unit)
        else:
            # Counted first: what is in use is not evicted to fetch what comes next.
            unit.backward_uses = 1
            self._note_inner(unit)
            self._prefetcher.acquire(unit)
            unit.open()
            unit.passing = unit.forward_uses == 0

    def note_backward(self) -> None:
        """A sign of a backward that was not known before (`ending`): makes sure that its end is noticed."""
        if self._backward_runs:
            self._recover(in_forward=bool(self.forwards))  # of one that broke off; no forward has come between
        self._life.check_alive()
        torch.autograd.Variable._execution_engine.queue_callback(self.begin_backward())

    def begin_backward(self) -> partial[None]:
        """Returns what is to be called at its end, and let go of where it breaks off, as autograd does."""
        ending = partial(self._end_backward)
        self._backward_runs, self.ending = True, weakref.ref(ending)
        self.begin_part()
        self._prefetcher.pool.begin_backward()
        if self._spans.on:
            self._spans.backward.begin()
        if self._trimmer is not None:
            self._trimmer.begin()
        return ending

    def begin_part(self) -> None:
        """The next sign is of a backward that is inside of no other: of one that begins, or of the next part of it."""
        self._task = torch._C._current_graph_task_id()

    def _end_backward(self) -> None:
        self._backward_runs, self.ending = False, _NO_BACKWARD
        self._forget_inner()
        for unit in self._units:
            unit.backward_uses = unit.num_uses = 0
            unit.close()
        self._prefetcher.meet("the end of a backward")
        self._grads.finish_backward()
        if self._updates is not None:
            self._updates.end()
        if self._spans.on:
            self._spans.backward.end()
