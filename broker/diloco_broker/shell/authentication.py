"""Who may connect: answers to ZeroMQ's questions about keys, in the one thread of the loop.

Before a connection is made ZeroMQ asks, on a socket inside the process (ZAP, RFC 27), whether it wants
the key that the other side has proved to own (CURVE, RFC 26). Until it is answered nothing of that
connection reaches the ROUTER or the PUB socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from diloco_broker.storage.key_folder import Guests, KeyFolder
from diloco_protocol.errors import UsageError
from diloco_protocol.roles import Peer, Role

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
# Which of our sockets is meant; ZeroMQ asks about none that has no domain.
DOMAIN = b"diloco"
# Questions answered in one turn of the loop: a flood of connections must not hold it.
ANSWERS_A_TURN = 32
LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Changes:
    """What has become of the keys since the last look.

    Attributes:
        revoked: whom the broker lets in no longer, or under another key.
        complaints: a sentence for each new file that is not a key.
    """

    revoked: frozenset[Peer]
    complaints: tuple[str, ...]


class Doorkeeper:
    """See the head of this module. To be made before the sockets that it guards are bound.

    Attributes:
        socket: to be polled; `answer` when it has something.
    """

    def __init__(self, context: zmq.Context[Any], keys: KeyFolder) -> None:
        self._keys = keys
        # Who waited for the broker asks before its first turn, and takes a refusal for final. What is no
        # key is told by the first look.
        try:
            self._guests = Guests(keys.guests().by_key)
        except OSError as error:
            raise UsageError(f"The keys in {keys.path} cannot be read: {error}.") from None
        self._peers = frozenset(self._guests.by_key.values())
        self._ids = _ids(self._guests)
        self._seen: object = None
        self._trouble: str | None = None  # why the folder could not be read at the last look
        self._looks_at = 0.0
        self.socket: zmq.Socket[Any] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Let this socket, before it is bound, speak to those only who are let in."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)

    def answer(self) -> None:
        """Answer the questions that are there."""
        for _ in range(ANSWERS_A_TURN):
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request = (*question, b"", b"")[:2]
            # version, request, domain, address, identity, mechanism, key
            key = z85.encode(question[6]) if len(question) == 7 and len(question[6]) == 32 else b""
            peer = self._guests.by_key.get(key)
            if version != ZAP_VERSION or peer is None:
                self.socket.send_multipart([version, request, b"400", b"no such key", b"", b""])
            else:
                self.socket.send_multipart([version, request, b"200", b"", user_id(peer, key), b""])

    def knows_key_of(self, frame: zmq.Frame) -> bool:
        """Is the key that this message came under let in, as of the last look?"""
        return str(frame.get("User-Id")).encode() in self._ids

    def lets_in(self, peer: Peer) -> bool:
        """Has this one a key, as of the last look?"""
        return peer in self._peers

    def look(self, now: float) -> Changes | None:
        """See, once a second, whether keys were added or removed. None where all is as it was."""
        if now < self._looks_at:
            return None
        self._looks_at = now + LOOK_EVERY_S
        try:
            seen = self._keys.fingerprint()
            guests = self._guests if seen == self._seen else self._keys.guests()
        except OSError as error:  # it passes: too many files are open, or a disk has an error
            text = f"The keys cannot be read now, so peers that were let in stay: {error}."
            is_new, self._trouble = text != self._trouble, text
            return Changes(frozenset(), (text,)) if is_new else None
        self._trouble = None
        if seen == self._seen:
            return None
        self._seen = seen
        before, self._guests = self._guests, guests
        now_in = self._guests.by_key
        self._peers, self._ids = frozenset(now_in.values()), _ids(guests)
        revoked = {peer for key, peer in before.by_key.items() if now_in.get(key) != peer}
        new = tuple(each for each in self._guests.complaints if each not in before.complaints)
        return Changes(frozenset(revoked), new)


def user_id(peer: Peer, key: bytes) -> bytes:
    """What ZeroMQ then says of each message of this peer; a replaced key has another beginning."""
    return f"{peer.role.value}/{peer.name}/".encode() + key[:16]


def _ids(guests: Guests) -> frozenset[bytes]:
    return frozenset(user_id(peer, key) for key, peer in guests.by_key.items())


def peer_of(frame: zmq.Frame) -> Peer:
    """Whose key this message came under."""
    role, name, _ = str(frame.get("User-Id")).split("/", 2)
    return Peer(Role(role), name)
