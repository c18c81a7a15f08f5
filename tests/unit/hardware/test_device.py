from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero_offload.base.problems import warn_user
from zero_offload.base.spans import Spans, Track
from zero_offload.base.types import GIB
from zero_offload.hardware import device
from zero_offload.hardware.accelerators import ACCELERATORS, Accelerator
from zero_offload.hardware.device import AcceleratorDevice, numa_node
from zero_offload.storage.memory.arena import Arena

SLOT = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)


@pytest.mark.parametrize(("content", "node"), [("1\n", 1), ("-1\n", None), ("", None), (None, None)])
def test_the_node_of_a_gpu(content: str | None, node: int | None, tmp_path: Path) -> None:
    place = tmp_path / "0000:3b:00.0"
    place.mkdir()
    if content is not None:
        (place / "numa_node").write_text(content)
    assert numa_node(SLOT, tmp_path) == node


def test_a_torch_that_does_not_tell_the_slot(tmp_path: Path) -> None:
    assert numa_node(SimpleNamespace(), tmp_path) is None


class _Gpus(threading.local):
    """Four devices of one type: its module, its registry, and torch.accelerator. The current device is each thread's
    own; it is noted with every call to the driver."""

    at = 0
    """As a thread begins."""
    noted: list[tuple[str, int]] = []  # noqa: RUF012 of all threads
    streams: list[_Stream] = []  # noqa: RUF012
    """Those that were made the current one."""
    events: list[Any] = []  # noqa: RUF012
    on: Any = None
    advice = "Ask for more."
    limit_bytes = 1 << 60

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def note(self, name: str) -> None:
        self.noted.append((name, self.at))

    @contextlib.contextmanager
    def device_index(self, wanted: int) -> Iterator[None]:
        before, self.at = self.at, wanted
        yield
        self.at = before  # torch makes no context for this

    def current_stream(self, of: torch.device | None = None) -> _Stream:
        return self.on or _Stream(self, self.at if of is None else of.index)

    def set_stream(self, stream: _Stream) -> None:
        self.on = stream
        self.streams.append(stream)
        self.note("set stream")

    def make_stream(self, of: torch.device) -> _Stream:
        return _Stream(self, of.index)

    def make_event(self, of: torch.device, timed: bool) -> Any:
        def query() -> bool:
            self.note("query")
            return True

        # torch goes to the stream's device by itself.
        made = SimpleNamespace(record=lambda stream: None, synchronize=lambda: self.note("synchronize"), query=query)
        self.events.append(made)
        return made

    def register(self, address: int, nbytes: int) -> int:
        self.note("register")
        if nbytes > self.limit_bytes - sum(self.registered.values()):
            return 2
        self.registered[address] = nbytes
        return 0

    def unregister(self, address: int) -> None:
        self.note("unregister")
        del self.registered[address]

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 4)
    get_device_properties = staticmethod(lambda of: SLOT)
    get_device_name = staticmethod(lambda of: f"number {of.index}")

    def current_device(self) -> int:
        return self.at

    def mem_get_info(self, of: torch.device | None = None) -> tuple[int, int]:
        return (self.at if of is None else of.index) * GIB, 8 * GIB


class _Stream:
    def __init__(self, gpus: _Gpus, index: int) -> None:
        self._gpus = gpus
        self.device = torch.device("cuda", index)

    def synchronize(self) -> None:
        self._gpus.note("await stream")

    def wait_event(self, event: Any) -> None:
        """There, too."""


class _OnDevice(torch.Tensor):
    def record_stream(self, stream: Any) -> None: ...


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> _Gpus:
    """Stand in for the machine's; the current one is number 3."""
    made: Any = _Gpus()
    made.at = 3
    for name in ("noted", "streams", "events"):
        monkeypatch.setattr(_Gpus, name, [])
    entry = Accelerator(
        *("nccl", "GPUS", made),
        make_stream=made.make_stream,
        current_stream=made.current_stream,
        make_event=made.make_event,
    )
    monkeypatch.setitem(ACCELERATORS, "cuda", entry)
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    for name in ("device_index", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.accelerator, name, getattr(made, name))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    found: _Gpus = made
    return found


def test_memory_that_may_not_be_pinned_is_used_as_it_is_with_one_warning(
    gpus: _Gpus, recwarn: pytest.WarningsRecorder
) -> None:
    gpus.limit_bytes = 8 << 20
    arena = Arena(0, pinner=AcceleratorDevice("cuda"))
    regions = [arena.allocate(4 << 20) for _ in range(4)]
    assert sorted(gpus.registered) == sorted(region.address for region in regions[:2])
    (warning,) = recwarn.list
    assert "registering 4 MiB of it failed (cuda error 2)" in str(warning.message)
    assert str(warning.message).endswith(" Ask for more.")
    assert warning.filename == __file__
    regions.clear()
    assert not gpus.registered


def test_a_device_that_registers_no_memory_says_so_once(
    gpus: _Gpus, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setitem(ACCELERATORS, "cuda", Accelerator("x", "X", None, make_stream=gpus.make_stream))
    found = AcceleratorDevice("cuda")
    for address in (1 << 20, 2 << 20):
        found.pin(address, 10)
        found.unpin(address)
    (warning,) = recwarn.list
    assert "cuda:3 has no call that registers it" in str(warning.message)


def test_large_memory_is_registered_in_pieces_with_progress(gpus: _Gpus, capsys: pytest.CaptureFixture[str]) -> None:
    """No driver is asked for 64 GiB at once, and none of it is touched here."""
    found = AcceleratorDevice("cuda")
    found.will_pin(100 * GIB)
    found.pin(1 << 40, 40 * GIB)
    found.pin(2 << 40, 60 * GIB)
    assert max(gpus.registered.values()) <= 64 * GIB
    assert sum(gpus.registered.values()) == 100 * GIB
    ends = [(begin, begin + nbytes) for begin, nbytes in sorted(gpus.registered.items())]
    assert {1 << 40, 2 << 40} == {begin for begin, _ in ends} - {end for _, end in ends}  # without gaps
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "zero_offload: pinning 100 GiB of CPU memory: 16 of 100 GiB"
    assert lines[-1] == "zero_offload: pinning 100 GiB of CPU memory: 100 of 100 GiB"
    found.unpin(1 << 40)
    assert sum(gpus.registered.values()) == 60 * GIB
    found.pin(3 << 40, 60 * GIB)
    assert capsys.readouterr().err == "zero_offload: pinning 120 GiB of CPU memory: 120 of 120 GiB\n", (
        "what is pinned now"
    )
    found.unpin(2 << 40)
    found.unpin(3 << 40)
    assert not gpus.registered


@pytest.mark.parametrize(("local_rank", "nbytes"), [("0", 20 * GIB), ("1", 100 * GIB)])
def test_little_memory_and_that_of_other_ranks_is_registered_in_silence(
    gpus: _Gpus,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    local_rank: str,
    nbytes: int,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    found = AcceleratorDevice("cuda")
    found.will_pin(nbytes)
    found.pin(1 << 40, nbytes)
    assert sum(gpus.registered.values()) == nbytes
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("ignore:CPU memory is not pinned")
def test_a_region_is_registered_whole_or_not_at_all(gpus: _Gpus) -> None:
    """A copy from memory that is registered in part is an error of the driver's."""
    gpus.limit_bytes = 50 * GIB
    found = AcceleratorDevice("cuda")
    found.pin(1 << 40, 60 * GIB)
    assert not gpus.registered
    found.unpin(1 << 40)


def test_a_warning_is_at_the_line_outside_of_the_package(recwarn: pytest.WarningsRecorder) -> None:
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    warn_user("something")
    (warning,) = recwarn.list
    assert (warning.filename, warning.lineno) == (__file__, line)


def test_memory_is_that_of_the_device_not_of_the_thread(gpus: _Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    found = AcceleratorDevice("cuda")
    gpus.at = 1
    assert (found.name, found.free_bytes()) == ("number 3", 3 * GIB)
    monkeypatch.setenv("LOCAL_RANK", "2")
    gpus.at = 0
    assert device.describe_device() == "number 2 (2 GiB of 8 GiB free)"


def test_threads_beside_the_one_that_computes_touch_no_other_gpu(gpus: _Gpus) -> None:
    """A context on the first GPU, which another rank computes on, would take half a GiB of it."""
    gpu = AcceleratorDevice("cuda")
    made, found = gpu.mark(), []

    def work() -> None:
        target, source = torch.zeros(4), torch.ones(4).as_subclass(_OnDevice)
        handoff = gpu.download(target, source, after=made)
        handoff.take_on_host()
        handoff.ready.done()
        gpu.upload(target, source).take()
        gpu.pin(1 << 20, 10)
        gpu.unpin(1 << 20)
        gpus.limit_bytes = 100
        with pytest.warns(UserWarning, match="not pinned"):
            gpu.pin(1 << 21, 1000)
        found.append((target.sum().item(), gpus.at))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(4.0, 0)]  # and the thread's current device is what it was
    calls = ["set stream", "set stream", "synchronize", "query", "set stream", "set stream"]
    # Copies from and to memory are over before it goes.
    calls += ["register", "await stream", "await stream", "unregister", "register"]
    assert gpus.noted == [(call, 3) for call in calls]


def _lanes_of(gpu: AcceleratorDevice, gpus: _Gpus) -> list[_Stream]:
    """The streams of uploads and of downloads."""
    on_gpu, found = torch.zeros(4).as_subclass(_OnDevice), []
    for copy in (lambda: gpu.upload(torch.zeros(4), torch.ones(4)), lambda: gpu.download(torch.zeros(4), on_gpu)):
        gpus.streams.clear()
        copy()
        found.append(gpus.streams[0])
    return found


def test_what_follows_copies_runs_beside_compute(gpus: _Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the copies and for compute launched before; compute waits for nothing."""
    waits: list[tuple[Any, Any]] = []
    monkeypatch.setattr(_Stream, "wait_event", lambda stream, event: waits.append((stream, event)))
    gpu = AcceleratorDevice("cuda")
    lanes = _lanes_of(gpu, gpus)
    uploaded = gpu.upload(torch.zeros(4), torch.ones(4)).ready
    before, end_of_copy = gpus.on, gpus.events[-1]
    waits.clear()
    with gpu.following([uploaded]):
        inside = gpus.on
    assert gpus.on is before
    (stream_of_mark, _), (stream_of_copy, event) = waits
    assert stream_of_mark is stream_of_copy is inside
    assert event is end_of_copy
    assert inside not in lanes


def test_memory_goes_where_the_driver_is_gone(gpus: _Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = AcceleratorDevice("cuda")
    gpu.pin(1 << 20, 10)

    def refuse(wanted: int) -> Any:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "device_index", refuse)
        gpu.unpin(1 << 20)
    gpu.unpin(1 << 20)
    assert "unregister" not in [call for call, _ in gpus.noted], "it is forgotten"


def test_an_alias_is_kept_for_copies_on_both_lanes(gpus: _Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator does not know it: what it stands for is what both lanes may still copy when it is given back."""
    streams: list[Any] = []
    gpu = AcceleratorDevice("cuda")
    lanes = _lanes_of(gpu, gpus)
    monkeypatch.setattr(_OnDevice, "record_stream", lambda _, stream: streams.append(stream))
    tensor = torch.zeros(4).as_subclass(_OnDevice)
    alias = gpu.alias(tensor)
    assert streams == lanes
    assert alias.data_ptr() == tensor.data_ptr()
    assert alias.untyped_storage()._cdata != tensor.untyped_storage()._cdata


class _Clock:
    """Events of a GPU whose copies take 3 ms each, and whose clock is 5 s ahead of the host's."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.events: list[Any] = []

    def copy(self) -> None:
        self.ms += 3

    def event(self, of: torch.device, timed: bool) -> Any:
        made = SimpleNamespace(timed=timed, ms=0.0, query=lambda: made.ms <= self.ms, synchronize=lambda: None)
        made.record = lambda stream: setattr(made, "ms", self.ms)
        made.elapsed_time = lambda other: other.ms - made.ms if made.timed and other.timed else 1 / 0
        self.events.append(made)
        return made


def test_copies_are_timed_on_the_gpu_during_a_recording(gpus: _Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, spans = _Clock(), Spans()
    monkeypatch.setitem(ACCELERATORS, "cuda", replace(ACCELERATORS["cuda"], make_event=clock.event))
    monkeypatch.setattr(device, "now", lambda: 5 * 10**9)
    monkeypatch.setattr(_OnDevice, "copy_", lambda *_, **__: clock.copy(), raising=False)
    gpu = AcceleratorDevice("cuda")
    gpu.record_to(spans)
    tensor = torch.zeros(4).as_subclass(_OnDevice)
    gpu.upload(tensor, tensor)
    spans.begin()
    spans.begin_ns = 0
    gpu.upload(tensor, tensor)
    gpu.download(tensor, tensor)
    gpu.upload(tensor, tensor)
    clock.events[-1].query = lambda: False  # the last copy's end
    clock.ms += 1
    gpu.tell_copies()
    spans.end()
    gpu.tell_copies()
    # The third upload ended 1 ms before the clocks were read, the download 4.
    told = [(span.track, (5 * 10**9 - span.begin_ns) / 1e6, (5 * 10**9 - span.end_ns) / 1e6) for span in spans.taken()]
    assert told == [(Track.UPLOAD, 10, 7), (Track.DOWNLOAD, 7, 4)]
    assert {span.nbytes for span in spans.taken()} == {16}
