"""Figures with a unit in README and docs are of a claim that names its source, or are marked as not measured."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.extensions.claims import KINDS, RECORDS, ROOT, blocks, load, with_notes
from tests.helpers.claims import git, has_commit

CLAIMS = load()
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


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "<!-- claim:" in text])
def test_figures_are_those_of_the_results(page: str) -> None:
    """As they are rounded, in the unit of the file or in GiB of MiB."""
    for block in blocks(PAGES[page]):
        if block.marker == "claim":
            known = {each for name in block.names for result in CLAIMS[name].results for each in numbers(result)}
            strange = [figure for figure in block.figures() if not is_among(figure, known)]
            assert strange == [], f"{page}, line {block.begin + 1}: not in the results of {block.names}"


def is_among(figure: str, known: set[float]) -> bool:
    text = re.match(r"\d[\d,]*(?:\.\d+)?", figure)
    assert text is not None
    value, half = float(text[0].replace(",", "")), 0.5 / 10 ** len(text[0].partition(".")[2])
    return any(abs(each / scale - value) <= half + 1e-9 for each in known for scale in (1, 1024))


def chapter(result: str) -> str:
    """Text of a file of results, or of the chapter of a page that it names."""
    path, _, anchor = result.partition("#")
    text = (ROOT / path).read_text()
    if not anchor:
        return text
    parts = re.split(r"^(?=#+ )", text, flags=re.MULTILINE)
    titles = [re.sub(r"[^\w -]", "", part.split("\n")[0]).strip().lower().replace(" ", "-") for part in parts]
    return parts[titles.index(anchor)]


def numbers(result: str) -> Iterator[float]:
    if result.endswith(".json"):
        yield from leaves(json.loads((ROOT / result).read_text()))
    else:
        yield from (float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*(?:\.\d+)?", chapter(result)))


def leaves(value: object) -> Iterator[float]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    elif isinstance(value, int | float):
        yield float(value)


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
    assert is_among("0.65 s", {0.6456}) and is_among("1.33 GiB", {1362.0}) and is_among("2,408 tokens/s", {2408.3})
    assert not is_among("0.65 s", {0.6439}) and not is_among("57", {58.0})


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
