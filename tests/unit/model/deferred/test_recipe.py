"""A recipe does what its values depend on, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.deferred import Bag, built, made_values
from zero_offload.base.types import MIB
from zero_offload.model.deferred import recipe, recorder
from zero_offload.model.deferred.recipe import Node


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that are done again, in order."""
    done: list[str] = []
    run = Node.run

    def noted(node: Node, *args: Any) -> None:
        done.append(node.func.overloadpacket.__name__)
        run(node, *args)

    monkeypatch.setattr(Node, "run", noted)
    return done


def _refilled(bag: Any) -> None:
    bag.w = nn.Parameter(torch.randn(4, 4) * 2)
    nn.init.kaiming_uniform_(bag.w)
    nn.init.normal_(bag.w)


def _partly_refilled(bag: Any) -> None:
    bag.w = nn.Parameter(torch.empty(4, 4))
    nn.init.ones_(bag.w)
    nn.init.normal_(bag.w[0].detach())


def _copied(bag: Any) -> None:
    """A later change of the source, and the target's own beginning, do not matter."""
    source = torch.zeros(4)
    source.add_(1)
    bag.w = nn.Parameter(torch.randn(4))
    with torch.no_grad():
        bag.w.copy_(source)
    source.mul_(7)


@pytest.mark.parametrize(
    ("fill", "expected"),
    [
        (_refilled, ["normal_"]),
        (_partly_refilled, ["fill_", "normal_"]),
        (_copied, ["zeros", "add_", "copy_"]),
    ],
)
def test_what_is_done_again(fill: Callable[[Any], None], expected: list[str], runs: list[str]) -> None:
    plain, _ = built(lambda: Bag(fill), deferred=False)
    model, _ = built(lambda: Bag(fill), deferred=True)
    runs.clear()
    values = made_values(model)["w"]
    assert runs == expected
    assert torch.equal(values, plain.w.detach())


def test_values_that_are_filled_are_not_made(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes over a model, as transformers makes: the second draws all values anew."""
    monkeypatch.setattr(recorder, "KEPT_BYTES", 0)
    with zo.deferred_init():
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for layer in layers:
            nn.init.normal_(layer.weight)
            nn.init.zeros_(layer.bias)
        assert runs == []
        with torch.no_grad():
            layers[0].weight.mul_(2)
    assert runs == ["normal_"]


def test_values_from_outside_are_those_of_their_time() -> None:
    outside = torch.ones(3)

    def fill(bag: Any) -> None:
        bag.a = nn.Parameter(torch.zeros(3))
        with torch.no_grad():
            bag.a.copy_(outside)
        bag.b = nn.Parameter(outside)
        outside.add_(1)

    model, _ = built(lambda: Bag(fill), deferred=True)
    outside.fill_(9)
    values = made_values(model)
    assert values["a"].tolist() == [1, 1, 1] and values["b"].tolist() == [2, 2, 2]


def test_a_large_blank_is_pages_of_its_own() -> None:
    storage = recipe.blank(2 * MIB)
    assert storage.nbytes() == 2 * MIB and storage.data_ptr() % 4096 == 0
    assert torch.empty(0).set_(storage).fill_(3).sum() == 3 * MIB / 2


def test_autocast_and_grad_mode_of_the_caller_do_not_matter() -> None:
    def fill(bag: Any) -> None:
        bag.w = nn.Parameter(torch.randn(4, 4) @ torch.randn(4, 4))

    plain, _ = built(lambda: Bag(fill), deferred=False)
    model, _ = built(lambda: Bag(fill), deferred=True)
    with torch.autocast("cpu", torch.bfloat16):
        values: Tensor = made_values(model)["w"]
    assert torch.equal(values, plain.w.detach()) and not values.requires_grad
