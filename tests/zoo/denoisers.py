"""Transformers and U-Nets of diffusers: tiny settings by names of fields, and inputs by names of forward's parameters.

All widths are `WIDTH`, that of heads together too, so that text, images and times fit in each class. `SETTINGS` says
what the names do not.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.inputs import Inputs, Way
from tests.zoo.shrink import HEAD_DIM, WIDTH, shrunk

BATCH, SIDE, FRAMES = 2, 4, 2
WORDS = ROWS = SIDE * SIDE
KEPT = r"patch_size(_t)?|pos_embed_max_size"
SIZES = r"sample_(size|height|width)"
AXES = r"axes_dims?(_rope)?|rope_axes_dim|rope_dim(_list)?|mrope_section"
"""Parts of a head, one per axis that it rotates by."""

MASKS = r"(encoder|text)_(hidden_states_|attention_|embedding_)?mask(_t5)?"
"""Text that is there, in integers or booleans."""

_MIXED = {"in_channels": WIDTH, "norm_num_groups": 8, "cross_attention_dim": WIDTH}
_SHORT = {"max_text_seq_length": WORDS, "sample_frames": FRAMES, "temporal_compression_ratio": 1}
_IMAGES = {"in_channels": 4, "out_channels": 4, "patch_size": 2}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "AceStepTransformer1DModel": {"in_channels": 96},
    "CogVideoXTransformer3DModel": _SHORT,
    "ConsisIDTransformer3DModel": _SHORT,
    "CosmosTransformer3DModel": {"attention_head_dim": 16, "num_attention_heads": 2, "concat_padding_mask": False},
    "DreamLiteTransformer2DModel": _MIXED,
    "EasyAnimateTransformer3DModel": _IMAGES,
    "HiDreamImageTransformer2DModel": _IMAGES | {"caption_channels": [WIDTH, WIDTH], "llama_layers": [0, 1]},
    "HunyuanDiT2DModel": {"in_channels": 4, "patch_size": 2, "text_len": WORDS, "text_len_t5": WORDS}
    | {"use_style_cond_and_image_meta_size": False},
    "HunyuanVideoFramepackTransformer3DModel": {"has_image_proj": True, "image_proj_dim": WIDTH},
    "Kandinsky3UNet": {"groups": 8},
    "Kandinsky5Transformer3DModel": {"in_text_dim2": WIDTH},
    "Kandinsky6Transformer3DModel": {"in_text_dim2": WIDTH, "visual_cond": False},
    "LatteTransformer3DModel": _IMAGES
    | {"norm_type": "ada_norm_single", "caption_channels": WIDTH, "cross_attention_dim": WIDTH, "video_length": FRAMES},
    "LuminaNextDiT2DModel": {"num_kv_heads": 2},
    "PRXTransformer2DModel": {"axes_dim": [4, 4]},
    "PriorTransformer": {"num_embeddings": WORDS},
    "Transformer2DModel": _MIXED,
    "TransformerTemporalModel": _MIXED,
    "UNet1DModel": {"extra_in_channels": 64},
    "UNetSpatioTemporalConditionModel": {"projection_class_embeddings_input_dim": 3 * WIDTH},
    "WanVACETransformer3DModel": {"vace_layers": [0, 1]},
}


def classes() -> Sequence[str]:
    diffusers = importlib.import_module("diffusers")
    found = []
    for name in dir(diffusers):
        kind = getattr(diffusers, name, None)
        module = getattr(kind, "__module__", "")
        if isinstance(kind, type) and re.search(r"\.models\.(transformers|unets)\.", module):
            found.append(name)
    return [name for name in found if issubclass(getattr(diffusers, name), diffusers.ModelMixin)]


def build(name: str) -> nn.Module:
    """No parameter is zero: the last layer's would keep gradients from all others."""
    kind: Any = getattr(importlib.import_module("diffusers"), name)
    model: nn.Module = kind(**settings(kind))
    for param in model.parameters():
        if not param.is_meta and not param.any():
            nn.init.normal_(param, std=0.02)
    return model


def settings(kind: type) -> dict[str, Any]:
    own = SETTINGS.get(kind.__name__, {})
    made: dict[str, Any] = {}
    for name, field in inspect.signature(kind.__init__).parameters.items():  # type: ignore[misc]
        if name in own:
            made[name] = own[name]
        elif field.default not in (None, field.empty) and not re.fullmatch(KEPT, name):
            value = own_size(name, field.default)
            if value is not None and value != field.default:
                made[name] = value
    return made


def own_size(name: str, value: Any) -> Any:
    if re.fullmatch(AXES, name):
        return parts(value)
    return 2 * SIDE if re.fullmatch(SIZES, name) else shrunk(name, value)


def parts(axes: Sequence[int]) -> Sequence[int]:
    """Even ones, the first the largest."""
    rest = 2 * (HEAD_DIM // 2 // len(axes))
    return type(axes)([HEAD_DIM - rest * (len(axes) - 1)] + [rest] * (len(axes) - 1))  # type: ignore[call-arg]


class Maker:
    """Inputs of one seed, by names."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.config = model, model.config
        self.names = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(seed)

    def ways(self) -> Iterator[Way]:
        """The fullest first."""
        for optional, shape, mask in itertools.product((True, False), self.shapes(), (torch.long, torch.bool)):
            yield "denoising", functools.partial(self.made, shape, optional, mask)

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """Of images, rows, videos and sounds."""
        names = (
            "audio_acoustic_hidden_dim",
            "in_channels",
            "in_visual_dim",
            "io_channels",
            "latent_dim",
            "input_dims",
            "embedding_dim",
        )
        channels = next((self.config[each] for each in names if self.config.get(each)), 4)
        yield BATCH, channels, 2 * SIDE, 2 * SIDE
        yield BATCH, ROWS, channels
        yield BATCH, channels, FRAMES, 2 * SIDE, 2 * SIDE
        yield BATCH, FRAMES, channels, 2 * SIDE, 2 * SIDE
        yield BATCH, FRAMES, 2 * SIDE, 2 * SIDE, channels
        yield BATCH, channels, ROWS
        yield BATCH, channels, 4 * ROWS
        yield BATCH, channels

    def made(self, shape: tuple[int, ...], optional: bool, mask: torch.dtype) -> Inputs:
        made: Inputs = {}
        own = EXTRA.get(type(self.model).__name__, {})
        for name, parameter in self.names.items():
            if (make := own.get(name) or self.known(name)) is None:
                continue
            value = torch.ones(BATCH, WORDS, dtype=mask) if re.fullmatch(MASKS, name) else make(self, shape)
            if value is not None and (optional or parameter.default is parameter.empty):
                made[name] = value
        return made

    @staticmethod
    def known(name: str) -> Any:
        return next((make for pattern, make in VALUES if re.fullmatch(pattern, name)), None)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def axes(self) -> int:
        fields = (value for name, value in self.config.items() if re.fullmatch(AXES, name) and value)
        return len(next(fields, (0, 0, 0)))


def _grid(maker: Maker, shape: tuple[int, ...]) -> Tensor:
    places = torch.zeros(ROWS, maker.axes())
    places[:, -2], places[:, -1] = (torch.arange(ROWS) // SIDE), (torch.arange(ROWS) % SIDE)
    return places


def _rows(*widths: int) -> Callable[[Maker, tuple[int, ...]], Any]:
    return lambda maker, shape: maker.noise(BATCH, ROWS, *widths)


EXTRA: Mapping[str, Mapping[str, Callable[[Maker, tuple[int, ...]], Any]]] = {
    "AceStepTransformer1DModel": {"context_latents": _rows(2 * WIDTH)},
    "AnyFlowTransformer3DModel": {
        "timestep": lambda maker, shape: torch.full((BATCH, FRAMES), 0.3),
        "r_timestep": lambda maker, shape: torch.full((BATCH, FRAMES), 0.7),
    },
    "BriaFiboTransformer2DModel": {
        "text_encoder_layers": lambda maker, shape: [maker.noise(BATCH, WORDS, WIDTH) for _ in range(4)]
    },
    "ErnieImageTransformer2DModel": {"text_lens": lambda maker, shape: torch.tensor([WORDS, WORDS])},
    "GlmImageTransformer2DModel": {
        "prior_token_id": lambda maker, shape: torch.arange(BATCH * ROWS).reshape(BATCH, ROWS),
        "prior_token_drop": lambda maker, shape: torch.tensor([False, True]),
    },
    "HiDreamImageTransformer2DModel": {
        "encoder_hidden_states_llama3": lambda maker, shape: maker.noise(2, BATCH, WORDS, WIDTH)
    },
    "HunyuanVideoFramepackTransformer3DModel": {
        "indices_latents": lambda maker, shape: torch.arange(FRAMES),
    },
    "I2VGenXLUNet": {
        "fps": lambda maker, shape: torch.tensor([8, 8]),
        "image_embeddings": lambda maker, shape: maker.noise(BATCH, WIDTH),
    },
    "Kandinsky5Transformer3DModel": {
        "visual_rope_pos": lambda maker, shape: [torch.arange(n) for n in (FRAMES, SIDE, SIDE)],
        "text_rope_pos": lambda maker, shape: torch.arange(WORDS),
    },
    "Krea2Transformer2DModel": {
        "encoder_hidden_states": lambda maker, shape: maker.noise(BATCH, WORDS, maker.config.num_text_layers, WIDTH),
        "position_ids": lambda maker, shape: torch.zeros(WORDS + ROWS, 3),
    },
    "LTX2VideoTransformer3DModel": {
        "audio_hidden_states": _rows(WIDTH),
        "audio_encoder_hidden_states": _rows(WIDTH),
        "audio_num_frames": lambda maker, shape: ROWS,
    },
    "MiniMaxMusic3RVQDepthDecoder": {"inputs_embeds": lambda maker, shape: maker.noise(BATCH, 8, WIDTH)},
    "StableCascadeUNet": {"clip_text_pooled": lambda maker, shape: maker.noise(BATCH, 1, WIDTH)},
    "UNetSpatioTemporalConditionModel": {"added_time_ids": lambda maker, shape: torch.ones(BATCH, 3)},
    "WanVACETransformer3DModel": {
        "control_hidden_states": lambda maker, shape: maker.noise(BATCH, maker.config.vace_in_channels, *shape[2:])
    },
}
"""Of single classes, by parameter."""

VALUES: Sequence[tuple[str, Callable[[Maker, tuple[int, ...]], Any]]] = (
    (r"hidden_states|sample|x|image_latents", lambda maker, shape: maker.noise(*shape)),
    (r"timesteps?|t|timestep_ratio|timestep_r|r_timestep", lambda maker, shape: torch.tensor([0.3, 0.7])),
    (MASKS, lambda maker, shape: torch.ones(BATCH, WORDS)),
    (
        r"(encoder|text)_hidden_states(_t5|_2)?|image_embeds|text_bth|cap_feats",
        lambda maker, shape: maker.noise(BATCH, WORDS, WIDTH),
    ),
    (r"pooled_.*|proj_embedding|global_hidden_states", lambda maker, shape: maker.noise(BATCH, WIDTH)),
    (r"img_ids", _grid),
    (r"txt_ids", lambda maker, shape: torch.zeros(WORDS, maker.axes())),
    (r"guidance", lambda maker, shape: torch.tensor([1.0, 2.0]) if maker.config.get("guidance_embeds") else None),
    (r"(original|target)_size", lambda maker, shape: torch.full((BATCH, 2), 2.0 * SIDE)),
    (r"crop_coords", lambda maker, shape: torch.zeros(BATCH, 2)),
    (r"img_shapes", lambda maker, shape: [[(1, SIDE, SIDE)]] * BATCH),
    (r"num_frames", lambda maker, shape: 1),
    (r"height|width", lambda maker, shape: SIDE),
    (r"class_labels", lambda maker, shape: torch.tensor([1, 2])),
)
"""Names of parameters, whole, to values; the first that fits."""
