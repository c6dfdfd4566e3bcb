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

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

from diloco_broker.config import BrokerConfig
from diloco_broker.config.declaration import AUTO
from diloco_broker.core import events
from diloco_broker.core.effects import Route
from diloco_broker.core.machine import Core
from diloco_broker.core.rules.joining import permissions
from diloco_broker.core.rules.sites.told import PASSED_ON
from diloco_broker.core.state.model_source import Resumption
from diloco_broker.core.state.run_record import FragmentRecord, RunRecord
from diloco_broker.core.state.submissions import Submission
from diloco_broker.relay.first_model import FirstModel
from diloco_broker.relay.report import Report
from diloco_broker.relay.unsettled import Unsettled
from diloco_protocol import messages
from diloco_protocol.chunks import ModelLayout
from diloco_protocol.dtypes import in_few_bits, whole_dtype
from diloco_protocol.errors import Code, ProtocolError, UsageError
from diloco_protocol.manifest import Manifest
from diloco_protocol.messages import Released, RunConfig
from diloco_worker.core import effects as to_parent
from diloco_worker.core import events as of_parent
from diloco_worker.core.compatibility import Terms
from diloco_worker.core.downloads import Held
from diloco_worker.core.session import Session

# Pushes that the parent would not have; their workers are told when they offer them again.
REFUSED_KEPT = 10_000
# After the parent has refused a push: when no newer version has come, the site tries again.
AGAIN_S = 5.0
_MISFIT = "The run of the parent does not fit the options of this relay: {}"
_NO_UNITS = "A relay hands out no units of data sets; let the script sample by its shard."


@dataclass(frozen=True)
class Connect:
    """Begin with a session to the parent; an earlier one is over."""

    session: Session


@dataclass(frozen=True)
class Tell:
    """An event for the session."""

    event: of_parent.Event


@dataclass(frozen=True)
class Offer:
    """Push what was averaged last."""

    push: messages.Push


@dataclass(frozen=True)
class Feed:
    """An event for the site's core."""

    event: events.Event


@dataclass(frozen=True)
class Begin:
    """The site begins anew with this core; what is queued of the one before is worth nothing."""

    core: Core
    layout: ModelLayout
    wire_dtype: str  # that its means go up in


@dataclass(frozen=True)
class Settle:
    """A version of the parent's has these pushes of the site, by id."""

    released: Released
    counted: tuple[int, ...]


@dataclass(frozen=True)
class Abandon:
    """Nobody waits for this push any more, which may be in a later version."""

    push_id: int


@dataclass(frozen=True)
class Forget:
    """This push of the site is in no version."""

    push_id: int


@dataclass(frozen=True)
class HandUp:
    """What a worker of the site has given goes up: by fragment, the push that it goes in.

    Of fragments that are `held` it is the version that the relay holds.
    """

    pushes: Mapping[int, int]
    held: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Send a message to somebody of the site."""

    route: Route
    message: messages.Message


@dataclass(frozen=True)
class Disconnect:
    """End this connection of the site."""

    route: Route


@dataclass(frozen=True)
class Say:
    """A sentence for people."""

    text: str
    is_trouble: bool = False


@dataclass(frozen=True)
class End:
    """The relay cannot go on, or need not: `is_over` where the run is."""

    reason: str
    is_over: bool = False


Command = (
    Connect
    | Tell
    | Offer
    | Feed
    | Begin
    | Answer
    | Disconnect
    | Say
    | End
    | Settle
    | Abandon
    | Forget
    | HandUp
)
Commands = Iterator[Command]


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
        self.site = Core(config, draw, now)  # until then nobody joins it
        self._join, self._draw = replace(join, workers=0), draw
        self._report = Report(parent, join.worker_id, now)
        self._flight: messages.Push | None = None  # the push that is on its way, or in no version
        # By fragment, the last version that came whole: what was said of it, and its chunks.
        self._versions: dict[int, tuple[Released, tuple[Any, ...]]] = {}
        self._refused: dict[tuple[str, int], tuple[str, str]] = {}  # code and sentence, by push
        self._again_at: float | None = None  # when the site begins anew, newer version or not
        self._first = FirstModel(parent)
        self.site.state.admit = self._first.admit

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
        return self.session is not None and not self.is_open and not self._first.is_asking

    def _puts_off(self, received: events.Received) -> Commands:
        """A worker whose model is long to describe is not asked for that each time that it asks."""
        try:
            permissions.check(received.peer, received.message)
            error = self._first.wait
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
        found = self._refused.get((member.worker_id, push.push_id))
        if found is not None:
            return found
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
        self._flight = _push_of(chosen, session.config, self._wire_dtype, self._draw())
        self._unsettled.sent(self._flight)
        yield Offer(self._flight)

    # The parent.

    def told(self, effect: to_parent.Effect, wires: Any, now: float) -> Commands:
        """The session has something to tell; `wires` are the chunks of a version that is delivered."""
        match effect:
            case to_parent.Joined(welcome):
                problem = _why_not_here(welcome.config) or self._why_not_any_more(welcome.config)
                if problem is not None:
                    yield End(f"{problem} The parent is {self.parent}.")
                yield Tell(of_parent.BeatNow())
            case to_parent.Deliver():
                yield from self._delivered(effect, wires, now)
            case to_parent.PushOver(push_id, code, text):
                self._first.is_over(push_id)
                if code is not None:
                    yield from self._is_refused(push_id, code, text, now)
            case to_parent.PrepareDonation(push_id, fragment):
                yield from self._is_asked(push_id, fragment, now)
            case to_parent.JoinRefused(code, text, final=True):
                yield from self._is_turned_away(code, text)
            case to_parent.Told(messages.Notice("shutdown", text)):
                yield End(text or "the run is over", is_over=True)
            case to_parent.Told(messages.Notice("kicked", text)):
                yield End(text)
            case to_parent.Told(messages.Notice(what) as notice) if (
                what in PASSED_ON and self.is_open
            ):
                yield Feed(events.Told(notice))

    def _why_not_any_more(self, config: RunConfig) -> str | None:
        """The site is told of one dtype, and is sent what is held and what comes as it is."""
        ours, theirs = self.site.state.config.reply_dtype, whole_dtype(config.reply_dtype)
        if not self.is_open or ours == theirs:
            return None
        return (
            f"The parent came back with parameters in {theirs}, and this site has got them in {ours}; "
            "start the relay again."
        )

    def _is_turned_away(self, code: str, text: str) -> Commands:
        if code != Code.MODEL_DIFFERS or self._first.brought is None:
            yield End(f"The parent at {self.parent} refuses this relay: {text}")
            return
        # That is the worker's fault who brought it; another may do better.
        self.session = None
        self._first.is_refused(text)
        yield Say(f"The parent does not take the model of the first worker: {text}", True)

    def _is_asked(self, push_id: int, fragment: int, now: float) -> Commands:
        """The parent has no parameters, and wants the site's."""
        session = self.session
        assert session is not None and session.terms is not None
        upload = session.uploads.by_id.get(push_id)
        if upload is None or upload.is_prepared:
            return  # what is held goes up, or what was given before
        self._first.wanted[fragment] = push_id
        if self._first.is_asking or self.is_open:
            return
        try:
            config = _config_of(self.config, session.terms.config)
        except UsageError as error:
            yield End(_MISFIT.format(error))
            return
        yield Say("The parent has no parameters: the relay asks a worker of its site for them.")
        core = self._first.core_that_asks(config, session.terms, self._draw, now)
        yield from self._lives_on_as(core, session.terms, "The relay has a parent now.")

    def _takes_gift(self, now: float) -> Commands:
        """A worker of the site may have given its parameters whole: they go up, and the site waits."""
        session, model = self.session, self.site.state.model
        assert session is not None and session.terms is not None
        terms = session.terms
        pushes: dict[int, int] = {}
        if model.is_done:
            held = self._first.held_by(self.site)
            yield from self._comes_back_with(held, terms)
        elif model.donation.donor is not None and model.donation.is_complete:
            pushes, held = self._first.wanted, {}
        else:
            return
        self._first.wanted, self._first.is_asking = {}, False
        yield HandUp(pushes, tuple(held))
        for push_id in pushes.values():
            yield Tell(of_parent.Prepared(push_id))
        if held:
            yield Tell(of_parent.Start())
        core = Core(self.config, self._draw, now)
        core.state.admit = self._first.admit
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
        self.session = Session(replace(self._join, manifest=self._first.brought), self._draw)
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
        if effect.unchanged or fragment == terms.layout.frozen.fragment:
            return
        flight = self._flight
        is_ours = flight is not None and effect.counted == flight.push_id
        if flight is not None and not is_ours:
            yield from self._abandon(flight)
        yield Settle(released, tuple(self._unsettled.found(released)))
        yield from map(Forget, self._unsettled.missed(released))
        if is_ours and self.site.state.closing is not None:
            self._flight = None
            yield Feed(events.Passed(released, self._versions[fragment][1]))
        else:
            yield from self._begin(terms, now, f"the run has gone on to version {released.version}")

    def _abandon(self, flight: messages.Push) -> Commands:
        yield Abandon(flight.push_id)
        yield from map(Forget, self._unsettled.abandoned(flight))

    def _is_refused(self, push_id: int, code: str, text: str, now: float) -> Commands:
        """The parent does not take the site's push. The site begins anew with the next version."""
        flight = self._flight
        if flight is None or flight.push_id != push_id:
            return
        self._flight, self._again_at = None, now + AGAIN_S
        self._unsettled.refused(flight)
        yield Forget(push_id)
        if code == Code.CONTAINED:
            text = f"A part of the site's push is counted, or under way, already: {text}"
        else:
            for name, each in (flight.contents or {}).items():
                self._refused[name, each] = code, text
            while len(self._refused) > REFUSED_KEPT:
                del self._refused[next(iter(self._refused))]
        yield Say(f"The site waits for the next version. {text}", True)
        assert self.session is not None
        held = self.session.downloads.of(flight.fragment).held
        after = -1 if held is None else held.version.counter
        yield Tell(of_parent.RequestVersion(flight.fragment, after))

    def _begin(self, terms: Terms, now: float, why: str) -> Commands:
        """A life of the site, with the parent's versions."""
        session = self.session
        assert session is not None and session.manifest is not None
        try:
            config = _config_of(self.config, terms.config)
        except UsageError as error:
            yield End(_MISFIT.format(error))
            return
        found = _resumption(session.manifest, terms, self._versions, self.parent)
        self.is_open, self._flight, self._again_at = True, None, None
        self._first = FirstModel(self.parent, session.manifest)
        text = f"The relay begins anew: {why}." if why else "The relay has the run's parameters."
        core = Core(config, self._draw, now, resumption=found)
        yield from self._lives_on_as(core, terms, text)

    def _lives_on_as(self, core: Core, terms: Terms, text: str) -> Commands:
        """Another core takes the place of the site's; its workers come back to that."""
        before, self.site = self.site, core
        # What an operator has asked for, and that the run is over, holds in this life, too.
        core.state.orders, core.state.ending = before.state.orders, before.state.ending
        self._wire_dtype = self._asked_wire_dtype or terms.config.wire_dtype
        yield Begin(core, terms.layout, self._wire_dtype)
        for member in before.state.members:
            yield Answer(member.control, messages.Rejoin(core.state.epoch, text))
        for reader in before.state.versions.observers:
            yield Disconnect(reader.route)

    # Both.

    def tick(self, now: float) -> Commands:
        """Time has passed: the parent hears how many are here, the site what is trained with."""
        if self.session is None and self._first.brought is not None:
            yield from self._connects()
            yield Tell(of_parent.Start())
        if self._first.is_asking:
            yield from self._takes_gift(now)
        session, state = self.session, self.site.state
        self._report.look(state, session, now, is_under_way=self._flight is not None)
        if session is None or session.join is None or not self.is_open:
            return
        if self._again_at is not None and now >= self._again_at and session.terms is not None:
            yield from self._begin(session.terms, now, "its push was refused")
            return
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

    @property
    def progress(self) -> messages.Heartbeat:
        """How the site does, for the parent; the session is filled in when it is sent."""
        return self._report.beat(self.site.state)


def _push_of(
    chosen: list[Submission], config: RunConfig, wire_dtype: str, push_id: int
) -> messages.Push:
    """The push of a site: the mean of these, with the sum of their weights, and each of them by name."""
    pushes = [each.push for each in chosen]
    contents: dict[str, int] = {}
    for each in chosen:
        contents |= each.push.contents or {}
    contents |= {each.worker_id: each.push.push_id for each in chosen}
    tokens, samples = sum(p.tokens for p in pushes), sum(p.samples for p in pushes)
    by = {"equal": 1, "tokens": tokens, "samples": samples}[config.weight_by]
    losses = [p.loss for p in pushes if p.loss is not None and math.isfinite(p.loss)]
    bases = [p.base for p in pushes if p.base is not None]
    return messages.Push(
        session=b"",
        push_id=push_id,
        fragment=pushes[0].fragment,
        chunks=pushes[0].chunks,
        wire_dtype=wire_dtype,
        base=min(bases, key=lambda base: base.counter),
        weight=sum(each.weight for each in chosen) / by,
        steps=median_low(p.steps for p in pushes),
        tokens=tokens,
        samples=samples,
        loss=sum(losses) / len(losses) if losses else None,
        buffers=messages.BUFFERS,
        contents=contents,
        workers=sum(p.workers for p in pushes),
    )


def _why_not_here(config: RunConfig) -> str | None:
    """Why a relay cannot be in a run, as a sentence; None where it can."""
    if not config.relays:
        return "This broker takes no relays; start it with --relays (an older release has none)."
    if config.mode != "sync":
        return "Relays take part in runs with rounds only, and this one is asynchronous."
    if config.num_fragments != 1:
        return f"Relays take part in runs of one fragment only, and this one has {config.num_fragments}."
    return None


def _config_of(config: BrokerConfig, told: RunConfig) -> BrokerConfig:
    """The options of the site, with what its parent says of the run; raises UsageError."""
    return replace(
        config,
        sync_every=told.sync_every,
        fragment_sync_delay=AUTO if told.fragment_delay_auto else told.fragment_sync_delay,
        fragment_update_alpha=told.fragment_update_alpha,
        fragment_merge=told.fragment_merge,
        fragment_max_delay=told.fragment_max_delay,
        weight_by=told.weight_by,
        reply_dtype=whole_dtype(told.reply_dtype)
        if in_few_bits(told.reply_dtype)
        else told.reply_dtype,
        chunk_elements=told.chunk_elements,
        relays=True,
        recover="rewind",
    )


def _resumption(
    manifest: Manifest,
    terms: Terms,
    versions: dict[int, tuple[Released, tuple[Any, ...]]],
    parent: str,
) -> Resumption:
    """What the site begins with: the parent's versions in the place of a checkpoint's."""
    last = terms.layout.frozen.fragment
    records, wires, newest = {}, {}, None
    for fragment, (released, chunks) in versions.items():
        version = released.version
        records[fragment] = FragmentRecord(
            version, released.ledger, version.counter, released.round, released.averaged
        )
        wires[fragment] = chunks
        newest = released if fragment != last else newest
    assert newest is not None, "no fragment is trained"
    record = RunRecord(
        run=newest.version.run,
        number=sum(r.version.counter for f, r in records.items() if f != last),
        epoch="",
        manifest=manifest,
        plan=terms.plan,
        fragments=records,
        workers={},
        totals={},
    )
    source = f"version {newest.version} of {parent}"
    return Resumption(source, record, terms.layout, wires, newest)
