"""An optimizer's rule is in each of the places that CONTRIBUTING names, and a missing one is told by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

import zero_offload as zo
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels import rules
from zero_offload.hardware.kernels.fallback import numba_words, torch_words
from zero_offload.optim import optimizers
from zero_offload.optim.optimizer import FusedOptimizer

ROOT = Path(__file__).resolve().parents[2]
HEADER, MATH = "csrc/include/zero_offload.h", "csrc/optim/rules.inl"
PLACES = {
    HEADER: r"\bZO_{}\b",
    "zero_offload/hardware/kernels/rules.py": r"\bRule\.{}: ",
    "zero_offload/optim/optimizers.py": r"\bRule\.{}\b",
    "tests/unit/hardware/kernels/test_rules.py": r"\bRule\.{}\b",
}
"""Files with the text by which a rule stands there."""


def read(*paths: str) -> dict[str, str]:
    return {path: (ROOT / path).read_text() for path in paths}


def missing(names: list[str], texts: Mapping[str, str]) -> list[str]:
    """The places without one of these rules."""
    found = [
        f"{path} has no {name}"
        for name in names
        for path, pattern in PLACES.items()
        if not re.search(pattern.format(name), texts[path])
    ]
    rows = re.search(r"#define ZO_RULES\(Row\)(.*?)\n(?!\s)", texts[MATH], re.DOTALL)
    count = len(re.findall(r"Row\(\w+\)", rows[1])) if rows else 0
    if count != len(names):
        found.append(f"{MATH} has {count} rows in ZO_RULES, for {len(names)} rules")
    number = re.search(r"#define ZO_NUM_RULES (\d+)", texts[HEADER])
    if number is None or int(number[1]) != len(names):
        found.append(f"{HEADER} has another ZO_NUM_RULES than {len(names)}")
    return found


def test_each_rule_is_in_each_place() -> None:
    assert missing([rule.name for rule in Rule], read(*PLACES, MATH)) == []


def test_contributing_lists_the_places() -> None:
    (entry,) = re.findall(r"^\* \*\*optimizer rule\*\*.*$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    for path in (*PLACES, MATH, "zero_offload/hardware/abi.py"):
        assert f"`{path.removeprefix('zero_offload/')}`" in entry, f"CONTRIBUTING does not name {path}"


def test_a_missing_place_is_named() -> None:
    texts, names = read(*PLACES, MATH), [rule.name for rule in Rule]
    assert len(missing([*names, "NEW"], texts)) == len(PLACES) + 2
    for path, pattern in PLACES.items():
        without = texts | {path: re.sub(pattern.format("LION"), "", texts[path])}
        assert missing(names, without) == [f"{path} has no LION"]
    without = texts | {MATH: texts[MATH].replace("Row(LionRule), ", "")}
    assert missing(names, without) == [f"{MATH} has 8 rows in ZO_RULES, for 9 rules"]


def test_every_optimizer_is_public() -> None:
    made = {each for each in vars(optimizers).values() if isinstance(each, type) and issubclass(each, FusedOptimizer)}
    assert {each.__name__ for each in made - {FusedOptimizer}} <= set(zo.__all__)


@pytest.mark.parametrize("words", [numba_words, torch_words], ids=lambda words: words.__name__.rpartition(".")[2])
def test_the_words_have_what_steps_use(words: object) -> None:
    used = {name for formula in rules.FORMULAS.values() for name in formula.step.__code__.co_names}
    lacking = sorted(name for name in used if not name.isupper() and not hasattr(words, name))
    assert lacking == [], f"give them to {words}"
    assert {name for name in used if name.isupper()} <= set(vars(rules))
    by_triton = (ROOT / "zero_offload/hardware/kernels/triton_update.py").read_text()
    (given,) = re.findall(r"_words = SimpleNamespace\((.*)\)", by_triton)
    assert {name for name in used if not name.isupper()} <= set(re.findall(r"(\w+)=", given))
