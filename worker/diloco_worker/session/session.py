"""A worker's side of the protocol: `handle(event, now)` returns the effects to execute.

No socket, tensor, clock, thread or file in here: time is an argument, random numbers are handed in.
`connection` decides when it joins and reconnects. The rules behind everything else:

- A push and its chunks never change. A new connection voids all credit; the push is offered again with
  the same push id and base, and the broker's grant says what it still lacks.
- A push is over when a complete version is here whose ledger names it as complete, or when the broker
  ends it with an error. A complete version that does not name it is discarded and the next requested.
- A delivered version is held: the worker names it when it reconnects, and uploads it when the broker
  asks, even before training has merged it.
- A download resumes where it stopped. Chunks of another version restart it. Each received chunk returns
  one credit, even if it is dropped.
- An illegal command raises before anything has changed. Nothing from the broker raises: a message that
  does not fit is dropped and logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from diloco_protocol import Code, ModelLayout, ProtocolError, VersionId, messages
from diloco_protocol.description import describe
from diloco_protocol.messages import in_a_header
from diloco_worker.session import effects, events
from diloco_worker.session.compatibility import OnTerms, Terms, changed, check_welcome, gives_way
from diloco_worker.session.connection import (
    ELSEWHERE,
    REPLACED,
    RETRY_S,
    Connection,
    Lanes,
    Owners,
    Phase,
    Votes,
)
from diloco_worker.session.control_requests import ControlRequests
from diloco_worker.session.downloads import Downloads, Held
from diloco_worker.session.effects import Effect
from diloco_worker.session.previous_incarnation import FORGOTTEN, PreviousIncarnation
from diloco_worker.session.units import Units
from diloco_worker.session.uploads import Uploads


class Session(OnTerms):
    """The conversation of a worker, or of an observer (without `join`), with its broker.

    Args:
        draw: returns a random number below 2**64.
        heartbeat_interval: seconds; None = 30 or a third of what the broker tolerates; 0 = none.
        is_group: the worker is a group of processes, maybe of one; its chunks wait for `ShareOut`.
        has_frozen: the model's frozen parameters may be the run's already, and are not fetched then.
    """

    def __init__(
        self,
        join: messages.Join | None,
        draw: Callable[[], int],
        heartbeat_interval: float | None = None,
        *,
        is_group: bool = False,
        has_frozen: bool = False,
    ) -> None:
        processes = 1 if join is None else join.processes
        self.lanes = Lanes(processes, is_group or processes > 1)
        self.votes = Votes(draw())
        # None for an observer
        self.join = None if join is None else replace(join, voter=self.votes.voter)
        self.worker_id = "" if join is None else join.worker_id
        self.manifest = None if join is None else join.manifest
        self.connection = Connection(heartbeat_interval)
        self.run: str | None = None
        self.uploads = Uploads(self.connection, self.lanes)
        self.downloads = Downloads(self.connection, observer=join is None, lanes=self.lanes)
        self.requests = ControlRequests()
        self.units = Units(self.connection)
        self.previous_incarnation = PreviousIncarnation()
        # Fragments to seed once the chunks are shared out.
        self._asked_for: list[int] = []
        self._over: messages.Notice | None = None  # the run is over, and training not notified yet
        self._draw = draw
        self._asked_interval = heartbeat_interval
        self._has_frozen = has_frozen
        self._frozen_tag: int | None = None  # of the model's own; None until it is known
        self._is_naming = False  # it is being computed, which may outlast a connection

    @property
    def phase(self) -> Phase:
        return self.connection.phase

    def wakes_at(self) -> float | None:
        """When a `Tick` has something to do; None = not by itself."""
        times = self.downloads.times + self.uploads.times + self.connection.times + self.units.times
        return min(times, default=None)

    def handle(self, event: events.Event, now: float) -> list[Effect]:
        """Handle one event; returns the effects in order. ValueError for an invalid command, which
        changes nothing.
        """
        if self.phase is Phase.LEFT:
            return []
        wanted = [*self._handle(event, now), *self.units.settle(self.uploads.by_id)]
        wanted += self._end_if_due()
        waits = self.uploads.waits_for_acks or self.downloads.waits_for_chunks
        self.connection.bulk.look(self.connection.is_joined and waits, now)
        return wanted

    def _handle(self, event: events.Event, now: float) -> Iterator[Effect]:  # noqa: C901, PLR0912, PLR0915  a case for each event
        match event:
            case events.Start(places):
                if self.phase is not Phase.NEW:
                    raise ValueError(f"a session starts once, this one is {self.phase.value}")
                self.connection.places.count = places
                yield self.connection.open(now)
            case events.Connected():
                yield from self._connected(now)
            case events.Disconnected(reason):
                yield from self._disconnected(reason, now)
            case events.Unreached():
                yield from self._turned_away(now) if self.connection.seeks_another else ()
            case events.LockedOut(reason):
                yield from self._locked_out(reason, now)
            case events.Received(message):
                self.connection.last_heard = now
                yield from self._received(message, now)
            case events.Offer(push):
                yield from self._offer(push)
            case events.RequestVersion(fragment, after):
                self.downloads.of(fragment).want_newest(after)
                yield from self._pull(fragment)
            case events.Observe(terms):
                self._set_terms(terms)
            case events.Resume():
                self._resume(event)
            case events.ShareOut(owners):
                yield from self._share_out(owners)
            case events.ArrivedElsewhere(chunk):
                yield from self._arrived_elsewhere(chunk, now)
            case events.Prepared(push_id):
                yield from self.uploads.prepared(push_id)
            case events.Followed(fragment):
                yield from self._stored(fragment)
            case events.Spoilt(fragment):
                yield from self.downloads.spoilt(fragment)
            case events.FrozenNamed(tag):
                self._frozen_tag, self._is_naming = tag, False
                yield from self._pull_frozen() if tag is not None else self._fetch_frozen()
            case events.VerifyPushes(fragment, known):
                self.previous_incarnation.unverified[fragment] = set(known)
            case events.Ask(control):
                self.requests.add(control)
                yield from self._send_requests()
            case events.Withdraw(request):
                self.requests.withdraw(request)
            case events.TakeUnits():
                yield from self.units.ask(event)
            case events.UnitsTrained():
                self.units.trained(event)
            case events.StepsLost():
                self.units.steps_lost()
            case events.BeatNow():
                yield from self._beat(now)
            case events.Depart(reason):
                yield from self.connection.leave(reason)
            case events.Tick():
                yield from self._tick(now)
            case _:
                raise TypeError(f"not an event of a session: {event!r}")

    # Connections.

    def _connected(self, now: float) -> Iterator[Effect]:
        if self.phase is not Phase.CONNECTING:
            return
        if self.join is not None:
            yield self._join(now)
            return
        self.connection.observes()
        yield from self._send_requests()
        for fragment, download in self.downloads.by_fragment.items():
            if download.wanted:
                yield self.downloads.pull(fragment)

    def _join(self, now: float) -> Effect:
        assert self.join is not None
        self.connection.joins(now)
        if not self.downloads.has_all:
            # The connection broke during the first pull. A part of a model is useless, and a worker
            # without a complete one belongs to no run.
            self.run = None
        token, versions = self.connection.token, self.downloads.versions
        join = replace(self.join, run=self.run, session=token, versions=versions)
        return effects.Send(in_a_header(join))

    def _turned_away(self, now: float) -> Iterator[Effect]:
        """Try the next address."""
        yield from self.connection.turns(now)
        yield from self._void()

    def _locked_out(self, reason: str, now: float) -> Iterator[Effect]:
        """Final if this worker never joined; otherwise retry, since its key may be restored."""
        if self.connection.places.lock() and self.connection.token is None:
            yield effects.Close()
            yield from self.connection.is_refused(Code.NOT_ALLOWED, reason, now)
        else:
            yield effects.Say(reason, trouble=True)
            yield from self._disconnected(reason, now)

    def _disconnected(self, reason: str, now: float) -> Iterator[Effect]:
        if self.connection.can_break:
            yield from self.connection.breaks(reason, now)
            yield from self._void()

    def _void(self) -> Iterator[Effect]:
        """Void the transfers of this connection."""
        self.downloads.disconnected()
        self._asked_for.clear()
        self.units.disconnected()
        yield from self.uploads.disconnected()
        yield from self.requests.disconnected()
        if self._over is not None:  # the broker may be gone for good
            yield self._end(self._over)

    def _tick(self, now: float) -> Iterator[Effect]:
        if self.connection.wakes(now):
            is_away = self.phase is Phase.AWAY
            yield self.connection.open(now) if is_away else self._join(now)
        for reason in self.connection.dead_ends(now):
            yield from self._disconnected(reason, now)
        if self.connection.must_beat(now):
            yield from self._beat(now)
        yield from self.downloads.tick(now)
        yield from self.uploads.tick(now)
        yield from self.units.tick(now)

    def _beat(self, now: float) -> Iterator[Effect]:
        return self.connection.beat(now, uploading=self.uploads.is_sending)

    # Messages.

    def _received(self, message: messages.Message, now: float) -> Iterator[Effect]:  # noqa: C901, PLR0912  a case for each message
        if self.join is None and not isinstance(message, messages.Error):
            self.connection.serves()
        match message:
            case messages.Welcome():
                if self.phase is Phase.JOINING:
                    yield from self._welcomed(message, now)
            case messages.Error():
                yield from self._failed(message, now)
            case messages.Rejoin(text=text):
                if self.connection.is_joined:
                    yield from self._disconnected(text or "The broker asks to join again.", now)
            case messages.Notice(nonce=int()):
                yield from self.votes.asked(message, self.connection.token or b"", now)
            case messages.Notice():
                yield from self._noticed(message, now)
            case messages.Grant():
                yield from self.uploads.granted(message)
            case messages.Ack():
                self.connection.bulk.moved(now)
                yield from self.uploads.acknowledged(message)
            case messages.Released():
                self.downloads.released(message)
                yield from self.previous_incarnation.look(
                    self.worker_id, message, self.downloads, self.uploads
                )
                yield from self._deliver_if_whole(message.fragment)
                yield from self._pull_frozen()
            case messages.Chunk():
                self.connection.bulk.moved(now)
                if self.connection.is_joined:
                    yield from self.downloads.chunk(message)
                    if message.delta_of is None:  # else with `Followed`
                        yield from self._stored(message.fragment)
            case messages.Result():
                yield from self.requests.answered(message)
                yield from self.units.answered(message, now)
            case _:
                yield effects.Say(
                    f"The broker sent a {message.kind}, which only workers send.", trouble=True
                )

    def _welcomed(self, welcome: messages.Welcome, now: float) -> Iterator[Effect]:
        assert self.join is not None and self.manifest is not None
        if not self.votes.goes_along(welcome.term):
            yield effects.Send(messages.Leave(welcome.session, REPLACED))
            yield from self._disconnected(REPLACED, now)
            return
        if self.terms is not None and self._is_resumed:
            misfit = changed(self.terms, welcome.config, welcome.plan)
            if misfit is not None:
                yield from self._forget("it has {} {}, the run has {} now".format(*misfit))
                if welcome.run is None:  # it may request the versions that this worker named
                    yield effects.Send(messages.Leave(welcome.session, "to join anew"))
                    yield self._join(now)
                    return
        asked = self.join.wants.get("sync_every")
        own = asked if isinstance(asked, int) else None
        try:
            terms = check_welcome(
                self.manifest,
                welcome,
                self.terms,
                asked_interval=self._asked_interval,
                asked_sync_every=own,
            )
        except ProtocolError as error:
            yield effects.Send(messages.Leave(welcome.session, str(error)))
            yield from self.connection.is_refused(Code.CONFIG_DIFFERS, str(error), now)
            return
        if self.downloads.is_part_of_another_run(welcome.run):
            for download in self.downloads.by_fragment.values():
                download.held = None
            yield effects.DropParts()
        self._set_terms(terms)
        self.connection.is_welcomed(welcome.session, terms.config, now, welcome.lease)
        self.run = welcome.run or self.run
        if (text := gives_way(terms.config, own)) is not None:
            yield effects.Say(text, trouble=True)
        yield effects.Told(welcome)
        yield from self.downloads.open_window(welcome.session)
        yield from self.units.welcomed()  # before pushes, which name data sets
        for upload in self.uploads:  # the oldest first
            if upload.is_gradient and not self.previous_incarnation.holds_back(upload.push):
                yield from self.uploads.offer(upload.push.push_id)
        yield from self._go_on_pulling(welcome, terms.layout)
        yield from self._send_requests()

    def _go_on_pulling(self, welcome: messages.Welcome, layout: ModelLayout) -> Iterator[Effect]:
        """After a welcome, request the versions that are still wanted, or new."""
        brokers = dict(enumerate(welcome.versions))
        for part in layout.all:
            fragment = part.fragment
            download, theirs = self.downloads.by_fragment[fragment], brokers.get(fragment)
            yield from self.previous_incarnation.keep(self.downloads, part, theirs)
            if welcome.run is not None:
                yield from self.downloads.left_behind(fragment, theirs)
            # Frozen parameters never change, so they are fetched once.
            here = part is layout.frozen and download.held is not None
            if not part.chunks or here:
                continue
            if part is layout.frozen and self._has_frozen:
                if self._frozen_tag is None and not self._is_naming:
                    self._is_naming = True
                    yield effects.NameFrozen(fragment)
                download.wanted = False  # on this connection
                yield from self._pull_frozen()
                continue
            in_flight = self.uploads.gradient(fragment) is not None
            if download.resume(theirs, in_flight=in_flight):
                if in_flight and fragment in self.previous_incarnation.unverified:
                    download.want_current()
                yield self.downloads.pull(fragment)

    def _pull_frozen(self) -> Iterator[Effect]:
        """Request the frozen parameters as held, once run and tag are known."""
        if self._frozen_tag is None or self.run is None or self.layout is None:
            return
        download = self.downloads.by_fragment[self.layout.frozen.fragment]
        if download.held is None and not download.wanted:
            download.want_own(VersionId(self.run, 0, self._frozen_tag))
            yield from self._pull(download.fragment)

    def _fetch_frozen(self) -> Iterator[Effect]:
        """The tag of the model's own frozen parameters is unknown: fetch the run's."""
        self._has_frozen = False
        if self.layout is not None:
            download = self.downloads.by_fragment[self.layout.frozen.fragment]
            if download.held is None:
                download.wanted = True
                yield from self._pull(download.fragment)

    def _set_terms(self, terms: Terms) -> None:
        if self.terms is None:
            self.downloads.set_layout(terms.layout)
            self._frozen_tag, self._is_naming = None, False  # other chunks have another tag
        self.terms = terms
        self.downloads.set_reply(terms.config.reply_dtype)

    def _failed(self, error: messages.Error, now: float) -> Iterator[Effect]:
        is_elsewhere = error.code in ELSEWHERE and self.connection.places.are_several
        if is_elsewhere and (self.phase is Phase.JOINING or error.code == Code.STANDBY):
            yield effects.Say(error.text, trouble=True)
            yield from self._turned_away(now)
        elif self.phase is Phase.JOINING:
            if error.code == Code.RUN_DIFFERS and self._is_resumed:
                yield from self._forget("this broker serves another run")
                yield self._join(now)
            elif error.retry or error.code == Code.STOPPING:
                self.connection.puts_off(now)
                yield effects.Say(error.text, trouble=True)
            else:
                yield from self.connection.is_refused(error.code, error.text, now)
        elif error.push_id is not None and error.push_id in self.uploads:
            upload = self.uploads.by_id[error.push_id]
            yield from self.uploads.refused(upload, error, now)
            if upload.is_gradient and error.push_id not in self.uploads:
                download = self.downloads.by_fragment[upload.push.fragment]
                download.wanted = download.takes_any  # no version is awaited for the push
        elif error.about == "pull":
            yield effects.Say(error.text, trouble=True)
            self.downloads.again(now + RETRY_S)
        elif error.push_id is None:
            yield from self.requests.failed(error)
            yield from self.units.failed(error)
            yield effects.Say(error.text, trouble=True)

    def _noticed(self, notice: messages.Notice, now: float) -> Iterator[Effect]:
        match notice.what:
            case "ping":
                yield from self._beat(now)
            case "describe" if self.manifest is not None and self.phase is Phase.JOINING:
                description = describe(self.manifest)
                self.connection.describes(len(description.packed), now)
                for piece in description.pieces():
                    yield effects.Send(messages.Describe(piece))
            case "seed":
                yield from self._seed(notice.fragment)
            case "shutdown" | "restarting" | "deferred":
                yield effects.Told(notice)
            case "kicked":
                yield from self.connection.is_removed(notice, now)
                yield from self._void()
            case "save_all":
                yield effects.Told(notice)
                yield effects.Say(notice.text)
            case "over" | "stop_all":
                self._over = notice
            case "waiting" | "last_round":
                yield effects.Say(notice.text)
            case "sync_every" if notice.sync_every and self.terms is not None:
                config = replace(self.terms.config, sync_every=notice.sync_every)
                self.terms = replace(self.terms, config=config)
                yield effects.Say(notice.text)
            case "alive" if notice.sync_every is not None and notice.sync_every > 0:
                yield effects.Told(notice)

    def _end_if_due(self) -> Iterator[Effect]:
        """The run is over: notify training once no work is in flight, or the connection breaks."""
        if self._over is not None and not any(each.is_gradient for each in self.uploads):
            yield self._end(self._over)

    def _end(self, over: messages.Notice) -> Effect:
        self._over = None
        return effects.Told(replace(over, what="shutdown"))

    # Going on from a checkpoint.

    @property
    def _is_resumed(self) -> bool:
        """Whether the held versions are of a checkpoint that no broker has confirmed."""
        return self.connection.token is None and self.run is not None

    def _resume(self, event: events.Resume) -> None:
        self._set_terms(event.terms)
        for fragment, held in event.held.items():
            download = self.downloads.of(fragment)
            download.held = held
            self.run = held.version.run
            if fragment != event.terms.layout.frozen.fragment:
                download.want_newest(None)
        self.previous_incarnation = PreviousIncarnation(event.held)

    def _forget(self, why: str) -> Iterator[Effect]:
        """The checkpoint does not fit: join as a new worker."""
        run, self.run = self.run, None
        self.terms = self.lanes.owners = None
        self.downloads = Downloads(self.connection, observer=False, lanes=self.lanes)
        self.previous_incarnation = PreviousIncarnation()
        yield effects.ForgetCheckpoint(FORGOTTEN.format(run=run, why=why))

    # Several processes.

    def _share_out(self, owners: Owners) -> Iterator[Effect]:
        if self.lanes.are_known:
            raise ValueError("the chunks are shared out once, among the processes of one worker")
        self.lanes.owners = owners
        if (token := self.connection.live_token) is not None:
            yield from self.downloads.open_window(token)
            for fragment in self._asked_for:
                yield from self._seed(fragment)

    def _arrived_elsewhere(self, chunk: messages.Chunk, now: float) -> Iterator[Effect]:
        self.connection.last_heard = now
        if self.connection.is_joined:
            self.connection.bulk.moved(now)
            yield from self.downloads.take(chunk, is_here=False)
            yield from self._stored(chunk.fragment)

    def _stored(self, fragment: int) -> Iterator[Effect]:
        """A chunk was decoded."""
        yield from self._deliver_if_whole(fragment)
        yield from self._pull_frozen()

    # Up.

    def _offer(self, push: messages.Push) -> Iterator[Effect]:
        download = self.downloads.of(push.fragment)
        if push.push_id in self.uploads:
            raise ValueError(
                f"push {push.push_id:#x} has been offered already; a push is offered once"
            )
        if self.join is None or push.purpose is not messages.Purpose.GRADIENT:
            raise ValueError("only a worker that takes part pushes, and only pseudo-gradients")
        if self.layout is not None:
            push = self.units.offered(push, self.layout)
        yield from self.uploads.begin(push)
        if self.previous_incarnation.holds_back(push):
            download.want_current()
        else:
            download.want_next()
            yield from self.uploads.offer(push.push_id)
        yield from self._pull(push.fragment)

    def _seed(self, fragment: int) -> Iterator[Effect]:
        if not self.lanes.are_known:
            self._asked_for.append(fragment)
            return
        if (
            not self.connection.is_joined
            or self.layout is None
            or self.uploads.is_seeding(fragment)
        ):
            return
        sizes = {part.fragment: part.chunks for part in self.layout.all}
        if not sizes.get(fragment):
            yield effects.Say(
                f"The broker asks for fragment {fragment}, which is empty.", trouble=True
            )
            return
        held = self.downloads.by_fragment[fragment].held
        yield from self.uploads.seed(fragment, sizes[fragment], held, self._draw)

    # Down.

    def _pull(self, fragment: int) -> Iterator[Effect]:
        if self.connection.is_joined:
            yield self.downloads.pull(fragment)

    def _deliver_if_whole(self, fragment: int) -> Iterator[Effect]:
        """Deliver a version if it is complete and the awaited one."""
        if (download := self.downloads.by_fragment.get(fragment)) is None or not download.is_whole:
            return
        takes_any = download.takes_any
        released = download.finish()
        in_flight = self.uploads.gradient(fragment) is not None
        counted = self.uploads.counted(self.worker_id, fragment, released.ledger)
        if takes_any or not in_flight or counted is not None:
            unchanged = download.is_here(released.version)
            superseding = self.previous_incarnation.delivers(fragment)
            yield effects.Deliver(released, counted, unchanged, superseding)
            if download.held is None or download.held.version != released.version:
                download.held = Held(released.version, released.ledger)
                self.run = released.version.run
        if counted is not None:
            self.previous_incarnation.unverified.pop(fragment, None)
            self.units.counted(counted)
            yield effects.PushOver(counted)
        elif in_flight:
            download.wanted = True
            yield self.downloads.pull(fragment)
            yield from self.previous_incarnation.let_go(fragment, self.uploads)

    def _send_requests(self) -> Iterator[Effect]:
        if self.connection.is_joined:
            yield from self.requests.send()

    def check_invariants(self) -> None:
        """Raise AssertionError when an invariant is broken; for tests."""
        self.uploads.check_invariants(joined=self.connection.is_joined)
        self.downloads.check_invariants()
        self.requests.check_invariants()
        self.units.check_invariants()
        for upload in self.uploads:
            if upload.is_gradient:
                assert self.downloads.by_fragment[upload.push.fragment].wanted, (
                    "no version is requested for a push"
                )
