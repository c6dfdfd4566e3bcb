"""Requests for units name counted lots only to a broker that may not know them."""

import pytest

from diloco_protocol.errors import Code
from diloco_protocol.messages import Error, Take
from diloco_worker.session.effects import Send
from diloco_worker.session.events import TakeUnits
from kit.core_harness import a_stage
from kit.unit_workers import NAME, UnitWorker, a_unit_round


def a_pair(**options: object) -> tuple[UnitWorker, UnitWorker]:
    stage = a_stage(2, 2, min_workers=1, **options)  # type: ignore[arg-type]
    first = UnitWorker(stage, "a", size=100, pulls=False)
    second = UnitWorker(stage, "b", size=100)
    first.pulls()
    return first, second


def pushes_told(worker: UnitWorker) -> list[list[int]]:
    """By request, the pushes of its lots."""
    return [[push for lot in take.lots for push in lot.pushes] for take in worker.asked]


def test_only_the_first_request_of_a_connection_names_counted_lots() -> None:
    a, b = a_pair()
    for first in (1, 11, 21):
        a_unit_round([a, b], first)
    a.takes(1)
    assert pushes_told(a) == [[], [], [], []]
    assert a.stage.state.data.sets[NAME].counted == 18
    a.comes_to(a.stage)
    a.takes(1)
    assert pushes_told(a)[-2:] == [[1, 11, 21], []]


def test_repeated_request_names_counted_lots_again() -> None:
    a, b = a_pair(save_dir="run")
    a_unit_round([a, b], 1)
    later = a.stage.restarted(a.stage.checkpoints[-1])
    a.comes_to(later, pulls=False, holds_versions=True)  # no parameters until b rejoins
    told = len(a.asked)
    assert pushes_told(a)[-1] == [1]
    b.comes_to(later, pulls=False, holds_versions=True)
    later.passes(2.0)
    a.is_back()
    a.takes(1)
    assert pushes_told(a)[told:] == [[1], []]


@pytest.mark.parametrize("lost", ["connection", "refused"])
def test_unanswered_request_is_repeated_with_counted_lots(lost: str) -> None:
    a, b = a_pair()
    a_unit_round([a, b], 1)
    a.units.disconnected()
    (first,) = a.units.welcomed()
    if lost == "connection":
        a.units.disconnected()
        (second,) = a.units.welcomed()
    else:
        list(a.units.failed(Error(Code.BAD_HEADER, "", about=Take.kind)))
        (second,) = a.units.ask(TakeUnits(9, NAME, a.size, a.epochs, None, 1))
    for each in (first, second):
        assert isinstance(each, Send) and isinstance(each.message, Take)
        assert [lot.pushes for lot in each.message.lots] == [(1,)]


def test_adopted_version_with_the_push_in_flight_is_reported_to_the_broker() -> None:
    a, b = a_pair(save_dir="run")
    a_unit_round([a, b], 1)
    old = a.stage.checkpoints[-1]
    for worker, push_id in ((a, 11), (b, 12)):
        worker.takes(3)
        worker.trains()
        worker.begins(push_id)
    a.completes()
    a.puppet.dies()  # before it sees its second push in a version
    b.completes()
    b.pulls()
    b.looks()
    later = a.stage.restarted(old)
    for worker in (a, b):
        worker.comes_to(later, pulls=False, holds_versions=True)
    b.puppet.seeds(0)
    later.passes(2.0)
    assert list(a.in_flight) == [0]
    told = len(a.asked)
    for worker in (a, b):
        worker.is_back()
    assert list(a.in_flight) == []
    a.takes(1)
    assert pushes_told(a)[told:] == [[1], [1, 11], []], "retried, with counted lots, and without"
    assert later.state.data.sets[NAME].counted == 12
