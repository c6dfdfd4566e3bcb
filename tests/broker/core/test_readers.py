"""Readers that do not go on cost nothing that stays; those that are only slow get their version."""

from __future__ import annotations

import pytest

from diloco_broker.core.events import Received
from diloco_broker.core.versions.readers import (
    MAX_OBSERVER_CREDIT,
    MAX_READER_CREDIT,
    OBSERVER_GOES_ON_WITHIN_S,
    WORKER_GOES_ON_WITHIN_S,
)
from diloco_protocol.messages import Credit, Pull
from kit.core_harness import Puppet, Stage, alone

CHUNKS = 20
MANY = MAX_READER_CREDIT + 4


def a_long_run() -> tuple[Stage, Puppet]:
    return alone(CHUNKS)


def observer(stage: Stage, credit: int = 1) -> bytes:
    """Somebody who reads and has not joined: its connection."""
    route = stage.route()
    stage.happens(Received(route, Pull(0, credit=credit)))
    return route


def chunks_of(stage: Stage, route: bytes) -> int:
    return len(stage.received.get(route, []))


def old_versions(stage: Stage) -> int:
    return len(stage.state.versions[0].old)


def test_observer_has_few_chunks_on_their_way_whatever_it_asks_for() -> None:
    stage, _ = alone(MANY)
    route = observer(stage, credit=1000)
    assert chunks_of(stage, route) == MAX_OBSERVER_CREDIT == 16
    stage.happens(Received(route, Credit(2**40)))
    assert chunks_of(stage, route) == 2 * MAX_OBSERVER_CREDIT


def test_worker_has_more_room_and_a_bound_as_well() -> None:
    stage, _ = alone(MANY)
    b = stage.worker("b").joins()
    b.sends(Credit(10**6, b.session), on=b.bulk)
    b.pulls()
    assert len(b.chunks) == MAX_READER_CREDIT < MANY


def test_observers_that_never_go_on_keep_no_version() -> None:
    stage, a = a_long_run()
    silent = [observer(stage) for _ in range(30)]
    a.pushes(1)
    assert old_versions(stage) == 1
    for _ in range(int(OBSERVER_GOES_ON_WITHIN_S) + 1):
        stage.passes_with(1, "a")
    assert set(silent) <= stage.gone
    assert old_versions(stage) == 0
    assert not stage.state.versions.observers


@pytest.mark.slow
def test_slow_observer_gets_the_version_that_it_has_begun() -> None:
    stage, a = a_long_run()
    route = observer(stage)
    for number in range(1, CHUNKS):
        if number < 4:
            a.pushes(number)
        stage.passes_with(int(OBSERVER_GOES_ON_WITHIN_S) - 5, "a")
        stage.happens(Received(route, Credit(1)))
    assert route not in stage.gone
    told = {message.version for message, _ in stage.received[route]}
    assert (chunks_of(stage, route), len(told)) == (CHUNKS, 1)


def test_observer_that_waits_for_the_next_version_is_left_in_peace() -> None:
    stage, _ = a_long_run()
    route = stage.route()
    stage.happens(Received(route, Pull(0, after=0)))
    stage.passes_with(int(OBSERVER_GOES_ON_WITHIN_S) * 3, "a")
    assert route not in stage.gone


@pytest.mark.slow
def test_worker_on_a_thin_link_goes_on_and_one_that_never_reads_is_given_up() -> None:
    stage, _ = alone(MANY)
    slow, silent = stage.worker("slow").joins(), stage.worker("silent").joins()
    for each in (slow, silent):
        each.pulls()
        assert len(each.chunks) == MAX_READER_CREDIT
    while len(slow.chunks) < MANY:
        stage.passes_with(int(WORKER_GOES_ON_WITHIN_S) - 20, "a", "slow", "silent")
        assert slow.bulk not in stage.gone
        slow.sends(Credit(1, slow.session), on=slow.bulk)
    assert silent.bulk in stage.gone
    assert silent.bulk not in stage.state.versions.readers
    assert silent.worker_id in stage.here, "its heartbeats come: it may read anew"


def test_reader_that_waited_for_long_has_its_time_once_its_credit_is_used_up() -> None:
    """A worker on a slow line, or one that others keep waiting, asks long before the first chunk."""
    stage, a = a_long_run()
    route = stage.route()
    stage.happens(Received(route, Pull(0, after=0, credit=1)))
    stage.passes_with(int(OBSERVER_GOES_ON_WITHIN_S) * 3, "a")
    a.pushes(1)
    assert chunks_of(stage, route) == 1
    stage.passes_with(int(OBSERVER_GOES_ON_WITHIN_S) - 5, "a")
    assert route not in stage.gone
    stage.passes_with(10, "a")
    assert route in stage.gone
