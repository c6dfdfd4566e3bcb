"""What the broker measures of pushes: their length, a bound on it, and workers that send the same."""

from functools import partial
from typing import Any

import pytest

from diloco_broker.core import events
from diloco_protocol.feed import parse_snapshot
from diloco_protocol.messages import Error
from diloco_protocol.monitor.verdict import verdict_on
from kit.core_harness import Puppet, Stage, a_run, a_stage
from kit.feed_snapshots import frame

FIVE = ("a", "b", "c", "d", "e")
CHUNKS = 4  # of norm n each, so that a push has norm 2 n
fresh = partial(a_run, rounds=0, chunks=CHUNKS)  # no worker has pushed yet


def of_norm(puppet: Puppet, push_id: int, length: float, **fields: Any) -> None:
    """A whole push of this length."""
    puppet.pushes(push_id, squares=length**2 / CHUNKS, **fields)


def a_round_of(puppets: list[Puppet], number: int, *norms: float, **fields: Any) -> None:
    for place, (puppet, norm) in enumerate(zip(puppets, norms, strict=True)):
        of_norm(puppet, 10 * number + place, norm, **fields)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"quorum": 5}])
def test_feed_has_what_the_broker_measured_not_what_a_worker_says(options: dict[str, Any]) -> None:
    stage, puppets = fresh(*FIVE, **options)
    a_round_of(puppets, 0, 2, 3, 4, 5, 6, norm=1e-9)
    assert list(stage.column("delta_norm").values()) == [2, 3, 4, 5, 6]
    assert list(stage.column("times_usual").values()) == [0.5, 0.75, 1, 1.25, 1.5]
    assert stage.shown()["fragments"][0]["usual_norm"] == 4


def test_norms_of_fragments_are_compared_with_those_of_the_same_fragment() -> None:
    stage, puppets = fresh("a", "b", "c", num_fragments=2)
    for fragment, norm in ((0, 1.0), (1, 50.0)):
        a_round_of(puppets, fragment, norm, norm, norm, fragment=fragment)
    assert [part["usual_norm"] for part in stage.shown()["fragments"]] == [1, 50]
    assert set(stage.column("times_usual").values()) == {1}
    assert set(stage.column("delta_norm").values()) == {50}
    a_round_of(puppets, 2, 2, 2, 2)
    assert set(stage.column("delta_norm").values()) == {2}, "of the last push"
    assert not stage.said("times the workers' median")


def test_two_workers_have_no_usual_norm() -> None:
    stage, puppets = fresh("a", "b")
    a_round_of(puppets, 0, 1, 100)
    assert stage.shown()["fragments"][0]["usual_norm"] is None
    assert stage.row("b")["delta_norm"] == 100
    assert stage.row("b")["times_usual"] is None


def test_outlier_is_named_once_a_minute() -> None:
    stage, puppets = fresh(*FIVE)
    for number in range(3):
        a_round_of(puppets, number, 1, 1, 60, 1, 1)
    assert len(stage.said("of c has norm 60")) == 1
    stage.passes(61)
    a_round_of(puppets, 3, 1, 1, 60, 1, 1)
    assert len(stage.said("of c has norm 60")) == 2


def test_round_goes_on_without_a_push_that_is_too_large_and_only_its_sender_is_told() -> None:
    stage, puppets = fresh("a", "b", "c", max_delta_norm=10.0)
    a_round_of(puppets, 0, 1, 9.9, 10.1)
    c = puppets[2]
    assert (c.error().code, c.error().push_id, c.error().retry) == ("too_large", 2, False)
    assert "10.1" in c.error().text
    assert stage.counted() == [{("a", 0): 1, ("b", 1): 1}] * CHUNKS
    assert not puppets[0].last(Error) and not puppets[1].last(Error)
    totals = stage.shown()["totals"]
    assert (totals["pushes"], totals["refused"]) == (3, {"too_large": 1})
    assert stage.row("c")["rejected"] == 1
    assert stage.row("c")["delta_norm"] == pytest.approx(10.1)
    of_norm(c, 12, 5)  # it takes part again
    a_round_of(puppets[:2], 1, 1, 1)
    assert ("c", 12) in stage.counted()[0]


def test_auto_bound_holds_in_round_one_in_any_order() -> None:
    for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0)):
        stage, puppets = fresh(*FIVE, max_delta_norm="auto")
        for place in order:
            of_norm(puppets[place], place, 100 if place == 4 else 1)
        assert puppets[4].error().code == "too_large"
        assert stage.counters == [1]
        assert {who for who, _ in stage.counted()[0]} == {"a", "b", "c", "d"}


def test_bound_follows_when_all_workers_make_longer_steps() -> None:
    stage, puppets = fresh("a", "b", "c", max_delta_norm="auto")
    for number, norm in enumerate((1, 1, 30, 30, 900, 0.1)):
        a_round_of(puppets, number, norm, norm, norm)
    assert stage.counters == [6]
    assert stage.shown()["totals"]["rejected"] == 0


def test_bound_follows_in_asynchronous_mode_once_most_have_longer_steps() -> None:
    stage, puppets = fresh("a", "b", "c", "d", "e", mode="async", max_delta_norm="auto")
    a_round_of(puppets, 0, 1, 1, 1, 1, 1)
    assert stage.counters == [5]
    a_round_of(puppets, 1, 30, 30, 30, 30, 30)
    # Of the first two the median is still 1; the third makes it 30.
    assert stage.shown()["totals"]["rejected"] == 2
    assert [bool(p.last(Error)) for p in puppets] == [True, True, False, False, False]
    assert stage.counters == [8]


def test_window_of_asynchronous_mode_applies_what_is_left() -> None:
    stage, (a, b, c) = fresh("a", "b", "c", mode="async", max_delta_norm=10.0, grace=1.0)
    of_norm(a, 1, 100)
    of_norm(b, 2, 2)
    stage.now += 1.5
    stage.happens(events.Tick())  # one is enough
    assert a.error().code == "too_large"
    assert stage.counters == [1]
    assert stage.counted() == [{("b", 2): 1}] * CHUNKS
    assert c.last(Error) is None


def test_quorum_without_the_refused_waits_for_the_next() -> None:
    stage, puppets = fresh("a", "b", "c", "d", quorum=3, max_delta_norm=10.0)
    a_round_of(puppets, 0, 1, 1, 1, 1)  # round one waits for all
    for place, norm in ((0, 1), (1, 100), (2, 1)):
        of_norm(puppets[place], 10 + place, norm)
    assert stage.counters == [1]
    of_norm(puppets[3], 13, 1)
    assert stage.counters == [2]


def test_floor_holds_also_for_what_was_refused() -> None:
    stage, puppets = fresh("a", "b", max_delta_norm=10.0, min_workers=2)
    a_round_of(puppets, 0, 1, 100)
    assert stage.counters == [0], "--min-workers 2 asks for two contributions"
    of_norm(puppets[1], 2, 1)
    assert stage.counters == [1]


def test_round_one_waits_for_successors_of_refused_workers_that_left() -> None:
    stage = a_stage(workers=3, chunks=CHUNKS, max_delta_norm=10)
    for name in ("a", "a2"):
        (vandal,) = stage.joined(name)
        of_norm(vandal, 1, 100)
        vandal.leaves()
    b, c, d = stage.joined("b", "c", "d")
    of_norm(b, 2, 1)
    assert stage.counters == [0]
    a_round_of([c, d], 1, 1, 1)
    assert stage.counters == [1]


def test_zeros_do_not_lower_the_bound() -> None:
    stage, puppets = fresh(*FIVE, max_delta_norm="auto")
    a_round_of(puppets, 0, 0, 0, 1, 1, 1)
    assert stage.counters == [1]
    assert stage.shown()["totals"]["rejected"] == 0


def test_many_tiny_pushes_of_one_worker_have_one_vote() -> None:
    stage, puppets = fresh("a", "b", "c", mode="async", max_delta_norm="auto")
    a_round_of(puppets, 0, 1, 1, 1)
    for number in range(20):
        of_norm(puppets[0], 100 + number, 1e-6)
    of_norm(puppets[1], 200, 2)
    assert puppets[1].last(Error) is None
    assert stage.counters == [24]


def test_weight_of_its_own_is_refused_where_length_is_bounded() -> None:
    stage, (a, b) = fresh("a", "b", max_delta_norm=10.0)
    a.begins(1, weight=1e12)
    assert (a.error().code, "1e+12" in a.error().text) == ("bad_push", True)
    of_norm(b, 2, 1)
    assert stage.counters == [1], "the others do not wait for it"


def test_bound_holds_after_a_restart_once_all_have_pushed() -> None:
    stage, puppets = fresh("a", "b", "c", max_delta_norm="auto", save_dir="run")
    a_round_of(puppets, 0, 1, 1, 1)
    again = stage.restarted()
    puppets = [again.worker(name).comes_with(stage.holdings()) for name in ("a", "b", "c")]
    a_round_of(puppets, 1, 1, 100, 1)
    assert again.counters == [2]
    assert puppets[1].error().code == "too_large"


# Workers that send identical updates train as one: the broker says so, once, and shows it.

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
    return {each: same for each, same in stage.column("same_as").items() if same is not None}


def warnings(stage: Stage) -> list[str]:
    return stage.said("sent identical updates")


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
    c.leaves()
    assert alike(stage) == {}


def test_identical_updates_are_logged_once_and_shown_while_they_last() -> None:
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
