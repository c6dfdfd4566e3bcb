"""The dialogs and pages over the full screen."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from diloco_protocol.monitor.fields import BAD, OF_WORKER, TOP, UNEASY, columns
from diloco_protocol.monitor.rows import Listed, cell
from diloco_protocol.quantities import NONE
from diloco_tools.monitor.orders import Order, wrong
from diloco_tools.monitor.terminal.text import QUIET, STYLES


def by_rich(text: RenderableType) -> RenderableType:
    """Have Rich draw it: in a bare `Text` Textual would use CSS's colours for names such as "yellow"."""
    return Group(text) if text else ""


class Confirm(ModalScreen[Order]):
    """Asks whether to send a command; only y confirms."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", priority=True),
        Binding("y,Y", "send"),
        Binding("n,N,q", "leave"),
    ]

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order

    def compose(self) -> ComposeResult:
        title = f"bold {STYLES[BAD]}" if self.order.typed else "bold"
        with Vertical(classes="dialog"):
            yield Static(by_rich(Text(self.order.title, title)))
            yield Static(by_rich(Text(self.order.text)), classes="said")
            yield from self.answers()

    def answers(self) -> ComposeResult:
        yield Static(choices(("y", self.order.label.lower()), ("n", "cancel")))

    def action_send(self) -> None:
        self.dismiss(self.order)

    def action_leave(self) -> None:
        self.dismiss(None)


class Entry(Confirm):
    """Asks for a typed confirmation, or for a new value."""

    AUTO_FOCUS = "Input"

    def answers(self) -> ComposeResult:
        if self.order.typed:
            yield Static(Text.assemble("Type ", (self.order.typed, "bold"), " and press enter."))
        yield Input(placeholder=f"{self.order.now} → ?" if self.order.setting else "", compact=True)
        yield Static(id="wrong")
        label = "set" if self.order.setting else self.order.label.lower()
        yield Static(choices(("enter", label), ("esc", "cancel")))

    @on(Input.Submitted)
    def submitted(self, event: Input.Submitted) -> None:
        order, typed = self.order, event.value.strip()
        if said := wrong(order, typed):
            shown = self.query_one("#wrong", Static)
            shown.update(by_rich(Text(said, STYLES[UNEASY])))
            shown.display = True
        else:
            given = {order.setting: float(typed)} if order.setting else order.arguments
            self.dismiss(replace(order, arguments=given))


class Page(ModalScreen[None]):
    """A page of text."""

    AUTO_FOCUS = "VerticalScroll"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,question_mark,space", "dismiss", priority=True)
    ]

    def __init__(self, title: str, text: RenderableType) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog page") as box, VerticalScroll():
            box.border_title = Text(self._title)  # a string would be read as markup
            box.border_subtitle = "esc back"
            yield Static(self._text)


def choices(*of: tuple[str, str]) -> Text:
    """The keys of a dialog, with their labels."""
    parts = (Text.assemble((key, "bold"), (f" {label}", QUIET)) for key, label in of)
    return Text("   ").join(parts)


def details(listed: Listed) -> Table:
    """All figures of one worker."""
    worker = listed.worker
    rows = [("Process", str(worker.pid))] if worker.pid else []
    for field in OF_WORKER:
        value, said = field.value(worker) if not field.title else 0, cell(field, listed).text
        is_usual = value is None or (field.path in ("processes", "connections") and value == 1)
        if not is_usual and said not in ("", NONE) and field.path != "sync_every":
            unit = f" {field.unit}" if field.unit not in ("", "pushes", "tokens") else ""
            rows.append((field.label, said + unit))
    rows += [("Warning", worker.warning)] if worker.warning else []
    rows += ((str(key), str(value)) for key, value in worker.extra.items())
    table = Table.grid(padding=(0, 1))
    table.add_column(style=QUIET, width=24, no_wrap=True)
    for label, value in rows:
        table.add_row(Text(label), Text(value))
    return table


def help_page(keys: Sequence[Binding]) -> Table:
    """All keys of this mode, and the meaning of the columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="bold", min_width=11)
    for key in keys:
        if key.tooltip:
            table.add_row(key.key_display, key.tooltip)
    table.add_row("", "")
    words = {field.title.upper(): field.help for field in columns(TOP)} | {
        "~": "inner steps estimated from the worker's pace since its last report",
        "curves": "scaled to their newer half; ↑ ↓ mark older values off the scale",
        "LIVE": "data less than 3 s old; LATE up to 10 s; then STALE",
    }
    for word, meaning in words.items():
        table.add_row(word, meaning)
    return table
