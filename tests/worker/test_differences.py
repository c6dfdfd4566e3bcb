"""Versions that arrive as differences from the held one, against a scripted broker."""

from dataclasses import replace

import pytest
import torch

from diloco_protocol import Counted, Ledger, Segment
from diloco_protocol.messages import Chunk, Commit, Pull, Push, Released
from diloco_protocol.tensors.codecs import CODECS, checksum
from kit.scripted_broker import ScriptedBroker, version
from kit.scripted_training import H, ScriptedTraining

pytest_plugins = ("kit.worker_fixtures",)


def few(training: ScriptedTraining) -> None:
    training.begins(config={"reply_dtype": "int4"})


def follows(
    training: ScriptedTraining,
    counter: int,
    push: Push,
    *,
    by: float = 1.0,
    onto: float = 100.0,
    held: int | None = None,
    spoilt: bool = False,
) -> None:
    """Send a version that is the held one, `onto`, plus `by` everywhere.

    `spoilt`: with a wrong checksum.
    """
    broker, what = training.broker, version(counter)
    base = version(counter - 1 if held is None else held)
    for span in training.filled(0).layout.spans:
        values = torch.full((span.elements,), by)
        code = CODECS["int4"].encode(values)
        read = CODECS["int4"].decode(code, span.elements)
        wanted = checksum(read + onto) + spoilt
        says = Chunk(0, span.index, version=what, delta_of=base, parts=(code.nbytes,))
        broker.says(replace(says, checksum=wanted), bytes(code))
    broker.says(Released(0, what, Ledger({"me": (Counted(push.push_id),)})))


def takes_with_pull(training: ScriptedTraining) -> tuple[Push, Pull]:
    """Receive a complete push, and the pull for the version with it."""
    broker = training.broker
    push = broker.hears(Push)
    pull = broker.hears_pull()
    broker.grants(push)
    broker.takes_chunks(push, push.chunks)
    assert broker.hears(Commit).push_id == push.push_id
    return push, pull


def test_version_with_a_wrong_checksum_is_fetched_complete(
    training: ScriptedTraining, caplog: pytest.LogCaptureFixture
) -> None:
    few(training)
    training.trains(H)
    push, pull = takes_with_pull(training)
    assert pull.delta_of == version(0)
    follows(training, 1, push, spoilt=True)
    again = training.broker.hears_pull()
    assert again.delta_of is None and again.held is None
    training.serves(50, 1, push)
    training.done()
    assert training.values == 50
    assert "fetching it complete" in caplog.text
    for counter in (2, 3):
        training.trains(H)
        push, pull = takes_with_pull(training)
        assert pull.delta_of == version(counter - 1), "a complete version is trusted"
        follows(training, counter, push, by=7.0, onto=50 + 7 * (counter - 2))
        training.done()
        assert training.values == 50 + 7 * (counter - 1)


def test_difference_from_an_unknown_version_is_ignored(training: ScriptedTraining) -> None:
    few(training)
    training.trains(H)
    push, _ = training.takes()
    follows(training, 5, push, held=4)
    training.serves(50, 1, push)
    training.done()
    assert training.values == 50


OF_WRONG_LENGTHS = [
    Chunk(0, 0, version=version(1), delta_of=version(0), parts=parts, checksum=0)
    for parts in ((), (1,), (130, 130), (129,))
]


@pytest.mark.parametrize(
    ("chunk", "payload", "words"),
    [
        (Chunk(0, 0, version=version(1)), b"123", "3 bytes"),
        *((chunk, bytes(130), "no difference in int4") for chunk in OF_WRONG_LENGTHS),
    ],
)
def test_malformed_chunk_is_logged_and_dropped(
    training: ScriptedTraining, chunk: Chunk, payload: bytes, words: str
) -> None:
    few(training)
    training.trains(H)
    push, _ = training.takes()
    training.broker.says(chunk, payload)
    training.serves(50, 1, push)
    training.done()
    assert training.values == 50
    assert words in str(training.metrics.last_error)


def test_buffers_never_come_as_differences(
    training: ScriptedTraining, broker: ScriptedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    training.begins(model, config={"reply_dtype": "int4"})
    assert broker.layout is not None
    spans = broker.layout.fragments[0].spans
    index = next(span.index for span in spans if span.segment is Segment.BUFFERS)
    says = Chunk(0, index, version=version(1), delta_of=version(0), parts=(130,), checksum=0)
    broker.says(says, bytes(130))
    training.trains(H)
    push, _ = training.broker.takes_push()
    training.serves(50, 1, push)
    training.done()
    assert "no difference in int4" in caplog.text
