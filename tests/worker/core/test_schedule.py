"""The cycle of slots, the cursor in the sequence of rounds, and who may be waited for."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_protocol import UsageError
from diloco_protocol.fragments import slots
from diloco_protocol.messages import Standing
from diloco_worker.core.sync.schedule import RoundSchedule, TurnState

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


def test_slot_that_could_not_be_used_stays_due_and_shifts_the_rest() -> None:
    turns = RoundSchedule(6, 3)
    assert not turns.is_due(1)
    assert all(turns.is_due(step) for step in (2, 3, 4, 5))
    turns.use_slot(5)
    assert due_steps(turns, 8, 5) == [7, 9, 11, 13]


def test_restarted_cycle_counts_from_here() -> None:
    turns = RoundSchedule(6, 3)
    turns.use_slot(2)
    turns.restart(3)
    assert (turns.cycle_start, turns.position(4)) == (3, 1)
    assert due_steps(turns, 6, 3) == [5, 7, 9]


def test_another_h_is_used_from_the_next_cycle_on() -> None:
    turns = RoundSchedule(6, 2)
    turns.use_slot(3)
    turns.pace(4, 3)
    assert turns.sync_every == 6
    assert due_steps(turns, 11, 3) == [6, 8, 10, 12, 14]
    assert turns.sync_every == 4


def test_another_h_is_used_at_once_in_a_cycle_without_a_step() -> None:
    turns = RoundSchedule(6, 1)
    turns.use_slot(6)
    turns.pace(3, 6)
    assert turns.sync_every == 3
    assert due_steps(turns, 6, 6) == [9, 12]


def test_h_never_falls_below_the_number_of_fragments() -> None:
    turns = RoundSchedule(6, 3)
    turns.pace(1, 0)
    assert turns.sync_every == 3


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


def test_flight_that_ends_uncounted_gives_its_round_back() -> None:
    turns = pushed(RoundSchedule(6, 3), 0, 1)
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


# All together: workers that follow the rule never wait for each other in a circle.

MOVES = 8000


@dataclass
class Site:
    """A worker of the game: a training loop that yields wherever time may pass."""

    name: int
    turns: RoundSchedule
    delay: int
    sent: deque[tuple[Any, ...]] = field(default_factory=deque)  # to the referee
    heard: deque[tuple[Any, ...]] = field(default_factory=deque)
    flights: dict[int, int] = field(default_factory=dict)  # push ids
    landed: Counter[int] = field(default_factory=Counter)  # by push id
    pushed: int = 0

    def train(self) -> Iterator[None]:
        step = 0
        wait_at: dict[int, int] = {}
        while True:
            yield
            step += 1
            for fragment in [f for f, at in wait_at.items() if at <= step]:
                del wait_at[fragment]
                yield from self.wait(fragment)
            if not self.turns.is_due(step):
                continue
            if self.turns.turn() is TurnState.BUSY:
                yield from self.wait(self.turns.fragment)
                if self.turns.turn() is TurnState.BUSY:
                    continue
            self.turns.use_slot(step)
            fragment = self.turns.fragment
            if self.turns.turn() is TurnState.FREE:
                self.turns.push()
                self.pushed += 1
                self.flights[fragment] = 1000 * self.name + self.pushed
                self.sent.append(("push", fragment, self.flights[fragment]))
                wait_at[fragment] = step + self.delay
            else:
                if self.turns.turn() is TurnState.TAKEN:
                    wait_at[fragment] = step + self.delay
                self.turns.skip()
            if self.delay == 0 and wait_at.pop(fragment, None) is not None:
                yield from self.wait(fragment)

    def wait(self, fragment: int) -> Iterator[None]:
        flight = self.flights.get(fragment)
        while flight is not None and self.flights.get(fragment) == flight:
            if not self.turns.may_wait(fragment):
                return
            yield

    def hears(self) -> None:
        kind, *what = self.heard.popleft()
        if kind == "welcome":
            self.turns.welcomed(what[0])
            self.sent.extend(("push", f, push_id) for f, push_id in self.flights.items())
            return
        fragment, push_id, *rest = what
        if self.flights.get(fragment) != push_id:
            return
        if kind == "grant":
            self.turns.granted(fragment, *rest)
        elif kind == "carried":
            self.turns.carried(fragment, *rest)
        else:
            del self.flights[fragment]
            if kind == "landed":
                self.landed[push_id] += 1
                self.turns.landed(fragment)
            else:
                self.turns.dropped(fragment, too_late=True)
        self.turns.check_invariants()


class Referee:
    """The sequence of rounds as a broker keeps it.

    Args:
        quorum: whole pushes that close a round; below the number of workers pushes are taken before
            their round is open, and what is not whole when it closes is carried or dropped.
    """

    def __init__(self, sites: list[Site], fragments: int, quorum: int, *, drops: bool) -> None:
        self.sites = sites
        self.fragments = fragments
        self.quorum = quorum
        self.drops = drops
        self.open = 0
        self.pool: dict[tuple[int, int], int] = {}  # push id by fragment and worker
        self.whole: set[int] = set()
        self.begun: set[int] = set()
        self.counted: set[int] = set()

    @property
    def stages(self) -> bool:
        return self.quorum < len(self.sites)

    def next_of(self, fragment: int) -> int:
        return self.open + (fragment - self.open) % self.fragments

    def hears(self, site: Site) -> None:
        _, fragment, push_id = site.sent.popleft()
        if push_id in self.counted:
            site.heard.append(("grant", fragment, push_id, COUNTED, None))
            site.heard.append(("landed", fragment, push_id))
            return
        self.pool[fragment, site.name] = push_id
        self.begin(site, fragment, push_id)

    def begin(self, site: Site, fragment: int, push_id: int) -> None:
        number = self.next_of(fragment)
        if self.stages or number == self.open:
            standing = RESUME if push_id in self.begun else NEW
            self.begun.add(push_id)
            site.heard.append(("grant", fragment, push_id, standing, number))
        else:
            site.heard.append(("grant", fragment, push_id, WAIT, number))

    def completes(self, push_id: int) -> None:
        self.whole.add(push_id)
        while self.close():
            pass

    def close(self) -> bool:
        fragment = self.open % self.fragments
        here = {name: p for (f, name), p in self.pool.items() if f == fragment}
        chosen = {name: push_id for name, push_id in here.items() if push_id in self.whole}
        if len(chosen) < self.quorum:
            return False
        for name, push_id in here.items():
            site = self.sites[name]
            if push_id in self.whole:
                del self.pool[fragment, name]
                self.counted.add(push_id)
                site.heard.append(("landed", fragment, push_id))
            elif self.drops:
                del self.pool[fragment, name]
                site.heard.append(("dropped", fragment, push_id))
            else:
                site.heard.append(("carried", fragment, push_id, self.open + self.fragments))
        self.open += 1
        following = self.open % self.fragments
        for (f, name), push_id in list(self.pool.items()):
            if f == following and push_id not in self.begun:
                self.begin(self.sites[name], f, push_id)
        return True

    def breaks(self, site: Site) -> None:
        """A connection breaks, and its worker comes back: what was under way on it is lost."""
        site.sent.clear()
        site.heard.clear()
        site.heard.append(("welcome", self.open))


def play(seed: int, *, quorum: int, drops: bool) -> tuple[int, list[Site]]:
    """A long game of three workers. Returns by how many rounds its second half came forward."""
    dice = random.Random(seed)
    fragments = dice.choice([1, 2, 3, 4])
    delay = dice.choice([0, 1, 2])
    sites = [
        Site(name, RoundSchedule(dice.choice([4, 5, 9]), fragments), min(delay, 4 // fragments))
        for name in range(3)
    ]
    referee = Referee(sites, fragments, quorum, drops=drops)
    loops = [site.train() for site in sites]
    weights = [dice.choice([1, 3, 10]) for _ in sites]  # how fast each of them is
    halfway = 0
    for move in range(MOVES):
        if move == MOVES // 2:
            halfway = referee.open
        (number,) = dice.choices(range(3), weights)
        site = sites[number]
        match dice.randrange(5):
            case 0 | 1:
                next(loops[number])
            case 2 if site.heard:
                site.hears()
            case 3 if site.sent:
                referee.hears(site)
            case 4:
                under_way = [
                    p
                    for (_, name), p in referee.pool.items()
                    if name == number and p in referee.begun - referee.whole
                ]
                if under_way:
                    referee.completes(dice.choice(under_way))
                elif dice.random() < 0.005:
                    referee.breaks(site)
            case _:
                pass
    return referee.open - halfway, sites


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("quorum", [3, 2, 1])
def test_rounds_go_on_for_ever_whoever_is_late_or_comes_back(quorum: int, drops: bool) -> None:
    for seed in range(10):
        rounds, sites = play(seed, quorum=quorum, drops=drops)
        assert rounds > 5, f"the game with seed {seed} is stuck"
        for site in sites:
            assert max(site.landed.values(), default=0) <= 1, "a delta counted twice"
            if quorum == 3:
                assert len(site.landed) > 10, f"seed {seed}: worker {site.name} is left behind"
