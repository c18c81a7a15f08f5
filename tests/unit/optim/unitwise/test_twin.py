"""A twin steps units one after the other with the bits of one joint step, and refuses what it cannot step so."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import zero_offload as zo
from zero_offload.optim.unitwise.twin import Twin

SHAPES = [(16, 8), (8, 4), (4,), (4, 12)]
UNITS = [[2, 3], [0], [1]]

Make = Callable[[Any], Any]


def values(step: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(step)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in SHAPES]


class Run:
    """An optimizer of the program, whose parameters have no memory, stepped by its twin."""

    def __init__(self, make: Make) -> None:
        self.params = [nn.Parameter(torch.empty(shape, dtype=torch.float32, device="cpu")) for shape in SHAPES]
        self.optimizer = make(self.params)
        for param in self.params:
            param.data = torch.zeros(1, dtype=torch.float32, device="cpu").expand(param.shape)
        self.twin = Twin(self.optimizer, self.params)
        self.values, self.states = values(0), [None] * len(SHAPES)

    def step(self, number: int, units: Sequence[Sequence[int]] = UNITS) -> None:
        grads = values(number)
        with self.twin.step(self.twin.capture()) as walk:
            for unit in units:
                found = walk.unit({at: (self.values[at], grads[at], self.states[at]) for at in unit})
                for at, state in found.items():
                    self.states[at] = copy.deepcopy(state)
        self.twin.publish(walk)


def plain(make: Make) -> tuple[list[nn.Parameter], Any]:
    params = [nn.Parameter(value) for value in values(0)]
    return params, make(params)


def give_grads(params: Sequence[nn.Parameter], step: int) -> None:
    for param, grad in zip(params, values(step), strict=True):
        param.grad = grad


def numbers_of(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def check_same_bits(make: Make, steps: int = 5) -> Run:
    run = Run(make)
    params, optimizer = plain(make)
    for step in range(1, steps + 1):
        give_grads(params, step)
        optimizer.step()
        run.step(step)
        for param, ours in zip(params, run.values, strict=True):
            assert torch.equal(param, ours)
    assert repr(numbers_of(optimizer)) == repr(numbers_of(run.optimizer))
    return run


class Sgd(torch.optim.Optimizer):
    """The least optimizer, for classes of these tests to add what is difficult."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.begin()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(group, param)

    def begin(self) -> None: ...

    def update(self, group: dict[str, Any], param: Any) -> None:
        param.sub_(param.grad, alpha=group["lr"])


OPTIONS: dict[str, Make] = {
    "Adadelta": lambda params: torch.optim.Adadelta(params),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
    "Adagrad": lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.3),
    "Adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW, lr is a tensor": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(0.01, dtype=torch.float64, device="cpu"), foreach=False
    ),
    "Adamax": lambda params: torch.optim.Adamax(params),
    "ASGD": lambda params: torch.optim.ASGD(params),
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2]),
    "NAdam": lambda params: torch.optim.NAdam(params),
    "RAdam": lambda params: torch.optim.RAdam(params),
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True),
    "Rprop": lambda params: torch.optim.Rprop(params),
    "SGD": lambda params: torch.optim.SGD(params, momentum=0.9, nesterov=True),
    "SGD, groups": lambda params: torch.optim.SGD(
        [{"params": params[:1], "lr": 0.2}, {"params": params[1:]}], lr=0.1, momentum=0.5, foreach=True
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_optimizers_of_torch_have_the_bits_of_a_joint_step(name: str) -> None:
    if name == "Muon":
        run, (params, optimizer) = Run(OPTIONS[name]), plain(OPTIONS[name])
        for step in range(1, 4):
            give_grads(params, step)
            optimizer.step()
            run.step(step, [[1], [0, 3]])
        assert all(torch.equal(params[at], run.values[at]) for at in (0, 1, 3))
    else:
        check_same_bits(OPTIONS[name])


def test_every_class_of_torch_is_tested_or_refused() -> None:
    classes = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    tested = {name.partition(" ")[0].strip(",") for name in OPTIONS}
    assert classes - tested == {"Optimizer", "LBFGS", "SparseAdam"}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda params: torch.optim.LBFGS(params), "torch.optim.lbfgs.LBFGS .* its step needs closure"),
        (lambda params: torch.optim.SparseAdam(params), "SparseAdam .* sparse gradients alone"),
    ],
)
def test_steps_that_compute_gradients_are_refused(make: Make, told: str) -> None:
    with pytest.raises(zo.ConfigError, match=told):
        Run(make)


# Numbers that are shared


class Counters:
    def __init__(self) -> None:
        self.steps = 0


class Counts(Sgd):
    """Numbers in a group, attributes, a container, an object, and in `state` under a text; some made late."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.state: Any
        self.count, self.inner, self.counters = 0, {"history": [1]}, Counters()
        self.total = torch.zeros((), dtype=torch.float64, device="cpu")
        self.state["shared"] = {"count": 0}

    def begin(self) -> None:
        self.count += 1
        self.counters.steps += 1
        self.total += 1
        self.state["shared"]["count"] += 1
        self.inner["history"] = [*self.inner["history"][-2:], self.count]
        self.late = {**getattr(self, "late", {}), "text": "x" * self.count, "nan": float("nan")}
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1

    def update(self, group: dict[str, Any], param: Any) -> None:
        factor = self.count + self.counters.steps + sum(self.inner["history"]) + group["k"] + float(self.total)
        param.sub_(param.grad, alpha=0.01 * (factor + self.state["shared"]["count"]))


def test_numbers_count_once_a_step_and_are_published() -> None:
    run = check_same_bits(lambda params: Counts(params))
    optimizer: Counts = run.optimizer
    assert (optimizer.count, optimizer.counters.steps, float(optimizer.total)) == (5, 5, 5.0)
    assert optimizer.inner == {"history": [3, 4, 5]} and optimizer.late["text"] == "xxxxx"
    assert optimizer.state["shared"] == {"count": 5} and optimizer.param_groups[0]["k"] == 5


def test_the_programs_object_is_not_touched_before_it_is_told() -> None:
    run = Run(lambda params: Counts(params))
    with run.twin.step(run.twin.capture()) as walk:
        walk.unit({0: (run.values[0], values(1)[0], None)})
        assert run.optimizer.count == 0
    assert run.optimizer.count == 0 and run.optimizer.inner == {"history": [1]}
    run.twin.publish(walk)
    assert run.optimizer.count == 1 and run.optimizer.inner == {"history": [1, 1]}


def test_hyperparameters_are_those_of_the_capture() -> None:
    run = Run(lambda params: Sgd(params))
    numbers = run.twin.capture()
    run.optimizer.param_groups[0]["lr"] = 1000.0
    before, grad = run.values[0].clone(), values(1)[0]
    with run.twin.step(numbers) as walk:
        walk.unit({0: (run.values[0], grad, None)})
        run.optimizer.param_groups[0]["lr"] = 5.0
    run.twin.publish(walk)
    assert torch.equal(run.values[0], torch.sub(before, grad, alpha=0.1))
    assert run.optimizer.param_groups[0]["lr"] == 5.0 and not walk.changed
    with run.twin.step(run.twin.capture()) as walk:
        walk.unit({0: (run.values[0], grad, None)})
    assert torch.equal(run.values[0], torch.sub(torch.sub(before, grad, alpha=0.1), grad, alpha=5.0))


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_schedulers_and_new_groups_reach_the_next_step() -> None:
    def make(params: Any) -> Any:
        return torch.optim.SGD(params[:2], lr=0.5, momentum=0.9)

    run, (params, optimizer) = Run(make), plain(make)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, run.optimizer)]
    for step in range(1, 5):
        if step == 3:
            optimizer.add_param_group({"params": params[2:], "lr": 0.25})
            run.optimizer.add_param_group({"params": run.params[2:], "lr": 0.25})
        give_grads(params, step)
        optimizer.step()
        run.step(step, UNITS if step >= 3 else [[1], [0]])
        for scheduler in schedulers:
            scheduler.step()
        assert all(map(torch.equal, params, run.values))


# Traps


class GlobalNorm(Sgd):
    """A sum over all parameters in a group, as Prodigy has it."""

    def begin(self) -> None:
        for group in self.param_groups:
            group["norm"] = float(sum(param.grad.square().sum() for param in group["params"]))


class Resets(Sgd):
    """Couples by an attribute that only some units change."""

    largest = 0.0

    def update(self, group: dict[str, Any], param: Any) -> None:
        self.largest = max(self.largest, float(param.numel()))
        super().update(group, param)


@pytest.mark.parametrize(
    ("kind", "told"), [(GlobalNorm, r"in param_groups\[0\]\['norm'\], another"), (Resets, "in largest, another")]
)
def test_units_that_leave_different_numbers_are_refused_by_name(kind: Any, told: str) -> None:
    run = Run(lambda params: kind(params))
    with pytest.raises(
        zo.ConfigError, match=f"{kind.__name__} cannot be stepped unit by unit: one unit leaves .*{told}"
    ):
        run.step(1)


class Drops(Sgd):
    """Drops gradients, keeps views of parameters by their addresses, and puts other memory under parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.views: dict[Any, Any] = {}
        self.inverse: dict[int, Any] = {}

    def update(self, group: dict[str, Any], param: Any) -> None:
        grad, param.grad = param.grad, None
        self.views[param] = [param.view(-1)]
        self.inverse[param.data_ptr()] = (param, 0)
        owner, _ = self.inverse[self.views[param][0].data_ptr()]
        momentum = self.state[owner].setdefault("momentum", torch.zeros_like(param))
        momentum.mul_(0.5).add_(grad.mul_(2))
        param.data = param.data - group["lr"] * momentum


def test_dropped_gradients_views_and_other_memory() -> None:
    run = check_same_bits(lambda params: Drops(params))
    assert run.optimizer.views == {} and run.optimizer.inverse == {}


class Beside(Sgd):
    """Keeps momentum outside of `state`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.momentum: dict[Any, Any] = {}

    def update(self, group: dict[str, Any], param: Any) -> None:
        momentum = self.momentum.setdefault(param, torch.zeros_like(param))
        param.sub_(momentum.add_(param.grad), alpha=group["lr"])


class ById(Beside):
    def update(self, group: dict[str, Any], param: Any) -> None:
        momentum = self.momentum.setdefault(id(param), torch.zeros_like(param))
        param.sub_(momentum.add_(param.grad), alpha=group["lr"])


class Outside(Sgd):
    """Makes states of parameters that have left its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.all_params = list(params)

    def begin(self) -> None:
        for param in self.all_params:
            self.state[param]["step"] = self.state[param].get("step", 0) + 1


class Narrows(Sgd):
    def update(self, group: dict[str, Any], param: Any) -> None:
        param.data = param.data.double()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Beside, "keeps tensors of parameters beside `state`"),
        (ById, r"in momentum\[\d+\], another"),
        (Outside, "makes states of parameters that are not in its groups"),
        (Narrows, "torch.float32 one of .* torch.float64"),
    ],
)
def test_what_a_row_would_not_have_is_refused(kind: Any, told: str) -> None:
    run = Run(lambda params: kind(params))
    with pytest.raises(zo.ConfigError, match=f"{kind.__name__} cannot be stepped unit by unit: .*{told}"):
        run.step(1)


class CountsBeside(Sgd):
    """Numbers of parameters that no state has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counts = {param: {"steps": 0} for param in params}
        self.all_params = list(params)
        self.names = {param: f"name {number}" for number, param in enumerate(params)}

    def update(self, group: dict[str, Any], param: Any) -> None:
        assert self.names[param].startswith("name")
        if param.dim() == 1:
            self.counts[param]["steps"] += 1
        super().update(group, param)


def test_numbers_of_parameters_beside_their_states_are_refused_once_they_change() -> None:
    run = Run(lambda params: CountsBeside(params))
    run.step(1, [[0], [1, 3]])
    with pytest.raises(zo.ConfigError, match=r"keeps numbers of parameters beside `state` \(of a .* shape \(4,\)\)"):
        run.step(2, [[0], [1, 2, 3]])


class MadeBeside(Beside):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.momentum = {param: torch.zeros_like(param) for param in params}


def test_tensors_of_parameters_beside_their_states_are_refused() -> None:
    with pytest.raises(zo.ConfigError, match="MadeBeside .*keeps tensors of parameters beside `state`"):
        Run(lambda params: MadeBeside(params))


class Holds(Sgd):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = torch.optim.SGD(params)


class HoldsModel(Sgd):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.model = nn.Linear(2, 2)


class Around(Sgd):
    """Shows the states of another optimizer as its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = [torch.optim.SGD(params)]
        del self.__dict__["state"]


class Captures(Sgd):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.function = lambda: self


class Locks(Sgd):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Holds, "its base is a SGD"),
        (HoldsModel, "its model is a Linear"),
        (Around, "it has no `state` of its own"),
        (Captures, "its function is a function that holds the optimizer"),
        (Locks, "its lock has something that cannot be copied"),
    ],
)
def test_attributes_that_no_copy_can_have_are_refused(kind: Any, told: str) -> None:
    with pytest.raises(zo.ConfigError, match=f"{kind.__name__} cannot be stepped unit by unit: {told}"):
        Run(lambda params: kind(params))


class Seeds(Sgd):
    """Numbers its parameters in the constructor, as APOLLO does, and keeps bound methods of itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for number, param in enumerate(self.param_groups[0]["params"]):
            self.state[param]["seed"] = number
            self.state[param]["sum"] = torch.full_like(param, 0.5)
        self.function = self.scaled

    def scaled(self, param: Any) -> Any:
        return param.grad * self.param_groups[0]["lr"] * self.state[param]["seed"]

    def update(self, group: dict[str, Any], param: Any) -> None:
        self.state[param]["sum"] += param.grad
        param.sub_(self.function(param) + self.state[param]["sum"])


def test_states_of_the_constructor_are_a_parameters_first() -> None:
    run = check_same_bits(lambda params: Seeds(params))
    found = run.twin.first_state(3)
    assert found["seed"] == 3 and torch.equal(found["sum"], torch.full((4, 12), 0.5, dtype=torch.float32, device="cpu"))
    assert run.twin.first_state(3)["sum"] is not found["sum"]


def test_hooks_run_for_no_unit() -> None:
    seen: list[str] = []
    run = Run(lambda params: torch.optim.AdamW(params))
    run.optimizer.register_step_pre_hook(lambda *_: seen.append("own"))
    run.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append("global"))
    try:
        run.step(1)
        Run(lambda params: torch.optim.AdamW(params)).step(1)
    finally:
        handle.remove()
    assert seen == []


def test_parameters_without_gradients_stay() -> None:
    run = Run(lambda params: torch.optim.AdamW(params))
    before = run.values[0].clone()
    with run.twin.step(run.twin.capture()) as walk:
        found = walk.unit({0: (run.values[0], None, None), 1: (run.values[1], values(1)[1], None)})
    assert torch.equal(run.values[0], before) and found[0] is None and found[1]["step"] == 1


def test_an_error_in_a_step_leaves_the_twin_as_it_was() -> None:
    run = Run(lambda params: Counts(params))
    with pytest.raises(RuntimeError, match="size"), run.twin.step(run.twin.capture()) as walk:
        walk.unit({0: (run.values[0], values(1)[0], {"bad": 1}), 1: (values(1)[1], values(1)[0], None)})
    check = Run(lambda params: Counts(params))
    run.values, run.states = values(0), [None] * len(SHAPES)
    for each in (run, check):
        each.step(1)
    assert all(map(torch.equal, run.values, check.values)) and run.optimizer.count == 1


def test_marks_of_parameters_are_seen() -> None:
    class Marked(Sgd):
        def update(self, group: dict[str, Any], param: Any) -> None:
            param.sub_(param.grad, alpha=param.scale)

    def make(params: Any) -> Any:
        for number, param in enumerate(params):
            param.scale = float(number)
        return Marked(params)

    check_same_bits(make)


class Named(Sgd):
    def update(self, group: dict[str, Any], param: Any) -> None:
        at = next(at for at, each in enumerate(group["params"]) if each is param)
        assert len(group["params"]) == len(group["names"])
        param.sub_(param.grad, alpha=len(group["names"][at]) * group["scales"][0])


def test_names_go_with_the_parameters_of_a_group() -> None:
    names = ["a", "bb", "ccc", "dddd"]
    run = check_same_bits(lambda params: Named([{"params": params, "names": list(names), "scales": [0.1, 2, 3, 4]}]))
    assert run.optimizer.param_groups[0]["names"] == names
    named = check_same_bits(lambda params: torch.optim.AdamW(zip(names, params, strict=True)))
    assert named.optimizer.param_groups[0]["param_names"] == names


class Mirrors(Sgd):
    """Keeps a counter of the group in the state of its first parameter too: a new tensor, or the same."""

    def __init__(self, params: Any, *, in_place: bool) -> None:
        super().__init__(params)
        self.in_place = in_place
        if in_place:
            self.param_groups[0]["count"] = torch.zeros((), dtype=torch.float32, device="cpu")

    def begin(self) -> None:
        group = self.param_groups[0]
        if self.in_place:
            group["count"] += 1
        else:
            group["count"] = group.get("count", torch.zeros((), dtype=torch.float32, device="cpu")) + 1
        self.state[group["params"][0]]["count"] = group["count"]

    def update(self, group: dict[str, Any], param: Any) -> None:
        param.sub_(param.grad, alpha=0.1 * float(group["count"]))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_counter_that_a_state_has_too(in_place: bool) -> None:
    run = check_same_bits(lambda params: Mirrors(params, in_place=in_place))
    assert [None if state is None else state["count"].item() for state in run.states] == [5.0, 5.0, 5.0, None]


def test_parameters_of_other_models_are_refused() -> None:
    other = nn.Parameter(torch.zeros(3, dtype=torch.float32, device="cpu"))
    with pytest.raises(zo.ConfigError, match=r"SGD has a parameter of shape \(3,\) that is not of this model"):
        Run(lambda params: torch.optim.SGD([*params, other]))


def test_the_programs_object_needs_no_memory_for_values() -> None:
    run = Run(lambda params: torch.optim.AdamW(params))
    assert all(param.untyped_storage().nbytes() == 4 for param in run.params)
    run.step(1)
    assert not run.optimizer.state
