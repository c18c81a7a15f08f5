"""The settings of a user: `OffloadConfig`, checked whole and then never changed.

Owns the names, defaults and rules of every setting. Never looks at the machine: whether the request fits is the
planner's question. The calls in order: construct (or `from_dict`, `from_toml`, `from_deepspeed`), which checks every
field and raises one ConfigError listing all problems. Then read through the typed accessors (`placement_of`,
`budget_bytes`, `nvme_dirs`, `numerics`, `effective_durability`).
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, cast

from zero_offload.base.errors import ConfigError
from zero_offload.base.precision import STATE_FORMATS, TORCH_NAMES, ModuleKey, precision_problems
from zero_offload.base.precision import Precision as Precision
from zero_offload.base.problems import list_problems, unknown_names, warn_user
from zero_offload.base.types import (
    STAGES,
    Branches,
    Durability,
    EngineKind,
    Existing,
    GradReduction,
    StateFormat,
    StateKind,
    Tier,
    UpdateOverlap,
    parse_bytes,
    parse_seconds,
)

PlacementRequest = str | Mapping[str, float]
"""A tier's name, "auto", or the fraction of the bytes wanted on each tier."""

FRACTION_TOLERANCE = 1e-6


class ForeignConfig(Protocol):
    """The config of another tool, read into settings of `OffloadConfig`."""

    name: str
    """The file's path, or the tool's name where there is no file."""
    settings: dict[str, Any]
    problems: list[str]

    def report(self) -> str:
        """Everything that the user has to do beside; empty if nothing."""


ConfigSource = str | os.PathLike[str] | Mapping[str, Any]
"""A file of another tool, or its dict."""
CONFIG_READERS: dict[str, Callable[[ConfigSource, Mapping[str, Any]], ForeignConfig]] = {}
"""Readers by the tool's name, which take the settings that the program has given, too. `integrations` adds them as the
package is imported, so that a config knows no other tool's names."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Where each kind of state rests, within which budgets, and what a run survives."""

    stage: int = 3
    """ZeRO stage, for several ranks: 1 divides optimizer states over them, 2 gradients too, 3 parameters too;
    0 divides nothing."""
    params: PlacementRequest = "cpu"
    """Tier of the values that forward uses: "device", "cpu", "nvme", fractions such as {"cpu": 0.5, "nvme": 0.5}, or
    "auto"."""
    grads: PlacementRequest = "cpu"
    """Tier of gradients, from backward to the update; as `params`."""
    optimizer: PlacementRequest = "cpu"
    """Tier of masters and moments; as `params`."""
    activations: PlacementRequest = "device"
    """Tier of tensors that forward keeps for backward; as `params`, and "auto" is "device"."""
    nvme: str | Path | Sequence[str | Path] | None = None
    """Directory of the NVMe tier and of the generations; several are striped. Read it as `nvme_dirs`."""
    existing: str = "refuse"
    """Treatment of a generation in that directory: "refuse" (an error names its step), "resume" or "discard"."""
    generation: int | None = None
    """With existing="resume": the number of the one to go on from; None is the newest."""
    precision: str | Precision = "bf16"
    """"bf16", "fp16" (with `zo.GradScaler`), "fp32" or a Precision. Read it as `numerics`."""
    device_memory: int | str | None = None
    """The most bytes of a GPU's memory: a number, or text such as "20GiB"; None is what is free. Read the budgets
    through `budget_bytes`."""
    cpu_memory: int | str | None = None
    """The most bytes of this process's host memory for states, gradients and buffers; activations are not counted.
    None is what is free, in equal parts for the ranks of a machine."""
    nvme_capacity: int | str | None = None
    """The most bytes of the directories; None is what is free there."""
    durability: str = "process"
    """The end that a run survives: "commit" (power loss), "process" (kill -9, a crash) or "scratch" (none)."""
    commit_every: int | str = 1
    """Between two generations: optimizer steps, a duration such as "30s", "2min" or "1h" by rank 0's clock, or "auto".
    "auto" is the shortest duration with which commits, as measured, take at most 2% of the time from training.
    """
    publish: str | Path | None = None
    """Directory that all machines see, or a URL of fsspec, for checkpoints in torch's format beside training. One for
    each model; those that are committed together are published together."""
    publish_every: int | str = "30min"
    """Between two of them: optimizer steps, or a duration by rank 0's clock."""
    publish_keep: int = 2
    """The number of them that stay, the newest."""
    io_engine: str = "auto"
    """The engine that moves bytes to and from the NVMe tier: "io_uring", "threads", "aiofiles" or "auto". "auto" is the
    fastest, by a short measurement in the directory if a step moves 1 GiB or more.
    """
    overlap: str = "auto"
    """The pass beside which the update runs: the next "forward", or the "backward" that makes the gradients; "none"; or
    "auto". Beside backward few gradients are held, and clipping and a loss scale are not possible. "auto" is forward,
    where that gains anything.
    """
    grad_reduction: str = "mean"
    """Gradients of several ranks become their "mean" or their "sum"."""
    branches: str = "same"
    """Several ranks use the "same" units in the same order, or "any": each what its data asks for."""

    def __new__(cls, *values: object, **settings: object) -> Self:
        """Checks the names: without it a wrong one were a TypeError, that says nothing of the others."""
        if values:
            raise ConfigError("OffloadConfig takes its settings by name, such as OffloadConfig(params='cpu')")
        known, problems = _read_names(settings)
        if problems:
            raise ConfigError(list_problems("OffloadConfig has", problems + _find_problems(known)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        if problems := _find_problems(settings):
            raise ConfigError(list_problems("OffloadConfig has", problems))
        # One spelling per setting from here on, so that equal requests compare equal.
        for name, value in _normalize(settings).items():
            object.__setattr__(self, name, value)

    @property
    def nvme_dirs(self) -> tuple[Path, ...]:
        return cast("tuple[Path, ...]", self.nvme)

    @property
    def numerics(self) -> Precision:
        return cast(Precision, self.precision)

    @property
    def compute_dtype_name(self) -> str:
        """The compute dtype's name in torch: "float32", "bfloat16" or "float16"."""
        return TORCH_NAMES[self.numerics.compute]

    @property
    def reduce_dtype_name(self) -> str:
        """The name in torch of the dtype in which gradients are reduced."""
        return TORCH_NAMES[self.numerics.reduce]

    @property
    def state_format(self) -> StateFormat:
        return STATE_FORMATS[self.numerics.states]

    @property
    def compute_exceptions(self) -> dict[ModuleKey, str]:
        """Modules that compute in another dtype, and its name in torch."""
        return {key: TORCH_NAMES[name] for key, name in self.numerics.modules.items()}

    @property
    def buffer_exceptions(self) -> dict[ModuleKey, str]:
        """Buffers that have a dtype of their own, and its name in torch."""
        return {key: TORCH_NAMES[name] for key, name in self.numerics.buffers.items()}

    @property
    def effective_durability(self) -> Durability:
        """Without a directory there is nowhere to keep a generation: then `scratch`."""
        return Durability(self.durability) if self.nvme_dirs else Durability.SCRATCH

    def placement_of(self, kind: StateKind) -> Mapping[Tier, float] | Literal["auto"]:
        """Fractions per tier that sum to 1 (tiers with none are absent), or "auto"."""
        request: PlacementRequest = getattr(self, kind.value)
        if request == "auto":
            return "auto"
        if isinstance(request, str):
            return {Tier(request): 1.0}
        return {Tier(tier): fraction for tier, fraction in request.items()}

    @property
    def activation_fractions(self) -> Mapping[Tier, float]:
        """Per tier that activations go to."""
        placement = self.placement_of(StateKind.ACTIVATIONS)
        return {Tier.DEVICE: 1.0} if placement == "auto" else placement

    def budget_bytes(self, tier: Tier) -> int | None:
        """The most this run may use of a tier; None where the user leaves it to the machine."""
        limits = {Tier.DEVICE: self.device_memory, Tier.CPU: self.cpu_memory, Tier.NVME: self.nvme_capacity}
        return cast("int | None", limits[tier])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and TOML, of which `from_dict` makes an equal config. Raises for classes as keys."""
        if problems := list(_classes_in(self.numerics)):
            raise ConfigError(list_problems("OffloadConfig has", problems))
        return asdict(self) | {"nvme": [str(path) for path in self.nvme_dirs]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OffloadConfig:
        """Build from plain values; every unknown key is an error that offers the nearest name."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"OffloadConfig.from_dict takes a dict of settings, not a {type(values).__name__}")
        settings, problems = _read_names(values)
        if isinstance(precision := settings["precision"], Mapping):
            names = [field.name for field in fields(Precision)]
            problems += unknown_names(precision, names, prefix="precision.")
            settings["precision"] = Precision(**{name: precision[name] for name in names if name in precision})
            problems += _classes_in(settings["precision"])
        if problems:
            raise ConfigError(list_problems("OffloadConfig has", problems + _find_problems(settings)))
        return cls(**settings)

    @classmethod
    def from_deepspeed(cls, source: ConfigSource, **settings: Any) -> OffloadConfig:
        """Build from a JSON config of DeepSpeed, a file or its dict; `settings` are this class's own and come first.

        One warning lists what the script does instead, and what has no effect here and why. "auto" is what
        transformers.Trainer puts there. Raises ConfigError with all unknown keys and all that would change results.
        """
        known, problems = _read_names(settings)
        reading = CONFIG_READERS["deepspeed"](source, {name: known[name] for name in settings if name in known})
        values, _ = _read_names(reading.settings)
        if problems := [*problems, *reading.problems, *_find_problems(values)]:
            raise ConfigError(list_problems(f"{reading.name} has", problems))
        if report := reading.report():
            warn_user(report)
        return cls(**values)

    @classmethod
    def from_toml(cls, path: str | Path, table: str = "offload") -> OffloadConfig:
        """Build from one table of a TOML file."""
        try:
            document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; give a TOML file") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
        values = document.get(table)
        if not isinstance(values, dict):
            raise ConfigError(f"{path} has no table [{table}]; add one holding the OffloadConfig settings")
        return cls.from_dict(values)


_TIERS = tuple(tier.value for tier in Tier)
_STATES = ("params", "grads", "optimizer", "activations")
BUDGETS = ("device_memory", "cpu_memory", "nvme_capacity")
_CHOICES = {
    "existing": [each.value for each in Existing],
    "durability": [each.value for each in Durability],
    "grad_reduction": [each.value for each in GradReduction],
    "branches": [each.value for each in Branches],
    "overlap": [each.value for each in UpdateOverlap],
    "io_engine": ["auto", *(each.value for each in EngineKind)],
}


def _classes_in(precision: Precision) -> Iterator[str]:
    """Problems where plain values are wanted."""
    for name, keys in (("modules", precision.modules), ("buffers", precision.buffers)):
        known = keys if isinstance(keys, Mapping) else ()
        if found := [getattr(key, "__name__", str(key)) for key in known if not isinstance(key, str)]:
            yield f"precision.{name} has {', '.join(found)}; where plain values are wanted, use patterns of names"


def _read_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """All settings, those that are not given too, and what is wrong with names."""
    defaults = {field.name: field.default for field in fields(OffloadConfig)}
    known = {name: value for name, value in values.items() if name in defaults}
    return defaults | known, unknown_names(values, list(defaults))


def _find_problems(settings: Mapping[str, Any]) -> list[str]:
    return [problem for check in _CHECKS for problem in check(settings)]


def _plain(value: str) -> str:
    """The exact str of an enum member or of text."""
    return str.__str__(value)


def _nvme_paths(value: Any) -> tuple[Path, ...]:
    return tuple(Path(path).expanduser() for path in _as_sequence(value))


def _as_sequence(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return [value] if isinstance(value, str | Path) else list(value)


def _check_stage(settings: Mapping[str, Any]) -> Iterator[str]:
    stage = settings["stage"]
    if isinstance(stage, bool) or not isinstance(stage, int):
        yield f"stage={stage!r} is not an integer; use 0, 1, 2 or 3"
    elif stage not in STAGES:
        yield f"stage={stage} does not exist; use 0, 1, 2 or 3"


def _check_placements(settings: Mapping[str, Any]) -> Iterator[str]:
    for name in _STATES:
        yield from _check_placement(name, settings[name])


def _check_placement(name: str, request: object) -> Iterator[str]:
    fractions = f"{name}={{'cpu': 0.5, 'nvme': 0.5}}"
    example = f"write {name}='cpu' or {fractions}"
    if isinstance(request, str):
        if request not in (*_TIERS, "auto"):
            yield f"{name}={request!r} is unknown; use one of {', '.join(_TIERS)}, auto, or fractions: {fractions}"
        return
    if not isinstance(request, Mapping):
        yield f"{name}={request!r} is neither a tier nor fractions per tier; {example}"
        return
    for tier in (tier for tier in request if tier not in _TIERS):
        yield f"{name} has a fraction for unknown tier {tier!r}; use one of {', '.join(_TIERS)}"
    if not all(_is_fraction(fraction) for fraction in request.values()):
        yield f"{name}={dict(request)} has a fraction outside 0 to 1; {example}"
    elif abs((total := sum(request.values())) - 1) > FRACTION_TOLERANCE:
        yield f"{name}={dict(request)} sums to {total:g}; make the fractions sum to 1"


def _is_fraction(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value <= 1


def _check_nvme(settings: Mapping[str, Any]) -> Iterator[str]:
    try:
        paths = _nvme_paths(settings["nvme"])
    except (TypeError, RuntimeError):
        yield f"nvme={settings['nvme']!r} is neither a directory nor a list of directories"
        return
    if "" in _as_sequence(settings["nvme"]):
        yield "nvme has an empty path; name a directory, or leave the setting out"
    if any("\0" in str(path) for path in paths):
        yield f"nvme={[str(path) for path in paths]} has a NUL byte in a path; name a directory"
    if len(set(paths)) < len(paths):
        yield f"nvme={[str(path) for path in paths]} names a directory twice; name each once"
    if paths:
        return
    hint = 'add nvme="/path/to/a/directory/on/nvme"'
    for name in _STATES:
        request = settings[name]
        fraction = request.get("nvme", 0) if isinstance(request, Mapping) else request == "nvme"
        if fraction:
            yield f"{name}={request!r} needs a directory; {hint}"
    if (capacity := settings["nvme_capacity"]) is not None:
        yield f"nvme_capacity={capacity!r} limits no directory; {hint}, or leave the limit out"
    if settings["existing"] == Existing.RESUME.value:
        yield f"existing='resume' goes on from no directory, and nothing is kept for a resume; {hint}, or leave it out"
    if settings["durability"] == Durability.COMMIT.value:
        yield f"durability='commit' has no directory to commit to, and nothing is kept; {hint}, or leave it out"


def _check_generation(settings: Mapping[str, Any]) -> Iterator[str]:
    number = settings["generation"]
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        yield f"generation={number!r} is not a number of a generation; leave it out for the newest"
    elif settings["existing"] != Existing.RESUME.value:
        yield f"generation={number} goes on from what is there; add existing='resume', or leave generation out"
    elif not _as_sequence(settings["nvme"]) or settings["durability"] == Durability.SCRATCH.value:
        yield f"generation={number} is in no directory: nothing is kept without nvme= or with durability='scratch'"


def _check_budgets(settings: Mapping[str, Any]) -> Iterator[str]:
    for name in BUDGETS:
        if (value := settings[name]) is not None:
            try:
                parse_bytes(value)
            except ConfigError as error:
                yield f"{name}={value!r}: {error}"


def _check_choices(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, choices in _CHOICES.items():
        if (value := settings[name]) not in choices:
            yield f"{name}={value!r} is unknown; use one of {', '.join(choices)}"


def _check_backward(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings["overlap"] != UpdateOverlap.BACKWARD.value:
        return
    precision, instead = settings["precision"], "use overlap='forward'"
    modules = getattr(precision, "modules", {})
    names = modules.values() if isinstance(modules, Mapping) else ()
    if "fp16" in (getattr(precision, "compute", precision), *names):
        yield f"overlap='backward' updates before an overflow of fp16 gradients is known; {instead}, or 'bf16'"
    if settings["branches"] == Branches.ANY.value:
        yield f"overlap='backward' updates before ranks with branches='any' know which gradients there are; {instead}"


def _is_interval(every: Any) -> bool:
    """True for a number of steps, or a duration."""
    if isinstance(every, str):
        try:
            return parse_seconds(every) > 0
        except ConfigError:
            return False
    return isinstance(every, int) and not isinstance(every, bool) and every >= 1


def _check_commit_every(settings: Mapping[str, Any]) -> Iterator[str]:
    every = settings["commit_every"]
    if not (_is_interval(every) or (isinstance(every, str) and _compact(every) == "auto")):
        yield (
            f"commit_every={every!r} is neither a number of optimizer steps nor a duration. Give steps (1 or more), a "
            "duration such as '30s', '2min' or '1h', or 'auto'"
        )


def _check_publish(settings: Mapping[str, Any]) -> Iterator[str]:
    place, every, keep = (settings[name] for name in ("publish", "publish_every", "publish_keep"))
    if place is not None and not (isinstance(place, str | Path) and str(place)):
        yield f"publish={place!r} is neither a directory nor a URL; leave it out to publish nothing"
    elif place is not None and (
        not _as_sequence(settings["nvme"]) or settings["durability"] == Durability.SCRATCH.value
    ):
        yield (
            f"publish={str(place)!r} publishes generations, and there are none without nvme= or with "
            "durability='scratch'; add nvme=, or use zo.save_checkpoint"
        )
    if not _is_interval(every):
        yield (
            f"publish_every={every!r} is neither a number of optimizer steps nor a duration. Give steps (1 or more), "
            "or a duration such as '30min' or '2h'"
        )
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        yield f"publish_keep={keep!r} is not a number of checkpoints; keep 1 or more"


def _compact(text: str) -> str:
    return "".join(text.split()).lower()


_CHECKS: tuple[Callable[[Mapping[str, Any]], Iterator[str]], ...] = (
    _check_stage,
    _check_placements,
    _check_nvme,
    _check_generation,
    lambda settings: precision_problems(settings["precision"]),
    _check_budgets,
    _check_choices,
    _check_backward,
    _check_commit_every,
    _check_publish,
)


def _normalize(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The checked fields in one spelling: plain strings, ints, dicts without zeros, tuples of Path."""
    values: dict[str, Any] = {"nvme": _nvme_paths(settings["nvme"])}
    for name in _STATES:
        request = settings[name]
        if isinstance(request, str):
            values[name] = _plain(request)
        else:
            shares = {tier: float(request[tier]) for tier in _TIERS if request.get(tier)}
            values[name] = next(iter(shares)) if len(shares) == 1 else shares
    for name in _CHOICES:
        values[name] = _plain(settings[name])
    for name in ("commit_every", "publish_every"):
        if isinstance(settings[name], str):
            values[name] = _compact(settings[name])
    if settings["publish"] is not None:
        values["publish"] = _plain(str(settings["publish"]))
    for name in BUDGETS:
        if (size := settings[name]) is not None:
            values[name] = parse_bytes(size)
    precision = settings["precision"]
    if isinstance(precision, str):
        precision = Precision(compute=_plain(precision))
    values["precision"] = replace(precision, modules=dict(precision.modules), buffers=dict(precision.buffers))
    return values
