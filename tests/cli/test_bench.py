from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zero_offload.cli.main import main


def test_the_table_and_what_auto_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--io", str(tmp_path), "--size", "16MiB"]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}: 16 MiB per measurement" in out
    for word in ("threads", "aiofiles", "read", "write", "mixed", "CPU ms/GB", "auto: ", "a checksum takes "):
        assert word in out
    assert os.listdir(tmp_path) == []


def test_json_of_several_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.mkdir()
    assert main(["bench", "--json", "--size", "16MiB", "--io", *map(str, paths)]) == 0
    found = json.loads(capsys.readouterr().out)["directories"]
    assert [each["path"] for each in found] == list(map(str, paths))
    assert sum(each["weight"] for each in found) == pytest.approx(1)
    for each in found:
        assert each["auto"]["kind"] in ("threads", "io_uring")
        assert each["auto"]["reason"].startswith("measured here: reads ")
        assert all(row["read_bytes_per_s"] > 0 and row["cpu_s_per_gb"] > 0 for row in each["measured"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--io", "/nowhere"], "/nowhere is no directory; name one on the drive to measure"),
        (["--io", ".", "--size", "1MiB"], "--size 1MiB is too little to measure; give 16 MiB or more"),
        (["--io", ".", "--size", "much"], "much"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
