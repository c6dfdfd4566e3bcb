"""The one widget of the full screen that shows something: lines that somebody else made."""

from collections.abc import Callable

from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from diloco_tools.top.drawing.full_screen import Picture


class Canvas(Widget):
    """Draws lines that somebody else made, and asks for new ones when it has another size."""

    def __init__(self, redraw: Callable[[], None]) -> None:
        super().__init__()
        self.picture = Picture([], [])
        self._redraw = redraw
        self._base = Style()

    def on_resize(self) -> None:
        self._redraw()

    def show(self, drawn: Picture) -> None:
        """Draw this instead; what stays as it was is not drawn again, for that costs the most."""
        before, now = self.picture.lines, drawn.lines
        self.picture, self._base = drawn, self.rich_style
        if len(before) != len(now):
            self.refresh()
            return
        changed = [y for y, line in enumerate(now) if line != before[y]]
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        lines, width = self.picture.lines, self.size.width
        if y >= len(lines):
            return Strip.blank(width, self._base)
        strip = Strip(lines[y].render(self.app.console))
        return strip.adjust_cell_length(width).apply_style(self._base)
