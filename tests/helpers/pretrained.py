"""A model with everything that a folder of weights may hold, such folders, and jobs of ranks with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import NARROW, TinyLM, build
from tests.helpers.ranks import Case, Outcome, steps
from tests.helpers.reference import param_groups

OURS, THEIRS = 0, 1
"""Seeds: the values a model is built with, and those it is to load."""


class Everything(TinyLM):
    """A tied head, a frozen block, one frozen in part, a frozen integer parameter, buffers of both kinds."""

    def __init__(self, dim: int = NARROW) -> None:
        super().__init__(dim)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)
        self.positions = nn.Parameter(torch.randint(0, 50, (64,)), requires_grad=False)
        self.register_buffer("mean", torch.randn(dim))
        self.register_buffer("calls", torch.randint(0, 50, ()))
        self.register_buffer("mask", torch.rand(dim) > 0.5)
        self.register_buffer("scratch", torch.randn(3), persistent=False)

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(x * self.mask + self.mean.to(x.dtype))


def weights_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """As saved by others: floating parameters in `dtype`, ties once, persistent buffers as they are."""
    params = {
        name: p.detach().to(dtype) if p.is_floating_point() else p.detach() for name, p in model.named_parameters()
    }
    names = model.state_dict().keys()
    return params | {name: buffer for name, buffer in model.named_buffers() if name in names}


def write_weights(path: Path, model: nn.Module, dtype: torch.dtype = torch.float32) -> Path:
    path.mkdir(exist_ok=True)
    save_file(weights_of(model, dtype), path / "model.safetensors")
    return path


def read_folder(path: Path | str) -> dict[str, Tensor]:
    """Every tensor of a folder, by the library."""
    return {name: tensor for file in Path(path).glob("*.safetensors") for name, tensor in load_file(file).items()}


# Jobs of ranks


def _start(case: Case) -> tuple[nn.Module, zo.AdamW]:
    model = build(lambda: Everything(case.dim), OURS)
    zo.offload(model, zo.OffloadConfig(**case.settings))
    return model, zo.AdamW(param_groups(model), lr=1e-2, weight_decay=0.1)


def _read(model: nn.Module) -> dict[str, Tensor]:
    """Values by name, one parameter at a time: the model would not fit the device."""
    found = {}
    for param in model.parameters():
        with zo.gathered([param]) as values:
            found |= {name: value.detach().clone() for name, value in values.items()}
    return found


def load(rank: int, world_size: int, case: Case, path: str) -> tuple[Outcome, dict[str, Tensor]]:
    """Load a folder and train; the parameters as loaded come too."""
    model, optimizer = _start(case)
    try:
        zo.load_pretrained(model, path)
        loaded = _read(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}
        out = Outcome()
        steps(case, (rank, world_size), model, optimizer, range(case.num_steps), out)
        out.params = _read(model)
        return out, loaded
    finally:
        zo.close(model)


def load_of_each(rank: int, world_size: int, case: Case, paths: Sequence[str]) -> None:
    """Plan the load of a folder of the rank's own, and offload."""
    with zo.deferred_init(values="skip"):
        model = build(lambda: Everything(case.dim), OURS)
    zo.load_pretrained(model, paths[rank])
    zo.offload(model, zo.OffloadConfig(**case.settings))


def export(rank: int, world_size: int, case: Case, path: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Train, export, train on; what the model held when it was exported."""
    model, optimizer = _start(case)
    try:
        steps(case, (rank, world_size), model, optimizer, range(2), Outcome())
        zo.export_pretrained(model, path, **arguments)
        params = _read(model)
        steps(case, (rank, world_size), model, optimizer, range(2, 4), Outcome())
        return params
    finally:
        zo.close(model)


def fail_to_write(rank: int, world_size: int, case: Case, path: str) -> None:
    """Export to a drive that fails in the middle."""
    from zero_offload.checkpoint.hf_export import FolderWriter

    model, _ = _start(case)
    left, original = iter(range(5)), FolderWriter.write

    def write(self: FolderWriter, name: str, begin: int, values: Tensor) -> None:
        if next(left, None) is None:
            raise zo.StorageError("the drive is gone")
        original(self, name, begin, values)

    FolderWriter.write = write  # type: ignore[method-assign]
    try:
        zo.export_pretrained(model, path)
    finally:
        FolderWriter.write = original  # type: ignore[method-assign]
        zo.close(model)


def count_reads(rank: int, world_size: int, case: Case, path: str) -> int:
    """Bytes of the tensors that this rank reads to load a folder: what it copies, and what rests in the files."""
    from zero_offload.checkpoint.hf_files import StoredTensor
    from zero_offload.storage.files.base_file import BaseSpan
    from zero_offload.storage.files.base_files import BaseFiles

    model, _ = _start(case)
    counted, copy, fetch = [], StoredTensor.read, BaseFiles.read

    def copy_and_count(self: StoredTensor, begin: int, end: int) -> Tensor:
        values = copy(self, begin, end)
        counted.append(values.nbytes)
        return values

    def fetch_and_count(self: BaseFiles, spans: Sequence[BaseSpan], begin: int, end: int, address: int) -> None:
        fetch(self, spans, begin, end, address)
        counted.extend(max(0, min(span.end, end) - max(span.begin, begin)) for span in spans)

    StoredTensor.read = copy_and_count  # type: ignore[method-assign]
    BaseFiles.read = fetch_and_count  # type: ignore[method-assign]
    try:
        zo.load_pretrained(model, path)
    finally:
        StoredTensor.read, BaseFiles.read = copy, fetch  # type: ignore[method-assign]
        zo.close(model)
    return sum(counted)
