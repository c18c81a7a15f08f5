"""The class of a function of torch: metadata, an address, a view, a read, a write, or unknown.

The class of an operator comes from its schema. A function in Python has no schema: torch's own are reads, and their
operators have classes of their own. A function of another package is unknown, since nothing says that it changes no
values. The lists of names below are questions to the tensor object, and ways to its memory. No operator stands for
those.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zero_offload.base.trees import leaves_in


class Kind(Enum):
    """Classes of functions, by the demand on a tensor."""

    METADATA = "shape, dtype, device, place in the graph: the tensor object answers"
    ADDRESS = "memory, past torch's operations"
    VIEW = "other strides over the same memory"
    READ = "values"
    WRITE = "changes of values"
    UNKNOWN = "nothing tells whether values change"


_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_signed", "__len__", "__hash__"),
)
_PROPERTIES_OF_PARAMS = (
    *("is_sparse_csr", "is_mkldnn", "is_mps", "is_xpu", "is_vulkan", "is_xla", "is_hpu", "is_mtia", "is_ipu"),
    *("is_maia", "_version", "output_nr", "retains_grad", "names", "name", "grad_dtype"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
)
_METHODS_OF_PARAMS = (
    *("is_inference", "is_shared", "is_neg", "is_conj", "is_same_size", "has_names", "register_hook"),
    *("is_pinned", "is_set_to", "dim_order", "retain_grad", "__dir__"),
)
FACTORIES = (
    *("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"),
    *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
)
QUESTIONS = (
    *("to", "cpu", "cuda", "xpu", "float", "double", "half", "bfloat16", "type", "type_as", "result_type"),
    *("new", "new_tensor", "view_as", "expand_as", "reshape_as", "is_same_size", "is_set_to"),
    *("is_signed", "is_neg", "is_conj"),
)
"""Those that often need no data: they are asked without it before a unit is fetched for them."""
ADDRESSES = (
    *("data_ptr", "const_data_ptr", "untyped_storage", "storage", "_typed_storage", "storage_type"),
    *("numpy", "tolist", "__array__", "__dlpack__", "as_subclass", "resize", "resize_as"),
)
"""Functions that read memory past torch's operations."""
VIEWS = ("view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze")
"""Functions that make views, of one tensor and of numbers."""
OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_OF_C = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
"""Functions that only torch's own C++ shows to a tensor class."""
_ACCESSORS = ("__get__", "__set__", "__delete__")
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = frozenset(("__set__", "__delete__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS)))
_CHANGE_NO_VALUES = frozenset(("retain_grad", "record_stream"))
"""Their schemas say that they change the tensor."""


def _getters(names: Iterable[str]) -> set[Any]:
    found = (getattr(Tensor, name, None) for name in names)
    return {each.__get__ for each in found if each is not None and hasattr(each, "__get__")}


@functools.cache
def metadata() -> frozenset[Any]:
    """The functions that any tensor object answers by itself."""
    return named(*_METHODS) | _getters((*_PROPERTIES, "grad"))


@functools.cache
def metadata_of_params() -> frozenset[Any]:
    """Those that a parameter does: its owner has the gradient, and the parameter its hooks."""
    return named(*_METHODS, *_METHODS_OF_PARAMS) | _getters((*_PROPERTIES, *_PROPERTIES_OF_PARAMS))


@functools.cache
def named(*names: str) -> frozenset[Any]:
    """Functions and methods of these names."""
    found = [getattr(Tensor, name, None) for name in names]
    found += [getattr(torch, name, None) for name in names if not name.startswith("__")]
    return frozenset(each for each in found if each is not None)


_OF_THE_GRAPH = frozenset(("requires_grad_", "detach_"))
"""Operators in place that leave the values as they are."""


@functools.cache
def _schemas(func: Any) -> tuple[Any, ...]:
    """The schemas of an operator, or of those of this name; none of a function in Python."""
    if isinstance(func, torch._ops.OpOverload):
        return (func._schema,)
    if isinstance(func, torch._ops.OpOverloadPacket):
        found = [getattr(func, name)._schema for name in func.overloads()]
    elif isinstance(func, FunctionType) or func.__name__ in _ACCESSORS:
        return ()
    else:
        found = torch._C._jit_get_schemas_for_operator(f"aten::{func.__name__}")
    # The rest are TorchScript's own, of lists and numbers.
    return tuple(
        each for each in found if torch._C._dispatch_has_kernel(f"{each.name}.{each.overload_name}".strip("."))
    )


@functools.lru_cache(maxsize=4096)
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that a function writes, beside `out=`."""
    schemas = _schemas(func)
    # Schemas of collectives name no writes: their first tensors are the results, by the convention for names.
    is_collective = any(schema.name.startswith("c10d::") for schema in schemas)
    if (is_collective or not schemas) and _works_in_place(func):
        return ((0, ""),)
    found = (
        (place, argument.name)
        for schema in schemas
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and not argument.kwarg_only
        if schema.name.partition("::")[2] not in _CHANGE_NO_VALUES
    )
    return tuple(dict.fromkeys(found))


def _works_in_place(func: Any) -> bool:
    """True by torch's convention for names: `constant_`, `__iadd__`, `__setitem__`, setters of properties."""
    name = str(getattr(func, "__name__", "")).partition(".")[0]  # without that of an overload
    return name in _IN_PLACE if name.endswith("__") else name.endswith("_")


@functools.lru_cache(maxsize=4096)
def kind_of(func: Any) -> Kind:
    """The class of a function that a tensor class meets."""
    if func in metadata():
        return Kind.METADATA
    if func in named(*ADDRESSES):
        return Kind.ADDRESS
    is_operator = isinstance(func, (*OPERATIONS, torch._ops.OperatorBase))
    if not is_operator and has_operators(func) and not f"{func.__module__}.".startswith("torch."):
        return Kind.UNKNOWN
    schemas = _schemas(func)
    if is_operator and not schemas:
        return Kind.UNKNOWN
    if _writes(func):
        # Those of torch.compile end when another operator waits for them.
        is_under_way = any(schema.name.startswith("_c10d_functional") for schema in schemas)
        return Kind.UNKNOWN if is_under_way else Kind.WRITE
    return Kind.VIEW if schemas and all(map(_is_view, schemas)) else Kind.READ


def _is_view(schema: Any) -> bool:
    """True if the result lies in an argument's memory. An `out=` is written to."""
    alias = schema.returns[0].alias_info if schema.returns else None
    return alias is not None and not alias.is_write


def has_operators(func: Any) -> bool:
    """True for a function in Python: it has no schema, and the operators that it calls do."""
    return not isinstance(func, (*OPERATIONS, *_OF_C))


def changed_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that a function changes, by its schema; by its name where it has none; and `out=`."""
    writes = _writes(func)
    if not writes and "out" not in kwargs:
        return []
    changed = [args[place] if place < len(args) else kwargs.get(name) for place, name in writes]
    if writes and not args:
        changed += list(kwargs.values())[:1]
    return leaves_in([*changed, kwargs.get("out")])


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors whose values an operator writes by its schema: torch counts no change in a fused update."""
    is_operator = bool(_schemas(func)) and func.__name__ not in _OF_THE_GRAPH
    return changed_by(func, args, kwargs) if is_operator else []


def is_collective(func: Any) -> bool:
    """True for collectives, of which no tensor counts the writes: functions in Python, or their operators."""
    if isinstance(func, torch._ops.OpOverload):
        return func.namespace == "c10d"
    return f"{getattr(func, '__module__', '')}.".startswith("torch.distributed.")


def wait_for(result: Any) -> None:
    """Collectives write on after they return: wait for what has begun, before a copy is read."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            dist.Work.unbox(leaf).wait()
        elif isinstance(leaf, dist.Work):
            leaf.wait()


def name_of(func: object) -> str:
    """A tensor function's name, without that of an overload; properties such as `data` are functions of a
    descriptor."""
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
    name = str(getattr(func, "__name__", func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name in _ACCESSORS else name
