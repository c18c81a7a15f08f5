"""One micro-batch's graph, run backward part by part.

Owns where it is cut, and gradients on their way between parts. Never knows other micro-batches. The calls: `cut` and
`begin_part` in forward, `plan` when the loss is there, then `run` for each of `left`, from the last part to the first.

[Note: parts]
A part is what forward made between coming to one unit and coming to the next: autograd numbers its nodes as they are
made, so a part is a range of numbers, and one backward through the whole graph runs all nodes of a part before any of
an earlier one. `run` asks autograd for the gradients at the part's ends: parameters, cuts, and nodes of earlier parts.
They wait, and with the next part that has the same end they go in first. So each sum is added up in the order in which
one backward adds it up, and each node runs once.

[Note: cuts]
Autograd does not stop at an end that leads to another end: it would run both. So what a unit's module is given becomes,
in place, an input of the graph: a node that leads nowhere. Views cannot be cut in place, and what passes a unit unseen
is not; such ends stop autograd as long as none leads to another. Where one does, hooks take what flows into these ends
out of autograd's hands, which then runs what is behind them with no gradient, to no effect. The same is done where
torch's reentrant checkpoint, which refuses to be run for the gradients at given ends, is in a part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import checkpoint

from zero_offload.errors import ZeroOffloadError
from zero_offload.runtime.inputs import tensors_in
from zero_offload.runtime.units.unit import Unit

Edge = tuple[Node, int]
"""A node, and which of its inputs."""
_autograd: Any = torch.autograd
_functions: Any = torch._C._functions
_Leaf = _functions.AccumulateGrad


class _Cut(torch.autograd.Function):
    """Makes a tensor an input of the graph that may be changed in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        if grad is not None:
            raise ZeroOffloadError(
                "a backward inside of zo.accumulate: loss_fn returns the loss, and zo.accumulate runs its backward"
            )
        return None, None


_cut: Callable[[Tensor, Tensor], Tensor] = _Cut.apply


@dataclass(eq=False)
class Part:
    """Nodes of the graph, from number `first` up to the next part's."""

    units: tuple[Unit, ...]
    visit: int
    """Counts the units that forward came to, over all micro-batches."""
    first: int
    roots: dict[Edge, None] = field(default_factory=dict)
    """Where its backward begins."""
    ends: tuple[Edge, ...] = ()
    """Where it stops."""
    taken: frozenset[Edge] = frozenset()
    """Ends where hooks take the gradients."""
    completes: dict[int, list[Edge]] = field(default_factory=dict)
    """Gradients of leaves that no earlier part adds to, by what must arrive together."""


class MicroGraph:
    """What the forward of one micro-batch made."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.region: object = None
        """What the forward is inside of that will be run again in backward."""
        self.parts = [Part((), 0, 0)]
        self.left: list[Part] = []
        """To be run, in this order."""
        self._cuts: dict[Node, Edge] = {}
        """What each was cut off from."""
        self._cut_of: dict[Edge, Edge] = {}
        self._waiting: dict[Edge, Tensor] = {}
        self._anchor = torch.empty(0, device="cpu", requires_grad=True)

    # Forward

    def cut(self, inputs: Iterable[Any]) -> None:
        """A unit's module is about to be given these."""
        for tensor in tensors_in(inputs):
            if type(tensor) is not Tensor or tensor.grad_fn is None or tensor.grad_fn in self._cuts:
                continue
            if tensor._is_view() or not tensor.requires_grad:
                continue
            edge = get_gradient_edge(tensor)
            tensor.detach_()
            # It is not changed: nodes that have saved it find it as they left it.
            with _autograd._unsafe_preserve_version_counter(tensor):
                _cut(self._anchor, tensor)
            assert tensor.grad_fn is not None
            self._cuts[tensor.grad_fn] = (edge.node, edge.output_nr)
            self._cut_of[edge.node, edge.output_nr] = (tensor.grad_fn, 0)

    def begin_part(self, units: tuple[Unit, ...], visit: int) -> None:
        self.parts.append(Part(units, visit, _autograd._get_sequence_nr()))

    # Between

    def plan(self, loss: Tensor, together: Callable[[Tensor], int]) -> None:
        """Find every part's roots and ends; `together` says which leaves' gradients must arrive with each other."""
        edge = get_gradient_edge(loss)
        root = (edge.node, edge.output_nr)
        self._waiting[root] = torch.ones_like(loss)
        self._part_of(root).roots[root] = None
        last_uses: dict[Edge, int] = {}
        for index in reversed(range(len(self.parts))):
            part = self.parts[index]
            inside = self._nodes_of(part)
            part.ends = self._find_ends(part, inside)
            for end in part.ends:
                if isinstance(end[0], _Leaf):
                    last_uses[end] = index
                else:
                    origin = self._cuts.get(end[0], end)
                    self._part_of(origin).roots[origin] = None
            part.taken = self._find_taken(part, inside)
        groups: dict[int, list[Edge]] = {}
        for leaf in last_uses:
            groups.setdefault(together(leaf_of(leaf)), []).append(leaf)
        for group, leaves in groups.items():
            self.parts[min(last_uses[leaf] for leaf in leaves)].completes[group] = leaves
        self.left = [part for part in reversed(self.parts) if part.ends]

    def _part_of(self, edge: Edge) -> Part:
        index = bisect_right(self.parts, edge[0]._sequence_nr(), key=lambda part: part.first)
        return self.parts[max(index - 1, 0)]

    def _stops(self, node: Node) -> bool:
        return isinstance(node, _Leaf) or node in self._cuts

    def _find_ends(self, part: Part, inside: Mapping[Node, None]) -> tuple[Edge, ...]:
        ends = dict.fromkeys(root for root in part.roots if self._stops(root[0]))
        return tuple(ends | {edge: None for node in inside for edge in _next_edges(node) if edge[0] not in inside})

    def _nodes_of(self, part: Part) -> dict[Node, None]:
        """That run in this part."""
        begin = [node for node, _ in part.roots if not self._stops(node)]
        return _reachable(begin, lambda node: not self._stops(node) and node._sequence_nr() >= part.first)

    def _find_taken(self, part: Part, inside: Iterable[Node]) -> frozenset[Edge]:
        """Where autograd would go on, or refuse to stop. Raises where what would run then may not."""
        leaks = [end for end in part.ends if not self._stops(end[0])]
        nodes = {node for node, _ in part.ends}
        behind = _reachable((node for node, _ in leaks), lambda node: not self._stops(node)) if len(nodes) > 1 else {}
        if whole := any(map(_is_reentrant, inside)):
            running = set(behind)
        else:
            running = set[Node]()
            for node in sorted(behind, key=lambda node: node._sequence_nr()):  # what it leads to comes first
                if any(each in nodes or each in running for each, _ in _next_edges(node)):
                    running.add(node)
        if own := sorted({node.name() for node in running if isinstance(node, BackwardCFunction)}):
            raise _tangled(part, own)
        return frozenset(part.ends if whole else leaks if running else ())

    # Backward

    def run(self) -> list[tuple[Tensor, Tensor]]:
        """Run the next part; returns leaves whose gradients are complete, with those."""
        part = self.left.pop(0)
        begins = {edge: grad for edge in (*part.roots, *part.ends) if (grad := self._take(edge)) is not None}
        if begins and not part.taken:
            self._waiting |= _backward(begins, part.ends)
        elif begins:
            self._waiting |= self._take_hooked(part, begins)
        complete = []
        for leaf in (leaf for leaves in part.completes.values() for leaf in leaves):
            if (grad := self._waiting.pop(leaf, None)) is not None:
                is_shared = any(other is grad for other in self._waiting.values())
                complete.append((leaf_of(leaf), grad.clone() if is_shared else grad))
        return complete

    def _take_hooked(self, part: Part, begins: dict[Edge, Tensor]) -> dict[Edge, Tensor]:
        """Add up what flows into ends as autograd would, and let it see nothing of that."""
        sums = {end: begins.pop(end) for end in part.taken if end in begins}

        def take(edges: Sequence[Any], grads: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
            left = list(grads)
            for index, (edge, grad) in enumerate(zip(edges, grads, strict=True)):
                if edge in part.taken and grad is not None:
                    sums[edge] = sums[edge] + grad if edge in sums else grad
                    left[index] = None
            return tuple(left)

        nodes = self._nodes_of(part)
        takers = [node for node in nodes if not part.taken.isdisjoint(node.next_functions)]
        hooks = [node.register_hook(partial(take, node.next_functions)) for node in takers]
        # What is behind the ends runs again, in its own part, and reads what it has saved again.
        keeps = any(not self._stops(node) for node, _ in part.taken)
        found: dict[Edge, Tensor] = {}
        try:
            if begins and any(map(_is_reentrant, nodes)):
                outputs = [GradientEdge(*edge) for edge in begins]
                torch.autograd.backward(outputs, list(begins.values()), retain_graph=keeps)
            elif begins:
                found = _backward(begins, part.ends, keep=keeps)
        finally:
            for hook in hooks:
                hook.remove()
        return {end: grad for end, grad in found.items() if end not in part.taken} | sums

    def _take(self, edge: Edge) -> Tensor | None:
        """The gradient that waits at an edge, or at where it was cut."""
        return self._waiting.pop(edge if edge in self._waiting else self._cut_of.get(edge, edge), None)


def leaf_of(edge: Edge) -> Tensor:
    node: Any = edge[0]
    leaf: Tensor = node.variable
    return leaf


def _is_reentrant(node: Node) -> bool:
    """Whether it is torch's checkpoint, which runs a backward of its own."""
    return isinstance(node, checkpoint.CheckpointFunction._backward_cls)


def _next_edges(node: Node) -> list[Edge]:
    return [(each, number) for each, number in node.next_functions if each is not None]


def _reachable(begin: Iterable[Node], passes: Callable[[Node], bool]) -> dict[Node, None]:
    """These nodes, and those behind them as far as they pass."""
    found = dict.fromkeys(begin)
    nodes = list(found)
    while nodes:
        for node, _ in _next_edges(nodes.pop()):
            if node not in found and passes(node):
                found[node] = None
                nodes.append(node)
    return found


def _backward(begins: Mapping[Edge, Tensor], ends: Iterable[Edge], *, keep: bool = False) -> dict[Edge, Tensor]:
    """Gradients at `ends`; `keep`: what nodes have saved stays."""
    outputs, inputs = [GradientEdge(*edge) for edge in begins], [GradientEdge(*edge) for edge in ends]
    grads = torch.autograd.grad(outputs, inputs, list(begins.values()), retain_graph=keep, allow_unused=True)
    return {edge: grad for edge, grad in zip(ends, grads, strict=True) if grad is not None}


def _tangled(part: Part, names: Sequence[str]) -> ZeroOffloadError:
    where = ", ".join(unit.name for unit in part.units) or "the first unit"
    return ZeroOffloadError(
        f"zo.accumulate cannot run backward unit by unit: behind {where} forward uses two results of earlier units, of "
        f"which one is made from the other by {', '.join(names)}, and that are views or were given to no unit's "
        "module. Use a copy (.clone()) of a view, or a loop of loss_fn(model, batch).backward()"
    )
