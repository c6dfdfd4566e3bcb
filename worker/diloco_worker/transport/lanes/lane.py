"""The I/O thread of a process that does not lead: one connection to the leader, one to the broker.

It sends and takes the chunks that this process owns, and decides nothing: the leader's session says what
to send, and is told of what has come. Credit for what comes it gives back itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from diloco_protocol import ProtocolError, VersionId, pack, unpack
from diloco_protocol.clients.keys import Keys
from diloco_protocol.clients.same_host import can_be_entered
from diloco_protocol.messages import Chunk, Credit, Lane, Push, decode, encode
from diloco_worker.model.flat_state import FlatState
from diloco_worker.session.downloads import CREDIT_BATCH
from diloco_worker.transport.connections import NOW, dealer
from diloco_worker.transport.forks import inode_of, keep_from_children
from diloco_worker.transport.lanes import words
from diloco_worker.transport.lanes.lane_buffers import AnotherCopy, LaneBuffers
from diloco_worker.transport.lanes.words import Meeting

logger = logging.getLogger("diloco.worker")

BATCH = 64
POLL_MS = 5000


class LaneThread:
    """See the head of this module. `start` it once, `close` it once.

    `rank` is that of this process in its worker, 1 or more.
    """

    def __init__(self, meeting: Meeting, rank: int, keys: Keys | None = None) -> None:
        self._meeting, self._rank, self._keys = meeting, rank, keys
        self.buffers: LaneBuffers | None = None  # once the layout is known
        self.has_ended = False  # the leader has left, or is gone
        self.leader_is_gone = False
        self.last_word = b""  # the leader's
        self.last_error: str | None = None
        self._calls: deque[Callable[[], object]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._poller = zmq.Poller()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._broker: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._generation = b""
        self._session, self._reply = b"", "fp32"
        self._is_shortened = False  # chunks go through a Unix socket
        self._owed = 0
        self._donations: dict[int, Push] = {}  # asked for, and not laid out yet
        self._waiting: list[Chunk] = []  # to be sent, of pushes that are not laid out yet
        self._descriptors: dict[int, int | None] = {}
        self._ended = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="diloco-lane", daemon=True)
        keep_from_children(self)

    # For other threads.

    def start(self) -> None:
        self._thread.start()

    def lay_out(self, push_id: int, wire: FlatState) -> None:
        """These are the chunks of a push; the leader offers it."""
        assert self.buffers is not None
        self.buffers.outgoing[push_id] = wire
        self._call(self._send_waiting)

    def has_own_values(self) -> None:
        """What a broker without parameters may ask for is here."""
        self._call(self._donate)

    def take(self, fragment: int, version: VersionId) -> FlatState:
        """This process's share of a version that the leader has whole."""
        assert self.buffers is not None
        return self.buffers.take(fragment, version)

    def wait_for_the_end(self, seconds: float) -> bool:
        """Until the leader has left; what it sends goes over this connection, too."""
        with self._ended:
            return self._ended.wait_for(lambda: self.has_ended, seconds)

    def close(self, patience: float = 5.0) -> None:
        self._call(self._end)
        if self._thread.is_alive():
            self._thread.join(patience)
        if not self._thread.is_alive():
            self._wake_reader.close()
            self._wake_writer.close()

    def leave_to_the_parent(self) -> None:
        """In a forked child: it holds no connection open."""
        for descriptor, inode in self._descriptors.items():
            if inode is not None and inode_of(descriptor) == inode:
                os.close(descriptor)
        self._wake_reader.close()
        self._wake_writer.close()
        self._ended = threading.Condition()
        self.has_ended = True

    def _call(self, action: Callable[[], object]) -> None:
        self._calls.append(action)
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    # The thread.

    def _main(self) -> None:
        try:
            self._context = zmq.Context()
            self._leader = words.prepared(self._context.socket(zmq.DEALER))
            self._leader.setsockopt(zmq.ROUTING_ID, b"L" + self._rank.to_bytes(4, "big"))
            self._leader.setsockopt(zmq.CURVE_SERVERKEY, self._meeting.server)
            self._leader.setsockopt(zmq.CURVE_PUBLICKEY, self._meeting.public)
            self._leader.setsockopt(zmq.CURVE_SECRETKEY, self._meeting.secret)
            self._watch = self._leader.get_monitor_socket(
                zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
            )
            self._leader.connect(self._meeting.address_from(words.machine()))
            self._leader.send(words.HERE, NOW)
            for each in (self._wake_reader, self._leader, self._watch):
                self._poller.register(each, zmq.POLLIN)
            while not self.has_ended:
                self._turn()
        except Exception as error:
            logger.exception("The connection of process %d of this worker has failed.", self._rank)
            self.last_error = f"The connection for chunks has failed: {error!r}"
        finally:
            self._close_broker()
            if self._context is not None:
                self._context.destroy(linger=0)
            self._end()

    def _end(self) -> None:
        with self._ended:
            self.has_ended = True
            self._ended.notify_all()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(POLL_MS))
        if self._wake_reader.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                while self._wake_reader.recv(4096):
                    pass
        while self._calls:
            self._calls.popleft()()
        if self._leader in ready:
            self._hear_leader()
        if self._broker is not None and self._broker in ready:
            self._hear_broker(self._broker)
        if self._monitor is not None and self._monitor in ready:
            self._see_changes(self._monitor)
        if self._watch in ready:
            self._see_leader()

    def _hear_leader(self) -> None:
        for _ in range(BATCH):
            try:
                what, *frames = self._leader.recv_multipart(NOW)
            except zmq.Again:
                return
            if what == words.OPEN:
                self._open(*frames)
            elif what == words.CLOSE:
                self._close_broker()
            elif what == words.SEND:
                message = decode(frames[0])
                assert isinstance(message, Chunk)
                self._send(message)
            elif what == words.DONATE:
                offer = decode(frames[0])
                assert isinstance(offer, Push)
                self._donations[offer.push_id] = offer
                self._donate()
            elif what == words.OVER and self.buffers is not None:
                push_id = int.from_bytes(frames[0], "big")
                self._donations.pop(push_id, None)
                self.buffers.outgoing.pop(push_id, None)
                self._waiting = [each for each in self._waiting if each.push_id != push_id]
            elif what == words.END:
                self.last_word = frames[0]
                self._end()

    def _see_leader(self) -> None:
        while self._watch.poll(0):
            event: Any = parse_monitor_message(self._watch.recv_multipart(NOW))
            if event["event"] == zmq.EVENT_CONNECTED:
                self._descriptors[event["value"]] = inode_of(event["value"])
            else:
                self._descriptors.pop(event["value"], None)
                self.leader_is_gone = True
                self._hear_leader()  # its last word may have come with the news
                self._end()

    # The connection to the broker.

    def _open(
        self, generation: bytes, address: bytes, shortcut: bytes, binding: bytes, reply: bytes
    ) -> None:
        self._close_broker()
        assert self._context is not None
        message = decode(binding)
        assert isinstance(message, Lane)
        self._generation, self._session, self._reply = generation, message.session, reply.decode()
        way = shortcut.decode()
        self._is_shortened = bool(way) and can_be_entered(way)
        way = way if self._is_shortened else address.decode()
        self._broker, self._monitor = dealer(self._context, way, self._keys)
        self._poller.register(self._broker, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._broker.send(binding, NOW)

    def _close_broker(self) -> None:
        broker, monitor = self._broker, self._monitor
        self._broker = self._monitor = None
        self._owed = 0
        self._waiting.clear()
        if broker is not None and monitor is not None:
            self._poller.unregister(broker)
            self._poller.unregister(monitor)
            broker.disable_monitor()
            broker.close(linger=0)
            monitor.close(linger=0)

    def _send(self, chunk: Chunk) -> None:
        if self._broker is None or self.buffers is None:
            return
        assert chunk.push_id is not None
        payload = self.buffers.chunk(chunk.push_id, chunk.fragment, chunk.index)
        if payload is None:
            self._waiting.append(chunk)
            return
        header, body = pack(chunk, payload)
        try:
            self._broker.send(header, zmq.SNDMORE | zmq.NOBLOCK)
            self._broker.send(body, NOW, copy=False)
        except zmq.Again:
            self._broken("The connection takes no more data.")
            return
        self._leader.send_multipart([words.SENT, (len(header) + payload.nbytes).to_bytes(8, "big")])

    def _donate(self) -> None:
        if self.buffers is None:
            return  # it is asked again when the model's own values are here
        for push_id, offer in list(self._donations.items()):
            if self.buffers.donate(push_id, offer.fragment, offer.base):
                del self._donations[push_id]
        self._send_waiting()

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for chunk in waiting:
            self._send(chunk)

    def _hear_broker(self, broker: zmq.Socket[bytes]) -> None:
        for _ in range(BATCH):
            try:
                frames = [frame.buffer for frame in broker.recv_multipart(NOW, copy=False)]
            except zmq.Again:
                return
            try:
                message, payload = unpack(frames)
            except ProtocolError as error:
                self._broken(f"The broker sent a message that cannot be read: {error}")
                return
            if isinstance(message, Chunk) and payload is not None:
                self._take(message, payload)
                if self._broker is not broker:
                    return  # it was closed for what came
            else:  # it has no other word for a lane than that the session is void
                self._broken(str(getattr(message, "text", "")) or f"It answered {message.kind}.")
                return

    def _take(self, chunk: Chunk, payload: memoryview) -> None:
        assert self._broker is not None and self.buffers is not None
        self._owed += 1
        if self._owed >= CREDIT_BATCH:
            self._broker.send(encode(Credit(self._owed, self._session)), NOW)
            self._owed = 0
        try:
            self.buffers.store(chunk, payload, self._reply)
        except AnotherCopy:
            fragment = chunk.fragment.to_bytes(4, "big")
            self._leader.send_multipart([words.SPOILT, self._generation, fragment])
            return
        except ProtocolError as error:
            self._broken(f"What the broker sent cannot be used: {error}")
            return
        size = payload.nbytes.to_bytes(8, "big")
        self._leader.send_multipart([words.CHUNK, self._generation, encode(chunk), size])

    def _broken(self, why: str) -> None:
        """Once for a connection: the leader opens all of them anew."""
        self._close_broker()
        text = f"The connection of process {self._rank} for chunks broke: {why}"
        self._leader.send_multipart([words.BROKEN, self._generation, text.encode()])

    def _see_changes(self, monitor: zmq.Socket[bytes]) -> None:
        while self._monitor is monitor and monitor.poll(0):
            event: Any = parse_monitor_message(monitor.recv_multipart(NOW))
            if event["event"] == zmq.EVENT_CONNECTED:
                self._descriptors[event["value"]] = inode_of(event["value"])
            elif event["event"] == zmq.EVENT_CONNECT_RETRIED:
                if self._is_shortened:
                    self._broken("the broker's Unix socket is gone.")
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._descriptors.pop(event["value"], None)
                self._broken("the broker, or the way to it, is gone.")
