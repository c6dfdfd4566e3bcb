"""The dialogs over the full screen."""

from collections.abc import Sequence
from typing import ClassVar, TypeVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, Static

from diloco_protocol.monitor.fields import BAD, UNEASY
from diloco_tools.monitor.terminal import sentences
from diloco_tools.monitor.terminal.glyphs import QUIET, STYLES, Glyphs

T = TypeVar("T")


def by_rich(text: RenderableType) -> RenderableType:
    """Drawn by Rich: of a bare `Text` Textual takes "yellow" for the colour that CSS calls so."""
    return Group(text) if text else ""


class Dialog(ModalScreen[T]):
    """A frame with a title, what is asked, and the keys that answer. Escape answers nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", priority=True)]

    def __init__(self, title: Text, asked: Sequence[Widget], *answers: tuple[str, str]) -> None:
        super().__init__()
        self._frame = (Static(by_rich(title), classes="title"), *asked)
        self._choices = Static(choices(*answers))

    def compose(self) -> ComposeResult:
        yield Vertical(*self._frame, self._choices, classes="dialog")

    def action_leave(self) -> None:
        self.dismiss(None)


class Question(Dialog[bool]):
    """Yes or no. Nothing but y is a yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,Y", "dismiss(True)"),
        Binding("n,N,q", "leave"),
    ]

    def __init__(self, title: str, said: Text, yes: str) -> None:
        asked = [Static(by_rich(said), classes="said")]
        super().__init__(Text(title, "bold"), asked, ("y", yes), ("n", "cancel"))


class NewRate(Dialog[float]):
    """A new outer learning rate: typed, shown beside the old one, and then confirmed."""

    AUTO_FOCUS = "Input"

    def __init__(self, old: float | None, glyphs: Glyphs) -> None:
        self._old, self._glyphs = old, glyphs
        self._new: float | None = None
        self._entry = Input(placeholder="for example 0.5", compact=True)
        self._change = Static(self._changing(""), classes="said")
        title = Text("Outer learning rate", "bold")
        asked = (self._entry, self._change)
        super().__init__(title, asked, ("enter", "go on"), ("esc", "cancel"))

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._change.update(self._changing(event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._new, _ = sentences.rate_change(self._old, event.value, self._glyphs)
        if self._new is None:
            return
        self._entry.disabled = True
        self.set_focus(None)
        self._choices.update(choices(("y", "send it to the broker"), ("n", "cancel")))

    def on_key(self, event: events.Key) -> None:
        if self._new is not None and event.key in ("y", "Y", "n", "N"):
            self.dismiss(self._new if event.key in ("y", "Y") else None)

    def _changing(self, typed: str) -> Text:
        new, said = sentences.rate_change(self._old, typed, self._glyphs)
        change = (self._glyphs.printable(said), "bold" if new is not None else QUIET)
        return Text.assemble(change, "\nIt applies to the whole run, from the next outer step on.")


class TypedWord(Dialog[bool]):
    """For what cannot be taken back: a word has to be typed."""

    AUTO_FOCUS = "Input"

    def __init__(self, title: str, said: Text, word: str) -> None:
        self._word = word
        self._wrong = Static(id="wrong")
        wanted = Static(Text.assemble("Type ", (word, "bold"), " and press enter."))
        asked = (Static(by_rich(said), classes="said"), wanted, Input(compact=True), self._wrong)
        super().__init__(
            Text(title, f"bold {STYLES[BAD]}"), asked, ("enter", "do it"), ("esc", "cancel")
        )

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if event.value.strip() == self._word:
            self.dismiss(True)
            return
        wrong = Text(f"That is not {self._word}: nothing was sent.", STYLES[UNEASY])
        self._wrong.update(by_rich(wrong))
        self._wrong.display = True


class Page(ModalScreen[None]):
    """Something to read."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,question_mark,space", "dismiss"),
        Binding("down,j", "scroll(1)"),
        Binding("up,k", "scroll(-1)"),
        Binding("pagedown", "scroll(10)"),
        Binding("pageup", "scroll(-10)"),
    ]

    def __init__(self, title: str, text: RenderableType) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog page") as box, VerticalScroll(can_focus=False):
            box.border_title = Text(self._title)  # a string would be read as markup
            box.border_subtitle = "esc back"
            yield Static(self._text)

    def action_scroll(self, lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


def choices(*of: tuple[str, str]) -> Text:
    """Keys that answer, and what each does."""
    text = Text()
    for key, label in of:
        text.append("   " if text.plain else "").append(key, "bold").append(f" {label}", QUIET)
    return text
