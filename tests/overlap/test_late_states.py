"""Optimizer states in the memory of a device of its own, on lanes that copy as late as the waits permit.

Results must be the CPU path's bits, whatever else rests where; what is committed must be what was computed.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.late_device import LateDevice
from tests.overlap.test_late_lanes import Model
from zero_offload.api import runtime_of
from zero_offload.device import Device, Event, Handoff, HostDevice
from zero_offload.optim import device_pass
from zero_offload.shards import places
from zero_offload.shards.device_staging import DeviceStaging
from zero_offload.shards.places import Places
from zero_offload.shards.shard import Component
from zero_offload.shards.snapshot import Snapshots

offload_module = importlib.import_module("zero_offload.offload")

MIXED = {"device": 0.5, "cpu": 0.25, "nvme": 0.25}
PLACEMENTS: list[tuple[Any, Any, Any]] = [
    ("device", "device", "device"),
    ("device", "cpu", "device"),
    ("cpu", "cpu", "device"),
    ("nvme", "nvme", "device"),
    ("device", "cpu", MIXED),
    (MIXED, MIXED, {"device": 0.5, "nvme": 0.5}),
]
Made = tuple[list[float], dict[str, Any]]
Factory = Callable[[Any], torch.optim.Optimizer]


def adamw(model: Any) -> torch.optim.Optimizer:
    """Groups of their own rates: several segments in a section."""
    params = list(model.named_parameters())
    plain = [param for name, param in params if "norm" in name]
    return zo.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": [p for n, p in params if "norm" not in n]}], 1e-2
    )


def batch(seed: int) -> torch.Tensor:
    return torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(seed))


def step(model: Any, optimizer: torch.optim.Optimizer, number: int, micro_batches: int = 1) -> list[float]:
    for micro in range(micro_batches):
        loss = model(batch(10 * number + micro))
        loss.backward()
    norm = zo.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item(), norm.item()]


def states_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every value and every state, by parameter."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    states = optimizer.state_dict()["state"]
    return values | {f"{index} {name}": value for index, of in states.items() for name, value in of.items()}


def differing(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert actual.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(actual[name], value)]


def train(config: zo.OffloadConfig, steps: Sequence[int], micro_batches: int = 1, make: Factory = adamw) -> Made:
    model = zo.offload(Model(), config)
    optimizer = make(model)
    zo.resume(model, optimizer)
    seen = [figure for number in steps for figure in step(model, optimizer, number, micro_batches)]
    found = states_of(model, optimizer)
    zo.close(model)
    return seen, found


@pytest.fixture
def compute_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], None]:
    return lambda device: monkeypatch.setattr(offload_module, "compute_device", lambda: device)


@pytest.mark.parametrize(
    ("precision", "micro_batches"),
    [
        ("fp32", 1),
        ("bf16", 2),
        (zo.Precision(compute="fp16"), 1),
        (zo.Precision(compute="bf16", states="bf16"), 1),
        (zo.Precision(compute="bf16", states="compact"), 1),
        (zo.Precision(compute="fp32", states="compact"), 2),
    ],
    ids=str,
)
def test_the_bits_of_the_host(
    tmp_path: Path, compute_on: Callable[[Device], None], precision: Any, micro_batches: int
) -> None:
    compute_on(HostDevice())
    expected = train(zo.OffloadConfig(precision=precision), range(4), micro_batches)
    for i, (params, grads, optimizer) in enumerate(PLACEMENTS):
        compute_on(LateDevice())
        config = zo.OffloadConfig(
            params=params,
            grads=grads,
            optimizer=optimizer,
            precision=precision,
            nvme=tmp_path / str(i),
            durability="scratch",
        )
        seen, found = train(config, range(4), micro_batches)
        assert seen == expected[0], (params, grads, optimizer)
        assert differing(found, expected[1]) == [], (params, grads, optimizer)


FORMATS = [zo.Precision(compute="bf16"), zo.Precision(compute="bf16", states="compact")]


@pytest.mark.parametrize("precision", FORMATS, ids=["exact", "compact"])
@pytest.mark.parametrize("durability", ["commit", "process"])
def test_a_generation_goes_on_anywhere(
    tmp_path: Path, compute_on: Callable[[Device], None], precision: zo.Precision, durability: Any
) -> None:
    """Committed every step beside the next one, from a device's memory; resumed there, on the host, and there again."""
    compute_on(HostDevice())
    expected = train(zo.OffloadConfig(precision=precision), range(9))[1]
    places = [("device", LateDevice()), ("device", LateDevice()), ("cpu", HostDevice()), ("device", LateDevice())]
    steps = [range(0, 2), range(2, 5), range(5, 7), range(7, 9)]
    for (optimizer, device), numbers in zip(places, steps, strict=True):
        compute_on(device)
        config = zo.OffloadConfig(
            params="device",
            optimizer=optimizer,
            precision=precision,
            nvme=tmp_path,
            existing="resume",
            durability=durability,
        )
        found = train(config, numbers)[1]
    assert differing(found, expected) == []


def test_a_checkpoint_moves_states_between_tiers(tmp_path: Path, compute_on: Callable[[Device], None]) -> None:
    def make(optimizer: str, device: Device) -> tuple[Any, torch.optim.Optimizer]:
        compute_on(device)
        model = zo.offload(Model(), zo.OffloadConfig(params="device", optimizer=optimizer))
        return model, adamw(model)

    first = make("device", LateDevice())
    for number in range(2):
        step(*first, number)
    zo.save_checkpoint(*first, tmp_path / "from device")
    second = make("cpu", HostDevice())
    zo.load_checkpoint(*second, tmp_path / "from device")
    step(*second, 2)
    zo.save_checkpoint(*second, tmp_path / "from host")
    zo.load_checkpoint(*first, tmp_path / "from host")
    for each in (first, second):
        step(*each, 3)
    assert differing(states_of(*first), states_of(*second)) == []
    zo.close(first[0])
    zo.close(second[0])


class Counting(LateDevice):
    """Knows which of its uploads the host has not waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.unread: set[int] = set()

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None) -> Handoff:
        ready, number = super().upload(target, source, after=after).ready, self.uploads.launched

        def synchronize() -> None:
            ready.synchronize()
            self.unread.discard(number)

        self.unread.add(number)
        return Handoff(target, SimpleNamespace(wait=ready.wait, done=ready.done, synchronize=synchronize))


@pytest.mark.parametrize("grads", ["cpu", "nvme"])
def test_a_step_returns_when_gradients_may_change(
    tmp_path: Path, compute_on: Callable[[Device], None], grads: str
) -> None:
    """What goes up are gradients, out of memory that the next backward writes."""
    device = Counting()
    compute_on(device)
    config = zo.OffloadConfig(params="device", grads=grads, optimizer="device", nvme=tmp_path, durability="scratch")
    model = zo.offload(Model(), config)
    optimizer = adamw(model)
    for number in range(3):
        model(batch(number)).backward()
        device.unread.clear()
        before = device.uploads.launched
        optimizer.step()
        assert device.uploads.launched > before and not device.unread
    zo.close(model)


class Logging(LateDevice):
    """Knows what came after what."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, Any]] = []

    def mark(self) -> Any:
        mark = super().mark()
        self.log.append(("mark", id(mark)))
        self.marks = [*getattr(self, "marks", ()), mark]  # an id is one object's as long as it lives
        return mark

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None) -> Handoff:
        self.log.append(("upload", (target.data_ptr(), None if after is None else id(after))))
        return super().upload(target, source, after=after)


def test_a_landing_buffer_is_filled_after_the_update_that_reads_it(
    compute_on: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more sections than buffers."""
    device = Logging()
    compute_on(device)
    update = device_pass.update_on_device

    def logged(rule: Any, tensors: Any, segment: Any) -> None:
        device.log.append(("update", tensors.grad.data_ptr()))
        update(rule, tensors, segment)

    monkeypatch.setattr(device_pass, "update_on_device", logged)
    model = zo.offload(Model(), zo.OffloadConfig(params="device", grads="cpu", optimizer="device"))
    optimizer = adamw(model)
    model(batch(0)).backward()
    device.log.clear()
    optimizer.step()
    refilled = 0
    for at, (what, detail) in enumerate(device.log):
        earlier = device.log[:at]
        if what == "upload" and any(each[0] == "upload" and each[1][0] == detail[0] for each in earlier):
            read = max(i for i, each in enumerate(earlier) if each == ("update", detail[0]))
            assert read < earlier.index(("mark", detail[1]))
            refilled += 1
    assert refilled > 0
    zo.close(model)


class Frozen(Model):
    """Large frozen weights beside small ones that are trained."""

    def __init__(self) -> None:
        super().__init__()
        for name, param in self.named_parameters():
            param.requires_grad_("norm" in name)


@pytest.mark.parametrize("params", ["cpu", "nvme", "device"])
def test_frozen_weights_stay_on_their_tier(tmp_path: Path, compute_on: Callable[[Device], None], params: str) -> None:
    def run(config: zo.OffloadConfig) -> tuple[list[float], int]:
        model = zo.offload(Frozen(), config)
        optimizer = zo.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        seen = [figure for number in range(3) for figure in step(model, optimizer, number)]
        resident = zo.stats(model).resident_bytes["device"]
        trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
        zo.close(model)
        return seen, resident if resident == 0 else resident // trained

    compute_on(HostDevice())
    expected, _ = run(zo.OffloadConfig())
    compute_on(LateDevice())
    config = zo.OffloadConfig(params=params, optimizer="device", nvme=tmp_path, durability="scratch")
    seen, per_element = run(config)
    assert seen == expected
    assert per_element >= 12  # sections are padded


OTHERS: list[Factory] = [
    lambda model: zo.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    lambda model: zo.Adam(model.parameters(), lr=1e-2, amsgrad=True, maximize=True),
    lambda model: zo.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1),
    lambda model: zo.Lion(model.parameters(), lr=1e-3, weight_decay=0.1),
]


@pytest.mark.parametrize("make", OTHERS, ids=["SGD", "Adam", "Adagrad", "Lion"])
def test_every_optimizer(compute_on: Callable[[Device], None], make: Factory) -> None:
    found = []
    for device in (HostDevice(), LateDevice()):
        compute_on(device)
        found.append(train(zo.OffloadConfig(params="device", optimizer="device"), range(3), make=make))
    assert found[1][0] == found[0][0]
    assert differing(found[1][1], found[0][1]) == []


def test_states_that_come_later_and_two_optimizers(compute_on: Callable[[Device], None]) -> None:
    """A momentum is given after a step; another optimizer has a part of the same sections."""
    found = []
    for device in (HostDevice(), LateDevice()):
        compute_on(device)
        model = zo.offload(Model(), zo.OffloadConfig(params="device", optimizer="device"))
        params = [param for param in model.parameters() if param.requires_grad]
        optimizers = [zo.SGD(params[::2], lr=0.1), zo.AdamW(params[1::2], lr=1e-2)]
        for number in range(4):
            model(batch(number)).backward()
            if number == 1:
                optimizers[0].param_groups[0]["momentum"] = 0.9
            for optimizer in optimizers[: 1 + number % 2]:  # the second waits for two backwards
                optimizer.step()
                optimizer.zero_grad()
        found.append(states_of(model, optimizers[0]) | states_of(model, optimizers[1]))
        zo.close(model)
    assert differing(found[1], found[0]) == []


def test_what_is_written_from_outside(compute_on: Callable[[Device], None]) -> None:
    found = []
    for device in (HostDevice(), LateDevice()):
        compute_on(device)
        model: Any = zo.offload(Model(), zo.OffloadConfig(params="device", optimizer="device"))
        optimizer = adamw(model)
        step(model, optimizer, 0)
        with zo.gathered(model.blocks[1], mode="write"), torch.no_grad():
            model.blocks[1].down.weight.mul_(2.0)
        step(model, optimizer, 1)
        with zo.gathered(model.blocks[1], kind="master"):
            masters = model.blocks[1].down.weight.detach().clone()
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        optimizer.load_state_dict(optimizer.state_dict())
        step(model, optimizer, 2)
        found.append(states_of(model, optimizer) | {"masters": masters})
        zo.close(model)
    assert differing(found[1], found[0]) == []


def test_a_step_with_an_infinite_gradient_changes_nothing(compute_on: Callable[[Device], None]) -> None:
    compute_on(LateDevice())
    model = zo.offload(Model(), zo.OffloadConfig(params="device", optimizer="device"))
    optimizer = adamw(model)
    step(model, optimizer, 0)
    before = states_of(model, optimizer)
    (model(batch(1)) * torch.inf).backward()
    with pytest.warns(UserWarning, match="the step is skipped"):
        optimizer.step()
    assert differing(states_of(model, optimizer), before) == []
    assert zo.stats(model).skipped_steps == 1
    zo.close(model)


@pytest.mark.parametrize(("owner", "name"), [(Snapshots, "begin"), (DeviceStaging, "bring")])
def test_an_update_waits_for_what_a_commit_still_needs(
    tmp_path: Path, compute_on: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """A commit that is kept from reading the device's memory keeps the next update from changing it."""
    compute_on(LateDevice())
    call, may_call, came = getattr(owner, name), threading.Event(), threading.Event()

    def call_late(self: Any, *args: Any) -> Any:
        came.set()
        assert may_call.wait(60)
        return call(self, *args)

    monkeypatch.setattr(owner, name, call_late)
    config = zo.OffloadConfig(params="device", optimizer="device", nvme=tmp_path, existing="resume")
    model = zo.offload(Model(), config)
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
    again = zo.offload(Model(), dataclasses.replace(config, generation=1))
    assert differing(states_of(again, adamw(again)), expected) == []
    zo.close(again)


class Marking(LateDevice):
    """Numbers its marks, and notes after which of them copies for a commit come."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Any] = []
        self.after: list[int] = []

    def mark(self) -> Any:
        self.marks.append(super().mark())
        return self.marks[-1]

    def download(self, target: torch.Tensor, source: torch.Tensor, *, after: Any = None) -> Handoff:
        if after is not None:
            self.after.append(self.marks.index(after))
        return super().download(target, source, after=after)


def test_a_commit_before_any_update_of_new_states_has_their_zeros(
    tmp_path: Path, compute_on: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made by the device, in the order of compute; copies of them come after."""
    device = Marking()
    compute_on(device)
    config = zo.OffloadConfig(
        params="device", optimizer="device", nvme=tmp_path, existing="resume", durability="process", commit_every=1
    )
    model = zo.offload(Model(), config)
    params = list(model.parameters())
    optimizer = zo.AdamW(params[: len(params) // 2], lr=1e-2)
    step(model, optimizer, 0)
    made, memory_of = [], Places.memory_of

    def note(self: Places, *args: Any) -> torch.Tensor:
        made.append(len(device.marks))
        return memory_of(self, *args)

    monkeypatch.setattr(Places, "memory_of", note)
    device.after.clear()
    optimizer.add_param_group({"params": params[len(params) // 2 :]})
    zo.commit(model, optimizer)
    zo.close(model)
    assert made and device.after and min(device.after) >= max(made)


def test_states_without_room_on_the_device_leave_nothing(
    tmp_path: Path, compute_on: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another optimizer takes its place, and what is committed then has states of that one alone."""
    config = zo.OffloadConfig(
        params="device", optimizer="device", nvme=tmp_path, existing="resume", durability="process", commit_every=1
    )
    found = []
    for device in (LateDevice(), HostDevice()):
        compute_on(device)
        model = zo.offload(Model(), config)
        shards = runtime_of(model).parts.store.shards
        if device.is_host:
            assert {name for shard in shards for name in shard.states} == {Component.MOMENTUM_BUFFER}
        else:
            with monkeypatch.context() as patch:
                patch.setattr(places.torch, "zeros", raise_out_of_memory)
                with pytest.raises(zo.CapacityError, match="are not free on"):
                    adamw(model)
            assert not any(shard.states for shard in shards)
        optimizer = zo.SGD(model.parameters(), lr=0.1, momentum=0.9)
        zo.resume(model, optimizer)
        if not device.is_host:
            step(model, optimizer, 0)
            zo.commit(model, optimizer)
        found.append(states_of(model, optimizer))
        zo.close(model)
    assert differing(found[1], found[0]) == []


def raise_out_of_memory(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(("states", "launches"), [("fp32", 2), ("bf16", 2), ("compact", 2)])
def test_a_parameter_is_one_launch_however_many_chunks_it_has(
    compute_on: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch, states: Any, launches: int
) -> None:
    """A launch takes the host longer than a GPU needs for a chunk. Compact states have scales chunk by chunk: there the
    rest of the weight is updated together with the bias."""
    sizes, update = [], device_pass.update_on_device

    def note(rule: Any, tensors: Any, segment: Any) -> None:
        sizes.append(segment.end - segment.begin)
        update(rule, tensors, segment)

    monkeypatch.setattr(device_pass, "update_on_device", note)
    found = []
    for device in (HostDevice(), LateDevice()):
        compute_on(device)
        torch.manual_seed(0)
        config = zo.OffloadConfig(
            params="device", grads="device", optimizer="device", precision=zo.Precision(compute="bf16", states=states)
        )
        model = zo.offload(torch.nn.Linear(1100, 1100), config)
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            draw = torch.Generator().manual_seed(number)
            model(torch.randn(1, 1100, generator=draw)).float().square().sum().backward()
            sizes.clear()
            optimizer.step()
            optimizer.zero_grad()
        found.append(states_of(model, optimizer))
        zo.close(model)
    assert len(sizes) == launches and 0 <= sum(sizes) - 1100 * 1101 < 256  # with the padding between two
    assert differing(found[1], found[0]) == []


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


@pytest.mark.parametrize("states", ["fp32", "bf16", "compact"])
@pytest.mark.parametrize("grads", ["device", "cpu"])
@pytest.mark.parametrize(
    ("make", "skipped", "launches"),
    [
        (one_group, -1, 1),
        (one_group, 2, 2),  # the third parameter has no gradient
        (two_groups, -1, 2),
        (lambda params: zo.Lion(params, lr=1e-3, weight_decay=0.1), -1, 1),
        (lambda params: zo.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True), -1, 1),
        (lambda params: zo.AdamW(params, lr=1e-2, eps=0.0), -1, 6),  # 0 / 0 is no zero
        (lambda params: zo.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1), -1, 6),
    ],
)
def test_small_parameters_are_updated_together(
    compute_on: Callable[[Device], None],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    skipped: int,
    launches: int,
    grads: Any,
    states: Any,
) -> None:
    """Torch's operations take as many launches for a small one. All that rests has the host's bits, padding too."""
    made: list[Any] = []
    update = device_pass.update_on_device
    monkeypatch.setattr(device_pass, "update_on_device", lambda *args: (made.append(args[2]), update(*args)))
    found = []
    for device in (HostDevice(), LateDevice()):
        compute_on(device)
        config = zo.OffloadConfig(
            params="device", grads=grads, optimizer="device", precision=zo.Precision(compute="bf16", states=states)
        )
        model = zo.offload(Small(), config)
        optimizer = make(list(model.parameters()))
        for _ in range(3):
            model(skipped).backward()
            made.clear()
            optimizer.step()
            optimizer.zero_grad()
        (shard,) = {s.shard.layout.index: s.shard for u in runtime_of(model).parts.units for s in u.sections}.values()
        found.append({str(component): array.clone() for component, array in shard.memory.items()})
        zo.close(model)
    assert len(made) == launches
    assert len(found[0]) >= 2 and differing(found[1], found[0]) == []
