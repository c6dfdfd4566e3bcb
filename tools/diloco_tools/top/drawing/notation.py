"""How quantities and conditions are written on a terminal: few characters, never a wrong one."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from rich.cells import cell_len, set_cell_size

from diloco_tools.monitor.feed.model import Freshness


@dataclass(frozen=True)
class Glyphs:
    """The signs that a terminal can show: a condition has a sign of its own beside its colour."""

    good: str = "●"
    uneasy: str = "◐"
    bad: str = "○"
    full: str = "█"
    empty: str = "░"
    none: str = "—"
    ellipsis: str = "…"
    arrow: str = "→"
    play: str = "▶"
    above: str = "↑"  # a value beyond the scale of a curve
    below: str = "↓"
    levels: str = "▁▂▃▄▅▆▇█"  # of a sparkline, from the least to the greatest
    encoding: str = "utf-8"

    @staticmethod
    def for_encoding(encoding: str | None) -> "Glyphs":
        """The Unicode signs if `encoding` has all of them, else signs of plain ASCII."""
        unicode = Glyphs(encoding=encoding or "utf-8")
        try:
            "".join(astuple(unicode)[:-1]).encode(unicode.encoding)
        except (UnicodeEncodeError, LookupError):
            return Glyphs.ascii(encoding)
        return unicode

    @staticmethod
    def ascii(encoding: str | None = None) -> "Glyphs":
        """Signs of plain ASCII; names of strangers are written in `encoding`, or ASCII as well."""
        signs = ("+", "!", "x", "#", ".", "-", "~", "->", ">", "^", "v", "_.:-=+*#")
        return Glyphs(*signs, encoding=encoding or "ascii")

    def printable(self, text: str) -> str:
        """`text` of a stranger with what would move the cursor or not encode replaced by "?"."""
        clean = "".join(sign if sign.isprintable() else "?" for sign in text)
        try:
            return clean.encode(self.encoding, "replace").decode(self.encoding)
        except LookupError:
            return clean.encode("ascii", "replace").decode("ascii")

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

    def bar(self, part: int, whole: int, cells: int = 10) -> str:
        """A progress bar; full only when it is."""
        filled = min(cells, cells * max(0, part) // whole) if whole > 0 else 0
        return self.full * filled + self.empty * (cells - filled)

    def chart(
        self,
        values: Sequence[float | None],
        cells: int,
        rows: int = 1,
        scale: tuple[float, float] | None = None,
    ) -> list[str]:
        """The last `cells` values as columns of `rows` lines; a blank for what is no number.

        From the least to the greatest value, or by `scale`: then a sign is where a value is beyond it.
        """
        shown = [v if v is not None and math.isfinite(v) else None for v in values[-cells:]]
        numbers = [v for v in shown if v is not None]
        least, most = scale or ((min(numbers), max(numbers)) if numbers else (0.0, 0.0))
        steps = len(self.levels)
        top = rows * steps - 1

        def column(value: float | None) -> list[str]:
            """One value, from the bottom to the top."""
            if value is None:
                return [" "] * rows
            # A curve that does not move is half high, or flat if it is zero.
            height = top // 2 if most else 0
            if most != least:
                height = int(min(1.0, max(0.0, _share(value, least, most))) * top + 0.5)
            filled = (height - row * steps for row in range(rows))
            signs = [self.levels[min(n, steps - 1)] if n >= 0 else " " for n in filled]
            if value > most:
                signs[-1] = self.above
            elif value < least:
                signs[0] = self.below
            return signs

        columns = [column(value) for value in shown]
        return ["".join(c[row] for c in columns).ljust(cells) for row in reversed(range(rows))]


def _share(value: float, least: float, most: float) -> float:
    """Where `value` lies between the two, 0 to 1; halved first, for differences may overflow."""
    span = most / 2 - least / 2
    return (value / 2 - least / 2) / span if span else 0.5


OK = "green"
UNEASY = "yellow"
BAD = "red"
QUIET = "dim"

LEVEL_STYLES = {"info": "", "warning": UNEASY, "error": BAD}
HEALTH_STYLES = {"ok": OK, "lost": BAD, "dead": BAD}  # any other health is uneasy
FRESHNESS_STYLES = {Freshness.LIVE: OK, Freshness.LATE: UNEASY, Freshness.STALE: BAD}


def marked(word: str, style: str, glyphs: Glyphs) -> tuple[str, str]:
    """Text and style of a condition: its sign says what its colour says."""
    sign = {OK: glyphs.good, BAD: glyphs.bad}.get(style, glyphs.uneasy)
    return f"{sign} {glyphs.printable(word)}", style


def duration(seconds: float) -> str:
    """0.4s, 41s, 12m, 3h, 4d: two significant figures; "?" for what is no age, or beyond 27 years."""
    if not -0.05 < seconds < 9999 * 86400:
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    for size, unit in ((1, "s"), (60, "m"), (3600, "h")):
        if seconds / size < 99.5:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def scaled(value: float, unit: str = "") -> str:
    """0.41, 1.5k, 38M, or with unit "B" 1.5 kB, 38 MB: decimal prefixes, two or three figures."""
    if not math.isfinite(value):
        return "?"
    space = " " if unit else ""
    if 0 < abs(value) < 0.995:
        return f"{value:.2f}{space}{unit}"
    for prefix in ("", "k", "M", "G", "T", "P"):
        # 9.95 and 999.5 are where rounding would need one character more
        if abs(value) < 9.95 and (prefix or value != int(value)):
            return f"{value:.1f}{space}{prefix}{unit}"
        if abs(value) < 999.5:
            return f"{value:.0f}{space}{prefix}{unit}"
        value /= 1000
    return f"{value:.3g}{space}E{unit}"


def byte_size(count: float) -> str:
    """Bytes with decimal prefixes, as networks are sold: 38 MB is 38,000,000 bytes."""
    return scaled(count, "B")


def number(value: float | None, none: str = "-") -> str:
    """A loss, or `none`: three decimals where they mean something, else an exponent."""
    if value is None:
        return none
    if value and math.isfinite(value) and not 0.001 <= abs(value) < 1000:
        return f"{value:.2e}"
    return f"{value:.3f}"
