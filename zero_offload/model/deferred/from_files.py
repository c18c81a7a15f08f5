"""Parameters on meta whose values are read from files: `FileRecipe`, parameters that such a module has got since, and
`deferred`, which makes a deferred tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.checkpoint.hf_files import FileTensor
from zero_offload.model.deferred.recipe import RecordedRecipe
from zero_offload.model.deferred.recorder import DeferredTensor
from zero_offload.plan.quantized import offloaded_tensors
from zero_offload.standins.owners import keep_recipe, recipe_of

_DIGEST_NUMEL = 2048
"""Values that tell tensors apart: fine-tunes of one model differ in these of some parameter."""


class PlannedFiles:
    """Files that have the weights of a module, open as long as this object is."""

    def __init__(self, module: nn.Module, opened: contextlib.ExitStack) -> None:
        self.module = weakref.ref(module)
        weakref.finalize(self, opened.close)


@dataclass(frozen=True, eq=False)
class FileRecipe:
    """The values of one parameter are a tensor of files, in row-major order."""

    source: FileTensor
    shape: tuple[int, ...]
    files: PlannedFiles
    is_skipped: bool = False

    @property
    def value(self) -> object:
        return self.source

    def drawn(self) -> bytes:
        return digest(self.source)

    def make(self) -> Tensor:
        """In the file's dtype."""
        return self.source.read(0, self.source.numel).view(self.shape)


def make_what_came_later(root: nn.Module) -> None:
    """Let parameters that a module has got since its files were planned, such as adapters, begin as their
    initialization says.

    A plan covers all parameters that a module has. So those whose values were left out came later, and are in no file.
    """
    found = (recipe_of(tensor) for _, tensor in offloaded_tensors(root))
    planned = {id(each.files): each.files.module() for each in found if isinstance(each, FileRecipe)}
    for module in filter(None, planned.values()):
        for _, tensor in offloaded_tensors(module):
            recipe = recipe_of(tensor)
            if isinstance(recipe, RecordedRecipe) and recipe.is_skipped and recipe.value is not None:
                keep_recipe(tensor, replace(recipe, is_skipped=False))


def digest(source: FileTensor) -> bytes:
    """A digest that tells tensors of files apart. It covers names of the files, places in them, shapes, dtypes, and the
    first values.
    """
    words = [(part.path.name, part.offset, part.shape, part.dtype_name) for part in source.parts]
    values = source.read(0, min(source.numel, _DIGEST_NUMEL))
    return hashlib.sha256(repr(words).encode() + values.view(torch.uint8).numpy().tobytes()).digest()


def deferred(like: Tensor, requires_grad: bool = False) -> nn.Parameter:
    """A deferred parameter in the place of one on meta, of the same class and with the same attributes."""
    base: Any = type(like)
    is_plain = base in (Tensor, nn.Parameter)
    own = {"__module__": __name__, "to": Tensor.to, "cpu": Tensor.cpu}  # a library's would convert what it keeps, too
    kind = DeferredTensor if is_plain else type(base.__name__, (DeferredTensor, base), own)
    with torch._C.DisableTorchFunctionSubclass():
        made: Any = Tensor._make_subclass(kind, like.detach(), requires_grad)
    made.__dict__.update(like.__dict__)
    made._is_param = True
    param: nn.Parameter = made
    return param
