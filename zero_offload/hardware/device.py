"""The compute device, and the lanes on which bytes move to and from it.

Nothing is initialised at import. On a CPU the device is the host itself: buffers are read into and computed on in
place, and no lane exists. On an accelerator (a "GPU" in all texts), copies run on two streams beside compute. Whatever
is made on one stream and used on another is a `Handoff`: a tensor and the event that makes it valid. `take` makes a
stream wait, and not the host. Before host memory that an upload reads is written or given away, the host synchronizes
with its event. Differences between device types are in `accelerators.py`. Tests run all this on a fake GPU in host
memory (tests/fake_gpu), which runs late and reports races.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import dlpack

from zero_offload.base.errors import ConfigError
from zero_offload.base.problems import warn_user
from zero_offload.base.spans import SPANS_MAX, Spans, Track, now
from zero_offload.base.types import GIB, format_bytes
from zero_offload.hardware.accelerators import ACCELERATORS, present_type

PIN_PIECE_BYTES = 16 * GIB
"""Host memory is registered in pieces of this size, since drivers from r580 on refuse 512 GiB in one call. Each piece
takes the driver 1 to 2 s, after which progress is told."""
PIN_TOLD_BYTES = 2 * PIN_PIECE_BYTES
"""Progress is told from this size on."""


class Event:
    """The moment at which a GPU has done what was launched before, such as a copy."""

    def __init__(self, event: Any, device: AcceleratorDevice) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        """Let compute launched from now on run after it; does not block the host."""
        self.let_wait(self._device.stream())

    def let_wait(self, stream: Any) -> None:
        """Let what is launched on a stream from now on run after it."""
        stream.wait_event(self._event)

    def synchronize(self) -> None:
        """Block the host until then."""
        with _current(self._device.torch_device):
            self._event.synchronize()

    def done(self) -> bool:
        with _current(self._device.torch_device):
            return bool(self._event.query())


class Handoff(NamedTuple):
    """A tensor made on one lane and wanted on another; `take` is the only way to it."""

    tensor: torch.Tensor
    ready: Event

    def take(self) -> torch.Tensor:
        """The tensor for compute: valid for kernels launched from now on."""
        self.ready.wait()
        return self.tensor

    def take_on_host(self) -> torch.Tensor:
        """The tensor for the host: valid when this returns."""
        self.ready.synchronize()
        return self.tensor


def aliased(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, of the same shape, by a storage of its own that is no larger. Keeps the memory alive."""
    # By a capsule: exchange between objects knows torch's own device types only.
    capsule: Any = dlpack.to_dlpack(tensor)  # type: ignore[attr-defined]
    found: torch.Tensor = dlpack.from_dlpack(capsule)
    return found


class Device:
    """Where the model computes. A method that a device does not define is that of a CPU, which copies nothing."""

    torch_device: torch.device
    is_host: bool
    """True if compute reads host memory in place."""
    numa_node: int | None
    """The node of host memory that is nearest to the device, where it has memory of its own."""

    @property
    def name(self) -> str:
        """As its maker calls it; "cpu" where that computes."""
        return self.torch_device.type

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None) -> Handoff:
        """Copy `source` (pinned host) to `target` (device), after compute launched so far.

        With a mark for `after`, when that is reached: nothing launched since uses `target`.
        """
        raise AssertionError(_IN_PLACE)

    def download(
        self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None, keeps_source: bool = False
    ) -> Handoff:
        """Copy `source` (device) to `target` (pinned host), after compute launched so far.

        With a mark for `after`, when that is reached. It is for threads beside the computing one: they would else wait
        for all that it has launched since. A caller that `keeps_source` does so until a stream that uses its memory
        next has waited for the copy.
        """
        raise AssertionError(_IN_PLACE)

    def mark(self) -> Event:
        """The event when compute launched so far is done."""
        raise AssertionError(_IN_PLACE)

    def stream(self) -> Any:
        """The one on which this thread computes; streams are compared by `==`."""
        raise AssertionError(_IN_PLACE)

    def join(self, streams: Iterable[Any], into: Any = None) -> None:
        """Let what is launched from now on `into`, by default this thread's stream, run after all on `streams`."""
        raise AssertionError(_IN_PLACE)

    def use_here(self, tensor: torch.Tensor) -> None:
        """This thread's stream computes with a tensor whose memory may be another's: it goes back after that."""
        raise AssertionError(_IN_PLACE)

    def following(self, events: Iterable[Event]) -> AbstractContextManager[None]:
        """A block whose launches, on a stream of its own, come after these events and after compute launched so far.

        For collectives, which come after the stream on which they are launched: compute need not wait.
        """
        raise AssertionError(_IN_PLACE)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, (numel,), by a storage of its own: views of the one do not count as views of the other.

        Keeps the memory alive. Copies from and to either are complete before the memory goes to something else.
        """
        return aliased(tensor)

    def will_pin(self, nbytes: int) -> None:
        """So much host memory is going to be registered, in all: where that takes long, progress is told."""

    def pin(self, address: int, nbytes: int) -> None:
        """Register host memory, exactly this much, for asynchronous copies; with a warning if that cannot be."""

    def unpin(self, address: int) -> None:
        """End the pinning of this address, once its copies are over."""

    def free_bytes(self) -> int | None:
        """Free memory of its own; None where it has none."""
        return None

    def record_to(self, spans: Spans) -> None:
        """Time copies while these are on."""

    def tell_copies(self) -> None:
        """Put those that are over among the spans; called before these end."""


_IN_PLACE = "a CPU computes on host memory in place, and has no streams"


class HostDevice(Device):
    """The CPU as compute device: nothing to copy, nothing to pin."""

    torch_device = torch.device("cpu")
    is_host = True
    numa_node = None


def _current(device: torch.device) -> AbstractContextManager[None]:
    """Makes a device this thread's current one.

    Every thread begins with the first device. A call that names no device, or a stream that is set back, would make a
    context there. That takes half a GiB of a GPU that is another rank's.
    """
    return torch.accelerator.device_index(device.index)


@contextlib.contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    """Makes a stream, and its device, this thread's current ones.

    Not by `with stream:`, which keeps what was current in the stream itself: threads that share one would mix it up.
    """
    with _current(stream.device):
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


class _Copy(NamedTuple):
    """A timed copy."""

    track: Track
    begin: Any
    end: Any
    nbytes: int


class AcceleratorDevice(Device):
    """One GPU. Its streams live as long as the process: a stream per step would grow the allocator's pools."""

    is_host = False

    def __init__(self, device_type: str) -> None:
        self._accelerator = ACCELERATORS[device_type]
        self._module: Any = torch.get_device_module(device_type)
        self.torch_device = torch.device(device_type, self._module.current_device())
        # One lane per direction: PCIe is full duplex, and a download must not queue behind a prefetch.
        self._uploads, self._downloads, self._following = (
            self._accelerator.make_stream(self.torch_device) for _ in range(3)
        )
        self._pinned: dict[int, dict[int, int]] = {}
        """The pieces of each region: their addresses and bytes."""
        self._borders: list[int] = []
        """Addresses where a piece ends and another one begins, ascending."""
        self._pins_all = True
        self._pin_bytes = self._pinned_bytes = self._told_pieces = 0
        self._spans = Spans()
        self._timed: deque[_Copy] = deque(maxlen=SPANS_MAX)
        self.numa_node = numa_node(self._module.get_device_properties(self.torch_device))

    @property
    def name(self) -> str:
        return str(self._module.get_device_name(self.torch_device))

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None) -> Handoff:
        return Handoff(target, self._copy(Track.UPLOAD, target, source, after))

    def download(
        self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None, keeps_source: bool = False
    ) -> Handoff:
        event = self._copy(Track.DOWNLOAD, target, source, after)
        if not keeps_source:
            # The allocator may reuse the source's memory only after this lane has read it.
            source.record_stream(self._downloads)
        return Handoff(target, event)

    def _copy(self, track: Track, target: torch.Tensor, source: torch.Tensor, after: Event | None) -> Event:
        stream = self._uploads if track is Track.UPLOAD else self._downloads
        # Memory just resized was last used by kernels launched before: the copy comes after them.
        mark = self.mark() if after is None else after
        mark.let_wait(stream)
        timed = self._spans.on
        with _on(stream):
            begin = self._recorded(stream, timed=True) if timed else None
            for to, of in self._cut(target, source, host=source if track is Track.UPLOAD else target):
                to.copy_(of, non_blocking=True)
            end = self._recorded(stream, timed=timed)
        if begin is not None:
            self._timed.append(_Copy(track, begin, end, target.nbytes))
        return Event(end, self)

    def _cut(self, target: torch.Tensor, source: torch.Tensor, host: torch.Tensor) -> Iterable[Sequence[torch.Tensor]]:
        """Targets and sources of a copy, each within one piece of the host's memory: no driver copies from two."""
        first, last = host.data_ptr(), host.data_ptr() + host.nbytes
        borders = self._borders[bisect_right(self._borders, first) : bisect_left(self._borders, last)]
        if not borders:
            return [(target, source)]
        cuts = [(border - first) // host.itemsize for border in borders]
        return zip(target.view(-1).tensor_split(cuts), source.view(-1).tensor_split(cuts), strict=True)

    def _recorded(self, stream: Any, *, timed: bool = False) -> Any:
        """An event for when a stream has done what was launched on it."""
        event = self._accelerator.make_event(self.torch_device, timed)
        event.record(stream)
        return event

    def mark(self) -> Event:
        return Event(self._recorded(self.stream()), self)

    def stream(self) -> Any:
        return self._accelerator.current_stream(self.torch_device)

    def join(self, streams: Iterable[Any], into: Any = None) -> None:
        then = self.stream() if into is None else into
        for first in streams:
            if first != then:
                then.wait_event(self._recorded(first))

    def use_here(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.stream())

    @contextlib.contextmanager
    def following(self, events: Iterable[Event]) -> Iterator[None]:
        for event in (self.mark(), *events):
            event.let_wait(self._following)
        with _on(self._following):
            yield

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        # The allocator does not know the alias: its `record_stream` does nothing. So the memory itself is marked, once,
        # and whenever it is given back the allocator waits for what is on both lanes then.
        for stream in (self._uploads, self._downloads):
            tensor.record_stream(stream)
        return super().alias(tensor)

    def will_pin(self, nbytes: int) -> None:
        self._pin_bytes, self._pinned_bytes, self._told_pieces = nbytes, 0, 0

    def pin(self, address: int, nbytes: int) -> None:
        registry = self._accelerator.host_memory
        if registry is None:
            self._cannot_pin(f"{self.torch_device} has no call that registers it", "")
            return
        pieces: dict[int, int] = {}
        with _current(self.torch_device):
            for begin in range(0, nbytes, PIN_PIECE_BYTES):
                size = min(PIN_PIECE_BYTES, nbytes - begin)
                if status := registry.register(address + begin, size):
                    # All or nothing: no driver copies from memory that is registered in part.
                    for piece in pieces:
                        registry.unregister(piece)
                    self._pinned_bytes -= sum(pieces.values())
                    error = f"registering {format_bytes(nbytes)} of it failed ({self.torch_device.type} error {status})"
                    self._cannot_pin(error, registry.advice)
                    return
                pieces[address + begin] = size
                self._tell_pinned(size)
        self._pinned[address] = pieces
        self._note_borders()

    def _note_borders(self) -> None:
        self._borders = sorted(piece for pieces in list(self._pinned.values()) for piece in list(pieces)[1:])

    def _tell_pinned(self, nbytes: int) -> None:
        self._pinned_bytes += nbytes
        done, of = self._pinned_bytes, self._pin_bytes
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # the ranks of a machine pin alike
        if is_first and of >= PIN_TOLD_BYTES and done // PIN_PIECE_BYTES > self._told_pieces:
            self._told_pieces = done // PIN_PIECE_BYTES
            progress = f"{done // GIB} of {max(of, done) // GIB} GiB"
            print(f"zero_offload: pinning {format_bytes(max(of, done))} of CPU memory: {progress}", file=sys.stderr)

    def _cannot_pin(self, why: str, advice: str) -> None:
        # Copies from and to pageable memory pass through the driver's own staging. A launch returns when the host's
        # memory is done with. That is slower, and nothing runs beside it, but every Handoff is valid.
        if self._pins_all:
            warn_user(
                f"CPU memory is not pinned: {why}. Copies to and from the GPU go through pageable memory, slower and "
                f"not beside compute. {advice}".rstrip()
            )
        self._pins_all = False

    def unpin(self, address: int) -> None:
        pieces = self._pinned.pop(address, None)
        self._note_borders()
        registry = self._accelerator.host_memory
        if pieces is not None and registry is not None:
            self._pinned_bytes -= sum(pieces.values())
            assert self._pinned_bytes >= 0, "more is unpinned than was pinned"
            # In a forked child, or late in a process, the driver is gone.
            with contextlib.suppress(RuntimeError), _current(self.torch_device):
                # The pages go next, and the last copies from there may still be under way.
                self._uploads.synchronize()
                self._downloads.synchronize()
                for piece in pieces:
                    registry.unregister(piece)

    def free_bytes(self) -> int | None:
        return int(self._module.mem_get_info(self.torch_device)[0])

    def record_to(self, spans: Spans) -> None:
        self._spans = spans

    def tell_copies(self) -> None:
        with _current(self.torch_device):
            # The GPU's clock is not the host's: one moment that both know stands for all.
            anchor = self._recorded(self.stream(), timed=True)
            anchor.synchronize()
            anchor_ns = now()
            while self._timed:
                copy = self._timed.popleft()
                if copy.end.query():
                    begin_ns, end_ns = (anchor_ns - _ns_between(event, anchor) for event in (copy.begin, copy.end))
                    self._spans.put(copy.track, copy.track.value, begin_ns, end_ns, copy.nbytes)


def _ns_between(begin: Any, end: Any) -> int:
    return int(begin.elapsed_time(end) * 1e6)


def numa_node(properties: Any, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The number of the NUMA node that the GPU's slot is wired to; None where the system does not say."""
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int((devices / address / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def compute_device() -> Device:
    """The current device of the accelerator, or the CPU."""
    device_type = present_type()
    return HostDevice() if device_type is None else AcceleratorDevice(device_type)


class DeviceChoice(NamedTuple):
    """The GPUs that one rank sees, and the GPU that its thread computes on now."""

    host: str
    """The same text on all ranks of one machine."""
    gpus: tuple[str, ...]
    """Each visible GPU, by a text that no other one of the machine has."""
    current: int
    local_rank: int | None
    """LOCAL_RANK, as torchrun sets it."""
    is_made: bool
    """True if the program has used the GPUs, and so may have chosen even the first one."""
    device_type: str
    """As torch names it; "" where there is no GPU."""

    @classmethod
    def here(cls) -> DeviceChoice:
        text = os.environ.get("LOCAL_RANK", "")
        local_rank = int(text) if text.isdecimal() else None
        device_type = present_type()
        if device_type is None:
            return cls(machine_name(), (), 0, local_rank, False, "")
        module: Any = torch.get_device_module(device_type)
        is_made = bool(module.is_initialized())
        gpus = tuple(_gpu_name(device_type, index) for index in range(module.device_count()))
        return cls(machine_name(), gpus, module.current_device(), local_rank, is_made, device_type)

    @property
    def by_local_rank(self) -> int:
        """The GPU of LOCAL_RANK, unless the program has chosen one, or sees its own only."""
        is_free = self.current == 0 and self.local_rank is not None and self.local_rank < len(self.gpus)
        return self.local_rank if is_free and self.local_rank is not None else self.current


def choose_gpus(choices: Sequence[DeviceChoice], names: Sequence[int]) -> list[int]:
    """Which of its GPUs each rank computes on, by the choices of all ranks, which have these `names`.

    Where those of a machine differ already, the program has chosen. Raises ConfigError for two ranks on one GPU.
    """
    crowded = {host for host, _, _ in _shared(choices, [each.current for each in choices])}
    hosts = [each.host for each in choices]
    chosen = [
        each.by_local_rank
        if each.host in crowded or (hosts.count(each.host) == 1 and not each.is_made)
        else each.current
        for each in choices
    ]
    for host, gpu, ranks in _shared(choices, chosen):
        numbers = " and ".join(str(names[rank]) for rank in ranks)
        raise ConfigError(
            f"ranks {numbers} on {host.split()[0]} compute on the same GPU ({gpu}), and each needs its own. Start at "
            "most as many ranks as the machine has GPUs, with torchrun, which sets LOCAL_RANK; or call "
            "torch.accelerator.set_device_index(...) on each rank before zo.offload"
        )
    return chosen


def _shared(choices: Sequence[DeviceChoice], chosen: Sequence[int]) -> Iterator[tuple[str, str, list[int]]]:
    """GPUs that several ranks have: machine, GPU, ranks."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank, (choice, index) in enumerate(zip(choices, chosen, strict=True)):
        if choice.gpus:
            users.setdefault((choice.host, choice.gpus[index]), []).append(rank)
    return ((*place, ranks) for place, ranks in users.items() if len(ranks) > 1)


def use_gpu(choice: DeviceChoice, index: int) -> torch.device | None:
    """Make this GPU the thread's current one; None where there is no GPU."""
    if not choice.gpus:
        return None
    if index != choice.current:
        torch.accelerator.set_device_index(index)
    return torch.device(choice.device_type, index)


def on_likely_gpu() -> AbstractContextManager[None]:
    """Inside, the current GPU is that which `zo.offload` will take, as far as a rank knows without the others."""
    device = _likely_gpu()
    return contextlib.nullcontext() if device is None else _current(device)


def _likely_gpu() -> torch.device | None:
    choice = DeviceChoice.here()
    return torch.device(choice.device_type, choice.by_local_rank) if choice.gpus else None


def machine_name() -> str:
    """The name of this machine, the same text for all its processes and for those of no other."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.is_file() else ''}"


def _gpu_name(device_type: str, index: int) -> str:
    visible = os.environ.get(ACCELERATORS[device_type].visible_devices, "")
    names = [name for name in visible.split(",") if name]
    name = names[index] if index < len(names) else str(index)
    # Parts of one GPU (MIG) may have its number.
    module: Any = torch.get_device_module(device_type)
    uuid = None if name.startswith("MIG") else getattr(module.get_device_properties(index), "uuid", None)
    return name if uuid is None else str(uuid)


def collectives_of(device: torch.device | None) -> str:
    """The backends of a process group for tensors of the host, and of the device if there is one."""
    return "gloo" if device is None else f"cpu:gloo,{device.type}:{ACCELERATORS[device.type].collectives}"


def describe_device() -> str:
    """One line for people: the name and memory of the GPU that `zo.offload` will take, or the CPU."""
    device = _likely_gpu()
    if device is None:
        other = torch.accelerator.current_accelerator(check_available=True)
        return "cpu (no GPU)" if other is None else f"cpu (zero_offload does not know the device type {other.type})"
    module: Any = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    return f"{module.get_device_name(device)} ({format_bytes(free)} of {format_bytes(total)} free)"


def _module_in_use() -> Any:
    """The module of the accelerator, such as torch.cuda, once the program has used it."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type not in ACCELERATORS:
        return None
    module: Any = torch.get_device_module(found)
    return module if module.is_initialized() else None


def this_stream() -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts in which another thread computes on the device and the stream that this one does now."""
    if _module_in_use() is None:
        return contextlib.nullcontext
    return partial(_on, torch.accelerator.current_stream())


def device_rng_states() -> list[torch.Tensor]:
    """The generators of all GPUs if this process uses them."""
    module = _module_in_use()
    return [] if module is None else module.get_rng_state_all()


def set_device_rng_states(states: list[torch.Tensor]) -> None:
    """Restore what `device_rng_states` gave; devices that are not here are skipped."""
    device_type = present_type()
    if device_type is not None:
        module: Any = torch.get_device_module(device_type)
        for index, state in enumerate(states[: module.device_count()]):
            module.set_rng_state(state, index)


# The allocator's figures of a device's memory, by the names that every device module of torch has. A module without
# `memory_stats` measures nothing: `read_memory` returns None, as for a CPU.


class DeviceMemory(NamedTuple):
    """Bytes of one device; all but the first two are of this process."""

    free: int
    """Bytes that no process has reserved, and that this one may still take."""
    total: int
    """The device's memory, or what `set_per_process_memory_fraction` leaves of it."""
    reserved: int
    """Bytes reserved by torch's allocator: tensors and its cache."""
    peak: int
    """The most that it has reserved since `reset_peak`."""
    allocated: int
    """Bytes of live tensors."""
    peak_allocated: int
    num_ooms: int
    """Out-of-memory errors so far; always 0 where the device type does not count them."""


def read_memory(device: torch.device) -> DeviceMemory | None:
    """The allocator's figures now; None for a CPU, and for a device type without them. Waits for nothing."""
    module = _module_of(device)
    if module is None:
        return None
    stats = module.memory_stats(device)
    free, total = module.mem_get_info(device)
    reserved = stats["reserved_bytes.all.current"]
    if hasattr(module, "get_per_process_memory_fraction"):
        total = int(total * module.get_per_process_memory_fraction(device))
        free = max(min(free, total - reserved), 0)
    return DeviceMemory(
        free,
        total,
        reserved,
        stats["reserved_bytes.all.peak"],
        stats["allocated_bytes.all.current"],
        stats["allocated_bytes.all.peak"],
        stats.get("num_ooms", 0),
    )


def reset_peak(device: torch.device) -> None:
    """Give the allocator's cache back, and begin peaks anew. Waits for the device."""
    module = _module_of(device)
    if module is not None:
        with torch.accelerator.device_index(device.index):
            module.empty_cache()
        module.reset_peak_memory_stats(device)


def is_capturing(device: torch.device) -> bool:
    """True if what this thread launches goes to a graph, to be run later, instead of to the device."""
    if device.type == "cpu":
        return False
    captures = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return captures is not None and bool(captures())


def _module_of(device: torch.device) -> Any:
    """The module of a device type that says what memory is used."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "memory_stats") else None
