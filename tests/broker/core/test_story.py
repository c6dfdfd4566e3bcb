"""What an error of the core tells: the round, the worker, and the last events of both."""

import gc
import tracemalloc
import weakref

import pytest

from diloco_broker.core import events
from diloco_broker.core.rounds import grants
from diloco_broker.core.rounds.round import InvariantBroken
from diloco_broker.core.story import KEPT, CoreError
from diloco_protocol.messages import Chunk, Heartbeat, Pull, Push
from kit.core_harness import Stage, a_run
from kit.noted_tensors import CHUNK_ELEMENTS, Payload

CHUNKS = 3


def broken_by(stage: Stage, worker_id: str) -> str:
    """Make the round's record of a worker wrong; returns what the core says of it."""
    (mine,) = stage.round.of_worker(worker_id)
    mine.taken.add(CHUNKS - 1)
    with pytest.raises(InvariantBroken) as caught:
        stage.core.check_invariants()
    assert caught.value.worker_id == worker_id
    return str(caught.value)


def test_broken_invariant_names_the_round_the_worker_and_their_last_events() -> None:
    stage, (a, b) = a_run("a", "b", rounds=0, chunks=CHUNKS)
    stage.pushes(a=1, b=2)
    b.begins(4)
    a.begins(3)
    a.delivers([0])
    b.delivers([0, 1])
    text = broken_by(stage, "a")
    first, where, *rest = text.splitlines()
    assert first == "('a', 3) has taken what never arrived"
    assert where.startswith("  in round 1 (closing, fragment 0), at the event: ")
    assert where.endswith("WorkDone of b, fragment 0, chunk 1, push 4")
    own, of_round = "\n".join(rest).split("  before it, in this round:\n")
    assert own.startswith("  before it, of a:\n")
    assert "round 0: Commit of a, fragment 0, push 1" in own
    assert "round 1: Push of a, fragment 0, push 3" in own
    assert "round 1: Chunk of a, fragment 0, chunk 0, push 3" in own
    assert " of b" not in own
    assert "round 1: Push of b, fragment 0, push 4" in of_round
    assert "round 0" not in of_round


def test_internal_error_tells_the_events_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (a, _) = a_run("a", "b", rounds=0, chunks=CHUNKS)
    a.begins(1)

    def stumble(*_: object) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(grants, "acknowledge_work", stumble)
    with pytest.raises(CoreError, match="a mistake of ours") as caught:
        a.delivers([0])
    assert "WorkDone of a, fragment 0, chunk 0, push 1" in str(caught.value)
    assert "Push of a, fragment 0, push 1" in str(caught.value)


def test_story_stays_small_whatever_happens() -> None:
    stage, (_, b) = a_run("a", "b", rounds=0, chunks=CHUNKS)
    b.begins(2)
    again = Push(b.token(), 2, 0, CHUNKS, "fp32", base=stage.version())
    for _ in range(2 * KEPT):
        stage.core.handle(events.Received(b.control, again), events.Now.both(stage.now))
        stage.core.handle(
            events.Malformed(b"x" * 5, "bad_header", "z" * 10_000), events.Now.both(stage.now)
        )
    text = broken_by(stage, "b")
    assert len(text) < 5000 and "zzz" not in text


def test_story_keeps_no_payload_alive() -> None:
    stage, (a, _) = a_run("a", "b", rounds=0, chunks=CHUNKS)
    a.begins(1)
    payload = Payload(4 * CHUNK_ELEMENTS)
    seen = weakref.ref(payload)
    stage.happens(events.Received(a.bulk, Chunk(0, 0, session=a.session, push_id=1), payload))
    del payload
    stage.happens(events.Tick())
    gc.collect()
    assert seen() is None


def test_story_keeps_nothing_that_an_unauthenticated_peer_sends() -> None:
    """An unknown session may be megabytes long, and each may differ."""
    stage, (_, _) = a_run("a", "b", rounds=0, chunks=CHUNKS)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(KEPT):
            session = bytes([number % 256]) * 100_000
            for message in (
                Chunk(0, number % CHUNKS, session=session, push_id=1),
                Pull(0, session=session),
                Heartbeat(session, 1),
            ):
                stage.core.handle(
                    events.Received(b"stranger", message, None), events.Now.both(stage.now)
                )
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 200_000  # two sessions' worth
