"""One micro-batch's graph, run backward part by part.

Owns where it is cut, and gradients on their way between parts. Never knows other micro-batches. The calls: `cut` and
`begin_part` in forward; `plan` when the loss is there; then `run` for each of `left`, from the last part to the first.

[Note: parts]
A part is what forward made between coming to one unit and coming to the next. Autograd numbers its nodes as they are
made, so a part is a range of numbers. One backward through the whole graph runs all nodes of a part before any of an
earlier one. `run` asks autograd for the gradients at the part's ends: parameters, cuts, and nodes of earlier parts.
They wait, and with the next part that has the same end they go in first. So each sum is added up in the order in which
one backward adds it up, and each node runs once.

[Note: cuts]
Autograd does not stop at an end that leads to another end: it would run both. So what a unit's module is given becomes,
in place, an input of the graph: a node that leads nowhere. Views cannot be cut in place, and what passes a unit unseen
is not. Hooks take the gradients that flow into such ends out of autograd's hands, so that it sees none there. Where one
end leads to another, nodes between them run to no effect, and again in their own part.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import checkpoint

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.host import host_empty
from zero_offload.runtime.pass_tracker import tensors_in
from zero_offload.runtime.saved_tensors.activations import Activations
from zero_offload.runtime.units.unit import Unit

Edge = tuple[Node, int]
"""A node, and which of its inputs."""
Hooks = dict[int, Any]
"""Those that the program has registered on one tensor, now or later."""
_autograd: Any = torch.autograd
_functions: Any = torch._C._functions
_Leaf = _functions.AccumulateGrad
_Reentrant: Any = checkpoint.CheckpointFunction._backward_cls


class _GraphInput(torch.autograd.Function):
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


_cut: Callable[[Tensor, Tensor], Tensor] = _GraphInput.apply


@dataclass(eq=False)
class GraphPart:
    """Nodes of the graph, from number `first` up to the next part's."""

    units: tuple[Unit, ...]
    visit: int
    """Counts the units that forward came to, over all micro-batches."""
    first: int
    roots: dict[Edge, None] = field(default_factory=dict)
    """Where its backward begins."""
    ends: tuple[Edge, ...] = ()
    """Where it stops."""
    partial: list[Edge] = field(default_factory=list)
    """Ends that an earlier part has, too: what is added up there is not complete."""
    taken: frozenset[Edge] = frozenset()
    """Ends that lead on: hooks take the gradients there."""
    beyond: list[Node] = field(default_factory=list)
    """Nodes of earlier parts that autograd runs, without a gradient."""
    completes: dict[int, list[Edge]] = field(default_factory=dict)
    """Gradients of leaves that no earlier part adds to, by what must arrive together."""


class MicroGraph:
    """The graphs that the forward of one micro-batch made, cut into parts."""

    def __init__(self, number: int, store: Activations | None) -> None:
        """`store` takes gradients of leaves that wait for an earlier part to add to them."""
        self.number = number
        self._store = store
        self.region: object = None
        """The pack hook of the recomputed region that the forward is inside of; None outside of such a region."""
        self.parts = [GraphPart((), 0, 0)]
        self.left: list[GraphPart] = []
        """Parts that are still to run, in this order."""
        self._cuts: dict[Node, Edge] = {}
        """By a node of this graph: the edge that it was cut off from."""
        self._cut_of: dict[Edge, Edge] = {}
        self._given: dict[Edge, weakref.ref[Tensor]] = {}
        """Tensors that were given to modules."""
        self._hooks: dict[Edge, Hooks] = {}
        """Hooks on what was given to modules, which they may outlive."""
        self._waiting: dict[Edge, Tensor] = {}
        self._stored: dict[Edge, Any] = {}
        self._owners: list[Node] = []
        """Nodes in front of Functions of Python, whose own objects keep no graph before torch 2.13."""
        self._anchor = host_empty(0, torch.float32).requires_grad_()

    # Forward

    def cut(self, inputs: Iterable[Any]) -> None:
        """A unit's module is about to be given these."""
        for tensor in tensors_in(inputs):
            if tensor.grad_fn is None or tensor.grad_fn in self._cuts:
                continue
            edge = self._edge_of(tensor)
            if type(tensor) is Tensor and not tensor._is_view() and not tensor.retains_grad:
                tensor.detach_()
                # It is not changed: nodes that have saved it find it as they left it.
                with _autograd._unsafe_preserve_version_counter(tensor):
                    _cut(self._anchor, tensor)
                cut = self._edge_of(tensor)
                self._cuts[cut[0]], self._cut_of[edge] = edge, cut
                edge = cut
            self._given[edge], self._hooks[edge] = weakref.ref(tensor), _hooks_on(tensor)

    def begin_part(self, units: tuple[Unit, ...], visit: int) -> None:
        self.parts.append(GraphPart(units, visit, _autograd._get_sequence_nr()))

    def _edge_of(self, tensor: Tensor) -> Edge:
        edge = get_gradient_edge(tensor)
        if edge.ownership_token is not None:
            self._owners.append(edge.ownership_token)
        return edge.node, edge.output_nr

    # Between

    def plan(self, loss: Tensor, together: Callable[[Tensor], int]) -> None:
        """Find every part's roots and ends; `together` says which leaves' gradients must arrive with each other."""
        root = self._edge_of(loss)
        self._waiting[root] = torch.ones_like(loss)
        self._part_of(root).roots[root] = None
        last_uses: dict[Edge, int] = {}
        """For leaves and cuts, the earliest part that has them."""
        for index in reversed(range(len(self.parts))):
            part = self.parts[index]
            inside = self._nodes_of(part)
            part.ends = self._find_ends(part, inside)
            if any(isinstance(node, _Reentrant) for node in inside):
                raise _refuses_parts(part)
            part.taken = frozenset(end for end in part.ends if not self._stops(end[0]))
            part.beyond = self._find_beyond(part) if part.taken and len(part.ends) > 1 else []
            for end in filter(lambda end: self._stops(end[0]), part.ends):
                if end in last_uses:
                    self.parts[last_uses[end]].partial.append(end)
                    self._check_retained(end)
                last_uses[end] = index
            for end in filter(lambda end: not isinstance(end[0], _Leaf), part.ends):
                origin = self._cuts.get(end[0], end)
                self._part_of(origin).roots[origin] = None
        groups: dict[int, list[Edge]] = {}
        for leaf in filter(lambda end: isinstance(end[0], _Leaf), last_uses):
            groups.setdefault(together(leaf_of(leaf)), []).append(leaf)
        for group, leaves in groups.items():
            self.parts[min(last_uses[leaf] for leaf in leaves)].completes[group] = leaves
        self.left = [part for part in reversed(self.parts) if part.ends]

    def _check_retained(self, end: Edge) -> None:
        tensor = self._given[end]() if end in self._given else None
        if tensor is not None and tensor.retains_grad:
            raise ZeroOffloadError(
                f"zo.accumulate adds up the gradient of a tensor of shape {tuple(tensor.shape)} in parts, so it cannot "
                "retain it. Call retain_grad() before the tensor is given to a unit's module, or run a loop of "
                "loss_fn(model, batch).backward()"
            )

    def _part_of(self, edge: Edge) -> GraphPart:
        index = bisect_right(self.parts, edge[0]._sequence_nr(), key=lambda part: part.first)
        return self.parts[max(index - 1, 0)]

    def _stops(self, node: Node) -> bool:
        return isinstance(node, _Leaf) or node in self._cuts

    def _find_ends(self, part: GraphPart, inside: Mapping[Node, None]) -> tuple[Edge, ...]:
        ends = dict.fromkeys(root for root in part.roots if self._stops(root[0]))
        return tuple(ends | {edge: None for node in inside for edge in _next_edges(node) if edge[0] not in inside})

    def _nodes_of(self, part: GraphPart) -> dict[Node, None]:
        """The nodes that run in this part."""
        begin = [node for node, _ in part.roots if not self._stops(node)]
        return _reachable(begin, lambda node: not self._stops(node) and node._sequence_nr() >= part.first)

    def _find_beyond(self, part: GraphPart) -> list[Node]:
        """Nodes of earlier parts that autograd will run: those between one end and another."""
        nodes = {node for node, _ in part.ends}
        behind = _reachable((node for node, _ in part.taken), lambda node: not self._stops(node))
        beyond: dict[Node, None] = {}
        for node in sorted(behind, key=lambda node: node._sequence_nr()):  # what it leads to comes first
            if any(each in nodes or each in beyond for each, _ in _next_edges(node)):
                beyond[node] = None
        return list(beyond)

    # Backward

    def run(self) -> list[tuple[Tensor, Tensor]]:
        """Run the next part; returns leaves whose gradients are complete, with those."""
        part = self.left.pop(0)
        begins = {edge: grad for edge in (*part.roots, *part.ends) if (grad := self._take(edge)) is not None}
        with _silent(map(self._hooks_at, (*part.partial, *part.taken))):
            self._waiting |= self._take_hooked(part, begins) if part.taken else _backward(begins, part.ends)
        complete = []
        for leaf in (leaf for leaves in part.completes.values() for leaf in leaves):
            if (grad := self._waiting.pop(leaf, None)) is not None:
                is_shared = any(other is grad for other in self._waiting.values())
                complete.append((leaf_of(leaf), grad.clone() if is_shared else grad))
        for leaf in filter(lambda end: isinstance(end[0], _Leaf), part.partial):
            if (
                self._store is not None
                and leaf in self._waiting
                and (stored := self._store.pack(self._waiting[leaf])) is not None
            ):
                self._stored[leaf] = stored
                del self._waiting[leaf]
        return complete

    def _take_hooked(self, part: GraphPart, begins: dict[Edge, Tensor]) -> dict[Edge, Tensor]:
        """Add up what flows into ends as autograd would, and let it see nothing of that."""
        sums = {end: begins.pop(end) for end in part.taken if end in begins}

        def take(edges: Sequence[Any], grads: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
            left = list(grads)
            for index, (edge, grad) in enumerate(zip(edges, grads, strict=True)):
                if edge in part.taken and grad is not None:
                    sums[edge] = sums[edge] + grad if edge in sums else grad
                    left[index] = None
            return tuple(left)

        takers = [node for node in self._nodes_of(part) if not part.taken.isdisjoint(node.next_functions)]
        hooks = [node.register_hook(partial(take, node.next_functions)) for node in takers]
        try:
            with _idle(node for node in part.beyond if isinstance(node, BackwardCFunction)):
                # The functions beyond run again, and read their saved tensors again.
                found = _backward(begins, part.ends, keep=bool(part.beyond))
        finally:
            for hook in hooks:
                hook.remove()
        return {end: grad for end, grad in found.items() if end not in part.taken} | sums

    def _hooks_at(self, end: Edge) -> Hooks:
        hooks: Hooks | None = leaf_of(end)._backward_hooks if isinstance(end[0], _Leaf) else self._hooks.get(end)
        return hooks or {}

    def _take(self, edge: Edge) -> Tensor | None:
        """The gradient that waits at an edge, or at where it was cut."""
        if self._store is not None and edge in self._stored:
            return self._store.unpack(self._stored.pop(edge))
        return self._waiting.pop(edge if edge in self._waiting else self._cut_of.get(edge, edge), None)


def leaf_of(edge: Edge) -> Tensor:
    node: Any = edge[0]
    leaf: Tensor = node.variable
    return leaf


def _hooks_on(tensor: Tensor) -> Hooks:
    """The table that autograd looks into, which is made with the first hook."""
    tensor.register_hook(lambda grad: None).remove()
    hooks: Any = tensor._backward_hooks
    return cast(Hooks, hooks)


def _next_edges(node: Node) -> list[Edge]:
    return [(each, number) for each, number in node.next_functions if each is not None]


@contextlib.contextmanager
def _silent(found: Iterable[Hooks]) -> Iterator[None]:
    """These do not run: they are for whole gradients."""
    tables = [(table, dict(table)) for table in found]
    for table, _ in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in tables:
            table.update(hooks)


class _Nothing:
    """The backward of a function of the program's own that has no gradient here: None for every input."""

    backward, vjp = staticmethod(lambda ctx, *_: (None,) * len(ctx.needs_input_grad)), torch.autograd.Function.vjp


@contextlib.contextmanager
def _idle(nodes: Iterable[Any]) -> Iterator[None]:
    """Autograd would give these functions zeros, and they would compute with them."""
    idle = list(nodes)
    for node in idle:
        node._forward_cls = _Nothing
    try:
        yield
    finally:
        for node in idle:
            del node._forward_cls  # the instance's; the class has its own


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
    if not begins:
        return {}
    outputs, inputs = [GradientEdge(*edge) for edge in begins], [GradientEdge(*edge) for edge in ends]
    grads = torch.autograd.grad(outputs, inputs, list(begins.values()), retain_graph=keep, allow_unused=True)
    return {edge: grad for edge, grad in zip(ends, grads, strict=True) if grad is not None}


def _refuses_parts(part: GraphPart) -> ZeroOffloadError:
    where = ", ".join(unit.name for unit in part.units) or "the first unit"
    return ZeroOffloadError(
        f"zo.accumulate runs backward unit by unit, which torch.utils.checkpoint(use_reentrant=True), used behind "
        f"{where}, refuses. Use use_reentrant=False or zo.checkpoint, or run a loop of loss_fn(model, batch).backward()"
    )
