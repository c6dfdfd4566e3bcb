"""The keys of diloco-top: one list for bindings, footer and help."""

from textual.binding import Binding


def _key(names: str, sign: str, action: str, label: str = "", help: str = "") -> Binding:
    """`sign` is the displayed key, `label` is for the footer, `help` for the help page."""
    return Binding(names, action, label, show=bool(label), key_display=sign, tooltip=help)


STEERING = (
    _key("k", "k", "order('kick')", "Kick", "remove the marked worker from the run"),
    _key("s", "s", "order('save')", "Save", "write a checkpoint now"),
    _key("l", "l", "order('lr')", "LR", "set the outer learning rate"),
    _key("p", "p", "order('pause')", "Pause", "pause the run, or resume it"),
    _key("S,ctrl+x", "S", "order('shutdown')", "Shutdown", "end the run (also ctrl-x)"),
)
PLAYING = (
    _key("space", "space", "play('toggle')", "Play", "play or stop"),
    _key("right", "→", "play('step', 1)", "Next", "next line of the history (left: previous)"),
    _key("left", "←", "play('step', -1)", "Back"),
    _key("shift+right", "shift-→", "play('step', 10)", help="ten lines forward (left: back)"),
    _key("shift+left", "shift-←", "play('step', -10)"),
    _key("home", "home", "play('first')", help="beginning of the history"),
    _key("end", "end", "play('last')", help="end of the history"),
    _key("plus,equals_sign", "+", "play('faster', 1)", "Faster", "faster (-: slower)"),
    _key("minus", "-", "play('faster', -1)", "Slower"),
)
OTHERS = (
    _key("o", "o", "sort", "Sort", "sort by the next column (O: reverse)"),
    _key("O", "O", "reverse"),
    _key("slash", "/", "filter", "Filter", "show workers whose id, host, state or health match"),
    _key("up", "↑↓", "move(-1)", help="mark a worker (also PgUp, PgDn, the mouse)"),
    _key("down", "↓", "move(1)"),
    _key("pageup", "PgUp", "move(-10)"),
    _key("pagedown", "PgDn", "move(10)"),
    _key("enter", "enter", "details", help="details of the marked worker"),
    _key("question_mark", "?", "help", "Help", "this page"),
    _key("q", "q", "quit", "Quit", "leave diloco-top; the run continues"),
    _key("escape", "esc", "clear"),
)
KEYS = (*STEERING, *PLAYING, *OTHERS)


def keys_for(*, readonly: bool, replay: bool) -> list[Binding]:
    """The keys of this mode."""
    return [*(PLAYING if replay else () if readonly else STEERING), *OTHERS]
