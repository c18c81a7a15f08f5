"""Models of timm: one of each module, made small by the parameters of its class that widths and depths have."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tests.zoo.inputs import Inputs, Way

BATCH, SIDE, WIDTH, HEADS, CLASSES = 2, 64, 64, 4, 2

MODELS: Mapping[str, str] = {
    "beit": "beit_base_patch16_224",
    "byoanet": "eca_botnext26ts_256",
    "byobnet": "test_byobnet",
    "cait": "cait_xxs24_224",
    "coat": "coat_tiny",
    "convit": "convit_tiny",
    "convmixer": "convmixer_768_32",
    "convnext": "test_convnext",
    "cpubone": "cpubone_nano",
    "crossvit": "crossvit_tiny_240",
    "csatv2": "csatv2",
    "cspnet": "cs3darknet_focus_s",
    "cspnext": "cspnext_tiny",
    "davit": "davit_tiny",
    "deepseek_vit": "deepseek_vit_412m",
    "deit": "deit_tiny_patch16_224",
    "densenet": "densenet121",
    "dla": "dla46_c",
    "dpn": "dpn48b",
    "edgenext": "edgenext_xx_small",
    "efficientformer": "efficientformer_l1",
    "efficientformer_v2": "efficientformerv2_s0",
    "efficientnet": "test_efficientnet",
    "efficientvim": "efficientvim_m1",
    "efficientvit_mit": "efficientvit_b0",
    "efficientvit_msra": "efficientvit_m0",
    "eva": "eva02_tiny_patch14_224",
    "fasternet": "fasternet_t0",
    "fastvit": "fastvit_t8",
    "focalnet": "focalnet_tiny_srf",
    "gcvit": "gcvit_xxtiny",
    "gemma4_vit": "gemma4_vit_167m",
    "ghostnet": "ghostnet_050",
    "hardcorenas": "hardcorenas_b",
    "hgnet": "hgnetv2_b0",
    "hiera": "hiera_tiny_224",
    "hieradet_sam2": "sam2_hiera_tiny",
    "hrnet": "hrnet_w18_small",
    "iformer": "iformer_t",
    "inception_next": "inception_next_atto",
    "inception_resnet_v2": "inception_resnet_v2",
    "inception_v3": "inception_v3",
    "inception_v4": "inception_v4",
    "lcnetv2": "lcnetv2_small",
    "levit": "levit_128s",
    "lowformer": "lowformer_b0",
    "mambaout": "test_mambaout",
    "maxxvit": "test_maxvit",
    "metaformer": "poolformer_s12",
    "mlp_mixer": "gmlp_ti16_224",
    "mobilenetv3": "mobilenetv3_small_050",
    "mobilenetv5": "mobilenetv5_base",
    "mobilevit": "mobilevit_xxs",
    "mvitv2": "mvitv2_tiny",
    "naflexvit": "naflexvit_base_patch16_gap",
    "nasnet": "nasnetalarge",
    "nest": "nest_tiny",
    "nextvit": "nextvit_small",
    "nfnet": "test_nfnet",
    "pit": "pit_ti_224",
    "pnasnet": "pnasnet5large",
    "pvt_v2": "pvt_v2_b0",
    "qwen3_vit": "qwen3_vit_306m",
    "rdnet": "rdnet_tiny",
    "regnet": "regnetx_004_tv",
    "repghost": "repghostnet_050",
    "repvit": "repvit_m1",
    "res2net": "res2net50_14w_8s",
    "resnest": "resnest14d",
    "resnet": "test_resnet",
    "resnetv2": "resnetv2_18",
    "rexnet": "rexnet_100",
    "selecsls": "selecsls42",
    "senet": "legacy_seresnet18",
    "sequencer": "sequencer2d_s",
    "shvit": "shvit_s1",
    "sknet": "skresnet18",
    "starnet": "starnet_s050",
    "swiftformer": "swiftformer_xs",
    "swin_transformer": "swin_tiny_patch4_window7_224",
    "swin_transformer_v2": "swinv2_tiny_window8_256",
    "swin_transformer_v2_cr": "swinv2_cr_tiny_224",
    "tiny_vit": "tiny_vit_5m_224",
    "tnt": "tnt_s_patch16_224",
    "tresnet": "tresnet_m",
    "twins": "twins_svt_small",
    "vgg": "vgg11",
    "visformer": "visformer_tiny",
    "vision_transformer": "test_vit",
    "vision_transformer_hybrid": "vit_small_r26_s32_224",
    "vision_transformer_relpos": "test_vit_relpos",
    "vision_transformer_sam": "samvit_base_patch16_224",
    "vitamin": "vitamin_small_224",
    "volo": "volo_d1_224",
    "vovnet": "ese_vovnet19b_slim_dw",
    "xception": "legacy_xception",
    "xception_aligned": "xception41p",
    "xcit": "xcit_nano_12_p8_224",
}
"""Name of a model by its module; the smallest one."""


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "coat_tiny": {"img_size": SIDE},
    "crossvit_tiny_240": {},
    "davit_tiny": {"depths": (1, 1, 1, 1), "embed_dims": (24, 48, 96, 192)},
    "swin_tiny_patch4_window7_224": {"img_size": SIDE, "embed_dim": 24, "depths": (1, 1, 1, 1)},
    "swinv2_cr_tiny_224": {"img_size": SIDE, "embed_dim": 24, "depths": (1, 1, 1, 1)},
    "swinv2_tiny_window8_256": {"img_size": SIDE, "embed_dim": 24, "depths": (1, 1, 1, 1)},
    "tnt_s_patch16_224": {"img_size": SIDE, "depth": 2},
}
"""Of models for which the names of parameters do not tell."""


def build(name: str, **options: Any) -> nn.Module:
    return importlib.import_module("timm").create_model(name, **settings(name), **options)  # type: ignore[no-any-return]


@functools.cache
def settings(name: str) -> dict[str, Any]:
    """The first that the model is built of without memory."""
    if name in SETTINGS:
        return {"num_classes": CLASSES} | SETTINGS[name]
    create = importlib.import_module("timm").create_model
    with torch.device("meta"):
        taken = inspect.signature(type(create(name)).__init__).parameters
        changes = {key: value for key, value in small(taken).items() if key in taken}
        size = {"img_size": SIDE} if "img_size" in taken else {}
        for each in (changes | size, changes, size):
            try:
                create(name, num_classes=CLASSES, **each)
            except Exception:
                continue
            return {"num_classes": CLASSES} | each
    return {"num_classes": CLASSES}


def small(taken: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Two blocks, or one of each stage."""
    found: dict[str, Any] = {}
    for name in ("depths", "layers", "stages"):
        default = taken[name].default if name in taken else ()
        found[name] = (1,) * (len(default) if isinstance(default, (tuple, list)) and default else 4)
    if all(isinstance(getattr(taken.get(each), "default", None), int) for each in ("embed_dim", "num_heads")):
        found |= {"embed_dim": WIDTH, "num_heads": HEADS}
    return found | {"depth": 2} if "depth" in taken and isinstance(taken["depth"].default, int) else found


def ways(model: Any, seed: int) -> Iterator[Way]:
    """Images of this size, or of the model's own."""
    own = (model.default_cfg if isinstance(model.default_cfg, dict) else vars(model.default_cfg))["input_size"]
    for size in dict.fromkeys((SIDE, 2 * SIDE, own[-1])):
        yield "images", functools.partial(images, size, seed)


def images(size: int, seed: int) -> Inputs:
    """Of a plain positional parameter, the name of which differs."""
    return {"x": torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(seed))}
