from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.published import RUNS, Run, as_table, predict
from zero_offload.hardware.machines import GPUS

FITTED = {run.gpu: run for run in reversed(RUNS)}
"""The first run of each card."""
FAR = {("a100-80", "MPT-7B", 2048), ("a100-40", "MPT-13B", 1024)}
"""Runs that are predicted worse: without recompute, and with little memory beside the gathers."""
PAGE = Path(__file__).parents[3] / "docs" / "choose" / "predictions.md"


@pytest.mark.parametrize("run", FITTED.values(), ids=lambda run: run.gpu)
def test_a_share_is_fitted_on_one_run(run: Run) -> None:
    assert predict(run) == pytest.approx(run.tokens_per_s, rel=0.005)
    share = GPUS[run.gpu].share
    assert share.run.startswith(f"{run.source}, {run.model}") and f" {run.tokens_per_s:,.0f} tokens/s" in share.run
    assert not share.card


@pytest.mark.parametrize(
    "run", [run for run in RUNS if run is not FITTED[run.gpu]], ids=lambda run: f"{run.gpu}-{run.model}-{run.source}"
)
def test_the_other_runs_are_predicted(run: Run) -> None:
    reach = 0.25 if (run.gpu, run.model, run.sequence) in FAR else 0.15
    assert predict(run) == pytest.approx(run.tokens_per_s, rel=reach)


def test_a_card_without_a_run_names_the_card_it_is_taken_for() -> None:
    for name, gpu in GPUS.items():
        if name not in FITTED:
            assert gpu.share == GPUS[gpu.share.card].share._replace(card=gpu.share.card) and gpu.share.card in FITTED


def test_the_page_shows_the_runs() -> None:
    assert "\n".join(as_table()) in PAGE.read_text()
