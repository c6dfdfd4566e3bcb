"""How the full screen looks: a calm dark palette of its own, so that it reads the same on any terminal.

Colour carries meaning only: green is well, yellow wants a look, red is lost or stale. What is drawn uses
the names of the eight terminal colours; `COLOURS` says what these are.
"""

from rich.terminal_theme import TerminalTheme
from textual.theme import Theme

BACKGROUND, FOREGROUND = (18, 22, 28), (200, 208, 217)

COLOURS = TerminalTheme(
    BACKGROUND,
    FOREGROUND,
    [
        (38, 45, 55),  # black
        (229, 100, 90),  # red: lost, stale, error
        (127, 176, 105),  # green: well
        (217, 164, 65),  # yellow: slow, late, warning
        (108, 142, 191),
        (165, 140, 190),
        (110, 170, 175),
        FOREGROUND,
    ],
)

THEME = Theme(
    name="diloco",
    primary="#6c8ebf",
    foreground="#c8d0d9",
    background="#12161c",
    surface="#181d25",
    panel="#1d232c",
    success="#7fb069",
    warning="#d9a441",
    error="#e5645a",
    dark=True,
)

CSS = """
Screen { background: $background; color: $foreground; overflow: hidden; layers: below; }
Canvas { width: 1fr; height: 1fr; }
#filter-row { display: none; height: 1; padding: 0 1; }
#filter-row.open { display: block; }
#filter-row Static { width: 8; }
#filter-row Input { width: 1fr; }
Input { background: $panel; color: $foreground; }
ModalScreen { align: center middle; background: $background 40%; }
.dialog { width: 76; max-width: 100%; height: auto; max-height: 100%; padding: 0 2;
    background: $surface; border: round $primary; }
.dialog > .title, .dialog > .said { margin-bottom: 1; }
.dialog > Input { margin-bottom: 1; }
#wrong { display: none; margin-bottom: 1; }
.page VerticalScroll { height: auto; max-height: 100%; }
.ascii .dialog { border: ascii $primary; }
.ascii VerticalScroll { scrollbar-size: 0 0; }
App:nocolor Input { text-style: underline; }
"""
