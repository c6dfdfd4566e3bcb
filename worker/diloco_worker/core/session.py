"""The worker's own state machine: `handle(event, now)` returns the effects to carry out.

No socket, tensor, clock, thread or file in here: time is an argument, random numbers are handed in.

    NEW -> CONNECTING -> JOINING -> JOINED
                ^           |          |
                |           v          |
                +-- AWAY <-- connection broke, `rejoin`, or silence; never longer than 2 s
    REFUSED: the broker says no and asking again cannot help. Before the first welcome that is the
             end, and so it is when an operator has removed this worker; later it is asked again
             every 30 s, since a person may mend the broker.
    LEFT: the end.

The rules that everything else follows from:

- A push and its chunks never change. A new connection voids all credit; the push is offered again with
  the same push id and base, and the broker's grant says what it still lacks.
- A push is over when a version is here, whole, whose ledger names it whole, or when the broker ends it
  with an error. A whole version that does not name it is discarded and the next one is asked for.
- What has been delivered is held: it is named when the worker comes back, and donated when the broker
  asks, also before training has merged it.
- A download goes on where it stopped. Chunks of another version make it begin anew. Each chunk that
  comes gives one credit back, also one that is dropped.
- A worker that goes on from a checkpoint joins as one that outlived its broker; `former` has the rest.
- An illegal command raises before anything has changed. The broker can say nothing illegal: what does
  not fit is dropped and said aloud.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from diloco_protocol import Code, Manifest, ModelLayout, RunConfig
from diloco_protocol.messages import (
    Ack,
    Chunk,
    Error,
    Grant,
    Join,
    Leave,
    Message,
    Notice,
    Purpose,
    Push,
    Rejoin,
    Released,
    Result,
    Welcome,
)
from diloco_worker.core.compatibility import agree, changed, cut, gives_way, heartbeat_interval
from diloco_worker.core.control_requests import Asks
from diloco_worker.core.downloads import Pulls
from diloco_worker.core.events import (
    Ask,
    Beat,
    Carried,
    Close,
    Connected,
    Deliver,
    Depart,
    Discard,
    Disconnected,
    Doubt,
    DropParts,
    Effect,
    Event,
    Forget,
    Hold,
    Joined,
    JoinRefused,
    Observe,
    Offer,
    Open,
    Paced,
    Prepared,
    Pulse,
    PushOver,
    Received,
    Restarting,
    Resume,
    Say,
    Send,
    Start,
    Stopping,
    Tick,
    Want,
    Withdraw,
)
from diloco_worker.core.previous_life import FORGOTTEN, FormerLife
from diloco_worker.core.timeouts import (
    FIRST_BACKOFF_S,
    JOIN_PATIENCE_S,
    LONGEST_BACKOFF_S,
    REFUSED_RETRY_S,
    RETRY_S,
    SILENT_BEATS,
    SILENT_S,
    BulkWatch,
)
from diloco_worker.core.uploads import Pushes


class Phase(str, Enum):
    NEW = "new"
    CONNECTING = "connecting"
    JOINING = "joining"
    JOINED = "joined"
    AWAY = "away"
    REFUSED = "refused"
    LEFT = "left"


class Session:
    """See the head of this module.

    Args:
        worker_id: 1 to 64 printable characters.
        manifest: the model; None for an observer, which only asks and pulls.
        draw: returns a random number below 2**64 (push ids of donations).
        wants: configuration fields that this worker insists on.
        heartbeat_interval: seconds; None = 30 or a third of what the broker tolerates; 0 = none.
        host, pid, extra: shown in the broker's displays.

    Attributes:
        config, layout: how the run is trained and how the model is cut; None before a welcome.
        plan: fragment of each manifest entry, as the broker told it.
        pushes, pulls, asks: what is under way up and down, and what is to be answered.
        former: what an earlier life of this worker may have left behind.
        reconnections: welcomes after the first.
        last_heard: when the broker last said anything; None before it has.
    """

    def __init__(
        self,
        worker_id: str,
        manifest: Manifest | None,
        draw: Callable[[], int],
        *,
        wants: Mapping[str, Any] | None = None,
        heartbeat_interval: float | None = None,
        host: str = "",
        pid: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.manifest = manifest
        self.wants = dict(wants or {})
        self.host = host
        self.pid = pid
        self.extra = dict(extra or {})
        self.phase = Phase.NEW
        self.config: RunConfig | None = None
        self.layout: ModelLayout | None = None
        self.plan: tuple[int, ...] = ()
        self.token: bytes | None = None
        self.run: str | None = None
        self.pushes = Pushes()
        self.pulls = Pulls(observer=manifest is None)
        self.asks = Asks()
        self.former = FormerLife()
        self.reconnections = 0
        self.last_heard: float | None = None
        self.refusal: str | None = None
        self._draw = draw
        self._observer = manifest is None
        self._asked_interval = heartbeat_interval
        self._interval = 0.0
        self._backoff = FIRST_BACKOFF_S
        self._wake_at: float | None = None  # reopen (AWAY) or join again (JOINING, REFUSED)
        self._beat_at: float | None = None
        self._joining_since = 0.0
        self._bulk = BulkWatch()

    # What the shell asks.

    @property
    def is_joined(self) -> bool:
        return self.phase is Phase.JOINED

    @property
    def _live_token(self) -> bytes | None:
        """The session on the connection at hand."""
        return self.token if self.phase is Phase.JOINED else None

    def wakes_at(self, now: float) -> float | None:
        """When a `Tick` has something to do; None = not by itself."""
        times = [*self.pulls.times, *self.pushes.times]
        if (since := self._waits_since()) is not None:
            times.append(since + JOIN_PATIENCE_S)
        others = (self._wake_at, self._beat_at, self._silent_at(), self._bulk.gives_up_at)
        return min([*times, *(at for at in others if at is not None)], default=None)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event. Returns the effects to carry out, in order.

        Raises:
            ValueError: for a command that cannot be meant; nothing has changed.
        """
        effects = [] if self.phase is Phase.LEFT else self._handle(event, now)
        waits = self.is_joined and (self.pushes.waits_for_acks or self.pulls.waits_for_chunks)
        self._bulk.look(waits, now)
        return effects

    def _handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Start():
                if self.phase is not Phase.NEW:
                    raise ValueError(f"a session starts once, this one is {self.phase.value}")
                return self._open()
            case Connected():
                return list(self._connected(now))
            case Disconnected(reason):
                return list(self._disconnected(reason, now))
            case Received(message):
                self.last_heard = now
                return list(self._received(message, now))
            case Offer(push):
                self._check_offer(push)
                return list(self._offer(push))
            case Want(fragment, after):
                self.pulls.of(fragment)
                return list(self._want(fragment, after))
            case Hold(fragment, version, ledger):
                self.pulls.hold(fragment, version, ledger)
                self.run = version.run
                return []
            case Observe(manifest, config, plan):
                self._furnish(cut(manifest, config, plan), config, plan)
                return []
            case Resume():
                self._resume(event)
                return []
            case Prepared(push_id):
                return list(self.pushes.prepared(push_id, self._live_token))
            case Doubt(fragment, known):
                self.former.doubt(fragment, known)
                return []
            case Ask():
                self.asks.add(event)
                return list(self._send_asks())
            case Withdraw(request):
                self.asks.withdraw(request)
                return []
            case Pulse():
                return list(self._beat(now))
            case Depart(reason):
                return list(self._depart(reason))
            case Tick():
                return list(self._tick(now))
            case _:
                raise TypeError(f"not an event of a session: {event!r}")

    # Connections.

    def _open(self) -> list[Effect]:
        self.phase = Phase.CONNECTING
        self._wake_at = None
        return [Open()]

    def _connected(self, now: float) -> Iterator[Effect]:
        if self.phase is not Phase.CONNECTING:
            return
        if self._observer:
            self.phase = Phase.JOINED
            self._backoff = FIRST_BACKOFF_S
            yield from self._send_asks()
            for fragment, download in self.pulls.downloads.items():
                if download.wanted:
                    yield self.pulls.pull(fragment, None)
        else:
            yield from self._join(now)

    def _join(self, now: float) -> Iterator[Effect]:
        assert self.manifest is not None
        self.phase = Phase.JOINING
        self._joining_since = now
        self._wake_at = None
        if not self.pulls.has_all:
            # The connection broke during the first pull. Part of a model can be given to nobody, and
            # a worker that has never had a whole one belongs to no run.
            self.run = None
        yield Send(
            Join(
                worker_id=self.worker_id,
                manifest=self.manifest,
                run=self.run,
                session=self.token,
                versions=self.pulls.versions,
                wants=self.wants,
                host=self.host,
                pid=self.pid,
                extra=self.extra,
            )
        )

    def _disconnected(self, reason: str, now: float) -> Iterator[Effect]:
        is_final = self.phase is Phase.REFUSED and self.token is None  # nobody wants it back
        if is_final or self.phase in (Phase.NEW, Phase.AWAY):
            return
        yield Close()
        if self.phase is Phase.JOINED:
            yield Say(f"{reason} Connecting again.", trouble=True)
        self.phase = Phase.AWAY
        self._wake_at = now + self._backoff
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF_S)
        self._beat_at = None
        self.pulls.disconnected()
        yield from self.pushes.disconnected()
        yield from self.asks.disconnected()

    def _waits_since(self) -> float | None:
        """When the join was sent that has no answer yet."""
        unanswered = self.phase is Phase.JOINING and self._wake_at is None
        return self._joining_since if unanswered else None

    def _silent_at(self) -> float | None:
        """When the silence of a joined broker counts as a broken connection."""
        if self.phase is not Phase.JOINED or not self._interval or self.last_heard is None:
            return None
        return self.last_heard + max(SILENT_BEATS * self._interval, SILENT_S)

    def _tick(self, now: float) -> Iterator[Effect]:
        if self._wake_at is not None and now >= self._wake_at:
            self._wake_at = None
            if self.phase is Phase.AWAY:
                yield from self._open()
            else:
                yield from self._join(now)
        since = self._waits_since()
        if since is not None and now - since >= JOIN_PATIENCE_S:
            reason = f"The broker did not answer the join within {JOIN_PATIENCE_S:g} s."
            yield from self._disconnected(reason, now)
        if (silent_at := self._silent_at()) is not None and now >= silent_at:
            silence = now - (self.last_heard or now)
            yield from self._disconnected(f"Nothing was heard for {silence:.0f} s.", now)
        if self._bulk.is_dead(now):
            yield from self._disconnected(self._bulk.give_up(), now)
        if self._beat_at is not None and now >= self._beat_at:
            yield from self._beat(now)
        yield from self.pulls.tick(now, self._live_token)
        yield from self.pushes.tick(now, self._live_token)

    def _beat(self, now: float) -> Iterator[Effect]:
        if self.phase is Phase.JOINED and self.token is not None:
            self._beat_at = now + self._interval if self._interval else None
            yield Beat(self.token, self.pushes.is_sending)

    def _depart(self, reason: str) -> Iterator[Effect]:
        if self.phase is Phase.JOINED and self.token is not None:
            yield Send(Leave(self.token, reason))
        self.phase = Phase.LEFT

    # Messages.

    def _received(self, message: Message, now: float) -> Iterator[Effect]:
        match message:
            case Welcome():
                yield from self._welcome(message, now)
            case Error():
                yield from self._error(message, now)
            case Rejoin(text=text):
                if self.phase is Phase.JOINED:
                    yield from self._disconnected(text or "The broker asks to join again.", now)
            case Notice():
                yield from self._notice(message, now)
            case Grant():
                yield from self.pushes.granted(message, self._live_token)
            case Ack():
                self._bulk.moved(now)
                yield from self.pushes.acknowledged(message, self._live_token)
            case Released():
                self.pulls.released(message)
                yield from self.former.look(self.worker_id, message, self.pulls, self.pushes)
                yield from self._finish(message.fragment)
            case Chunk():
                self._bulk.moved(now)
                if self.phase is Phase.JOINED:
                    yield from self.pulls.chunk(message, self._live_token)
                    yield from self._finish(message.fragment)
            case Result():
                yield from self.asks.answered(message)
            case _:
                yield Say(f"The broker sent a {message.kind}, which workers send.", trouble=True)

    def _welcome(self, welcome: Welcome, now: float) -> Iterator[Effect]:
        if self.phase is not Phase.JOINING:
            return
        assert self.manifest is not None
        misfit = changed(self.config, welcome.config, self.plan, welcome.plan)
        if misfit is not None and self._is_resumed:
            yield from self._forget("it has {} {}, the run has {} now".format(*misfit))
        asked = self.wants.get("sync_every")
        own = asked if isinstance(asked, int) else None
        earlier = (self.config, self.plan, self.layout)
        layout = agree(self.manifest, welcome, earlier, self._asked_interval, own)
        if isinstance(layout, str):
            yield Send(Leave(welcome.session, layout))
            yield from self._refused(Code.CONFIG_DIFFERS, layout, now)
            return
        again = self.token is not None
        if not self.pulls.has_all and any(
            h.version.run != welcome.run for h in self.pulls.held.values()
        ):
            self.pulls.held.clear()
            yield DropParts()
        self._furnish(layout, welcome.config, welcome.plan)
        self.phase = Phase.JOINED
        self.token = welcome.session
        self.run = welcome.run or self.run
        self.refusal = None
        self.reconnections += again
        self._backoff = FIRST_BACKOFF_S
        self._wake_at = None
        self._beat_at = now + self._interval if self._interval else None
        if (text := gives_way(welcome.config, own)) is not None:
            yield Say(text, trouble=True)
        yield Joined(welcome, layout, again)
        yield self.pulls.open_window(self.token)
        for upload in self.pushes:  # the oldest first
            if upload.is_gradient and not self.former.holds_back(upload.push):
                yield from self.pushes.offer(upload.push.push_id, self.token)
        for part in layout.all:
            fragment = part.fragment
            theirs = dict(enumerate(welcome.versions)).get(fragment)
            yield from self.former.keep(self.pulls, part, theirs)
            if welcome.run is not None:
                yield from self.pulls.left_behind(fragment, theirs)
            # Frozen parameters never change, so they come once.
            here = part is layout.frozen and fragment in self.pulls.held
            if part.chunks and not here:
                in_flight = self.pushes.gradient(fragment) is not None
                for _ in self.pulls.resume(fragment, theirs, in_flight=in_flight):
                    if in_flight and self.former.doubts(fragment):
                        self.pulls.want_current(fragment)
                    yield self.pulls.pull(fragment, self.token)
        yield from self._send_asks()

    # Going on from a checkpoint.

    @property
    def _is_resumed(self) -> bool:
        """Whether what is held comes from a checkpoint and no broker has said that it fits."""
        return self.token is None and self.run is not None

    def _resume(self, event: Resume) -> None:
        assert self.manifest is not None
        layout = cut(self.manifest, event.config, event.plan)
        self._furnish(layout, event.config, event.plan)
        for fragment, held in event.held.items():
            self.pulls.hold(fragment, held.version, held.ledger)
            self.run = held.version.run
            if fragment != layout.frozen.fragment:
                self.pulls.want_newest(fragment, None)
        self.former = FormerLife(event.held)

    def _forget(self, why: str) -> Iterator[Effect]:
        """The checkpoint does not fit: join as a new worker does."""
        run, self.run = self.run, None
        self.config, self.layout, self.plan = None, None, ()
        self.pulls = Pulls(observer=False)
        self.former = FormerLife()
        yield Forget(FORGOTTEN.format(run=run, why=why))

    def _furnish(self, layout: ModelLayout, config: RunConfig, plan: tuple[int, ...]) -> None:
        self.config = config
        if self.layout is None:
            self.layout, self.plan = layout, plan
            self.pulls.furnish(layout)
        if not self._observer:
            self._interval = heartbeat_interval(config, self._asked_interval)

    def _error(self, error: Error, now: float) -> Iterator[Effect]:
        if self.phase is Phase.JOINING:
            if error.code == Code.RUN_DIFFERS and self._is_resumed:
                yield from self._forget("this broker serves another run")
                yield from self._join(now)
            elif error.retry or error.code == Code.STOPPING:
                self._wake_at = now + RETRY_S
                yield Say(error.text, trouble=True)
            else:
                yield from self._refused(error.code, error.text, now)
            return
        if error.push_id in self.pushes:
            assert error.push_id is not None
            upload = self.pushes.uploads[error.push_id]
            yield from self.pushes.refused(error, now)
            if upload.is_gradient and error.push_id not in self.pushes:
                self.pulls.want_no_more(upload.push.fragment)
        elif error.about == "pull":
            yield Say(error.text, trouble=True)
            self.pulls.again(now + RETRY_S)
        elif error.push_id is None:
            yield from self.asks.failed(error)
            yield Say(error.text, trouble=True)

    def _refused(self, code: str, text: str, now: float) -> Iterator[Effect]:
        final = self.token is None
        self.phase = Phase.REFUSED
        self.refusal = text
        self._wake_at = None if final else now + REFUSED_RETRY_S
        self._beat_at = None
        yield JoinRefused(code, text, final)

    def _notice(self, notice: Notice, now: float) -> Iterator[Effect]:
        match notice.what:
            case "ping":
                yield from self._beat(now)
            case "donate":
                yield from self._donate(notice.fragment)
            case "shutdown":
                yield Stopping(notice.text)
            case "restarting":
                yield Restarting(notice.text)
            case "kicked":
                self.token = None  # there is no way back
                yield Stopping(notice.text)
                yield from self._refused(Code.NOT_ALLOWED, notice.text, now)
            case "waiting":
                yield Say(notice.text)
            case "carried":
                yield Carried(notice.fragment, notice.round)
            case "sync_every" if notice.sync_every and self.config is not None:
                self.config = replace(self.config, sync_every=notice.sync_every)
                yield Say(notice.text)
            case "alive" if notice.sync_every is not None and notice.sync_every > 0:
                yield Paced(notice.sync_every)

    # Up.

    def _check_offer(self, push: Push) -> None:
        self.pulls.of(push.fragment)
        if push.push_id in self.pushes:
            raise ValueError(f"push {push.push_id:#x} has been offered already, it goes on once")
        if self._observer or push.purpose is not Purpose.GRADIENT:
            raise ValueError("only a worker that takes part pushes, and only pseudo-gradients")

    def _offer(self, push: Push) -> Iterator[Effect]:
        yield from self.pushes.begin(push)
        if self.former.holds_back(push):
            self.pulls.want_current(push.fragment)
        else:
            self.pulls.want_next(push.fragment)
            yield from self.pushes.offer(push.push_id, self._live_token)
        if self.is_joined:
            yield self.pulls.pull(push.fragment, self.token)

    def _donate(self, fragment: int) -> Iterator[Effect]:
        if not self.is_joined or self.layout is None or self.pushes.donation(fragment):
            return
        sizes = {part.fragment: part.chunks for part in self.layout.all}
        if not sizes.get(fragment):
            yield Say(f"The broker asks for fragment {fragment}, which is empty.", trouble=True)
            return
        held = self.pulls.held.get(fragment)
        yield from self.pushes.donate(fragment, sizes[fragment], held, self._draw, self.token)

    # Down.

    def _want(self, fragment: int, after: int | None) -> Iterator[Effect]:
        self.pulls.want_newest(fragment, after)
        if self.is_joined:
            yield self.pulls.pull(fragment, self.token)

    def _finish(self, fragment: int) -> Iterator[Effect]:
        """Hand over a version if it is whole now and the one that is waited for."""
        if (download := self.pulls.downloads.get(fragment)) is None or not download.is_whole:
            return
        whatever = download.whatever
        released = download.finish()
        in_flight = self.pushes.gradient(fragment) is not None
        counted = self.pushes.counted(self.worker_id, fragment, released.ledger)
        if whatever or not in_flight or counted is not None:
            held = self.pulls.held.get(fragment)
            unchanged = held is not None and held.version == released.version
            yield Deliver(released, counted, unchanged, self.former.delivers(fragment))
        else:
            yield Discard(fragment)
        if counted is not None:
            self.former.forget(fragment)
            yield PushOver(counted)
        elif in_flight:
            download.wanted = True
            yield self.pulls.pull(fragment, self._live_token)
            yield from self.former.let_go(fragment, self.pushes, self._live_token)

    def _send_asks(self) -> Iterator[Effect]:
        if self.phase is Phase.JOINED:
            yield from self.asks.send()

    def check_invariants(self) -> None:
        """Raise AssertionError when the books do not balance; for tests."""
        self.pushes.check_invariants(joined=self.is_joined)
        self.pulls.check_invariants()
        self.asks.check_invariants()
        for upload in self.pushes:
            if upload.is_gradient:
                assert self.pulls.downloads[upload.push.fragment].wanted, "nobody waits for a push"
