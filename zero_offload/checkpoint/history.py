"""Which generations a directory holds, and which of them a run goes on from.

The newest is the one with the highest number. A manifest that cannot be read, or that is missing although it was
committed, is never passed over in silence: it may have been the newest, so choosing raises and names the generation
that is left. Reads manifests only; changes nothing.
The calls: `History.read`, then `choose`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_offload.base.errors import CheckpointError, IntegrityError, ZeroOffloadError
from zero_offload.checkpoint.format import COMMITTED, GENERATION_NAMES, RUN_NAME, Generation, rank_manifest_name
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.manifest import read_manifest


@dataclass(frozen=True)
class History:
    """The generations of one directory."""

    where: str
    generations: Mapping[str, Generation]
    """By the name of their manifest, the newest first."""
    damaged: Mapping[str, ZeroOffloadError]
    """What is wrong with each manifest that cannot be read, or is missing."""

    @classmethod
    def read(cls, directory: RunDirectory) -> History:
        found: dict[str, Generation] = {}
        damaged: dict[str, ZeroOffloadError] = {}
        for name in GENERATION_NAMES:
            try:
                payload = read_manifest(directory, name)
                if payload is not None:
                    found[name] = Generation.parse(payload, str(directory.path / name))
            except (IntegrityError, CheckpointError) as error:
                damaged[name] = error
        newest = max(found.values(), key=lambda each: each.number, default=None)
        if missing := [name for name in GENERATION_NAMES[:2] if _is_missing(directory, name, found, damaged, newest)]:
            damaged |= dict.fromkeys(missing, _loss(directory, missing))
        newest_first = sorted(found.items(), key=lambda item: -item[1].number)
        return cls(str(directory.path), dict(newest_first), damaged)

    @property
    def is_empty(self) -> bool:
        return not self.generations and not self.damaged

    @property
    def newest(self) -> Generation | None:
        return next(iter(self.generations.values()), None)

    def choose(self, number: int | None) -> Generation | None:
        """Generation `number`, or the newest; None when there is none at all.

        Raises IntegrityError when a manifest is damaged and no number was given (of a manifest that another version
        wrote: CheckpointError), and CheckpointError when the number is not there.
        """
        if number is None:
            for error in self.damaged.values():
                # The higher one of what is left: it may be the newest, or the one before.
                raise type(error)(f"{error}. {_remedy(self.newest)}" if self.newest else str(error)) from error
            return self.newest
        for generation in self.generations.values():
            if generation.number == number:
                return generation
        there = ", ".join(map(str, self.generations.values())) or "none"
        raise CheckpointError(
            f"{self.where} holds no generation {number}; there is: {there}. Name one of these with generation= "
            "(zero-offload train: --generation), or leave it out for the newest"
        )

    def is_newest(self, chosen: Generation) -> bool:
        """Whether nothing here can be newer."""
        return chosen is self.newest and not self.damaged

    def remedy(self, bad: Generation) -> str:
        """What to type when this generation turns out to be damaged; empty when there is no other."""
        other = next((each for each in self.generations.values() if each is not bad), None)
        return _remedy(other) if other is not None else ""


def _is_missing(
    home: RunDirectory,
    name: str,
    found: Mapping[str, Generation],
    damaged: Mapping[str, ZeroOffloadError],
    newest: Generation | None,
) -> bool:
    """Whether a generation was committed under this name, may be the newest, and is not there."""
    if name in found or name in damaged:
        return False
    committed = _read_or_none(home, RUN_NAME).get(COMMITTED)
    # Each rank's manifest is written before the generation's, and stays when that one is lost.
    record = _read_or_none(home, rank_manifest_name(0, GENERATION_NAMES.index(name)))
    if isinstance(committed, list):
        number = record.get("number")
        is_older = newest is not None and type(number) is int and number < newest.number
        return name in committed and not is_older
    # Earlier versions, and a `run.json` that is lost too: a commit that broke off cannot be told from a loss.
    if not record or GENERATION_NAMES[2] in (*found, *damaged):
        return False
    step = record.get("step")
    return newest is None or not isinstance(step, int) or step > newest.step


def _read_or_none(home: RunDirectory, name: str) -> dict[str, Any]:
    try:
        return read_manifest(home, name) or {}
    except (IntegrityError, CheckpointError):
        return {}


def _loss(home: RunDirectory, missing: Sequence[str]) -> IntegrityError:
    names = " and ".join(missing)
    return IntegrityError(
        f"{names} in {home.path} {'are' if len(missing) > 1 else 'is'} missing, and may have been the newest "
        f"generation; {RUN_NAME} or a rank's manifest shows that it was written. Put it back, load a checkpoint, or "
        "start over with existing='discard' (zero-offload train: --discard)"
    )


def _remedy(other: Generation) -> str:
    return (
        f"The directory also holds {other}: if no later step has written over it, zero-offload train "
        f"--generation {other.number} goes on from there, as does OffloadConfig(existing='resume', "
        f"generation={other.number})"
    )
