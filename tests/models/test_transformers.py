"""Real architectures train offloaded exactly as they train plainly: same losses, same parameters, bit for bit.

The plain twin is a copy that was never offloaded, trained by the same `zo.AdamW`. On the nvme tier memory holds
fewer units than the model has, so that they really leave.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.architectures import ARCHITECTURES, Architecture
from tests.helpers.pairwise import full
from tests.helpers.reference import placed, read_masters
from zero_offload.model.api import runtime_of
from zero_offload.runtime.units.unit import UnitState

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'zero_offload[hf]'")

Script = Callable[[nn.Module, zo.AdamW, Architecture], Iterator[float]]

TWO_FRAMES, THREE_FRAMES = "4MiB", "6MiB"
"""Of these models a unit takes one frame, and one more when part of it is frozen."""


@pytest.fixture(params=["nvme", full("cpu")])
def config(request: pytest.FixtureRequest, nvme: Path) -> zo.OffloadConfig:
    if request.param == "cpu":
        return placed("fp32", ("cpu", "cpu", "cpu"), None, None)
    return placed("fp32", ("nvme", "cpu", "nvme"), nvme, THREE_FRAMES)


@pytest.fixture
def nvme_config(nvme: Path) -> zo.OffloadConfig:
    return placed("fp32", ("nvme", "cpu", "nvme"), nvme, THREE_FRAMES)


def run(script: Script, each: Architecture, model: nn.Module) -> list[float]:
    torch.manual_seed(1)
    optimizer = zo.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    return list(script(model, optimizer, each))


def assert_same(script: Script, each: Architecture, model: nn.Module, *configs: zo.OffloadConfig) -> None:
    """`model` trains alike on its own and offloaded with each of `configs`."""
    plain = copy.deepcopy(model)
    expected = run(script, each, plain)
    assert len(set(expected)) > 1, "the losses do not move: nothing is compared"
    for config in configs:
        twin = zo.offload(copy.deepcopy(model), config)
        assert run(script, each, twin) == expected
        check_departures(twin, config)
        masters = read_masters(twin)
        zo.close(twin)
        assert [name for name, p in plain.named_parameters() if not torch.equal(p.detach(), masters[name])] == []
        assert [name for name, b in plain.named_buffers() if not torch.equal(b, twin.get_buffer(name))] == []


def check_departures(model: nn.Module, config: zo.OffloadConfig) -> None:
    """With a directory some units are away now: memory does not hold them all."""
    owner = runtime_of(model)
    assert owner is not None
    if config.nvme_dirs:
        assert any(unit.state is UnitState.AWAY for unit in owner.units)


def step(optimizer: zo.AdamW) -> None:
    optimizer.step()
    optimizer.zero_grad()


def train(model: nn.Module, optimizer: zo.AdamW, each: Architecture) -> Iterator[float]:
    for seed in range(3):
        loss = model(**each.batch(seed)).loss
        loss.backward()
        step(optimizer)
        yield loss.item()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture(name: str, nvme: Path) -> None:
    each = ARCHITECTURES[name]
    away = placed("fp32", ("nvme", "cpu", "nvme"), nvme, TWO_FRAMES)
    assert_same(train, each, each.build(), away, placed("fp32", ("cpu", "cpu", "cpu"), None, None))


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2"])
def test_with_dropout(name: str, config: zo.OffloadConfig) -> None:
    dropout = {
        "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2},
        "t5": {"dropout_rate": 0.2},
        "gpt2": {"embd_pdrop": 0.2, "attn_pdrop": 0.2, "resid_pdrop": 0.2},
    }
    each = ARCHITECTURES[name]
    model = each.build(**dropout[name])
    batch = each.batch(0)
    assert model(**batch).loss.item() != model(**batch).loss.item(), "nothing drops out"
    assert_same(train, each, model, config)


def test_layers_that_are_dropped_by_chance(config: zo.OffloadConfig) -> None:
    each = ARCHITECTURES["wav2vec2"]
    assert_same(train, each, each.build(layerdrop=0.5), config)


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_with_adapters(name: str, config: zo.OffloadConfig) -> None:
    """A frozen model with trained low-rank adapters."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'zero_offload[hf]'")
    targets = {"bert": ["query", "value"], "t5": ["q", "v"]}.get(name, ["q_proj", "v_proj"])
    each = ARCHITECTURES[name]
    adapters = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.1, init_lora_weights=False)
    model = peft.get_peft_model(each.build(), adapters)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert_same(train, each, model, config)


def train_and_generate(model: nn.Module, optimizer: zo.AdamW, each: Architecture) -> Iterator[float]:
    generate: Any = model.generate
    for seed in range(3):
        loss = model(**each.batch(seed)).loss
        loss.backward()
        step(optimizer)
        yield loss.item()
        prompt = {k: v for k, v in each.batch(seed + 10).items() if k != "labels"}
        tokens: Tensor = generate(**prompt, max_new_tokens=6, do_sample=seed == 1, num_beams=2 if seed == 2 else 1)
        yield from tokens.flatten().double().tolist()


@pytest.mark.parametrize("name", ["llama", "t5", "mamba", "whisper"])
def test_generation_between_steps(name: str, config: zo.OffloadConfig) -> None:
    each = ARCHITECTURES[name]
    assert_same(train_and_generate, each, each.build(), config)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bart", "t5"])
def test_checkpointing(name: str, reentrant: bool, config: zo.OffloadConfig) -> None:
    each = ARCHITECTURES[name]
    model: Any = each.build()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(train, each, model, config)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
def test_checkpointing_of_a_frozen_model_with_adapters(reentrant: bool, config: zo.OffloadConfig) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'zero_offload[hf]'")
    each = ARCHITECTURES["llama"]
    model: Any = each.build()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    assert_same(train, each, adapted, config)


def train_and_evaluate(model: nn.Module, optimizer: zo.AdamW, each: Architecture) -> Iterator[float]:
    for seed in range(3):
        loss = model(**each.batch(seed)).loss
        with torch.no_grad():
            yield model(**each.batch(seed + 10)).loss.item()
        loss.backward()
        model.eval()
        with torch.inference_mode():
            yield model(**each.batch(seed + 20)).loss.item()
        model.train()
        step(optimizer)
        yield loss.item()


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "deberta_v2", "bart"])
def test_evaluation_between_everything(name: str, nvme_config: zo.OffloadConfig) -> None:
    each = ARCHITECTURES[name]
    assert_same(train_and_evaluate, each, each.build(), nvme_config)


def test_modules_kept_in_fp32(nvme: Path) -> None:
    """As README says to pass what a Hugging Face class keeps in fp32."""
    each = ARCHITECTURES["t5"]
    model: Any = each.build()
    assert "wo" in model._keep_in_fp32_modules
    for param in model.parameters():
        param.data = param.data.bfloat16().float()
    plain = copy.deepcopy(model).bfloat16()
    for name, module in plain.named_modules():
        if name.endswith(".wo"):
            module.float()
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            module.register_forward_hook(lambda _, args, output: output.bfloat16())
    precision = zo.Precision(modules=dict.fromkeys(names_kept(model), "fp32"))
    config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme, precision=precision)
    assert run(train, each, zo.offload(model, config)) == run(train, each, plain)


def names_kept(model: Any) -> list[str]:
    kept = tuple(f".{name}" for name in model._keep_in_fp32_modules or ())
    return [name for name, _ in (*model.named_modules(), *model.named_parameters()) if f".{name}".endswith(kept)]


def test_parameters_kept_in_fp32(nvme: Path) -> None:
    """Where the class names parameters, whose modules are not: the model's own code casts."""
    each = ARCHITECTURES["rwkv"]
    model: Any = each.build()
    names = names_kept(model)
    assert len(names) == 4 and all(name.endswith(("time_decay", "time_first")) for name in names)
    for param in model.parameters():
        param.data = param.data.bfloat16().float()
    plain = copy.deepcopy(model).bfloat16()
    for name in names:
        plain.get_parameter(name).data = model.get_parameter(name).data.clone()
    precision = zo.Precision(modules=dict.fromkeys(names, "fp32"))
    config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme, precision=precision)
    zo.offload(model, config)
    assert {name for name, param in model.named_parameters() if param.dtype == torch.float32} == set(names)
    assert run(train, each, model) == run(train, each, plain)
