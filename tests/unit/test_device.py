from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from zero_offload import device
from zero_offload.device import CudaDevice, _numa_node
from zero_offload.memory.arena import Arena

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
    monkeypatch.setattr(device.torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(device.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device.torch.cuda, "get_device_properties", lambda _: GPU)
    arena = Arena(0, pinner=CudaDevice())
    regions = [arena.allocate(4 << 20) for _ in range(4)]
    assert sorted(runtime.registered) == sorted(region.address for region in regions[:2])
    assert len(forgotten) == 2
    (warning,) = recwarn.list
    assert "pinning 4 MiB of CPU memory failed (CUDA error 2)" in str(warning.message)
    assert "ulimit -l unlimited" in str(warning.message)
    regions.clear()
    assert not runtime.registered
