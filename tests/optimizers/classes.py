"""The classes of the table: how an optimizer of each is built for a list of parameters."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Make = Callable[[list[Any]], torch.optim.Optimizer]

PACKAGES = {
    "torch.optim": "torch",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "came_pytorch": "came-pytorch",
    "galore_torch": "galore-torch",
    "apollo_torch": "apollo-torch",
    "bitsandbytes.optim": "bitsandbytes",
    "torchao.optim": "torchao",
    "heavyball": "heavyball",
    "pytorch_optimizer": "pytorch_optimizer",
}
"""By module: the name of its package, in the order of the page."""


@dataclass(frozen=True)
class Entry:
    """One row of the table."""

    module: str
    kind: str
    settings: str
    """Arguments that are not the class's own, as the page shows them."""
    make: Make

    @property
    def name(self) -> str:
        return f"{self.module}.{self.kind}" + (f" {self.settings}" if self.settings else "")

    @property
    def version(self) -> str:
        return importlib.metadata.version(PACKAGES[self.module])


def entries(module: str) -> Iterator[Entry]:
    """All of a module that is installed."""
    found = importlib.import_module(module)
    yield from _LISTS[module](found)


def _entry(found: Any, kind: str, **arguments: Any) -> Entry:
    shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items() if key != "lr")
    return Entry(found.__name__, kind, shown, lambda params: getattr(found, kind)(params, **arguments))


def _of_torch(found: Any) -> Iterator[Entry]:
    for kind in sorted(found.__all__):
        value = getattr(found, kind)
        if isinstance(value, type) and value is not torch.optim.Optimizer:
            yield _entry(found, kind)
    yield _entry(found, "Adam", amsgrad=True)
    yield _entry(found, "AdamW", foreach=True)
    yield _entry(found, "AdamW", fused=True)
    yield _entry(found, "SGD", momentum=0.9)
    yield _entry(found, "RMSprop", momentum=0.9, centered=True)


def _of_schedulefree(found: Any) -> Iterator[Entry]:
    yield _entry(found, "AdamWScheduleFree", lr=1e-2)
    yield _entry(found, "AdamWScheduleFree", lr=1e-2, foreach=False, warmup_steps=50)
    yield _entry(found, "AdamWScheduleFreeReference", lr=1e-2)
    yield _entry(found, "RAdamScheduleFree", lr=1e-2)
    yield _entry(found, "SGDScheduleFree", lr=1e-2)


def _of_prodigy(found: Any) -> Iterator[Entry]:
    yield _entry(found, "Prodigy")
    yield _entry(found, "Prodigy", slice_p=11)


def _of_came(found: Any) -> Iterator[Entry]:
    yield _entry(found, "CAME", lr=1e-3)


def _projected(found: Any, kind: str, entries_of_group: dict[str, Any], **arguments: Any) -> Entry:
    """Matrices are in a group that names a rank."""

    def make(params: list[Any]) -> torch.optim.Optimizer:
        groups = [
            {"params": [param for param in params if param.dim() != 2]},
            {"params": [param for param in params if param.dim() == 2], **entries_of_group},
        ]
        made: torch.optim.Optimizer = getattr(found, kind)([each for each in groups if each["params"]], **arguments)
        return made

    return Entry(found.__name__, kind, f"rank={entries_of_group['rank']}", make)


def _of_galore(found: Any) -> Iterator[Entry]:
    group = {"rank": 8, "update_proj_gap": 50, "scale": 0.25, "proj_type": "std"}
    yield _projected(found, "GaLoreAdafactor", group, lr=1e-2, relative_step=False, scale_parameter=False)
    yield _projected(found, "GaLoreAdamW", group, lr=1e-2)
    yield _projected(found, "GaLoreAdamW8bit", group, lr=1e-2)


def _of_apollo(found: Any) -> Iterator[Entry]:
    group = {"rank": 8, "proj": "random", "scale_type": "channel", "scale": 1, "update_proj_gap": 50}
    for kind in ("APOLLOAdamW", "QAPOLLOAdamW"):
        yield _projected(found, kind, group | {"proj_type": "std"}, lr=1e-2)


def _of_bitsandbytes(found: Any) -> Iterator[Entry]:
    kinds = ("Adam8bit", "AdamW", "AdamW8bit", "PagedAdamW8bit", "AdEMAMix8bit", "Lion8bit", "RMSprop8bit")
    for kind in (*kinds, "Adagrad8bit", "LAMB8bit"):
        yield _entry(found, kind, lr=1e-3)
    for kind in ("SGD8bit", "LARS8bit"):
        yield _entry(found, kind, lr=1e-3, momentum=0.9)


def _of_torchao(found: Any) -> Iterator[Entry]:
    for kind in ("AdamW4bit", "AdamW8bit", "AdamWFp8"):
        yield _entry(found, kind, lr=1e-3)


def _of_heavyball(found: Any) -> Iterator[Entry]:
    importlib.import_module("heavyball.utils").compile_mode = None  # compilations would take minutes
    for kind in sorted(dir(found)):
        if isinstance(value := getattr(found, kind), type) and issubclass(value, torch.optim.Optimizer):
            yield _entry(found, kind, lr=1e-3)


def _of_pytorch_optimizer(found: Any) -> Iterator[Entry]:
    for name in sorted(found.get_supported_optimizers()):
        kind = found.load_optimizer(name)
        if kind.__module__.partition(".")[0] == found.__name__:
            arguments: dict[str, Any] = {"lr": 1.0 if "dadapt" in name or "prodigy" in name else 1e-3}
            arguments |= {"ranger21": {"num_iterations": 1000}, "bsam": {"num_data": 1000}}.get(name, {})
            yield Entry(found.__name__, kind.__name__, "", _with_groups(kind, arguments))


def _with_groups(kind: Any, arguments: dict[str, Any]) -> Make:
    """Some classes are of groups that say whether they are for Muon."""

    def make(params: list[Any]) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = kind(params, **arguments)
        except (AssertionError, KeyError, RuntimeError, ValueError):
            made = kind([{"params": params, "use_muon": True}], **arguments)
        return made

    return make


_LISTS: dict[str, Callable[[Any], Iterator[Entry]]] = {
    "torch.optim": _of_torch,
    "schedulefree": _of_schedulefree,
    "prodigyopt": _of_prodigy,
    "came_pytorch": _of_came,
    "galore_torch": _of_galore,
    "apollo_torch": _of_apollo,
    "bitsandbytes.optim": _of_bitsandbytes,
    "torchao.optim": _of_torchao,
    "heavyball": _of_heavyball,
    "pytorch_optimizer": _of_pytorch_optimizer,
}
