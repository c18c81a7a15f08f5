"""`TiledLinear` against `nn.Linear`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_offload.base.errors import ConfigError
from zero_offload.nn import TiledLinear
from zero_offload.plan.model_spec import ModelSpec, find_units

NUM_IN, NUM_OUT = 64, 101
DTYPES = (torch.float32, torch.bfloat16)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-5}
"""Relative to the largest element: kernels add in another order, and each partial sum is rounded to the dtype."""


def linear_of(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(NUM_IN, NUM_OUT, bias, dtype=dtype)


def small_integers(*shape: int, dtype: torch.dtype) -> Tensor:
    """-1, 0 and 1: every sum of their products here is exact in bf16, in whatever order it is taken."""
    return torch.randint(-1, 2, shape).to(dtype)


def run(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and the gradient of the input; those of the parameters stay in them."""
    x = x.detach().requires_grad_()
    y = layer(x)
    (y * small_integers(NUM_OUT, dtype=y.dtype)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


CUTS = [(1, 1), (2, 1), (8, 1), (101, 1), (1, 2), (1, 64), (4, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("tiles", "in_tiles"), CUTS)
def test_exact_numbers_give_the_bits_of_linear(tiles: int, in_tiles: int, bias: bool, dtype: torch.dtype) -> None:
    linear = linear_of(dtype, bias)
    for param in linear.parameters():
        param.data = small_integers(*param.shape, dtype=dtype)
    tiled = TiledLinear.from_linear(linear, tiles=tiles, in_tiles=in_tiles)
    x = small_integers(2, 5, NUM_IN, dtype=dtype)
    for layer in (linear, tiled):
        torch.manual_seed(4)
        layer.found = run(layer, x)
    for found, expected in zip(tiled.found, linear.found, strict=True):
        assert torch.equal(found, expected) and expected.any()
    grads = TiledLinear.from_linear(linear, tiles=tiles, in_tiles=in_tiles)  # a place for the gradients
    for tile, into in zip(tiled.tiles, grads.tiles, strict=True):
        for param, target in zip(tile.parameters(), into.parameters(), strict=True):
            target.data = param.grad
    for name, param in grads.to_linear().named_parameters():
        assert torch.equal(param, linear.get_parameter(name).grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tiles", "in_tiles"), CUTS)
def test_other_numbers_differ_by_rounding(tiles: int, in_tiles: int, dtype: torch.dtype) -> None:
    linear = linear_of(dtype)
    tiled = TiledLinear.from_linear(linear, tiles=tiles, in_tiles=in_tiles)
    x = torch.randn(2, 5, NUM_IN, dtype=dtype)
    torch.manual_seed(4)
    expected = run(linear, x)
    torch.manual_seed(4)
    for found, wanted in zip(run(tiled, x), expected, strict=True):
        assert error_of(found, wanted) <= ROUNDING[dtype]


def test_the_first_tile_of_a_row_has_its_bias() -> None:
    tiled = TiledLinear(NUM_IN, NUM_OUT, tiles=2, in_tiles=3)
    assert [tile.bias is not None for tile in tiled.tiles] == [True, False, False] * 2


def test_sizes_of_small_layers_differ_by_at_most_one() -> None:
    tiled = TiledLinear(NUM_IN, NUM_OUT, tiles=8, in_tiles=5)
    assert (tiled.out_sizes, tiled.in_sizes) == ([13] * 5 + [12] * 3, [13] * 4 + [12])
    shapes = [tuple(tile.weight.shape) for tile in tiled.tiles]
    assert shapes == [(rows, columns) for rows in tiled.out_sizes for columns in tiled.in_sizes]


def test_sizes_of_large_layers_are_multiples_of_64() -> None:
    tiled = TiledLinear(256, 50257, device="meta", tiles=8, in_tiles=3)
    assert tiled.in_sizes == [128, 64, 64]
    assert tiled.out_sizes == [6336] + [6272] * 6 + [6289]
    assert (sum(tiled.in_sizes), sum(tiled.out_sizes)) == (256, 50257)


def test_one_seed_gives_the_values_of_linear() -> None:
    torch.manual_seed(3)
    tiled = TiledLinear(NUM_IN, NUM_OUT, tiles=7)
    whole, linear = tiled.to_linear(), linear_of()
    assert torch.equal(whole.weight, linear.weight) and torch.equal(whole.bias, linear.bias)


def test_columns_are_drawn_from_the_range_of_the_whole() -> None:
    bound = NUM_IN**-0.5  # of a tile of 2 inputs it would be 0.7
    largest = max(p.abs().max().item() for p in TiledLinear(NUM_IN, NUM_OUT, tiles=2, in_tiles=32).parameters())
    assert 0.9 * bound < largest <= bound


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_tiles", [1, 3])
def test_there_and_back(in_tiles: int, bias: bool) -> None:
    linear = linear_of(torch.bfloat16, bias).eval()
    linear.weight.requires_grad_(False)
    tiled = TiledLinear.from_linear(linear, tiles=4, in_tiles=in_tiles)
    assert not tiled.training and not any(tile.training for tile in tiled.tiles)
    whole = tiled.to_linear()
    assert not whole.training
    expected = dict(linear.named_parameters())
    assert [name for name, _ in whole.named_parameters()] == list(expected)
    for name, param in whole.named_parameters():
        assert torch.equal(param, expected[name])
        assert (param.dtype, param.requires_grad) == (torch.bfloat16, expected[name].requires_grad)
        assert param.data_ptr() != expected[name].data_ptr()


def test_the_devices_and_dtypes_of_linear() -> None:
    assert {p.device.type for p in TiledLinear(8, 8, device="meta", tiles=2).parameters()} == {"meta"}
    with torch.device("meta"):
        assert {p.device.type for p in TiledLinear(8, 8, tiles=2).parameters()} == {"meta"}
    assert {p.dtype for p in TiledLinear(8, 8, dtype=torch.float64, tiles=2).parameters()} == {torch.float64}


def test_a_state_dict_is_loaded_into_another() -> None:
    one, other = (TiledLinear(NUM_IN, NUM_OUT, tiles=3) for _ in range(2))
    other.load_state_dict(one.state_dict())
    x = torch.randn(4, NUM_IN)
    assert torch.equal(one(x), other(x))
    assert "tiles=3, in_tiles=1" in repr(one)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"tiles": 0}, "tiles=0 with out_features=101; use a whole number from 1 to 101"),
        ({"tiles": 2.5}, "tiles=2.5 with out_features=101; use a whole number"),
        ({"tiles": "2"}, "tiles='2' with out_features=101"),
        ({"tiles": 2, "in_tiles": 2.0}, "in_tiles=2.0 with in_features=64"),
        ({"tiles": 102}, "tiles=102 with out_features=101"),
        ({"tiles": 2, "in_tiles": 65}, "in_tiles=65 with in_features=64; use a whole number from 1 to 64"),
    ],
)
def test_impossible_numbers_of_tiles(counts: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TiledLinear(NUM_IN, NUM_OUT, **counts)


# The unit finder.


class InBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(NUM_IN)
        self.up = TiledLinear(NUM_IN, NUM_IN, tiles=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.up(self.norm(x))
        return result


def test_tiles_are_units() -> None:
    model = nn.Sequential(nn.LayerNorm(NUM_IN), TiledLinear(NUM_IN, NUM_OUT, tiles=3, in_tiles=2))
    assert find_units(model) == tuple(f"1.tiles.{index}" for index in range(6))


def test_inside_a_block_they_are_units_where_named() -> None:
    model = nn.Sequential(InBlock(), InBlock())
    assert find_units(model) == ("0", "1")
    tiles = [tile for block in model for tile in block.up.tiles]
    spec = ModelSpec.from_module(model, [InBlock, *tiles])
    named = {unit.name: [param.name for param in unit.params] for unit in spec.units}
    assert named["1"] == ["1.norm.weight", "1.norm.bias"]
    assert named["1.up.tiles.1"] == ["1.up.tiles.1.weight", "1.up.tiles.1.bias"]
    assert len(named) == 6
