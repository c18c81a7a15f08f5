"""Words of the glossary on other pages: the first use of each leads to its row, and a mouse there shows its meaning.

Titles, code and links are left as they are, and so are words that everybody knows.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

GLOSSARY = "glossary"
FOLDERS = ("start/", "choose/", "use/", "move/", "read/")
KNOWN = {
    "block",
    "commit",
    "device",
    "fetch",
    "frozen",
    "handle",
    "plan",
    "program",
    "resume",
    "step",
    "update",
    "wear",
}
"""Words of the glossary that are not marked: plain English says nearly the same."""


def anchor(word: str) -> str:
    return "word-" + word.replace(" ", "-")


def _rows(glossary: nodes.document) -> dict[str, nodes.row]:
    """Rows by their word."""
    rows = [row for body in glossary.findall(nodes.tbody) for row in body.findall(nodes.row)]
    return {row.children[0].astext(): row for row in rows}


def _mark(app: Sphinx, page: nodes.document, docname: str) -> None:
    if docname == GLOSSARY:
        for word, row in _rows(page).items():
            row["ids"] = [anchor(word)]
        return
    if not docname.startswith(FOLDERS):
        return
    found = _rows(app.env.get_doctree(GLOSSARY))
    meanings = {word: row.children[1].astext() for word, row in found.items() if word not in KNOWN}
    base = app.builder.get_relative_uri(docname, GLOSSARY)
    for text in [text for text in page.findall(nodes.Text) if _is_prose(text)]:
        if not meanings:
            break
        pattern = "|".join(sorted(map(re.escape, meanings), key=len, reverse=True))
        parts = re.split(rf"\b({pattern})(s?)\b", text.astext())
        if parts[1:]:
            text.parent.replace(text, list(_linked(parts, meanings, base)))


def _is_prose(text: nodes.Text) -> bool:
    parents: list[Any] = []
    node = text.parent
    while node is not None:
        parents.append(node)
        node = node.parent
    left_out = (nodes.title, nodes.literal, nodes.literal_block, nodes.reference, nodes.thead, nodes.image)
    return not any(isinstance(parent, left_out) for parent in parents)


def _linked(parts: list[str], meanings: dict[str, str], base: str) -> Any:
    """The text with links at the words that are met for the first time, which are taken out of `meanings`."""
    plain = parts[0]
    for word, plural, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        # "Rank 16" is LoRA's.
        if word not in meanings or re.match(r" \d", rest):
            plain += word + plural + rest
            continue
        meaning = meanings.pop(word)
        yield nodes.Text(plain)
        target = f"{base}#{anchor(word)}"
        yield nodes.reference("", word + plural, internal=True, refuri=target, reftitle=meaning, classes=["word"])
        plain = rest
    yield nodes.Text(plain)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", _mark)
    return {"parallel_read_safe": True}
