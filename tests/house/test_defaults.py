"""Whatever the package makes names its dtype and device: torch's defaults for both are the user's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import zero_offload
from tests.house.test_one_importer import aliases_of, path_of, resolved

ROOT = Path(zero_offload.__file__).parent

FACTORIES = frozenset(each.__name__ for each in _device_constructors()) | {"normal"}
"""torch's functions that make a tensor on the default device, as torch lists them."""
NEEDS: dict[str, frozenset[str]] = {
    **{f"torch.{name}": frozenset({"dtype", "device"}) for name in FACTORIES},
    "torch.frombuffer": frozenset({"dtype"}),
    "torch.UntypedStorage": frozenset({"device"}),
}
"""Keywords that a call must have."""
FORBIDDEN = frozenset(
    {"torch.Tensor", "torch.set_default_device", "torch.set_default_tensor_type"}
    | {f"torch.{name}Tensor" for name in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Byte", "Bool")}
)
"""Calls that follow a default, or change one."""
NEEDS_ARGUMENT = frozenset({"torch.Generator", "torch.finfo"})
"""Calls that follow one unless they are told."""
READERS: dict[str, frozenset[str]] = {
    # Inside deferred_init operations run again with the default dtype that they first ran with.
    # A constructor of transformers is asked what it makes of 16 bits as the default.
    "torch.get_default_dtype": frozenset({"model/deferred/recipe.py", "model/deferred/recorder.py", "plan/dtypes.py"}),
    "torch.set_default_dtype": frozenset({"model/deferred/recipe.py", "plan/dtypes.py"}),
    # Modules that a user builds go where torch's own would go; skip_init does not look.
    "torch.get_default_device": frozenset({"model/deferred/recorder.py", "nn/tiled_linear.py", "finetune/gpt.py"}),
}
"""Files that ask for a default, since there it is the user's modules that follow it."""


def faults(source: str, file: str = "") -> list[str]:
    """Calls in a source text that leave a dtype or a device to torch's defaults."""
    tree = ast.parse(source)
    aliases, found = aliases_of(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (path := path_of(node)):
            name = resolved(path, aliases)
            if name in READERS and file not in READERS[name]:
                found.append(f"{file}:{node.lineno}: {name}")
        if not isinstance(node, ast.Call) or not (path := path_of(node.func)):
            continue
        name = resolved(path, aliases)
        missing = NEEDS.get(name, frozenset()) - {keyword.arg for keyword in node.keywords}
        is_told = bool(node.args or node.keywords)
        if missing or name in FORBIDDEN or (name in NEEDS_ARGUMENT and not is_told):
            found.append(f"{file}:{node.lineno}: {name} {', '.join(sorted(missing))}")
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_tensors_name_their_dtype_and_device(path: Path) -> None:
    assert faults(path.read_text(), str(path.relative_to(ROOT))) == []


def test_the_list_has_what_everybody_uses() -> None:
    common = {"empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "eye", "linspace"}
    assert common <= FACTORIES
    assert all(hasattr(torch, name.removeprefix("torch.")) for name in READERS)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.empty(3)",
        "import torch\ntorch.empty(3, dtype=torch.float32)",
        "import torch\ntorch.zeros(3, device='cpu')",
        "import torch as t\nt.tensor(1.0)",
        "from torch import full\nfull((), 1.0, device=d)",
        "import torch\ntorch.frombuffer(b)",
        "import torch\ntorch.Generator()",
        "import torch\ntorch.finfo().max",
        "import torch\ntorch.Tensor([1.0])",
        "import torch\ntorch.get_default_dtype()",
        "from torch import get_default_dtype as g\ng()",
        "import torch\ntorch.UntypedStorage(8)",
    ],
)
def test_the_rule_finds_what_it_forbids(source: str) -> None:
    assert faults(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.empty(3, dtype=torch.int8, device='cpu')",
        "import torch\ntorch.zeros_like(x)",
        "x.new_empty(3)",
        "import numpy as np\nnp.empty(3)",
        "import torch\ntorch.Generator('cpu')\ntorch.finfo(torch.float16)",
        "import torch\ntorch.from_numpy(x)\nisinstance(x, torch.Tensor)",
    ],
)
def test_the_rule_leaves_the_rest_alone(source: str) -> None:
    assert faults(source) == []
