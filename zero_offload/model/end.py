"""How a model ends: closed by the program, dropped by it, or with the interpreter.

Owns the order in which work, commits, threads, files and locks end. The finalizer of a dropped `ModelRuntime` has this
object, which therefore must not refer to the runtime. A model ends once: what comes later does nothing.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.threads import THREAD_PREFIX, FirstError, UpdateInterrupted, may_join, start
from zero_offload.checkpoint.run_files import RunFiles
from zero_offload.model.commits import Commits
from zero_offload.runtime.grads.gradients import Gradients
from zero_offload.runtime.pass_tracker import ModelLife
from zero_offload.runtime.ranks.collectives import CommitGroup
from zero_offload.storage.shards.store import ShardStore


@dataclass(frozen=True)
class ModelEnd:
    """The end of one model."""

    life: ModelLife
    errors: FirstError
    grads: Gradients
    commits: Commits
    store: ShardStore
    ranks: CommitGroup
    files: RunFiles

    def close(self) -> None:
        """Finish updates, make the last step a generation, release files and locks."""
        if self.life.is_closed:
            return
        self._stop_use()
        commits, ranks, is_raised = self.commits, self.ranks, sys.exc_info()[1] is not None
        whole = together = same = False
        try:
            self.store.read_lazy()
            commits.drop_unresumable()
            try:
                # First of all: a commit under way talks to the other ranks, on the same group.
                commits.drain()
                whole = True
            except UpdateInterrupted:
                pass  # the program has had its KeyboardInterrupt
            finally:
                if not whole:
                    commits.forget_record()
                # An exception may be one rank's affair: then the others do not come here, and wait for it elsewhere.
                together = ranks.all_come("zo.close, which all ranks call", surely=whole and not is_raised)
                # It may also have struck ranks at different steps.
                same = together and len(set(ranks.gather_digests(f"{commits.pending_step:016x}"))) == 1
            if same:
                commits.launch_latest()
            if whole:
                commits.drain()
        finally:
            try:
                commits.shutdown()
            finally:
                # When one rank returns, none holds the directory's lock: it can be opened again at once.
                with ranks.together() if together else nullcontext():
                    self.files.close()

    def close_at_exit(self, close: Callable[[], None]) -> None:
        """`close` the model where this rank can do that alone. With several ranks a commit needs all of them, and an
        exit may be one rank's failure: nothing is waited for."""
        if self.ranks.world_size > 1 or not self.life.is_in_own_process:
            return
        self.store.drop_lazy()  # the program is over: a state dict that it still holds is not read for that
        was_raised = self.errors.is_raised
        try:
            close()
        except ZeroOffloadError as error:
            if not was_raised:  # else the program has had it, and the user
                _say(f"the last step is not made a generation: {error}")

    def drop(self) -> None:
        """End a model that nothing refers to any more; its directory is free when this returns.

        The garbage collector may call this on one of the model's own threads, which cannot wait for itself. It may also
        call this inside of Python's `threading`, where waiting for a thread takes a lock that this thread has. Then the
        end comes on a thread of its own, later.
        """
        if self.life.is_closed or not self.life.is_in_own_process:
            return
        self._stop_use()
        if not may_join():
            _thread.start_new_thread(self._end_dropped, ())
        elif threading.current_thread().name.startswith(THREAD_PREFIX):
            start(threading.Thread(target=self._end_dropped, name="zero-offload-end"))
        else:
            self._end_dropped()

    def _end_dropped(self) -> None:
        """Finish what is under way, and release files and locks. Nothing more is committed: an exception between `step`
        and `zo.commit` drops a model too, and other ranks may be elsewhere."""
        was_raised, step = self.errors.is_raised, self.commits.pending_step
        try:
            self.store.read_lazy()
            self.commits.forget_record()
            with suppress(UpdateInterrupted):
                self.commits.drain()
            if step and self.files.keeper is not None:
                _say(f"step {step} is not made a generation: the model was dropped. Call zo.close(model) to keep it")
        except ZeroOffloadError as error:
            if not was_raised:  # else the program has had it, and the user
                _say(f"an error after the model was dropped: {error}")
        finally:
            try:
                self.commits.shutdown()
            finally:
                self.files.close()

    def _stop_use(self) -> None:
        """Gradients that are on their way from a device have come, and more are not expected."""
        self.life.is_closed = True
        self.grads.cancel()


def _say(text: str) -> None:
    print(f"zero_offload: {text}", file=sys.stderr)
