"""The one thread that runs updates and commits, in the order in which they were submitted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from zero_offload.shards.update_board import UpdateBoard


class Worker:
    """A queue of jobs on one thread. The first error stops everything: it reaches all waiters by the board.

    The queue is short by construction: a step submits one update and at most one commit, and waits for the
    previous update of every unit before it submits.
    """

    def __init__(self, board: UpdateBoard) -> None:
        self._board = board
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zero_offload-update")
        self._jobs: list[Future[None]] = []

    def submit(self, job: Callable[[], None]) -> None:
        self._board.check()
        self._jobs = [each for each in self._jobs if not each.done()]
        try:
            self._jobs.append(self._executor.submit(self._run, job))
        except RuntimeError:
            # The interpreter is shutting down and takes no new work in threads.
            self.drain()
            self._run(job)

    def _run(self, job: Callable[[], None]) -> None:
        self._board.check()
        try:
            job()
        except BaseException as error:
            self._board.fail(error)
            raise

    def drain(self) -> None:
        """Wait until everything submitted is complete. Raises the first error."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()
        self._board.check()

    def shutdown(self) -> None:
        self._executor.shutdown()
