from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from zero_offload.device import _numa_node

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
