"""Which generations a directory holds, and which of them a run goes on from.

The newest is the one with the highest number. A manifest that cannot be read is never passed over in silence: it may
have been the newest, so choosing raises and names the generation that is left. Reads manifests only; changes nothing.
The calls: `History.read`, then `choose`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zero_offload.checkpoint.format import GENERATION_NAMES, Generation
from zero_offload.errors import CheckpointError, IntegrityError, ZeroOffloadError
from zero_offload.storage.directory import RunDirectory
from zero_offload.storage.manifest import read_manifest


@dataclass(frozen=True)
class History:
    """The generations of one directory."""

    where: str
    generations: Mapping[str, Generation]
    """By the name of their manifest, the newest first."""
    damaged: Mapping[str, ZeroOffloadError]
    """What is wrong with each manifest that cannot be read."""

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


def _remedy(other: Generation) -> str:
    return (
        f"The directory also holds {other}: if no later step has written over it, zero-offload train "
        f"--generation {other.number} goes on from there, as does OffloadConfig(existing='resume', "
        f"generation={other.number})"
    )
