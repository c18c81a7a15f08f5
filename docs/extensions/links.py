"""Pages of the repository outside of docs/: the directive `outside` shows one, and links lead to where it is shown.

Links in Markdown are those that a forge follows too. A link to a page that `OUTSIDE` names leads to the site's page;
links to other files become downloads, as MyST makes them. A link to a file that is missing fails the build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "about/changelog.md",
    "CONTRIBUTING.md": "about/contributing.md",
    "STATUS.md": "about/status.md",
    "benchmarks/results/README.md": "how/figures.md",
    "findings/README.md": "about/findings.md",
    "tests/fake_gpu/README.md": "about/fake-gpu.md",
}
"""Pages, and where the site shows them."""
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)((?:#[^)]*)?)(?=\))")


def moved(text: str, origin: Path, page: Path) -> str:
    """The text of `origin` as `page` has it: links are relative to `page`."""

    def lead(match: re.Match[str]) -> str:
        target = (origin.parent / match[1]).resolve()
        anchor = match[2]
        if target.is_relative_to(ROOT) and (shown := OUTSIDE.get(str(target.relative_to(ROOT)))):
            target = DOCS / shown
            anchor = "" if shown == "index.md" else anchor
        return os.path.relpath(target, page.parent) + anchor

    return _LINK.sub(lead, text)


class Outside(SphinxDirective):
    """The page of the repository that is named, by its path from the root; without its title."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = ROOT / self.arguments[0]
        self.env.note_dependency(str(path))
        text = re.sub(r"\A# .*\n", "", path.read_text())
        page = Path(self.env.doc2path(self.env.docname))
        return self.parse_text_to_nodes(moved(text, path, page), allow_section_headings=True)


def _read(app: Sphinx, docname: str, content: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    content[0] = moved(content[0], page, page)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("outside", Outside)
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
