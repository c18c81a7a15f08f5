"""The update on a GPU without one: what Triton compiles it to is the documented list of roundings."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.device_updates import import_triton_update
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import MAX_STATES, ElementType, Rule
from zero_offload.hardware.kernels.fallback.codec import make_codec, make_codes
from zero_offload.hardware.kernels.rules import NUM_SCALARS, SIGNED, STATES, make_rule

NUM_STATES = {rule: len(names) for rule, names in STATES.items()}
NUM_SIGNED = {rule: len(SIGNED.intersection(names)) for rule, names in STATES.items()}

Counts = collections.Counter[str]


class Counted:
    """A number that notes which roundings are done with it."""

    __array_ufunc__ = None  # constants of numpy leave operations to this

    def __init__(self, counts: Counts, kind: str = "real") -> None:
        self.counts, self.kind = counts, kind  # real, whole (a real number that is an integer), or bits

    def note(self, operation: str, other: object) -> Counted:
        if self.kind == "bits":
            return self
        # The number taken off an integer is 1, and exact; the sum with a negative number is a difference.
        if operation == "add" and self.kind == "whole" and isinstance(other, np.float32):
            return self
        self.counts[operation] += 1
        return Counted(self.counts)

    def __getitem__(self, place: int) -> Counted:
        return self

    def __add__(self, other: object) -> Counted:
        return self.note("add", other)

    def __mul__(self, other: object) -> Counted:
        return self.note("mul", other)

    def __truediv__(self, other: object) -> Counted:
        return self.note("div", other)

    def _bits(self, other: object) -> Counted:
        """Of integers, or a comparison: nothing is rounded."""
        return self

    __sub__ = __radd__ = __rsub__ = __add__
    __rtruediv__ = __truediv__
    __and__ = __or__ = __xor__ = __rshift__ = __lshift__ = __rand__ = __ror__ = __rxor__ = _bits
    __lt__ = __gt__ = __le__ = __ge__ = __eq__ = __ne__ = _bits  # type: ignore[assignment]


class Roundings:
    """How many of each kind the documented rules have."""

    def __init__(self) -> None:
        self.counts: Counts = collections.Counter()
        self.real, self.whole, self.bits = (Counted(self.counts, kind) for kind in ("real", "whole", "bits"))
        self.words = SimpleNamespace(
            function=lambda body, name="": body,
            fma=lambda a, b, c: self.real.note("fma", b),
            sqrt=lambda x: self.real.note("sqrt", None),
            divide=lambda a, b: self.real.note("div", b),
            select=lambda condition, then, otherwise: otherwise if isinstance(otherwise, Counted) else then,
            sign=lambda x: x,
            bits=lambda x: self.bits,
            from_bits=lambda x: self.real,
            f32=lambda x: self.whole,
            whole=lambda x: self.bits,
            u32=lambda x: x,
        )


def of_an_element(rule: Rule, format: StateFormat) -> Counts:
    """The gradient's scale among them."""
    made = Roundings()
    make_rule(made.words, rule)(*[made.real] * 6)
    made.real.note("mul", None)
    if format is StateFormat.COMPACT:
        for state in range(NUM_STATES[rule]):
            codes = make_codes(made.words, signed=state < NUM_SIGNED[rule])
            codes.value_of(made.bits, made.real)
            codes.root_of(made.real)
            codes.code_of(made.real, made.real, made.real)
        # The first state has an edge of its own between codes, the others share one.
        for _ in range(min(NUM_STATES[rule], 2)):
            make_codec(made.words).random_edge(made.bits, np.uint32(0))
        # The rule has taken the root of the last state if it has no sign: see [Note: roots] in csrc/optim/rules.inl.
        made.counts["sqrt"] -= NUM_STATES[rule] > NUM_SIGNED[rule]
    return +made.counts


def of_a_block(rule: Rule, format: StateFormat) -> Counts:
    """The scales."""
    made = Roundings()
    for state in range(NUM_STATES[rule] if format is StateFormat.COMPACT else 0):
        codes = make_codes(made.words, signed=state < NUM_SIGNED[rule])
        codes.scale_of(made.bits)
        codes.inverse_of(made.real)
    return +made.counts


@pytest.fixture
def triton_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """To be compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return import_triton_update(monkeypatch, "0")


def compiled(module: Any, rule: Rule, format: StateFormat, value: ElementType, grad: ElementType) -> Any:
    """For an A100."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel, count, compact = module.kernel_of(rule), NUM_STATES[rule], format is StateFormat.COMPACT
    constants: dict[str, Any] = {"RULE": int(rule), "NUM_STATES": count, "NUM_SIGNED": NUM_SIGNED[rule]}
    constants |= {
        "VALUE": int(value),
        "FORMAT": int(format),
        "HAS_BF16_GRAD": grad is ElementType.BF16,
        "BLOCK": module.BLOCK,
    }
    constants |= {f"state{k}": None for k in range(count, MAX_STATES)}
    constants |= {f"scales{k}": None for k in range(count * compact, MAX_STATES)}
    constants |= {"beside": None} if value is ElementType.FP32 else {}
    pointers = {ElementType.FP32: "*fp32", ElementType.BF16: "*i16", ElementType.FP16: "*fp16"}
    signature: dict[str, Any] = {"value": pointers[value], "grad": pointers[grad], "c": ("fp32",) * NUM_SCALARS}
    signature |= dict.fromkeys(("numel", "number", "before", "between"), "i32")
    signature["beside"] = "*fp32" if value is ElementType.FP16 else "*i8" if compact else "*i16"
    for k in range(count):
        codes = "*i8" if k < NUM_SIGNED[rule] else "*u8"
        signature[f"state{k}"] = {StateFormat.FP32: "*fp32", StateFormat.BF16: "*i16"}.get(format, codes)
        signature[f"scales{k}"] = "*fp32"
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    # As arrays from torch's allocator are: the reads and writes of a thread are as wide as they can be.
    aligned = [k for k, kind in enumerate(signature.values()) if isinstance(kind, str) and kind.startswith("*")]
    multiples: dict[Any, Any] = {(k,): [["tt.divisibility", 16]] for k in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=multiples)
    return compile(source, target=GPUTarget("cuda", 80, 32), options=module.OPTIONS)


# Every rule in every format, and with one of them every pair of formats: what is not compiled is not looked at.
CASES = [
    (rule, format, value)
    for rule in Rule
    for format in StateFormat
    for value in ElementType
    if rule is Rule.ADAMW_AMSGRAD or value == (format + 1) % len(ElementType)
]


@pytest.mark.parametrize(("rule", "format", "value"), CASES, ids=lambda each: each.name)
def test_each_rounding_is_one_instruction(
    triton_update: ModuleType, rule: Rule, format: StateFormat, value: ElementType
) -> None:
    """Nothing more is fused, nothing is approximate, subnormal numbers are kept, and no conversion rounds but one."""
    made = compiled(triton_update, rule, format, value, ElementType((value + rule) % len(ElementType)))
    text = made.asm["ptx"]
    assert triton_update.OPTIONS == {"enable_fp_fusion": False}  # of which an older Triton has another default
    assert "ftz" not in text and "approx" not in text
    elements = triton_update.BLOCK // (32 * made.metadata.num_warps)
    expected: Counts = collections.Counter()
    for name, each in of_an_element(rule, format).items():
        expected[name] += each * elements
    expected.update(of_a_block(rule, format))  # a thread has elements of one alone
    found = collections.Counter(re.findall(r"\b(add|sub|mul|div|fma|sqrt|rcp)(?:\.rn)?\.f32\b", text))
    found["add"] += found.pop("sub", 0)
    assert found == expected
    for name in ("div", "sqrt", "fma"):
        assert len(re.findall(rf"\b{name}\.", text)) == found[name]  # none of another kind
    conversions = collections.Counter(re.findall(r"\bcvt\.(?:\w+\.)*(?:b?f16x?2?|f64|f32\.f64)\.f32\b", text))
    assert conversions == ({"cvt.rn.f16.f32": elements} if value is ElementType.FP16 else {})
    assert "f64" not in text


def test_a_kernel_is_compiled_once_for_all_steps_and_places(triton_update: ModuleType) -> None:
    """Triton compiles anew for some values of some integers, of which a key or an element's number may be any."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel = triton_update.kernel_of(Rule.ADAMW)
    backend = make_backend(GPUTarget("cuda", 80, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    rest = [None] * kernel.arg_names.index("c")
    constants = dict.fromkeys(("RULE", "NUM_STATES", "NUM_SIGNED", "VALUE", "HAS_BF16_GRAD", "FORMAT", "BLOCK"), 0)

    def kinds(*numbering: int) -> Any:
        return bind(*rest, (0.5,) * NUM_SCALARS, 1024, *numbering, **constants)[1]

    int32 = triton_update.int32
    seen = [kinds(*(int32(word) for word in words)) for words in [(0, 1, 16), (1, 0, 2**32 - 1), (2**31, 2**33 + 5, 3)]]
    assert seen[0] == seen[1] == seen[2]
    assert kinds(0, 1, 2**31) != seen[0]  # which is why they are int32
    assert [int32(word) for word in (5, 2**31, 2**32 - 1, 2**32 + 7)] == [5, -(2**31), -1, 7]
