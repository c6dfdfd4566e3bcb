"""The state machine of the broker: `handle(event, now)` returns the effects to execute.

The core uses no clock, socket, thread, file or tensor: time is an argument, payloads are opaque,
randomness is passed in. This module maps events and messages to their handlers, functions of the
`RunState` that yield effects.

A handler that refuses a message raises ProtocolError before it changes anything; the sender receives the
error, other workers are not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.config.declaration import AUTO
from diloco_broker.core import effects, events
from diloco_broker.core.data import units
from diloco_broker.core.effects import Effects
from diloco_broker.core.members import (
    admission,
    descriptions,
    liveness,
    permissions,
    probes,
    seeding,
)
from diloco_broker.core.members.members import Member
from diloco_broker.core.members.run_model import RunModel
from diloco_broker.core.operations import commands, ending, holding, refusals
from diloco_broker.core.relays import combining, link
from diloco_broker.core.rounds import pushes, sequence
from diloco_broker.core.rounds.grace import NO_OVERLAP
from diloco_broker.core.rounds.modes import close_if_due, decision, name_of
from diloco_broker.core.rounds.round import InvariantBroken, Phase
from diloco_broker.core.state import RunState
from diloco_broker.core.story import Story
from diloco_broker.core.versions import checkpoints, pulls
from diloco_broker.core.versions.record import InitialModel, Resumption
from diloco_broker.standby import fence
from diloco_broker.standby.lease import Ballot, Lease
from diloco_protocol import messages
from diloco_protocol.errors import Code, ProtocolError


def _surroundings(state: RunState, event: events.Surroundings) -> Effects:
    """The broker has started: what surrounds it, and a warning of an option without effect."""
    state.surroundings = event
    if state.config.grace == AUTO and not state.config.overlap_steps():
        yield effects.warning(NO_OVERLAP)


def _outer_groups(state: RunState, event: events.OuterGroups) -> Effects:
    state.outer_groups = event.groups
    yield from ()


def _tick(state: RunState, event: events.Tick) -> Effects:
    yield from link.tick(state, lost=event.lost)
    yield from liveness.tick(state, event)


# The handler of each event; those of messages are below.
RULES: dict[type, Callable[[RunState, Any], Effects]] = {
    events.Surroundings: _surroundings,
    events.OuterGroups: _outer_groups,
    events.Split: descriptions.split,
    events.Malformed: refusals.malformed,
    events.KeysRevoked: link.revoked,
    events.ConnectionEnded: refusals.connection_ended,
    events.PeerGone: link.peer_gone,
    events.Tick: _tick,
    events.StoodStill: liveness.stood_still,
    events.WorkDone: pushes.done,
    events.WorkRefused: link.work_refused,
    events.Stepped: sequence.stepped,
    events.InitialStored: seeding.stored,
    events.InitialRefused: seeding.refused,
    events.Saved: sequence.saved,
    events.SaveFailed: checkpoints.save_failed,
    events.Stop: ending.stop,
}
# Messages that may arrive on any of a worker's data connections.
ON_BULK = frozenset({messages.Chunk, messages.Credit, messages.Lane})
# Handlers of messages that any peer may send, and of those that need a session.
OF_ANYBODY: dict[type, Callable[[RunState, effects.Route, Any], Effects]] = {
    messages.Join: descriptions.join,
    messages.Describe: descriptions.describe_on,
    messages.Control: commands.control,
    messages.Probe: probes.answer,
    messages.Promise: fence.promise,
    messages.Attach: link.attach,
    messages.Gone: link.over,
}
OF_MEMBERS: dict[type, Callable[[RunState, Member, Any], Effects]] = {
    messages.Heartbeat: liveness.beat,
    messages.Push: pushes.push,
    messages.Commit: pushes.commit,
    messages.Pull: pulls.pull,
    messages.Take: units.take,
    messages.Vote: fence.vote,
    messages.Leave: admission.leave,
}


class Core:
    """Handles events: updates its `state` and returns effects.

    Args:
        config: the broker's options.
        draw: returns an unpredictable number below 2**64.
        now: the core's clock, as in every later call.
        initial: the model file, if the broker was started with one.
        resumption: the checkpoint to resume from, if any; takes precedence over `initial`.
        term: the number of takeovers of the run, if larger than the checkpoint's.
        moved_aside: names of the runs that this one replaces; their workers are refused.
    """

    def __init__(
        self,
        config: BrokerConfig,
        draw: Callable[[], int],
        now: float,
        initial: InitialModel | None = None,
        resumption: Resumption | None = None,
        *,
        term: int = 0,
        moved_aside: frozenset[str] = frozenset(),
    ) -> None:
        model = RunModel(initial, moved_aside=moved_aside)
        mode = name_of(config)
        self.state = state = RunState(config, draw, now, f"{draw():016x}", model, mode)
        state.now = state.recovers_from = now
        self._story = Story()
        if config.standby:
            state.standby = Lease(Ballot(draw, config.lease))
        if resumption is not None:
            checkpoints.resume(state, resumption)
        state.term = max(state.term, term)

    @classmethod
    def with_state(cls, state: RunState) -> Core:
        """Make a core that continues from this state, as read from a tape."""
        core = object.__new__(cls)
        core.state, core._story = state, Story()
        return core

    def handle(self, event: events.Event, now: events.Now) -> list[effects.Effect]:
        """Handle one event. Returns the effects to execute, in order.

        Raises InvariantBroken or CoreError for a bug in the core; the text has the preceding events.
        """
        holding.advance(self.state, now)
        self._story.note(event, self.state)
        try:
            return self._handle(event)
        except MemoryError:
            raise
        except Exception as error:
            raise self._story.failure(error, self.state) from error

    def _handle(self, event: events.Event) -> list[effects.Effect]:
        state = self.state
        asked_for: list[effects.Effect] = []
        try:
            if type(event) is events.Received:
                asked_for += self._message(event)
            else:
                asked_for += RULES[type(event)](state, event)
        except ProtocolError as error:
            if not isinstance(event, events.Received):
                raise
            if asked_for:
                text = f"a {event.message.kind} was refused after effects: {error}"
                raise InvariantBroken(text) from error
            asked_for += refusals.refuse(state, event.route, event.message, error)
        asked_for += close_if_due(state)
        if state.ending.without is not None:
            asked_for += ending.settle(state)
            asked_for += close_if_due(state)
        asked_for += combining.collect_due(state, event)
        if state.stopping is not None:
            asked_for += ending.finish_if_due(state, state.stopping)
        return asked_for

    def _message(self, received: events.Received) -> Effects:
        state, route, peer, message = self.state, received.route, received.peer, received.message
        if peer is not None:
            permissions.check(peer, message)
        kind = type(message)
        relay = state.relays.heard(route, state.now)
        if isinstance(message, messages.Combined) and relay is not None:
            return link.combined(state, relay, message, received.payload)
        if kind in OF_ANYBODY:
            if isinstance(message, messages.Control):
                message = permissions.signed(peer, message)
            return OF_ANYBODY[kind](state, route, message)
        on_bulk = kind in ON_BULK
        if not on_bulk and kind not in OF_MEMBERS:
            text = f"A {message.kind} message is only sent by the broker."
            raise ProtocolError(Code.NOT_ALLOWED, text)
        session: bytes | None = getattr(message, "session", None)
        if session is None and isinstance(message, messages.Pull | messages.Credit):
            return pulls.observe(state, route, message)
        member = state.members.with_session(session or b"")
        is_here = member is not None and (on_bulk or member.control == route)
        is_own = peer is None or (member is not None and permissions.is_own(peer, member))
        if member is None or not is_here or not is_own:
            text = "Unknown session on this connection; join again."
            return iter([effects.Send(route, messages.Rejoin(state.epoch, text))])
        is_lane = member.processes > 1 and route != member.control
        if not (is_lane and member.liveness.disconnected_at is not None):
            # Other ranks of a worker may continue for a while after its leader died.
            member.liveness.hear(state.now)
        match message:
            case messages.Chunk():
                return pushes.chunk(state, member, route, message, received.payload)
            case messages.Credit():
                return pulls.credit(state, member, route, message)
            case messages.Lane():
                return pulls.lane(state, member, route, message)
        return OF_MEMBERS[kind](state, member, message)

    def check_invariants(self) -> None:
        """Raise InvariantBroken, with the last events, if an invariant is violated; for tests."""
        try:
            self._check_invariants()
        except AssertionError as error:
            raise self._story.failure(error, self.state) from error

    def _check_invariants(self) -> None:
        state = self.state
        state.members.check_invariants()
        state.versions.check_invariants()
        state.submissions.check_invariants()
        state.data.check_invariants()
        now, said = decision(state).why, state.decision.why
        assert now and said and now.reason is said.reason, f"decided {now}, but published {said}"
        if state.round is None:
            return
        state.round.check_invariants()
        ids = {member.worker_id for member in state.members}
        if state.round.phase is Phase.OPEN:
            expected = state.round.barrier.expected if state.round.barrier else set()
            for worker_id in expected - ids:
                raise InvariantBroken(
                    "a round waits for a worker that is not in the run", worker_id
                )
        in_progress = state.versions[state.round.fragment].in_progress
        assert (in_progress is not None) == (state.round.phase is Phase.CLOSING)
        assert state.unreleased is None or (
            state.unreleased.ended is state.round and in_progress is not None
        )
        counters = [s.version.counter for s in state.versions.trained if s.version]
        assert state.round.number == sum(counters), "round number and versions disagree"
        for reader in state.versions.readers.values():
            assert not reader.joined or any(m.bulk == reader.route for m in state.members)
