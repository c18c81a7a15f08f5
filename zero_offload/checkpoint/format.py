"""The content of a generation's manifests, and the generations that a directory holds.

Owns the words shared by writing, resuming and loading, and the choice of the generation that a run goes on from. Reads
manifests only; changes nothing.

`generation-0.json` or `generation-1.json`, in turn, is the commit point. It names the step, the ranks' manifests with
their digests, the model's fingerprint and the optimizer's scalars. A rank's manifest says for every section which slot
holds it, and for each component where its blocks are and their checksums. Sizes and names are checked before use;
nothing in these files is ever executed.

The newest generation is the one with the highest number. A manifest that cannot be read, or is missing although it was
committed, may have been the newest. It is never passed over in silence: choosing raises and names the generation that
is left. The calls: `History.read`, then `choose`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zero_offload.base.errors import CheckpointError, IntegrityError, ZeroOffloadError
from zero_offload.base.precision import STATE_FORMATS, TORCH_NAMES
from zero_offload.base.problems import warn_user
from zero_offload.base.types import StateFormat
from zero_offload.plan.layout import ParamSlice, SectionLayout, ShardLayout
from zero_offload.plan.model_spec import ParamSpec
from zero_offload.plan.quantized import COMPUTE_DTYPES, Record
from zero_offload.plan.tensor_parallel import whole_shape
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.manifest import read_manifest

RUN_NAME = "run.json"
COMMITTED = "generations"
"""The key in `run.json` of the names of the generations' manifests that were made and not deleted by a run."""
JOINT = "joint"
"""The key, in manifests, of the models that a generation was committed with."""
BASE = "base"
"""The key, in `run.json` and in manifests, of the files that frozen parts rest in."""
HOMES = "homes"
"""The key, in manifests, of the machines on whose drives a generation is."""
FORMAT = 4
"""In its files the slots of an array lie behind each other. In earlier formats they do not: those are cut anew."""
CHECKPOINT_KIND = "checkpoint"
"""The kind, in `run.json`, of a directory that never changes: it is read without a lock, by any number of readers."""


def generation_name(number: int) -> str:
    """Two names in turn: a commit replaces the generation before the last one, never the last one."""
    return f"generation-{number % 2}.json"


GENERATION_NAMES = (generation_name(0), generation_name(1), "generation.json")
"""Format 1 kept its only generation under the last of these names; it is read, and never written."""


def rank_manifest_name(rank: int, generation: int) -> str:
    """Two names per rank in turn: the file of the committed generation is never replaced."""
    return f"rank{rank}-{generation % 2}.json"


def swap_file_name(rank: int, edition: int = 0) -> str:
    """Each time a run is cut anew, for other ranks or directories, its files get names of their own."""
    return f"rank{rank}.swap" if edition == 0 else f"rank{rank}.{edition}.swap"


RANK_MANIFEST = re.compile(r"rank\d+-[01]\.json")
"""All that `rank_manifest_name` makes."""
_LOOKS = 5
"""Beside a run, before a generation counts as lost."""
SWAP_NAME = re.compile(r"rank\d+(\.\d+)?\.swap")
"""All that `swap_file_name` makes."""


ENDED_BY_STEP, ENDED_BY_COMMIT, ENDED_BY_ROW = "step", "zo.commit", "RunLog.step"
"""How a program ends its iterations; the first one stands for a program that calls neither of the others."""
UNENDED = "not ended"
"""Several optimizers have stepped, in a program that calls neither: its checkpoints do not know their iterations."""


@dataclass(frozen=True)
class Change:
    """How a model's parameters have changed after it was offloaded."""

    step: int
    """After this one."""
    renamed: Mapping[str, str]
    """New names by the old ones."""
    removed: Sequence[str]
    replaced: Sequence[str]
    """Parameters that are others under the same name."""
    added: Sequence[str]

    def __str__(self) -> str:
        renamed = Counter(map(_moved, self.renamed, self.renamed.values()))
        parts = [f"{before} is {now}{_of_many(count)}" for (before, now), count in renamed.items()]
        for what, names in (("removed", self.removed), ("replaced", self.replaced), ("new", self.added)):
            parts += [f"{name} is {what}{_of_many(count)}" for name, count in Counter(map(_block, names)).items()]
        more = f", and {len(parts) - _TOLD} further changes" if len(parts) > _TOLD else ""
        return f"after step {self.step} {', '.join(parts[:_TOLD])}{more}"


_TOLD = 12
CHANGES_MAX = 16
"""A generation lists the last changes of its model."""


def _of_many(count: int) -> str:
    return f" ({count} parameters)" if count > 1 else ""


def _moved(before: str, now: str) -> tuple[str, str]:
    """The two names of a module that has moved with this parameter."""
    old, new = before.split("."), now.split(".")
    while len(old) > 1 and len(new) > 1 and old[-1] == new[-1]:
        del old[-1], new[-1]
    return ".".join(old), ".".join(new)


def _block(name: str) -> str:
    """The numbered block that a parameter is in; without one, its module."""
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdecimal()), len(parts) - 2)
    return ".".join(parts[: number + 1]) or name


@dataclass(frozen=True)
class StepRecord:
    """All of a commit but the tensors; JSON values, taken on the control thread at the step's end."""

    step: int
    param_steps: dict[str, int]
    """Updates each parameter has had, by name."""
    optimizer: list[dict[str, Any]]
    """Param groups: hyperparameters and parameter names."""
    rng: dict[str, Any] | None
    """Random number generators of this rank; None when `commit` was not called for this step."""
    extra: Any
    scaler: dict[str, Any] | None
    """The loss scaler's state; None without one, and when `commit` was not called for this step."""
    buffers: dict[str, Any]
    """Persistent ones, by name; none when `commit` was not called for this step."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """The model's own description; see `model/about.py`."""
    thawed: Sequence[str] = ()
    """Parameters that were frozen when they were offloaded, and require a gradient."""
    resting: Sequence[int] = ()
    """Sections whose states have gone."""
    ended_by: str = ""
    """How the program ends an iteration, of which `step` is the count; empty of earlier versions."""
    changes: Sequence[Change] = ()
    """How the model has changed since it was offloaded, the last ones: then a resume finds parameters by name."""
    buffer_forms: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Of each buffer, persistent or not, the dtype and shape that it was offloaded with."""
    joint: Mapping[str, Any] = field(default_factory=dict)
    """Of a generation that is committed again: `Generation.joint`."""
    beside: Mapping[str, int] = field(default_factory=dict)
    """Iterations of the other models of the program at this step, by the run that each makes generations of."""

    @classmethod
    def of(cls, generation: Generation, rng: dict[str, Any] | None) -> StepRecord:
        """The record of a generation, to be committed again."""
        given = generation.payload
        groups, steps = given.get("optimizer", []), given.get("param_steps", {})
        return cls(
            generation.step, steps, groups, rng, given.get("extra"), given.get("scaler"), given.get("buffers", {}),
            generation.about, generation.thawed, generation.resting, generation.ended_by, generation.changes,
            generation.buffer_forms or {},
            given.get(JOINT, {}), given.get("beside", {}),
        )  # fmt: skip


@dataclass(frozen=True)
class Partner:
    """A generation of another model, which has one commit point with this one."""

    model: str
    """Its class and its directory, for messages."""
    home: str
    """The directory of its manifests."""
    beside: str
    """The same, from this one's: for models that have moved together."""
    run_id: str
    number: int


@dataclass(frozen=True)
class CommittedWith:
    """The models whose generations were committed together; see `checkpoint/joint.py`."""

    token: str
    """The same in all of them, and in no others."""
    lead: Partner | None
    """The model that has the commit point; None in its own generation."""
    also: Sequence[Partner]
    """In the lead's generation, the others."""

    @classmethod
    def parse(cls, payload: Mapping[str, Any]) -> CommittedWith:
        lead = payload["lead"]
        return cls(
            payload["token"], None if lead is None else Partner(**lead), [Partner(**each) for each in payload["also"]]
        )


@dataclass(frozen=True)
class Generation:
    """A committed generation as read back."""

    run_id: str
    number: int
    step: int
    world_size: int
    num_shards: int
    committed_at: str
    edition: int
    payload: Mapping[str, Any]

    def __str__(self) -> str:
        return f"generation {self.number} (step {self.step}, committed {self.committed_at})"

    @property
    def directories(self) -> list[str]:
        """Where it was written; the first one has the manifests."""
        found = self.payload.get("directories")
        return [path for path in found if isinstance(path, str)] if isinstance(found, list) else []

    @property
    def homes(self) -> list[dict[str, Any]]:
        """The machines on whose drives it is, each with its directory and its ranks; empty where that is one."""
        found = self.payload.get(HOMES)
        return found if isinstance(found, list) else []

    def ranks_in(self, names: Collection[str]) -> list[int]:
        """The ranks whose files are, or should be, in a directory that has these names."""
        if not self.homes:
            return list(range(self.world_size))
        with reading(str(self)):
            own = {rank for home in self.homes if home["is_here"] for rank in home["ranks"]}
        return [r for r in range(self.world_size) if r in own or rank_manifest_name(r, self.number) in names]

    @property
    def identity(self) -> str:
        """A text that it shares with its own manifests on other machines, and with no other generation."""
        words = [self.run_id, self.number, self.payload.get("ranks")]
        return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()

    @property
    def buffer_forms(self) -> Mapping[str, Any] | None:
        """As `StepRecord.buffer_forms`; None of earlier versions."""
        found = self.payload.get("buffer_forms")
        return found if isinstance(found, dict) else None

    @property
    def ended_by(self) -> str:
        """As `StepRecord.ended_by`."""
        found = self.payload.get("ended_by")
        return found if isinstance(found, str) else ""

    @property
    def uncounted(self) -> str:
        """Why `step` may not count iterations; or empty. Earlier versions added up steps of several optimizers."""
        if self.ended_by == UNENDED:
            return f"{self} is of a program with several optimizers, which called neither zo.commit nor RunLog.step"
        with reading(str(self)):
            steps: Mapping[str, int] = self.payload.get("param_steps", {})
            most, groups = max(steps.values(), default=0), self.payload.get("optimizer", [])
            trained = {name for group in groups for name in group.get("params", ())}
            others = {name: count for name, count in steps.items() if count and name not in trained}
        if self.ended_by or not others or self.step <= most:
            return ""
        here = max((count for name, count in steps.items() if name in trained), default=0)
        return (
            f"{self} was written by a version that added up the steps of several optimizers, and {self.step} does "
            f"not count iterations. The optimizer that it names has stepped {here} times, another one "
            f"{max(others.values())} times ({next(iter(others))})"
        )

    @property
    def about(self) -> Mapping[str, Any]:
        """The model's own description; empty of models without a config, and of earlier versions."""
        found = self.payload.get("about")
        return found if isinstance(found, dict) else {}

    @property
    def rank_entries(self) -> list[Any]:
        """Name and digest of each rank's manifest. Raises IntegrityError."""
        entries = self.payload.get("ranks")
        valid = isinstance(entries, list) and all(
            isinstance(each, dict) and {"manifest", "digest"} <= set(each) for each in entries
        )
        if not isinstance(entries, list) or not valid or len(entries) != self.world_size:
            raise IntegrityError(f"{self} names no manifest for each of its {self.world_size} ranks")
        return entries

    @property
    def calls(self) -> list[int]:
        """How many sections there were before each further call of zo.offload."""
        found = self.payload.get("calls")
        return [each for each in found if type(each) is int] if isinstance(found, list) else []

    @property
    def thawed(self) -> list[str]:
        """Parameters that were frozen when they were offloaded, and required a gradient then."""
        found = self.payload.get("thawed")
        return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []

    @property
    def resting(self) -> list[int]:
        """Sections that are trained, and whose states had gone."""
        found = self.payload.get("resting")
        return [each for each in found if type(each) is int] if isinstance(found, list) else []

    def resting_in(self, layout: ShardLayout) -> list[int]:
        """Sections of a layout whose parameters all rest in such sections."""
        resting = set(self.resting)
        names = {entry["name"] for entry in self.params if entry["section"] in resting}
        return [
            section.index
            for section in layout.sections
            if names and section.params and all(piece.spec.name in names or piece.is_gone for piece in section.params)
        ]

    @property
    def changes(self) -> list[Change]:
        """How the model has changed, before it was made; the last one last."""
        found = self.payload.get("changes")
        with reading(str(self)):
            return [Change(**each) for each in found or ()]

    @property
    def joint(self) -> CommittedWith | None:
        """The models that it was committed with; None if it was committed alone."""
        found = self.payload.get(JOINT)
        with reading(str(self)):
            return CommittedWith.parse(found) if found else None

    @property
    def beside(self) -> Mapping[str, int]:
        """As `StepRecord.beside`; empty of earlier versions."""
        found = self.payload.get("beside")
        with reading(str(self)):
            return {str(run_id): int(step) for run_id, step in (found or {}).items()}

    @property
    def params(self) -> list[dict[str, Any]]:
        """As `fingerprint` lists them. Raises IntegrityError."""
        params = self.payload.get("params")
        if not isinstance(params, list) or not all(isinstance(entry, dict) for entry in params):
            raise IntegrityError(f"{self}: the list of parameters is damaged")
        return params

    @property
    def names(self) -> list[str]:
        """The names of its parameters, section by section."""
        params = self.payload.get("params")
        return [entry["name"] for entry in params] if isinstance(params, list) else []

    def file_names(self) -> set[str]:
        """Everything that this generation needs, beside its own manifest."""
        ranks = range(self.world_size)
        swaps = {swap_file_name(rank, self.edition) for rank in ranks}
        return swaps | {rank_manifest_name(rank, self.number) for rank in ranks}

    @classmethod
    def parse(cls, payload: Mapping[str, Any], name: str) -> Generation:
        """The generation of the manifest `name`. Raises IntegrityError when a field is missing or of the wrong type."""
        fields = {
            "run_id": str,
            "number": int,
            "step": int,
            "world_size": int,
            "num_shards": int,
            "committed_at": str,
            "edition": int,
        }
        given = {"edition": 0} | dict(payload)
        for key, kind in fields.items():
            if type(given.get(key)) is not kind or (kind is int and given[key] < 0):
                raise IntegrityError(f"{name} has no valid {key}; load a checkpoint instead")
        steps = given.get("param_steps")
        if not isinstance(steps, dict) or not all(type(step) is int and step >= 0 for step in steps.values()):
            raise IntegrityError(f"{name} has no valid param_steps; load a checkpoint instead")
        return cls(**{key: given[key] for key in fields}, payload=payload)


@dataclass(frozen=True)
class History:
    """The generations of one directory."""

    where: str
    generations: Mapping[str, Generation]
    """Generations by the name of their manifest, the newest first."""
    damaged: Mapping[str, ZeroOffloadError]
    """The error of each manifest that cannot be read, or is missing."""
    unfinished: Generation | None = None
    """The newest one, if the model that it was to be committed with has not come to the commit point."""

    @classmethod
    def read(cls, directory: RunDirectory) -> History:
        for _ in range(_LOOKS):
            history = cls._read(directory)
            # A run that commits between two of our reads makes a generation look lost.
            if not (directory.user and history.damaged):
                break
        return history

    @classmethod
    def _read(cls, directory: RunDirectory) -> History:
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
        unfinished = newest if newest is not None and _is_unfinished(newest, directory) else None
        return cls(str(directory.path), dict(newest_first), damaged, unfinished)

    @property
    def is_empty(self) -> bool:
        return not self.generations and not self.damaged

    @property
    def newest(self) -> Generation | None:
        return next((each for each in self.generations.values() if each is not self.unfinished), None)

    def check(self) -> None:
        """Raise the error of a manifest that is damaged."""
        for error in self.damaged.values():
            # The higher one of what is left: it may be the newest, or the one before.
            raise type(error)(f"{error}. {_remedy(self.newest)}" if self.newest else str(error)) from error

    def among(self, numbers: Collection[int]) -> History:
        """The same without other generations than these."""
        kept = {name: each for name, each in self.generations.items() if each.number in numbers}
        return replace(self, generations=kept)

    def choose(self, number: int | None) -> Generation | None:
        """Generation `number`, or the newest; None when there is none at all.

        Raises IntegrityError when a manifest is damaged and no number was given; if another version wrote the manifest,
        CheckpointError. Raises CheckpointError when the number is not there.
        """
        if number is None:
            self.check()
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
        """True if nothing here can be newer."""
        return chosen is next(iter(self.generations.values()), None) and not self.damaged

    def remedy(self, bad: Generation) -> str:
        """The remedy to type when this generation turns out to be damaged; empty when there is no other."""
        other = next((each for each in self.generations.values() if each not in (bad, self.unfinished)), None)
        return _remedy(other) if other is not None else ""


def _is_unfinished(newest: Generation, directory: RunDirectory) -> bool:
    """True if a generation was written to be committed with another model's, and that one's commit point never came.

    Where nothing is known of the other, it counts as committed: `zo.resume` compares both.
    """
    joint = newest.joint
    if joint is None or joint.lead is None:
        return False
    lead = joint.lead
    # Beside it first: of a copy, the recorded path is the original's.
    for path in (directory.path / lead.beside, Path(lead.home)):
        with contextlib.suppress(ZeroOffloadError, OSError), RunDirectory.look(path, directory.system) as home:
            if (read_manifest(home, RUN_NAME) or {}).get("run_id") != lead.run_id:
                continue
            payloads = [payload for name in GENERATION_NAMES if (payload := read_manifest(home, name)) is not None]
            found = max((Generation.parse(each, lead.home) for each in payloads), key=_number_of, default=None)
            if found is None or found.number < lead.number:
                return True
            return found.number == lead.number and (found.joint is None or found.joint.token != joint.token)
    return False


def _number_of(generation: Generation) -> int:
    return generation.number


def _is_missing(
    home: RunDirectory,
    name: str,
    found: Mapping[str, Generation],
    damaged: Mapping[str, ZeroOffloadError],
    newest: Generation | None,
) -> bool:
    """True if a generation was committed under this name, may be the newest, and is not there."""
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


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Inside, values of a manifest are used: what is missing or of another type there is damage, not a bug of ours."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise IntegrityError(
            f"{where} has a manifest with values that this version does not write ({type(error).__name__}: {error}); "
            "load a checkpoint, or start over with existing='discard'"
        ) from error


_SECTIONS_MAX = 2**24
_THAWED = "thawed"
"""The key, in an entry of a parameter, of a section that was frozen at first."""
_DIVISION = "division"
"""The key, in an entry of a parameter, of how tensor-parallel ranks divide it."""
_KINDS = ("shape", "dtype", "trainable")
"""Properties of a parameter, wherever it lies."""
_PLACE = ("name", "section", "begin")
"""Which one lies where."""


def fingerprint(layout: ShardLayout) -> list[dict[str, Any]]:
    """The properties that must agree before a byte of a generation is believed: of every parameter, in order."""
    return [
        {
            "name": piece.spec.name,
            "shape": list(piece.spec.shape),
            "dtype": str(section.dtype).removeprefix("torch."),
            "trainable": section.trainable,
            "section": section.index,
            "begin": piece.begin,
        }
        | ({_DIVISION: piece.spec.division} if piece.spec.division else {})
        | ({"order": list(piece.spec.order)} if piece.spec.order else {})
        | ({"keeps_dtype": True} if piece.spec.keeps_dtype and section.dtype in COMPUTE_DTYPES else {})
        | ({"held_by": piece.spec.held_by} if piece.spec.held_by else {})
        | ({"record": asdict(piece.spec.record)} if piece.spec.record else {})
        | ({_THAWED: True} if section.is_thawed else {})
        for section in layout.sections
        for piece in section.params
        if not piece.is_gone
    ]


def thawed_as(found: Generation, layout: ShardLayout) -> ShardLayout:
    """A layout with the sections thawed of which a generation has a thawed parameter."""
    thawed = {entry["name"] for entry in found.params if entry.get(_THAWED)}
    return layout.thawed(
        {
            section.index
            for section in layout.sections
            if not section.trainable and any(piece.spec.name in thawed for piece in section.params)
        }
    )


def lies_elsewhere(found: Generation, layout: ShardLayout) -> bool:
    """True if a generation of a model that has changed has parameters in other places than a layout: they are found by
    their names."""
    saved, here = (
        [[each.get(key) for key in _PLACE] for each in params] for params in (found.params, fingerprint(layout))
    )
    return bool(found.changes) and saved != here


def check_found_by_name(found: Generation, layout: ShardLayout, where: str) -> None:
    """Raise CheckpointError, with what became of a changed model, unless the layout has the same parameters."""
    here = {entry["name"]: entry for entry in fingerprint(layout)}
    saved = {entry["name"]: entry for entry in found.params}
    problems = []
    for names, has in ((saved.keys() - here.keys(), "lacks"), (here.keys() - saved.keys(), "has others than that one")):
        if names:
            blocks = Counter(map(_block, (name for name in (*saved, *here) if name in names)))
            problems.append(f"this model {has}: {', '.join(n + _of_many(c) for n, c in [*blocks.items()][:_TOLD])}")
    for name in (name for name in here if name in saved):
        mine, there = here[name], saved[name]
        keys = (mine.keys() | there.keys()) - {"section", "begin", _THAWED}
        # A section thaws with the first of its parameters.
        keys -= {"trainable"} if mine.get(_THAWED) else set()
        problems += [
            f"{name} has {key}={there.get(key)!r}, and here {mine.get(key)!r}"
            for key in keys
            if mine.get(key) != there.get(key)
        ][:1]
    if problems:
        history = "; ".join(map(str, found.changes))
        raise CheckpointError(
            f"{where}: {found} is of a model that had changed since it was offloaded: {history}. "
            f"{'; '.join(problems[:_TOLD])}. Build the model as it was when the generation was made, with all that was "
            "adopted, and call zo.offload once; or start over with existing='discard'"
        )


def is_divided_otherwise(found: Generation, layout: ShardLayout) -> bool:
    """True if tensor-parallel ranks had other parts of parameters than those of a layout."""
    here = {entry["name"]: entry.get(_DIVISION) for entry in fingerprint(layout)}
    return any(here.get(each["name"], each.get(_DIVISION)) != each.get(_DIVISION) for each in found.params)


def check_divided_otherwise(found: Generation, layout: ShardLayout) -> None:
    """Raise CheckpointError unless the layout has the same parameters, divided otherwise over tensor-parallel ranks,
    whose values can be told apart."""
    here, saved = ({each["name"]: each for each in params} for params in (fingerprint(layout), found.params))
    problems = [f"only one of both models has {name}" for name in sorted(here.keys() ^ saved.keys())]
    for name in here.keys() & saved.keys():
        mine, there = (each | {"shape": list(_whole_shape(each))} for each in (here[name], saved[name]))
        keys = (mine.keys() | there.keys()) - {"section", "begin", _DIVISION, _THAWED}
        keys -= {"trainable"} if mine.get(_THAWED) else set()
        problems += [
            f"{name} has {key}={there.get(key)!r}, and here {mine.get(key)!r}"
            for key in sorted(keys)
            if mine.get(key) != there.get(key)
        ]
        if mine.get(_DIVISION) != there.get(_DIVISION) and {"order", "record", "held_by"} & keys:
            problems.append(f"{name} lies in memory in an order of its own")
    if found.payload.get(BASE):
        problems.append("frozen values rest in files of others")
    if problems:
        raise CheckpointError(
            f"{found} is of a model that was divided otherwise over tensor-parallel ranks, and does not come into this "
            f"one: {'; '.join(problems[:_TOLD])}. Start with the mesh and the model that it was published with"
        )


def _whole_shape(entry: Mapping[str, Any]) -> tuple[int, ...]:
    return whole_shape(entry.get(_DIVISION, ""), entry["shape"])


def told_changes(found: Generation) -> str:
    """The history of the parameters of a model that has changed."""
    new = {name for change in found.changes for name in (*change.added, *change.replaced, *change.renamed.values())}
    kept = sum(name not in new for name in found.names)
    return f"{'; '.join(map(str, found.changes))}. The other {kept} of {len(found.names)} parameters are as they were"


def check_fingerprint(
    saved: Any, layout: ShardLayout, where: str, calls: Sequence[int] = (), *, thaws: bool = False
) -> None:
    """Raise CheckpointError naming the first difference.

    `calls`: how many sections there were before each further call of zo.offload. A model with so many sections waits
    for further calls before it is whole. With `thaws` sections that have thawed here may be frozen there.
    """
    here = fingerprint(layout)
    if not isinstance(saved, list) or not all(isinstance(entry, dict) for entry in saved):
        raise IntegrityError(f"{where}: the list of parameters is damaged")
    hint = ""
    if calls:
        first = [entry for entry in saved if entry.get("section", 0) < calls[0]]
        hint = (
            f". It was written by a model that was offloaded in {len(calls) + 1} calls: zo.offload with the first "
            f"{len(first)} parameters, then zo.offload(model) again with the others. Make the same calls in the same "
            "order"
        )
    # A model that is not whole yet is compared with the part that its calls have made so far.
    if len(layout.sections) in calls:
        saved = [entry for entry in saved if entry.get("section", 0) < len(layout.sections)]
    # By name first: a parameter of another dtype lies elsewhere, and moves those that came after it.
    named = {entry.get("name"): entry for entry in saved}
    same_names = [(named[mine["name"]], mine, _KINDS) for mine in here if mine["name"] in named]
    in_order = [(there, mine, tuple(mine | there)) for there, mine in zip(saved, here, strict=False)]
    is_same_model = named.keys() == {mine["name"] for mine in here}
    # The same parameters in other places have another remedy than another model.
    for there, mine, keys in same_names + in_order:
        different = [key for key in keys if there.get(key) != mine.get(key) and key != _THAWED]
        if different == ["trainable"] and thaws and mine.get(_THAWED):
            continue
        if different == ["trainable"] and there.get(_THAWED):
            raise CheckpointError(
                f"{where}: {there.get('name')!r} was frozen when it was offloaded and thawed later; here it is frozen. "
                "Call requires_grad_(True) on what was thawed, after zo.offload, and then this"
            )
        if is_same_model and different[:1] and different[0] in _PLACE:
            raise CheckpointError(
                f"{where} has the parameters of this model in other units, from {mine['name']!r} on. Pass the units= "
                "that it was written with. If there were none, another version of zero_offload chose the units: resume "
                f"with that version. 'zero-offload export' writes the weights alone, for zo.load_pretrained{hint}"
            )
        if different:
            key = different[0]
            known = next((name for name, each in TORCH_NAMES.items() if each == there.get("dtype")), None)
            if key == "dtype" and known is not None:
                hint = f". Precision(modules={ {mine['name']: known} }) gives this one the dtype of that run{hint}"
            raise CheckpointError(
                f"{where} holds another model: its parameter {there.get('name')!r} has "
                f"{key}={there.get(key)!r}, this model's {mine['name']!r} has {key}={mine.get(key)!r}. "
                f"Build the same model with the same precision and units, or use another directory{hint}"
            )
    if len(saved) != len(here):
        alone = (saved if len(saved) > len(here) else here)[min(len(saved), len(here))]
        raise CheckpointError(
            f"{where} holds another model: {len(saved)} parameters, this model has {len(here)}; only one of them "
            f"has {alone.get('name')!r}. Build the same model, or use another directory{hint}"
        )


def state_format_of(generation: Generation) -> StateFormat:
    """How optimizer states rest in it; once they always did in fp32."""
    name = generation.payload.get("states", "fp32")
    if name not in STATE_FORMATS:
        raise IntegrityError(f"{generation} has states in {name!r}, a format that this version does not know")
    return STATE_FORMATS[name]


def tell_conversion(generation: Generation, layout: ShardLayout) -> None:
    """Say so, if states of a generation do not rest as a layout has them."""
    before, now = state_format_of(generation), layout.state_format
    if before is not now:
        loss = "exactly" if before is not StateFormat.FP32 and now is StateFormat.FP32 else "rounded to the nearest"
        warn_user(
            f"{generation}: optimizer states are converted from {before.name.lower()} to {now.name.lower()}, "
            f"{loss}; precision=zo.Precision(states={before.name.lower()!r}) would keep them as they are"
        )


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise IntegrityError(f"a manifest names the dtype {name!r}, which does not exist")
    return dtype


def sections_of(generation: Generation) -> tuple[SectionLayout, ...]:
    """The sections as the fingerprint describes them, each in one piece; ranks' shards are in their manifests."""
    params = generation.payload.get("params")
    try:
        pieces: dict[int, list[ParamSlice]] = {}
        kinds: dict[int, tuple[torch.dtype, bool]] = {}
        for entry in params or []:
            shape, index = tuple(entry["shape"]), entry["section"]
            dtype, trainable = dtype_of(entry["dtype"]), bool(entry["trainable"])
            numel = math.prod(shape)
            spec = ParamSpec(
                entry["name"],
                aliases=(),
                shape=shape,
                numel=numel,
                dtype=entry["dtype"],
                trainable=trainable,
                division=entry.get(_DIVISION, ""),
                keeps_dtype=dtype not in COMPUTE_DTYPES or bool(entry.get("keeps_dtype")),
                order=tuple(entry.get("order", ())),
                held_by=entry.get("held_by", ""),
                record=Record(**entry["record"]) if "record" in entry else None,
            )
            pieces.setdefault(index, []).append(ParamSlice(spec, entry["begin"]))
            kinds[index] = (dtype, trainable)
        states, empty = state_format_of(generation), (torch.float32, False)
        # Of a model that has changed, some may have no parameter.
        count = generation.payload.get("num_sections", len(pieces))
        if not len(pieces) <= count <= _SECTIONS_MAX or max(pieces, default=0) >= count:
            raise IntegrityError(f"{generation}: the list of parameters is damaged ({count} sections)")
        return tuple(
            SectionLayout(0, i, *kinds.get(i, empty), 1, tuple(pieces.get(i, ())), 0, 1, states) for i in range(count)
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{generation}: the list of parameters is damaged ({error!r})") from error
