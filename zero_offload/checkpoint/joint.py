"""One commit point of several models.

Owns the order of a commit that several models make together. The first one leads: its global manifest is the commit
point of all. The others have written theirs before, and keep the slots of the generation before until it is there. So
whatever breaks off leaves all models at one commit; see `History.unfinished`. Each model commits on its own thread.
The lead's word says whether the generations are published, and its publisher does that for all. Writes nothing itself.
The calls: a `JointCommit` when the commit is launched, `part` for each model's commit, `fail` where one of them cannot
go on.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from zero_offload.base.threads import Monitor
from zero_offload.checkpoint.format import Partner


class Releasable(Protocol):
    """A generation that is held until it is published; see `checkpoint/publisher.py`."""

    def release(self) -> None: ...


Publish = Callable[[Sequence[Any]], None]
"""Publishes generations that are held, and releases them."""


class CommitPart:
    """The part of one model in a commit: here of a model that is committed alone."""

    def begin(self, home: Path, run_id: str, number: int) -> None:
        """This model makes generation `number`."""

    def before_point(self) -> dict[str, Any]:
        """Wait for what has to be there before the global manifest is; `Generation.joint` as the manifest has it."""
        return {}

    def after_point(self, is_due: bool) -> bool:
        """The global manifest is there: return once the generation before is not needed any more. True if the
        generation is to be published, which `is_due` says of this model alone."""
        return is_due

    def publish(self, held: Releasable, publish: Publish) -> None:
        """This model's generation is to be published, and held: `publish` does so, with those of the others."""
        publish([held])

    @property
    def is_over(self) -> bool:
        """True if no other model waits for this one."""
        return True

    def fail(self, error: BaseException) -> None:
        """This model cannot go on."""

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """An error inside ends the commit."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise


ALONE = CommitPart()


class JointCommit:
    """One commit of several models."""

    def __init__(self, models: Sequence[str], changed: Monitor | None = None) -> None:
        """`models`: their classes, for messages; the first one leads. `changed` tells the threads."""
        self._models = models
        self._token = uuid.uuid4().hex
        self._changed = changed or Monitor()
        self._homes: dict[int, tuple[Path, str, int]] = {}
        """Home, run and number of the generations under way, by model."""
        self._written: set[int] = set()
        """Models whose manifests are there."""
        self.is_published = False
        """True if the generations are to be published, by the lead's word."""
        self._held: dict[int, Releasable] = {}
        """Those that wait for the others to be published."""
        self._publish: Publish | None = None
        """The lead's."""
        self._error: BaseException | None = None

    def part(self, index: int) -> CommitPart:
        """Of the model with this index."""
        return _Lead(self, index) if index == 0 else _Other(self, index)

    @property
    def is_over(self) -> bool:
        """True if it is committed, or has failed."""
        return 0 in self._written or self._error is not None

    def fail(self, error: BaseException) -> None:
        """A model cannot go on: every wait of the others raises this, and nothing is published."""
        with self._changed.lock:
            self._error = self._error or error
            held, self._held = self._held, {}
            self._changed.notify()
        for each in held.values():
            each.release()

    def begin(self, index: int, home: Path, run_id: str, number: int) -> None:
        with self._changed.lock:
            self._homes[index] = home, run_id, number
            self._changed.notify()

    def note_written(self, index: int) -> None:
        with self._changed.lock:
            self._written.add(index)
            self._changed.notify()

    def publish(self, index: int, held: Releasable, publish: Publish) -> None:
        with self._changed.lock:
            if index == 0:
                self._publish = publish
            self._held[index] = held
            every, error = self._held, self._error
            is_last = len(every) == len(self._models)
            if is_last or error is not None:
                self._held = {}
        if error is not None:
            held.release()
        elif is_last:
            assert self._publish is not None
            self._publish([every[each] for each in sorted(every)])

    def wait_for_begin(self) -> None:
        self._wait(lambda count: len(self._homes) == count)

    def wait_for_others(self) -> None:
        self._wait(lambda count: len(self._written) == count - 1)

    def wait_for_lead(self) -> None:
        self._wait(lambda _: 0 in self._written)

    def _wait(self, is_so: Callable[[int], bool]) -> None:
        count = len(self._models)
        self._changed.wait_for(lambda: self._error is not None or is_so(count))
        if self._error is not None and not is_so(count):
            raise self._error

    def record(self, index: int) -> dict[str, Any]:
        """`Generation.joint` of a model's generation; all have begun."""
        others = [self._member(each, index) for each in sorted(self._homes) if each != 0] if index == 0 else []
        lead = None if index == 0 else asdict(self._member(0, index))
        return {"token": self._token, "lead": lead, "also": [asdict(each) for each in others]}

    def _member(self, index: int, of: int) -> Partner:
        home, run_id, number = self._homes[index]
        return Partner(
            f"{self._models[index]} in {home}", str(home), os.path.relpath(home, self._homes[of][0]), run_id, number
        )


class _Lead(CommitPart):
    """The model whose manifest is the commit point."""

    def __init__(self, joint: JointCommit, index: int) -> None:
        self._joint, self._index = joint, index

    def begin(self, home: Path, run_id: str, number: int) -> None:
        self._joint.begin(self._index, home, run_id, number)

    def before_point(self) -> dict[str, Any]:
        self._joint.wait_for_others()
        return self._joint.record(self._index)

    def after_point(self, is_due: bool) -> bool:
        self._joint.is_published = is_due
        self._joint.note_written(self._index)
        return is_due

    def publish(self, held: Releasable, publish: Publish) -> None:
        self._joint.publish(self._index, held, publish)

    @property
    def is_over(self) -> bool:
        return self._joint.is_over

    def fail(self, error: BaseException) -> None:
        self._joint.fail(error)


class _Other(_Lead):
    """A model whose generation counts once the lead's is there."""

    def before_point(self) -> dict[str, Any]:
        self._joint.wait_for_begin()
        return self._joint.record(self._index)

    def after_point(self, is_due: bool) -> bool:
        self._joint.note_written(self._index)
        self._joint.wait_for_lead()
        return self._joint.is_published
