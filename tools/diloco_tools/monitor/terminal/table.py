"""The table of workers on a terminal: which columns have room, how wide they are. Pure.

Columns give way by rank where the width does not hold all of them, and names are cut in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from diloco_protocol.monitor.fields import TOP, Field, Part, columns
from diloco_protocol.quantities import NONE
from diloco_tools.monitor.terminal.glyphs import QUIET, STYLES, Glyphs

# Columns that give way, the highest rank first; any other stays.
# fmt: off
RANKS = {
    "tokens": 9, "delta_norm": 9, "step": 8, "bytes_up": 7, "bytes_down": 7, "pushes": 6,
    "sync_age_s": 4, "rejected": 3, "state": 2, "rate_up": 1, "rate_down": 1,
}
# fmt: on
NAMES_FIRST = 3  # columns of this rank and above give way before a name is cut
WORDS = ("id", "health", "host", "state")  # columns that stand at the left of their room
LEAST = {"id": 8, "host": 6}  # columns that may be cut, and to what
MOST = {"id": 32, "host": 24}


@dataclass(frozen=True)
class Column:
    """A column that has room."""

    field: Field
    width: int

    def title(self, *, is_sorted: bool) -> Text:
        return self._placed(Text(self.field.title.upper(), "bold" if is_sorted else QUIET))

    def shown(self, part: Part, glyphs: Glyphs) -> Text:
        if self.field.path == "health":
            return self._placed(glyphs.marked(part.text, part.tone))
        text = glyphs.clip(glyphs.printable(part.text), self.width)
        return self._placed(Text(text, STYLES.get(part.tone, "")))

    def _placed(self, text: Text) -> Text:
        text.truncate(self.width)  # a state of absurd length
        text.align("left" if self.field.path in WORDS else "right", self.width)
        return text


def fitted(rows: Sequence[dict[str, Part]], width: int) -> list[Column]:
    """The columns that have room in `width`, with one blank between them."""
    kept = [f for f in columns(TOP) if f.path not in RANKS or _is_known(f, rows)]
    sizes = {field.path: _natural(field, rows) for field in kept}

    def excess(rank: int) -> int:
        """How much too wide the columns are, once names are cut or (for columns of a high rank) not."""
        least = LEAST if rank < NAMES_FIRST else {}
        widths = (min(sizes[f.path], least.get(f.path, 999)) for f in kept)
        return sum(widths) + len(kept) - 1 - width

    while (worst := max(RANKS.get(field.path, 0) for field in kept)) and excess(worst) > 0:
        last = max(n for n, field in enumerate(kept) if RANKS.get(field.path, 0) == worst)
        del kept[last]
    over = sum(sizes[field.path] for field in kept) + len(kept) - 1 - width
    for _ in range(over):
        names = [f for f in kept if sizes[f.path] > LEAST.get(f.path, 999)]
        if not names:
            break
        sizes[max(names, key=lambda f: sizes[f.path]).path] -= 1
    return [Column(field, sizes[field.path]) for field in kept]


def _is_known(field: Field, rows: Sequence[dict[str, Part]]) -> bool:
    return any(row[field.path].text != NONE for row in rows)


def _natural(field: Field, rows: Sequence[dict[str, Part]]) -> int:
    """How wide a column is where there is room for all."""
    sign = 2 * (field.path == "health")
    widest = max((cell_len(row[field.path].text) + sign for row in rows), default=0)
    return max(min(widest, MOST.get(field.path, 16)), len(field.title))
