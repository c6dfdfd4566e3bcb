"""The state machine of the broker: `handle(event, now)` returns the effects to carry out.

No clock, socket, thread, file or tensor in here: time is an argument, payloads are opaque, randomness is
handed in. The rules stand where they belong, as functions over one `State`:

    joining       who comes, comes back, leaves, dies       membership  the records of it
    terms         what a worker may have for itself
    providing     where the first parameters come from      bootstrap
    recovering    a run that exists goes on                 branches
    pushing       what is checked of a push and its chunks  granting    what it is answered
    sequence      opening, closing, releasing rounds        transfer    versions, readers, credits
    streaming     a round that adds up chunks as they come  rounds      its record
    staged        a round over whole submissions            staging     its records
    asynchronous  no rounds: each submission by itself
    controlling   what operators ask for
    dylu          how many steps for whom

A message that cannot be accepted raises ProtocolError before anything has changed; its sender gets the
sentence, the others never notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects, events
from diloco_broker.core.rules import (
    admission,
    checkpoints,
    initial_model,
    operator,
    pushes,
    rounds,
    stopping,
)
from diloco_broker.core.state.members import Member, printable
from diloco_broker.core.state.model_source import Bootstrap, InitialModel, Resumption
from diloco_broker.core.state.run import RunState
from diloco_broker.core.state.update import Phase
from diloco_broker.core.state.versions import MAX_OBSERVERS, Reader
from diloco_protocol import messages
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.errors import Code, ProtocolError

# What a refusal may be worth trying again for.
WORTH_A_RETRY = frozenset({Code.STOPPING, Code.NO_MODEL})


class Core:
    """See the head of this module.

    Args:
        config: the broker's options.
        draw: returns an unpredictable number below 2**64.
        now: seconds of a monotonic clock, as in every later call. All deadlines run on it, so it must
            leave out time in which the broker did not run (`served`).
        initial: names and shapes of the parameters the broker was given, if it was.
        resumption: what a checkpoint has, if the broker goes on from one; comes before `initial`.
    """

    def __init__(
        self,
        config: BrokerConfig,
        draw: Callable[[], int],
        now: float,
        initial: InitialModel | None = None,
        resumption: Resumption | None = None,
    ) -> None:
        self.state = RunState(config, draw, now, f"{draw():016x}", Bootstrap(initial))
        self._alive = messages.Notice("alive")  # the last answer to a heartbeat: most are alike
        if resumption is not None:
            initial_model.resume(self.state, resumption)

    def handle(self, event: events.Event, now: float) -> list[effects.Effect]:
        """Take in one event. Returns the effects to carry out, in order."""
        self.state.now = now
        asked_for = self._handle(event, now)
        if self.state.stopping is not None:
            asked_for += stopping.finish_if_due(self.state, self.state.stopping)
        return asked_for

    def _handle(self, event: events.Event, now: float) -> list[effects.Effect]:
        state = self.state
        match event:
            case events.Received(route, message, payload):
                try:
                    return list(self._message(route, message, payload, now))
                except ProtocolError as error:
                    return list(self._refuse(route, message, error))
            case events.Malformed(route, code, sentence):
                state.totals.malformed += 1
                log = effects.Log(
                    "warning", f"A message that cannot be read was refused: {sentence}"
                )
                return [effects.Send(route, messages.Error(code, sentence)), log]
            case events.Folded() | events.Inspected():
                return list(pushes.done(state, event))
            case events.FoldRefused() | events.InspectRefused():
                return list(pushes.refused(state, event))
            case events.Stepped():
                return list(rounds.stepped(state, event))
            case events.InitialStored():
                return list(initial_model.stored(state, event))
            case events.InitialRefused():
                return list(initial_model.refused(state, event))
            case events.Saved():
                return list(rounds.saved(state, event))
            case events.SaveFailed():
                return list(checkpoints.save_failed(state, event))
            case events.PeerGone(route):
                return list(admission.peer_gone(state, route, now))
            case events.Tick(lost):
                return list(admission.tick(state, now, lost))
            case events.StoodStill(seconds):
                return list(admission.stood_still(state, seconds))
            case events.Stop():
                return list(stopping.stop(state, event))

    def _message(
        self, route: effects.Route, message: messages.Message, payload: Any, now: float
    ) -> effects.Effects:
        match message:
            case messages.Join():
                yield from admission.join(self.state, route, message, now)
            case messages.Pull(session=None) | messages.Credit(session=None):
                yield from self._observer(route, message)
            case (
                messages.Heartbeat()
                | messages.Push()
                | messages.Chunk()
                | messages.Commit()
                | messages.Pull()
                | messages.Credit()
                | messages.Leave()
            ):
                member = self.state.members.with_session(message.session or b"")
                on_control = not isinstance(message, messages.Chunk | messages.Credit)
                if member is None or (on_control and member.control != route):
                    text = "This session is not known on this connection; join again."
                    yield effects.Send(route, messages.Rejoin(self.state.epoch, text))
                    return
                member.last_seen = now
                member.disconnected_at = None
                yield from self._of_member(member, route, message, payload)
            case messages.Control():
                yield from operator.control(self.state, route, message)
            case _:
                raise ProtocolError(
                    Code.NOT_ALLOWED, f"A {message.kind} message goes from the broker to others."
                )

    def _of_member(
        self, member: Member, route: effects.Route, message: messages.Message, payload: Any
    ) -> effects.Effects:
        state = self.state
        match message:
            case messages.Heartbeat():
                yield from admission.beat(state, member, message)
                number = state.round.number if state.round else 0
                steps = state.sync_every_of(member) if state.config.dylu else None
                if (self._alive.round, self._alive.sync_every) != (number, steps):
                    self._alive = messages.Notice("alive", round=number, sync_every=steps)
                yield effects.Send(route, self._alive)
            case messages.Push():
                yield from pushes.push(state, member, message)
            case messages.Chunk():
                yield from pushes.chunk(state, member, message, payload)
            case messages.Commit():
                yield from pushes.commit(state, member, message)
            case messages.Pull():
                self._check_pull(message)
                if member.bulk is None:
                    # It overtook the credit that binds the bulk connection.
                    member.early_pulls[message.fragment] = message
                else:
                    yield from self._read(self._reader_of(member, member.bulk), message)
            case messages.Credit():
                if route not in (member.control, member.bulk):
                    state.versions.forget(member.bulk)
                    member.bulk = route
                if member.bulk is not None:
                    reader = self._reader_of(member, member.bulk)
                    yield from state.versions.add_credit(reader, message.chunks)
                    while member.early_pulls:
                        yield from self._read(reader, member.early_pulls.popitem()[1])
            case messages.Leave():
                why = printable(message.reason, 200)
                yield effects.Log("info", f"{member.worker_id} leaves: {why or 'it is done'}.")
                yield from admission.remove(state, member, why)

    def _refuse(
        self, route: effects.Route, message: messages.Message, error: ProtocolError
    ) -> effects.Effects:
        push_id = None
        who = (
            f" of {printable(message.worker_id, 64)}" if isinstance(message, messages.Join) else ""
        )
        retry = error.code in WORTH_A_RETRY
        if isinstance(message, messages.Push | messages.Chunk | messages.Commit):
            push_id = message.push_id
            member = self.state.members.with_session(message.session or b"")
            if not retry:  # "not now" loses nothing, and is no refusal
                self.state.reject(member.worker_id if member else "", error.code.value, str(error))
            if member is not None:
                member.rejected += not retry
                who = f" of {member.worker_id}"
                route = member.control
            if (
                isinstance(message, messages.Push)
                and message.purpose is messages.Purpose.DONATION
                and member
            ):
                yield from initial_model.reject_donor(self.state, member)
        if isinstance(message, messages.Push) and not retry and error.code != Code.LATE:
            yield from self._skip_this_round(message)
        if isinstance(message, messages.Join) and error.code == Code.STOPPING:
            assert self.state.stopping is not None
            # It was on its way when the others were told.
            yield effects.Send(route, stopping.farewell(self.state.stopping))
        yield effects.Send(
            route, messages.Error(error.code, str(error), retry, push_id, message.kind)
        )
        if not retry:
            yield effects.Log("warning", f"Refused a {message.kind}{who}: {error}")

    def _skip_this_round(self, push: messages.Push) -> effects.Effects:
        member = self.state.members.with_session(push.session)
        known = range(len(self.state.versions.fragments) - 1)
        if (
            member is not None
            and push.purpose is messages.Purpose.GRADIENT
            and push.fragment in known
        ):
            yield from rounds.skip_this_round(self.state, member.worker_id, push.fragment)

    # Readers.

    def _reader_of(self, member: Member, bulk: effects.Route) -> Reader:
        return self.state.versions.joined_reader(bulk, member.control, member.account)

    def _observer(
        self, route: effects.Route, message: messages.Pull | messages.Credit
    ) -> effects.Effects:
        versions = self.state.versions
        if isinstance(message, messages.Credit):
            if route in versions.readers:
                yield from versions.add_credit(versions.readers[route], message.chunks)
            return
        self._check_pull(message)
        if route not in versions.readers and len(versions.observers) >= MAX_OBSERVERS:
            raise ProtocolError(
                Code.NOT_ALLOWED, f"There are {MAX_OBSERVERS} observers already; try later."
            )
        yield from self._read(versions.observer(route), message)

    def _check_pull(self, pull: messages.Pull) -> None:
        fragments = self.state.versions.fragments
        if not fragments:
            raise ProtocolError(Code.NO_MODEL, "The broker has no model yet; try again later.")
        if not 0 <= pull.fragment < len(fragments) or not fragments[pull.fragment].layout.chunks:
            raise ProtocolError(
                Code.BAD_HEADER, f"There is no fragment {pull.fragment} to pull in this run."
            )
        if pull.held is not None:
            Bitmap.from_bytes(pull.held, fragments[pull.fragment].layout.chunks)

    def _read(self, reader: Reader, pull: messages.Pull) -> effects.Effects:
        held = (pull.held_version, pull.held) if pull.held_version and pull.held else None
        yield from self.state.versions.pull(reader, pull.fragment, pull.after, held)
        yield from self.state.versions.add_credit(reader, pull.credit)

    def check_invariants(self) -> None:
        """Raise AssertionError when an invariant is broken; for tests."""
        state = self.state
        state.members.check_invariants()
        state.versions.check_invariants()
        state.submissions.check_invariants()
        if state.round is None:
            return
        state.round.check_invariants()
        ids = {member.worker_id for member in state.members}
        if state.round.phase is Phase.OPEN:
            waits_for = state.round.barrier.expected if state.round.barrier else set()
            assert waits_for <= ids, "a round waits for somebody who is not here"
        in_progress = state.versions[state.round.fragment].in_progress
        assert (in_progress is not None) == (state.round.phase is Phase.CLOSING)
        assert state.unreleased is None or (
            state.unreleased.ended is state.round and in_progress is not None
        )
        counters = [s.version.counter for s in state.versions.trained if s.version]
        assert state.round.number == sum(counters), "round number and versions disagree"
        for reader in state.versions.readers.values():
            assert not reader.joined or any(m.bulk == reader.route for m in state.members)
