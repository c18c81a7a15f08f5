"""Models of diffusers, of a few thousand parameters, with a batch each: denoisers of images and of videos.

Import this before diffusers: `tools` keeps it off the network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.tools import transformers  # noqa: F401  keeps what is imported next off the network

import diffusers  # isort: skip
from peft import LoraConfig  # isort: skip

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Denoiser:
    """How a model is built, and what its forward takes."""

    kind: str
    settings: dict[str, Any]
    inputs: Callable[[int], dict[str, Any]]
    """By a seed."""

    def build(self) -> Any:
        """With the same values in each call, none of them zero."""
        torch.manual_seed(0)
        model = getattr(diffusers, self.kind)(**self.settings)
        for param in model.parameters():
            if not param.any():
                nn.init.normal_(param, std=0.02)
        return model.train()

    def adapted(self) -> Any:
        """With LoRA of diffusers' own, over a frozen base."""
        model = self.build().requires_grad_(False)
        model.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=ATTENTION))
        return model

    def loss(self, model: Any, seed: int, device: Any = "cpu") -> Tensor:
        inputs = {
            name: value.to(device) if isinstance(value, Tensor) else value for name, value in self.inputs(seed).items()
        }
        out = model(**inputs).sample
        return (out.float() - noise(*out.shape, seed=seed + 9).to(device)).square().mean()


def _pooled(seed: int) -> dict[str, Any]:
    return {"encoder_hidden_states": noise(2, 6, 16, seed=seed + 1), "pooled_projections": noise(2, 16, seed=seed + 2)}


def _unet_inputs(seed: int) -> dict[str, Any]:
    words = noise(2, 5, 8, seed=seed + 1)
    return {"sample": noise(2, 4, 8, 8, seed=seed), "timestep": torch.tensor([3, 7]), "encoder_hidden_states": words}


def _dit_inputs(seed: int) -> dict[str, Any]:
    labels = torch.tensor([1, 2])
    return {"hidden_states": noise(2, 4, 8, 8, seed=seed), "timestep": torch.tensor([3, 7]), "class_labels": labels}


def _flux_inputs(seed: int) -> dict[str, Any]:
    ids = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)}
    return {"hidden_states": noise(2, 16, 4, seed=seed), "timestep": torch.tensor([0.3, 0.7])} | ids | _pooled(seed)


def _sd3_inputs(seed: int) -> dict[str, Any]:
    return {"hidden_states": noise(2, 4, 8, 8, seed=seed), "timestep": torch.tensor([3.0, 7.0])} | _pooled(seed)


def _wan_inputs(seed: int) -> dict[str, Any]:
    words = noise(2, 6, 16, seed=seed + 1)
    video = noise(2, 4, 2, 8, 8, seed=seed)
    return {"hidden_states": video, "timestep": torch.tensor([3, 7]), "encoder_hidden_states": words}


def _ltx_inputs(seed: int) -> dict[str, Any]:
    words = {"encoder_hidden_states": noise(2, 6, 16, seed=seed + 1), "encoder_attention_mask": torch.ones(2, 6)}
    video = {"hidden_states": noise(2, 32, 4, seed=seed), "num_frames": 2, "height": 4, "width": 4}
    return video | words | {"timestep": torch.tensor([3, 7])}


DENOISERS = {
    "unet": Denoiser(
        "UNet2DConditionModel",
        {
            "sample_size": 8,
            "layers_per_block": 1,
            "block_out_channels": (8, 16),
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 8,
            "attention_head_dim": 4,
            "norm_num_groups": 4,
        },
        _unet_inputs,
    ),
    "dit": Denoiser(
        "DiTTransformer2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "norm_num_groups": 1},
        _dit_inputs,
    ),
    "flux": Denoiser(
        "FluxTransformer2DModel",
        {
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        },
        _flux_inputs,
    ),
    "sd3": Denoiser(
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 1,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
            "dual_attention_layers": (0,),
        },
        _sd3_inputs,
    ),
    "wan": Denoiser(
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "ffn_dim": 32,
            "num_layers": 2,
            "rope_max_seq_len": 32,
        },
        _wan_inputs,
    ),
    "ltx": Denoiser(
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "cross_attention_dim": 24,
            "num_layers": 2,
            "caption_channels": 16,
        },
        _ltx_inputs,
    ),
}
