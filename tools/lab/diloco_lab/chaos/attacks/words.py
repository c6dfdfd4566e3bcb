"""Attacks by what a message says: forged lines, settings that end a run, and nonsense."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import msgpack

from diloco_lab.chaos.attacks.peers import Scene
from diloco_protocol import messages
from diloco_protocol.description import describe
from diloco_protocol.manifest import Kind, Manifest, TensorEntry

MARK = "FORGED-BY-AN-ATTACKER"
HOST = f"host\n12:00:00 WARNING {MARK}\r\x1b]0;{MARK}\x07\x1b[2J\u202e{MARK}"
# Settings that would end a training, or stand still for ever; each of them is out of every bound.
RUINOUS: tuple[dict[str, Any], ...] = (
    {"outer_lr": 1e308},
    {"outer_lr": math.inf},
    {"outer_lr": math.nan},
    {"outer_lr": -1.0},
    {"outer_momentum": 1.5},
    {"sync_every": 10**15},
    {"workers": 10**9},
    {"min_workers": -1},
    {"quorum": 10**9},
    {"grace": 1e300},
    {"save_every": 10**15},
)
# Within every bound: only the role refuses these.
LAWFUL: tuple[tuple[str, dict[str, Any]], ...] = (("set", {"outer_lr": 0.5}), ("pause", {}))


def host_names(scene: Scene) -> None:
    """Join under a host name with line ends and terminal escapes, and leave at once.

    What is written of it is looked at by the drill, which reads the log and the history.
    """
    for _ in range(2):  # each is expected for a moment, and rounds wait for it
        with scene.peer() as peer:
            join = messages.Join(
                scene.worker_id, digest=scene.digest, size=len(scene.description), host=HOST
            )
            peer.say(join)
            answer = peer.hear("welcome", "error", "notice")
            if answer is not None and answer["kind"] == "welcome":
                peer.say(messages.Leave(answer["session"], HOST))
                peer.hear(within_s=0.1)
            elif answer is not None:
                scene.tally.refused += 1
    with scene.peer() as peer:
        peer.say(messages.Join(HOST, digest=scene.digest, size=len(scene.description), host=HOST))
        answer = peer.hear()
        if answer is not None and answer["kind"] == "welcome":
            scene.tally.got_through("a worker id with a line end was taken")
        else:
            scene.tally.refused += 1
    with scene.peer() as peer:
        peer.asks(HOST, who=HOST)


def settings(scene: Scene) -> None:
    """`set` to values that end a run, as a stranger or with the key at hand."""
    _steer(scene, [("set", values) for values in RUINOUS])


def lawful_settings(scene: Scene) -> None:
    """What an operator may ask for and others may not, besides values that end a run."""
    _steer(scene, [*LAWFUL, *(("set", values) for values in RUINOUS)])


def _steer(scene: Scene, requests: Sequence[tuple[str, dict[str, Any]]]) -> None:
    def ask() -> None:
        with scene.peer() as peer:
            for action, values in requests:
                answer = peer.asks(action, who="an attacker", **values)
                if answer is None:
                    scene.tally.ended += 1
                    return
                if answer["kind"] == "result" and answer["ok"]:
                    scene.tally.got_through(f"{action} {values}: {answer['text']}")
                else:
                    scene.tally.refused += 1

    scene.repeat(ask)


def nonsense(scene: Scene) -> None:
    """Random and mutated messages, from a seed, as fast as they go."""
    rng = random.Random(scene.seed)
    templates = [messages.encode(each) for each in _examples(scene)]

    def send() -> None:
        with scene.peer() as peer:
            for _ in range(200):
                if not scene.goes_on or peer.is_ended(0):
                    break
                peer.send(*_nonsense(rng, templates))
            scene.tally.ended += peer.is_ended(0.005)

    scene.repeat(send)


def _examples(scene: Scene) -> list[messages.Message]:
    """Nothing that would be done as it is: no session is known, no model is that of the run."""
    other = Manifest((TensorEntry("w", (3, 2), "float32", Kind.TRAINABLE),))
    session = bytes(16)
    return [
        messages.Join(scene.worker_id, other, host="h", pid=1),
        messages.Join(scene.worker_id, digest=describe(other).digest, size=50),
        messages.Describe(b"piece"),
        messages.Heartbeat(session, 1, 2, "training", 1.0, 2.0, 3),
        messages.Push(session, 1, 0, 1, "bf16", weight=1.0),
        messages.Chunk(0, 0, session, 1),
        messages.Commit(session, 1, 0),
        messages.Pull(0, session=session),
        messages.Credit(1, session),
        messages.Leave(session, "bye"),
        messages.Control("status", 1),
    ]


def _nonsense(rng: random.Random, templates: list[bytes]) -> list[bytes]:
    """The frames of one message."""
    how = rng.randrange(4)
    if how == 0:
        return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 4))]
    header = bytearray(rng.choice(templates))
    if how == 1:  # a few bytes of it are others
        for _ in range(rng.randrange(1, 5)):
            header[rng.randrange(len(header))] = rng.randrange(256)
        return [bytes(header), *([rng.randbytes(64)] if rng.random() < 0.5 else [])]
    if how == 2:  # it ends early
        return [bytes(header[: rng.randrange(len(header))])]
    plain = msgpack.unpackb(bytes(header))
    plain[rng.choice(list(plain))] = rng.choice(_STRANGE)
    return [bytes(msgpack.packb(plain))]


_STRANGE: tuple[Any, ...] = (
    None,
    -1,
    2**63,
    math.nan,
    math.inf,
    "",
    "x" * 5000,
    b"\xff" * 100,
    [[[]]] * 50,
    {"a": {"b": {}}},
    True,
    [],
)
