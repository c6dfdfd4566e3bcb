"""The keys of diloco-top: one list for bindings, footer and help. Pure."""

from typing import NamedTuple

from rich.text import Text

from diloco_tools.top.drawing.notation import QUIET, Glyphs


class Key(NamedTuple):
    """`names` as Textual calls them, `sign` as people do; no `sign`: the key before tells of it.

    `label` and `wide` (where there is room) are for the footer, `told` is for the help.
    """

    names: str
    sign: str
    action: str
    label: str = ""
    wide: str = ""
    told: str = ""


STEERING = (
    Key("k", "k", "kick", "Kick", "Kick", "remove the marked worker from the run"),
    Key("s", "s", "save", "Save", "Save", "write a checkpoint now"),
    Key("l", "l", "rate", "LR", "Outer LR", "set the outer learning rate"),
    Key("p", "p", "pause", "Pause", "Pause", "pause the run, or let it go on"),
    Key("S,ctrl+x", "S", "shutdown", "Shutdown", "Shut down", "end the run (also ctrl-x)"),
)
PLAYING = (
    Key("space", "space", "play('toggle')", "Play", "Play/Pause", "play the history, or stop"),
    Key("right", "←→", "play('step', 1)", "Step", "Step", "one line of the history back, or on"),
    Key("left", "", "play('step', -1)"),
    Key("shift+right", "shift-←→", "play('step', 10)", told="ten lines back, or on"),
    Key("shift+left", "", "play('step', -10)"),
    Key("home", "home", "play('first')", "", "First", "the beginning of the history"),
    Key("end", "end", "play('last')", "", "Last", "its end"),
    Key("plus,equals_sign", "+ -", "play('faster', 1)", "Speed", "Speed", "faster, slower"),
    Key("minus", "", "play('faster', -1)"),
)
ORDERING = (
    Key("o", "o", "sort", "Sort", "Sort", "sort by the next column (O: the other way round)"),
    Key("O", "", "reverse"),
    Key("slash", "/", "filter", "Filter", "Filter",
        "only workers with this in id, host, state or health"),
)  # fmt: skip
FREEZE = Key("f", "f", "freeze", "Freeze", "Freeze", "hold the picture still; the feed is read on")
OTHERS = (
    Key("up", "↑↓", "move(-1)", told="mark a worker (also PgUp, PgDn, the mouse)"),
    Key("down", "", "move(1)"),
    Key("pageup", "", "move(-10)"),
    Key("pagedown", "", "move(10)"),
    Key("enter", "enter", "details", "", "Details", "everything about the marked worker"),
    Key("question_mark", "?", "help", "Help", "Help", "this page"),
    Key("q", "q", "quit", "Quit", "Quit", "end diloco-top; the run goes on"),
    Key("escape", "", "clear"),
)
KEYS = (*STEERING, *PLAYING, *ORDERING, FREEZE, *OTHERS)
PLAIN = {"←→": "<- ->", "↑↓": "up/down", "shift-←→": "shift <->"}


def keys_for(*, readonly: bool, replay: bool) -> list[Key]:
    """The keys that mean something in this mode."""
    if replay:
        return [*PLAYING, *ORDERING, *OTHERS]
    return [*(() if readonly else STEERING), *ORDERING, FREEZE, *OTHERS]


def sign(key: Key, glyphs: Glyphs) -> str:
    """What the key is called on this terminal."""
    try:
        key.sign.encode(glyphs.encoding)
    except (UnicodeEncodeError, LookupError):
        return PLAIN.get(key.sign, key.sign)
    return key.sign


def footer(
    keys: list[Key], width: int, glyphs: Glyphs, *, paused: bool = False, frozen: bool = False
) -> Text:
    """One line with the keys, those that switch something named after what they would do now.

    In whole words if there is room for them.
    """
    renamed = {"pause": "Resume"} if paused else {}
    renamed |= {"freeze": "Thaw"} if frozen else {}
    for gap, labels in (("  ", "wide"), (" ", "label")):
        line = Text()
        for key in keys:
            if label := getattr(key, labels):
                line.append(gap if line.plain else " ")
                line.append(sign(key, glyphs), "bold")
                line.append(f" {renamed.get(key.action, label)}", QUIET)
        if line.cell_len <= width:
            break
    return line
