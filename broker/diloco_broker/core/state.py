"""The whole state of a broker, as one record that the functions of the core work on."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_broker.config import BrokerConfig
from diloco_broker.core import effects
from diloco_broker.core.data.data_sets import DataSets
from diloco_broker.core.events import Surroundings
from diloco_broker.core.members.absences import Absences
from diloco_broker.core.members.members import Member, Membership
from diloco_broker.core.members.run_model import RunModel
from diloco_broker.core.members.shards import Shards
from diloco_broker.core.members.start import Recovery, Seeding, Start
from diloco_broker.core.relays.relays import Relays
from diloco_broker.core.rounds.decision import Decision, Reason, Why
from diloco_broker.core.rounds.round import Barrier, Phase, PushInProgress, Update
from diloco_broker.core.rounds.submissions import Submissions
from diloco_broker.core.versions.record import FragmentRecord
from diloco_broker.core.versions.store import VersionStore
from diloco_broker.standby.lease import Lease
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.description import DescriptionInProgress
from diloco_protocol.feed import OuterGroup
from diloco_protocol.fragments import OWN
from diloco_protocol.messages import Join, Notice, Push, RunConfig
from diloco_protocol.version import VersionId

# Names of workers that have answered; more are not noted, so that those who come and go cost nothing.
MOST_NAMES = 1000
REJECTIONS_KEPT = 10
# Seconds after which the same cause is said again, and causes of which it is known when they were said.
SAID_AGAIN_AFTER_S = 60.0
CAUSES_KEPT = 1000
# Probes at once, with at most 48 KiB each way: five workers look at the same time, with 24 MiB each way.
# And how many more in a second: what somebody who goes on and on takes of a line, 3 MiB/s.
PROBES_AT_ONCE = 6000
PROBES_A_SECOND = 64.0


@dataclass
class Order:
    """`save_all` or `stop_all`. Workers that come while it is pending get it, too."""

    number: int
    text: str  # what the workers are told
    until: float  # when those that have not answered are not waited for any longer
    is_given_up: bool = False
    waiting: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    @property
    def is_pending(self) -> bool:
        """Does it concern workers that come now?"""
        return bool(self.waiting) and not self.is_given_up

    def settle(self, worker_id: str, *, is_gone: bool) -> None:
        """A worker has done it, or is gone."""
        self.waiting.discard(worker_id)
        answered = self.left if is_gone else self.saved
        if len(answered) < MOST_NAMES:
            answered.add(worker_id)


@dataclass
class ProbeAllowance:
    """How often the way to this broker may be measured, by all together.

    `left` is what is left of it. Times are seconds of the core's clock.
    """

    left: float = PROBES_AT_ONCE
    seen_at: float = 0.0

    def take(self, now: float) -> bool:
        """Take one probe's share; False where there is none."""
        left = min(PROBES_AT_ONCE, self.left + max(0.0, now - self.seen_at) * PROBES_A_SECOND)
        if left < 1:
            return False
        self.left, self.seen_at = left - 1, now
        return True


@dataclass
class Totals:
    """Counters of the run. `contributions` are those counted whole.

    What `steps` and `tokens` count, `progress` says.
    """

    rounds: int = 0
    pushes: int = 0
    rejected: int = 0
    malformed: int = 0
    ended_connections: int = 0  # that cost too much
    contributions: int = 0
    steps: int = 0
    tokens: int = 0
    open_s: int = 0  # seconds in which rounds could close
    bytes_up: int = 0
    deaths: int = 0


@dataclass(frozen=True)
class Rejection:
    """Work of a worker that was refused: when (the core's clock), whose, and why."""

    at: float
    worker_id: str
    code: str
    text: str


@dataclass(frozen=True)
class Departure:
    """A worker that is gone, and why; empty where it was done."""

    worker_id: str
    why: str


@dataclass
class Saving:
    """How the checkpoints fare."""

    number: int | None = None  # the round that comes after the newest one
    saved_at: float | None = None  # when that was written
    error: str | None = None  # what is wrong, None while all is well
    retry_at: float | None = None  # when a release that waits for its checkpoint asks for it again
    is_asked: bool = False  # somebody wants one once the version that is being made is whole


@dataclass
class UntoldVersions:
    """Versions of asynchronous mode that the log has no line of yet."""

    told_at: float | None = None  # when the last line was; None before the first
    versions: int = 0  # how many have come since
    newest: str = ""  # the last of them, in words
    # Of each push in them, the largest by worker.
    staleness: dict[str, int] = field(default_factory=dict)


@dataclass
class Stopping:
    """How the broker ends."""

    reason: str  # as the end of a sentence
    restarting: bool  # it stops to come back, which does not end the run
    until: float  # when a closing round is not waited for any longer
    is_finished: bool = False  # it has nothing left to do


@dataclass
class Ending:
    """How the run comes to the end that its options set; see `operations.ending`."""

    why: str | None = None  # as the end of a sentence; None while no end is near
    last: int | None = None  # the number of the last round, once it is known
    # When that is not waited for any longer; then, when workers are not. Run time, as is `timed_at`.
    until: float | None = None
    extended: int | None = None  # the last round that got more time because all had begun
    # Workers that the last round is made without, its time being up; None unless that was just found.
    without: tuple[str, ...] | None = None
    is_announced: bool = False  # the workers have been told which round is the last
    is_over: bool = False  # the last round is made: no other closes
    is_asked_to_end: bool = False  # the broker has been
    timed_at: float | None = None  # up to when time is counted
    rest_s: float = 0.0  # of time, less than a second, that is not counted yet


@dataclass(frozen=True)
class UnreleasedVersion:
    """A version of which every chunk is there, and what it contains; not released yet."""

    ended: Update
    pushes: tuple[effects.CountedPush, ...]
    record: FragmentRecord
    waits_for_lease: bool = False  # nothing else is missing


@dataclass
class Refusals:
    """What was refused, and when that was last said: of each cause once a minute, or logs would fill.

    Attributes:
        noisy: of those who have not joined, by connection, messages that could not be read.
    """

    said_at: dict[str, float] = field(default_factory=dict)
    unsaid: Counter[str] = field(default_factory=Counter)
    noisy: Counter[bytes] = field(default_factory=Counter)

    def to_say(self, cause: str, text: str, now: float) -> str | None:
        """The sentence, with how many like it were not said; None where it is not to be said now."""
        if now - self.said_at.get(cause, -SAID_AGAIN_AFTER_S) < SAID_AGAIN_AFTER_S:
            self.unsaid[cause] += 1
            return None
        self.said_at.pop(cause, None)  # the latest comes last
        if len(self.said_at) >= CAUSES_KEPT:
            oldest = next(iter(self.said_at))
            del self.said_at[oldest]
            self.unsaid.pop(oldest, None)
        self.said_at[cause] = now
        more = self.unsaid.pop(cause, 0)
        return f"{text} ({more} more like this in the meantime.)" if more else text


@dataclass
class Described:
    """A worker that describes its model, to join."""

    join: Join
    progress: DescriptionInProgress
    heard_at: float  # when it was asked, or the last piece came
    ends_at: float  # until when all of it must be here


@dataclass
class RunState:
    """Everything the broker knows, except tensors."""

    config: BrokerConfig
    draw: Callable[
        [], int
    ]  # returns an unpredictable number below 2**64 (tokens, tags, the run's name)
    started_at: float
    epoch: str  # this life of the broker, 16 hexadecimal digits
    model: RunModel
    mode: str  # as `rounds.modes` names it
    start: Start = Start.WAITING_FOR_WORKERS  # how it gets its first parameters
    seeding: Seeding = field(default_factory=Seeding)
    recovery: Recovery = field(default_factory=Recovery)
    members: Membership = field(default_factory=Membership)
    relays: Relays = field(default_factory=Relays)
    absences: Absences = field(default_factory=Absences)
    shards: Shards = field(default_factory=Shards)  # who samples which part of the data
    data: DataSets = field(default_factory=DataSets)  # of which units are handed out
    # By connection, those who are about to join and have to describe their models.
    descriptions: dict[effects.Route, Described] = field(default_factory=dict)
    probes: ProbeAllowance = field(default_factory=ProbeAllowance)
    versions: VersionStore = field(default_factory=VersionStore)
    # The round going on, in asynchronous mode the update; None until there are parameters.
    round: Update | None = None
    # Whether the open round closes, as of the last event.
    decision: Decision = field(default_factory=lambda: Decision(Why(Reason.PARAMETERS)))
    # Whom rounds wait for, by fragment.
    barriers: dict[int, Barrier] = field(default_factory=lambda: defaultdict(Barrier))
    # A version that waits for its checkpoint to be written, if the run is durable.
    unreleased: UnreleasedVersion | None = None
    chunks_waiting: int = 0  # chunks of pseudo-gradients that wait to be added or looked at
    # Pushes that are kept until they are whole, where the run needs whole ones.
    submissions: Submissions = field(default_factory=Submissions)
    now: float = 0.0  # the time of the event at hand, seconds of the core's clock
    held_s: float = 0.0  # how much of that time the run was held; see `operations.holding`
    resumed: str = ""  # title of the run that this life of the broker resumed; empty: of none
    saving: Saving = field(default_factory=Saving)
    totals: Totals = field(default_factory=Totals)
    # What the totals were when this life of the broker began.
    totals_before: Totals = field(default_factory=Totals)
    last_report: effects.RoundReport | None = None
    ending: Ending = field(default_factory=Ending)
    orders: dict[str, Order] = field(default_factory=dict)  # the newest of each kind
    stopping: Stopping | None = None  # how the broker is about to stop; None while it is not
    # When the broker ran again after it had stood still; None when it never has.
    back_at: float | None = None
    # The configuration that an operator has asked for, until the next version is begun.
    wanted: BrokerConfig | None = None
    # Since when no round closes, as an operator asked; None while rounds do.
    paused_at: float | None = None
    first_round_pending: bool = True  # no round has closed in this life, so `workers` is the floor
    departed: Departure | None = None  # who went last; None while nobody has
    # The last answer to a heartbeat: most are alike, so it is kept.
    alive: Notice = field(default_factory=lambda: Notice("alive"))
    # Workers to send a word, since a connection was closed and nobody knows whose.
    to_probe: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # work that was refused, by code
    refusals: Refusals = field(default_factory=Refusals)
    rejections: deque[Rejection] = field(default_factory=lambda: deque(maxlen=REJECTIONS_KEPT))
    surroundings: Surroundings = field(default_factory=Surroundings)
    # At a hub that has a standby: the lease without which nothing is released.
    standby: Lease | None = None
    term: int = 0  # how often the run's hub was replaced by a standby
    # From when on workers are waited for that may hold newer versions (run time).
    recovers_from: float = 0.0
    # Of the user's outer optimizer, over all fragments; empty before it is made.
    outer_groups: tuple[OuterGroup, ...] = ()
    # Settings of it that an operator has asked for, until the next version is begun.
    wanted_outer: dict[str, float] = field(default_factory=dict)
    # Versions of asynchronous mode that the log has no line of yet.
    untold: UntoldVersions = field(default_factory=UntoldVersions)

    @property
    def run_time(self) -> float:
        """Seconds of the core's clock, less those in which the run was held: `operations.holding`."""
        return self.now - self.held_s

    @property
    def is_running(self) -> bool:
        return self.start is Start.RUNNING

    @property
    def run_config(self) -> RunConfig:
        return self.config.run_config

    @property
    def has_own_optimizer(self) -> bool:
        """The outer optimizer is one of torch's, made by the user's factory."""
        return self.surroundings.has_own_optimizer

    @property
    def fragment_pattern(self) -> str:
        """How the model is split, for people: the pattern, or "own"."""
        return OWN if self.surroundings.has_own_split else self.config.fragment_pattern

    @property
    def pushes_in_progress(self) -> list[PushInProgress]:
        """Those taken in, of which no version has been released."""
        found: list[PushInProgress] = [*self.submissions]
        return found or ([] if self.round is None else [*self.round.pushes])

    def knows(self, route: effects.Route) -> bool:
        """Is this a connection of a worker that has joined, or of a relay?"""
        return self.relays.on(route) is not None or self.members.on_route(route) is not None

    def reject(self, worker_id: str, code: str, text: str) -> None:
        self.totals.rejected += 1
        self.refused[code] += 1
        self.rejections.append(Rejection(self.now, worker_id, code, text))

    def warn(self, cause: str, text: str, *, is_listed: bool = True) -> effects.Effects:
        """Warn, unless this was done for the same cause within the last minute."""
        said = self.refusals.to_say(cause, text, self.now)
        if said is not None:
            yield effects.warning(said, is_listed=is_listed)

    @property
    def closing(self) -> Update | None:
        """The round that is being finished; None while one is open, or there is none."""
        return self.round if self.round and self.round.phase is Phase.CLOSING else None

    @property
    def floor(self) -> int:
        """Contributions that a round needs."""
        config, round_ = self.config, self.round
        if not self.first_round_pending:
            return config.min_workers
        needed = config.workers
        may_refuse = config.max_delta_norm is not None
        if may_refuse and round_ is not None and round_.barrier is not None:
            # They are here, though their work is refused.
            needed -= sum(name in self.members for name in round_.barrier.skipped)
        return max(config.min_workers, needed)

    @property
    def below_floor(self) -> bool:
        """True while even all the workers that the open round waits for would be too few."""
        round_ = self.round
        if round_ is None or round_.barrier is None or self.closing:
            return False
        return len(round_.barrier.expected | round_.participating) < self.floor

    def skip(self, worker_id: str, fragment: int) -> None:
        """A push was refused: no other worker waits for this one in that round."""
        if self.round is not None and self.round.barrier is not None:
            self.barriers[fragment].skip(worker_id)

    def coming(self, number: int) -> tuple[int, int]:
        """The fragment whose turn it is in round `number`, and its chunks."""
        fragment = number % self.config.num_fragments
        return fragment, self.versions[fragment].layout.chunks

    def open_barrier(self, fragment: int) -> Barrier:
        """A round of this fragment opens: it waits for everyone who is here and trains."""
        barrier = self.barriers[fragment]
        barrier.open(
            {member.worker_id for member in self.members if not member.liveness.is_stalled}
        )
        return barrier

    def next_round_of(self, fragment: int) -> int:
        """The first round that a new push of this fragment can be part of."""
        assert self.round is not None
        pieces = self.config.num_fragments
        first = self.round.number + bool(self.closing)
        return first + (fragment - first) % pieces

    def begin_version(self, fragment: int, gradients: int) -> int:
        """A version of the fragment is being made from now on, by so many gradients.

        Returns how many the outer optimizer has had of this fragment before.
        """
        versions = self.versions[fragment]
        version, before = versions.record.version, versions.record.gradients
        new = VersionId(version.run, version.counter + 1, self.draw())
        self.versions.make(fragment, new, before + gradients)
        return before

    def standing(self, member: Member, push: Push) -> Bitmap:
        """The chunks of this push that the current version contains."""
        ledger = self.versions[push.fragment].ledger
        return ledger.standing(member.worker_id, push.push_id, push.chunks)

    def weight_of(self, push: Push) -> float:
        by = {"equal": 1, "tokens": push.tokens, "samples": push.samples}
        return push.weight * by[self.config.weight_by]
