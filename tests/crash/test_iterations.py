"""A generation has whole iterations, however many steps of however many optimizers one has."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.fresh import run_script
from tests.helpers.iterations import ENDS, LOOPS, Pair, optimizers_of, run, trained
from tests.helpers.pairwise import in_turn
from tests.helpers.reference import read_masters
from zero_offload.checkpoint import generation

SCRIPT = """
import sys
from pathlib import Path
from tests.helpers.iterations import run
where, kind, ends, killed_in = sys.argv[1:]
run(Path(where), kind, ends, 7, int(killed_in))
"""


@in_turn(kind=list(LOOPS), ends=ENDS)
def test_a_kill_within_an_iteration(kind: str, ends: str, tmp_path: Path) -> None:
    """It is trained again from its begin, and the run ends with plain training's bits."""
    killed = run_script(SCRIPT, str(tmp_path), kind, ends, "5")
    assert killed.returncode == 9, killed.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin, model = run(tmp_path, kind, ends, 7)
    assert begin == 5
    found, expected = read_masters(model), trained(kind, 7)
    zo.close(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _open(where: Path, kind: str, **settings: Any) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = Pair()
    config = zo.OffloadConfig(precision="fp32", params="nvme", optimizer="nvme", nvme=where, **settings)
    zo.offload(model, config)
    return model, optimizers_of(model, kind)


def _iterate(model: nn.Module, optimizers: list[torch.optim.Optimizer], kind: str, begin: int, end: int) -> None:
    for number in range(begin, end):
        LOOPS[kind](model, optimizers, number, lambda: None)


@pytest.mark.parametrize("kind", [kind for kind in LOOPS if kind != "accumulate"])
def test_several_optimizers_without_an_end_make_no_generation_and_one_warning(kind: str, tmp_path: Path) -> None:
    model, optimizers = _open(tmp_path, kind)
    with pytest.warns(UserWarning, match=r"zo.commit\(model, optimizer\)") as told:
        _iterate(model, optimizers, kind, 0, 9)
        zo.close(model)
    assert len(told) == 1
    assert not list(tmp_path.glob("generation-*.json"))


def test_the_warning_comes_no_later_than_the_end(tmp_path: Path) -> None:
    model, optimizers = _open(tmp_path, "two after one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _iterate(model, optimizers, "two after one", 0, 1)
    with pytest.warns(UserWarning, match="2 optimizers step this model"):
        zo.close(model)
    assert not list(tmp_path.glob("generation-*.json"))


def test_one_optimizer_without_an_end_has_an_iteration_per_step(tmp_path: Path) -> None:
    """Optimizers that replace each other are one."""
    model, optimizers = _open(tmp_path, "accumulate")
    _iterate(model, optimizers, "accumulate", 0, 2)
    others = optimizers_of(model, "accumulate")
    _iterate(model, others, "accumulate", 2, 5)
    zo.close(model)
    model, optimizers = _open(tmp_path, "accumulate", existing="resume")
    assert (found := zo.resume(model, optimizers[0])) is not None and found.step == 5
    zo.close(model)


def test_steps_of_one_optimizer_are_iterations_however_rare_commits_are(tmp_path: Path) -> None:
    model, optimizers = _open(tmp_path, "accumulate")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for begin in (0, 2):
            _iterate(model, optimizers, "accumulate", begin, begin + 2)
            zo.commit(model, optimizers[0])
        _iterate(model, optimizers, "accumulate", 4, 5)
        assert zo.stats(model).step == 5
    zo.close(model)
    model, optimizers = _open(tmp_path, "accumulate", existing="resume")
    assert (found := zo.resume(model, optimizers[0])) is not None and found.step == 4
    zo.close(model)


def test_rows_that_count_steps_leave_steps_iterations(tmp_path: Path) -> None:
    """A row may stand for several steps."""
    model, optimizers = _open(tmp_path / "swap", "accumulate")
    with zo.RunLog(tmp_path / "log", model) as log:
        for number in range(5):
            _iterate(model, optimizers, "accumulate", number, number + 1)
            if number % 2:
                log.step(number + 1)
    zo.close(model)
    model, optimizers = _open(tmp_path / "swap", "accumulate", existing="resume")
    assert (found := zo.resume(model, optimizers[0])) is not None and found.step == 5
    zo.close(model)


def test_rows_that_end_iterations_of_several_optimizers_number_the_generation(tmp_path: Path) -> None:
    kind = "two after one"
    model, optimizers = _open(tmp_path / "swap", kind)
    with warnings.catch_warnings(), zo.RunLog(tmp_path / "log", model) as log:
        warnings.simplefilter("ignore")  # before the first row nothing has ended an iteration
        for number in range(9):
            _iterate(model, optimizers, kind, number, number + 1)
            if number % 3 == 2:
                log.step(number + 1)
    zo.close(model)
    model, optimizers = _open(tmp_path / "swap", kind, existing="resume")
    assert (found := zo.resume(model, optimizers[0])) is not None and found.step == 9
    zo.close(model)


def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations of an earlier version: steps of all optimizers are added up, and nothing says so."""
    original = generation.GenerationKeeper._global_payload

    def payload(*args: Any) -> dict[str, Any]:
        written = original(*args)
        written["step"] *= 2
        del written["ended_by"]
        return written

    monkeypatch.setattr(generation.GenerationKeeper, "_global_payload", payload)


def test_a_generation_that_adds_up_steps_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, where = "two after one", tmp_path / "swap"
    with monkeypatch.context() as patches:
        _as_before(patches)
        model, optimizers = _open(where, kind)
        for number in range(3):
            _iterate(model, optimizers, kind, number, number + 1)
            zo.commit(model, optimizers[0])
        zo.save_checkpoint(model, optimizers[0], tmp_path / "saved")
        zo.close(model)
    model, optimizers = _open(where, kind, existing="resume")
    for call in (
        lambda: zo.resume(model, optimizers[0]),
        lambda: zo.RunLog(tmp_path / "log", model),
    ):
        with pytest.raises(zo.ConfigError, match=r"added up.*stepped 3 times, another one 3 times.*step=N"):
            call()
    with pytest.raises(zo.ConfigError, match="a whole number from 0 up"):
        zo.resume(model, optimizers[0], step=-1)
    with pytest.raises(zo.ConfigError, match=r"added up.*step=N of zo.load_checkpoint"):
        zo.load_checkpoint(model, optimizers[0], tmp_path / "saved")
    found = zo.resume(model, optimizers[0], step=3)
    assert found is not None and found.step == 3
    with zo.RunLog(tmp_path / "log", model) as log:
        assert log.committed_step == 3
    _iterate(model, optimizers, kind, 3, 4)
    zo.commit(model, optimizers[0])
    zo.close(model)
    model, optimizers = _open(where, kind, existing="resume")
    assert (found := zo.resume(model, optimizers[0])) is not None and found.step == 4
    zo.close(model)


def test_a_checkpoint_of_several_optimizers_without_an_end_has_no_count(tmp_path: Path) -> None:
    model, optimizers = _open(tmp_path / "swap", "two after one")
    with pytest.warns(UserWarning, match="2 optimizers step this model"):
        _iterate(model, optimizers, "two after one", 0, 2)
    zo.save_checkpoint(model, optimizers[0], tmp_path / "saved")
    with pytest.raises(zo.ConfigError, match=r"several optimizers.*step=N of zo.load_checkpoint"):
        zo.load_checkpoint(model, optimizers[0], tmp_path / "saved")
    assert zo.load_checkpoint(model, optimizers[0], tmp_path / "saved", step=2).step == 2
    zo.commit(model, optimizers[0])
    assert zo.stats(model).step == 2
    zo.close(model)
