"""docs/OPTIMIZERS.md is made of the results that are kept, and the rows of torch.optim are true."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.optimizers import checks, page
from tests.optimizers.__main__ import CONSTRAINTS
from tests.optimizers.classes import PACKAGES, entries
from tests.unit.optim.unitwise.test_grades import TRAPS

RESULTS = page.load()
ROWS: dict[str, dict[str, Any]] = {row["name"]: row for row in RESULTS["rows"]}
ENTRIES = {entry.name: entry for entry in entries("torch.optim")}


def test_the_page_has_the_results() -> None:
    assert page.PAGE.read_text() == page.text(RESULTS)


def test_versions_are_those_that_are_installed_for_it() -> None:
    pins = CONSTRAINTS.read_text().splitlines()
    found = {(row["module"], row["version"]) for row in ROWS.values()}
    assert {module for module, _ in found} == set(PACKAGES)
    others = {f"{PACKAGES[module]}=={version}" for module, version in found if module != "torch.optim"}
    assert others == {line for line in pins if "==" in line}


def test_every_class_of_torch_has_a_row() -> None:
    assert {name for name, row in ROWS.items() if row["module"] == "torch.optim"} == set(ENTRIES)


@pytest.mark.parametrize("name", ENTRIES)
def test_rows_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SECONDS", 20.0)  # Rprop has a period of 50, on machines that are busy too
    row, entry = ROWS[name], ENTRIES[name]
    found = checks.verdict(entry, row["model"])
    assert (found["grade"], found["reason"]) == (row["grade"], row["reason"])
    assert checks.attempt(lambda: checks.nbytes(entry)) == row["bytes"]


def test_optimizers_that_can_be_stepped_by_sections_have_the_plain_ones_bits() -> None:
    walked = {name: row for name, row in ROWS.items() if row["grade"] in ("elementwise", "separable")}
    assert {name for name, row in walked.items() if row["module"] == "torch.optim"} == set(ENTRIES) - {
        "torch.optim.LBFGS",
        "torch.optim.SparseAdam",
    }
    differ = {name: [row[tier] for tier in checks.TIERS] for name, row in walked.items()}
    itself = "the plain optimizer differs from itself"
    assert {name: bits for name, bits in differ.items() if {*bits} != {"yes"} and itself not in bits[0]} == {}


def test_traps_have_their_verdicts() -> None:
    kept = {name: verdict.partition(":")[0].partition(";")[0] for name, verdict in RESULTS["traps"].items()}
    assert kept == {name: expected.value for name, (_, expected, _) in TRAPS.items()}


def test_a_class_that_has_other_bits_is_seen(tmp_path: Any) -> None:
    """The comparison of a row: here the plain optimizer has another rate."""
    rates = iter((0.1, 0.1, 0.2))
    sgd = ENTRIES["torch.optim.SGD"]
    other = type(sgd)(sgd.module, sgd.kind, "", lambda params: torch.optim.SGD(params, next(rates)))
    assert checks.same_bits(other, "matrices", "cpu", "each", tmp_path) == "blocks.0.weight in step 1"
