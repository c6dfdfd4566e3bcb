"""Members of the run: sessions, connections, liveness and figures.

A session starts with a join: it has a random 128-bit token, the control connection of the join, and the
data connection that is bound later. A worker that reconnects joins again with its token. A message with
the token is the worker's only if it arrives on the control connection or a data connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from diloco_broker.core import effects
from diloco_broker.core.members.dylu import average_speed
from diloco_broker.core.relays.relay import Relay
from diloco_broker.core.rounds.uploads import Account, Uploads
from diloco_protocol import messages
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.version import VersionId

MAX_HOST_LENGTH = 255
MAX_WARNING_LENGTH = 300
MAX_STATE_LENGTH = 20  # characters of a worker's state, which displays show


def own_sync_every(wants: Mapping[str, Any]) -> int | None:
    """H that a worker has asked for; None if it uses the run's."""
    asked = wants.get("sync_every")
    return asked if isinstance(asked, int) and not isinstance(asked, bool) else None


@dataclass
class Liveness:
    """Liveness of a worker. Times are of the core's clock."""

    last_seen: float  # its last message
    probed_at: float  # when it was last probed, to find out whether its connection is broken
    beat_at: float  # its last heartbeat
    moved_at: float  # its last heartbeat that showed progress
    disconnected_at: float | None = None  # when its connection broke; None while it is connected
    contested_at: float | None = None  # when another worker asked for its id
    is_stalled: bool = False  # it makes no progress, and rounds do not wait for it

    def hear(self, now: float) -> None:
        self.last_seen = now
        self.disconnected_at = None

    def disconnect(self, now: float) -> None:
        self.disconnected_at = now

    def contest(self, now: float | None) -> None:
        """Another worker asks for its id; `now` is None once that is settled."""
        self.contested_at = now

    def beat(self, now: float, *, has_moved: bool) -> None:
        self.beat_at = now
        if has_moved:
            self.moved_at = now

    def stall(self) -> None:
        self.is_stalled = True

    def move(self, now: float) -> bool:
        """Note progress. Returns whether it was stalled before."""
        was_stalled, self.is_stalled, self.moved_at = self.is_stalled, False, now
        return was_stalled

    def stood_still(self) -> float:
        """Seconds without a step in the state "training", as of its last heartbeat."""
        return self.beat_at - self.moved_at


@dataclass(frozen=True)
class SentUpdate:
    """The last complete update of a worker for one fragment, to detect identical ones of others."""

    base: VersionId | None
    fingerprint: int  # of `tensors.fingerprint`


@dataclass
class Figures:
    """Figures of a worker for displays: its last report about itself, and its contributions."""

    host: str = ""
    pid: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0  # optimizer steps in total
    inner_step: int = 0  # optimizer steps in the current cycle
    told_at: float | None = None  # when it reported its inner step; None: the broker inferred it
    state: str = "joining"
    steps_per_s: float | None = None
    speed: float | None = None  # `steps_per_s` as an average over heartbeats
    loss: float | None = None
    tokens: int = 0
    warning: str | None = None  # a sentence; None if it has nothing to warn of now
    has_warned: bool = False
    merge_delay: int | None = None  # steps from sync step to merge, of its last reported merge
    pushes: int = 0  # accepted
    rejected: int = 0
    # Euclidean length of its last complete push of each fragment, as the broker measured it; the newest
    # push is the last entry.
    norms: dict[int, float] = field(default_factory=dict)
    sent: dict[int, SentUpdate] = field(default_factory=dict)  # by fragment
    same_as: str | None = None  # a worker whose last update from the same version was identical
    is_known_as_alike: bool = False  # it was warned about already
    staleness: int = 0
    last_round: int | None = None
    # When a version last counted a push of this worker; `staleness` is that of this push.
    counted_at: float | None = None

    def take(self, beat: messages.Heartbeat, now: float) -> bool:
        """Update from a heartbeat. Returns whether the worker has made progress."""
        has_moved = beat.step != self.step or beat.state != "training" or self.told_at is None
        self.told_at = now
        self.step = beat.step
        self.inner_step = beat.inner_step
        self.state = beat.state[:MAX_STATE_LENGTH]
        self.steps_per_s = beat.steps_per_s
        self.speed = average_speed(self.speed, beat.steps_per_s)
        self.loss = beat.loss if beat.loss is not None else self.loss
        self.tokens = max(self.tokens, beat.tokens)
        self.warning = beat.warning[:MAX_WARNING_LENGTH] if beat.warning else None
        if beat.merge_delay is not None:
            self.merge_delay = beat.merge_delay
        return has_moved

    def push_begins(self, push: messages.Push, number: int | None) -> None:
        """Note an accepted push, for round `number` if the run has rounds."""
        self.pushes += 1
        self.state = "pushing"
        self.inner_step, self.told_at = push.steps, None
        self.loss = push.loss if push.loss is not None else self.loss
        if number is not None:
            self.last_round = number

    def push_counts(self, staleness: int, now: float) -> None:
        """Note that a version with a push of this worker was released.

        The worker will continue from that version, unless it has reported since its push that it trains.
        """
        if self.state != "training" or self.told_at is None:
            self.inner_step, self.told_at = 0, None
        self.state = "training"
        self.staleness, self.counted_at = staleness, now

    def is_measured(self, fragment: int, norm: float) -> None:
        self.norms.pop(fragment, None)
        self.norms[fragment] = norm


@dataclass(frozen=True)
class Binding:
    """A data connection of a worker of several processes."""

    route: effects.Route
    shares: tuple[Bitmap, ...]  # by fragment, the chunks that it carries
    credit: int  # when it was bound


@dataclass
class Member:
    """A worker that has joined."""

    worker_id: str
    session: bytes  # the session token
    control: effects.Route
    joined_at: float  # run time
    liveness: Liveness
    relay: Relay | None = None  # through which its connections go
    bulk: effects.Route | None = None  # its first data connection; None until a credit binds it
    processes: int = 1
    voter: int | None = None  # random number of this process of the worker
    # Of a worker of several processes: its other bound data connections, by index from 1 on.
    lanes: dict[int, Binding] = field(default_factory=dict)
    sync_every: int | None = None  # its own H; None if it uses the run's
    versions: tuple[VersionId | None, ...] = ()  # by fragment, the version it held when it joined
    # How often it was too slow as a seed worker; infinite: its parameters cannot be used.
    seed_failures: float = 0
    # By fragment, a push whose round is not open yet.
    deferred: dict[int, messages.Push] = field(default_factory=dict)
    # By fragment, pulls received before the data connection was bound, or while a hub had no lease.
    early_pulls: dict[int, messages.Pull] = field(default_factory=dict)
    uploads: Uploads = field(default_factory=Uploads)
    figures: Figures = field(default_factory=Figures)
    account: Account = field(default_factory=Account)

    @property
    def via(self) -> str:
        """The name of its relay; empty for a direct connection."""
        return "" if self.relay is None else self.relay.name

    @property
    def has_trained(self) -> bool:
        """Whether it has made a step or a push."""
        return self.figures.step > 0 or self.figures.pushes > 0

    def comes_back_as(self, join: messages.Join) -> bool:
        """Whether this join is from the same process on new connections.

        It has the same session token. If its welcome was lost, it has none, but the same voter number.
        """
        is_same_process = join.voter is not None and join.voter == self.voter
        return join.session == self.session or is_same_process

    def tell(self, message: messages.Message) -> effects.Send:
        return effects.Send(self.control, message)

    @property
    def routes(self) -> list[effects.Route]:
        """Its bound connections."""
        found = [self.control, *(each.route for each in self.lanes.values())]
        return found if self.bulk is None else [*found, self.bulk]

    def takes_chunks_on(self, route: effects.Route) -> bool:
        """Whether this is a data connection of this worker that is bound now."""
        if self.processes == 1 or route == self.bulk:
            return True
        return any(each.route == route for each in self.lanes.values())

    def lane_of(self, route: effects.Route) -> int:
        """The lane of a connection; 0 if it is not bound."""
        for index, each in self.lanes.items():
            if each.route == route:
                return index
        return 0

    def defer(self, push: messages.Push) -> None:
        """Defer a push; it replaces an earlier deferred one of its fragment."""
        self.deferred[push.fragment] = push

    def take_deferred(self, fragment: int) -> messages.Push | None:
        """Remove and return the deferred push of a fragment."""
        return self.deferred.pop(fragment, None)

    def forget_work(self) -> None:
        """Drop all pushes and pulls in progress: the worker is dead, or will send them again."""
        self.uploads.clear()
        self.deferred.clear()
        self.early_pulls.clear()

    def unfinished_pushes(self) -> list[messages.Push]:
        """Pushes that are in progress, complete or deferred, and not in any version."""
        waiting = list(self.deferred.values())
        return waiting + [each.push for each in self.uploads if not each.is_void]

    def has_unfinished(self, push: messages.Push) -> bool:
        key = push.fragment, push.push_id
        return any((each.fragment, each.push_id) == key for each in self.unfinished_pushes())

    def begins(self, push: messages.Push, number: int | None) -> None:
        self.take_deferred(push.fragment)  # an earlier one, which this one replaces
        self.figures.push_begins(push, number)

    def counts(self, push: messages.Push, staleness: int, now: float) -> None:
        """Note that a version with this push is being released."""
        self.uploads.void(push.fragment, push.push_id)
        self.figures.push_counts(staleness, now)
        self.account.staleness[push.fragment] = staleness

    def counters(self) -> dict[str, int]:
        return {
            "pushes": self.figures.pushes,
            "rejected": self.figures.rejected,
            "bytes_up": self.account.bytes_up,
            "bytes_down": self.account.bytes_down,
        }

    def goes_on_from(self, counters: Mapping[str, int]) -> None:
        """Continue from the counters of a checkpoint."""
        self.figures.pushes = counters.get("pushes", 0)
        self.figures.rejected = counters.get("rejected", 0)
        self.account.bytes_up = counters.get("bytes_up", 0)
        self.account.bytes_down = counters.get("bytes_down", 0)


class Membership:
    """The members, by session token, worker id and connection; each live id occurs once.

    Connections of a member change only through the methods here, which keep the index of them: the
    broker looks up the sender of a message, and there may be hundreds of members.
    """

    def __init__(self) -> None:
        self._by_session: dict[bytes, Member] = {}
        self._by_id: dict[str, Member] = {}
        # Several members may have joined on one connection; the first one that has it counts.
        self._by_route: dict[effects.Route, list[Member]] = {}
        self.gone = 0  # how many have been removed

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._by_id

    def named(self, worker_id: str) -> Member | None:
        return self._by_id.get(worker_id)

    def with_session(self, session: bytes) -> Member | None:
        return self._by_session.get(session)

    def routes(self) -> Set[effects.Route]:
        """The connections of all members."""
        return self._by_route.keys()

    def on_route(self, route: effects.Route) -> Member | None:
        found = self._by_route.get(route)
        return found[0] if found else None

    @contextmanager
    def _reconnects(self, member: Member) -> Iterator[None]:
        """Keep the index of connections in step while this member's change."""
        self._forget_routes(member)
        yield
        self._note_routes(member)

    def _forget_routes(self, member: Member) -> None:
        for route in set(member.routes):
            others = [each for each in self._by_route.pop(route) if each is not member]
            if others:
                self._by_route[route] = others

    def _note_routes(self, member: Member) -> None:
        for route in set(member.routes):
            self._by_route.setdefault(route, []).append(member)

    def bind(self, member: Member, route: effects.Route) -> None:
        """This is the member's bulk connection from now on."""
        with self._reconnects(member):
            member.bulk = route

    def bind_lane(self, member: Member, index: int, binding: Binding) -> None:
        """This is one more connection for chunks, of a worker of several processes."""
        with self._reconnects(member):
            member.lanes[index] = binding

    def lose_lanes(self, member: Member) -> None:
        """One of several is gone, so all are void: the worker opens them anew, and joins again."""
        if member.processes > 1:
            with self._reconnects(member):
                member.bulk = None
                member.lanes.clear()

    def admit(
        self, join: messages.Join, session: bytes, route: effects.Route, now: float, run_time: float
    ) -> Member:
        member = Member(
            join.worker_id,
            session,
            route,
            joined_at=run_time,
            liveness=Liveness(now, now, now, now),
            sync_every=own_sync_every(join.wants),
            versions=join.versions,
            processes=join.processes,
            voter=join.voter,
            figures=Figures(join.host[:MAX_HOST_LENGTH], join.pid, join.extra),
        )
        self._by_session[session] = member
        self._by_id[join.worker_id] = member
        self._note_routes(member)
        return member

    def renew(
        self, member: Member, join: messages.Join, session: bytes, route: effects.Route, now: float
    ) -> None:
        """Move a member to its new connections, which start without credit."""
        del self._by_session[member.session]
        self._by_session[session] = member
        member.session = session
        with self._reconnects(member):
            member.control = route
            member.bulk = None
            member.lanes.clear()
        member.processes = join.processes
        member.voter = join.voter
        member.liveness.hear(now)
        member.liveness.probed_at = now
        member.sync_every = own_sync_every(join.wants)
        member.versions = join.versions
        member.seed_failures = 0
        member.forget_work()

    def remove(self, member: Member) -> None:
        self.gone += 1
        del self._by_session[member.session]
        del self._by_id[member.worker_id]
        self._forget_routes(member)

    def check_invariants(self) -> None:
        """Raise AssertionError when the indexes disagree; for tests."""
        assert {id(m) for m in self._by_id.values()} == {id(m) for m in self._by_session.values()}
        for worker_id, member in self._by_id.items():
            assert member.worker_id == worker_id
            assert self._by_session[member.session] is member
        found = {(route, id(m)) for route, members in self._by_route.items() for m in members}
        assert found == {(route, id(m)) for m in self._by_id.values() for route in m.routes}
