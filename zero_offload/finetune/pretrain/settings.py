"""The settings of a training run: `TrainConfig`, checked whole and then never changed.

Owns the names, defaults and rules of the settings of `train`; those of tiers and storage are `OffloadConfig`'s.
Never reads the data or the run directory.

Calls, in order: `TrainConfig.from_tables(*read_tables(path))`, which raises one ConfigError listing every
problem of both tables; then read the fields, `gpt()` and `arguments()`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError
from zero_offload.base.problems import list_problems, unknown_names
from zero_offload.base.types import Existing, user_path
from zero_offload.checkpoint.run_dir import offload_settings
from zero_offload.finetune.gpt_config import PRESETS, GPTConfig, RecomputeMode, preset
from zero_offload.runs.settings import RUNS, is_count, is_real, out_problems, place_problems, with_offload


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run of `train`. The defaults train a small GPT on the Python standard library's sources."""

    model: str = "small"
    """A name in `finetune.gpt.PRESETS`."""
    data: tuple[Path, ...] = ()
    """Files and directories of text; none is the Python standard library of this machine."""
    out: Path = RUNS / "stdlib"
    """Run directory: metrics, report, sample, and the NVMe tier where none is named."""
    steps: int = 450
    """Optimizer steps."""
    seq: int = 128
    """Bytes of text in a sequence: each is a token."""
    batch: int = 16
    """Sequences per micro-batch and rank."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    lr: float = 3e-3
    """Peak learning rate: reached after `warmup` steps, then a cosine down to a tenth of it."""
    warmup: int = 20
    """Steps until the peak."""
    weight_decay: float = 0.1
    """Applied to matrices; norm weights are not decayed."""
    clip: float = 1.0
    """The largest norm of all gradients, to which larger ones are clipped."""
    seed: int = 0
    """Seed of the values and of the order of data."""
    eval_every: int = 50
    """Steps between evaluations."""
    eval_batches: int = 8
    """Batches of an evaluation."""
    recompute: str = ""
    """"none" or "block" (a block's activations are computed again in backward); empty: as the preset."""
    sample_bytes: int = 240
    """Length of the text that the model writes at the end."""
    trace: int = 0
    """Steps to trace, after the second one of this start; no part of what the run is."""
    offload: OffloadConfig = field(default_factory=lambda: _offload_config({}, RUNS / "stdlib"))
    """The table `[offload]`: where states rest."""

    def __post_init__(self) -> None:
        if problems := list(_find_problems(self)):
            raise ConfigError(list_problems("the training settings have", problems))

    @classmethod
    def from_tables(cls, train: Mapping[str, Any], offload: Mapping[str, Any]) -> TrainConfig:
        """Build from plain values as TOML or flags hold them; all problems of both tables at once."""
        names = [item.name for item in fields(cls) if item.name != "offload"]
        problems = unknown_names(train, names)
        if "existing" in offload:
            problems.append("existing is decided by train: a run goes on by itself, and --discard deletes it")
        settings = {name: value for name, value in train.items() if name in names}
        try:
            settings |= _as_paths(settings)
        except TypeError:
            problems.append("data and out are paths: data = ['FILE or DIR', ...], out = 'DIR'")
            settings = {name: value for name, value in settings.items() if name not in ("data", "out")}
        make = partial(_offload_config, offload, settings.get("out", cls.out))
        return cls(**with_offload(cls, settings, make, problems, _find_problems, "the training settings have"))

    def gpt(self) -> GPTConfig:
        config = preset(self.model, seq_max=self.seq)
        return replace(config, recompute=RecomputeMode(self.recompute)) if self.recompute else config

    def arguments(self) -> dict[str, Any]:
        """Plain values that decide the run, flat; two runs are the same run where these are equal."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("offload", "trace")}
        values |= {"data": [str(path.absolute()) for path in self.data], "out": str(self.out.absolute())}
        return values | offload_settings(self.offload)


def default_out(data: tuple[Path, ...]) -> Path:
    """Where a run on this text goes unless told: runs on different text do not meet."""
    return RUNS / (data[0].absolute().stem or "text") if data else TrainConfig.out


def _offload_config(offload: Mapping[str, Any], out: Path) -> OffloadConfig:
    defaults = {"params": "nvme", "grads": "cpu", "optimizer": "nvme", "nvme": str(out / "nvme")}
    if "generation" in offload:
        defaults["existing"] = Existing.RESUME.value
    return OffloadConfig.from_dict(defaults | dict(offload))


def _as_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    data = settings.get("data", ())
    paths = tuple(user_path(item) for item in ([data] if isinstance(data, str | Path) else data))
    out = user_path(settings.get("out", default_out(paths)))
    if any("\0" in str(path) for path in (*paths, out)):
        raise TypeError("a NUL byte")
    return {"data": paths, "out": out}


def _find_problems(config: TrainConfig | SimpleNamespace) -> Iterator[str]:
    if not isinstance(config.model, str) or config.model not in PRESETS:
        choice = f"choose one of {', '.join(PRESETS)}"
        if "/" in str(config.model) or os.path.exists(str(config.model)):
            yield (
                f"model={config.model!r} is not a preset, which train begins with random weights ({choice}). To go on "
                f"from a folder's: zero-offload finetune {config.model} --data FILES, and what it takes: zero-offload "
                f"plan {config.model}"
            )
        else:
            near = difflib.get_close_matches(str(config.model), PRESETS, n=1, cutoff=0.0)[0]
            yield f"unknown preset model={config.model!r}; did you mean {near!r}? C{choice[1:]}"
    for name in ("steps", "seq", "batch", "accumulate", "eval_every", "eval_batches", "sample_bytes"):
        if not is_count(value := getattr(config, name), least=1):
            yield f"{name}={value!r} is not a positive whole number"
    for name in ("warmup", "seed", "trace"):
        if not is_count(value := getattr(config, name), least=0):
            yield f"{name}={value!r} is not a whole number from 0 up"
    for name in ("lr", "clip"):
        if not (is_real(value := getattr(config, name)) and value > 0):
            yield f"{name}={value!r} is not a positive number"
    if not (is_real(config.weight_decay) and config.weight_decay >= 0):
        yield f"weight_decay={config.weight_decay!r} is not a number from 0 up"
    if config.recompute not in ("", *(choice.value for choice in RecomputeMode)):
        yield f"recompute={config.recompute!r} is unknown; use 'none' or 'block'"
    yield from out_problems(config.out)
    if isinstance(config.offload, OffloadConfig):
        yield from place_problems(config.offload, config.out, config.clip)
