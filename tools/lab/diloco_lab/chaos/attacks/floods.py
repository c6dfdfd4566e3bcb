"""Attacks on resources: floods of frames, headers and requests, and unread answers."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable

import zmq

from diloco_lab.chaos.attacks.peers import Peer, Scene, frame
from diloco_protocol import messages
from diloco_protocol.description import MOST_BYTES, PIECE_BYTES
from diloco_protocol.manifest import Kind, Manifest, TensorEntry

MIB = 1 << 20
EMPTY_FRAMES = 3_000_000
EMPTIES_OF_A_KEY = 300_000  # ZeroMQ keeps them at the attacker until the message is whole
ENDLESS_BYTES = 1260 * MIB  # after which an endless message counts as accepted
ENDLESS_EMPTIES = 200 * MIB
BLOCK = frame(b"", more=True) * (1 << 15)
JOINS, HEADER_BYTES = 60, 7_000_000
OBSERVERS = 30
QUESTIONS = 700  # of about 70 bytes: 50 kB
ENDS_WITHIN_S = 2.0
READS_WITHIN_S = 10.0  # the broker's own bound for unread connections; see `connection_watch` there

# Shorter attacks do not see their unread connections end: they send requests in the first third.
READS_AFTER_S = 1.5 * READS_WITHIN_S + 1


def empty_frames(scene: Scene) -> None:
    """One message of three million empty frames, 6 MB, again and again."""
    scene.repeat(lambda: _flood(scene, b"", EMPTY_FRAMES, EMPTIES_OF_A_KEY, ends=True))


def endless_empties(scene: Scene) -> None:
    """A message of empty frames that never ends."""
    scene.repeat(lambda: _flood(scene, b"", ENDLESS_EMPTIES // 2, EMPTIES_OF_A_KEY, ends=False))


def endless_mebibytes(scene: Scene) -> None:
    """A message of frames of a mebibyte that never ends."""
    count = ENDLESS_BYTES // MIB
    scene.repeat(lambda: _flood(scene, bytes(MIB), count, count, ends=False))


def _flood(scene: Scene, body: bytes, count: int, count_of_a_key: int, *, ends: bool) -> None:
    if scene.keys is not None:
        _flood_with_a_key(scene, body, count_of_a_key, ends=ends)
        return
    with scene.raw() as peer:
        block = frame(body, more=True) if body else BLOCK
        each = 1 if body else len(BLOCK) // 2
        for _ in range(-(-count // each)):
            peer.write(block)
        if ends:
            peer.write(frame(b"", more=False))
            scene.tally.messages += 1
        else:
            scene.tally.got_through(f"{count * max(2, len(body)) >> 20} MiB of one message")


def _flood_with_a_key(scene: Scene, body: bytes, count: int, *, ends: bool) -> None:
    with scene.peer() as peer:
        part = zmq.Frame(body)
        try:
            for _ in range(count):
                peer.socket.send(part, zmq.SNDMORE, copy=False)
            peer.socket.send(b"")
        except zmq.ZMQError:
            scene.tally.ended += 1
            return
        scene.tally.messages += 1
        scene.tally.bytes += count * max(35, len(body))
        if peer.is_ended(ENDS_WITHIN_S):
            scene.tally.ended += 1
        elif not ends:
            scene.tally.got_through(f"{count * len(body) >> 20} MiB of one message")


def large_joins(scene: Scene) -> None:
    """Sixty joins, each with a header of 7 MB."""
    entries = tuple(
        TensorEntry(f"a.rather.long.name.of.a.layer.{n:08d}", (1,), "float32", Kind.TRAINABLE)
        for n in range(HEADER_BYTES // 115)
    )
    header = messages.encode(messages.Join(scene.worker_id, Manifest(entries)))

    def joins() -> None:
        for _ in range(JOINS):
            with scene.peer() as peer:
                peer.send(header)
                answer = peer.hear()
            if answer is None:
                scene.tally.ended += 1
            elif answer["kind"] == "error":
                scene.tally.refused += 1
            else:
                what = "a join with a header of 7 MB was answered"
                scene.tally.got_through(f"{what}: {answer['kind']}")

    scene.repeat(joins)


def observers(scene: Scene) -> None:
    """Thirty observers that ask for the model, take credit for all of it, and never read.

    ZeroMQ reads the first two chunks for them, at a trickle: until then they count as slow.
    """
    pull = messages.Pull(0, credit=1 << 20)
    _never_read(scene, OBSERVERS, lambda peer: peer.say(pull), must_end=False)


def manifests(scene: Scene) -> None:
    """50 kB of requests for the manifest on ten connections, which do not read the answers."""
    question = messages.Control("manifest", 1, {"who": "an attacker"})

    def ask(peer: Peer) -> int:
        return sum(peer.say(question) for _ in range(QUESTIONS // 10))

    _never_read(scene, 10, ask)


def _never_read(
    scene: Scene, count: int, ask: Callable[[Peer], object], *, must_end: bool = True
) -> None:
    """Ask on `count` connections, one after the other, and read nothing until the time is over.

    If the time is longer than a connection without a reader may last, all of them must be ended.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        peers = []
        for number in range(count):
            peer = stack.enter_context(scene.peer(reads=False))
            ask(peer)
            peers.append(peer)
            # Each at another version, in the first third of the time.
            time.sleep(max(0.0, began + scene.seconds / 3 * number / count - time.monotonic()))
        while scene.goes_on:
            time.sleep(0.05)
        ended = sum(peer.is_ended(0) for peer in peers)
        scene.tally.ended += ended
        if must_end and scene.seconds > READS_AFTER_S and ended < count:
            scene.tally.got_through(
                f"{count - ended} of {count} that read nothing for {READS_WITHIN_S:g} s were kept"
            )


def noise(scene: Scene) -> None:
    """Messages of one byte, as fast as they go, on connection after connection."""

    def send() -> None:
        with scene.peer() as peer:
            for _ in range(1000):
                if not peer.send(b"x") or (not scene.goes_on) or peer.is_ended(0):
                    break
            scene.tally.ended += peer.is_ended(0.2)

    scene.repeat(send)


def large_description(scene: Scene) -> None:
    """Claims of descriptions of 8 MB, a piece of each, and no more of it."""
    digest = hashlib.sha256(b"none").digest()

    def describe() -> None:
        with scene.peer() as peer:
            peer.say(messages.Join(scene.worker_id, digest=digest, size=MOST_BYTES))
            answer = peer.hear()
            if answer is not None and answer["kind"] == "error":
                scene.tally.refused += 1
                return
            for _ in range(100):
                if not peer.send(messages.encode(messages.Describe(bytes(PIECE_BYTES)))):
                    break

    scene.repeat(describe)
