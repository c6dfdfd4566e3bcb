"""Attacks by the contents of a message: forged lines, and ruinous settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from diloco_lab.chaos.attacks.peers import Scene
from diloco_protocol import messages

MARK = "FORGED-BY-AN-ATTACKER"
HOST = f"host\n12:00:00 WARNING {MARK}\r\x1b]0;{MARK}\x07\x1b[2J\u202e{MARK}"
# Settings that would ruin or stop a training; each of them is out of bounds.
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
# Within all bounds: only the role of the sender forbids these.
LAWFUL: tuple[tuple[str, dict[str, Any]], ...] = (("set", {"outer_lr": 0.5}), ("pause", {}))


def host_names(scene: Scene) -> None:
    """Join under a host name with line ends and terminal escapes, and leave at once.

    The drill checks the log and the history for it.
    """
    for _ in range(2):  # rounds wait for each for a moment
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
    """`set` to ruinous values, without a key or with the given one."""
    _steer(scene, [("set", values) for values in RUINOUS])


def lawful_settings(scene: Scene) -> None:
    """Settings that only an operator may change, and ruinous ones."""
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
