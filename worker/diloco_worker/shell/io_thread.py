"""The one thread that owns a worker's sockets: it feeds the session and carries out its effects.

Another thread that wants something of it leaves a call, which it makes between two looks at the sockets.
Nothing that goes wrong in here reaches the training thread as an exception, and nothing makes it wait
without an end: the inbox says that the thread has ended once it is gone, for whatever reason.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import zmq

from diloco_protocol import ProtocolError, pack, unpack
from diloco_protocol.messages import Heartbeat, Message, Push
from diloco_worker.core import effects, events
from diloco_worker.core.connection import Phase
from diloco_worker.core.session import Session
from diloco_worker.model.flat_state import FlatState, WireFragment
from diloco_worker.shell.connections import NOW, Connections
from diloco_worker.shell.effects import Executor
from diloco_worker.shell.fragment_buffers import FragmentBuffers, check_length
from diloco_worker.shell.inbox import Inbox
from diloco_worker.shell.repeated_lines import RepeatedLines

logger = logging.getLogger("diloco.worker")

# Messages taken from one socket before the others get their turn.
BATCH = 64
# Longest sleep of the thread; everything that matters wakes it earlier.
LONGEST_POLL_S = 5.0
# How long the last message, `leave`, may take to get out.
LEAVE_LINGER_MS = 1000
# Effects that the training thread need not hear of.
QUIET = (
    effects.Send,
    effects.SendChunk,
    effects.Beat,
    effects.BeginVersion,
    effects.StoreChunk,
)
# Unexpected exceptions in a row after which the thread gives up; each is followed by a pause.
MAX_FAILURES = 20
FAILURE_PAUSE_S = 0.5


class IoThread:
    """See the head of this module. `start` it once; it ends when its session has left.

    Args:
        session: only this thread touches it from now on.
        inbox: what the training thread is told.
        beat: the heartbeat to send now.
        welcomed: called in the thread with the broker's epoch, whenever it takes this worker in.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        address: str,
        session: Session,
        inbox: Inbox,
        buffers: FragmentBuffers,
        *,
        beat: Callable[[bytes, bool], Heartbeat],
        welcomed: Callable[[str], object],
        clock: Callable[[], float],
    ) -> None:
        self.address = address
        self.now = clock
        self.session = session
        self.said = RepeatedLines()
        self._inbox = inbox
        self._buffers = buffers
        self._beat = beat
        self._on_welcome = welcomed
        self._calls: deque[Callable[[], object]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._main, name="diloco-link", daemon=True)
        self._executor = Executor(session, inbox, self, buffers, self._notice)
        self._connections: Connections | None = None
        self._poller = zmq.Poller()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._is_news = False  # since the inbox was published last
        self._offered: dict[int, int] = {}  # by fragment; the last push id
        self._failures = 0

    # For other threads.

    def start(self) -> None:
        self._thread.start()

    def call(self, action: Callable[[], object]) -> None:
        """Have this done in the thread."""
        self._calls.append(action)
        self.wake()

    def wake(self) -> None:
        """Let the thread take a turn, which wakes up those who wait for the inbox. Takes no lock."""
        # Full: it will wake up anyway. Closed: nobody is there to wake up.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def join(self, patience: float) -> None:
        """Wait for the end, which somebody has called for, at most this long."""
        if self._thread.is_alive():
            self._thread.join(patience)
        if not self._thread.is_alive():
            self._close_wake_ups()
        elif patience:
            logger.error("The link to %s did not end within %g s.", self.address, patience)

    def leave_to_the_parent(self) -> None:
        """In a forked child: hold no connection open."""
        connections, self._connections = self._connections, None
        for descriptor in list(connections.descriptors.values()) if connections is not None else ():
            descriptor.close()
        self._close_wake_ups()

    def _close_wake_ups(self) -> None:
        self._wake_reader.close()
        self._wake_writer.close()

    # Calls.

    def feed(self, event: events.Event) -> None:
        """Let the session take in an event, and do what it asks for."""
        self._executor.feed(event)

    def _notice(self, effect: effects.Effect) -> None:
        self._is_news |= not isinstance(effect, QUIET)

    def offer(self, push: Push, wire: WireFragment) -> None:
        former = self._offered.get(push.fragment)
        if former == push.push_id:
            return  # offered again by who was interrupted behind the first time
        self._buffers.outgoing[push.push_id] = wire
        self.feed(events.Offer(push))
        self._offered[push.fragment] = push.push_id
        self._inbox.take_rejection(former or 0)  # nobody asks for it any more

    def donate(self, push_id: int, copied: Future[WireFragment]) -> None:
        """The model has been copied, to be donated."""
        if push_id in self.session.uploads:  # else nobody wants it any more
            self._buffers.outgoing[push_id] = copied.result()
            self.feed(events.Prepared(push_id))

    def set_base(self, fragment: int, state: FlatState | None) -> None:
        self._buffers.set_base(fragment, state)

    def withdraw(self, request: int) -> None:
        self.feed(events.Withdraw(request))
        with self._inbox.condition:  # it may have been answered meanwhile
            self._inbox.results.pop(request, None)

    # The thread.

    def _main(self) -> None:
        try:
            self._context = zmq.Context()
            self._poller.register(self._wake_reader, zmq.POLLIN)
            self.feed(events.Start())
            while self.session.phase is not Phase.LEFT:
                self._guarded_turn()
        except Exception as error:
            logger.exception("The link to %s has failed; training goes on alone.", self.address)
            self._inbox.last_error = f"The link has failed: {error!r}"
        finally:
            try:
                self.close(LEAVE_LINGER_MS)
                if self._context is not None:
                    self._context.term()
            finally:
                self._inbox.end()

    def _guarded_turn(self) -> None:
        """One turn. What nobody expected costs the connections, never the thread."""
        try:
            self._turn()
        except Exception as error:
            self._failures += 1
            logger.exception("Unexpected error in the link to %s.", self.address)
            self._inbox.last_error = f"Unexpected error in the link: {error!r}"
            if self._failures >= MAX_FAILURES:
                raise
            threading.Event().wait(FAILURE_PAUSE_S)
            self.feed(events.Disconnected("The link starts again after an unexpected error."))
        is_news, self._is_news = self._is_news, False
        self._inbox.publish(self.session, is_news=is_news)

    def _turn(self) -> None:
        wakes_at = self.session.wakes_at()
        pause = LONGEST_POLL_S if wakes_at is None else min(LONGEST_POLL_S, wakes_at - self.now())
        # Rounded up, or a deadline a fraction of a millisecond away would be polled for in a spin.
        ready = dict(self._poller.poll(max(0, int(pause * 1000 + 1)) if pause > 0 else 0))
        if self._wake_reader.fileno() in ready:
            self._drain_wake_ups()
            self._is_news = True  # for who waits, whatever it was
        while self._calls and self.session.phase is not Phase.LEFT:
            self._calls.popleft()()
        connections = self._connections
        if connections is not None:
            for each in (connections.control, connections.bulk):
                if each in ready:
                    self._receive(each)
            # After the messages, so that what a peer said before it died is heard.
            if self._connections is connections and connections.may_have_changed(ready):
                connected, broken = connections.changes()
                if connected:
                    self.feed(events.Connected())
                if broken is not None:
                    self.feed(events.Disconnected(broken))
        self.feed(events.Tick())

    def _drain_wake_ups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass

    def _receive(self, source: zmq.Socket[bytes]) -> None:
        connections = self._connections
        for _ in range(BATCH):
            try:
                frames = source.recv_multipart(NOW, copy=False)
            except zmq.Again:
                return
            buffers = [frame.buffer for frame in frames]
            self._inbox.bytes_down += sum(buffer.nbytes for buffer in buffers)
            try:
                message, payload = unpack(buffers)
                if payload is not None:
                    check_length(message, payload, self.session.layout, self.session.config)
            except ProtocolError as error:
                self.say(f"The broker sent a message that cannot be read: {error}", trouble=True)
                continue
            self._executor.payload = payload
            self.feed(events.Received(message))
            self._executor.payload = None
            self._failures = 0
            if self._connections is not connections:
                return

    # What the session asks for.

    def open(self) -> None:
        assert self._context is not None and self._connections is None
        self._connections = Connections(self._context, self.address)
        for each in self._connections.pollable:
            self._poller.register(each, zmq.POLLIN)

    def close(self, linger_ms: int = 0) -> None:
        connections, self._connections = self._connections, None
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
        self._inbox.bytes_up += sum(memoryview(frame).nbytes for frame in frames)

    def heartbeat(self, session: bytes, *, uploading: bool) -> Heartbeat:
        return self._beat(session, uploading)

    def welcomed(self, epoch: str) -> None:
        self._on_welcome(epoch)

    def say(self, text: str, *, trouble: bool = False) -> None:
        if trouble:
            self._inbox.last_error = text
        if self.said.is_due(text, self.now()):
            logger.log(logging.WARNING if trouble else logging.INFO, "%s", text)
