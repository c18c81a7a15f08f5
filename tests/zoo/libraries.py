"""Differences between the libraries of the zoo: how a tiny model is built, fed, saved and read."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.zoo import denoisers, vision
from tests.zoo.exceptions import CHANGES
from tests.zoo.families import DIFFUSERS, TIMM, TRANSFORMERS, Family
from tests.zoo.inputs import Maker, Way
from tests.zoo.shrink import tiny


class Library:
    """Folders by the calls that transformers and diffusers share."""

    def build(self, family: Family) -> nn.Module:
        raise NotImplementedError

    def ways(self, family: Family, model: nn.Module, seed: int) -> Iterator[Way]:
        """Names, and calls that make what forward takes, the fullest first."""
        raise NotImplementedError

    def save(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder)

    def read(self, family: Family, folder: Path) -> nn.Module:
        """In fp32."""
        raise NotImplementedError


class Transformers(Library):
    def build(self, family: Family) -> nn.Module:
        auto = importlib.import_module("transformers.models.auto.configuration_auto")
        config = tiny(auto.CONFIG_MAPPING[family.config](), CHANGES.get(family.name, {}))
        for name, token in (("pad_token_id", 0), ("decoder_start_token_id", 1)):
            if getattr(config, name, None) is None:
                setattr(config, name, token)
        return self._kind(family)(config)  # type: ignore[no-any-return]

    def ways(self, family: Family, model: nn.Module, seed: int) -> Iterator[Way]:
        return Maker(model, family.name, seed).ways()

    def read(self, family: Family, folder: Path) -> nn.Module:
        """Raises LookupError where transformers does not find all in a folder, and draws the rest."""
        kind = self._kind(family)
        model, told = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        if missing := told["missing_keys"]:
            raise LookupError(f"the folder lacks {len(missing)} tensors, the first {min(missing)}")
        return model  # type: ignore[no-any-return]

    def _kind(self, family: Family) -> Any:
        return getattr(importlib.import_module("transformers"), family.kind)


class Diffusers(Library):
    def build(self, family: Family) -> nn.Module:
        return denoisers.build(family.kind)

    def ways(self, family: Family, model: nn.Module, seed: int) -> Iterator[Way]:
        return denoisers.Maker(model, seed).ways()

    def read(self, family: Family, folder: Path) -> nn.Module:
        kind: Any = getattr(importlib.import_module("diffusers"), family.kind)
        return kind.from_pretrained(folder)  # type: ignore[no-any-return]


class Timm(Library):
    def build(self, family: Family) -> nn.Module:
        return vision.build(family.kind)

    def ways(self, family: Family, model: nn.Module, seed: int) -> Iterator[Way]:
        return vision.ways(model, seed)

    def save(self, model: Any, folder: Path) -> None:
        importlib.import_module("timm.models").save_for_hf(model, folder, safe_serialization=True)

    def read(self, family: Family, folder: Path) -> nn.Module:
        return vision.build(family.kind, checkpoint_path=str(folder / "model.safetensors"))


LIBRARIES: Mapping[str, Library] = {TRANSFORMERS: Transformers(), DIFFUSERS: Diffusers(), TIMM: Timm()}


def missing(family: Family) -> str:
    """A library that the family needs and that is not installed; empty if there is none."""
    return next((name for name in family.needs if importlib.util.find_spec(name) is None), "")
