"""What a peer says, fit for a line of a log, a terminal and a page.

Texts are made so where they are decoded, and nowhere else: line breaks forge lines, escapes command a
terminal, marks of direction make a line read other than it is.
"""

from __future__ import annotations

from typing import Any

# Characters of a text in a message. The longest of ours name a few tensors.
LONGEST_TEXT = 4000
# Maps and arrays in each other; ours have 6.
DEEPEST = 32


def printable(text: str) -> str:
    """The same, with a question mark for each character that cannot be printed."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def printable_all(value: Any, depth: int = 0) -> Any:
    """The same with each text in it made printable, and keys as well; of plain values.

    Raises:
        ValueError: there are more than `DEEPEST` levels.
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
