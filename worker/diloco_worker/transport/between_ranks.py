"""The connections between the ranks of one worker, from each follower to the leader.

Both ends are made in the training thread, since the leader broadcasts its address; then each belongs to
the I/O thread of its process. They are encrypted (CURVE, RFC 26) with keys that are drawn at each
start.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import msgpack
import zmq

from diloco_protocol import Bitmap
from diloco_protocol.messages import Lane, Message, Push, decode, encode
from diloco_worker.session import effects
from diloco_worker.session.events import ArrivedElsewhere, Disconnected, Event, Spoilt
from diloco_worker.transport.connections import NOW, prepared
from diloco_worker.transport.forks import monitored

# Records received before the sockets to the broker are polled.
BATCH = 256
# Largest record in bytes; it has a bitmap of the chunks of each fragment.
LONGEST = 1 << 20


class Codec:
    """Plain values, records (dataclasses), bitmaps, enums, frozen sets and messages as msgpack."""

    MESSAGE = 127  # extension code of a message; that of a record is its index

    def __init__(self, *records: type[Any]) -> None:
        self._records = records

    def packed(self, value: Any) -> bytes:
        made: bytes = msgpack.packb(value, default=self._extension)
        return made

    def unpacked(self, data: bytes) -> Any:
        return msgpack.unpackb(data, ext_hook=self._read, use_list=False, strict_map_key=False)

    def _extension(self, value: Any) -> Any:
        content: list[Any]
        match value:
            case Message():
                return msgpack.ExtType(self.MESSAGE, encode(value))
            case frozenset():
                content = [sorted(value)]
            case Enum():
                content = [value.value]
            case Bitmap():
                content = [value.to_bytes(), value.size]
            case _:
                content = [self._field(getattr(value, each.name)) for each in fields(value)]
        return msgpack.ExtType(self._records.index(type(value)), self.packed(content))

    def _field(self, value: Any) -> Any:
        # msgpack would encode an enum that is a text as a text.
        return self._extension(value) if isinstance(value, Enum) else value

    def _read(self, code: int, data: bytes) -> Any:
        if code == self.MESSAGE:
            return decode(data)
        kind: Any = self._records[code]
        return (Bitmap.from_bytes if kind is Bitmap else kind)(*self.unpacked(data))


# From the leader to a follower, besides effects of its session.


@dataclass(frozen=True)
class OpenBulk(Event):
    """Open a data connection to the broker."""

    generation: int  # of the leader's connections
    address: str
    shortcut: str  # a Unix socket for a rank on the broker's machine, or empty
    binding: Lane  # the first message on it
    reply_dtype: str  # of chunks; it may change when the broker restarts


@dataclass(frozen=True)
class Seed(Event):
    """Lay out the version that this push is based on, where it is held, else the model's own values."""

    push: Push


@dataclass(frozen=True)
class LeaderLeft(Event):
    """The leader has left the run, or its process is gone."""

    last: bytes = b""  # the last message, sent on closing


# From a follower to the leader, besides events of the leader's session.


@dataclass(frozen=True)
class Here(Event):
    """This rank is connected."""


@dataclass(frozen=True)
class Moved(Event):
    """Bytes sent to and received from the broker since the last record."""

    up: int
    down: int


Record = Event | effects.Effect
_CODEC = Codec(
    *(OpenBulk, effects.Close, effects.SendChunk, Seed, effects.PushOver, LeaderLeft),
    *(Here, Moved, ArrivedElsewhere, Disconnected, Spoilt),
)


@dataclass(frozen=True)
class LeaderAddress:
    """Where the followers find the leader: plain values, which it broadcasts."""

    addresses: tuple[str, ...]  # of the leader; the first is for those of the same machine
    host: str  # that it is on
    server: bytes  # public half of the leader's key
    public: bytes  # the pair of keys that the followers have
    secret: bytes


class Followers:
    """The leader's end.

    Args:
        ranks: of the worker, the leader included.
        reach: an address of this machine that all ranks can reach; finds which local address they use.
    """

    def __init__(self, ranks: int, reach: str | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        server, secret = zmq.curve_keypair()
        public, theirs = zmq.curve_keypair()
        self.socket = _without_limit(self._context.socket(zmq.ROUTER))
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED)
        addresses = []
        for host in ("127.0.0.1", _own_address(reach)):
            if host is not None:
                port = self.socket.bind_to_random_port(f"tcp://{host}")
                addresses.append(f"tcp://{host}:{port}")
        self.address = LeaderAddress(tuple(addresses), machine(), server, public, theirs)
        self._ranks = ranks
        self._connected: set[int] = set()
        self._unsent: list[tuple[int, Record]] = []  # for those that are not connected yet
        self._generation = 0
        self.last = b""  # sent to the followers on closing
        self.lost: str | None = None  # a sentence, once a process is gone
        self.bytes_up = self.bytes_down = 0  # of the followers, since the last read

    def open(
        self, address: str, bindings: tuple[Lane, ...], reply_dtype: str, shortcut: str
    ) -> None:
        for binding in bindings:
            opened = OpenBulk(self._generation, address, shortcut, binding, reply_dtype)
            self._send(binding.index, opened)

    def close_all(self) -> None:
        self._generation += 1
        self._send_all(effects.Close())

    def send(self, effect: effects.SendChunk) -> None:
        self._send(effect.lane, effect)

    def seed(self, push: Push) -> None:
        self._send_all(Seed(push))

    def over(self, push_id: int) -> None:
        self._send_all(effects.PushOver(push_id))

    def _send_all(self, record: Record) -> None:
        for rank in range(1, self._ranks):
            self._send(rank, record)

    def _send(self, rank: int, record: Record) -> None:
        if rank in self._connected:
            self.socket.send_multipart([_route(rank), _CODEC.packed(record)], NOW)
        else:
            self._unsent.append((rank, record))

    def receive(self) -> Iterator[Event]:
        """Return the followers' events for the leader's session."""
        for _ in range(BATCH):
            try:
                route, data = self.socket.recv_multipart(NOW)
            except zmq.Again:
                break
            generation, record = _CODEC.unpacked(data)
            match record:
                case Here():
                    rank = int.from_bytes(route[1:], "big")
                    self._connected.add(rank)
                    waiting, self._unsent = self._unsent, []
                    for each in waiting:
                        self._send(*each)
                case Moved(up, down):
                    self.bytes_up += up
                    self.bytes_down += down
                case _ if generation == self._generation:  # else of a connection before
                    yield record
        for event in monitored(self.monitor):
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self.lost = "A process of this worker is gone"

    def close(self, linger_ms: int = 0) -> None:
        """Tell the followers, and close; the last records have this long to leave."""
        self._send_all(LeaderLeft(self.last))
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)
        self._context.term()


class LeaderConnection:
    """The end of a follower."""

    def __init__(self, leader: LeaderAddress, rank: int) -> None:
        self.rank = rank
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = _without_limit(self._context.socket(zmq.DEALER))
        self.socket.setsockopt(zmq.ROUTING_ID, _route(rank))
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, leader.server)
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, leader.public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, leader.secret)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        is_near = leader.host == machine()
        self.socket.connect(leader.addresses[0 if is_near else -1])
        self._generation = 0
        self.send(Here())

    def send(self, record: Event) -> None:
        self.socket.send(_CODEC.packed((self._generation, record)), NOW)

    def receive(self) -> Iterator[Record]:
        # The monitor first: records from before the disconnect are still read.
        is_gone = any(each["event"] == zmq.EVENT_DISCONNECTED for each in monitored(self.monitor))
        while self.socket.poll(0):
            record = _CODEC.unpacked(self.socket.recv(NOW))
            if isinstance(record, OpenBulk):
                self._generation = record.generation
            yield record
        if is_gone:
            yield LeaderLeft()

    def close(self, linger_ms: int = 0) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
        self._context.term()


def _route(rank: int) -> bytes:
    return b"L" + rank.to_bytes(4, "big")


def _without_limit(made: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Remove the limits of queues: records are bounded by the credit of chunks, and none may be
    dropped.
    """
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    return prepared(made, LONGEST)


def machine() -> str:
    """A name of this machine that is unique in a launch."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as found:
            return found.read().strip()
    except OSError:
        return socket.gethostname()


def _own_address(reach: str | None) -> str | None:
    """This machine's own address towards that one; None where it is this machine itself."""
    if not reach:
        return None
    try:
        family, kind, _, _, target = socket.getaddrinfo(reach, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            found = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if found.startswith("127.") or ":" in found else found
