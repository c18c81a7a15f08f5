"""Which functions of torch ask for what: metadata, an address, a view, values, or a change."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from zero_offload.base.trees import leaves_in

_HARMLESS_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn"),
    *("is_mps", "is_xpu", "is_vulkan", "is_xla", "is_hpu", "is_mtia", "is_ipu", "is_maia"),
    *("_version", "output_nr", "retains_grad", "names", "name", "grad_dtype"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
)
_HARMLESS_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_signed", "is_inference", "is_shared", "is_neg"),
    *("is_conj", "is_same_size", "has_names", "register_hook"),
    *("is_pinned", "is_set_to", "dim_order", "retain_grad", "__len__", "__hash__", "__dir__"),
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
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_ACCESSORS = ("__get__", "__set__", "__delete__")
_CHANGING = frozenset(("__set__", "__setitem__", "__delete__", *(f"__i{name}__" for name in _OPERATORS)))


@functools.cache
def harmless() -> frozenset[Any]:
    """Functions that read metadata only."""
    found: set[Any] = set()
    for name in _HARMLESS_PROPERTIES:
        descriptor = getattr(Tensor, name, None)
        if descriptor is not None and hasattr(descriptor, "__get__"):
            found.add(descriptor.__get__)
    for name in _HARMLESS_METHODS:
        method = getattr(Tensor, name, None)
        if method is not None:
            found.add(method)
    found.update((torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference))
    return frozenset(found)


@functools.cache
def named(*names: str) -> frozenset[Any]:
    """Functions and methods of these names."""
    found = (getattr(place, name, None) for place in (torch, Tensor) for name in names)
    return frozenset(each for each in found if each is not None)


@functools.cache
def addresses() -> frozenset[Any]:
    return named(*ADDRESSES)


def changed_by(func: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that a function changes: `out=`, and the first argument of a function that works in place."""
    name = getattr(func, "__name__", "")
    if name not in _CHANGING and (not name.endswith("_") or name.endswith("__")):
        return list(leaves_in([kwargs["out"]])) if "out" in kwargs else []
    return list(leaves_in((args[:1] or tuple(kwargs.values())[:1], kwargs.get("out"))))


def name_of(func: object) -> str:
    """A tensor function's name; properties such as `data` are functions of a descriptor."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name in _ACCESSORS else name
