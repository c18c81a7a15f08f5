"""A write of the program to a frozen model is state: it can be committed without an optimizer, and comes back."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zero_offload as zo
from tests.helpers import bases
from tests.helpers.disk import drain, runtime
from tests.helpers.fresh import run_script
from zero_offload.base.types import Tier

SCRIPT = """
import sys
from pathlib import Path
from tests.crash.test_frozen import average
average(Path(sys.argv[1]), 6, 4)
"""


def _open(where: Path, *, frozen: bool = True, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).requires_grad_(not frozen)
    choices = {"precision": "fp32", "params": "nvme", "existing": "resume"} | settings
    return zo.offload(model, zo.OffloadConfig(nvme=where, **choices))


def _values(model: nn.Module) -> list[torch.Tensor]:
    with zo.gathered(model):
        return [param.detach().clone() for param in model.parameters()]


def _write(model: nn.Module, number: int) -> None:
    with zo.gathered(model, mode="write"):
        for index, param in enumerate(model.parameters()):
            param.lerp_(torch.full_like(param, float(number + index)), 0.1)


def average(where: Path, num_iterations: int, killed_in: int = -1) -> tuple[int, list[torch.Tensor]]:
    model = _open(where)
    found = zo.resume(model)
    begin = 0 if found is None else found.step
    assert found is None or found.extra == {"next": begin}
    for number in range(begin, num_iterations):
        _write(model, number)
        if number == killed_in:
            drain(model)
            os._exit(9)
        zo.commit(model, extra={"next": number + 1})
    values = _values(model)
    zo.close(model)
    return begin, values


def test_a_kill_behind_a_write(tmp_path: Path) -> None:
    killed = run_script(SCRIPT, str(tmp_path / "killed"), environment=os.environ)
    assert killed.returncode == 9, killed.stderr
    begin, values = average(tmp_path / "killed", 6)
    assert begin == 4
    expected = average(tmp_path / "whole", 6)[1]
    assert all(map(torch.equal, values, expected))


@pytest.mark.parametrize("every", [2, "2min", "auto"])
@pytest.mark.parametrize("tier", ["nvme", "cpu"])
def test_what_is_committed_comes_back(every: int | str, tier: str, tmp_path: Path) -> None:
    """A clock counts steps, which a frozen model has none of: each of its commits is due then."""
    model = _open(tmp_path, params=tier, commit_every=every)
    for number in range(2):
        _write(model, number)
        zo.commit(model)
    expected = _values(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zo.close(model)
    again = _open(tmp_path, params=tier)
    assert (found := zo.resume(again)) is not None and found.step == 2
    assert all(map(torch.equal, _values(again), expected))
    zo.close(again)


def test_what_is_not_committed_is_told(tmp_path: Path) -> None:
    for words in ("no generation has what was written", "goes on from the generation committed last"):
        model = _open(tmp_path)
        _write(model, 1)
        with pytest.warns(UserWarning, match=words):
            zo.close(model)
        model = _open(tmp_path)
        zo.commit(model)
        zo.close(model)


def _write_in_place(model: nn.Module, number: int) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), number + 1)


def _load(model: nn.Module, number: int) -> None:
    model.load_state_dict({name: value + number for name, value in model.state_dict().items()})


def _load_parts(model: nn.Module, number: int) -> None:
    state = model.state_dict()
    checkpoint = {name: torch.full(value.shape, float(number)) for name, value in state.items()}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(checkpoint, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)


REFUSED = (zo.CapacityError, dcp.api.CheckpointException)
"""The second has the first one's text."""
WRITES = {"gathered": _write, "in place": _write_in_place, "state dict": _load, "dcp": _load_parts}


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
@pytest.mark.parametrize("how", WRITES)
def test_room_for_a_written_section_is_made_sure_of_before_the_change(how: str, tier: str, tmp_path: Path) -> None:
    """The first commit names its slot; a further write needs another one."""
    capacity = _planned(tmp_path / "plan", tier)
    model = _open(tmp_path / "run", params=tier, nvme_capacity=capacity)
    WRITES[how](model, 1)
    zo.commit(model)
    expected = _values(model)
    with pytest.raises(REFUSED, match=r"Nothing is written"):
        WRITES[how](model, 2)
    assert all(map(torch.equal, _values(model), expected))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if how == "dcp" else "error")  # a load had begun
        zo.close(model)
    model = _open(tmp_path / "run", params=tier)
    assert (found := zo.resume(model)) is not None and found.step == 1
    assert all(map(torch.equal, _values(model), expected))
    WRITES[how](model, 2)
    zo.commit(model)
    expected = _values(model)
    zo.close(model)
    model = _open(tmp_path / "run", params=tier)
    assert all(map(torch.equal, _values(model), expected))
    zo.close(model)


@pytest.mark.parametrize("how", WRITES)
def test_a_base_that_is_written_has_slots_of_ours(how: str, tmp_path: Path) -> None:
    """The user's files stay as they are, and so do values where there is no room."""
    folder = bases.write_base(tmp_path / "base")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def open_base(nvme: Path, **settings: Any) -> nn.Module:
        with zo.deferred_init(values="skip"):
            model = bases.Adapted().requires_grad_(False)
        zo.load_pretrained(model, folder)
        return zo.offload(model, bases.settings(nvme, existing="resume", **settings))

    small = open_base(tmp_path / "small", nvme_capacity=4096)
    expected = _values(small)
    with pytest.raises(REFUSED, match=r"Nothing is written"):
        WRITES[how](small, 1)
    assert all(map(torch.equal, _values(small), expected))
    zo.close(small)
    for number in range(2):
        model = open_base(tmp_path / "large")
        if number:
            assert (found := zo.resume(model)) is not None and found.step == number
            assert all(map(torch.equal, _values(model), expected))
        WRITES[how](model, number + 1)
        expected = _values(model)
        zo.commit(model)
        zo.close(model)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def _planned(where: Path, tier: str) -> int:
    model = _open(where, params=tier)
    found = runtime(model).sizes.plan.used_bytes(Tier.NVME)
    zo.close(model)
    return found


def test_a_checkpoint_of_a_frozen_model(tmp_path: Path) -> None:
    model = _open(tmp_path / "swap")
    _write(model, 1)
    expected = _values(model)
    zo.save_checkpoint(model, None, tmp_path / "saved")
    zo.commit(model)
    zo.close(model)
    other = _open(tmp_path / "other")
    zo.load_checkpoint(other, None, tmp_path / "saved")
    assert all(map(torch.equal, _values(other), expected))
    zo.commit(other)
    zo.close(other)


def test_a_trained_model_needs_its_optimizer(tmp_path: Path) -> None:
    model = _open(tmp_path, frozen=False)
    for call in (
        lambda: zo.commit(model),
        lambda: zo.resume(model),
        lambda: zo.save_checkpoint(model, None, tmp_path / "saved"),
    ):
        with pytest.raises(zo.ConfigError, match="without an optimizer is for frozen models"):
            call()
    zo.close(model)
