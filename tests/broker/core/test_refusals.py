"""What anybody may ask for: refusals are logged within bounds, noise ends, probes have a share."""

import pytest

from diloco_broker.config import BrokerConfig
from diloco_broker.core import state
from diloco_broker.core.effects import Log, Send
from diloco_broker.core.events import ConnectionEnded, Malformed, Now, Received
from diloco_broker.core.operations.refusals import UNAUTHENTICATED_NOISE
from diloco_broker.core.state import CAUSES_KEPT, SAID_AGAIN_AFTER_S
from diloco_protocol.errors import ProtocolError
from diloco_protocol.frames import pack, unpack
from diloco_protocol.messages import LONGEST_PROBE, Error, Message, Probe
from kit.core_harness import Stage, a_manifest

BAD = "The header is not a msgpack map (ExtraData)."


@pytest.fixture
def stage() -> Stage:
    return Stage(BrokerConfig(workers=1))


def test_same_cause_is_said_once_a_minute_with_how_often_it_came(stage: Stage) -> None:
    for _ in range(1000):
        stage.happens(Malformed(stage.route(), "bad_header", BAD))
    said = [log for log in stage.logs if BAD in log]
    assert len(said) == 1
    stage.now += SAID_AGAIN_AFTER_S
    stage.happens(Malformed(stage.route(), "bad_header", BAD))
    assert "999" in stage.logs[-1]
    stage.happens(Malformed(stage.route(), "bad_frames", "A message has a header."))
    assert "A message has a header." in stage.logs[-1]
    assert stage.shown()["totals"]["malformed"] == 1002


def test_unauthenticated_peer_who_sends_noise_is_cut_off(stage: Stage) -> None:
    noisy, other = stage.route(), stage.route()
    for _ in range(UNAUTHENTICATED_NOISE - 1):
        stage.happens(Malformed(noisy, "bad_header", BAD))
    stage.happens(Malformed(other, "bad_header", BAD))
    assert not stage.gone
    stage.happens(Malformed(noisy, "bad_header", BAD))
    assert stage.gone == {noisy}
    worker = stage.worker("a").joins()
    for _ in range(2 * UNAUTHENTICATED_NOISE):
        stage.happens(Malformed(worker.control, "bad_header", BAD))
    assert stage.gone == {noisy}, "a member keeps its connection"


def test_memory_of_refusals_is_bounded(stage: Stage) -> None:
    for number in range(2 * CAUSES_KEPT):
        stage.happens(Malformed(stage.route(), f"code {number}", BAD))
        stage.happens(ConnectionEnded(f"{number} KiB of an incomplete message"))
    refusals = stage.state.refusals
    assert max(len(refusals.said_at), len(refusals.unsaid), len(refusals.noisy)) <= CAUSES_KEPT + 1


def test_noise_is_not_among_the_events_of_feed_and_history(stage: Stage) -> None:
    found = stage.core.handle(Malformed(b"noisy", "bad_header", BAD), Now.both(stage.now))
    assert [each.is_listed for each in found if isinstance(each, Log)] == [False]


def test_joins_under_ever_new_names_are_said_once(stage: Stage) -> None:
    for number in range(50):
        stage.worker(f"stranger-{number}").joins(manifest=a_manifest(0))
    assert len(stage.said("Refused a join of stranger-")) == 1


# Measuring the link to the broker costs it little, and no more than a bound.


def answer(stage: Stage, message: Message, payload: bytes | None = None) -> Send:
    """The messages sent to a peer that has not joined."""
    sent = stage.core.handle(Received(b"doctor", message, payload), Now.both(stage.now))
    (only,) = [each for each in sent if isinstance(each, Send)]
    return only


@pytest.mark.parametrize("size", [0, 1, LONGEST_PROBE])
def test_probe_is_answered_with_as_many_bytes_as_are_asked_for(stage: Stage, size: int) -> None:
    sent = answer(stage, Probe(7, size), b"x" * LONGEST_PROBE)
    assert sent.message == Probe(7)
    assert sent.payload is None if not size else len(sent.payload) == size


def test_probe_that_is_too_long_is_refused(stage: Stage) -> None:
    sent = answer(stage, Probe(7, LONGEST_PROBE + 1))
    assert isinstance(sent.message, Error) and sent.message.code == "bad_header"
    with pytest.raises(ProtocolError, match="49152"):
        unpack(pack(Probe(7), b"x" * (LONGEST_PROBE + 1)))


def test_probes_of_a_peer_have_a_share_that_grows_with_time(stage: Stage) -> None:
    def answered() -> int:
        count = 0
        while isinstance(answer(stage, Probe(count)).message, Probe):
            count += 1
            assert count <= 2 * state.PROBES_AT_ONCE, "probes are not bounded"
        return count

    assert answered() == state.PROBES_AT_ONCE
    refusal = answer(stage, Probe(1)).message
    assert isinstance(refusal, Error) and refusal.code == "not_allowed"
    stage.now += 10
    assert answered() == 10 * state.PROBES_A_SECOND
    stage.now += 1e6
    assert answered() == state.PROBES_AT_ONCE, "more is saved than one measurement of all takes"
