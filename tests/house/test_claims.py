"""Figures with a unit in README and docs are of a claim that names its source, or are marked as not measured."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.extensions.claims import KINDS, RECORDS, ROOT, blocks, load, with_notes
from tests.helpers.claims import git, has_commit
from tests.helpers.figures import chapter, figures_of, is_as_rounded, keys_of, value_of

CLAIMS = load()
KEYS = keys_of()
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path.parent.name != "decisions" and str(path.relative_to(ROOT)) not in RECORDS
}


def faults_of(text: str) -> Iterator[str]:
    """Markers and figures of a page that the rules forbid."""
    for line, said in enumerate(text.splitlines()):
        if said.lstrip().startswith("<!--") and not re.fullmatch(r"<!-- (claim|figures): [\w, -]+ -->", said):
            yield f"line {line + 1}: not a marker of claims or figures: {said}"
    for block in blocks(text):
        line, figures = block.begin + 1, block.figures() if block.lines else []
        if not block.lines:
            yield f"line {line}: the marker has no block behind it"
        elif figures and not block.marker:
            yield f"line {line}: figures without a claim: {', '.join(figures)} (docs/extensions/claims.py says how)"
        elif block.marker == "figures" and not figures:
            yield f"line {line}: the block has no figures to mark"
        unknown = [name for name in block.names if name not in (CLAIMS if block.marker == "claim" else KINDS)]
        if unknown or (block.marker == "figures" and len(block.names) > 1):
            yield f"line {line}: unknown: {', '.join(block.names)}"


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_of_a_claim(page: str) -> None:
    assert [*faults_of(PAGES[page])] == []


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_has_its_sources(name: str) -> None:
    claim = CLAIMS[name]
    assert all([claim.text, claim.machine, claim.results, claim.paths]) and claim.kind in ("measured", "checked")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", claim.date) and re.fullmatch(r"[0-9a-f]{8}", claim.commit)
    assert [path for path in claim.paths if not (ROOT / path).exists()] == []
    assert all(chapter(result) for result in claim.results)
    target = re.match(r"make ([\w-]+)", claim.script)
    if target:
        assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        scripts = re.findall(r"[\w/*-]+\.(?:py|sh)", claim.script)
        assert scripts and all(any(ROOT.glob(script)) for script in scripts)


def test_every_claim_stands_on_a_page() -> None:
    named = {
        name for text in PAGES.values() for block in blocks(text) if block.marker == "claim" for name in block.names
    }
    assert named == {*CLAIMS}


def test_commits_of_claims_exist() -> None:
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no repository here, or one without history")
    assert [name for name, claim in CLAIMS.items() if not has_commit(claim.commit)] == []


def test_each_figure_has_one_key_of_its_results() -> None:
    """In the order of the page: figures that change places fail, as those that differ from their result."""
    shown = {page: {marker: len(found) for marker, found in figures_of(text).items()} for page, text in PAGES.items()}
    keyed = {page: {marker: len(keys) for marker, keys in markers.items()} for page, markers in KEYS.items()}
    assert {page: counts for page, counts in shown.items() if counts} == keyed


@pytest.mark.parametrize("page", KEYS)
def test_figures_are_those_of_their_keys(page: str) -> None:
    wrong = [
        f"line {line}: {figure}, but {key} is {value}"
        for marker, found in figures_of(PAGES[page]).items()
        for (line, figure), key in zip(found, KEYS[page][marker], strict=True)
        if not is_as_rounded(figure, value := value_of(key, CLAIMS, marker.split(", ")))
    ]
    assert wrong == []


def test_figures_of_another_row_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/choose/recipes.md"
    a, b = "| 4,096 | 2.31 | 1,775 |", "| 8,192 | 3.40 | 2,408 |"
    assert a in PAGES[page] and b in PAGES[page]
    monkeypatch.setitem(PAGES, page, PAGES[page].replace(a, b, 1))
    with pytest.raises(AssertionError, match=r"3\.40, but .*4096 tokens > step_s is 2\.3"):
        test_figures_are_those_of_their_keys(page)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("MoE, bf16: step > ours", "begin with a claim"),
        ("moe-16-layers > MoE, bf16: step > nothing", r"leads to \[\]"),
        ("moe-16-layers > MoE, bf16: step > ours > deeper", r"leads to \[\]"),
        ("moe-16-layers > MoE, bf16: no row > ours", r"leads to \[\]"),
        ("moe-16-layers > MoE, bf16: peak in the group", r"leads to \[\]"),
        ("moe-16-layers > ours", r"leads to \[0\.0, .*\]"),
        ("moe-16-layers > no words # here", r"leads to \[\]"),
    ],
)
def test_a_key_leads_to_one_value(key: str, error: str) -> None:
    with pytest.raises(AssertionError, match=error):
        value_of(key, CLAIMS, ["moe-16-layers", "moe-40-layers"])


@pytest.mark.parametrize(
    "block",
    [
        "It takes 1.5 s.",
        "It takes\n120 MiB.",
        "* 3,100 tokens/s",
        "at 7 GB/s",
        "less than 5%",
        "2.3 times the step",
        "0.36 of that",
        "| | a | s |\n|---|---|---|\n| b | c | 57 |",
        "| a | b |\n|---|---|\n| c | 0.65 |",
    ],
)
def test_figures_are_found(block: str) -> None:
    assert [*faults_of(block)] and [*faults_of(f"<!-- claim: none -->\n{block}")]
    assert [*faults_of(f"<!-- figures: set -->\n{block}")] == []
    assert [*faults_of(f"<!-- figures: set -->\n\n{block}")] and [*faults_of(f"<!-- figures:set -->\n{block}")]


@pytest.mark.parametrize(
    "block",
    [
        "torch 2.10 and Python 3.11",
        "`--ram 64GiB` and [there](hardware.md#24-gb-gpu)",
        "```sh\nsleep 5 s\n```",
        "## 8 GB GPU",
        "two of 4 steps, 8 times",
        "| library | version |\n|---|---|\n| a | 1.15.0 |",
    ],
)
def test_other_numbers_are_left(block: str) -> None:
    assert [*faults_of(block)] == []
    assert block.startswith(("```", "#")) or [*faults_of(f"<!-- figures: set -->\n{block}")]


def test_results_are_compared_as_they_are_rounded() -> None:
    assert is_as_rounded("0.65 s", 0.6456) and is_as_rounded("1.33 GiB", 1362.0)
    assert is_as_rounded("2,408 tokens/s", 2408.3)
    assert not is_as_rounded("0.65 s", 0.6439) and not is_as_rounded("57", 58.0)


def test_the_site_says_when_and_where() -> None:
    name, claim = next(iter(CLAIMS.items()))
    shown = with_notes(f"A\n\n<!-- claim: {name} -->\nB\nC\n\nD\n", ROOT / "docs" / "how" / "performance.md")
    before, note, after = re.split(r"\n\n\{\.claim\}\n(.+)\n", shown)
    assert before.endswith("B\nC") and after == "\nD\n"
    assert note.startswith(f"Measured {claim.date} on {claim.machine}") and claim.script in note
    assert f"](../../{claim.results[0]})" in note


def test_a_claim_that_lacks_a_field_is_refused(tmp_path: Path) -> None:
    text = re.sub(r"^date = .*\n", "", (ROOT / "claims.toml").read_text(), count=1, flags=re.MULTILINE)
    assert tomllib.loads(text)
    (tmp_path / "claims.toml").write_text(text)
    with pytest.raises(TypeError, match="date"):
        load(tmp_path / "claims.toml")
