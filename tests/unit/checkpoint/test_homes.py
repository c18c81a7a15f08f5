"""Homes of a run, by the first rank of each."""

from __future__ import annotations

from tests.helpers.crew import Crew, CrewGroup
from zero_offload.checkpoint.homes import Homes


def test_two_machines_of_one_name_have_a_word_each() -> None:
    crew = Crew(3, 0)

    def work(rank: int) -> list[tuple[str, object]]:
        homes = Homes(CrewGroup(crew, rank), (0, 0, 2), ("localhost",) * 3, ("/drive/run",) * 3)
        return homes.gather(f"word {rank}")

    name = "/drive/run on localhost"
    assert crew.run(work) == [[(name, "word 0"), (name, "word 2")]] * 3
