"""Verdicts of the self-test: each class of torch, and optimizers that are made to deceive it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_offload.optim.unitwise.grades import Grade, Graded, compare_units, grade, periods_of
from zero_offload.optim.unitwise.twin import Twin

Make = Callable[[Any], Any]


def params_of(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=torch.float32, device="cpu")) for shape in shapes]


def verdict(make: Make, *, seconds: float = 2.0, shapes: tuple[tuple[int, ...], ...] = ((6, 4), (5,))) -> Graded:
    return grade(make(params_of(*shapes)), seconds=seconds)


class Plain(torch.optim.Optimizer):
    """Gradient descent, which the traps below add something to."""

    def __init__(self, params: Any, lr: float = 1e-2, **numbers: Any) -> None:
        super().__init__(params, {"lr": lr, **numbers})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        self.begin(params)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["step"] = self.state[param].get("step", 0) + 1
                    self.update(group, param, self.state[param]["step"])

    def begin(self, params: list[Any]) -> None: ...

    def update(self, group: dict[str, Any], param: Any, step: int) -> None:
        param.sub_(param.grad, alpha=group["lr"])


def norm_of(params: list[Any]) -> float:
    return float(torch.stack([param.grad.norm() for param in params]).norm())


class ProdigyLike(Plain):
    """A sum over all parameters moves the rate, but only when it has grown."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, d=1e-6, d_numerator=0.0)

    def begin(self, params: list[Any]) -> None:
        for group in self.param_groups:
            group["d_numerator"] += norm_of(params) * 1e-9
            group["d"] = max(group["d"], group["d_numerator"])

    def update(self, group: dict[str, Any], param: Any, step: int) -> None:
        param.sub_(param.grad, alpha=group["lr"] * group["d"])


class SilentProdigy(Plain):
    """The same, whose sum is left in no number: the weights tell, with the third step."""

    def begin(self, params: list[Any]) -> None:
        self.scale = norm_of(params) if self.state.get(params[0], {}).get("step", 0) >= 2 else 1.0

    def update(self, group: dict[str, Any], param: Any, step: int) -> None:
        param.sub_(param.grad, alpha=group["lr"] / self.scale)
        self.scale = self.scale if step > 90 else 1.0 if param.grad is None else self.scale
        group.pop("scale", None)


class Clips(Plain):
    """As LAMB: couples parameters only where the norm of all is above 5000."""

    def begin(self, params: list[Any]) -> None:
        factor = min(1.0, 5000 / norm_of(params))
        if factor < 1:
            for param in params:
                param.grad.mul_(factor)


class Delayed(Plain):
    """As AdaShift: a gradient is used five steps later."""

    def __init__(self, params: Any, delay: int = 5) -> None:
        super().__init__(params, delay=delay)

    def update(self, group: dict[str, Any], param: Any, step: int) -> None:
        queue = self.state[param].setdefault("queue", [])
        queue.append(param.grad.clone())
        if len(queue) > group["delay"]:
            param.sub_(queue.pop(0), alpha=group["lr"])


class DelayedCoupled(Delayed):
    """Couples in what moves late."""

    def begin(self, params: list[Any]) -> None:
        norm = norm_of(params)
        for param in params:
            param.grad.div_(norm)


class AtStep(Plain):
    """Couples in one step only."""

    at = 0

    def __init__(self, params: Any, **numbers: Any) -> None:
        super().__init__(params, **numbers)
        self.steps = 0

    def begin(self, params: list[Any]) -> None:
        self.steps += 1
        if self.steps == (self.param_groups[0].get("interval") or self.at):
            norm = norm_of(params)
            for param in params:
                param.grad.div_(norm)


class Seventh(AtStep):
    """No number tells the step."""

    @property
    def at(self) -> int:  # type: ignore[override]
        return 3 + 4


class Noisy(Plain):
    """Couples by the random generator of torch alone, and there by the order of parameters."""

    def update(self, group: dict[str, Any], param: Any, step: int) -> None:
        noise = torch.rand((), dtype=torch.float32, device="cpu")
        param.sub_(param.grad * noise, alpha=group["lr"])


class RarelyNoisy(Plain):
    """Draws without use: one day it may use what it draws."""

    def update(self, group: dict[str, Any], param: Any, step: int) -> None:
        if random.random() < 0:
            param.zero_()
        super().update(group, param, step)


class OwnGenerator(Plain):
    """A generator of its own, which units draw from in another order."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator("cpu").manual_seed(0)

    def update(self, group: dict[str, Any], param: Any, step: int) -> None:
        noise = torch.rand((), generator=self.generator, dtype=torch.float32, device="cpu")
        param.sub_(param.grad * noise, alpha=group["lr"])


class Seeded(Plain):
    """A generator made anew from a parameter's state couples nothing."""

    def update(self, group: dict[str, Any], param: Any, step: int) -> None:
        generator = torch.Generator("cpu").manual_seed(step)
        param.sub_(param.grad * torch.rand((), generator=generator, dtype=torch.float32, device="cpu"), alpha=1e-2)


class CountsGroups(Plain):
    """A number that counts the groups of a step: fewer in a unit."""

    count = 0

    def update(self, group: dict[str, Any], param: Any, step: int) -> None:
        super().update(group, param, step)
        if group["params"][0] is param:
            self.count += 1


class Order(Plain):
    """Each parameter sees the one before it."""

    previous = 0.0

    def begin(self, params: list[Any]) -> None:
        self.previous = 0.0

    def update(self, group: dict[str, Any], param: Any, step: int) -> None:
        self.previous, before = float(param.grad.mean()), self.previous
        param.sub_(param.grad, alpha=group["lr"] * (1 + before * before))
        if param is self.param_groups[-1]["params"][-1]:
            self.previous = 0.0


class Hidden(Plain):
    """Couples states only, which weights would show much later."""

    def begin(self, params: list[Any]) -> None:
        for param in params:
            self.state[param]["seen"] = torch.tensor(norm_of(params), dtype=torch.float32, device="cpu")


class Mirrors(Plain):
    """Keeps a counter of each group in the state of its first parameter too, which couples nothing."""

    def begin(self, params: list[Any]) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", torch.zeros((), dtype=torch.float32, device="cpu")) + 1
            self.state[group["params"][0]]["count"] = group["count"]


class Normalizes(Plain):
    """Couples the elements of a parameter."""

    def update(self, group: dict[str, Any], param: Any, step: int) -> None:
        param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


class Outer(Plain):
    """A matrix for each vector, and for each row and column: a flat parameter would have a matrix that fits nowhere."""

    def update(self, group: dict[str, Any], param: Any, step: int) -> None:
        size = param.numel() if param.dim() == 1 else sum(param.shape)
        assert size < 1000
        self.state[param].setdefault("outer", torch.zeros((size, size), dtype=torch.float32, device="cpu"))
        super().update(group, param, step)


class Around(Plain):
    """An optimizer around another, whose states it shows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        del self.__dict__["state"]


class Idle(Plain):
    def update(self, group: dict[str, Any], param: Any, step: int) -> None: ...


class Fails(Plain):
    def begin(self, params: list[Any]) -> None:
        raise ValueError("no shards")


TRAPS: dict[str, tuple[Make, Grade, str]] = {
    "a sum over all": (ProdigyLike, Grade.COUPLED, r"param_groups\[0\]\['d_numerator'\].* \(step 1\)"),
    "a sum that starts late": (SilentProdigy, Grade.COUPLED, "step 3"),
    "above a norm": (Clips, Grade.COUPLED, r"weights of .*gradients of 1000, step 1\)"),
    "after five steps": (Delayed, Grade.ELEMENTWISE, ""),
    "after five steps, coupled": (DelayedCoupled, Grade.COUPLED, "step 1"),
    "at step 7": (Seventh, Grade.COUPLED, "weights of .*step 7"),
    "at step 40 of a group": (lambda params: AtStep(params, interval=40), Grade.COUPLED, "weights of .*step 40"),
    "by torch's generator": (Noisy, Grade.COUPLED, "random numbers .*step 1"),
    "by Python's generator, without use": (RarelyNoisy, Grade.COUPLED, "random numbers"),
    "by a generator of its own": (OwnGenerator, Grade.COUPLED, "generator, another|weights"),
    "a seed of each step": (Seeded, Grade.ELEMENTWISE, ""),
    "by order": (Order, Grade.COUPLED, "weights of"),
    "in states only": (Hidden, Grade.COUPLED, r"state\['seen'\] of a parameter of shape"),
    "a counter in the first state": (Mirrors, Grade.ELEMENTWISE, ""),
    "elements of a parameter": (Normalizes, Grade.SEPARABLE, "weights of flat parts"),
    "a matrix for each vector": (Outer, Grade.SEPARABLE, r"state\['outer'\] .* has shape \(64, 64\)"),
    "around another": (Around, Grade.COUPLED, "no `state` of its own"),
    "nothing moves": (Idle, Grade.UNPROVEN, "no weight of shape"),
    "an error": (Fails, Grade.UNPROVEN, "fails on tiny parameters .*no shards"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name: str) -> None:
    make, expected, told = TRAPS[name]
    found = verdict(make)
    assert found.grade is expected, found.describe()
    if told:
        assert re.search(told, found.reason), found.reason
    assert found.may_walk == (expected in (Grade.ELEMENTWISE, Grade.SEPARABLE))


class InPhases(Plain):
    """Draws for all parameters before it changes the first: no order of units has the same bits."""

    def begin(self, params: list[Any]) -> None:
        for param in params:
            self.state[param]["noise"] = torch.rand((), dtype=torch.float32, device="cpu")
        for param in params:
            param.grad.mul_(self.state[param]["noise"] + torch.rand((), dtype=torch.float32, device="cpu"))


class DrawsLate(Noisy):
    def update(self, group: dict[str, Any], param: Any, step: int) -> None:
        (Noisy if step > 11 else Plain).update(self, group, param, step)


@pytest.mark.parametrize(
    ("make", "in_order"), [(Noisy, True), (DrawsLate, True), (InPhases, False), (OwnGenerator, False), (Clips, False)]
)
def test_units_in_the_order_of_groups(make: Make, in_order: bool) -> None:
    found = verdict(make)
    assert found.grade is Grade.COUPLED and found.in_order == in_order and not found.may_walk
    assert found.steps >= 16 or not in_order


def test_numbers_that_count_groups() -> None:
    two = grade(CountsGroups([{"params": params_of((6, 4)), "kind": "a"}, {"params": params_of((6, 4)), "kind": "b"}]))
    assert two.grade is Grade.COUPLED and "count" in two.reason


OF_TORCH: dict[str, tuple[Make, Grade]] = {
    "Adadelta": (lambda params: torch.optim.Adadelta(params), Grade.ELEMENTWISE),
    "Adafactor": (lambda params: torch.optim.Adafactor(params), Grade.SEPARABLE),
    "Adagrad": (lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.1), Grade.ELEMENTWISE),
    "Adam": (lambda params: torch.optim.Adam(params, amsgrad=True, foreach=False), Grade.ELEMENTWISE),
    "Adamax": (lambda params: torch.optim.Adamax(params), Grade.ELEMENTWISE),
    "AdamW": (lambda params: torch.optim.AdamW(params), Grade.ELEMENTWISE),
    "AdamW foreach": (lambda params: torch.optim.AdamW(params, foreach=True), Grade.ELEMENTWISE),
    # Fused loops round the last elements of a tensor otherwise than those before.
    "AdamW fused": (lambda params: torch.optim.AdamW(params, fused=True), Grade.SEPARABLE),
    "ASGD": (lambda params: torch.optim.ASGD(params), Grade.ELEMENTWISE),
    "LBFGS": (lambda params: torch.optim.LBFGS(params), Grade.COUPLED),
    "NAdam": (lambda params: torch.optim.NAdam(params), Grade.ELEMENTWISE),
    "RAdam": (lambda params: torch.optim.RAdam(params), Grade.ELEMENTWISE),
    "RMSprop": (lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True), Grade.ELEMENTWISE),
    "Rprop": (lambda params: torch.optim.Rprop(params), Grade.ELEMENTWISE),
    "SGD": (lambda params: torch.optim.SGD(params, momentum=0.9, nesterov=True), Grade.ELEMENTWISE),
    "SGD foreach": (lambda params: torch.optim.SGD(params, momentum=0.9, foreach=True), Grade.ELEMENTWISE),
    "SGD fused": (lambda params: torch.optim.SGD(params, momentum=0.9, fused=True), Grade.SEPARABLE),
    "SparseAdam": (lambda params: torch.optim.SparseAdam(params), Grade.COUPLED),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_optimizers_of_torch(name: str) -> None:
    make, expected = OF_TORCH[name]
    found = verdict(make, seconds=20.0)  # Rprop's period takes 1 s, and ten times that beside other processes
    assert found.grade is expected and not found.beyond, found.describe()


def test_muon() -> None:
    found = verdict(lambda params: torch.optim.Muon(params), shapes=((6, 4), (3, 8)))
    assert found.grade is Grade.SEPARABLE and "2D matrix" in found.reason


def test_every_class_of_torch_has_a_verdict() -> None:
    classes = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    assert classes - {name.partition(" ")[0] for name in OF_TORCH} == {"Optimizer", "Muon"}


def test_periods_that_do_not_fit_are_said() -> None:
    found = verdict(lambda params: Plain(params, warmup=30, interval=10**7), seconds=1.0)
    assert found.grade is Grade.SEPARABLE and found.steps >= 32 and "within its periods" in found.reason
    assert found.beyond == "param_groups[0]['interval'] = 10000000"
    assert f"unproven beyond step {found.steps} (param_groups[0]['interval'] = 10000000)" in found.describe()


def test_periods_are_whole_numbers_of_groups_attributes_and_the_class() -> None:
    class Numbers(Plain):
        interval = 12

        def __init__(self, params: Any) -> None:
            super().__init__(params, betas=(0.9, 30), flag=True, gap=4)
            self.inner = {"delay": [7, 1]}

    found = dict(periods_of(Numbers(params_of((3,))), Numbers))
    assert found == {
        4: "param_groups[0]['gap']",
        7: "inner['delay'][0]",
        12: "interval",
        30: "param_groups[0]['betas']",
    }


def test_a_verdict_is_made_once_for_a_class_and_its_groups() -> None:
    made: list[int] = []

    class Counted(Plain):
        def begin(self, params: list[Any]) -> None:
            made.append(1)

    first = verdict(Counted)
    count = len(made)
    assert verdict(Counted) is first and len(made) == count
    assert verdict(lambda params: Counted(params, momentum=0.5)) is not first and len(made) > count


def test_the_programs_object_and_its_random_numbers_stay() -> None:
    params = params_of((6, 4), (5,))
    optimizer = Noisy(params, interval=9)
    torch.manual_seed(0)
    expected = torch.rand(3, dtype=torch.float32, device="cpu")
    torch.manual_seed(0)
    grade(optimizer, seconds=1.0)
    assert torch.equal(torch.rand(3, dtype=torch.float32, device="cpu"), expected)
    assert not optimizer.state and not any(param.any() for param in params)
    assert optimizer.param_groups[0]["params"][0] is params[0]


def test_a_scheduler_that_begins_at_rate_0() -> None:
    assert verdict(lambda params: Plain(params, lr=0.0)).grade is Grade.ELEMENTWISE


def test_groups_of_a_kind_are_tried_once_and_lists_of_parameters_are_cut() -> None:
    class Named(Plain):
        def update(self, group: dict[str, Any], param: Any, step: int) -> None:
            names = dict(zip(map(id, group["params"]), group["names"], strict=True))
            assert names[id(param)].startswith("layer")
            super().update(group, param, step)

    groups = [
        {"params": params_of(*[(6, 4)] * 9), "names": [f"layer{number}" for number in range(9)], "lr": 0.1 / (at + 1)}
        for at in range(50)
    ]
    assert grade(Named(groups)).grade is Grade.ELEMENTWISE


# In a run


def units_of(twin: Twin, numbers: Any) -> list[dict[int, tuple[Tensor, Tensor, Any]]]:
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = {0: (6, 4), 1: (5,)}
    values = {
        at: torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for at, shape in shapes.items()
    }
    with twin.step(numbers) as walk:
        states = walk.unit({at: (value, value.clone(), None) for at, value in values.items()})
    return [{at: (values[at], values[at].cos(), states[at])} for at in shapes]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (torch.optim.AdamW, ""),
        (torch.optim.Adafactor, ""),
        (DelayedCoupled, r"state\['queue'\]\[1\] of a parameter of shape \(6, 4\)"),
        (Clips, ""),
        (Mirrors, ""),
        (Order, "the weights of a parameter of shape"),
    ],
)
def test_two_units_of_a_run_are_compared(make: Make, told: str) -> None:
    params = params_of((6, 4), (5,))
    twin = Twin(make(params), params)
    numbers = twin.capture()
    one, other = units_of(twin, numbers)
    before = {at: value.clone() for unit in (one, other) for at, (value, _, _) in unit.items()}
    found = compare_units(twin, numbers, one, other)
    assert re.search(told, found) and bool(told) == bool(found), found
    for unit in (one, other):
        for at, (value, _, _) in unit.items():
            assert torch.equal(value, before[at])
