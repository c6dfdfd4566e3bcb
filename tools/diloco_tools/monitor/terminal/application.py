"""The full screen of diloco-top.

What is shown comes from the feed (or a history) and nothing else: a key asks the broker for something,
its answer is a sentence in the status line, and the table changes when the feed says so.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar, TypeVar

from rich.padding import Padding
from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal
from textual.css.query import NoMatches
from textual.events import Resize
from textual.renderables.sparkline import Sparkline as Line
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Sparkline, Static

from diloco_protocol.addresses import as_reached
from diloco_protocol.clients import Answer, Ask, ask_once
from diloco_protocol.feed import FeedError, LastRound, Snapshot, Worker
from diloco_protocol.monitor import tree
from diloco_protocol.monitor.fields import BAD, GOOD, TOP, UNEASY, Part, confirmed_by
from diloco_protocol.monitor.rows import cells
from diloco_protocol.quantities import byte_rate, duration, figure, norm, whole
from diloco_tools.monitor.feed.listener import FeedSubscriber, Listener
from diloco_tools.monitor.feed.model import FeedModel, Freshness
from diloco_tools.monitor.feed.series import RunSeries, recent_scale
from diloco_tools.monitor.terminal import palette, sentences
from diloco_tools.monitor.terminal.dialogs import (
    NewRate,
    Page,
    Question,
    TypedWord,
    by_rich,
    choices,
)
from diloco_tools.monitor.terminal.glyphs import QUIET, STYLES, Glyphs
from diloco_tools.monitor.terminal.keys import SWITCHES, bindings, keys_for
from diloco_tools.monitor.terminal.playing import Player
from diloco_tools.monitor.terminal.scene import Scene, View
from diloco_tools.monitor.terminal.table import Column, fitted
from diloco_tools.monitor.terminal.text import (
    header,
    log_table,
    no_workers,
    rows_for,
    rows_table,
    verdict,
)

REFRESH_S = 1.2  # without a snapshot for so long ages go on by themselves
LOOK_S = 0.4  # how often that is looked at
PLAY_S = 0.1  # how often a replay looks whether the next moment is due
SAID_FOR_S = 30.0  # a sentence leaves the status line after this
MIN_WIDTH, MIN_HEIGHT = 80, 24
TALL = 32  # lines from which there is air, and curves take several lines
FOUR_CURVES = 110  # columns from which there is room for the norm of the deltas
LARGEST = 1e100  # of a curve: differences of larger values overflow
TREND_WIDTH, TREND = 10, 120  # columns of a worker's curve of speed, and those it needs
SILENCE = (
    "No snapshot has arrived from {} yet. Start diloco-broker serve, or give the feed address that "
    "it printed (the control address has another port). This screen fills as soon as the broker is up."
)

T = TypeVar("T")


class Curve(Container):
    """A figure, what it is now, and how it got there."""

    def compose(self) -> ComposeResult:
        yield Static(classes="caption")
        yield Sparkline()

    def show(
        self,
        name: str,
        values: Sequence[float | None],
        written: Callable[[float | None], str],
        glyphs: Glyphs,
    ) -> None:
        """Older values beyond the scale of the newer half are cut, and a sign says so."""
        known = [v for v in values if v is not None and abs(v) < LARGEST]
        low, high = recent_scale(known) if known else (0.0, 0.0)
        caption = Text(f"{name} ", QUIET)
        caption.append(glyphs.printable(written(values[-1] if values else None)), "not dim bold")
        if len(known) > 1 and low != high and self.app.has_class("tall"):
            below = glyphs.below * (min(known) < low)
            above = glyphs.above * (max(known) > high)
            span = f"  {below}{written(low)} to {written(high)}{above}"
            caption.append(span if caption.cell_len + len(span) <= self.size.width else "")
        elif known and max(known) > high:
            caption.append(glyphs.above)
        self.query_one(Static).update(caption)
        self.query_one(Sparkline).data = [min(max(value, low), high) for value in known]


class Workers(DataTable[Text | Padding]):
    """The table of workers. The marked worker keeps the mark when rows move."""

    def __init__(self) -> None:
        super().__init__(cursor_type="row", cell_padding=0, zebra_stripes=False, id="workers")
        self.can_focus = False  # keys are the screen's
        self._shape: tuple[object, ...] = ()
        self.listed: list[Worker] = []

    @property
    def marked(self) -> Worker | None:
        return self.listed[self.cursor_row] if self.cursor_row < len(self.listed) else None

    def show(
        self,
        workers: Sequence[Worker],
        columns: Sequence[Column],
        cells: Sequence[Sequence[Text | Padding]],
        titles: Sequence[Text],
    ) -> None:
        """Rows that stayed where they were change only the cells that differ."""
        before, place = self.marked, self.cursor_row
        ids = [worker.id for worker in workers]
        widths = [title.cell_len for title in titles]
        shape = (
            *widths,
            *(title.style for title in titles),
            *ids,
            *(c.field.path for c in columns),
        )
        if shape != self._shape:
            self._shape = shape
            self.clear(columns=True)
            for title, width in zip(titles, widths, strict=True):
                self.add_column(title, width=width)
            for row in cells:
                self.add_row(*row)
        else:
            for y, row in enumerate(cells):
                for x, cell in enumerate(row):
                    if self.get_row_at(y)[x] != cell:
                        self.update_cell_at((y, x), cell)  # type: ignore[arg-type]
        self.listed = list(workers)
        if before is not None and before.id in ids:
            place = ids.index(before.id)
        self.move_cursor(row=max(0, min(place, len(ids) - 1)), animate=False)


class Top(App[None]):
    """The full screen.

    Args:
        address: of the feed, or the name of the history; shown in the header.
        feed: what is listened to; None: snapshots come by `heard` (a test) or from `player`.
        ask: sends a request to a broker and waits; it is called in a thread.
        control: the control address, where it is not the one that the feed names.
        readonly: no key changes the run.
        clock: seconds, monotonic. All ages are by it.
        player: a history to play instead of a feed.
    """

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None  # else the filter, though hidden, would take the keys
    CSS = palette.CSS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(
        self,
        address: str,
        *,
        feed: FeedSubscriber | None = None,
        ask: Ask = ask_once,
        control: str | None = None,
        readonly: bool = False,
        glyphs: Glyphs | None = None,
        clock: Callable[[], float] = time.monotonic,
        player: Player | None = None,
        colour: bool = True,
    ) -> None:
        # With the terminal's own colours Textual takes all colour out where NO_COLOR is set.
        super().__init__(ansi_color=None if colour else True)
        self.ansi_theme_dark = palette.COLOURS
        self.register_theme(palette.THEME)
        self.theme = palette.THEME.name
        self.title = "diloco-top"
        self.glyphs = glyphs or Glyphs.for_encoding("utf-8")
        self.set_class(self.glyphs.is_ascii, "ascii")
        self.model, self.series = FeedModel(), RunSeries()
        self.view = View()
        self.said, self._said_at = Text(), 0.0
        self._drawn_at = -math.inf
        self._address, self._control, self._readonly = address, control, readonly
        self._ask, self._clock, self._player = ask, clock, player
        # What is shown instead of what is known, and as of when.
        self._frozen: tuple[FeedModel, RunSeries, float] | None = None
        self._asking = ""  # the pending request
        self._listener = Listener(feed, self.heard, self.cannot_read) if feed else None
        self._keys = keys_for(readonly=readonly, replay=player is not None)
        for each in bindings(self._keys, self.glyphs):
            self.bind(
                each.key,
                each.action,
                description=each.description,
                show=each.show,
                key_display=each.key_display,
            )

    def compose(self) -> ComposeResult:
        yield Static(id="header")
        yield Static(id="verdict")
        yield Static(id="rows")
        with Horizontal(id="curves"):
            for name in ("loss", "round", "net", "norm"):
                yield Curve(id=name)
        yield Workers()
        yield Static(id="nobody")
        yield Static(id="log")
        yield Static(id="status")
        with Horizontal(id="filter-row"):
            yield Static(Text("filter", "bold"))
            hint = "part of an id, a host, a state or a health"
            yield Input(placeholder=hint, compact=True, id="filter")
            yield Static(choices(("enter", "keep"), ("esc", "show all")))
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.set_interval(LOOK_S if self._player is None else PLAY_S, self._tick)
        if self._listener is not None:
            self._listener.start()
        self.redraw()

    def on_unmount(self) -> None:
        if self._listener is not None:
            self._listener.stop()

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.height >= TALL, "tall")
        self.call_after_refresh(self.redraw)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Of two actions of one key, the one that would change something."""
        if action not in SWITCHES:
            return action != "filter" or not self.has_class("filtering")
        snapshot = self.model.snapshot
        is_paused = snapshot is not None and snapshot.state == "paused"
        is_on = is_paused if action in ("pause", "resume") else self._frozen is not None
        return is_on is SWITCHES[action]

    # What arrives from outside, in threads of its own.

    def heard(self, snapshot: Snapshot) -> None:
        """Take a snapshot; any thread may call."""
        self.call_later(self._take, snapshot, self._clock())

    def cannot_read(self, error: FeedError) -> None:
        """Take what is wrong with the feed; any thread may call."""
        self.call_later(self._complain, error)

    def _complain(self, error: FeedError) -> None:
        self.model.cannot_read(error)
        if self.model.refusal:  # shown as long as it holds
            self.redraw()
        else:
            self.say(str(error), UNEASY)

    def _take(self, snapshot: Snapshot, at: float) -> None:
        before = self.model.snapshot
        if self.model.update(snapshot, at):
            self.series.update(snapshot, at)
        if before is None or before.state != snapshot.state:
            self.refresh_bindings()
        self.redraw()

    def _answered(self, answer: Answer) -> None:
        self._asking = ""
        self.say(answer.text, GOOD if answer.ok else BAD)

    # Drawing.

    def say(self, text: str, tone: str = "") -> None:
        """Put a sentence into the status line."""
        self.said, self._said_at = self.glyphs.text(Part(text, tone)), self._clock()
        self.redraw()

    def scene(self) -> Scene:
        """What the picture is made from."""
        now, player = self._clock(), self._player
        feed, series = self.model, self.series
        if player is not None:
            (feed, series), now = player.picture(), player.moment.at
        model, series, at = self._frozen or (feed, series, now)
        return Scene(
            model=model,
            series=series,
            now=at,
            fresh=feed.freshness(now),
            age_s=feed.age_s(now),
            address=self._address,
            frozen_s=None if self._frozen is None else now - at,
            replay=player,
            readonly=self._readonly,
        )

    def redraw(self) -> None:
        """Draw the picture as it is now."""
        self._drawn_at = self._clock()
        # A message may come before the widgets are there, or after they are gone.
        with suppress(LookupError, NoMatches):
            self._draw(self.screen_stack[0])

    def _draw(self, base: Screen[object]) -> None:
        scene, glyphs, width, height = self.scene(), self.glyphs, *self.size
        snapshot, is_tall = scene.snapshot(), self.has_class("tall")

        def show(name: str, what: object) -> None:
            widget = base.query_one(f"#{name}", Static)
            widget.update(by_rich(what))  # type: ignore[arg-type]
            widget.display = bool(what)

        fresh = Freshness.LIVE if scene.replay is not None else scene.fresh
        is_coloured = fresh is not Freshness.LIVE
        show("header", header(scene, width - 2, glyphs, is_coloured=is_coloured))
        for each in (Freshness.LATE, Freshness.STALE):
            base.query_one("#header").set_class(each is fresh, each.name.lower())
        judged = verdict(scene, 3 if is_tall else 2, glyphs)
        if width < MIN_WIDTH or height < MIN_HEIGHT:
            said = f"{width}x{height} is too small: diloco-top needs {MIN_WIDTH}x{MIN_HEIGHT}"
            judged = Text(said, STYLES[UNEASY])
        lines = judged.plain.count("\n") + 1
        show("verdict", judged if snapshot else "")
        for name in ("curves", "workers"):
            base.query_one(f"#{name}").display = snapshot is not None
        rows: Sequence[Worker] = ()
        if snapshot is None:
            sentence = scene.model.refusal or SILENCE.format(scene.address)
            show("rows", Text(glyphs.printable(sentence)))
            show("log", "")
            show("nobody", "")
        else:
            rows = self.view.rows(snapshot.listed)
            events = 8 if is_tall else 3
            # Besides the rows: header, verdict, curves, table, log, status, footer.
            taken = (
                1 + lines + 1 + 1 + min(len(rows), 5) + min(events, len(snapshot.events)) + 1 + 1
            )
            shown = rows_for(snapshot, None if is_tall else max(3, height - taken))
            show("rows", rows_table(shown, glyphs, wraps=is_tall))
            self._draw_curves(base, scene, snapshot)
            self._draw_table(base, scene, rows)
            show("nobody", "" if rows else Text(self._nobody(snapshot), QUIET))
            show("log", log_table(snapshot, events, glyphs, wraps=is_tall))
        show("status", self._status(scene, rows))

    def _draw_curves(self, base: Screen[object], scene: Scene, snapshot: Snapshot) -> None:
        """Loss, time of a round (or staleness of a push), network, and the norm if there is room."""
        points = [closed for _, closed in scene.series.rounds] or [
            snapshot.last_round or LastRound(0)
        ]
        is_async = snapshot.mode == "async"
        middle: tuple[str, list[float | None], Callable[[float | None], str]] = (
            ("staleness", [float(point.staleness) for point in points], whole)
            if is_async
            else ("round", [point.seconds for point in points], duration)
        )
        shown: dict[str, tuple[str, list[float | None], Callable[[float | None], str]]] = {
            "loss": ("loss", [point.loss for point in points], figure),
            "round": middle,
            "net": ("net", [rate.up + rate.down for rate in scene.series.network], byte_rate),
            "norm": ("delta norm", [point.delta_norm for point in points], norm),
        }
        for name, (caption, values, written) in shown.items():
            base.query_one(f"#{name}", Curve).show(caption, values, written, self.glyphs)
        base.query_one("#norm").display = self.size.width >= FOUR_CURVES

    def _draw_table(self, base: Screen[object], scene: Scene, workers: Sequence[Worker]) -> None:
        parts = [cells(each, TOP) for each in scene.listed(workers)]
        has_trend = self.size.width >= TREND and not self.glyphs.is_ascii
        width = self.size.width - 3 - (TREND_WIDTH + 1) * has_trend
        columns = fitted(parts, width)
        titles = [
            Text(" ") + each.title(is_sorted=each.field.path == self.view.by.path)
            for each in columns
        ]
        lines: list[list[Text | Padding]] = [
            [Text(" ") + each.shown(row[each.field.path], self.glyphs) for each in columns]
            for row in parts
        ]
        if has_trend:
            titles.append(Text(" " + "TREND".ljust(TREND_WIDTH), QUIET))
            for worker, row in zip(workers, lines, strict=True):
                row.append(self._trend(scene, worker))
        base.query_one(Workers).show(workers, columns, lines, titles)

    def _trend(self, scene: Scene, worker: Worker) -> Text | Padding:
        speeds = [speed for _, speed in scene.series.speeds.get(worker.id, ()) if speed < LARGEST]
        if len(speeds) < 2:
            return Text("")
        line = Line(speeds, width=TREND_WIDTH, min_color=palette.LINE, max_color=palette.LINE)
        return Padding(line, (0, 0, 0, 1))

    def _nobody(self, snapshot: Snapshot) -> str:
        if not snapshot.listed:
            return no_workers(snapshot)
        return self.glyphs.printable(f"no worker matches {self.view.wanted!r}")

    def _status(self, scene: Scene, rows: Sequence[Worker]) -> Text:
        """What was said last, else how the table is sorted and filtered."""
        if self.said.plain and not self._asking and self._clock() - self._said_at > SAID_FOR_S:
            self.said = Text()
        if self.said.plain:
            return self.said
        snapshot, words = scene.snapshot(), []
        if scene.model.refusal and snapshot is not None:  # else it stands in the place of the run
            return self.glyphs.text(Part(scene.model.refusal, BAD))
        if self.view.wanted and snapshot is not None:
            count = len(tree.everyone(snapshot.listed))
            words.append(f"{len(rows)} of {count} workers match {self.view.wanted!r}")
        elif len(rows) > 1:
            words.append(f"{len(rows)} workers")
        words += [self.view.order_name] if len(rows) > 1 else []
        return Text(self.glyphs.printable(", ".join(words)), QUIET)

    def _tick(self) -> None:
        player = self._player
        if player is None:
            # Snapshots that come in time draw the picture themselves: once a second is enough.
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
        self.refresh_bindings()
        entry = self.query_one("#filter", Input)
        entry.value = self.view.wanted
        entry.focus()

    @on(Input.Changed, "#filter")
    def filter_changed(self, event: Input.Changed) -> None:
        self.view.wanted = event.value.strip()
        self.redraw()

    @on(Input.Submitted, "#filter")
    def filter_submitted(self) -> None:
        self._close_filter()

    def action_clear(self) -> None:
        """Escape: no filter, and nothing in the status line."""
        self.view.wanted = ""
        self.query_one("#filter", Input).value = ""
        self.said = Text()
        self._close_filter()

    def _close_filter(self) -> None:
        self.remove_class("filtering")
        self.refresh_bindings()
        self.set_focus(None)
        self.redraw()

    def action_freeze(self) -> None:
        if self._player is None and self.model.snapshot is not None:
            self._frozen = (copy.copy(self.model), copy.deepcopy(self.series), self._clock())
            self.refresh_bindings()
            self.redraw()

    def action_thaw(self) -> None:
        self._frozen = None
        self.refresh_bindings()
        self.redraw()

    def action_details(self) -> None:
        if (worker := self.table.marked) is not None:
            (listed,) = self.scene().listed([worker])
            title = self.glyphs.printable(f"Worker {worker.id}")
            self.push_screen(Page(title, sentences.details(listed, self.glyphs)))

    @on(DataTable.RowSelected)
    def row_selected(self) -> None:
        """A click on the marked worker."""
        self.action_details()

    def action_help(self) -> None:
        self.push_screen(Page("diloco-top: keys", sentences.help_page(self._keys, self.glyphs)))

    def action_play(self, move: str, *by: int) -> None:
        """Go through the history: a method of the player."""
        if self._player is not None:
            getattr(self._player, move)(*by)
            self.redraw()

    # The run.

    def _where(self) -> str | None:
        """The control address if this screen may steer the run; else why not is said."""
        known = self.model.snapshot.control if self.model.snapshot is not None else ""
        for holds, why_not, style in (
            (self._player, "This is a history: there is nothing to steer.", ""),
            (self._readonly, "diloco-top was started with --readonly: it changes nothing.", ""),
            (self._asking, f"Still waiting for the answer to {self._asking}.", ""),
            (
                not (self._control or known),
                "The feed has not named the control address yet: give --server ADDR.",
                UNEASY,
            ),
        ):
            if holds:
                self.say(why_not, style)
                return None
        return self._control or as_reached(known, self._address)

    def _request(self, action: str, **arguments: object) -> None:
        """Send a request in a thread: the screen goes on, and the answer comes as a message."""
        address = self._where()
        if address is None:
            return

        def wait() -> None:
            self.call_later(self._answered, self._ask(address, action, arguments))

        self._asking = action
        self.say(f"{action}: waiting for the answer of {address}")
        # Not a worker of Textual: quitting would wait for the answer.
        threading.Thread(target=wait, name="control", daemon=True).start()

    def _confirm(self, dialog: Screen[T], send: Callable[[T], None]) -> None:
        """Ask first; what is not answered is not sent."""
        self.push_screen(dialog, lambda answer: send(answer) if answer else None)

    def action_save(self) -> None:
        self._request("save")

    def action_kick(self) -> None:
        if self._where() is None:
            return
        worker, snapshot = self.table.marked, self.scene().snapshot()
        if worker is None or snapshot is None:
            self.say("There is no worker to kick.")
            return
        title = sentences.kick_title(worker, self.glyphs)
        said = sentences.kick(worker, snapshot, self.glyphs)
        dialog = Question(title, said, "kick it")
        self._confirm(dialog, lambda _: self._request("kick", worker=worker.id))

    def action_rate(self) -> None:
        if self._where() is None:
            return
        snapshot = self.model.snapshot
        old = snapshot.outer.lr if snapshot else None
        if snapshot is not None and old is None:
            kind = snapshot.outer.optimizer or "outer optimizer"
            self.say(f"The learning rate of {kind} is its own and cannot be set here.")
            return
        dialog = NewRate(old, self.glyphs)
        self._confirm(dialog, lambda new: self._request("set", outer_lr=new))

    def action_pause(self) -> None:
        if self._where() is None:
            return
        dialog = Question("Pause the run?", sentences.PAUSE, "pause")
        self._confirm(dialog, lambda _: self._request("pause"))

    def action_resume(self) -> None:
        self._request("resume")

    def action_shutdown(self) -> None:
        if self._where() is None:
            return
        snapshot = self.model.snapshot
        said = sentences.shutdown(snapshot, self.glyphs)
        word = self.glyphs.printable(confirmed_by(snapshot))
        dialog = TypedWord("End the run?", said, word)
        self._confirm(dialog, lambda _: self._request("shutdown"))
