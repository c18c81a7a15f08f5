"""The compute device, and the lanes on which bytes move to and from it: the only file that says `torch.cuda`.

Nothing is initialised at import. On a CPU the device is the host itself: buffers are read into and computed on in
place, and no lane exists. On a GPU, copies run on two streams beside compute, and whatever is made on one stream
and used on another is a `Handoff`: a tensor and the event that makes it valid. `take` makes a stream wait, and not the
host: before host memory that an upload reads is written, or given to somebody else, its event is synchronized with.
Tests put a device with late lanes in the GPU's place (tests/helpers/late_device.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from zero_offload.errors import ConfigError
from zero_offload.telemetry.spans import SPANS_MAX, Lane, Spans, now
from zero_offload.types import format_bytes

_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""


class Event(Protocol):
    """The moment at which a copy is complete."""

    def wait(self) -> None:
        """Let compute launched from now on run after it; does not block the host."""

    def synchronize(self) -> None:
        """Block the host until then."""

    def done(self) -> bool: ...


class Handoff(NamedTuple):
    """A tensor made on one lane and wanted on another; `take` is the only way to it."""

    tensor: torch.Tensor
    ready: Event

    def take(self) -> torch.Tensor:
        """For compute: valid for kernels launched from now on."""
        self.ready.wait()
        return self.tensor

    def take_on_host(self) -> torch.Tensor:
        """For the host: valid when this returns."""
        self.ready.synchronize()
        return self.tensor


class Device(Protocol):
    """Where the model computes."""

    torch_device: torch.device
    is_host: bool
    """Whether compute reads host memory in place."""
    numa_node: int | None
    """The node of host memory that is nearest to the device, where it has memory of its own."""

    @property
    def name(self) -> str:
        """As its maker calls it; "cpu" where that computes."""

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None) -> Handoff:
        """Copy `source` (pinned host) to `target` (device), after compute launched so far.

        With a mark for `after`, when that is reached: nothing launched since uses `target`.
        """

    def download(self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None) -> Handoff:
        """Copy `source` (device) to `target` (pinned host), after compute launched so far.

        With a mark for `after`, when that is reached: for threads beside the one that computes, which would else wait
        for whatever it has launched since.
        """

    def mark(self) -> Event:
        """When compute launched so far is done."""

    def stream(self) -> Any:
        """The one on which this thread computes; streams are compared by `==`."""

    def join(self, streams: Iterable[Any], into: Any = None) -> None:
        """Let what is launched from now on `into`, by default this thread's stream, run after all on `streams`."""

    def use_here(self, tensor: torch.Tensor) -> None:
        """This thread's stream computes with a tensor whose memory may be another's: it goes back after that."""

    def following(self, events: Iterable[Event]) -> AbstractContextManager[None]:
        """What is launched inside, on a stream of its own, comes after these and after compute launched so far.

        For collectives, which come after the stream on which they are launched: compute need not wait.
        """

    def pin(self, address: int, nbytes: int) -> None:
        """Register host memory, exactly this much, for asynchronous copies; with a warning if that cannot be."""

    def unpin(self, address: int) -> None: ...

    def free_bytes(self) -> int | None:
        """Free memory of its own; None where it has none."""

    def record_to(self, spans: Spans) -> None:
        """Time copies while these are on."""

    def tell_copies(self) -> None:
        """Put those that are over among the spans; called before these end."""


class HostDevice:
    """The CPU as compute device: nothing to copy, nothing to pin."""

    torch_device = torch.device("cpu")
    name = "cpu"
    is_host = True
    numa_node: int | None = None

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None) -> Handoff:
        raise AssertionError("a CPU computes on host memory in place")

    def download(self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None) -> Handoff:
        raise AssertionError("a CPU computes on host memory in place")

    def mark(self) -> Event:
        raise AssertionError("a CPU computes at once")

    def stream(self) -> Any:
        raise AssertionError("a CPU has no streams")

    def join(self, streams: Iterable[Any], into: Any = None) -> None:
        raise AssertionError("a CPU has no streams")

    def use_here(self, tensor: torch.Tensor) -> None:
        raise AssertionError("a CPU has no streams")

    def following(self, events: Iterable[Event]) -> AbstractContextManager[None]:
        raise AssertionError("a CPU has no streams")

    def pin(self, address: int, nbytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...

    def free_bytes(self) -> int | None:
        return None

    def record_to(self, spans: Spans) -> None: ...

    def tell_copies(self) -> None: ...


def _current(device: torch.device) -> AbstractContextManager[None]:
    """Makes a device this thread's current one.

    Every thread begins with the first: a call of CUDA's that names no device, or a stream that is set back, would make
    a context there, which takes half a GiB of a GPU that is another rank's.
    """
    return torch.cuda.device(device)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        self.let_wait(torch.cuda.current_stream(self._device))

    def let_wait(self, stream: torch.cuda.Stream) -> None:
        """Let what is launched on a stream from now on run after it."""
        stream.wait_event(self._event)

    def synchronize(self) -> None:
        with _current(self._device):
            self._event.synchronize()

    def done(self) -> bool:
        with _current(self._device):
            return bool(self._event.query())


class _Copy(NamedTuple):
    """One that is timed."""

    lane: Lane
    begin: torch.cuda.Event
    end: torch.cuda.Event
    nbytes: int


class CudaDevice:
    """One GPU. Its streams live as long as the process: a stream per step would grow the allocator's pools."""

    is_host = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        # One lane per direction: PCIe is full duplex, and a download must not queue behind a prefetch.
        self._uploads = torch.cuda.Stream()
        self._downloads = torch.cuda.Stream()
        self._following = torch.cuda.Stream()
        self._pinned: set[int] = set()
        self._pins_all = True
        self._spans = Spans()
        self._timed: deque[_Copy] = deque(maxlen=SPANS_MAX)
        self.numa_node = _numa_node(torch.cuda.get_device_properties(self.torch_device))

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None) -> Handoff:
        return Handoff(target, self._copy(Lane.UPLOAD, target, source, after))

    def download(self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None) -> Handoff:
        event = self._copy(Lane.DOWNLOAD, target, source, after)
        # The allocator may reuse the source's memory only after this lane has read it.
        source.record_stream(self._downloads)
        return Handoff(target, event)

    def _copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Event | None) -> Event:
        stream = self._uploads if lane is Lane.UPLOAD else self._downloads
        # Memory just resized was last used by kernels launched before: the copy comes after them.
        mark = self.mark() if after is None else after
        assert isinstance(mark, _CudaEvent)
        mark.let_wait(stream)
        timed = self._spans.on
        with _current(self.torch_device), torch.cuda.stream(stream):
            begin = _recorded(stream, timed=True) if timed else None
            target.copy_(source, non_blocking=True)
            end = _recorded(stream, timed=timed)
        if begin is not None:
            self._timed.append(_Copy(lane, begin, end, target.nbytes))
        return _CudaEvent(end, self.torch_device)

    def mark(self) -> Event:
        return _CudaEvent(_recorded(torch.cuda.current_stream(self.torch_device)), self.torch_device)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def join(self, streams: Iterable[Any], into: Any = None) -> None:
        then = self.stream() if into is None else into
        for first in streams:
            if first != then:
                then.wait_event(_recorded(first))

    def use_here(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self.stream())

    @contextlib.contextmanager
    def following(self, events: Iterable[Event]) -> Iterator[None]:
        for event in (self.mark(), *events):
            assert isinstance(event, _CudaEvent)
            event.let_wait(self._following)
        with _current(self.torch_device), torch.cuda.stream(self._following):
            yield

    def pin(self, address: int, nbytes: int) -> None:
        # Not torch's pinned allocator: that rounds to powers of two, up to twice what is asked for.
        with _current(self.torch_device):
            status = int(_cudart().cudaHostRegister(address, nbytes, _REGISTER_PORTABLE))
            if status == 0:
                self._pinned.add(address)
                return
            _forget_failure()
        # Copies from and to pageable memory pass through CUDA's own staging, and a launch returns when the host's
        # memory is done with: slower, and nothing runs beside it, but every Handoff is valid.
        if self._pins_all:
            warnings.warn(
                f"pinning {format_bytes(nbytes)} of CPU memory failed (CUDA error {status}): copies to and from the "
                "GPU go through pageable memory, slower and not beside compute. Raise the limit with 'ulimit -l "
                "unlimited' (in a container: --ulimit memlock=-1), or place fewer states on the cpu tier",
                stacklevel=2,
            )
        self._pins_all = False

    def unpin(self, address: int) -> None:
        if address in self._pinned:
            self._pinned.remove(address)
            # In a forked child, or late in a process, there is no CUDA any more.
            with contextlib.suppress(RuntimeError), _current(self.torch_device):
                # Nobody may have waited for the last copies from there, and the pages go next.
                self._uploads.synchronize()
                self._downloads.synchronize()
                _cudart().cudaHostUnregister(address)

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info()[0]

    def record_to(self, spans: Spans) -> None:
        self._spans = spans

    def tell_copies(self) -> None:
        with _current(self.torch_device):
            # The GPU's clock is not the host's: one moment that both know stands for all.
            anchor = _recorded(torch.cuda.current_stream(self.torch_device), timed=True)
            anchor.synchronize()
            anchor_ns = now()
            while self._timed:
                copy = self._timed.popleft()
                if copy.end.query():
                    begin_ns, end_ns = (anchor_ns - _ns_between(event, anchor) for event in (copy.begin, copy.end))
                    self._spans.put(copy.lane, copy.lane.value, begin_ns, end_ns, copy.nbytes)


def _recorded(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    """When a stream has done what was launched on it."""
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


def _ns_between(begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return int(begin.elapsed_time(end) * 1e6)


def _numa_node(properties: Any, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Of the node that the GPU's slot is wired to; None where the system does not say."""
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int((devices / address / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def _cudart() -> Any:
    return torch.cuda.cudart()


def _forget_failure() -> None:
    """CUDA keeps a failed call's error, and the next kernel launch of whoever comes would report it as its own."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, dtype=torch.uint8, device="cuda")


def compute_device() -> Device:
    """The current CUDA device, or the CPU."""
    return CudaDevice() if torch.cuda.is_available() else HostDevice()


class DeviceChoice(NamedTuple):
    """What one rank sees, and which GPU its thread computes on now."""

    host: str
    """The same text on all ranks of one machine."""
    gpus: tuple[str, ...]
    """Each visible GPU, by a text that no other one of the machine has."""
    current: int
    local_rank: int | None
    """LOCAL_RANK, as torchrun sets it."""
    is_made: bool
    """True if the program has used CUDA, and so may have chosen even the first GPU."""

    @classmethod
    def here(cls) -> DeviceChoice:
        text = os.environ.get("LOCAL_RANK", "")
        local_rank = int(text) if text.isdecimal() else None
        if not torch.cuda.is_available():
            return cls(_host(), (), 0, local_rank, False)
        is_made = torch.cuda.is_initialized()
        gpus = tuple(map(_gpu_name, range(torch.cuda.device_count())))
        return cls(_host(), gpus, torch.cuda.current_device(), local_rank, is_made)

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
            "torch.cuda.set_device(...) on each rank before zo.offload"
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
    return torch.device("cuda", index)


def on_likely_gpu() -> AbstractContextManager[None]:
    """Inside, the current GPU is the one that `zo.offload` will take, as far as a rank knows without the others."""
    if not torch.cuda.is_available():
        return contextlib.nullcontext()
    return _current(torch.device("cuda", DeviceChoice.here().by_local_rank))


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.is_file() else ''}"


def _gpu_name(index: int) -> str:
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    name = names[index] if index < len(names) else str(index)
    # Parts of one GPU (MIG) may have its number.
    uuid = None if name.startswith("MIG") else getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return name if uuid is None else str(uuid)


def describe_device() -> str:
    """One line for people: the GPU's name and memory, or the CPU."""
    if not torch.cuda.is_available():
        return "cpu (no CUDA device)"
    free, total = torch.cuda.mem_get_info()
    return f"{torch.cuda.get_device_name()} ({format_bytes(free)} of {format_bytes(total)} free)"


def this_stream() -> Callable[[], AbstractContextManager[Any]]:
    """Makes contexts in which another thread computes on the device and the stream that this one does now."""
    if not torch.cuda.is_initialized():
        return contextlib.nullcontext
    return partial(torch.cuda.stream, torch.cuda.current_stream())


def device_rng_states() -> list[torch.Tensor]:
    """The generators of all CUDA devices this process uses; none without CUDA."""
    used = torch.cuda.is_initialized()
    return torch.cuda.get_rng_state_all() if used else []


def set_device_rng_states(states: list[torch.Tensor]) -> None:
    """Restore what `device_rng_states` gave; devices that are not here are skipped."""
    for index, state in enumerate(states[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)
