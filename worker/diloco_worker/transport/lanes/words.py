"""What the I/O threads of one worker's processes say to each other.

Each word is a frame that names it, then frames of its own; messages of the wire protocol are headers as
they are sent to the broker. The connection is CURVE's (RFC 26), with keys that are drawn at each start
and are told to nobody but the processes of this worker.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import zmq

from diloco_protocol.frames import KEEPALIVE_IDLE_S
from diloco_worker.transport.connections import RECONNECT_MAX_MS, RECONNECT_MS

# From the leader: open a connection to the broker (generation, address, a Unix socket that may be near,
# the first word on it, the dtype of replies, which another life of the broker may have changed); close
# it; send this chunk; lay out a donation (the offer); this push is over; the end (with the worker's
# counts).
OPEN, CLOSE, SEND = b"open", b"close", b"send"
DONATE, OVER, END = b"donate", b"over", b"end"
# To the leader: it is there; a chunk has come (generation, its header, its bytes); its connection broke
# (generation, why); bytes that were sent; what it has of a fragment is another copy than the broker's.
HERE, CHUNK, BROKEN, SENT, SPOILT = b"here", b"chunk", b"broken", b"sent", b"spoilt"
# No word is longer; the longest has a bitmap of the chunks of each fragment.
LONGEST = 1 << 20


@dataclass(frozen=True)
class Meeting:
    """Where the processes of a worker meet. Plain values, given to each over the group."""

    addresses: tuple[str, ...]  # of the leader; the first is for those of the same machine
    host: str  # that it is on
    server: bytes  # public half of the leader's key
    public: bytes  # the pair that the others show
    secret: bytes

    def plain(self) -> list[Any]:
        return [list(self.addresses), self.host, self.server, self.public, self.secret]

    @classmethod
    def from_plain(cls, plain: Any) -> Meeting:
        addresses, host, server, public, secret = plain
        return cls(tuple(addresses), host, server, public, secret)

    def address_from(self, host: str) -> str:
        """Where a process on this machine finds the leader."""
        return self.addresses[0] if host == self.host else self.addresses[-1]


def machine() -> str:
    """A name of this machine that no other of a launch has."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as found:
            return found.read().strip()
    except OSError:
        return socket.gethostname()


def prepared(made: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket between processes: its words are bounded by credit, so none may be dropped."""
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    made.setsockopt(zmq.MAXMSGSIZE, LONGEST)
    made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    made.setsockopt(zmq.TCP_KEEPALIVE, 1)
    made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    return made
