"""Adapters of peft over a base that is streamed in: what they begin with, and folders that peft loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.ranks import RankPool
from zero_offload.cli.main import main
from zero_offload.integrations import pretrained

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

TOKENS = torch.arange(24).view(2, 12)
CAUSAL = {"task_type": "CAUSAL_LM"}
KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules="all-linear", **CAUSAL),
    "trained whole": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], **CAUSAL),
    "embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], **CAUSAL),
    "biases": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], bias="all", **CAUSAL),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=["q_proj"], **CAUSAL),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], **CAUSAL),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], **CAUSAL),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
}
BEGIN_AS_THE_BASE = ("lora", "trained whole", "embedding", "biases", "loha", "ia3", "vera", "norms")


def base_config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_bias=True,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose values differ from those of any fresh model, norms included."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(base_config())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return folder


def deferred(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with zo.deferred_init(values="skip"):
        return peft.get_peft_model(transformers.LlamaForCausalLM(base_config()), KINDS[kind]())


def started(kind: str, base: Path, **settings: Any) -> Any:
    model = deferred(kind)
    zo.offload(model, zo.OffloadConfig(precision="fp32", **settings))
    zo.load_pretrained(model, base)
    return model


def trained(model: Any) -> Any:
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    for _ in range(2):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    model.train()
    return found


def theirs(base: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_from_the_base_and_peft_loads_what_is_exported(kind: str, base: Path, nvme: Path) -> None:
    model = started(kind, base, params="nvme", optimizer="nvme", nvme=nvme)
    begin = logits(model)
    if kind in BEGIN_AS_THE_BASE:
        assert torch.equal(begin, logits(theirs(base)))
    end = logits(trained(model))
    assert not torch.equal(begin, end)
    zo.export_pretrained(model, nvme.parent / "out")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(theirs(base), nvme.parent / "out")), end)
    zo.close(model)


def test_fresh_adapters_follow_the_seed_and_differ_from_each_other() -> None:
    def first_of_each(seed: int) -> list[torch.Tensor]:
        model = zo.offload(deferred("lora", seed), zo.OffloadConfig(precision="fp32"))
        recipes = [model_recipe.make() for model_recipe in pretrained.need_runtime(model, "").without_values.values()]
        zo.close(model)
        return [values for values in recipes if values.shape == (4, 32)]

    values, again, other = first_of_each(0), first_of_each(0), first_of_each(5)
    assert len(values) > 4 and all(map(torch.equal, values, again))
    assert not any(map(torch.equal, values, other))
    assert not any(torch.equal(values[0], each) for each in values[1:])


def test_only_adapters_are_read_to_be_exported(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read, rested = started("lora", base), [], pretrained._rested

    def noting(owner: Any, section: Any, target: Any) -> Any:
        read.append(section.layout.trainable)
        return rested(owner, section, target)

    monkeypatch.setattr(pretrained, "_rested", noting)
    zo.export_pretrained(model, tmp_path / "out", dtype="bf16")
    assert read and all(read)
    zo.close(model)


def test_adapters_that_are_there_keep_their_values(base: Path) -> None:
    torch.manual_seed(0)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(base_config()), KINDS["trained whole"]())
    weight = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight"
    before = model.get_parameter(weight).detach().clone()
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    zo.load_pretrained(model, base)
    with zo.gathered(model):
        assert torch.equal(model.get_parameter(weight), before)
    assert torch.equal(logits(model), logits(theirs(base)))
    zo.close(model)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (lambda: peft.LoraConfig(target_modules=["q_proj"], use_dora=True), "use_dora=True"),
        (lambda: peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (lambda: peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1]), "trainable_token_indices"),
    ],
)
def test_adapters_made_of_other_weights_are_refused(config: Callable[[], Any], what: str, base: Path) -> None:
    model = peft.get_peft_model(transformers.LlamaForCausalLM(base_config()), config())
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    with pytest.raises(zo.ConfigError, match=what):
        zo.load_pretrained(model, base)
    zo.close(model)


def test_an_old_prefix_is_explained(base: Path) -> None:
    model = zo.offload(deferred("lora"), zo.OffloadConfig(precision="fp32"))
    with pytest.raises(zo.CheckpointError, match="leave prefix='base_model.model.' out"):
        zo.load_pretrained(model, base, prefix="base_model.model.")
    zo.close(model)


def test_adapters_without_their_peft_model_are_not_exported(base: Path, tmp_path: Path) -> None:
    inner = started("lora", base).get_base_model()
    with pytest.raises(zo.ConfigError, match="Export the peft.PeftModel"):
        zo.export_pretrained(inner, tmp_path / "out")
    zo.close(inner)


def test_a_saved_run_with_adapters_is_exported_for_peft(base: Path, nvme: Path) -> None:
    model = trained(started("lora", base, optimizer="nvme", nvme=nvme))
    end, out = logits(model), nvme.parent / "out"
    zo.close(model)
    assert main(["export", str(nvme), str(out)]) == 0
    assert torch.equal(logits(peft.PeftModel.from_pretrained(theirs(base), str(out))), end)


def test_a_compiled_model_is_exported_under_its_own_names(base: Path, tmp_path: Path) -> None:
    model = zo.offload(theirs(base), zo.OffloadConfig(precision="fp32"))
    zo.export_pretrained(torch.compile(model), tmp_path / "out")  # type: ignore[arg-type]
    assert torch.equal(logits(theirs(tmp_path / "out")), logits(theirs(base)))
    zo.close(model)


def _on_a_rank(rank: int, world_size: int, base: str, out: str) -> torch.Tensor:
    model = trained(started("lora", Path(base)))
    zo.export_pretrained(model, out)
    end = logits(model)
    zo.close(model)
    return end


def test_ranks_draw_and_export_as_one(base: Path, tmp_path: Path, pool: RankPool) -> None:
    end, other = pool.succeed(_on_a_rank, str(base), str(tmp_path / "out"))
    assert torch.equal(end, other)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(theirs(base), tmp_path / "out")), end)
