"""Attacks on a broker that asks for keys: none, a wrong one, another's, a revoked one, and replays."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from diloco_lab.chaos.attacks.peers import READY, Peer, RawPeer, Scene, frame
from diloco_protocol import messages
from diloco_protocol.clients import Keys, Operator
from diloco_protocol.errors import DilocoError
from diloco_protocol.feed import TOPIC
from diloco_protocol.roles import Peer as Owner
from diloco_protocol.roles import Role
from diloco_tools.tcp_proxy import Gate, TcpProxy

# Keys of the drill besides those of the workers that train.
OPERATOR, MONITOR = Owner(Role.OPERATOR, "drill"), Owner(Role.MONITOR, "screen")
WORKERS = tuple(Owner(Role.WORKER, name) for name in ("thief", "victim", "revoked", "pulse"))
THIEF, VICTIM, REVOKED, PULSE = WORKERS
# What a monitor may not ask for; none of it would be undone by itself.
STEERING = ("pause", "save", "manifest", "shutdown", "kick", "close", "set")
ASKED = ("status", "pause")
REVOKED_WITHIN_S = 10.0
SAVE_EVERY = 1_000_000  # of the broker: the drill is no test of disks
SHORT_S = 0.3  # for an answer that should not come
FEED_WITHIN_S = 2.0  # the feed speaks every second


def no_key(scene: Scene) -> None:
    """All that costs a broker without keys, blindly; half a handshake; and plain questions."""
    flood = frame(b"", more=True) * (1 << 16)

    def blind(mechanism: bytes, rest: bytes) -> None:
        with contextlib.closing(RawPeer(scene.address, scene.tally, mechanism=mechanism)) as peer:
            peer.write(rest)
            while scene.goes_on:
                if peer.is_ended(0.01):
                    scene.tally.ended += 1
                    return
                peer.write(flood)

    def ask() -> None:
        with scene.peer_with(None) as peer:
            for action in ASKED:
                peer.say(messages.Control(action, 1))
            peer.say(messages.Join("victim", digest=bytes(32), size=100))
            _must_be_silent(scene, peer, "a stranger without a key")

    def attempt() -> None:
        for mechanism, rest in (
            (b"NULL", READY),
            (b"CURVE", READY),
            (b"CURVE", b"\x04\xc8\x05HELLO" + bytes(194)),
            (b"PLAIN", b"\x04\x0e\x05HELLO\x03abc\x03def"),
        ):
            try:
                blind(mechanism, rest)
            except OSError:
                scene.tally.ended += 1
        with contextlib.suppress(OSError):  # it greets and says no more
            held.append(RawPeer(scene.address, scene.tally, mechanism=b"CURVE"))
        ask()

    held: list[RawPeer] = []
    try:
        with _feed_is_silent(scene, None):
            scene.repeat(attempt)
    finally:
        for each in held:
            each.close()


def wrong_key(scene: Scene) -> None:
    """A key pair of our own making, under the names of others, to the ROUTER and to the feed."""
    assert scene.keys is not None
    broker = scene.keys.broker

    def attempt() -> None:
        public, secret = zmq.curve_keypair()
        for owner in (VICTIM, OPERATOR):
            with scene.peer_with(Keys(owner, public, secret, broker)) as peer:
                peer.say(messages.Control("status", 1))
                peer.say(messages.Join(owner.name, digest=bytes(32), size=100))
                _must_be_silent(scene, peer, "a key that nobody made")

    with _feed_is_silent(scene, Keys(MONITOR, *zmq.curve_keypair(), broker)):
        scene.repeat(attempt)


@contextlib.contextmanager
def _feed_is_silent(scene: Scene, keys: Keys | None) -> Iterator[None]:
    """Listen to it meanwhile, and long enough."""
    reader = scene.context.socket(zmq.SUB)
    reader.linger = 0
    reader.subscribe(TOPIC)
    if keys is not None:
        keys.lock(reader)
    with contextlib.closing(reader):
        reader.connect(scene.feed)
        scene.tally.connections += 1
        until = time.monotonic() + FEED_WITHIN_S
        yield
        if reader.poll(max(0, int(1000 * (until - time.monotonic())))):
            what = "without a key" if keys is None else "with a key that nobody made"
            scene.tally.got_through(f"the feed was read {what}")


def _must_be_silent(scene: Scene, peer: Peer, who: str) -> None:
    answer = peer.hear(within_s=SHORT_S)
    if answer is not None:
        scene.tally.got_through(f"{who} was answered: {answer['kind']}")
    else:
        scene.tally.ended += peer.is_ended(0)


def anothers_name(scene: Scene) -> None:
    """A worker's key that wants to train under other names, and to use the session of another."""
    thief = scene.key_of(THIEF)

    def attempt() -> None:
        with scene.peer_with(thief) as peer:
            for name in ("victim", "w0", "w1"):
                join = messages.Join(name, digest=scene.digest, size=len(scene.description))
                peer.say(join)
                _must_be_refused(scene, peer, f"join as {name}")

    with _joined(scene, VICTIM) as (session, owner):
        with scene.peer_with(thief) as peer:
            for message in (
                messages.Heartbeat(session, 1),
                messages.Credit(8, session),
                messages.Push(session, 1, 0, 2, "bf16"),
                messages.Leave(session),
            ):
                peer.say(message)
                _must_be_refused(scene, peer, f"{message.kind} in the session of another")
        owner.say(messages.Heartbeat(session, 1))
        alive = owner.hear("notice", "rejoin", "error")
        if alive is None or alive["kind"] != "notice":
            scene.tally.got_through(f"the session of another was ended: {alive}")
    scene.repeat(attempt)


def replay(scene: Scene) -> None:
    """What was said in another session: its messages under a key, and its bytes on a new connection."""
    with _joined(scene, VICTIM) as (session, _):
        pass  # it has left: its token is an old one

    def messages_again() -> None:
        with scene.peer_with(scene.key_of(VICTIM)) as peer:
            for message in (
                messages.Heartbeat(session, 1),
                messages.Push(session, 1, 0, 2, "bf16"),
            ):
                peer.say(message)
                _must_be_refused(scene, peer, f"{message.kind} of a session that is over")

    messages_again()
    keys = scene.key_of(OPERATOR)
    recorded = _recorded(scene, keys)

    def bytes_again() -> None:
        host, port = scene.address.removeprefix("tcp://").rsplit(":", 1)
        with socket.create_connection((host, int(port)), SHORT_S) as again:
            scene.tally.connections += 1
            again.sendall(recorded)
            scene.tally.bytes += len(recorded)
            with contextlib.suppress(OSError):
                while again.recv(4096):
                    pass
            scene.tally.ended += 1

    scene.repeat(bytes_again)
    with scene.peer_with(keys) as operator:
        found = operator.asks("set", save_every=SAVE_EVERY)
        if found is None or "Nothing changes" not in found["text"]:
            scene.tally.got_through(f"bytes of another connection were obeyed: {found}")


def _recorded(scene: Scene, keys: Keys) -> bytes:
    """The bytes with which an operator has set something, which was taken back since."""
    with _Recorder(scene.address) as recorder, Operator(recorder.address, keys=keys) as operator:
        done = operator.ask("set", save_every=SAVE_EVERY - 1)
        assert done.ok, done.text
    with Operator(scene.address, keys=keys) as operator:
        operator.ask("set", save_every=SAVE_EVERY)
    return bytes(recorder.taken)


class _Recorder(TcpProxy):
    """Keeps what goes to the broker."""

    def __init__(self, target: str) -> None:
        self.taken = bytearray()
        super().__init__(target)

    def gate(self, connection: int, up: bool) -> Gate:
        def keep(data: bytes) -> tuple[bytes, bool]:
            self.taken.extend(data if up else b"")
            return data, False

        return keep


def revoked(scene: Scene) -> None:
    """A key that is taken back while it is in use: the connection ends, and no other is let in."""
    keys = scene.key_of(REVOKED)
    public = scene.folder / "allowed" / "worker" / f"{REVOKED.name}.pub"
    kept = public.read_text()
    try:
        _revoke(scene, keys, public)
    finally:
        public.write_text(kept)  # for whoever tries it again


def _revoke(scene: Scene, keys: Keys, public: Path) -> None:
    until = time.monotonic() + REVOKED_WITHIN_S
    while not _is_let_in(scene, keys):  # it may have been let in again just now
        if time.monotonic() > until:
            raise RuntimeError("the key was not good before it was revoked")
    with scene.peer_with(keys) as peer:
        peer.asks("status")
        public.unlink()
        if peer.is_ended(REVOKED_WITHIN_S):
            scene.tally.ended += 1
        else:
            scene.tally.got_through(f"its connection was open {REVOKED_WITHIN_S:g} s later")

    def attempt() -> None:
        with scene.peer_with(keys) as again:
            again.say(messages.Control("status", 1))
            again.say(messages.Join(REVOKED.name, digest=bytes(32), size=100))
            _must_be_silent(scene, again, "a revoked key")

    scene.repeat(attempt)


def _is_let_in(scene: Scene, keys: Keys) -> bool:
    with scene.peer_with(keys) as peer:
        return peer.asks("status") is not None


def steering_monitor(scene: Scene) -> None:
    """A monitor's key that steers, trains, and reads the model."""
    keys = scene.key_of(MONITOR)

    def attempt() -> None:
        with scene.peer_with(keys) as peer:
            for action in STEERING:
                arguments = {"outer_lr": 0.5} if action == "set" else {"worker": "w0"}
                answer = peer.asks(action, **arguments)
                if answer is not None and answer["kind"] == "result" and answer["ok"]:
                    scene.tally.got_through(f"a monitor did {action}")
                else:
                    scene.tally.refused += 1
            peer.say(messages.Join(MONITOR.name, digest=scene.digest, size=1))
            _must_be_refused(scene, peer, "join")
            peer.say(messages.Pull(0, credit=2))
            _must_be_refused(scene, peer, "pull")

    scene.repeat(attempt)


def _must_be_refused(scene: Scene, peer: Peer, what: str) -> None:
    answer = peer.hear()
    if answer is None and not peer.is_ended(0):  # credit that is taken has no answer
        scene.tally.got_through(f"{what} was not refused")
    elif answer is None or answer["kind"] in ("error", "rejoin"):
        scene.tally.refused += 1
    else:
        scene.tally.got_through(f"{what}: {json.dumps(answer, default=repr)[:200]}")


@contextlib.contextmanager
def _joined(scene: Scene, owner: Owner) -> Iterator[tuple[bytes, Peer]]:
    """The session of a worker that has joined, for a moment: rounds wait for it."""
    with scene.peer_with(scene.key_of(owner)) as peer:
        peer.say(messages.Join(owner.name, digest=scene.digest, size=len(scene.description)))
        welcome = peer.hear("welcome", "error")
        if welcome is None or welcome["kind"] == "error":
            raise DilocoError(f"{owner} could not join: {welcome}")
        try:
            yield welcome["session"], peer
        finally:
            peer.say(messages.Leave(welcome["session"]))
            peer.hear(within_s=SHORT_S)
