"""Lines of styled text out of parts: flowing on, cut to a width, put side by side. Pure."""

from collections.abc import Sequence

from rich.text import Text

from diloco_tools.top.drawing.notation import Glyphs

LABEL = 10  # columns for the name of a row, its gap included


def flow(
    label: Text,
    parts: Sequence[Text],
    width: int,
    glyphs: Glyphs,
    *,
    indent: int = LABEL,
    gap: int = 2,
) -> list[Text]:
    """`label`, then `parts` one after another, on as many lines as they need."""
    lines = [Text().append_text(label)]  # else the style of the label would be that of the line
    lines[0].append(" " * (indent - label.cell_len))
    for part in parts:
        shown = part
        if part.cell_len > width - indent:
            shown = Text(glyphs.clip(part.plain, width - indent), part.style)
        start = lines[-1].cell_len == indent
        if not start and lines[-1].cell_len + gap + shown.cell_len > width:
            lines.append(Text(" " * indent))
            start = True
        lines[-1].append(" " * (0 if start else gap)).append_text(shown)
    return lines


def cut(text: Text, width: int, glyphs: Glyphs) -> Text:
    """`text` in at most `width` columns; what is cut off at the end leaves a sign."""
    if text.cell_len <= width:
        return text
    shown = text.copy()
    shown.truncate(max(0, width - len(glyphs.ellipsis)))
    return shown.append(glyphs.ellipsis[:width])


def one_line(label: Text, parts: Sequence[Text], width: int, glyphs: Glyphs) -> Text:
    """`label` and as many of `parts` as fit on one line, each whole; a sign stands for the rest."""
    line = Text().append_text(label)
    line.append(" " * (LABEL - label.cell_len))
    shown = [part for part in parts if part.plain]
    for place, part in enumerate(shown):
        gap = 2 if place else 0
        sign = len(glyphs.ellipsis) + 1 if place + 1 < len(shown) else 0
        if line.cell_len + gap + part.cell_len + sign > width:
            left = width - line.cell_len - gap
            # A part that alone is too long is worth its beginning; a short one is not.
            if part.cell_len > LABEL * 2 and left > LABEL:
                return line.append(" " * gap).append_text(cut(part, left, glyphs))
            return line.append(f" {glyphs.ellipsis}") if place else line
        line.append(" " * gap).append_text(part)
    return line


def apart(left: Text, right: Text, width: int, glyphs: Glyphs) -> Text:
    """`left` and `right` at the two ends of one line; the left one gives way."""
    right = cut(right, width, glyphs)
    left = cut(left, max(0, width - right.cell_len - 2 * bool(right.plain)), glyphs)
    line = Text().append_text(left)
    line.append(" " * (width - line.cell_len - right.cell_len))
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
