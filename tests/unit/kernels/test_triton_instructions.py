"""The update on a GPU without one: what Triton compiles it to is the documented list of roundings."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.device_updates import import_triton_update
from zero_offload.abi import Rule
from zero_offload.kernels.fallback.rules import NUM_SCALARS, NUM_STATES, make_rule


class Counted:
    """A number that notes what is done with it."""

    def __init__(self, counts: collections.Counter[str]) -> None:
        self.counts = counts

    def _note(self, operation: str) -> Counted:
        self.counts[operation] += 1
        return self

    def __getitem__(self, place: int) -> Counted:
        return self

    def __add__(self, other: Counted) -> Counted:
        return self._note("add")

    def __sub__(self, other: Counted) -> Counted:
        return self._note("sub")

    def __mul__(self, other: Counted) -> Counted:
        return self._note("mul")

    def __truediv__(self, other: Counted) -> Counted:
        return self._note("div")


def operations_of(rule: Rule) -> collections.Counter[str]:
    """How many roundings of each kind the documented rule has for an element, the gradient's scale among them."""
    counts: collections.Counter[str] = collections.Counter({"mul": 1})
    number = Counted(counts)
    words = SimpleNamespace(
        fma=lambda a, b, c: number._note("fma"),
        sqrt=lambda x: number._note("sqrt"),
        greater=lambda a, b: number,
        sign=lambda x: number,
    )
    make_rule(words, rule)(*[number] * 6)
    return counts


@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name)
def test_each_rounding_is_one_instruction(rule: Rule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled for an A100: nothing more is fused, nothing is approximate, and subnormal numbers are kept."""
    module = import_triton_update(monkeypatch, "0")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    count = NUM_STATES[rule]
    constants = {"RULE": int(rule), "NUM_STATES": count, "IS_SPLIT": True, "HAS_BF16_GRAD": True, "BLOCK": module.BLOCK}
    constants |= {f"state{k}": None for k in range(count, 3)}
    signature = {"value": "*i16", "residual": "*i16", "grad": "*i16", "c": ("fp32",) * NUM_SCALARS, "numel": "i32"}
    signature |= {f"state{k}": "*fp32" for k in range(count)} | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in module._update.arg_names}
    source = ASTSource(fn=module._update, signature=signature, constexprs=constants)
    compiled = compile(source, target=GPUTarget("cuda", 80, 32), options=module.OPTIONS)
    text = compiled.asm["ptx"]
    assert module.OPTIONS == {"enable_fp_fusion": False}  # of which an older Triton has another default
    assert "ftz" not in text and "approx" not in text
    found = collections.Counter(re.findall(r"\b(add|sub|mul|div|fma|sqrt)(?:\.rn)?\.f32\b", text))
    elements = module.BLOCK // (32 * compiled.metadata.num_warps)
    assert found == {name: each * elements for name, each in operations_of(rule).items()}
    for name in ("div", "sqrt", "fma"):
        assert len(re.findall(rf"\b{name}\.", text)) == found[name]  # none of another kind
