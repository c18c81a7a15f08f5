"""A program reads and changes elements of `.grad` of a GPU: the bits of plain fp32 tensors, and no race."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.helpers.grad_edits import EDITS, Twin, same
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import RankPools
from tests.helpers.reference import read_masters


@in_turn(
    edit=[*EDITS],
    of=[("cpu", "bf16"), ("device", "fp32"), ("nvme", "fp16"), ("cpu", "fp32"), ("nvme", "bf16")],
    policy=[Policy.LATE, Policy.SIDE_LATE, Policy.RANDOM],
    micro_batches=[1, 2],
)
def test_edits_are_those_of_plain_tensors(
    edit: str, of: tuple[str, str], policy: Policy, micro_batches: int, nvme: Path
) -> None:
    device.policy(policy, 0)
    grads, precision = of
    config = zo.OffloadConfig(precision=precision, grads=grads, params="cpu", nvme=nvme, durability="scratch")
    model = zo.offload(build(TinyLM), config)
    twin = Twin(model, read_masters(model))
    for micro in range(micro_batches):
        model(tokens_of(micro).to(TYPE)).backward()
    seen = EDITS[edit]([*model.parameters()])
    assert same(seen, EDITS[edit](twin.params))
    with zo.gathered(model, kind="grads") as found:
        grads_by_name = {name: grad.cpu() for name, grad in found.items()}
    for name, param in zip(twin.names, twin.params, strict=True):
        assert param.grad is None or torch.equal(grads_by_name[name], param.grad), name
    zo.clip_grad_norm_(model, 1e9)
    zo.SGD(model.parameters(), lr=0.5).step()
    masters = read_masters(model)
    assert all(torch.equal(masters[name], value) for name, value in twin.step().items())
    zo.close(model)


def test_a_gradient_of_the_device_follows_its_sum() -> None:
    """The tensor that a program has of a bf16 gradient is the fp32 sum after a second backward."""
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="bf16", grads="device", params="cpu"))
    model(tokens_of(0).to(TYPE)).backward()
    kept = model.norm.weight.grad
    assert kept is not None and kept.dtype == torch.bfloat16
    model(tokens_of(1).to(TYPE)).backward()
    assert model.norm.weight.grad is kept and kept.dtype == torch.float32
    kept.zero_()
    with zo.gathered(model, kind="grads") as found:
        assert not found["norm.weight"].any()
    with pytest.raises(zo.ZeroOffloadError, match="cannot be of shape"):
        model.norm.weight.grad = torch.zeros(3, device=TYPE)
    zo.close(model)


def edit_on_ranks(rank: int, world_size: int, stage: int, grads: str, edits: list[str]) -> list[str]:
    """Those of the edits that are not those of plain tensors."""
    device.reset(rank)
    device.policy(Policy.SIDE_LATE, 0)
    wrong = []
    for edit in edits:
        model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", stage=stage, grads=grads))
        twin = Twin(model, {name: param.detach() for name, param in build(TinyLM).named_parameters()})
        model(tokens_of(rank).to(TYPE)).backward()
        params = [*model.parameters()]
        for param, plain in zip(params, twin.params, strict=True):
            plain.grad = param.grad.clone().cpu()
        is_same = same(EDITS[edit](params), EDITS[edit](twin.params))
        zo.SGD(params, lr=0.5).step()
        with zo.gathered(model) as found:
            expected = twin.step()
            is_same &= all(torch.equal(found[name].detach().cpu(), value) for name, value in expected.items())
        wrong += [] if is_same else [edit]
        zo.close(model)
    assert device.take_races() == []
    return wrong


@pytest.mark.parametrize(("stage", "grads"), [(0, "device"), (3, "cpu"), full(1, "device")])
def test_ranks_edit_alike(stage: int, grads: str, pools: RankPools) -> None:
    edits = ["add_noise", "set_rows", "by_views", "assign", "scale_and_add", "zero_and_add"]
    assert pools.of(2, on_device=True).succeed(edit_on_ranks, stage, grads, edits) == [[], []]
