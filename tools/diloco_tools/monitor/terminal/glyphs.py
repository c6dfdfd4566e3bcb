"""The signs and colours of a terminal: a condition has a sign of its own beside its colour."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from diloco_protocol.monitor.fields import BAD, GOOD, UNEASY, Part
from diloco_tools.monitor.feed.model import Freshness

QUIET = "dim"
STYLES = {"": "", GOOD: "green", UNEASY: "yellow", BAD: "red"}  # of tones
LEVELS = {"info": "", "warning": UNEASY, "error": BAD}  # tones of events
FRESHNESS = {Freshness.LIVE: GOOD, Freshness.LATE: UNEASY, Freshness.STALE: BAD}


@dataclass(frozen=True)
class Glyphs:
    """The signs that a terminal can show."""

    good: str = "●"
    uneasy: str = "◐"
    bad: str = "○"
    none: str = "—"
    ellipsis: str = "…"
    arrow: str = "→"
    play: str = "▶"
    above: str = "↑"  # a value beyond the scale of a curve
    below: str = "↓"
    levels: str = "▁▂▃▄▅▆▇█"  # of a sparkline
    encoding: str = "utf-8"

    @staticmethod
    def for_encoding(encoding: str | None) -> Glyphs:
        """The Unicode signs if `encoding` has all of them, else signs of plain ASCII."""
        unicode = Glyphs(encoding=encoding or "utf-8")
        try:
            "".join(astuple(unicode)[:-1]).encode(unicode.encoding)
        except (UnicodeEncodeError, LookupError):
            return Glyphs.ascii(encoding)
        return unicode

    @staticmethod
    def ascii(encoding: str | None = None) -> Glyphs:
        """Signs of plain ASCII; names are written in `encoding`, or ASCII as well."""
        signs = ("+", "!", "x", "-", "~", "->", ">", "^", "v", "_.:-=+*#")
        return Glyphs(*signs, encoding=encoding or "ascii")

    @property
    def is_ascii(self) -> bool:
        return self.ellipsis.isascii()

    def printable(self, text: str) -> str:
        """`text` with what would move the cursor or does not encode replaced."""
        clean = "".join(sign if sign.isprintable() else "?" for sign in text)
        clean = clean.replace("—", self.none)
        try:
            return clean.encode(self.encoding, "replace").decode(self.encoding)
        except LookupError:
            return clean.encode("ascii", "replace").decode("ascii")

    def text(self, part: Part) -> Text:
        """A part of a row in its colour."""
        return Text(self.printable(part.text), STYLES.get(part.tone, ""))

    def marked(self, word: str, tone: str) -> Text:
        """A condition: its sign says what its colour says."""
        sign = {GOOD: self.good, BAD: self.bad}.get(tone, self.uneasy)
        return Text(f"{sign} {self.printable(word)}", STYLES[tone])

    def clip(self, text: str, cells: int) -> str:
        """`text` in at most `cells` columns, cut in the middle: names differ at either end."""
        if cell_len(text) <= cells:
            return text
        head = (cells - 1) // 2
        tail = cells - 1 - head
        end = text[-tail:] if tail else ""
        while cell_len(end) > tail:
            end = end[1:]
        return set_cell_size(text, head) + self.ellipsis + end if cells > 0 else ""
