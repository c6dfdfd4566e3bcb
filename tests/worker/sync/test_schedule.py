"""The cycle of slots, the cursor in the sequence of rounds, and who may be waited for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import UsageError
from diloco_protocol.fragments import slots
from diloco_protocol.messages import Standing
from diloco_worker.sync.schedule import RoundSchedule, SchedulePlace, TurnState

NEW, RESUME, WAIT, COUNTED = Standing.NEW, Standing.RESUME, Standing.WAIT, Standing.COUNTED


def due_steps(turns: RoundSchedule, steps: int, start: int = 0) -> list[int]:
    """The steps after which a slot is due, each used at once."""
    found = []
    for step in range(start + 1, start + steps + 1):
        if turns.is_due(step):
            turns.use_slot(step)
            turns.check_invariants()
            found.append(step)
    return found


@given(st.integers(1, 9), st.data())
def test_slots_of_every_cycle_are_those_of_the_plan(fragments: int, data: st.DataObject) -> None:
    every = data.draw(st.integers(fragments, 60))
    expected = [c * every + slot for c in range(3) for slot in slots(every, fragments)]
    assert due_steps(RoundSchedule(every, fragments), 3 * every) == expected


@given(st.integers(1, 9), st.data())
def test_resumed_worker_keeps_its_place_in_the_cycle(fragments: int, data: st.DataObject) -> None:
    every = data.draw(st.integers(fragments, 40))
    stop = data.draw(st.integers(0, 3 * every))
    before = RoundSchedule(every, fragments)
    due_steps(before, stop)
    after = RoundSchedule(every, fragments, step=stop, cycle_start=before.cycle_start)
    assert after.cycle_start == before.cycle_start
    assert due_steps(after, every, stop) == due_steps(before, every, stop)


def test_checkpoint_without_the_start_of_its_cycle_shifts_the_schedule() -> None:
    assert due_steps(RoundSchedule(4, 1, step=6), 8, 6) == [8, 12]
    assert due_steps(RoundSchedule(6, 3, step=9), 6, 9) == [10, 12, 14]
    assert due_steps(RoundSchedule(4, 1, step=6, cycle_start=1), 8, 6) == [9, 13]


def test_unused_slot_stays_due_and_shifts_the_rest() -> None:
    turns = RoundSchedule(6, 3)
    assert [step for step in range(1, 6) if turns.is_due(step)] == [2, 3, 4, 5]
    turns.use_slot(5)
    assert due_steps(turns, 8, 5) == [7, 9, 11, 13]
    turns.restart(14)
    assert (turns.cycle_start, turns.position(15)) == (14, 1)
    assert due_steps(turns, 6, 14) == [16, 18, 20], "a restarted cycle counts from here"


def test_another_h_is_used_from_the_next_cycle_on_or_at_once_before_its_first_step() -> None:
    turns = RoundSchedule(6, 2)
    turns.use_slot(3)
    turns.pace(4, 3)
    assert turns.sync_every == 6
    assert due_steps(turns, 11, 3) == [6, 8, 10, 12, 14]
    assert turns.sync_every == 4
    turns.pace(6, 14)
    assert due_steps(turns, 6, 14) == [17, 20]
    turns.pace(1, 20)
    assert turns.sync_every == 2, "never below the number of fragments"


def test_more_fragments_than_steps_are_refused() -> None:
    with pytest.raises(UsageError, match="sync_every 2"):
        RoundSchedule(2, 3)


def after(story: str, fragments: int = 3, *, common: bool = True) -> RoundSchedule:
    """A schedule after these calls with their arguments: "push, granted 0 wait 3, dropped 0 late"."""
    turns = RoundSchedule(2 * fragments, fragments, common=common)
    for step in story.split(", "):
        call, *words = step.split()
        values = [word for word in words if word not in ("late", "over")]
        arguments: list[Any] = [
            None if word == "-" else int(word) if word.isdigit() else Standing(word)
            for word in values
        ]
        named = {"too_late": True} if "late" in words else {}
        if "over" in words:
            *arguments, over = arguments
            arguments.append({over})
        getattr(turns, call)(*arguments, **named)
        turns.check_invariants()
    return turns


def test_pushes_follow_the_sequence_of_rounds_from_the_first_one_expected() -> None:
    turns = after("welcomed 4, push, push, push")
    assert (turns.cursor, turns.rounds) == (7, {1: 4, 2: 5, 0: 6})
    assert all(turns.may_wait(fragment) for fragment in range(3))


@pytest.mark.parametrize(
    ("fragments", "story", "cursor"),
    [
        # A late worker catches up as far as rounds are known to be over.
        (3, "push, granted 0 new 9", 7),
        (3, "push, granted 0 new 9, made 9, merged 0", 10),
        (1, "push, deferred 0 5, made 5, merged 0", 6),
        (3, "push, deferred 0 3", 1),
        (3, "push, deferred 0 3, push, push, granted 1 new 1, skip, merged 0, merged 1", 4),
        (3, "push, push, push, granted 0 wait 6, skip", 4),  # over without this worker
        # Merged before its round was named: an earlier one may have counted it, and this one need a
        # push.
        (3, "welcomed 5, push, push, merged 2", 5),
        # No round is given back that a version has shown to be over.
        (3, "push, push, made 0, merged 0", 2),
        (3, "push, push, made 0, merged 0, dropped 1", 1),
        (3, "push, push, made 0, merged 0, dropped 1, push, made 4, dropped 1", 5),
        # An in-flight push that ends uncounted gives its round back, if it was not too late for it.
        (3, "push, push, dropped 0", 0),
        (3, "push, push, granted 0 new 0, dropped 0", 0),
        (3, "push, push, granted 0 new 0, dropped 0 late", 2),
        # On a version from before round 1: too late for that one, in time for round 4.
        (3, "welcomed 4, push, dropped 1 late", 4),
        (3, "welcomed 4, push, dropped 1 late, made 4", 5),
        # A version shows that the rounds up to its own are over.
        (3, "push, made 0", 1),
        (3, "push, made 0, made 7", 8),
        (3, "push, made 0, made 7, made 3", 8),
        # After a welcome pushes in flight are assumed in the expected rounds, until the broker answers.
        (4, "push, welcomed 4", 5),
        (4, "push, welcomed 4, granted 0 counted -", 4),
        (4, "push, welcomed 4, granted 0 resume 0", 4),
        (4, "push, welcomed 4 over 0", 4),
        (4, "push, welcomed 4 over 0, merged 0", 4),
    ],
)
def test_cursor_skips_no_round_that_may_need_us(fragments: int, story: str, cursor: int) -> None:
    assert after(story, fragments).cursor == cursor


@pytest.mark.parametrize(
    ("fragments", "story", "turn"),
    [
        (1, "push", TurnState.BUSY),
        (3, "push, deferred 0 3, push, push, granted 1 new 1", TurnState.TAKEN),
        (
            3,
            "push, deferred 0 3, push, push, granted 1 new 1, skip, merged 0, merged 1",
            TurnState.FREE,
        ),
        (3, "push, push, push, granted 0 wait 6", TurnState.PAST),
        (3, "push, push, dropped 0, push", TurnState.TAKEN),
        (3, "push, push, granted 0 new 0, dropped 0, push", TurnState.TAKEN),
        (3, "welcomed 5, push, push, merged 2", TurnState.FREE),
        (4, "push, push, push, welcomed 4", TurnState.FREE),
        (4, "push, welcomed 4, granted 0 counted -", TurnState.BUSY),
        (4, "push, welcomed 4, granted 0 counted -, merged 0", TurnState.FREE),
        # An ended push is in no round after the welcome, whichever was named.
        (4, "push, granted 0 wait 8, welcomed 4 over 0", TurnState.BUSY),
        (4, "push, welcomed 4 over 0, merged 0", TurnState.FREE),
    ],
)
def test_turn_is_that_of_the_next_fragment(fragments: int, story: str, turn: TurnState) -> None:
    assert after(story, fragments).turn() is turn


@pytest.mark.parametrize(
    ("fragments", "story", "waits_for"),
    [
        (3, "push, push, granted 0 wait 3", {1}),  # rounds 0 and 1, then one beyond the cursor
        (3, "push, push, granted 0 wait 3, push", {0, 1, 2}),  # a push in each round before it
        (3, "push, push, dropped 0", set()),  # round 1 waits for our round 0
        (3, "push, push, granted 0 new 0, dropped 0", set()),
        (3, "push, granted 0 new 9", set()),
        (1, "push, deferred 0 5", {0}),
        (4, "push, push, push, merged 0, welcomed 6, granted 1 wait 9", {2}),
        (4, "push, welcomed 4, granted 0 resume 0", {0}),
        # It is counted in round 0, and the news is lost with the connection.
        (2, "welcomed 0, push, welcomed 1", {0}),
        (2, "welcomed 0, push, welcomed 1, granted 0 counted -", {0}),
        (2, "welcomed 0, push, welcomed 1, granted 0 wait 2", set()),
        (2, "welcomed 0, push, welcomed 1, deferred 0 2", set()),
    ],
)
def test_push_awaited_if_none_is_missing(fragments: int, story: str, waits_for: set[int]) -> None:
    turns = after(story, fragments)
    assert {each for each in turns.rounds if turns.may_wait(each)} == waits_for


@pytest.mark.parametrize(
    ("story", "cursor", "rounds"),
    [
        ("push, push, push, welcomed 4", 7, {0: 4, 1: 5, 2: 6}),
        # One that is not next gets the next round of its fragment.
        ("push, push, push, merged 0, welcomed 6", 7, {2: 6, 1: 9}),
    ],
)
def test_welcome_assigns_flights_to_rounds(story: str, cursor: int, rounds: dict[int, int]) -> None:
    turns = after(story, fragments=4)
    assert (turns.cursor, turns.rounds) == (cursor, rounds)


def test_asynchronous_worker_waits_for_every_push_and_keeps_its_order() -> None:
    turns = after("welcomed 0, push, push, granted 0 wait -, welcomed 0, made 7", common=False)
    assert (turns.cursor, turns.rounds) == (2, {0: None, 1: None})
    turns.dropped(0)
    assert (turns.cursor, turns.may_wait(1)) == (2, True)
    resumed = after("welcomed 6", fragments=2, common=False)
    resumed.resume(SchedulePlace(4, 0, 1), 0, 0, [])
    assert resumed.push() == 1, "regardless of other workers' pushes"


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60))
def test_no_fragment_is_in_flight_twice(fragments: int, script: list[tuple[int, int]]) -> None:
    turns = RoundSchedule(fragments, fragments)
    unanswered: set[int] = set()
    for action, number in script:
        fragment = number % fragments
        flying = fragment in turns.rounds
        match action:
            case 0 if turns.turn() is TurnState.FREE:
                before = dict(turns.rounds)
                fragment = turns.push()
                assert fragment not in before
            case 0 if turns.turn() is not TurnState.BUSY:
                turns.skip()
            case 1:
                turns.welcomed(number)
                assert turns.cursor >= number
            case 2 if flying:
                turns.granted(fragment, (NEW, RESUME, WAIT, COUNTED)[number // 11], number)
            case 3:
                turns.deferred(fragment, number)
            case 4 if flying:
                turns.merged(fragment)
            case 5 if flying:
                turns.dropped(fragment, too_late=number % 2 == 0)
            case _:
                pass
        if action == 1:
            unanswered = set(turns.rounds)
        elif action > 1 and (flying or action == 3):
            unanswered.discard(fragment)
        turns.check_invariants()
        for each, round_ in turns.rounds.items():
            may_wait = round_ is None or round_ <= turns.cursor or each in unanswered
            assert turns.may_wait(each) is may_wait
