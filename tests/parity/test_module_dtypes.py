"""Modules in another dtype than the rest train as a plain model whose casts are written by hand, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers import routed
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.pairwise import full
from tests.helpers.ranks import RankPool, read_params
from tests.helpers.routed import MIXED, RoutedLM, optimizer_of, round_values, train, train_by_hand, train_offloaded

STEPS = range(6)
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "device_memory": "10MiB"},
    "mixed": {"params": {"cpu": 0.5, "nvme": 0.5}, "grads": "device", "optimizer": {"cpu": 0.5, "nvme": 0.5}},
}


@pytest.fixture(params=["cpu", "nvme", full("mixed")])
def settings(request: pytest.FixtureRequest, nvme: Path) -> dict[str, Any]:
    return TIERS[request.param] | {"nvme": nvme}


def check(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], values) for name, values in expected[1].items())


@pytest.mark.parametrize("dim", [33, WIDE])
def test_one_rank(dim: int, settings: dict[str, Any]) -> None:
    check(train_offloaded(0, 1, dim, settings, STEPS), train_by_hand(dim, STEPS))


@pytest.mark.parametrize("stage", [full(1), 3])
def test_two_ranks(stage: int, settings: dict[str, Any], pool: RankPool) -> None:
    torch.set_num_threads(1)
    expected = train_by_hand(33, STEPS)
    for found in pool.succeed(train_offloaded, 33, settings | {"stage": stage}, STEPS):
        check(found, expected)


def test_a_run_resumes(settings: dict[str, Any]) -> None:
    whole = train_by_hand(33, STEPS)
    first, _ = train_offloaded(0, 1, 33, settings, range(3))
    second, params = train_offloaded(0, 1, 33, settings | {"existing": "resume"}, range(3, 6))
    check((first + second, params), whole)


def test_a_checkpoint_of_two_ranks_loads_on_one(pool: RankPool, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    saved = str(tmp_path / "saved")
    first = pool.succeed(train_offloaded, 33, {"stage": 3}, range(3), saved)[0][0]
    second, params = train_offloaded(0, 1, 33, {}, range(3, 6), saved)
    check((first + second, params), train_by_hand(33, STEPS))


# Which modules


class Nested(nn.Module):
    """bf16 around an fp32 part, in it a list of modules that is never called, and a bf16 part again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.LayerNorm(8))
        self.several = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.first(x))
        for each in self.several:
            self.seen.append(x.dtype)
            x = each(x)
        self.seen.append(x.dtype)
        return x


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: param.dtype for name, param in model.named_parameters() if name.endswith("weight")}


def test_the_innermost_module_decides() -> None:
    precision = zo.Precision(modules={"inner": "fp32", "inner.1": "bf16", "several": "fp32"})
    model = zo.offload(build(Nested), zo.OffloadConfig(precision=precision))
    half, whole = torch.bfloat16, torch.float32
    assert dtypes_of(model) == {
        "first.weight": half,
        "inner.0.weight": whole,
        "inner.1.0.weight": half,
        "inner.2.weight": whole,
        "several.0.weight": whole,
        "several.1.weight": whole,
    }
    out = model(torch.ones(2, 8))
    # A list is never called: what it holds is cast one by one.
    assert model.seen == [half, half, half] and out.dtype == half
    twin = build(Nested)
    for name, param in twin.named_parameters():
        param.data = param.data.to(dict(model.named_parameters())[name].dtype)
    x = twin.first(torch.ones(2, 8, dtype=half))
    x = twin.inner[1](twin.inner[0](x.float()).to(half)).float()
    x = twin.inner[2](x).to(half)
    x = twin.several[1](twin.several[0](x.float()).to(half).float()).to(half)
    assert torch.equal(out, x)
    out.float().square().sum().backward()
    x.float().square().sum().backward()
    with zo.gathered(model, kind="grads") as grads:
        assert all(torch.equal(grads[name], param.grad.float()) for name, param in twin.named_parameters())


def test_of_keys_for_one_module_the_last_counts() -> None:
    modules = {nn.Linear: "fp32", "inner.*": "bf16", "*.1": "fp32"}
    model = zo.offload(build(Nested), zo.OffloadConfig(precision=zo.Precision(modules=modules)))
    halves = [name for name, dtype in dtypes_of(model).items() if dtype == torch.bfloat16]
    assert halves == ["inner.0.weight", "inner.1.0.weight", "inner.2.weight"]


def test_half_a_part_of_an_fp32_model() -> None:
    config = zo.OffloadConfig(precision=zo.Precision("fp32", modules={"several": "bf16"}))
    model = zo.offload(build(Nested), config)
    out = model(torch.ones(2, 8))
    assert out.dtype == torch.float32 and dtypes_of(model)["several.1.weight"] == torch.bfloat16
    twin = build(Nested)
    twin.several.bfloat16()
    x = twin.inner(twin.first(torch.ones(2, 8)))
    for each in twin.several:
        x = each(x.bfloat16()).float()
    assert torch.equal(out, x)


def test_all_of_a_model() -> None:
    config = zo.OffloadConfig(precision=zo.Precision(modules={"*": "fp32"}))
    assert set(dtypes_of(zo.offload(build(TinyLM), config)).values()) == {torch.float32}


class Normed(nn.Module):
    """Running statistics between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)))
        return out


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_running_statistics_and_weights_have_one_dtype(precision: str) -> None:
    """Torch has no kernel for others, and buffers keep their dtype."""
    model, twin, x = build(Normed), build(Normed), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    zo.offload(model, zo.OffloadConfig(precision=precision))
    assert dtypes_of(model) == {"first.weight": half, "norm.weight": torch.float32, "last.weight": half}
    twin.first.to(half)
    twin.last.to(half)
    for training in (True, False):
        model.train(training)
        out = twin.last(twin.norm.train(training)(twin.first(x.to(half)).float()).to(half))
        assert torch.equal(model(x), out)
    assert torch.equal(model.norm.running_var, twin.norm.running_var)
    model.train()
    model(x).float().square().sum().backward()
    optimizer = zo.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    with zo.gathered(model) as params:
        assert not torch.equal(params["norm.bias"], twin.norm.bias)
    # A model in 16 bits has such statistics, and what a key says of the module counts.
    assert dtypes_of(zo.offload(build(Normed).to(half), zo.OffloadConfig(precision=precision)))["norm.weight"] == half
    named = build(Normed)
    offload_with(named, {nn.BatchNorm1d: "bf16"})
    assert dtypes_of(named)["norm.weight"] == torch.bfloat16


def test_autocast_around_it() -> None:
    """Autocast converts inside of an exception as on a plain model with fp32 parts."""
    model = zo.offload(round_values(build(RoutedLM)), zo.OffloadConfig(precision=MIXED))
    twin = routed.convert_by_hand(build(lambda: routed.RoutedByHand(33)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert train(model, optimizer_of(model), STEPS) == train(twin, optimizer_of(twin), STEPS)


def test_an_exception_in_an_exception_leaves_the_model_usable() -> None:
    model = zo.offload(round_values(build(RoutedLM)), zo.OffloadConfig(precision=MIXED))
    twin = zo.offload(round_values(build(RoutedLM)), zo.OffloadConfig(precision=MIXED))
    with pytest.raises(RuntimeError):
        model.blocks[0].router(hidden=torch.ones(2, 5))
    assert train(model, optimizer_of(model), STEPS) == train(twin, optimizer_of(twin), STEPS)


# Other calls that show dtypes


def test_what_a_plan_counts() -> None:
    plain = zo.plan(TinyLM(), zo.OffloadConfig())
    mixed = zo.plan(TinyLM(), zo.OffloadConfig(precision=zo.Precision(modules={"blocks.*": "fp32"})))
    blocks = sum(param.numel() for param in TinyLM().blocks.parameters())
    for kind, extra in (("params", 2 * blocks), ("grads", 2 * blocks), ("optimizer", -2 * blocks)):
        # With fp32 the parameter is the master: no residual.
        found, before = (sum(n for (_, k), n in plan.rest_bytes.items() if k == kind) for plan in (mixed, plain))
        assert found - before == extra, kind


def test_an_export_keeps_fp32(tmp_path: Path) -> None:
    from tests.helpers.pretrained import read_folder

    model = zo.offload(build(RoutedLM), zo.OffloadConfig(precision=MIXED))
    values = read_params(model)
    zo.export_pretrained(model, tmp_path / "out")
    found = read_folder(tmp_path / "out")
    for name, param in model.named_parameters():
        assert found[name].dtype == param.dtype and torch.equal(found[name].float(), values[name])
    other = zo.offload(build(RoutedLM, seed=1), zo.OffloadConfig(precision=MIXED))
    zo.load_pretrained(other, tmp_path / "out")
    assert all(torch.equal(theirs, values[name]) for name, theirs in read_params(other).items())
    zo.export_pretrained(model, tmp_path / "wide", dtype="fp32")
    masters = dict(build(RoutedLM).named_parameters())
    assert all(torch.equal(value, masters[name]) for name, value in read_folder(tmp_path / "wide").items())


def test_another_precision_does_not_resume(nvme: Path) -> None:
    train_offloaded(0, 1, 33, {"nvme": nvme}, STEPS)
    modules = {"*.router": "fp32", nn.LayerNorm: "fp32", "*.experts": "fp32"}
    config = zo.OffloadConfig(precision=zo.Precision(modules=modules), nvme=nvme, existing="resume")
    words = "'blocks.0.experts.0.weight' has dtype='bfloat16', this model's .* has dtype='float32'"
    with pytest.raises(zo.CheckpointError, match=words):
        zo.offload(build(RoutedLM), config)


# Problems


def offload_with(model: nn.Module, modules: dict[Any, str]) -> None:
    zo.offload(model, zo.OffloadConfig(precision=zo.Precision(modules=modules)))


def test_keys_that_match_nothing_are_named_with_what_is_near() -> None:
    modules: dict[Any, str] = {"*.ruoter": "fp32", nn.RMSNorm: "fp32", "zzz": "fp32", "*.norm": "fp32"}
    with pytest.raises(zo.ConfigError) as caught:
        offload_with(RoutedLM(), modules)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "'*.ruoter' matches no module of this RoutedLM; did you mean router?" in lines[0]
    assert "RMSNorm matches no module of this RoutedLM; its classes are Embedding, LayerNorm, Linear," in lines[1]
    assert "'zzz' matches no module" in lines[2] and "model.named_modules()" in lines[2]
    with pytest.raises(zo.ConfigError, match="ruoter"):
        zo.plan(RoutedLM(), zo.OffloadConfig(precision=zo.Precision(modules={"*.ruoter": "fp32"})))


def test_a_pattern_that_matches_no_module_names_parameters() -> None:
    model = RoutedLM()
    model.register_buffer("count", torch.zeros(2))
    offload_with(model, {"*.norm.weight": "fp32", "count": "fp32", "norm.*": "fp32"})
    in_fp32 = {name for name, param in model.named_parameters() if param.dtype == torch.float32}
    expected = {name for name, _ in RoutedLM().named_parameters() if name.endswith(".norm.weight")} | {
        "norm.weight",
        "norm.bias",
    }
    assert in_fp32 == expected and len(expected) > 2
    # A pattern of modules stays one, whatever parameters it matches too.
    model = RoutedLM()
    offload_with(model, {"*": "fp32", "*.norm": "bf16", "norm": "bf16"})
    assert model.norm.weight.dtype == torch.bfloat16


def test_a_tie_of_two_dtypes() -> None:
    with pytest.raises(zo.ConfigError) as caught:
        offload_with(TinyLM(), {"head": "fp32"})
    assert "embedding.weight (bfloat16) and head.weight (float32) are one parameter" in str(caught.value)
    offload_with(TinyLM(), {"head": "fp32", "embedding": "fp32"})


def test_a_shared_module_with_two_surroundings() -> None:
    model = Nested()
    model.several[1] = model.inner[2]
    with pytest.raises(zo.ConfigError, match=r"inner.2 and several.1 are one module"):
        offload_with(model, {nn.LayerNorm: "fp32", "inner": "fp32"})
    model = Nested()
    model.several[1] = model.inner[2]
    offload_with(model, {nn.LayerNorm: "fp32"})
    assert model(torch.ones(2, 8)).dtype == torch.bfloat16


# Dtypes that the user gave


class Quantized(nn.Module):
    """Frozen weights of one byte with scales, beside a trained adapter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        low = 0 if dtype == torch.uint8 else -100
        weight = torch.randint(low, 100, (33, 33), generator=torch.Generator().manual_seed(3), dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.full((33, 1), 0.01), requires_grad=False)
        self.down, self.up = nn.Linear(33, 4, bias=False), nn.Linear(4, 33, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ (self.weight.to(x.dtype) * self.scale) + self.up(self.down(x))


class QuantizedLM(TinyLM):
    """Besides, a norm that is frozen, and one given in bf16."""

    def __init__(self) -> None:
        dtypes = iter([torch.int8, torch.uint8, torch.int8])
        super().__init__(33, block=lambda dim: Quantized(next(dtypes)))
        self.norm.requires_grad_(False)
        self.norm.bfloat16()
        self.embedding.requires_grad_(False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_bytes_beside_adapters(precision: str, settings: dict[str, Any]) -> None:
    twin = round_values_of_floats(build(QuantizedLM))
    for param in twin.parameters():
        if param.is_floating_point():
            param.data = param.data.to(torch.float32 if precision == "fp32" else torch.bfloat16)
    expected = train(twin, optimizer_of(twin), STEPS)
    model = round_values_of_floats(build(QuantizedLM))
    zo.offload(model, zo.OffloadConfig(precision=precision, **settings))
    bytes_kept = {name: param.dtype for name, param in model.named_parameters() if not param.is_floating_point()}
    assert bytes_kept == {f"blocks.{i}.weight": dtype for i, dtype in enumerate((torch.int8, torch.uint8, torch.int8))}
    assert train(model, optimizer_of(model), STEPS) == expected
    found = read_params(model)
    assert all(torch.equal(found[name], param.detach().float()) for name, param in twin.named_parameters())


def round_values_of_floats(model: nn.Module) -> nn.Module:
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.bfloat16().to(param.dtype)
    return model


def test_what_the_user_gave_in_bf16_is_computed_in_fp32_where_asked() -> None:
    model = build(partial(TinyLM, 33)).bfloat16()
    plain = build(partial(TinyLM, 33)).bfloat16().float()
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    assert model(tokens_of(0)).item() == plain(tokens_of(0)).item()


def test_fp16_around_fp32_and_bf16() -> None:
    """Three ways to keep a master, in one unit."""
    precision = zo.Precision("fp16", modules={"*.router": "fp32", nn.LayerNorm: "bf16"})
    model = zo.offload(build(RoutedLM), zo.OffloadConfig(precision=precision))
    optimizer, scaler = optimizer_of(model), zo.GradScaler(1024.0)
    dtypes = {param.dtype for param in model.blocks[0].parameters()}
    assert dtypes == {torch.float16, torch.float32, torch.bfloat16}
    losses = []
    for _ in range(8):
        loss = model(tokens_of(0))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert zo.stats(model).skipped_steps == 0 and losses[-1] < 0.8 * losses[0]
