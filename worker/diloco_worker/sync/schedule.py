"""Whose turn it is: the cycle of H steps, the cursor in the sequence of rounds, who may be waited for.

Rounds form one sequence, round n concerns fragment n mod P (docs/specification.md, section 7). A
worker goes through it with a *cursor*: the round that its next push is meant for. P *slots* in each
cycle of H optimizer steps say when (Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512). An
*in-flight push* is in the round that it was pushed at until the broker names another.

The rule that keeps workers from waiting for each other in a circle: **a push is waited for only if its
round is not beyond the cursor.** Then this worker has a push in every round that is still to close
before that one. The cursor therefore never passes a round that may still need this worker:

- A push moves it by one, and so does a round that is over without this worker.
- A fragment's round n is named only once its round n - P is closing, so the cursor may move to
  n - P + 1 at once: that is how a late worker catches up. Not further, since a broker may take chunks
  before their round is open, and the rounds up to it still want theirs.
- Every round up to the one that a version was made in is over.
- A push that was merged without the broker ever having named its round gives back the one it was pushed
  at: an earlier round may have taken it.
- A push that ended without being counted gives its round back, unless it came too late for it: then that
  round is over.
- No round is given back that is known to be over.

At a welcome the rounds of in-flight pushes are a guess until the broker has answered each of them, which
it does at once. Until then all of them may be waited for: one may have been counted long ago.

In asynchronous mode there are no common rounds: the cursor only goes through the fragments in order, and
every in-flight push may be waited for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from diloco_protocol.fragments import slots
from diloco_protocol.messages import Standing


class TurnState(str, Enum):
    """The state of the fragment of the cursor's round."""

    FREE = "free"  # nothing in flight: push
    BUSY = "busy"  # its last push is under way for an earlier round: that comes first
    TAKEN = "taken"  # its push is in flight for this round
    PAST = "past"  # its push is in a later round: this one is over


@dataclass(frozen=True)
class SchedulePlace:
    """A worker's place in its cycle of slots, for a checkpoint."""

    sync_every: int
    slot: int
    cursor: int


class RoundSchedule:
    """The cycle and the cursor of one worker. Raises UsageError where H is below P.

    `step` is the current one, `cycle_start` the step after which the current cycle began.
    """

    def __init__(
        self,
        sync_every: int,
        num_fragments: int,
        *,
        common: bool = True,
        step: int = 0,
        cycle_start: int = 0,
    ) -> None:
        self.num_fragments = num_fragments  # P
        self.common = common  # rounds are common to all workers (synchronous mode)
        self.cursor = 0  # the round that the next push is meant for
        # By fragment in flight, the round that it is part of; None if unknown or irrelevant.
        self.rounds: dict[int, int | None] = {}
        self.sync_every = sync_every  # H of the current cycle
        self._next_sync_every = sync_every
        self._slots = slots(sync_every, num_fragments)
        position = (step - cycle_start) % sync_every
        self.cycle_start = step - position
        self._slot = sum(1 for slot in self._slots if slot <= position)
        self._welcomed = False
        self._first_open = 0  # the first round that is not known to be over
        # By fragment in flight, the round that the cursor passed for it, until the broker has
        # named the round that it is part of.
        self._reserved: dict[int, int] = {}
        self._told: set[int] = set()  # fragments in flight whose round comes from the broker
        self._unanswered: set[int] = set()  # fragments in flight at a welcome, until their grant

    # The cycle.

    @property
    def place(self) -> SchedulePlace:
        """What `resume` continues."""
        return SchedulePlace(self.sync_every, self._slot, self.cursor)

    def position(self, step: int) -> int:
        """Steps since the cycle began."""
        return step - self.cycle_start

    def is_due(self, step: int) -> bool:
        """Whether a slot is due. One that could not be used stays due."""
        return self.position(step) >= self._slots[self._slot]

    def use_slot(self, step: int) -> None:
        """The due slot was used; after the last one the next cycle begins.

        Used late, it shifts the rest of the cycle, so that the distance to the next slot stays.
        """
        assert self.is_due(step)
        self.cycle_start += self.position(step) - self._slots[self._slot]
        self._slot += 1
        if self._slot == self.num_fragments:
            self.restart(step)

    def restart(self, step: int) -> None:
        """A new cycle begins here."""
        self.cycle_start = step
        self._slot = 0
        self._set_pace()

    def resume(
        self, place: SchedulePlace, step: int, cycle_start: int, pushes_in_flight: Collection[int]
    ) -> None:
        """Continue a previous process, with these fragments in flight."""
        self.pace(place.sync_every, step)
        self.restart(step)
        self.cycle_start, self._slot = cycle_start, place.slot
        self.rounds.update(dict.fromkeys(pushes_in_flight))
        if not self.common:  # the cursor counts where it is the worker's own
            self.cursor = place.cursor
            self._welcomed = True

    def pace(self, sync_every: int, step: int) -> None:
        """Use this H from the next cycle on, and at once in one that has had no step yet."""
        self._next_sync_every = max(sync_every, self.num_fragments)
        if self.position(step) == 0 and self._slot == 0:
            self._set_pace()

    def _set_pace(self) -> None:
        if self.sync_every != self._next_sync_every:
            self.sync_every = self._next_sync_every
            self._slots = slots(self.sync_every, self.num_fragments)

    # The cursor.

    @property
    def fragment(self) -> int:
        """The fragment whose turn it is."""
        return self.cursor % self.num_fragments

    def turn(self) -> TurnState:
        """The state of that fragment."""
        if self.fragment not in self.rounds:
            return TurnState.FREE
        round_ = self.rounds[self.fragment]
        if round_ is None or round_ < self.cursor:
            return TurnState.BUSY
        return TurnState.TAKEN if round_ == self.cursor else TurnState.PAST

    def push(self) -> int:
        """Push the fragment whose turn it is; returns it."""
        fragment = self.fragment
        assert self.turn() is TurnState.FREE, "no second delta grows over a first"
        self.rounds[fragment] = None
        if self.common:
            self.rounds[fragment] = self._reserved[fragment] = self.cursor
        self.cursor += 1
        return fragment

    def skip(self) -> None:
        """Push nothing for the cursor's round: the push in flight is in it or beyond it."""
        assert self.turn() in (TurnState.TAKEN, TurnState.PAST)
        self.cursor += 1

    def may_wait(self, fragment: int) -> bool:
        """Whether training may wait until this fragment's in-flight push is merged."""
        round_ = self.rounds.get(fragment)
        return round_ is None or round_ <= self.cursor or fragment in self._unanswered

    # What the broker says.

    def welcomed(self, first_round: int, over: Collection[int] = ()) -> None:
        """The broker names the first round that it expects of this worker.

        The in-flight pushes of the fragments `over` have ended, which is not taken in yet.
        """
        if not self.common and self._welcomed:
            return  # the order of the fragments is the worker's own
        self._welcomed = True
        self.cursor = self._first_open = first_round
        self._reserved.clear()
        self._told.clear()
        self._unanswered.clear()
        for fragment in over:
            if fragment in self.rounds:
                self.rounds[fragment] = None
        if not self.common:
            return
        waiting = self.rounds.keys() - set(over)
        self._unanswered |= waiting
        while self.fragment in waiting:
            fragment = self.fragment
            waiting.remove(fragment)
            self.rounds[fragment] = self._reserved[fragment] = self.cursor
            self.cursor += 1
        for fragment in waiting:
            self.rounds[fragment] = self.cursor + (fragment - self.cursor) % self.num_fragments

    def granted(self, fragment: int, standing: Standing, round_: int | None) -> None:
        """The broker's answer to this fragment's in-flight push, with its round."""
        self._unanswered.discard(fragment)
        if not self.common or (round_ is None and standing is not Standing.COUNTED):
            return
        reserved = self._reserved.pop(fragment, None)
        if standing is Standing.COUNTED:
            round_ = None  # whichever it was, it is over
            if fragment in self.rounds:
                self.rounds[fragment] = None
        else:
            assert round_ is not None
            self._tell(fragment, round_)
            if standing is not Standing.WAIT:
                self._is_past(round_ - self.num_fragments)
        if reserved is not None and (round_ is None or round_ < reserved):
            self._give_back(reserved)

    def deferred(self, fragment: int, round_: int) -> None:
        """Its round closed without this fragment's in-flight push, which is deferred to a later one."""
        if self.common and fragment in self.rounds:
            self._reserved.pop(fragment, None)
            self._unanswered.discard(fragment)
            self._is_past(round_ - self.num_fragments)
            self._tell(fragment, round_)

    def made(self, round_: int) -> None:
        """A version of this round arrived: it is over, and so is every one before it."""
        if self.common:
            self._is_past(round_)

    def _tell(self, fragment: int, round_: int) -> None:
        if fragment in self.rounds:
            self.rounds[fragment] = round_
            self._told.add(fragment)

    def _is_past(self, round_: int) -> None:
        self._first_open = max(self._first_open, round_ + 1)
        self.cursor = max(self.cursor, self._first_open)

    def _give_back(self, round_: int) -> None:
        before = self.cursor
        self.cursor = max(self._first_open, min(before, round_))
        while self.cursor < before and self.turn() is TurnState.TAKEN:
            self.cursor += 1

    # How in-flight pushes end.

    def merged(self, fragment: int) -> None:
        """A version contains this fragment's in-flight push."""
        reserved = self._reserved.get(fragment)
        self._end(fragment)
        if reserved is not None:
            self._give_back(reserved)

    def dropped(self, fragment: int, *, too_late: bool = False) -> None:
        """This fragment's push ended without being counted: its round may still want one.

        `too_late`: the broker dropped it because a round had closed without it: the round that the
        broker named. Where it named none, the newest version tells (`made`).
        """
        round_, was_told = self._end(fragment)
        if round_ is None:
            return
        if too_late and was_told:
            self._is_past(round_)
        else:
            self._give_back(round_)

    def _end(self, fragment: int) -> tuple[int | None, bool]:
        """Forget an in-flight push; returns its round, and whether the broker had named it."""
        round_, was_told = self.rounds.pop(fragment), fragment in self._told
        self._reserved.pop(fragment, None)
        self._told.discard(fragment)
        self._unanswered.discard(fragment)
        return round_, was_told

    def check_invariants(self) -> None:
        """Raise AssertionError when something contradicts itself; for tests."""
        assert 0 <= self._slot < self.num_fragments
        assert self._reserved.keys() | self._told | self._unanswered <= self.rounds.keys()
        for fragment, round_ in self.rounds.items():
            assert 0 <= fragment < self.num_fragments
            assert round_ is None or round_ % self.num_fragments == fragment
