"""`--grace auto`: a round waits after its quorum only for as long as no worker would pause."""

from typing import Any

import pytest

from diloco_broker.config import BrokerConfig
from diloco_broker.core.events import Surroundings
from diloco_broker.core.rounds.grace import GAMMA, LONGEST_S, NEWEST
from diloco_protocol.messages import Credit, Heartbeat
from kit.core_harness import Puppet, Stage, a_run

TAU = 10
SYNC_S = 0.5


def overlapping(**options: Any) -> tuple[Stage, list[Puppet]]:
    """A run whose workers train on for TAU steps after each push."""
    usual = {"quorum": 2, "grace": "auto", "sync_every": 40, "fragment_sync_delay": TAU}
    return a_run("a", "b", "c", rounds=0, **usual | options)


def a_round(stage: Stage, number: int, *, reply_s: float = SYNC_S) -> None:
    """All push and wait for the version, whose last chunk arrives after `reply_s`."""
    for place, puppet in enumerate(stage.puppets.values()):
        puppet.pulls(after=stage.version().counter)
        puppet.pushes(10 * number + place)
    stage.passes(reply_s)
    for puppet in stage.puppets.values():
        puppet.sends(Credit(4, puppet.token()), on=puppet.bulk)
    stage.passes(5.0)


def trains(puppet: Puppet, steps_per_s: float) -> None:
    puppet.sends(Heartbeat(puppet.token(), 1, steps_per_s=steps_per_s))


def reaches_the_quorum(stage: Stage, after_s: float) -> None:
    """The first push of a round begins; `after_s` later it and another one are complete."""
    a, b, _ = stage.puppets.values()
    a.offers(901)
    stage.passes(after_s)
    a.completes()
    b.pushes(902)


def grace_s(stage: Stage) -> float:
    return float(stage.shown()["reducer"]["grace_s"])


@pytest.mark.parametrize(
    ("steps_per_s", "quorum_s", "expected"),
    [
        ({"a": 2.0}, 1.0, GAMMA * (TAU / 2.0 - 1.0 - SYNC_S)),
        ({"a": 2.0, "c": 4.0}, 1.0, GAMMA * (TAU / 4.0 - 1.0 - SYNC_S)),  # c pauses first
        ({"a": 2.0}, 4.8, 0.0),  # nothing is left
        ({"a": 0.001}, 1.0, LONGEST_S),
        ({}, 1.0, 0.0),  # no worker has reported a speed
    ],
)
def test_round_waits_for_what_the_overlap_leaves(
    steps_per_s: dict[str, float], quorum_s: float, expected: float
) -> None:
    stage, _ = overlapping()
    a_round(stage, 0)
    for name, speed in steps_per_s.items():
        trains(stage.puppets[name], speed)
    made = stage.version().counter
    reaches_the_quorum(stage, quorum_s)
    assert grace_s(stage) == pytest.approx(expected, abs=1e-3)
    assert stage.shown()["reducer"]["grace_auto"]
    if not expected:
        assert stage.version().counter == made + 1, "the round has closed with two of three"
        return
    why = stage.shown()["why"]
    assert (why["reason"], why["left_s"]) == ("grace", pytest.approx(expected, abs=1e-3))
    if expected < LONGEST_S:
        stage.passes(expected - 0.02)
        assert stage.version().counter == made
        stage.passes(0.04)
        assert stage.version().counter == made + 1
        assert stage.reports[-1].averaged == 2


def test_delivery_of_a_reply_is_averaged_over_rounds() -> None:
    stage, (a, _, _) = overlapping()
    trains(a, 2.0)
    reaches_the_quorum(stage, 0.0)  # of round one, for which all are expected
    assert grace_s(stage) == 0.0, "no reply has been measured"
    stage, (a, _, _) = overlapping()
    trains(a, 2.0)
    a_round(stage, 0)
    a_round(stage, 1, reply_s=SYNC_S + 1.0)
    reaches_the_quorum(stage, 1.0)
    expected = GAMMA * (TAU / 2.0 - 1.0 - (SYNC_S + NEWEST * 1.0))
    assert grace_s(stage) == pytest.approx(expected, abs=1e-3)


def test_push_that_was_deferred_shortens_the_wait_since_its_worker_waits_longer() -> None:
    stage, (a, b, c) = overlapping()
    a_round(stage, 0)
    trains(a, 2.0)
    c.offers(700)
    reaches_the_quorum(stage, 0.0)
    stage.passes(5.0)
    c.completes()  # it belongs to the next round
    assert stage.version().counter == 2
    for push_id, puppet in ((911, a), (912, b)):
        puppet.base = stage.version()
        puppet.pushes(push_id)
    assert stage.version().counter == 3, "three of three"
    assert grace_s(stage) == 0.0


def test_without_overlap_the_grace_is_zero_and_the_broker_says_so() -> None:
    stage, (a, _, _) = overlapping(fragment_sync_delay=0)
    stage.happens(Surroundings())
    assert stage.said("--grace auto", "the grace is 0")
    a_round(stage, 0)
    trains(a, 2.0)
    reaches_the_quorum(stage, 0.0)
    assert stage.reports[-1].averaged == 2
    stage, _ = overlapping()
    stage.happens(Surroundings())
    assert not stage.said("--grace auto")


def test_operator_changes_between_a_number_and_auto() -> None:
    stage, _ = overlapping(grace=3.0, fragment_sync_delay=0)
    result = stage.asks("set", grace="auto")
    assert result.ok
    assert "Grace 3 -> auto" in result.text and "the grace is 0" in result.text
    a_round(stage, 0)
    assert (stage.shown()["reducer"]["grace_auto"], grace_s(stage)) == (True, 0.0)
    assert stage.asks("set", grace=2).ok
    a_round(stage, 1)
    assert (stage.shown()["reducer"]["grace_auto"], grace_s(stage)) == (False, 2.0)
    assert not stage.asks("set", grace="soon").ok


@pytest.mark.parametrize(
    ("options", "own", "steps"),
    [
        ({"num_fragments": 4}, None, 10),  # auto: H/P
        ({"num_fragments": 4}, 20, 5),
        ({"num_fragments": 4, "fragment_max_delay": 7}, 20, 7),
        ({"num_fragments": 4, "fragment_sync_delay": 3, "fragment_max_delay": 7}, None, 3),
        ({}, None, 0),
    ],
)
def test_overlap_in_inner_steps(options: dict[str, Any], own: int | None, steps: int) -> None:
    assert BrokerConfig(sync_every=40, **options).overlap_steps(own) == steps
