"""Which steps become generations, and how they get there behind the next step.

Owns the record of the last step until a generation has it, and the thread of commits. A commit begins on the update's
thread when the update is complete, which fixes what the generation is made of. It goes on on a thread of its own. Moves
no bytes. The calls: `is_due_by_clock` and `note_due` when a step begins; `forget_record` before states change. `add`
per step, `complete_record` where the program has more to say, `launch_due`. `set_aside` when the program has written
states itself. `drop_unresumable`, `launch_latest`, `drain` and `shutdown` at the end. A `JointStep` calls `take_part`
and `launch` of each of its models.

[Note: how ranks commit the same steps]
A number of steps is counted alike on all ranks. A duration, or "auto", is measured by rank 0's clock alone
(`CommitClock`). All ranks meet when `step()` begins, to say that nothing went wrong on any of them. Rank 0's word there
says whether the step that begins becomes a generation: a bit of a message that is sent anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

from zero_offload.base.problems import warn_user
from zero_offload.checkpoint.commit_clock import CommitClock
from zero_offload.checkpoint.format import ENDED_BY_STEP, StepRecord
from zero_offload.checkpoint.generation import GenerationKeeper
from zero_offload.checkpoint.joint import ALONE, CommitPart, JointCommit
from zero_offload.model.iterations import Iterations
from zero_offload.optim.worker import Worker
from zero_offload.runtime.ranks.collectives import CommitGroup
from zero_offload.storage.shards.snapshot import Snapshot, Snapshots


class Holds(Enum):
    """The states that the model holds, and so what a commit would keep."""

    GENERATION = "generation"  # the newest generation's, none yet, or states that are about to change: nothing to keep
    STEP = "step"  # the last step's, whose record waits for its commit
    CHANGED_STEP = "changed step"  # the program has replaced some since the last step, whose record waits
    CHANGED = "changed"  # the program has replaced some since the newest generation
    CHECKPOINT = "checkpoint"  # all are a checkpoint's


TRANSITIONS: dict[Holds, frozenset[Holds]] = {
    Holds.GENERATION: frozenset({Holds.GENERATION, Holds.STEP, Holds.CHANGED, Holds.CHECKPOINT}),
    Holds.STEP: frozenset({Holds.STEP, Holds.GENERATION, Holds.CHANGED_STEP, Holds.CHECKPOINT}),
    Holds.CHANGED_STEP: frozenset({Holds.STEP, Holds.GENERATION, Holds.CHECKPOINT}),
    Holds.CHANGED: frozenset({Holds.STEP, Holds.GENERATION, Holds.CHECKPOINT}),
    Holds.CHECKPOINT: frozenset({Holds.STEP, Holds.GENERATION, Holds.CHECKPOINT}),
}

REPLACED = {Holds.GENERATION: Holds.CHANGED, Holds.STEP: Holds.CHANGED_STEP}
"""After the program has replaced states; the others stay as they are."""


class Commits:
    """The commits of one model; used by the control thread. Without a keeper there is nothing to do."""

    def __init__(
        self,
        keeper: GenerationKeeper | None,
        snapshots: Snapshots,
        workers: tuple[Worker, Worker | None],
        unit_order: Callable[[], Sequence[int]],
        every: int | str,
        iterations: Iterations,
        ranks: CommitGroup,
        *,
        resumes: bool = False,
    ) -> None:
        """`workers`: the updates' and, with a keeper, the commits'. `unit_order`: in which units are first used.
        `every`: as in `OffloadConfig.commit_every`; `iterations`: of which none but whole ones become generations.
        `ranks`: lent to commits; rank 0's clock counts. `resumes`: the program goes on from what is there."""
        self._keeper = keeper
        self._snapshots = snapshots
        self._update_worker, self._commit_worker = workers
        self._unit_order = unit_order
        self._every = every
        self._ranks = ranks
        self.iterations = iterations
        self._resumes = resumes
        self._has_warned = False
        self._holds = Holds.GENERATION
        self._latest: StepRecord | None = None
        """The last step, in the states that have one."""
        self._is_due = False
        """True if a step is to become a generation: the last one or, where its states were replaced, the next."""
        self.completes = False
        """True if this run calls `complete_record`, or is about to: then a record without its part belongs to a step
        that broke off."""
        self._clock: CommitClock | None = None
        if isinstance(every, str) and ranks.rank == 0 and keeper is not None:
            self._clock = CommitClock(every)
        self._is_due_by_time = False
        """True if rank 0 has said that this step becomes a generation."""
        self._publisher = None if keeper is None else keeper.publisher
        self._asks = ranks.rank == 0 and self._publisher is not None
        self._may = True
        """False while commits wait for a generation that is published: by rank 0's word."""
        self._num_launched = self._num_ended = 0
        self.joint: JointStep | None = None
        """The step that the last one is committed with, of other models."""
        self._parts: tuple[CommitPart, ...] = ()
        """Of the commits under way."""

    def start(self, *, loaded: bool = False) -> None:
        """The states are those of the generation that was found or, if `loaded`, of a checkpoint."""
        self._move_to(Holds.CHECKPOINT if loaded else Holds.GENERATION)
        self._is_due = False
        # Files that are cut anew have had a commit of their own.
        self._num_launched = self._num_ended = self._snapshots.num_ended
        if self._clock is not None:
            self._clock.restart()

    def forget_record(self) -> None:
        """The states of the last step are about to change; whatever interrupts that, they are not committed as its."""
        self._move_to(Holds.GENERATION)

    def _move_to(self, to: Holds, record: StepRecord | None = None) -> None:
        """Raises AssertionError for a move that `TRANSITIONS` does not have."""
        assert to in TRANSITIONS[self._holds], f"states of a {self._holds.value} cannot become those of a {to.value}"
        self._holds, self._latest, self.joint = to, record, None

    def set_aside(self) -> None:
        """The program has written states of its own: the last step is committed only if `complete_record` follows."""
        if self._holds in REPLACED:
            self._move_to(REPLACED[self._holds], self._latest)

    def note_written(self) -> None:
        """The program has changed parameters: as a part of the last step, unless a generation has that already."""
        if self._holds is Holds.GENERATION:
            self._move_to(Holds.CHANGED)

    @property
    def pending_step(self) -> int:
        """The step that `launch_latest` would make a generation; 0 when there is none."""
        return self._latest.step if self._latest is not None and self._holds is Holds.STEP else 0

    def is_due_by_clock(self) -> bool:
        """True if the step that begins is to become a generation by this rank's clock. Never while a commit runs: the
        next one would have to wait for it, and the update for both. Nor while a generation is published: its slots are
        written after the next commit but one. With an interval in steps, true if rank 0 has neither under way."""
        if self._num_launched > self._snapshots.num_ended or (self._publisher is not None and self._publisher.is_busy):
            return False
        return self._asks if self._clock is None else self._clock.is_due()

    def note_due(self, is_due: bool) -> None:
        """Take over the answer of rank 0's `is_due_by_clock`."""
        if isinstance(self._every, str):
            self._is_due_by_time = is_due
        elif self._publisher is not None:
            self._may = is_due

    def add(self, record: StepRecord, step_s: float, wait_s: float) -> None:
        """A step was taken, of this length, of which commits have cost `wait_s`."""
        self._move_to(Holds.STEP, record)
        if self._keeper is None:
            return
        if self._clock is not None:
            ended, before = self._snapshots.num_ended, self._num_ended
            self._num_ended, is_over = ended, ended >= self._num_launched
            self._clock.add(step_s, wait_s, is_beside=ended > before or not is_over, is_over=is_over)
        # Whatever number of steps one backward has: the due step may not be the last one.
        self._is_due = self._is_due or (
            record.step % self._every == 0 if isinstance(self._every, int) else self._is_due_by_time
        )

    def complete_record(
        self,
        record: Callable[[], StepRecord],
        *,
        in_step: bool = False,
        is_frozen: bool = False,
        joint: JointStep | None = None,
    ) -> None:
        """The program is done with the last step: replace its record, and launch its generation if it is due.

        A generation may have that step already. It is written again if states were replaced since, or the program says
        something else. With `in_step` it is not: the program is on its way to the next step, whose gradients no
        generation has. A model that `is_frozen` has no steps that a clock could tell of, and each is due then. This
        model leads `joint`.
        """
        self.completes = True
        is_complete = self._holds is Holds.STEP and self._latest is not None and self._latest.rng is not None
        if in_step and (self._holds is Holds.GENERATION or is_complete):
            return
        before, latest = self._holds, record()
        self._move_to(Holds.STEP, latest)
        if joint is not None:
            joint.take()
        if before not in (Holds.STEP, Holds.CHANGED_STEP):
            is_multiple = not latest.step % self._every if isinstance(self._every, int) else is_frozen
            self._is_due = self._is_due or before is Holds.CHECKPOINT or is_multiple
        self.launch_due()

    def take_part(self, record: StepRecord) -> None:
        """This is the record of the states as they are now, which another model's commit decides on."""
        self.completes, self._is_due = True, False
        self._move_to(Holds.STEP, record)

    def number_record(self, step: int, ended_by: str) -> None:
        """The program has ended the iteration of the last step: its record has the number."""
        if self._latest is not None:
            self._latest = replace(self._latest, step=step, ended_by=ended_by)

    @property
    def _is_replaced(self) -> bool:
        """True if the program has replaced states, which are no step's until it says so by `complete_record`."""
        return self._holds not in (Holds.GENERATION, Holds.STEP)

    def launch_due(self) -> None:
        # Replaced states are left out, and the next step is due in their place. So is an iteration that goes on.
        if self._is_due and self._may and not self._is_replaced and not self._is_half:
            self.launch_latest()

    @property
    def _is_half(self) -> bool:
        """True if the program has not ended the iteration of the last step, or has more to say of it."""
        return not self.iterations.is_over or (self.completes and self._latest is not None and self._latest.rng is None)

    def warn_unended(self) -> None:
        """Nothing tells a second optimizer's step from the next iteration, so no generation is made."""
        if self._has_warned or self._keeper is None:
            return
        self._has_warned = True
        warn_user(
            f"{self.iterations.num_optimizers} optimizers step this model, and neither zo.commit nor RunLog.step was "
            "called: where an iteration ends is not known, and no generation is made. At the end of each iteration "
            "call zo.commit(model, optimizer)"
        )

    def launch_latest(self) -> None:
        """Make the last step a generation, unless it is one; with those of other models that belong to it."""
        if self.joint is None:
            self.launch(ALONE)
        else:
            self.joint.launch()

    def fail(self, error: BaseException) -> None:
        """No commit comes to its end any more; models that are committed with this one do not wait for it."""
        for part in self._parts:
            part.fail(error)

    def launch(self, part: CommitPart) -> None:
        record, keeper, worker = self._latest, self._keeper, self._commit_worker
        self.forget_record()
        self._is_due = False
        if record is None or keeper is None or worker is None:
            return
        snapshots, order = self._snapshots, self._unit_order()
        self._parts = (*(each for each in self._parts if not each.is_over), part)

        def take() -> None:
            with part.failing():
                snapshot = snapshots.take(order)
                worker.submit(lambda: commit(snapshot))

        def commit(snapshot: Snapshot) -> None:
            with part.failing(), self._ranks.borrowed():
                keeper.commit(record, snapshot, part)

        self._ranks.lend()
        self._update_worker.submit(take)
        # Not before: what was never submitted is never over.
        self._num_launched += 1
        if self._clock is not None:
            self._clock.restart()

    def drop_unresumable(self) -> None:
        """No generation is made of a step whose record does not say what a resume needs; the one before does."""
        if self.joint is not None and not self.joint.is_whole:
            self.joint.drop()
        record = self._latest
        if self._is_replaced and (what := self._missing_in(record)):
            warn_user(
                f"{what}: after it load_state_dict, optimizer.state, zo.load_checkpoint, zo.gathered(mode='write') or "
                "a new optimizer has replaced states, and a resume could not tell. To keep them as they are now call "
                "zo.commit(model, optimizer) before zo.close; to keep the step, zo.close before they are replaced",
            )
        elif record is not None and self._holds is Holds.STEP and not self.iterations.is_over and not self.completes:
            self._warn_half(record.step)
        # The script may also have ended between `step` and `commit`.
        if self._is_replaced or (record is not None and self._is_half):
            self.forget_record()

    def _warn_half(self, step: int) -> None:
        if self.iterations.ended_by == ENDED_BY_STEP:
            self.warn_unended()
        elif self._keeper is not None:
            warn_user(
                f"iteration {step} is not made a generation: neither RunLog.step nor zo.commit has ended it before "
                "zo.close"
            )

    def _missing_in(self, record: StepRecord | None) -> str:
        """A clause about states that the program has replaced, which a resume will not find."""
        if self._keeper is None:
            return ""
        if record is not None:
            return f"step {record.step} is not made a generation"
        if self._keeper.found is None and not self._num_launched:
            # There is no generation to go on from. A program that resumes, and has written, counts on one.
            return "no generation has what was written" if self._resumes and self._holds is Holds.CHANGED else ""
        return "a resume goes on from the generation committed last"

    def drain(self) -> None:
        """Wait for updates, and for commits. Raises the first error."""
        try:
            self._update_worker.drain()
        finally:
            try:
                if self._commit_worker is not None:
                    self._commit_worker.drain()
            finally:
                self._ranks.take_back()

    def shutdown(self) -> None:
        """Both threads end with what was submitted."""
        try:
            self._update_worker.shutdown()
        finally:
            if self._commit_worker is not None:
                self._commit_worker.shutdown()
            self._ranks.take_back()
            if self._publisher is not None:
                self._publisher.shutdown()


class JointStep:
    """The last steps of several models, which become generations together or not at all; the first one leads."""

    def __init__(
        self, lead: tuple[str, Commits], others: Sequence[tuple[str, Commits, Callable[[], StepRecord]]]
    ) -> None:
        """Names are for messages. The records of the others are asked for when the lead's is there."""
        self._members = [lead, *((name, commits) for name, commits, _ in others)]
        self._records = [record for _, _, record in others]

    def take(self) -> None:
        """The lead has its record; the others' are taken now."""
        for (_, commits), record in zip(self._members[1:], self._records, strict=True):
            commits.take_part(record())
        for _, commits in self._members:
            commits.joint = self

    @property
    def is_whole(self) -> bool:
        """True if no model has gone on since."""
        return all(commits.joint is self for _, commits in self._members)

    def launch(self) -> None:
        if not self.is_whole:
            return self.drop()
        joint = JointCommit([name for name, _ in self._members])
        try:
            for index, (_, commits) in enumerate(self._members):
                commits.launch(joint.part(index))
        except BaseException as error:
            joint.fail(error)
            raise

    def drop(self) -> None:
        """A model has gone on, without which the others' records are of no use."""
        left = [(name, commits) for name, commits in self._members if commits.joint is self]
        gone = [name for name, commits in self._members if commits.joint is not self]
        warn_user(
            f"step {left[0][1].pending_step} of {' and '.join(name for name, _ in left)} is not made a generation: "
            f"{' and '.join(gone)} went on or ended after zo.commit(also=...), which keeps all or none. Call it again "
            "before zo.close"
        )
        for _, commits in left:
            commits.forget_record()
