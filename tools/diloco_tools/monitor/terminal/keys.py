"""The keys of diloco-top: one list for bindings, footer and help."""

from __future__ import annotations

from typing import NamedTuple

from textual.binding import Binding

from diloco_tools.monitor.terminal.glyphs import Glyphs


class Key(NamedTuple):
    """`names` as Textual calls them, `sign` as people do; no `sign`: the key before explains it.

    `label` is for the footer, `told` for the help.
    """

    names: str
    sign: str
    action: str
    label: str = ""
    told: str = ""


STEERING = (
    Key("k", "k", "kick", "Kick", "remove the marked worker from the run"),
    Key("s", "s", "save", "Save", "write a checkpoint now"),
    Key("l", "l", "rate", "LR", "set the outer learning rate"),
    Key("p", "p", "pause", "Pause", "pause the run, or resume it"),
    Key("p", "", "resume", "Resume"),
    Key("S,ctrl+x", "S", "shutdown", "Shutdown", "end the run (also ctrl-x)"),
)
PLAYING = (
    Key("space", "space", "play('toggle')", "Play", "play the history, or stop"),
    Key("right", "→", "play('step', 1)", "On", "one line of the history on (left: back)"),
    Key("left", "←", "play('step', -1)", "Back"),
    Key("shift+right", "shift-→", "play('step', 10)", told="ten lines on (left: back)"),
    Key("shift+left", "", "play('step', -10)"),
    Key("home", "home", "play('first')", told="the beginning of the history"),
    Key("end", "end", "play('last')", told="its end"),
    Key("plus,equals_sign", "+", "play('faster', 1)", "Faster", "faster (-: slower)"),
    Key("minus", "-", "play('faster', -1)", "Slower"),
)
ORDERING = (
    Key("o", "o", "sort", "Sort", "sort by the next column (O: reverse)"),
    Key("O", "", "reverse"),
    Key("slash", "/", "filter", "Filter", "only workers with this in id, host, state or health"),
)
FREEZE = (
    Key("f", "f", "freeze", "Freeze", "freeze the display (data keeps arriving)"),
    Key("f", "", "thaw", "Thaw"),
)
OTHERS = (
    Key("up", "↑↓", "move(-1)", told="mark a worker (also PgUp, PgDn, the mouse)"),
    Key("down", "", "move(1)"),
    Key("pageup", "", "move(-10)"),
    Key("pagedown", "", "move(10)"),
    Key("enter", "enter", "details", told="all details of the marked worker"),
    Key("question_mark", "?", "help", "Help", "this page"),
    Key("q", "q", "quit", "Quit", "leave diloco-top; the run goes on"),
    Key("escape", "", "clear"),
)
KEYS = (*STEERING, *PLAYING, *ORDERING, *FREEZE, *OTHERS)
PLAIN = {"→": "right", "←": "left", "↑↓": "up/down", "shift-→": "shift-right"}
# Pairs of actions of one key, of which one applies at a time.
SWITCHES = {"pause": False, "resume": True, "freeze": False, "thaw": True}


def keys_for(*, readonly: bool, replay: bool) -> list[Key]:
    """The keys that mean something in this mode."""
    if replay:
        return [*PLAYING, *ORDERING, *OTHERS]
    return [*(() if readonly else STEERING), *ORDERING, *FREEZE, *OTHERS]


def sign(key: Key, glyphs: Glyphs) -> str:
    """What the key is called on this terminal."""
    try:
        key.sign.encode(glyphs.encoding)
    except (UnicodeEncodeError, LookupError):
        return PLAIN.get(key.sign, key.sign)
    return key.sign


def bindings(keys: list[Key], glyphs: Glyphs) -> list[Binding]:
    """Of all keys; the footer shows those of `keys` that have a label."""
    return [
        Binding(
            key.names,
            key.action,
            key.label,
            show=bool(key.label) and key in keys,
            key_display=sign(key, glyphs) or key.names,
        )
        for key in KEYS
    ]
