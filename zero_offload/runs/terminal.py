"""Text that models and files bring, before it goes to a terminal."""

from __future__ import annotations

import unicodedata

_JOINERS = "\u200c\u200d"
"""Parts of words in some scripts, and of emoji."""


def printable(text: str) -> str:
    """`text` with U+FFFD in place of what would steer a terminal. Lines, tabs and spaces of all kinds stay."""
    return "".join(letter if _is_printable(letter) else "\ufffd" for letter in text)


def _is_printable(letter: str) -> bool:
    return letter.isprintable() or letter in "\n\t" + _JOINERS or unicodedata.category(letter) == "Zs"
