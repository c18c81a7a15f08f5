from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.models import Block, TinyLM
from zero_offload.base.errors import ConfigError
from zero_offload.plan.model_spec import SMALL_NUMEL, ModelSpec, find_units


def units_of(model: nn.Module, units: object = None) -> dict[str, list[str]]:
    spec = ModelSpec.from_module(model, units)
    return {unit.name: [param.name for param in unit.params] for unit in spec.units}


def test_blocks_of_a_list_and_small_leftovers() -> None:
    units = units_of(TinyLM(8, 2))
    assert list(units) == ["(small)", "blocks.0", "blocks.1"]
    assert units["(small)"] == ["embedding.weight", "norm.weight", "norm.bias"]
    assert len(units["blocks.0"]) == 6


def test_large_leftovers_are_units() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(SMALL_NUMEL, 1), "norm": nn.LayerNorm(4)})
    assert list(units_of(model)) == ["table", "(small)"]


def test_blocks_of_a_sequential_of_mixed_modules() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), Block(4), nn.ReLU(), Block(4), nn.Linear(4, 3))
    assert find_units(model) == ("1", "3")


def test_the_outermost_repetition_counts() -> None:
    model = nn.ModuleList(nn.Sequential(Block(4), Block(4)) for _ in range(2))
    assert find_units(model) == ("0", "1")


class Stage(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.down = nn.Linear(dim, 2 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.down(x)  # type: ignore[no-any-return]


def test_the_blocks_of_growing_stages_are_units() -> None:
    model = nn.Sequential(Stage(4, 2), Stage(8, 1), Stage(16, 2))
    assert find_units(model) == ("0.blocks.0", "0.blocks.1", "1", "2.blocks.0", "2.blocks.1")
    assert list(units_of(model)) == ["0.blocks.0", "0.blocks.1", "(small)", "1", "2.blocks.0", "2.blocks.1"]


def test_stages_that_are_alike_are_blocks() -> None:
    assert find_units(nn.Sequential(Stage(4, 2), Stage(4, 2))) == ("0", "1")


class Pyramid(nn.Module):
    """A stage that holds its blocks in several lists, as those of U-Nets do."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(Block(dim) for _ in range(2))
        self.attentions = nn.ModuleList(Stage(dim, depth) for _ in range(2))

    forward = Stage.forward


def test_blocks_of_a_stage_in_several_lists_and_below_are_units() -> None:
    model = nn.ModuleList([Pyramid(4, 1), Pyramid(16, 3)])
    below = [f"1.attentions.{index}.blocks.{block}" for index in range(2) for block in range(3)]
    first = [f"0.{part}.{index}" for part in ("convolutions", "attentions") for index in range(2)]
    assert list(find_units(model)) == [*first, "1.convolutions.0", "1.convolutions.1", *below]


class Layered(nn.Module):
    """A block whose parts are in a list: single layers, or experts behind another module."""

    def __init__(self, dim: int, *parts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.parts = nn.Sequential(*parts)

    forward = Stage.forward


def test_blocks_that_grow_without_blocks_in_them_are_units() -> None:
    mlps = [Layered(dim, nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)) for dim in (4, 8)]
    assert find_units(nn.Sequential(*mlps)) == ("0", "1")
    experts = [Layered(4, nn.Sequential(nn.ModuleList(Block(4) for _ in range(count)))) for count in (2, 8)]
    assert find_units(nn.Sequential(*experts)) == ("0", "1")


def test_a_single_block_is_looked_into() -> None:
    model = nn.Sequential(nn.Sequential(Block(4), Block(4)), nn.Linear(4, 4))
    assert find_units(model) == ("0.0", "0.1")


def test_modules_without_parameters_are_no_blocks() -> None:
    assert find_units(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2))) == ()


def test_ties_are_one_parameter_with_every_user_a_hook_point() -> None:
    spec = ModelSpec.from_module(TinyLM(8, 2))
    (tied,) = [param for unit in spec.units for param in unit.params if param.aliases]
    assert (tied.name, tied.aliases) == ("embedding.weight", ("head.weight",))
    points = {point.module: [spec.units[i].name for i in point.units] for point in spec.hook_points}
    assert points["head"] == points["embedding"] == ["(small)"] and points["blocks.1"] == ["blocks.1"]
    assert spec.numel == sum(param.numel() for param in TinyLM(8, 2).parameters())


def test_a_block_that_borrows_a_tied_parameter_needs_both_units() -> None:
    model = nn.ModuleList([Block(4), Block(4)])
    model[1].up.weight = model[0].up.weight
    spec = ModelSpec.from_module(model)
    assert {point.module: point.units for point in spec.hook_points} == {"0": (0,), "1": (0, 1)}


class Adapted(nn.Module):
    """A frozen layer of 16 x 16 and two trained ones of rank 1."""

    def __init__(self, rank: int = 1) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(16, rank, bias=False), nn.Linear(rank, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def test_the_few_trained_parameters_of_a_unit_are_one_of_their_own() -> None:
    spec = ModelSpec.from_module(nn.ModuleList([Adapted(), Adapted()]))
    assert {unit.name: [param.name for param in unit.params] for unit in spec.units} == {
        "0": ["0.base.weight"],
        "0 (trained)": ["0.down.weight", "0.up.weight"],
        "1": ["1.base.weight"],
        "1 (trained)": ["1.down.weight", "1.up.weight"],
    }
    assert [unit.is_trained_part for unit in spec.units] == [False, True, False, True]
    assert {point.module: point.units for point in spec.hook_points} == {"0": (0, 1), "1": (2, 3)}
    assert spec.in_use_with(0) == spec.in_use_with(1) == ((0, 1),)


@pytest.mark.parametrize(("rank", "apart"), [(1, True), (2, False)])  # 32 and 64 trained elements beside 256
def test_few_is_one_element_in_eight(rank: int, apart: bool) -> None:
    assert (len(ModelSpec.from_module(nn.ModuleList([Adapted(rank), Adapted(rank)])).units) == 4) is apart


def test_parts_are_in_the_order_of_their_first_parameters() -> None:
    """A generation names sections by number, and holds those of a model whose adapters were in the units."""
    first = nn.Sequential(nn.Linear(4, 1), nn.Linear(16, 16).requires_grad_(False))
    for model in (nn.ModuleList([first, Adapted()]), nn.ModuleList([Adapted(), first])):
        spec = ModelSpec.from_module(model, [""])
        assert [param.name for unit in spec.units for param in unit.params] == sorted(
            (name for name, _ in model.named_parameters()),
            key=lambda name: model.get_parameter(name).requires_grad is not next(model.parameters()).requires_grad,
        )


def test_units_without_trained_parameters_and_without_frozen_ones_stay_whole() -> None:
    frozen, trained = Block(4).requires_grad_(False), Block(4)
    spec = ModelSpec.from_module(nn.ModuleList([frozen, trained]))
    assert [unit.name for unit in spec.units] == ["0", "1"]
    assert not any(unit.is_trained_part for unit in spec.units)


@pytest.mark.parametrize("naming", ["names", "class", "modules"])
def test_units_named_by_the_user(naming: str) -> None:
    model = TinyLM(8, 3)
    named = {"names": ["blocks.0", "blocks.2"], "class": [Block], "modules": [model.blocks[1]]}[naming]
    expected = {"names": [0, 2], "class": [0, 1, 2], "modules": [1]}[naming]
    assert set(units_of(model, named)) == {"(small)"} | {f"blocks.{i}" for i in expected}


def test_the_innermost_named_unit_owns() -> None:
    units = units_of(TinyLM(8, 2), ["blocks", "blocks.1.up"])
    assert units["blocks.1.up"] == ["blocks.1.up.weight", "blocks.1.up.bias"]
    assert "blocks.1.down.weight" in units["blocks"]


def test_the_root_as_one_unit() -> None:
    assert len(units_of(TinyLM(8, 2), [""])) == 1


def test_meta_models_have_a_spec() -> None:
    with torch.device("meta"):
        model = TinyLM(8, 2)
    assert ModelSpec.from_module(model).numel == ModelSpec.from_module(TinyLM(8, 2)).numel


def test_errors_name_everything() -> None:
    with pytest.raises(ConfigError) as error:
        ModelSpec.from_module(TinyLM(8, 2), ["nope", nn.LSTM])
    assert "'nope'" in str(error.value) and "LSTM" in str(error.value)
    with pytest.raises(ConfigError, match="no parameter"):
        ModelSpec.from_module(nn.ReLU())


def test_a_list_of_lists_is_looked_into() -> None:
    """A list is never called, so a hook on one would never run."""
    model = nn.ModuleList(nn.ModuleList([Block(4), Block(4)]) for _ in range(2))
    assert find_units(model) == ("0.0", "0.1", "1.0", "1.1")


def test_a_list_named_as_a_unit_is_hooked_at_its_modules() -> None:
    spec = ModelSpec.from_module(TinyLM(8, 2), ["blocks"])
    assert [unit.name for unit in spec.units] == ["(small)", "blocks"]
    points = {point.module: point.units for point in spec.hook_points}
    assert points["blocks.0"] == points["blocks.1"] == (1,) and "blocks" not in points
