"""How many parameters stay on a device: more after the first step, less where memory runs short."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.helpers.models import WIDE, Block, build
from tests.helpers.pairwise import full, in_turn
from zero_offload.base.types import FRAME, MIB
from zero_offload.model.api import runtime_of
from zero_offload.plan.memory import ACTIVATIONS_AHEAD_BYTES, MARGIN_SHARE, WORKSPACE_BYTES
from zero_offload.runtime.units.unit import UnitState

NUM_BLOCKS = 6
BLOCK_FRAMES = 2
NUM_UNITS = NUM_BLOCKS + 1
IN_FLIGHT = 3 * BLOCK_FRAMES * FRAME
WHOLE = (NUM_BLOCKS * BLOCK_FRAMES + 1) * FRAME
PLACEMENTS = {
    "cpu": {},
    "nvme": {"params": "nvme", "optimizer": "nvme"},
    "grads": {"grads": "device"},
    "mixed": {"params": {"cpu": 0.5, "nvme": 0.5}, "grads": "device"},
    "activations": {"activations": "cpu"},
}


def make() -> nn.Module:
    return build(lambda: nn.Sequential(*(Block(WIDE) for _ in range(NUM_BLOCKS)), nn.LayerNorm(WIDE)))


def rows(number: int, count: int = 4) -> Tensor:
    return torch.randn(count, WIDE, generator=torch.Generator().manual_seed(number)).to(TYPE)


class Step(NamedTuple):
    """Figures of one step."""

    loss: float
    norm: float
    uploads: int
    limit: int
    there: int
    reason: str


class Run:
    """A model that trains."""

    def __init__(self, path: Path | None = None, **settings: Any) -> None:
        settings = {"precision": "fp32"} | settings
        if "nvme" in str(settings):
            settings |= {"nvme": path, "durability": "scratch"}
        self.model = make()
        for param in self.model[0].parameters() if settings.pop("freezes", False) else ():  # type: ignore[union-attr]
            param.requires_grad = False
        zo.offload(self.model, zo.OffloadConfig(**settings))
        self.optimizer = zo.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, batch: Tensor, forward: Callable[[nn.Module, Tensor], Tensor] | None = None) -> Step:
        with device.counting() as counts:
            loss = (forward or nn.Module.__call__)(self.model, batch).square().mean()
            loss.backward()
            norm = zo.clip_grad_norm_(self.model, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        found = zo.stats(self.model).device_params
        assert found is not None
        return Step(float(loss.detach()), float(norm), counts["uploads"], found.limit, found.nbytes, found.reason)

    def close(self) -> list[float]:
        with zo.gathered(self.model, kind="master") as masters:
            sums = [float(value.double().sum()) for value in masters.values()]
        zo.close(self.model)
        return sums


def train(num_steps: int = 4, batches: Sequence[int] = (), path: Path | None = None, **settings: Any) -> list[Step]:
    """The last of them has sums of the masters in place of the loss and the norm."""
    run = Run(path, **settings)
    steps = [run.step(rows(i, batches[i] if batches else 4)) for i in range(num_steps)]
    sums = run.close()
    return [*steps, steps[-1]._replace(loss=sum(sums), norm=max(sums))]


@functools.cache
def expected_steps(num_steps: int = 4, batches: Sequence[int] = ()) -> list[Step]:
    """Of a run at once, with all the memory there is."""
    device.policy(Policy.EAGER)
    return train(num_steps, batches)


@functools.cache
def few_in_flight(placement: str) -> list[Step]:
    """The same with three units in flight."""
    device.policy(Policy.EAGER)
    settings = PLACEMENTS[placement]
    with tempfile.TemporaryDirectory() as path:
        return train(device_memory="34MiB" if "grads" in settings else "17MiB", path=Path(path), **settings)


def bits(steps: Sequence[Step]) -> list[tuple[float, float]]:
    return [(step.loss, step.norm) for step in steps]


@contextmanager
def room_for(num_frames: int, peak: int) -> Iterator[None]:
    """Memory of which a first step with this peak leaves so many frames."""
    with device.memory_limit((peak + WORKSPACE_BYTES + num_frames * FRAME) * MARGIN_SHARE // (MARGIN_SHARE - 1) + MIB):
        yield


def peak_of_a_step(**settings: Any) -> int:
    torch.fakegpu.empty_cache()  # type: ignore[attr-defined]
    run = Run(**settings)
    run.step(rows(0))
    peak = torch.fakegpu.max_memory_reserved()  # type: ignore[attr-defined]
    run.close()
    return int(peak)


# Growth


@pytest.mark.parametrize(
    ("placement", "policy"),
    [
        *((name, Policy.RANDOM) for name in PLACEMENTS),
        ("cpu", Policy.LATE),
        *(full("cpu", policy) for policy in (Policy.SIDE_EARLY, Policy.SIDE_LATE)),
    ],
)
def test_parameters_stay_where_there_is_room(placement: str, policy: Policy, tmp_path: Path) -> None:
    """From the second step on each unit comes once a step, after its update; the bits are those of three in flight."""
    few = few_in_flight(placement)
    device.policy(policy, seed=3)
    many = train(path=tmp_path / "many", **PLACEMENTS[placement])
    assert bits(many) == bits(few)
    assert [step.limit for step in many] == [IN_FLIGHT, WHOLE, WHOLE, WHOLE, WHOLE]
    assert many[0].there <= IN_FLIGHT and many[-1].there == WHOLE
    if placement == "cpu":
        assert [step.uploads for step in many[:4]] == [11, NUM_UNITS, NUM_UNITS, NUM_UNITS]
        assert few[3].uploads > NUM_UNITS


def test_frozen_parameters_are_uploaded_once() -> None:
    """An adapter's base model stays as it is."""
    model = make().requires_grad_(False)
    model[-1].requires_grad_(True)  # type: ignore[index, union-attr]
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    optimizer, found = zo.AdamW(model[-1].parameters(), lr=1e-2), []  # type: ignore[index, union-attr]
    for batch in map(rows, range(4)):
        with device.counting() as counts:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(counts["uploads"])
    zo.close(model)
    assert found[0] >= NUM_UNITS
    assert found[2:] == [1, 1], "the unit that is trained"


def test_an_evaluation_uploads_nothing_after_its_second_forward() -> None:
    model, found = zo.offload(make(), zo.OffloadConfig(precision="fp32")), []
    with torch.no_grad():
        for batch in map(rows, range(4)):
            with device.counting() as counts:
                model(batch)
            found.append(counts["uploads"])
    zo.close(model)
    assert found[0] == NUM_UNITS and found[1] <= NUM_UNITS and found[2:] == [0, 0]


@pytest.mark.parametrize("num_frames", [0, 5, *(full(each) for each in (1, 2))])
def test_growth_ends_at_the_margin(num_frames: int) -> None:
    peak = peak_of_a_step()
    with room_for(num_frames, peak):
        steps = train()
    assert {step.limit for step in steps[1:]} == {IN_FLIGHT + num_frames * FRAME}


def test_a_share_of_the_memory_is_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = peak_of_a_step()
    total = torch.fakegpu.mem_get_info()[1]  # type: ignore[attr-defined]
    limit = (peak + WORKSPACE_BYTES + 2 * FRAME) * MARGIN_SHARE // (MARGIN_SHARE - 1) + MIB
    monkeypatch.setattr(
        torch.fakegpu,  # type: ignore[attr-defined]
        "get_per_process_memory_fraction",
        lambda index: limit / total,
        raising=False,
    )
    assert {step.limit for step in train()[1:]} == {IN_FLIGHT + 2 * FRAME}


# Memory that runs short


def no_room(nbytes: int = 0) -> AbstractContextManager[None]:
    """From now on the device has so many bytes beside those that are allocated."""
    torch.fakegpu.empty_cache()  # type: ignore[attr-defined]
    return device.memory_limit(torch.fakegpu.memory_reserved() + nbytes)  # type: ignore[attr-defined]


def num_ooms() -> int:
    return int(torch.fakegpu.memory_stats()["num_ooms"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("policy", "where"),
    [
        (Policy.LATE, "forward"),
        (Policy.RANDOM, "backward"),
        full(Policy.LATE, "backward"),
        full(Policy.RANDOM, "forward"),
    ],
)
def test_a_step_that_ran_out_of_memory_is_run_again_with_less(policy: Policy, where: str) -> None:
    """In an operation of the model's own; the program catches the error."""
    expected = expected_steps()
    device.policy(policy, seed=2)
    run, steps = Run(), []

    def take(*_: Any) -> None:
        with no_room():
            torch.empty(MIB, device=TYPE)

    for number in range(4):
        if number == 2:
            block: Any = run.model[3]  # type: ignore[index]
            handle = (block.register_forward_pre_hook if where == "forward" else block.register_full_backward_hook)(
                take
            )
            with pytest.raises(torch.OutOfMemoryError):
                run.step(rows(number))
            handle.remove()
            run.optimizer.zero_grad()
            with pytest.warns(UserWarning, match="ran out of memory: parameters keep at most 12 MiB"):
                steps.append(run.step(rows(number)))
        else:
            steps.append(run.step(rows(number)))
    sums = run.close()
    assert bits([*steps, steps[-1]._replace(loss=sum(sums), norm=max(sums))]) == bits(expected)
    assert [step.limit for step in steps] == [IN_FLIGHT, WHOLE, IN_FLIGHT, IN_FLIGHT]
    assert steps[-1].there <= IN_FLIGHT and "out of memory" in steps[-1].reason


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (Policy.LATE, {}),
        (Policy.RANDOM, {"device_memory": "40MiB"}),
        full(Policy.LATE, {"device_memory": "40MiB"}),
        full(Policy.RANDOM, {}),
    ],
)
def test_prefetches_without_memory_do_not_break_a_step(policy: Policy, settings: dict[str, Any]) -> None:
    """Each refusal has flushed the allocator's cache, so none follows before something has left."""
    expected = expected_steps(3)
    device.policy(policy, seed=4)
    run = Run(**settings)
    steps = [run.step(rows(0)), run.step(rows(1))]
    owner: Any = runtime_of(run.model)
    prefetcher, limits = owner.prefetcher, []

    def fill(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """All units leave, and until the forward has ended there is memory for three others."""
        for unit in owner.units:
            if not unit.in_use and unit.state is not UnitState.AWAY:
                prefetcher._evictor.evict(unit)
        limits.append(no_room(12 * MIB))
        limits[0].__enter__()

    model: Any = run.model
    first = model[0].register_forward_pre_hook(fill)

    def give_back(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        limits[0].__exit__(None, None, None)

    last = model[-1].register_forward_hook(give_back)
    before = num_ooms()
    with pytest.warns(UserWarning, match="out of memory in a prefetch"):
        steps.append(run.step(rows(2)))
    assert num_ooms() == before + 1
    first.remove()
    last.remove()
    assert "prefetch" in steps[-1].reason and steps[-1].limit == IN_FLIGHT
    sums = run.close()
    assert bits([*steps, steps[-1]._replace(loss=sum(sums), norm=max(sums))]) == bits(expected)


def test_a_use_without_memory_has_that_of_units_that_are_not_used() -> None:
    expected = expected_steps(3)
    run = Run()
    steps = [run.step(rows(0)), run.step(rows(1))]
    owner: Any = runtime_of(run.model)
    limits = []

    def fill(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """The next unit leaves, and there is no memory for it."""
        unit = owner.units[3]
        assert unit.layout.name == "3"
        owner.prefetcher._evictor.evict(unit)
        limits.append(no_room())
        limits[0].__enter__()
        owner.prefetcher.fetch_for_access(unit)
        assert unit.state is UnitState.PRESENT
        limits[0].__exit__(None, None, None)

    block: Any = run.model[0]  # type: ignore[index]
    handle = block.register_forward_pre_hook(fill)
    with pytest.warns(UserWarning, match="out of memory"):
        steps.append(run.step(rows(2)))
    handle.remove()
    sums = run.close()
    assert bits([*steps, steps[-1]._replace(loss=sum(sums), norm=max(sums))]) == bits(expected)


def test_larger_inputs_find_room_that_parameters_have_left() -> None:
    """A forward that would have met units where its activations go: none of them runs out of memory."""
    batches = (64, 64, 256, 256)
    expected = expected_steps(batches=batches)
    peak = peak_of_a_step()
    before = num_ooms()
    with room_for(20, peak + 6 * MIB):
        steps = train(batches=batches)
    assert bits(steps) == bits(expected)
    assert num_ooms() == before
    assert steps[1].limit > steps[2].limit and steps[2].reason == "inputs are larger than before"


def test_a_step_in_another_order_leaves_half_of_what_was_gained() -> None:
    def backwards(model: nn.Module, batch: Tensor) -> Tensor:
        return model[6](model[0](model[1](model[2](model[3](model[4](model[5](batch)))))))  # type: ignore

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = make()
            self.turned = False

        def forward(self, x: Tensor) -> Tensor:
            return backwards(self.blocks, x) if self.turned else self.blocks(x)

    def run(**settings: Any) -> tuple[list[float], list[int]]:
        model = zo.offload(Either(), zo.OffloadConfig(precision="fp32", **settings))
        optimizer, losses, limits = zo.AdamW(model.parameters(), lr=1e-2), [], []
        for number in range(5):
            model.turned = number == 2
            loss = model(rows(number)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            found = zo.stats(model).device_params
            assert found is not None
            limits.append(found.limit // FRAME)
        zo.close(model)
        return losses, limits

    losses, limits = run()
    assert losses == run(device_memory="16MiB")[0]
    assert limits == [6, 13, 13, 9, 7]


# Activations


def test_two_of_the_largest_activations_come_ahead() -> None:
    """Of 40 MiB each: with 32 MiB ahead, none would be launched while another one is in use."""
    nbytes = 40 * MIB
    read: list[int] = []

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                # Backward has come to the layer: the tensor behind it is in use.
                x.register_hook(lambda _: read.append(owner.store.counters.snapshot()["read.cpu"] - before))
                x = torch.tanh(x)
            return x

    model = zo.offload(build(Wide), zo.OffloadConfig(precision="fp32", activations="cpu"))
    owner = runtime_of(model)
    assert owner is not None
    loss = model(torch.ones(nbytes // 64, 16, device=TYPE)).sum()
    before = owner.store.counters.snapshot()["read.cpu"]
    loss.backward()
    zo.close(model)
    assert 2 * nbytes <= ACTIVATIONS_AHEAD_BYTES
    assert [round(each / nbytes) for each in read] == [3, 4, 5, 6, 7, 7]


# Graphs


def test_a_captured_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zo.offload(make(), zo.OffloadConfig(precision="fp32"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.fakegpu, "is_current_stream_capturing", lambda: True)  # type: ignore[attr-defined]
        patch.delattr(torch.fakegpu, "mem_get_info")  # type: ignore[attr-defined]
        with pytest.raises(zo.ConfigError, match=r"torch\.cuda\.graph.*max-autotune-no-cudagraphs"):
            model(rows(0))
    loss = model(rows(0)).square().mean()
    with monkeypatch.context() as patch:
        patch.setattr(torch.fakegpu, "is_current_stream_capturing", lambda: True)  # type: ignore[attr-defined]
        with pytest.raises(zo.ConfigError, match="captured in a graph"):
            loss.backward()
    model(rows(0)).square().mean().backward()
    zo.close(model)


@in_turn(
    how=["whole", "in place", "a block", "a block in place", "a part", "a function"],
    options=[{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}],
)
def test_compiling_to_graphs_is_refused(how: str, options: dict[str, Any]) -> None:
    model: Any = zo.offload(make(), zo.OffloadConfig(precision="fp32"))
    call = model
    if how == "whole":
        call = torch.compile(model, **options)
    elif how == "in place":
        model.compile(**options)
    elif how == "a block":
        model[1] = torch.compile(model[1], **options)
    elif how == "a block in place":
        model[1].compile(**options)
    elif how == "a part":
        model[1].up = torch.compile(model[1].up, **options)
    else:
        call = torch.compile(lambda x: model(x), **options)
    with pytest.raises(zo.ConfigError, match="told to make graphs"):
        call(rows(0))
    zo.close(model)


def test_compiling_without_graphs_is_not() -> None:
    model: Any = zo.offload(make(), zo.OffloadConfig(precision="fp32"))
    plain = model(rows(0)).square().mean()
    model[1] = torch.compile(model[1], backend="eager")
    assert float(model(rows(0)).square().mean()) == float(plain)
    zo.close(model)
