"""Measuring the way to the broker costs it little, and no more than a bound."""

from __future__ import annotations

import pytest

from diloco_broker.config import BrokerConfig
from diloco_broker.core import state
from diloco_broker.core.effects import Send
from diloco_broker.core.events import Now, Received
from diloco_protocol.errors import ProtocolError
from diloco_protocol.frames import pack, unpack
from diloco_protocol.messages import LONGEST_PROBE, Error, Message, Probe
from kit.core_harness import Stage


@pytest.fixture
def stage() -> Stage:
    return Stage(BrokerConfig(workers=1))


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


def test_answer_is_not_longer_than_a_stranger_may_be_in_the_middle_of(stage: Stage) -> None:
    sent = answer(stage, Probe(7, LONGEST_PROBE + 1))
    assert isinstance(sent.message, Error) and sent.message.code == "bad_header"
    with pytest.raises(ProtocolError, match="49152"):
        unpack(pack(Probe(7), b"x" * (LONGEST_PROBE + 1)))


def test_who_measures_on_and_on_gets_a_share_that_grows_with_time(stage: Stage) -> None:
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
