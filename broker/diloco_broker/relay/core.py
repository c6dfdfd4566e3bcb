"""What joins a broker for a site with a worker of its parent: no rounds, no messages of its own.

The site has the core of any broker. What its closing round has averaged is no outer step there but a
push to the parent, which names all that is in it; the version of the parent's that contains it is what
the round makes. Up there the session of any worker says what is sent, held, and asked for.

A relay keeps nothing on a disk. The parent has the parameters and, in its ledger, which of the site's
pushes are in them; the workers have what is not counted. So there is one way out of everything that
does not go as usual, a restart among it: the site begins anew with a version of the parent's, its
workers come back, and offer what that version does not name.

`now` is an argument, random numbers are handed in. Methods yield commands for the shell, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.core import events
from diloco_broker.core.machine import Core
from diloco_broker.core.members import permissions
from diloco_broker.core.members.start import Start
from diloco_broker.core.rounds.submissions import Submission
from diloco_broker.core.sites.gate import Gate
from diloco_broker.core.sites.told import PASSED_ON
from diloco_broker.relay.commands import (
    Abandon,
    Answer,
    Begin,
    Commands,
    Connect,
    Disconnect,
    End,
    Feed,
    Forget,
    HandUp,
    Offer,
    Say,
    Settle,
    Tell,
)
from diloco_broker.relay.report import Report
from diloco_broker.relay.terms import config_of, push_of, resumption, why_not_here
from diloco_broker.relay.unsettled import Unsettled
from diloco_protocol import messages
from diloco_protocol.dtypes import whole_dtype
from diloco_protocol.errors import Code, ProtocolError, UsageError
from diloco_protocol.manifest import Manifest
from diloco_protocol.messages import Released, RunConfig
from diloco_protocol.version import VersionId
from diloco_worker.session import effects as to_parent
from diloco_worker.session import events as of_parent
from diloco_worker.session.compatibility import Terms
from diloco_worker.session.downloads import Held
from diloco_worker.session.session import Session

# After the parent has refused a push: when no newer version has come, the site tries again.
AGAIN_S = 5.0
# Half of the time after which a site that stands still begins anew, with `--stall-timeout 0`.
STANDS_STILL_S = 600.0
_MISFIT = "The run of the parent does not fit the options of this relay: {}"
_NO_UNITS = "A relay hands out no units of data sets; let the script sample by its shard."


class Relay:
    """See the head of this module.

    Args:
        join: how it takes part in its parent's run; without a manifest, which its first worker brings.
        config: options of the site; what the parent says of the run takes their place.
        draw: returns an unpredictable number below 2**64.
        now: seconds of a monotonic clock, as in every later call.
        parent: where that is, for people.
        wire_dtype: what its pushes travel in; None: in what those of the parent's run do.
    """

    def __init__(
        self,
        join: messages.Join,
        config: BrokerConfig,
        draw: Callable[[], int],
        now: float,
        *,
        parent: str,
        wire_dtype: str | None,
    ) -> None:
        self.config, self.parent = config, parent
        self._asked_wire_dtype = wire_dtype
        self._wire_dtype = ""  # what means are made in, in this life of the site
        self._unsettled = Unsettled(join.worker_id)
        self.session: Session | None = None
        self.is_open = False  # the site has parameters, and lets workers in
        gate = Gate(parent)
        self.site = Core(config, draw, now, gate=gate)  # until then nobody joins it
        self._join, self._draw = replace(join, workers=0), draw
        self._report = Report(parent, join.worker_id, now)
        # While a worker here gives its parameters: by fragment, the push that they go up in.
        self._wanted: dict[int, int] = {}
        self._flights: dict[int, messages.Push] = {}  # on their way, or in no version, by fragment
        # By fragment, a flight that the parent has refused: code, sentence, and when the site does
        # without it, newer version or not.
        self._over: dict[int, tuple[messages.Push, str, str, float]] = {}
        # Fragments of which a version has to come before the site begins anew, and why it does.
        self._missing: set[int] = set()
        self._why = ""
        # By fragment, the last version that came whole: what was said of it, and its chunks.
        self._versions: dict[int, tuple[Released, tuple[Any, ...]]] = {}
        self._taken: set[int] = set()  # flights that the parent has taken in, or had
        # Steps of the site's workers and its versions, and since when they are these.
        self._seen: tuple[int, tuple[VersionId | None, ...]] = (0, ())
        self._moved_at = now
        self._first_round = 0  # that the parent expects of the site, as of its last welcome
        self._is_back = False  # and the site has not been told

    # The site.

    def hears(self, received: events.Received) -> Commands:
        """Somebody of the site has sent a message."""
        match received.message:
            case messages.Join(manifest=None) if self._waits_for_parent:
                yield from self._puts_off(received)
            case messages.Push() as push if (refusal := self._why_not(push)) is not None:
                code, text = refusal
                error = messages.Error(code, text, push_id=push.push_id, about="push")
                yield Answer(received.route, error)
            case messages.Take(request=request):
                yield Answer(received.route, messages.Result(request, False, _NO_UNITS))
            case _:
                yield Feed(received)

    @property
    def _waits_for_parent(self) -> bool:
        return self.session is not None and not self.is_open and not self._is_asking

    @property
    def _gate(self) -> Gate | None:
        return self.site.state.gate

    @property
    def _is_asking(self) -> bool:
        """Workers are let in, and one of them gives its parameters."""
        return self._gate is not None and self._gate.is_open

    @property
    def _brought(self) -> Manifest | None:
        """The model that a worker has brought, while there are no parameters."""
        return None if self._gate is None else self._gate.brought

    def _puts_off(self, received: events.Received) -> Commands:
        """A worker whose model is long to describe is not asked for that each time that it asks."""
        try:
            permissions.check(received.peer, received.message)
            assert self._gate is not None
            error = ProtocolError(Code.NO_MODEL, self._gate.wait)
        except ProtocolError as refusal:
            error = refusal
        retry = error.code == Code.NO_MODEL
        yield Answer(
            received.route, messages.Error(error.code, str(error), retry=retry, about="join")
        )

    def _why_not(self, push: messages.Push) -> tuple[str, str] | None:
        """Why a push cannot go up with others, as code and sentence; None where it can."""
        state = self.site.state
        member = state.members.with_session(push.session)
        known = range(len(state.versions.fragments))
        if not self.is_open or member is None or push.fragment not in known:
            return None
        if push.chunks == state.versions[push.fragment].layout.chunks:
            standing = state.standing(member, push)
            if standing and not standing.is_full:
                return (
                    Code.LATE.value,
                    "A part of this push is in a version, and the rest comes late.",
                )
        return None

    def averaged(self) -> Commands:
        """The means of all chunks of the site's closing round are there: they go up as one push."""
        round_, session = self.site.state.closing, self.session
        assert round_ is not None and session is not None and session.config is not None
        chosen = [each for each in round_.pushes if isinstance(each, Submission)]
        push = push_of(chosen, session.config, self._wire_dtype, self._draw())
        self._flights[push.fragment] = push
        self._unsettled.sent(push)
        yield Offer(push)
        yield Feed(events.SentUp(push))

    # The parent.

    def told(self, effect: to_parent.Effect, wires: Any, now: float) -> Commands:
        """The session has something to tell; `wires` are the chunks of a version that is delivered."""
        match effect:
            case to_parent.Joined(welcome):
                problem = self._why_not_here(welcome.config)
                if problem is not None:
                    yield End(f"{problem} The parent is {self.parent}.")
                yield Tell(of_parent.BeatNow())
                if self.is_open and self._has_gone_back(welcome.versions):
                    yield from self._catch_up("the parent has gone back to an older version")
                self._first_round = welcome.first_round
                self._is_back = self.is_open
            case to_parent.Told(messages.Grant() as grant):
                yield from self._hears_round(grant)
            case to_parent.Told(messages.Notice() as notice):
                yield from self._hears_notice(notice)
            case to_parent.Deliver(released):
                assert self.session is not None and self.session.layout is not None
                chunks = self.session.layout.all[released.fragment].chunks
                yield Settle(released, self._unsettled.found(released, chunks))
                yield from map(Forget, self._unsettled.missed(released))
                yield from self._delivered(effect, wires, now)
            case to_parent.PushOver(push_id, code, text):
                self._wanted = {f: each for f, each in self._wanted.items() if each != push_id}
                if code is not None:
                    yield from self._is_refused(push_id, code, text, now)
            case to_parent.PrepareDonation(push_id, fragment):
                yield from self._is_asked(push_id, fragment, now)
            case to_parent.JoinRefused(code, text, final=True):
                yield from self._is_turned_away(code, text)

    def _hears_notice(self, notice: messages.Notice) -> Commands:
        match notice:
            case messages.Notice("carried"):
                yield from self._hears_round(notice)
            case messages.Notice("alive", sync_every=int() as steps):
                yield Feed(events.Paced(steps))
            case messages.Notice("shutdown", text):
                yield End(text or "the run is over", is_over=True)
            case messages.Notice("kicked", text):
                yield End(text)
            case messages.Notice(what) if what in PASSED_ON and self.is_open:
                yield Feed(events.Told(notice))

    def _why_not_here(self, config: RunConfig) -> str | None:
        """Why the relay cannot be in this run, or not any more, as a sentence."""
        # The site is told of one dtype, and is sent what is held and what comes as it is.
        ours, theirs = self.site.state.config.reply_dtype, whole_dtype(config.reply_dtype)
        if not self.is_open or ours == theirs:
            return why_not_here(config)
        return (
            f"The parent came back with parameters in {theirs}, and this site has got them in {ours}; "
            "start the relay again."
        )

    def _is_turned_away(self, code: str, text: str) -> Commands:
        if code != Code.MODEL_DIFFERS or self._brought is None:
            yield End(f"The parent at {self.parent} refuses this relay: {text}")
            return
        # That is the worker's fault who brought it; another may do better.
        self.session = None
        yield Feed(events.ModelRefused(text))
        yield Say(f"The parent does not take the model of the first worker: {text}", True)

    def _is_asked(self, push_id: int, fragment: int, now: float) -> Commands:
        """The parent has no parameters, and wants the site's."""
        session = self.session
        assert session is not None and session.terms is not None
        upload = session.uploads.by_id.get(push_id)
        if upload is None or upload.is_prepared:
            return  # what is held goes up, or what was given before
        self._wanted[fragment] = push_id
        gate = self._gate
        if gate is None or gate.is_open:
            return
        try:
            config = config_of(self.config, session.terms.config)
        except UsageError as error:
            yield End(_MISFIT.format(error))
            return
        yield Say("The parent has no parameters: the relay asks a worker of its site for them.")
        # Whoever may hold an earlier run was waited for by the parent.
        core = Core(
            replace(config, recover_wait=0.0),
            self._draw,
            now,
            gate=replace(gate, is_open=True, plan=session.terms.plan),
            before=self.site,
        )
        yield from self._lives_on_as(core, session.terms, "The relay has a parent now.")

    def _takes_gift(self, now: float) -> Commands:
        """A worker of the site may have given its parameters whole: they go up, and the site waits."""
        session, site = self.session, self.site.state
        assert session is not None and session.terms is not None
        terms = session.terms
        pushes: dict[int, int] = {}
        if site.is_running:
            held = held_by(self.site)
            yield from self._comes_back_with(held, terms)
        elif site.start is Start.SEEDING and site.seeding.is_complete:
            pushes, held = self._wanted, {}
        else:
            return
        self._wanted = {}
        yield HandUp(pushes, tuple(held))
        for push_id in pushes.values():
            yield Tell(of_parent.Prepared(push_id))
        if held:
            yield Tell(of_parent.Start())
        assert self._gate is not None
        gate = replace(self._gate, is_open=False, plan=())
        core = Core(self.config, self._draw, now, gate=gate, before=self.site)
        text = "The relay hands parameters up; workers are let in when its parent has them."
        yield from self._lives_on_as(core, terms, text)

    def _comes_back_with(self, held: dict[int, Held], terms: Terms) -> Commands:
        """The parent has lost a run that the site holds: it hears of it as this relay joins."""
        yield Say(
            "The site holds a version of the run that the parent has lost; it goes on with that."
        )
        yield Tell(of_parent.Depart("it comes back with what its site holds"))
        yield from self._connects()
        yield Tell(of_parent.Resume(terms, held))

    def _connects(self) -> Commands:
        self.session = Session(replace(self._join, manifest=self._brought), self._draw)
        yield Connect(self.session)

    def _delivered(self, effect: to_parent.Deliver, wires: Any, now: float) -> Commands:
        released, terms = effect.released, self.session.terms if self.session else None
        assert terms is not None
        fragment = released.fragment
        if not effect.unchanged or fragment not in self._versions:
            self._versions[fragment] = released, tuple(wires)
        if not self.is_open:
            wanted = {part.fragment for part in terms.layout.all if part.chunks}
            if wanted <= self._versions.keys():
                yield from self._begin(terms, now, "")
            return
        if self._missing:
            self._missing.discard(fragment)
            if not self._missing:
                yield from self._begin(terms, now, self._why)
            return
        if fragment == terms.layout.frozen.fragment:
            return
        if not effect.unchanged:
            if self._has_gone_back((None,) * fragment + (released.version,)):
                yield from self._catch_up("the parent has gone back to an older version")
                return
            if self.site.state.round is None:  # nobody is here yet
                yield from self._begin(terms, now, "")
                return
            flight = self._flights.get(fragment)
            is_ours = flight is not None and effect.counted == flight.push_id
            if is_ours:
                del self._flights[fragment]
            wires = self._versions[fragment][1]
            yield Feed(events.Passed(released, wires, effect.counted if is_ours else None))
        if fragment in self._over:
            yield from self._do_without(fragment)

    def _has_gone_back(self, versions: Sequence[VersionId | None]) -> bool:
        """Are these, by fragment, not newer than what the site has, but other ones?"""
        for theirs, ours in zip(versions, self.site.state.versions.trained, strict=False):
            if theirs is not None and ours.version is not None and theirs != ours.version:
                is_newer = theirs.counter > ours.version.counter
                if not is_newer or ours.is_of_another_branch(theirs):
                    return True
        return False

    def _catch_up(self, why: str) -> Commands:
        """Get the parent's version of each fragment, then begin anew."""
        session = self.session
        assert session is not None and session.layout is not None
        self._why = why
        wanted = [part.fragment for part in session.layout.fragments if part.chunks]
        self._missing = set(wanted)
        for fragment in wanted:
            yield Tell(of_parent.RequestVersion(fragment))

    def _hears_round(self, told: messages.Grant | messages.Notice) -> Commands:
        """The parent says which round a push is in."""
        fragment, number = told.fragment, told.round
        flight = self._flights.get(fragment)
        is_put_off = isinstance(told, messages.Grant) and told.standing is messages.Standing.WAIT
        if flight is None or number is None or is_put_off:
            return
        if isinstance(told, messages.Grant) and told.push_id != flight.push_id:
            return
        self._taken = {each.push_id for each in self._flights.values()} & self._taken
        self._taken.add(flight.push_id)
        up, pieces = self.site.state.flights.get(fragment), self.site.state.config.num_fragments
        # With one fragment who has just joined may be taken into a round earlier than it was told.
        is_earlier = up is not None and number < up.number and pieces > 1
        if is_earlier and not self._missing:
            yield from self._catch_up("the parent has gone back to an earlier round")
        else:
            yield Feed(events.RoundNamed(fragment, flight.push_id, number))

    def _abandon(self, flight: messages.Push) -> Commands:
        yield Abandon(flight.push_id)
        yield from map(Forget, self._unsettled.abandoned(flight))

    def _is_refused(self, push_id: int, code: str, text: str, now: float) -> Commands:
        """The parent refuses a push of the site, which does without it once a newer version is here."""
        flight = next((each for each in self._flights.values() if each.push_id == push_id), None)
        if flight is None:
            return
        fragment = flight.fragment
        del self._flights[fragment]
        self._over[fragment] = flight, code, text, now + AGAIN_S
        if code == Code.CONTAINED and push_id in self._taken:
            # All of it may be on its way, if the parent is a relay that was killed when it had gone up.
            yield from self._abandon(flight)
        else:
            self._unsettled.refused(flight)
            yield Forget(push_id)
        if code == Code.CONTAINED:
            text = f"A part of the site's push is counted, or under way, already: {text}"
        else:
            text = f"The parent refuses what the site has sent: {text}"
        yield Say(text, True)
        assert self.session is not None
        held = self.session.downloads.of(fragment).held
        after = -1 if held is None else held.version.counter
        yield Tell(of_parent.RequestVersion(fragment, after))

    def _do_without(self, fragment: int) -> Commands:
        """A flight was refused, and what there is to know by now is known."""
        flight, code, text, _ = self._over.pop(fragment)
        yield Feed(events.TurnedDown(fragment, flight.push_id, code, text))

    def _begin(self, terms: Terms, now: float, why: str) -> Commands:
        """A life of the site, with the parent's versions."""
        session = self.session
        assert session is not None and session.manifest is not None
        try:
            config = config_of(self.config, terms.config)
        except UsageError as error:
            yield End(_MISFIT.format(error))
            return
        found = resumption(session.manifest, terms, self._versions, self.parent, self._first_round)
        for flight in self._flights.values():
            yield from self._abandon(flight)
        self.is_open = True
        self._flights.clear()
        self._over.clear()
        self._missing.clear()
        self._is_back = False
        self._wanted = {}
        text = f"The relay begins anew: {why}." if why else "The relay has the run's parameters."
        core = Core(config, self._draw, now, resumption=found, before=self.site)
        yield from self._lives_on_as(core, terms, text)

    def _lives_on_as(self, core: Core, terms: Terms, text: str) -> Commands:
        """Another core takes the place of the site's; its workers come back to that."""
        before, self.site = self.site, core
        self._wire_dtype = self._asked_wire_dtype or terms.config.wire_dtype
        yield Begin(core, terms.layout, self._wire_dtype)
        for member in before.state.members:
            yield Answer(member.control, messages.Rejoin(core.state.epoch, text))
        for reader in before.state.versions.observers:
            yield Disconnect(reader.route)

    # Both.

    def tick(self, now: float) -> Commands:
        """Time has passed: the parent hears how many are here, the site what is trained with."""
        if self.session is None and self._brought is not None:
            yield from self._connects()
            yield Tell(of_parent.Start())
        if self._is_asking:
            yield from self._takes_gift(now)
        session, state = self.session, self.site.state
        seen = self._report.look(session, now, is_under_way=bool(self._flights))
        if seen != state.parent:
            yield Feed(seen)
        if session is None or session.join is None or not self.is_open:
            return
        if self._is_back and state.closing is None:
            self._is_back = False
            yield Feed(events.ExpectedFrom(self._first_round))
        for fragment in [each for each, (*_, at) in self._over.items() if now >= at]:
            yield from self._do_without(fragment)
        if session.connection.is_joined and self._stands_still(now):
            yield from self._catch_up(
                "nobody here has made a step, and no version has come, for long"
            )
        here = state.members.workers
        if session.join.workers != here:
            session.join = replace(session.join, workers=here)
            yield Tell(of_parent.BeatNow())
        elif session.connection.is_joined and self._report.has_news(state, now):
            yield Tell(of_parent.BeatNow())
        steps = session.config.sync_every if session.config is not None else 0
        wanted = (state.wanted or state.config).sync_every
        if steps and steps != wanted:
            arguments = {"sync_every": steps, "who": "the parent"}
            yield Feed(events.Received(b"", messages.Control("set", 0, arguments)))

    def _stands_still(self, now: float) -> bool:
        """Has nothing happened for so long that site and parent may wait for each other?

        With fragments there are several ways to come to that through faults; beginning anew is the way
        out of each, and where nothing is wrong it costs the site what its workers send once more.
        """
        state = self.site.state
        # Not those of relays, which are another sum whenever a site behind them begins anew.
        steps = sum(member.figures.step for member in state.members if not member.is_relay)
        versions = tuple(each.version for each in state.versions.trained)
        if (steps, versions) != self._seen:
            self._seen, self._moved_at = (steps, versions), now
            return False
        patience = 2 * (state.config.stall_timeout or STANDS_STILL_S)
        is_long = now - self._moved_at > patience and state.config.num_fragments > 1
        if is_long and len(state.members) and not self._missing:
            self._moved_at = now
            return True
        return False

    @property
    def progress(self) -> messages.Heartbeat:
        """How the site does, for the parent; the session is filled in when it is sent."""
        return self._report.beat(self.site.state)


def held_by(site: Core) -> dict[int, Held]:
    """By fragment, the versions of an earlier run that workers of the site have given whole."""
    versions = dict(enumerate(site.state.versions.fragments))
    return {
        fragment: Held(each.version, each.ledger)
        for fragment, each in versions.items()
        if each.version is not None
    }
