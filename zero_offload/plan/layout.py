"""Where every parameter lies: unit -> section -> flat buffer -> this rank's shard.

A section is a unit's parameters of one (dtype, trainable), and of one number of tensor-parallel copies: one flat
buffer, whose norm counts once. These rules cannot change later, since files depend on them. Every parameter starts at a
multiple of `ALIGN_NUMEL` elements, so no 8-bit block and no hyperparameter segment straddles two parameters. Ranks cut
at multiples of `SHARD_NUMEL`, so the shard of any dtype of two bytes or more is a whole number of 4 KiB sectors.
Pure: numbers in, frozen values out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

import torch

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import StateFormat
from zero_offload.plan.dtypes import ComputeDtypes
from zero_offload.plan.model_spec import ExpertGroups, ModelSpec, ParamSpec

ALIGN_NUMEL = 256
SHARD_NUMEL = 4096
CHUNK_NUMEL = 1 << 20
"""Elements per chunk: the grain of the update pipeline, of file blocks and of checksums."""

_COMPUTE = ("float32", "bfloat16", "float16")

Target = TypeVar("Target", bound=Hashable)


@dataclass(frozen=True)
class ParamSlice:
    """A parameter inside its section: elements [begin, begin + numel) of the flat buffer."""

    spec: ParamSpec
    begin: int
    is_gone: bool = False
    """True if the model has the parameter no more: its place stays as it is, and generations do not list it."""

    @cached_property
    def end(self) -> int:
        return self.begin + self.spec.numel


@dataclass(frozen=True)
class SectionLayout:
    """One flat buffer of a unit and how ranks share it."""

    unit: int
    index: int
    """Position among all sections of the model; names its extents in files."""
    dtype: torch.dtype
    trainable: bool
    num_copies: int
    """How many tensor-parallel ranks hold the same values."""
    params: tuple[ParamSlice, ...]
    """None once all of them are gone: nothing is left of the section but its number."""
    shard_numel: int
    """Elements each rank holds, padding included."""
    num_shards: int
    state_format: StateFormat = StateFormat.FP32
    """How optimizer states rest."""
    is_thawed: bool = False
    """True if it is `trainable` and was not when its buffer was made."""

    def whole(self) -> SectionLayout:
        """The same section cut into one shard."""
        return replace(self, shard_numel=self.numel, num_shards=1)

    @cached_property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.shard_numel * self.num_shards

    @property
    def used_numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(piece.spec.numel for piece in self.params)

    @cached_property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property
    def shard_nbytes(self) -> int:
        return self.shard_numel * self.dtype.itemsize

    @property
    def has_master_apart(self) -> bool:
        """True if the fp32 master is more than the value: a residual completes it, or it lies beside it."""
        return self.trainable and self.dtype != torch.float32

    def in_shard(self, piece: ParamSlice, shard_index: int) -> tuple[int, int]:
        """The part of a parameter that a shard holds, counted from the shard's start; maybe empty."""
        offset = shard_index * self.shard_numel
        return (
            min(max(piece.begin - offset, 0), self.shard_numel),
            min(max(piece.end - offset, 0), self.shard_numel),
        )

    @cached_property
    def steppers(self) -> Mapping[int, int]:
        """The shard whose rank steps each parameter, for optimizers that need it whole; by first element. The
        rank with two thirds of it does, else ranks do in turns.

        States of such optimizers rest there. So it depends on the parameter's place alone, which stays when others go.
        """
        return {piece.begin: self._stepper_of(piece) for piece in self.params}

    def _stepper_of(self, piece: ParamSlice) -> int:
        first = piece.begin // self.shard_numel
        for shard in range(first, min(first + 3, self.num_shards)):
            begin, end = self.in_shard(piece, shard)
            if 3 * (end - begin) >= 2 * piece.spec.numel:
                return shard
        # Where sections that are alike come every second time, an even number of ranks takes its turns all the same.
        return (first + self.index + self.index // self.num_shards) % self.num_shards

    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Element ranges of a shard, `CHUNK_NUMEL` each but the last."""
        return self._chunks

    @cached_property
    def _chunks(self) -> tuple[tuple[int, int], ...]:
        # Asked for with every array of every chunk: made anew, a large shard's would take longer than its update.
        return tuple(
            (begin, min(begin + CHUNK_NUMEL, self.shard_numel)) for begin in range(0, self.shard_numel, CHUNK_NUMEL)
        )

    def elements(self, rows: range) -> tuple[int, int]:
        """The range of neighbouring chunks, at least one."""
        return self._chunks[rows[0]][0], self._chunks[rows[-1]][1]

    def block_sizes(self, dtype: torch.dtype) -> list[int]:
        """Bytes of each block of an array over a shard: one block per chunk."""
        return [(end - begin) * dtype.itemsize for begin, end in self.chunks()]


@dataclass(frozen=True)
class UnitLayout:
    """The sections of one unit."""

    name: str
    sections: tuple[SectionLayout, ...]
    experts: ExpertGroups | None = None
    """As `UnitSpec.experts`."""
    is_trained_part: bool = False
    """As in `UnitSpec`."""

    @cached_property
    def nbytes(self) -> int:
        return sum(section.nbytes for section in self.sections)


@dataclass(frozen=True)
class ShardLayout:
    """Every section of a model for a given number of shards."""

    units: tuple[UnitLayout, ...]
    num_shards: int
    state_format: StateFormat = StateFormat.FP32

    @property
    def sections(self) -> tuple[SectionLayout, ...]:
        return tuple(section for unit in self.units for section in unit.sections)

    def thawed(self, indices: Container[int]) -> ShardLayout:
        """The same with these sections, which are frozen, trained."""

        def of(section: SectionLayout) -> SectionLayout:
            if section.index not in indices:
                return section
            assert not section.trainable, f"section {section.index} is trained already"
            return replace(section, trainable=True, is_thawed=True)

        return self._with(of)

    def frozen(self, indices: Container[int]) -> ShardLayout:
        """The same with these sections, which have thawed, frozen again."""

        def of(section: SectionLayout) -> SectionLayout:
            if section.index not in indices:
                return section
            assert section.is_thawed, f"section {section.index} has not thawed"
            return replace(section, trainable=False, is_thawed=False)

        return self._with(of)

    def _with(self, of: Callable[[SectionLayout], SectionLayout]) -> ShardLayout:
        units = (replace(unit, sections=tuple(map(of, unit.sections))) for unit in self.units)
        return replace(self, units=tuple(units))

    def changed(self, gone: Container[str], names: Mapping[str, tuple[str, ...]]) -> ShardLayout:
        """The same of a model that has lost the parameters `gone`, and has others under new names: `names` are all of
        those, the first one first. Sections keep their numbers, and parameters their places."""
        return replace(self, units=tuple(_changed(unit, gone, names) for unit in self.units))


def _changed(unit: UnitLayout, gone: Container[str], names: Mapping[str, tuple[str, ...]]) -> UnitLayout:
    def of(piece: ParamSlice) -> ParamSlice:
        if piece.is_gone or piece.spec.name in gone:
            return replace(piece, is_gone=True)
        first, *others = names.get(piece.spec.name, (piece.spec.name, *piece.spec.aliases))
        return replace(piece, spec=replace(piece.spec, name=first, aliases=tuple(others)))

    sections, moved = [], dict[str, str]()
    for section in unit.sections:
        params = tuple(map(of, section.params))
        moved |= {mine.spec.name: now.spec.name for mine, now in zip(section.params, params, strict=True)}
        if all(piece.is_gone for piece in params):
            sections.append(replace(section, params=(), shard_numel=0, trainable=False, is_thawed=False))
        else:
            sections.append(replace(section, params=params))
    return replace(unit, sections=tuple(sections), name=_moved_name(unit.name, moved))


def _moved_name(name: str, moved: Mapping[str, str]) -> str:
    """A unit's name, that of its module, where its parameters have other names now."""
    module, space, part = name.partition(" ")
    for before, now in moved.items():
        inside = before.removeprefix(f"{module}.")
        if inside != before and now != before and now.endswith(f".{inside}"):
            return now.removesuffix(f".{inside}") + space + part
    return name


def make_layout(
    spec: ModelSpec, dtypes: ComputeDtypes, num_shards: int, before: ShardLayout | None = None
) -> ShardLayout:
    """Lay out `spec` for `num_shards` ranks; floating parameters become what `dtypes` says.

    `before` stays as it is, and the units of `spec` come behind its own.
    Raises ConfigError for dtypes that have no place: float64, complex, trainable integers.
    """
    problems = [text for unit in spec.units for param in unit.params if (text := _problem(param))]
    if problems:
        raise ConfigError("\n".join(problems))
    units: list[UnitLayout] = [] if before is None else list(before.units)
    index = sum(len(unit.sections) for unit in units)
    for number, unit in enumerate(spec.units, start=len(units)):
        alike: dict[tuple[torch.dtype, bool, int], list[ParamSpec]] = {}
        for param in unit.params:
            dtype = getattr(torch, param.dtype) if param.keeps_dtype else dtypes.of(param.name)
            alike.setdefault((dtype, param.trainable, param.num_copies), []).append(param)
        sections = []
        for (dtype, trainable, num_copies), params in alike.items():
            ends = [0, *itertools.accumulate(_round_up(param.numel, ALIGN_NUMEL) for param in params)]
            slices = tuple(map(ParamSlice, params, ends))
            shard_numel = max(_round_up(-(-ends[-1] // num_shards), SHARD_NUMEL), SHARD_NUMEL)
            sections.append(
                SectionLayout(
                    number, index, dtype, trainable, num_copies, slices, shard_numel, num_shards, dtypes.states
                )
            )
            index += 1
        units.append(UnitLayout(unit.name, tuple(sections), unit.experts, unit.is_trained_part))
    return ShardLayout(tuple(units), num_shards, dtypes.states)


def _problem(param: ParamSpec) -> str | None:
    if param.dtype in ("float64", "complex64", "complex128"):
        return f"parameter {param.name} is {param.dtype}; convert it first, for example with model.float()"
    if param.trainable and param.dtype not in _COMPUTE:
        return f"parameter {param.name} is {param.dtype} and cannot be trained; call requires_grad_(False) on it"
    return None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Dealer(Generic[Target]):
    """Deals weights to targets so that each gets its fraction, evenly all along: units to tiers, blocks to directories.

    A weight goes to the target that lags its fraction most; of equals to the first.
    """

    def __init__(self, fractions: Mapping[Target, float]) -> None:
        self._fractions = dict(fractions)
        self._lag = dict.fromkeys(self._fractions, 0.0)

    def deal(self, weight: int, to: Target | None = None) -> Target:
        """The target of the next weight; `to` where that is known."""
        for target, fraction in self._fractions.items():
            self._lag[target] += fraction * weight
        chosen = max(self._lag, key=lambda target: self._lag[target]) if to is None else to
        self._lag[chosen] -= weight
        return chosen
