"""What the leader of a worker of several processes tells the others of a landing."""

from __future__ import annotations

import pytest

from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Push
from diloco_worker.group.orders import landing_as_order, landing_of
from diloco_worker.sync.fragment import Flight, Landing, Outcome


def flight() -> Flight:
    return Flight(Push(b"", 77, 0, 3, "int8"), 8, 8, 8)


@pytest.mark.parametrize("may_count", [None, Bitmap(3), Bitmap(3, 0b101), Bitmap.full(3)])
def test_all_processes_keep_track_of_the_same_pushes(may_count: Bitmap | None) -> None:
    """Else one would keep what a push may gain for ever, or lack it when a version tells of it."""
    landing = Landing(
        Outcome.REJECTED,
        flight(),
        settled={5: Bitmap(3), 6: Bitmap.full(3)},
        may_count=may_count,
    )
    there = landing_of(landing_as_order(0, landing, 9), None)
    assert there.may_count == may_count
    assert there.outcome is landing.outcome
    assert there.flight is not None and there.flight.push_id == 77
    assert [list(each) for each in there.settled.values()] == [[], [0, 1, 2]]
    assert list(there.settled) == [5, 6]
