"""The rounding error of a quantized delta that is offered again, resumed, or followed by another codec.

The worker trains against a scripted broker; each step lowers every parameter by 1. The expected value
of each chunk is computed by codecs in plain Python, in fp32.
"""

from dataclasses import replace

import pytest

from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Commit, Push
from diloco_worker.model.flat_state import FlatState
from kit.raw_codecs import decode, encode, fp32
from kit.scripted_broker import ScriptedBroker, version
from kit.scripted_training import H, ScriptedTraining

pytest_plugins = ("kit.worker_fixtures",)

CHUNKS = 3  # of 4 elements each
CODEC = "int4"
DECAY = 0.75


class Sender:
    """The expected pushes of a chunk in which all elements are equal."""

    residual = 0.0

    def sends(self, delta: float) -> float:
        """The value that the broker decodes."""
        return decode(encode([self._sum(delta)] * 4, CODEC), CODEC, 4)[0]

    def counts(self, delta: float) -> None:
        """The push counted."""
        self.residual = fp32(DECAY * fp32(self._sum(delta) - self.sends(delta)))

    def _sum(self, delta: float) -> float:
        return fp32(delta + self.residual)


def few(training: ScriptedTraining, **config: object) -> None:
    training.begins(config={"wire_dtype": CODEC, "feedback_decay": DECAY, **config})


def by_chunk(training: ScriptedTraining, push: Push, state: FlatState) -> list[float]:
    vector = state.vectors[next(iter(state.vectors))]
    found = []
    for span in state.layout.spans:
        part = vector[span.start : span.stop]
        assert bool((part == part[0]).all())
        found.append(float(part[0]))
    assert len(found) == push.chunks == CHUNKS
    return found


def pushes(training: ScriptedTraining) -> tuple[Push, list[float]]:
    """Receive a complete push; the value of each chunk."""
    push, state = training.broker.takes_push()
    return push, by_chunk(training, push, state)


def counted_round(training: ScriptedTraining, counter: int) -> list[float]:
    """Step to a boundary, and serve a version of the same values with the push in it."""
    training.trains(H)
    push, values = pushes(training)
    training.serves(100, counter, push)
    training.done()
    return values


def test_push_offered_again_has_the_same_bytes(training: ScriptedTraining) -> None:
    few(training)
    counted_round(training, 1)
    training.trains(H)
    broker = training.broker
    push = broker.hears(Push)
    broker.grants(push, credit=CHUNKS)
    before = taken(broker, push)
    broker.restart()
    broker.welcomes(version(1))
    again = broker.hears(Push)
    assert again.push_id == push.push_id
    broker.grants(again, Bitmap(CHUNKS).to_bytes(), credit=CHUNKS)
    assert taken(broker, again) == before
    training.serves(100, 2, push)
    training.done()
    sender = Sender()
    sender.counts(H)
    sender.counts(H)
    assert counted_round(training, 3) == [sender.sends(H)] * CHUNKS


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("is_taken", [False, True])
def test_worker_that_resumes_has_residual_and_bytes_and_the_ledger_decides(
    training: ScriptedTraining,
    broker: ScriptedBroker,
    is_counted: bool,
    is_taken: bool,
) -> None:
    """Also for chunks that had not been sent."""
    few(training, fragment_sync_delay=3)
    sender = Sender()
    training.steps(H)
    push, _ = pushes(training)
    training.brings(100, 1, push)
    training.steps(3)  # merged beneath the steps made since
    sender.counts(H)
    training.steps(2)  # a step, the freeze, and a step
    push, before = broker.hears(Push), None
    if is_taken:
        broker.grants(push, credit=CHUNKS)
        before = taken(broker, push)
    training.resumes(training.saves(), version(2 if is_counted else 1))
    if is_counted:
        broker.hears_pull()
        training.serves(100, 2, push)
        training.done()
    else:
        training.says_current(1)
        training.done()
        training.says_current(1)
        again = broker.hears(Push)
        assert again.push_id == push.push_id
        broker.grants(again, Bitmap(CHUNKS).to_bytes(), credit=CHUNKS)
        chunks = taken(broker, again)
        assert before is None or chunks == before
        values = by_chunk(training, again, broker.decoded(again, chunks))
        assert values == [sender.sends(1)] * CHUNKS
        training.brings(100, 2, again)
    sender.counts(1)
    training.steps(3)
    if is_counted:
        training.says_current(2)
    _, values = pushes(training)
    assert values == [sender.sends(1)] * CHUNKS


def taken(broker: ScriptedBroker, push: Push) -> dict[int, bytes]:
    """All chunks of a push that has its grant."""
    chunks = broker.takes_chunks(push, CHUNKS)
    assert broker.hears(Commit).push_id == push.push_id
    return chunks


def first_round(training: ScriptedTraining, counter: int) -> list[float]:
    """Another incarnation of the worker, from the version before this one, and what it sends first."""
    training.resumes(training.saves(), version(counter - 1))
    training.says_current(counter - 1)
    training.done()
    training.trains(H)
    training.says_current(counter - 1)
    push, values = pushes(training)
    training.serves(100, counter, push)
    training.done()
    return values


def test_unquantized_codec_drops_the_residual(training: ScriptedTraining) -> None:
    few(training)
    counted_round(training, 1)
    training.broker.config = replace(training.broker.config, wire_dtype="bf16")
    assert first_round(training, 2) == [H] * CHUNKS
    saved = training.worker.state_dict()
    assert saved["resume"]["fragments"][0]["residual"] is None
    training.broker.config = replace(training.broker.config, wire_dtype=CODEC)
    assert first_round(training, 3) == [Sender().sends(H)] * CHUNKS, "no residual is sent"
