"""Random programs that insert, remove, replace and move modules between steps, beside a plain model that does so."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import VOCAB, Block, TinyLM, build

UNEVEN = 33
"""As in `tests/helpers/ranks.py`."""
Average = Callable[[nn.Module], None]
Rows = Callable[[int], Tensor]


def make() -> nn.Module:
    """All values are numbers of bf16."""
    return as_bf16_values(TinyLM(UNEVEN))


def as_bf16_values(module: nn.Module) -> nn.Module:
    for param in module.parameters():
        param.data = param.data.bfloat16().float()
    return module


def insert(model: nn.Module, at: int) -> None:
    model.blocks.insert(at % (len(model.blocks) + 1), as_bf16_values(Block(UNEVEN)))


def remove(model: nn.Module, at: int) -> None:
    if len(model.blocks) > 1:
        del model.blocks[at % len(model.blocks)]


def swap(model: nn.Module, at: int) -> None:
    first, second = at % len(model.blocks), (at + 1) % len(model.blocks)
    model.blocks[first], model.blocks[second] = model.blocks[second], model.blocks[first]


def wrap(model: nn.Module, at: int) -> None:
    """The block's parameters have longer names; a wrapped one gets its name back."""
    at %= len(model.blocks)
    block = model.blocks[at]
    model.blocks[at] = block[0] if isinstance(block, nn.Sequential) else nn.Sequential(block)


def new_head(model: nn.Module, at: int) -> None:
    """Of another shape than the last one's, or tied again."""
    model.head = nn.Linear(UNEVEN, VOCAB + at % 5, bias=False)
    as_bf16_values(model.head)
    if not at % 5:
        model.head.weight = model.embedding.weight


def new_block(model: nn.Module, at: int) -> None:
    """In the place of another one, with half of its parameters in another shape."""
    block = Block(UNEVEN)
    block.up, block.down = nn.Linear(UNEVEN, 40 + at % 9), nn.Linear(40 + at % 9, UNEVEN)
    model.blocks[at % len(model.blocks)] = as_bf16_values(block)


CHANGES = (insert, remove, swap, wrap, new_head, new_block)


def change(model: nn.Module, optimizer: Any, how: Callable[[nn.Module, int], None], at: int, *, is_plain: bool) -> None:
    """The new parameters are trained as a group of their own."""
    torch.manual_seed(at)
    dtype = model.embedding.weight.dtype
    before = {name: id(param) for name, param in model.named_parameters()}
    how(model, at)
    new = [param for param in model.parameters() if id(param) not in before.values()]
    if is_plain:
        model.to(dtype)
    elif before != {name: id(param) for name, param in model.named_parameters()}:
        zo.offload(model)
    if new:
        optimizer.add_param_group({"params": new, "lr": 5e-3 + at % 3 / 100})


def step(model: nn.Module, optimizer: Any, rows: Tensor, average: Average = lambda _: None) -> float:
    loss = model(rows)
    loss.backward()
    average(model)
    optimizer.step()
    optimizer.zero_grad()
    value: float = loss.item()
    return value


def start_again(plain: nn.Module, its_optimizer: Any, config: zo.OffloadConfig) -> tuple[nn.Module, zo.AdamW]:
    """A new program: it builds the model as it was, with other values, and resumes."""
    model = copy.deepcopy(plain).float()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
            param.grad = None
    zo.offload(model, config)
    twins = dict(zip(map(id, plain.parameters()), model.parameters(), strict=True))
    groups = [[twins[id(p)] for p in group["params"] if id(p) in twins] for group in its_optimizer.param_groups]
    optimizer = zo.AdamW([{"params": params} for params in groups if params])
    assert zo.resume(model, optimizer) is not None
    return model, optimizer


def play(
    seed: int,
    nvme: Path,
    settings: dict[str, Any],
    rows: Rows,
    average: Average = lambda _: None,
    *,
    precision: str = "fp32",
    num_steps: int = 10,
) -> list[str]:
    """A program of so many steps, each with a change or a new start before it; what it did."""
    chance, done = random.Random(seed), []
    config = zo.OffloadConfig(precision=precision, nvme=nvme, existing="resume", **settings)
    plain, model = build(make), zo.offload(build(make), config)
    if precision == "bf16":
        plain.bfloat16()
    its_optimizer, optimizer = (zo.AdamW(each.parameters(), lr=1e-2) for each in (plain, model))
    try:
        for number in range(num_steps):
            how, at = chance.choice((*CHANGES, None, None)), chance.randrange(1000)
            done.append(f"{number}: {'start again' if how is None else how.__name__} {at}")
            if how is not None:
                change(plain, its_optimizer, how, at, is_plain=True)
                change(model, optimizer, how, at, is_plain=False)
            elif number:
                zo.close(model)
                model, optimizer = start_again(plain, its_optimizer, config)
            expected = step(plain, its_optimizer, rows(number), average)
            found = step(model, optimizer, rows(number))
            assert found == expected, done
            zo.commit(model, optimizer)
        check_same(model, optimizer, plain, its_optimizer, with_states="stage" not in settings)
    finally:
        zo.close(model)
    return done


def check_same(
    model: nn.Module, optimizer: Any, plain: nn.Module, its_optimizer: Any, *, with_states: bool = True
) -> None:
    """The same names and values, and states that one rank can read."""
    named, plainly = dict(model.named_parameters()), dict(plain.named_parameters())
    assert named.keys() == plainly.keys()
    for name, param in plainly.items():
        with zo.gathered([named[name]]):
            assert torch.equal(named[name].detach().float(), param.detach().float()), name
        for key, state in its_optimizer.state[param].items() if with_states else ():
            found = torch.as_tensor(optimizer.state[named[name]][key])
            assert torch.equal(found.float(), torch.as_tensor(state).float()), (name, key)
