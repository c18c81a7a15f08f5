"""Hugging Face models on the fake GPU, offloaded: the bits of the same model that is all in the device's memory."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.fake_gpu.training import SOME, check_run, run
from tests.helpers.architectures import ARCHITECTURES

transformers: Any = pytest.importorskip("transformers")
PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"params": "nvme", "optimizer": "nvme"},
    {"grads": "device", "activations": "cpu"},
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", ["llama"])
def test_a_model_trains_the_same_wherever_its_states_rest(name: str, placement: dict[str, Any]) -> None:
    architecture = ARCHITECTURES[name]

    def body(model: nn.Module, tokens: Tensor, step: int) -> Tensor:
        batch = {key: value.to(TYPE) for key, value in architecture.batch(step).items()}
        loss: Tensor = model(**batch).loss
        loss.backward()
        return loss

    device.policy(Policy.EAGER)
    expected = run(body, architecture.build, precision="bf16")
    assert len({float(loss) for loss in expected[:3]}) == 3
    check_run(expected, body, architecture.build, schedules=SOME, precision="bf16", **placement)


def mixture(kind: str, *, size: int, checkpointing: str | None) -> nn.Module:
    """All of it is trained; `size` experts in a group, 0 for none."""
    config: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "attn_implementation": "eager"}
    made: Any
    if kind == "qwen3":
        sizes = {"intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 6}
        made = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**config, **sizes))
    else:  # with biases, and transposed
        made = transformers.GptOssForCausalLM(transformers.GptOssConfig(**config, num_local_experts=6))
    made.set_experts_implementation("eager")
    if size:
        zo.group_experts(made, size)
    if checkpointing == "zo":
        zo.checkpoint(made.model.layers)
    elif checkpointing is not None:
        made.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        made.enable_input_require_grads()
    return made.train()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "size", "checkpointing", "grads"),
    [
        ("qwen3", 1, None, "nvme"),
        ("qwen3", 4, "zo", "cpu"),
        ("gpt_oss", 2, "torch", "cpu"),
        ("gpt_oss", 6, "reentrant", "nvme"),
    ],
)
def test_trained_experts_in_groups(kind: str, size: int, checkpointing: str | None, grads: str) -> None:
    def body(model: nn.Module, tokens: Tensor, step: int) -> Tensor:
        loss: Tensor = model(input_ids=tokens % 64, labels=tokens % 64, use_cache=False).loss
        loss.backward()
        return loss

    device.policy(Policy.EAGER)
    whole = functools.partial(mixture, kind, size=0, checkpointing=None)
    expected = run(body, whole, precision="bf16", device_memory="64MiB")
    assert len({float(loss) for loss in expected[:3]}) == 3
    grouped = functools.partial(mixture, kind, size=size, checkpointing=checkpointing)
    check_run(expected, body, grouped, schedules=SOME, precision="bf16", grads=grads, device_memory="64MiB")


@pytest.mark.parametrize("num_experts", [4, 16])
def test_an_expert_makes_the_host_wait_for_nothing(num_experts: int) -> None:
    """A layer does, once in forward: to see which experts have tokens."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": num_experts}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.MixtralConfig(vocab_size=64, **sizes, **heads)
    model = transformers.MixtralForCausalLM(config)
    model.model.layers.requires_grad_(False)
    device.policy(Policy.EAGER)
    zo.offload(zo.group_experts(model, 2), zo.OffloadConfig(params="cpu"))
    tokens = torch.arange(256).view(4, 64).remainder(64).to(TYPE)
    for _ in range(2):
        with device.counting() as forward:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        with device.counting() as backward:
            loss.backward()
    zo.close(model)
    assert forward["stream_syncs"] <= 10 and forward["items"] <= 1  # of two layers, with any number of experts
    assert backward["stream_syncs"] <= 2 and not backward["items"]
