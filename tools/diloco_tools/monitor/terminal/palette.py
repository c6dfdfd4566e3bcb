"""How the full screen looks: a calm dark palette of its own, so that it reads the same on any terminal.

Colour carries meaning only: green is well, yellow wants a look, red is lost or stale. What is drawn uses
the names of the eight terminal colours; `COLOURS` says what these are.
"""

from rich.color import Color
from rich.terminal_theme import TerminalTheme
from textual.theme import Theme

BACKGROUND, FOREGROUND = (18, 22, 28), (200, 208, 217)

LINE = Color.parse("#6c8ebf")  # of a sparkline

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
    primary=LINE.name,
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
Screen { background: $background; color: $foreground; overflow: hidden; }
#header, #verdict, #rows, #log, #status, #nobody { padding: 0 1; height: auto; }
#header { height: 1; }
#header.late { background: $warning; color: $background; text-style: bold; }
#header.stale { background: $error; color: $background; text-style: bold; }
#curves { height: 1; padding: 0 1; }
Curve { width: 1fr; height: 1; layout: horizontal; margin-right: 2; }
Curve .caption { width: auto; margin-right: 1; }
Curve Sparkline { width: 1fr; height: 1; }
Sparkline > .sparkline--max-color { color: $primary; }
Sparkline > .sparkline--min-color { color: $primary; }
.tall Curve { layout: vertical; height: 5; }
.tall #curves { height: 5; }
.tall Curve .caption { width: 100%; height: 1; }
.tall Curve Sparkline { width: 100%; height: 4; }
.tall #rows, .tall #curves, .tall #header { margin-bottom: 1; }
#workers { height: 1fr; background: $background; scrollbar-size-vertical: 1; overflow-x: hidden; }
DataTable > .datatable--header { background: $background; color: $foreground 70%; }
DataTable > .datatable--cursor { background: #2b3648; color: $foreground; text-style: bold; }
DataTable > .datatable--hover { background: $background; }
#log { max-height: 12; }
.tall #log { margin-top: 1; }
Footer { background: $background; padding-left: 1; }
FooterKey { background: $background; }
#filter-row { display: none; height: 1; padding: 0 1; }
.filtering #filter-row { display: block; }
#filter-row Static { width: auto; margin-right: 1; }
#filter-row Input { width: 1fr; margin-right: 1; }
Input { background: $panel; color: $foreground; }
ModalScreen { align: center middle; background: $background 40%; }
.dialog { width: 76; max-width: 100%; height: auto; max-height: 100%; padding: 0 2;
    background: $surface; border: round $primary; }
.dialog > .title, .dialog > .said { margin-bottom: 1; }
.dialog > Input { margin-bottom: 1; }
#wrong { display: none; margin-bottom: 1; }
.page { width: 96; }
.page VerticalScroll { height: auto; max-height: 100%; scrollbar-size-vertical: 1; }
.ascii .dialog { border: ascii $primary; }
.ascii VerticalScroll, .ascii #workers { scrollbar-size: 0 0; }
.ascii Sparkline { display: none; }
App:nocolor Input { text-style: underline; }
App:nocolor .datatable--cursor { text-style: reverse; }
"""
