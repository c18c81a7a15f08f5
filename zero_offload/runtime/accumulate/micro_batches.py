"""Micro-batches of one step, each unit for all of them before the next one: `zo.accumulate`.

Owns the order: of forwards by `Relay`, of backwards by what `MicroGraph` has found. Moves no bytes: `PassTracker` asks
for units as in any forward and backward, and this says how long they stay. The calls: `forward`, then `backward`, once.

Backward takes the units against the order of forward. At each unit the micro-batches come in the order of a loop. A
micro-batch waits where it would add to a parameter's gradient before an earlier one has.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ConfigError
from zero_offload.base.host import host_empty
from zero_offload.base.spans import Track
from zero_offload.hardware.device import Device
from zero_offload.runtime.accumulate.graph import GraphPart, MicroGraph, leaf_of
from zero_offload.runtime.accumulate.relay import Forks, Relay, Runner, Surroundings
from zero_offload.runtime.grads.gradients import Gradients
from zero_offload.runtime.pass_tracker import PassTracker, Scope, changed_in_forward
from zero_offload.runtime.prefetcher import ParamPrefetcher
from zero_offload.runtime.saved_tensors.activations import Activations
from zero_offload.runtime.saved_tensors.tensors import recomputed_later, saving_hooks
from zero_offload.runtime.units.unit import Unit
from zero_offload.standins.owners import owner_of
from zero_offload.standins.sources import Owner


class MicroBatches:
    """Those of one call; implements `runtime.pass_tracker.Round`."""

    def __init__(
        self,
        losses: Sequence[Callable[[], Tensor]],
        forks: Forks,
        owner: Owner,
        tracker: PassTracker,
        prefetcher: ParamPrefetcher,
        grads: Gradients,
        activations: Activations | None,
        device: Device,
    ) -> None:
        """Each of `losses` runs a micro-batch's forwards; the rest is of one offloaded model."""
        self._forks = forks
        self._owner = owner
        self._tracker = tracker
        self._prefetcher = prefetcher
        self._grads = grads
        self._activations = activations
        self._graphs = [MicroGraph(number, activations) for number in range(len(losses))]
        self._stacks: list[list[Scope]] = [[] for _ in losses]
        self._losses: list[Tensor] = [host_empty(0, torch.float32) for _ in losses]
        works = [partial(self._compute, number, loss) for number, loss in enumerate(losses)]
        surroundings = Surroundings(device)
        self._relay: Relay | None = Relay(works, surroundings, forks, self._begin_station, self._begin_turn)
        """The forwards that take turns; None once all are over."""
        self._held: list[Unit] = []
        self._visit = 0
        self._lines: dict[int, deque[int]] = {}
        """Per gradient that arrives as one: the micro-batches that have still to add to it, in order."""

    # Forward

    def forward(self) -> list[Tensor]:
        """Run all forwards; the losses, without their graphs."""
        tracker, spans = self._tracker, self._prefetcher.spans
        opened = spans.open(Track.FORWARD, Track.FORWARD.value)
        relay = self._relay
        assert relay is not None
        tracker.reset_forwards()
        tracker.begin()
        try:
            tracker.round = self
            relay.run()
            self._release()
        except BaseException:
            tracker.resume([])  # what hooks have entered ended with its thread
            tracker.reset_forwards()
            raise
        finally:
            tracker.round = None
            tracker.resume([])
            self._relay = None  # it knows this object: a cycle would keep the model
        self._prefetcher.meet("the end of a forward")
        spans.close(opened)
        return [loss.detach() for loss in self._losses]

    def _compute(self, number: int, loss: Callable[[], Tensor]) -> None:
        self._tracker.resume(self._stacks[number])
        self._losses[number] = loss()

    def enter(self, units: tuple[Unit, ...], inputs: Iterable[Any]) -> None:
        """A micro-batch comes to a module: the others catch up before it goes on to new units."""
        relay = self._relay
        if relay is None or not relay.is_running:
            self._tracker.round = None  # Ctrl-C has struck before `forward` could see to it
            return
        if not units or threading.get_ident() != relay.turn.thread.ident:
            return  # a thread of the program's own is refused by the tracker
        number = relay.turn.number
        graph, hooks = self._graphs[number], saving_hooks()
        region = hooks[0] if hooks is not None and recomputed_later(hooks) else None
        within = region is not None and region == graph.region
        if within or graph.parts[-1].units == units:
            return  # what is run again as a whole is one part
        graph.region = region
        if torch.is_grad_enabled():
            graph.cut(inputs)
        try:
            relay.wait(tuple(unit.index for unit in units))
        finally:
            self._tracker.resume(self._stacks[number])
        graph.begin_part(units, self._visit)

    def hold(self, unit: Unit) -> None:
        """Keep it for the micro-batches that come to it next."""
        unit.forward_uses += 1
        self._held.append(unit)

    def _begin_station(self) -> None:
        self._release()
        self._visit += 1

    def _begin_turn(self, runner: Runner) -> None:
        if self._activations is not None:
            self._activations.part = (self._visit, -runner.number)

    def _release(self) -> None:
        held, self._held = self._held, []
        changed = [name for unit in held for name in unit.end_use(self._prefetcher.holds_value)]
        if changed:
            raise changed_in_forward(changed)

    # Backward

    def backward(self) -> None:
        """Run all backwards; their gradients have arrived when this returns."""
        for graph, loss in zip(self._graphs, self._losses, strict=True):
            graph.plan(loss, self._together)
            for part in graph.left:
                for group in part.completes:
                    self._lines.setdefault(group, deque()).append(graph.number)
        self._losses.clear()
        end = self._tracker.begin_backward()
        if self._activations is not None:
            self._activations.begin_parts()
        try:
            self._grads.expected = self._lines
            self._run_parts()
        except BaseException:
            del end  # a program that keeps the exception keeps this frame
            raise
        finally:
            self._grads.expected = {}
            if self._activations is not None:
                self._activations.end_backward()
        end()

    def _together(self, leaf: Tensor) -> int:
        """A number that leaves share if their gradients must arrive with each other."""
        owner = owner_of(leaf) if isinstance(leaf, nn.Parameter) else None
        if owner is self._owner and isinstance(leaf, nn.Parameter):
            return self._grads.arrive_together(leaf)
        if owner is not None:
            raise ConfigError(
                f"zo.accumulate trains one offloaded model, and {owner.places.describe(leaf)}, belongs to another one. "  # type: ignore[arg-type]
                "Freeze that one, or use a loop of loss_fn(model, batch).backward()"
            )
        return id(leaf)

    def _run_parts(self) -> None:
        visit, units = -1, tuple[Unit, ...]()
        while ready := [graph for graph in self._graphs if graph.left and self._may_run(graph)]:
            graph = max(ready, key=lambda each: (each.left[0].visit, -each.number))
            part = graph.left[0]
            if part.visit != visit:
                self._end_backward_through(units)
                visit, units = part.visit, part.units
            with self._forks.turn(graph.number):
                self._run_part(graph, part)

    def _run_part(self, graph: MicroGraph, part: GraphPart) -> None:
        self._tracker.begin_part()
        complete = graph.run()
        for group in part.completes:
            self._lines[group].popleft()
        leaves = [leaf_of(leaves[0]) for leaves in part.completes.values()]
        params = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and owner_of(leaf) is not None]
        for param in params:
            self._grads.begin_section(param)
        for leaf, grad in complete:
            _accumulate(leaf, grad)
        for param in params:
            self._grads.finish_section(param)

    def _may_run(self, graph: MicroGraph) -> bool:
        return all(self._lines[group][0] == graph.number for group in graph.left[0].completes)

    def _end_backward_through(self, units: tuple[Unit, ...]) -> None:
        """All backwards through this forward are over; recomputes have counted as further ones."""
        for unit in units:
            unit.backward_uses = min(unit.backward_uses, 1)
        self._tracker.end_backward_through(units)


def _accumulate(leaf: Tensor, grad: Tensor) -> None:
    """Accumulate into a leaf's gradient as autograd does, then call the leaf's post-accumulate hooks."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # it may be a parameter at rest
        if leaf.grad is not None:
            leaf.grad.add_(grad)
        elif type(grad) is Tensor and grad.layout is torch.strided and grad.stride() != leaf.stride():
            like = torch.empty_strided(leaf.shape, leaf.stride(), dtype=grad.dtype, device=grad.device)
            leaf.grad = like.copy_(grad)
        else:
            leaf.grad = grad
        hooks: Any = leaf._post_accumulate_grad_hooks
    for hook in list((hooks or {}).values()):
        hook(leaf)
