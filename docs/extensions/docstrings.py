"""Docstrings on the site: ours are plain text with code in backquotes, and Sphinx reads reStructuredText.

Names of our own types in signatures lead to their API pages; names of others, and of types that are not public, stay
text.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

_CODE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")


def as_literals(text: str) -> str:
    """A docstring whose code is literal, and whose other marks mean nothing."""
    parts = _CODE.split(text)
    for at, part in enumerate(parts):
        if at % 2:
            # A literal ends before white space or punctuation; in front of a letter it needs a break that is not seen.
            parts[at] = f"``{' '.join(part.split())}``" + "\\ " * parts[at + 1][:1].isalnum()
        else:
            parts[at] = re.sub(r"([*|_])(?!\w*``)", r"\\\1", part)
    return "".join(parts)


def _process(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    lines[:] = as_literals("\n".join(lines)).split("\n")


def _resolve(app: Sphinx, env: Any, node: Any, contnode: nodes.Element) -> nodes.Node | None:
    """A link to the API page of a public name of ours, else the text."""
    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    package, _, name = node["reftarget"].rpartition(".")
    for target in (f"zero_offload.{name}", f"zero_offload.nn.{name}"):
        if not package.startswith("torch") and target in domain.objects:
            found = domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], target, node, contnode)
            return found or contnode
    return contnode


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True}
