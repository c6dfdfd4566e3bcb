"""The one thread that owns a worker's sockets: it feeds the session and carries out its effects.

The training thread talks to it through commands (a deque and a socket pair to wake it up) and reads the
results under a condition. Nothing that goes wrong in here reaches the training thread as an exception,
and nothing makes it wait without an end: `has_ended` is true once the thread is gone, for whatever
reason.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq

from diloco_protocol import (
    Code,
    ModelLayout,
    ProtocolError,
    Refused,
    RunConfig,
    pack,
    unpack,
)
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import Chunk, Push
from diloco_worker.core.connection import Phase
from diloco_worker.core.effects import (
    Answered,
    Beat,
    BeginVersion,
    Carried,
    Close,
    Deliver,
    DropParts,
    Effect,
    ForgetCheckpoint,
    Granted,
    Joined,
    JoinRefused,
    Open,
    Paced,
    PrepareDonation,
    PushOver,
    Restarting,
    Say,
    Send,
    SendChunk,
    Stopping,
    StoreChunk,
)
from diloco_worker.core.events import (
    Ask,
    BeatNow,
    Connected,
    Depart,
    Disconnected,
    Event,
    Observe,
    Offer,
    Prepared,
    Received,
    RequestVersion,
    Start,
    Tick,
    VerifyPushes,
    Withdraw,
)
from diloco_worker.core.previous_life import SENT_BEFORE
from diloco_worker.core.session import Session
from diloco_worker.core.sync.news import Arrival, News, Rejection, Turning
from diloco_worker.model.flat_state import FlatState, WireFragment
from diloco_worker.shell.connections import NOW, Connections
from diloco_worker.shell.forks import keep_from_children
from diloco_worker.shell.fragment_buffers import Holdings, check_length
from diloco_worker.shell.inbox import Progress
from diloco_worker.shell.repeated_lines import Sayings

logger = logging.getLogger("diloco.worker")

# Messages taken from one socket before the others get their turn.
BATCH = 64
# Longest sleep of the thread; everything that matters wakes it earlier.
LONGEST_POLL_S = 5.0
# How long the last message, `leave`, may take to get out.
LEAVE_LINGER_MS = 1000
# Effects that the training thread need not hear of.
QUIET = frozenset({Send, SendChunk, Beat, BeginVersion, StoreChunk})
# Unexpected exceptions in a row after which the thread gives up; each is followed by a pause.
MAX_FAILURES = 20
FAILURE_PAUSE_S = 0.5


@dataclass(frozen=True)
class Base:
    """A command that is no business of the session: training stands on these values from now on."""

    fragment: int
    state: FlatState | None


class Link:
    """See the head of this module. `start` it once, `close` it once.

    Args:
        address: of the broker's control socket.
        session: the state machine; only this thread touches it from now on.
        capture: copies a fragment of the model to the host, for a broker that has no parameters. Called
            in a thread of its own, and only for fragments that nobody is training at that moment.
        pinned: whether to receive into pinned memory (the model is on a CUDA device).
        states: by fragment, the values of what the session holds already (`Resume`). They are room for
            later versions once training stands on others.
        welcomed: called in the I/O thread with the broker's epoch, whenever it takes this worker in.
        follows_rounds: whether somebody takes `turns`; else they would pile up for ever.
        clock: seconds, monotonic.

    Attributes (to be read under `condition`, or where a moment's lag does no harm; counters and
    `last_heard` wake nobody who waits):
        phase, config, layout, last_heard: of the session.
        refusal: set when the broker refuses this worker; `refused_for_good` when that was at joining.
        stopping: why this worker should end, as the broker says it, else None.
        restarting: the broker's sentence when it goes away to come back; None once it is back.
        arrivals: whole versions by fragment, until `take`n.
        rejections: pushes that were dropped, by push id.
        turns: what concerns rounds, in the order in which it came; `take_news` takes it. Always empty
            for one that does not follow rounds.
        sync_every: H that the broker has worked out for this worker (Dynamic Local Updates).
        uploaded: pushes in flight whose chunks are all in at the broker.
        put_off: pushes in flight that the broker takes nothing of yet.
        results: answers to `ask`, by request.
        has_forgotten: what the session held already does not fit the run and is not held any more.
        has_news: something is in `arrivals` or `rejections`; cheap to look at.
    """

    def __init__(
        self,
        address: str,
        session: Session,
        *,
        capture: Callable[[FragmentLayout], FlatState] | None = None,
        pinned: bool = False,
        states: Mapping[int, FlatState] | None = None,
        welcomed: Callable[[str], object] = lambda _: None,
        follows_rounds: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.condition = threading.Condition()
        self.progress = Progress()
        self.phase = session.phase
        self.config: RunConfig | None = None
        self.layout: ModelLayout | None = None
        self.feed: str | None = None
        self.last_heard: float | None = None
        self.refusal: Refused | None = None
        self.refused_for_good = False
        self.stopping: str | None = None
        self.restarting: str | None = None
        self.arrivals: dict[int, Arrival] = {}
        self.rejections: dict[int, Rejection] = {}
        self.turns: deque[Turning] = deque(maxlen=None if follows_rounds else 0)
        self.sync_every: int | None = None
        self.uploaded: frozenset[int] = frozenset()
        self.put_off: frozenset[int] = frozenset()
        self.results: dict[int, Answered] = {}
        self.bytes_up = 0
        self.bytes_down = 0
        self.retries = 0
        self.reconnections = 0
        self.last_error: str | None = None
        self.has_forgotten = False
        self.has_ended = False
        self._session = session
        self._welcomed = welcomed
        self._clock = clock
        self._commands: deque[tuple[Event | Base, Any]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._main, name="diloco-link", daemon=True)
        # Below: the I/O thread's own.
        self._connections: Connections | None = None
        self._poller = zmq.Poller()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._holdings = Holdings(capture, pinned=pinned, states=states or {})
        self._is_news = False  # since `_publish` was called last
        self._offered: dict[int, int] = {}  # by fragment; the last push id
        self._payload: memoryview | None = None
        self._said = Sayings()
        self._failures = 0
        keep_from_children(self)

    # For the training thread.

    def start(self) -> None:
        self._thread.start()

    @property
    def has_news(self) -> bool:
        return bool(self.arrivals or self.rejections)

    def offer(self, push: Push, wire: WireFragment) -> None:
        """Push a pseudo-gradient. Neither may change any more."""
        self._command(Offer(push), wire)

    def want(self, fragment: int, after: int | None = None) -> None:
        """Ask for the newest version (or one above `after`); it will be in `arrivals`."""
        self._command(RequestVersion(fragment, after))

    def doubt(self, fragment: int, known: frozenset[int]) -> None:
        """Only these pushes of this worker are taken into account in this fragment; see `former`."""
        self._command(VerifyPushes(fragment, known))

    def stand_on(self, fragment: int, state: FlatState | None) -> None:
        """Training stands on these values from now on; the former ones may be overwritten.

        With None no copy is kept: the model itself has them, and nothing changes them.
        """
        self._command(Base(fragment, state))

    def observe(self, event: Observe) -> None:
        self._command(event)

    def ask(self, request: int, action: str, arguments: Mapping[str, Any]) -> None:
        """Send a control action; the answer will be in `results`."""
        self._command(Ask(request, action, dict(arguments)))

    def withdraw(self, request: int) -> None:
        """Nobody waits for the answer to this action any more."""
        self._command(Withdraw(request))

    def pulse(self) -> None:
        """Send a heartbeat now."""
        self._command(BeatNow())

    def take(self, fragment: int) -> Arrival | None:
        """The whole version of a fragment that has arrived, once."""
        with self.condition:
            return self.arrivals.pop(fragment, None)

    def take_news(self) -> News:
        """All that has come since the last look, at one moment."""
        with self.condition:
            news = News(tuple(self.turns), dict(self.arrivals), dict(self.rejections))
            self.turns.clear()
            self.arrivals.clear()
            self.rejections.clear()
            return news

    def take_rejection(self, push_id: int) -> Rejection | None:
        with self.condition:
            return self.rejections.pop(push_id, None)

    def wait_for(self, what: Callable[[], bool], timeout: float) -> bool:
        """Wait until `what` is true, or the thread has ended, at most `timeout` seconds."""
        with self.condition:
            return self.condition.wait_for(lambda: what() or self.has_ended, timeout) and what()

    def silence(self) -> float | None:
        """Seconds since the broker last said anything; None when it never has."""
        return None if self.last_heard is None else self._clock() - self.last_heard

    def describe(self) -> str:
        """What the link is at, as the end of a sentence."""
        match self.phase:
            case Phase.NEW | Phase.CONNECTING | Phase.AWAY:
                away = ", which restarts" if self.restarting else ""
                return f"no broker answers at {self.address}{away}"
            case Phase.JOINING:
                return self.last_error or "the broker has not answered the join"
            case Phase.JOINED:
                return "the broker is there"
            case Phase.REFUSED:
                return str(self.refusal)
            case Phase.LEFT:
                return "this worker has left"

    def close(self, reason: str = "", patience: float = 5.0) -> None:
        """Tell the broker, close the sockets, end the thread: within `patience` seconds."""
        self._command(Depart(reason))
        if self._thread.is_alive():
            self._thread.join(patience)
        if self._thread.is_alive():
            if patience:
                logger.error("The link to %s did not end within %g s.", self.address, patience)
            return
        self._wake_reader.close()
        self._wake_writer.close()

    def wake(self) -> None:
        """Let the I/O thread take a turn, which wakes up those in `wait_for`; for signal handlers."""
        # Full: it will wake up anyway. Closed: nobody is there to wake up.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def leave_to_the_parent(self) -> None:
        """In a forked child: this link has ended, and holds no connection open."""
        connections, self._connections = self._connections, None
        for descriptor in list(connections.descriptors.values()) if connections is not None else ():
            descriptor.close()
        self._wake_reader.close()
        self._wake_writer.close()
        self.condition = threading.Condition()  # the thread may have held the other one
        self.has_ended = True
        self.last_error = "This process was forked from the worker's; only that one is in the run."

    def _command(self, event: Event | Base, cargo: Any = None) -> None:
        self._commands.append((event, cargo))
        self.wake()

    # The thread.

    def _main(self) -> None:
        try:
            self._context = zmq.Context()
            self._poller.register(self._wake_reader, zmq.POLLIN)
            self._feed(Start())
            while self._session.phase is not Phase.LEFT:
                self._guarded_turn()
        except Exception as error:
            logger.exception("The link to %s has failed; training goes on alone.", self.address)
            self.last_error = f"The link has failed: {error!r}"
        finally:
            try:
                self._close_connections(LEAVE_LINGER_MS)
                if self._context is not None:
                    self._context.term()
            finally:
                with self.condition:
                    self.has_ended = True
                    self.condition.notify_all()

    def _guarded_turn(self) -> None:
        """One turn. What nobody expected costs the connections, never the thread."""
        try:
            self._turn()
        except Exception as error:
            self._failures += 1
            logger.exception("Unexpected trouble in the link to %s.", self.address)
            self.last_error = f"Unexpected trouble in the link: {error!r}"
            if self._failures >= MAX_FAILURES:
                raise
            threading.Event().wait(FAILURE_PAUSE_S)
            self._feed(Disconnected("The link starts afresh after unexpected trouble."))
        self._publish()

    def _turn(self) -> None:
        now = self._clock()
        wakes_at = self._session.wakes_at()
        pause = LONGEST_POLL_S if wakes_at is None else min(LONGEST_POLL_S, wakes_at - now)
        # Rounded up, or a deadline a fraction of a millisecond away would be polled for in a spin.
        ready = dict(self._poller.poll(max(0, int(pause * 1000 + 1)) if pause > 0 else 0))
        if self._wake_reader.fileno() in ready:
            self._drain_wake_ups()
            self._is_news = True  # for who waits, whatever it was
        while self._commands and self._session.phase is not Phase.LEFT:
            self._carry(*self._commands.popleft())
        connections = self._connections
        if connections is not None:
            for each in (connections.control, connections.bulk):
                if each in ready:
                    self._receive(each)
            # After the messages, so that what a peer said before it died is heard.
            if self._connections is connections and connections.may_have_changed(ready):
                connected, broken = connections.changes()
                if connected:
                    self._feed(Connected())
                if broken is not None:
                    self._feed(Disconnected(broken))
        self._feed(Tick())

    def _drain_wake_ups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass

    def _carry(self, event: Event | Base, cargo: Any) -> None:
        """A command of the training thread."""
        match event:
            case Base(fragment, state):
                self._holdings.stand_on(fragment, state)
            case Prepared(push_id):
                if push_id in self._session.uploads:  # else nobody wants it any more
                    self._holdings.outgoing[push_id] = cargo.result()
                    self._feed(event)
            case Offer(push):
                former = self._offered.get(push.fragment)
                if former == push.push_id:
                    return  # offered again by who was interrupted behind the first time
                self._holdings.outgoing[push.push_id] = cargo
                self._feed(event)
                self._offered[push.fragment] = push.push_id
                with self.condition:  # nobody asks for it any more
                    self.rejections.pop(former or 0, None)
            case Withdraw(request):
                self._feed(event)
                with self.condition:  # it may have been answered meanwhile
                    self.results.pop(request, None)
            case _:
                self._feed(event)

    def _receive(self, source: zmq.Socket[bytes]) -> None:
        connections = self._connections
        for _ in range(BATCH):
            try:
                frames = source.recv_multipart(NOW, copy=False)
            except zmq.Again:
                return
            buffers = [frame.buffer for frame in frames]
            self.bytes_down += sum(buffer.nbytes for buffer in buffers)
            try:
                message, payload = unpack(buffers)
                if payload is not None:
                    check_length(message, payload, self._session.layout, self._session.config)
            except ProtocolError as error:
                self._say(f"The broker sent what cannot be read: {error}", trouble=True)
                continue
            self._payload = payload
            self._feed(Received(message))
            self._payload = None
            self._failures = 0
            if self._connections is not connections:
                return

    def _feed(self, event: Event) -> None:
        for effect in self._session.handle(event, self._clock()):
            self._is_news |= type(effect) not in QUIET
            self._do(effect)

    def _publish(self) -> None:
        """Let the training thread see how things stand now, and wake it up where that is news.

        Not for each chunk that comes or goes: while training waits for a version, it would wake up a
        thousand times to find nothing, and this thread would wait for Python's lock as often.
        """
        session = self._session
        self.last_heard, self.retries = session.connection.last_heard, session.uploads.retries
        flights = [upload for upload in session.uploads if upload.is_gradient]
        uploaded = frozenset(each.push.push_id for each in flights if each.is_in)
        put_off = frozenset(each.push.push_id for each in flights if each.is_put_off)
        is_same = (self.phase, self.uploaded, self.put_off) == (session.phase, uploaded, put_off)
        if is_same and not self._is_news:
            return
        self._is_news = False
        with self.condition:
            self.phase = session.phase
            self.config = session.config
            self.layout = session.layout
            self.reconnections = session.connection.reconnections
            self.uploaded, self.put_off = uploaded, put_off
            self.condition.notify_all()

    # Effects.

    def _do(self, effect: Effect) -> None:
        match effect:
            case Open():
                self._open_connections()
            case Close():
                self._close_connections()
            case Send(message, bulk):
                self._send(pack(message), bulk=bulk)
            case SendChunk(session, push_id, fragment, index):
                chunk = Chunk(fragment, index, session=session, push_id=push_id)
                self._send(pack(chunk, self._holdings.outgoing[push_id].chunk(index)), bulk=True)
            case Beat(session, uploading):
                self._send(pack(self.progress.heartbeat(session, uploading=uploading)), bulk=False)
            case BeginVersion(fragment):
                self._holdings.begin(self._fragment(fragment))
            case StoreChunk(fragment, index):
                assert self._payload is not None and self._session.config is not None
                wire = self._session.config.reply_dtype
                self._holdings.store(fragment, index, self._payload, wire)
            case Deliver():
                self._deliver(effect)
            case PrepareDonation(push_id, fragment):
                self._prepare(push_id, self._fragment(fragment))
            case PushOver(push_id, code, text):
                self._holdings.outgoing.pop(push_id, None)
                if code is not None:
                    self._reject(push_id, code, text)
            case Joined(welcome, _, again):
                with self.condition:
                    self.refusal = None
                    self.stopping = self.restarting = None
                    self.feed = welcome.feed
                    self.turns.clear()  # what came before it has no meaning any more
                    self.turns.append(effect)
                self._welcomed(welcome.epoch)
                how = "Back at" if again else "Joined the run at"
                self._say(f"{how} {self.address}, expected from round {welcome.first_round}.")
            case JoinRefused(code, text, final):
                with self.condition:
                    self.refusal = Refused(code, text)
                    self.refused_for_good = final
                self._say(text, trouble=True)
            case DropParts():
                self._holdings.forget()
                with self.condition:
                    self.arrivals.clear()
            case ForgetCheckpoint(text):
                self._holdings.forget()
                with self.condition:
                    self.has_forgotten = True
                self._say(text, trouble=True)
            case Answered():
                with self.condition:
                    self.results[effect.request] = effect
            case Granted() | Carried():
                with self.condition:
                    self.turns.append(effect)
            case Paced(sync_every):
                self.sync_every = sync_every
            case Stopping(text):
                with self.condition:
                    self.stopping = text
                self._say(text)
            case Restarting(text):
                with self.condition:
                    self.restarting = text
                self._say(f"{text} Training goes on, and takes part again when it is back.")
            case Say(text, trouble):
                self._say(text, trouble=trouble)
            case _:
                raise TypeError(f"not an effect of a session: {effect!r}")

    def _prepare(self, push_id: int, layout: FragmentLayout) -> None:
        """Lay out a donation: what is held as it is, the model by a copy that keeps nobody waiting."""
        held = self._holdings.held(layout)
        if held is None:
            ready = Prepared(push_id)
            self._holdings.copy(layout, lambda copied: self._command(ready, copied))
        else:
            self._holdings.outgoing[push_id] = held
            self._feed(Prepared(push_id))

    def _open_connections(self) -> None:
        assert self._context is not None and self._connections is None
        self._connections = Connections(self._context, self.address)
        for each in self._connections.pollable:
            self._poller.register(each, zmq.POLLIN)

    def _close_connections(self, linger_ms: int = 0) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            for each in connections.pollable:
                self._poller.unregister(each)
            connections.close(linger_ms)

    def _send(self, frames: list[Any], *, bulk: bool) -> None:
        connections = self._connections
        if connections is None:
            return
        if not connections.send(frames, bulk=bulk):
            # Credits bind long before this; only a connection that takes nothing gets here.
            self._say("The connection to the broker takes nothing any more.", trouble=True)
            return
        self.bytes_up += sum(memoryview(frame).nbytes for frame in frames)

    def _fragment(self, fragment: int) -> FragmentLayout:
        assert self._session.layout is not None
        return self._session.layout.all[fragment]

    def _deliver(self, effect: Deliver) -> None:
        released, fragment = effect.released, effect.released.fragment
        if effect.unchanged:
            state = self._holdings.state(fragment)
        else:
            state = self._holdings.finish(fragment)
        ids = frozenset(() if effect.counted is None else (effect.counted,))
        superseding = SENT_BEFORE if effect.superseding else None
        arrival = Arrival(released, ids, state, released.staleness, superseding)
        with self.condition:
            self.arrivals[fragment] = arrival.after(self.arrivals.get(fragment))
            self.turns.append(released)

    def _reject(self, push_id: int, code: str, text: str) -> None:
        with self.condition:
            self.rejections[push_id] = Rejection(code, text)
        if code not in (Code.LATE, Code.STALE):  # a matter of course, told by who moves on from it
            self._say(f"The broker refuses the pseudo-gradient: {text}", trouble=True)

    def _say(self, text: str, *, trouble: bool = False) -> None:
        if trouble:
            self.last_error = text
        if self._said.is_due(text, self._clock()):
            logger.log(logging.WARNING if trouble else logging.INFO, "%s", text)
