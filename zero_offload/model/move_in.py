"""The parameters of a model move into their sections: values to where they rest, parameters to views of buffers.

Owns which parameters can be moved, whether all ranks have built the same ones, and what becomes of each. A plain one
stays the object it is. Values that `deferred_init` has left to be made are made here, one parameter at a time. A plain
parameter then takes the deferred one's place in every module. Decides nothing about tiers, and takes no memory but for
values on their way.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils import swap_tensors

from zero_offload.base.alike import Compared
from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.base.host import host_empty, host_tensor, host_zeros
from zero_offload.base.problems import warn_user
from zero_offload.checkpoint.hf_files import FileTensor, base_spans, rests_in_files
from zero_offload.checkpoint.values import ComponentSource, fill_from_readers, read_master
from zero_offload.hardware.device import Device
from zero_offload.hardware.kernels.checksums import crc32c_of_tensor
from zero_offload.model.deferred.recipe import TEMPORARY_BYTES
from zero_offload.model.deferred.recorder import DeferredTensor, class_of
from zero_offload.plan.layout import ParamSlice, SectionLayout, ShardLayout
from zero_offload.plan.model_spec import ParamSpec
from zero_offload.plan.quantized import BoundTensor, TensorBinding, ordinary_buffers_of, prepare, problem_of, slots
from zero_offload.plan.tensor_parallel import is_dtensor, local_part
from zero_offload.runtime.ranks.collectives import CommitGroup
from zero_offload.runtime.ranks.group import CALL
from zero_offload.runtime.ranks.watch import Notice
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.standins.owners import Recipe, keep_recipe, recipe_of, unregister
from zero_offload.standins.refusals import wrapper_of
from zero_offload.storage.files.base_file import fingerprint_of
from zero_offload.storage.memory.heap import HeapTrimmer, trim_heap
from zero_offload.storage.shards.store import ShardStore


def check_not_wrapped(model: nn.Module) -> None:
    """Raise if a library divides, copies or moves the model, or a part of it, itself."""
    for name, module in model.named_modules():
        if (problem := _moved_by_others(module)) is not None:
            raise ConfigError(f"{name or 'the model'} {problem}")
        wrappers = (wrapper_of(kind.__module__) for kind in type(module).__mro__)
        if (what := next(filter(None, wrappers), None)) is not None:
            raise ConfigError(
                f"{name or 'the model'} is wrapped by torch's {what}, and zo.offload divides and reduces parameters "
                "over the ranks itself (stage=). Call zo.offload(model, config) on the plain model, as it was before "
                "it was wrapped, and leave the wrapper out"
            )


def _moved_by_others(module: nn.Module) -> str | None:
    """How a library keeps values of a module elsewhere, or will put other parameters into it."""
    if hasattr(module, "_hf_hook") and any(param.is_meta and recipe_of(param) is None for param in module.parameters()):
        return (
            "has values that accelerate keeps elsewhere (a device_map, cpu_offload or disk_offload). Build the model "
            "without these, or load it by zo.load_pretrained, and call zo.offload on that"
        )
    is_cache = type(module._parameters).__module__.startswith("compressed_tensors.")
    if is_cache or getattr(getattr(module, "quantization_status", None), "value", None) == "compressed":
        return (
            "is compressed by compressed-tensors, which puts other parameters into it in the first forward. Load a "
            "folder of one config group by from_pretrained(quantization_config=CompressedTensorsConfig("
            "dequantize=True)). That gives wrong weights where there are several groups, or experts in NVFP4: write a "
            "folder of ordinary weights by convert_checkpoint(FOLDER, NEW, CompressedTensorsDequantizer(FOLDER)) of "
            "compressed_tensors, and load that"
        )
    return None


def param_problem(param: nn.Parameter, device: torch.device | None = None) -> str | None:
    """Why a parameter that is not offloaded cannot be, or None."""
    if recipe_of(param) is not None:
        with torch._C.DisableTorchFunctionSubclass():
            hooks = param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)
        return "has a hook, which a deferred parameter loses; register it after zo.offload" if hooks else None
    if isinstance(param, DeferredTensor):
        return "is still recorded; leave 'with zo.deferred_init():' before zo.offload"
    if param.is_meta:
        return "is on meta and has no values; build the model inside 'with zo.deferred_init():'"
    if isinstance(param, nn.UninitializedParameter):
        return "belongs to a lazy module, which gets its shape with its first input; run one forward before zo.offload"
    if type(param) is not nn.Parameter and (problem := problem_of(param)) is not None:
        return problem
    if param.device.type != "cpu" and param.device != device:
        return f"is on {param.device}; build the model on the CPU"
    return "has a gradient; call model.zero_grad() first" if param.grad is not None else None


_DIGITS = 8
"""Hexadecimal digits of a word."""


def check_same_model(params: Mapping[str, torch.Tensor], ranks: CommitGroup, *, values: bool) -> None:
    """Raise ConfigError on every rank if two that hold the same part of the model have built it differently.

    Compared are its parameters, in order: names, shapes, which are trained, and, with `values`, their values. Of
    deferred parameters these are their random draws; values that are still to be loaded are left out. Collective.
    """
    if ranks.world_size == 1:
        return
    counts = [int(word, 16) for word in ranks.gather_digests(f"{len(params):0{_DIGITS}x}")]
    if len(set(counts)) > 1:
        other = next(rank for rank, count in enumerate(counts) if count != counts[0])
        raise ConfigError(
            f"ranks have built different models: of {counts[0]} parameters on rank 0, and of {counts[other]} on rank "
            f"{other}. Build the same one on all ranks"
        )
    if not params:
        return
    if values:
        notice = Notice(compared=[_built_of(params.values())])
        with ranks.together(CALL, notice):
            pass
    mine = "".join(f"{_word(name, param, values):0{_DIGITS}x}" for name, param in params.items())
    every = ranks.gather_digests(mine)
    ranks_per_column = ranks.world_size // ranks.num_columns
    for rank, words in enumerate(every):
        first = rank - rank % ranks_per_column
        if words != every[first]:
            raise _difference(list(params), first, rank, every)


def _built_of(params: Iterable[torch.Tensor]) -> Compared:
    """Properties whose difference makes all values differ."""
    kinds = {(str(param.dtype), recipe_of(param) is not None) for param in params}
    return Compared.of(
        {
            "dtypes of parameters": sorted({dtype for dtype, _ in kinds}),
            "parameters of zo.deferred_init": _SHARES[frozenset(is_deferred for _, is_deferred in kinds)],
        }
    )


_SHARES = {frozenset({True}): "all", frozenset({False}): "none", frozenset({True, False}): "some", frozenset(): "none"}


def _word(name: str, param: torch.Tensor, values: bool) -> int:
    described = zlib.crc32(f"{name} {tuple(param.shape)} {param.requires_grad}".encode())
    if not values:
        return described
    recipe = recipe_of(param)
    if recipe is not None and recipe.is_skipped:
        return described
    if recipe is not None:
        return zlib.crc32(recipe.drawn(), described)
    return crc32c_of_tensor(local_part(param).detach().contiguous().cpu(), seed=described)


def _difference(names: Sequence[str], first: int, rank: int, every: Sequence[str]) -> ConfigError:
    at = [slice(begin, begin + _DIGITS) for begin in range(0, len(every[rank]), _DIGITS)]
    differ = [name for name, word in zip(names, at, strict=True) if every[first][word] != every[rank][word]]
    others = f" and {len(differ) - 1} other parameters" if differ[1:] else ""
    return ConfigError(
        f"ranks have built different models: {differ[0]}{others} of rank {rank} {'differ' if others else 'differs'} "
        f"from rank {first}'s. Call torch.manual_seed(0) before the model is built, with the same seed on all ranks, "
        "or load the same weights on all. A rank's own seed may come after zo.offload"
    )


def lacks_values(params: Iterable[torch.Tensor]) -> bool:
    """True if values of some parameter were left out by `deferred_init(values="skip")`."""
    recipes = [recipe_of(param) for param in params]
    return any(recipe is not None and recipe.is_skipped for recipe in recipes)


def sections_without_values(layout: ShardLayout, params: Mapping[str, torch.Tensor]) -> set[int]:
    """Frozen sections without values yet, or whose values files have as they are. They take room on a drive when they
    are written.
    """

    def waits(section: SectionLayout) -> bool:
        found = {piece: params[piece.spec.name] for piece in section.params if piece.spec.name in params}
        if section.trainable or len(found) < len(section.params):
            return False
        sources = {piece: _source_of(recipe_of(param)) for piece, param in found.items()}
        return rests_in_files(section, sources) or all(lacks_values([param]) for param in found.values())

    return {section.index for section in layout.sections if waits(section)}


def _source_of(recipe: Recipe | None) -> FileTensor | None:
    """The tensor of files that has a deferred parameter's values."""
    source = None if recipe is None else recipe.source
    assert source is None or isinstance(source, FileTensor)
    return source


def check_same_base(store: ShardStore, ranks: CommitGroup) -> None:
    """Raise ConfigError on every rank if frozen sections rest in different files. Collective."""
    if len(set(ranks.gather_digests(fingerprint_of(store.base_files)))) > 1:
        raise ConfigError(
            "ranks have found different files, and would train different models. Give all of them copies of one folder"
        )


def base_paths(params: Iterable[torch.Tensor]) -> dict[str, Path]:
    """The files that deferred parameters are read from, by their names."""
    sources = (_source_of(recipe_of(param)) for param in params)
    return {part.path.name: part.path for source in sources if source is not None for part in source.parts}


@dataclass(frozen=True)
class CastBuffer:
    """A buffer that `zo.offload` gave another dtype."""

    name: str
    holder: weakref.ref[nn.Module]
    own: str
    """Its name there."""
    tensor: torch.Tensor
    version: int

    @property
    def is_narrow(self) -> bool:
        return self.tensor.dtype.itemsize < torch.float32.itemsize

    @property
    def is_changed(self) -> bool:
        """True if the program has changed or replaced it since."""
        module = self.holder()
        return module is not None and (
            getattr(module, self.own, None) is not self.tensor or self.tensor._version != self.version
        )


def move_buffers(
    model: nn.Module, dtypes: Mapping[str, torch.dtype], device: Device, undo: contextlib.ExitStack
) -> list[CastBuffer]:
    """Those that are not offloaded, to the compute device; some change their dtype, by name."""
    cast = []
    moved: dict[int, torch.Tensor] = {}  # one tensor of several modules stays one
    for path, module in model.named_modules():
        for own, buffer in ordinary_buffers_of(module):
            undo.callback(setattr, module, own, buffer)
            name = f"{path}.{own}" if path else own
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer.to(device.torch_device, dtypes.get(name))
            to = moved[id(buffer)]
            setattr(module, own, to)
            if name in dtypes and bool(to.isinf().any()) and not buffer.isinf().any():
                warn_user(
                    f"buffer {name} has values beyond {to.dtype}, which become infinite there, as by module.to(dtype). "
                    f"Precision(buffers={{{name!r}: 'fp32'}}) keeps them"
                )
            if name in dtypes:
                cast.append(CastBuffer(name, weakref.ref(module), own, to, to._version))
    return cast


def move_in(
    model: nn.Module,
    units: Sequence[Unit],
    store: ShardStore,
    values_of: int | None,
    undo: contextlib.ExitStack,
) -> dict[int, Recipe]:
    """Make every tensor of these units a view of its section; returns, by id, recipes of those without values.

    The values of shard number `values_of` are taken along; None where the shards have theirs. `undo` gives
    every tensor memory of its own again; a frozen one keeps its values as the compute dtype has rounded them.
    """
    places = _places_of(model)
    without_values: dict[int, Recipe] = {}
    for unit in units:
        for section in unit.sections:
            # Taken out: a tensor that a parameter replaces has to give its memory back before the next one.
            moved = [MovedTensor.of(piece, places.pop(piece.spec.name)) for piece in section.layout.params]
            if values_of is not None:
                _write_values(section, store, values_of, moved)
            undo.callback(_move_out, section, store, moved)
            for each in moved:
                made = each.become(section.own_view(each.piece))
                unit.params.append(made)
                if each.recipe is not None and each.recipe.is_skipped:
                    without_values[id(made)] = each.recipe
    prepare(model, undo)
    return without_values


def _places_of(model: nn.Module) -> dict[str, list[BoundTensor]]:
    """Where each tensor stands, by its first name."""
    first: dict[tuple[int, str], str] = {}
    places: dict[str, list[BoundTensor]] = {}
    for slot in slots(model, remove_duplicate=False):
        places.setdefault(first.setdefault(slot.identity, slot.name), []).append(slot)
    return places


@dataclass
class MovedTensor:
    """A tensor that becomes a view of its section, and the parameter that it is then.

    A plain parameter stays the object that it is, also one of a copy, which has no memory yet. A deferred one, which
    cannot leave meta, and a tensor that was no parameter are replaced where they stand. A deferred one is kept: it
    takes no memory, and can come back.
    """

    piece: ParamSlice
    tensor: torch.Tensor | None
    """None once a parameter is in its places, and it has given its memory back."""
    recipe: Recipe | None
    """How its values are made, if it has none."""
    dtype: torch.dtype
    device: torch.device
    """Where it has been: the host, or the compute device for what is adopted."""
    holders: Sequence[TensorBinding]
    """Where it stands."""

    @classmethod
    def of(cls, piece: ParamSlice, places: Sequence[BoundTensor]) -> MovedTensor:
        tensor = places[0].tensor
        return cls(piece, tensor, recipe_of(tensor), tensor.dtype, tensor.device, [slot.holder for slot in places])

    def become(self, view: torch.Tensor) -> nn.Parameter:
        """The parameter that is `view`, in each place."""
        if self._kept is not None:
            if self.recipe is not None:
                unregister(self._kept)  # torch swaps no tensor that something refers to weakly
            move_to(self._kept, view)
            return self._kept
        assert self.tensor is not None
        made = _made_like(self.tensor, view)
        for holder in self.holders:
            holder.put(made)
        if self.recipe is None:
            self.tensor = None
        else:
            unregister(self.tensor)  # a program that has kept it learns that it is no longer the model's
        return made

    def leave(self, values: torch.Tensor | None) -> None:
        """Be a tensor of these values again; with None, one whose values are to be made."""
        kept, tensor = self._kept, self.tensor
        if values is None:
            assert tensor is not None
            values = tensor if kept is None else without_memory(tensor)
        if kept is not None:
            move_to(kept, values)
        else:
            for holder in self.holders:
                holder.put(values)
        if self.recipe is not None and tensor is not None:
            keep_recipe(tensor, self.recipe)

    @property
    def _kept(self) -> nn.Parameter | None:
        """The parameter that stays the object that it is."""
        is_plain = isinstance(self.tensor, nn.Parameter) and not isinstance(self.tensor, DeferredTensor)
        return cast(nn.Parameter, self.tensor) if is_plain else None


def _move_out(section: Section, store: ShardStore, moved: Sequence[MovedTensor]) -> None:
    """After an error elsewhere: what became a view is a tensor of its own again, since the buffer's pages will go."""
    plain = [each for each in moved if each.recipe is None]
    for each in moved:
        if each.recipe is not None:
            each.leave(None)
    if not plain:
        return
    values, first = None, plain[0].piece.spec.name
    if section.layout.num_shards == 1:
        with contextlib.suppress(ZeroOffloadError, RuntimeError):
            values = read_master(store, section.shard)
    for each in plain:
        piece = each.piece
        if values is None:
            old = host_tensor(torch.nan, torch.float32).to(each.dtype).expand(piece.spec.shape)
        else:
            old = piece.spec.view(values[piece.begin : piece.end].to(each.dtype, copy=True))
        each.leave(old if each.device.type == "meta" else old.to(each.device))
    if (
        values is not None
        and not section.layout.trainable
        and any(each.dtype.itemsize > section.layout.dtype.itemsize for each in plain)
    ):
        warn_user(
            f"{first} and what lies beside it ({len(plain)} frozen parameters) had moved to the tiers "
            f"before zo.offload failed: they are rounded to {str(section.layout.dtype).removeprefix('torch.')} now. "
            "Build the model again for their exact values",
        )
    if values is None:
        warn_user(
            f"{first} and parameters beside it ({len(plain)} in all) cannot be read back on this rank. "
            "They had moved to the tiers before zo.offload failed, and are NaN now. Build the model again",
        )


def _write_values(section: Section, store: ShardStore, shard_index: int, moved: Sequence[MovedTensor]) -> None:
    recipes = [each.recipe for each in moved]
    if all(recipe is not None and recipe.is_skipped for recipe in recipes):
        return
    sources = {each.piece: _source_of(each.recipe) for each in moved}
    if rests_in_files(section.layout, sources):
        store.rest_in_base(section.shard, base_spans(section.layout, sources, store.base), shard_index)
        return
    values = _ElementReader()
    readers = {
        each.piece: functools.partial(values.read, each.piece.spec, each.tensor)
        for each in moved
        if each.tensor is not None
    }
    fill = fill_from_readers(section.shard, shard_index, readers)
    store.write_components(section.shard, ComponentSource(section.shard, fill))
    if any(recipes):
        trim_heap()  # what values were made with, of many sizes


class _ElementReader:
    """Elements of parameters, in any order, best one parameter after the other: a parameter that was made is kept."""

    def __init__(self) -> None:
        self._param: torch.Tensor | None = None
        self._made = host_empty(0, torch.float32)
        self._trimmer = HeapTrimmer(TEMPORARY_BYTES)

    def read(self, spec: ParamSpec, param: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        recipe = recipe_of(param)
        if recipe is None:
            return spec.elements(local_part(param).detach())[begin:end].cpu()
        if recipe.is_skipped:
            return host_zeros(1, param.dtype).expand(end - begin)
        if recipe.source is not None and not spec.order:
            return recipe.source.read(begin, end)
        if self._param is not param:
            freed, self._made = self._made.nbytes, host_empty(0, torch.float32)  # before the next one takes memory
            self._trimmer.freed(freed)
            self._param, self._made = param, spec.elements(recipe.make())
        return self._made[begin:end]


def _made_like(tensor: torch.Tensor, view: torch.Tensor) -> nn.Parameter:
    """A new parameter that is this view, of the tensor's class if that is a library's, and with its attributes."""
    made = _made_at(view, tensor.requires_grad)
    if issubclass(kind := class_of(tensor), nn.Parameter):
        made.__class__ = kind
    made.__dict__.update({key: value for key, value in vars(tensor).items() if key != "_is_param"})
    return made


def without_memory(like: torch.Tensor) -> torch.Tensor:
    """A tensor of this form on the host, which must not be read."""
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
    made.untyped_storage().resize_(0)
    return made


def move_to(param: nn.Parameter, place: torch.Tensor) -> None:
    """Make a parameter a view of `place`, which holds its (local) values in the compute dtype.

    A DTensor keeps its identity, hooked modules and placement; its plain part becomes the view.
    """
    if not is_dtensor(param):
        if torch._has_compatible_shallow_copy_type(param, place):
            param.data = place
        else:  # between the host and device types that torch does not convert itself
            made = _made_like(param, place)
            if param.grad_dtype != param.dtype:  # as the program has set it, None for any
                made.grad_dtype = param.grad_dtype
            swap_tensors(param, made)
        return
    # Late: the import takes half a second, and a program that has a DTensor has made it.
    from torch.distributed.tensor import DTensor

    old: Any = param
    new = DTensor.from_local(
        place, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
    )
    # As Module.to does; setting data would leave its dtype and its part as they were.
    swap_tensors(param, nn.Parameter(new, requires_grad=param.requires_grad))


def _made_at(place: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """A new parameter that is a view of `place` and counts its own versions: writing to `place` does not
    count for it."""
    made = nn.Parameter(torch.empty(0, dtype=place.dtype, device=place.device), requires_grad)
    made.data = place
    return made
