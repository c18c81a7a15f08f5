"""Which tensor of a folder belongs to which of a model, and everything that does not fit, in one error.

Pure but for ties: where the files have a tied tensor twice, both are compared, chunk by chunk. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_offload.base.errors import CheckpointError
from zero_offload.checkpoint.hf_files import StoredTensor
from zero_offload.plan.layout import CHUNK_NUMEL

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Convert into each other; what is narrower is meaningless without scales."""
NAMES_SHOWN = 10


@dataclass(frozen=True)
class Wanted:
    """A parameter or buffer of the model."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    """Several when it is tied."""
    optional: bool = False
    """True if it may be missing in the files: none of its names is in a state dict."""


def match(
    wanted: Sequence[Wanted], stored: Mapping[str, StoredTensor], prefix: str, where: Path
) -> list[StoredTensor | None]:
    """The stored tensor of each wanted one; `prefix` is put before the names in the files.

    Raises CheckpointError that lists what is missing, unknown, of another shape or dtype, or tied and different.
    """
    named = {prefix + name: tensor for name, tensor in stored.items()}
    found = [[named[name] for name in want.names if name in named] for want in wanted]
    known = {name for want in wanted for name in want.names}
    missing = [want.names[0] for want, here in zip(wanted, found, strict=True) if not here and not want.optional]
    unknown = [name for name in stored if prefix + name not in known]
    pairs = [(want.tensor, named[name], name) for want in wanted for name in want.names if name in named]
    shapes = [f"{n} {list(t.shape)} (model: {list(w.shape)})" for w, t, n in pairs if t.shape != tuple(w.shape)]
    dtypes = [f"{n} {t.dtype_name} (model: {w.dtype})" for w, t, n in pairs if not _convertible(t.dtype, w.dtype)]
    problems = [
        *_listed("missing in the files", missing),
        *_listed("unknown to the model", unknown),
        *_listed("of another shape", shapes),
        *_listed("of a dtype that does not convert", dtypes),
    ]
    if not problems:
        ties = zip(wanted, found, strict=True)
        differ = [" and ".join(want.names) for want, here in ties if not all(same_values(here[0], t) for t in here[1:])]
        problems = _listed("tied in the model, with different values in the files", differ)
    if problems:
        remedy = _prefix_hint(missing, unknown, prefix) or "Build the model that the files belong to, or name its files"
        raise CheckpointError("\n".join([f"{where} does not fit this model; nothing was changed:", *problems, remedy]))
    return [here[0] if here else None for here in found]


def adapter_names(names: Iterable[str]) -> list[str]:
    """Of parameters' names, those that only a model with adapters of peft has."""
    return [name for name in names if ".base_layer." in name or name.startswith("base_model.")]


def _listed(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [f"  {len(names)} {what}: {', '.join(names[:NAMES_SHOWN])}{', ...' * (len(names) > NAMES_SHOWN)}"]


def _convertible(source: torch.dtype | None, target: torch.dtype) -> bool:
    return source == target or (source in FLOATS and target in FLOATS)


def _prefix_hint(missing: Sequence[str], unknown: Sequence[str], prefix: str) -> str | None:
    """What to type if all that is unknown becomes known with another prefix."""
    absent = set(missing)
    if prefix and set(unknown) <= absent:
        return f"The model has the names of the files as they are: leave prefix={prefix!r} out"
    for name in missing[:1] if prefix == "" else ():
        for other in unknown:
            if name.endswith(f".{other}"):
                found = name.removesuffix(other)
                if all(found + each in absent for each in unknown):
                    return f'The model has the names of the files behind {found!r}: pass prefix="{found}"'
    return None


def same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """True if two tensors of one shape hold the same numbers."""
    for begin in range(0, one.numel, CHUNK_NUMEL):
        end = min(begin + CHUNK_NUMEL, one.numel)
        mine, theirs = one.read(begin, end), other.read(begin, end)
        if mine.dtype != theirs.dtype:
            mine, theirs = mine.double(), theirs.double()
        if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
            return False
    return True
