"""The tensors that a forward is given, and how the end of its backward is noticed by them.

Owns nothing. Never knows units: who watches says what is to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


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
        # What nearly all inputs are, without torch's walk over trees, which takes longer than a hook may.
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
