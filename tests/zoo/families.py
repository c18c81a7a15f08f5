"""The families of the zoo: folders of transformers' models, classes of diffusers, modules of timm.

Each has the class that the zoo trains.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.zoo import denoisers, vision
from tests.zoo.exceptions import KINDS, NEEDS

TRANSFORMERS, DIFFUSERS, TIMM = "transformers", "diffusers", "timm"

HEADS = [
    "MULTIMODAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "RNNT",
    "TDT",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "TIME_SERIES_REGRESSION",
    "DEPTH_ESTIMATION",
    "CAUSAL_IMAGE_MODELING",
    "MASKED_IMAGE_MODELING",
    "PRETRAINING",
    "IMAGE_TO_IMAGE",
    "KEYPOINT_DETECTION",
    "KEYPOINT_MATCHING",
    "POSE_ESTIMATION",
    "IMAGE_MATTING",
    "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
    "SEQUENCE_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "TOKEN_CLASSIFICATION",
    "TABLE_RECOGNITION",
    "TEXT_RECOGNITION",
    "RETRIEVAL",
    "MASK_GENERATION",
    "DECISION",
]
"""A family trains the first head that it has; a base model is the last choice."""


@dataclass(frozen=True)
class Family:
    """A folder of transformers' models, a class of diffusers, or a module of timm."""

    name: str
    """Behind that of the library, where this is not transformers."""
    kind: str
    """Name of the model's class, of timm that of the model."""
    config: str = ""
    """Model type, by which transformers finds the class of the configuration."""
    library: str = TRANSFORMERS
    needs: tuple[str, ...] = ()
    """Libraries that need not be installed."""


@functools.cache
def families() -> Mapping[str, Family]:
    """By name, those of transformers first, each library's in alphabetical order."""
    others = [Family(f"{DIFFUSERS}/{kind}", kind, library=DIFFUSERS) for kind in denoisers.classes()]
    others += [Family(f"{TIMM}/{module}", kind, library=TIMM, needs=(TIMM,)) for module, kind in vision.MODELS.items()]
    return {**_of_transformers(), **{each.name: each for each in others}}


def _of_transformers() -> dict[str, Family]:
    """By folder."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    configs = importlib.import_module("transformers.models.auto.configuration_auto")
    tables = [getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}) for head in HEADS]
    found: dict[str, Family] = {}
    for table in [*tables, auto.MODEL_MAPPING_NAMES]:
        for model_type, kinds in table.items():
            kind = kinds if isinstance(kinds, str) else kinds[0]
            name = folder_of(configs, model_type)
            found.setdefault(name, Family(name, *KINDS.get(name, (kind, model_type)), needs=_needs(name)))
    return dict(sorted(found.items()))


def folder_of(configs: Any, model_type: str) -> str:
    return str(configs.model_type_to_module_name(model_type))


def _needs(name: str) -> tuple[str, ...]:
    return tuple(library for library, names in NEEDS.items() if name in names)
