"""The leader's end of its connections to the other processes of its worker.

Made in the training thread, which tells the others where it is; then it belongs to the I/O thread.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from diloco_protocol import ProtocolError
from diloco_protocol.messages import Chunk, Lane, Message, Push, decode, encode
from diloco_worker.session import events
from diloco_worker.transport.connections import NOW
from diloco_worker.transport.forks import inode_of, keep_from_children
from diloco_worker.transport.lanes import words
from diloco_worker.transport.lanes.words import Meeting

# Words taken in before the sockets to the broker get their turn.
BATCH = 256


class Hub:
    """See the head of this module.

    `processes` of the worker, the leader included; `reach` is an address of a machine that all of them
    can reach, by which the leader finds which of its own addresses they can.
    """

    def __init__(self, processes: int, reach: str | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        server, secret = zmq.curve_keypair()
        public, theirs = zmq.curve_keypair()
        self.socket = words.prepared(self._context.socket(zmq.ROUTER))
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED)
        ports = [self.socket.bind_to_random_port("tcp://127.0.0.1")]
        addresses = [f"tcp://127.0.0.1:{ports[0]}"]
        outside = _own_address(reach)
        if outside is not None:
            addresses.append(
                f"tcp://{outside}:{self.socket.bind_to_random_port(f'tcp://{outside}')}"
            )
        self.meeting = Meeting(tuple(addresses), words.machine(), server, public, theirs)
        self._processes = processes
        self._here: set[int] = set()
        self._unsaid: list[tuple[int, list[bytes]]] = []
        self._generation = 0
        self.last_word = b""  # what the others are to know at the end
        self.lost: str | None = None  # one of them has gone that was there
        self.bytes_up = self.bytes_down = 0  # of chunks, by the others
        self._descriptors: dict[int, int | None] = {}
        keep_from_children(self)

    # To the others.

    def open(
        self, address: str, bindings: tuple[Lane, ...], reply_dtype: str, shortcut: str
    ) -> None:
        """Each opens a connection to the broker, with its first word; what comes is in this dtype.

        `shortcut` is a Unix socket for those who are on the broker's machine; empty where none is.
        """
        generation = self._generation.to_bytes(8, "big")
        for binding in bindings:
            ways = [address.encode(), shortcut.encode()]
            first = [generation, *ways, encode(binding), reply_dtype.encode()]
            self._tell(binding.index, words.OPEN, *first)

    def close_all(self) -> None:
        """What they have is void."""
        self._generation += 1
        self._tell_all(words.CLOSE)

    def send(self, lane: int, chunk: Chunk) -> None:
        self._tell(lane, words.SEND, encode(chunk))

    def donate(self, push: Push) -> None:
        self._tell_all(words.DONATE, encode(push))

    def over(self, push_id: int) -> None:
        self._tell_all(words.OVER, push_id.to_bytes(8, "big"))

    def end(self) -> None:
        self._tell_all(words.END, self.last_word)

    def _tell_all(self, *frames: bytes) -> None:
        for lane in range(1, self._processes):
            self._tell(lane, *frames)

    def _tell(self, lane: int, *frames: bytes) -> None:
        if lane in self._here:
            self.socket.send_multipart([_route(lane), *frames], NOW)
        else:
            self._unsaid.append((lane, list(frames)))

    # From the others.

    def receive(self) -> Iterator[events.Event]:
        """What they have said, as events of the session."""
        for _ in range(BATCH):
            try:
                route, what, *frames = self.socket.recv_multipart(NOW)
            except zmq.Again:
                return
            except ValueError:
                continue  # no word of ours
            yield from self._heard(route, what, frames)

    def _heard(self, route: bytes, what: bytes, frames: list[bytes]) -> Iterator[events.Event]:
        lane = int.from_bytes(route[1:], "big")
        if what == words.HERE and 0 < lane < self._processes:
            self._here.add(lane)
            mine = [said for to, said in self._unsaid if to == lane]
            self._unsaid = [each for each in self._unsaid if each[0] != lane]
            for said in mine:
                self._tell(lane, *said)
        elif what == words.SENT:
            self.bytes_up += int.from_bytes(frames[0], "big")
        elif int.from_bytes(frames[0], "big") == self._generation:  # else of a connection before
            if what == words.BROKEN:
                yield events.Disconnected(frames[1].decode())
            elif what == words.SPOILT:
                yield events.Spoilt(int.from_bytes(frames[1], "big"))
            elif what == words.CHUNK:
                self.bytes_down += int.from_bytes(frames[2], "big")
                message = _read(frames[1])
                if isinstance(message, Chunk):
                    yield events.ArrivedElsewhere(message)

    def look(self) -> None:
        """See whether one of them has gone."""
        while self.monitor.poll(0):
            event: Any = parse_monitor_message(self.monitor.recv_multipart(NOW))
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._descriptors[event["value"]] = inode_of(event["value"])
            else:
                self._descriptors.pop(event["value"], None)
                self.lost = "A process of this worker is gone"

    def close(self, linger_ms: int = 0) -> None:
        """Close all; what was said last gets so long to get out."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)
        self._context.term()

    def leave_to_the_parent(self) -> None:
        for descriptor, inode in self._descriptors.items():
            if inode is not None and inode_of(descriptor) == inode:
                os.close(descriptor)


def _route(lane: int) -> bytes:
    return b"L" + lane.to_bytes(4, "big")


def _read(header: bytes) -> Message | None:
    try:
        return decode(header)
    except ProtocolError:
        return None


def _own_address(reach: str | None) -> str | None:
    """This machine's own address on the way to that one; None where it is this machine itself."""
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
