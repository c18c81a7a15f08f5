"""Host memory that is registered, device memory that leaves with its model, and bytes that cross."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import param_groups, placed
from tests.models.test_memory import WARM, no_garbage_collection, steps_with_eval
from zero_offload.base.types import MIB, parse_bytes
from zero_offload.hardware.accelerators import ACCELERATORS
from zero_offload.model.api import runtime_of

pytestmark = pytest.mark.usefixtures("late")


class Registered:
    """Host memory that the driver knows."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        """Bytes, by address."""
        self.times = 0


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Registered:
    found = Registered()
    memory: Any = ACCELERATORS[TYPE].host_memory
    register, unregister = memory.register, memory.unregister

    def noted(address: int, nbytes: int) -> int:
        assert address not in found.now
        found.now[address] = nbytes
        found.times += 1
        return int(register(address, nbytes))

    def forgotten(address: int) -> None:
        found.now.pop(address, None)
        unregister(address)

    monkeypatch.setattr(memory, "register", noted)
    monkeypatch.setattr(memory, "unregister", forgotten)
    return found


def test_memory_is_registered_exactly(registered: Registered) -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig())
    model(tokens_of(0)).backward()
    assert sum(registered.now.values()) == zo.stats(model).resident_bytes["cpu"] > 0
    zo.close(model)
    del model
    gc.collect()
    assert registered.now == {}


def test_memory_is_registered_once(nvme: Path, registered: Registered) -> None:
    """Each registration costs milliseconds."""
    model = zo.offload(build(TinyLM), placed("bf16", ("nvme", "cpu", "nvme"), nvme, "8MiB"))
    optimizer = zo.AdamW(param_groups(model))
    steps_with_eval(model, optimizer, range(2))
    before = registered.times
    steps_with_eval(model, optimizer, range(2, WARM))
    assert registered.times == before == zo.stats(model).num_registrations > 0
    zo.close(model)


def test_states_leave_with_a_model_that_makes_generations(nvme: Path) -> None:
    with no_garbage_collection():
        config = zo.OffloadConfig(params="device", grads="device", optimizer="device", nvme=nvme)
        model = zo.offload(build(TinyLM), config)
        optimizer = zo.AdamW(model.parameters())
        model(tokens_of(0)).backward()
        optimizer.step()
        zo.commit(model, optimizer)
        zo.close(model)
        runtime = runtime_of(model)
        left = [weakref.ref(each) for each in (runtime.store, runtime.store.arena, runtime.store.snapshots)]
        left += [weakref.ref(array) for shard in runtime.store.shards for array in shard.memory.values()]
        del model, optimizer, runtime
        assert [each() for each in left if each() is not None] == []


@pytest.mark.parametrize("optimizer", ["cpu", "device"])
def test_what_crosses_is_counted_once(optimizer: Any) -> None:
    """In three forwards after an update."""
    config = zo.OffloadConfig(params="cpu", optimizer=optimizer, device_memory="8MiB" if optimizer == "cpu" else None)
    model = zo.offload(build(lambda: TinyLM(num_blocks=4)), config)
    its = zo.AdamW(model.parameters())
    tokens = tokens_of(0).to(TYPE)
    for _ in range(2):
        model(tokens).backward()
        its.step()
        its.zero_grad()
    runtime: Any = runtime_of(model)
    runtime.drain()
    before = runtime.store.counters.snapshot()
    with device.counting() as counts, torch.no_grad():
        for _ in range(3):
            model(tokens)
    after = runtime.store.counters.snapshot()
    assert after.get("read.cpu", 0) - before.get("read.cpu", 0) == counts["upload_bytes"]
    assert (counts["upload_bytes"] > 0) == (optimizer == "cpu"), "what a device updates is there"
    assert after.get("written.cpu", 0) == before.get("written.cpu", 0)
    zo.close(model)


def test_the_device_memory_that_an_error_offers_trains() -> None:
    """Activations that come back take a share of the budget, 512 MiB of a large GPU's."""
    settings = {"activations": "cpu", "precision": "bf16"}
    with pytest.raises(zo.CapacityError, match="device tier: needs") as caught:
        zo.offload(build(TinyLM), zo.OffloadConfig(device_memory="4KiB", **settings))
    (offered,) = (line for line in str(caught.value).splitlines() if "device_memory of at least" in line)
    least = parse_bytes(offered.rpartition("at least ")[2])
    assert least < MIB
    model = zo.offload(build(TinyLM), zo.OffloadConfig(device_memory=least, **settings))
    model(tokens_of(0).to(TYPE)).backward()
    zo.AdamW(model.parameters()).step()
    assert zo.stats(model).step == 1
