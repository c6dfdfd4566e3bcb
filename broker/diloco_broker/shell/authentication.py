"""Authentication of connections by public key, in the thread of the loop.

During each handshake ZeroMQ asks, on a socket inside the process (ZAP, RFC 27), whether to accept the
key that the peer has proved to own (CURVE, RFC 26). Until we answer, no message of that connection
reaches the ROUTER or the PUB socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from diloco_broker.storage.key_folder import AllowedKeys, KeyFolder
from diloco_protocol.errors import UsageError
from diloco_protocol.roles import Peer, Role

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
# The ZAP domain of our sockets; ZeroMQ sends no request for a socket without one.
DOMAIN = b"diloco"
# Requests answered in one turn of the loop, so that a flood of connections does not block it.
ANSWERS_A_TURN = 32
LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Changes:
    """Changes of the key folder since the last poll.

    Attributes:
        revoked: peers whose key was removed or replaced.
        complaints: a sentence for each newly found file that is not a valid key.
    """

    revoked: frozenset[Peer]
    complaints: tuple[str, ...]


class Doorkeeper:
    """Answers ZAP requests from a key folder. Create it before the sockets that it guards are bound.

    Attributes:
        socket: poll it, and call `answer` when it is readable.
    """

    def __init__(self, context: zmq.Context[Any], keys: KeyFolder) -> None:
        self._keys = keys
        # Read now: workers that are waiting connect before the first turn, and treat a rejection as
        # final. The first poll reports files that are not keys.
        try:
            self._allowed = AllowedKeys(keys.allowed().by_key)
        except OSError as error:
            raise UsageError(f"The keys in {keys.path} cannot be read: {error}.") from None
        self._peers = frozenset(self._allowed.by_key.values())
        self._ids = _ids(self._allowed)
        self._seen: object = None
        self._trouble: str | None = None  # why the folder could not be read at the last poll
        self._looks_at = 0.0
        self.socket: zmq.Socket[Any] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Require an allowed key on this socket. Call it before the socket is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)

    def answer(self) -> None:
        """Answer pending ZAP requests."""
        for _ in range(ANSWERS_A_TURN):
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request = (*question, b"", b"")[:2]
            # version, request, domain, address, identity, mechanism, key
            key = z85.encode(question[6]) if len(question) == 7 and len(question[6]) == 32 else b""
            peer = self._allowed.by_key.get(key)
            if version != ZAP_VERSION or peer is None:
                self.socket.send_multipart([version, request, b"400", b"no such key", b"", b""])
            else:
                self.socket.send_multipart([version, request, b"200", b"", user_id(peer, key), b""])

    def knows_key_of(self, frame: zmq.Frame) -> bool:
        """Whether the key of this message's connection is allowed, as of the last poll."""
        return str(frame.get("User-Id")).encode() in self._ids

    def lets_in(self, peer: Peer) -> bool:
        """Whether this peer has an allowed key, as of the last poll."""
        return peer in self._peers

    def look(self, now: float) -> Changes | None:
        """Check, once a second, for added and removed keys. Returns None if nothing changed."""
        if now < self._looks_at:
            return None
        self._looks_at = now + LOOK_EVERY_S
        try:
            seen = self._keys.fingerprint()
            allowed = self._allowed if seen == self._seen else self._keys.allowed()
        except OSError as error:  # temporary: too many open files, or a disk error
            text = f"Cannot read the keys: {error}. The previous keys stay valid; retrying."
            is_new, self._trouble = text != self._trouble, text
            return Changes(frozenset(), (text,)) if is_new else None
        self._trouble = None
        if seen == self._seen:
            return None
        self._seen = seen
        before, self._allowed = self._allowed, allowed
        now_in = self._allowed.by_key
        self._peers, self._ids = frozenset(now_in.values()), _ids(allowed)
        revoked = {peer for key, peer in before.by_key.items() if now_in.get(key) != peer}
        new = tuple(each for each in self._allowed.complaints if each not in before.complaints)
        return Changes(frozenset(revoked), new)


def user_id(peer: Peer, key: bytes) -> bytes:
    """The User-Id that ZeroMQ attaches to each message; it changes when the peer's key is replaced."""
    return f"{peer.role.value}/{peer.name}/".encode() + key[:16]


def _ids(allowed: AllowedKeys) -> frozenset[bytes]:
    return frozenset(user_id(peer, key) for key, peer in allowed.by_key.items())


def peer_of(frame: zmq.Frame) -> Peer:
    """The owner of the key under which this message was sent."""
    role, name, _ = str(frame.get("User-Id")).split("/", 2)
    return Peer(Role(role), name)
