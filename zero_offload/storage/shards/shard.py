"""One rank's part of one section: which components it has and where each of them is.

[Note: components of a shard]
A trainable shard is whole in its optimizer components; they alone make a generation.

    value       (shard_numel,) compute dtype: forward uses it. With bf16 compute it is the upper half of the fp32
                master. With fp32 compute it is the master. With fp16 compute it is a rounded copy of the master.
    residual    (shard_numel,) int16, bf16 compute only: completes the master bit for bit. Beside compact states it
                is int8, and the master has 24 bits.
    master      (shard_numel,) fp32, fp16 compute only: an exponent of 5 bits leaves nothing to complete.
    exp_avg, ...   (shard_numel,) fp32: states of the optimizers of its parameters, by torch's names. They exist from
                the first optimizer on (`ShardStore.add_states`); with several optimizers, all of theirs.
                They may rest in bf16, or compact: chunk after chunk, codes and then scales, up to a whole sector.
    rows_N      (chunks * N,) uint8: states of any other kind, packed parameter by parameter (`rows.py`). A step that
                needs more room gives the shard rows of another N.

A frozen shard has a value and nothing else. If files of a base model hold all of it, byte for byte, they are its
`base`. Then it is read from there, has no slot, and generations name the files, until a write ends that. `memory` has
the components that rest on the device or CPU tier, in host memory. A shard that is `on_device` has all of them in the
device's memory, the value too, whatever the params tier. `slots` are the extents on disk. A shard that can change and
takes part in generations has two, so that the committed one is never overwritten. A value on NVMe whose other
components rest in memory is a cache: it is written after every update and belongs to no generation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from zero_offload.base.host import host_empty, host_zeros
from zero_offload.base.types import StateFormat, StateKind, Tier, whole_sectors
from zero_offload.hardware.device import Event
from zero_offload.hardware.kernels.arguments import num_scales, state_dtype
from zero_offload.hardware.kernels.formats import decode_states, encode_states
from zero_offload.hardware.kernels.rules import SIGNED
from zero_offload.plan.layout import CHUNK_NUMEL, SectionLayout
from zero_offload.storage.files.base_file import BaseFile, BaseSpan, Stretch
from zero_offload.storage.files.base_files import BaseFiles
from zero_offload.storage.files.engine import Urgency
from zero_offload.storage.files.swap_file import ALL_ROWS, Extent, SwapFile, Transfer


class Component(str):
    """An array of a shard, by its name. Raises ValueError for another name."""

    VALUE: ClassVar[Component]
    RESIDUAL: ClassVar[Component]
    MASTER: ClassVar[Component]
    EXP_AVG: ClassVar[Component]
    EXP_AVG_SQ: ClassVar[Component]
    MAX_EXP_AVG_SQ: ClassVar[Component]
    SUM: ClassVar[Component]
    MOMENTUM_BUFFER: ClassVar[Component]

    chunk_bytes: int
    """Of rows, the bytes that each chunk of the shard has of them; else 0."""

    def __new__(cls, name: str) -> Component:
        name = str(name)  # manifests that are damaged have anything there
        if (known := _NAMED.get(name)) is not None:
            return known
        size = name.removeprefix(_ROWS)
        if size == name or not size.isdecimal() or not 0 < int(size) <= _ROWS_MAX or f"{_ROWS}{int(size)}" != name:
            raise ValueError(f"{name!r} is not an array of a shard")
        return cls._made(name, int(size))

    @classmethod
    def _made(cls, name: str, chunk_bytes: int) -> Component:
        made = super().__new__(cls, name)
        made.chunk_bytes = chunk_bytes
        return made

    @classmethod
    def named(cls, name: str) -> Component:
        """An array of its own name, which is the same object each time."""
        return _NAMED.setdefault(name, cls._made(name, 0))

    @classmethod
    def rows(cls, nbytes: int, num_chunks: int) -> Component:
        """Rows with room for so many bytes in a shard of so many chunks."""
        return cls(f"{_ROWS}{whole_sectors(-(-nbytes // num_chunks))}")

    @property
    def is_rows(self) -> bool:
        return self.chunk_bytes > 0


_NAMED: dict[str, Component] = {}
_ROWS, _ROWS_MAX = "rows_", 1 << 40
Component.VALUE = Component.named("value")
Component.RESIDUAL = Component.named("residual")
Component.MASTER = Component.named("master")
Component.EXP_AVG = Component.named("exp_avg")
Component.EXP_AVG_SQ = Component.named("exp_avg_sq")
Component.MAX_EXP_AVG_SQ = Component.named("max_exp_avg_sq")
Component.SUM = Component.named("sum")
Component.MOMENTUM_BUFFER = Component.named("momentum_buffer")


def in_order(components: Iterable[Component]) -> tuple[Component, ...]:
    """Each once, in the order in which extents lie and messages name them: rows come last."""
    wanted = set(components)
    return (*(each for each in _NAMED.values() if each in wanted), *sorted(each for each in wanted if each.is_rows))


def named_states() -> tuple[Component, ...]:
    """The states that have names of their own."""
    return tuple(each for each in _NAMED.values() if is_state(each))


ADAM_STATES = (Component.EXP_AVG, Component.EXP_AVG_SQ)
"""The states that plans count before there is an optimizer."""


def master_components(layout: SectionLayout) -> tuple[Component, ...]:
    """The components a shard of this section has without an optimizer's states."""
    return (Component.VALUE, *(_MASTER_PARTS[layout.dtype] if layout.trainable else ()))


def planned_components(layout: SectionLayout) -> tuple[Component, ...]:
    """The components it will have with AdamW."""
    return master_components(layout) + (ADAM_STATES if layout.trainable else ())


def unplanned_bytes(layout: SectionLayout, states: Iterable[Component]) -> int:
    """Bytes that these states of a whole shard take beyond those that plans count."""
    planned = [each for each in planned_components(layout) if is_state(each)]
    return max(shard_bytes(layout, states) - shard_bytes(layout, planned), 0)


_MASTER_PARTS: dict[torch.dtype, tuple[Component, ...]] = {
    torch.float32: (),
    torch.bfloat16: (Component.RESIDUAL,),
    torch.float16: (Component.MASTER,),
}
"""Components of the master beside the value, by compute dtype."""
_MASTER_COMPONENTS = frozenset({Component.VALUE, Component.RESIDUAL, Component.MASTER})


def is_state(component: Component) -> bool:
    """True if it is what an optimizer keeps."""
    return component not in _MASTER_COMPONENTS


def is_packed(layout: SectionLayout, component: Component) -> bool:
    """True if its array is bytes: codes and scales."""
    return layout.state_format is StateFormat.COMPACT and is_state(component) and not component.is_rows


def component_dtype(layout: SectionLayout, component: Component) -> torch.dtype:
    """The dtype of the component's array."""
    match component:
        case Component.VALUE:
            return layout.dtype
        case Component.RESIDUAL:
            return torch.int8 if layout.state_format is StateFormat.COMPACT else torch.int16
        case Component.MASTER:
            return torch.float32
    if component.is_rows or is_packed(layout, component):
        return torch.uint8
    return torch.bfloat16 if layout.state_format is StateFormat.BF16 else torch.float32


def array_numel(layout: SectionLayout, component: Component, numel: int) -> int:
    """Elements of the array that a chunk of `numel` elements has."""
    if component.is_rows:
        return component.chunk_bytes
    if not is_packed(layout, component):
        return numel
    return whole_sectors(numel + num_scales(layout.state_format, numel) * 4)


def array_bytes(layout: SectionLayout, components: Iterable[Component], numel: int) -> int:
    """Bytes of the arrays of these components that a chunk of `numel` elements has."""
    return sum(array_numel(layout, each, numel) * component_dtype(layout, each).itemsize for each in components)


def array_range(layout: SectionLayout, component: Component, begin: int, end: int) -> slice:
    """Where neighbouring chunks, elements [begin, end), are in the array of a whole shard."""
    if component.is_rows:
        first, last = begin // CHUNK_NUMEL, -(-end // CHUNK_NUMEL)
        return slice(first * component.chunk_bytes, last * component.chunk_bytes)
    if not is_packed(layout, component):
        return slice(begin, end)
    packed = array_numel(layout, component, CHUNK_NUMEL)
    (before, _), (whole, rest) = divmod(begin, CHUNK_NUMEL), divmod(end - begin, CHUNK_NUMEL)
    return slice(before * packed, (before + whole) * packed + array_numel(layout, component, rest))


def shard_bytes(layout: SectionLayout, components: Iterable[Component]) -> int:
    """Bytes of these components of a whole shard."""
    kinds = tuple(components)
    return sum(array_bytes(layout, kinds, end - begin) for begin, end in layout.chunks())


def planned_bytes(layout: SectionLayout) -> int:
    """Bytes of a whole shard with AdamW's states."""
    return shard_bytes(layout, planned_components(layout))


def block_sizes(layout: SectionLayout, component: Component) -> list[int]:
    """Bytes of each block of its extent: one block per chunk."""
    return [array_bytes(layout, [component], end - begin) for begin, end in layout.chunks()]


def encode_array(layout: SectionLayout, component: Component, values: torch.Tensor) -> torch.Tensor:
    """A chunk's array of what is nearest to `values`, (numel,) fp32, host; of fp32 states `values` itself."""
    if layout.state_format is StateFormat.FP32 or component.is_rows:
        return values
    numel = array_numel(layout, component, values.numel())
    array = host_zeros(numel, component_dtype(layout, component))
    codes, scales = _parts(layout, component, array, values.numel())
    encode_states(layout.state_format, values.contiguous(), codes, scales, signed=component in SIGNED)
    return array


def decode_array(layout: SectionLayout, component: Component, array: torch.Tensor, numel: int) -> torch.Tensor:
    """(numel,) fp32, host, that a chunk's array stands for; of fp32 states the array itself."""
    if layout.state_format is StateFormat.FP32 or component.is_rows:
        return array
    values = host_empty(numel, torch.float32)
    codes, scales = _parts(layout, component, array, numel)
    decode_states(layout.state_format, codes, scales, values, signed=component in SIGNED)
    return values


def _parts(
    layout: SectionLayout, component: Component, array: torch.Tensor, numel: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views of the states' elements, and of their scales if they have any."""
    count = num_scales(layout.state_format, numel)
    if not count:
        return array, None
    codes = array[:numel].view(state_dtype(layout.state_format, signed=component in SIGNED))
    return codes, array[numel : numel + 4 * count].view(torch.float32)


@dataclass(frozen=True)
class ShardPlacement:
    """The tier of each state kind of one shard."""

    params: Tier
    grads: Tier
    optimizer: Tier

    @property
    def value_in_memory(self) -> bool:
        return self.params is not Tier.NVME

    @property
    def all_in_memory(self) -> bool:
        return Tier.NVME not in (self.params, self.grads, self.optimizer)

    @classmethod
    def of(cls, kinds: Mapping[StateKind, Tier]) -> ShardPlacement:
        return cls(kinds[StateKind.PARAMS], kinds[StateKind.GRADS], kinds[StateKind.OPTIMIZER])


@dataclass(frozen=True)
class InBase:
    """Where files of a base hold a section, byte for byte."""

    layout: SectionLayout
    spans: tuple[BaseSpan, ...]
    """Those of the whole section, by their begin; between them is padding."""
    shard_index: int
    files: BaseFiles

    def launch_fetch(self, stretches: Iterable[Stretch], urgency: Urgency) -> Transfer:
        """Bring stretches of elements of the shard to host memory."""
        first, itemsize = self.shard_index * self.layout.shard_nbytes, self.layout.dtype.itemsize
        in_bytes = [Stretch(first + begin * itemsize, first + end * itemsize, to) for begin, end, to in stretches]
        return self.files.launch_read(f"section {self.layout.index} base", self.spans, in_bytes, urgency)

    def read(self, address: int) -> None:
        """Bring the shard's values to host memory, and wait. An error is the caller's alone."""
        first = self.shard_index * self.layout.shard_nbytes
        self.files.read(self.spans, first, first + self.layout.shard_nbytes, address)

    def used(self) -> list[BaseFile]:
        return list(dict.fromkeys(span.file for span in self.spans))


class Replica:
    """Whole values of a section that ranks have cut, on this rank and away from the compute device: stages 1 and 2.

    The first use after an update gathers the shards and is kept here; every other use is served from here, without
    communication. It belongs to no generation, since it can be made again.
    """

    def __init__(self, layout: SectionLayout, disk: SwapFile | None, memory: torch.Tensor | None) -> None:
        """The replica is in host memory where `memory`, (numel,), is given; else on disk."""
        self._layout = layout.whole()
        self._disk = disk
        self._extent: Extent | None = None
        self.memory = memory
        self.fresh = False
        """True if it has the newest values."""
        self.base: InBase | None = None
        """Set where they are read from a base instead of the disk: all of the section, as one shard."""

    def outdate(self) -> None:
        """The shards may have other values now; those of a base stay."""
        self.fresh = self.base is not None

    def take_extents(self) -> list[Extent]:
        """Its extents, which are the caller's from now on."""
        taken = [] if self._extent is None else [self._extent]
        self._extent, self.fresh = None, False
        return taken

    def launch_fetch(self, address: int, urgency: Urgency) -> Transfer:
        """Bring the values, `layout.nbytes`, from disk to host memory at `address`."""
        if self.base is not None:
            return self.base.launch_fetch([Stretch(0, self._layout.numel, address)], urgency)
        assert self._disk is not None and self._extent is not None and self.fresh
        return self._disk.launch_read(self._extent, ALL_ROWS, address, urgency)

    def launch_save(self, address: int) -> Transfer:
        """Write the values from host memory to disk."""
        assert self._disk is not None
        if self._extent is None:
            # Now, not at the start: extents of generations must lie alike for every placement.
            sizes = self._layout.block_sizes(self._layout.dtype)
            self._extent = self._disk.allocate(f"section {self._layout.index} replica", sizes)
        return self._disk.launch_write(self._extent, ALL_ROWS, address)


@dataclass
class Shard:
    """See [Note: components of a shard]."""

    layout: SectionLayout
    placement: ShardPlacement
    on_device: bool = False
    """See `plan.buffers.is_on_device`."""
    states: tuple[Component, ...] = ()
    """The states that optimizers keep, as `in_order` has them."""
    memory: dict[Component, torch.Tensor] = field(default_factory=dict)
    slots: tuple[dict[Component, Extent], ...] = ()
    base: InBase | None = None
    """Set if a base has the values, and the slots do not."""
    awaits_base: bool = False
    """True if what rests in memory is yet to be read from the base."""
    cache: Extent | None = None
    replica: Replica | None = None
    """Present where parameters are whole on every rank and leave the compute device."""
    current: int = 0
    """The slot of the newest values, where they rest on disk."""
    committed: int | None = None
    """The slot that the committed generation names; never written to."""
    uncommitted: frozenset[Component] = frozenset()
    """States that came since: that generation has none of them."""
    dirty: bool = True
    """True if it changed in memory since it was last written to a slot."""
    writes: list[Transfer] = field(default_factory=list)
    """Writes not yet known to be complete."""
    write_held: Callable[[], None] | None = None
    """Writes what is held back of it; see `Held`."""
    last_copy: Event | None = None
    """A copy between values in host memory, which may be part of a replica, and the compute device. Earlier copies do
    not end later than it. For all the host knows it is under way."""

    @property
    def components(self) -> tuple[Component, ...]:
        """All that it has, as `in_order` has them."""
        return master_components(self.layout) + self.states

    def array(self, component: Component, row: int) -> torch.Tensor:
        """A view of a chunk in memory: the host's, or the device's where it is `on_device`."""
        return self.memory[component][array_range(self.layout, component, *self.layout.chunks()[row])]

    @property
    def memory_tier(self) -> Tier:
        """The tier that its bytes in memory count as."""
        return Tier.DEVICE if self.on_device else Tier.CPU

    @property
    def rows(self) -> Component | None:
        """The rows among its states."""
        return next((each for each in self.states if each.is_rows), None)

    def keeps(self, states: Iterable[str]) -> bool:
        """True if it has all of these."""
        return set(states) <= set(self.states)

    @property
    def fresh_replica(self) -> Replica | None:
        """Where the section's newest values are whole on this rank, if they are."""
        return self.replica if self.replica is not None and self.replica.fresh else None

    @property
    def on_disk(self) -> bool:
        """True if the working copy is in the slots (then generations cost no further write)."""
        return not self.memory.keys() >= set(self.components)

    def wait_for_writes(self) -> None:
        """Return when its slot has everything, and can be read. Raises StorageError when a write failed."""
        if self.write_held is not None:
            self.write_held()
        self.wait_for_launched()

    def wait_for_launched(self) -> None:
        """The same, but what is held back stays so."""
        for transfer in list(self.writes):
            if not transfer.arrived:
                transfer.wait()
            # An update on another thread may have added further ones, and a commit may have waited as well.
            with contextlib.suppress(ValueError):
                self.writes.remove(transfer)

    def wait_for_copies(self) -> None:
        """Return when values in host memory may change.

        Compute only lets its stream wait for copies. Gradients that have come down tell the host of those before them,
        so that in a training loop this finds an event that is complete.
        """
        if self.last_copy is not None:
            self.last_copy.synchronize()
            self.last_copy = None

    def writable_slot(self) -> int:
        """The slot that may be overwritten now."""
        busy = self.committed == self.current
        return (self.current + 1) % len(self.slots) if busy else self.current
