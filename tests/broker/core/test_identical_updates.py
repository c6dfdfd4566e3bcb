"""Workers that send identical updates train as one: the broker says so, once, and shows it."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_protocol.feed import parse_snapshot
from diloco_protocol.monitor.verdict import verdict_on
from kit.core_harness import Puppet, Stage, a_run
from kit.feed_snapshots import frame

SAME, OTHER, THIRD = 0xAAAA, 0xBBBB, 0xCCCC
MODES = pytest.mark.parametrize(
    "options",
    [{}, {"num_fragments": 2}, {"quorum": 2}, {"mode": "async"}, {"deterministic": True}],
    ids=str,
)


class Ids:
    """Push ids that no test has to think of."""

    newest = 1000


def push(*fingerprints: tuple[Puppet, int]) -> None:
    """Each worker makes an update from the version that is the newest now, and sends it."""
    base = fingerprints[0][0].stage.version()
    for puppet, fingerprint in fingerprints:
        Ids.newest += 1
        puppet.pushes(Ids.newest, fingerprint=fingerprint, base=base)


def alike(stage: Stage) -> dict[str, str]:
    """Who sent the same as whom, as the feed has it."""
    return {w["id"]: w["same_as"] for w in stage.shown()["workers"] if w["same_as"] is not None}


def warnings(stage: Stage) -> list[str]:
    return stage.said("sent identical updates")


def fresh(*ids: str, **options: Any) -> tuple[Stage, list[Puppet]]:
    """A run whose workers have pushed nothing yet."""
    return a_run(*ids, rounds=0, **options)


@MODES
def test_workers_that_send_the_same_are_named_once_and_shown(options: dict[str, Any]) -> None:
    stage, (a, b, c) = fresh("a", "b", "c", **options)
    push((a, SAME), (b, OTHER), (c, SAME))
    assert alike(stage) == {"a": "c", "c": "a"}
    (line,) = warnings(stage)
    assert "a and c" in line
    found = verdict_on(parse_snapshot(frame(stage.shown())))
    assert found.word == "degraded"
    assert any("a and c" in reason for reason in found.reasons)


def test_it_is_said_once_and_shown_as_long_as_it_holds() -> None:
    stage, (a, b) = fresh("a", "b")
    for fingerprint in (SAME, OTHER, THIRD):
        push((a, fingerprint), (b, fingerprint))
        stage.passes_with(61, "a", "b")
    assert len(warnings(stage)) == 1
    assert alike(stage) == {"a": "b", "b": "a"}
    push((a, SAME), (b, OTHER))
    assert alike(stage) == {}


def test_zeros_and_updates_from_different_versions_are_not_compared() -> None:
    stage, (a, b) = fresh("a", "b")
    push((a, 0), (b, 0))
    assert not warnings(stage)
    stage, (a, b) = fresh("a", "b", mode="async")
    for puppet in (a, b):  # b from the version that a's update made
        push((puppet, SAME))
    assert not warnings(stage)


def test_worker_that_is_gone_is_not_named() -> None:
    stage, (a, b, c) = fresh("a", "b", "c")
    push((a, SAME), (b, SAME), (c, OTHER))
    b.leaves()
    assert alike(stage) == {}
