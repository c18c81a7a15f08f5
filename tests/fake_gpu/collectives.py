"""A process group whose collectives of device tensors run on a stream of their own, as late as all else there.

Its bytes cross by gloo. A collective is two operations on the stream: one reads what this rank sends, and one writes
what came. Between them a thread exchanges with the other ranks. A rank's device does nothing before something waits for
it, and the ranks wait for each other. So as soon as one rank has read, the others are told, and read as well. Tensors
in host memory go to gloo as they are.
"""

from __future__ import annotations

import ctypes
import datetime
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fake_gpu.device import STREAMS_PER_DEVICE, TYPE
from tests.fake_gpu.library import call

_POLL_S = 0.0005
_ON_HOST_ONLY = ("send", "recv", "recv_anysource", "gather", "scatter", "reduce", "alltoall")


@dataclass
class _Exchange:
    number: int
    handle: int
    sent: Tensor
    received: Tensor
    combine: Callable[[list[Tensor]], Tensor] | None
    """The result, made of the tensors that all ranks sent. None: each rank gets a part of each other's."""
    splits: tuple[Sequence[int], Sequence[int]] = (), ()
    """Rows that come from each rank, and that go to each."""


class DeviceWork(dist.Work):
    """The work of a launch: a wait is a wait of streams."""

    def __init__(self, over: torch.Event, group: DeviceGroup) -> None:
        super().__init__()
        self._over = over
        self._group = group

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self._group.check()
        torch.accelerator.current_stream().wait_event(self._over)
        return True

    def is_completed(self) -> bool:
        return bool(self._over.query())


class DeviceGroup(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._store = dist.PrefixStore("device", store)
        self._on_host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)
        for device_type in ("cpu", TYPE):
            kind = dist.ProcessGroup.BackendType.GLOO
            self._register_backend(torch.device(device_type), kind, self._on_host)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # torch 2.15 asks it for its records
        self._between_devices = dist.ProcessGroupGloo(dist.PrefixStore("between", store), rank, size, timeout)
        self._streams: dict[int, torch.Stream] = {}
        """By device: a rank may use both."""
        self._launched: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        self._num_launched = 0
        self._error: BaseException | None = None
        threading.Thread(target=self._serve, daemon=True, name="collectives of the fake GPU").start()

    def getBackendName(self) -> str:
        return TYPE

    def shutdown(self) -> None:
        self._launched.put(None)

    def abort(self) -> None:
        """Ends the exchanges that other ranks have not joined: what waits for one goes on, with any bytes."""
        self._error = self._error or RuntimeError("the communicator was aborted")

    def check(self) -> None:
        """Raises what the exchanges have raised."""
        if self._error is not None:
            raise RuntimeError(f"a collective on {TYPE} failed: {self._error}")

    # The collectives: what is sent, and what comes of all that is sent

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        (tensor,) = tensors
        if tensor.is_cpu:
            return self._on_host.allreduce(tensors, opts)
        return self._launch(tensor, tensor, sum_in_order)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        (tensor,) = tensors
        if tensor.is_cpu:
            return self._on_host.broadcast(tensors, opts)
        root = opts.rootRank
        return self._launch(tensor, tensor, lambda parts: parts[root])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        (output,), (tensor,) = outputs, inputs
        if tensor.is_cpu:
            return self._on_host.allgather(outputs, inputs, opts)
        whole = torch.empty((self._size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        work = self._launch(tensor, whole, torch.stack)
        work.wait()
        for part, target in zip(whole, output, strict=True):
            target.copy_(part)
        return work

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        if tensor.is_cpu:
            return self._on_host._allgather_base(output, tensor, opts)
        return self._launch(tensor, output, torch.cat)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        if tensor.is_cpu:
            return self._on_host._reduce_scatter_base(output, tensor, opts)
        return self._launch(tensor, output, lambda parts: sum_in_order(parts).chunk(self._size)[self._rank])

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, arriving: Sequence[int], sizes: Sequence[int], opts: Any = None
    ) -> Any:
        if tensor.is_cpu:
            return self._on_host.alltoall_base(output, tensor, arriving, sizes, opts or dist.AllToAllOptions())
        return self._launch(tensor, output, None, (arriving, sizes))

    # torch's own functional collectives, such as those of DTensors, ask for several at once. They are launched on one
    # stream, so the last one's end is that of all.

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return [self.allreduce([each], opts) for each in tensors][-1]

    def allgather_into_tensor_coalesced(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any) -> Any:
        return [self._allgather_base(*each, opts) for each in zip(outputs, tensors, strict=True)][-1]

    def reduce_scatter_tensor_coalesced(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any) -> Any:
        return [self._reduce_scatter_base(*each, opts) for each in zip(outputs, tensors, strict=True)][-1]

    # torch 2.13 renames them.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def barrier(self, opts: Any = None) -> Any:
        return self._on_host.barrier(opts or dist.BarrierOptions())

    # How they run

    def _launch(
        self,
        source: Tensor,
        target: Tensor,
        combine: Callable[[list[Tensor]], Tensor] | None,
        splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> DeviceWork:
        self.check()
        assert source.is_contiguous() and target.is_contiguous()
        device = source.device
        with torch.accelerator.device_index(device.index):
            if device.index not in self._streams:
                self._streams[device.index] = torch.Stream(device=device)
            stream = self._streams[device.index]
            stream.wait_stream(torch.accelerator.current_stream())
            for tensor in (source, target):
                tensor.record_stream(stream)
            number = device.index * STREAMS_PER_DEVICE + stream.stream_id
            memory = (source.data_ptr(), source.nbytes, target.data_ptr(), target.nbytes)
            handle = call("launch_exchange", number, *memory)
            sent = _over(call("exchange_sent", handle), source)
            received = _over(call("exchange_received", handle), target)
            over = torch.Event(device=device)
            over.record(stream)
        self._num_launched += 1
        self._launched.put(_Exchange(self._num_launched, handle, sent, received, combine, splits))
        return DeviceWork(over, self)

    def _serve(self) -> None:
        """Exchanges, one after the other, in the order in which all ranks launch them."""
        while (exchange := self._launched.get()) is not None:
            try:
                with torch.inference_mode():  # tensors over memory are inference tensors where a program launched so
                    self._run(exchange)
            except BaseException as error:
                self._error = error
            finally:
                call("finish_exchange", exchange.handle)

    def _run(self, exchange: _Exchange) -> None:
        told = f"read {exchange.number}"
        while not call("exchange_is_read", exchange.handle):
            self.check()
            if self._store.check([told]):
                call("fetch_exchange", exchange.handle)
            else:
                time.sleep(_POLL_S)
        self._store.set(told, "")
        if exchange.combine is None:
            options = dist.AllToAllOptions()
            self._wait(self._between_devices.alltoall_base(exchange.received, exchange.sent, *exchange.splits, options))
            return
        parts = [torch.empty_like(exchange.sent) for _ in range(self._size)]
        # Bytes, since gloo does not know every dtype.
        inputs, outputs = [exchange.sent.view(torch.uint8)], [[part.view(torch.uint8) for part in parts]]
        self._wait(self._between_devices.allgather(outputs, inputs))
        exchange.received.copy_(exchange.combine(parts).view(exchange.received.shape))

    def _wait(self, work: Any) -> None:
        while not work.is_completed():
            self.check()
            time.sleep(_POLL_S)
        work.wait()


def _over(address: int, like: Tensor) -> Tensor:
    """Host memory as a tensor of the same shape and dtype."""
    if not like.nbytes:
        return torch.empty_like(like, device="cpu")
    memory = (ctypes.c_char * like.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """In the order of ranks; 16 bits in fp32."""
    dtype = parts[0].dtype
    total = parts[0].to(torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def _on_host_only(name: str) -> Callable[..., Any]:
    def collective(self: DeviceGroup, *arguments: Any) -> Any:
        return getattr(self._on_host, name)(*arguments)

    return collective


for _name in _ON_HOST_ONLY:
    setattr(DeviceGroup, _name, _on_host_only(_name))


def register() -> None:
    """Make it known to torch.distributed as the backend of the device type."""
    if TYPE not in dist.Backend.backend_list:
        dist.Backend.register_backend(TYPE, DeviceGroup, devices=[TYPE])
