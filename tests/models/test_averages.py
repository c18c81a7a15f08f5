"""torch's averages of weights over an offloaded model, in memory and on tiers, to the bits of plain torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import zero_offload as zo
from tests.helpers.averages import TIERS, Student, follow, same, settings, trained
from tests.helpers.models import build, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.reference import read_masters

KINDS: dict[str, dict[str, Any]] = {
    "mean": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "swa": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "function": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "buffers": {"use_buffers": True, "multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "device": {"device": torch.device("cpu")},
}
_READS = ("mean", "function", "device")
"""Kinds that compute with the model's values before they write: those have its compute dtype, as in torch."""


def averages(tier: str, precision: str, where: str, kind: str, folder: Path) -> tuple[Any, Any]:
    """The average of an offloaded model, in memory or offloaded in fp32, and that of a plain one with its values."""
    model = zo.offload(build(Student), settings(tier, folder / "model", precision))
    in_16_bits = precision == "bf16" and (where == "memory" or kind in _READS)
    shadow = build(Student)
    if in_16_bits:
        shadow.lm.bfloat16()
        shadow.frozen.bfloat16()
    follow(shadow, model)
    if where == "memory":
        found, expected = (swa_utils.AveragedModel(each, **KINDS[kind]) for each in (model, shadow))
    else:
        # In fp32, whatever the model computes in.
        found, expected = (
            swa_utils.AveragedModel(build(Student).requires_grad_(False), **KINDS[kind]) for _ in range(2)
        )
        zo.offload(found, settings(tier, folder / "average", "fp32"))
    if in_16_bits:
        for each in (found, expected):
            each.n_averaged.fill_(1)  # else they begin with a copy, which takes the master

    def update() -> None:
        follow(shadow, model)
        found.update_parameters(model)
        expected.update_parameters(shadow)

    trained(model, update)
    return found, expected


@in_turn(tier=TIERS, precision=["fp32", "bf16"], where=["memory", "tiers"], kind=list(KINDS))
def test_averages_of_torch(tier: str, precision: str, where: str, kind: str, tmp_path: Path) -> None:
    found, expected = averages(tier, precision, where, kind, tmp_path)
    assert same(found, expected)
    if kind == "ema" and (precision == "fp32" or where == "tiers"):
        for each in (found, expected):
            swa_utils.update_bn([tokens_of(step) for step in range(5, 8)], each)
        assert same(found, expected)
        assert found(tokens_of(9)).item() == expected(tokens_of(9)).item()


@pytest.mark.parametrize("form", ["loop", "views", "foreach"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_copy_in_fp32_averages_masters(tier: str, precision: str, form: str, tmp_path: Path) -> None:
    model = zo.offload(build(Student), settings(tier, tmp_path / "model", precision))
    teacher = zo.copy(model, settings(tier, tmp_path / "teacher", "fp32"), kind="frozen")
    plain = build(Student).requires_grad_(False)
    follow(plain, model)
    shadow = copy.deepcopy(plain)

    def update() -> None:
        follow(shadow, model)
        with torch.no_grad():
            for average, source in ((teacher, model), (plain, shadow)):
                averaged, given = list(average.parameters()), list(source.parameters())
                if form == "foreach":
                    torch._foreach_lerp_(averaged, given, 0.01)
                for t, s in zip(averaged, given, strict=True) if form != "foreach" else ():
                    (t.data.lerp_(s.data, 0.01) if form == "views" else t.lerp_(s, 0.01))

    trained(model, update)
    found = read_masters(teacher)
    assert all(torch.equal(found[name], param) for name, param in plain.named_parameters())
    assert teacher.eval()(tokens_of(9)).item() == plain.eval()(tokens_of(9)).item()
    zo.close(model)
    zo.close(teacher)


def test_values_in_16_bits_without_a_master_are_widened_beside_fp32(tmp_path: Path) -> None:
    frozen = [nn.Linear(8, 8).requires_grad_(False) for _ in range(2)]
    plain = copy.deepcopy(frozen[1]).float()
    teacher, student = frozen[0], zo.offload(frozen[1], zo.OffloadConfig(precision="bf16"))
    expected = copy.deepcopy(teacher)
    zo.offload(teacher, zo.OffloadConfig(precision="fp32", params="nvme", nvme=tmp_path))
    with torch.no_grad():
        for param, t, s in zip(expected.parameters(), teacher.parameters(), student.parameters(), strict=True):
            rounded = next(p for p in plain.parameters() if p.shape == s.shape).bfloat16().float()
            param.lerp_(rounded, 0.1).addcmul_(rounded, rounded, value=0.5)
            t.lerp_(s, 0.1).addcmul_(s, s, value=0.5)
    found = read_masters(teacher)
    assert all(torch.equal(found[name], param) for name, param in expected.named_parameters())
    zo.close(teacher)
