"""The settings of a fine-tuning run: `FinetuneConfig`, checked whole and then never changed.

Owns the names, defaults and rules of the settings of `finetune`; those of tiers and storage are `OffloadConfig`'s.
Never reads the model, the data or the run directory.

Calls, in order: `FinetuneConfig.from_tables(*read_tables(path, TABLE))` raises one ConfigError listing every problem of
both tables. `with_length` and `with_method` follow once the model and the data have told them. Then read the fields,
`arguments()`, `to_toml()`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError
from zero_offload.base.precision import QUANTIZATIONS
from zero_offload.base.problems import list_problems, unknown_names
from zero_offload.base.types import Existing, StateKind, Tier, user_path
from zero_offload.finetune.choices import CAUSAL, CLASSIFY, MASKED, LiveChoice, Lora
from zero_offload.plan.turns import MASTERS, PERIODS
from zero_offload.runs.settings import RUNS, is_count, is_real, out_problems, place_problems, with_offload

TABLE = "finetune"
TASKS = {"sft": CAUSAL, "dpo": CAUSAL, "mlm": MASKED, "classify": CLASSIFY}
"""By method, what the model does."""
_RATES = {"sft": (1e-5, 2e-4), "dpo": (5e-7, 5e-6), "mlm": (5e-5, 5e-4), "classify": (2e-5, 5e-4)}
"""By method, the learning rate of all parameters and of adapters."""
_ASKED = ("mlm", "classify")
"""Methods that no data tell: without `method` the same data are trained by another one."""
OUR_OPTIMIZERS = ("AdamW", "Adam", "Adagrad", "SGD", "Lion", "Muon")
LIBRARIES = {
    "torch.optim": "torch",
    "prodigyopt": "prodigyopt",
    "came_pytorch": "came-pytorch",
    "bitsandbytes.optim": "bitsandbytes",
    "torchao.optim": "torchao",
    "heavyball": "heavyball",
    "pytorch_optimizer": "pytorch_optimizer",
}
"""Modules of docs/OPTIMIZERS.md whose classes need no more than parameters and a rate, and the packages that bring
them. No other module is imported.
"""
_SEQ = 1024
_HOW_IT_STARTS = ("existing", "generation")
RECOMPUTE = ("block", "none")
_PATHS = ("model", "out")
_NAMES = ("data", "eval_data", "lora_targets")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """One run of `finetune`."""

    model: Path = Path()
    """A Hugging Face folder, or an adapter's."""
    data: tuple[str, ...] = ()
    """Files, folders or names of data sets."""
    eval_data: tuple[str, ...] = ()
    """Data for evaluation, as `data`."""
    split: float = 0.0
    """The share of the data that is kept for evaluation; 0 is none."""
    method: str = "auto"
    """"sft", "dpo", "mlm" or "classify"; "auto" is what the columns of the data tell."""
    out: Path = RUNS / "model"
    """The trained model, metrics, report, and the NVMe tier where none is named."""
    steps: int = 0
    """Optimizer steps; 0: as many as `epochs` have."""
    epochs: float = 1.0
    """Passes over the data."""
    batch: int = 4
    """Samples (with packing: sequences) per micro-batch and rank."""
    accumulate: int = 4
    """Micro-batches per optimizer step."""
    seq: int = 0
    """The most tokens of a sample, and of a packed sequence; 0: 1024, or as many as the model has positions for."""
    lr: float = 0.0
    """Peak learning rate, reached after `warmup`, then a cosine down to 0. 0: as usual for the method."""
    warmup: float = 0.03
    """Steps until the peak; below 1 a share of all steps, and none where that is less than one."""
    weight_decay: float = 0.0
    """Decay of the matrices."""
    optimizer: str = ""
    """The class that steps, as docs/OPTIMIZERS.md names it: "torch.optim.NAdam", "zo.Muon"; "" is AdamW."""
    clip: float = 1.0
    """The largest norm of all gradients, to which larger ones are clipped."""
    seed: int = 0
    """Seed of the order of data, of new heads and adapters, and of live blocks."""
    lora: int = 0
    """Rank of the adapters; 0 trains all parameters."""
    lora_alpha: float = 0.0
    """Adapters are scaled by alpha / rank; 0 is twice the rank."""
    lora_targets: tuple[str, ...] = ()
    """Targets of adapters, as `Targets` takes them. () is all linear layers but the output's, and of mixtures that peft
    knows experts and routers.
    """
    live_blocks: int | str = 0
    """Blocks that are trained at a time, while the others rest without states; 0 trains all. "auto" is as many as fit.
    """
    live_order: str = "random"
    """One of `PERIODS`: with "random" what is around the blocks is always trained, else it is frozen."""
    live_every: int = 0
    """Steps of a turn; 0: as many as `PERIODS` says."""
    live_master: str = "keep"
    """One of `MASTERS`: with "drop" masters of blocks that rest are rounded, and give up their room."""
    quantize: str = ""
    """The form that the frozen linear layers take, one of `QUANTIZATIONS`; "" leaves them as they are."""
    group_size: int = 0
    """Frozen experts of a layer that are fetched together; 0 is as many as 256 MiB hold."""
    merge: bool = False
    """True if OUT/merged gets the base with its adapters merged into it."""
    packing: bool = True
    """True if short samples share a sequence, each attending to itself alone."""
    recompute: str = "block"
    """Activations in backward: "block" (computed again from the block's inputs) or "none" (kept)."""
    eval_every: int = 0
    """Steps between evaluations; 0: ten in a run."""
    patience: int = 0
    """Evaluations without a better loss after which the run ends; 0 is never."""
    samples: int = 2
    """Texts that the model writes at each evaluation."""
    offload: OffloadConfig = field(default_factory=lambda: default_offload())
    """The table `[offload]`: where states rest."""

    def __post_init__(self) -> None:
        if problems := list(_find_problems(self)):
            raise ConfigError(list_problems("the settings have", problems))

    @classmethod
    def from_tables(cls, finetune: Mapping[str, Any], offload: Mapping[str, Any]) -> FinetuneConfig:
        """Build from plain values as TOML or flags hold them; all problems of both tables at once."""
        names = [item.name for item in fields(cls) if item.name != "offload"]
        problems = unknown_names(finetune, names)
        if "existing" in offload:
            problems.append("existing is decided by finetune: a run goes on by itself, and --discard deletes it")
        settings = {name: value for name, value in finetune.items() if name in names}
        for name in (*_PATHS, *_NAMES):
            try:
                if name in settings:
                    settings[name] = _path(settings[name]) if name in _PATHS else _texts(settings[name])
            except (TypeError, UnicodeEncodeError):  # run.toml has no bytes that are not UTF-8
                problems.append(
                    f"{name}={settings.pop(name)!r} is not {'a path' if name in _PATHS else 'a list of text'} in UTF-8"
                )
            except ConfigError as error:
                settings.pop(name)
                problems.append(f"{name}: {error}")
        settings.setdefault("out", _default_out(settings))
        make = partial(_offload_config, offload, settings["out"])
        return cls(**with_offload(cls, settings, make, problems, _find_problems, "the settings have"))

    def with_length(self, num_positions: int) -> FinetuneConfig:
        """With a length that a model of so many positions takes."""
        return replace(self, seq=self.seq or min(_SEQ, num_positions))

    def with_method(self, method: str, *, is_adapter: bool) -> FinetuneConfig:
        """With the method that the data has told, and its learning rate."""
        return replace(self, method=method, lr=self.lr or usual_rate(method, is_adapter=is_adapter))

    def of_data(self) -> dict[str, Any]:
        """Arguments of `data.prepare`."""
        names = ("method", "seq", "eval_data", "split", "seed", "packing")
        return {name: getattr(self, name) for name in names}

    def num_steps(self, num_rows: int, num_ranks: int) -> int:
        """Optimizer steps of the whole run on so many ranks."""
        return self.steps or max(1, math.ceil(self.epochs * self.steps_per_epoch(num_rows, num_ranks)))

    def steps_per_epoch(self, num_rows: int, num_ranks: int) -> int:
        return max(1, math.ceil(self._batches_per_epoch(num_rows, num_ranks) / self.accumulate))

    def epochs_of(self, num_steps: int, num_rows: int, num_ranks: int) -> float:
        """Passes over the data in so many steps. The last step of a pass may have fewer micro-batches."""
        whole, rest = divmod(num_steps, self.steps_per_epoch(num_rows, num_ranks))
        return whole + rest * self.accumulate / self._batches_per_epoch(num_rows, num_ranks)

    def repeated_rows(self, num_rows: int, num_ranks: int) -> int:
        """Rows that come once more in a pass: every rank gets as many whole micro-batches, as accelerate deals them."""
        together = self.batch * num_ranks
        return -num_rows % together if num_ranks > 1 else 0

    def _batches_per_epoch(self, num_rows: int, num_ranks: int) -> int:
        return math.ceil(num_rows / (self.batch * num_ranks))

    def eval_steps(self, num_steps: int) -> int:
        """Steps between evaluations."""
        return self.eval_every or max(1, num_steps // 10)

    def warmup_of(self, num_steps: int, *, shrinks: bool) -> float:
        """The warm-up that Trainer is given. Trainer rounds a share up, and its first step of warm-up has rate 0. Where
        the share is less than a step, that step would train nothing, so warm-up `shrinks` to none. Older runs keep
        theirs.
        """
        return 0 if shrinks and self.warmup < 1 and num_steps * self.warmup < 1 else self.warmup

    def warmup_steps(self, num_steps: int, *, shrinks: bool) -> int:
        """Steps until the peak, as Trainer counts them."""
        warmup = self.warmup_of(num_steps, shrinks=shrinks)
        return int(warmup) if warmup >= 1 else math.ceil(num_steps * warmup)

    def turns(self) -> LiveChoice | None:
        """None where all is trained at once."""
        if not self.live_blocks:
            return None
        return LiveChoice(self.live_blocks, self.live_order, self.live_every, self.seed, self.live_master)

    def adapters(self) -> Lora | None:
        if not self.lora:
            return None
        return Lora(rank=self.lora, alpha=self.lora_alpha or 2.0 * self.lora, targets=self.lora_targets)

    def arguments(self) -> dict[str, Any]:
        """Plain values that decide the run, flat; two runs are the same run where these are equal."""
        values = self._plain()
        if not self.optimizer:  # as in the files of runs from before these settings
            del values["optimizer"]
        if not self.live_blocks:
            values = {name: value for name, value in values.items() if not name.startswith("live_")}
        elif self.live_master == FinetuneConfig.live_master:
            del values["live_master"]
        return values | {f"offload.{name}": value for name, value in self._places().items()}

    def to_toml(self) -> str:
        """Both tables, of which `from_tables` makes an equal config."""
        tables = {TABLE: self._plain(), "offload": self._places()}
        return "\n".join(
            f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items() if value is not None)
            for name, table in tables.items()
        )

    def _plain(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "offload"}
        values |= {name: str(values[name].absolute()) for name in _PATHS}
        return values | {name: [_whole_name(each) for each in values[name]] for name in _NAMES}

    def _places(self) -> dict[str, Any]:
        places = self.offload.to_dict() | {"nvme": [str(path.absolute()) for path in self.offload.nvme_dirs]}
        # How a run starts is not part of what it is.
        return {name: value for name, value in places.items() if name not in _HOW_IT_STARTS}


def _live_problems(config: FinetuneConfig | SimpleNamespace) -> Iterator[str]:
    """Settings that do not go with blocks that take turns."""
    if config.live_order not in PERIODS:
        yield f"live_order={config.live_order!r} is unknown; use {', '.join(PERIODS)}"
    if config.live_master not in MASTERS:
        yield f"live_master={config.live_master!r} is unknown; use {' or '.join(MASTERS)}"
    if config.lora:
        yield f"live_blocks trains the blocks' own weights in turns, and lora={config.lora} freezes them; leave one out"
    if config.group_size:
        yield f"group_size={config.group_size} is of experts that stay frozen, and blocks take turns; leave one out"
    if config.quantize:
        yield f"live_blocks trains the blocks' weights, and quantize={config.quantize} freezes them; leave one out"
    if not isinstance(config.offload, OffloadConfig):
        return
    for kind in (StateKind.GRADS, StateKind.OPTIMIZER):
        given = config.offload.placement_of(kind)
        if not isinstance(given, str) and len([share for share in given.values() if share]) > 1:
            yield (
                f"{kind.value} is divided over tiers, by units that are trained at the start, and blocks take turns "
                f"later; give one tier, such as --{kind.value}-tier cpu"
            )


def _optimizer_problems(config: FinetuneConfig | SimpleNamespace) -> Iterator[str]:
    """Settings that do not go with a class of the user's choice."""
    ours = [f"zo.{each}" for each in OUR_OPTIMIZERS]
    if config.optimizer in [*(tier.value for tier in Tier), "auto"]:
        yield f"optimizer={config.optimizer!r} is a tier; where states rest is for --optimizer-tier to say"
    elif config.optimizer not in ours and str(config.optimizer).rpartition(".")[0] not in LIBRARIES:
        yield (
            f"optimizer={config.optimizer!r} is unknown; name a class as docs/OPTIMIZERS.md does, such as "
            f"torch.optim.NAdam. There are {', '.join(ours)}, and classes of {', '.join(LIBRARIES)}"
        )
    if config.lr == 0:
        yield f"optimizer={config.optimizer!r} has its own learning rates, and the usual ones are AdamW's; give --lr"
    if config.live_blocks:
        yield f"live_blocks is planned for AdamW alone, and optimizer={config.optimizer!r}; leave one out"


def usual_rate(method: str, *, is_adapter: bool) -> float:
    """The learning rate where none is given."""
    return _RATES[method][is_adapter]


def _default_out(settings: Mapping[str, Any]) -> Path:
    """Where a run goes unless told: runs of other models, on other data, or by LoRA of another rank do not meet."""
    model, data = settings.get("model", Path("model")), settings.get("data", ())
    names = [model.absolute().name, Path(data[0]).absolute().stem if data else "data"]
    if (method := settings.get("method")) in _ASKED:
        names.append(method)
    if is_count(rank := settings.get("lora", 0), least=1):
        names.append(f"lora{rank}")
    if quantize := settings.get("quantize"):
        names.append(str(quantize))
    return RUNS / "-".join(names)


def default_offload() -> OffloadConfig:
    return _offload_config({}, RUNS / "model")


def _offload_config(offload: Mapping[str, Any], out: Path) -> OffloadConfig:
    defaults: dict[str, Any] = dict.fromkeys(("params", "grads", "optimizer"), "auto")
    defaults |= {"nvme": str(out / "nvme"), "commit_every": "auto"}
    if "generation" in offload:
        defaults["existing"] = Existing.RESUME.value
    return OffloadConfig.from_dict(defaults | dict(offload))


def _path(value: Any) -> Path:
    if "\0" in str(value):
        raise TypeError("a NUL byte")
    str(value).encode()
    return user_path(value)


def _texts(value: Any) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(each, str) and "\0" not in each for each in values):
        raise TypeError("not text")
    "".join(values).encode()
    return values


def _whole_name(name: str) -> str:
    """A path that holds from any directory; a name of anything else stays as it is."""
    path = user_path(name)
    return str(path.absolute()) if os.path.lexists(path) else name


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in value.items() if each is not None) + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)  # of text, numbers and booleans the same in TOML


def _find_problems(config: FinetuneConfig | SimpleNamespace) -> Iterator[str]:
    if config.model == Path():
        yield "no model is given; name its folder before the flags: zero-offload finetune MODEL --data FILES"
    if not config.data:
        yield "no data is given; name files, a folder or a data set: --data chat.jsonl"
    if config.method not in ("auto", *TASKS):
        yield f"method={config.method!r} is unknown; use auto, {', '.join(TASKS)}"
    # Each number within its range.
    for name in ("batch", "accumulate"):
        if not is_count(value := getattr(config, name), least=1):
            yield f"{name}={value!r} is not a positive whole number"
    counts = ("steps", "seq", "seed", "lora", "live_every", "group_size", "eval_every", "patience", "samples")
    for name in counts:
        if not is_count(value := getattr(config, name), least=0):
            yield f"{name}={value!r} is not a whole number from 0 up"
    for name, most in (("epochs", 2.0**63), ("clip", sys.float_info.max)):
        if not (is_real(value := getattr(config, name)) and 0 < value <= most):
            yield f"{name}={value!r} is not a positive number" + ", or too large" * (name == "epochs")
    for name in ("lr", "warmup", "weight_decay", "lora_alpha"):
        if not (is_real(value := getattr(config, name)) and value >= 0):
            yield f"{name}={value!r} is not a number from 0 up"
    for name in ("merge", "packing"):
        if not isinstance(value := getattr(config, name), bool):
            yield f"{name}={value!r} is neither true nor false"
    # Settings that need others, or exclude them.
    if not (is_real(config.split) and 0 <= config.split < 1):
        yield f"split={config.split!r} is not a share from 0 up to 1"
    elif config.split and config.eval_data:
        yield "eval_data and split both say what to evaluate on; give one of them"
    if config.patience and not (config.eval_data or config.split):
        yield f"patience={config.patience!r} counts evaluations; give --eval-data, or --split 0.05"
    if config.eval_every and not (config.eval_data or config.split):
        yield f"eval_every={config.eval_every!r} counts steps between evaluations; give --eval-data, or --split 0.05"
    if config.live_blocks != "auto" and not is_count(config.live_blocks, least=0):
        yield f"live_blocks={config.live_blocks!r} is neither a whole number from 0 up nor auto"
    elif config.live_blocks:
        yield from _live_problems(config)
    elif any(
        getattr(config, name) != getattr(FinetuneConfig, name) for name in ("live_order", "live_every", "live_master")
    ):
        yield (
            "live_order, live_every and live_master are of blocks that take turns; give --live-blocks N, such as "
            "--live-blocks 2"
        )
    if config.optimizer:
        yield from _optimizer_problems(config)
    if config.quantize not in ("", *QUANTIZATIONS):
        yield f"quantize={config.quantize!r} is unknown; use {', '.join(QUANTIZATIONS)}"
    if not config.lora and (config.lora_alpha or config.lora_targets):
        yield "lora_alpha and lora_targets are of adapters; give --lora RANK, such as --lora 16"
    if config.recompute not in RECOMPUTE:
        yield f"recompute={config.recompute!r} is unknown; use block or none"
    # Places: a run must not replace the model that it reads.
    yield from out_problems(config.out)
    if config.model != Path() and config.out.resolve() == config.model.resolve():
        yield f"out={str(config.out)!r} is the model's folder too; its weights would be replaced: give another --out"
    if isinstance(config.offload, OffloadConfig):
        yield from place_problems(config.offload, config.out, config.clip)
