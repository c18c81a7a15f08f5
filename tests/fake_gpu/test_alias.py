"""The alias by which states are copied that rest where forward uses them: the allocator does not know it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from zero_offload.hardware.device import AcceleratorDevice, Device, compute_device
from zero_offload.storage.memory.arena import Arena

N = 1 << 16


def download_and_drop(gpu: Device) -> Tensor:
    """Download what is under an alias, whose memory goes back and is taken again at once; returns what has come."""
    host = Arena(0, pinner=gpu).array(torch.float32, N)
    alias = gpu.alias(torch.full((N,), 3.0, device=TYPE))
    copy = gpu.download(host, alias)
    del alias
    for _ in range(4):
        torch.full((N,), 7.0, device=TYPE)
    return copy.take_on_host()


def test_memory_is_taken_again_after_the_copies_of_its_alias() -> None:
    device.policy(Policy.LATE)
    assert bool((download_and_drop(compute_device()) == 3).all())


def test_the_fake_gpu_sees_an_alias_without_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would fail without it."""
    monkeypatch.setattr(AcceleratorDevice, "alias", Device.alias)
    device.policy(Policy.LATE)
    found = download_and_drop(compute_device())
    assert device.take_races() or not bool((found == 3).all())


def test_views_of_an_alias_are_no_views_of_what_it_stands_for() -> None:
    flat = torch.zeros(N, device=TYPE)
    alias = compute_device().alias(flat)
    alias[5:].fill_(2.0)
    assert alias.untyped_storage()._cdata != flat.untyped_storage()._cdata
    assert flat.sum().item() == 2 * (N - 5)
