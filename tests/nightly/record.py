"""Which checks of one state of the source have ended, and how: lines of JSON in `build/nightly`."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "nightly"
SOURCES = ("zero_offload", "csrc", "tests", "benchmarks", "examples", "docs", "README.md", "setup.py", "pyproject.toml")
RECORDS_OF_RUNS = ROOT / "docs" / "TEST-ALL.md"
SUFFIXES = {".py", ".cpp", ".h", ".inl", ".toml", ".md", ".css", ".js", ".xz", ".json"}
FAILED = "failed"


def digest() -> str:
    """Of all that a check reads, but for the page that says how checks have ended."""
    found = hashlib.sha256()
    for name in SOURCES:
        top = ROOT / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.suffix in SUFFIXES and path != RECORDS_OF_RUNS:
                found.update(f"{path.relative_to(ROOT)}\0".encode())
                found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


class Record:
    """Checks of one part, each with its last outcome. A line is written as a check ends, so that a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, str] = {}
        self.total: int | None = None
        """Checks of the part; None before they are collected."""
        self.seconds = 0.0
        if path.exists():
            for line in path.read_text().splitlines():
                self._take(json.loads(line))

    @classmethod
    def of(cls, part: str) -> Record:
        return cls(FOLDER / digest() / f"{part}.jsonl")

    @property
    def path(self) -> Path:
        return self._path

    def _take(self, row: dict[str, object]) -> None:
        match row:
            case {"check": str(check), "outcome": str(outcome)}:
                self._outcomes[check] = outcome
            case {"total": int(total)}:
                self.total = total
            case {"seconds": float(seconds)}:
                self.seconds += seconds

    def _add(self, **row: object) -> None:
        self._take(row)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def end(self, check: str, outcome: str) -> None:
        """`outcome`: "passed", "skipped", "failed"."""
        self._add(check=check, outcome=outcome)

    def collect(self, total: int) -> None:
        self._add(total=total)

    def spend(self, seconds: float) -> None:
        self._add(seconds=seconds)

    def is_done(self, check: str) -> bool:
        """True if the check has ended and has not failed."""
        return self._outcomes.get(check, FAILED) != FAILED

    @property
    def is_complete(self) -> bool:
        """True if each check of the part has ended."""
        return self.total is not None and len(self._outcomes) >= self.total

    @property
    def failed(self) -> list[str]:
        return [check for check, outcome in self._outcomes.items() if outcome == FAILED]

    def summary(self) -> str:
        """As "12 passed, 1 failed of 40 in 3:20"."""
        counts = Counter(self._outcomes.values())
        said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items(), key=lambda each: -each[1]))
        left = "" if self.is_complete else f" of {self.total if self.total is not None else 'an unknown number'}"
        minutes, seconds = divmod(round(self.seconds), 60)
        return f"{said or 'none ended'}{left} in {minutes}:{seconds:02}"
