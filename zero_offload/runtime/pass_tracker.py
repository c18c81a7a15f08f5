"""The order of events: forwards, backwards and touches of one offloaded model, whatever order they come in.

Owns the uses of units. Hooks need not pair: recompute enters a forward inside backward, and an exception may leave any
of them. So forwards push and pop a stack, and uses of units are counted. The next outermost forward starts from a clean
state. Never moves bytes: it asks `ParamPrefetcher` for units and lets go of them.

[Note: when a unit is needed in backward]
A node of the graph reads a parameter only after unpacking it. While the model's forward runs, saved tensors pass
through `SavedTensors`, so unpacking a view of a unit's buffer fetches that unit first. Tensors that are recomputed
inside backward (torch.utils.checkpoint) are saved elsewhere, but their forward passes the hooks again. A unit's
backward ends when the gradient of an input is complete, or with the whole backward.

[Note: backwards inside of a backward]
A node may run forwards and a backward of its own (reversible networks, adjoints, reentrant checkpoints). Such a forward
is one like any other: its uses end with it, and what it saves asks for units. Units that the inner backward begins to
use are released when it ends. Autograd numbers backwards, so an inner one is told by its number.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from zero_offload.base.checks import DEAR_CHECKS
from zero_offload.base.errors import ConfigError, IntegrityError, ZeroOffloadError
from zero_offload.base.spans import Opened, Track
from zero_offload.base.threads import FirstError
from zero_offload.base.types import MIB, format_bytes
from zero_offload.runtime.bring import bring
from zero_offload.runtime.grads.gradients import Gradients
from zero_offload.runtime.grads.section import Given
from zero_offload.runtime.graphs import refuse_graph_modes
from zero_offload.runtime.prefetcher import ParamPrefetcher
from zero_offload.runtime.saved_tensors.activations import Activations
from zero_offload.runtime.saved_tensors.recompute import drop_stale
from zero_offload.runtime.saved_tensors.tensors import SavedTensors, exit_hooks, runs, runs_again, saving_hooks
from zero_offload.runtime.units.unit import Section, Unit, UnitState, UpdatesInBackward
from zero_offload.standins.away import Away
from zero_offload.standins.derived import Derived
from zero_offload.standins.refusals import cannot_wrap, refuse_copy, wrapper_of
from zero_offload.storage.memory.heap import HeapHole, HeapTrimmer

_IN_ANOTHER_THREAD = (
    "of this model runs in another thread; what starts now could take its parameters out of memory. Run one forward at "
    "a time, and none beside a backward"
)


_NO_BACKWARD = weakref.ref(set[None]())
"""A dead reference."""

TOLD_CASTS_BYTES = 64 * MIB
"""From so many bytes on that autocast's cache keeps, a warning says so."""


def in_backward() -> bool:
    """True if autograd runs on this thread now."""
    return torch._C._current_graph_task_id() != -1


class ModelLife:
    """Knows if a model can be used: in its own process, until it is closed, with the states of one whole step."""

    def __init__(self, errors: FirstError) -> None:
        """`errors` has what the model's work has met."""
        self._errors = errors
        self._pid = os.getpid()
        self.is_closed = False
        """True if nothing but the model's figures can be asked for any more."""
        self.lacks_weights = False
        """True if values were left out, and none have been loaded in their place."""
        self.lost_base = ""
        """The error of the files of the base that frozen parts of the model rest in; empty while they are whole."""
        self.half_written = ""
        """The load or the change that broke off half-way, if there is one."""
        self.half_updated = ""
        """A clause for the error: the units that an unfinished or broken backward has updated (overlap="backward")."""
        self.assigned: dict[int, tuple[str, Given]] = {}
        """Tensors that the program has assigned to `.data`, which is a copy here: the parameter's name, by its id."""

    @property
    def is_in_own_process(self) -> bool:
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """A forked child has neither our pages nor our threads: it must not get as far as touching them."""
        if os.getpid() != self._pid:
            raise ZeroOffloadError(
                f"an offloaded model works in the process that offloaded it ({self._pid}), not in its forked child "
                f"({os.getpid()}). Keep the model out of DataLoader workers, or start them by forkserver or spawn"
            )

    def check_alive(self) -> None:
        """Raise in a forked child, and for a model that was closed."""
        self.check_process()
        if self.is_closed:
            raise ZeroOffloadError(
                "this model was closed by zo.close; build and offload it again (existing='resume' goes on from the "
                "last generation)"
            )

    def check_assigned(self, chosen: Iterable[int] | None = None) -> None:
        """Raise where a tensor that was assigned to the `.data` of these parameters, or of any, was changed since."""
        for key in (list(self.assigned) if chosen is None else chosen) if self.assigned else ():
            name, given = self.assigned.get(key, ("", None))
            if given is not None and given.counter._version != given.version:
                raise ZeroOffloadError(
                    f"the tensor that was assigned to .data of {name} was changed afterwards. In plain torch its "
                    "memory is the parameter's; here the parameter has a copy, and misses the change. Assign again "
                    "after the last change, or change the parameter (param.copy_(values))"
                )

    def check_usable(self) -> None:
        """Raise where there is nothing to compute with or to read."""
        if self.is_closed or os.getpid() != self._pid:
            self.check_alive()
        if self._errors.error is not None:
            self._errors.check_whole()
        if self.half_updated and not in_backward():
            raise ZeroOffloadError(
                f"a backward with overlap='backward' was left by an exception when {self.half_updated}, so this "
                "model's states are a mix of two steps. Load a whole checkpoint by zo.load_checkpoint, or start again "
                "with zo.offload (existing='resume' goes on from the last generation)"
            )
        if self.half_written:
            raise ZeroOffloadError(
                f"{self.half_written} failed half-way, so this model's states are a mix of two. Load a whole "
                "checkpoint by zo.load_checkpoint, or start again with zo.offload (existing='resume' goes on from the "
                "last generation)"
            )
        if self.lost_base:
            raise IntegrityError(self.lost_base)
        if self.lacks_weights:
            raise ConfigError(
                'this model was built by zo.deferred_init(values="skip") and has no weights yet. Load them by '
                'zo.load_pretrained(model, "folder/") or zo.load_checkpoint, or build it by zo.deferred_init()'
            )


@dataclass
class Scope:
    """One running forward of a hooked module."""

    units: tuple[Unit, ...]
    caller: FrameType
    """Runs as long as this forward does."""
    touched: list[Unit] = field(default_factory=list)
    saving: saved_tensors_hooks | None = None
    """Our hooks for saved tensors, where others or none were in place."""
    opened: Opened | None = None
    """Since its units are here, where it is recorded."""

    @property
    def name(self) -> str:
        """The names of its units, for a trace."""
        return ", ".join(unit.name for unit in self.units)


class Round(Protocol):
    """Forwards that take turns, unit by unit, each on a thread of its own: those of `zo.accumulate`."""

    def enter(self, units: tuple[Unit, ...], inputs: Iterable[Any]) -> None:
        """One of them comes to a module with these units; returns when it is its turn to use them.

        Takes itself back if the round was left by an exception."""

    def hold(self, unit: Unit) -> None:
        """A unit is here: it stays until all of them have passed it."""


def changed_in_forward(names: Sequence[str]) -> ZeroOffloadError:
    return ZeroOffloadError(
        f"forward has changed {', '.join(names[:3])}{' and others' * (len(names) > 3)} in place; the change would be "
        "lost: the parameter leaves memory, or its fp32 master does not follow. Change it between steps, in "
        "'with zo.gathered(module, mode=\"write\"):', or compute with a changed copy. If it has converted the dtype, "
        f"Precision(modules={{{names[0]!r}: 'fp32'}}) gives it that one from the start"
    )


@dataclass
class InputsWatch:
    """A tensor hook of a forward's inputs: runs `then` in every backward, when that forward's own is over.

    It is over as soon as one input's gradient is complete. Autograd runs nodes in the reverse order of their making,
    and the forward's nodes are younger than all of its inputs. Others may have far to go, such as an encoder's output
    that every block of a decoder takes.

    torch's register_multi_grad_hook does this too, but its hooks hold the graph they sit in. Every forward would stay
    in memory until Python's garbage collector has found it, one module at a time.
    """

    then: Callable[[], None]
    _backward: int = -1

    def __call__(self, grad: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            self.then()


def watch_inputs(inputs: Iterable[Any], then: Callable[[], None]) -> None:
    """Run `then` in every backward, when the backward through the forward that gets these inputs is over."""
    watch = InputsWatch(then)
    for tensor in tensors_in(inputs):
        # Inputs of the graph itself are left out: autograd.grad refuses to say when those are complete.
        if tensor.grad_fn is not None:
            tensor.register_hook(watch)


_PLAIN = (int, float, str, type(None))


def tensors_in(inputs: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among the inputs, in containers, and in the attributes of other objects, such as dataclasses."""
    for value in inputs:
        # Nearly all inputs are of these types. torch's walk over trees takes longer than a hook may.
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
        elif not isinstance(value, _PLAIN):
            yield from _tensors_of(value)


def _tensors_of(thing: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(thing):
        values = [leaf] if isinstance(leaf, Tensor) else tree_leaves(list(getattr(leaf, "__dict__", {}).values()))
        yield from (value for value in values if isinstance(value, Tensor))


def _module_call() -> FrameType:
    """The frame that calls the hook which calls this; torch.compile's, between the two, end with the hook."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "").startswith("torch._dynamo") and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _lives(ending: Callable[[], object | None]) -> bool:
    """True if the backward still runs. After an error, a GPU's thread may drop its backward a moment later."""
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
        activations: Activations | None,
        hole: HeapHole | None,
        life: ModelLife,
        updates: UpdatesInBackward | None,
        device: torch.device | None = None,
    ) -> None:
        """`updates`: if gradients are used by the backward that makes them. `device`: where the model computes, if that
        is not where a program's tensors are made."""
        self._units = units
        self._device = device
        self._brought = weakref.WeakSet[nn.Module]()
        """Modules whose forward was the outermost one and had inputs elsewhere: a checkpoint may run it again."""
        self._life = life
        self._prefetcher = prefetcher
        self._streams = prefetcher.streams
        self._reads = None if self._streams is None else self._streams.use
        """Told when an operation saves a parameter, which it reads on a stream that may be its own."""
        self._spans = prefetcher.spans
        self._records = False
        """True if spans are recorded of the forward that runs."""
        self._grads = grads
        self.forwards: list[Scope] = []
        """The forwards that run now, the outermost first."""
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
        """True if this forward looks for changes of parameters that torch's versions do not show."""
        self._backward_runs = False
        """True while a backward runs, and after a broken one until the next forward or backward."""
        self._task = -1
        """Autograd's number of it; -1 until it is known. See [Note: backwards inside of a backward]."""
        self._inner_forwards: list[Scope] = []
        """The forwards that nodes of a backward run now, the outermost first."""
        self._inner_uses: dict[int, list[Unit]] = {}
        """Units that backwards inside of it have begun to use, by their numbers."""
        self.end_ref: Callable[[], object | None] = _NO_BACKWARD
        """Weak reference to the callback at the end of the running backward; returns None if none runs, or one broke
        off. Every sign of a backward asks it, and calls `note_backward` if it returns None."""
        self.any_leaves = False
        """True if units leave: then the end of a use matters, and so do views of parameters that the program holds."""
        self._trimmer: HeapTrimmer | None = None
        self._hole = hole
        self._updates = updates
        self._saved = SavedTensors((), activations, always=grads.updates_in_backward)
        self.grow(units)

    def grow(self, units: Sequence[Unit]) -> None:
        """These are used too; the list that this object was given has them already."""
        self.any_leaves = self.any_leaves or not all(unit.resident for unit in units)
        # Memory is short where units are away from it: then some ms per step for the heap are well spent.
        if self._trimmer is None and any(unit.on_host and not unit.resident for unit in units):
            self._trimmer = HeapTrimmer()
        self._saved.grow(units)

    def forget(self, sections: Iterable[Section]) -> None:
        """The memory of these goes."""
        self._saved.forget(sections)

    __reduce_ex__ = refuse_copy

    @property
    def active(self) -> bool:
        """True if parameters may be touched: a forward or backward of this model is running on this thread."""
        runs_here = bool(self.forwards) and threading.get_ident() == self._thread
        return runs_here or torch._C._current_graph_task_id() != -1

    def check_alone(self, what: str) -> None:
        """Raise where a forward runs in another thread: `what` starts now, and units move there."""
        if self.forwards and not self.active and any(runs(scope.caller) for scope in self.forwards):
            raise ZeroOffloadError(f"{what}, and a forward {_IN_ANOTHER_THREAD}")

    # Forward

    def enter(
        self,
        units: tuple[Unit, ...],
        runtime: object,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Any] | None:
        """A hooked module's forward starts; returns what replaces its inputs, or None.

        The outermost forward's are brought to the compute device. The graph keeps `runtime`: backward may come after
        the model is dropped.
        """
        kind = type(module)
        if kind.__module__.startswith("torch.distributed.") and (what := wrapper_of(kind.__module__)):
            # It wraps without looking at a parameter.
            raise cannot_wrap(what, f"an offloaded {kind.__bases__[-1].__name__}")
        given = inputs = (args, kwargs)
        scope = Scope(units, _module_call())
        if torch._C._current_graph_task_id() != -1:
            if module in self._brought:
                inputs = bring(given, self._device)
            self._enter_in_backward(scope, inputs, runtime)
            return None if inputs is given else inputs
        if self.round is not None:
            self.round.enter(units, inputs)
        thread = threading.get_ident()
        if any((scope.units is units or thread != self._thread) and not runs(scope.caller) for scope in self.forwards):
            # Not a module that calls itself: an earlier forward ended without its exit hook, as after a Ctrl-C.
            self.reset_forwards()
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
        if is_outermost:
            try:
                if self.round is None:
                    self.begin(inputs)
                if self._device is not None and (inputs := bring(given, self._device)) is not given:
                    self._brought.add(module)
            except BaseException:
                self.forwards.clear()
                raise
        scope.saving = self._saved.hooks(partial(self._use_in_backward, runtime=runtime), self._reads)
        whole = len(self.forwards) == 1 and self.round is None
        if whole and self._records:
            names = f"{Track.FORWARD.value}, {scope.name}" if units else Track.FORWARD.value
            scope.opened = self._spans.open(Track.FORWARD, names)  # with its waits
        for unit in units:
            self._use(unit)
        if units and not whole and self._records:
            scope.opened = self._spans.open(Track.FORWARD, scope.name)
        if units and (self.any_leaves or self._updates is not None) and self.round is None:
            # Learn when the backward through this forward is over.
            watch_inputs(inputs, partial(self.end_backward_through, units))
        if self._watches and self._prefetcher.device_limit is not None:
            refuse_graph_modes(module)
        return None if inputs is given else inputs

    def exit(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The forward ended, with a result or an exception; returns what replaces the result, or None."""
        if torch._C._current_graph_task_id() != -1:
            return self._exit_in_backward(_module_call(), output)
        if not self.forwards or threading.get_ident() != self._thread:
            return None
        scope = self.forwards.pop()
        if scope.saving is not None:
            scope.saving.__exit__(None, None, None)
        replaced = self._keep_views(output, self.forwards) if self.any_leaves else None
        changed = self._end_uses(scope, self.forwards)
        if not self.forwards and self.round is None:
            self._prefetcher.meet("the end of a forward")
            if DEAR_CHECKS:
                self._check_unused()
            if self._saved.cast_bytes >= TOLD_CASTS_BYTES and not self._has_told_casts:
                self._tell_casts()
        if scope.opened is not None:
            self._spans.close(scope.opened)
        if changed:
            raise changed_in_forward(changed)
        return replaced

    def _check_unused(self) -> None:
        """No forward runs: none uses a unit."""
        used = [unit.name for unit in self._units if unit.forward_uses or unit.broken_uses]
        assert not used, f"no forward runs, and {', '.join(used)} count as in use"

    def _tell_casts(self) -> None:
        """Autocast's cache cannot be emptied for one unit: gradients of weights that are used twice would add up
        otherwise."""
        kinds = {s.flat.device.type for unit in self._units for s in unit.sections}
        if torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, kinds)):
            self._has_told_casts = True
            warnings.warn(
                f"torch.autocast keeps {format_bytes(self._saved.cast_bytes)} of casts of fp32 weights in memory until "
                "its block ends, though the weights leave. torch.autocast(..., cache_enabled=False) keeps none; or "
                "offload with precision='bf16'",
                stacklevel=3,
            )

    def _end_uses(self, scope: Scope, around: Sequence[Scope]) -> list[str]:
        """Names of parameters that the forward has changed."""
        changed: list[str] = []
        for unit in (*scope.units, *scope.touched):
            changed += unit.end_use(self._prefetcher.holds_value)
            if unit.forward_uses and self.round is None:
                unit.used_by_operations = not any(unit in each.units for each in around)
        return changed

    def _keep_views(self, output: Any, around: Sequence[Scope]) -> Any:
        """Views of parameters among the results outlive this forward: they keep their unit, or become copies."""
        found = [x for x in tensors_in([output]) if not isinstance(x, nn.Parameter | Away)]
        # Those of a buffer that may go.
        views = [x for x in found if (unit := self._saved.unit_of(x)) is not None and not unit.resident]
        replaced = None
        if any(type(x) is Derived for x in found):
            replaced = output = tree_map_only(Derived, lambda x: x.plain, output)
        if not views:
            return replaced
        if not around:
            ids = set(map(id, views))
            return tree_map_only(Tensor, lambda x: x.clone() if id(x) in ids else x, output)
        for unit in filter(None, map(self._saved.unit_of, views)):
            unit.forward_uses += 1
            around[-1].touched.append(unit)
        return replaced

    def reset_forwards(self) -> None:
        """Forwards ended without their exit hooks: nothing of them runs any more."""
        drop_stale()
        while self.forwards:
            saving = self.forwards.pop().saving
            if saving is not None:
                exit_hooks(saving)
        for unit in self._units:
            unit.drop_uses()
            unit.guard()

    def touch(self, units: Sequence[Unit]) -> None:
        """An operation needs parameters of these units outside of their modules; valid while `active`."""
        by_operations = [unit for unit in units if unit.used_by_operations or not unit.runs]
        for unit in units:
            unit.used_by_operations = False  # none of them goes while another one comes
        is_backward = in_backward()
        recomputed = is_backward and runs_again(saving_hooks())
        for unit in units:
            if recomputed or (is_backward and not self._inner_forwards):
                with self._counted(unit):
                    self._use_in_backward(unit)
            elif unit.forward_uses == 0:
                (self._inner_forwards if is_backward else self.forwards)[-1].touched.append(unit)
                with self._counted(unit):
                    self._use(unit, in_backward=is_backward)
            elif self._streams is not None:
                self._streams.use(unit)
        for unit in by_operations:
            # A recomputed forward saves its tensors without asking us.
            unit.used_by_operations = not recomputed

    def _counted(self, unit: Unit) -> AbstractContextManager[None]:
        """Count what it costs to fetch a unit for an operation outside of its modules."""
        if unit.state is UnitState.PRESENT:
            return nullcontext()
        return self._prefetcher.counters.bringing(f"unit {unit.name}", unit.layout.nbytes)

    def _use(self, unit: Unit, *, in_backward: bool = False) -> None:
        unit.forward_uses += 1
        unit.num_uses += not in_backward
        unit.used_by_operations = False
        if unit.forward_uses > 1:
            self._use_again(unit)
            return
        self._prefetcher.acquire(unit)
        assert unit.state is UnitState.PRESENT, f"unit {unit.name} is used, and {unit.state.value}"
        unit.unguard()
        if self._watches or unit.compares_values:
            unit.watch()
        if self.round is not None and not in_backward:
            self.round.hold(unit)

    def _use_again(self, unit: Unit) -> None:
        """A unit in use is read once more, maybe on another stream."""
        if self._streams is not None:
            self._streams.use(unit)

    def resume(self, stack: list[Scope]) -> None:
        """The forwards on `stack` go on, on this thread, in a round."""
        self.forwards, self._thread = stack, threading.get_ident()

    def begin(self, inputs: Iterable[Any] = ()) -> None:
        """The outermost forward: whatever the last step left behind is put right first."""
        self._life.check_usable()
        self._life.check_assigned()
        if self._backward_runs or any(unit.forward_uses or unit.backward_uses for unit in self._units):
            self._clean_up()
        kind = "grad" if torch.is_grad_enabled() else "no_grad"
        self._num_cycles[kind] += 1
        if self._hole is not None and kind == "grad":
            self._hole.begin()
        # Forwards look in the first, second, fourth, eighth cycle and so on, which costs nothing in the long run. All
        # uses of a unit look, since several modules may use it in turn.
        self._watches = self._num_cycles[kind].bit_count() == 1
        self._records = self._spans.records
        self._saved.begin(checks=self._watches)
        self._grads.begin_forward()
        sizes = () if self._prefetcher.device_limit is None else (tensor.numel() for tensor in tensors_in(inputs))
        self._prefetcher.begin_cycle(kind, sum(sizes))

    def recover(self) -> None:
        """Clean up after a backward that broke off. Its gradients are dropped, since some are not whole, and the units
        that it used go to rest. Called before a norm, a step, or a read or write of values from outside.
        """
        self._life.check_alive()
        if self._backward_runs and not self.active:
            self._clean_up()

    def _clean_up(self, *, in_forward: bool = False) -> None:
        """Clean up after a backward, or forwards, that broke off; with `in_forward` other forwards run now."""
        broken = self._backward_runs
        if broken and _lives(self.end_ref):
            raise ZeroOffloadError(f"a backward {_IN_ANOTHER_THREAD}")
        if broken and not self._backward_runs:
            return  # it has come to its end meanwhile, in another thread
        self._backward_runs = False
        for scope in self._inner_forwards:
            self._end_uses(scope, ())
        self._clear_inner()
        for unit in self._units:
            if not in_forward:
                unit.drop_uses()
            unit.backward_uses = unit.num_uses = 0
            unit.guard()
        dropped = broken and self._grads.reset()
        self._prefetcher.pool.end_backward()
        if self._updates is not None:
            self._updates.cancel()
        if dropped:
            warnings.warn(
                "the last backward was left by an exception: its gradients are dropped, no step used them",
                stacklevel=2,
            )

    # Backward

    def end_backward_through(self, units: tuple[Unit, ...]) -> None:
        """The backward through a forward with these units is over."""
        if self._spans.on:
            self._spans.backward.pause()
        for unit in units:
            if unit.backward_uses > 0:  # else nothing in this backward has read it
                unit.backward_uses -= 1
            unit.guard()
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
        if self.end_ref() is None:
            self.note_backward()
        self._inner_forwards.append(scope)
        scope.saving = self._saved.hooks(partial(self._use_in_backward, runtime=runtime), self._reads)
        for unit in scope.units:
            if self._updates is not None:
                self._updates.before_use(unit)
            self._use(unit, in_backward=True)
        if scope.units and (self.any_leaves or self._updates is not None):
            watch_inputs(inputs, partial(self._end_inner_part, scope.units))

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

    def _end_inner_part(self, units: Sequence[Unit]) -> None:
        """The part of an inner backward through a forward with these units is over."""
        begun = self._inner_uses.get(torch._C._current_graph_task_id(), [])
        self.end_backward_through(tuple(unit for unit in units if unit in begun))

    def _end_inner(self, task: int) -> None:
        begun = self._inner_uses.pop(task, [])
        for unit in begun:
            unit.backward_uses = min(unit.backward_uses, 1)
        self.end_backward_through(tuple(begun))

    def _clear_inner(self) -> None:
        self._inner_forwards.clear()
        self._inner_uses.clear()

    def _recompute(self, unit: Unit) -> None:
        if self._updates is not None:
            self._updates.before_use(unit)
        # Counted per forward, so that a region which uses a unit twice keeps it until both are done. A use that an
        # operation has begun becomes this forward's: only forwards' uses have an end of their own.
        if unit.backward_uses > 0 and not unit.used_by_operations:
            unit.backward_uses += 1
            self._use_again(unit)
        else:
            self._use_in_backward(unit)
        # A recomputed forward saves its tensors past our hooks, so no unpack asks for the unit.
        unit.used_by_operations = False

    def _use_in_backward(self, unit: Unit, *, runtime: object = None) -> None:
        """Backward is about to read the unit. `runtime` is only held: a graph has this call, and needs the model."""
        if self.end_ref() is None:
            self.note_backward()
        if self._updates is not None:
            self._updates.before_use(unit)
        if self._spans.on:
            self._spans.backward.uses(unit.name)
        if unit.backward_uses > 0:
            if self._streams is not None:
                self._streams.use(unit)
        else:
            # Counted first: what is in use is not evicted to fetch what comes next.
            unit.backward_uses = 1
            self._note_inner(unit)
            self._prefetcher.acquire(unit)
            assert unit.state is UnitState.PRESENT, f"unit {unit.name} is used, and {unit.state.value}"
            unit.unguard()
            unit.used_by_operations = unit.forward_uses == 0

    def note_node(self) -> None:
        """A node of the graph runs that reads values of this model."""
        if self.end_ref() is None:
            self.note_backward()

    def note_backward(self) -> None:
        """A sign of a backward that was not known before (`end_ref`): makes sure that its end is noticed."""
        if self._backward_runs:
            self._clean_up(in_forward=bool(self.forwards))  # of a broken one; no forward has come between
        self._life.check_alive()
        torch.autograd.Variable._execution_engine.queue_callback(self.begin_backward())

    def begin_backward(self) -> partial[None]:
        """Returns what is to be called at its end, and let go of where it breaks off, as autograd does."""
        ending = partial(self._end_backward)
        self._backward_runs, self.end_ref = True, weakref.ref(ending)
        self.begin_part()
        self._prefetcher.pool.begin_backward()
        if self._spans.on:
            self._spans.backward.begin()
        if self._trimmer is not None:
            self._trimmer.begin()
        return ending

    def begin_part(self) -> None:
        """Take the running backward as the outermost one: it begins here, or its next part does."""
        self._task = torch._C._current_graph_task_id()

    def _end_backward(self) -> None:
        self._backward_runs, self.end_ref = False, _NO_BACKWARD
        self._clear_inner()
        for unit in self._units:
            unit.backward_uses = unit.num_uses = 0
            unit.guard()
        try:
            self._prefetcher.meet("the end of a backward")
            self._grads.finish_backward()
        except BaseException:
            self._backward_runs = True  # it has broken off, and its sums with it
            raise
        self._prefetcher.pool.end_backward()
        if self._updates is not None:
            self._updates.end()
        if self._spans.on:
            self._spans.backward.end()
