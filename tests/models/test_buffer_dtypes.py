"""Floating buffers go with the parameters, as in `module.to(dtype)`, but for those that are made to stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import build
from zero_offload.base.precision import Precision
from zero_offload.checkpoint.generation import GenerationKeeper
from zero_offload.plan import dtypes

WIDTH = 8


class Table(nn.Module):
    """A buffer of a module without parameters, added to hidden states."""

    def __init__(self, dtype: torch.dtype = torch.float32, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, WIDTH).to(dtype), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class RotaryEmbedding(Table):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.table.cos().to(x.dtype)


class Keeping(nn.Module):
    """A class that names what it keeps in fp32, as transformers' do."""

    _keep_in_fp32_modules_strict = ("kept.tab*",)
    _keep_in_fp32_modules = ("fp16_alone",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept, self.fp16_alone, self.other = RotaryTable(), RotaryTable(), Table()

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.kept(self.fp16_alone(self.linear(x))))


class RotaryTable(Table):
    """As `RotaryEmbedding`, under a name that says nothing."""

    forward = RotaryEmbedding.forward


RotaryTable.__name__ = "Angles"


def around(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), module, nn.Linear(WIDTH, WIDTH))


def with_own_buffer() -> nn.Module:
    model = around(nn.Identity())
    model[0].register_buffer("scale", torch.ones(WIDTH))
    model.register_buffer("complex", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("seen", torch.zeros(3, dtype=torch.long))
    model.register_buffer("wide", torch.ones(2, dtype=torch.float64))
    model.register_buffer("nothing", None)
    return model


def with_frequencies() -> nn.Module:
    model = around(nn.Identity())
    model[0].register_buffer("inv_freq", torch.ones(WIDTH))
    return model


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS: dict[str, tuple[Callable[[], nn.Module], str | Precision, dict[str, torch.dtype]]] = {
    "a table": (lambda: around(Table()), "bf16", {"1.table": BF16}),
    "a table that no state dict has": (lambda: around(Table(persistent=False)), "fp16", {"1.table": FP16}),
    "fp32": (lambda: around(Table()), "fp32", {"1.table": FP32}),
    "a wider table": (lambda: around(Table(BF16)).to(BF16), "fp32", {"1.table": FP32}),
    "one beside parameters": (with_own_buffer, "bf16", {"0.scale": BF16}),
    "other kinds": (
        with_own_buffer,
        "bf16",
        {"complex": torch.complex64, "seen": torch.long, "wide": torch.float64},
    ),
    "one that is wider on purpose": (
        lambda: around(nn.Identity()).to(BF16).append(RotaryTable()),
        "bf16",
        {"3.table": FP32},
    ),
    "running statistics": (lambda: around(nn.BatchNorm1d(WIDTH)), "bf16", {"1.running_mean": FP32}),
    "angles": (lambda: around(RotaryEmbedding()), "bf16", {"1.table": FP32}),
    "kept by a class": (Keeping, "bf16", {"kept.table": FP32, "fp16_alone.table": BF16, "other.table": BF16}),
    "kept by a class in fp16": (Keeping, "fp16", {"kept.table": FP32, "fp16_alone.table": FP32, "other.table": FP16}),
    "frequencies": (with_frequencies, "bf16", {"0.inv_freq": FP32}),
    "named": (lambda: around(RotaryTable()), Precision(buffers={"1.*": "fp32"}), {"1.table": FP32}),
    "of a named class": (lambda: around(RotaryTable()), Precision(buffers={Table: "fp32"}), {"1.table": FP32}),
    "named although a rule keeps it": (
        lambda: around(RotaryEmbedding()),
        Precision(buffers={"*.table": "bf16"}),
        {"1.table": BF16},
    ),
    "in a module of another dtype": (lambda: around(Table()), Precision(modules={Table: "fp32"}), {"1.table": FP32}),
    "named as a tensor": (lambda: around(RotaryTable()), Precision(modules={"1.table": "fp32"}), {"1.table": FP32}),
    "one in several modules": (lambda: shared(), "bf16", {"1.table": BF16, "2.table": BF16}),
}


def shared() -> nn.Module:
    model = around(Table()).append(Table())
    model[2] = Table()
    model[2].table = model[1].table
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes(kind: str) -> None:
    make, precision, expected = KINDS[kind]
    model = build(make)
    before = {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
    zo.offload(model, zo.OffloadConfig(precision=precision))
    found = dict(model.named_buffers(remove_duplicate=False))
    assert {name: found[name].dtype for name in expected} == expected
    assert all(torch.equal(found[name], value.to(found[name].dtype)) for name, value in before.items())
    model(torch.ones(4, WIDTH)).float().sum().backward()
    zo.close(model)


def test_a_shared_buffer_stays_one() -> None:
    model = build(shared)
    zo.offload(model, zo.OffloadConfig())
    assert model[1].table is model[2].table
    zo.close(model)


def test_as_plain_torch(tmp_path: Path) -> None:
    """The bits of a model that `.to(dtype)` has made."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain = build(lambda: around(Table())).to(BF16)
    for tiers in ({}, {"params": "nvme", "optimizer": "nvme", "nvme": tmp_path / "run"}):
        model = zo.offload(build(lambda: around(Table())), zo.OffloadConfig(**tiers))
        assert torch.equal(model(x), plain(x))
        zo.close(model)


def test_deferred_models_and_what_comes_later() -> None:
    with zo.deferred_init():
        model = build(lambda: around(Table()))
    zo.offload(model, zo.OffloadConfig())
    model.append(around(Table()))
    model[1].table = torch.ones(WIDTH)  # of the program's own choice
    zo.offload(model)
    assert model[3][1].table.dtype == BF16 and model[1].table.dtype == FP32
    zo.close(model)


def test_keys_that_match_nothing_and_wrong_values() -> None:
    model = build(lambda: around(Table()))
    precision = Precision(buffers={"1.tabel": "fp32", RotaryEmbedding: "fp32"})
    with pytest.raises(zo.ConfigError, match=r"(?s)'1.tabel' matches no floating buffer.*RotaryEmbedding matches no"):
        zo.offload(model, zo.OffloadConfig(precision=precision))
    with pytest.raises(zo.ConfigError, match=r"Precision\(buffers=\) has 'fp8' for 'x', no compute dtype"):
        zo.OffloadConfig(precision=Precision(buffers={"x": "fp8"}))
    with pytest.raises(zo.ConfigError, match=r"Precision\(buffers=3\) does not map patterns"):
        zo.OffloadConfig(precision=Precision(buffers=3))  # type: ignore[arg-type]
    config = zo.OffloadConfig(precision=Precision(buffers={"*.table": "fp32"}))
    assert zo.OffloadConfig.from_dict(config.to_dict()) == config
    with pytest.raises(zo.ConfigError, match="precision.buffers has Table; where plain values"):
        zo.OffloadConfig(precision=Precision(buffers={Table: "fp32"})).to_dict()


class Memory(nn.Module):
    """A queue of what was seen, whose shape and in the end dtype change."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("memory", torch.zeros(0, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.memory = torch.cat([self.memory, y.detach()])[-5:]
        return (y * self.memory.mean()).square().mean()


def opened(nvme: Path, existing: str = "refuse", width: int = WIDTH) -> tuple[nn.Module, zo.AdamW]:
    config = zo.OffloadConfig(precision="fp32", params="nvme", optimizer="nvme", nvme=nvme, existing=existing)
    model = zo.offload(build(lambda: Memory(width)), config)
    return model, zo.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: zo.AdamW, begin: int, end: int) -> None:
    for step in range(begin, end):
        model(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer)


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_a_buffer_comes_back_in_its_shape(is_checkpoint: bool, tmp_path: Path) -> None:
    model, optimizer = opened(tmp_path / "plain")
    train(model, optimizer, 0, 5)
    expected = model.memory.clone(), model.state_dict()["linear.weight"].clone()
    zo.close(model)
    model, optimizer = opened(tmp_path / "run")
    train(model, optimizer, 0, 2)
    zo.save_checkpoint(model, optimizer, tmp_path / "checkpoint")
    zo.close(model)
    model, optimizer = opened(tmp_path / ("other" if is_checkpoint else "run"), "refuse" if is_checkpoint else "resume")
    if is_checkpoint:
        zo.load_checkpoint(model, optimizer, tmp_path / "checkpoint")
    else:
        assert zo.resume(model, optimizer).step == 2
    assert model.memory.shape == (4, WIDTH)
    train(model, optimizer, 2, 5)
    assert torch.equal(model.memory, expected[0]) and torch.equal(model.state_dict()["linear.weight"], expected[1])
    zo.close(model)
    # Models that were built with other buffers are other models, whatever the buffers are now.
    for width in (WIDTH + 1, 0):
        model, optimizer = opened(tmp_path / "run", "resume", width)
        with pytest.raises(
            zo.CheckpointError, match=rf"'memory' is \[0, 8\] torch.float32, this model's \[0, {width}\]"
        ):
            zo.resume(model, optimizer)
        zo.close(model)


def test_a_resume_says_which_buffers_have_another_dtype(tmp_path: Path) -> None:
    def opened(existing: str, **buffers: str) -> tuple[nn.Module, zo.AdamW]:
        precision = Precision(buffers=buffers)
        config = zo.OffloadConfig(params="nvme", nvme=tmp_path, existing=existing, precision=precision)
        model = zo.offload(build(lambda: around(Table(persistent=False)).append(Table())), config)
        return model, zo.AdamW(model.parameters())

    model, optimizer = opened("refuse")
    model(torch.ones(2, WIDTH)).float().sum().backward()
    optimizer.step()
    zo.commit(model, optimizer)
    zo.close(model)
    model, optimizer = opened("resume", **{"1.table": "fp32"})
    with pytest.warns(UserWarning, match=r"1\.table: buffers of another dtype than in the run of the ge"):
        zo.resume(model, optimizer)
    zo.close(model)
    model, optimizer = opened("resume", **{"3.table": "fp32"})
    with pytest.raises(zo.CheckpointError, match=r"'3.table' is \[8\] torch.bfloat16, this model's \[8\] torch.f"):
        zo.resume(model, optimizer)
    zo.close(model)


def test_a_run_of_an_earlier_version_goes_on_in_its_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kept floating buffers in theirs, and wrote no forms."""

    def opened(existing: str) -> tuple[nn.Module, zo.AdamW]:
        config = zo.OffloadConfig(params="nvme", nvme=tmp_path, existing=existing)
        model = zo.offload(build(lambda: around(RotaryTable()).append(RotaryTable(persistent=False))), config)
        return model, zo.AdamW(model.parameters())

    payload = GenerationKeeper._global_payload

    def earlier(*given: Any) -> dict[str, Any]:
        return {name: value for name, value in payload(*given).items() if name != "buffer_forms"}

    with monkeypatch.context() as patch:
        patch.setattr(dtypes, "_buffer_dtypes", lambda *_: {})
        patch.setattr(GenerationKeeper, "_global_payload", earlier)
        model, optimizer = opened("refuse")
        model(torch.ones(2, WIDTH)).float().sum().backward()
        optimizer.step()
        zo.commit(model, optimizer)
        zo.close(model)
    model, optimizer = opened("resume")
    with pytest.warns(UserWarning, match=r"^3\.table: buffers of another dtype"):
        zo.resume(model, optimizer)
    assert model[1].table.dtype == FP32 and model[3].table.dtype == BF16
    zo.close(model)


class Averaging(Table):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.table.lerp_(x.detach().mean(0).to(self.table.dtype), 0.1)
        return x


@pytest.mark.parametrize("precision", ["bf16", "fp32", Precision(buffers={"*.table": "fp32"})])
def test_averages_in_16_bits_are_told_once(precision: str | Precision) -> None:
    model = zo.offload(build(lambda: around(Averaging())), zo.OffloadConfig(precision=precision))
    optimizer = zo.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(2, WIDTH)).float().sum().backward()
            optimizer.step()
    found = [str(each.message) for each in told if "the program changes" in str(each.message)]
    assert found == [] if precision != "bf16" else len(found) == 1 and "buffers={'1.table': 'fp32'}" in found[0]
    zo.close(model)


class Late(nn.Module):
    """A buffer that the first forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.shift is None:
            self.shift = x.detach().mean(0)
        return (self.linear(x) - self.shift).square().mean()


def test_a_buffer_that_a_forward_makes_comes_back(tmp_path: Path) -> None:
    def opened(existing: str, make: Callable[[], nn.Module] = Late) -> tuple[nn.Module, zo.AdamW]:
        config = zo.OffloadConfig(precision="fp32", params="nvme", optimizer="nvme", nvme=tmp_path, existing=existing)
        model = zo.offload(build(make), config)
        return model, zo.AdamW(model.parameters())

    model, optimizer = opened("refuse")
    train(model, optimizer, 0, 2)
    shift = model.shift.clone()
    zo.close(model)
    model, optimizer = opened("resume")
    zo.resume(model, optimizer)
    assert torch.equal(model.shift, shift)
    train(model, optimizer, 2, 3)
    zo.close(model)

    class Without(Late):
        def __init__(self) -> None:
            super().__init__()
            del self.shift

    model, optimizer = opened("resume", Without)
    with pytest.warns(UserWarning, match="has the buffers shift, which this model does not have"):
        zo.resume(model, optimizer)
    zo.close(model)


@pytest.mark.parametrize(("precision", "told"), [("fp16", True), ("fp32", False)])
def test_values_that_overflow_are_told(precision: str, told: bool) -> None:
    model = build(lambda: around(RotaryTable()))
    model[1].table[0] = 1e6
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        zo.offload(model, zo.OffloadConfig(precision=precision))
    assert any("1.table has values beyond torch.float16" in str(each.message) for each in found) == told
    zo.close(model)


def test_changes_between_steps_are_told_too() -> None:
    model = zo.offload(build(lambda: around(RotaryTable())), zo.OffloadConfig())
    optimizer = zo.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="the program changes 1.table"):
        for _ in range(2):
            model(torch.ones(2, WIDTH)).float().sum().backward()
            optimizer.step()
            model[1].table += 1
    zo.close(model)
