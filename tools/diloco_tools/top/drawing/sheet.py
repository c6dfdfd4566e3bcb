"""Lines of styled text out of parts: flowing on, cut to a width, put side by side. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from diloco_tools.top.drawing.notation import QUIET, Glyphs

LABEL = 10  # columns for the name of a row, its gap included

Part = str | Text


@dataclass(frozen=True)
class Sheet:
    """What lines are written on: so many columns, and the signs that the terminal can show."""

    width: int
    glyphs: Glyphs

    def texts(self, parts: Sequence[Part]) -> list[Text]:
        """The parts that are not empty, each fit for a terminal."""
        made = (part if isinstance(part, Text) else self.text(part) for part in parts)
        return [text for text in made if text.plain]

    def text(self, text: str, style: str = "") -> Text:
        """What a stranger has written, fit for a terminal."""
        return Text(self.glyphs.printable(text), style)

    def words(self, text: str, style: str = "") -> list[Text]:
        """The words of a sentence, fit for a terminal: `flow` breaks it between them."""
        return [Text(word, style) for word in self.glyphs.printable(text).split()]

    def flow(
        self, label: Text, parts: Sequence[Text], *, indent: int = LABEL, gap: int = 2
    ) -> list[Text]:
        """`label`, then `parts` one after another, on as many lines as they need."""
        room = self.width - indent
        lines = [Text().append_text(label)]  # else the style of the label would be that of the line
        lines[0].append(" " * (indent - label.cell_len))
        for part in parts:
            shown = part
            if part.cell_len > room:
                shown = Text(self.glyphs.clip(part.plain, room), part.style)
            start = lines[-1].cell_len == indent
            if not start and lines[-1].cell_len + gap + shown.cell_len > self.width:
                lines.append(Text(" " * indent))
                start = True
            lines[-1].append(" " * (0 if start else gap)).append_text(shown)
        return lines

    def rows(self, label: str, parts: Sequence[Part], most: int | None = None) -> list[Text]:
        """A labelled row on as many lines as it needs, but `most`; a sign stands for the rest."""
        if most == 1:
            return [self.row(label, parts)]
        lines = self.flow(Text(label, QUIET), self.texts(parts))
        return lines if most is None else self.first(lines, most, gap=2)

    def first(self, lines: list[Text], most: int, *, gap: int, style: str = "") -> list[Text]:
        """The first `most` lines, with a sign behind them if there are more."""
        if len(lines) <= most:
            return lines
        sign = Text(" " * gap + self.glyphs.ellipsis, style)
        return [*lines[: most - 1], self.cut(lines[most - 1] + sign)]

    def row(self, label: str, parts: Sequence[Part]) -> Text:
        """A labelled row of as many `parts` as fit on one line, each whole; a sign for the rest."""
        line = Text().append(label, QUIET)
        line.append(" " * (LABEL - line.cell_len))
        shown = self.texts(parts)
        ellipsis = self.glyphs.ellipsis
        for place, part in enumerate(shown):
            gap = 2 if place else 0
            sign = len(ellipsis) + 1 if place + 1 < len(shown) else 0
            if line.cell_len + gap + part.cell_len + sign > self.width:
                left = self.width - line.cell_len - gap
                # A part that alone is too long is worth its beginning; a short one is not.
                if part.cell_len > LABEL * 2 and left > LABEL:
                    cut = Sheet(left, self.glyphs).cut(part)
                    return line.append(" " * gap).append_text(cut)
                return line.append(f" {ellipsis}") if place else line
            line.append(" " * gap).append_text(part)
        return line

    def cut(self, text: Text) -> Text:
        """`text` in at most the width; what is cut off at the end leaves a sign."""
        if text.cell_len <= self.width:
            return text
        shown = text.copy()
        shown.truncate(max(0, self.width - len(self.glyphs.ellipsis)))
        return shown.append(self.glyphs.ellipsis[: self.width])

    def apart(self, left: Text, right: Text) -> Text:
        """`left` and `right` at the two ends of one line; the left one gives way."""
        right = self.cut(right)
        room = max(0, self.width - right.cell_len - 2 * bool(right.plain))
        line = Text().append_text(Sheet(room, self.glyphs).cut(left))
        line.append(" " * (self.width - line.cell_len - right.cell_len))
        return line.append_text(right)


def beside(blocks: Sequence[tuple[Sequence[Text], int]], gap: int = 2) -> list[Text]:
    """Blocks of lines side by side, each as wide as said."""
    lines = []
    for row in range(max((len(block) for block, _ in blocks), default=0)):
        line = Text()
        for place, (block, width) in enumerate(blocks):
            part = block[row].copy() if row < len(block) else Text()
            part.truncate(width)
            line.append(" " * (gap if place else 0)).append_text(part)
            line.append(" " * (width - part.cell_len))
        line.rstrip()
        lines.append(line)
    return lines
