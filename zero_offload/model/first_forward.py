"""A model's first forward on tensors without memory: operations that get floats of two dtypes, found before step 1.

Owns which operations take floats of one dtype alone, and where a tensor's dtype is from: a parameter, a buffer, or a
forward's own code. Kernels check dtypes, and tensors without memory have none: `_OF_ONE_DTYPE` lists these operations.
Changes no values. The calls: `give_dtypes`, as `zo.offload` would; then forward and backward inside a `DtypeWatch`.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_offload.base.errors import ConfigError
from zero_offload.base.precision import TORCH_NAMES
from zero_offload.plan.dtypes import ComputeDtypes
from zero_offload.plan.quantized import ordinary_buffers_of
from zero_offload.runtime.hooks import install_cast

_OF_ONE_DTYPE = frozenset(
    (
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution"),
        *("index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "index_copy", "index_copy_"),
        *("scatter", "scatter_", "scatter_add", "scatter_add_", "masked_scatter", "masked_scatter_"),
    )
)
"""Operations whose kernels raise for floats of several dtypes, on each device type."""
_NORMS = frozenset(("native_layer_norm", "native_group_norm"))
"""Operations whose kernels raise for weights that are narrower than what is normalized."""
_SAYS_DTYPES = re.compile("dtype|scalar type|[Ii]nput type", re.ASCII)
"""In errors of operations that check dtypes without memory too."""
_ABOVE = re.compile("have the same dtype")
"""In errors of functions that check dtypes before they call an operation, such as attention."""
_TOLD = 3


def give_dtypes(model: nn.Module, dtypes: ComputeDtypes) -> None:
    """Let a model on meta have the dtypes and casts that `zo.offload` would give it."""
    for name, param in model.named_parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtypes.of(name))
    made: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for own, buffer in ordinary_buffers_of(module):
            name = f"{path}.{own}" if path else own
            if name in dtypes.buffers:
                made.setdefault(id(buffer), buffer.to(dtypes.buffers[name]))
                setattr(module, own, made[id(buffer)])
    with contextlib.ExitStack() as undo:
        for name, cast in dtypes.casts.items():
            install_cast(model.get_submodule(name), cast, undo)
        undo.pop_all()


@dataclass(frozen=True)
class _Origin:
    """Where the dtype of a tensor is from."""

    kind: str
    """buffer, parameter, or forward: the code of a module has made it."""
    name: str
    """Of the tensor, or of the module."""

    def __str__(self) -> str:
        if self.kind != "forward":
            return f"the {self.kind} {self.name}"
        return f"code in the forward of {self.name or 'the model'}"


class DtypeWatch(TorchDispatchMode):
    """Raises ConfigError for an operation inside that takes floats of one dtype and gets several."""

    def __init__(self, model: nn.Module, compute: torch.dtype) -> None:
        """`compute`: the dtype that all floats have but for exceptions."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._compute = model, compute
        self._modules = [""]
        """Names of those whose forwards run, the innermost last."""
        self._last = ""
        """The innermost one at the last operation."""
        self._origins: dict[int, _Origin] = {}
        """By storage, of tensors in other dtypes."""
        for kind, found in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in found:
                self._origins[tensor.untyped_storage()._cdata] = _Origin(kind, name)

    @contextlib.contextmanager
    def names(self) -> Iterator[None]:
        """Know which module's forward an operation is in. Functions that compare dtypes themselves are told too."""
        hooks = []
        for name, module in self._model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name)))
            hooks.append(module.register_forward_hook(lambda *_: [self._modules.pop(), None][1], always_call=True))
        try:
            yield
        except RuntimeError as error:
            if not _ABOVE.search(str(error)):
                raise
            where = self._last or type(self._model).__name__
            raise ConfigError(
                f"the first forward would stop in {where}: {error} Give it one dtype, by "
                f"Precision(modules={ {self._last: 'fp32'} if self._last else {} }) or Precision(buffers=)"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._last = next((name for name in reversed(self._modules) if name), "")
        given = [each for each in tree_leaves((args, kwargs)) if _is_float(each)]
        is_mixed = len({each.dtype for each in given}) > 1
        if is_mixed and _takes_one_dtype(func.overloadpacket.__name__, given):
            raise ConfigError(self._told(func, given))
        try:
            made = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if is_mixed and _SAYS_DTYPES.search(str(error)):
                raise ConfigError(self._told(func, given)) from error
            raise
        for each in tree_leaves(made):
            if _is_float(each) and each.dtype != self._compute:
                self._note(each, given)
        return made

    def _note(self, made: Tensor, given: Sequence[Tensor]) -> None:
        storage = made.untyped_storage()
        if storage._cdata in self._origins:
            return
        known = [self._origins.get(each.untyped_storage()._cdata) for each in given if each.dtype == made.dtype]
        # A tensor that code has made in a dtype stays in it, whatever dtype a buffer beside it gets.
        found = next((each for each in known if each is not None and each.kind == "forward"), None)
        found = found or next(filter(None, known), None) or _Origin("forward", self._modules[-1])
        self._origins[storage._cdata] = found
        weakref.finalize(storage, self._origins.pop, storage._cdata, None)

    def _told(self, func: Any, given: Sequence[Tensor]) -> str:
        compute = _short(self._compute)
        others = [each for each in given if each.dtype != self._compute] or given
        found = dict.fromkeys(self._origins.get(each.untyped_storage()._cdata) for each in others)
        origins = [each for each in found if each is not None]
        where = self._last
        dtypes = " and ".join(dict.fromkeys(_short(each.dtype) for each in given))
        beside = [
            f"the {kind} {name} is {_short(tensor.dtype)}"
            for kind, tensors in (
                ("parameter", self._model.named_parameters()),
                ("buffer", self._model.named_buffers()),
            )
            for name, tensor in tensors
            if any(tensor.untyped_storage()._cdata == each.untyped_storage()._cdata for each in given)
        ]
        from_ = f"{_short(others[0].dtype)} comes from {', '.join(map(str, origins[:_TOLD])) or 'the inputs'}"
        ways = []
        for kind, setting in (("buffer", "buffers"), ("parameter", "modules")):
            if names := [each.name for each in origins if each.kind == kind][:_TOLD]:
                ways.append(f"Precision({setting}={dict.fromkeys(names, compute)})")
        if where:
            ways.append(f"Precision(modules={ {where: _short(others[0].dtype)} })")
        return (
            f"the first forward would stop in {where or type(self._model).__name__}: {func.overloadpacket.__name__} "
            f"takes floats of one dtype, and gets {dtypes}. {'; '.join([from_, *beside])}. Give it one dtype: "
            f"{' or '.join(ways) or 'precision=' + repr(_short(others[0].dtype))}"
        )


def _takes_one_dtype(name: str, given: Sequence[Tensor]) -> bool:
    if name in _NORMS:
        return given[0].dtype.itemsize > max(each.dtype.itemsize for each in given[1:])
    return name in _OF_ONE_DTYPE


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _short(dtype: torch.dtype) -> str:
    """As settings call it."""
    return next((name for name, each in TORCH_NAMES.items() if getattr(torch, each) == dtype), str(dtype))
