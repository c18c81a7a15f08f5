"""A plugin of pytest: tests that have ended before are left out, and each that ends is noted.

`NIGHTLY_RECORD` names the record. Workers of xdist must collect alike, so each reads the copy that is made before they
start, `NIGHTLY_BEFORE`; the process that starts them writes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.nightly.record import FAILED, Record

RECORD = Path(os.environ["NIGHTLY_RECORD"])
BEFORE = RECORD.with_suffix(".before")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        BEFORE.parent.mkdir(parents=True, exist_ok=True)
        if RECORD.exists():
            shutil.copy(RECORD, BEFORE)
        else:
            BEFORE.unlink(missing_ok=True)
        config.pluginmanager.register(_Writer(), "nightly-writer")
    config.pluginmanager.register(_Chooser(config), "nightly-chooser")


class _Chooser:
    def __init__(self, config: pytest.Config) -> None:
        self._before = Record(BEFORE)
        self._is_first = getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._is_first and self._before.total != len(items):
            Record(RECORD).collect(len(items))
        done = [item for item in items if self._before.is_done(item.nodeid)]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if not self._before.is_done(item.nodeid)]


class _Writer:
    """In the process that all reports come to."""

    def __init__(self) -> None:
        self._record = Record(RECORD)
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._outcomes.get(report.nodeid)
        if before is None or report.failed or (report.skipped and before != FAILED):
            self._outcomes[report.nodeid] = report.outcome
        if report.when == "teardown":
            self._record.end(report.nodeid, self._outcomes.pop(report.nodeid))
