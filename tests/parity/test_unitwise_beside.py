"""The step of an optimizer of others that goes on beside the program: no delay of it changes a bit."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zero_offload as zo
from tests.helpers.disk import close_broken
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import read_masters
from tests.parity.test_unitwise import MAKERS, TIERS, assert_same, groups_of
from zero_offload.optim.unitwise.walk_step import WalkStep
from zero_offload.storage.shards.store import ShardStore

STEPS = 7
Step = Callable[[nn.Module, torch.optim.Optimizer, int], None]


@pytest.fixture
def gone_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of steps that went on beside the program."""
    found, go_on = list[str](), WalkStep.go_on

    def noted(self: WalkStep) -> None:
        found.append(self.kind)
        go_on(self)

    monkeypatch.setattr(WalkStep, "go_on", noted)
    return found


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random delays before reads and writes of a walk, before each section is stepped, and before its end."""
    delays = random.Random(0)

    def delayed(call: Callable[..., Any], longest_s: float) -> Callable[..., Any]:
        def later(*arguments: Any, **named: Any) -> Any:
            time.sleep(delays.choice([0, 0, longest_s / 10, longest_s]))
            return call(*arguments, **named)

        return later

    for owner, name in ((ShardStore, "open_chunks"), (ShardStore, "close_chunks"), (WalkStep, "step")):
        monkeypatch.setattr(owner, name, delayed(getattr(owner, name), 0.01))
    monkeypatch.setattr(WalkStep, "end", delayed(WalkStep.end, 0.2))


class Counting(torch.optim.Optimizer):
    """SGD with momentum whose rate falls with a count in its groups, and another one in itself."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0})
        self.total = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.total += 1
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    held = self.state[param].setdefault("held", torch.zeros_like(param))
                    held.mul_(group["momentum"]).add_(param.grad, alpha=1 / group["k"])
                    param.sub_(held, alpha=group["lr"] / self.total)


def backward(model: nn.Module, step: int) -> float:
    loss: Tensor = model(tokens_of(step))
    loss.backward()
    return loss.item()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, then: Step, begin: int = 0, end: int = STEPS
) -> list[float]:
    losses = []
    for step in range(begin, end):
        losses.append(backward(model, step))
        optimizer.step()
        then(model, optimizer, step)
        optimizer.zero_grad()
    return losses


def no_more(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


def other_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Of groups, by hand, when `step` has returned."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.5 if step % 2 else 1.5
        if step == 4:
            group["momentum"] = 0.5


def offloaded(
    nvme: Path, tiers: str, make: Callable[[Any], torch.optim.Optimizer], **settings: Any
) -> tuple[nn.Module, Any]:
    model = build(TinyLM)
    choices = {"precision": "fp32", "existing": "resume", "overlap": "forward", **TIERS[tiers], **settings}
    zo.offload(model, zo.OffloadConfig(nvme=nvme, **choices))
    return model, zo.unitwise(make(groups_of([*model.parameters()])))


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("then", [no_more, other_numbers], ids=["", "other numbers"])
def test_delays_change_nothing(tiers: str, then: Step, tmp_path: Path, gone_on: list[str], late: None) -> None:
    """The program changes its groups while a step of before goes on with the numbers of then."""
    plain = build(TinyLM)
    theirs = Counting(groups_of([*plain.parameters()]))
    expected = train(plain, theirs, then)
    model, optimizer = offloaded(tmp_path, tiers, Counting)
    assert train(model, optimizer, then) == expected
    assert len(gone_on) == STEPS - 2 and optimizer.total == STEPS
    assert_same(read_masters(model), {name: param.detach() for name, param in plain.named_parameters()})
    assert [group["k"] for group in optimizer.param_groups] == [STEPS, STEPS]
    zo.close(model)


@pytest.mark.parametrize("name", MAKERS)
def test_optimizers_of_torch_go_on(name: str, tmp_path: Path, gone_on: list[str], late: None) -> None:
    def seen(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Every second step is looked at while it goes on."""
        if step % 2:
            entries = [
                {key: value.clone() for key, value in optimizer.state[param].items() if isinstance(value, Tensor)}
                for param in model.parameters()
            ]
            found.append(entries)

    found: list[Any] = []
    plain = build(TinyLM)
    expected = train(plain, MAKERS[name](groups_of([*plain.parameters()])), seen)
    theirs, found = found, []
    model, optimizer = offloaded(tmp_path, "nvme", MAKERS[name], overlap="auto")
    assert train(model, optimizer, seen) == expected
    assert len(gone_on) >= STEPS - 3
    for ours, entries in zip(found, theirs, strict=True):
        for one, other in zip(ours, entries, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in one)
    zo.close(model)


class Products(torch.optim.Optimizer):
    """SGD whose update is a product of matrices, with a state of subnormal numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                flat = param.grad.reshape(1, -1)
                param.sub_((flat.mT @ torch.full((1, 1), 1.001) * group["lr"]).reshape(param.shape))
                self.state[param]["small"] = param.grad * 1e-38


class Doubled(TorchFunctionMode):
    """A mode of torch in which products are doubled."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is Tensor.matmul else found


@contextlib.contextmanager
def without_subnormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    "mode",
    [lambda: torch.autocast("cpu", torch.bfloat16), Doubled, without_subnormals],
    ids=["autocast", "mode", "subnormals"],
)
def test_a_step_computes_as_its_thread(mode: Callable[[], Any], tmp_path: Path, gone_on: list[str]) -> None:
    """Autocast, modes and subnormal numbers are of a thread: such a step is made on that of the program."""
    plain = build(TinyLM)
    model, ours = offloaded(tmp_path, "nvme", Products)
    theirs = Products(groups_of([*plain.parameters()]))
    for step in range(4):
        for each, optimizer in ((plain, theirs), (model, ours)):
            backward(each, step)
            with contextlib.nullcontext() if step % 2 == 0 else mode():
                optimizer.step()
            optimizer.zero_grad()
    assert len(gone_on) == 1
    assert_same(read_masters(model), {name: param.detach() for name, param in plain.named_parameters()})
    small = {name: ours.state[param]["small"] for name, param in model.named_parameters()}
    assert_same(small, {name: theirs.state[param]["small"] for name, param in plain.named_parameters()})
    zo.close(model)


def test_a_scheduler_steps_beside_it(tmp_path: Path, gone_on: list[str], late: None) -> None:
    """It changes rates and momentum. The loop switches momentum off once: that step is made at once."""

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=40)

        def then(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
            scheduler.step()
            if step == 3:
                optimizer.param_groups[0]["momentum"] = 0.0

        return train(model, optimizer, then)

    plain = build(TinyLM)
    expected = losses(plain, torch.optim.SGD(groups_of([*plain.parameters()]), 0.1, momentum=0.9))
    model, optimizer = offloaded(tmp_path, "nvme", lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9))
    assert losses(model, optimizer) == expected
    assert STEPS - 4 <= len(gone_on) < STEPS - 1
    zo.close(model)


def test_generations_have_whole_steps(tmp_path: Path, gone_on: list[str], late: None) -> None:
    """A commit behind each step, and a start that goes on from the last one."""

    def committed(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        zo.commit(model, optimizer)

    plain = build(TinyLM)
    theirs = Counting(groups_of([*plain.parameters()]))
    expected = train(plain, theirs, no_more)
    losses = []
    for begin, end in ((0, 4), (4, STEPS)):
        model, optimizer = offloaded(tmp_path, "split", Counting)
        zo.resume(model, optimizer)
        losses += train(model, optimizer, committed, begin, end)
        zo.close(model)
    assert losses == expected and len(gone_on) == (4 - 2) + (STEPS - 4 - 1)
    model, optimizer = offloaded(tmp_path, "split", Counting)
    assert zo.resume(model, optimizer) is not None and optimizer.total == STEPS
    assert_same(read_masters(model), {name: param.detach() for name, param in plain.named_parameters()})
    zo.close(model)


class Second(Counting):
    """Another class."""


def test_two_optimizers_of_one_unit_and_one_that_begins_late(tmp_path: Path, gone_on: list[str], late: None) -> None:
    """The second one steps first in the third iteration; parameters of the first one have a first gradient then."""

    def losses(model: nn.Module, make: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> list[float]:
        first, second = (group["params"] for group in groups_of([*model.parameters()]))
        optimizers = [make(Counting(first)), make(Second(second))]
        found = []
        for step in range(STEPS):
            first[1].requires_grad_(step > 3)
            found.append(backward(model, step))
            for each in optimizers[: 1 + (step > 1)]:
                each.step()
            for each in optimizers:
                each.zero_grad()
        return found

    plain, model = build(TinyLM), build(TinyLM)
    expected = losses(plain, lambda optimizer: optimizer)
    config = zo.OffloadConfig(
        nvme=tmp_path, precision="fp32", durability="scratch", overlap="forward", **TIERS["split"]
    )
    zo.offload(model, config)
    assert losses(model, zo.unitwise) == expected
    assert {kind.rpartition(".")[2] for kind in gone_on} == {"Counting", "Second"}
    zo.close(model)


class Hoarding(Counting):
    """Keeps one tensor more of a parameter of many elements in its fifth step: no test on tiny ones sees that."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None and self.param_groups[0]["k"] == 5 and param.numel() > 10**5:
                self.state[param]["more"] = torch.ones_like(param)


def test_a_state_that_grows_meanwhile_ends_the_run(tmp_path: Path, gone_on: list[str]) -> None:
    def committed(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        zo.commit(model, optimizer)

    def wide() -> nn.Module:
        return TinyLM(384, 3)

    def make(overlap: str) -> tuple[nn.Module, Any]:
        model = build(wide)
        config = zo.OffloadConfig(
            nvme=tmp_path, precision="fp32", existing="resume", commit_every=1, overlap=overlap, **TIERS["nvme"]
        )
        zo.offload(model, config)
        return model, zo.unitwise(Hoarding(model.parameters()))

    model, optimizer = make("forward")
    with pytest.raises(zo.ConfigError, match="has grown in a step beside the next forward.*overlap='none'"):
        train(model, optimizer, committed)
        zo.close(model)
    close_broken(model)
    assert len(gone_on) == 3
    plain = build(wide)
    expected = train(plain, Hoarding(plain.parameters()), no_more)
    model, optimizer = make("none")
    found = zo.resume(model, optimizer)
    assert found is not None and found.step == 4
    assert train(model, optimizer, committed, 4) == expected[4:]
    zo.close(model)


def test_a_step_that_takes_room_is_made_at_once(tmp_path: Path, gone_on: list[str]) -> None:
    """States that are assigned, deleted and made anew between steps."""

    def deleted(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        param = next(model.parameters())
        if step == 3:
            del optimizer.state[param]
        if step == 5:
            optimizer.state[param] = {"held": torch.ones_like(param)}

    plain = build(TinyLM)
    expected = train(plain, Counting(groups_of([*plain.parameters()])), deleted)
    model, optimizer = offloaded(tmp_path, "nvme", Counting)
    assert train(model, optimizer, deleted) == expected
    assert len(gone_on) < STEPS - 2
    zo.close(model)


def test_a_checkpoint_without_states_is_loaded_between_steps(tmp_path: Path, gone_on: list[str]) -> None:
    """Its parameters have had steps, and no state: the next step makes new ones, where those of before were."""

    def sgd(momentum: float) -> Callable[[Any], torch.optim.Optimizer]:
        return lambda groups: torch.optim.SGD(groups, 0.1, momentum=momentum)

    def go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings["momentum"] = 0.9
        return train(model, optimizer, no_more, 2)

    plain = build(TinyLM)
    theirs = sgd(0.0)(groups_of([*plain.parameters()]))
    train(plain, theirs, no_more, 0, 2)
    expected = go_on(plain, theirs)
    model, optimizer = offloaded(tmp_path / "first", "nvme", sgd(0.0))
    train(model, optimizer, no_more, 0, 2)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    zo.close(model)
    model, optimizer = offloaded(tmp_path / "second", "nvme", sgd(0.9))
    train(model, optimizer, no_more)
    before = len(gone_on)
    zo.load_checkpoint(model, optimizer, tmp_path / "saved")
    assert go_on(model, optimizer) == expected
    assert len(gone_on) - before == STEPS - 2
    zo.close(model)
