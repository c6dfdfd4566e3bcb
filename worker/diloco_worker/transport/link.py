"""What the training thread calls to take part in a run, and the one thread that owns its sockets.

The thread feeds the session and carries out its effects. A worker of several processes has a session in
its leader alone; in the others the thread feeds a follower, which does as the leader says. What another
thread wants of it is left as a call, which it makes between two looks at the sockets; what comes back is
read from the link as from an inbox. Nothing that goes wrong in here reaches the training thread as an
exception, and nothing makes it wait without an end: `has_ended` says that the thread is gone, for
whatever reason.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import zmq

from diloco_protocol import ProtocolError, UsageError, VersionId, pack, unpack
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.clients.keys import Keys
from diloco_protocol.clients.same_host import can_be_entered, leads_to
from diloco_protocol.messages import Heartbeat, Message, Push, Welcome
from diloco_worker.model.flat_state import FlatState
from diloco_worker.session import events
from diloco_worker.session.connection import Owners, Phase
from diloco_worker.session.news import LinkState
from diloco_worker.session.session import Session
from diloco_worker.transport.between_ranks import Followers, LeaderConnection, Moved
from diloco_worker.transport.connections import NOW, Changes, Connections
from diloco_worker.transport.executor import Executor
from diloco_worker.transport.follower import Follower, SharesKnown
from diloco_worker.transport.forks import keep_from_children
from diloco_worker.transport.fragment_buffers import FragmentBuffers, Versions, check_length
from diloco_worker.transport.inbox import Inbox
from diloco_worker.transport.whereabouts import Given, Whereabouts

logger = logging.getLogger("diloco.worker")

# Of a broker that was killed the Unix socket may break first. Where it breaks alone so often, one time
# after the other, something is wrong with it, and the next session goes over TCP.
BREAKS_OF_SHORTCUT = 2
# Messages taken from one socket before the others get their turn.
BATCH = 64
# Longest sleep of the thread; everything that matters wakes it earlier.
LONGEST_POLL_S = 5.0
# How long the last message, `leave`, may take to get out.
LEAVE_LINGER_MS = 1000
# Pause after an unexpected exception: twice as long after each that follows within `FAILURES_APART_S`.
FAILURE_PAUSE_S = 0.5
LONGEST_FAILURE_PAUSE_S = 30.0
FAILURES_APART_S = 120.0
# Unexpected exceptions while the link is closed, after which it ends without leaving the run.
FAILURES_AT_THE_END = 3
# The same sentence is not logged again within so many seconds, and so many are remembered for that.
REPEAT_S = 30.0
SENTENCES = 100


class RepeatedLines(dict[str, float]):
    """When each sentence was logged last, so that the same is not logged again and again."""

    def is_due(self, text: str, now: float) -> bool:
        """Whether to log this sentence; it counts as logged then."""
        if now - self.get(text, -REPEAT_S) < REPEAT_S:
            return False
        self.pop(text, None)  # the latest comes last
        self[text] = now
        while len(self) > SENTENCES:
            del self[next(iter(self))]
        return True


class Link(Inbox):
    """See the head of this module. `start` it once, `close` it once.

    Only the I/O thread touches the session from now on. It calls `welcomed` with the broker's epoch,
    whenever it takes this worker in. `capture`, `tag_of`, `pinned` and `states` are those of
    `FragmentBuffers`, `follows_rounds` is that of `Inbox`. By its `keys` it proves itself where the
    broker asks for it. `others` leads to the other processes of the worker: from a follower, which has
    no session, to its leader.
    """

    def __init__(  # noqa: PLR0913  what it stands between
        self,
        address: Given,
        session: Session | None,
        *,
        capture: Callable[[FragmentLayout], FlatState] | None = None,
        tag_of: Callable[[FragmentLayout], int] | None = None,
        pinned: bool = False,
        states: Mapping[int, Versions] | None = None,
        welcomed: Callable[[str], object] = lambda _: None,
        follows_rounds: bool = True,
        keys: Keys | None = None,
        others: Followers | LeaderConnection | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(follows_rounds=follows_rounds)
        # As it was given, or where the broker was found by it.
        self.address = address if isinstance(address, str) else "the address that server() says"
        self._whereabouts = Whereabouts(address)
        self.refused_key: str | None = None  # why the broker does not speak to us
        self._keys = keys
        self.progress = Heartbeat(b"", 0)  # how training stands, for the next heartbeat
        self.said = RepeatedLines()  # what was logged lately
        self.welcomed = welcomed
        self.now = clock
        self._buffers = FragmentBuffers(
            capture=capture,
            copied=lambda push_id, copied: self._call(self._donate, push_id, copied),
            tag_of=tag_of,
            named=lambda named: self._call(self._named, named),
            pinned=pinned,
            states=states or {},
        )
        self._others = others
        self._followers = others if isinstance(others, Followers) else None
        self._executor: Executor | Follower
        self.session: Session | Follower
        if isinstance(others, LeaderConnection):
            self._executor = self.session = Follower(self, self.connect_bulk, self._buffers, others)
        else:
            assert session is not None
            self.session = session
            self._executor = Executor(session, self, self, self._buffers, others=others)
        self._calls: deque[Callable[[], object]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._main, name="diloco-link", daemon=True)
        self._connections: Connections | None = None
        self._poller = zmq.Poller()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._offered: dict[int, int] = {}  # by fragment; the last push id
        self._failures = 0  # unexpected exceptions, one soon after the other
        self._failed_at = -math.inf
        self._failure: str | None = None  # why the connections are to be made anew, a sentence
        self._is_closing = threading.Event()
        self._breaks_of_shortcut = 0  # one after the other, of it alone
        self.shortcut = ""
        keep_from_children(self)

    # For other threads.

    def start(self) -> None:
        self._thread.start()

    def tell(self, event: events.Event) -> None:
        """Let the session take in an event: a version is requested, for instance.

        A follower takes in what concerns itself. Raises UsageError for what only the leader may ask for.
        """
        if isinstance(event, events.TakeUnits) and self.session is self._executor:
            raise UsageError(
                "Units of a work queue are handed to the first process of a worker; take them there, "
                "and give them to the others with torch.distributed."
            )
        self._call(self._executor.feed, event)

    def offer(self, push: Push, wire: FlatState) -> None:
        """Push a pseudo-gradient. Neither may change any more."""
        self._call(self._offer, push, wire)

    def set_base(
        self, fragment: int, state: FlatState | None, came_as: FlatState | None = None
    ) -> None:
        """Training stands on these values from now on; see `FragmentBuffers`."""
        self._call(self._buffers.set_base, fragment, state, came_as)

    def share_out(self, owners: Owners, rank: int, shares: tuple[FragmentLayout, ...]) -> None:
        """The chunks that each rank of this worker owns, and those of this one.

        A follower knows the terms of the run by now, from its leader.
        """
        self._call(self._buffers.share_out, owners, rank, shares)
        if isinstance(self.session, Follower):
            assert self.terms is not None
            self.tell(SharesKnown(self.terms, owners))
        else:
            self.tell(events.ShareOut(owners))

    def share_of(self, fragment: int, version: VersionId) -> FlatState:
        """A follower's share of a version that the leader has called complete."""
        return self._buffers.share_of(fragment, version)

    def holds(self, fragment: int) -> bool:
        """Whether this process has values of a complete version."""
        return self._buffers.holds(fragment)

    @property
    def last_of_leader(self) -> bytes:
        """What the leader told this follower when it left; empty where it has not."""
        return self.session.last if isinstance(self.session, Follower) else b""

    def say_at_the_end(self, word: bytes) -> None:
        """What the followers of this leader are to know when it has left."""
        if self._followers is not None:
            self._followers.last = word

    @property
    def lost_process(self) -> str | None:
        """Which process of this worker is gone, a sentence; None while all are there."""
        return self._followers.lost if self._followers is not None else None

    def withdraw(self, request: int) -> None:
        """Nobody waits for the answer to this control action any more."""
        self._call(self._withdraw, request)

    def described(self, asked_to_stop: str | None = None) -> LinkState:
        """How things stand now; why this process is asked to stop is handed in."""
        return replace(
            self.state(None if self.last_heard is None else self.now() - self.last_heard),
            asked_to_stop=asked_to_stop,
            address=self.address,
            description=self.describe(),
        )

    @property
    def waits_for_address(self) -> str | None:
        """What is waited for where it is not known yet where the broker is; ends a sentence."""
        return self._whereabouts.advice if self._whereabouts.address is None else None

    def describe(self) -> str:
        """What the link is at, as the end of a sentence."""
        match self.phase:
            case Phase.NEW | Phase.CONNECTING | Phase.AWAY:
                away = ", which restarts" if self.restarting else ""
                problem = self._whereabouts.problem
                where = self._whereabouts.names(self.address)
                return self.refused_key or problem or f"no broker answers at {where}{away}"
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
        self.tell(events.Depart(reason))
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(patience)
        if not self._thread.is_alive():
            self._close_wake_ups()
        elif patience:
            logger.error("The link to %s did not end within %g s.", self.address, patience)

    def wake(self) -> None:
        """Let the thread take a turn, which wakes up those in `wait_for`. Takes no lock: for signal
        handlers too."""
        # Full: it will wake up anyway. Closed: nobody is there to wake up.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def leave_to_the_parent(self) -> None:
        """In a forked child: this link has ended."""
        self._connections = None
        self._close_wake_ups()
        self.condition = threading.Condition()  # the thread may have held the other one
        self.has_ended = True
        self.last_error = "This process was forked from the worker's; only that one is in the run."

    def _close_wake_ups(self) -> None:
        self._wake_reader.close()
        self._wake_writer.close()

    def _call(self, action: Callable[..., object], *args: Any) -> None:
        """Have this done in the thread."""
        self._calls.append(partial(action, *args))
        self.wake()

    # Calls.

    def _offer(self, push: Push, wire: FlatState) -> None:
        former = self._offered.get(push.fragment)
        if former == push.push_id:
            return  # offered again by who was interrupted behind the first time
        self._buffers.outgoing[push.push_id] = wire
        self._executor.feed(events.Offer(push))
        self._offered[push.fragment] = push.push_id
        self.take_rejection(former or 0)  # nobody asks for it any more

    def _donate(self, push_id: int, copied: Future[FlatState]) -> None:
        """The model has been copied, to be donated."""
        if push_id in self.session.uploads:  # else nobody wants it any more
            self._buffers.outgoing[push_id] = copied.result()
            self._executor.feed(events.Prepared(push_id))

    def _named(self, tag: Future[int]) -> None:
        """What the model's own frozen parameters are called."""
        error = tag.exception()
        if error is not None:
            text = f"The frozen parameters here cannot be read ({error!r:.200}): the run's are fetched."
            self.say(text, trouble=True)
        self._executor.feed(events.FrozenNamed(None if error else tag.result()))

    def _withdraw(self, request: int) -> None:
        self._executor.feed(events.Withdraw(request))
        with self.condition:  # it may have been answered meanwhile
            self.results.pop(request, None)

    # The thread.

    def _main(self) -> None:
        try:
            self._context = zmq.Context()
            self._poller.register(self._wake_reader, zmq.POLLIN)
            if self._others is not None:
                self._poller.register(self._others.socket, zmq.POLLIN)
                self._poller.register(self._others.monitor, zmq.POLLIN)
            start = events.Start(self._whereabouts.count)
            self._calls.appendleft(partial(self._executor.feed, start))
            self.wake()
            failures_at_the_end = 0
            while (
                self.session.phase is not Phase.LEFT and failures_at_the_end < FAILURES_AT_THE_END
            ):
                is_well = self._guarded_turn()
                failures_at_the_end += self._is_closing.is_set() and not is_well
        except Exception as error:
            logger.exception("The link to %s has failed; training goes on alone.", self.address)
            self.last_error = f"The link has failed: {error!r}"
        finally:
            try:
                self.disconnect(LEAVE_LINGER_MS)
                if self._others is not None:
                    self._others.close(LEAVE_LINGER_MS)
                if self._context is not None:
                    self._context.term()
            finally:
                self.end()

    def _guarded_turn(self) -> bool:
        """One turn; False where it has failed.

        An unexpected exception costs the connections, never the thread: training would go on alone for
        the rest of its life.
        """
        try:
            self._restart_after_failure()
            self._turn()
            self._publish()
        except Exception as error:  # noqa: BLE001  whatever it is
            pause = self._failed(error)
            with contextlib.suppress(Exception):  # else it is tried again after the pause
                self._restart_after_failure()
            self._is_closing.wait(pause)
            return False
        return True

    def _failed(self, error: Exception) -> float:
        """Log an unexpected exception. Returns how many seconds to pause."""
        now = self.now()
        if now - self._failed_at > FAILURES_APART_S:
            self._failures = 0
        self._failed_at = now
        pause = min(FAILURE_PAUSE_S * (1 << self._failures), LONGEST_FAILURE_PAUSE_S)
        self._failures = min(self._failures + 1, 20)
        self._failure = self.last_error = f"Unexpected error in the link: {error!r:.300}."
        if self.said.is_due(self._failure, now):
            logger.error(
                "Unexpected error in the link to %s; it starts again in %g s.",
                self.address,
                pause,
                exc_info=error,
            )
        return pause

    def _restart_after_failure(self) -> None:
        if self._failure is not None:
            self._executor.feed(events.Disconnected(self._failure))
            self._failure = None
            self._publish()

    def _publish(self) -> None:
        if isinstance(self.session, Session):
            self.publish(self.session)

    def _turn(self) -> None:
        wakes_at = self._look_for_the_broker(self.session.wakes_at())
        pause = LONGEST_POLL_S if wakes_at is None else min(LONGEST_POLL_S, wakes_at - self.now())
        # Rounded up, or a deadline a fraction of a millisecond away would be polled for in a spin.
        ready = dict(self._poller.poll(max(0, int(pause * 1000 + 1)) if pause > 0 else 0))
        if self._wake_reader.fileno() in ready:
            self._drain_wake_ups()
            self.is_news = True  # for who waits, whatever it was
        while self._calls and self.session.phase is not Phase.LEFT:
            self._calls.popleft()()
        connections = self._connections
        if connections is not None:
            for each in connections.sockets:
                if each in ready and not each.closed:
                    self._receive(each)
            if self._connections is connections and connections.may_have_changed(ready):
                self._follow(connections, connections.changes())
        if self._others is not None and (
            self._others.socket in ready or self._others.monitor in ready
        ):
            for event in self._others.receive():
                self._executor.feed(event)
            self.is_news |= self._others.monitor in ready  # one of them may be gone
        self._count_others()
        self._executor.feed(events.Tick())

    def _count_others(self) -> None:
        """The leader counts what its followers have sent and received."""
        others = self._others
        if isinstance(others, Followers):
            self.bytes_up += others.bytes_up
            self.bytes_down += others.bytes_down
            others.bytes_up = others.bytes_down = 0
        elif others is not None and (self.bytes_up or self.bytes_down):
            others.send(Moved(self.bytes_up, self.bytes_down))
            self.bytes_up = self.bytes_down = 0

    def _follow(self, connections: Connections, changes: Changes) -> None:
        """Tell the session what the monitors have seen of these connections."""
        self.refused_key = None if changes.connected else changes.refused
        if changes.connected:
            self._executor.feed(events.Connected())
        if changes.refused is not None and changes.is_final:
            self._executor.feed(events.LockedOut(changes.refused))
        elif changes.broken is not None:
            # Messages that arrived before the break are handled first. The poll may have missed them:
            # it asks for messages before it asks the monitors.
            for each in connections.sockets:
                if self._connections is connections:
                    self._receive(each)
            if self._connections is not connections:
                return
            is_alone = connections.is_shortened and changes.is_of_bulk_alone
            self._breaks_of_shortcut = self._breaks_of_shortcut + 1 if is_alone else 0
            self._executor.feed(events.Disconnected(changes.broken))
        elif changes.unreached and not changes.connected:
            self._executor.feed(events.Unreached())

    def _look_for_the_broker(self, wakes_at: float | None) -> float | None:
        """Follow a broker that has moved while nobody answers. Returns when to wake up."""
        next_look = self._whereabouts.next_look()
        if next_look is None or self.session.phase is not Phase.CONNECTING:
            return wakes_at
        if self.now() >= next_look and self._whereabouts.look(self.now()):
            self.disconnect()
            self.connect()
        next_look = self._whereabouts.next_look()
        return min((at for at in (wakes_at, next_look) if at is not None), default=None)

    def _drain_wake_ups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass

    def _receive(self, source: zmq.Socket[bytes]) -> None:
        connections = self._connections
        for _ in range(BATCH):
            if self._connections is not connections:
                return
            try:
                frames = source.recv_multipart(NOW, copy=False)
            except zmq.Again:
                return
            buffers = [frame.buffer for frame in frames]
            self.bytes_down += sum(buffer.nbytes for buffer in buffers)
            try:
                message, payload = unpack(buffers)
                if payload is not None:
                    check_length(message, payload, self.session.layout, self.session.config)
            except ProtocolError as error:
                text = f"The broker sent a message that cannot be read: {error}"
                if isinstance(self.session, Session):
                    self.say(text, trouble=True)
                else:
                    self._executor.feed(events.Disconnected(text))
                continue
            if isinstance(message, Welcome):
                self._shorten(message)
            self._executor.payload = payload
            self._executor.feed(events.Received(message))
            self._executor.payload = None

    def _shorten(self, welcome: Welcome) -> None:
        """Chunks go through a Unix socket where the broker is on this machine.

        Not where it was reached at another address than its own: there is a proxy, or a tunnel, which
        somebody has put there for a reason.
        """
        connections, address = self._connections, welcome.ipc
        self.shortcut = ""
        if connections is None or address is None or connections.is_shortened:
            return
        if self._breaks_of_shortcut >= BREAKS_OF_SHORTCUT:
            self._breaks_of_shortcut = 0
            return
        if leads_to(self.address, welcome.bound or "") and can_be_entered(address):
            for each in connections.pollable:
                self._poller.unregister(each)
            connections.shorten(address)
            for each in connections.pollable:
                self._poller.register(each, zmq.POLLIN)
            self.shortcut = address

    # What the session asks for.

    def connect(self, place: int = 0) -> None:
        assert self._context is not None and self._connections is None
        self.refused_key = None  # what was true of the last connections may be over
        self._whereabouts.turn_to(place)
        self._whereabouts.look(self.now())
        if (address := self._whereabouts.address) is None:
            return  # its file, or function, says none yet
        if address != self.address:
            self.address = address
            if self._whereabouts.count == 1:  # of several most may be wrong
                self.say(f"The broker is at {address} now.")
        self._adopt(Connections(self._context, address, self._keys))

    def connect_bulk(self, address: str, shortcut: str) -> None:
        """A follower connects for chunks, by this Unix socket where it can."""
        assert self._context is not None
        connections = Connections(self._context, address, self._keys, names=("bulk",))
        if shortcut and can_be_entered(shortcut):
            connections.shorten(shortcut)
        self._adopt(connections)

    def _adopt(self, connections: Connections) -> None:
        self._connections = connections
        for each in connections.pollable:
            self._poller.register(each, zmq.POLLIN)

    def disconnect(self, linger_ms: int = 0) -> None:
        connections, self._connections = self._connections, None
        if self._followers is not None:
            self._followers.close_all()
        if connections is not None:
            for each in connections.pollable:
                self._poller.unregister(each)
            connections.close(linger_ms)

    def send(self, message: Message, payload: Any = None, *, bulk: bool = False) -> None:
        connections = self._connections
        if connections is None:
            return
        frames = pack(message, payload)
        if not connections.send(frames, bulk=bulk):
            # Credits bind long before this; only a connection that takes nothing gets here.
            self.say("The connection to the broker accepts no more data.", trouble=True)
            return
        self.bytes_up += sum(memoryview(frame).nbytes for frame in frames)

    def say(self, text: str, *, trouble: bool = False) -> None:
        if trouble:
            self.last_error = text
        if self.said.is_due(text, self.now()):
            logger.log(logging.WARNING if trouble else logging.INFO, "%s", text)
