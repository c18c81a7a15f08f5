"""Memory under activations that came back: leased again once it has neither a view nor a read under way."""

from __future__ import annotations

from typing import Any

import torch

from zero_offload.base.types import MIB
from zero_offload.runtime.saved_tensors.tiers import LANDING_SLAB_BYTES, ActivationStaging, TensorLease
from zero_offload.storage.memory.arena import Arena


class Read:
    def __init__(self) -> None:
        self.is_done = False

    def done(self) -> bool:
        return self.is_done


def tensor_of(lease: TensorLease, nbytes: int) -> torch.Tensor:
    return lease.region.tensor(torch.uint8, nbytes)


def test_memory_without_a_view_is_leased_again() -> None:
    arena = Arena(0)
    landing = ActivationStaging(arena)
    first = tensor_of(landing.lease(3 * MIB), 3 * MIB)
    view, address = first.view(torch.float32)[5:], first.data_ptr()
    del first
    other = tensor_of(landing.lease(3 * MIB), 3 * MIB)
    assert other.data_ptr() != address, "a view of a part keeps it"
    del view
    assert landing.lease(3 * MIB).region.address == address
    assert arena.allocated_bytes == LANDING_SLAB_BYTES


def test_what_is_read_to_is_not_leased_again() -> None:
    landing, read = ActivationStaging(Arena(0)), Read()
    lease: Any = landing.lease(MIB)
    address = lease.region.address
    lease.reads.append(read)
    del lease
    assert landing.lease(MIB).region.address != address
    read.is_done = True
    assert landing.lease(MIB).region.address == address


def test_what_may_be_read_to_is_never_leased_again() -> None:
    """An exception came between the launch of a read and its place on the list."""
    landing = ActivationStaging(Arena(0))
    lease = landing.lease(MIB)
    lease.reads.append(None)
    address = lease.region.address
    del lease
    assert landing.lease(MIB).region.address != address


def test_slabs_that_are_too_small_for_ever_larger_tensors_do_not_add_up() -> None:
    arena = Arena(0)
    landing = ActivationStaging(arena)
    for count in range(1, 5):
        nbytes = count * LANDING_SLAB_BYTES
        kept = tensor_of(landing.lease(nbytes), nbytes)
        assert arena.allocated_bytes == nbytes
        del kept


def test_memory_outlives_its_landing() -> None:
    landing = ActivationStaging(Arena(0))
    kept = tensor_of(landing.lease(MIB), MIB).fill_(7)
    del landing
    assert kept.sum().item() == 7 * MIB
