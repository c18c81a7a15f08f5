from __future__ import annotations

import io
import os

import pytest

from zero_offload.runs.progress import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _row(step: int, **extra: object) -> dict[str, object]:
    moved = {"device": 0, "cpu": 0, "nvme": 3 << 20}
    row = {"step": step, "loss": 2.5, "step_s": 0.5, "stall_s": 0.1, "tokens_per_s": 4096.0}
    return row | {"read_bytes": moved, "written_bytes": moved} | extra


def test_a_terminal_sees_one_line_rewritten() -> None:
    out = _Terminal()
    progress = Progress(out, num_steps=3)
    for step in (1, 2, 3):
        progress.step(_row(step))
    progress.note("done")
    text = out.getvalue()
    assert text.count("\r") == 3
    assert text.count("\n") == 2  # the live line is closed once, then the note
    for part in ("step 3/3", "loss 2.500", "0:00 left", "4,096 tokens/s", "20% waiting"):
        assert part in text


def test_activations_are_shown_where_they_move() -> None:
    out = io.StringIO()
    progress = Progress(out, num_steps=2)
    progress.step(_row(1, activation_bytes={"device": 0, "cpu": 0, "nvme": 0}))
    progress.step(_row(2, activation_bytes={"device": 0, "cpu": 0, "nvme": 5 << 20}))
    first, second = out.getvalue().splitlines()
    assert "activations" not in first and second.endswith("| nvme 3 MiB in 3 MiB out | activations: nvme 5 MiB")


def test_the_hidden_share_of_the_update_is_shown() -> None:
    out = io.StringIO()
    progress = Progress(out, num_steps=2)
    progress.step(_row(1, update_s=0.4, exposed_s={"params": 0.1, "update": 0.1}))
    progress.step(_row(2, update_s=0.0, exposed_s={"params": 0.1, "update": 0.0}))
    first, second = out.getvalue().splitlines()
    assert "| 40% waiting | update 75% beside compute |" in first and "| 20% waiting | nvme" in second


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (
            200,
            "step 150/100000 | loss 2.500 val 1.250 | 13:52:05 left | 4,096 tokens/s | 20% waiting | "
            "update 75% beside compute",
        ),
        (80, "step 150/100000 | loss 2.500 val 1.250 | 13:52:05 left | 4,096 tokens/s"),
        (70, "step 150/100000 | loss 2.500 val 1.250 | 13:52:05 left | 20% waiting"),
        (40, "step 150/100000 | loss 2.500 val 1.250"),
        (20, "step 150/100000"),
        (8, ""),
    ],
)
def test_parts_fit_a_terminal_whole(columns: int, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns, 24)))
    out = _Terminal()
    row = _row(150, val_loss=1.25, update_s=0.4, exposed_s={"update": 0.1})
    Progress(out, num_steps=100_000).step(row | {"written_bytes": {}, "read_bytes": {}})
    assert out.getvalue() == "\r\x1b[K" + line


@pytest.mark.parametrize(("step_s", "left"), [(0.1, "0:06"), (59.0, "59:00"), (61.0, "1:01:00"), (3000.0, "2.1 days")])
def test_the_time_left(step_s: float, left: str) -> None:
    out = io.StringIO()
    Progress(out, num_steps=61).step(_row(1, step_s=step_s))
    assert f"| {left} left |" in out.getvalue()


def test_figures_that_a_row_lacks_are_left_out() -> None:
    """As of a loop that neither counts tokens nor says its loss."""
    row = _row(1)
    del row["loss"], row["tokens_per_s"]
    out = io.StringIO()
    Progress(out, num_steps=1).step(row)
    assert out.getvalue() == "step 1/1 | 0:00 left | 20% waiting | nvme 3 MiB in 3 MiB out\n"


def test_a_file_gets_a_plain_line_now_and_then() -> None:
    out = io.StringIO()
    progress = Progress(out, num_steps=100)
    for step in range(1, 41):
        progress.step(_row(step))
    lines = out.getvalue().splitlines()
    assert "\r" not in out.getvalue()
    assert [line.split()[1] for line in lines] == ["1/100", "10/100", "20/100", "30/100", "40/100"]


def test_the_last_validation_loss_stays_in_sight() -> None:
    out = io.StringIO()
    progress = Progress(out, num_steps=20)
    progress.step(_row(7, val_loss=1.25))
    progress.step(_row(20))
    assert out.getvalue().count("val 1.250") == 2


def test_other_ranks_are_silent(capsys: object) -> None:
    progress = Progress(None, num_steps=1)
    progress.step(_row(1))
    progress.note("nothing")
    assert capsys.readouterr().out == ""  # type: ignore[attr-defined]
