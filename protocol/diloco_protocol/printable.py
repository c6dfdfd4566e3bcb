"""Makes texts of peers safe for logs, terminals and web pages.

Texts are sanitized when they are decoded: line breaks could forge log lines, escape sequences could
control a terminal, and direction marks could make a line look different.
"""

from __future__ import annotations

from typing import Any

# Characters of a text in a message. Our longest texts have the names of a few tensors.
LONGEST_TEXT = 4000
# Nested maps and arrays; ours have 6 levels.
DEEPEST = 32


def printable(text: str) -> str:
    """The text with each unprintable character replaced by a question mark."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def printable_all(value: Any, depth: int = 0) -> Any:
    """A plain value with all texts in it, including keys, made printable.

    Raises:
        ValueError: it has more than `DEEPEST` levels.
    """
    kind = type(value)
    if kind is str:
        return printable(value)
    if (kind is not dict and kind is not tuple and kind is not list) or not value:
        return value
    if depth == DEEPEST:
        raise ValueError(f"more than {DEEPEST} levels")
    if kind is dict:
        return {
            printable(key) if type(key) is str else key: printable_all(item, depth + 1)
            for key, item in value.items()
        }
    return kind([printable_all(item, depth + 1) for item in value])
