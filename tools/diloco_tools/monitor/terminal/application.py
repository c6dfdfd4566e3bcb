"""The full screen of diloco-top.

It shows only the feed (or a history). A key sends a command to the broker, whose answer appears in the
status line; the table changes with the feed.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar

from rich.segment import Segment
from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.containers import Container, Horizontal
from textual.css.query import NoMatches
from textual.events import Resize
from textual.filter import LineFilter
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Sparkline, Static

from diloco_protocol.addresses import as_reached
from diloco_protocol.clients import Answer, Ask, ask_once
from diloco_protocol.feed import FeedError, LastRound, Snapshot, Worker
from diloco_protocol.monitor.fields import BAD, GOOD, TOP, UNEASY, Part
from diloco_protocol.monitor.rows import cells
from diloco_protocol.quantities import byte_rate, duration, figure, norm, whole
from diloco_tools.monitor.feed.listener import FeedSubscriber, Listener
from diloco_tools.monitor.feed.model import FeedModel, Freshness
from diloco_tools.monitor.feed.series import LARGEST, RunSeries, recent_scale
from diloco_tools.monitor.orders import Order, kick, orders
from diloco_tools.monitor.terminal.dialogs import Confirm, Entry, Page, by_rich, details, help_page
from diloco_tools.monitor.terminal.scene import Player, Scene, View
from diloco_tools.monitor.terminal.text import (
    MIN_WIDTH,
    QUIET,
    STYLES,
    fitted,
    fitted_to,
    header,
    log_table,
    no_workers,
    rows_for,
    rows_table,
    styled,
    verdict,
)

REFRESH_S = 1.2  # without a snapshot the screen is redrawn, to advance ages
POLL_S = 0.4  # between two checks whether a redraw is due
PLAY_S = 0.1  # between two checks of a replay
MESSAGE_S = 30.0  # that a message stays in the status line
MIN_HEIGHT = 24
TALL = 32  # lines from which there are margins, and curves take several lines
FOUR_CURVES = 110  # columns from which the norm of the deltas is shown
SILENCE = (
    "No snapshot from {} yet. Start diloco-broker serve, or give the feed address that it printed (the "
    "control address has another port). This screen fills as soon as the broker is up."
)
Written = Callable[[float | None], str]


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


class Charset(LineFilter):
    """Replaces characters that the terminal lacks."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [each._replace(text=fitted_to(self._encoding, each.text)) for each in segments]


class Curve(Container):
    """A figure: its current value, and its curve."""

    def compose(self) -> ComposeResult:
        yield Static(classes="caption")
        yield Sparkline()

    def show(self, name: str, values: Sequence[float | None], written: Written) -> None:
        """Older values off the scale of the newer half are clipped and marked."""
        known = [v for v in values if v is not None and abs(v) < LARGEST]
        low, high = recent_scale(known) if known else (0.0, 0.0)
        now = written(values[-1] if values else None)
        caption = Text.assemble((f"{name} ", QUIET), (now, "not dim bold"))
        if len(known) > 1 and low != high and self.app.has_class("tall"):
            below, above = "↓" * (min(known) < low), "↑" * (max(known) > high)
            span = f"  {below}{written(low)} to {written(high)}{above}"
            caption.append(span if caption.cell_len + len(span) <= self.size.width else "")
        elif known and max(known) > high:
            caption.append("↑")
        self.query_one(Static).update(caption)
        self.query_one(Sparkline).data = [min(max(value, low), high) for value in known]


class Workers(DataTable[Text]):
    """The table of workers. The mark stays with its worker when rows move."""

    def __init__(self) -> None:
        super().__init__(cursor_type="row", cell_padding=0, id="workers")
        self.can_focus = False  # the screen handles keys
        self.listed: list[Worker] = []

    @property
    def marked(self) -> Worker | None:
        return self.listed[self.cursor_row] if self.cursor_row < len(self.listed) else None

    def show(self, scene: Scene, workers: Sequence[Worker], view: View) -> None:
        before, place, top = self.marked, self.cursor_row, self.scroll_y
        rows = [cells(each, TOP) for each in scene.listed(workers)]
        columns = fitted(rows, self.app.size.width - 3)
        self.clear(columns=True)
        for each in columns:
            title = each.title(is_sorted=each.field.path == view.by.path)
            self.add_column(Text(" ") + title, width=each.width + 1)
        for row in rows:
            self.add_row(*(Text(" ") + each.shown(row[each.field.path]) for each in columns))
        self.listed = list(workers)
        ids = [worker.id for worker in workers]
        if before is not None and before.id in ids:
            place = ids.index(before.id)
        self.scroll_to(y=top, animate=False)
        self.move_cursor(row=max(0, min(place, len(ids) - 1)), animate=False)


class Top(App[None]):
    """The full screen.

    Args:
        address: of the feed, or the name of the history; shown in the header.
        feed: the feed to read; None: snapshots come by `heard` or from `player`.
        ask: sends a command to a broker and waits; called in a thread.
        control: the control address, if it is not the one in the feed.
        readonly: no key changes the run.
        encoding: of the terminal.
        clock: monotonic seconds, from which ages are computed.
        player: a history to play instead of a feed.
    """

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None  # otherwise the hidden filter would take the keys
    CSS_PATH = "top.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", show=False, priority=True)]

    def __init__(
        self,
        address: str,
        *,
        feed: FeedSubscriber | None = None,
        ask: Ask = ask_once,
        control: str | None = None,
        readonly: bool = False,
        encoding: str = "utf-8",
        clock: Callable[[], float] = time.monotonic,
        player: Player | None = None,
        colour: bool = True,
    ) -> None:
        # With the terminal's own colours Textual removes all colour if NO_COLOR is set.
        super().__init__(ansi_color=None if colour else True)
        self._filters.append(Charset(encoding))
        self.title = "diloco-top"
        self.model, self.series = FeedModel(), RunSeries()
        self.view = View()
        self.said, self._said_at = Text(), 0.0
        self._drawn_at = -math.inf
        self._address, self._control, self._readonly = address, control, readonly
        self._ask, self._clock, self._player = ask, clock, player
        self._asking = ""  # the pending request
        self._listener = Listener(feed, self.heard, self.cannot_read) if feed else None
        self._keys = keys_for(readonly=readonly, replay=player is not None)
        for key in KEYS:  # keys of other modes explain why they do nothing
            shown = key.show and key in self._keys
            self.bind(
                key.key,
                key.action,
                description=key.description,
                show=shown,
                key_display=key.key_display,
            )

    def compose(self) -> ComposeResult:
        yield Static(id="header")
        yield Static(id="verdict")
        yield Static(id="rows")
        with Horizontal(id="curves"):
            for name in ("loss", "round", "net", "norm"):
                yield Curve(id=name)
        yield Workers()
        yield Static(id="log")
        yield Static(id="status")
        hint = "filter by id, host, relay, state or health; enter keeps it, esc shows all"
        yield Input(placeholder=hint, compact=True, id="filter")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.set_interval(POLL_S if self._player is None else PLAY_S, self._tick)
        if self._listener is not None:
            self._listener.start()
        self.redraw()

    def on_unmount(self) -> None:
        if self._listener is not None:
            self._listener.stop()

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.height >= TALL, "tall")
        self.call_after_refresh(self.redraw)

    # Calls from other threads.

    def heard(self, snapshot: Snapshot) -> None:
        """Take a snapshot."""
        self.call_later(self._take, snapshot, self._clock())

    def cannot_read(self, error: FeedError) -> None:
        """Take an error of the feed."""
        self.call_later(self._complain, error)

    def _complain(self, error: FeedError) -> None:
        self.model.cannot_read(error)
        if self.model.refusal:  # shown while it holds
            self.redraw()
        else:
            self.say(str(error), UNEASY)

    def _take(self, snapshot: Snapshot, at: float) -> None:
        if self.model.update(snapshot, at):
            self.series.update(snapshot, at)
        self.redraw()

    def _answered(self, answer: Answer) -> None:
        self._asking = ""
        self.say(answer.text, GOOD if answer.ok else BAD)

    # Drawing.

    def say(self, text: str, tone: str = "") -> None:
        """Show a message in the status line."""
        self.said, self._said_at = styled(Part(text, tone)), self._clock()
        self.redraw()

    def scene(self) -> Scene:
        """The data of the picture."""
        if self._player is not None:
            return self._player.scene(self._address)
        now, model = self._clock(), self.model
        return Scene(model, self.series, now, self._address, readonly=self._readonly)

    def redraw(self) -> None:
        """Draw the picture."""
        self._drawn_at = self._clock()
        # A message may arrive before the widgets exist, or after they are gone.
        with suppress(LookupError, NoMatches):
            self._draw(self.screen_stack[0])

    def _draw(self, base: Screen[object]) -> None:
        scene, width, height = self.scene(), *self.size
        snapshot, is_tall = scene.snapshot(), self.has_class("tall")

        def show(name: str, what: object) -> None:
            widget = base.query_one(f"#{name}", Static)
            widget.update(by_rich(what))  # type: ignore[arg-type]
            widget.display = bool(what)

        fresh = scene.fresh
        show("header", header(scene, width - 2, is_coloured=fresh is not Freshness.LIVE))
        for each in (Freshness.LATE, Freshness.STALE):
            base.query_one("#header").set_class(each is fresh, each.name.lower())
        for name in ("verdict", "curves", "workers", "log"):
            base.query_one(f"#{name}").display = snapshot is not None
        rows: Sequence[Worker] = ()
        if snapshot is None:
            show("rows", Text(scene.model.refusal or SILENCE.format(scene.address)))
        else:
            judged = verdict(scene, 3 if is_tall else 2)
            if width < MIN_WIDTH or height < MIN_HEIGHT:
                said = f"{width}x{height} is too small: diloco-top needs {MIN_WIDTH}x{MIN_HEIGHT}"
                judged = Text(said, STYLES[UNEASY])
            rows = self.view.rows(snapshot.listed)
            events = 8 if is_tall else 3
            # All but the rows: header, verdict, curves, table, log, status, footer.
            taken = (
                6 + judged.plain.count("\n") + min(len(rows), 5) + min(events, len(snapshot.events))
            )
            shown = rows_for(snapshot, None if is_tall else max(3, height - taken))
            show("verdict", judged)
            show("rows", rows_table(shown, wraps=is_tall))
            self._draw_curves(base, scene, snapshot)
            base.query_one(Workers).show(scene, rows, self.view)
            show("log", log_table(snapshot, events, wraps=is_tall))
        show("status", self._status(scene, snapshot, rows))

    def _draw_curves(self, base: Screen[object], scene: Scene, snapshot: Snapshot) -> None:
        """Loss, round time (or staleness), network, and the norm if there is room."""
        closed = [each for _, each in scene.series.rounds] or [snapshot.last_round or LastRound(0)]

        def show(name: str, caption: str, values: Sequence[float | None], written: Written) -> None:
            base.query_one(f"#{name}", Curve).show(caption, values, written)

        show("loss", "loss", [each.loss for each in closed], figure)
        if snapshot.mode == "async":
            show("round", "staleness", [float(each.staleness) for each in closed], whole)
        else:
            show("round", "round", [each.seconds for each in closed], duration)
        show("net", "net", [rate.up + rate.down for rate in scene.series.network], byte_rate)
        show("norm", "delta norm", [each.delta_norm for each in closed], norm)
        base.query_one("#norm").display = self.size.width >= FOUR_CURVES

    def _status(self, scene: Scene, snapshot: Snapshot | None, rows: Sequence[Worker]) -> Text:
        """The last message, or the order and filter of the table."""
        if not self._asking and self._clock() - self._said_at > MESSAGE_S:
            self.said = Text()
        if self.said.plain or snapshot is None:
            return self.said
        if scene.model.refusal:
            return styled(Part(scene.model.refusal, BAD))
        words = [f"{len(rows)} workers", self.view.order_name] if len(rows) > 1 else []
        if not snapshot.listed:
            words = [no_workers(snapshot)]
        elif self.view.wanted:
            count = len(snapshot.listed)
            words[:1] = [f"{len(rows) or 'none'} of {count} workers match {self.view.wanted!r}"]
        return Text(", ".join(words), QUIET)

    def _tick(self) -> None:
        player = self._player
        if player is None:
            # A snapshot redraws the screen itself: once a second is enough.
            is_due = self._clock() - self._drawn_at >= REFRESH_S
        else:
            before = (player.index, player.playing)
            player.tick()
            is_due = before != (player.index, player.playing)
        if is_due:
            self.redraw()

    # The table.

    @property
    def table(self) -> Workers:
        return self.screen_stack[0].query_one(Workers)

    def action_move(self, by: int) -> None:
        self.table.move_cursor(row=self.table.cursor_row + by, animate=False)

    def action_sort(self) -> None:
        self.view.next_order()
        self.redraw()

    def action_reverse(self) -> None:
        self.view.reverse = not self.view.reverse
        self.redraw()

    def action_filter(self) -> None:
        self.add_class("filtering")
        entry = self.query_one("#filter", Input)
        entry.value = self.view.wanted
        entry.focus()

    @on(Input.Changed, "#filter")
    def filter_changed(self, event: Input.Changed) -> None:
        self.view.wanted = event.value.strip()
        self.redraw()

    def action_clear(self) -> None:
        """Escape: clear the filter and the status line."""
        self.view.wanted = self.query_one("#filter", Input).value = ""
        self.said = Text()
        self.close_filter()

    @on(Input.Submitted, "#filter")
    def close_filter(self) -> None:
        self.remove_class("filtering")
        self.set_focus(None)
        self.redraw()

    @on(DataTable.RowSelected)  # a click on the marked worker
    def action_details(self) -> None:
        if (worker := self.table.marked) is not None:
            (listed,) = self.scene().listed([worker])
            self.push_screen(Page(f"Worker {worker.id}", details(listed)))

    def action_help(self) -> None:
        self.push_screen(Page("diloco-top: keys", help_page(self._keys)))

    def action_play(self, move: str, *by: int) -> None:
        """Call a method of the player."""
        if self._player is not None:
            getattr(self._player, move)(*by)
            self.redraw()

    # The run.

    def _where(self) -> str | None:
        """The control address if this screen may steer the run; otherwise show why not."""
        known = self.model.snapshot.control if self.model.snapshot is not None else ""
        unknown = "The control address is unknown yet: give --server ADDR."
        for holds, why_not, tone in (
            (self._player, "A history cannot be steered.", ""),
            (self._readonly, "diloco-top was started with --readonly.", ""),
            (self._asking, f"Still waiting for the answer to {self._asking}.", ""),
            (not (self._control or known), unknown, UNEASY),
        ):
            if holds:
                self.say(why_not, tone)
                return None
        return self._control or as_reached(known, self._address)

    def _request(self, order: Order) -> None:
        """Send a command in a thread, so that the screen stays responsive."""
        address = self._where()
        if address is None:
            return

        def wait() -> None:
            self.call_later(self._answered, self._ask(address, order.action, order.arguments))

        self._asking = order.action
        self.say(f"{order.action}: waiting for {address}")
        # Not a Textual worker: quitting would wait for the answer.
        threading.Thread(target=wait, name="control", daemon=True).start()

    def action_order(self, name: str) -> None:
        """Open the dialog of a command; "kick" is for the marked worker."""
        worker, snapshot = self.table.marked, self.scene().snapshot()
        if self._where() is None:
            return
        if name != "kick":
            order = orders(self.model.snapshot)[name]
        elif worker is not None and snapshot is not None:
            order = kick(worker, snapshot)
        else:
            self.say("No worker is marked.")
            return
        if order.off:
            self.say(order.off)
        elif not order.title:
            self._request(order)
        else:
            dialog = Entry(order) if order.typed or order.setting else Confirm(order)
            self.push_screen(dialog, lambda answer: self._request(answer) if answer else None)
