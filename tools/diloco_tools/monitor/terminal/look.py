"""The signs and colours of a terminal: a condition has a sign of its own beside its colour."""

from __future__ import annotations

import codecs

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from diloco_protocol.monitor.fields import BAD, GOOD, UNEASY, Part
from diloco_tools.monitor.feed.model import Freshness

QUIET = "dim"
STYLES = {"": "", GOOD: "green", UNEASY: "yellow", BAD: "red"}  # of tones
SIGNS = {GOOD: "●", UNEASY: "◐", BAD: "○"}
FRESHNESS = {Freshness.LIVE: GOOD, Freshness.LATE: UNEASY, Freshness.STALE: BAD}
# What stands for a sign where the terminal does not have it; as wide.
ASCII = str.maketrans("●◐○—…→←▶↑↓▁▂▃▄▅▆▇█│─╭╮╰╯", "+!x-~><>^v_.:-=+*#|-++++")


def charset(name: str | None) -> str:
    """The encoding of a terminal; ASCII if it is unknown."""
    try:
        return codecs.lookup(name or "utf-8").name
    except LookupError:
        return "ascii"


def fitted_to(encoding: str, text: str) -> str:
    """`text` as it is, or in signs that the encoding has; in as many columns."""

    def known(sign: str) -> str:
        try:
            sign.encode(encoding)
        except UnicodeEncodeError:
            return "?" * cell_len(sign)
        return sign

    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(map(known, text.translate(ASCII)))
    return text


def styled(part: Part) -> Text:
    """A part of a row in its colour."""
    return Text(part.text, STYLES.get(part.tone, ""))


def marked(part: Part) -> Text:
    """A condition: its sign says what its colour says."""
    return Text(f"{SIGNS.get(part.tone, SIGNS[UNEASY])} {part.text}", STYLES[part.tone])


def clipped(text: str, cells: int) -> str:
    """`text` in at most `cells` columns, cut in the middle: names differ at either end."""
    if cell_len(text) <= cells:
        return text
    head = (cells - 1) // 2
    end = text[head + 1 - cells :] if cells > head + 1 else ""
    while cell_len(end) > cells - 1 - head:
        end = end[1:]
    return set_cell_size(text, head) + "…" + end if cells > 0 else ""


def on_one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
