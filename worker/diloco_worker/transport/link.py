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
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
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
from diloco_worker.transport.follower import Follower, SharesKnown
from diloco_worker.transport.forks import keep_from_children
from diloco_worker.transport.fragment_buffers import FragmentBuffers, Versions
from diloco_worker.transport.inbox import Inbox

logger = logging.getLogger("diloco.worker")

# Longest sleep of the thread; everything that matters wakes it earlier.
LONGEST_POLL_S = 5.0
# Pause after an unexpected exception: twice as long after each that follows within `FAILURES_APART_S`.
FAILURE_PAUSE_S = 0.5
LONGEST_FAILURE_PAUSE_S = 30.0
FAILURES_APART_S = 120.0
# Unexpected exceptions while the link is closed, after which it ends without leaving the run.
FAILURES_AT_THE_END = 3


class Link(Inbox, BrokerConnection):
    """See the head of this module. `start` it once, `close` it once.

    Only the I/O thread touches the session from now on. It calls `welcomed` with the broker's epoch,
    whenever it takes this worker in. `capture`, `tag_of`, `pinned` and `states` are those of
    `FragmentBuffers`, `follows_rounds` is that of `Inbox`. By its `keys` it proves itself where the
    broker asks for it. `others` leads to the other processes of the worker: from a follower, which has
    no session, to its leader.
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
        self.progress = Heartbeat(b"", 0)  # how training stands, for the next heartbeat
        self.welcomed = welcomed
        self.buffers = FragmentBuffers(
            capture=capture,
            copied=lambda push_id, copied: self._call(self._donate, push_id, copied),
            tag_of=tag_of,
            named=lambda named: self._call(self._named, named),
            pinned=pinned,
            states=states or {},
        )
        self._encoders: ThreadPoolExecutor | None = None
        self._others = others
        self._followers = others if isinstance(others, Followers) else None
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
        self._offered: dict[int, int] = {}  # by fragment; the last push id
        self._failures = 0  # unexpected exceptions, one soon after the other
        self._failed_at = -math.inf
        self._failure: str | None = None  # why the connections are to be made anew, a sentence
        self._is_closing = threading.Event()
        keep_from_children(self)

    # For other threads.

    def start(self, tensor_threads: int = 1) -> None:
        """Start the I/O thread and the threads that encode deltas in few bits, itself among them."""
        self._encoders = thread_pool(tensor_threads - 1)
        self._thread.start()

    def tell(self, event: events.Event) -> None:
        """Let the session take in an event: a version is requested, for instance.

        A follower takes in what concerns itself. Raises UsageError for what only the leader may ask for.
        """
        if isinstance(event, events.TakeUnits) and self.session is self.executor:
            raise UsageError(
                "Units of a work queue are handed to the first process of a worker; take them there, "
                "and give them to the others with torch.distributed."
            )
        self._call(self.executor.feed, event)

    def offer(self, push: Push, wire: FlatState) -> None:
        """Push a pseudo-gradient. Neither may change any more."""
        self._call(self._offer, push, wire)

    def set_base(
        self, fragment: int, state: FlatState | None, came_as: FlatState | None = None
    ) -> None:
        """Training stands on these values from now on; see `FragmentBuffers`."""
        self._call(self.buffers.set_base, fragment, state, came_as)

    def share_out(self, owners: Owners, rank: int, shares: tuple[FragmentLayout, ...]) -> None:
        """The chunks that each rank of this worker owns, and those of this one.

        A follower knows the terms of the run by now, from its leader.
        """
        self._call(self.buffers.share_out, owners, rank, shares)
        if isinstance(self.session, Follower):
            assert self.terms is not None
            self.tell(SharesKnown(self.terms, owners))
        else:
            self.tell(events.ShareOut(owners))

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
        return self._where.advice if self._where.address is None else None

    def describe(self) -> str:
        """What the link is at, as the end of a sentence."""
        match self.phase:
            case Phase.NEW | Phase.CONNECTING | Phase.AWAY:
                away = ", which restarts" if self.restarting else ""
                problem = self._where.problem
                where = self._where.names(self.address)
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
        if self._encoders is not None:
            self._encoders.shutdown(wait=False, cancel_futures=True)
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
        for wire in self.buffers.outgoing.values():
            if isinstance(wire, InFewBits):
                wire.encode_here(in_child=True)
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
        self.buffers.outgoing[push.push_id] = wire
        encoders = None if self._is_closing.is_set() else self._encoders
        if encoders is not None and isinstance(wire, InFewBits):
            wire.encode_ahead(encoders)
        self.executor.feed(events.Offer(push))
        self._offered[push.fragment] = push.push_id
        self.take_rejection(former or 0)  # nobody asks for it any more

    def _donate(self, push_id: int, copied: Future[FlatState]) -> None:
        """The model has been copied, to be donated."""
        if push_id in self.session.uploads:  # else nobody wants it any more
            self.buffers.outgoing[push_id] = copied.result()
            self.executor.feed(events.Prepared(push_id))

    def _named(self, tag: Future[int]) -> None:
        """What the model's own frozen parameters are called."""
        error = tag.exception()
        if error is not None:
            text = f"The frozen parameters here cannot be read ({error!r:.200}): the run's are fetched."
            self.say(text, trouble=True)
        self.executor.feed(events.FrozenNamed(None if error else tag.result()))

    def _withdraw(self, request: int) -> None:
        self.executor.feed(events.Withdraw(request))
        with self.condition:  # it may have been answered meanwhile
            self.results.pop(request, None)

    # The thread.

    def _main(self) -> None:
        try:
            self._context = zmq.Context()
            self.poller.register(self._wake_reader, zmq.POLLIN)
            if self._others is not None:
                self.poller.register(self._others.socket, zmq.POLLIN)
                self.poller.register(self._others.monitor, zmq.POLLIN)
            start = events.Start(self._where.count)
            self._calls.appendleft(partial(self.executor.feed, start))
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
            self.executor.feed(events.Disconnected(self._failure))
            self._failure = None
            self._publish()

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
            self.is_news = True  # for who waits, whatever it was
        while self._calls and self.session.phase is not Phase.LEFT:
            self._calls.popleft()()
        self.receive(ready)
        if self._others is not None and (
            self._others.socket in ready or self._others.monitor in ready
        ):
            record: Any  # what a session is fed, or a follower
            for record in self._others.receive():
                self.executor.feed(record)
            self.is_news |= self._others.monitor in ready  # one of them may be gone
        self._count_others()
        self.executor.feed(events.Tick())

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

    def disconnect(self, linger_ms: int = 0) -> None:
        if self._followers is not None:
            self._followers.close_all()
        super().disconnect(linger_ms)
