"""The store of activations with small models: everything counts as large, blocks are few and small."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.models import TinyLM, tokens_of
from tests.helpers.ranks import Case, Outcome
from zero_offload.model.api import runtime_of
from zero_offload.runtime.saved_tensors import activations, tiers
from zero_offload.runtime.saved_tensors.activations import Activations

SMALLEST_BYTES = 4096


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", SMALLEST_BYTES)
    monkeypatch.setattr(activations, "AHEAD_BYTES", 64 << 10)
    monkeypatch.setattr(tiers, "ACTIVATION_BLOCK_BYTES", 16 << 10)
    monkeypatch.setattr(tiers, "ACTIVATION_BLOCKS_OUT", 2)
    monkeypatch.setattr(tiers, "ACTIVATION_BLOCKS_BACK", 3)
    monkeypatch.setattr(tiers, "PINNED_SLAB_BLOCKS", 4)
    monkeypatch.setattr(tiers, "BYTES_OUT", 96 << 10)


def activations_of(model: nn.Module) -> Activations:
    owner = runtime_of(model)
    assert owner is not None and owner.activations is not None
    return owner.activations


# Jobs of ranks


def replicated_job(rank: int, world_size: int, dim: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], int]:
    """The same forward and backward on every rank, plain and with boundaries in parts; and bytes that were kept."""
    group = DeviceMesh("cpu", list(range(world_size)), mesh_dim_names=("tp",))["tp"]
    results: list[list[Tensor]] = []
    sizes: list[int] = []
    for is_marked in (False, True):
        model = TinyLM(dim, 3).to(dtype)
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
        if is_marked:
            zo.checkpoint(model.blocks, group=group)
            with torch.autograd.graph.saved_tensors_hooks(lambda x: (x, _count(x, sizes)), lambda kept: kept[0]):
                model.run_blocks(model.embedding(tokens_of(0)))
        x = torch.randn(3, 7, dim, generator=torch.Generator().manual_seed(9)).to(dtype).requires_grad_()
        loss = model.run_blocks(x).float().square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([loss.detach(), x.grad, *(param.grad for block in model.blocks for param in block.parameters())])
    return results[0], results[1], sum(sizes)


def _count(tensor: Tensor, sizes: list[int]) -> None:
    if tensor.is_floating_point() and tensor.dim() == 1:
        sizes.append(tensor.numel())


def marked_job(rank: int, world_size: int, case: Case, is_marked: bool) -> Outcome:
    """`ranks.train` with marked blocks and small activations."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_small(monkeypatch)
        model, optimizer = ranks.start(case)
        if is_marked:
            zo.checkpoint(model.blocks)
        out = Outcome()
        ranks.steps(case, (rank, world_size), model, optimizer, range(case.num_steps), out)
        out.params = ranks.read_params(model)
        moved = zo.stats(model).activation_bytes["nvme"]
        zo.close(model)
    assert (moved > 0) == (case.settings.get("activations") == "nvme")
    return out
