"""Layers and losses that need less memory than torch's: `zo.nn`. Ordinary torch code, offloaded or not."""

from zero_offload.nn.cross_entropy import chunked_cross_entropy
from zero_offload.nn.tiled_linear import TiledLinear

__all__ = ["TiledLinear", "chunked_cross_entropy"]
