from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.agreeing import known_step, line_of
from tests.helpers.ranks import RankPools
from tests.helpers.scale import (
    PAPER,
    RANKS,
    SIZES,
    largest,
    memory_table,
    planned_bytes,
    step_of,
    step_table,
    times_of_layers_over_machines,
)
from zero_offload.hardware.machines import NO_DRIVES, Cluster, agreement_s, share_of_rank

PAGE = Path(__file__).parents[3] / "docs" / "choose" / "scale.md"


@pytest.mark.parametrize("stage", PAPER)
@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_the_paper_beside_fp32_gradients(size: str, stage: int) -> None:
    """On several ranks gradients are fp32: two bytes more of each that a rank keeps, and at stage 1 of its sums."""
    numel = SIZES[size]
    for ranks in RANKS:
        more = 0.0 if ranks == 1 else 2 * numel / ranks if stage > 1 else 2 * numel + 4 * numel / ranks
        assert planned_bytes(numel, ranks, stage) == pytest.approx(PAPER[stage](numel, ranks) + more, rel=1e-3)


def test_ten_times_the_throughput() -> None:
    """Of layers that are divided over machines: 40B on two DGX-2 ran at 5 TFLOPS, and bytes alone give twice that."""
    assert 38 / times_of_layers_over_machines(40e9, 32) == pytest.approx(9.6, abs=0.1)
    assert [round(times_of_layers_over_machines(100e9, gpus), 1) for gpus in (64, 128)] == [6.9, 12.9]


def test_eight_times_the_model() -> None:
    """The abstract's 8 was measured: 170B parameters against some 20B. State alone gives 7."""
    assert largest(2) / largest(0) == pytest.approx(6.8, abs=0.1) and 170e9 < largest(2) < 200e9


@pytest.mark.parametrize("each", [(2, 1), (16, 1), (32, 8)])
def test_a_plan_counts_the_agreement_of_machines(each: tuple[int, int], pools: RankPools) -> None:
    """As the package's own classes do it, but for bytes and what is inside of a machine."""
    ranks, per_machine = each
    planned_s = agreement_s(Cluster(ranks, ranks // per_machine))
    assert known_step(pools, ranks, per_machine).seconds == pytest.approx(planned_s, rel=0.1)
    machine = share_of_rank("h100", NO_DRIVES, Cluster(ranks, ranks // per_machine))
    assert machine.agreement_s == planned_s and agreement_s(Cluster(8, 1)) == 0


def test_a_gpu_computes_more_where_more_share() -> None:
    speeds = [step_of(gpus, 1024).prediction.tokens_per_s / gpus for gpus in (1, 8, 64)]
    assert speeds[0] < speeds[1] < speeds[2]


def test_the_page_shows_the_tables() -> None:
    text = PAGE.read_text()
    assert "\n".join(memory_table()) in text and "\n".join(step_table()) in text


@pytest.mark.parametrize("each", [(4, 1), (16, 1), (16, 8)])
def test_the_page_shows_the_agreement(each: tuple[int, int], pools: RankPools) -> None:
    """Of few ranks: 1,024 take minutes."""
    assert line_of(*each, known_step(pools, *each)) in PAGE.read_text()
