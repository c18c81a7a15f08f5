"""`TiledLinear`: a linear layer in tiles, each a module of its own.

Owns how weight and bias are cut and how the tiles' results are put together; each tile is an ordinary `nn.Linear`.
Knows nothing of tiers: that only some tiles are in memory at a time is `zo.offload`'s work, for which each may be
a unit.

Calls, in order: `TiledLinear(...)` or `TiledLinear.from_linear(linear, ...)` -> `layer(x)`, and `to_linear()` back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from numbers import Integral

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ConfigError

GRAIN = 64
"""Tiles of large layers are multiples of it: kernels like it, and the products tried then round as the whole does."""


class TiledLinear(nn.Module):
    """`nn.Linear` cut into `tiles` along out_features, and each of those into `in_tiles` along in_features.

    The arguments are those of `nn.Linear`; cut along out_features only, so are the initial values for one seed. Any
    sizes can be cut; tiles differ by at most 64 and what remains. The output is nn.Linear's as far as a product with
    fewer columns rounds alike. On the CPU tried it does, with tiles of 64 columns or more. With `in_tiles` it is a sum
    and differs in the last bits. So does the gradient of the input: a sum over the tiles of all rows, in its dtype.

    `self.tiles` holds the tiles, row after row; the first of a row has its bias. `zo.offload` takes each for a unit,
    except inside a repeated block, which is a unit as a whole. There, name them:
    `zo.offload(model, config, units=[Block, *(tile for block in model.blocks for tile in block.up.tiles)])`.

    Raises ConfigError for a number of tiles that the layer cannot have.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        tiles: int,
        in_tiles: int = 1,
    ) -> None:
        super().__init__()
        _check_tiles("tiles", tiles, "out_features", out_features)
        _check_tiles("in_tiles", in_tiles, "in_features", in_features)
        self.in_features, self.out_features = in_features, out_features
        self.in_sizes, self.out_sizes = _sizes(in_features, in_tiles), _sizes(out_features, tiles)
        # The values are drawn once, in `reset_parameters`; skip_init knows no default device.
        device = torch.get_default_device() if device is None else device
        self.tiles = nn.ModuleList(
            nn.utils.skip_init(nn.Linear, num_in, num_out, bias=bias and column == 0, device=device, dtype=dtype)
            for num_out in self.out_sizes
            for column, num_in in enumerate(self.in_sizes)
        )
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, tiles: int, in_tiles: int = 1) -> TiledLinear:
        """A copy of `linear`, in tiles: values, dtype, device, and what is trainable."""
        with torch.device("meta"):
            tiled = cls(
                linear.in_features,
                linear.out_features,
                linear.bias is not None,
                dtype=linear.weight.dtype,
                tiles=tiles,
                in_tiles=in_tiles,
            )
        tiled.to_empty(device=linear.weight.device)
        tiled.train(linear.training)
        with torch.no_grad():
            for tile, rows, columns in tiled._placed():
                tile.weight.copy_(linear.weight[rows, columns])
                tile.weight.requires_grad_(linear.weight.requires_grad)
                if tile.bias is not None:
                    tile.bias.copy_(linear.bias[rows])
                    tile.bias.requires_grad_(linear.bias.requires_grad)
        return tiled

    def to_linear(self) -> nn.Linear:
        """A copy as one nn.Linear. Of an offloaded layer, inside `with zo.gathered(layer):`."""
        first = self.tiles[0]
        assert isinstance(first, nn.Linear)
        linear: nn.Linear = nn.utils.skip_init(
            nn.Linear,
            self.in_features,
            self.out_features,
            bias=first.bias is not None,
            device=first.weight.device,
            dtype=first.weight.dtype,
        )
        linear.train(self.training)
        linear.weight.requires_grad_(first.weight.requires_grad)
        with torch.no_grad():
            for tile, rows, columns in self._placed():
                linear.weight[rows, columns] = tile.weight
                if tile.bias is not None:
                    linear.bias[rows] = tile.bias
                    linear.bias.requires_grad_(tile.bias.requires_grad)
        return linear

    def reset_parameters(self) -> None:
        """nn.Linear's distribution, in its order: all weights, then all biases."""
        # kaiming_uniform_ of the whole weight; asked of a tile, it would take the tile's width for the layer's.
        std = nn.init.calculate_gain("leaky_relu", math.sqrt(5)) / math.sqrt(self.in_features)
        bound, bias_bound = math.sqrt(3.0) * std, 1 / math.sqrt(self.in_features)
        for tile, _, _ in self._placed():
            nn.init.uniform_(tile.weight, -bound, bound)
        for tile, _, _ in self._placed():
            if tile.bias is not None:
                nn.init.uniform_(tile.bias, -bias_bound, bias_bound)

    def forward(self, input: Tensor) -> Tensor:
        pieces = input.split(self.in_sizes, dim=-1)
        tiles = iter(self.tiles)
        rows = []
        for _ in self.out_sizes:
            # Each tile gets a view of its own: a unit's backward is over when the gradient of its input is complete.
            # That of a common input is complete after the last tile only, and all of them would stay until then.
            products = (next(tiles)(piece.view_as(piece)) for piece in pieces)
            rows.append(functools.reduce(torch.add, products))
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"tiles={len(self.out_sizes)}, in_tiles={len(self.in_sizes)}"
        )

    def _placed(self) -> Iterator[tuple[nn.Linear, slice, slice]]:
        """Every tile, and the rows and columns of the whole weight that it is."""
        tiles = iter(self.tiles)
        for rows in _slices(self.out_sizes):
            for columns in _slices(self.in_sizes):
                tile = next(tiles)
                assert isinstance(tile, nn.Linear)
                yield tile, rows, columns


def _check_tiles(name: str, count: int, features: str, size: int) -> None:
    if not isinstance(count, Integral) or not 1 <= count <= size:
        raise ConfigError(f"TiledLinear: {name}={count!r} with {features}={size}; use a whole number from 1 to {size}")


def _sizes(total: int, count: int) -> list[int]:
    """`count` sizes: multiples of `GRAIN` that differ by at most one of it, and the rest with the last."""
    grain = GRAIN if total >= GRAIN * count else 1
    size, larger = divmod(total // grain, count)
    sizes = [grain * (size + 1)] * larger + [grain * size] * (count - larger)
    sizes[-1] += total % grain
    return sizes


def _slices(sizes: list[int]) -> Iterator[slice]:
    begin = 0
    for size in sizes:
        yield slice(begin, begin + size)
        begin += size
