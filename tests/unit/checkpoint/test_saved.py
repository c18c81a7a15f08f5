"""Directories of several ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.helpers.crew import Crew, CrewGroup
from zero_offload.base.errors import ConfigError, StorageError
from zero_offload.checkpoint.saved_generation import open_in_turn
from zero_offload.storage.files.directory import RunDirectory


def test_rank_0_opens_first_and_all_let_go_where_one_cannot(tmp_path: Path) -> None:
    crew = Crew(3, 0)
    calls: list[str] = []

    def first(path: Path) -> RunDirectory:
        calls.append("open")
        return RunDirectory.open(path)

    def then(path: Path) -> RunDirectory:
        calls.append("join")
        if crew.rank == 2 and path.name == "b":
            raise ConfigError("not here")
        return RunDirectory.join(path)

    def work(rank: int) -> None:
        with contextlib.ExitStack() as cleanup:
            paths = [tmp_path / "a", tmp_path / "b"]
            open_in_turn(paths, CrewGroup(crew, rank), cleanup, first, then, is_first=rank == 0)

    assert [type(outcome) for outcome in crew.run(work)] == [StorageError, StorageError, ConfigError]
    assert calls == ["open"] * 2 + ["join"] * 4
    for name in ("a", "b"):
        RunDirectory.open(tmp_path / name).close()
