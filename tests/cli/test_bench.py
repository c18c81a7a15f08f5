from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zero_offload.cli import bench
from zero_offload.cli.main import main
from zero_offload.hardware.device import HostDevice
from zero_offload.storage.files.engine import EngineSettings
from zero_offload.storage.files.engines import AIOFILES, EngineRates, Pattern, measure

FASTEST = dict.fromkeys(Pattern, 1e15)


def test_the_table_and_what_auto_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--io", str(tmp_path), "--size", "16MiB"]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}: 16 MiB per measurement" in out
    for word in ("threads", "aiofiles", "read", "write", "mixed", "CPU ms/GB", "auto: ", "a checksum takes "):
        assert word in out
    assert os.listdir(tmp_path) == []


def test_json_of_several_directories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that a run never tries may be the fastest. It is shown, and not as the choice of "auto"."""

    def measured(directory: object, candidates: Sequence[EngineSettings], *rest: Any) -> list[EngineRates]:
        found = measure(directory, candidates, *rest)  # type: ignore[arg-type]
        assert AIOFILES in candidates
        return [replace(each, bytes_per_s=FASTEST) if each.settings == AIOFILES else each for each in found]

    monkeypatch.setattr(bench, "measure", measured)
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.mkdir()
    assert main(["bench", "--json", "--size", "16MiB", "--io", *map(str, paths)]) == 0
    found = json.loads(capsys.readouterr().out)["directories"]
    assert [each["path"] for each in found] == list(map(str, paths))
    assert sum(each["weight"] for each in found) == pytest.approx(1)
    for each in found:
        assert each["auto"]["kind"] in ("threads", "io_uring")
        assert all(row["read_bytes_per_s"] > 0 and row["cpu_s_per_gb"] > 0 for row in each["measured"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--io", "/nowhere"], "/nowhere is not a directory; name one on the drive to measure"),
        (["--io", ".", "--size", "1MiB"], "--size 1MiB is too little to measure; give 16 MiB or more"),
        (["--io", ".", "--size", "much"], "much"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_without_an_accelerator_nothing_is_measured(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bench, "compute_device", HostDevice)
    assert main(["bench", "--device", *flags]) == 3
    out, err = capsys.readouterr()
    assert out == "" and "sees no accelerator, so there is none to measure. Install a build of torch" in err
    assert "zero-offload plan --measure" in err and list(tmp_path.iterdir()) == []
