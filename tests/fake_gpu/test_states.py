"""Optimizer states in the device's memory: the bits of the CPU, whatever else rests where, and commits of what was
computed.

The race detector sees three faults. A landing buffer is filled before the update has read it. Gradients change under
their upload. Copies for a commit come before the states are made.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import LATE, Policy
from tests.helpers.models import TinyLM, build, tokens_of
from zero_offload.model.api import runtime_of
from zero_offload.optim import device_pass
from zero_offload.storage.shards.shard import Component
from zero_offload.storage.shards.snapshot import DeviceStaging, Snapshots

pytestmark = pytest.mark.usefixtures("late")

MIXED = {"device": 0.5, "cpu": 0.25, "nvme": 0.25}
PLACEMENTS: list[tuple[Any, Any, Any]] = [
    ("device", "device", "device"),
    ("device", "cpu", "device"),
    ("cpu", "cpu", "device"),
    ("nvme", "nvme", "device"),
    ("device", "cpu", MIXED),
    (MIXED, MIXED, {"device": 0.5, "nvme": 0.5}),
]
ON_DEVICE = zo.OffloadConfig(params="device", optimizer="device")
Made = tuple[list[float], dict[str, Any]]
Factory = Callable[[Any], torch.optim.Optimizer]


def make_model() -> Any:
    """One block is frozen in part."""
    model: Any = build(lambda: TinyLM(num_blocks=3))
    model.blocks[1].up.requires_grad_(False)
    return model


def adamw(model: Any) -> torch.optim.Optimizer:
    """Groups of their own rates: several segments in a section."""
    params = list(model.named_parameters())
    plain = [param for name, param in params if "norm" in name]
    return zo.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": [p for n, p in params if "norm" not in n]}], 1e-2
    )


def step(model: Any, optimizer: torch.optim.Optimizer, number: int, micro_batches: int = 1) -> list[float]:
    for micro in range(micro_batches):
        loss = model(tokens_of(10 * number + micro))
        loss.backward()
    norm = zo.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item(), norm.item()]


def states_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every value and every state, by parameter."""
    states = optimizer.state_dict()["state"]
    found = model.state_dict() | {
        f"{index} {name}": value for index, of in states.items() for name, value in of.items()
    }
    return {name: value.to("cpu", copy=True) for name, value in found.items()}


def differing(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert actual.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(actual[name], value)]


def train(config: zo.OffloadConfig, steps: Sequence[int], micro_batches: int = 1, make: Factory = adamw) -> Made:
    model = zo.offload(make_model(), config)
    optimizer = make(model)
    zo.resume(model, optimizer)
    seen = [figure for number in steps for figure in step(model, optimizer, number, micro_batches)]
    found = states_of(model, optimizer)
    zo.close(model)
    return seen, found


FORMATS = [
    ("fp32", 1),
    ("bf16", 2),
    (zo.Precision(compute="fp16"), 1),
    (zo.Precision(compute="bf16", states="bf16"), 1),
    (zo.Precision(compute="bf16", states="compact"), 1),
    (zo.Precision(compute="fp32", states="compact"), 2),
]


@pytest.mark.parametrize(
    ("format_", "placement", "policy"),
    [*zip(FORMATS, PLACEMENTS, itertools.cycle(LATE)), *zip(FORMATS[:4], PLACEMENTS[2:], LATE, strict=True)],
    ids=str,
)
def test_the_bits_of_the_host(format_: tuple[Any, int], placement: Any, policy: Policy, tmp_path: Path) -> None:
    precision, micro_batches = format_
    params, grads, optimizer = placement
    with device.on_host():
        expected = train(zo.OffloadConfig(precision=precision), range(3), micro_batches)
    device.policy(policy, 1)
    config = zo.OffloadConfig(
        params=params, grads=grads, optimizer=optimizer, precision=precision, nvme=tmp_path, durability="scratch"
    )
    seen, found = train(config, range(3), micro_batches)
    assert seen == expected[0]
    assert differing(found, expected[1]) == []


def test_a_landing_buffer_is_filled_after_the_update_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more sections than buffers."""
    monkeypatch.setattr(device_pass, "DEVICE_CHUNKS_IN_FLIGHT", 2)
    train(dataclasses.replace(ON_DEVICE, grads="cpu"), range(2))


@pytest.mark.parametrize(("states", "durability"), [("fp32", "commit"), ("compact", "process")])
def test_a_generation_goes_on_anywhere(states: Any, durability: Any, tmp_path: Path) -> None:
    """Committed every step beside the next one, from the device's memory; resumed there, on the host, and there."""
    precision = zo.Precision(compute="bf16", states=states)
    with device.on_host():
        expected = train(zo.OffloadConfig(precision=precision), range(7))[1]
    config = zo.OffloadConfig(
        params="device", precision=precision, nvme=tmp_path, existing="resume", durability=durability
    )
    on_device = dataclasses.replace(config, optimizer="device")
    train(on_device, range(2))
    train(on_device, range(2, 4))
    with device.on_host():
        train(config, range(4, 6))
    assert differing(train(on_device, range(6, 7))[1], expected) == []


def test_a_checkpoint_moves_states_between_tiers(tmp_path: Path) -> None:
    def start(config: zo.OffloadConfig) -> tuple[Any, torch.optim.Optimizer]:
        model = zo.offload(make_model(), config)
        return model, adamw(model)

    first = start(ON_DEVICE)
    with device.on_host():
        second = start(zo.OffloadConfig())
    for number in range(2):
        step(*first, number)
    zo.save_checkpoint(*first, tmp_path / "from device")
    zo.load_checkpoint(*second, tmp_path / "from device")
    step(*second, 2)
    zo.save_checkpoint(*second, tmp_path / "from host")
    zo.load_checkpoint(*first, tmp_path / "from host")
    for each in (first, second):
        step(*each, 3)
    assert differing(states_of(*first), states_of(*second)) == []
    zo.close(first[0])
    zo.close(second[0])


@pytest.mark.parametrize("params", ["cpu", "nvme", "device"])
def test_frozen_weights_stay_on_their_tier(params: str, tmp_path: Path) -> None:
    """Large frozen weights, beside small trained ones."""

    def run(config: zo.OffloadConfig) -> tuple[list[float], int]:
        model = make_model()
        for name, param in model.named_parameters():
            param.requires_grad_("norm" in name)
        zo.offload(model, config)
        optimizer = zo.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        seen = [figure for number in range(3) for figure in step(model, optimizer, number)]
        resident = zo.stats(model).resident_bytes["device"]
        trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
        zo.close(model)
        return seen, resident // trained

    with device.on_host():
        expected, _ = run(zo.OffloadConfig())
    seen, per_element = run(zo.OffloadConfig(params=params, optimizer="device", nvme=tmp_path, durability="scratch"))
    assert seen == expected
    assert per_element >= 12  # sections are padded


OTHERS: list[Factory] = [
    lambda model: zo.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    lambda model: zo.Adam(model.parameters(), lr=1e-2, amsgrad=True, maximize=True),
    lambda model: zo.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1),
    lambda model: zo.Lion(model.parameters(), lr=1e-3, weight_decay=0.1),
]


@pytest.mark.parametrize("make", OTHERS, ids=["SGD", "Adam", "Adagrad", "Lion"])
def test_every_optimizer(make: Factory) -> None:
    with device.on_host():
        expected = train(zo.OffloadConfig(), range(3), make=make)
    found = train(ON_DEVICE, range(3), make=make)
    assert found[0] == expected[0]
    assert differing(found[1], expected[1]) == []


def test_states_that_come_later_and_two_optimizers() -> None:
    """A momentum is given after a step; another optimizer has a part of the same sections."""

    def run(config: zo.OffloadConfig) -> dict[str, Any]:
        model = zo.offload(make_model(), config)
        params = [param for param in model.parameters() if param.requires_grad]
        optimizers = [zo.SGD(params[::2], lr=0.1), zo.AdamW(params[1::2], lr=1e-2)]
        for number in range(4):
            model(tokens_of(number)).backward()
            if number == 1:
                optimizers[0].param_groups[0]["momentum"] = 0.9
            for optimizer in optimizers[: 1 + number % 2]:  # the second waits for two backwards
                optimizer.step()
                optimizer.zero_grad()
        found = states_of(model, optimizers[0]) | states_of(model, optimizers[1])
        zo.close(model)
        return found

    with device.on_host():
        expected = run(zo.OffloadConfig())
    assert differing(run(ON_DEVICE), expected) == []


def test_what_is_written_from_outside() -> None:
    def run(config: zo.OffloadConfig) -> dict[str, Any]:
        model = zo.offload(make_model(), config)
        optimizer = adamw(model)
        step(model, optimizer, 0)
        with zo.gathered(model.blocks[1], mode="write"), torch.no_grad():
            model.blocks[1].down.weight.mul_(2.0)
        step(model, optimizer, 1)
        with zo.gathered(model.blocks[1], kind="master") as found:
            masters = {f"master {name}": value.to("cpu", copy=True) for name, value in found.items()}
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        optimizer.load_state_dict(optimizer.state_dict())
        step(model, optimizer, 2)
        masters |= states_of(model, optimizer)
        zo.close(model)
        return masters

    with device.on_host():
        expected = run(zo.OffloadConfig())
    assert differing(run(ON_DEVICE), expected) == []


def test_a_step_with_an_infinite_gradient_changes_nothing() -> None:
    model = zo.offload(make_model(), ON_DEVICE)
    optimizer = adamw(model)
    step(model, optimizer, 0)
    before = states_of(model, optimizer)
    (model(tokens_of(1)) * torch.inf).backward()
    with pytest.warns(UserWarning, match="the step is skipped"):
        optimizer.step()
    assert differing(states_of(model, optimizer), before) == []
    assert zo.stats(model).skipped_steps == 1
    zo.close(model)


@pytest.mark.parametrize(("owner", "name"), [(Snapshots, "take"), (DeviceStaging, "download")])
def test_an_update_waits_for_what_a_commit_still_needs(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that is kept from reading the device's memory keeps the next update from changing it."""
    call, may_call, came = getattr(owner, name), threading.Event(), threading.Event()

    def call_late(self: Any, *args: Any) -> Any:
        came.set()
        assert may_call.wait(60)
        return call(self, *args)

    monkeypatch.setattr(owner, name, call_late)
    config = dataclasses.replace(ON_DEVICE, nvme=tmp_path, existing="resume")
    model = zo.offload(make_model(), config)
    optimizer = adamw(model)
    step(model, optimizer, 0)
    expected = states_of(model, optimizer)
    zo.commit(model, optimizer)
    assert came.wait(60)
    ended, waited = threading.Event(), []

    def let_go() -> None:
        waited.append(not ended.wait(0.5))
        may_call.set()

    other = threading.Thread(target=let_go)
    other.start()
    step(model, optimizer, 1)
    ended.set()
    other.join()
    assert waited == [True]
    assert differing(states_of(model, optimizer), expected)
    zo.close(model)
    again = zo.offload(make_model(), dataclasses.replace(config, generation=1))
    assert differing(states_of(again, adamw(again)), expected) == []
    zo.close(again)


def test_a_commit_before_any_update_of_new_states_has_their_zeros(tmp_path: Path) -> None:
    """The device makes them in the order of compute; copies of them come after."""
    config = dataclasses.replace(ON_DEVICE, nvme=tmp_path, existing="resume", commit_every=1)
    model = zo.offload(make_model(), config)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = zo.AdamW(params[:4], lr=1e-2)
    step(model, optimizer, 0)
    optimizer.add_param_group({"params": params[4:]})
    zo.commit(model, optimizer)
    zo.close(model)
    again = zo.offload(make_model(), config)
    params = [param for param in again.parameters() if param.requires_grad]
    optimizer = zo.AdamW([{"params": params[:4]}, {"params": params[4:]}], lr=1e-2)
    zo.resume(again, optimizer)
    states = optimizer.state_dict()["state"]
    assert all(states[index]["exp_avg"].any() for index in range(4))
    assert not any(state["exp_avg"].any() for index, state in states.items() if index >= 4)
    zo.close(again)


def test_states_without_room_on_the_device_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another optimizer takes its place, and what is committed then has states of that one alone."""
    config = dataclasses.replace(ON_DEVICE, nvme=tmp_path, existing="resume", commit_every=1)
    model = zo.offload(make_model(), config)
    shards = runtime_of(model).store.shards
    device.synchronize()
    with device.memory_limit(torch.fakegpu.memory_allocated() + 4096):
        torch.fakegpu.empty_cache()
        with pytest.raises(zo.CapacityError, match="are not free on"):
            adamw(model)
    assert not any(shard.states for shard in shards)
    optimizer = zo.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer, 0)
    zo.commit(model, optimizer)
    expected = states_of(model, optimizer)
    zo.close(model)
    with device.on_host():
        model = zo.offload(make_model(), config)
    shards = runtime_of(model).store.shards
    assert {name for shard in shards for name in shard.states} == {Component.MOMENTUM_BUFFER}
    optimizer = zo.SGD(model.parameters(), lr=0.1, momentum=0.9)
    zo.resume(model, optimizer)
    assert differing(states_of(model, optimizer), expected) == []
    zo.close(model)


class Launches:
    """How many elements each update on the device takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        update = device_pass.update_on_device

        def note(rule: Any, tensors: Any, segment: Any) -> None:
            self.sizes.append(segment.end - segment.begin)
            update(rule, tensors, segment)

        monkeypatch.setattr(device_pass, "update_on_device", note)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def all_on_device(states: Any, grads: Any = "device") -> zo.OffloadConfig:
    return dataclasses.replace(ON_DEVICE, grads=grads, precision=zo.Precision(compute="bf16", states=states))


@pytest.mark.parametrize(("states", "count"), [("fp32", 1), ("bf16", 1), ("compact", 2)])
def test_a_section_is_one_launch_however_many_chunks_it_has(states: Any, count: int, launches: Launches) -> None:
    """A launch takes the host longer than a GPU needs for a chunk. Compact states have scales chunk by chunk: there the
    rest of the weight is updated together with the bias."""

    def run() -> dict[str, Any]:
        torch.manual_seed(0)
        model = zo.offload(torch.nn.Linear(1100, 1100), all_on_device(states))
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        draw = torch.Generator().manual_seed(0)
        model(torch.randn(1, 1100, generator=draw).to(model.weight.device)).float().square().sum().backward()
        launches.sizes.clear()
        optimizer.step()
        found = states_of(model, optimizer)
        zo.close(model)
        return found

    with device.on_host():
        expected = run()
    assert differing(run(), expected) == []
    assert len(launches.sizes) == count and 0 <= sum(launches.sizes) - 1100 * 1101 < 256  # with the padding between two


class Small(torch.nn.Module):
    """Parameters of odd sizes, all in one section."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.params = torch.nn.ParameterList(torch.randn(numel) for numel in (300, 5, 700, 64, 256, 90))

    def forward(self, skipped: int) -> torch.Tensor:
        used = [param for index, param in enumerate(self.params) if index != skipped]
        return torch.stack([(param.float() * (number + 1)).square().mean() for number, param in enumerate(used)]).sum()


def one_group(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return zo.AdamW(params, lr=1e-2, weight_decay=0.1)


def two_groups(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return zo.AdamW([{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 1e-3}], lr=1e-2)


@pytest.mark.parametrize(
    ("make", "skipped", "count", "states", "grads"),
    [
        (one_group, -1, 1, "fp32", "device"),
        (one_group, -1, 1, "bf16", "cpu"),
        (one_group, -1, 1, "compact", "cpu"),
        (one_group, 2, 2, "compact", "device"),  # the third parameter has no gradient
        (two_groups, -1, 2, "bf16", "cpu"),
        (lambda params: zo.Lion(params, lr=1e-3, weight_decay=0.1), -1, 1, "compact", "device"),
        (lambda params: zo.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True), -1, 1, "fp32", "cpu"),
        (lambda params: zo.AdamW(params, lr=1e-2, eps=0.0), -1, 6, "fp32", "cpu"),  # 0 / 0 is NaN
        (lambda params: zo.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1), -1, 6, "bf16", "device"),
    ],
)
def test_small_parameters_are_updated_together(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    skipped: int,
    count: int,
    states: Any,
    grads: Any,
    launches: Launches,
) -> None:
    """Torch's operations take as many launches for a small one. All that rests has the host's bits, padding too."""

    def run() -> dict[str, Any]:
        model = zo.offload(Small(), all_on_device(states, grads))
        optimizer = make(list(model.parameters()))
        for _ in range(3):
            model(skipped).backward()
            launches.sizes.clear()
            optimizer.step()
            optimizer.zero_grad()
        (shard,) = {s.shard.layout.index: s.shard for u in runtime_of(model).units for s in u.sections}.values()
        found = {str(component): array.to("cpu", copy=True) for component, array in shard.memory.items()}
        zo.close(model)
        return found

    with device.on_host():
        expected = run()
    found = run()
    assert len(launches.sizes) == count
    assert len(expected) >= 2 and differing(found, expected) == []
