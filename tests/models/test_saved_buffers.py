"""Buffers of a state dict come back with the parameters: resumed, loaded, exported, on other ranks."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import build
from tests.helpers.ranks import RankPools
from zero_offload.checkpoint.extras import capture_buffers, check_buffers, restore_buffers
from zero_offload.checkpoint.format import reading
from zero_offload.cli.main import main

WIDTH = 8


class Counting(nn.Module):
    """Buffers of every kind that training changes, and a buffer that no state dict has."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(width, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(2, 3, dtype=torch.bfloat16).t())
        self.register_buffer("nothing", torch.zeros(0, 2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen[int(self.norm.num_batches_tracked)] = True
            self.mean += 0.3
            self.cache += 1
        return self.norm(self.linear(x)).square().mean()


def opened(nvme: Path, existing: str = "refuse", make: type[nn.Module] = Counting) -> tuple[nn.Module, zo.AdamW]:
    config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme, existing=existing, precision="fp32")
    model = zo.offload(build(make), config)
    return model, zo.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: zo.AdamW, begin: int, end: int, rank: int = 0) -> list[float]:
    losses = []
    for step in range(begin, end):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer)
        losses.append(loss.item())
    return losses


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name != "cache"}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) and value.dtype == other[name].dtype for name, value in one.items())


def test_resumed_loaded_and_exported(tmp_path: Path) -> None:
    model, optimizer = opened(tmp_path / "run")
    train(model, optimizer, 0, 3)
    zo.save_checkpoint(model, optimizer, tmp_path / "checkpoint")
    expected = buffers_of(model)
    zo.close(model)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "folder")]) == 0
    exported = load_file(tmp_path / "folder" / "model.safetensors")
    assert_same({name: exported[name] for name in expected}, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = opened(tmp_path / "run", "resume")
        assert zo.resume(model, optimizer) is not None
        assert_same(buffers_of(model), expected)
        assert not model.cache.any()
        later = train(model, optimizer, 3, 5), buffers_of(model)
        zo.load_checkpoint(model, optimizer, tmp_path / "checkpoint")
        assert_same(buffers_of(model), expected)
        again = train(model, optimizer, 3, 5), buffers_of(model)
    assert later[0] == again[0]
    assert_same(later[1], again[1])
    zo.close(model)


def test_taken_at_the_commit_and_not_later(tmp_path: Path) -> None:
    model, optimizer = opened(tmp_path / "run")
    train(model, optimizer, 0, 2)
    expected = buffers_of(model)
    with torch.no_grad():
        model(torch.ones(4, WIDTH))
    assert not torch.equal(model.mean, expected["mean"])
    zo.close(model)
    model, optimizer = opened(tmp_path / "run", "resume")
    zo.resume(model, optimizer)
    assert_same(buffers_of(model), expected)
    zo.close(model)


class Wider(Counting):
    def __init__(self) -> None:
        super().__init__(WIDTH + 1)


class WithMore(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("more", torch.ones(2))


def test_other_models_are_refused_or_told(tmp_path: Path) -> None:
    model, optimizer = opened(tmp_path / "run")
    train(model, optimizer, 0, 1)
    zo.save_checkpoint(model, optimizer, tmp_path / "checkpoint")
    zo.close(model)
    model, optimizer = opened(tmp_path / "run", "resume", Wider)
    words = r"its buffer 'seen' is \[8\] torch.bool, this model's \[9\] torch.bool"
    with pytest.raises(zo.CheckpointError, match=f"generation of step 1 holds another model: {words}"):
        zo.resume(model, optimizer)
    zo.close(model)
    model, optimizer = opened(tmp_path / "other", make=Wider)
    before = [param.clone() for param in model.state_dict().values()]
    with pytest.raises(zo.CheckpointError, match=words):
        zo.load_checkpoint(model, optimizer, tmp_path / "checkpoint")
    assert all(map(torch.equal, before, model.state_dict().values())), "nothing is replaced"
    zo.close(model)
    model, optimizer = opened(tmp_path / "third", make=WithMore)
    with pytest.warns(UserWarning, match="checkpoint does not have the buffers more: they keep the values"):
        zo.load_checkpoint(model, optimizer, tmp_path / "checkpoint")
    assert model.norm.num_batches_tracked == 1 and model.more.all()
    zo.close(model)


def test_ordinary_parameters_beside_the_model_are_told_of(tmp_path: Path) -> None:
    model, _ = opened(tmp_path / "run")
    head = nn.Linear(WIDTH, WIDTH)
    optimizer = zo.AdamW([*model.parameters(), *head.parameters()], lr=1e-2)
    words = "2 of the 6 parameters that the optimizer trains are not, and are lost"
    with pytest.warns(UserWarning, match=f"zo.commit keeps.*{words}"):
        train(model, optimizer, 0, 1)
    with pytest.warns(UserWarning, match=f"zo.save_checkpoint keeps.*{words}"):
        zo.save_checkpoint(model, optimizer, tmp_path / "checkpoint")
    zo.close(model)


class WithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(512, 512).tril())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def test_masks_take_little(tmp_path: Path) -> None:
    model, optimizer = opened(tmp_path / "run", make=WithMask)
    train(model, optimizer, 0, 2)
    expected = buffers_of(model)
    zo.close(model)
    assert max(path.stat().st_size for path in (tmp_path / "run").glob("*.json")) < 64 << 10
    model, optimizer = opened(tmp_path / "run", "resume", WithMask)
    model.mask.zero_()
    zo.resume(model, optimizer)
    assert_same(buffers_of(model), expected)
    zo.close(model)


def test_buffers_of_any_dtype_come_back() -> None:
    module = nn.Module()
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn):
        module.register_buffer(str(dtype).replace(".", "_"), torch.tensor([1.0, 0.0, 1.0]).to(dtype))
    module.register_buffer("conjugate", torch.full((2,), 1 + 2j).conj())
    module.register_buffer("empty", torch.empty(0, 3))
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    expected = {name: buffer.clone() for name, buffer in module.named_buffers() if name != "sparse"}
    saved = capture_buffers(module)
    assert saved.keys() == expected.keys()
    for name in expected:
        getattr(module, name).zero_()
    with pytest.warns(UserWarning, match="does not have the buffers sparse:"):
        restore_buffers(module, saved, "here", torch.device("cpu"))
    assert all(torch.equal(getattr(module, name), value) for name, value in expected.items())


def test_damaged_values_are_one_error() -> None:
    saved = capture_buffers(nn.BatchNorm1d(WIDTH))
    saved["running_mean"]["data"] = "AAAA"
    wrong = "here has a manifest with values that this version does not write"
    with pytest.raises(zo.IntegrityError, match=wrong), reading("here"):
        check_buffers(nn.BatchNorm1d(WIDTH), saved, "here")


def trained(rank: int, world_size: int, nvme: Path) -> dict[str, Tensor]:
    model, optimizer = opened(nvme)
    train(model, optimizer, 0, 2, rank)
    try:
        return buffers_of(model)
    finally:
        zo.close(model)


def resumed(rank: int, world_size: int, nvme: Path) -> dict[str, Tensor]:
    model, optimizer = opened(nvme, "resume")
    zo.resume(model, optimizer)
    try:
        return buffers_of(model)
    finally:
        zo.close(model)


def test_all_ranks_get_those_of_the_first(tmp_path: Path, pools: RankPools) -> None:
    first, second = pools.of(2).succeed(trained, tmp_path / "run")
    assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])
    for found in pools.of(2).succeed(resumed, tmp_path / "run"):
        assert_same(found, first)
