"""What peft does to a model gives the same losses and files, bit for bit, on an offloaded one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.pairwise import full
from tests.helpers.reference import placed

peft: Any = pytest.importorskip("peft", reason="peft is not installed: pip install 'zero_offload[hf]'")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

QV = ["q_proj", "v_proj"]
SQUARE = ["q_proj", "o_proj"]
COMMON: dict[str, Any] = {"task_type": "CAUSAL_LM"}
LORA: dict[str, Any] = COMMON | {"r": 4}

METHODS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(target_modules=QV, **LORA),
    "modules_to_save": lambda: peft.LoraConfig(target_modules=QV, modules_to_save=["lm_head"], **LORA),
    "dora": lambda: peft.LoraConfig(target_modules=QV, use_dora=True, **LORA),
    "embeddings": lambda: peft.LoraConfig(target_modules=[*QV, "embed_tokens"], **LORA),
    "trainable_token_indices": lambda: peft.LoraConfig(target_modules=QV, trainable_token_indices=[1, 5], **LORA),
    "target_parameters": lambda: peft.LoraConfig(target_modules=[], target_parameters=["mlp.up_proj.weight"], **LORA),
    "loha": lambda: peft.LoHaConfig(target_modules=QV, **LORA),
    "vera": lambda: peft.VeraConfig(target_modules=SQUARE, **LORA),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **COMMON),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 5], target_modules=["embed_tokens"], **COMMON),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], **COMMON),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **COMMON),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **COMMON),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **COMMON),
}
PROMPTS = ("prompt", "prefix", "p-tuning")
"""They have no layers to merge, and train all of their adapters."""
ONE_ADAPTER = ("layer norms", "trainable_token_indices", "tokens")


def base() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def adapted(name: str, seed: int = 1) -> Any:
    model = base()
    torch.manual_seed(seed)
    return peft.get_peft_model(model, METHODS[name]())


def loss_of(model: Any, seed: int) -> Tensor:
    tokens = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).loss
    return loss


def evaluate(model: Any) -> float:
    with torch.no_grad():
        return loss_of(model, 99).item()


def trained(model: Any) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def train(model: Any, steps: int) -> Iterator[float]:
    optimizer = zo.AdamW(trained(model), lr=1e-2)
    for seed in range(steps):
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def saved(model: Any, path: Path) -> bytes:
    model.save_pretrained(path)
    return (path / "adapter_model.safetensors").read_bytes()


def gathered(model: Any, away: bool, mode: str = "read") -> AbstractContextManager[object]:
    return zo.gathered(model, mode=mode) if away else nullcontext()


def journey(model: Any, name: str, path: Path, other: Path, *, away: bool) -> Iterator[Any]:
    """Train, save, load, switch, merge; `other` is an adapter of the same kind."""
    yield list(train(model, 3))
    yield saved(model, path)
    plain = peft.PeftModel.from_pretrained(base(), path)
    found = evaluate(model)
    assert evaluate(plain) == found
    yield found
    with model.disable_adapter():
        yield evaluate(model)
    state = peft.get_peft_model_state_dict(model)
    kept = copy.deepcopy(state)
    peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(other)))
    yield evaluate(model)
    peft.set_peft_model_state_dict(model, kept)
    yield evaluate(model)
    if name in PROMPTS:
        return
    if name not in ONE_ADAPTER:
        with gathered(model, away):
            model.load_adapter(other, "other")
        model.set_adapter("other")
        yield evaluate(model)
        model.set_adapter("default")
        yield list(train(model, 1))
        model.delete_adapter("other")
    with gathered(model, away, "write"):
        model.merge_adapter()
    yield evaluate(model)
    with gathered(model, away, "write"):
        model.unmerge_adapter()
    yield from train(model, 1)
    with gathered(model, away, "write"):
        merged = model.merge_and_unload()
    yield evaluate(merged)
    yield {key: value.clone() for key, value in merged.state_dict().items()}


def compare(name: str, tier: str, nvme: Path, tmp_path: Path) -> None:
    other = adapted(name, seed=7)
    list(train(other, 1))
    other.save_pretrained(tmp_path / "other")
    steps = []
    for away in (False, True):
        model = adapted(name)
        if away:
            zo.offload(model, placed("fp32", (tier,) * 3, nvme if tier == "nvme" else None))
        steps.append(list(journey(model, name, tmp_path / f"saved {away}", tmp_path / "other", away=away)))
    assert len(steps[0]) == len(steps[1])
    for found, expected in zip(*steps, strict=True):
        if isinstance(found, dict):
            assert list(found) == list(expected) and all(torch.equal(found[key], expected[key]) for key in found)
        else:
            assert found == expected


@pytest.mark.parametrize("name", METHODS)
def test_methods_on_nvme(name: str, nvme: Path, tmp_path: Path) -> None:
    compare(name, "nvme", nvme, tmp_path)


QUICK = ("modules_to_save", "embeddings", "target_parameters", "dora", "prefix")


@pytest.mark.parametrize("name", [each if each in QUICK else full(each) for each in METHODS])
def test_methods_in_memory(name: str, nvme: Path, tmp_path: Path) -> None:
    compare(name, "cpu", nvme, tmp_path)


def adalora() -> Any:
    torch.manual_seed(1)
    limits = {"init_r": 6, "target_r": 2, "tinit": 0, "tfinal": 1, "deltaT": 1, "total_step": 6}
    return peft.get_peft_model(base(), peft.AdaLoraConfig(target_modules=QV, **limits, **COMMON))


def allocate(model: Any, away: bool) -> Iterator[float]:
    """As the guide says."""
    adapters = trained(model)
    optimizer = zo.AdamW(adapters, lr=1e-2)
    for step in range(7):
        loss = loss_of(model, step)
        loss.backward()
        if not away:
            optimizer.step()
            model.base_model.update_and_allocate(step)
        else:
            with zo.gathered(adapters, kind="grads") as grads:
                pass
            optimizer.step()
            with zo.gathered(adapters, mode="write") as params:
                for name, param in params.items():
                    param.grad = grads[name]
                model.base_model.update_and_allocate(step)
                for param in params.values():
                    param.grad = None
        optimizer.zero_grad()
        yield loss.item()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_adalora(tier: str, nvme: Path, tmp_path: Path) -> None:
    plain, model = adalora(), adalora()
    zo.offload(model, placed("fp32", (tier,) * 3, nvme if tier == "nvme" else None))
    assert list(allocate(model, away=True)) == list(allocate(plain, away=False))
    assert saved(model, tmp_path / "a") == saved(plain, tmp_path / "b")


def test_a_gradient_that_a_step_has_used_is_named(nvme: Path) -> None:
    model = zo.offload(adalora(), zo.OffloadConfig(precision="fp32"))
    list(train(model, 1))
    with pytest.raises(
        zo.ZeroOffloadError, match=r"lora_A.default, offloaded to cpu, and None.*step\(\) uses a gradient"
    ):
        model.base_model.update_and_allocate(0)
    assert evaluate(model) > 0


@pytest.mark.parametrize("call", ["merge_adapter", "merge_and_unload", "add_adapter"])
def test_what_computes_with_weights_names_gathered(call: str, nvme: Path) -> None:
    model = zo.offload(adapted("modules_to_save"), placed("fp32", ("nvme",) * 3, nvme))
    expected = evaluate(model)
    with pytest.raises(zo.ZeroOffloadError, match=r"with zo\.gathered\(module"):
        getattr(model, call)(*(("new", METHODS["modules_to_save"]()) if call == "add_adapter" else ()))
    model.set_adapter("default")
    assert evaluate(model) == expected
