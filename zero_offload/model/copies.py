"""`copy()`: an offloaded copy of a model, which never holds more of it than some chunks.

Owns what a copy has of its original. Modules and buffers are those of `copy.deepcopy`. Parameters have no memory at
first (`CopyRecipe`): `zo.offload` reads each from where the original's rests, as it reads those of files. Hooks that
the original's `zo.offload` has registered stay behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError
from zero_offload.base.host import host_empty
from zero_offload.base.inputs import check_model
from zero_offload.checkpoint.hf_files import DTYPES, FileTensor, StoredTensor
from zero_offload.checkpoint.values import read_master_chunk
from zero_offload.model.move_in import without_memory
from zero_offload.model.offload import offload
from zero_offload.model.params import ParamPlace
from zero_offload.model.runtime import ModelRuntime
from zero_offload.plan.layout import CHUNK_NUMEL
from zero_offload.plan.model_spec import UnitChoice
from zero_offload.plan.quantized import library_class, slots
from zero_offload.runtime.hooks import remove_copied_hooks
from zero_offload.standins.owners import keep_recipe, owner_of, recipe_of
from zero_offload.storage.shards.shard import Shard

KINDS = ("same", "frozen")
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def copy(
    model: nn.Module,
    config: OffloadConfig | None = None,
    mesh: DeviceMesh | None = None,
    units: UnitChoice | None = None,
    kind: str = "same",
) -> nn.Module:
    """An offloaded copy of `model`, which is offloaded itself, a part of such a model, or an ordinary one.

    Modules, buffers, ties, mode and hooks of the program are those of `copy.deepcopy`. Values go from tier to tier,
    some chunks at a time. Where the original has fp32 masters, the copy is made of these: with `precision="fp32"` a
    copy of a bf16 model has all their bits. States of optimizers and gradients stay behind. Frozen weights that rest in
    files of others are read there by both, where the copy has their dtype. Flags `requires_grad` are the original's;
    with `kind="frozen"` nothing requires a gradient, and the plan counts no states, as for a teacher or an average.

    `config`, `mesh` and `units` are those of `zo.offload`. The copy needs a directory of its own in `nvme=`; with
    existing="resume" and a generation there, its values are the generation's. Every rank must call, outside of forwards
    and of `zo.gathered`. Each reads its own part, so stage, units and trained parameters are then the original's.

    Raises what `zo.offload` raises, and ConfigError for quantized weights, DTensors and parameters without values.
    """
    check_model("zo.copy", model)
    if kind not in KINDS:
        raise ConfigError(f'zo.copy has no kind={kind!r}; there are "same" and "frozen" (no parameter is trained)')
    owners = {id(each): each for each in map(owner_of, model.parameters()) if isinstance(each, ModelRuntime)}
    with ExitStack() as met:
        for owner in owners.values():
            met.enter_context(owner.together("zo.copy"))
            owner.life.check_usable()
            owner.check_between_uses("zo.copy reads the parameters of a model")
        _check_tensors(model)
    memo: dict[int, Any] = {}
    readers = {key: _ShardReader(owner) for key, owner in owners.items()}
    for param in model.parameters():
        made = memo[id(param)] = nn.Parameter(without_memory(param), kind == "same" and param.requires_grad)
        owned_by = owners.get(id(owner_of(param)))
        if owned_by is None:
            keep_recipe(made, CopyRecipe(PlainTensor(param)))
        else:
            keep_recipe(made, CopyRecipe(RestingTensor.of(owned_by.places[param], readers[id(owned_by)])))
    copied = deepcopy(model, memo)
    remove_copied_hooks(copied)
    try:
        return offload(copied, config, mesh, units)
    finally:
        for owner in owners.values():
            owner.store.staging.drop()


def _check_tensors(model: nn.Module) -> None:
    """Raise ConfigError for what cannot be copied part by part."""
    params, problems = {id(param) for param in model.parameters()}, []
    for slot in slots(model):
        if slot.tensor.is_meta or recipe_of(slot.tensor) is not None:
            problems.append(f"{slot.name} has no values yet: call zo.offload first")
        elif slot.held_by or id(slot.tensor) not in params or (kind := library_class(slot.tensor)) is not nn.Parameter:
            what = slot.held_by or (kind.__name__ if id(slot.tensor) in params else "part of a quantized weight")
            problems.append(f"{slot.name} is a {what}: build the model once more, and load the same weights")
    if problems:
        raise ConfigError("zo.copy: " + "\n".join(problems[:3] + ["..."] * (len(problems) > 3)))


@dataclass(frozen=True, eq=False)
class CopyRecipe:
    """The values of one parameter are another's."""

    source: PlainTensor | RestingTensor
    is_skipped: bool = False

    @property
    def value(self) -> object:
        return self.source

    def drawn(self) -> bytes:
        """Nothing is drawn: ranks that have one original have one copy."""
        return b""

    def make(self) -> torch.Tensor:
        """With the original's strides."""
        return self.source.whole()


class PlainTensor(FileTensor):
    """The values of an ordinary parameter."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param.detach()
        self.dtype_name, self.shape = _DTYPE_NAMES.get(param.dtype, ""), tuple(param.shape)

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self._param.reshape(-1)[begin:end].cpu()

    def whole(self) -> torch.Tensor:
        return self._param.cpu()


@dataclass(frozen=True, eq=False)
class RestingTensor(FileTensor):
    """The master of a parameter at rest, or its value where it has none. Elements are in the order in which they lie;
    `zo.offload` reads those that lie in another than row-major order as a whole."""

    place: ParamPlace
    reader: _ShardReader
    dtype_name: str
    shape: tuple[int, ...]
    spans: tuple[StoredTensor, ...]
    """Where files of others have it."""

    @classmethod
    def of(cls, place: ParamPlace, reader: _ShardReader) -> RestingTensor:
        layout, piece, base = place.section.layout, place.piece, place.section.shard.base
        name = "F32" if layout.trainable else _DTYPE_NAMES[layout.dtype]
        itemsize, found = layout.dtype.itemsize, []
        # A file that was replaced since is read by those alone that have it open.
        if base is not None and not any(file.what_changed() for file in base.used()):
            for span in base.spans:
                if piece.begin * itemsize <= span.begin < piece.end * itemsize:
                    file, numel = span.file, span.nbytes // itemsize
                    found.append(StoredTensor(file.path, file.descriptors[-1].fd, name, (numel,), span.offset))
        return cls(place, reader, name, piece.spec.shape, tuple(found))

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.spans

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.reader.read(self.place, begin, end)

    def whole(self) -> torch.Tensor:
        return self.place.piece.spec.view(self.read(0, self.numel))


class _ShardReader:
    """Reads masters of one model, and keeps the chunk that it has read last: the next elements lie in it."""

    def __init__(self, owner: ModelRuntime) -> None:
        self._index = owner.collectives.shard_index
        self._store = owner.store
        self._kept: tuple[int, int] | None = None
        self._chunk = host_empty(0, torch.float32)

    def read(self, place: ParamPlace, begin: int, end: int) -> torch.Tensor:
        """(end - begin,) of a parameter's elements as they lie."""
        layout, shard = place.section.layout, place.section.shard
        first = place.piece.begin - self._index * layout.shard_numel
        begin, end = first + begin, first + end
        if begin < 0 or end > layout.shard_numel:
            raise ConfigError(
                f"zo.copy: a rank has a part of {place.name} alone, and the copy is cut into other parts. Give it the "
                "stage, the units, the dtypes and the trained parameters of its model (kind='same'), or call "
                "zo.export_pretrained and zo.load_pretrained"
            )
        place.unit.wait_for_update()
        out, at = None, begin
        for row, first, last in _rows(begin, end):
            values = self._read_chunk(shard, row)
            if out is None:
                out = host_empty(end - begin, values.dtype)
            out[at - begin : at - begin + last - first] = values[first:last]
            at += last - first
        return host_empty(0, layout.dtype) if out is None else out

    def _read_chunk(self, shard: Shard, row: int) -> torch.Tensor:
        if self._kept != (key := (shard.layout.index, row)):
            self._chunk = read_master_chunk(self._store, shard, row).clone()
            self._kept = key
        return self._chunk


def _rows(begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Elements [begin, end) of a shard by the chunks that they lie in: (chunk, first, last) within it."""
    for row in range(begin // CHUNK_NUMEL, -(-end // CHUNK_NUMEL)):
        first = row * CHUNK_NUMEL
        yield row, max(begin - first, 0), min(end - first, CHUNK_NUMEL)
