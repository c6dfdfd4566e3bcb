"""The log's line for pushes that have counted, and the warning where nothing is learnt."""

from __future__ import annotations

from diloco_protocol import Ledger
from diloco_protocol.messages import Push, Released
from diloco_worker.core.sync.flights import Flight
from diloco_worker.core.sync.freezing import Stillness
from diloco_worker.core.sync.lines import SyncLines
from diloco_worker.core.sync.news import Arrival
from kit.session_harness import version


def flight(push_id: int, steps: int) -> Flight:
    push = Push(b"", push_id, 0, 1, "fp32", version(0), steps=steps, norm=0.5)
    return Flight(push, 10, 10, 10)


def arrival(counter: int) -> Arrival:
    return Arrival(Released(0, version(counter), Ledger(), round=counter - 1), frozenset(), None)


def test_line_of_a_single_step_says_step() -> None:
    told = SyncLines(lambda: 0.0, has_fragments=True)
    told.counted(flight(1, 1), arrival(1), 0, 11)
    line = told.line(0.0)
    assert line is not None
    assert "has 1 step of this worker" in line
    assert "merged 1 step after the slot" in line


def test_at_a_fast_pace_a_line_tells_of_all_syncs_of_a_second() -> None:
    now = 0.0
    told = SyncLines(lambda: now, 100.0)
    said = []
    for counter in range(1, 31):
        told.counted(flight(counter, 5), arrival(counter), 2, 12)
        said.append(told.line(100.0 + counter))
        now += 0.125
    lines = [line for line in said if line is not None]
    assert len(lines) == 4
    assert "waited 1.0 s." in lines[0], "what a previous life has waited is no part of it"
    assert "version 9 (round 8)" in lines[1]
    assert lines[1].endswith("waited 8.0 s; and 7 more since the last line.")
    assert "version 30" in str(told.line(130.0, at_once=True))
    assert told.line(140.0, at_once=True) is None, "nothing is said twice"


def test_fragment_that_does_not_move_is_named_until_it_does() -> None:
    noticed = Stillness(2)
    assert [noticed.pushed(n % 2, 0.0 if n % 2 else 1.0, 9) for n in range(3)] == [None] * 3
    warning = noticed.pushed(1, 0.0, 9)
    assert warning is not None
    assert "of fragment 1 was all zeros twice in a row, the last time after 9" in warning
    assert noticed.pushed(0, 0.0, 9) is None
    assert noticed.pushed(0, 0.0, 9) is None, "the warning stands already"
    assert noticed.pushed(1, 1.0, 9) is None
    assert noticed.pushed(0, 1.0, 9) is None
    assert noticed.pushed(0, 0.0, 9) is None
    assert noticed.pushed(0, 0.0, 9) is not None
    assert noticed.pushed(0, None, 9) is None
