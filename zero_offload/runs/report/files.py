"""The files of a report: a run's page and picture, as far as both can be written.

Never changes a metric. The calls: `write_reports` at a run's end; `write_pages` for a run that has been read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zero_offload.base.errors import CapacityError, ZeroOffloadError
from zero_offload.checkpoint.run_dir import METRICS_FILE, PAGE_FILE, PICTURE_FILE, RUN_FILE
from zero_offload.plan.wear import TBW_USUAL
from zero_offload.runs.reader import Run, read_run
from zero_offload.runs.report.page import write_page
from zero_offload.runs.report.picture import write_picture
from zero_offload.runs.report.summary import require_rows
from zero_offload.storage.files.system import is_not_writable


def write_reports(path: Path, note: Callable[[str], None]) -> dict[str, str | None]:
    """Write page and picture at a run's end, as far as they can be; `note` gets why one cannot. Paths by name.

    Nothing is written where both are newer than what they show: the run was over already.
    """
    files = {"page": path / PAGE_FILE, "report": path / PICTURE_FILE}
    shown = [each.stat().st_mtime_ns for each in (path / RUN_FILE, path / METRICS_FILE) if each.is_file()]
    if all(each.is_file() and each.stat().st_mtime_ns > max(shown, default=0) for each in files.values()):
        return {name: str(each) for name, each in files.items()}
    try:
        pages, failure = write_pages(require_rows(read_run(path)), TBW_USUAL, path, note)
    except ZeroOffloadError as error:
        pages, failure = {"page": None, "report": None}, error
    if failure is not None:
        note(f"no report: {failure}")
    return pages


def write_pages(
    found: Run, tbw: float, out: Path, note: Callable[[str], None]
) -> tuple[dict[str, str | None], ZeroOffloadError | None]:
    """Write page and picture. Their paths in `out`, None where it cannot be written, and the first error.

    That of a run which may only be read is none: its summary is there.
    """
    pages: dict[str, str | None] = {}
    failure: ZeroOffloadError | None = None
    writers: dict[str, Callable[[], Path]] = {
        "page": lambda: write_page(found, tbw, out),
        "report": lambda: write_picture(found, out),
    }
    for name, write in writers.items():
        try:
            pages[name] = str(write())
        except CapacityError as error:  # without matplotlib there is the page
            pages[name] = None
            note(str(error))
        except ZeroOffloadError as error:
            pages[name] = None
            if out == found.path and is_not_writable(error):
                note(f"{error}: give --out DIR")
            else:
                failure = failure or error
    return pages, failure
