"""What every test can count on: two threads, a fixed seed, and a directory on a disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    """An empty directory for the NVMe tier."""
    path = tmp_path / "nvme"
    path.mkdir()
    return path
