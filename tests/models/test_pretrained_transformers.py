"""Folders of the transformers library: theirs load here, ours load there, and the logits are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(40).view(2, 20)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _build(tie: str) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tie == "tied",
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.door(
    "transformers",
    load="`zo.load_pretrained`",
    between="tied and untied, in shards",
    save="`zo.export_pretrained`",
    outcome="right",
)
@pytest.mark.parametrize("tie", ["tied", "untied"])
def test_there_and_back(tie: str, fp32_config: zo.OffloadConfig, tmp_path: Path) -> None:
    theirs = _build(tie)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="100KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        ours = _build(tie)
        assert not torch.equal(ours(TOKENS).logits, expected)
        zo.offload(ours, fp32_config)
        zo.load_pretrained(ours, tmp_path / "in")
        assert torch.equal(ours(TOKENS).logits, expected)
        zo.export_pretrained(ours, tmp_path / "out", max_shard_size="100KB")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        assert torch.equal(again(TOKENS).logits, expected)
    zo.close(ours)


@pytest.mark.door(
    "transformers",
    load='`from_pretrained(dtype="auto")`',
    between="written in another dtype",
    save="`zo.export_pretrained`",
    outcome="right",
)
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_it_is_loaded_in_the_dtype_that_it_was_exported_in(precision: str, dtype: str, tmp_path: Path) -> None:
    ours = _build("tied")
    ours.config.dtype = DTYPES[precision]
    zo.offload(ours, zo.OffloadConfig(precision=precision))
    zo.export_pretrained(ours, tmp_path / "out", dtype=dtype)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {param.dtype for param in again.parameters()} == {DTYPES[dtype]}
    zo.close(ours)


@pytest.mark.door(
    "transformers",
    load="`zo.load_pretrained` of the folder of a base model",
    between="a head that is tied",
    outcome="right",
)
def test_a_base_model(tmp_path: Path) -> None:
    """Its files lack the prefix, and the head, which is tied."""
    theirs = _build("tied")
    theirs.base_model.save_pretrained(tmp_path / "in")
    ours = zo.offload(_build("tied"), zo.OffloadConfig(precision="fp32"))
    for prefix in ("", "model."):
        with torch.no_grad():
            ours.model.embed_tokens.weight.zero_()
        zo.load_pretrained(ours, tmp_path / "in", prefix=prefix)
        with torch.no_grad():
            assert torch.equal(ours(TOKENS).logits, theirs(TOKENS).logits)
