"""What waits in the broker: tensor work, and acknowledgements that go out together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_broker.core.effects import DropInitial, Fold, Send, Step, StoreInitial, TensorWork
from diloco_broker.core.rounds.uploads import UPLOAD_WINDOW_TOTAL, Window
from diloco_broker.shell.effects import Acks
from diloco_broker.shell.tensor_work.queue import PASSED_BY, WorkQueue
from diloco_protocol.messages import Ack


def fold(index: int, worker: str = "a") -> Fold:
    return Fold(0, index, worker, 1, 1.0, "fp32", None)


def step(index: int) -> Step:
    return Step(0, index, 1.0, 0)


def test_folds_are_done_in_the_order_of_chunks_and_steps_before_them() -> None:
    queue = WorkQueue()
    assert not queue
    for work in (
        fold(4),
        fold(5),
        fold(3, "b"),
        fold(4, "b"),
        step(2),
        step(1),
        StoreInitial(0, 0),
    ):
        queue.add(work)
    done = [queue.take() for _ in range(7)]
    assert done[:2] == [step(2), step(1)]
    assert done[2:6] == [fold(3, "b"), fold(4), fold(4, "b"), fold(5)]
    assert isinstance(done[6], StoreInitial)
    assert not queue
    with pytest.raises(IndexError):
        queue.take()


@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.booleans(), max_size=30))
def test_first_of_the_queue_is_what_is_taken_next(indexes: list[int], takes: list[bool]) -> None:
    queue, left = WorkQueue(), 0
    for index, is_taken in zip(indexes, [*takes, *[False] * len(indexes)], strict=False):
        queue.add(step(index) if index == 5 else fold(index))
        left += 1
        if is_taken:
            first = next(iter(queue))
            assert queue.peek() is first
            assert queue.take() is first
            left -= 1
        assert len(list(queue)) == left
        assert bool(queue) == bool(left)


def test_fold_that_is_passed_by_has_its_turn_after_a_while() -> None:
    """Otherwise those behind could keep the one ahead waiting until it takes its connection for dead."""
    queue = WorkQueue()
    queue.add(fold(1000, "ahead"))
    taken: list[TensorWork] = []
    for index in range(200):
        queue.add(fold(index, "behind"))
        taken.append(queue.take())
    assert taken.index(fold(1000, "ahead")) == PASSED_BY
    assert taken[:PASSED_BY] == [fold(index, "behind") for index in range(PASSED_BY)]
    assert queue.take() == fold(199, "behind")
    assert not queue


def test_extra_credit_stays_below_the_total_window() -> None:
    """A worker may offer its push again and again, and each grant leaves what the one before gave."""
    upload = Window(UPLOAD_WINDOW_TOTAL - 8, window=6, widest=16)
    given = [upload.acknowledged(is_calm=True) for _ in range(6)]
    assert given == [0, 0, 0, 0, 0, 2]
    assert upload.credit == UPLOAD_WINDOW_TOTAL
    assert upload.window == 8


def test_places_are_forgotten_and_nothing_else() -> None:
    queue = WorkQueue()
    for work in (StoreInitial(0, 0), fold(0), step(1), StoreInitial(0, 1)):
        queue.add(work)
    queue.add(DropInitial((0,)))
    assert list(queue) == [step(1), fold(0)]


def test_acknowledgements_of_one_push_go_out_as_one_message() -> None:
    acks = Acks()
    for ack in (Ack(7, 0, (1,)), Ack(7, 0, (2,), 6), Ack(8, 0, (3,)), Ack(7, 0, (1,))):
        acks.add(b"a", ack)
    acks.add(b"b", Ack(7, 0, (5,)))
    assert acks.chunks == 5
    assert acks.take() == [
        Send(b"a", Ack(7, 0, (1, 2, 1), 6)),
        Send(b"a", Ack(8, 0, (3,))),
        Send(b"b", Ack(7, 0, (5,))),
    ]
    assert acks.chunks == 0
    assert acks.take() == []
