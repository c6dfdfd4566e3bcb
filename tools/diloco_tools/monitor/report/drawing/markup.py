"""HTML from Python, in which a text is always a text: nothing that is not `Html` becomes markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

VOID = frozenset({"meta", "br"})


class Html(str):
    """Markup of ours. Only `tag`, `joined` and `verbatim` make it."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Html:
    """An element. Children that are not `Html` are escaped, and so is each attribute.

    In names of attributes "_" stands for "-", and one at the end (`class_`) for nothing. An attribute
    that is None is left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """One after the other; those that are not `Html` are escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def verbatim(markup: str) -> Html:
    """What is markup already: only for texts in this program's own files."""
    return Html(markup)
