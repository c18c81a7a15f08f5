"""`zo.unitwise`: an optimizer of others steps offloaded parameters with the bits of the plain one, on every tier."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.disk import close_broken, runtime
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.reference import clip_factor, global_norm, nearest_bf16, read_masters
from zero_offload.optim.unitwise import grades

Groups = list[dict[str, Any]]
MAKERS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "Adadelta": lambda groups: torch.optim.Adadelta(groups, 0.1),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, 1e-2),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, 1e-2),
    "Adamax": lambda groups: torch.optim.Adamax(groups, 1e-2),
    "AdamW": lambda groups: torch.optim.AdamW(groups, 1e-2, amsgrad=True),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, 1e-2, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, 1e-2, fused=True),
    "ASGD": lambda groups: torch.optim.ASGD(groups, 1e-2),
    "NAdam": lambda groups: torch.optim.NAdam(groups, 1e-2),
    "RAdam": lambda groups: torch.optim.RAdam(groups, 1e-2),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, 1e-3, momentum=0.9, centered=True),
    "Rprop": lambda groups: torch.optim.Rprop(groups, 1e-3),
    "SGD": lambda groups: torch.optim.SGD(groups, 0.1),
    "SGD momentum": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9, nesterov=True),
}
TIERS: dict[str, dict[str, Any]] = {
    "memory": {"params": "cpu", "optimizer": "cpu"},
    "nvme": {"params": "nvme", "optimizer": "nvme", "grads": "nvme"},
    "split": {"params": "cpu", "optimizer": {"cpu": 0.5, "nvme": 0.5}},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def groups_of(params: list[nn.Parameter]) -> Groups:
    """Matrices in one group, the rest in another: two in each unit."""
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def open_run(name: str, nvme: Path, tiers: str, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(TinyLM)
    choices = {**TIERS[tiers], "existing": "resume", "precision": "fp32", **settings}
    zo.offload(model, zo.OffloadConfig(nvme=nvme, **choices))
    return model, zo.unitwise(MAKERS[name](groups_of([*model.parameters()])))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    begin: int,
    end: int,
    *,
    micro_batches: int = 1,
    max_norm: float | None = None,
) -> list[float]:
    losses = []
    for step in range(begin, end):
        for part in range(micro_batches):
            loss = model(tokens_of(step * micro_batches + part))
            loss.backward()
            losses.append(loss.item())
        if max_norm is not None:
            zo.clip_grad_norm_(model, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer)
    return losses


def plain_losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Those of a model that is not offloaded."""
    losses = []
    for step in range(steps):
        loss = model(tokens_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Written:
    """The same training, written out on plain tensors. The plain optimizer steps fp32 masters, from which a model of
    `precision` is rounded."""

    def __init__(self, name: str, precision: str) -> None:
        self.precision, self.model = precision, build(TinyLM)
        self.masters = [nn.Parameter(param.detach().clone()) for param in self.model.parameters()]
        self.model.to(DTYPES[precision])
        self.optimizer = MAKERS[name](groups_of(self.masters))
        self.round()

    def round(self) -> None:
        for param, master in zip(self.model.parameters(), self.masters, strict=True):
            rounded = nearest_bf16(master) if self.precision == "bf16" else master.detach().to(param.dtype)
            param.data.copy_(rounded)

    def train(self, begin: int, end: int, *, micro_batches: int = 1, max_norm: float | None = None) -> list[float]:
        losses = []
        for step in range(begin, end):
            sums: dict[str, Tensor] = {}
            for part in range(micro_batches):
                loss = self.model(tokens_of(step * micro_batches + part))
                loss.backward()
                losses.append(loss.item())
                for key, param in self.model.named_parameters():
                    assert param.grad is not None
                    grad, param.grad = param.grad, None
                    if part or self.precision == "fp32":
                        sums[key] = sums[key].float() + grad.float() if part else grad
                    else:
                        sums[key] = grad
            factor = 1.0 if max_norm is None else clip_factor(global_norm(self.model, sums), max_norm)
            for master, grad in zip(self.masters, sums.values(), strict=True):
                master.grad = grad.float().mul_(factor)
            self.optimizer.step()
            self.round()
        return losses

    def named(self) -> dict[str, Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        return {name: master.detach() for name, master in zip(names, self.masters, strict=True)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("name", MAKERS)
def test_the_same_bits_as_on_plain_parameters(name: str, tiers: str, tmp_path: Path) -> None:
    written = Written(name, "fp32")
    expected = written.train(0, 4)
    model, optimizer = open_run(name, tmp_path, tiers)
    assert train(model, optimizer, 0, 4) == expected
    assert_same(read_masters(model), written.named())
    states = optimizer.state_dict()["state"]
    for key, entry in written.optimizer.state_dict()["state"].items():
        assert states.get(key, {}).keys() >= {each for each in entry if entry[each] is not None}
        assert all(torch.equal(states[key][each], entry[each]) for each in states.get(key, {}))
    zo.close(model)


@pytest.mark.parametrize(
    ("name", "precision", "tiers"),
    [(*pair, tier) for pair, tier in zip(itertools.product(MAKERS, ["bf16", "fp16"]), itertools.cycle(TIERS))],
)
def test_16_bits_are_a_loop_over_fp32_masters(name: str, precision: str, tiers: str, tmp_path: Path) -> None:
    written = Written(name, precision)
    expected = written.train(0, 3, micro_batches=2, max_norm=0.5)
    model, optimizer = open_run(name, tmp_path, tiers, precision=precision)
    assert train(model, optimizer, 0, 3, micro_batches=2, max_norm=0.5) == expected
    assert_same(read_masters(model), written.named())
    zo.close(model)


@pytest.mark.parametrize(("name", "precision"), [*zip(MAKERS, itertools.cycle(["fp32", "bf16", "fp16"]))])
def test_goes_on_from_its_files_and_from_a_checkpoint(name: str, precision: str, tmp_path: Path) -> None:
    model, optimizer = open_run(name, tmp_path / "whole", "nvme", precision=precision)
    expected = train(model, optimizer, 0, 4)
    masters = read_masters(model)
    zo.close(model)
    model, optimizer = open_run(name, tmp_path / "run", "nvme", precision=precision)
    assert train(model, optimizer, 0, 2) == expected[:2]
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    zo.close(model)
    for tiers in ("split", "memory"):
        model, optimizer = open_run(name, tmp_path / tiers, tiers, precision=precision)
        zo.load_checkpoint(model, optimizer, tmp_path / "saved")
        assert train(model, optimizer, 2, 4) == expected[2:]
        assert_same(read_masters(model), masters)
        zo.close(model)
    model, optimizer = open_run(name, tmp_path / "run", "memory", precision=precision)
    assert zo.resume(model, optimizer) is not None
    assert train(model, optimizer, 2, 4) == expected[2:]
    assert_same(read_masters(model), masters)
    zo.close(model)


class Remembering(torch.optim.Optimizer):
    """Plain SGD that keeps the last gradients, one more in each step, and counts steps in its groups and itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "growth": float("inf")})
        self.total = {"steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.total["steps"] += 1
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    seen = self.state[param].setdefault("seen", [])
                    seen.append(param.grad.clone())
                    param.sub_(torch.stack(seen).mean(0), alpha=group["lr"] / group["k"])


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("dim", [32, WIDE])
def test_states_may_grow(tiers: str, dim: int, tmp_path: Path) -> None:
    """A chunk has a part of the rows, whose room grows with each step; a generation has them as they are."""
    plain = build(lambda: TinyLM(dim, 2))
    expected, losses = plain_losses(plain, Remembering(plain.parameters()), 5), list[float]()
    for begin, end in ((0, 2), (2, 5)):
        model = build(lambda: TinyLM(dim, 2))
        config = zo.OffloadConfig(nvme=tmp_path, existing="resume", precision="fp32", **TIERS[tiers])
        zo.offload(model, config)
        optimizer = zo.unitwise(Remembering(model.parameters()))
        zo.resume(model, optimizer)
        losses += train(model, optimizer, begin, end)
        assert optimizer.param_groups[0]["k"] == end and optimizer.param_groups[0]["growth"] == float("inf")
        assert len(optimizer.state[model.norm.weight]["seen"]) == end  # type: ignore[union-attr]
        zo.close(model)
    assert losses == expected
    assert optimizer.total == {"steps": 5}  # type: ignore[attr-defined]


@pytest.mark.parametrize("tiers", TIERS)
def test_states_that_grow_leave_those_of_other_parameters(tiers: str, tmp_path: Path) -> None:
    """One optimizer's rows are laid anew in each step, beside those of another one."""

    def both(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices, rest = (group["params"] for group in groups_of([*model.parameters()]))
        return [Remembering(matrices), torch.optim.SGD(rest, 0.1, momentum=0.9)]

    def steps(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[float]:
        losses = []
        for step in range(4):
            loss = model(tokens_of(step))
            loss.backward()
            for each in reversed(optimizers):
                each.step()
                each.zero_grad()
            losses.append(loss.item())
        return losses

    plain = build(TinyLM)
    expected = steps(plain, both(plain))
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(nvme=tmp_path, precision="fp32", durability="scratch", **TIERS[tiers]))
    assert steps(model, [*map(zo.unitwise, both(model))]) == expected
    zo.close(model)


class Base(ABC, torch.optim.Optimizer):
    """Objects of classes with such a base lie otherwise in memory than those of torch's."""

    @abstractmethod
    def shrink(self, group: dict[str, Any]) -> float: ...

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kind": "shrinking"}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({"rate": 0.5, **param_group})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=self.shrink(group))


class Shrinking(Base):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def shrink(self, group: dict[str, Any]) -> float:
        return float(group["rate"])


def test_a_class_with_bases_of_its_own_keeps_their_methods(tmp_path: Path) -> None:
    plain = build(TinyLM)
    expected = plain_losses(plain, Shrinking(plain.parameters()), 2)
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(nvme=tmp_path, precision="fp32", **TIERS["nvme"]))
    first, *others = model.parameters()
    optimizer = zo.unitwise(Shrinking([first]))
    optimizer.add_param_group({"params": others})
    assert isinstance(optimizer, Shrinking) and [group["rate"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert train(model, optimizer, 0, 2) == expected
    assert optimizer.state_dict()["kind"] == "shrinking"
    zo.close(model)


class Averaged(torch.optim.Optimizer):
    """SGD whose weights are an average between `eval` and `train`, in the way of schedule-free optimizers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": True})

    @torch.no_grad()
    def eval(self) -> None:
        self._move(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def train(self) -> None:
        self._move(True, 1 - 0.9)

    def _move(self, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight)
                group["train_mode"] = mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for param in group["params"]:
                z = self.state[param].setdefault("z", param.clone())
                param.lerp_(z, 1 / group["k"])
                z.sub_(param.grad, alpha=group["lr"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tiers", TIERS)
def test_train_and_eval_walk_over_parameters(tiers: str, precision: str, tmp_path: Path) -> None:
    """A generation holds the mode."""
    written = Written("SGD", precision)
    written.optimizer = Averaged(groups_of(written.masters))
    expected = written.train(0, 2)
    written.optimizer.eval()
    averages = {name: value.clone() for name, value in written.named().items()}
    written.optimizer.train()
    written.round()
    expected += written.train(2, 4)

    def opened() -> tuple[nn.Module, Any]:
        model = build(TinyLM)
        zo.offload(model, zo.OffloadConfig(nvme=tmp_path, existing="resume", precision=precision, **TIERS[tiers]))
        optimizer = zo.unitwise(Averaged(groups_of([*model.parameters()])))
        zo.resume(model, optimizer)
        return model, optimizer

    model, optimizer = opened()
    losses = train(model, optimizer, 0, 2)
    optimizer.eval()
    optimizer.eval()
    assert_same(read_masters(model), averages)
    zo.commit(model, optimizer)
    zo.close(model)
    model, optimizer = opened()
    assert optimizer.param_groups[0]["train_mode"] is False
    assert_same(read_masters(model), averages)
    optimizer.train()
    assert losses + train(model, optimizer, 2, 4) == expected
    assert_same(read_masters(model), written.named())
    zo.close(model)


class Shifted(nn.Module):
    """Parameters whose gradient is one tensor, in two sections."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(600, 600)
        self.first, self.second = (nn.Parameter(torch.ones(600, 600)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) + self.first + self.second).square().mean()


class Spending(torch.optim.SGD):
    """Changes gradients in place before it steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (each for group in self.param_groups for each in group["params"]):
            param.grad.mul_(param.abs().mean()).add_(param)
        super().step()


@pytest.mark.parametrize("tiers", TIERS)
def test_an_optimizer_may_change_gradients(tiers: str, tmp_path: Path) -> None:
    """They are no copies where they rest in memory, and a parameter's change is not another's."""
    x, plain = torch.randn(600, 600), build(Shifted)
    theirs = Spending(plain.parameters(), 0.1)
    model = build(Shifted)
    zo.offload(model, zo.OffloadConfig(nvme=tmp_path, precision="fp32", durability="scratch", **TIERS[tiers]))
    ours = zo.unitwise(Spending(model.parameters(), 0.1))
    for _ in range(3):
        for each, optimizer in ((plain, theirs), (model, ours)):
            each(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(read_masters(model), {name: param.detach() for name, param in plain.named_parameters()})
    zo.close(model)


class Normalized(torch.optim.Optimizer):
    """Momentum, whose step is divided by the norm of all gradients together: at once, or in each step of a period."""

    def __init__(self, params: Any, lr: float = 0.1, gap: int = 1) -> None:
        super().__init__(params, {"lr": lr})
        self.gap = [gap] if gap > 1 else []
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        params = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in params]).norm()
        is_joint = not self.gap or self.count % self.gap[0] == 0
        for param in params:
            state = self.state[param].setdefault("momentum", torch.zeros_like(param))
            state.mul_(0.9).add_(param.grad)
            param.sub_(state, alpha=self.param_groups[0]["lr"] / (float(norm) if is_joint else 1.0))


@pytest.mark.parametrize("tiers", TIERS)
def test_coupled_parameters_are_refused_or_step_all_together(tiers: str, tmp_path: Path) -> None:
    plain = build(TinyLM)
    expected, losses = plain_losses(plain, Normalized(plain.parameters()), 4), list[float]()
    for begin, end in ((0, 2), (2, 4)):
        model = build(TinyLM)
        config = zo.OffloadConfig(nvme=tmp_path, existing="resume", precision="fp32", **TIERS[tiers])
        zo.offload(model, config)
        with pytest.raises(zo.ConfigError, match=r"Normalized cannot be stepped unit by unit: coupled: .*units='all'"):
            zo.unitwise(Normalized(model.parameters()))
        optimizer = zo.unitwise(Normalized(model.parameters()), units="all")
        zo.resume(model, optimizer)
        losses += train(model, optimizer, begin, end)
        zo.close(model)
    assert losses == expected


def test_a_period_beyond_the_test_is_compared_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume goes on with the count of steps."""
    monkeypatch.setattr(grades, "SECONDS", 1e-3)
    for begin, end in ((0, 18), (18, 20)):
        model = build(TinyLM)
        zo.offload(model, zo.OffloadConfig(nvme=tmp_path, existing="resume", precision="fp32", **TIERS["nvme"]))
        with pytest.warns(UserWarning, match=r"unproven beyond step \d+ \(gap\[0\] = 21\)"):
            optimizer = zo.unitwise(Normalized(model.parameters(), lr=1e-3, gap=21))
        zo.resume(model, optimizer)
        train(model, optimizer, begin, end)
        if end < 20:
            zo.close(model)
    model(tokens_of(20)).backward()
    with pytest.raises(zo.ConfigError, match=r"step 21 of Normalized: .* two units differ in the weights"):
        optimizer.step()
    close_broken(model)
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(nvme=tmp_path, existing="resume", precision="fp32", **TIERS["nvme"]))
    resumed = zo.resume(model, zo.unitwise(Normalized(model.parameters(), lr=1e-3, gap=21), units="all"))
    assert resumed is not None and resumed.step == 20
    zo.close(model)


def test_a_scheduler_and_a_loss_scaler_go_on_with_it(tmp_path: Path) -> None:
    written = Written("NAdam", "fp32")
    schedule = torch.optim.lr_scheduler.StepLR(written.optimizer, 1, 0.5)
    expected = []
    for step in range(3):
        expected += written.train(step, step + 1)
        schedule.step()
    model, optimizer = open_run("NAdam", tmp_path, "nvme")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler, losses, calls = zo.GradScaler(2.0**20), list[float](), list[int]()
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for step in range(3):
        loss = model(tokens_of(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    assert losses == expected
    assert calls == [1, 1, 1]
    assert optimizer.param_groups[0]["lr"] == written.optimizer.param_groups[0]["lr"]
    zo.close(model)


def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = open_run("AdamW", tmp_path, "memory")
    train(model, optimizer, 0, 1)
    before, entry = read_masters(model), copy.deepcopy(optimizer.state_dict())
    (model(tokens_of(1)) * float("inf")).backward()
    with pytest.warns(UserWarning, match="a gradient is NaN or infinite"):
        optimizer.step()
    assert_same(read_masters(model), before)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][k], v) for i, kept in entry["state"].items() for k, v in kept.items())
    zo.close(model)


def test_states_are_read_assigned_and_deleted(tmp_path: Path) -> None:
    model, optimizer = open_run("SGD momentum", tmp_path, "nvme")
    weight, bias = model.blocks[0].up.weight, model.blocks[0].up.bias  # type: ignore[union-attr]
    assert weight not in optimizer.state and len(optimizer.state) == 0
    train(model, optimizer, 0, 2)
    momentum = optimizer.state[weight]["momentum_buffer"]
    assert momentum.shape == weight.shape and len(optimizer.state) == len([*model.parameters()])
    with pytest.raises(zo.ConfigError, match="Assign the whole entry"):
        optimizer.state[weight]["momentum_buffer"] = momentum
    optimizer.state[weight] = {"momentum_buffer": momentum * 2}
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], momentum * 2)
    del optimizer.state[bias]
    assert bias not in optimizer.state and weight in optimizer.state
    taken = optimizer.state[weight]["momentum_buffer"]
    taken.zero_()
    model(tokens_of(2)).backward()
    with pytest.raises(zo.ConfigError, match=r"optimizer\.state of blocks\.0\.up\.weight was changed in place"):
        optimizer.step()
    del taken
    optimizer.step()
    optimizer.state.clear()
    assert len(optimizer.state) == 0
    zo.close(model)


def test_a_state_dict_goes_to_the_plain_optimizer_and_back(tmp_path: Path) -> None:
    written = Written("AdamW", "fp32")
    expected = written.train(0, 4)
    model, optimizer = open_run("AdamW", tmp_path / "a", "nvme")
    train(model, optimizer, 0, 2)
    saved, weights = optimizer.state_dict(), read_masters(model)
    zo.close(model)
    plain = Written("AdamW", "fp32")
    plain.optimizer.load_state_dict(saved)
    for master, value in zip(plain.masters, weights.values(), strict=True):
        master.data.copy_(value)
    for param, master in zip(plain.model.parameters(), plain.masters, strict=True):
        param.data.copy_(master)
    assert plain.train(2, 3) == expected[2:3]
    model, optimizer = open_run("AdamW", tmp_path / "b", "split")
    model.load_state_dict(plain.model.state_dict())
    optimizer.load_state_dict(plain.optimizer.state_dict())
    assert train(model, optimizer, 3, 4) == expected[3:]
    zo.close(model)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "SGD"])
@pytest.mark.parametrize("precision", DTYPES)
def test_state_dicts_have_the_masters(name: str, precision: str, tmp_path: Path) -> None:
    """Those of the model and the optimizer together, where values are rounded."""
    model, optimizer = open_run(name, tmp_path / "one", "split", precision=precision)
    train(model, optimizer, 0, 2)
    masters = read_masters(model)
    given = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    expected = train(model, optimizer, 2, 4)
    zo.close(model)
    model, optimizer = open_run(name, tmp_path / "other", "nvme", precision=precision)
    train(model, optimizer, 10, 11)
    model.load_state_dict(given[0])
    optimizer.load_state_dict(given[1])
    assert_same(read_masters(model), masters)
    assert train(model, optimizer, 2, 4) == expected
    zo.close(model)


def test_numbers_of_states_that_are_made_at_build(tmp_path: Path) -> None:
    plain = build(TinyLM)
    theirs = torch.optim.Adagrad(plain.parameters(), 1e-2, initial_accumulator_value=0.1)
    expected, losses = plain_losses(plain, theirs, 3), list[float]()
    for begin, end in ((0, 1), (1, 3)):
        model = build(TinyLM)
        zo.offload(model, zo.OffloadConfig(nvme=tmp_path, existing="resume", precision="fp32", **TIERS["nvme"]))
        optimizer = torch.optim.Adagrad(model.parameters(), 1e-2, initial_accumulator_value=0.1)
        zo.unitwise(optimizer)
        zo.resume(model, optimizer)
        losses += train(model, optimizer, begin, end)
        zo.close(model)
    assert losses == expected
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="bf16"))
    with pytest.raises(zo.ConfigError, match="has filled sum with 0.1"):
        zo.unitwise(torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1))
    zo.close(model)


@pytest.mark.parametrize("tiers", TIERS)
def test_two_optimizers_share_units(tiers: str, tmp_path: Path) -> None:
    """torch's Muon has the matrices, ours the rest; each of one generation has its own states."""

    def both(model: nn.Module, *, offloaded: bool) -> list[torch.optim.Optimizer]:
        params = [*model.parameters()]
        matrices, rest = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
        muon: torch.optim.Optimizer = torch.optim.Muon(matrices, lr=1e-2)
        return [zo.unitwise(muon) if offloaded else muon, zo.AdamW(rest, lr=1e-2)]

    def steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], begin: int, end: int) -> list[float]:
        losses = []
        for step in range(begin, end):
            loss = model(tokens_of(step))
            loss.backward()
            for each in optimizers:
                each.step()
            for each in optimizers:
                each.zero_grad()
            losses.append(loss.item())
            if optimizers[0] in resumed:
                zo.commit(model, optimizers[0])
        return losses

    resumed: list[torch.optim.Optimizer] = []
    plain = build(TinyLM)
    expected = steps(plain, both(plain, offloaded=False), 0, 4)
    losses = []
    for begin in (0, 2):
        model = build(TinyLM)
        config = zo.OffloadConfig(nvme=tmp_path, existing="resume", precision="fp32", **TIERS[tiers])
        zo.offload(model, config)
        optimizers = both(model, offloaded=True)
        resumed[:] = optimizers
        zo.resume(model, optimizers[0])
        losses += steps(model, optimizers, begin, begin + 2)
        masters = read_masters(model)
        zo.close(model)
    assert losses == expected
    assert_same(masters, {name: param.detach() for name, param in plain.named_parameters()})


def test_states_of_another_class_are_not_taken(tmp_path: Path) -> None:
    model, optimizer = open_run("NAdam", tmp_path, "memory")
    train(model, optimizer, 0, 1)
    zo.close(model)
    model, optimizer = open_run("RAdam", tmp_path, "memory")
    with pytest.raises(
        zo.CheckpointError, match=r"was written with torch.*NAdam, whose states are not those of torch.*RAdam"
    ):
        zo.resume(model, optimizer)
    model(tokens_of(1)).backward()
    with pytest.raises(zo.CheckpointError, match=r"NAdam, and torch.*RAdam steps it"):
        optimizer.step()
    close_broken(model)


@pytest.mark.parametrize(
    ("first", "second"), [("zo.AdamW", "torch.optim.adamw.AdamW"), ("torch.optim.adamw.AdamW", "zo.AdamW")]
)
def test_an_optimizer_of_one_name_is_not_another(first: str, second: str, tmp_path: Path) -> None:
    """Ours has states that torch's has not, and the other way round."""
    makers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "zo.AdamW": lambda model: zo.AdamW(model.parameters()),
        "torch.optim.adamw.AdamW": lambda model: zo.unitwise(torch.optim.AdamW(model.parameters())),
    }
    for name in (first, second):
        model = build(TinyLM)
        zo.offload(model, zo.OffloadConfig(nvme=tmp_path, existing="resume", **TIERS["memory"]))
        optimizer = makers[name](model)
        if name == first:
            train(model, optimizer, 0, 1)
        else:
            with pytest.raises(zo.CheckpointError, match=f"with {first}, whose states are not those of {second}"):
                zo.resume(model, optimizer)
        zo.close(model)


def test_refusals_name_the_way(tmp_path: Path) -> None:
    plain = build(TinyLM)
    with pytest.raises(zo.ConfigError, match="parameters are not offloaded"):
        zo.unitwise(torch.optim.AdamW(plain.parameters()))
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32"))
    with pytest.raises(zo.ConfigError, match=r"zo\.AdamW steps offloaded parameters as it is"):
        zo.unitwise(zo.AdamW(model.parameters()))
    for given in (model.parameters(), model, torch.optim.NAdam, [torch.optim.NAdam(model.parameters())]):
        with pytest.raises(zo.ConfigError, match=r"one optimizer that is built, not .*unitwise\(torch\.optim\.NAdam\("):
            zo.unitwise(given)  # type: ignore[arg-type]
    for one in (torch.optim.LBFGS(model.parameters()), torch.optim.SparseAdam(model.parameters())):
        with pytest.raises(zo.ConfigError, match=r"by unit: it.* Use another optimizer, or .* such as zo\.AdamW$"):
            zo.unitwise(one)
    scheduled = torch.optim.NAdam(model.parameters())
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    with pytest.raises(zo.ConfigError, match="build the scheduler then"):
        zo.unitwise(scheduled)
    managed: Any = torch.optim.NAdam(model.parameters())
    managed.mng = SimpleNamespace(pid2config={1: {"optim_bits": 32}})
    with pytest.raises(zo.ConfigError, match="GlobalOptimManager has settings of single parameters"):
        zo.unitwise(managed)
    optimizer = torch.optim.NAdam(model.parameters())
    model(tokens_of(0)).backward()
    with pytest.raises(zo.ZeroOffloadError, match=r"torch's NAdam cannot step .* zo\.unitwise\(optimizer\)"):
        optimizer.step()
    with pytest.raises(zo.ZeroOffloadError, match=r"torch's LBFGS cannot step .* Step with zo\.AdamW"):
        torch.optim.LBFGS(model.parameters()).step(lambda: 0.0)
    assert zo.unitwise(optimizer) is optimizer and isinstance(optimizer, torch.optim.NAdam)
    assert zo.unitwise(optimizer) is optimizer
    with pytest.raises(zo.ConfigError, match=r"steps with units='each' already"):
        zo.unitwise(optimizer, units="all")
    optimizer.step()
    other = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32"))
    with pytest.raises(zo.ConfigError, match="of one offloaded model together, and these are of 2"):
        zo.unitwise(Normalized([*model.parameters(), *other.parameters()]), units="all")
    zo.close(other)
    zo.close(model)
    settings: dict[str, Any] = {"overlap": "backward", "precision": "fp32"}
    model = zo.offload(build(TinyLM), zo.OffloadConfig(**settings))
    with pytest.raises(zo.ConfigError, match='overlap="backward" updates while gradients come'):
        zo.unitwise(torch.optim.NAdam(model.parameters()))
    zo.close(model)


class Around(torch.optim.Optimizer):
    """Steps another optimizer, and moves weights by itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for param in (each for group in self.param_groups for each in group["params"]):
            param.data.mul_(0.9)


@pytest.mark.parametrize("units", ["each", "all"])
def test_an_optimizer_around_another_one_is_not_left_out(units: str, tmp_path: Path) -> None:
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(nvme=tmp_path, precision="fp32"))
    with pytest.raises(zo.ConfigError, match="zo.unitwise: Around is an optimizer around AdamW, and what it does"):
        zo.unitwise(Around(torch.optim.AdamW(model.parameters())), units=units)
    optimizer = zo.AdamW(model.parameters())
    calls: list[Callable[[torch.optim.Optimizer], Any]] = [
        lambda each: zo.commit(model, each),
        lambda each: zo.resume(model, each),
        lambda each: zo.save_checkpoint(model, each, tmp_path / "saved"),
        lambda each: next(iter(zo.steps(model, each, 3))),
    ]
    for call in calls:
        with pytest.raises(zo.ConfigError, match=r"Around is an optimizer around AdamW, .* Train with AdamW alone"):
            call(Around(optimizer))
    zo.close(model)


def test_room_for_rows_is_counted(tmp_path: Path) -> None:
    """Beyond two states of a parameter, which plans count."""
    model, optimizer = open_run("AdamW", tmp_path, "memory")
    train(model, optimizer, 0, 1)
    sections = [shard for shard in runtime(model).store.shards if shard.states]
    assert sections and all(len(shard.states) == 1 and shard.rows is not None for shard in sections)
    zo.close(model)
