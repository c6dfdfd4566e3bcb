"""The keys of diloco-top: one list for bindings, footer and help."""

from __future__ import annotations

from textual.binding import Binding


def _key(names: str, sign: str, action: str, label: str = "", told: str = "") -> Binding:
    """`sign` is what people call it, `label` is for the footer, `told` for the help."""
    return Binding(names, action, label, show=bool(label), key_display=sign, tooltip=told)


STEERING = (
    _key("k", "k", "order('kick')", "Kick", "remove the marked worker from the run"),
    _key("s", "s", "order('save')", "Save", "write a checkpoint now"),
    _key("l", "l", "order('lr')", "LR", "set the outer learning rate"),
    _key("p", "p", "order('pause')", "Pause", "pause the run, or resume it"),
    _key("S,ctrl+x", "S", "order('shutdown')", "Shutdown", "end the run (also ctrl-x)"),
)
PLAYING = (
    _key("space", "space", "play('toggle')", "Play", "play the history, or stop"),
    _key("right", "→", "play('step', 1)", "On", "one line of the history on (left: back)"),
    _key("left", "←", "play('step', -1)", "Back"),
    _key("shift+right", "shift-→", "play('step', 10)", told="ten lines on (left: back)"),
    _key("shift+left", "shift-←", "play('step', -10)"),
    _key("home", "home", "play('first')", told="the beginning of the history"),
    _key("end", "end", "play('last')", told="its end"),
    _key("plus,equals_sign", "+", "play('faster', 1)", "Faster", "faster (-: slower)"),
    _key("minus", "-", "play('faster', -1)", "Slower"),
)
OTHERS = (
    _key("o", "o", "sort", "Sort", "sort by the next column (O: reverse)"),
    _key("O", "O", "reverse"),
    _key("slash", "/", "filter", "Filter", "only workers with this in id, host, state or health"),
    _key("up", "↑↓", "move(-1)", told="mark a worker (also PgUp, PgDn, the mouse)"),
    _key("down", "↓", "move(1)"),
    _key("pageup", "PgUp", "move(-10)"),
    _key("pagedown", "PgDn", "move(10)"),
    _key("enter", "enter", "details", told="all details of the marked worker"),
    _key("question_mark", "?", "help", "Help", "this page"),
    _key("q", "q", "quit", "Quit", "leave diloco-top; the run goes on"),
    _key("escape", "esc", "clear"),
)
KEYS = (*STEERING, *PLAYING, *OTHERS)


def keys_for(*, readonly: bool, replay: bool) -> list[Binding]:
    """The keys that mean something in this mode."""
    return [*(PLAYING if replay else () if readonly else STEERING), *OTHERS]
