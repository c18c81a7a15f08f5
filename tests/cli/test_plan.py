from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zero_offload.cli.main import main
from zero_offload.types import GIB

MEMORY = ["--cpu-memory", "64GiB"]


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", "--json", *MEMORY, *flags])
    return code, json.loads(capsys.readouterr().out)


def test_a_preset_with_everything_on_nvme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--params-tier", "nvme", "--optimizer-tier", "nvme", "--durability", "scratch"]
    code, result = plan(capsys, "--model", "gpt125m", "--nvme", str(tmp_path), *flags)
    count = result["parameters"]
    assert code == 0 and result["fits"] and result["reasons"] == []
    assert count > 80_000_000
    assert result["bytes"]["nvme"]["optimizer"] == result["nvme_written_bytes_per_step"] == 12 * count
    assert result["bytes"]["nvme"]["params"] == 0
    assert result["bytes"]["cpu"]["grads"] == 2 * count


def test_sizes_and_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    code, result = plan(capsys, "--model", "8B", "--ranks", "4", "--device-memory", "24GiB")
    assert code == 0
    assert result["parameters"] == 8 * 10**9
    # The value is part of the optimizer's 12 bytes, and stored once.
    assert result["bytes"]["cpu"]["params"] == 2 * 2 * 10**9
    assert result["bytes"]["cpu"]["optimizer"] == (12 - 2) * 2 * 10**9
    assert result["bytes"]["cpu"]["grads"] == 4 * 2 * 10**9
    assert result["bytes"]["device"]["available"] == 24 * GIB
    assert result["bytes"]["cpu"]["available"] == 64 * GIB


def test_accumulation_and_precision(capsys: pytest.CaptureFixture[str]) -> None:
    _, result = plan(capsys, "--model", "320M", "--accumulate", "2")
    assert result["bytes"]["cpu"]["grads"] == 4 * 320_000_000
    _, result = plan(capsys, "--model", "320M", "--precision", "fp32")
    assert result["bytes"]["cpu"]["params"] == 4 * 320_000_000


@pytest.mark.parametrize(("states", "nbytes"), [("fp32", 12.0), ("bf16", 8.0), ("compact", 5.03125)])
def test_formats_of_states(states: str, nbytes: float, capsys: pytest.CaptureFixture[str]) -> None:
    """The value is 2 of these bytes, and stored once."""
    _, result = plan(capsys, "--model", "320M", "--states", states)
    assert result["bytes"]["cpu"]["optimizer"] == (nbytes - 2) * 320_000_000
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["plan", "--states", "fp8"]))
    assert ended.value.code == 2 and "use 'fp32', 'bf16' or 'compact'" in capsys.readouterr().err


NVME_ROOM = ["--nvme-capacity", "2000GiB", "--nvme", "never-made"]


def test_wear_of_a_drive(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "3200M", *NVME_ROOM, "--params-tier", "nvme", "--optimizer-tier", "nvme"]
    _, result = plan(capsys, *flags, "--step-time", "38.4")
    written = 12 * 3_200_000_000
    assert result["wear"] == {
        "states_bytes_per_step": written,
        "commit_bytes_per_step": 0,
        "is_upper_bound": False,
        "tbw": 600.0,
        "steps_to_tbw": 15625,
        "tb_per_day": 86.4,
        "days_to_tbw": 15625 * 38.4 / 86400,
    }
    _, result = plan(capsys, *flags, "--tbw", "1200")
    assert result["wear"]["steps_to_tbw"] == 31250
    assert result["wear"]["tb_per_day"] is None and result["wear"]["days_to_tbw"] is None


def test_wear_of_commits_and_of_several_drives(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "3200M", *NVME_ROOM, "--commit-every", "10"]
    _, result = plan(capsys, *flags)
    assert result["wear"]["states_bytes_per_step"] == 0
    assert result["wear"]["commit_bytes_per_step"] == 12 * 320_000_000
    _, result = plan(capsys, *flags, "--ranks", "4", "--nvme", "one", "another")
    assert result["wear"]["commit_bytes_per_step"] == 12 * 320_000_000 // 2
    _, result = plan(capsys, *flags[:-1], "auto")
    assert result["wear"]["commit_bytes_per_step"] == 12 * 3_200_000_000
    assert result["wear"]["is_upper_bound"]


def test_wear_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--model", "3200M", *MEMORY, *NVME_ROOM]
    main([*flags, "--optimizer-tier", "nvme"])
    text = capsys.readouterr().out
    assert "each drive is written 35.8 GiB per step: 35.8 GiB of states that rest on it\n" in text
    assert "that is 38.4 TB per 1000 steps; 600 TBW last 15,625 steps (--step-time S says how many days" in text
    main([*flags, "--commit-every", "auto", "--step-time", "38.4", "--tbw", "300"])
    text = capsys.readouterr().out
    assert "35.8 GiB of generations (at most: auto measures how often; every step is counted here)" in text
    assert "that is 86.4 TB per day at 38.4 s per step; 300 TBW last 3.47 days, 7,812 steps" in text
    main([*flags, "--commit-every", "10"])
    assert "per step: 3.58 GiB of generations (of 35.8 GiB every 10 steps)\n" in capsys.readouterr().out
    main(["plan", "--model", "3200M", *MEMORY])
    assert "TBW" not in capsys.readouterr().out


def test_what_does_not_fit_exits_3_with_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "8B", *MEMORY]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8B: 8,000,000,000 parameters in 32 units on 1 rank"
    assert any("GiB missing" in line for line in lines)
    assert any(line.startswith("would fit: optimizer='nvme'") for line in lines)
    assert "it does not fit" in lines


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "gpt9000"], "is no preset; use tiny, small"),
        (["--optimizer-tier", "nvme"], "optimizer='nvme' needs a directory"),
        (["--ranks", "0"], "both must be 1 or more"),
        (["--commit-every", "often"], "commit_every='often' is no positive number of optimizer steps"),
        (["--tbw", "0"], "both must be more than 0"),
        (["--step-time", "-1"], "both must be more than 0"),
        (["--stage", "5", "--precision", "fp8"], "has 2 problems"),
    ],
)
def test_what_makes_no_sense_exits_2(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    assert main(["plan", *flags]) == 2
    assert words in capsys.readouterr().err
