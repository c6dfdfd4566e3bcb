"""The cycle of slots, the cursor in the sequence of rounds, and who may be waited for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_protocol import UsageError
from diloco_protocol.fragments import slots
from diloco_protocol.messages import Standing
from diloco_worker.core.sync.schedule import RoundSchedule, SchedulePlace, TurnState

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


# The cycle.


@settings(deadline=None)
@given(st.integers(1, 9), st.data())
def test_slots_of_every_cycle_are_those_of_the_plan(fragments: int, data: st.DataObject) -> None:
    every = data.draw(st.integers(fragments, 60))
    expected = [c * every + slot for c in range(3) for slot in slots(every, fragments)]
    assert due_steps(RoundSchedule(every, fragments), 3 * every) == expected


@settings(deadline=None)
@given(st.integers(1, 9), st.data())
def test_worker_that_goes_on_from_a_checkpoint_keeps_its_place_in_the_cycle(
    fragments: int, data: st.DataObject
) -> None:
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


def test_slot_that_could_not_be_used_stays_due_and_shifts_the_rest() -> None:
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


# The cursor.


def pushed(turns: RoundSchedule, *fragments: int) -> RoundSchedule:
    assert [turns.push() for _ in fragments] == list(fragments)
    return turns


def test_pushes_follow_the_sequence_of_rounds_from_the_first_one_expected() -> None:
    turns = RoundSchedule(6, 3)
    turns.welcomed(4)
    pushed(turns, 1, 2, 0)
    assert (turns.cursor, turns.rounds) == (7, {1: 4, 2: 5, 0: 6})
    assert all(turns.may_wait(fragment) for fragment in range(3))


def test_no_second_delta_of_a_fragment_is_pushed_over_a_first() -> None:
    turns = pushed(RoundSchedule(6, 1), 0)
    assert turns.turn() is TurnState.BUSY
    with pytest.raises(AssertionError, match="no second delta"):
        turns.push()


def test_flight_in_a_round_beyond_the_cursor_is_not_waited_for() -> None:
    turns = pushed(RoundSchedule(6, 3), 0, 1)  # in rounds 0 and 1, the cursor is at 2
    turns.granted(0, WAIT, 3)
    assert not turns.may_wait(0)
    assert turns.may_wait(1)
    pushed(turns, 2)
    assert turns.may_wait(0), "now there is a push of ours in each round before it"


def test_carried_flight_takes_the_next_slot_of_its_fragment() -> None:
    turns = pushed(RoundSchedule(6, 3), 0)
    turns.carried(0, 3)
    assert turns.cursor == 1
    pushed(turns, 1, 2)
    turns.granted(1, NEW, 1)
    assert turns.turn() is TurnState.TAKEN
    turns.skip()
    turns.landed(0)
    turns.landed(1)
    assert (turns.cursor, turns.turn()) == (4, TurnState.FREE)


def test_round_that_is_over_without_this_worker_is_passed_by() -> None:
    turns = RoundSchedule(6, 3)
    pushed(turns, 0, 1, 2)
    turns.granted(0, WAIT, 6)
    assert turns.turn() is TurnState.PAST
    turns.skip()
    assert turns.fragment == 1


def test_late_worker_catches_up_as_far_as_rounds_are_known_to_be_over() -> None:
    turns = pushed(RoundSchedule(6, 3), 0)
    turns.granted(0, NEW, 9)  # so round 6 of this fragment has closed
    assert turns.cursor == 7
    assert not turns.may_wait(0)
    turns.made(9)
    turns.landed(0)
    assert turns.cursor == 10, "and round 9 is over now"


def test_single_fragment_always_waits_for_the_round_it_is_carried_into() -> None:
    turns = pushed(RoundSchedule(6, 1), 0)
    turns.carried(0, 5)
    assert turns.may_wait(0)
    turns.made(5)
    turns.landed(0)
    assert turns.cursor == 6


def test_flight_that_landed_before_its_round_was_named_gives_back_the_one_it_was_pushed_at() -> (
    None
):
    turns = RoundSchedule(6, 3)
    turns.welcomed(5)
    pushed(turns, 2, 0)
    turns.landed(2)  # round 2 may have taken it: round 5 may still want a push
    assert (turns.cursor, turns.turn()) == (5, TurnState.FREE)


def test_flight_gives_back_no_round_that_a_version_has_shown_to_be_over() -> None:
    turns = pushed(RoundSchedule(6, 3), 0, 1)
    turns.made(0)
    turns.landed(0)
    assert turns.cursor == 2
    turns.dropped(1)
    assert turns.cursor == 1
    pushed(turns, 1)
    turns.made(4)
    turns.dropped(1)
    assert turns.cursor == 5


@pytest.mark.parametrize("is_named", [False, True])
def test_flight_that_ends_uncounted_gives_its_round_back(is_named: bool) -> None:
    turns = pushed(RoundSchedule(6, 3), 0, 1)
    if is_named:
        turns.granted(0, NEW, 0)
    turns.dropped(0)
    assert turns.cursor == 0
    assert not turns.may_wait(1), "round 1 waits for our round 0"
    pushed(turns, 0)
    assert turns.turn() is TurnState.TAKEN


def test_flight_that_came_too_late_does_not_give_back_the_round_that_is_over() -> None:
    turns = pushed(RoundSchedule(6, 3), 0, 1)
    turns.granted(0, NEW, 0)
    turns.dropped(0, too_late=True)
    assert (turns.cursor, turns.fragment) == (2, 2)


def test_flight_that_came_too_late_for_a_round_nobody_named_gives_back_its_own() -> None:
    turns = RoundSchedule(6, 3)
    turns.welcomed(4)
    pushed(turns, 1)  # on a version from before round 1: too late for that one, in time for round 4
    turns.dropped(1, too_late=True)
    assert turns.cursor == 4
    turns.made(4)
    assert turns.cursor == 5, "now it is known that round 4 is over"


def test_version_tells_that_the_rounds_up_to_its_own_are_over() -> None:
    turns = pushed(RoundSchedule(6, 3), 0)
    turns.made(0)
    assert turns.cursor == 1
    turns.made(7)
    assert turns.cursor == 8
    turns.made(3)
    assert turns.cursor == 8
    alone = RoundSchedule(6, 3, common=False)
    alone.made(7)
    assert alone.cursor == 0


def test_asynchronous_worker_waits_for_every_flight_and_keeps_its_order() -> None:
    turns = RoundSchedule(6, 3, common=False)
    turns.welcomed(0)
    pushed(turns, 0, 1)
    turns.granted(0, WAIT, None)
    turns.welcomed(0)
    assert (turns.cursor, turns.rounds) == (2, {0: None, 1: None})
    turns.dropped(0)
    assert turns.cursor == 2
    assert turns.may_wait(1)


def test_resumed_asynchronous_worker_keeps_its_order_whatever_others_have_pushed() -> None:
    turns = RoundSchedule(4, 2, common=False)
    turns.welcomed(6)
    turns.resume(SchedulePlace(4, 0, 1), 0, 0, [])
    assert turns.push() == 1


# Welcomes.


def test_welcome_finds_flights_in_the_rounds_that_are_expected() -> None:
    turns = pushed(RoundSchedule(8, 4), 0, 1, 2)
    turns.welcomed(4)
    assert (turns.cursor, turns.rounds) == (7, {0: 4, 1: 5, 2: 6})
    assert turns.turn() is TurnState.FREE


def test_flight_that_is_not_next_gets_the_next_round_of_its_fragment() -> None:
    turns = pushed(RoundSchedule(8, 4), 0, 1, 2)
    turns.landed(0)
    turns.welcomed(6)
    assert (turns.cursor, turns.rounds) == (7, {2: 6, 1: 9})
    turns.granted(1, WAIT, 9)
    assert not turns.may_wait(1)


def test_flight_that_turns_out_to_be_counted_gives_back_the_round_it_was_taken_for() -> None:
    turns = pushed(RoundSchedule(8, 4), 0)
    turns.welcomed(4)
    assert turns.cursor == 5
    turns.granted(0, COUNTED, None)
    assert (turns.cursor, turns.turn()) == (4, TurnState.BUSY)
    turns.landed(0)
    assert turns.turn() is TurnState.FREE


@pytest.mark.parametrize("answer", [COUNTED, WAIT, None])
def test_flight_is_waited_for_after_a_welcome_until_its_answer_has_come(
    answer: Standing | None,
) -> None:
    turns = RoundSchedule(6, 2)
    turns.welcomed(0)
    pushed(turns, 0)  # it is counted in round 0, and the news is lost with the connection
    turns.welcomed(1)
    assert turns.rounds == {0: 2}, "as far as anybody can tell"
    assert turns.may_wait(0)
    if answer is None:
        turns.carried(0, 2)
    else:
        turns.granted(0, answer, None if answer is COUNTED else 2)
    assert turns.may_wait(0) is (answer is COUNTED)


def test_flight_that_belongs_to_an_earlier_round_gives_back_the_one_it_was_taken_for() -> None:
    turns = pushed(RoundSchedule(8, 4), 0)
    turns.welcomed(4)
    turns.granted(0, RESUME, 0)
    assert turns.cursor == 4
    assert turns.may_wait(0)


def test_flight_that_ended_before_the_welcome_is_in_no_round_after_it() -> None:
    turns = pushed(RoundSchedule(8, 4), 0)
    turns.welcomed(4, over={0})
    assert turns.cursor == 4
    turns.landed(0)
    assert (turns.cursor, turns.turn()) == (4, TurnState.FREE)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60))
def test_whatever_the_broker_says_no_fragment_flies_twice_and_no_wait_goes_beyond_the_cursor(
    fragments: int, script: list[tuple[int, int]]
) -> None:
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
                turns.carried(fragment, number)
            case 4 if flying:
                turns.landed(fragment)
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
