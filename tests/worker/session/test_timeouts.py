"""A data connection that died silently, while heartbeats are answered."""

from diloco_protocol.description import describe, seconds_for
from diloco_protocol.messages import Ack, Chunk, Describe, Grant, Notice, Push, Released, Standing
from diloco_worker.session.connection import (
    BULK_PATIENCE_S,
    JOIN_PATIENCE_S,
    LONGEST_BULK_PATIENCE_S,
)
from diloco_worker.session.effects import Close
from diloco_worker.session.events import Offer, RequestVersion
from kit.core_harness import layered
from kit.session_harness import CHUNKS, Desk, desk, gradient, version, whole


def lives_on(made: Desk, seconds: float) -> bool:
    """Let the control connection receive messages. Returns whether the connections were closed."""
    for _ in range(int(seconds / 5)):
        made.hears(Notice("alive", ""))
        made.passes(5)
        if made.all(Close):
            return False
    return True


def sends(made: Desk) -> Desk:
    made.happens(Offer(gradient()))
    made.hears(Grant(77, 0, Standing.NEW, credit=4))
    return made


def test_each_acknowledgement_is_a_sign_of_life(ready: Desk) -> None:
    sends(ready)
    for index in range(CHUNKS - 1):
        assert lives_on(ready, BULK_PATIENCE_S - 5)
        ready.hears(Ack(77, 0, (index,)))
    ready.hears(Ack(77, 0, (CHUNKS - 1,)))
    assert lives_on(ready, 10 * BULK_PATIENCE_S), "a round may take long"


def test_waiting_pushes_and_unreleased_versions_do_not_time_out(ready: Desk) -> None:
    ready.hears(Released(0, version(1), whole(5)))
    assert lives_on(ready, 10 * BULK_PATIENCE_S), "it was not requested"
    ready.happens(RequestVersion(0))
    assert lives_on(ready, 10 * BULK_PATIENCE_S)
    ready.happens(Offer(gradient()))
    ready.hears(Grant(77, 0, Standing.WAIT))
    assert lives_on(ready, 10 * BULK_PATIENCE_S)


def test_chunks_of_a_released_version_must_come(ready: Desk) -> None:
    sends(ready)
    ready.hears(Ack(77, 0, tuple(range(4))), Ack(77, 0, tuple(range(4, CHUNKS))))
    ready.hears(Chunk(0, 0, version=version(1)))
    assert lives_on(ready, 10 * BULK_PATIENCE_S), "its round is not over"
    ready.hears(Released(0, version(1), whole(77)))
    assert lives_on(ready, BULK_PATIENCE_S - 5)
    ready.hears(Chunk(0, 1, version=version(1)))
    assert lives_on(ready, BULK_PATIENCE_S - 5)
    assert not lives_on(ready, 10)


def test_patience_grows_until_data_arrives(ready: Desk) -> None:
    """A link that needs a minute for a chunk succeeds in the end."""
    patience = BULK_PATIENCE_S
    sends(ready)
    for _ in range(8):
        assert lives_on(ready, patience - 5)
        assert not lives_on(ready, 10)
        (push,) = ready.breaks().is_welcomed(version(0)).sent(Push)
        assert push.push_id == 77, "and the push continues"
        ready.hears(Grant(77, 0, Standing.RESUME, b"\0\0", credit=4))
        patience = min(2 * patience, LONGEST_BULK_PATIENCE_S)
    ready.hears(Ack(77, 0, (0,)))
    assert lives_on(ready, BULK_PATIENCE_S - 5)
    assert not lives_on(ready, 10)


def test_describing_a_model_may_take_as_long_as_a_slow_link_needs() -> None:
    made = desk(manifest=layered(2000)).connects()
    made.passes(JOIN_PATIENCE_S - 1)
    made.hears(Notice("describe"))
    size = sum(len(each.piece) for each in made.sent(Describe))
    assert size == len(describe(layered(2000)).packed)
    made.passes(JOIN_PATIENCE_S + seconds_for(size) - 1)
    assert not made.all(Close)
    made.passes(1)
    assert made.all(Close)
    made.breaks()
    made.passes(JOIN_PATIENCE_S)
    assert made.all(Close), "the next join has the usual time limit"
