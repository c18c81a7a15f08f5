"""Modules whose parameters get their values in every way that we know of, and what a deferred build of one gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.utils import parametrizations

import zero_offload as zo
from zero_offload.standins.owners import recipe_of

SEED = 3


class Bag(nn.Module):
    """Whatever `fill` puts into it."""

    def __init__(self, fill: Callable[[Any], None]) -> None:
        super().__init__()
        fill(self)


def built(make: Callable[[], nn.Module], *, deferred: bool) -> tuple[nn.Module, Tensor]:
    """A model from the same seed, and the state of the generator after it."""
    torch.manual_seed(SEED)
    if not deferred:
        return make(), torch.get_rng_state()
    with zo.deferred_init():
        model = make()
    return model, torch.get_rng_state()


def made_values(model: nn.Module) -> dict[str, Tensor]:
    """The values that the recipes of its parameters give."""
    found = {}
    for name, param in model.named_parameters():
        recipe = recipe_of(param)
        assert recipe is not None and param.is_meta, name
        found[name] = recipe.make()
    return found


# Oddities


INITS: list[Callable[[Tensor], Any]] = [
    init.orthogonal_,
    init.trunc_normal_,
    lambda w: init.trunc_normal_(w, 0.5, 1.0, 0.6, 0.7),  # draws from the tail, in another way
    init.eye_,
    lambda w: init.sparse_(w, 0.3),
    init.xavier_uniform_,
    init.xavier_normal_,
    init.kaiming_uniform_,
    init.kaiming_normal_,
    lambda w: init.uniform_(w, -1, 2),
    lambda w: init.constant_(w, 3),
    lambda w: init.normal_(w, generator=torch.Generator().manual_seed(4)),
    lambda w: w.data.exponential_(2.0),
    lambda w: w.data.bernoulli_(0.3),
]


def every_init(bag: Any) -> None:
    for i, fill in enumerate(INITS):
        bag.register_parameter(f"w{i}", nn.Parameter(torch.empty(17, 13)))
        fill(bag.get_parameter(f"w{i}"))
    bag.filters = nn.Parameter(torch.empty(4, 4, 3))
    init.dirac_(bag.filters)
    generator = torch.Generator().manual_seed(5)
    bag.first = nn.Parameter(torch.randn(3, generator=generator))
    bag.second = nn.Parameter(torch.randn(3, generator=generator))
    bag.last = nn.Parameter(torch.randn(3))


def views(bag: Any) -> None:
    """Views, copies among parameters, and reads."""
    bag.w = nn.Parameter(torch.randn(20, 30))
    bag.v = nn.Parameter(torch.empty(20, 30))
    bag.z = nn.Parameter(torch.empty(30, 20))
    with torch.no_grad():
        bag.v.copy_(bag.w)
        bag.v.copy_(bag.v)
        bag.w.mul_(2)
        bag.v[3].zero_()
        bag.v[:, 5] = 7
        bag.v[2, 3] = 1.5
        bag.z.copy_(bag.w.t())
        bag.z.t()[0].normal_()
        bag.v[torch.tensor([1, 4])] = bag.w[torch.tensor([2, 3])]
        bag.v[bag.v > 1] = -1
        bag.w.data[0].fill_(float(bag.v.sum()))
        bag.w[4] = torch.ones(30)
        bag.v[0, 0] += 5
        bag.v.view(-1)[10:20].uniform_()
        bag.w.data = bag.w.data * 3
        bag.w.add_(bag.v, alpha=2)
        torch._foreach_mul_([bag.w, bag.v], 0.5)
        parts = bag.z.chunk(2)
        parts[1].copy_(parts[0])
        if bool((bag.z > 0).any()):
            bag.z.clamp_(max=1)
    bag.register_buffer("row", bag.w.detach()[0])
    bag.register_buffer("sums", bag.w.sum(0).detach())
    bag.register_buffer("copied", bag.w.detach().clone())


def kept(bag: Any) -> None:
    """The object that was registered goes on to be used."""
    param = nn.Parameter(torch.empty(50, 50))
    bag.p = param
    init.normal_(param)
    bag.q = param
    param.data.mul_(2)
    bag.r = nn.Parameter(bag.p.detach().clone())
    with torch.no_grad():
        bag.p.add_(1)
        param.add_(bag.q)


def made_before(bag: Any) -> None:
    """Values that are there when a parameter is made."""
    bag.a = nn.Parameter(torch.tensor([1.0, 2, 3]))
    with torch.no_grad():
        bag.a.mul_(2)
    bag.b = nn.Parameter(torch.log(torch.arange(1, 17).float()).repeat(4, 1))
    bag.c = nn.Parameter(torch.from_numpy(np.arange(12.0).reshape(3, 4)))
    bag.d = nn.Parameter(torch.arange(5), requires_grad=False)
    seen = torch.zeros(5)
    seen.numpy()[2] = 3
    bag.e = nn.Parameter(seen)
    base = torch.randn(6)
    base[0] = 1
    bag.f = nn.Parameter(base[2:])
    base.mul_(2)
    bag.g = nn.Parameter(torch.linspace(0, 1, 7) / torch.arange(1, 8))
    bag.h = nn.Parameter(torch.tensor(0.5))
    bag.i = nn.Parameter(torch.ones(3).bfloat16())
    bag.j = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(3)])
    bag.k = nn.ParameterDict({"x": torch.randn(2)})
    query, key, _ = torch.randn(9, 4).chunk(3)
    bag.l, bag.m = (nn.Parameter(part, requires_grad=False) for part in (query, key))
    bag.n = nn.Parameter(torch.bernoulli(torch.full((30,), 0.3)))
    bag.o = nn.Parameter(nn.functional.dropout(torch.ones(40), 0.5))
    bag.p = nn.Parameter(torch.distributions.Gamma(2.0, 1.0).sample((10,)))
    bag.q = nn.Parameter(torch.normal(torch.zeros(4), torch.ones(4)))
    torch.set_default_dtype(torch.float64)
    bag.r = nn.Parameter(torch.arange(4) / 3)
    torch.set_default_dtype(torch.float32)
    bag.s = nn.Parameter(torch.empty(0))
    bag.register_parameter("none", None)


def norms(bag: Any) -> None:
    bag.a = parametrizations.weight_norm(nn.Linear(5, 6))
    bag.b = parametrizations.spectral_norm(nn.Linear(5, 6))
    bag.c = parametrizations.orthogonal(nn.Linear(6, 6))
    bag.d = nn.utils.weight_norm(nn.Linear(4, 4))
    bag.e = nn.utils.spectral_norm(nn.Linear(4, 4))


def modules(bag: Any) -> None:
    """Copies, changes of dtype and place, modules that are built on meta, ties."""
    linear = nn.Linear(6, 6)
    bag.copies = nn.ModuleList([copy.deepcopy(linear) for _ in range(3)])
    bag.skipped = nn.utils.skip_init(nn.Linear, 4, 5)
    init.normal_(bag.skipped.weight)
    init.zeros_(bag.skipped.bias)
    bag.half = nn.Linear(4, 4).half()
    bag.wide = nn.Linear(4, 4).to("cpu").to("cpu", torch.float64)
    bag.tied = nn.Linear(6, 6)
    bag.tied.weight = linear.weight
    bag.again = bag.tied
    bag.filters = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    bag.batch_norm = nn.BatchNorm1d(4)
    bag.embedding = nn.Embedding(10, 4, padding_idx=2)
    bag.attention = nn.MultiheadAttention(8, 2)
    bag.recurrent = nn.GRU(4, 4, bidirectional=True)
    bag.given = nn.Embedding.from_pretrained(torch.randn(4, 3))
    bag.frozen = nn.Linear(3, 3).requires_grad_(False)
    bag.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


def devices(bag: Any) -> None:
    """Code that asks a parameter where it is, and for its values."""
    bag.a = nn.Linear(4, 4)
    weight = bag.a.weight
    assert weight.device.type == "cpu" and not weight.is_meta
    bag.b = nn.Parameter(torch.arange(4, device=weight.device) * 1.0)
    bag.c = nn.Parameter(torch.zeros_like(weight))
    bag.d = nn.Parameter(weight.new_zeros(3) + weight.new_tensor([1.0, 2, 3]))
    with torch.no_grad():
        weight.copy_(torch.ones(4, 4).to(weight))
        weight.data.copy_(torch.eye(4).to(weight.device) * 2)
        weight.mul_(torch.tensor(3.0).type_as(weight))
    assert weight.tolist()[0] == [6.0, 0.0, 0.0, 0.0] and float(weight[0, 0].detach()) == 6.0
    bag.e = nn.Parameter(weight.detach().to("cpu", torch.float64))
    bag.f = nn.Parameter(weight.detach().cpu() * 1)
    bag.register_buffer("mask", torch.ones(2, device=weight.data.device))


ODDITIES = (every_init, views, kept, made_before, norms, modules, devices)
