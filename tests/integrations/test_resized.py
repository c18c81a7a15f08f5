"""`resize_token_embeddings` of transformers between two steps: values, states and resumes as of a plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.changing import check_same, start_again
from tests.helpers.models import build
from tests.helpers.thawing import TIERS

transformers = pytest.importorskip("transformers")


def llama(tied: bool) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def step(model: nn.Module, optimizer: Any, number: int) -> float:
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(number))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value: float = loss.item()
    return value


@pytest.mark.door(
    "transformers",
    load="`zo.offload`",
    between="`resize_token_embeddings`, tied and untied",
    save="`zo.export_pretrained`",
    outcome="right",
)
@pytest.mark.parametrize(("tied", "tier", "size"), [(True, "nvme", 61), (False, "cpu", 61), (False, "nvme", 43)])
def test_embeddings_get_another_size(tied: bool, tier: str, size: int, nvme: Path, tmp_path: Path) -> None:
    plain, config = build(lambda: llama(tied)), zo.OffloadConfig(precision="fp32", nvme=nvme, **TIERS[tier])
    model = zo.offload(build(lambda: llama(tied)), config)
    its_optimizer, optimizer = (zo.AdamW(each.parameters(), lr=1e-2) for each in (plain, model))
    pairs = ((plain, its_optimizer), (model, optimizer))
    assert len({step(*each, 0) for each in pairs}) == 1
    for each, its in pairs:
        torch.manual_seed(3)
        each.resize_token_embeddings(size)
        if each is model:
            zo.offload(model)
        else:  # what torch's optimizer has of it has another shape
            its.state.pop(plain.model.embed_tokens.weight)
        trained = {id(param) for group in its.param_groups for param in group["params"]}
        if new := [param for param in each.parameters() if id(param) not in trained]:
            its.add_param_group({"params": new})
    for number in (1, 2):
        assert len({step(*each, number) for each in pairs}) == 1
    zo.commit(model, optimizer)
    check_same(model, optimizer, plain, its_optimizer)
    zo.export_pretrained(model, tmp_path / "out")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert all(map(torch.equal, loaded.parameters(), plain.parameters()))
    zo.close(model)
    resumes = zo.OffloadConfig(precision="fp32", nvme=nvme, existing="resume", **TIERS[tier])
    model, optimizer = start_again(plain, its_optimizer, resumes)
    check_same(model, optimizer, plain, its_optimizer)
    zo.close(model)
