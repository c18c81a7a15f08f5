"""Arguments of the wrong kind are one ConfigError that says what goes there; nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import TinyLM, tokens_of

Call = Callable[[nn.Module, torch.optim.Optimizer], object]
NOT_A_CONFIG = r"write zo.OffloadConfig\(params='cpu'\), or zo.OffloadConfig.from_dict"


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Offloaded, with gradients that wait for a step."""
    model = zo.offload(TinyLM(), zo.OffloadConfig())
    model(tokens_of(0)).backward()
    return model, zo.AdamW(model.parameters())


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch)
    return loss


WRONG: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "offload, a dict": (lambda m, o: zo.offload(nn.Linear(2, 2), {"params": "cpu"}), NOT_A_CONFIG),  # type: ignore[arg-type]
    "offload, no config": (lambda m, o: zo.offload(nn.Linear(2, 2), None), "not None; write zo.OffloadConfig"),  # type: ignore[arg-type]
    "offload, no model": (lambda m, o: zo.offload(None, zo.OffloadConfig()), "takes a torch.nn.Module first, not None"),  # type: ignore[arg-type]
    "plan, a dict": (lambda m, o: zo.plan(nn.Linear(2, 2), {}), f"zo.plan takes an OffloadConfig, .*{NOT_A_CONFIG}"),  # type: ignore[arg-type]
    "plan, tokens": (lambda m, o: zo.plan(nn.Linear(2, 2), zo.OffloadConfig(), tokens="3"), "tokens='3'"),  # type: ignore[arg-type]
    "plan, micro-batches": (
        lambda m, o: zo.plan(nn.Linear(2, 2), zo.OffloadConfig(), micro_batches=0),
        "micro_batches=0: a step has 1 or more",
    ),
    "commit, swapped": (lambda m, o: zo.commit(o, m), r"not a value of type AdamW; write zo.commit\(model, optimizer"),
    "save, swapped": (lambda m, o: zo.save_checkpoint(o, m, "x"), r"write zo.save_checkpoint\(model, optimizer"),
    "load, swapped": (lambda m, o: zo.load_checkpoint(o, m, "x"), r"write zo.load_checkpoint\(model, optimizer"),
    "resume, no optimizer": (lambda m, o: zo.resume(m, None), "are trained. Give the optimizer after the model"),  # type: ignore[arg-type]
    "stats, a number": (lambda m, o: zo.stats(3), "zo.stats takes a torch.nn.Module first, not a value of type int"),  # type: ignore[arg-type]
    "export, no model": (lambda m, o: zo.export_pretrained(None, "x"), "takes a torch.nn.Module first, not None"),  # type: ignore[arg-type]
    "checkpoint, nothing": (lambda m, o: zo.checkpoint(None), "zo.checkpoint takes modules, not a NoneType"),  # type: ignore[type-var]
    "accumulate, swapped": (lambda m, o: zo.accumulate(m, loss_of, [1]), "it got function, then list"),  # type: ignore[arg-type]
    "accumulate, no function": (lambda m, o: zo.accumulate(m, [1], None), "it got list, then NoneType"),  # type: ignore[arg-type]
    "norm, a text": (lambda m, o: zo.clip_grad_norm_(m, "1"), "max_norm='1' is not a number"),  # type: ignore[arg-type]
    "norm, nothing": (lambda m, o: zo.clip_grad_norm_(m, None), "max_norm=None is not a number"),  # type: ignore[arg-type]
    "norm, of what": (lambda m, o: zo.clip_grad_norm_(3, 1.0), "takes a module or parameters, not a value of type int"),  # type: ignore[arg-type]
    "norm, of names": (lambda m, o: zo.clip_grad_norm_(["a"], 1.0), "among these is a value of type str"),  # type: ignore[list-item]
    "norm, another": (lambda m, o: zo.clip_grad_norm_(m, 1.0, norm_type=1.0), r"norm_type=1.0: .* leave it out, or 2"),
    "value, a list": (lambda m, o: zo.clip_grad_value_(m, [1]), r"clip_value=\[1\] is not a number"),  # type: ignore[arg-type]
    "value, nan": (lambda m, o: zo.clip_grad_value_(m, float("nan")), "clip_value=nan is not a number"),
    "gathered, nothing": (lambda m, o: zo.gathered(None).__enter__(), "a module or parameters, not None"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("call", "words"), WRONG.values(), ids=WRONG)
def test_what_goes_there_is_said(call: Call, words: str, trained: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    with pytest.raises(zo.ConfigError, match=words):
        call(*trained)
    # The model is as it was: its gradients still wait.
    with zo.gathered(trained[0], kind="grads") as grads:
        assert grads


def test_torchs_arguments_of_clipping_are_taken() -> None:
    model = zo.offload(TinyLM(), zo.OffloadConfig(precision="fp32"))
    plain = TinyLM()
    for each in (model, plain):
        each(tokens_of(0)).backward()
        assert zo.clip_grad_norm_(each, 1.0, norm_type=2, error_if_nonfinite=True, foreach=False) > 0
        zo.clip_grad_value_(each, 1.0, foreach=False)
    assert zo.clip_grad_norm_(plain, 1.0, norm_type=1.0) > 0
    (model(tokens_of(0)) * float("nan")).backward()
    with pytest.raises(zo.NonFiniteError, match="the norm of the gradients is nan"):
        zo.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    zo.close(model)


@pytest.mark.parametrize("units", ["blocks.0", nn.Linear, ["blocks.0"]])
def test_one_unit_needs_no_list(units: Any) -> None:
    assert zo.plan(TinyLM(), zo.OffloadConfig(), units=units).fits


@pytest.mark.parametrize(
    ("units", "words"),
    [("layers", r"^units: 'layers' is not a module of this TinyLM\n"), (3, "units=3 names no modules")],
)
def test_units_that_are_none(units: Any, words: str) -> None:
    with pytest.raises(zo.ConfigError, match=words):
        zo.plan(TinyLM(), zo.OffloadConfig(), units=units)
