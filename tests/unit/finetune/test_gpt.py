from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zero_offload.base.errors import ConfigError
from zero_offload.finetune.gpt import GPT, generate, next_token_loss
from zero_offload.finetune.gpt_config import (
    PRESETS,
    GPTConfig,
    Head,
    RecomputeMode,
    num_parameters,
    preset,
    unit_numels,
)

SMALL = GPTConfig(num_layers=2, width=32, num_heads=2, seq_max=16)


def _tokens(seed: int = 0, batch: int = 2, seq: int = 16) -> torch.Tensor:
    return torch.randint(256, (batch, seq), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("head", Head)
def test_counts_are_those_of_the_module(name: str, head: Head) -> None:
    config = replace(PRESETS[name], head=head, width=64, num_heads=4, seq_max=8)  # narrow: it is built here
    model = GPT(config)
    assert num_parameters(config) == sum(weight.numel() for weight in model.parameters())
    block = sum(weight.numel() for weight in model.blocks[0].parameters())
    assert dict(unit_numels(config))["blocks.2"] == block
    assert len(unit_numels(config)) == config.num_layers + 2


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("tiny", 0.9e6, 1.1e6),
        ("small", 4e6, 10e6),
        ("gpt25m", 24e6, 27e6),
        ("gpt125m", 120e6, 130e6),
        ("gpt350m", 340e6, 360e6),
        ("gpt760m", 740e6, 780e6),
        ("gpt1b3", 1.28e9, 1.35e9),
    ],
)
def test_presets_have_the_size_of_their_name(name: str, low: float, high: float) -> None:
    vocab_size = 50257 if name.startswith("gpt") and name != "gpt25m" else 256
    assert low <= num_parameters(preset(name, vocab_size=vocab_size)) <= high


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="gpt125m"):
        preset("gpt-125m")


def test_weights_depend_on_the_seed_and_their_name_only() -> None:
    torch.manual_seed(1)
    first = GPT(SMALL, seed=3)
    torch.manual_seed(2)
    again = GPT(SMALL, seed=3)
    deeper = GPT(replace(SMALL, head=Head.OWN), seed=3)
    other = GPT(SMALL, seed=4)
    for name, weight in first.named_parameters():
        assert torch.equal(weight, again.get_parameter(name))
        assert torch.equal(weight, deeper.get_parameter(name))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_a_token_never_sees_the_ones_after_it() -> None:
    model = GPT(SMALL)
    tokens = _tokens()
    changed = tokens.clone()
    changed[:, 9:] = 255 - changed[:, 9:]
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_positions_matter() -> None:
    model = GPT(SMALL)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(20)  # attention of fresh weights is nearly uniform
    tokens = _tokens(batch=1, seq=8)
    swapped = tokens[:, [1, 0, *range(2, 8)]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1], atol=1e-6)


def test_recompute_changes_no_gradient() -> None:
    gradients = []
    for recompute in RecomputeMode:
        model = GPT(replace(SMALL, recompute=recompute))
        next_token_loss(model(_tokens()), _tokens(1)).backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for kept, computed_again in zip(*gradients, strict=True):
        assert torch.equal(kept, computed_again)


def test_fresh_model_predicts_nothing() -> None:
    loss = next_token_loss(GPT(SMALL)(_tokens()), _tokens(1))
    assert loss.item() == pytest.approx(5.545, abs=0.1)  # ln 256


def test_generate_is_deterministic_and_keeps_the_prompt() -> None:
    model = GPT(SMALL)
    text = generate(model, b"def ", 20, seed=1)
    assert text == generate(model, b"def ", 20, seed=1)
    assert text.startswith(b"def ") and len(text) == 24  # longer than seq_max: the window moves
    assert text != generate(model, b"def ", 20, seed=2)


def test_generate_at_zero_temperature_takes_the_likeliest() -> None:
    model = GPT(SMALL)
    text = generate(model, b"ab", 1, temperature=0.0)
    assert text[-1] == int(model(torch.tensor([[97, 98]]))[0, -1].argmax())
