"""What is refused is said, but not more often than a log can bear, and noise ends."""

from __future__ import annotations

from diloco_broker.config import BrokerConfig
from diloco_broker.core.events import ConnectionEnded, Malformed
from diloco_broker.core.operations.refusals import NOISE_OF_A_STRANGER
from diloco_broker.core.state import CAUSES_KEPT, SAID_AGAIN_AFTER_S
from kit.core_harness import Stage, a_manifest

BAD = "The header is not a msgpack map (ExtraData)."


def test_same_cause_is_said_once_a_minute_with_how_often_it_came() -> None:
    stage = Stage(BrokerConfig(workers=1))
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


def test_stranger_who_sends_noise_is_cut_off() -> None:
    stage = Stage(BrokerConfig(workers=1))
    noisy, other = stage.route(), stage.route()
    for _ in range(NOISE_OF_A_STRANGER - 1):
        stage.happens(Malformed(noisy, "bad_header", BAD))
    stage.happens(Malformed(other, "bad_header", BAD))
    assert not stage.gone
    stage.happens(Malformed(noisy, "bad_header", BAD))
    assert stage.gone == {noisy}


def test_member_that_sends_noise_keeps_its_connection() -> None:
    stage = Stage(BrokerConfig(workers=1))
    worker = stage.worker("a").joins()
    for _ in range(2 * NOISE_OF_A_STRANGER):
        stage.happens(Malformed(worker.control, "bad_header", BAD))
    assert not stage.gone


def test_what_is_remembered_of_refusals_is_bounded() -> None:
    stage = Stage(BrokerConfig(workers=1))
    for number in range(2 * CAUSES_KEPT):
        stage.happens(Malformed(stage.route(), f"code {number}", BAD))
        stage.happens(ConnectionEnded(f"{number} KiB of an incomplete message"))
    refusals = stage.state.refusals
    assert max(len(refusals.said_at), len(refusals.unsaid), len(refusals.noisy)) <= CAUSES_KEPT + 1


def test_joins_under_ever_new_names_are_said_once() -> None:
    stage = Stage(BrokerConfig(workers=1))
    for number in range(50):
        stage.worker(f"stranger-{number}").joins(manifest=a_manifest(0))
    assert len(stage.said("Refused a join of stranger-")) == 1
