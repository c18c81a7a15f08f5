"""Inputs of a model, made from the signature of its forward, its configuration, and a seed.

`Maker.ways` gives several, the fullest first: text around images or sounds, then each alone. The zoo trains on the
first that the model takes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.exceptions import IMAGES, INPUTS, SOUNDS

BATCH, LENGTH, TARGETS = 2, 12, 6
LOWEST, HIGHEST = 5, 100
"""Token ids between those of text's ends and those of images."""
Inputs = dict[str, Any]
Way = tuple[str, Callable[[], Inputs]]
PLACES = {
    "get_image_features": ("image_token_id", "image_token_index"),
    "get_audio_features": ("audio_token_id", "audio_token_index"),
    "get_video_features": ("video_token_id", "video_token_index"),
}
"""Calls that make the features which go to the places of a token; fields of a configuration with the token."""
MASKS = ("input_features_mask", "feature_attention_mask", "padding_mask", "attention_mask")


class Maker:
    """One model's inputs of one seed."""

    def __init__(self, model: nn.Module, family: str, seed: int) -> None:
        self.model, self.family, self.config = model, family, model.config
        self.names = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(seed)

    def ways(self) -> Iterator[Way]:
        """Names, and calls that make what forward takes."""
        own = INPUTS.get(self.family)
        if own is not None:
            yield own[0], functools.partial(own[1], self)
            return
        has_text = "input_ids" in self.names
        for kind, media in self.media():
            if has_text:
                yield f"text, {kind}", lambda media=media: self.finished(self.text_around(media()))
            yield kind, lambda media=media: self.finished(media())
            if has_text:
                yield f"text, {kind}", lambda media=media: self.text_around(media())
            yield kind, media
        if has_text:
            yield "text", lambda: self.finished(self.text())
            yield "text", lambda: self.finished(self.text() | self.decoder_text())
            yield "text", lambda: self.text() | self.decoder_text()

    def tokens(self, length: int) -> Tensor:
        below = min(HIGHEST, self.field("vocab_size", default=HIGHEST))
        return torch.randint(LOWEST, below, (BATCH, length), generator=self.generator)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=self.generator)

    def field(self, *names: str, default: Any = None) -> Any:
        """Of the configuration, or of the first of its parts that has one of them."""
        for each in (self.config, *parts_of(self.config)):
            for name in names:
                if getattr(each, name, None) is not None:
                    return getattr(each, name)
        return default

    # Text

    def text(self) -> Inputs:
        made: Inputs = {"input_ids": self.tokens(LENGTH)}
        if "bbox" in self.names:
            made["bbox"] = torch.tensor([1, 2, 3, 4]).expand(BATCH, LENGTH, 4).clone()
        if "qformer_input_ids" in self.names:
            made["qformer_input_ids"] = self.tokens(4)
        return made

    def decoder_text(self, length: int = TARGETS) -> Inputs:
        return {"decoder_input_ids": self.tokens(length)} if "decoder_input_ids" in self.names else {}

    def text_around(self, media: Inputs) -> Inputs:
        """Text with as many places for images or sounds as the model makes features of them."""
        made = self.text()
        for call, fields in PLACES.items():
            functions = [getattr(each, call) for each in self.model.modules() if hasattr(each, call)]
            choices = [(_chosen(each, media | made), each) for each in functions]
            chosen, function = max(choices, key=lambda each: len(each[0]), default=({}, None))
            token = self.field(*fields)
            if function is None or token is None or not {*media} & {*chosen}:
                continue
            with torch.no_grad():
                count = rows_of(function(**chosen)) // BATCH
            made = self.placed(made, token, count)
        return media | made

    def placed(self, text: Inputs, token: int, count: int) -> Inputs:
        """Text with so many places for what the token stands for."""
        ids = text["input_ids"]
        ids = torch.cat([ids[:, :4], torch.full((BATCH, count), token), ids[:, 4:]], 1)
        kinds = {name for name in ("mm_token_type_ids", "token_type_ids") if name in self.names}
        return text | {"input_ids": ids} | {name: (ids == token).long() for name in kinds}

    # Images, sounds, series

    def media(self) -> Iterator[Way]:
        size = self.image_size()
        if "pixel_values" in self.names:
            yield from (("images", way) for way in self.images())
        elif "pixel_values_videos" in self.names:
            frames = self.field("num_frames", default=4)
            yield "videos", lambda: {"pixel_values_videos": self.noise(BATCH, frames, 3, *size)}
        for name in ("input_features", "input_values", "audio_values"):
            if name in self.names:
                yield from (("sounds", way) for way in self.sounds(name))
        if "past_values" in self.names:
            yield from (("series", way) for way in self.series())
        if "inputs_embeds" in self.names and not {"input_ids", "pixel_values", "input_features"} & {*self.names}:
            width = self.field("hidden_size", "d_model")
            yield "embeddings", lambda: {"inputs_embeds": self.noise(BATCH, LENGTH, width)}

    def image_size(self) -> tuple[int, int]:
        size = self.field("image_size", "img_size", "input_size", "crop_size", default=32)
        if isinstance(size, Mapping):
            return size["height"], size["width"]
        return (size[-2], size[-1]) if isinstance(size, (list, tuple)) else (size, size)

    def images(self) -> Iterator[Callable[[], Inputs]]:
        if self.family in IMAGES:
            yield lambda: IMAGES[self.family](self)
            return
        channels = self.field("num_channels", "in_channels", "num_image_channels", default=3)
        channels = channels if isinstance(channels, int) else 3
        if key := next((name for name in ("image_grid_thw", "grid_thw") if name in self.names), None):
            yield lambda: self.patches(channels, key)
            yield lambda: self.patches(channels, key, flat=False)
        size, frames = self.image_size(), self.field("num_frames", "frames_per_clip", default=4)
        middles = [(), (1,), (2,), (3,), (frames,)]
        for middle, sized in itertools.product(middles, (True, False) if "image_sizes" in self.names else (False,)):
            yield functools.partial(self.image, channels, middle, size, sized)
        for side in (64, 224):
            yield functools.partial(self.image, channels, (), (side, side), False)

    def image(self, channels: int, middle: tuple[int, ...], size: tuple[int, int], sized: bool) -> Inputs:
        made: Inputs = {"pixel_values": self.noise(BATCH, *middle, channels, *size)}
        return made | {"image_sizes": torch.tensor([size] * BATCH)} if sized else made

    def patches(self, channels: int, key: str, flat: bool = True) -> Inputs:
        """Images cut by the processor, as Qwen's."""
        patch, times = self.field("patch_size", default=8), self.field("temporal_patch_size", default=1)
        grid = torch.tensor([[1, 4, 4]] * BATCH)
        shape = (channels * times * patch * patch,) if flat else (channels, patch, patch)
        return {"pixel_values": self.noise(int(grid.prod(-1).sum()), *shape), key: grid}

    def sounds(self, name: str) -> Iterator[Callable[[], Inputs]]:
        if self.family in SOUNDS:
            yield lambda: SOUNDS[self.family](self)
            return
        bins = self.field(
            "feature_projection_input_dim",
            "num_mel_bins",
            "n_mels",
            "feature_size",
            "input_dim",
            "input_feat_per_channel",
            default=16,
        )
        for frames in (64, 128):
            for shape in ((bins, frames), (frames, bins)):
                for mask in (True, False):
                    yield functools.partial(self.sound, name, shape, frames if mask else 0)
        for length in (800, 4000):
            yield functools.partial(self.sound, name, (length,), 0)
            yield functools.partial(self.sound, name, (1, length), 0)
        yield functools.partial(self.sound, name, (1, 64, bins), 0)

    def sound(self, name: str, shape: tuple[int, ...], frames: int) -> Inputs:
        made: Inputs = {name: self.noise(BATCH, *shape)}
        mask = next((each for each in MASKS if each in self.names), None)
        if frames and mask is not None:
            made[mask] = torch.ones(BATCH, frames, dtype=torch.long)
        return made

    def series(self) -> Iterator[Callable[[], Inputs]]:
        length, channels = self.field("context_length", default=32), self.field("num_input_channels", default=1)
        ahead, lags = self.field("prediction_length", default=8), max(self.field("lags_sequence", default=[0]))
        yield lambda: {"past_values": self.noise(BATCH, length, channels), **self.future(ahead, channels)}
        yield lambda: {"past_values": self.noise(BATCH, length, channels)}
        yield lambda: {
            "past_values": self.noise(BATCH, length + lags),
            "past_time_features": self.noise(BATCH, length + lags, self.config.num_time_features),
            "past_observed_mask": torch.ones(BATCH, length + lags),
            "future_values": self.noise(BATCH, ahead),
            "future_time_features": self.noise(BATCH, ahead, self.config.num_time_features),
        }
        rows: Inputs = {"past_values": [self.noise(length), self.noise(length)]}
        yield lambda: rows | {"freq": [0, 0], "future_values": self.noise(BATCH, ahead)}
        yield lambda: rows

    def future(self, ahead: int, channels: int) -> Inputs:
        return {"future_values": self.noise(BATCH, ahead, channels)} if "future_values" in self.names else {}

    # Labels

    def finished(self, inputs: Inputs) -> Inputs:
        """With labels, and what else a loss needs."""
        kind, size = type(self.model).__name__, self.image_size()
        if "return_loss" in self.names and "input_ids" in inputs:
            inputs = inputs | {"return_loss": True}
        if {"mask_labels", "class_labels"} <= {*self.names}:
            masks = [(self.noise(2, *size) > 0).float() for _ in range(BATCH)]
            return inputs | {"mask_labels": masks, "class_labels": [torch.tensor([0, 1])] * BATCH}
        if "labels" in self.names:
            return inputs | {"labels": self.labels(kind, inputs)}
        if "start_positions" in self.names:
            return inputs | {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
        return inputs

    def labels(self, kind: str, inputs: Inputs) -> Any:
        size = self.image_size()
        if "ObjectDetection" in kind or kind == "DetrForSegmentation":
            boxes = torch.tensor([[0.5, 0.5, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]])
            each: Inputs = {"class_labels": torch.tensor([0, 1]), "boxes": boxes}
            if "Segmentation" in kind:
                each["masks"] = (self.noise(2, *size) > 0).float()
            return [each] * BATCH
        if "SemanticSegmentation" in kind:
            return self.integers(2, BATCH, *inputs["pixel_values"].shape[-2:])
        if "Depth" in kind:
            return self.noise(BATCH, *size).abs() + 0.1
        if "TokenClassification" in kind or "FrameClassification" in kind:
            return self.integers(2, *inputs["input_ids"].shape)
        if "Classification" in kind:
            return self.integers(2, BATCH)
        if "decoder_input_ids" in inputs:
            return inputs["decoder_input_ids"].clone()
        if "input_ids" in inputs and "decoder_input_ids" not in self.names:
            return inputs["input_ids"].clone()
        return self.tokens(TARGETS)


def _chosen(function: Callable[..., Any], values: Inputs) -> Inputs:
    taken = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in taken}


def parts_of(config: Any) -> Iterator[Any]:
    """Configurations inside of a configuration, the outer ones first."""
    for value in vars(config).values():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield value
            yield from parts_of(value)


def rows_of(features: Any) -> int:
    """Vectors that a model puts in the places of images or sounds."""
    found = getattr(features, "pooler_output", features)
    found = features.last_hidden_state if found is None else found
    if isinstance(found, Tensor):
        return found.numel() // found.shape[-1]
    return sum(rows_of(each) for each in found if isinstance(each, Tensor))


def loss_of(outputs: Any) -> Tensor:
    """The model's own loss; else the sum of the mean squares of what it gives out, without masks of infinity."""
    own = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if own is not None:
        return own if own.dim() == 0 else own.mean()
    given = (each.float().nan_to_num(math.nan, 0.0, 0.0) for each in tensors_of(outputs) if each.requires_grad)
    found = [each.square().mean() for each in given]
    if not found:
        raise ValueError("no output has a gradient")
    return torch.stack(found).sum()


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(each)
