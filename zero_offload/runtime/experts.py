"""A forward and backward through a module's experts, a group of them at a time.

Owns the autograd nodes of such a forward. The output is a chain of additions, one node (`_Expert`) for each expert, as
in the plain model. Autograd adds up gradients of hidden states and routing weights in the reverse order of the nodes:
the same bits. A node keeps which rows are its own, and no values: backward computes the expert once more.

Gradients of trained values are made expert by expert too. `Gradients.receive_slices` says where they go: a GPU's may
leave for host memory at once. Autograd gets one gradient of each parameter at the end of the chain, and passes it on.

The chain begins with `_Begin`, which saves hidden states and routing weights, once for all. A checkpointed block that
saves nothing behind its experts ends its recompute there, and runs no expert again. Behind each group is a
`_GroupBoundary`: backward meets it before the experts of the group, and fetches them. Ranks that gather have one for
each group, with or without rows of their own.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.runtime.grads.gradients import Gradients
from zero_offload.runtime.pass_tracker import PassTracker
from zero_offload.runtime.prefetcher import ParamPrefetcher
from zero_offload.runtime.saved_tensors.recompute import Autocast, keep_result, kept_result
from zero_offload.runtime.saved_tensors.tensors import KEPT_AS_IT_IS
from zero_offload.runtime.units.group_reader import ExpertGroup, GroupReader, is_here
from zero_offload.runtime.units.unit import Unit
from zero_offload.standins.sliced_grad import GradSlices, WholeGrad

ExpertFn = Callable[[Mapping[str, Tensor], Sequence[Tensor], Tensor, Tensor], Tensor]
"""one(values, more, hidden, weights) -> (n, width): an expert's part of the output for rows (n, width), each times its
weight, (n, 1). `values` by name, each of shape (1, ...); `more` are the expert's entries of the run's `stacks`."""


@dataclass
class _ExpertsForward:
    """One forward through a unit's experts: a run."""

    runtime: object
    """Held only: backward may come after the model is dropped."""
    experts: GroupedExperts
    unit: Unit
    expert_fn: ExpertFn
    rows: Mapping[int, tuple[Tensor, Tensor]]
    """By expert, the tokens that come to it, and which of each token's weights is its own."""
    spans: Sequence[range]
    """Experts that are fetched together, in order."""
    in_groups: bool
    """True if the spans are all of the unit's groups."""
    autocasts: tuple[Autocast, ...]
    trained: Mapping[str, nn.Parameter]
    """By name, those of the unit's parameters that get a gradient."""
    begin: Any = None
    """The context of `_Begin`."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Of the span in use."""
    first: int = 0
    """The first expert of the span in use."""
    wanted: dict[str, bool] = field(default_factory=dict)
    """By name, trained values whose gradients something takes in the running backward; True if it is `.grad` alone."""
    grads: dict[str, WholeGrad | GradSlices] = field(default_factory=dict)
    """Those gradients, while the backward makes them."""
    inputs: tuple[Tensor, ...] | None = None
    """Hidden states, routing weights and stacks, while a backward runs."""
    num_fetches: int = 0
    """`GroupedExperts.num_fetches` when the span in use was fetched."""

    def fetch(self, index: int, *, in_backward: bool) -> None:
        """Have the values of a span here."""
        step = -1 if in_backward else 1
        following = self.spans[index + step] if 0 <= index + step < len(self.spans) else None
        self.values = self.experts.fetch(self, self.spans[index], following, in_backward=in_backward)
        self.first, self.num_fetches = self.spans[index].start, self.experts.num_fetches

    def values_of(self, expert: int) -> dict[str, Tensor]:
        at = expert - self.first
        return {name: values[at : at + 1] for name, values in self.values.items()}

    def begin_backward(self) -> None:
        self.inputs = self.begin.saved_tensors
        self.grads = {}  # of a backward that broke off
        edges = self.begin.next_functions
        nodes = [node for node, _ in edges[len(edges) - len(self.trained) :]]
        takers = dict(zip(self.trained, map(_taker, nodes), strict=True))
        # zo.accumulate asks autograd for gradients, and passes them on to the parameters itself.
        accumulates = (_Taker.PARAMETER, _Taker.CALLER) if self.experts.grads.expected else (_Taker.PARAMETER,)
        self.wanted = {name: taker in accumulates for name, taker in takers.items() if taker is not _Taker.NOTHING}

    def add_grad(self, name: str, expert: int, grad: Tensor) -> None:
        """One expert's part, (1, ...), of a parameter's gradient, which is zeros elsewhere."""
        if name not in self.grads:
            accumulates = self.wanted[name]
            self.grads[name] = self.experts.grads.receive_slices(self.trained[name], grad, accumulates=accumulates)
        self.grads[name].put(expert, grad)

    def add_zeros(self) -> list[Tensor | None]:
        """Where other ranks have gradients of this forward, and this one has no rows, its gradients are zeros: ranks
        reduce the same ones. Those of the inputs. Collective."""
        inputs = self.inputs or ()
        found: list[Tensor | None] = [None] * len(inputs)
        accumulated = [name for name, accumulates in self.wanted.items() if accumulates]
        # Where ranks do not gather, torch.autograd.grad may be one rank's own.
        is_common = bool(accumulated) or self.experts.gathers
        if not is_common or not self.experts.grads.are_elsewhere(self.unit, here=bool(self.rows)):
            return found
        for name in accumulated:
            param = self.trained[name]
            like = torch.empty((1, *param.shape[1:]), dtype=param.dtype, device=inputs[0].device)
            self.grads[name] = self.experts.grads.receive_slices(param, like, accumulates=True)
        needed = self.begin.needs_input_grad[3:]
        return [torch.zeros_like(each) if need else None for each, need in zip(inputs, needed, strict=False)]

    def compute(
        self, expert: int, values: Mapping[str, Tensor], hidden: Tensor, weights: Tensor, more: Sequence[Tensor]
    ) -> Tensor:
        """(n, width): what is added to the output for the expert's rows, in the dtype of `hidden`."""
        tokens, which = self.rows[expert]
        return self.expert_fn(values, more, hidden[tokens], weights[tokens, which, None]).to(hidden.dtype)

    def add(self, expert: int, output: Tensor, hidden: Tensor, weights: Tensor, more: Sequence[Tensor]) -> None:
        added = self.compute(expert, self.values_of(expert), hidden, weights, more)
        output.index_add_(0, self.rows[expert][0], added)


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, run: _ExpertsForward, output: Tensor, num_inputs: int, *inputs: Tensor) -> Tensor:
        """Of `inputs` those behind the first `num_inputs` are the trained parameters, at rest."""
        ctx.mark_dirty(output)
        ctx.save_for_backward(*inputs[:num_inputs])
        ctx.num_inputs, ctx.names = num_inputs, list(run.trained)
        # The run has this node: a cycle would keep a dropped model until garbage collection.
        ctx.run = weakref.ref(run)
        run.begin = ctx
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        run = ctx.run()
        if run is None or run.inputs is None:  # it had nothing to compute
            return (None,) * (3 + ctx.num_inputs + len(ctx.names))
        of_inputs = run.add_zeros()
        run.inputs, run.values = None, {}
        grads, run.grads = run.grads, {}
        found = (grads[name].finish() if name in grads else None for name in ctx.names)
        return (None, None, None, *of_inputs, *found)


class _Expert(Function):
    @staticmethod
    def forward(
        ctx: Any, run: _ExpertsForward, expert: int, output: Tensor, hidden: Tensor, weights: Tensor, *more: Tensor
    ) -> Tensor:
        ctx.mark_dirty(output)
        ctx.run, ctx.expert = run, expert
        run.add(expert, output, hidden, weights, more)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        run, expert = ctx.run, ctx.expert
        assert run.inputs is not None
        hidden, weights, *stacks = run.inputs
        inputs = [
            each.detach().requires_grad_(needed)
            for each, needed in zip(
                (hidden, weights, *(stack[expert] for stack in stacks)), ctx.needs_input_grad[3:], strict=True
            )
        ]
        values = {
            name: value.detach().requires_grad_(name in run.wanted) for name, value in run.values_of(expert).items()
        }
        with saved_tensors_hooks(*KEPT_AS_IT_IS), torch.enable_grad(), contextlib.ExitStack() as contexts:
            for autocast in run.autocasts:
                contexts.enter_context(torch.autocast(*autocast))
            added = run.compute(expert, values, *inputs[:2], inputs[2:])
        wanted = [each for each in (*inputs, *values.values()) if each.requires_grad]
        found = iter(torch.autograd.grad(added, wanted, grad.index_select(0, run.rows[expert][0])))
        run.experts.advance(run)
        of_inputs = [next(found) if each.requires_grad else None for each in inputs]
        for name in values:
            if name in run.wanted:
                run.add_grad(name, expert, next(found))
        return None, None, grad, *of_inputs


class _GroupBoundary(Function):
    @staticmethod
    def forward(ctx: Any, run: _ExpertsForward, index: int, output: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        ctx.run, ctx.index = run, index
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        run = ctx.run
        if ctx.index == len(run.spans) - 1:
            run.begin_backward()
        run.fetch(ctx.index, in_backward=True)
        return None, None, grad


class GroupedExperts:
    """Runs the experts of one model."""

    def __init__(
        self, reader: GroupReader, prefetcher: ParamPrefetcher, tracker: PassTracker, grads: Gradients
    ) -> None:
        self._reader = reader
        self.gathers = reader.gathers
        self._prefetcher = prefetcher
        self._tracker = tracker
        self.grads = grads
        self.num_fetches = 0
        """Spans that were fetched, of all calls: a span's values are valid until the next one is."""

    def run(
        self,
        runtime: object,
        unit: Unit,
        expert_fn: ExpertFn,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        stacks: Sequence[Tensor] = (),
    ) -> Tensor:
        """(tokens, width): the output for `hidden`, (tokens, width), of which the experts in `index`, (tokens, k), have
        `weights`, (tokens, k). Each adds what `expert_fn` computes, of its values and its entries of `stacks`,
        (experts, ...). An index above the last expert's counts for none.
        """
        experts = unit.layout.experts
        assert experts is not None
        output, rows = torch.zeros_like(hidden), _rows_of(index, experts.num_experts)
        inputs = (hidden, weights, *stacks)
        trained = {
            piece.spec.name.rpartition(".")[2]: param for _, piece, param in unit.placed_params if param.requires_grad
        }
        has_graph = torch.is_grad_enabled() and (bool(trained) or any(each.requires_grad for each in inputs))
        # One node for all entries of a stack: its backward stacks their gradients.
        entries = list(zip(*(stack.unbind(0) for stack in stacks), strict=True)) or [()] * experts.num_experts
        spans = list(_spans(unit, rows, every=self._reader.gathers))
        if not spans and trained and self.grads.num_ranks > 1:
            spans = [experts.group(0)]  # other ranks may have gradients
        kinds = {"cpu", hidden.device.type}
        autocasts = tuple(Autocast.of(kind) for kind in sorted(kinds)) if has_graph else ()
        in_groups = len(spans) == experts.num_groups
        run = _ExpertsForward(runtime, self, unit, expert_fn, rows, spans, in_groups, autocasts, trained)
        kept = kept_result() if has_graph else None
        if kept is not None:
            output, run.spans = kept.detach(), []
        if has_graph:
            output = _Begin.apply(run, output, len(inputs), *inputs, *trained.values())  # type: ignore[no-untyped-call]
        for number, span in enumerate(run.spans):
            run.fetch(number, in_backward=False)
            for expert in span:
                if expert not in rows:
                    continue
                if has_graph:
                    output = _Expert.apply(run, expert, output, hidden, weights, *entries[expert])  # type: ignore[no-untyped-call]
                else:
                    run.add(expert, output, hidden, weights, entries[expert])
                self.advance(run)
            if has_graph:
                output = _GroupBoundary.apply(run, number, output)  # type: ignore[no-untyped-call]
        run.values = {}
        if has_graph and kept is None:
            keep_result(output)
        return output

    def fetch(
        self, run: _ExpertsForward, span: range, following: range | None, *, in_backward: bool
    ) -> dict[str, Tensor]:
        """The values of these experts, when they are here."""
        unit = run.unit
        if in_backward:
            self._tracker.note_node()
        if is_here(unit):
            self._prefetcher.fetch_for_access(unit)
        else:
            unit.wait_for_update()
        self.num_fetches += 1
        then = None if following is None else ExpertGroup(unit, following)
        return self._reader.values(ExpertGroup(unit, span), then, in_backward=in_backward, keeps_order=run.in_groups)

    def advance(self, run: _ExpertsForward) -> None:
        """An expert of this run is computed. Raises ZeroOffloadError where its values were overwritten meanwhile."""
        if run.num_fetches != self.num_fetches and not is_here(run.unit):
            raise ZeroOffloadError(
                f"another forward or backward of this model ran while an expert of {run.unit.name} was computed, and "
                "took the memory of its values. Run it when this pass is over, not in a hook inside of an expert"
            )
        self._reader.advance()


class _Taker(enum.Enum):
    """The receiver of a parameter's gradient in the running backward."""

    PARAMETER = enum.auto()
    CALLER = enum.auto()
    """torch.autograd.grad returns it."""
    NOTHING = enum.auto()


def _taker(node: Any) -> _Taker:
    """`node`: where autograd adds to the parameter's gradient."""
    try:
        return _Taker.PARAMETER if torch._C._will_engine_execute_node(node) else _Taker.NOTHING
    except RuntimeError:  # so it says that torch.autograd.grad was given the parameter
        return _Taker.CALLER


def _rows_of(index: Tensor, num_experts: int) -> dict[int, tuple[Tensor, Tensor]]:
    """By expert, its tokens and which of a token's experts it is; in the order of `torch.where` over (k, tokens)."""
    chosen = index.t().reshape(-1)
    order = torch.sort(chosen, stable=True).indices
    counts: list[int] = torch.bincount(chosen.clamp(max=num_experts), minlength=num_experts + 1).tolist()
    parts = order.split(counts[: num_experts + 1])
    return {
        expert: (part % index.shape[0], part // index.shape[0])
        for expert, part in enumerate(parts[:num_experts])
        if counts[expert]
    }


def _spans(unit: Unit, rows: Mapping[int, object], *, every: bool) -> Iterator[range]:
    """Ranges of experts that are fetched together. With `every`, these are all groups. Otherwise a group gives the
    range from its first to its last expert in `rows`. Where less than half of that range is used, each expert is a
    range by itself.
    """
    experts = unit.layout.experts
    assert experts is not None
    for group in map(experts.group, range(experts.num_groups)):
        if every:
            yield group
            continue
        used = [expert for expert in group if expert in rows]
        if used and 2 * len(used) >= used[-1] + 1 - used[0]:
            yield range(used[0], used[-1] + 1)
        else:
            yield from (range(expert, expert + 1) for expert in used)
