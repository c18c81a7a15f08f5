"""Texts behind the fields of a dataclass, which the tables of settings show. Needs nothing but Python."""

from __future__ import annotations

import ast
import inspect
import textwrap


def field_texts(cls: type) -> dict[str, str]:
    """The text behind each field, in one line. A field without one is left out."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    texts: dict[str, str] = {}
    name = ""
    for node in body:
        if name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts[name] = " ".join(str(node.value.value).split())
        name = node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else ""
    return texts
