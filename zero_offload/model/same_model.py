"""Ranks build the model for themselves, and nothing is broadcast: whether they have all built the same one.

Owns what is compared and the words for a difference. The call: `check_same_model`, on every rank, before anything is
moved. Rank by rank a word per parameter crosses, so a difference has a name.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from torch import nn

from zero_offload.base.errors import ConfigError
from zero_offload.hardware.kernels.checksums import crc32c_of_tensor
from zero_offload.plan.tensor_parallel import local_part
from zero_offload.runtime.ranks.collectives import CommitGroup
from zero_offload.storage.shards.registry import recipe_of

_DIGITS = 8
"""Of a word, hexadecimal."""


def check_same_model(params: Mapping[str, nn.Parameter], ranks: CommitGroup, *, values: bool) -> None:
    """Raise ConfigError on every rank if two that hold the same part of the model have built it differently.

    Its parameters, in order: names, shapes, which are trained, and, with `values`, what they hold; of deferred ones
    what was drawn for them, and nothing where values are still to be loaded. Collective.
    """
    if ranks.world_size == 1:
        return
    counts = [int(word, 16) for word in ranks.gather_digests(f"{len(params):0{_DIGITS}x}")]
    if len(set(counts)) > 1:
        other = next(rank for rank, count in enumerate(counts) if count != counts[0])
        raise ConfigError(
            f"ranks have built different models: of {counts[0]} parameters on rank 0, and of {counts[other]} on rank "
            f"{other}. Build the same one on all ranks"
        )
    mine = "".join(f"{_word(name, param, values):0{_DIGITS}x}" for name, param in params.items())
    every = ranks.gather_digests(mine)
    ranks_per_column = ranks.world_size // ranks.num_columns
    for rank, words in enumerate(every):
        first = rank - rank % ranks_per_column
        if words != every[first]:
            raise _difference(list(params), first, rank, every)


def _word(name: str, param: nn.Parameter, values: bool) -> int:
    described = zlib.crc32(f"{name} {tuple(param.shape)} {param.requires_grad}".encode())
    if not values:
        return described
    recipe = recipe_of(param)
    if recipe is not None and recipe.is_skipped:
        return described
    if recipe is not None:
        return zlib.crc32(recipe.drawn(), described)
    return crc32c_of_tensor(local_part(param).detach().contiguous(), seed=described)


def _difference(names: Sequence[str], first: int, rank: int, every: Sequence[str]) -> ConfigError:
    at = [slice(begin, begin + _DIGITS) for begin in range(0, len(every[rank]), _DIGITS)]
    differ = [name for name, word in zip(names, at, strict=True) if every[first][word] != every[rank][word]]
    others = f" and {len(differ) - 1} other parameters" if differ[1:] else ""
    return ConfigError(
        f"ranks have built different models: {differ[0]}{others} of rank {rank} {'differ' if others else 'differs'} "
        f"from rank {first}'s. Call torch.manual_seed(0) before the model is built, with the same seed on all ranks "
        "(a rank's own may come after zo.offload), or load the same weights on all"
    )
