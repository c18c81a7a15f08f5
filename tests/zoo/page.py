"""docs/ZOO.md, made of the outcomes of a run."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.zoo.checks import CHECKS, HOLDS, LEFT_OUT
from tests.zoo.families import TRANSFORMERS, families
from tests.zoo.known import Reason, known, reasons
from tests.zoo.libraries import LIBRARIES

PAGE = Path(__file__).parents[2] / "docs" / "ZOO.md"
HEAD = """# Families of models

After this page you know which families of models train offloaded, and what holds of each.

`make zoo` builds a tiny model of each family, offloads it, and writes this page. A family is a folder of \
`transformers/models`, a class of diffusers' transformers and U-Nets, or a module of timm. The class of a folder is \
the first of a list of heads that it has. timm's column has the name of a model, the smallest of the module.

| column | holds where |
|---|---|
| fed | inputs; "own loss" where the class makes one, else the mean squares of its outputs are the loss |
| steps | 4 steps of AdamW in fp32, all on drives: losses, parameters and buffers are those of the plain model, `==` |
| bf16 | 4 steps on drives have the bits of those in memory |
| generate | greedy tokens with parameters on drives are those of the plain model |
| load | the folder that the library saves, by `zo.load_pretrained`, gives the parameters that the library reads |
| export | `zo.export_pretrained` writes names and values that the library saves, and the library reads them alike |
| kept | of a folder in bf16 the tensors that the class keeps in fp32, and the first loss, are those of \
`from_pretrained`; the parameters that the class freezes are frozen |
| dtypes | a first forward without memory raises for floats of two dtypes where the real one does, and nowhere else; \
a dash where the class needs values for it |
| plan | bytes of the model without memory are those of the model |

A number in a cell is that of a reason below. A dash stands where the class has no such thing, a question mark where \
nothing has been compared yet.
"""
ELSEWHERE = "## On other versions of transformers"
CONSTRAINTS = PAGE.parents[1] / "constraints.txt"
UNKNOWN = "not compared yet"
WORDS = {HOLDS: "yes", LEFT_OUT: "–", UNKNOWN: "?"}
SHOWN = [name for name in CHECKS if name != "inputs"]


Row = dict[str, str]
"""Of a family: its class ("kind"), what it is fed ("fed"), and the outcome of each check by name."""


def write(found: Sequence[Sequence[Any]]) -> None:
    """Families that have not been compared keep their rows. A run on another version of transformers than the pinned
    one writes its own chapter alone."""
    page = PAGE.read_text().splitlines()
    last = page.index(ELSEWHERE) if ELSEWHERE in page else len(page)
    version = importlib.metadata.version(TRANSFORMERS)
    if f"{TRANSFORMERS}=={version}" not in CONSTRAINTS.read_text().splitlines():
        above = "\n".join(page[:last]).rstrip()
        PAGE.write_text("\n".join([above, "", *elsewhere(found, version)]) + "\n")
        return
    rows = kept(page[:last])
    for family, kind, fed, own, check, outcome in found:
        if check:
            rows.setdefault(family, {}).update(kind=kind, fed=f"{fed}, own loss" if own else fed)
            rows[family][check] = outcome
    rows = {name: rows[name] for name in families() if name in rows and known(name) is None}
    below = ["", *page[last:]] if page[last:] else []
    PAGE.write_text("\n".join([*lines(rows), *below]) + "\n")


def elsewhere(found: Sequence[Sequence[Any]], version: str) -> Iterable[str]:
    """Outcomes of a run on another version of transformers, and where they differ from the tables above."""
    rows: dict[str, Row] = {}
    untrained: dict[str, str] = {}
    for family, _, _, _, check, outcome in found:
        if check and families()[family].library == TRANSFORMERS:
            rows.setdefault(family, {})[check] = outcome
        elif not check and known(family) is None:
            untrained[family] = outcome
    yield ELSEWHERE
    yield ""
    yield f"`make zoo` with transformers {version}. Families of the table above that it does not have are left out."
    yield ""
    yield "| library | compared | " + " | ".join(SHOWN) + " |"
    yield "|---|---|" + "---|" * len(SHOWN)
    counts = " | ".join(_count(rows.values(), check) for check in SHOWN)
    yield f"| {TRANSFORMERS} {version} | {len(rows)} | {counts} |"
    yield ""
    others = [(family, "trains", outcome) for family, outcome in untrained.items()]
    others += [(*each, rows[each[0]][each[1]]) for each in _others(rows)]
    yield "Other outcomes than above:" if others else "All outcomes are those above."
    if others:
        yield ""
        yield "| family | column | outcome |"
        yield "|---|---|---|"
        for family, check, outcome in others:
            yield f"| {family} | {'fed' if check == 'inputs' else check} | {outcome.replace('|', '/')} |"


def _others(rows: Mapping[str, Row]) -> Iterable[tuple[str, str]]:
    """Families and checks whose outcome `known.toml` does not have."""
    for family in sorted(rows):
        for check, outcome in rows[family].items():
            reason = known(family, check)
            if outcome not in (HOLDS, LEFT_OUT) if reason is None else reason.says not in outcome:
                yield family, check


def kept(page: Iterable[str]) -> dict[str, Row]:
    """Rows of the page, by family."""
    rows: dict[str, Row] = {}
    for line in page:
        library, name, *cells = [cell.strip() for cell in line.strip("|").split("|")] if "|" in line else ["", ""]
        if library in LIBRARIES and len(cells) == 2 + len(SHOWN):
            row = {"kind": cells[0], "fed": re.sub(r" \(\d+\)$", "", cells[1])}
            outcomes = {word: outcome for outcome, word in WORDS.items()}
            row |= {check: outcomes.get(cell, "no") for check, cell in zip(SHOWN, cells[2:], strict=True)}
            rows[name if library == TRANSFORMERS else f"{library}/{name}"] = row
    return rows


def lines(rows: Mapping[str, Row]) -> Iterable[str]:
    yield HEAD
    yield f"Versions: {', '.join(map(_version, ('transformers', 'diffusers', 'timm', 'torch')))}."
    yield ""
    yield "Of families that train hold:"
    yield ""
    yield "| library | families | of these train | " + " | ".join(SHOWN) + " |"
    yield "|---|---|---|" + "---|" * len(SHOWN)
    for library in LIBRARIES:
        names = [name for name, family in families().items() if family.library == library]
        own = [rows[name] for name in names if name in rows]
        trained = sum(known(name) is None for name in names)
        cells = [library, str(len(names)), str(trained), *(_count(own, check) for check in SHOWN)]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "## Families that train"
    yield ""
    yield "| library | family | class | fed | " + " | ".join(SHOWN) + " |"
    yield "|---|---|---|---|" + "---|" * len(SHOWN)
    numbers = {each: number for number, each in enumerate((each for each in reasons() if each.check), 1)}
    for name, row in rows.items():
        cells = [families()[name].library, name.split("/")[-1], row["kind"], row["fed"]]
        if (reason := known(name, "inputs")) is not None:
            cells[-1] += f" ({numbers[reason]})"
        cells += [_cell(name, check, row.get(check, UNKNOWN), numbers) for check in SHOWN]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "## What does not hold"
    yield ""
    yield "| number | column | whose | reason |"
    yield "|---|---|---|---|"
    for reason, number in numbers.items():
        check = "fed" if reason.check == "inputs" else reason.check
        yield f"| {number} | {check} | {reason.whose} | {reason.reason} |"
    yield ""
    yield "## Families that do not train here"
    yield ""
    yield "| reason | families |"
    yield "|---|---|"
    for reason in (each for each in reasons() if not each.check):
        yield f"| {reason.reason} | {', '.join(reason.families)} |"


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed"


def _count(rows: Iterable[Row], check: str) -> str:
    outcomes = [row.get(check, UNKNOWN) for row in rows]
    return f"{outcomes.count(HOLDS)} of {len(outcomes) - outcomes.count(LEFT_OUT) - outcomes.count(UNKNOWN)}"


def _cell(family: str, check: str, outcome: str, numbers: dict[Reason, int]) -> str:
    if outcome in WORDS:
        return WORDS[outcome]
    reason = known(family, check)
    return f"no ({numbers[reason]})" if reason is not None else "no"
