"""Readers that do not go on cost nothing that stays; those that are only slow get their version."""

import pytest

from diloco_broker.core.events import Received
from diloco_broker.core.versions.readers import (
    MAX_OBSERVER_CREDIT,
    MAX_OBSERVERS,
    MAX_READER_CREDIT,
    OBSERVER_GOES_ON_WITHIN_S,
    WORKER_GOES_ON_WITHIN_S,
)
from diloco_protocol.messages import Credit, Error, Join, Pull, Released, Welcome
from kit.core_harness import Stage, a_stage, alone

CHUNKS = 20
MANY = MAX_READER_CREDIT + 4


def observer(stage: Stage, credit: int = 1, after: int = -1) -> bytes:
    """A reader that has not joined: its connection."""
    route = stage.route()
    stage.happens(Received(route, Pull(0, after=after, credit=credit)))
    return route


def versions_read(stage: Stage, route: bytes) -> list[int]:
    """Counters of the versions of the chunks that this reader got."""
    return [chunk.version.counter for chunk, _ in stage.received[route] if chunk.version]


def kept(stage: Stage) -> list[int]:
    return [each.version.counter for each in stage.state.versions[0].old]


def chunks_of(stage: Stage, route: bytes) -> int:
    return len(stage.received.get(route, []))


def test_observer_has_few_chunks_on_their_way_whatever_it_asks_for() -> None:
    stage, _ = alone(MANY)
    route = observer(stage, credit=1000)
    assert chunks_of(stage, route) == MAX_OBSERVER_CREDIT == 16
    stage.happens(Received(route, Credit(2**40)))
    assert chunks_of(stage, route) == 2 * MAX_OBSERVER_CREDIT


def test_credit_of_a_worker_is_larger_and_bounded() -> None:
    stage, _ = alone(MANY)
    b = stage.worker("b").joins()
    b.sends(Credit(10**6, b.session), on=b.bulk)
    b.pulls()
    assert len(b.chunks) == MAX_READER_CREDIT < MANY


def test_observers_that_never_go_on_keep_no_version() -> None:
    stage, a = alone(CHUNKS, heartbeat_timeout=0.0)
    silent = [observer(stage) for _ in range(30)]
    a.pushes(1)
    assert kept(stage) == [0]
    stage.passes(OBSERVER_GOES_ON_WITHIN_S + 5)
    assert set(silent) <= stage.gone
    assert kept(stage) == []
    assert not stage.state.versions.observers


def test_slow_observer_gets_the_version_that_it_has_begun() -> None:
    stage, a = alone(CHUNKS, heartbeat_timeout=0.0)
    route = observer(stage)
    for number in range(1, CHUNKS):
        if number < 4:
            a.pushes(number)
        stage.passes(OBSERVER_GOES_ON_WITHIN_S - 5)
        stage.happens(Received(route, Credit(1)))
    assert route not in stage.gone
    told = {message.version for message, _ in stage.received[route]}
    assert (chunks_of(stage, route), len(told)) == (CHUNKS, 1)


def test_worker_on_a_thin_link_goes_on_and_one_that_never_reads_is_given_up() -> None:
    stage, _ = alone(MANY, heartbeat_timeout=0.0)
    slow, silent = stage.worker("slow").joins(), stage.worker("silent").joins()
    for each in (slow, silent):
        each.pulls()
        assert len(each.chunks) == MAX_READER_CREDIT
    while len(slow.chunks) < MANY:
        stage.passes(WORKER_GOES_ON_WITHIN_S - 20)
        stage.beats("slow", "silent")
        assert slow.bulk not in stage.gone
        slow.sends(Credit(1, slow.session), on=slow.bulk)
    assert silent.bulk in stage.gone
    assert silent.bulk not in stage.state.versions.readers
    assert silent.worker_id in stage.here, "its heartbeats come: it may read anew"


def test_reader_that_waited_for_long_has_its_time_once_its_credit_is_used_up() -> None:
    """A worker on a slow line, or one that others keep waiting, asks long before the first chunk."""
    stage, a = alone(CHUNKS, heartbeat_timeout=0.0)
    route = observer(stage, after=0)
    stage.passes(OBSERVER_GOES_ON_WITHIN_S * 3)
    a.pushes(1)
    assert versions_read(stage, route) == [1]
    stage.passes(OBSERVER_GOES_ON_WITHIN_S - 5)
    assert route not in stage.gone
    stage.passes(10)
    assert route in stage.gone


@pytest.mark.parametrize("credit", [1, 0], ids=["begun", "not begun"])
def test_reader_gets_the_version_that_it_has_begun_and_else_the_newest(credit: int) -> None:
    """A link that is slower than the rounds would have none otherwise."""
    stage, a = alone()
    eye = observer(stage, credit)
    for number in range(1, 6):
        a.pushes(number)
    assert kept(stage) == [0] * credit
    stage.happens(Received(eye, Credit(8)))
    assert versions_read(stage, eye) == [0 if credit else 5] * 3
    assert kept(stage) == [], "no reader needs it any more"
    stage.happens(Received(eye, Pull(0, after=0, credit=8)))
    assert versions_read(stage, eye)[-3:] == [5, 5, 5]


def test_slow_readers_keep_no_more_than_two_old_versions_alive() -> None:
    """Whoever is slower still is moved, until it is their turn."""
    stage, a = alone()
    eyes = []
    for number in range(1, 5):
        eyes.append(observer(stage))
        a.pushes(number)
    assert kept(stage) == [0, 1]
    stage.happens(Received(eyes[0], Credit(8)))
    assert kept(stage) == [1]
    stage.state.versions.forget(eyes[1])
    assert kept(stage) == []
    for eye in eyes[2:]:
        stage.happens(Received(eye, Credit(1)))
    a.pushes(5)
    assert kept(stage) == [4], "both that were moved have begun with it"
    for eye in eyes[2:]:
        stage.happens(Received(eye, Credit(8)))
        assert versions_read(stage, eye)[-3:] == [4, 4, 4]


def test_observers_are_bounded_and_wait_for_the_next_version_unless_they_are_gone() -> None:
    stage, a = alone()
    first, *others = [observer(stage, credit=8, after=0) for _ in range(MAX_OBSERVERS)]
    one_too_many = observer(stage, after=0)
    assert isinstance(stage.inbox[one_too_many][-1], Error)
    assert first not in stage.received and first not in stage.inbox
    a.pushes(1)
    (released,) = stage.inbox[first]
    assert isinstance(released, Released) and released.version.counter == 1
    assert versions_read(stage, first) == [1, 1, 1]
    stage.gone.update(others)
    stage.passes(11.0)
    a.beats()
    assert versions_read(stage, observer(stage, credit=8)) == [1, 1, 1]


def test_pull_that_overtakes_the_first_credit_is_served_after_it() -> None:
    stage = a_stage()
    stage.joined("a")
    b = stage.worker("b")
    b.control, b.bulk = stage.route(), stage.route()
    b.sends(Join("b", stage.manifest))
    b.session = b.got(Welcome).session
    b.pulls()
    assert not b.chunks
    b.sends(Credit(8, b.token()), on=b.bulk)
    assert b.holds() == stage.version()


def test_broken_download_resumes_where_it_stopped() -> None:
    stage, a = alone()
    a.loses_connection()
    a.joins()
    held = bytes([0b011])
    a.sends(Pull(0, -1, a.token(), held_version=stage.version(), held=held))
    assert [chunk.index for chunk, _ in a.chunks] == [2]
