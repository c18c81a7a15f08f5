from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero_offload import device
from zero_offload.device import CudaDevice, _numa_node
from zero_offload.memory.arena import Arena
from zero_offload.telemetry.spans import Lane, Spans

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)


@pytest.mark.parametrize(("content", "node"), [("1\n", 1), ("-1\n", None), ("", None), (None, None)])
def test_the_node_of_a_gpu(content: str | None, node: int | None, tmp_path: Path) -> None:
    place = tmp_path / "0000:3b:00.0"
    place.mkdir()
    if content is not None:
        (place / "numa_node").write_text(content)
    assert _numa_node(GPU, tmp_path) == node


def test_a_torch_that_does_not_tell_the_slot(tmp_path: Path) -> None:
    assert _numa_node(SimpleNamespace(), tmp_path) is None


class _Runtime:
    """CUDA's calls, with a limit on what may be locked."""

    def __init__(self, limit_bytes: int) -> None:
        self.left_bytes = limit_bytes
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if nbytes > self.left_bytes:
            return 2
        self.left_bytes -= nbytes
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.left_bytes += self.registered.pop(address)


def test_memory_that_may_not_be_pinned_is_used_as_it_is_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    runtime = _Runtime(limit_bytes=8 << 20)
    forgotten: list[None] = []
    monkeypatch.setattr(device, "_cudart", lambda: runtime)
    monkeypatch.setattr(device, "_forget_failure", lambda: forgotten.append(None))
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(device.torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(device.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device.torch.cuda, "get_device_properties", lambda _: GPU)
    monkeypatch.setattr(device.torch.cuda, "device", lambda _: contextlib.nullcontext())
    arena = Arena(0, pinner=CudaDevice())
    regions = [arena.allocate(4 << 20) for _ in range(4)]
    assert sorted(runtime.registered) == sorted(region.address for region in regions[:2])
    assert len(forgotten) == 2
    (warning,) = recwarn.list
    assert "pinning 4 MiB of CPU memory failed (CUDA error 2)" in str(warning.message)
    assert "ulimit -l unlimited" in str(warning.message)
    regions.clear()
    assert not runtime.registered


class _Cuda(threading.local):
    """What `device` uses of torch.cuda, with a current device for each thread, which are noted with every call."""

    at = 0
    """As a thread begins."""
    noted: list[tuple[str, int]] = []  # noqa: RUF012 of all threads

    def note(self, name: str) -> None:
        self.noted.append((name, self.at))

    @contextlib.contextmanager
    def device(self, wanted: torch.device) -> Iterator[None]:
        before, self.at = self.at, wanted.index
        yield
        self.at = before  # torch makes no context for this

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        """What was current is set back by a call of CUDA's, on its own device."""
        before, self.at = self.at, stream.device.index
        yield
        self.at = before
        self.note("set stream")

    def current_device(self) -> int:
        return self.at

    def current_stream(self, of: torch.device) -> _Stream:
        return _Stream(self, of.index)

    def Stream(self) -> _Stream:
        return _Stream(self, self.at)

    def Event(self, enable_timing: bool) -> Any:
        def query() -> bool:
            self.note("query")
            return True

        # torch goes to the stream's device by itself.
        return SimpleNamespace(record=lambda stream: None, synchronize=lambda: self.note("synchronize"), query=query)

    def get_device_properties(self, of: torch.device) -> Any:
        return GPU

    def cudart(self) -> Any:
        def register(address: int, nbytes: int, flags: int) -> int:
            self.note("register")
            return 0 if nbytes < 100 else 2

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: self.note("unregister"))


class _Stream:
    def __init__(self, cuda: _Cuda, index: int) -> None:
        self._cuda = cuda
        self.device = torch.device("cuda", index)

    def synchronize(self) -> None:
        self._cuda.note("await stream")

    def wait_event(self, event: Any) -> None:
        """There, too."""


class _OnDevice(torch.Tensor):
    def record_stream(self, stream: Any) -> None: ...


def test_threads_beside_the_one_that_computes_touch_no_other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context on the first GPU, which another rank computes on, would take half a GiB of it."""
    cuda, place = _Cuda(), torch.device("cuda", 3)
    cuda.at = place.index
    monkeypatch.setattr(_Cuda, "noted", [])
    monkeypatch.setattr(device.torch, "cuda", cuda)
    monkeypatch.setattr(device, "_forget_failure", lambda: cuda.note("forget"))
    gpu = CudaDevice()
    made, found = gpu.mark(), []

    def work() -> None:
        target, source = torch.zeros(4), torch.ones(4).as_subclass(_OnDevice)
        handoff = gpu.download(target, source, after=made)
        handoff.take_on_host()
        handoff.ready.done()
        gpu.upload(target, source).take()
        gpu.pin(1 << 20, 10)
        gpu.unpin(1 << 20)
        with pytest.warns(UserWarning, match="pinning"):
            gpu.pin(1 << 21, 1000)
        found.append((target.sum().item(), cuda.at))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(4.0, 0)]  # and the thread's current device is what it was
    calls = ["set stream", "synchronize", "query", "set stream"]
    # Copies from and to memory are over before it goes.
    calls += ["register", "await stream", "await stream", "unregister", "register", "forget"]
    assert cuda.noted == [(call, place.index) for call in calls]


def test_what_follows_copies_runs_beside_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the copies and for compute launched before; compute waits for nothing."""
    cuda, waits, current = _Cuda(), [], []
    monkeypatch.setattr(device.torch, "cuda", cuda)
    monkeypatch.setattr(_Stream, "wait_event", lambda stream, event: waits.append((stream, event)))
    stream = cuda.stream

    @contextlib.contextmanager
    def note(wanted: _Stream) -> Iterator[None]:
        current.append(wanted)
        with stream(wanted):
            yield
        current.pop()

    monkeypatch.setattr(cuda, "stream", note)
    gpu = CudaDevice()
    uploaded = gpu.upload(torch.zeros(4), torch.ones(4)).ready
    waits.clear()
    with gpu.following([uploaded]):
        inside = list(current)
    (stream_of_mark, _), (stream_of_copy, event) = waits
    assert [stream_of_mark, stream_of_copy] == inside * 2
    assert event is uploaded._event  # type: ignore[attr-defined]
    assert inside[0] not in (gpu._uploads, gpu._downloads)


def test_memory_goes_where_there_is_no_cuda_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda()
    monkeypatch.setattr(device.torch, "cuda", cuda)
    gpu = CudaDevice()
    gpu.pin(1 << 20, 10)

    def refuse(wanted: torch.device) -> Any:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(cuda, "device", refuse)
    gpu.unpin(1 << 20)
    assert not gpu._pinned


class _Clock:
    """Events of a GPU whose copies take 3 ms each, and whose clock is 5 s ahead of the host's."""

    def __init__(self) -> None:
        self.ms = 0.0

    def copy(self) -> None:
        self.ms += 3

    def event(self, enable_timing: bool) -> Any:
        made = SimpleNamespace(timed=enable_timing, ms=0.0, query=lambda: made.ms <= self.ms, synchronize=lambda: None)
        made.record = lambda stream: setattr(made, "ms", self.ms)
        made.elapsed_time = lambda other: other.ms - made.ms if made.timed and other.timed else 1 / 0
        return made


def test_copies_are_timed_on_the_gpu_while_somebody_records(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, clock, spans = _Cuda(), _Clock(), Spans()
    monkeypatch.setattr(cuda, "Event", clock.event)
    monkeypatch.setattr(device.torch, "cuda", cuda)
    monkeypatch.setattr(device, "now", lambda: 5 * 10**9)
    monkeypatch.setattr(_OnDevice, "copy_", lambda *_, **__: clock.copy(), raising=False)
    gpu = CudaDevice()
    gpu.record_to(spans)
    tensor = torch.zeros(4).as_subclass(_OnDevice)
    gpu.upload(tensor, tensor)
    spans.begin()
    spans.begin_ns = 0
    gpu.upload(tensor, tensor)
    gpu.download(tensor, tensor)
    unfinished = gpu.upload(tensor, tensor)
    monkeypatch.setattr(unfinished.ready._event, "query", lambda: False)
    clock.ms += 1
    gpu.tell_copies()
    spans.end()
    gpu.tell_copies()
    # The third upload ended 1 ms before the clocks were read, the download 4.
    told = [(span.lane, (5 * 10**9 - span.begin_ns) / 1e6, (5 * 10**9 - span.end_ns) / 1e6) for span in spans.taken()]
    assert told == [(Lane.UPLOAD, 10, 7), (Lane.DOWNLOAD, 7, 4)]
    assert {span.nbytes for span in spans.taken()} == {16}
