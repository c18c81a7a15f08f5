from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero_offload.runtime.units.param_loader import HostParamLoader
from zero_offload.storage.files.engine import Urgency


class Transfer:
    """Its first wait is broken off."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_what_ctrl_c_breaks_off_is_waited_for_again(end: str) -> None:
    """Otherwise the unit would be taken for present while reads are under way, or its pages be given to another."""
    transfers = [Transfer(), Transfer()]
    store: Any = SimpleNamespace(launch_fetch=lambda shard, address, urgency: transfers)
    section: Any = SimpleNamespace(
        flat=torch.zeros(1), shard=SimpleNamespace(fresh_replica=None), layout=SimpleNamespace(shard_nbytes=4)
    )
    unit: Any = SimpleNamespace(index=3)
    loader = HostParamLoader(store, 0)
    loader.launch(unit, [section], Urgency.NORMAL)
    for _ in transfers:
        with pytest.raises(KeyboardInterrupt):
            getattr(loader, end)(unit)
    getattr(loader, end)(unit)
    assert [transfer.waits for transfer in transfers] == [3, 2]
    getattr(loader, end)(unit)
    assert [transfer.waits for transfer in transfers] == [3, 2]
