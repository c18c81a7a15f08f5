"""The generation that machines go on from, by what each of them says it has."""

from __future__ import annotations

import pytest

from zero_offload.base.errors import CheckpointError
from zero_offload.checkpoint.format import rank_manifest_name
from zero_offload.checkpoint.spread import HomeView, Kept, Spread, choose_spread


def kept(number: int, num_ranks: int = 2, num_shards: int = 2, ranks: tuple[int, ...] = (), run: str = "run") -> Kept:
    digests = [f"digest {number} {rank}" for rank in range(num_ranks)]
    homes = [{"host": name, "directory": f"/{name}", "ranks": [rank]} for rank, name in enumerate("abcd"[:num_ranks])]
    return Kept(number, number, run, f"generation {number}", num_ranks, num_shards, digests, ranks, homes)


def view(name: str, *generations: Kept, prepared: tuple[Kept, int] | None = None, is_used: bool = True) -> HomeView:
    """`prepared`: of a generation that is not here, the files of a rank."""
    manifests = {}
    if prepared is not None:
        cut, rank = prepared
        manifests = {rank_manifest_name(rank, cut.number): cut.digests[rank]}
    return HomeView(
        f"/{name} on {name}", {f"{each.run_id} {each.number}": each for each in generations}, manifests, is_used
    )


def chosen(*views: HomeView, number: int | None = None, num_columns: int = 1) -> tuple[int, dict[int, int]] | None:
    found = choose_spread(views, num_columns, number)
    return found if found is None else (found.kept.number, dict(found.holders))


def both(number: int) -> tuple[Kept, Kept]:
    """A generation as two machines have it."""
    return kept(number, ranks=(0,)), kept(number, ranks=(1,))


def test_the_newest_that_is_whole() -> None:
    (a1, b1), (a2, b2) = both(1), both(2)
    assert chosen(view("a", a2, a1), view("b", b2, b1)) == (2, {0: 0, 1: 1})
    assert chosen(view("b", b2, b1), view("c"), view("a", a2, a1)) == (2, {0: 2, 1: 0})
    assert chosen(view("a", a2, a1), view("b", b2, b1), number=1) == (1, {0: 0, 1: 1})
    assert chosen(view("a", a2, a1), view("b", b2, b1), number=7) is None
    assert chosen(view("a", is_used=False), view("b", is_used=False)) is None


def test_a_cut_commit_is_passed_over() -> None:
    (a1, b1), (a2, _) = both(1), both(2)
    assert chosen(view("a", a2, a1), view("b", b1, prepared=(a2, 1))) == (1, {0: 0, 1: 1})
    assert chosen(view("a", a1, is_used=False), view("b", prepared=(a1, 1), is_used=False)) is None


def test_twins_have_what_is_gone() -> None:
    replica = kept(3, num_ranks=4, num_shards=2, ranks=(2, 3))
    assert chosen(view("a"), view("b", replica)) == (3, {2: 1, 3: 1})
    half = kept(3, num_ranks=4, num_shards=2, ranks=(3,))
    with pytest.raises(CheckpointError, match="lacks the files of ranks 0 and 2, which were in /a on a and /c on c"):
        chosen(view("d", half))
    # With two columns the ranks of each have a part of the model.
    with pytest.raises(CheckpointError, match="lacks the files of ranks 0 and 1,"):
        chosen(view("b", kept(3, num_ranks=4, num_shards=1, ranks=(2, 3))), num_columns=2)


def test_machines_that_are_not_of_one_run() -> None:
    with pytest.raises(CheckpointError, match="generations of 2 runs: /a on a has 1; /b on b has 5"):
        chosen(view("a", kept(1, ranks=(0, 1))), view("b", kept(5, ranks=(0, 1), run="other")))
    apart = {"a": kept(4, 1, 1, (0,)), "b": kept(4, 1, 1, (0,))}
    views = [HomeView(name, {f"of {name}": each}, {}, True) for name, each in apart.items()]
    with pytest.raises(CheckpointError, match="gone on apart from each other, and each has a generation 4"):
        choose_spread(views, 1, None)
    ahead = HomeView("c", {"of c": kept(5, 1, 1, (0,))}, {}, True)
    assert choose_spread([*views, ahead], 1, None) == Spread("of c", ahead.kept["of c"], {0: 2})


def test_a_drive_that_was_emptied_is_an_error() -> None:
    (a1, _), (a2, _) = both(1), both(2)
    with pytest.raises(
        CheckpointError, match=r"generation 2 lacks the files of rank 1, which were in /b on b\. /a on a"
    ):
        chosen(view("a", a2, a1), view("b", is_used=False))
    with pytest.raises(CheckpointError, match="no generation is whole"):
        chosen(view("a", is_used=False), view("b", is_used=True))
