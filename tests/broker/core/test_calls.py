"""How many functions the core calls for a chunk and for a heartbeat, in runs of any size."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from statistics import mean
from types import FrameType
from typing import Any

import pytest

from diloco_broker.core import effects, events
from diloco_broker.core.machine import Core
from diloco_broker.core.members.members import Member, Membership
from diloco_protocol.messages import Chunk, Heartbeat
from kit.core_harness import Stage, a_stage

CHUNKS = 20
Calls = defaultdict[type, list[int]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """By kind of event or message, the calls that the core makes for each one (Python functions, and
    generators each time they go on)."""
    found: Calls = defaultdict(list)
    handle = Core.handle

    def counted(core: Core, event: events.Event, now: events.Now) -> list[effects.Effect]:
        made = found[type(event.message if isinstance(event, events.Received) else event)]
        made.append(0)

        def called(frame: FrameType, what: str, argument: object) -> None:
            made[-1] += what == "call"

        former = sys.getprofile()
        sys.setprofile(called)
        try:
            return handle(core, event, now)
        finally:
            sys.setprofile(former)

    monkeypatch.setattr(Core, "handle", counted)
    return found


@pytest.mark.parametrize("workers", [2, 6])
def test_chunk_of_a_closing_round_takes_few_calls(calls: Calls, workers: int) -> None:
    stage = a_stage(workers, chunks=CHUNKS)
    puppets = stage.joined(*"abcdef"[:workers])
    for number, puppet in enumerate(puppets):
        puppet.pulls(credit=CHUNKS)
        puppet.begins(number + 1)
    calls.clear()
    for puppet in puppets:
        puppet.delivers(range(CHUNKS))
    # A seventh more than Python 3.11 makes. With a step its chunk goes to all readers.
    most = {Chunk: 39, events.WorkDone: 35, events.Stepped: 24 + 4 * workers}
    made = {kind: mean(calls[kind]) for kind in most}
    assert all(made[kind] <= most[kind] for kind in most), made


@pytest.mark.parametrize("options", [{}, {"quorum": 2}, {"mode": "async"}], ids=str)
def test_heartbeat_costs_the_same_however_many_workers_are_idle(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    made = []
    for workers in (3, 60):
        stage = a_stage(workers, **options)
        (first, *_) = stage.joined(*(f"worker-{number}" for number in range(workers)))
        first.beats()
        calls.clear()
        with monkeypatch.context() as guarded:
            guarded.setattr(Membership, "__iter__", never)
            guarded.setattr(Stage, "handled", lambda *_: None)  # checks visit every member
            first.beats()
            assert stage.state.knows(first.control)
        made += calls.pop(Heartbeat)
    assert made[0] == made[1]


def never(membership: Membership) -> Iterator[Member]:
    raise AssertionError("an idle worker makes the broker visit every member")
