"""Experts of transformers' models in groups: losses, gradients and texts of the eager implementation, bit for bit."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation
from transformers.models.mixtral import modeling_mixtral

import zero_offload as zo
from tests.helpers.pairwise import Row, label, pairwise
from tests.helpers.tools import llama, transformers
from zero_offload.base.types import MIB
from zero_offload.integrations import experts as integration
from zero_offload.model import offload
from zero_offload.model.runtime import ModelRuntime
from zero_offload.standins.owners import owner_of

import peft  # isort: skip  # after what keeps it off the network
import torchao.quantization as torchao_float8  # isort: skip

VOCAB = 64
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
KV: dict[str, Any] = COMMON | {"num_key_value_heads": 2, "intermediate_size": 48}
RANKS_OF_DEEPSEEK = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**KV, num_local_experts=5, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def qwen3() -> nn.Module:
    sizes = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**KV, **sizes))


def deepseek() -> nn.Module:
    sizes = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "v_head_dim": 8}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    settings = KV | sizes | groups | RANKS_OF_DEEPSEEK
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**settings))


def gpt_oss() -> nn.Module:
    config = transformers.GptOssConfig(**KV, num_local_experts=5, num_experts_per_tok=2, head_dim=8)
    return transformers.GptOssForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": mixtral,
    "qwen3": qwen3,
    "deepseek": deepseek,
    "gpt_oss": gpt_oss,
}
TRAINS = ("everything", "attention and routers", "lora", "lora on experts", "lora on experts, routers and embeddings")
MATRIX: dict[str, Any] = {
    "model": list(MODELS),
    "trains": TRAINS,
    "checkpointing": [None, "zo", "torch", "reentrant"],
    "params": ["cpu", "nvme"],
    "size": [1, 2, 100],
    "precision": ["fp32", "bf16"],
}


def build(name: str, trains: str) -> Any:
    torch.manual_seed(1)
    model: Any = MODELS[name]()
    for param in model.parameters():
        param.data = param.data.bfloat16().float()  # ties: masters are not split as torch rounds
    if trains == "everything":
        return model.train()
    if trains == "attention and routers":
        for of, param in model.named_parameters():
            param.requires_grad_(any(part in of for part in ("attn", "gate.weight", "router", "norm")))
        return model.train()
    on = ["o_proj", "embed_tokens"] if "embeddings" in trains else ["o_proj"]
    params = ["experts.gate_up_proj", "experts.down_proj"] * ("experts" in trains)
    if "routers" in trains:
        params.append("router.weight" if name == "gpt_oss" else "gate.weight")
    config = peft.LoraConfig(r=4, target_modules=on, target_parameters=params or None, init_lora_weights=False)
    return peft.get_peft_model(model, config).train()


def base_of(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


def checkpointed(model: Any, how: str | None) -> None:
    if how == "zo":
        zo.checkpoint(base_of(model).model.layers)
    elif how is not None:
        base_of(model).gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        base_of(model).enable_input_require_grads()


def step(model: Any, number: int) -> Tensor:
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(number))
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach()


def trained(model: Any, num_steps: int, read: Callable[[], dict[str, Tensor]]) -> list[Any]:
    """Losses and gradients of each step."""
    optimizer = zo.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    found = []
    for number in range(num_steps):
        loss = step(model, number)
        found.append((loss.item(), read()))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("row", pairwise(MATRIX), ids=label)
def test_losses_and_gradients_are_those_of_the_eager_implementation(row: Row, nvme: Path) -> None:
    num_steps = 2 if row["precision"] == "fp32" else 1  # a plain model has no fp32 masters
    plain = build(row["model"], row["trains"])
    base_of(plain).set_experts_implementation("eager")
    if row["precision"] == "bf16":
        for param in plain.parameters():
            param.data = param.data.bfloat16()
    checkpointed(plain, row["checkpointing"] if row["checkpointing"] == "reentrant" else None)

    def read() -> dict[str, Tensor]:
        return {name: p.grad.float().clone() for name, p in plain.named_parameters() if p.grad is not None}

    expected = trained(plain, num_steps, read)
    model = build(row["model"], row["trains"])
    assert zo.group_experts(model, row["size"]) is model
    checkpointed(model, row["checkpointing"])
    zo.offload(model, zo.OffloadConfig(params=row["params"], precision=row["precision"], nvme=nvme))

    def gather() -> dict[str, Tensor]:
        with zo.gathered(model, kind="grads") as grads:
            return {name: grad.float().clone() for name, grad in grads.items()}

    found = trained(model, num_steps, gather)
    zo.close(model)
    for (loss, grads), (expected_loss, expected_grads) in zip(found, expected, strict=True):
        assert loss == expected_loss
        assert set(grads) == set(expected_grads)
        assert [name for name in grads if not torch.equal(grads[name], expected_grads[name])] == []


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_generated_with_a_cache(name: str, nvme: Path) -> None:
    plain, model = build(name, "lora on experts"), build(name, "lora on experts")
    base_of(plain).set_experts_implementation("eager")
    zo.group_experts(model, 2)
    zo.offload(model, zo.OffloadConfig(params="nvme", precision="fp32", nvme=nvme))
    prompt = torch.arange(5)[None]
    texts = [
        each.eval().generate(input_ids=prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        for each in (plain, model)
    ]
    zo.close(model)
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("name", "checkpointing"), [("qwen3", None), ("qwen3", "zo"), ("qwen3", "torch"), ("deepseek", "zo")]
)
def test_a_checkpointed_block_reads_its_experts_no_third_time(name: str, checkpointing: str | None, nvme: Path) -> None:
    model = build(name, "attention and routers")
    zo.group_experts(model, 8)
    checkpointed(model, checkpointing)
    zo.offload(model, zo.OffloadConfig(params="nvme", precision="fp32", nvme=nvme, durability="scratch"))
    owner: Any = next(filter(None, map(owner_of, model.parameters())))
    assert isinstance(owner, ModelRuntime)
    read = list[tuple[str, range]]()
    fetch = owner.experts.fetch

    def noted(call: Any, span: range, *rest: Any, **names: Any) -> Any:
        read.append((call.unit.name, span))
        return fetch(call, span, *rest, **names)

    owner.experts.fetch = noted  # type: ignore[method-assign]
    step(model, 0)
    zo.close(model)
    num_blocks = 2 if name == "qwen3" else 1
    assert len(read) == 2 * num_blocks  # forward and backward


@pytest.mark.parametrize("checkpointing", [None, "zo", "torch"])
def test_adapters_on_experts_leave_memory_between_forward_and_backward(checkpointing: str | None, nvme: Path) -> None:
    """The graph holds no view of them, which would pin their unit."""
    model = build("deepseek", "lora on experts")
    zo.group_experts(model, 2)
    checkpointed(model, checkpointing)
    zo.offload(model, zo.OffloadConfig(params="nvme", precision="bf16", nvme=nvme, durability="scratch"))
    owner: Any = next(filter(None, map(owner_of, model.parameters())))
    tokens = torch.arange(18).view(2, 9)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    held = [unit.name for unit in owner.units if unit.lent]
    loss.backward()
    zo.close(model)
    assert held == []


@pytest.mark.parametrize("checkpointing", [None, "zo"])
def test_a_plan_counts_no_third_time(checkpointing: str | None, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("deepseek", "attention and routers")
    zo.group_experts(model, 8)
    checkpointed(model, checkpointing)
    planned: list[Any] = []
    made = offload.Plan.of

    def noted(memory: Any, job: Any, *rest: Any) -> Any:
        planned.append(job)
        return made(memory, job, *rest)

    monkeypatch.setattr(offload.Plan, "of", noted)
    zo.plan(model, zo.OffloadConfig(params="nvme", nvme=nvme, durability="scratch"))
    (job,) = planned
    experts = [work for work in job.work if work.in_groups]
    assert experts and all(work.backward_uses(job.batch.recompute) == 1 for work in experts)
    assert job.batch.recompute is (checkpointing == "zo")


def test_a_compiled_model_runs_its_experts_as_they_are() -> None:
    losses = []
    for compiled in (False, True):
        model = build("qwen3", "everything")
        zo.offload(zo.group_experts(model, 2), zo.OffloadConfig(precision="fp32"))
        runs = torch.compile(model, backend="eager") if compiled else model
        losses.append([loss for loss, _ in trained(runs, 2, dict)])
        zo.close(model)
    assert losses[0] == losses[1]


def test_without_offload_the_model_is_what_it_was() -> None:
    plain, model = build("mixtral", "lora on experts"), build("mixtral", "lora on experts")
    base_of(plain).set_experts_implementation("eager")
    assert torch.equal(step(zo.group_experts(model), 0), step(plain, 0))


def test_a_model_made_from_the_config_of_a_grouped_one_is_eager(nvme: Path) -> None:
    grouped: Any = zo.group_experts(mixtral())
    torch.manual_seed(1)
    model, plain = type(grouped)(grouped.config), build("mixtral", "everything")
    for param in model.parameters():
        param.data = param.data.bfloat16().float()
    base_of(plain).set_experts_implementation("eager")
    zo.offload(model, zo.OffloadConfig(params="nvme", precision="fp32", nvme=nvme))
    assert torch.equal(step(model, 0), step(plain, 0))
    zo.close(model)


def test_a_class_that_does_more_than_it_says_is_computed_by_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = inspect.unwrap(modeling_mixtral.MixtralExperts.forward)

    def doubled(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output: Tensor = forward(self, hidden, index, weights * 2)
        return output

    plain, model = build("mixtral", "everything"), build("mixtral", "everything")
    for block in plain.model.layers:
        block.mlp.experts.forward = functools.partial(doubled, block.mlp.experts)
    monkeypatch.setattr(modeling_mixtral.MixtralExperts.forward, "__wrapped__", doubled)
    zo.offload(zo.group_experts(model, 2), zo.OffloadConfig(precision="fp32"))
    for number in range(2):
        assert torch.equal(step(model, number), step(plain, number))
    with zo.gathered(model, kind="grads") as grads:
        for name, param in plain.named_parameters():
            assert torch.equal(grads[name], param.grad), name
    zo.close(model)


def test_what_a_class_does_with_large_values_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = inspect.unwrap(modeling_mixtral.MixtralExperts.forward)

    def clamped(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output: Tensor = forward(self, hidden.clamp(-8, 8), index, weights)
        return output

    experts = mixtral().model.layers[0].mlp.experts  # type: ignore[union-attr, index]
    assert integration._check(experts)
    monkeypatch.setattr(modeling_mixtral.MixtralExperts.forward, "__wrapped__", clamped)
    assert not integration._check(experts)


@use_experts_implementation
class WideSum(nn.Module):
    """Adds up in fp32 what it returns in bf16."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.randn(4, 16, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 8))
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden, dtype=torch.float32)
        for expert in range(self.num_experts):
            which, tokens = torch.where(index.t() == expert)
            gate, up = nn.functional.linear(hidden[tokens], self.gate_up_proj[expert]).chunk(2, dim=-1)
            added = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            output.index_add_(0, tokens, (added * weights[tokens, which, None]).float())
        return output.to(hidden.dtype)


@use_experts_implementation
class EightBits(WideSum):
    """Has an int8 value for each weight, and a scale for each row of each expert."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name in ("gate_up_proj", "down_proj"):
            values = torch.ones(getattr(self, name).shape, dtype=torch.int8)
            setattr(self, name, nn.Parameter(values, requires_grad=False))
            setattr(self, f"{name}_scale", nn.Parameter(torch.ones(4, values.shape[1], 1)))


def test_quantized_experts_are_refused() -> None:
    with pytest.raises(zo.ConfigError, match=r"gate_up_proj of 0 \(EightBits\) is quantized \(int8\).*fetched whole"):
        zo.group_experts(nn.Sequential(EightBits(None)))
    wide = WideSum(None)
    for name in ("gate_up_proj", "down_proj"):
        values = torchao_float8.Float8Tensor.from_hp(getattr(wide, name).detach().bfloat16())
        setattr(wide, name, nn.Parameter(values, requires_grad=False))
    with pytest.raises(zo.ConfigError, match=r"gate_up_proj of 0 \(WideSum\) is quantized \(Float8Tensor\)"):
        zo.group_experts(nn.Sequential(wide))


@pytest.mark.parametrize("quantize", ["nf4", "fp8"])
def test_experts_of_a_model_whose_linear_layers_are_quantized(quantize: Any, nvme: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain: Any = mixtral().bfloat16()
    plain.save_pretrained(tmp_path / "in")
    losses = []
    for size in (None, 2):
        with zo.deferred_init(values="skip"):
            model: Any = type(plain)(transformers.MixtralConfig(**plain.config.to_dict())).bfloat16()
        zo.load_pretrained(model, tmp_path / "in", quantize=quantize)
        model.set_experts_implementation("eager")
        model.lm_head.requires_grad_(True)
        if size is not None:
            zo.group_experts(model, size)
        folder = nvme / str(size)
        zo.offload(model, zo.OffloadConfig(params="nvme", precision="bf16", nvme=folder, durability="scratch"))
        losses.append(trained(model, 2, lambda: {}))
        zo.close(model)
    assert losses[0] == losses[1]


def test_a_group_ends_at_a_whole_chunk_where_sizes_allow() -> None:
    with torch.device("meta"):
        model = mixtral()
    experts: Any = model.model.layers[0].mlp.experts
    for name, shape in (("gate_up_proj", (128, 1536, 2048)), ("down_proj", (128, 2048, 768))):
        setattr(experts, name, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")))
    experts.num_experts = 128
    for nbytes, size in ((256, 28), (250, 26), (12, 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(integration, "GROUP_BYTES", nbytes * MIB)
            assert integration._default_size(experts) == size


def test_what_groups_cannot_compute_is_refused() -> None:
    with pytest.raises(zo.ConfigError, match="no module of this LlamaForCausalLM has experts"):
        zo.group_experts(llama())
    with pytest.raises(zo.ConfigError, match="WideSum does not add up its experts one by one"):
        zo.group_experts(nn.Sequential(WideSum(None)))
    with pytest.raises(zo.ConfigError, match="group_size=0"):
        zo.group_experts(build("mixtral", "lora"), 0)
    with pytest.raises(zo.ConfigError, match="group_size=True"):
        zo.group_experts(build("mixtral", "lora"), True)
    model = build("mixtral", "lora")
    zo.offload(model, zo.OffloadConfig(durability="scratch"))
    with pytest.raises(zo.ConfigError, match="comes before zo.offload"):
        zo.group_experts(model)
    zo.close(model)


def test_adapters_that_come_after_the_call_are_refused() -> None:
    torch.manual_seed(0)
    model: Any = zo.group_experts(mixtral().requires_grad_(False))
    config = peft.LoraConfig(r=4, target_modules=["o_proj"], target_parameters=["experts.gate_up_proj"])
    model = peft.get_peft_model(model, config)
    zo.offload(model, zo.OffloadConfig(precision="fp32", durability="scratch"))
    with pytest.raises(zo.ConfigError, match="Call get_peft_model, then zo.group_experts"):
        step(model, 0)
    zo.close(model)


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "deepseek"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
def test_folders_that_have_experts_one_by_one_are_loaded(
    name: str, before: bool, adapters: bool, nvme: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    plain: Any = MODELS[name]()
    plain.save_pretrained(tmp_path / "in")
    wanted = {key: value.clone() for key, value in plain.state_dict().items()}
    with zo.deferred_init(values="skip"):
        model = type(plain)(plain.config)
        if adapters:
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "o_proj"]))
    config = zo.OffloadConfig(precision="fp32", params="nvme", nvme=nvme)
    if before:
        zo.load_pretrained(model, tmp_path / "in")
    zo.offload(model, config)
    if not before:
        zo.load_pretrained(model, tmp_path / "in")
    found = {key.replace(".base_layer", ""): value for key, value in base_of(model).state_dict().items()}
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    zo.close(model)
