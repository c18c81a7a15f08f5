"""A training run without a model on a `CrashFS`: the real directories, swap files, stores and generations.

The states are a function of (step, rank, shard, component, element), made step by step from the values that are read
back. So a block of another step, shard or rank is seen for what it is. `explore` crashes a run everywhere, opens what
is left, and judges it.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.helpers.crash_disk import Disk, Op
from tests.helpers.crash_engine import CrashEngine
from tests.helpers.crashfs import CrashFS
from tests.helpers.crew import Crew, CrewGroup
from zero_offload.base.config import OffloadConfig
from zero_offload.base.events import Counters
from zero_offload.base.threads import FirstError
from zero_offload.base.types import Durability, StateKind, Tier
from zero_offload.checkpoint import generation, homes, run_files
from zero_offload.checkpoint.format import StepRecord
from zero_offload.checkpoint.generation import GenerationKeeper
from zero_offload.checkpoint.joint import ALONE, CommitPart, JointCommit
from zero_offload.checkpoint.run_files import RunFiles
from zero_offload.plan.dtypes import ComputeDtypes
from zero_offload.plan.layout import SHARD_NUMEL, ShardLayout, make_layout
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.runs.locate import alone
from zero_offload.runtime.ranks.collectives import CommitGroup
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engine import Urgency
from zero_offload.storage.memory.arena import Arena
from zero_offload.storage.memory.pool import LazyRegion
from zero_offload.storage.shards.shard import ADAM_STATES, Component, Shard
from zero_offload.storage.shards.store import ShardStore

STRIDE = SHARD_NUMEL * 64
"""The number that a step adds to every element; fp32 holds the sums of some sixty steps exactly."""
TIERS = {
    "mixed": {"disk": (Tier.NVME, Tier.NVME), "memory": (Tier.CPU, Tier.CPU), "frozen": (Tier.CPU, Tier.CPU)},
    "disk": {"disk": (Tier.NVME, Tier.NVME), "memory": (Tier.NVME, Tier.CPU), "frozen": (Tier.NVME, Tier.NVME)},
}
"""Unit -> tiers of its parameters and of its optimizer's states. A value on disk beside states in memory is a cache."""
CHANGE_STEP = 3
"""After so many steps the frozen shard is changed, once: it then needs a second slot."""


@dataclass(frozen=True)
class Setup:
    """The kind of run."""

    durability: Durability = Durability.COMMIT
    world_size: int = 1
    interval: int = 1
    """Steps between commits."""
    tiers: str = "mixed"
    directories: tuple[str, ...] = ("/drive/run",)
    existing: str = "resume"
    num_models: int = 1
    """Models that are committed together, of one rank each. They take turns as ranks do."""
    own_drives: bool = False
    """Each rank has a machine of its own, with its directories."""

    def __str__(self) -> str:
        words = [f"{self.num_models} models"] * (self.num_models > 1)
        words += [self.durability.value, f"{self.world_size} rank" + "s" * (self.world_size > 1)]
        words += [f"every {self.interval} steps"] * (self.interval > 1) + ["caches"] * (self.tiers == "disk")
        words += [f"{len(self.directories)} directories"] * (len(self.directories) > 1)
        words += ["on drives of their own"] * self.own_drives
        return ", ".join(words + ["discard"] * (self.existing == "discard"))

    def config(self, model: int = 0, rank: int = 0) -> OffloadConfig:
        place = f"/of/{rank}" * self.own_drives
        where = [f"{place}{each}{model or ''}" for each in self.directories]
        return OffloadConfig(nvme=where, params="nvme", durability=self.durability.value, existing=self.existing)

    @property
    def layout(self) -> ShardLayout:
        return _layout(self.world_size)


@functools.cache
def _layout(num_shards: int) -> ShardLayout:
    model = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in TIERS["mixed"]})
    model["frozen"].requires_grad_(False)
    spec = ModelSpec.from_module(model, units=list(model))
    return make_layout(spec, ComputeDtypes(torch.float32), num_shards)


def _place(params: Tier, optimizer: Tier) -> dict[StateKind, Tier]:
    return {StateKind.PARAMS: params, StateKind.GRADS: Tier.CPU, StateKind.OPTIMIZER: optimizer}


def expected(shard: Shard, component: Component, rank: int, step: int) -> torch.Tensor:
    """(shard_numel,) fp32, host: the states of a shard after so many steps."""
    place = shard.components.index(component) + 4 * (shard.layout.index + 4 * rank)
    first = torch.arange(SHARD_NUMEL, dtype=torch.float32) + SHARD_NUMEL * place
    return first + STRIDE * (step if shard.layout.trainable else int(step >= CHANGE_STEP))


@contextmanager
def mounted(fs: CrashFS, seed: int) -> Iterator[None]:
    """Runs that are opened inside have their files on `fs`."""
    seeds = random.Random(seed)
    directory = SimpleNamespace(open=partial(RunDirectory.open, system=fs), join=partial(RunDirectory.join, system=fs))
    with (
        mock.patch.object(homes, "RunDirectory", directory),
        mock.patch.object(generation.uuid, "uuid4", lambda: SimpleNamespace(hex=f"{seeds.getrandbits(128):032x}")),
        mock.patch.object(run_files, "open_engine", lambda *_, **__: CrashEngine(fs, seeds.randrange(1 << 30))),
    ):
        yield


class Run:
    """One rank's run, from `open` on; what `offload` and a step do, without a model."""

    def __init__(self, setup: Setup, ranks: CommitGroup, cleanup: ExitStack, model: int = 0) -> None:
        self.setup, self.rank, self.step = setup, ranks.rank, 0
        files = RunFiles.open(setup.config(model, self.rank), setup.layout, ranks, FirstError(), Counters())
        cleanup.callback(files.close)
        assert files.keeper is not None and files.swap is not None
        self.keeper: GenerationKeeper = files.keeper
        with ranks.together():
            places = [_place(*TIERS[setup.tiers][unit.name]) for unit in setup.layout.units]
            self.store = ShardStore(setup.layout, places, Arena(0), files.swap, num_slots=2)
            files.create(self.store, setup.durability)
            self.keeper.adopt(self.store, files.swap)
            for shard in self.store.shards:
                self.store.place_memory(shard, {})
            if self.keeper.found is not None:
                self.step = self.keeper.found.step
                self.keeper.restore(self.store.shards, self.rank)
            else:
                for shard in self.store.shards:
                    self.store.add_states(shard, ADAM_STATES)
                    self._replace(shard)
            self._staging = LazyRegion(self.store.arena, self.store.state_staging_bytes)
        if setup.num_models > 1:
            files.finish_resume(ranks)

    def _replace(self, shard: Shard) -> None:
        """Write a whole shard anew, as this step has it."""
        step = self.step
        self.store.write_components(shard, lambda each, begin, end: expected(shard, each, self.rank, step)[begin:end])

    def train(self) -> None:
        """One step: what was read back, and a constant more."""
        for shard in self.store.shards:
            if shard.layout.trainable:
                self._update(shard)
        self.step += 1
        if self.step == CHANGE_STEP:
            self._replace(next(shard for shard in self.store.shards if not shard.layout.trainable))

    def _update(self, shard: Shard) -> None:
        shard.wait_for_writes()
        shard.writes.clear()
        region = self._staging.region
        chunk = self.store.open_chunks(shard, range(1), region.address)
        chunk.wait()
        for i, component in enumerate(shard.components):
            values = shard.memory.get(component)
            if values is None:
                values = region.tensor(torch.float32, SHARD_NUMEL, i * SHARD_NUMEL * 4)
                assert values.data_ptr() == chunk.addresses[component]
            values += STRIDE
        self.store.close_chunks(chunk)
        self.store.finish_update(shard)

    def commit(self, part: CommitPart = ALONE) -> None:
        self.keeper.commit(StepRecord(self.step, {}, [], None, {"step": self.step}, None, {}), part=part)

    def wrong_arrays(self) -> list[str]:
        """Arrays that are not what this step's are, values that forward would not get, the record of another step."""
        found = self.keeper.found
        record = ["extra"] if found is not None and found.payload["extra"] != {"step": self.step} else []
        return record + [
            f"rank {self.rank} section {shard.layout.index} {component}"
            for shard in self.store.shards
            for component in shard.components
            if not self._is_right(shard, component)
        ]

    def _is_right(self, shard: Shard, component: Component) -> bool:
        right = expected(shard, component, self.rank, self.step)
        fetched = torch.empty(SHARD_NUMEL)
        if component is Component.VALUE:
            for transfer in self.store.launch_fetch(shard, fetched.data_ptr(), Urgency.URGENT):
                transfer.wait()
        else:
            fetched = right
        return torch.equal(fetched, right) and torch.equal(self.store.read_component(shard, component), right)


@dataclass
class History:
    """A run as far as it came."""

    fs: CrashFS
    setup: Setup
    reported: list[tuple[int, int]] = field(default_factory=list)
    """(operations so far, step) of every resume and every commit that returned on some rank."""
    opened: list[tuple[int, list[str]]] = field(default_factory=list)
    """(step, wrong arrays) that each rank began with."""
    outcomes: list[Any] = field(default_factory=list)
    """None or what was raised, by rank."""

    def promised(self, num_operations: int) -> int:
        """The last step that was reported to be committed before that operation; 0 is none."""
        return max((step for at, step in self.reported if at <= num_operations), default=0)

    @property
    def errors(self) -> list[BaseException]:
        return [each for each in self.outcomes if each is not None]

    def verdict(self) -> str:
        """Of what the run began with, and of whether it came to its end."""
        if self.errors:
            return "unrecoverable"
        whole = len({step for step, _ in self.opened}) == 1 and not any(wrong for _, wrong in self.opened)
        return "good" if whole else "wrong states"

    def summary(self) -> str:
        return f"{self.errors or self.opened}"


class _InTurns:
    """The monitor of a commit of several models, which take turns."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.lock = nullcontext()

    def notify(self) -> None: ...

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._crew.pass_on()


def _live_together(fs: CrashFS, setup: Setup, num_steps: int, seed: int, history: History, crew: Crew) -> None:
    """As `play`, of several models."""
    joints: dict[int, JointCommit] = {}
    opened: list[int] = []
    tokens: list[str] = []
    order = random.Random(seed).sample(range(setup.num_models), setup.num_models)
    monitor = _InTurns(crew)

    def life(model: int) -> None:
        with ExitStack() as cleanup:
            # A program offloads one after the other.
            monitor.wait_for(lambda: order[len(opened)] == model)
            try:
                run = Run(setup, alone(), cleanup, model)
            finally:
                opened.append(model)
            found = run.keeper.found
            history.opened.append((run.step, run.wrong_arrays()))
            tokens.append("" if found is None or found.joint is None else found.joint.token)
            monitor.wait_for(lambda: len(opened) == len(tokens) == setup.num_models)
            assert len({*tokens}) == 1, "the models go on from different commits"
            history.reported.append((len(fs.journal), run.step))
            for _ in range(num_steps):
                run.train()
                if run.step % setup.interval == 0:
                    joint = joints.setdefault(run.step, JointCommit(["model"] * setup.num_models, monitor))
                    part = joint.part(model)
                    with part.failing():
                        run.commit(part)
                    history.reported.append((len(fs.journal), run.step))

    history.outcomes = crew.run(life)


def play(fs: CrashFS, setup: Setup, num_steps: int, seed: int, watch: Callable[[Crew], None] | None = None) -> History:
    """Open, check, train so many steps more, close. An error ends a rank, as it ends a run.

    `watch` is told of the crew before anything happens.
    """
    history, crew = History(fs, setup), Crew(setup.world_size * setup.num_models, seed)
    fs.before_call = crew.turn
    if watch is not None:
        watch(crew)

    def life(rank: int) -> None:
        with ExitStack() as cleanup:
            run = Run(setup, CrewGroup(crew, rank), cleanup)
            history.opened.append((run.step, run.wrong_arrays()))
            # The step that a run goes on from is promised too: its user has seen it.
            history.reported.append((len(fs.journal), run.step))
            for _ in range(num_steps):
                run.train()
                if run.step % setup.interval == 0:
                    run.commit()
                    history.reported.append((len(fs.journal), run.step))

    def machine() -> str:
        return f"machine {crew.rank * setup.own_drives}"

    with mounted(fs, seed), mock.patch.object(homes, "machine_name", machine):
        if setup.num_models > 1:
            _live_together(fs, setup, num_steps, seed, history, crew)
        else:
            history.outcomes = crew.run(life)
    return history


class Crash(Enum):
    POWER = "power"
    KILL = "kill -9"


@dataclass
class Tally:
    """The outcomes of the crashes of one or several runs."""

    points: int = 0
    """Operations before which a run was broken off."""
    cases: int = 0
    """Points times seeds."""
    distinct: int = 0
    """Disks that differ."""
    verdicts: Counter[str] = field(default_factory=Counter)
    first_bad: str = ""

    @property
    def bad(self) -> int:
        return self.cases - self.verdicts["good"]

    def count(self, verdict: str, text: str) -> None:
        self.cases += 1
        self.verdicts[verdict] += 1
        if verdict != "good":
            self.first_bad = self.first_bad or text

    def add(self, other: Tally) -> None:
        self.points += other.points
        self.cases += other.cases
        self.distinct += other.distinct
        self.verdicts += other.verdicts
        self.first_bad = self.first_bad or other.first_bad

    def row(self, name: str) -> str:
        """Of the table."""
        kinds = ", ".join(
            f"{count:,} {verdict}" for verdict, count in sorted(self.verdicts.items()) if verdict != "good"
        )
        return f"| {name} | {self.points:,} | {self.cases:,} | {self.distinct:,} | {kinds or 0} |"


@dataclass(frozen=True)
class Plan:
    """Which crashes of a run are tried."""

    crash: Crash
    seeds: range
    every: int = 1
    """One crash point in so many."""
    begin: int = 0
    """The first crash point."""
    enough: int = 1 << 30
    """Stop at so many bad recoveries."""
    then: Plan | None = None
    """Crashes of the run that goes on from what the first one left; of one first crash in `then_every`."""
    then_every: int = 1


def explore(history: History, plan: Plan, floor: int = 0) -> Tally:
    """Crash a run that has been played; `floor` is a step that was promised before it began."""
    tally = Tally()
    judged: dict[bytes, tuple[str, int, str]] = {}
    for k, disk, underway in history.fs.moments(range(plan.begin, len(history.fs.journal) + 1, plan.every)):
        tally.points += 1
        promised = max(floor, history.promised(k))
        for seed in plan.seeds:
            left = _after(plan.crash, disk, underway, seed if seed < 5 else seed + 1000 * k)
            if history.setup.durability is not Durability.COMMIT:
                left = left.settled()
            digest = left.digest()
            if digest not in judged:
                verdict, step, sequel = judge(left, history.setup, seed)
                judged[digest] = verdict, step, sequel.summary()
                tally.distinct += 1
            verdict, step, summary = judged[digest]
            if verdict == "good" and step < promised:
                verdict = "older than promised"
            where = "the end" if underway is None else describe(underway)
            tally.count(verdict, f"{plan.crash.value} at {k}, {where}, seed {seed}: {verdict}: {summary}")
            if plan.then is not None and tally.cases % plan.then_every == 0 and verdict == "good":
                tally.add(explore(judge(left, history.setup, seed)[2], plan.then, promised))
            if tally.bad >= plan.enough:
                return tally
    return tally


def _after(crash: Crash, disk: Disk, underway: Op | None, seed: int) -> Disk:
    return disk.without_power(underway, seed) if crash is Crash.POWER else disk.killed(underway, seed)


def describe(op: Op) -> str:
    values = {key: len(value) if isinstance(value, bytes) else value for key, value in vars(op).items()}
    return f"{type(op).__name__} {values}"


def judge(disk: Disk, setup: Setup, seed: int) -> tuple[str, int, History]:
    """Go on from `disk` until a commit, and see that it lasts: "good" or what is wrong, and the step found."""
    history = play(CrashFS(disk), setup, setup.interval, seed)
    verdict = history.verdict()
    step = history.opened[0][0] if history.opened else 0
    if verdict == "good":
        crash = Crash.POWER if setup.durability is Durability.COMMIT else Crash.KILL
        again = play(CrashFS(_after(crash, history.fs.disk(), None, 0)), setup, 0, seed)
        verdict = again.verdict()
        if verdict == "good" and again.opened[0][0] != history.reported[-1][1]:
            verdict = "older than promised"
    return verdict, step, history
