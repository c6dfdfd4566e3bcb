"""The full screen of diloco-top: keys, dialogs, and one canvas on which the picture is drawn.

What is shown comes from the feed (or a history) and nothing else: a key asks the broker for something,
its answer is a sentence in the status line, and the table changes when the feed says so.
"""

import copy
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, TypeVar

from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.widgets import Input, Static

from diloco_protocol.addresses import as_reached
from diloco_protocol.clients import Answer, Ask, ask_once
from diloco_protocol.feed import FeedError, Snapshot, Worker
from diloco_tools.monitor.feed.listener import FeedSubscriber, Listener
from diloco_tools.monitor.feed.model import FeedModel
from diloco_tools.monitor.feed.series import RunSeries
from diloco_tools.top import palette
from diloco_tools.top.drawing import sentences
from diloco_tools.top.drawing.full_screen import picture
from diloco_tools.top.drawing.keys import KEYS, keys_for
from diloco_tools.top.drawing.notation import BAD, OK, QUIET, UNEASY, Glyphs
from diloco_tools.top.drawing.scene import Said, Scene, View
from diloco_tools.top.playing import Player
from diloco_tools.top.widgets import Canvas, NewRate, Page, Question, TypedWord

REFRESH_S = 1.2  # without a snapshot for so long ages go on by themselves
LOOK_S = 0.4  # how often that is looked at
PLAY_S = 0.1  # how often a replay looks whether the next moment is due
SAID_FOR_S = 30.0  # a sentence gives its place back

T = TypeVar("T")


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
        *(Binding(key.names, key.action, show=False) for key in KEYS),
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
        self.set_class(self.glyphs.ellipsis.isascii(), "ascii")
        self.model, self.series = FeedModel(), RunSeries()
        self.view = View()
        self.said, self._said_at = Said(), 0.0
        self._drawn_at = -math.inf
        self._address, self._control, self._readonly = address, control, readonly
        self._ask, self._clock, self._player = ask, clock, player
        # What is shown instead of what is known, and as of when.
        self._frozen: tuple[FeedModel, RunSeries, float] | None = None
        self._asking = ""  # the request under way
        self._listener = Listener(feed, self.heard, self.cannot_read) if feed else None

    def compose(self) -> ComposeResult:
        yield Canvas(self.redraw)
        with Horizontal(id="filter-row"):
            yield Static(Text("filter", "bold"))
            hint = "part of an id, a host, a state or a health"
            yield Input(placeholder=hint, compact=True, id="filter")

    def on_mount(self) -> None:
        self.set_interval(LOOK_S if self._player is None else PLAY_S, self._tick)
        if self._listener is not None:
            self._listener.start()

    def on_unmount(self) -> None:
        if self._listener is not None:
            self._listener.stop()

    # What comes from outside, in threads of its own.

    def heard(self, snapshot: Snapshot) -> None:
        """A snapshot came; any thread may say so."""
        self.call_later(self._take, snapshot, self._clock())

    def cannot_read(self, error: FeedError) -> None:
        """The feed cannot be read; any thread may say so."""
        self.call_later(self._complain, error)

    def _complain(self, error: FeedError) -> None:
        self.model.cannot_read(error)
        if self.model.refusal:  # which the picture has as long as it holds
            self.redraw()
        else:
            self.say(str(error), UNEASY)

    def _take(self, snapshot: Snapshot, at: float) -> None:
        if self.model.update(snapshot, at):
            self.series.update(snapshot, at)
        self.redraw()

    def _answered(self, answer: Answer) -> None:
        self._asking = ""
        self.say(answer.text, OK if answer.ok else BAD)

    # Drawing.

    def say(self, text: str, style: str = "") -> None:
        """Put a sentence into the status line."""
        self.said, self._said_at = Said(text, style), self._clock()
        self.redraw()

    def redraw(self) -> None:
        """Draw the picture as it is now."""
        self._drawn_at = self._clock()
        with suppress(
            LookupError, NoMatches
        ):  # a message may come before the canvas is there, or after it
            canvas = self.screen_stack[0].query_one(Canvas)
            width, height = canvas.size
            if width and height:
                canvas.show(picture(self.scene(), self.view, width, height, self.glyphs))

    def scene(self) -> Scene:
        """What the picture is made from."""
        now, player = self._clock(), self._player
        if self.said.text and not self._asking and now - self._said_at > SAID_FOR_S:
            self.said = Said()
        feed, series = self.model, self.series
        if player is not None:
            (feed, series), now = player.picture(), player.moment.at
        model, series, at = self._frozen or (feed, series, now)
        said = self.said
        if not said.text and self.model.snapshot is not None:
            said = Said(self.model.refusal, BAD)
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
            said=said,
        )

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

    def _rows(self) -> list[Worker]:
        snapshot = self.scene().snapshot()
        return self.view.rows(snapshot.listed) if snapshot else []

    def _marked(self) -> Worker | None:
        return next((worker for worker in self._rows() if worker.id == self.view.marked), None)

    def action_move(self, by: int) -> None:
        self.view.move(by, self._rows())
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        canvas = self.screen_stack[0].query_one(Canvas)
        if event.widget is canvas and (name := canvas.picture.worker_at(event.y)) is not None:
            self.view.marked = name
            self.redraw()

    def on_mouse_scroll_down(self) -> None:
        self.action_move(1)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-1)

    def action_sort(self) -> None:
        self.view.next_order()
        self.redraw()

    def action_reverse(self) -> None:
        self.view.reverse = not self.view.reverse
        self.redraw()

    def action_filter(self) -> None:
        self.query_one("#filter-row").add_class("open")
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
        self.said = Said()
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter-row").remove_class("open")
        self.set_focus(None)
        self.redraw()

    def action_freeze(self) -> None:
        if self._player is not None:
            return
        frozen = (copy.copy(self.model), copy.deepcopy(self.series), self._clock())
        is_thawed = self._frozen is not None or self.model.snapshot is None
        self._frozen = None if is_thawed else frozen
        self.redraw()

    def action_details(self) -> None:
        if (worker := self._marked()) is not None:
            rate = self.scene().series.rate_of(worker.id)
            title = self.glyphs.printable(f"Worker {worker.id}")
            self.push_screen(Page(title, sentences.details(worker, rate, self.glyphs)))

    def action_help(self) -> None:
        keys = keys_for(readonly=self._readonly, replay=self._player is not None)
        self.push_screen(Page("diloco-top: keys", sentences.help_page(keys, self.glyphs)))

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
            (self._player, "This is a history: there is nothing to steer.", QUIET),
            (self._readonly, "diloco-top was started with --readonly: it changes nothing.", QUIET),
            (self._asking, f"Still waiting for the answer to {self._asking}.", QUIET),
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
        self.say(f"{action}: waiting for the answer of {address}", QUIET)
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
        worker, snapshot = self._marked(), self.scene().snapshot()
        if worker is None or snapshot is None:
            self.say("There is no worker to kick.", QUIET)
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
            self.say(f"The learning rate of {kind} is its own: it cannot be set here.", QUIET)
            return
        dialog = NewRate(old, self.glyphs)
        self._confirm(dialog, lambda new: self._request("set", outer_lr=new))

    def action_pause(self) -> None:
        if self._where() is None:
            return
        snapshot = self.model.snapshot
        if snapshot is not None and snapshot.state == "paused":
            self._request("resume")
        else:
            dialog = Question("Pause the run?", sentences.PAUSE, "pause")
            self._confirm(dialog, lambda _: self._request("pause"))

    def action_shutdown(self) -> None:
        if self._where() is None:
            return
        snapshot = self.model.snapshot
        said = sentences.shutdown(snapshot, self.glyphs)
        word = self.glyphs.printable(sentences.shutdown_word(snapshot))
        dialog = TypedWord("End the run?", said, word)
        self._confirm(dialog, lambda _: self._request("shutdown"))
