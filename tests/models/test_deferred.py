"""A model built in `deferred_init` and offloaded is the plain one offloaded, on every tier and with several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.deferred import built
from tests.helpers.models import AttentionBlock, TinyLM, tokens_of
from tests.helpers.pretrained import write_weights
from tests.helpers.ranks import UNEVEN, Case, Outcome, RankPool, read_params, steps
from tests.helpers.reference import param_groups, placed, read_masters
from zero_offload.finetune.gpt import GPT
from zero_offload.finetune.gpt_config import preset
from zero_offload.integrations.file_names import FileNames
from zero_offload.integrations.pretrained import plan_weights
from zero_offload.model.deferred.recipe import RecordedRecipe

THREE = [name for name in ARCHITECTURES if name in ("bert", "mamba", "wav2vec2")]
"""Also with everything on disk: ties and inits by data; parameters from data; a parametrization."""


def _start(make: Callable[[], nn.Module], config: zo.OffloadConfig, *, deferred: bool) -> dict[str, Any]:
    """All properties of an offloaded model, which must be equal."""
    model, generator = built(make, deferred=deferred)
    if deferred:
        assert all(param.is_meta for param in model.parameters())
        assert zo.plan(model, config).fits
    trainable = {name: param.requires_grad for name, param in model.named_parameters()}
    assert zo.offload(model, config) is model
    assert torch.equal(torch.get_rng_state(), generator)
    assert {name: param.requires_grad for name, param in model.named_parameters()} == trainable
    ids = [id(param) for _, param in model.named_parameters(remove_duplicate=False)]
    found = {
        "generator": generator,
        "names": [name for name, _ in model.named_parameters(remove_duplicate=False)],
        "ties": torch.tensor([ids.index(each) for each in ids]),
        "trainable": trainable,
        "attributes": [sorted(vars(param)) for param in model.parameters()],
        **read_masters(model),
        **{f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()},
    }
    zo.close(model)
    return found


def _assert_same_start(make: Callable[[], nn.Module], config: zo.OffloadConfig) -> None:
    expected, found = _start(make, config, deferred=False), _start(make, config, deferred=True)
    assert list(found) == list(expected)
    same = {n: torch.equal(found[n], x) if isinstance(x, Tensor) else found[n] == x for n, x in expected.items()}
    assert [name for name, is_same in same.items() if not is_same] == []


def _attention() -> nn.Module:
    return TinyLM(block=AttentionBlock)


def _frozen() -> nn.Module:
    model = TinyLM(UNEVEN)
    model.blocks[0].requires_grad_(False)
    return model.bfloat16()


@pytest.mark.parametrize(
    "make", [_attention, _frozen, lambda: GPT(preset("tiny"), 5)], ids=["attention", "frozen", "gpt"]
)
def test_the_start(make: Callable[[], nn.Module], config: zo.OffloadConfig) -> None:
    _assert_same_start(make, config)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    _assert_same_start(lambda: _unseeded(name), placed("fp32", ("cpu", "cpu", "cpu"), None, None))


@pytest.mark.parametrize("name", THREE)
def test_an_architecture_on_disk(name: str, nvme_config: zo.OffloadConfig) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    _assert_same_start(lambda: _unseeded(name), nvme_config)


def _unseeded(name: str) -> nn.Module:
    return ARCHITECTURES[name].build()


def _train(model: nn.Module, num_steps: int = 3) -> list[float]:
    optimizer = zo.AdamW(param_groups(model), lr=1e-2, weight_decay=0.1)
    losses = []
    for seed in range(num_steps):
        loss = model(tokens_of(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [_attention, lambda: TinyLM(UNEVEN)])
def test_training(make: Callable[[], nn.Module], config: zo.OffloadConfig) -> None:
    results = []
    for deferred in (False, True):
        model, _ = built(make, deferred=deferred)
        zo.offload(model, config)
        results.append((_train(model), read_masters(model)))
        zo.close(model)
    (expected, masters), (losses, found) = results
    assert losses == expected and len(set(losses)) == 3
    assert all(torch.equal(found[name], values) for name, values in masters.items())


class Recurrent(nn.Module):
    """torch's LSTM keeps its weights in a list beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(8)) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.lstm(self.embedding(tokens))[0]
        return (found * self.scales[0] + self.scales[1]).square().mean()


def test_modules_that_keep_their_weights_elsewhere(fp32_config: zo.OffloadConfig) -> None:
    losses = []
    for deferred in (False, True):
        model, _ = built(Recurrent, deferred=deferred)
        losses.append(_train(zo.offload(model, fp32_config)))
        zo.close(model)
    assert losses[0] == losses[1] and len(set(losses[0])) == 3


# Several ranks


def _start_ranks(rank: int, world_size: int, case: Case, values: str) -> Outcome:
    """Train a model that was built plainly ("plain") or deferred, from one seed or each rank's own."""
    torch.manual_seed(3)
    if values == "plain":
        model: nn.Module = TinyLM(case.dim)
    else:
        with zo.deferred_init(values):
            model = TinyLM(case.dim)
    zo.offload(model, zo.OffloadConfig(**case.settings))
    out = Outcome()
    try:
        optimizer = zo.AdamW(param_groups(model), lr=1e-2, weight_decay=0.1)
        steps(case, (rank, world_size), model, optimizer, range(case.num_steps), out)
        out.params = read_params(model)
        return out
    finally:
        zo.close(model)


@pytest.mark.parametrize("stage", [3, 2, 0])
def test_two_ranks(stage: int, pool: RankPool, tmp_path: Path) -> None:
    def train(values: str) -> list[Outcome]:
        nvme = tmp_path / values
        nvme.mkdir()
        settings = {"stage": stage, "params": "nvme", "optimizer": "nvme", "nvme": nvme, "precision": "bf16"}
        return pool.succeed(_start_ranks, Case(settings, num_steps=2), values)

    expected, found = train("plain"), train("init")
    assert found == expected
    assert expected[0].losses != expected[1].losses


# Values that are not made


def test_resume_makes_no_values(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"params": "nvme", "optimizer": "nvme", "nvme": nvme, "existing": "resume"}

    def run(num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
        model, _ = built(TinyLM, deferred=True)
        optimizer = zo.AdamW(zo.offload(model, zo.OffloadConfig(**settings)).parameters(), lr=1e-2)
        zo.resume(model, optimizer)
        losses = []
        for seed in range(num_steps):
            loss = model(tokens_of(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            zo.commit(model, optimizer)
            losses.append(loss.item())
        masters = read_masters(model)
        zo.close(model)
        return losses, masters

    _, expected = run(2)

    def make(recipe: RecordedRecipe) -> Tensor:
        raise AssertionError("a value is made that is not needed")

    monkeypatch.setattr(RecordedRecipe, "make", make)
    _, found = run(0)
    assert all(torch.equal(found[name], values) for name, values in expected.items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(11)
    return write_weights(tmp_path / "in", TinyLM(UNEVEN))


def _skipped() -> nn.Module:
    with zo.deferred_init(values="skip"):
        return TinyLM(UNEVEN)


def test_skipped_values_are_loaded(config: zo.OffloadConfig, folder: Path) -> None:
    results = []
    for make in (lambda: TinyLM(UNEVEN), _skipped):
        model = zo.offload(make(), config)
        zo.load_pretrained(model, folder)
        results.append((_train(model), read_masters(model)))
        zo.close(model)
    (expected, masters), (losses, found) = results
    assert losses == expected
    assert all(torch.equal(found[name], values) for name, values in masters.items())


def test_skipped_values_come_from_a_checkpoint(config: zo.OffloadConfig, tmp_path: Path) -> None:
    model = zo.offload(built(TinyLM, deferred=False)[0], config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    expected = read_masters(model)
    zo.close(model)
    with zo.deferred_init(values="skip"):
        model = TinyLM()
    zo.offload(model, config)
    zo.load_checkpoint(model, zo.AdamW(model.parameters(), lr=1e-2), tmp_path / "saved")
    found = read_masters(model)
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    zo.close(model)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, folder: model(tokens_of(0)),
        lambda model, folder: model.head(torch.ones(2, UNEVEN)),
        lambda model, folder: model.state_dict(),
        lambda model, folder: model.norm.weight + 1,
        lambda model, folder: zo.gathered(model).__enter__(),
        lambda model, folder: zo.gathered(model, kind="master").__enter__(),
        lambda model, folder: zo.export_pretrained(model, folder / "out"),
        lambda model, folder: zo.save_checkpoint(model, zo.AdamW(model.parameters()), folder / "out"),
    ],
)
def test_skipped_values_are_missed(use: Callable[[Any, Path], Any], config: zo.OffloadConfig, tmp_path: Path) -> None:
    model = zo.offload(_skipped(), config)
    with pytest.raises(zo.ConfigError, match="load_pretrained"):
        use(model, tmp_path)
    assert not os.path.lexists(tmp_path / "out")
    zo.close(model)


class WithTable(nn.Module):
    """A table that a computation fills, and buffers of the form of a weight."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = nn.Embedding(6, 4)
        table = torch.empty(6, 4)
        table[:, ::2], table[:, 1::2] = torch.arange(12.0).view(6, 2).sin(), torch.arange(12.0).view(6, 2).cos()
        with torch.no_grad():
            self.table.weight.copy_(table)
        table.mul_(0)  # the copy has been made
        self.shift = nn.Parameter(torch.full_like(self.linear.bias, scale))
        self.register_buffer("steps", torch.zeros_like(self.linear.weight))
        self.register_buffer("ones", self.linear.weight.new_ones(3))


def test_values_that_need_no_skipped_ones_are_made(tmp_path: Path) -> None:
    """Of a table in no file, and of a form alone."""
    torch.manual_seed(0)
    plain = WithTable()
    save_file(
        {"linear.weight": plain.linear.weight.detach(), "linear.bias": plain.linear.bias.detach()},
        tmp_path / "f.safetensors",
    )
    with zo.deferred_init(values="skip"):
        model = WithTable()
    plan_weights(
        model, tmp_path / "f.safetensors", FileNames(fresh=frozenset(("table.weight", "shift", "steps", "ones")))
    )
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    found, expected = model.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    zo.close(model)


class OfValues(WithTable):
    """A buffer of a weight's values, which are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scaled", self.linear.weight.detach() * 2)


def test_values_of_skipped_ones_are_missed() -> None:
    with pytest.raises(zo.ConfigError, match="buffer scaled of OfValues"), zo.deferred_init(values="skip"):
        OfValues()


def test_skipped_values_beside_real_ones(config: zo.OffloadConfig, folder: Path) -> None:
    """A parameter that was not deferred has its values from the start."""
    model = _skipped()
    model.norm = nn.LayerNorm(UNEVEN)
    zo.offload(model, config)
    with pytest.raises(zo.ConfigError, match="load_pretrained"):
        model(tokens_of(0))
    zo.load_pretrained(model, folder)
    assert model(tokens_of(0)).isfinite()
    zo.close(model)


# Errors


def test_a_model_on_meta_has_no_values(config: zo.OffloadConfig) -> None:
    with torch.device("meta"):
        model = TinyLM()
    assert zo.plan(model, config).fits
    with pytest.raises(zo.ConfigError, match=r"embedding\.weight is on meta .*deferred_init"):
        zo.offload(model, config)


def test_offload_inside_raises(config: zo.OffloadConfig) -> None:
    with zo.deferred_init():
        model = TinyLM()
        with pytest.raises(zo.ConfigError, match=r"leave .* before zo\.offload"):
            zo.offload(model, config)
    zo.close(zo.offload(model, config))


def test_two_parameters_in_one_memory(config: zo.OffloadConfig) -> None:
    with zo.deferred_init():
        model = TinyLM()
        model.extra = nn.Parameter(model.head.weight.data)
    with pytest.raises(zo.ConfigError, match="two parameters in the same memory"):
        zo.offload(model, config)


def test_after_an_error_the_model_is_as_it_was(config: zo.OffloadConfig, tmp_path: Path) -> None:
    model, _ = built(TinyLM, deferred=True)
    file = tmp_path / "file"
    file.touch()
    wrong = zo.OffloadConfig(params="nvme", nvme=file / "run")
    with pytest.raises(zo.ZeroOffloadError):
        zo.offload(model, wrong)
    assert all(param.is_meta for param in model.parameters())
    expected, _ = built(TinyLM, deferred=False)
    masters = read_masters(zo.offload(model, config))
    if config.numerics.compute == "fp32":
        assert all(torch.equal(masters[name], param.detach()) for name, param in expected.named_parameters())
    zo.close(model)


def test_an_optimizer_from_before(fp32_config: zo.OffloadConfig) -> None:
    """It has the deferred parameters, which the model has no longer."""
    model, _ = built(TinyLM, deferred=True)
    early = zo.AdamW(model.parameters(), lr=1e-2)
    zo.offload(model, fp32_config)
    model(tokens_of(0)).backward()
    with pytest.raises(zo.ConfigError, match=r"zo\.offload"):
        early.step()
    zo.close(model)


def test_from_pretrained_raises(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ARCHITECTURES["gpt2"].build().save_pretrained(tmp_path / "gpt2")
    with zo.deferred_init(), pytest.raises(zo.ConfigError, match=r"from_config[\s\S]*zo\.load_pretrained"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")
    assert not any(param.is_meta for param in model.parameters())
