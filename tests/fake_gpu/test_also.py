"""Models of one commit on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fake_gpu import device
from tests.fake_gpu.training import SOME
from tests.helpers.two_models import plain, run


@pytest.mark.parametrize("tier", ["nvme", "device"])
def test_both_go_on_together(tier: str, tmp_path: Path) -> None:
    expected = plain(4, "bf16")
    for number, schedule in enumerate(SOME):
        device.policy(*schedule)
        for begin, end in ((0, 2), (2, 4)):
            found = run(tmp_path / str(number), end, "bf16", tier)
            assert found[0] == begin
        assert all(torch.equal(found[1][name].cpu(), values) for name, values in expected.items())
    assert device.take_races() == []
