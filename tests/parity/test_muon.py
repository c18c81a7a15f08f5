"""`zo.Muon`: torch's Muon for matrices and `zo.AdamW` for the rest, with their bits, once per update."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import read_masters
from tests.parity.test_unitwise import TIERS, Written, assert_same, train
from zero_offload.optim.unitwise.grades import Grade, grade

MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.05, "momentum": 0.9}
ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.95)}
BLOCK = ("up", "down")
"""The modules of TinyLM that have matrices of hidden layers; its embedding is tied to the head."""


def divided(named: Iterable[tuple[str, Any]]) -> tuple[list[Any], list[Any]]:
    """The matrices of blocks, and the rest."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for name, param in named:
        parts[not (name.endswith(".weight") and name.split(".")[-2] in BLOCK)].append(param)
    return parts


class Plain:
    """Two plain optimizers, as programs have them without `zo.Muon`."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        matrices, rest = divided(named)
        self.muon, self.adamw = torch.optim.Muon(matrices, **MUON), zo.AdamW(rest, **ADAMW)
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()


def written(precision: str) -> Written:
    found: Any = Written("SGD", precision)
    found.optimizer = Plain(zip((name for name, _ in found.model.named_parameters()), found.masters, strict=True))
    return found  # type: ignore[no-any-return]


def muon_of(model: nn.Module) -> Any:
    return zo.Muon(model.parameters(), **MUON, adamw=ADAMW)


def open_run(nvme: Path, tiers: str, **settings: Any) -> tuple[Any, Any]:
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(nvme=nvme, **{**TIERS[tiers], "existing": "resume", **settings}))
    return model, muon_of(model)


@pytest.mark.parametrize("tiers", TIERS)
def test_the_bits_of_two_plain_optimizers(tiers: str, tmp_path: Path) -> None:
    plain = written("fp32")
    expected = plain.train(0, 4)
    model, optimizer = open_run(tmp_path, tiers, precision="fp32")
    assert train(model, optimizer, 0, 4) == expected
    assert_same(read_masters(model), plain.named())
    masters = dict(zip((name for name, _ in plain.model.named_parameters()), plain.masters, strict=True))
    two: Any = plain.optimizer
    for name, param in model.named_parameters():
        state, (by, other) = optimizer.state[param], (two.muon, two.adamw)
        entry = by.state[masters[name]] if masters[name] in by.state else other.state[masters[name]]
        assert state.keys() == entry.keys(), name
        assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(entry[key])) for key in entry), name
    zo.close(model)


@pytest.mark.parametrize(
    ("precision", "micro_batches", "tiers"),
    [(*pair, tier) for pair, tier in zip(itertools.product(["bf16", "fp16"], [1, 2, 4]), itertools.cycle(TIERS))],
)
def test_16_bits_accumulate_and_clip_as_a_loop_over_fp32_masters(
    precision: str, micro_batches: int, tiers: str, tmp_path: Path
) -> None:
    """Muon steps once per update, with the sum of gradients: Newton-Schulz of each backward's would be another step."""
    plain = written(precision)
    expected = plain.train(0, 3, micro_batches=micro_batches, max_norm=0.5)
    model, optimizer = open_run(tmp_path, tiers, precision=precision)
    assert train(model, optimizer, 0, 3, micro_batches=micro_batches, max_norm=0.5) == expected
    assert_same(read_masters(model), plain.named())
    zo.close(model)


@pytest.mark.parametrize(("micro_batches", "tiers"), [*zip([2, 4, 2], TIERS, strict=True)])
def test_accumulate_is_a_loop(micro_batches: int, tiers: str, tmp_path: Path) -> None:
    plain = written("fp32")
    plain.train(0, 2, micro_batches=micro_batches, max_norm=0.5)
    model, optimizer = open_run(tmp_path, tiers, precision="fp32")
    for step in range(2):
        batches = [tokens_of(step * micro_batches + part) for part in range(micro_batches)]
        zo.accumulate(model, batches, lambda module, tokens: module(tokens))
        zo.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(read_masters(model), plain.named())
    zo.close(model)


@pytest.mark.parametrize("tiers", TIERS)
def test_a_deferred_model_trains_as_one_that_was_built(tiers: str, tmp_path: Path) -> None:
    """Parameters without values are divided as others are."""
    plain = written("fp32")
    expected = plain.train(0, 3)
    torch.manual_seed(0)
    with zo.deferred_init():
        model = TinyLM()
    zo.offload(model, zo.OffloadConfig(nvme=tmp_path, precision="fp32", **TIERS[tiers]))
    optimizer = muon_of(model)
    assert [len(group["params"]) for group in optimizer.param_groups] == [6, 15]
    assert train(model, optimizer, 0, 3) == expected
    assert_same(read_masters(model), plain.named())
    zo.close(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_goes_on_from_a_commit_and_from_a_checkpoint(precision: str, tmp_path: Path) -> None:
    plain = written(precision)
    expected = plain.train(0, 4)
    model, optimizer = open_run(tmp_path / "run", "nvme", precision=precision)
    assert train(model, optimizer, 0, 2) == expected[:2]
    optimizer.param_groups[0]["momentum"] = 0.0  # a generation has that of its commit
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    optimizer.param_groups[0]["momentum"] = MUON["momentum"]
    zo.commit(model, optimizer)
    zo.close(model)
    for tiers in ("split", "memory"):
        model, optimizer = open_run(tmp_path / tiers, tiers, precision=precision)
        zo.load_checkpoint(model, optimizer, tmp_path / "saved")
        assert optimizer.param_groups[0]["momentum"] == 0.0
        optimizer.param_groups[0]["momentum"] = MUON["momentum"]
        assert train(model, optimizer, 2, 4) == expected[2:]
        assert_same(read_masters(model), plain.named())
        zo.close(model)
    model, optimizer = open_run(tmp_path / "run", "memory", precision=precision)
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and resumed.step == 2 and optimizer.param_groups[0]["momentum"] == MUON["momentum"]
    assert train(model, optimizer, 2, 4) == expected[2:]
    zo.close(model)
    model, _ = open_run(tmp_path / "run", "memory", precision=precision)
    with pytest.raises(zo.CheckpointError, match=r"written with .*\.Muon, whose states are not those of zo\.AdamW"):
        zo.resume(model, zo.AdamW([{"params": each} for each in reversed(divided(model.named_parameters()))][::-1]))
    zo.close(model)


def test_steps_a_scheduler_and_a_scaler_go_on_with_it(tmp_path: Path) -> None:
    plain = written("fp32")
    two: Any = plain.optimizer
    expected = []
    for step in range(4):
        expected += plain.train(step, step + 1)
        for group in two.param_groups:
            group["lr"] *= 0.5
    losses = []
    for end in (2, 4):
        model, optimizer = open_run(tmp_path, "nvme", precision="fp32")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        scaler = zo.GradScaler(2.0**10)
        for step in zo.steps(model, optimizer, end, scheduler=scheduler, scaler=scaler):
            loss = model(tokens_of(step - 1))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        assert [group["lr"] for group in optimizer.param_groups] == [
            g["lr"] * 0.5 ** (end - 4) for g in two.param_groups
        ]
        zo.close(model)
    assert losses == expected


def test_state_dicts_and_further_groups(tmp_path: Path) -> None:
    plain = written("fp32")
    expected = plain.train(0, 4)
    model, optimizer = open_run(tmp_path / "a", "nvme", precision="fp32")
    assert train(model, optimizer, 0, 2) == expected[:2]
    saved, weights = optimizer.state_dict(), model.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    zo.close(model)
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(nvme=tmp_path / "b", precision="fp32", **TIERS["split"]))
    model.load_state_dict(weights)
    matrices, rest = divided(model.named_parameters())
    optimizer = zo.Muon(matrices[:3], **MUON, adamw=ADAMW)
    optimizer.add_param_group({"params": [*matrices[3:], *rest], "weight_decay": 0.01})
    assert [(group["use_muon"], len(group["params"])) for group in optimizer.param_groups] == [
        (True, 3),
        (True, 3),
        (False, 15),
    ]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05, 0.01, 0.01]
    del optimizer
    optimizer = muon_of(model)
    optimizer.load_state_dict(saved)
    assert train(model, optimizer, 2, 4) == expected[2:]
    zo.close(model)


def test_an_optimizer_that_gets_groups_one_by_one_has_the_same_bits(tmp_path: Path) -> None:
    plain = written("fp32")
    expected = plain.train(0, 3)
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(nvme=tmp_path, precision="fp32", **TIERS["nvme"]))
    named = [*model.named_parameters()]
    optimizer = zo.Muon(named[:8], **MUON, adamw=ADAMW)
    taken, matrix = named[0], next(each for each in named[8:] if each[0].endswith("up.weight"))
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": [matrix, taken]})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": named[8:]})
    assert [name for group in optimizer.param_groups for name in group["param_names"] if group["use_muon"]] == [
        name for name, _ in named if name.endswith((".up.weight", ".down.weight"))
    ]
    assert train(model, optimizer, 0, 3) == expected
    zo.close(model)


# Which parameters are of which kind


class Zoo(nn.Module):
    """Parameters of many kinds; it computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(8, 4), nn.Parameter(torch.zeros(6, 4))
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"output": nn.Linear(4, 4), "bias_table": nn.Embedding(3, 4)}) for _ in range(2)
        )
        self.experts = nn.Parameter(torch.zeros(2, 4, 4))
        self.scale = nn.Parameter(torch.zeros(()))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.reader = nn.Linear(4, 9, bias=False)
        self.classifier = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def get_output_embeddings(self) -> nn.Module:
        return self.reader


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters that Muon steps."""
    names = {param: name for name, param in model.named_parameters()}
    return [names[param] for group in optimizer.param_groups if group["use_muon"] for param in group["params"]]


HIDDEN = ["blocks.0.output.weight", "blocks.1.output.weight"]


def test_embeddings_and_output_layers_are_adamws() -> None:
    model = zo.offload(build(Zoo), zo.OffloadConfig(precision="fp32"))
    with pytest.warns(UserWarning, match=r"2 parameters of more than two dimensions .*\(experts, stem\.weight\)"):
        optimizer = zo.Muon(sorted(model.named_parameters()))
    assert names_of(model, optimizer) == HIDDEN
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()])
    for group in optimizer.param_groups:
        kind = torch.optim.Muon([torch.zeros(2, 2)]) if group["use_muon"] else zo.AdamW([torch.zeros(2)])
        extra = {"use_muon", "params", "param_names"}
        assert all(group[name] == kind.defaults[name] for name in group.keys() - extra)
    zo.close(model)


def test_the_program_chooses() -> None:
    model = zo.offload(build(Zoo), zo.OffloadConfig(precision="fp32"))
    asked = []

    def choose(name: str, param: nn.Parameter) -> bool:
        asked.append(name)
        return "output" in name or name == "reader.weight"

    flat = [(name, param) for name, param in model.named_parameters() if param.dim() < 3]
    optimizer = zo.Muon(iter(flat), use_muon=choose)
    assert names_of(model, optimizer) == [*HIDDEN, "reader.weight"]
    assert asked == [name for name, param in flat if param.dim() == 2]
    optimizer = zo.Muon([param for _, param in flat], use_muon=choose)
    assert names_of(model, optimizer) == [*HIDDEN, "reader.weight"]
    groups = [
        {"params": [model.wte.weight, model.reader.weight], "use_muon": True, "lr": 0.5, "momentum": 0.5},
        {"params": [*model.blocks.parameters(), model.wpe], "use_muon": False, "betas": (0.5, 0.5)},
        {"params": [*model.classifier.parameters()], "weight_decay": 0.0, "name": "last"},
    ]
    optimizer = zo.Muon(groups)
    assert names_of(model, optimizer) == ["wte.weight", "reader.weight"]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 7, 4]
    first, second, third = optimizer.param_groups
    assert (first["lr"], first["momentum"], first["weight_decay"]) == (0.5, 0.5, 0.1)
    divided_in_two = zo.Muon([{"params": [*model.blocks.parameters()], "momentum": 0.5, "betas": (0.5, 0.5)}])
    assert [("momentum" in group, "betas" in group) for group in divided_in_two.param_groups] == [
        (True, False),
        (False, True),
    ]
    assert (second["lr"], second["betas"], third["weight_decay"], third["name"]) == (1e-3, (0.5, 0.5), 0.0, "last")
    zo.close(model)


def test_refusals() -> None:
    plain = build(TinyLM)
    with pytest.raises(zo.ConfigError, match=r"one of shape \(61, 32\) is not offloaded\. Call zo\.offload\("):
        zo.Muon(plain.parameters())
    optimizer = zo.Muon(plain.named_parameters())
    assert names_of(plain, optimizer) == [
        name for name, _ in plain.named_parameters() if name.endswith(("up.weight", "down.weight"))
    ]
    plain(tokens_of(0)).backward()
    with pytest.raises(zo.ConfigError, match=r"built before zo\.offload, for a plan.* build it anew after"):
        optimizer.step()
    plain.zero_grad()
    zo.offload(plain, zo.OffloadConfig(precision="fp32"))
    with pytest.raises(zo.ConfigError, match=r"zo\.Muon: 1 of \d+ parameters are not offloaded"):
        zo.Muon([*plain.named_parameters(), ("extra", nn.Parameter(torch.zeros(2, 2)))])
    zo.close(plain)
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32"))
    model(tokens_of(0)).backward()
    with pytest.raises(zo.ZeroOffloadError, match=r"torch's Muon cannot step .* Step with zo\.Muon\(model\.parameters"):
        torch.optim.Muon([model.blocks[0].up.weight]).step()
    zo.close(model)
    model = zo.offload(build(Zoo), zo.OffloadConfig(precision="fp32"))
    hidden = [each["output"].weight for each in model.blocks]
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ([model.wte.weight, model.scale], {}, r"none of 2 parameters is a matrix .* use zo\.AdamW, or name matrices"),
        (
            [{"params": [model.scale], "use_muon": True}],
            {},
            r"use_muon=True has scale of shape \(\), .* matrices alone",
        ),
        ([{"params": [model.stem.weight], "use_muon": True}], {}, r"has stem\.weight of shape \(4, 3, 3, 3\)"),
        ([{"params": hidden, "use_muon": True, "betas": (0, 0)}], {}, "use_muon=True has betas, which Muon does not"),
        ([{"params": hidden, "use_muon": False, "ns_steps": 3}], {}, "use_muon=False has ns_steps, which AdamW"),
        (hidden, {"lr": -1.0}, "torch.optim.Muon: Learning rate should be >= 0"),
        (hidden, {"adjust_lr_fn": "none"}, "Adjust learning rate function none is not supported"),
        (hidden, {"ns_steps": 100}, "ns_steps=100 is not below 100"),
        (hidden, {"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients=\(1.0, 2.0\) are not 3 numbers"),
        (hidden, {"adamw": {"eps": -1.0}}, "AdamW: eps=-1.0 is negative"),
        (hidden, {"adamw": {"momentum": 0.9}}, r"adamw=\.\.\.\) has momentum; use lr, betas, eps, weight_decay"),
        ([{"params": hidden, "lr": -2.0}], {}, "Learning rate should be >= 0"),
    ]
    for params, settings, told in refused:
        with pytest.raises(zo.ConfigError, match=told):
            zo.Muon(params, **settings)
    with pytest.raises(zo.ConfigError, match=r"zo\.Muon cannot step an offloaded TinyLM"):
        other = zo.offload(build(TinyLM), zo.OffloadConfig(overlap="backward"))
        try:
            zo.Muon(other.parameters())
        finally:
            zo.close(other)
    zo.close(model)


def test_its_class_is_graded_as_it_says() -> None:
    """`zo.Muon` leaves the test of its class out, which is here."""
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32"))
    found = grade(muon_of(model), kind=zo.Muon)
    assert found.grade is Grade.SEPARABLE and not found.beyond
    zo.close(model)


class Images(nn.Module):
    """A convolution whose weight lies channels last, before a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.stem.weight.data = self.stem.weight.data.to(memory_format=torch.channels_last)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.stem(x).mean((2, 3))).relu()).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("tiers", TIERS)
def test_other_orders_of_memory(tiers: str, tmp_path: Path) -> None:
    def build_both(make: Callable[[nn.Module], list[Any]], model: nn.Module) -> dict[str, Tensor]:
        optimizers = make(model)
        for step in range(3):
            model(torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))).backward()
            for each in optimizers:
                each.step()
            model.zero_grad()
        return read_masters(model)

    config = zo.OffloadConfig(nvme=tmp_path, precision="fp32", durability="scratch", **TIERS[tiers])
    two = zo.offload(build(Images), zo.OffloadConfig(precision="fp32"))
    others = [param for name, param in two.named_parameters() if name != "inner.weight"]
    expected = build_both(lambda _: [zo.unitwise(torch.optim.Muon([two.inner.weight])), zo.AdamW(others)], two)
    one = zo.offload(build(Images), config)
    groups = [{"params": [one.inner.weight]}, {"params": [p for p in one.parameters() if p is not one.inner.weight]}]
    groups[1]["use_muon"] = False  # type: ignore[assignment]
    assert_same(build_both(lambda _: [zo.Muon(groups)], one), expected)
    zo.close(one)
    zo.close(two)
