"""Who is here: sessions, connections, signs of life.

A session is one stay of a worker: a 128-bit token drawn at joining, the control connection it joined
on, and the bulk connection it bound later. Connections come and go; whoever shows the token is the
worker, on the connection that it joined on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_broker.core import effects
from diloco_broker.core.state.dylu import average_speed
from diloco_broker.core.state.uploads import Account, Upload
from diloco_protocol import messages
from diloco_protocol.version import VersionId

MAX_HOST_LENGTH = 255
MAX_WARNING_LENGTH = 300
MAX_STATE_LENGTH = 20  # of what a worker says it is doing: displays show it


def printable(text: str, longest: int) -> str:
    """What a peer says of itself, fit for a line of the log and for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:longest])


def own_sync_every(wants: Mapping[str, Any]) -> int | None:
    """H that a worker has asked for; None where it takes what the broker says."""
    asked = wants.get("sync_every")
    return asked if isinstance(asked, int) and not isinstance(asked, bool) else None


@dataclass
class Member:
    """A worker that has joined, and what it last told about itself. Times are the core's clock."""

    worker_id: str
    session: bytes
    control: effects.Route
    joined_at: float
    last_seen: float
    bulk: effects.Route | None = None
    host: str = ""
    pid: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    sync_every: int | None = None  # H of its own
    versions: tuple[VersionId | None, ...] = ()
    uploads: dict[int, Upload] = field(default_factory=dict)  # by fragment
    window: int = 0  # chunks that its last push could have under way
    deferred: dict[int, messages.Push] = field(
        default_factory=dict
    )  # pushes whose round is not open yet
    early_pulls: dict[int, messages.Pull] = field(
        default_factory=dict
    )  # came before the bulk connection
    disconnected_at: float | None = None
    contested_at: float | None = None  # when another worker asked for this id
    probed_at: float = 0.0
    moved_at: float = 0.0
    beat_at: float = 0.0
    is_stalled: bool = False
    newest_push: int | None = None
    zeros: dict[int, int] = field(default_factory=dict)  # by fragment, its last push if all zeros
    is_told_of_zeros: bool = False
    step: int = 0
    inner_step: int = 0
    told_at: float | None = None  # when it told of its inner step; None: the broker concluded it
    state: str = "joining"
    steps_per_s: float | None = None
    speed: float | None = None  # the same as an average over heartbeats
    loss: float | None = None
    tokens: int = 0
    account: Account = field(default_factory=Account)
    pushes: int = 0
    rejected: int = 0
    staleness: int = 0
    warning: str | None = None  # a sentence, as long as it holds
    has_warned: bool = False
    merge_delay: int | None = None  # steps from slot to merge, of the last merge it told of
    last_round: int | None = None
    counted_at: float | None = None  # when a version last took in work of this worker

    def hears(self, beat: messages.Heartbeat, now: float) -> None:
        if beat.step != self.step or beat.state != "training" or self.told_at is None:
            self.moved_at = now
        self.beat_at = self.told_at = now
        self.step = beat.step
        self.inner_step = beat.inner_step
        self.state = printable(beat.state, MAX_STATE_LENGTH)
        self.steps_per_s = beat.steps_per_s
        self.speed = average_speed(self.speed, beat.steps_per_s)
        self.loss = beat.loss if beat.loss is not None else self.loss
        self.tokens = max(self.tokens, beat.tokens)
        self.warning = printable(beat.warning, MAX_WARNING_LENGTH) if beat.warning else None
        if beat.merge_delay is not None:
            self.merge_delay = beat.merge_delay

    def stands_still(self, push: messages.Push) -> bool:
        """Whether this is the second push in a row of a fragment with zeros only; True once.

        That is told anew when every fragment has moved in between.
        """
        if push.norm != 0:
            self.zeros.pop(push.fragment, None)
            self.is_told_of_zeros = self.is_told_of_zeros and bool(self.zeros)
            return False
        if not push.steps:
            return False  # nothing was done, so zeros are no news
        earlier = self.zeros.get(push.fragment, push.push_id)
        self.zeros[push.fragment] = push.push_id
        if earlier == push.push_id or self.is_told_of_zeros:
            return False
        self.is_told_of_zeros = True
        return True

    def merges(self) -> None:
        """A version is on its way to this worker, with work of it.

        It will train on from there at once or when that has arrived; unless it has said, since its
        push, that it trains meanwhile.
        """
        if self.state != "training" or self.told_at is None:
            self.inner_step, self.told_at = 0, None
        self.state = "training"

    def stood_still(self) -> float:
        """Seconds without a step while it said that it trains, as of its last heartbeat."""
        return self.beat_at - self.moved_at

    def counters(self) -> dict[str, int]:
        """What a checkpoint keeps of this worker."""
        return {
            "pushes": self.pushes,
            "rejected": self.rejected,
            "bytes_up": self.account.bytes_up,
            "bytes_down": self.account.bytes_down,
        }

    def goes_on_from(self, counters: Mapping[str, int]) -> None:
        """Count on from what a checkpoint has of this worker."""
        self.pushes, self.rejected = counters["pushes"], counters["rejected"]
        self.account.bytes_up = counters["bytes_up"]
        self.account.bytes_down = counters["bytes_down"]

    def defer(self, push: messages.Push) -> None:
        """This push waits for its turn; it takes the place of an earlier one of its fragment."""
        self.deferred[push.fragment] = push

    def take_deferred(self, fragment: int) -> messages.Push | None:
        """The push of a fragment that waits, which does so no longer."""
        return self.deferred.pop(fragment, None)

    def begins(self, push: messages.Push, number: int | None) -> None:
        """A push of this worker is taken in, for round `number` where there are common rounds."""
        self.take_deferred(push.fragment)  # an earlier one, which this one takes the place of
        self.pushes += 1
        self.state = "pushing"
        self.inner_step, self.told_at = push.steps, None
        self.loss = push.loss if push.loss is not None else self.loss
        if number is not None:
            self.last_round = number


class Membership:
    """The members, by session token and by worker id; each live id occurs once."""

    def __init__(self) -> None:
        self._by_session: dict[bytes, Member] = {}
        self._by_id: dict[str, Member] = {}

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

    def on_route(self, route: effects.Route) -> Member | None:
        return next((m for m in self._by_id.values() if route in (m.control, m.bulk)), None)

    def admit(
        self, join: messages.Join, session: bytes, route: effects.Route, now: float
    ) -> Member:
        member = Member(
            join.worker_id,
            session,
            route,
            joined_at=now,
            last_seen=now,
            host=printable(join.host, MAX_HOST_LENGTH),
            pid=join.pid,
            extra=join.extra,
            sync_every=own_sync_every(join.wants),
            versions=join.versions,
            probed_at=now,
            moved_at=now,
            beat_at=now,
        )
        self._by_session[session] = member
        self._by_id[join.worker_id] = member
        return member

    def renew(
        self, member: Member, join: messages.Join, session: bytes, route: effects.Route, now: float
    ) -> None:
        """The same worker on new connections: all credits of the old ones are void."""
        del self._by_session[member.session]
        self._by_session[session] = member
        member.session = session
        member.control = route
        member.bulk = None
        member.last_seen = member.probed_at = now
        member.disconnected_at = None
        member.sync_every = own_sync_every(join.wants)
        member.versions = join.versions
        member.uploads.clear()
        member.deferred.clear()
        member.early_pulls.clear()

    def remove(self, member: Member) -> None:
        del self._by_session[member.session]
        del self._by_id[member.worker_id]

    def check_invariants(self) -> None:
        """Raise AssertionError when the two indexes disagree; for tests."""
        assert {id(m) for m in self._by_id.values()} == {id(m) for m in self._by_session.values()}
        for worker_id, member in self._by_id.items():
            assert member.worker_id == worker_id
            assert self._by_session[member.session] is member
