"""Which parameters a model has and which of them form a unit.

Owns `ModelSpec`: a frozen picture of a module, made once and valid for meta tensors too. It never
touches parameter data. A unit is what is fetched, used and released together: one transformer block,
or a leftover such as the embedding. Calls, in order: `find_units` picks the modules,
`ModelSpec.from_module` reads the parameters.

[Note: trained parts]
Adapters are a small share of a block, and all that a step changes. In one unit with the frozen weights they would rest
on the same tier. Some units have frozen and trained parameters, and at most one element in `TRAINED_PART` is trained.
Then the trained ones are a unit of their own. The same modules use both. It follows or precedes the frozen part as its
first parameter does. So sections keep the order that they have in one unit, if all frozen ones are of one dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_offload.base.errors import ConfigError
from zero_offload.plan.quantized import BoundTensor, Record, module_name, records, slots
from zero_offload.plan.tensor_parallel import division, local_part, mesh_of, num_copies

SMALL_NUMEL = 1 << 18
"""Leftover modules below this many elements share one unit: a fetch of a few KiB is all latency."""
SMALL = "(small)"
"""That unit's name."""

TRAINED_PART = 8
"""See [Note: trained parts]."""

UnitChoice = Sequence["str | type[nn.Module] | nn.Module"] | str | type[nn.Module]
"""Names, classes or modules; one name or class stands for itself."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, under the first name it has in the model."""

    name: str
    aliases: tuple[str, ...]
    """Its further names: a tied parameter has several."""
    shape: tuple[int, ...]
    """For a DTensor, the shape of what this rank holds."""
    numel: int
    dtype: str
    """The dtype the user gave it, without the "torch." prefix."""
    trainable: bool
    division: str = ""
    """How a DTensor's parts lie on the ranks of its mesh."""
    num_copies: int = 1
    """How many ranks of the model's tensor-parallel mesh hold the same values."""
    keeps_dtype: bool = False
    """True if the compute dtype does not apply."""
    order: tuple[int, ...] = ()
    """The dimensions from the outermost in memory to the innermost; () where they lie in their order."""
    held_by: str = ""
    """The class of the parameter without memory that it is an attribute of."""
    record: Record | None = None
    """Of a weight that files describe by one more tensor."""

    def view(self, elements: torch.Tensor) -> torch.Tensor:
        """The parameter, of its elements as they lie in memory, (numel,)."""
        if not self.order:
            return elements.view(self.shape)
        return elements.view([self.shape[dim] for dim in self.order]).permute(inverse(self.order))

    @property
    def strides(self) -> tuple[int, ...]:
        """Of such a view."""
        strides, step = [0] * len(self.shape), 1
        for dim in reversed(self.order or range(len(self.shape))):
            strides[dim], step = step, step * max(self.shape[dim], 1)
        return tuple(strides)

    def elements(self, param: torch.Tensor) -> torch.Tensor:
        """(numel,) of a tensor of its shape, as they lie in memory: a view, if it has its strides."""
        return param.permute(self.order).reshape(-1) if self.order else param.reshape(-1)


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that takes `order` back."""
    return sorted(range(len(order)), key=order.__getitem__)


def _order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The order of a tensor's dimensions in memory; () where that is theirs, or elements do not lie side by side."""
    strides, sizes = tensor.stride(), tensor.shape
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -sizes[dim]))
    return tuple(order) if not tensor.is_contiguous() and tensor.permute(order).is_contiguous() else ()


@dataclass(frozen=True)
class ExpertGroups:
    """How a module's experts are used: `size` of them at a time, in order. Along the first dimension of its parameters
    entry i is expert i's."""

    num_experts: int
    size: int

    @property
    def num_groups(self) -> int:
        return -(-self.num_experts // self.size)

    def group(self, index: int) -> range:
        """The experts of a group; the last one may have fewer."""
        return range(index * self.size, min((index + 1) * self.size, self.num_experts))


@dataclass(frozen=True)
class UnitSpec:
    """Parameters that move together."""

    name: str
    params: tuple[ParamSpec, ...]
    experts: ExpertGroups | None = None
    """Of a unit that no forward fetches whole: its experts come in groups."""
    is_trained_part: bool = False
    """True if the modules that use it use a frozen part too."""

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    def parts(self) -> tuple[UnitSpec, ...]:
        """Itself, or its frozen and its trained part: see [Note: trained parts]."""
        trained = tuple(param for param in self.params if param.trainable)
        if self.experts is not None or not 0 < TRAINED_PART * sum(param.numel for param in trained) <= self.numel:
            return (self,)
        frozen = replace(self, params=tuple(param for param in self.params if not param.trainable))
        part = UnitSpec(f"{self.name} (trained)", trained, is_trained_part=True)
        return (part, frozen) if self.params[0].trainable else (frozen, part)


@dataclass(frozen=True)
class HookPoint:
    """A module whose forward needs these units (indices into `ModelSpec.units`)."""

    module: str
    units: tuple[int, ...]


@dataclass(frozen=True)
class ModelSpec:
    """The units of a model in order of definition, and the modules that use them."""

    units: tuple[UnitSpec, ...]
    hook_points: tuple[HookPoint, ...]

    @classmethod
    def from_module(
        cls,
        root: nn.Module,
        units: UnitChoice | None = None,
        only: Collection[torch.Tensor] | None = None,
        experts: Mapping[str, ExpertGroups] | None = None,
    ) -> ModelSpec:
        """Read `root`; `units` names the unit modules (names, classes or modules), else they are found.

        Of its tensors those in `only`, by default all. The parameters of modules of `experts`, by name, are units of
        their own, which no module fetches. Raises ConfigError when a named unit is not in the model or the model has no
        parameter.
        """
        anchors = _resolve(root, units) if units is not None else find_units(root)
        specs = _param_specs(root, only)
        if not specs:
            raise ConfigError("the model has no parameter to offload")
        grouped = experts or {}
        if problems := [*_scripted(root), *_overlaps(root), *_half_tied(specs.values(), grouped)]:
            raise ConfigError("\n".join(problems))
        owner = {name: _anchor_of(name, anchors) for name in specs}
        leftover = _leftover_groups(root, [spec for name, spec in specs.items() if owner[name] is None])
        groups: dict[tuple[str, ExpertGroups | None], list[str]] = {}
        for name, spec in specs.items():
            module = name.rpartition(".")[0]
            if (of_module := grouped.get(module)) is not None and spec.shape[:1] == (of_module.num_experts,):
                groups.setdefault((module, of_module), []).append(name)
            else:
                groups.setdefault((owner[name] or leftover.get(name, SMALL), None), []).append(name)
        whole = (UnitSpec(key, tuple(specs[n] for n in names), of) for (key, of), names in groups.items())
        built = tuple(part for unit in whole for part in unit.parts())
        return cls(built, _hook_points(root, anchors, built))

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    def in_use_with(self, unit: int) -> tuple[tuple[int, ...], ...]:
        """For each module that uses the unit, the units in use meanwhile: its own, and of modules around it."""
        found = []
        for point in self.hook_points:
            if unit in point.units:
                outer = [o for o in self.hook_points if not o.module or f"{point.module}.".startswith(f"{o.module}.")]
                found.append(tuple(sorted({index for each in outer for index in each.units})))
        return tuple(found)


def find_units(root: nn.Module) -> tuple[str, ...]:
    """Names of the repeated blocks of `root`: the outermost children of one class in a list or Sequential.

    Blocks are alike. Children that grow, and consist of blocks themselves, are the stages of a pyramid (Swin,
    ConvNeXt, U-Nets). There the blocks inside are the units, since the last stage can be most of a model. So are the
    blocks of which a stage's own children consist (the transformers of SDXL's U-Net, ten blocks each).
    """
    return tuple(_repeated_blocks(root, "", in_stage=False))


def _repeated_blocks(module: nn.Module, prefix: str, *, in_stage: bool) -> Iterator[str]:
    children = dict(module.named_children())
    repeated: set[type[nn.Module]] = set()
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        repeated = _repeated_kinds(children.values())
    stages = {kind for kind in repeated if _are_stages([c for c in children.values() if type(c) is kind], in_stage)}
    for name, child in children.items():
        path = f"{prefix}{name}"
        if type(child) not in repeated or not can_be_called(child):
            yield from _repeated_blocks(child, f"{path}.", in_stage=in_stage)
        elif type(child) in stages and (inside := list(_repeated_blocks(child, f"{path}.", in_stage=True))):
            yield from inside
        else:
            yield path


def _repeated_kinds(modules: Iterable[nn.Module]) -> set[type[nn.Module]]:
    """Classes that several modules with parameters have."""
    counts = Counter(type(module) for module in modules if _numel(module) > 0)
    return {kind for kind, count in counts.items() if count > 1}


def _are_stages(modules: Sequence[nn.Module], in_stage: bool) -> bool:
    """True if modules of one class differ in size, and the largest holds most of its parameters in lists of blocks.

    `in_stage`: inside of a stage they may be of one size. A list of single layers does not count. Nor do experts:
    layers with experts are alike, or keep them further inside.
    """
    sizes = [_numel(module) for module in modules]
    largest = modules[sizes.index(max(sizes))]
    if not in_stage and max(sizes) < 2 * min(sizes):
        return False
    in_blocks = 0
    for inside in largest.children():
        blocks = [each for each in inside.children() if any(True for _ in each.children())]
        kinds = _repeated_kinds(blocks) if isinstance(inside, nn.ModuleList | nn.Sequential) else set()
        in_blocks += sum(_numel(each) for each in blocks if type(each) in kinds)
    return 2 * in_blocks > max(sizes)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def can_be_called(module: nn.Module) -> bool:
    """True if the module can be called. A list of modules cannot, so its hooks never run."""
    return type(module).forward is not nn.Module.forward


def _resolve(root: nn.Module, units: UnitChoice) -> tuple[str, ...]:
    modules = dict(root.named_modules())
    names: dict[str, None] = {}
    problems: list[str] = []
    if not isinstance(units, str | type | Iterable):
        raise ConfigError(
            f"units={units!r} names no modules; give names, classes or modules, such as units=['blocks.0']"
        )
    for unit in [units] if isinstance(units, str | type) else units:
        if isinstance(unit, str):
            found = [unit] if unit in modules else []
        elif isinstance(unit, type):
            found = [name for name, module in modules.items() if isinstance(module, unit)]
        else:
            found = [name for name, module in modules.items() if module is unit]
        if not found:
            problems.append(f"units: {unit!r} is not a module of this {type(root).__name__}")
        names.update(dict.fromkeys(found))
    if problems:
        raise ConfigError("\n".join([*problems, "names are those of model.named_modules()"]))
    return tuple(name for name in modules if name in names)


def _param_specs(root: nn.Module, only: Collection[torch.Tensor] | None) -> dict[str, ParamSpec]:
    """Tensors by first name, in order of definition; ties are one entry with aliases."""
    found: dict[tuple[int, str], list[BoundTensor]] = {}
    chosen = None if only is None else set(map(id, only))
    for slot in slots(root, remove_duplicate=False):
        if chosen is None or id(slot.tensor) in chosen:
            found.setdefault(slot.identity, []).append(slot)
    mesh, of_weights = mesh_of(root.parameters()), records(root)
    return {same[0].name: _param_spec(same, mesh, of_weights.get(same[0].name)) for same in found.values()}


def _param_spec(same: Sequence[BoundTensor], mesh: DeviceMesh | None, record: Record | None) -> ParamSpec:
    """The tensor that stands in all of these places."""
    name, *aliases = (slot.name for slot in same)
    tensor = same[0].tensor
    part = local_part(tensor)
    return ParamSpec(
        name=name,
        aliases=tuple(aliases),
        shape=tuple(part.shape),
        numel=part.numel(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        trainable=tensor.requires_grad,
        division=division(tensor),
        num_copies=num_copies(tensor, mesh),
        keeps_dtype=same[0].keeps_dtype,
        order=_order_of(tensor) if same[0].keeps_strides else (),
        held_by=same[0].held_by,
        record=record,
    )


def _scripted(root: nn.Module) -> Iterator[str]:
    for name, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(recurse=False), None) is not None:
            yield (
                f"{name or 'the model'} is a {type(module).__name__}, whose code saves parameters where no hook sees "
                "it; offload the module that it was made from, and use torch.compile"
            )


def _overlaps(root: nn.Module) -> Iterator[str]:
    """Different parameters in the same memory, of which one is trained: apart, they would no longer be one."""
    placed = [
        (_memory_of(param.untyped_storage()), param.storage_offset() * param.itemsize, name, param)
        for name, param in root.named_parameters()
        if (type(param) is nn.Parameter or param.is_meta) and param.numel() > 0
    ]
    placed.sort(key=lambda entry: entry[:2])
    for (storage, begin, name, param), (other_storage, other_begin, other_name, other) in pairwise(placed):
        overlap = storage == other_storage and other_begin < begin + param.nbytes
        if overlap and (param.requires_grad or other.requires_grad):
            yield (
                f"{name} and {other_name} are two parameters in the same memory. Tie them by assigning the parameter, "
                f"not its data, or give one a copy of its own"
            )


def _half_tied(specs: Iterable[ParamSpec], grouped: Mapping[str, ExpertGroups]) -> Iterator[str]:
    """Modules whose experts are in parameters of several modules: groups come from one unit."""
    homes: dict[str, set[str]] = {}
    for spec in specs:
        home = spec.name.rpartition(".")[0]
        for module in {name.rpartition(".")[0] for name in (spec.name, *spec.aliases)} & grouped.keys():
            if spec.shape[:1] == (grouped[module].num_experts,):
                homes.setdefault(module, set()).add(home)
    for module, found in homes.items():
        if len(found) > 1:
            yield (
                f"{module} shares some of its experts' parameters with {', '.join(sorted(found - {module}))}, and has "
                "others of its own. Experts in groups are all tied or not at all: give the module parameters of its "
                "own, or leave zo.group_experts out"
            )


def _memory_of(storage: torch.UntypedStorage) -> int:
    """Where a storage is; one on meta, which is nowhere, is itself."""
    return storage.data_ptr() or storage._cdata


def _anchor_of(param_name: str, anchors: Sequence[str]) -> str | None:
    """The innermost unit module that holds the parameter, or None for a leftover."""
    inside = [a for a in anchors if a == "" or param_name.startswith(f"{a}.")]
    return max(inside, key=len) if inside else None


def _leftover_groups(root: nn.Module, specs: Sequence[ParamSpec]) -> dict[str, str]:
    """The unit of each tensor: large leftover modules are units of their own; the small ones share one."""
    module_of = {spec.name: module_name(root, spec.name) for spec in specs}
    numels: Counter[str] = Counter()
    for spec in specs:
        numels[module_of[spec.name]] += spec.numel
    return {name: (path or "(root)") if numels[path] >= SMALL_NUMEL else SMALL for name, path in module_of.items()}


def _hook_points(root: nn.Module, anchors: Sequence[str], units: Sequence[UnitSpec]) -> tuple[HookPoint, ...]:
    """Every unit module, and outside of them every module that holds a parameter directly."""
    unit_of = {name: i for i, unit in enumerate(units) for p in unit.params for name in (p.name, *p.aliases)}
    needed: dict[str, dict[int, None]] = {}
    for name, index in unit_of.items():
        if units[index].experts is not None:
            needed.setdefault(name.rpartition(".")[0], {})  # its forward is one of the model's, and fetches nothing
            continue
        anchor = _anchor_of(name, anchors)
        point = module_name(root, name) if anchor is None else _called(root, anchor, name)
        needed.setdefault(point, {})[index] = None
    order = [name for name, _ in root.named_modules() if name in needed]
    return tuple(HookPoint(name, tuple(sorted(needed[name]))) for name in order)


def _called(root: nn.Module, anchor: str, param_name: str) -> str:
    """The unit module itself; if that is a list, the outermost module in it that is called and has the parameter."""
    path = anchor
    while not can_be_called(root.get_submodule(path)):
        below = param_name.removeprefix(f"{path}.") if path else param_name
        if "." not in below:
            break
        path = f"{path}.{below.partition('.')[0]}".removeprefix(".")
    return path
