"""The dialogs of diloco-top: a question, a number, a word to type, a page to read."""

from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from diloco_tools.top.drawing import sentences
from diloco_tools.top.drawing.notation import BAD, QUIET, UNEASY, Glyphs


class Question(ModalScreen[bool]):
    """Yes or no. Nothing but y is a yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,Y", "answer(True)"),
        Binding("n,N,escape,q", "answer(False)"),
    ]

    def __init__(self, title: str, said: Text, yes: str) -> None:
        super().__init__()
        self._title, self._said, self._yes = title, said, yes

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Text(self._title, "bold"), classes="title")
            yield Static(self._said, classes="said")
            yield Static(_choices(("y", self._yes), ("n", "leave it")))

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class NewRate(ModalScreen[float | None]):
    """A new outer learning rate: typed, shown beside the old one, and then confirmed."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", priority=True)]

    def __init__(self, old: float | None, glyphs: Glyphs) -> None:
        super().__init__()
        self._old, self._glyphs = old, glyphs
        self._new: float | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Text("Outer learning rate", "bold"), classes="title")
            yield Input(placeholder="for example 0.5", compact=True)
            yield Static(self._change(""), classes="said", id="change")
            yield Static(_choices(("enter", "go on"), ("esc", "leave it")), id="choices")

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.query_one("#change", Static).update(self._change(event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        new, _ = sentences.rate_change(self._old, event.value, self._glyphs)
        if new is None:
            return
        self._new = new
        self.query_one(Input).disabled = True
        self.set_focus(None)
        self.query_one("#choices", Static).update(
            _choices(("y", "send it to the broker"), ("n", "leave it"))
        )

    def on_key(self, event: events.Key) -> None:
        if self._new is not None and event.key in ("y", "Y"):
            self.dismiss(self._new)
        elif self._new is not None and event.key in ("n", "N"):
            self.dismiss(None)

    def action_leave(self) -> None:
        self.dismiss(None)

    def _change(self, typed: str) -> Text:
        new, said = sentences.rate_change(self._old, typed, self._glyphs)
        change = (self._glyphs.printable(said), "bold" if new is not None else QUIET)
        return Text.assemble(change, "\nIt holds for everybody, from the next outer step on.")


class TypedWord(ModalScreen[bool]):
    """For what cannot be taken back: a word has to be typed."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", priority=True)]

    def __init__(self, title: str, said: Text, word: str) -> None:
        super().__init__()
        self._title, self._said, self._word = title, said, word

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Text(self._title, f"bold {BAD}"), classes="title")
            yield Static(self._said, classes="said")
            yield Static(Text.assemble("Type ", (self._word, "bold"), " and press enter."))
            yield Input(compact=True)
            yield Static(id="wrong")
            yield Static(_choices(("enter", "do it"), ("esc", "leave it")))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if event.value.strip() == self._word:
            self.dismiss(True)
        else:
            said = self.query_one("#wrong", Static)
            said.update(Text(f"That is not {self._word}: nothing was sent.", UNEASY))
            said.display = True

    def action_leave(self) -> None:
        self.dismiss(False)


class Page(ModalScreen[None]):
    """Something to read."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,question_mark,space", "leave"),
        Binding("down,j", "scroll(1)"),
        Binding("up,k", "scroll(-1)"),
        Binding("pagedown", "scroll(10)"),
        Binding("pageup", "scroll(-10)"),
    ]

    def __init__(self, title: str, text: Text) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog page") as box, VerticalScroll(can_focus=False):
            box.border_title = Text(self._title)  # a string would be read as markup
            box.border_subtitle = "esc back"
            yield Static(self._text)

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_scroll(self, lines: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


def _choices(*choices: tuple[str, str]) -> Text:
    text = Text()
    for key, label in choices:
        text.append("   " if text.plain else "").append(key, "bold").append(f" {label}", QUIET)
    return text
