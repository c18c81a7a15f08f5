"""Properties that a parameter keeps while its data is away, and operations that are refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import time
import weakref
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import VOCAB, WIDE, TinyLM, build, tokens_of
from tests.helpers.pairwise import full
from tests.helpers.reference import placed
from tests.helpers.twins import train
from zero_offload.model.api import runtime_of
from zero_offload.storage.memory.heap import trim_heap

Model = partial(TinyLM, WIDE)


@pytest.fixture
def away(nvme_config: zo.OffloadConfig) -> nn.Module:
    return zo.offload(build(Model), nvme_config)


def test_metadata_is_that_of_the_plain_parameter(away: nn.Module) -> None:
    plain = dict(build(Model).named_parameters())
    assert list(plain) == [name for name, _ in away.named_parameters()]
    for name, param in away.named_parameters():
        twin = plain[name]
        assert isinstance(param, nn.Parameter)
        assert (param.shape, param.dtype, param.device) == (twin.shape, torch.float32, twin.device)
        assert (param.numel(), param.dim(), param.stride()) == (twin.numel(), twin.dim(), twin.stride())
        assert param.requires_grad and param.is_leaf and param.is_contiguous() and param.is_floating_point()
        assert len(param) == len(twin) and param.element_size() == 4 and not param.is_cuda
        assert param.grad is None and param.grad_fn is None
    assert isinstance(hash(param), int) and "shape" in dir(param)
    assert sum(p.numel() for p in away.parameters()) == sum(p.numel() for p in plain.values())


def test_repr_says_where_it_rests(away: nn.Module) -> None:
    text = repr(away.blocks[0].up.weight)
    assert "blocks.0.up.weight" in text and "nvme" in text and str((4 * WIDE, WIDE)) in text
    assert "Linear" in repr(away)


def test_class_and_hooks_only(away: nn.Module) -> None:
    assert type(away) is TinyLM
    assert set(vars(away)) == set(vars(build(Model))) | {"_is_accelerate_prepared"}
    assert not vars(away.blocks[0].up.weight)


def test_compute_dtype(nvme: Path) -> None:
    model = zo.offload(build(Model), placed("bf16", ("nvme", "cpu", "nvme"), nvme))
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


def test_hooks_of_the_user_still_run(away: nn.Module) -> None:
    seen = []
    away.blocks[0].up.weight.register_hook(lambda grad: seen.append(grad.shape))
    away(tokens_of(0)).backward()
    assert seen == [(4 * WIDE, WIDE)]


@pytest.mark.parametrize("call", [copy.copy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())])
@pytest.mark.parametrize("what", ["parameter", "block", "model"])
def test_copies_that_share_memory_or_hooks_are_refused(what: str, call: object, away: nn.Module) -> None:
    away(tokens_of(0)).backward()
    thing = {"parameter": away.blocks[0].up.weight, "block": away.blocks[0], "model": away}[what]
    if call is copy.copy and what != "parameter":
        assert call(thing) is not thing  # A shallow copy of a module shares its parameters.
        return
    if what == "parameter" and call is not copy.copy:
        call(thing)
        return
    with pytest.raises(zo.ZeroOffloadError, match="zo.save_checkpoint"):
        call(thing)


def test_a_deep_copy_is_an_ordinary_model(away: nn.Module) -> None:
    away(tokens_of(0)).backward()
    made, block = copy.deepcopy(away), copy.deepcopy(away.blocks[0])
    assert all(type(param) is nn.Parameter for param in (*made.parameters(), *block.parameters()))
    assert made.head.weight is made.embedding.weight and block.up.weight is not away.blocks[0].up.weight
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), build(Model).parameters(), strict=True))
    made(tokens_of(1)).backward()
    assert made.blocks[0].up.weight.grad is not None and made(tokens_of(0)).item() == away(tokens_of(0)).item()


@pytest.mark.parametrize("inside", [False, True])
def test_a_conversion_that_copies_gives_a_tensor_of_its_own(inside: bool, away: nn.Module) -> None:
    weight = away.blocks[0].up.weight
    with zo.gathered([weight]) if inside else contextlib.nullcontext(), torch.no_grad():
        assert weight.to("cpu") is weight
        copies = [weight.to("cpu", copy=True), weight.to(weight.dtype, copy=True), weight.to(weight, False, True)]
    values = build(Model).blocks[0].up.weight
    zo.close(away)
    assert all(type(each) is torch.Tensor and torch.equal(each, values) for each in copies)


def test_what_is_away_can_be_frozen_and_thawed(away: nn.Module) -> None:
    away.blocks[0].up.weight.requires_grad = False
    away.blocks[1].requires_grad_(False)
    frozen = [name for name, param in away.named_parameters() if not param.requires_grad]
    assert frozen == ["blocks.0.up.weight", *(f"blocks.1.{name}" for name, _ in away.blocks[1].named_parameters())]
    away.requires_grad_(True)
    assert all(param.requires_grad for param in away.parameters())


@pytest.mark.parametrize("cast", ["half", "double", "bfloat16", "to_empty"])
def test_conversions_of_the_module_are_refused(cast: str, away: nn.Module) -> None:
    convert = {"to_empty": lambda: away.to_empty(device="cpu")}.get(cast, getattr(away, cast, None))
    with pytest.raises(zo.ZeroOffloadError):
        convert()


@pytest.mark.parametrize("cast", ["half", "double"])
def test_conversions_of_a_resident_module_are_refused(cast: str) -> None:
    model = zo.offload(build(Model), placed("fp32", ("cpu", "cpu", "cpu"), None, None))
    with pytest.raises(zo.ZeroOffloadError):
        getattr(model, cast)()
    assert model(tokens_of(0)).item() == build(Model)(tokens_of(0)).item()


def test_offload_twice_is_refused(away: nn.Module, nvme: Path) -> None:
    with pytest.raises(zo.ConfigError, match="offloaded already"):
        zo.offload(away, zo.OffloadConfig())


def test_models_that_cannot_be_offloaded(nvme: Path) -> None:
    config = zo.OffloadConfig()
    with_grad = build(Model)
    with_grad(tokens_of(0)).backward()
    for model, message in [
        (build(Model).double(), "float64"),
        (with_grad, "zero_grad"),
        (nn.Identity(), "no parameter"),
        (build(Model).to("meta"), "meta"),
    ]:
        with pytest.raises(zo.ConfigError, match=message):
            zo.offload(model, config)


def test_a_failed_offload_leaves_the_model_and_the_directory(nvme: Path) -> None:
    model = build(Model)
    config = placed("fp32", ("nvme", "cpu", "nvme"), nvme)
    model.blocks[0].double()
    with pytest.raises(zo.ConfigError):
        zo.offload(model, config)
    model.blocks[0].float()
    assert model(tokens_of(0)).item() == build(Model)(tokens_of(0)).item()
    zo.offload(model, config)


class SparseEmbedding(TinyLM):
    def __init__(self) -> None:
        super().__init__(WIDE)
        self.embedding = nn.Embedding(VOCAB, WIDE, sparse=True)


def test_a_sparse_gradient_is_refused(fp32_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(SparseEmbedding), fp32_config)
    with pytest.raises(zo.ZeroOffloadError, match=r"embedding\.weight is sparse.*sparse=False"):
        model(tokens_of(0)).backward()


@pytest.mark.parametrize("optimizer", ["cpu", full("nvme")])
def test_a_dropped_model_frees_its_directory_and_its_memory(optimizer: str, nvme: Path) -> None:
    config = placed("fp32", ("nvme", "nvme", optimizer), nvme)
    # In a process of its own: what other tests have left in the C library's hands would come and go in between.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        sizes = process.submit(sizes_after_drops, config).result()
    # The remains of one model may go a moment later; those of all models stay.
    assert min(sizes[2:]) - min(sizes[:2]) < 60 << 20, "the states of one model are about 120 MB"


def sizes_after_drops(config: zo.OffloadConfig) -> list[int]:
    sizes = []
    for _ in range(5):
        model = zo.offload(build(partial(TinyLM, 2 * WIDE)), config)
        steps = zo.AdamW(model.parameters())
        list(train(model, steps, range(2)))
        alive = weakref.ref(runtime_of(model))
        del model, steps
        # The last update and commit may still run, and hold what they work on.
        deadline = time.monotonic() + 30
        while alive() is not None and time.monotonic() < deadline:
            time.sleep(0.02)
            gc.collect()
        assert alive() is None
        trim_heap()  # what activations left in the C library's hands is not a model's memory
        sizes.append(resident_bytes())
    return sizes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Probe(torch.autograd.Function):
    """Identity; its context lives exactly as long as its node of the graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, into: list[Any]) -> torch.Tensor:
        into.append(weakref.ref(ctx))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


@pytest.mark.parametrize("steps", ["forward", "forward and backward"])
def test_a_graph_dies_with_its_loss_without_the_garbage_collector(steps: str, config: zo.OffloadConfig) -> None:
    model = zo.offload(build(Model), config)
    nodes: list[Any] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: Probe.apply(output, nodes))
    gc.disable()
    try:
        loss = model(tokens_of(0)).exp()
        if "backward" in steps:
            loss.backward()
        assert len(nodes) == 3 and all(node() is not None for node in nodes)
        del loss
        assert all(node() is None for node in nodes)
    finally:
        gc.enable()


def test_a_directory_is_free_after_close_and_locked_before(nvme: Path) -> None:
    config = placed("fp32", ("nvme", "cpu", "nvme"), nvme)
    model = zo.offload(build(Model), config)
    with pytest.raises(zo.LockError):
        zo.offload(build(Model), config)
    zo.close(model)
    zo.close(zo.offload(build(Model), config))


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return tokens_of(index, 1)[0]


def test_a_data_loader_with_workers(config: zo.OffloadConfig) -> None:
    def losses(num_workers: int, directory: Path | None) -> list[float]:
        settings = config.to_dict() | {"nvme": [] if directory is None else [str(directory)]}
        model = zo.offload(build(Model), zo.OffloadConfig.from_dict(settings))
        optimizer = zo.AdamW(model.parameters())
        found = []
        for _ in range(2):
            loader = torch.utils.data.DataLoader(Numbers(), 2, num_workers=num_workers, multiprocessing_context=context)
            for tokens in loader:
                loss = model(tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        zo.close(model)
        return found

    context = None
    alone = losses(0, config.nvme_dirs[0] if config.nvme_dirs else None)
    context = "fork"
    assert losses(2, config.nvme_dirs[0] if config.nvme_dirs else None) == alone
