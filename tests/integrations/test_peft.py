"""An offloaded model with adapters of peft has the same losses and files as the plain one, bit for bit."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.ranks import RankPools
from tests.helpers.reference import placed
from tests.helpers.tools import transformers
from zero_offload.storage.shards.shard import Shard
from zero_offload.storage.shards.store import ShardStore

import peft  # isort: skip  # after what keeps it off the network

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
    "target_parameters": lambda: peft.LoraConfig(
        target_modules=QV, target_parameters=["experts.gate_up_proj", "experts.down_proj"], **LORA
    ),
    "tied head": lambda: peft.LoraConfig(target_modules=[*QV, "lm_head"], **LORA),
    "tied copy": lambda: peft.LoraConfig(target_modules=QV, modules_to_save=["lm_head"], **LORA),
}
"""Adapters that work in full."""
OTHERS: dict[str, Callable[[], Any]] = {
    "adalora": lambda: peft.AdaLoraConfig(target_modules=QV, init_r=6, target_r=2, total_step=9, tfinal=1, **COMMON),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=QV, **COMMON),
    "c3a": lambda: peft.C3AConfig(block_size=4, target_modules=QV, **COMMON),
    "cpt": lambda: peft.CPTConfig(
        cpt_token_ids=[1, 2], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2], opt_loss_decay_factor=0.9, **COMMON
    ),
    "delora": lambda: peft.DeloraConfig(r=4, target_modules=QV, **COMMON),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=10, target_modules=QV, **COMMON),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=QV, **COMMON),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **COMMON),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], **COMMON),
    "llama adapter": lambda: peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, **COMMON),
    "loha": lambda: peft.LoHaConfig(target_modules=QV, **LORA),
    "lokr": lambda: peft.LoKrConfig(target_modules=QV, **LORA),
    "miss": lambda: peft.MissConfig(target_modules=QV, **LORA),
    "multitask prompt": lambda: peft.MultitaskPromptTuningConfig(num_virtual_tokens=3, num_tasks=2, **COMMON),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=QV, **COMMON),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **COMMON),
    "poly": lambda: peft.PolyConfig(r=4, n_tasks=2, n_skills=2, n_splits=2, target_modules=QV, **COMMON),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **COMMON),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **COMMON),
    "randlora": lambda: peft.RandLoraConfig(target_modules=SQUARE, **LORA),
    "shira": lambda: peft.ShiraConfig(target_modules=QV, **LORA),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 5], target_modules=["embed_tokens"], **COMMON),
    "vblora": lambda: peft.VBLoRAConfig(r=4, num_vectors=16, vector_length=4, topk=2, target_modules=QV, **COMMON),
    "vera": lambda: peft.VeraConfig(target_modules=SQUARE, **LORA),
}
NOT_MERGED = ("cpt", "llama adapter", "multitask prompt", "p-tuning", "poly", "prefix", "prompt")
TASKS = {"task_ids": torch.tensor([0, 1])}
MORE = {"multitask prompt": TASKS, "poly": TASKS, "cpt": {"input_type_mask": torch.full((2, 7), 4)}}
"""Further inputs."""
READ_THE_BASE = {
    "dora": ["model.layers"],
    "modules_to_save": ["lm_head"],
    "tied copy": ["lm_head"],
    "trainable_token_indices": ["model.embed_tokens"],
}
"""Methods that begin with values of the base's weights, and the modules that have these."""


def base(name: str) -> Any:
    torch.manual_seed(0)
    settings = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": name.startswith("tied"),
        "use_cache": False,
    }
    if name == "target_parameters":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=2, **settings))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def adapted(name: str, seed: int = 1) -> Any:
    model = base(name)
    torch.manual_seed(seed)
    return peft.get_peft_model(model, (METHODS | OTHERS)[name]())


def loss_of(model: Any, seed: int, **more: Any) -> Tensor:
    tokens = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens), **more).loss
    return loss


def evaluate(model: Any) -> float:
    with torch.no_grad():
        return loss_of(model, 99).item()


def trained(model: Any) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def train(model: Any, steps: int, **more: Any) -> Iterator[float]:
    optimizer = zo.AdamW(trained(model), lr=1e-2)
    for seed in range(steps):
        loss = loss_of(model, seed, **more)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def saved(model: Any, path: Path) -> bytes:
    model.save_pretrained(path)
    return (path / "adapter_model.safetensors").read_bytes()


def gathered(model: Any, away: bool, mode: str = "read") -> AbstractContextManager[object]:
    return zo.gathered(model, mode=mode) if away else nullcontext()


def merged(model: Any, path: Path, away: bool) -> dict[str, Tensor]:
    """Values of a plain model that is made from a merged folder, and its loss; nothing where the embedding would change
    with the head."""
    if model.config.tie_word_embeddings and hasattr(model.get_output_embeddings(), "lora_A"):
        with pytest.raises(zo.ConfigError, match="is the same weight") if away else nullcontext():
            zo.export_pretrained(model, path, adapters="merged") if away else None
        return {}
    if away:
        zo.export_pretrained(model, path, adapters="merged")
    else:
        copy.deepcopy(model).merge_and_unload().save_pretrained(path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
    return loaded.state_dict() | {"its loss": torch.tensor(evaluate(loaded))}


def journey(model: Any, name: str, path: Path, other: Path, *, away: bool) -> Iterator[Any]:
    """Train, save, load, switch, merge; `other` is an adapter of the same kind."""
    yield list(train(model, 3))
    yield saved(model, path)
    found = evaluate(model)
    assert evaluate(peft.PeftModel.from_pretrained(base(name), path)) == found
    yield found
    yield merged(model, path / "merged", away)
    assert evaluate(model) == found
    with model.disable_adapter():
        yield evaluate(model)
    state = peft.get_peft_model_state_dict(model)
    kept = copy.deepcopy(state)
    peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(other)))
    yield evaluate(model)
    peft.set_peft_model_state_dict(model, kept)
    yield evaluate(model)
    if name != "trainable_token_indices":
        with gathered(model, away):
            model.load_adapter(other, "other", is_trainable=True)
        if away:
            zo.offload(model)
        model.set_adapter("other")
        yield evaluate(model)
        yield list(train(model, 1))
        yield merged(model, path / "merged other", away)
        model.set_adapter("default")
        yield list(train(model, 1))
        yield saved(model, path)
        model.delete_adapter("other")
    with gathered(model, away, "write"):
        model.merge_adapter()
    yield evaluate(model)
    with gathered(model, away, "write"):
        model.unmerge_adapter()
    yield from train(model, 1)
    with gathered(model, away, "write"):
        whole = model.merge_and_unload()
    yield evaluate(whole)
    yield {key: value.clone() for key, value in whole.state_dict().items()}


def check_same(found: Any, expected: Any) -> None:
    if isinstance(found, dict):
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("name", "tier"), [(name, ("cpu", "nvme")[index % 2]) for index, name in enumerate(METHODS)] + [("lora", "nvme")]
)
def test_what_works_in_full(name: str, tier: str, nvme: Path, tmp_path: Path) -> None:
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
        check_same(found, expected)


@pytest.mark.parametrize("name", METHODS)
def test_added_after_offload(name: str, nvme: Path, tmp_path: Path) -> None:
    """Fresh adapters, then others from a folder, over a base that is on the drive."""
    plain = adapted(name)
    expected = [*train(plain, 2), saved(plain, tmp_path / "plain"), merged(plain, tmp_path / "merged plain", False)]
    added = zo.offload(base(name), placed("fp32", ("nvme",) * 3, nvme))
    again = zo.offload(base(name), placed("fp32", ("cpu",) * 3, None))
    begins = [param for each in READ_THE_BASE.get(name, ()) for param in added.get_submodule(each).parameters()]
    with zo.gathered(begins) if begins else nullcontext():
        torch.manual_seed(1)
        model = peft.get_peft_model(added, METHODS[name]())
    zo.offload(model)
    found = [*train(model, 2), saved(model, tmp_path / "ours"), merged(model, tmp_path / "merged", True)]
    for one, two in zip(found, expected, strict=True):
        check_same(one, two)
    with zo.gathered(again):
        loaded = peft.PeftModel.from_pretrained(again, tmp_path / "plain", is_trainable=True)
    zo.offload(loaded)
    theirs = peft.PeftModel.from_pretrained(base(name), tmp_path / "plain", is_trainable=True)
    assert evaluate(loaded) == evaluate(theirs)
    assert list(train(loaded, 1)) == list(train(theirs, 1))


def test_adapters_that_change_the_base_are_added_in_write_mode(nvme: Path) -> None:
    config = peft.LoraConfig(target_modules=QV, init_lora_weights="pissa", **LORA)
    plain, added = peft.get_peft_model(base("pissa"), config), base("pissa")
    zo.offload(added, placed("fp32", ("nvme",) * 3, nvme))
    with zo.gathered(added, mode="write"):
        model = peft.get_peft_model(added, config)
    zo.offload(model)
    assert list(train(model, 2)) == list(train(plain, 2))


@pytest.mark.parametrize("name", OTHERS)
def test_others_train_and_are_saved(name: str, nvme: Path, tmp_path: Path) -> None:
    more = MORE.get(name, {})
    plain, model = adapted(name), adapted(name)
    tier = ("cpu", "nvme")[sorted(OTHERS).index(name) % 2]
    zo.offload(model, placed("fp32", (tier,) * 3, nvme if tier == "nvme" else None))
    torch.manual_seed(2)  # poly draws
    losses = list(train(plain, 2, **more))
    torch.manual_seed(2)
    assert repr(list(train(model, 2, **more))) == repr(losses)  # of cpt the first is NaN
    with zo.gathered(model.prompt_encoder, mode="write") if hasattr(model, "prompt_encoder") else nullcontext():
        found = saved(model, tmp_path / "ours")
    assert found == saved(plain, tmp_path / "plain")
    zo.export_pretrained(model, tmp_path / "export")
    assert (tmp_path / "export" / "adapter_model.safetensors").read_bytes() == found
    if name not in NOT_MERGED:
        check_same(merged(model, tmp_path / "merged", True), merged(plain, tmp_path / "merged plain", False))
        return
    with pytest.raises(zo.ConfigError, match='peft cannot merge these adapters.*Leave adapters="merged" out'):
        zo.export_pretrained(model, tmp_path / "merged", adapters="merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("after", [False, True])
def test_several_adapters_take_turns(after: bool, nvme: Path, tmp_path: Path) -> None:
    """Each is active when it is offloaded: at first, or adopted."""

    def turns(away: bool) -> Iterator[Any]:
        model = adapted("lora")
        if away and after:
            zo.offload(model, placed("fp32", ("nvme",) * 3, nvme))
        torch.manual_seed(2)
        model.add_adapter("second", METHODS["embeddings"]())
        model.base_model.set_adapter(["default", "second"])
        if away:
            zo.offload(model, *(() if after else (placed("fp32", ("nvme",) * 3, nvme),)))
        for name in ("second", "default", "second"):
            model.set_adapter(name)
            yield list(train(model, 2))
        model.save_pretrained(tmp_path / f"all {away}")
        yield [(tmp_path / f"all {away}" / each / "adapter_model.safetensors").read_bytes() for each in ("", "second")]
        model.set_adapter("default")
        model.delete_adapter("second")
        yield list(train(model, 1))
        if away:
            zo.export_pretrained(model, tmp_path / "left")
        yield saved(model, tmp_path / f"left {away}")
        yield merged(model, tmp_path / f"merged {away}", away)

    for found, expected in zip(turns(True), turns(False), strict=True):
        check_same(found, expected)
    left = (tmp_path / folder / "adapter_model.safetensors" for folder in ("left", "left True"))
    assert next(left).read_bytes() == next(left).read_bytes()


def test_the_reference_of_dpo_is_the_model_without_its_adapter(nvme: Path) -> None:
    def losses(model: Any) -> Iterator[float]:
        optimizer = zo.AdamW(trained(model), lr=1e-2)
        for seed in range(3):
            with torch.no_grad(), model.disable_adapter():
                reference = loss_of(model, seed)
            loss = -torch.nn.functional.logsigmoid(loss_of(model, seed) - reference)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    model = zo.offload(adapted("lora"), placed("fp32", ("nvme",) * 3, nvme))
    assert list(losses(model)) == list(losses(adapted("lora")))


def test_saving_reads_adapters_alone(nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read, read_lazily = adapted("modules_to_save"), [], ShardStore.read_lazily

    def noting(store: ShardStore, shard: Shard, begin: int, values: Tensor) -> Any:
        lazy = read_lazily(store, shard, begin, values)
        return SimpleNamespace(read=lambda: (read.append(shard.layout.trainable), lazy.read()))

    zo.offload(model, placed("fp32", ("nvme",) * 3, nvme))
    monkeypatch.setattr(ShardStore, "read_lazily", noting)
    saved(model, tmp_path)
    assert read and all(read)


@pytest.mark.parametrize("dtype", [None, "bf16", "fp32"])
def test_merged_of_bf16(dtype: str | None, nvme: Path, tmp_path: Path) -> None:
    """With a dtype it is rounded once, from the sum of fp32 values; without, as peft merges bf16."""
    model = zo.offload(adapted("lora"), placed("bf16", ("nvme",) * 3, nvme))
    list(train(model, 2))
    zo.export_pretrained(model, tmp_path / "out", dtype=dtype, adapters="merged")
    plain = adapted("lora")
    with zo.gathered(model, kind="params" if dtype is None else "master") as values:
        for name, param in plain.named_parameters():
            value = values[name].detach()
            param.data = value.clone() if dtype is None else value.float()
    expected = plain.merge_and_unload().state_dict()
    found = load_file(tmp_path / "out" / "model.safetensors")
    target = torch.float32 if dtype == "fp32" else torch.bfloat16
    check_same(found, {name: value.to(target) for name, value in expected.items()})


def on_a_rank(rank: int, world_size: int, name: str, tier: str, out: Path) -> list[Any]:
    """Ranks have the same batch, so that the mean of their gradients is that of one."""
    model = zo.offload(base(name), placed("fp32", (tier,) * 3, out / "run" if tier == "nvme" else None))
    torch.manual_seed(1)
    with zo.gathered(model):
        model = peft.get_peft_model(model, METHODS[name]())
    zo.offload(model)
    losses = list(train(model, 2))
    zo.export_pretrained(model, out / "adapter")
    zo.export_pretrained(model, out / "merged", adapters="merged")
    zo.close(model)
    return losses


@pytest.mark.parametrize(("name", "tier"), [("modules_to_save", "cpu"), ("embeddings", "nvme")])
def test_two_ranks(name: str, tier: str, pools: RankPools, tmp_path: Path) -> None:
    plain = adapted(name)
    expected = list(train(plain, 2))
    assert pools.of(2).succeed(on_a_rank, name, tier, tmp_path) == [expected, expected]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == saved(plain, tmp_path / "plain")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    check_same(found, plain.merge_and_unload().state_dict())


def test_the_example_ends_with_two_equal_models(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "peft_lora.py"))
    _, adapter, whole = (
        line.split()[-1] for line in capsys.readouterr().out.splitlines() if "loss" in line or "For" in line
    )
    assert adapter == whole


def adalora() -> Any:
    torch.manual_seed(1)
    limits = {"init_r": 6, "target_r": 2, "tinit": 0, "tfinal": 1, "deltaT": 1, "total_step": 6}
    return peft.get_peft_model(base("adalora"), peft.AdaLoraConfig(target_modules=QV, **limits, **COMMON))


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
def test_what_computes_with_weights_needs_no_block(call: str, nvme: Path) -> None:
    model, plain = adapted("modules_to_save"), adapted("modules_to_save")
    zo.offload(model, placed("fp32", ("nvme",) * 3, nvme))
    found = []
    for each in (model, plain):
        arguments = ("new", METHODS["modules_to_save"]()) if call == "add_adapter" else ()
        after = getattr(each, call)(*arguments) or each
        if call == "add_adapter":
            each.set_adapter("default")
        found.append(evaluate(after))
    assert found[0] == found[1]
