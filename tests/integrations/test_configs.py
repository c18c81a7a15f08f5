"""Every config class of transformers is a hint for a plan; models whose layers differ train as plain ones."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.pairwise import full
from tests.helpers.tools import config as settings
from tests.helpers.tools import distance, transformers, values_of
from zero_offload.plan.hints import Hints

NAMES = ("hidden_size", "num_attention_heads", "head_dim", "num_experts", "num_local_experts", "num_experts_per_tok")
MAKES_NONE = {"gemma4_assistant", "nougat"}
"""Types whose class raises without arguments."""


PARTS = 6


def configs(part: int) -> dict[str, Any]:
    """A config of each type that transformers knows, with its defaults: one part of them."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(set(transformers.CONFIG_MAPPING.keys()) - MAKES_NONE)[part::PARTS]:
            found[name] = transformers.CONFIG_MAPPING[name]()
    return found


@pytest.mark.parametrize("part", [0, *map(full, range(1, PARTS))])
def test_every_type_says_its_numbers(part: int) -> None:
    every = configs(part)
    assert len(every) > 60
    for name, config in every.items():
        hints = Hints(config)
        for each in NAMES:
            hints.number(each), hints.number(each, layer=0)
        assert hints.notes == (), name
        try:
            text = config.get_text_config()
        except ValueError:
            text = config.get_text_config(decoder=True)
        if getattr(text, "is_heterogeneous", False):
            check_layers(hints, text)


def check_layers(hints: Hints, config: Any) -> None:
    for name in NAMES:
        expected = [getattr(layer, name, None) or 0 for layer in config.per_layer_config]
        assert [hints.number(name, layer=index) for index in range(len(expected))] == expected
        assert hints.number(name) == max(expected)


def test_gemma4_trains_as_the_plain_model() -> None:
    if not hasattr(transformers, "Gemma4ForCausalLM"):
        pytest.skip("this transformers has no Gemma 4")

    def make() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4}
        heads = {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16}
        rows = {"vocab_size": 128, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
        config = transformers.Gemma4TextConfig(**sizes, **heads, **rows, use_cache=False)
        return transformers.Gemma4ForCausalLM(config)

    def train(model: Any) -> list[float]:
        optimizer, losses = zo.AdamW(model.parameters(), lr=1e-3), []
        for step in range(3):
            ids = torch.arange(3, 67).view(2, 32) + step
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain, ours = make(), make()
    hints = Hints(ours.config)
    check_layers(hints, ours.config)
    assert {hints.number("head_dim", layer=layer) for layer in range(6)} == {16, 32}
    plan = zo.plan(ours, settings("cpu", ""))
    assert plan.fits and plan.notes == ()
    zo.offload(ours, settings("cpu", ""))
    assert train(ours) == train(plain)
    assert distance(values_of(ours), values_of(plain)) == 0
    zo.close(ours)
