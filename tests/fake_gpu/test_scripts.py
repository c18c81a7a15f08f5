"""Programs of other tests: adapters that come later, dtypes of modules, torch's defaults, late commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zero_offload as zo
from tests.fake_gpu.device import TYPE
from tests.helpers.late_writes import Gate, make_writes_late
from tests.helpers.pairwise import full
from tests.helpers.scripts import run_offloaded, run_plain
from tests.parity import test_adoption, test_commits, test_defaults, test_module_dtypes

pytestmark = pytest.mark.usefixtures("late")

STREAMED: dict[str, Any] = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "device_memory": "10MiB"}
ON_DEVICE: dict[str, Any] = {"params": "device", "grads": "device", "optimizer": "device"}


@pytest.mark.parametrize("settings", [{"activations": "cpu"}, STREAMED, ON_DEVICE], ids=["cpu", "nvme", "device"])
def test_a_model_that_grows(settings: dict[str, Any], nvme: Path) -> None:
    script, make = test_adoption.grows_twice, test_adoption.make
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, **settings)
    test_adoption.check(run_offloaded(script, make, config), run_plain(script, make))


@pytest.mark.parametrize("settings", [{"activations": "cpu"}, STREAMED], ids=["cpu", "nvme"])
def test_what_is_adopted_may_be_on_the_device(
    settings: dict[str, Any], nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As peft leaves adapters: where their layer is."""
    adapt = test_adoption.adapt

    def adapt_there(model: Any, name: str) -> list[nn.Parameter]:
        adapt(model, name)
        adapters = [getattr(block, name) for block in model.blocks]
        for each in adapters:
            each.scale = nn.Parameter(each.scale.to(TYPE), requires_grad=False)
            each.down.to(TYPE), each.up.to(TYPE)
        return [param for each in adapters for param in (*each.down.parameters(), *each.up.parameters())]

    script, make = test_adoption.grows_twice, test_adoption.make
    expected = run_plain(script, make)
    monkeypatch.setattr(test_adoption, "adapt", adapt_there)
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, **settings)
    test_adoption.check(run_offloaded(script, make, config), expected)


@pytest.mark.parametrize("params", ["cpu", "device", "nvme"])
def test_modules_with_dtypes_of_their_own(params: str, nvme: Path) -> None:
    steps = test_module_dtypes.STEPS
    settings = {"params": params, "optimizer": "nvme", "grads": "nvme", "nvme": nvme}
    found = test_module_dtypes.train_offloaded(0, 1, 33, settings, steps)
    test_module_dtypes.check(found, test_module_dtypes.train_by_hand(33, steps))


@pytest.mark.parametrize(
    ("default", "precision", "optimizer"),
    [
        ("bfloat16", "fp16", "AdamW"),
        full("float64", "compact", "Lion"),
        ("torch.device", "bf16", "Adagrad"),
    ],
)
def test_torchs_defaults_change_nothing(default: str, precision: str, optimizer: str, tmp_path: Path) -> None:
    expected = test_defaults.story(None, tmp_path / "a", "device", precision, optimizer)
    actual = test_defaults.story(default, tmp_path / "b", "device", precision, optimizer)
    assert actual.keys() == expected.keys()
    assert [path for path, each in expected.items() if actual[path] != each] == []


@pytest.mark.parametrize("tiers", [("cpu", "cpu"), ("device", "cpu"), ("device", "nvme")], ids="-".join)
def test_commits_whose_writes_are_late(tiers: tuple[str, str], nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"params": tiers[0], "optimizer": tiers[1], "precision": "bf16"}
    losses, masters = test_commits.plain("bf16")
    with monkeypatch.context() as patches:
        make_writes_late(patches)
        assert test_commits.train_with_late_commits(nvme, Gate(patches), settings) == losses
    test_commits.assert_are_generations(nvme, masters, settings)
