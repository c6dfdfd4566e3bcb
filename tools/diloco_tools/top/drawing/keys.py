"""The keys of diloco-top: one list for bindings, footer and help. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rich.text import Text

from diloco_tools.top.drawing.notation import QUIET, Glyphs


class When(Enum):
    """Where a key means something."""

    ALWAYS = "always"
    CONTROL = "control"  # changes the run: not with --readonly, not in a replay
    LIVE = "live"  # not in a replay
    REPLAY = "replay"


@dataclass(frozen=True)
class Key:
    """`names` as Textual calls them, `sign` as people do; no `sign`: the key before tells of it.

    `label` and `wide` are for the footer, `told` is for the help.
    """

    names: str
    sign: str
    action: str
    label: str
    wide: str  # the label where there is room
    told: str
    when: When = When.ALWAYS


KEYS = (
    Key("k", "k", "kick", "Kick", "Kick", "remove the marked worker from the run", When.CONTROL),
    Key("s", "s", "save", "Save", "Save", "write a checkpoint now", When.CONTROL),
    Key("l", "l", "rate", "LR", "Outer LR", "set the outer learning rate", When.CONTROL),
    Key("p", "p", "pause", "Pause", "Pause", "pause the run, or let it go on", When.CONTROL),
    Key("S,ctrl+x", "S", "shutdown", "Shutdown", "Shut down", "end the run (also ctrl-x)",
        When.CONTROL),
    Key("space", "space", "play", "Play", "Play/Pause", "play the history, or stop", When.REPLAY),
    Key("right", "←→", "step(1)", "Step", "Step", "one line of the history back, or on", When.REPLAY),
    Key("left", "", "step(-1)", "", "", "", When.REPLAY),
    Key("shift+right,shift+left", "shift-←→", "", "", "", "ten lines back, or on", When.REPLAY),
    Key("home", "home", "first", "", "First", "the beginning of the history", When.REPLAY),
    Key("end", "end", "last", "", "Last", "its end", When.REPLAY),
    Key("plus,equals_sign,minus", "+ -", "", "Speed", "Speed", "faster, slower", When.REPLAY),
    Key("o", "o", "sort", "Sort", "Sort", "sort by the next column (O: the other way round)"),
    Key("slash", "/", "filter", "Filter", "Filter",
        "only workers with this in id, host, state or health"),
    Key("f", "f", "freeze", "Freeze", "Freeze", "hold the picture still; the feed is read on",
        When.LIVE),
    Key("up,down,pageup,pagedown", "↑↓", "", "", "", "mark a worker (also PgUp, PgDn, the mouse)"),
    Key("enter", "enter", "details", "", "Details", "everything about the marked worker"),
    Key("question_mark", "?", "help", "Help", "Help", "this page"),
    Key("q", "q", "quit", "Quit", "Quit", "end diloco-top; the run goes on"),
)  # fmt: skip
PLAIN = {"←→": "<- ->", "↑↓": "up/down", "shift-←→": "shift <->"}


def keys_for(*, readonly: bool, replay: bool) -> list[Key]:
    """The keys that mean something in this mode."""
    out = {When.LIVE, When.CONTROL} if replay else {When.REPLAY}
    out |= {When.CONTROL} if readonly else set()
    return [key for key in KEYS if key.when not in out]


def sign(key: Key, glyphs: Glyphs) -> str:
    """What the key is called on this terminal."""
    try:
        key.sign.encode(glyphs.encoding)
    except (UnicodeEncodeError, LookupError):
        return PLAIN.get(key.sign, key.sign)
    return key.sign


def footer(
    keys: Sequence[Key], width: int, glyphs: Glyphs, *, paused: bool = False, frozen: bool = False
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
