"""What few bits leave out of a delta: what becomes of it, whatever becomes of the push.

The worker trains against a scripted broker; each step lowers every parameter by 1. What a chunk of its
next push must be is worked out by the codecs in plain Python, in fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import pytest

from diloco_protocol import Counted, Ledger
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Chunk, Commit, Error, Push, Released
from diloco_worker.model.flat_state import FlatState
from kit.raw_codecs import decode, encode, fp32
from kit.scripted_broker import ScriptedBroker, version
from kit.scripted_training import H, ScriptedTraining

pytest_plugins = ("kit.worker_fixtures",)

CHUNKS = 3  # of 4 elements each
STRANGER = 99
CODEC = "int4"


class Sender:
    """What a worker should send of a chunk in which all elements are the same."""

    def __init__(self, wire: str = CODEC) -> None:
        self.wire = wire
        self.residual = 0.0

    def sends(self, delta: float) -> float:
        """What the broker reads of it."""
        coded = encode([self._sum(delta)] * 4, self.wire)
        return decode(coded, self.wire, 4)[0]

    def counts(self, delta: float) -> None:
        """It has counted."""
        self.residual = fp32(self._sum(delta) - self.sends(delta))

    def _sum(self, delta: float) -> float:
        return fp32(delta + self.residual)


def few(training: ScriptedTraining, wire: str = CODEC, **config: object) -> None:
    training.begins(config={"wire_dtype": wire, **config})


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
    """Takes a whole push; the value of each chunk."""
    push, state = training.broker.takes_push()
    return push, by_chunk(training, push, state)


def counted_round(training: ScriptedTraining, counter: int) -> list[float]:
    """Steps to a boundary, and a version of the same values with the push in it."""
    training.trains(H)
    push, values = pushes(training)
    training.serves(100, counter, push)
    training.done()
    return values


def serves_in_part(
    training: ScriptedTraining,
    counter: int,
    counted: Mapping[int, Bitmap | None],
    from_earlier: Mapping[int, Bitmap] | None = None,
) -> None:
    """A version that contains these chunks of pushes; None: all. In the place of some there are those of
    an earlier push."""
    state = training.filled(100)
    broker, what = training.broker, version(counter)
    for span in state.layout.spans:
        values = state.vectors[span.segment][span.start : span.stop]
        broker.says(Chunk(0, span.index, version=what), values.numpy().tobytes())
    earlier = {push: chunks.to_bytes() for push, chunks in (from_earlier or {}).items() if chunks}
    ledger = Ledger(
        {
            "me": tuple(
                Counted(push, None if chunks is None else chunks.to_bytes(), earlier.get(push))
                for push, chunks in counted.items()
                if chunks is None or chunks
            )
        }
    )
    broker.says(Released(0, what, ledger))


def some(*chunks: int) -> Bitmap:
    made = Bitmap(CHUNKS)
    for chunk in chunks:
        made.add(chunk)
    return made


@pytest.mark.parametrize("wire", ["int8", "int4", "int4z"])
def test_what_was_left_out_goes_with_the_next(training: ScriptedTraining, wire: str) -> None:
    few(training, wire)
    sender = Sender(wire)
    for counter in range(1, 6):
        assert counted_round(training, counter) == [sender.sends(H)] * CHUNKS
        sender.counts(H)
    if wire == "int4":
        assert sender.residual != 0


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
def test_nothing_is_kept_where_much_travels(training: ScriptedTraining, wire: str) -> None:
    few(training, wire)
    counted_round(training, 1)
    saved = training.worker.state_dict()
    assert saved["resume"]["fragments"][0]["residual"] is None


def test_push_that_is_refused_leaves_the_residual_and_its_own_steps_are_gone(
    training: ScriptedTraining,
) -> None:
    few(training)
    sender = Sender()
    counted_round(training, 1)
    sender.counts(H)
    training.trains(H)
    push, values = pushes(training)
    assert values == [sender.sends(H)] * CHUNKS
    training.refuses(push)
    training.done()
    training.trains(H)
    push, values = pushes(training)
    assert values == [sender.sends(H)] * CHUNKS, "as if the refused one had never been"
    training.serves(100, 2, push)
    training.done()
    sender.counts(H)
    assert counted_round(training, 3) == [sender.sends(H)] * CHUNKS


def test_chunks_of_a_refused_push_that_count_all_the_same_are_settled_one_by_one(
    training: ScriptedTraining,
) -> None:
    """The next delta was frozen before anybody knew; its own version tells of both."""
    few(training)
    left = [Sender() for _ in range(CHUNKS)]
    counted_round(training, 1)
    for each in left:
        each.counts(H)
    training.trains(H)
    refused, _ = pushes(training)
    training.refuses(refused, "non_finite")
    training.done()
    training.trains(H)
    following, values = pushes(training)
    assert values == [each.sends(H) for each in left]
    serves_in_part(training, 2, {refused.push_id: some(1), following.push_id: None})
    training.done()
    for index, each in enumerate(left):
        before = each.residual
        gained = fp32(fp32(fp32(H + before) - each.sends(H)) - before)
        each.counts(H)
        if index == 1:
            each.residual = fp32(each.residual + gained)
    assert counted_round(training, 3) == [each.sends(H) for each in left]
    assert left[1].residual != left[0].residual


@pytest.mark.parametrize("is_restarted", [False, True])
def test_ledger_decides_which_chunks_an_earlier_push_has_brought(
    training: ScriptedTraining, is_restarted: bool
) -> None:
    """A grant names chunks as held that the round has of a refused push. A broker that restarts in that
    round forgets them, and the worker's push brings them after all."""
    few(training)
    left = [Sender() for _ in range(CHUNKS)]
    training.trains(H)
    broker = training.broker
    push, earlier = broker.hears(Push), 5
    broker.grants(push, some(1).to_bytes(), credit=CHUNKS)
    broker.takes_chunks(push, CHUNKS - 1)
    if is_restarted:
        broker.restart()
        broker.welcomes(version(0))
        push = broker.hears(Push)
        broker.grants(push, credit=CHUNKS)
        broker.takes_chunks(push, CHUNKS)
    assert broker.hears(Commit).push_id == push.push_id
    others = some() if is_restarted else some(1)
    serves_in_part(training, 1, {earlier: others, push.push_id: None}, {push.push_id: others})
    training.done()
    for index, each in enumerate(left):
        if index not in others:
            each.counts(H)
    assert counted_round(training, 2) == [each.sends(H) for each in left]
    assert left[0].residual != 0


def test_late_push_of_which_a_part_counts_is_settled_by_the_version_that_it_missed(
    training: ScriptedTraining,
) -> None:
    few(training, fragment_sync_delay=2)
    training.steps(H)
    push, _ = pushes(training)
    training.refuses(push, "late")
    training.hears_news()
    training.steps(1)
    training.is_asked_for_newest()
    serves_in_part(training, 1, {push.push_id: some(0, 2)})
    training.hears_news()
    training.steps(1)
    left = [Sender() for _ in range(CHUNKS)]
    for index in (0, 2):
        left[index].counts(H)
    training.steps(H - 2)
    following, values = pushes(training)
    assert following.steps == H
    assert values == [each.sends(H) for each in left]
    assert left[0].residual != 0 == left[1].residual


def test_push_that_is_offered_again_is_the_same_byte_by_byte(training: ScriptedTraining) -> None:
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
    broker.grants(again, some().to_bytes(), credit=CHUNKS)
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
    training: ScriptedTraining, broker: ScriptedBroker, is_counted: bool, is_taken: bool
) -> None:
    """Also of chunks that had not been sent."""
    few(training, fragment_sync_delay=3)
    sender = Sender()
    training.steps(H)
    push, _ = pushes(training)
    training.brings(100, 1, push)
    training.steps(3)  # it lands, on top of what was made since
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
        broker.grants(again, some().to_bytes(), credit=CHUNKS)
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


@pytest.mark.parametrize("what", ["a push that it does not know", "another run"])
def test_what_the_model_gives_way_to_takes_the_residual_along(
    training: ScriptedTraining, broker: ScriptedBroker, what: str
) -> None:
    few(training)
    counted_round(training, 1)
    saved = training.saves()
    if what == "another run":
        training.resumes(saved, answer=Error("run_differs", "Another run.", about="join"))
        broker.welcomes(version(3))
        broker.hears_pull()
        training.serves(100, 3)
    else:
        training.resumes(saved, version(3))
        broker.hears_pull()
        broker.serves(training.filled(100), version(3), STRANGER)
    training.done()
    assert counted_round(training, 4) == [Sender().sends(H)] * CHUNKS


def test_state_of_an_older_release_has_no_residual(training: ScriptedTraining) -> None:
    few(training)
    counted_round(training, 1)
    state, model = training.saves()
    older = copy.deepcopy(state)
    for fragment in older["resume"]["fragments"]:
        for name in ("residual", "gains", "dropped"):
            del fragment[name]
    training.resumes((older, model), version(1))
    training.says_current(1)
    training.done()
    training.trains(H)
    training.says_current(1)
    push, values = pushes(training)
    assert values == [Sender().sends(H)] * CHUNKS
    training.serves(100, 2, push)
    training.done()


def first_round(training: ScriptedTraining, counter: int) -> list[float]:
    """Another life of the worker, from the version before this one, and what it sends first."""
    training.resumes(training.saves(), version(counter - 1))
    training.says_current(counter - 1)
    training.done()
    training.trains(H)
    training.says_current(counter - 1)
    push, values = pushes(training)
    training.serves(100, counter, push)
    training.done()
    return values


def test_what_was_left_out_is_given_up_when_deltas_travel_whole_from_then_on(
    training: ScriptedTraining, broker: ScriptedBroker
) -> None:
    few(training)
    counted_round(training, 1)
    broker.config = replace(broker.config, wire_dtype="bf16")
    assert first_round(training, 2) == [H] * CHUNKS
    saved = training.worker.state_dict()
    assert saved["resume"]["fragments"][0]["residual"] is None
    broker.config = replace(broker.config, wire_dtype=CODEC)
    assert first_round(training, 3) == [Sender().sends(H)] * CHUNKS, "nothing old is sent"
