"""The link of a worker to its broker: what the training thread calls, and the thread of the sockets.

The I/O thread feeds the session and executes its effects. In a worker of several processes the leader
alone has a session; in the others the thread feeds a follower. Other threads queue calls, which the I/O
thread makes between two polls of the sockets, and read its results from the link as an inbox. No
exception in here reaches the training thread: `has_ended` says that the I/O thread is gone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import zmq

from diloco_protocol import UsageError
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.clients.keys import Keys
from diloco_protocol.messages import Heartbeat, Push
from diloco_protocol.tensors.threads import thread_pool
from diloco_worker.model.feedback import InFewBits
from diloco_worker.model.flat_state import FlatState
from diloco_worker.session import events
from diloco_worker.session.connection import Owners, Phase
from diloco_worker.session.news import LinkState
from diloco_worker.session.session import Session
from diloco_worker.transport.between_ranks import Followers, LeaderConnection, Moved
from diloco_worker.transport.broker_address import Given
from diloco_worker.transport.broker_connection import LEAVE_LINGER_MS, BrokerConnection
from diloco_worker.transport.executor import Executor
from diloco_worker.transport.follower import Follower
from diloco_worker.transport.forks import keep_from_children
from diloco_worker.transport.fragment_buffers import FragmentBuffers, Versions
from diloco_worker.transport.inbox import Inbox

logger = logging.getLogger("diloco.worker")

# Longest sleep of the thread; events wake it earlier.
LONGEST_POLL_S = 5.0
# Pause after an unexpected exception, doubled for each that follows within `FAILURES_APART_S`.
FAILURE_PAUSE_S = 0.5
LONGEST_FAILURE_PAUSE_S = 30.0
FAILURES_APART_S = 120.0
# Unexpected exceptions during closing, after which the thread ends without a `leave`.
FAILURES_AT_THE_END = 3


class Link(Inbox, BrokerConnection):
    """`start` it once, `close` it once. Only the I/O thread uses the session from now on.

    Args:
        session: None for a follower, whose `others` is the connection to its leader.
        capture, tag_of, pinned, states: those of `FragmentBuffers`.
        welcomed: called with the broker's epoch at each welcome.
        follows_rounds: that of `Inbox`.
    """

    def __init__(
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
    ) -> None:
        BrokerConnection.__init__(self, address, keys)
        Inbox.__init__(self, follows_rounds=follows_rounds)
        self.progress = Heartbeat(b"", 0)  # the next heartbeat
        self.welcomed = welcomed
        self.buffers = FragmentBuffers(
            capture=capture,
            copied=lambda push_id, copied: self._call(self._seed, push_id, copied),
            tag_of=tag_of,
            named=lambda named: self._call(self._named, named),
            pinned=pinned,
            states=states or {},
        )
        self._encoders: ThreadPoolExecutor | None = None
        self.others = others
        if isinstance(others, LeaderConnection):
            self.executor = self.session = Follower(self, self.connect_bulk, self.buffers, others)
        else:
            assert session is not None
            self.session = session
            self.executor = Executor(session, self, self, self.buffers, others=others)
        self._calls: deque[Callable[[], object]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._main, name="diloco-link", daemon=True)
        self._offered: dict[int, int] = {}  # by fragment, the last push id
        self._failures = 0  # unexpected exceptions in quick succession
        self._failed_at = -math.inf
        self._failure: str | None = None  # why to reconnect, a sentence
        self._is_closing = threading.Event()
        keep_from_children(self)

    # For other threads.

    def start(self, tensor_threads: int = 1) -> None:
        """Start the I/O thread, and the others of the threads that encode quantized deltas."""
        self._encoders = thread_pool(tensor_threads - 1)
        self._thread.start()

    def tell(self, event: events.Event) -> None:
        """Queue an event for the session; raises UsageError for one that only the leader may send."""
        if isinstance(event, events.TakeUnits) and self.session is self.executor:
            raise UsageError(
                "The first process of a worker takes the units of a work queue; give them to the others "
                "with torch.distributed."
            )
        self._call(self.executor.feed, event)

    def offer(self, push: Push, wire: FlatState) -> None:
        """Push a pseudo-gradient. Neither may change any more."""
        self._call(self._offer, push, wire)

    def set_base(
        self, fragment: int, state: FlatState | None, came_as: FlatState | None = None
    ) -> None:
        """See `FragmentBuffers.set_base`."""
        self._call(self.buffers.set_base, fragment, state, came_as)

    def share_out(self, owners: Owners, rank: int, shares: tuple[FragmentLayout, ...]) -> None:
        """Set which rank owns each chunk. A follower has the terms from its leader by now."""
        self._call(self.buffers.share_out, owners, rank, shares)
        self.tell(events.ShareOut(owners, self.terms))

    def withdraw(self, request: int) -> None:
        """Discard the answer to this control action."""
        self._call(self._withdraw, request)

    def described(self, asked_to_stop: str | None = None) -> LinkState:
        """The state of the link now. `asked_to_stop`: why this process is about to end."""
        return self.state(
            None if self.last_heard is None else self.now() - self.last_heard,
            asked_to_stop=asked_to_stop,
            address=self.address,
            description=self.describe(),
        )

    @property
    def waits_for_address(self) -> str | None:
        """What provides the broker's address while it is unknown; ends a sentence."""
        return self._where.advice if self._where.address is None else None

    def describe(self) -> str:
        """What the link is doing, as the end of a sentence."""
        match self.phase:
            case Phase.NEW | Phase.CONNECTING | Phase.AWAY:
                away = " (it announced a restart)" if self.restarting else ""
                where = self._where.names(self.address)
                unreachable = f"no broker answers at {where}{away}"
                return self.refused_key or self._where.problem or unreachable
            case Phase.JOINING:
                return self.last_error or "the broker has not answered the join"
            case Phase.JOINED:
                return "the broker is connected"
            case Phase.REFUSED:
                return str(self.refusal)
            case Phase.LEFT:
                return "this worker has left"

    def close(self, reason: str = "", patience: float = 5.0) -> None:
        """Send `leave`, close the sockets and end the thread, within `patience` seconds."""
        self.tell(events.Depart(reason))
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(patience)
        if self._encoders is not None:
            self._encoders.shutdown(wait=False, cancel_futures=True)
        if not self._thread.is_alive():
            self._close_wake_ups()
        elif patience:
            logger.error("The link to %s did not end within %g s.", self.address, patience)

    def wake(self) -> None:
        """Wake the I/O thread, and with it those in `wait_for`. Takes no lock, for signal handlers."""
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: it has ended
            self._wake_writer.send(b"\0")

    def leave_to_the_parent(self) -> None:
        """In a forked child, end this link."""
        self._connections = None
        for wire in self.buffers.outgoing.values():
            if isinstance(wire, InFewBits):
                wire.encode_here(in_child=True)
        self._close_wake_ups()
        self.condition = threading.Condition()  # the thread may have held the other one
        self.has_ended = True
        self.last_error = "This process was forked from the worker's, which alone is in the run."

    def _close_wake_ups(self) -> None:
        self._wake_reader.close()
        self._wake_writer.close()

    def _call(self, action: Callable[..., object], *args: Any) -> None:
        """Queue a call for the I/O thread."""
        self._calls.append(partial(action, *args))
        self.wake()

    # Calls.

    def _offer(self, push: Push, wire: FlatState) -> None:
        former = self._offered.get(push.fragment)
        if former == push.push_id:
            return  # offered again after an interrupt
        self.buffers.outgoing[push.push_id] = wire
        encoders = None if self._is_closing.is_set() else self._encoders
        if encoders is not None and isinstance(wire, InFewBits):
            wire.encode_ahead(encoders)
        self.executor.feed(events.Offer(push))
        self._offered[push.fragment] = push.push_id
        self.take_rejection(former or 0)  # obsolete

    def _seed(self, push_id: int, copied: Future[FlatState]) -> None:
        """The model was copied for seeding."""
        if push_id in self.session.uploads:  # else it is obsolete
            self.buffers.outgoing[push_id] = copied.result()
            self.executor.feed(events.Prepared(push_id))

    def _named(self, tag: Future[int]) -> None:
        """The tag of the model's own frozen parameters is known."""
        error = tag.exception()
        if error is not None:
            text = f"The model's frozen parameters cannot be read ({error!r:.200}); fetching the run's."
            self.say(text, trouble=True)
        self.executor.feed(events.FrozenNamed(None if error else tag.result()))

    def _withdraw(self, request: int) -> None:
        self.executor.feed(events.Withdraw(request))
        with self.condition:  # it may have been answered
            self.results.pop(request, None)

    # The thread.

    def _main(self) -> None:
        try:
            self._context = zmq.Context()
            self.poller.register(self._wake_reader, zmq.POLLIN)
            if self.others is not None:
                self.poller.register(self.others.socket, zmq.POLLIN)
                self.poller.register(self.others.monitor, zmq.POLLIN)
            start = events.Start(self._where.count)
            self._calls.appendleft(partial(self.executor.feed, start))
            self.wake()
            failures_left = FAILURES_AT_THE_END
            while self.session.phase is not Phase.LEFT and failures_left:
                failures_left -= not self._guarded_turn() and self._is_closing.is_set()
        except Exception as error:
            logger.exception("The link to %s has failed; training goes on alone.", self.address)
            self.last_error = f"The link has failed: {error!r}"
        finally:
            try:
                self.disconnect(LEAVE_LINGER_MS)
                if self.others is not None:
                    self.others.close(LEAVE_LINGER_MS)
                if self._context is not None:
                    self._context.term()
            finally:
                self.end()

    def _guarded_turn(self) -> bool:
        """One turn; False where it failed.

        An unexpected exception costs the connections, not the thread: training would go on alone.
        """
        try:
            if self._failure is not None:
                self.executor.feed(events.Disconnected(self._failure))
                self._failure = None
                self._publish()
            self._turn()
            self._publish()
            return True
        except Exception as error:  # noqa: BLE001  whatever it is
            self._is_closing.wait(self._failed(error))
            return False

    def _failed(self, error: Exception) -> float:
        """Log an unexpected exception. Returns the seconds to pause."""
        now = self.now()
        is_next = now - self._failed_at <= FAILURES_APART_S
        self._failures, self._failed_at = (self._failures + 1 if is_next else 0), now
        pause: float = min(
            FAILURE_PAUSE_S * 2.0 ** min(self._failures, 16), LONGEST_FAILURE_PAUSE_S
        )
        self._failure = self.last_error = f"Unexpected error in the link: {error!r:.300}."
        if self.said.is_due(self._failure, now):
            text = "Unexpected error in the link to %s; retrying in %g s."
            logger.error(text, self.address, pause, exc_info=error)
        return pause

    def _publish(self) -> None:
        if isinstance(self.session, Session):
            self.publish(self.session)

    def _turn(self) -> None:
        wakes_at = self.look_for_the_broker()
        pause = LONGEST_POLL_S if wakes_at is None else min(LONGEST_POLL_S, wakes_at - self.now())
        # Rounded up, or a deadline a fraction of a millisecond away would be polled for in a spin.
        ready = dict(self.poller.poll(max(0, int(pause * 1000 + 1)) if pause > 0 else 0))
        if self._wake_reader.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                while self._wake_reader.recv(4096):
                    pass
            self.is_news = True  # wakes waiting threads
        while self._calls and self.session.phase is not Phase.LEFT:
            self._calls.popleft()()
        self.receive(ready)
        if self.others is not None and (
            self.others.socket in ready or self.others.monitor in ready
        ):
            record: Any  # for a session or a follower
            for record in self.others.receive():
                self.executor.feed(record)
            self.is_news |= self.others.monitor in ready  # a process may be gone
        self._count_others()
        self.executor.feed(events.Tick())

    def _count_others(self) -> None:
        """The leader counts the bytes of its followers."""
        others = self.others
        if isinstance(others, Followers):
            self.bytes_up += others.bytes_up
            self.bytes_down += others.bytes_down
            others.bytes_up = others.bytes_down = 0
        elif others is not None and (self.bytes_up or self.bytes_down):
            others.send(Moved(self.bytes_up, self.bytes_down))
            self.bytes_up = self.bytes_down = 0

    def disconnect(self, linger_ms: int = 0) -> None:
        if isinstance(self.others, Followers):
            self.others.close_all()
        super().disconnect(linger_ms)
