"""Real architectures of the transformers library, so small that one trains in tenths of a second; no file is loaded.

Each `Architecture` builds a model from a configuration alone and makes its inputs from a seed. Nothing here
imports transformers before a model is built, so that the table can be read without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, HIDDEN, LAYERS, LENGTH = 99, 32, 3, 10
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A model class, its configuration, and what its forward takes."""

    name: str
    model: str
    config: str
    options: Mapping[str, Any]
    inputs: Callable[[torch.Generator], Inputs]
    parts: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Configurations inside the configuration: field, class, options."""

    def build(self, **changes: Any) -> nn.Module:
        """A model in training mode with always the same initial values."""
        transformers = importlib.import_module("transformers")
        torch.manual_seed(0)
        parts = {key: getattr(transformers, kind)(**options) for key, (kind, options) in self.parts.items()}
        config = getattr(transformers, self.config)(**{**self.options, **parts, **changes})
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.train()

    def batch(self, seed: int) -> Inputs:
        return self.inputs(torch.Generator().manual_seed(seed))


# Inputs: always the same for one generator's seed


def _tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    # From 5 on: the lower ones are the special tokens of some configurations.
    return torch.randint(5, VOCAB, (2, length), generator=generator)


def text(generator: torch.Generator) -> Inputs:
    """Next-token or masked prediction over all positions, one of them padding."""
    tokens = _tokens(generator)
    mask = torch.ones_like(tokens)
    mask[0, -1] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def sentences(generator: torch.Generator) -> Inputs:
    return {"input_ids": _tokens(generator), "labels": torch.randint(0, 2, (2,), generator=generator)}


def pairs(generator: torch.Generator) -> Inputs:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator, 6)}


def images(generator: torch.Generator) -> Inputs:
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (2,), generator=generator)}


def captioned_images(generator: torch.Generator) -> Inputs:
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    return {"input_ids": _tokens(generator), "pixel_values": pixels, "return_loss": True}


def spectrograms(generator: torch.Generator) -> Inputs:
    return {"input_features": torch.randn(2, 8, 40, generator=generator), "labels": _tokens(generator, 6)}


def waves(generator: torch.Generator) -> Inputs:
    return {"input_values": torch.randn(2, 800, generator=generator), "labels": _tokens(generator, 4)}


# Configurations


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**SIZES, **TOKENS, "num_key_value_heads": 2, "head_dim": 8}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {**SIZES, **TOKENS, **STILL}
OPT_SIZES = {"word_embed_proj_dim": HIDDEN, "ffn_dim": 64, "dropout": 0.0}
PLAIN_SIZES = {"d_model": HIDDEN, "vocab_size": VOCAB, **TOKENS}
TWO_STACKS = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
    "decoder_start_token_id": 1,
}
VISION = {"image_size": 32, "patch_size": 8, "num_hidden_layers": LAYERS, "hidden_size": HIDDEN}
VISION |= {"num_attention_heads": 4, "intermediate_size": 64}


def _named(name: str, model: str, options: Mapping[str, Any], inputs: Any = text, config: str = "") -> Architecture:
    """`model` is a family and a head, as in "Llama CausalLM": the names of the classes."""
    family, head = model.split()
    return Architecture(name, f"{family}{head}", config or f"{family}Config", options, inputs)


DECODERS = [
    _named(
        "gpt2",
        "GPT2 LMHeadModel",
        {
            **TOKENS,
            "vocab_size": VOCAB,
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": 4,
            "n_positions": 32,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    _named("llama", "Llama ForCausalLM", GROUPED),
    _named("qwen2", "Qwen2 ForCausalLM", GROUPED),
    _named("qwen3", "Qwen3 ForCausalLM", GROUPED),
    _named("mistral", "Mistral ForCausalLM", {**GROUPED, "sliding_window": 4}),
    _named("gemma", "Gemma ForCausalLM", GROUPED),
    _named("gemma2", "Gemma2 ForCausalLM", {**GROUPED, "sliding_window": 4}),
    _named("phi", "Phi ForCausalLM", {**SIZES, **TOKENS}),
    _named("gpt_neox", "GPTNeoX ForCausalLM", {**SIZES, **TOKENS}),
    _named("opt", "OPT ForCausalLM", {**SIZES, **TOKENS, **OPT_SIZES}),
    _named(
        "bloom",
        "Bloom ForCausalLM",
        {**TOKENS, "vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": 4}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    _named("falcon", "Falcon ForCausalLM", {**SIZES, **TOKENS}),
]
EXPERTS = [
    _named("mixtral", "Mixtral ForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    _named(
        "qwen2_moe",
        "Qwen2Moe ForCausalLM",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 2},
    ),
    _named("olmoe", "Olmoe ForCausalLM", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
]
ENCODERS = [
    _named("bert", "Bert ForMaskedLM", ENCODER),
    _named("roberta", "Roberta ForSequenceClassification", ENCODER, sentences),
    _named("electra", "Electra ForMaskedLM", {**ENCODER, "embedding_size": 16}),
    _named(
        "distilbert",
        "DistilBert ForMaskedLM",
        {"vocab_size": VOCAB, "dim": HIDDEN, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 64}
        | {"dropout": 0.0, "attention_dropout": 0.0},
    ),
    _named(
        "deberta_v2",
        "DebertaV2 ForMaskedLM",
        {**ENCODER, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    ),
    _named("modernbert", "ModernBert ForMaskedLM", {**SIZES, **TOKENS, "cls_token_id": 1, "sep_token_id": 2}),
    _named(
        "albert", "Albert ForMaskedLM", {**ENCODER, "embedding_size": 16, "num_hidden_groups": 2, "inner_group_num": 2}
    ),
]
STACKS = [
    _named(
        "t5",
        "T5 ForConditionalGeneration",
        {**PLAIN_SIZES, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        | {"decoder_start_token_id": 0},
        pairs,
    ),
    _named("bart", "Bart ForConditionalGeneration", {**PLAIN_SIZES, **TWO_STACKS}, pairs),
]
OTHERS = [
    _named("vit", "ViT ForImageClassification", {**STILL, **VISION}, images),
    _named(
        "convnext",
        "ConvNext ForImageClassification",
        {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 2, 1], "image_size": 32},
        images,
    ),
    Architecture(
        "clip",
        "CLIPModel",
        "CLIPConfig",
        {"projection_dim": 16},
        captioned_images,
        {"text_config": ("CLIPTextConfig", {**SIZES, **TOKENS}), "vision_config": ("CLIPVisionConfig", VISION)},
    ),
    _named(
        "whisper",
        "Whisper ForConditionalGeneration",
        {**PLAIN_SIZES, **TWO_STACKS, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20},
        spectrograms,
    ),
    _named(
        "wav2vec2",
        "Wav2Vec2 ForCTC",
        {**ENCODER, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4)}
        | {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0}
        | {"layerdrop": 0.0, "apply_spec_augment": False, "activation_dropout": 0.0},
        waves,
    ),
    _named(
        "mamba",
        "Mamba ForCausalLM",
        {**TOKENS, "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "state_size": 4},
    ),
    _named(
        "mamba2",
        "Mamba2 ForCausalLM",
        {**TOKENS, "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "state_size": 4}
        | {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1, "chunk_size": 8},
    ),
    _named("rwkv", "Rwkv ForCausalLM", {**TOKENS, "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2}),
]
ARCHITECTURES = {each.name: each for each in [*DECODERS, *EXPERTS, *ENCODERS, *STACKS, *OTHERS]}
