"""Tensors that are made of frozen weights alone, such as the values of a quantized weight.

[Note: what is made of frozen weights]
Autograd saves the values that a layer has made of its quantized weight. All of them would stay from forward to
backward, though their units leave. So an operation on a frozen weight that keeps its dtype returns a `Derived`. It
computes like a plain tensor, and knows the operations that have made it. Saved for backward are those operations and
the weights, and backward repeats them: the same bits, for any format.

A result with other tensors is plain again, unless these are small or frozen parameters. So activations are never
repeated. A change in place ends the knowledge, and so do `clone()` and an operation that draws random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from zero_offload.base.trees import mapped

TABLE_BYTES = 128 * 1024
"""Other tensors of integers up to this size may take part: shifts, the order of columns."""
FEW_BYTES = 1024
"""Other tensors of floats, which may be activations or gradients, up to this size."""
_PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "mv", "dot", "convolution", "embedding", "_scaled_mm")
)
"""Operations whose other input is an activation, however small."""


class Step:
    """One operation, on what other steps make and on tensors."""

    __slots__ = ("func", "args", "kwargs", "versions")

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        versions: dict[int, tuple[Tensor, int]] | None = None,
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.versions = versions or {}
        """By id, the parameters that this and earlier operations have read, with their versions then."""

    @property
    def is_repeatable(self) -> bool:
        """True if no parameter was changed since."""
        return all(param._version == version for param, version in self.versions.values())

    def replaced(self, leaf: Callable[[Tensor], Any], known: dict[int, Step]) -> Step:
        """The same operations with `leaf` of each tensor in its place; `known` has the steps that are replaced."""
        if (found := known.get(id(self))) is None:

            def replace(each: Any) -> Any:
                return each.replaced(leaf, known) if isinstance(each, Step) else leaf(each)

            kwargs = self.kwargs and mapped((Step, Tensor), replace, self.kwargs)
            found = Step(self.func, mapped((Step, Tensor), replace, self.args), kwargs)
            known[id(self)] = found
        return found

    def repeat(self, kind: type, leaf: Callable[[Any], Tensor], known: dict[int, Any]) -> Any:
        """The result of the operations, with `leaf` of each leaf of type `kind`; `known` has the results of steps."""
        if id(self) not in known:

            def value(each: Any) -> Any:
                return each.repeat(kind, leaf, known) if isinstance(each, Step) else leaf(each)

            args, kwargs = mapped((Step, kind), value, self.args), self.kwargs
            known[id(self)] = self.func(*args, **(kwargs and mapped((Step, kind), value, kwargs)))
        return known[id(self)]


class _Traits(NamedTuple):
    """The properties of an operation that count."""

    changes: bool
    """True if it works in place."""
    draws: bool
    """True if it draws random numbers."""
    is_product: bool
    is_view: bool
    is_clone: bool


@functools.cache
def _traits(func: Any) -> _Traits:
    schema = func._schema
    is_view = bool(schema.returns) and schema.returns[0].alias_info is not None
    draws = torch.Tag.nondeterministic_seeded in func.tags
    name = func.overloadpacket.__name__
    return _Traits(schema.is_mutable, draws, name in _PRODUCTS, is_view, name == "clone")


class Derived(Tensor):
    """A tensor that is made of frozen weights; see the module's docstring."""

    __slots__ = ("plain", "step", "version")

    plain: Tensor
    """The same memory."""
    step: Step | None
    """The operation that has made it; None for a weight itself."""
    version: int
    """Its version, as it was made."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def made(plain: Tensor, step: Step | None = None, version: int | None = None) -> Derived:
        """`version`: that of the tensor that it is a view of, with which it will count."""
        derived = Tensor._make_subclass(Derived, plain)
        derived.plain, derived.step = plain, step
        derived.version = derived._version if version is None else version
        return derived

    @property
    def is_known(self) -> bool:
        """True if the operations make what it holds: it was not changed in place since."""
        return self._version == self.version

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if kind is not Derived:
                return NotImplemented  # a wrapper takes its tensors out first
        plain_args, kwargs = mapped(Derived, _plain, args), kwargs or {}
        result = func(*plain_args, **(kwargs and mapped(Derived, _plain, kwargs)))
        traits = _traits(func)
        if traits.changes:
            return args[0] if args and result is plain_args[0] else result
        if traits.draws or not torch.is_grad_enabled():
            return result  # it cannot be made again; or nothing saves it, as in backward
        if traits.is_clone and "memory_format" not in kwargs:
            return result  # what a program keeps as a copy of its own holds no weight in memory
        is_known = True
        versions: dict[int, tuple[Tensor, int]] = {}

        def leaf(each: Tensor) -> Any:
            nonlocal is_known
            if type(each) is not Derived:
                is_param = isinstance(each, nn.Parameter) or isinstance(each._base, nn.Parameter)
                most = FEW_BYTES if each.is_floating_point() else TABLE_BYTES
                takes_part = (is_param or each.nbytes <= most) and not (traits.is_product or each.requires_grad)
                is_known = is_known and takes_part
                if not is_param:
                    return each.clone() if takes_part else each  # it may be changed
            else:
                is_known = is_known and each.is_known
                if each.step is not None:
                    versions.update(each.step.versions)
                    return each.step
                each = each.plain
            versions[id(each)] = each, each._version
            return each

        step = Step(func, mapped(Tensor, leaf, args), kwargs and mapped(Tensor, leaf, kwargs), versions)
        if not is_known:
            return result
        version = args[0]._version if traits.is_view else None
        if isinstance(result, Tensor):
            return Derived.made(result, step, version)
        if isinstance(result, list | tuple):
            return type(result)(
                Derived.made(each, Step(_item, (step, index), {}, versions), version)
                if isinstance(each, Tensor)
                else each
                for index, each in enumerate(result)
            )
        return result

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain.numpy(force=force)

    def tolist(self) -> Any:
        return self.plain.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.plain.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.plain)


def _plain(derived: Derived) -> Tensor:
    return derived.plain


def _item(results: Any, index: int) -> Any:
    return results[index]


def plain_of(tensor: Any) -> Tensor:
    """The same memory as a plain tensor, of a parameter that is guarded in use, or of what was made of one."""
    with torch._C.DisableTorchFunctionSubclass():
        return cast(Tensor, tensor.plain if type(tensor) is Derived else tensor.detach())
