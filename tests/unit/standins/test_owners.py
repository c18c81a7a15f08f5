from __future__ import annotations

import gc
from typing import Any, cast

import torch
from torch import nn

from zero_offload.standins.owners import live_owners, owner_of, register


class Anyone:
    pass


def test_an_owner_is_found_by_identity_and_not_kept_alive() -> None:
    param, twin, owner = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), Anyone()
    register(param, cast(Any, owner))
    assert owner_of(param) is cast(Any, owner) and owner_of(twin) is None
    assert not vars(param), "nothing is hung on a parameter"
    del owner
    gc.collect()
    assert owner_of(param) is None


def test_a_dead_parameter_leaves_no_entry() -> None:
    owner = Anyone()
    for _ in range(100):
        register(nn.Parameter(torch.ones(1)), cast(Any, owner))
    gc.collect()
    fresh = [nn.Parameter(torch.ones(1)) for _ in range(200)]
    assert all(owner_of(param) is None for param in fresh), "an address is used again, not its owner"


def test_owners_that_go_while_they_are_listed() -> None:
    """A collection at each allocation of the call, of owners that hold themselves."""
    thresholds = gc.get_threshold()
    try:
        for allocations in range(12):
            gc.disable()
            for _ in range(40):
                owner = Anyone()
                vars(owner)["itself"] = owner
                register(nn.Parameter(torch.ones(1)), cast(Any, owner))
            del owner
            gc.set_threshold(gc.get_count()[0] + allocations, 1, 1)
            gc.enable()
            live_owners()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
