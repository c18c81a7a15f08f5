"""A loop around `zo.steps` that is killed at each of its lines sees the batches of an undisturbed run."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.loops import LINES, Loop, Spec, finish
from tests.helpers.pairwise import full, pairwise

FACTORS: dict[str, list[Any]] = {
    "loader": ["order", "generator", "distributed", "list", "stream", "state"],
    "workers": [0, 2],
    "tier": ["nvme", "cpu"],
    "accumulate": [2, 1],
    "optimizers": [2, 1],
    "ranks": [1, 2],
}
FEW = [
    ("order", 2, "nvme", 2, 2, 2),
    ("stream", 0, "cpu", 1, 1, 1),
    ("state", 0, "cpu", 1, 1, 2),
]
REST = [each for row in pairwise(FACTORS) if (each := tuple(row.values())) not in FEW]


@pytest.mark.parametrize(tuple(FACTORS), [*FEW, *(full(*each) for each in REST)])
def test_killed_at_each_line_a_loop_sees_what_an_undisturbed_one_does(
    loader: str, workers: int, tier: str, accumulate: int, optimizers: int, ranks: int, tmp_path: Path
) -> None:
    lines = [line for line in LINES if optimizers > 1 or line != "step"]
    spec = Spec(str(tmp_path / "killed"), len(lines) + 2, loader, workers, tier, accumulate, optimizers, ranks)
    for number, line in enumerate(lines):
        victim = number % ranks
        codes = Loop(replace(spec, die_at=(number + 2, line, victim))).codes()
        assert codes[victim] == -signal.SIGKILL, (line, codes)
    expected = finish(replace(spec, folder=str(tmp_path / "undisturbed")))
    assert finish(spec) == expected
    assert all(sorted(rows) == list(range(1, spec.num_steps + 1)) for rows in expected)


def test_a_second_start_says_where_it_goes_on(tmp_path: Path) -> None:
    spec = Spec(str(tmp_path / "run"), 8, accumulate=2)
    finish(spec)
    assert spec.said(0).read_text() == ""
    finish(replace(spec, num_steps=9))
    assert re.search(
        r"zero_offload: zo.steps goes on with step 9 of 9, from generation 8 of step 8, committed 20\S+ \S+, "
        r"behind batch 4 of epoch 2 of its DataLoader\n",
        spec.said(0).read_text(),
    )
    finish(replace(spec, num_steps=9))
    assert "zo.steps has no further step of 9, from generation 9 of step 9" in spec.said(0).read_text()
