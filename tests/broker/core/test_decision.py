"""When a round closes, and what it waits for: one decision, asked after each event."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from diloco_broker.core.rounds.decision import Decision, Limits, Reason, Tally, Why, decide
from kit.core_harness import a_run

NOW = 100.0
HELD = set(Reason) - {Reason.WORKERS, Reason.PUSHES, Reason.GRACE}


def tallies() -> Iterator[Tally]:
    for here, comes, ago in product(range(4), range(4), (None, 0, 4, 5, 6)):
        enough_at = None if ago is None else NOW - ago
        yield Tally(here, is_complete=True, may_come=max(here, comes), enough_at=enough_at)
        yield Tally(here, is_complete=False, may_come=max(here, comes), enough_at=enough_at)
        # In asynchronous mode fewer workers may be here than pushes.
        yield Tally(here, False, comes, enough_at if here else None)


def expected(tally: Tally | None, limits: Limits) -> Reason | None:
    """The table: the first row that holds says why; none holds, and the round closes."""
    least = max(1, limits.floor)
    table: list[tuple[bool, Reason | None]] = [
        (limits.held not in (None, Reason.PAUSED), limits.held),
        (tally is None, limits.held or Reason.PARAMETERS),
    ]
    if tally is not None:
        is_short = tally.here < least
        since = None if tally.enough_at is None else NOW - tally.enough_at
        table += [
            (is_short and tally.may_come < limits.floor, Reason.WORKERS),
            (limits.held is not None, limits.held),
            (is_short, Reason.PUSHES),
            (tally.is_complete, None),
            (since is None, Reason.PUSHES),
            ((since or 0.0) < limits.grace_s, Reason.GRACE),
        ]
    return next((reason for holds, reason in table if holds), None)


@pytest.mark.parametrize("held", [None, *sorted(HELD)])
def test_every_combination_of_what_is_here_and_what_holds(held: Reason | None) -> None:
    for tally, floor, grace in product([None, *tallies()], range(4), (0.0, 5.0)):
        limits = Limits(held, floor, grace)
        found = decide(tally, limits, NOW)
        assert (found.why.reason if found.why else None) is expected(tally, limits), (tally, limits)
        assert found.closes == (found.why is None)


def test_reason_carries_counts_and_times() -> None:
    tally = Tally(1, False, 3)
    assert decide(tally, Limits(floor=3), NOW).why == Why(Reason.PUSHES, 2, since=NOW)
    enough = Tally(1, False, 2, enough_at=NOW - 3)
    why = decide(enough, Limits(grace_s=5.0), NOW).why
    assert why == Why(Reason.GRACE, since=NOW - 3, until=NOW + 2)


def test_reason_that_goes_on_keeps_its_beginning() -> None:
    limits, before = Limits(), Decision(Why(Reason.PUSHES, 2, since=NOW - 7))
    fewer = decide(Tally(0, False, 2), limits, NOW).after(before)
    assert fewer.why == Why(Reason.PUSHES, 1, since=NOW - 7)
    other = decide(None, Limits(Reason.PAUSED), NOW).after(before)
    assert other.why == Why(Reason.PAUSED, since=NOW)


@pytest.mark.parametrize(
    "options", [{}, {"quorum": 2, "grace": 5.0}, {"mode": "async", "grace": 5.0}], ids=str
)
def test_feed_says_what_the_round_waits_for(options: dict[str, Any]) -> None:
    stage, _ = a_run("a", "b", "c", **options)
    stage.passes(10.0)
    assert stage.shown()["why"]["reason"] == "pushes"
    stage.pushes(a=11)
    if "mode" not in options:
        assert stage.shown()["why"]["workers"] == ["b", "c"]
        stage.pushes(b=12)
    if options:
        stage.passes(2.0)
        why = stage.shown()["why"]
        assert (why["reason"], why["since_s"], why["left_s"]) == ("grace", 2.0, 3.0)
    stage.asks("pause")
    stage.passes(4.0)
    assert stage.shown()["why"]["reason"] == "paused"


def test_paused_run_that_lacks_workers_says_so() -> None:
    stage, _ = a_run("a", "b", min_workers=2)
    stage.asks("pause")
    assert stage.shown()["why"]["reason"] == "paused"
    stage.puppets["b"].leaves()
    shown = stage.shown()
    assert (shown["why"]["reason"], shown["why"]["needed"]) == ("workers", 2)
    assert shown["state"] == "paused" and "workers" in shown["waiting_for"]
    stage.worker("c").joins()
    assert stage.shown()["why"]["reason"] == "paused"
