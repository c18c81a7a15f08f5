"""Directives that write what the package knows: `settings` of a dataclass, and `commands` with the flags of each.

Both read the code as the site is built, so a page cannot lack a setting or a flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from fields import field_texts
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from zero_offload.cli.main import build_parser


def default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default).replace("'", '"')
    if field.default_factory is dict or field.default_factory is tuple:
        return repr(field.default_factory())
    return "made"


def settings_rows(cls: type) -> Iterator[str]:
    """Rows of Markdown: name, default, text."""
    texts = field_texts(cls)
    for field in dataclasses.fields(cls):
        text = texts.get(field.name, "").replace("|", "\\|")
        yield f"| `{field.name}` | `{default_text(field)}` | {text} |"


def flag_rows(group: argparse._ArgumentGroup) -> Iterator[str]:
    """Rows of Markdown: flag, what it takes, text."""
    for action in group._group_actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
        takes = ""
        if action.choices:
            takes = ", ".join(f"`{choice}`" for choice in action.choices)
        elif action.option_strings and action.nargs != 0:
            metavar = action.metavar if action.metavar is not None else action.dest.upper()
            takes = f"`{' '.join(metavar) if isinstance(metavar, tuple) else metavar}`"
        text = (action.help or "") % {**vars(action), "prog": "zero-offload"}
        yield f"| {names} | {takes} | {' '.join(text.split())} |".replace("<", "&lt;")


class Settings(SphinxDirective):
    """A table of the fields of the dataclass that is named."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module, _, name = self.arguments[0].rpartition(".")
        rows = settings_rows(getattr(importlib.import_module(module), name))
        return self.parse_text_to_nodes("\n".join(["| field | default | meaning |", "|---|---|---|", *rows]))


class Commands(SphinxDirective):
    """A section for each command, with a table for each group of its flags."""

    def run(self) -> list[nodes.Node]:
        choices = next(action.choices for action in build_parser()._actions if isinstance(action.choices, dict))
        lines: list[str] = []
        for name, parser in choices.items():
            lines += [f"## {name}", "", " ".join((parser.description or "").split()), ""]
            for group in parser._action_groups:
                if rows := list(flag_rows(group)):
                    title = {"positional arguments": "argument", "options": "flag"}.get(group.title or "", group.title)
                    lines += [f"| {title} | takes | meaning |", "|---|---|---|", *rows, ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("settings", Settings)
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
