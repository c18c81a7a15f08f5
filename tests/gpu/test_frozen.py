"""On the GPU here, training beside frozen, quantized or grouped weights has the losses of the model in its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.accelerator import IS_FAKE, TYPE, module, on_gpu
from tests.helpers.experts import NUM_EXPERTS, experts_lm
from tests.helpers.models import build, tokens_of
from tests.helpers.pairwise import in_pairs
from tests.helpers.quantized import KINDS, quantized_lm

pytestmark = on_gpu

PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"device_memory": "8MiB"},
    "nvme": {"params": "nvme", "optimizer": "nvme", "device_memory": "8MiB"},
    "device": {"params": "device", "grads": "device", "optimizer": "device"},
    "auto": {"params": "auto", "optimizer": "auto"},
}
LIBRARY_KINDS = ("nf4", "nf4 nested", "fp4", "int8", "torchao int8", "torchao fp8", "plain")
LIBRARY_SHAPES = ("llama", "qwen", "mixtral", "deepseek")
STEPS = 4
PLAIN = "cpu" if IS_FAKE else TYPE
"""Where the model in memory is: the fake GPU runs the CPU's kernels, and to move there breaks ties."""


@pytest.fixture(autouse=True)
def one_order() -> Iterator[None]:
    """Some backwards on a GPU add in any order unless they are asked not to."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def move(model: nn.Module) -> None:
    """To where plain models are."""
    model.to(PLAIN)
    for param in model.parameters():
        if type(param).__name__ == "Int8Params":  # bitsandbytes leaves them where they were
            int8: Any = param
            int8.CB, int8.SCB = int8.data, int8.SCB.to(PLAIN)


def train(make: Callable[[], nn.Module], loss_of: Callable[[nn.Module, int], Any], config: Any) -> list[float]:
    """Losses of the model in memory if `config` is None, else of the offloaded one."""
    model = make().train()
    if config is None:
        move(model)
    else:
        zo.offload(model, config)
    trained = [param for param in model.parameters() if param.requires_grad]
    if config is None:
        for param in trained:
            param.grad_dtype = torch.float32
    optimizer, losses = zo.AdamW(trained, lr=1e-2), []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if config is not None:
        zo.close(model)
    return losses


def check(
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, int], Any],
    nvme: Path,
    plain: Callable[[], nn.Module] | None = None,
    **settings: Any,
) -> None:
    expected = train(plain or make, loss_of, None)
    for i, (name, placement) in enumerate(PLACEMENTS.items()):
        config = zo.OffloadConfig(nvme=nvme / str(i), durability="scratch", **(settings | placement))
        assert train(make, loss_of, config) == expected, name


def tiny_loss(model: nn.Module, step: int) -> Any:
    return model(tokens_of(step))


def recomputed(make: Callable[[], nn.Module]) -> nn.Module:
    model: Any = make()
    zo.checkpoint(list(model.blocks))
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_without_a_library(kind: str, tmp_path: Path) -> None:
    make = partial(quantized_lm, kind, num_blocks=4)
    check(partial(recomputed, make), tiny_loss, tmp_path, precision="fp32")


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("size", [1, 4])
def test_experts_in_groups(size: int, tmp_path: Path, *, trained: bool) -> None:
    def of(size: int) -> nn.Module:
        return build(partial(experts_lm, size=size, trained=trained))

    check(partial(of, size), tiny_loss, tmp_path, partial(of, 0), precision="fp32")


@pytest.mark.skipif(IS_FAKE, reason="the libraries have no kernels for the fake GPU")
@in_pairs(kind=LIBRARY_KINDS, shape=LIBRARY_SHAPES, precision=["fp32", "bf16"])
def test_adapters_over_a_quantized_base(kind: str, shape: str, precision: str, tmp_path: Path) -> None:
    if (kind, shape) == ("int8", "deepseek"):
        pytest.skip("a kernel of bitsandbytes takes inputs of three dimensions at most")
    for library in ("transformers", "peft", "torchao" if kind.startswith("torchao") else "bitsandbytes"):
        pytest.importorskip(library)
    from tests.helpers.quantized_models import adapted_model
    from tests.helpers.tools import Tokens

    rows = Tokens()

    is_sparse = shape in ("mixtral", "deepseek")

    def make(*, grouped: bool) -> nn.Module:
        model: Any = adapted_model(shape, kind, torch.float32 if precision == "fp32" else torch.bfloat16)
        if grouped:
            zo.group_experts(model, 2)
        elif is_sparse:
            model.base_model.model.set_experts_implementation("eager")
        return model  # type: ignore[no-any-return]

    def loss_of(model: nn.Module, step: int) -> Any:
        few = [rows[step * 4 + i] for i in range(4)]
        return model(**{name: torch.stack([row[name] for row in few]).to(TYPE) for name in few[0]}).loss

    check(partial(make, grouped=is_sparse), loss_of, tmp_path, partial(make, grouped=False), precision=precision)


@pytest.mark.skipif(IS_FAKE, reason="tests/fake_gpu has it, at the size that it needs")
def test_gradients_of_trained_experts_leave_one_by_one() -> None:
    dim, inner = 512, 4096
    model = build(partial(experts_lm, dim=dim, inner=inner, size=1, num_blocks=2, trained=True))
    zo.offload(model, zo.OffloadConfig(params="cpu", precision="fp32", durability="scratch", device_memory="256MiB"))
    optimizer = zo.SGD(model.parameters(), lr=1e-2)
    expert_bytes, peak = 3 * dim * inner * 4, 0
    for step in range(3):  # the first takes memory for groups
        loss = tiny_loss(model, step)
        before = module().memory_allocated()
        module().reset_peak_memory_stats()
        loss.backward()
        peak = module().max_memory_allocated() - before
        optimizer.step()
        optimizer.zero_grad()
    zo.close(model)
    assert peak < (NUM_EXPERTS - 1) * expert_bytes  # of 2 * NUM_EXPERTS
