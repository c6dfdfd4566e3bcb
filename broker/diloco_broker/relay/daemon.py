"""The process of a relay: its sockets, served by one thread.

Relay(RelayConfig(bind=...), "tcp://hub:8512").run()
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zmq

from diloco_broker.config import BrokerConfig
from diloco_broker.core.members import permissions
from diloco_broker.relay import core
from diloco_broker.relay.sums import TensorSums
from diloco_broker.shell.broker import ITS_PROGRAM, Service
from diloco_broker.shell.process_memory import give_back_freed_memory
from diloco_broker.shell.receive_queue import ReceiveQueue
from diloco_broker.shell.sockets import ANSWERS_KEPT_FOR_RELAYS, Incoming, Sockets
from diloco_broker.storage.key_folder import KeyFolder
from diloco_broker.tensors import memory
from diloco_protocol.addresses import as_reached, several
from diloco_protocol.clients.address_file import check_address
from diloco_protocol.clients.keys import Keys
from diloco_protocol.dtypes import SPARSE_KEPT, check_wire_dtype
from diloco_protocol.errors import Code, ProtocolError, UsageError
from diloco_protocol.frames import MAX_HEADER_BYTES, pack, unpack
from diloco_protocol.messages import LONGEST_WORKER_ID, Error, Message, Via, is_worker_id
from diloco_protocol.relays import piece_of, read, unwrap, wrapped
from diloco_protocol.roles import Peer, Role
from diloco_worker.transport.broker_address import BrokerAddress, Given
from diloco_worker.transport.connections import NOW, Connections

logger = logging.getLogger("diloco.relay")

TICK_S = 0.1
# Seconds of a turn for messages of unauthenticated peers that wait, and between two such turns.
CATCH_UP_S = 0.0005
# Seconds that the longest join takes at the hub.
JOIN_AT_HUB_S = 0.005
# Messages taken in a turn: of the site, and of each connection to the hub.
MESSAGES_A_TURN = 256
# Seconds between attempts to connect to the hub, each at its next address.
AGAIN_S = 3.0
LEAVE_LINGER_MS = 1000


class RelayBroker(Service):
    """A relay: `run()` it in this thread, or `start()` and `stop()` it in a background thread.

    The constructor binds the sockets, so `address` and `feed_address` are known at once. The relay
    forwards the hub's feed.

    Args:
        config: `bind`, `feed`, `keys`, `insecure` and `max_workers` are the relay's own.
        parent: the address of the hub or of another relay, or a function that returns it; several
            addresses, separated by commas, are tried in turn.
        name: the name of the relay in displays; default: host name and port.
        parent_wire_dtype: wire dtype of the means that it sends upstream; default: that of the run.
        keys: the keys of a worker, if the hub requires keys; the relay uses the worker's name.

    Raises:
        UsageError: an address cannot be bound, or the name is invalid.
    """

    thread_name = "diloco-relay"

    def __init__(
        self,
        config: BrokerConfig,
        parent: Given,
        *,
        name: str | None = None,
        parent_wire_dtype: str | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.config = config
        self.name = name or default_name(config)
        self.hub = check(parent, self.name, parent_wire_dtype)
        self._keys = keys
        self._stop: tuple[str, bool] | None = None
        with ExitStack() as opened:
            of_site = KeyFolder(Path(config.keys)) if config.keys else None
            self.sockets = Sockets(
                config.bind, config.feed, of_site, config.max_workers, relays=True
            )
            opened.callback(self.sockets.close)
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            opened.callback(self._context.term)
            opened.callback(self._disconnect, LEAVE_LINGER_MS)
            self._opened = opened.pop_all()
        self.address, self.feed_address = self.sockets.address, self.sockets.feed_address
        self._where = BrokerAddress(self.hub)
        self._place = 0
        self._connections: Connections | None = None
        self._feed: zmq.Socket[bytes] | None = None  # the hub's
        self._tries_at = 0.0
        self._said = ""
        draw = partial(secrets.randbits, 64)
        self._core = core.Relay(self.name, draw, TensorSums(), parent_wire_dtype)
        self._receive_queue = ReceiveQueue(
            self._core.is_member, self._take, self._end_unauthenticated, JOIN_AT_HUB_S
        )

    # Start and stop.

    def run(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        next_tick = 0.0
        try:
            while self._stop is None:
                until_tick = max(0.0, next_tick - time.monotonic())
                self.sockets.wait(
                    min(CATCH_UP_S, until_tick) if self._receive_queue else until_tick
                )
                self._receive()
                self._hear_hub()
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self._tick(now)
                if now >= self.sockets.next_look:
                    self.sockets.look(self._core.members, now)
            self._do(self._core.disconnected(self._stop[0]))
        finally:
            torch.set_num_threads(threads)
            self.close()

    def request_stop(self, reason: str = ITS_PROGRAM, *, restarting: bool = False) -> None:
        self._stop = self._stop or (reason or ITS_PROGRAM, restarting)
        self.sockets.wake()

    def close(self) -> None:
        self._opened.close()

    @property
    def is_connected(self) -> bool:
        """Whether the hub has admitted the relay."""
        return self._core.terms is not None

    def _tick(self, now: float) -> None:
        self.sockets.changed_keys(now)
        if self.sockets.lost_a_connection():
            self._do(self._core.probe_all())
        if self._connections is None and now >= self._tries_at:
            self._connect(now)
        self._do(self._core.tick(now))
        if not self._core.held_bytes:
            memory.release()
            give_back_freed_memory()

    # The site.

    def _receive(self) -> None:
        now = time.monotonic()
        for _ in range(MESSAGES_A_TURN):
            incoming = self.sockets.receive()
            if incoming is None:
                break
            if incoming.route and not incoming.is_left_behind:
                self._receive_queue.deliver(incoming, now)
        self._receive_queue.catch_up(time.monotonic, CATCH_UP_S, is_idle=False)

    def _end_unauthenticated(self, route: bytes, why: str) -> None:
        logger.warning("Disconnected a peer: %s.", why)
        self.sockets.shut(route)
        self._do(self._core.closed(route))

    def _take(self, incoming: Incoming) -> None:
        """Handle one message. A failure returns an error to its sender."""
        route, peer = incoming.route, incoming.peer
        if not self.sockets.lets_in(peer):
            return
        try:
            via, frames = unwrap(incoming.frames)
            message, payload = _read(frames, self._receive_queue.longest_header(route, frames), via)
            if via is not None and peer is not None:
                # The downstream relay vouches for its workers.
                peer = Peer(Role.WORKER, via.peer or peer.name)
            permissions.check(peer, message)
            name = peer.name if peer is not None else None
            self._do(self._core.receive(route, via, message, payload, name))
        except ProtocolError as error:
            self.sockets.send(route, pack(Error(error.code, str(error))))
        except Exception:
            logger.exception("Failed to handle a message; its sender was notified.")
            text = "The relay failed to handle this message; see its log."
            self.sockets.send(route, pack(Error(Code.BAD_HEADER, text)))

    # The hub.

    def _connect(self, now: float) -> None:
        self._tries_at = now + AGAIN_S
        self._where.turn_to(self._place % self._where.count)
        self._place += 1
        self._where.look(now)
        if self._where.address is None:
            return  # its file or function has no address yet
        self._connections = Connections(
            self._context, self._where.address, self._keys, unsent=ANSWERS_KEPT_FOR_RELAYS
        )
        for each in self._connections.pollable:
            self.sockets.watch(each)

    def _disconnect(self, linger_ms: int = 0) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            for each in connections.pollable:
                self.sockets.unwatch(each)
            connections.close(linger_ms)
        if self._feed is not None:
            self.sockets.unwatch(self._feed)
            self._feed.close(linger=0)
            self._feed = None

    def _hear_hub(self) -> None:
        connections = self._connections
        if connections is None:
            return
        for number, each in enumerate(connections.sockets):
            for _ in range(MESSAGES_A_TURN):
                if self._connections is not connections:
                    return
                try:
                    frames = each.recv_multipart(NOW, copy=False)
                except zmq.Again:
                    break
                self._take_of_hub([frame.buffer for frame in frames], bulk=number == 1)
        if self._connections is connections:
            self._follow(connections)
        if self._feed is not None:
            self._pass_feed_on(self._feed)

    def _take_of_hub(self, frames: list[Any], *, bulk: bool) -> None:
        try:
            via, inner = unwrap(frames)
            message, payload = _read(inner, MAX_HEADER_BYTES, via)
            before = self._core.terms
            self._do(
                self._core.receive_from_hub(via, message, payload, time.monotonic(), bulk=bulk)
            )
            if before is None and self._core.terms is not None:
                self._follow_feed(self._core.terms.feed)
        except Exception:
            logger.exception("Failed to handle a message from the hub; reconnecting.")
            self._start_over("a message that could not be handled", "")

    def _follow(self, connections: Connections) -> None:
        """Handle connects and disconnects that the socket monitors report."""
        changes = connections.changes()
        if changes.connected:
            self._do(self._core.connected(time.monotonic()))
        if changes.broken is not None:
            self._start_over(changes.broken, changes.refused or "")
        elif changes.refused is not None and not changes.connected:
            self._start_over(changes.refused, changes.refused)
        elif changes.unreached and not changes.connected:
            where = self._where.names(str(self._where.address))
            self._start_over("", f"No broker answers at {where}; retrying.")

    def _start_over(self, why: str, trouble: str) -> None:
        if trouble and trouble != self._said:
            self._said = trouble
            logger.warning("%s", trouble)
        self._disconnect()
        self._tries_at = time.monotonic() + (0.0 if self._core.terms is not None else AGAIN_S)
        self._do(self._core.disconnected(why))

    def _follow_feed(self, address: str | None) -> None:
        """Subscribe to the hub's feed, if its address is known."""
        self._said = ""
        if address is None:
            return
        self._feed = self._context.socket(zmq.SUB)
        self._feed.setsockopt(zmq.LINGER, 0)
        self._feed.setsockopt(zmq.SUBSCRIBE, b"")
        if self._keys is not None:
            self._keys.lock(self._feed)
        self._feed.connect(as_reached(address, str(self._where.address)))
        self.sockets.watch(self._feed)

    def _pass_feed_on(self, feed: zmq.Socket[bytes]) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                self.sockets.publish(feed.recv(NOW))
            except zmq.Again:
                return

    # Commands.

    def _do(self, commands: core.Commands) -> None:
        for command in commands:
            match command:
                case core.SendUp(message, payload, via, bulk):
                    self._send_up(_frames(message, payload, via), bulk=bulk)
                case core.SendDown(route, message, payload, via):
                    frames = _frames(message, payload, via)
                    if not self.sockets.send(route, frames, piece_of(message)):
                        self._do(self._core.closed(route))
                case core.Close(route):
                    self.sockets.shut(route)
                    self._do(self._core.closed(route))
                case core.Reconnect(why):
                    self._start_over(why, "")
                case core.Stop(why):
                    self.request_stop(why)
                case core.Log(text, is_trouble):
                    logger.log(logging.WARNING if is_trouble else logging.INFO, "%s", text)

    def _send_up(self, frames: list[Any], *, bulk: bool) -> None:
        if self._connections is None or self._connections.send(frames, bulk=bulk):
            return
        self._start_over("its send queue is full", "The send queue to the hub is full.")


def _read(frames: Sequence[Any], longest: int, via: Via | None) -> tuple[Message, Any]:
    return unpack(frames, longest) if via is None else read(frames, longest, via.held)


def _frames(message: Message, payload: Any, via: Via | None) -> list[Any]:
    if via is None:
        return pack(message, payload)
    return wrapped(via.who, message, payload, peer=via.peer, held=via.held)


def check(hub: Given, name: str, wire_dtype: str | None = None) -> Given:
    """Validate the options, and return the hub's address with its scheme; raises UsageError."""
    if not is_worker_id(name):
        raise UsageError(
            f"The name must be 1 to {LONGEST_WORKER_ID} printable characters, got {name!r:.80}."
        )
    if wire_dtype is not None:
        check_wire_dtype(wire_dtype)
    if wire_dtype in SPARSE_KEPT:
        raise UsageError("--parent-wire-dtype is sparse, but the mean of several pushes is not.")
    return ",".join(several(check_address("--parent", hub))) if isinstance(hub, str) else hub


def default_name(config: BrokerConfig) -> str:
    """Host name and port; a random suffix if the system picks the port."""
    port = config.bind.rpartition(":")[2]
    ending = port if port.isdecimal() and port != "0" else secrets.token_hex(3)
    return f"relay-{socket.gethostname()[:40]}-{ending}"
