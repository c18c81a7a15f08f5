"""Refusals of the public functions, and their words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo

Call = Callable[[nn.Module, torch.optim.Optimizer, Path], Any]


def offloaded(**settings: Any) -> tuple[nn.Module, zo.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zo.offload(model, zo.OffloadConfig(**settings))
    return model, zo.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


WITH_OPTIMIZER: dict[str, Call] = {
    "zo.commit": lambda model, optimizer, _: zo.commit(model, optimizer),
    "zo.save_checkpoint": lambda model, optimizer, path: zo.save_checkpoint(model, optimizer, path / "saved"),
    "zo.load_checkpoint": lambda model, optimizer, path: zo.load_checkpoint(model, optimizer, path / "saved"),
    "zo.resume": lambda model, optimizer, _: zo.resume(model, optimizer),
}


@pytest.mark.parametrize("call", WITH_OPTIMIZER)
def test_an_optimizer_of_something_else_is_refused(call: str, tmp_path: Path) -> None:
    model, optimizer = offloaded(nvme=tmp_path / "nvme")
    step(model, optimizer)
    others = [offloaded()[1], torch.optim.AdamW(nn.Linear(8, 8).parameters()), zo.SGD(nn.Linear(8, 8).parameters())]
    for other in others:
        with pytest.raises(zo.ConfigError, match=rf"{call} .* none of which is offloaded .* zo\.AdamW"):
            WITH_OPTIMIZER[call](model, other, tmp_path)
    assert not (tmp_path / "saved").exists()
    zo.close(model)


def test_an_optimizer_of_a_part_of_the_model_will_do(tmp_path: Path) -> None:
    model, _ = offloaded(nvme=tmp_path / "nvme")
    part = zo.AdamW([*model[1].parameters(), *nn.Linear(8, 8).parameters()])
    step(model, part)
    zo.commit(model, part)
    zo.save_checkpoint(model, part, tmp_path / "saved")
    zo.close(model)


def test_a_commit_with_nowhere_to_go_warns_once() -> None:
    model, optimizer = offloaded()
    step(model, optimizer)
    with pytest.warns(UserWarning, match=r"keeps nothing, neither step 1 .*OffloadConfig\(nvme=") as caught:
        zo.commit(model, optimizer)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer)
        zo.commit(model, optimizer)


def test_a_commit_of_what_is_not_to_be_kept_is_silent(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for settings in ({}, {"nvme": tmp_path / "nvme"}):
            model, optimizer = offloaded(durability="scratch", **settings)
            step(model, optimizer)
            zo.commit(model, optimizer)
            zo.close(model)


AFTER_CLOSE: dict[str, Call] = WITH_OPTIMIZER | {
    "forward": lambda model, *_: model(torch.ones(2, 8)),
    "forward of a part": lambda model, *_: model[1](torch.ones(2, 8)),
    "step": lambda model, optimizer, _: optimizer.step(),
    "state_dict": lambda model, *_: model.state_dict(),
    "load_state_dict": lambda model, *_: model.load_state_dict({}),
    "optimizer.state_dict": lambda model, optimizer, _: optimizer.state_dict(),
    "read": lambda model, *_: model[0].weight.sum(),
    "clip_grad_norm_": lambda model, *_: zo.clip_grad_norm_(model, 1.0),
    "clip_grad_value_": lambda model, *_: zo.clip_grad_value_(model, 1.0),
    "no_sync": lambda model, *_: zo.no_sync(model).__enter__(),
    "accumulate": lambda model, *_: zo.accumulate(model, [torch.ones(2, 8)], lambda net, batch: net(batch).sum()),
    "new optimizer": lambda model, *_: zo.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "load_pretrained": lambda model, _, path: zo.load_pretrained(model, path),
    "export_pretrained": lambda model, _, path: zo.export_pretrained(model, path / "out"),
    **{
        f"gathered {kind} {mode}": lambda model, *_, kind=kind, mode=mode: zo.gathered(model, mode, kind).__enter__()
        for kind, mode in [("params", "read"), ("params", "write"), ("master", "read"), ("grads", "read")]
    },
}


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.parametrize("call", AFTER_CLOSE)
def test_what_a_closed_model_is_asked_raises(call: str, place: str, tmp_path: Path) -> None:
    on_disk = {"params": "nvme", "optimizer": "nvme", "nvme": tmp_path / "nvme"}
    model, optimizer = offloaded(**on_disk if place == "nvme" else {})
    step(model, optimizer)
    model(torch.ones(2, 8)).float().sum().backward()
    zo.close(model)
    with pytest.raises(zo.ZeroOffloadError, match=r"this model was closed by zo\.close; build and offload it again"):
        AFTER_CLOSE[call](model, optimizer, tmp_path)


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_a_backward_after_close_raises(place: str, tmp_path: Path) -> None:
    model, _ = offloaded(**{"params": "nvme", "nvme": tmp_path} if place == "nvme" else {})
    loss = model(torch.ones(2, 8)).float().sum()
    zo.close(model)
    with pytest.raises(zo.ZeroOffloadError, match="this model was closed"):
        loss.backward()


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_a_closed_model_has_its_figures_and_its_names(place: str, tmp_path: Path) -> None:
    model, optimizer = offloaded(**{"params": "nvme", "nvme": tmp_path} if place == "nvme" else {})
    step(model, optimizer)
    zo.close(model)
    zo.close(model)
    assert zo.stats(model).step == 1
    assert "0.weight" in repr(model[0].weight) and model[0].weight.shape == (8, 8)
    optimizer.zero_grad()


def resumed(nvme: Path) -> tuple[nn.Module, zo.AdamW]:
    """At step 1 of an earlier run."""
    model, optimizer = offloaded(nvme=nvme)
    step(model, optimizer)
    zo.commit(model, optimizer)
    zo.close(model)
    return offloaded(nvme=nvme, existing="resume")


def test_a_resume_after_steps_is_refused(tmp_path: Path) -> None:
    model, optimizer = resumed(tmp_path)
    assert all(found is not None and found.step == 1 for found in [zo.resume(model, optimizer) for _ in range(2)])
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    state = torch.get_rng_state()
    with pytest.raises(
        zo.ConfigError, match=r"generation of step 1, but this model is at step 2\. .*existing='resume'"
    ):
        zo.resume(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5 and torch.equal(torch.get_rng_state(), state)
    zo.close(model)


def test_a_resume_after_a_checkpoint_of_another_step_is_refused(tmp_path: Path) -> None:
    other, its_optimizer = offloaded()
    for _ in range(3):
        step(other, its_optimizer)
    zo.save_checkpoint(other, its_optimizer, tmp_path / "saved")
    model, optimizer = resumed(tmp_path / "nvme")
    zo.load_checkpoint(model, optimizer, tmp_path / "saved")
    with pytest.raises(zo.ConfigError, match=r"step 1, but this model is at step 3\. .*a checkpoint was loaded"):
        zo.resume(model, optimizer)
    zo.close(model)


def test_the_message_of_grad_leads_to_the_gradient() -> None:
    model, optimizer = offloaded()
    model(torch.ones(2, 8)).float().sum().backward()
    with pytest.raises(zo.ZeroOffloadError, match=r"memory of the gradient of 0\.weight.*param\.grad\.clone"):
        model[0].weight.grad.data_ptr()
    copy = model[0].weight.grad.clone()
    with zo.gathered(model, kind="grads") as grads:
        assert torch.equal(grads["0.weight"], copy) and copy.any()
    optimizer.step()
    assert model[0].weight.grad is None
