"""Modes: streaming, staged and asynchronous updates.

Each mode is a module with the functions of `Rules` and a row of `MODES`, which has the options that
select it and what the rest of the broker needs to know about it. No other code tests for a mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from diloco_broker.config import BrokerConfig
from diloco_broker.core.effects import CountedPush, Effects
from diloco_broker.core.events import WorkDone, WorkRefused
from diloco_broker.core.members.members import Member
from diloco_broker.core.members.start import Start
from diloco_broker.core.rounds import asynchronous, staged, streaming
from diloco_broker.core.rounds.decision import Decision, Limits, Reason, Tally, decide
from diloco_broker.core.rounds.round import Phase, PushInProgress, RemoteChunk, Update
from diloco_broker.core.state import RunState
from diloco_broker.standby import fence
from diloco_protocol.messages import Commit, Push


class Rules(Protocol):
    """The functions of a mode. Only `open_round` is called while there is no `state.round`."""

    def open_round(self, state: RunState, number: int) -> Effects:
        """Open the next update and enter the pushes that were deferred to it."""

    def check(self, state: RunState, member: Member, push: Push) -> None:
        """Raise ProtocolError for a push that cannot be offered now."""

    def offer(self, state: RunState, member: Member, push: Push) -> Effects:
        """Enter or defer an offered push that passed `check`."""

    def find(self, state: RunState, worker_id: str, push: Push) -> PushInProgress | None:
        """The push in progress; None if it has ended or is unknown."""

    def done(self, state: RunState, event: WorkDone) -> Effects:
        """The tensor work on a chunk is done."""

    def refused(self, state: RunState, event: WorkRefused) -> Effects:
        """A chunk was not finite."""

    def lost(self, state: RunState, chunk: RemoteChunk) -> Effects:
        """A relay has lost a chunk that it held."""

    def commit(self, state: RunState, member: Member, commit: Commit) -> None:
        """A worker has sent every chunk of a push."""

    def look(self, state: RunState, /) -> Effects:
        """Update what the decision depends on, such as the time at which a quorum was reached."""

    def tally(self, state: RunState) -> Tally:
        """Count the contributions of the open update."""

    def close(self, state: RunState) -> Effects:
        """Begin the outer step, or refuse a push that cannot be in it. Only `close_if_due` calls it."""

    def leave(self, state: RunState, worker_id: str) -> Effects:
        """A worker died or left."""

    def do_without(self, state: RunState, worker_id: str) -> Effects:
        """Stop waiting in this round for what a worker has not delivered."""

    def tick(self, state: RunState, /) -> Effects:
        """Time has passed."""

    def tell(self, state: RunState, ended: Update, pushes: Sequence[CountedPush]) -> Effects:
        """The log line of an update that has ended."""

    def released(self, state: RunState, /) -> Effects:
        """A version was released, and the next update is open."""


@dataclass(frozen=True)
class Mode:
    """A mode as the rest of the broker sees it."""

    rules: Rules
    # The option that selects it; empty if none does.
    asked_for_by: Callable[[BrokerConfig], str] = lambda _: ""
    # If submissions count completely or not at all: their greatest number, whose each is, and its bytes,
    # from the bytes of each fragment. None: chunks are added as they arrive.
    room_needed: Callable[[BrokerConfig, Sequence[int]], tuple[int, str, int]] | None = None
    # Workers wait for each other, and an outer step takes the mean of a round. Otherwise each push is a
    # gradient with weight 1 / workers, and takes one of a few admission slots.
    has_rounds: bool = True
    # A version may be made by any number of gradients.
    takes_any_number: Callable[[BrokerConfig], bool] = lambda _: False

    @property
    def needs_whole(self) -> bool:
        return self.room_needed is not None


# A run has the first mode that an option selects, or the last one.
MODES: dict[str, Mode] = {
    "async": Mode(
        asynchronous,
        asked_for_by=lambda config: "--mode async" if config.is_async else "",
        room_needed=asynchronous.room_needed,
        has_rounds=False,
        takes_any_number=lambda config: config.fixed_grace > 0,
    ),
    "staged": Mode(staged, asked_for_by=staged.asked_for_by, room_needed=staged.room_needed),
    "streaming": Mode(streaming),
}


def name_of(config: BrokerConfig) -> str:
    """The mode of a run, a key of `MODES`; it never changes in a broker's lifetime."""
    return next((name for name, mode in MODES.items() if mode.asked_for_by(config)), "streaming")


def mode_of(config: BrokerConfig) -> Mode:
    return MODES[name_of(config)]


def close_if_due(state: RunState) -> Effects:
    """Close the open round if the decision says so; no other code closes one."""
    while True:
        held, round_, why = _held(state), state.round, state.decision.why
        is_closing = round_ is not None and round_.phase is Phase.CLOSING
        if is_closing and why is not None and why.reason is (held or Reason.CLOSING):
            return  # unchanged: most events are chunks of a closing round
        rules, not_open = rules_of(state), _not_open(state)
        if held is None and not_open is None:
            yield from rules.look(state)
        found = _decision(state, held, not_open)
        state.decision = found.after(state.decision)
        if not found.closes:
            return
        yield from rules.close(state)


def decision(state: RunState) -> Decision:
    """Evaluate `decide` on the current state."""
    return _decision(state, _held(state), _not_open(state))


def _decision(state: RunState, held: Reason | None, not_open: Reason | None) -> Decision:
    if not_open is not None:
        waits = held is None and state.start is Start.WAITING_FOR_HOLDERS
        until = state.recovery.waits_until if waits else None
        return decide(None, Limits(held or not_open, held_until=until), state.run_time)
    has_barrier = state.round is not None and state.round.barrier is not None
    limits = Limits(held, state.floor if has_barrier else 1, state.grace_s)
    return decide(rules_of(state).tally(state), limits, state.run_time)


def _held(state: RunState) -> Reason | None:
    """Return why no round may close at all; None if one may."""
    if state.stopping is not None:
        return Reason.STOPPING
    if state.ending.is_over:
        return Reason.OVER
    has_standby = state.standby is not None
    if has_standby and not fence.may_release(state):
        return Reason.LEASE
    if state.paused_at is not None:
        return Reason.PAUSED
    return Reason.TAKEOVER if has_standby and fence.holds_rounds(state) else None


def _not_open(state: RunState) -> Reason | None:
    """Return why no round is open; None if one is."""
    round_ = state.round
    if round_ is None:
        return Reason.PARAMETERS
    return Reason.CLOSING if round_.phase is Phase.CLOSING else None


def rules_of(state: RunState) -> Rules:
    return MODES[state.mode].rules
