"""Settings that ranks must have alike: how they are compared, and how a difference is told.

Ranks that differ in them would train one mixed model, or meet in different collectives. A rank sends a word, which
crosses with what is exchanged anyway. Where words differ, ranks exchange texts, and all raise one ConfigError. Owns
the list of what each rank may have of its own (`OWN`). Communicates nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError

Texts = Mapping[str, str]
"""Settings by name, as an error shows them."""

OWN: Texts = {
    "nvme": "a path is a machine's own; how many there are is compared, and then that they are the same directories",
    "existing": "ranks agree on the generation that this leads to",
    "generation": "ranks agree on the generation that this leads to",
    "device_memory": "the least of the ranks' budgets holds on all",
    "cpu_memory": "the least of the ranks' budgets holds on all",
    "nvme_capacity": "the least of the ranks' budgets holds on all",
    "io_engine": "all engines write the same bytes",
}
"""Fields of `OffloadConfig` that ranks may have of their own, and why; all others are compared."""


_LINES_MAX = 20
"""Settings that one error names."""


class Compared(NamedTuple):
    """The texts of one rank; `word` is equal where they are."""

    word: int
    texts: Callable[[], Texts]

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Compared:
        """Of values whose repr is equal where they are."""
        texts = {name: repr(value) for name, value in settings.items()}
        return cls(word_of(texts), lambda: texts)


def word_of(value: object) -> int:
    """32 bits."""
    return zlib.crc32(repr(value).encode())


def of_config(config: OffloadConfig) -> dict[str, object]:
    """The settings of a config that ranks compare."""
    found: dict[str, object] = {"the number of directories in nvme": len(config.nvme_dirs)}
    for field in fields(config):
        if field.name == "precision":
            found |= {f"precision.{each.name}": _plain(config.precision, each.name) for each in fields(config.numerics)}
        elif field.name not in OWN:
            found[field.name] = _plain(config, field.name)
    return found


def _plain(holder: object, name: str) -> object:
    """A value whose repr is the same in every process; a mapping keeps its order, which decides between its keys."""
    value: Any = getattr(holder, name)
    if isinstance(value, Mapping):
        return {f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else key: v for key, v in value.items()}
    return value


def difference(where: str, every: Iterable[tuple[int, Texts]], *, alone: bool = False) -> ConfigError | None:
    """The error for `where` about what ranks, by number, have of settings that all of them name; None if all agree.

    With `alone`, of all settings if those agree: a setting that a rank does not name is not given there.
    """
    found = sorted(every, key=lambda each: each[0])
    names = list(dict.fromkeys(name for _, texts in found for name in texts))
    named = [name for name in names if all(name in texts for _, texts in found)]
    lines = _differing(found, named) or (_differing(found, names) if alone else [])
    if not lines:
        return None
    if len(lines) > _LINES_MAX:
        lines = [*lines[:_LINES_MAX], f"and {len(lines) - _LINES_MAX} more"]
    return ConfigError(
        f"{where}: ranks differ: {'; '.join(lines)}. Give all ranks the same: with different settings they would train "
        "a mixture"
    )


def _differing(found: Sequence[tuple[int, Texts]], names: Iterable[str]) -> list[str]:
    grouped = {name: by_value([(rank, texts.get(name, "not given")) for rank, texts in found]) for name in names}
    return [
        f"{name} is {' and '.join(f'{value} on {ranks}' for value, ranks in each)}"
        for name, each in grouped.items()
        if len(each) > 1
    ]


def by_value(every: Sequence[tuple[int, str]]) -> list[tuple[str, str]]:
    """Each value, and the ranks that have it: "rank 0", "ranks 1, 2 and 5"."""
    found: dict[str, list[int]] = {}
    for rank, value in every:
        found.setdefault(value, []).append(rank)
    return [(value, name_ranks(ranks)) for value, ranks in found.items()]


def name_ranks(ranks: Sequence[int]) -> str:
    """Such as "ranks 1, 2 and 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def hash_of(tensor: torch.Tensor) -> str:
    """A word for a tensor's values, the same wherever they are and however many threads read them."""
    return str(torch.hash_tensor(tensor).item()) if tensor.numel() else ""
