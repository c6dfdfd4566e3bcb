"""Attacks on a broker with keys: without a key, with a wrong one, with another's; old sessions."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

import zmq

from diloco_lab.chaos.attacks.peers import READY, Peer, RawPeer, Scene, frame
from diloco_protocol import messages
from diloco_protocol.clients import Keys
from diloco_protocol.errors import DilocoError
from diloco_protocol.feed import TOPIC
from diloco_protocol.roles import Peer as Owner
from diloco_protocol.roles import Role

# Keys of the drill besides those of the workers that train.
OPERATOR, MONITOR = Owner(Role.OPERATOR, "drill"), Owner(Role.MONITOR, "screen")
WORKERS = tuple(Owner(Role.WORKER, name) for name in ("thief", "victim", "pulse"))
THIEF, VICTIM, PULSE = WORKERS
# Actions that a monitor may not request; none is undone by itself.
STEERING = ("pause", "save", "manifest", "shutdown", "kick", "close", "set")
SAVE_EVERY = 1_000_000  # of the broker: the drill does not test disks
SHORT_S = 0.3  # for an answer that should not come
FEED_WITHIN_S = 2.0  # the feed publishes every second
FLOOD = frame(b"", more=True) * (1 << 16)
# Mechanisms of ZMTP, and the bytes after a greeting with them.
BLIND = (
    (b"NULL", READY),
    (b"CURVE", READY),
    (b"CURVE", b"\x04\xc8\x05HELLO" + bytes(194)),
    (b"PLAIN", b"\x04\x0e\x05HELLO\x03abc\x03def"),
)


def no_key(scene: Scene) -> None:
    """All floods for a broker without keys; half a handshake; and plain requests."""

    def flood(mechanism: bytes, rest: bytes) -> None:
        with contextlib.closing(RawPeer(scene.address, scene.tally, mechanism=mechanism)) as peer:
            peer.write(rest)
            while scene.goes_on and not peer.is_ended(0.01):
                peer.write(FLOOD)
            scene.tally.ended += 1

    def attempt() -> None:
        for mechanism, rest in BLIND:
            try:
                flood(mechanism, rest)
            except OSError:
                scene.tally.ended += 1
        with contextlib.suppress(OSError):  # it greets and then is silent
            held.append(RawPeer(scene.address, scene.tally, mechanism=b"CURVE"))
        _must_be_silent(scene, None, "an unauthenticated peer without a key", "victim")

    held: list[RawPeer] = []
    try:
        with _feed_is_silent(scene, None):
            scene.repeat(attempt)
    finally:
        for each in held:
            each.close()


def wrong_key(scene: Scene) -> None:
    """A made-up key pair under the names of others, to the ROUTER and to the feed."""
    assert scene.keys is not None
    broker = scene.keys.broker

    def attempt() -> None:
        for owner in (VICTIM, OPERATOR):
            keys = Keys(owner, *zmq.curve_keypair(), broker)
            _must_be_silent(scene, keys, "a made-up key", owner.name)

    with _feed_is_silent(scene, Keys(MONITOR, *zmq.curve_keypair(), broker)):
        scene.repeat(attempt)


@contextlib.contextmanager
def _feed_is_silent(scene: Scene, keys: Keys | None) -> Iterator[None]:
    """Check that the feed is silent during the context, for long enough."""
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
            what = "without a key" if keys is None else "with a made-up key"
            scene.tally.got_through(f"the feed was read {what}")


def _must_be_silent(scene: Scene, keys: Keys | None, who: str, name: str) -> None:
    """Requests and a join on a connection with these keys must have no answer."""
    with scene.peer_with(keys) as peer:
        for action in ("status", "pause"):
            peer.say(messages.Control(action, 1))
        peer.say(messages.Join(name, digest=bytes(32), size=100))
        answer = peer.hear(within_s=SHORT_S)
        if answer is not None:
            scene.tally.got_through(f"{who} was answered: {answer['kind']}")
        else:
            scene.tally.ended += peer.is_ended(0)


def _must_be_refused(scene: Scene, peer: Peer, message: messages.Message, where: str = "") -> None:
    peer.say(message)
    answer, what = peer.hear(), f"{message.kind}{where}"
    if answer is None and not peer.is_ended(0):  # credit that is taken has no answer
        scene.tally.got_through(f"{what} was not refused")
    elif answer is None or answer["kind"] in ("error", "rejoin"):
        scene.tally.refused += 1
    else:
        scene.tally.got_through(f"{what}: {json.dumps(answer, default=repr)[:200]}")


def anothers_name(scene: Scene) -> None:
    """A worker's key is used to train under other names, and in the session of another."""
    thief = scene.key_of(THIEF)

    def attempt() -> None:
        with scene.peer_with(thief) as peer:
            for name in ("victim", "w0", "w1"):
                join = messages.Join(name, digest=scene.digest, size=len(scene.description))
                _must_be_refused(scene, peer, join, f" as {name}")

    with _joined(scene, VICTIM) as (session, owner):
        with scene.peer_with(thief) as peer:
            for message in (
                messages.Heartbeat(session, 1),
                messages.Credit(8, session),
                messages.Push(session, 1, 0, 2, "bf16"),
                messages.Leave(session),
            ):
                _must_be_refused(scene, peer, message, " in the session of another")
        owner.say(messages.Heartbeat(session, 1))
        alive = owner.hear("notice", "rejoin", "error")
        if alive is None or alive["kind"] != "notice":
            scene.tally.got_through(f"the session of another was ended: {alive}")
    scene.repeat(attempt)


def replay(scene: Scene) -> None:
    """Messages of an ended session, sent again under its key."""
    with _joined(scene, VICTIM) as (session, _):
        pass  # it has left: its token is an old one

    def attempt() -> None:
        with scene.peer_with(scene.key_of(VICTIM)) as peer:
            for message in (
                messages.Heartbeat(session, 1),
                messages.Push(session, 1, 0, 2, "bf16"),
            ):
                _must_be_refused(scene, peer, message, " of a session that is over")

    scene.repeat(attempt)


def steering_monitor(scene: Scene) -> None:
    """A monitor's key is used to steer, to train, and to read the model."""
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
            join = messages.Join(MONITOR.name, digest=scene.digest, size=1)
            _must_be_refused(scene, peer, join)
            _must_be_refused(scene, peer, messages.Pull(0, credit=2))

    scene.repeat(attempt)


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
