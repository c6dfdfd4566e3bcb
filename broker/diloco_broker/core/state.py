"""The state of a broker: one record that all functions of the core work on."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_broker.config import BrokerConfig
from diloco_broker.config.declaration import AUTO
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
from diloco_broker.core.rounds.grace import Slack
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

# Names of workers that have answered an order; more are not recorded, to bound the memory.
MOST_NAMES = 1000
REJECTIONS_KEPT = 10
# Seconds after which a warning with the same cause is logged again, and causes that are remembered.
SAID_AGAIN_AFTER_S = 60.0
CAUSES_KEPT = 1000
# Probes in a burst, each with up to 48 KiB each way: five workers measure concurrently, with 24 MiB each
# way. And probes per second after that: a peer that never stops takes 3 MiB/s of the link.
PROBES_AT_ONCE = 6000
PROBES_A_SECOND = 64.0


@dataclass
class Order:
    """`save_all` or `stop_all`. Workers that join while it is pending receive it, too."""

    number: int
    text: str  # sent to the workers
    until: float  # deadline for the answers
    is_given_up: bool = False
    waiting: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    @property
    def is_pending(self) -> bool:
        """Whether workers that join now receive it."""
        return bool(self.waiting) and not self.is_given_up

    def settle(self, worker_id: str, *, is_gone: bool) -> None:
        """Note that a worker has executed it, or is gone."""
        self.waiting.discard(worker_id)
        answered = self.left if is_gone else self.saved
        if len(answered) < MOST_NAMES:
            answered.add(worker_id)


@dataclass
class ProbeAllowance:
    """Rate limit of bandwidth probes, of all peers together: a token bucket.

    `left` are the remaining probes. Times are of the core's clock.
    """

    left: float = PROBES_AT_ONCE
    seen_at: float = 0.0

    def take(self, now: float) -> bool:
        """Use one probe; False if none is left."""
        left = min(PROBES_AT_ONCE, self.left + max(0.0, now - self.seen_at) * PROBES_A_SECOND)
        if left < 1:
            return False
        self.left, self.seen_at = left - 1, now
        return True


@dataclass
class Totals:
    """Counters of the run. `contributions` counts only complete ones.

    `operations.progress` defines `steps` and `tokens`.
    """

    rounds: int = 0
    pushes: int = 0
    rejected: int = 0
    malformed: int = 0
    ended_connections: int = 0  # closed because they cost too much
    contributions: int = 0
    steps: int = 0
    tokens: int = 0
    open_s: int = 0  # seconds in which rounds could close
    bytes_up: int = 0
    deaths: int = 0


@dataclass(frozen=True)
class Rejection:
    """A rejected push: when (core's clock), of which worker, and why."""

    at: float
    worker_id: str
    code: str
    text: str


@dataclass(frozen=True)
class Departure:
    """A worker that died or left, and why; the reason is empty if it had finished."""

    worker_id: str
    why: str


@dataclass
class Saving:
    """The state of checkpoints."""

    number: int | None = None  # the next round, as of the newest one
    saved_at: float | None = None  # when the newest one was written
    error: str | None = None  # why the last one failed; None if it was written
    retry_at: float | None = None  # when to retry the one that a release waits for
    is_asked: bool = False  # save once the version in progress is complete


@dataclass
class UntoldVersions:
    """Versions of asynchronous mode that were not logged yet."""

    told_at: float | None = None  # when the last line was logged; None before the first
    versions: int = 0  # number of versions since then
    newest: str = ""  # describes the last of them
    # By worker, the largest staleness of its pushes in them.
    staleness: dict[str, int] = field(default_factory=dict)


@dataclass
class Stopping:
    """A requested stop of the broker."""

    reason: str  # as the end of a sentence
    restarting: bool  # it will be restarted, so the run does not end
    until: float  # deadline of a closing round
    is_finished: bool = False  # `Finish` was requested


@dataclass
class Ending:
    """The end of the run by its options; see `operations.ending`."""

    why: str | None = None  # as the end of a sentence; None while no end is near
    last: int | None = None  # the number of the last round, once it is known
    # Deadline of the last round, then that of workers to leave. Run time, as is `timed_at`.
    until: float | None = None
    extended: int | None = None  # the last round that got more time because it was closing
    # Workers without which the last round closes at its deadline; None unless that is being decided.
    without: tuple[str, ...] | None = None
    is_announced: bool = False  # the workers know the last round
    is_over: bool = False  # the last round has closed
    is_asked_to_end: bool = False  # `End` was requested
    timed_at: float | None = None  # up to when the time of the run is counted
    rest_s: float = 0.0  # fraction of a second that is not counted yet


@dataclass(frozen=True)
class UnreleasedVersion:
    """A complete version that is not released yet, and its contents."""

    ended: Update
    pushes: tuple[effects.CountedPush, ...]
    record: FragmentRecord
    waits_for_lease: bool = False  # only the lease is missing


@dataclass
class Refusals:
    """Rate limit of warnings, once a minute for each cause, so that peers cannot fill the log.

    Attributes:
        noisy: by connection of a peer that has not joined, the number of malformed messages.
    """

    said_at: dict[str, float] = field(default_factory=dict)
    unsaid: Counter[str] = field(default_factory=Counter)
    noisy: Counter[bytes] = field(default_factory=Counter)

    def to_say(self, cause: str, text: str, now: float) -> str | None:
        """The text, with the number of suppressed repetitions; None to suppress this one."""
        if now - self.said_at.get(cause, -SAID_AGAIN_AFTER_S) < SAID_AGAIN_AFTER_S:
            self.unsaid[cause] += 1
            return None
        self.said_at.pop(cause, None)  # keep the causes in order of time
        if len(self.said_at) >= CAUSES_KEPT:
            oldest = next(iter(self.said_at))
            del self.said_at[oldest]
            self.unsaid.pop(oldest, None)
        self.said_at[cause] = now
        more = self.unsaid.pop(cause, 0)
        return f"{text} ({more} similar messages suppressed.)" if more else text


@dataclass
class Described:
    """A description in progress of the model of a joining worker."""

    join: Join
    progress: DescriptionInProgress
    heard_at: float  # when it was requested, or its last slice received
    ends_at: float  # deadline of the complete description


@dataclass
class RunState:
    """The complete state of the broker, except tensors."""

    config: BrokerConfig
    # Returns an unpredictable number below 2**64 (tokens, tags, the run's name).
    draw: Callable[[], int]
    started_at: float
    epoch: str  # this incarnation of the broker, 16 hexadecimal digits
    model: RunModel
    mode: str  # as `rounds.modes` names it
    start: Start = Start.WAITING_FOR_WORKERS  # the state of seeding
    seeding: Seeding = field(default_factory=Seeding)
    recovery: Recovery = field(default_factory=Recovery)
    members: Membership = field(default_factory=Membership)
    relays: Relays = field(default_factory=Relays)
    absences: Absences = field(default_factory=Absences)
    shards: Shards = field(default_factory=Shards)  # shares of the data by worker
    data: DataSets = field(default_factory=DataSets)  # of the work queue
    # By connection, models that joining workers are describing.
    descriptions: dict[effects.Route, Described] = field(default_factory=dict)
    probes: ProbeAllowance = field(default_factory=ProbeAllowance)
    versions: VersionStore = field(default_factory=VersionStore)
    # The current round or asynchronous update; None until the broker has parameters.
    round: Update | None = None
    # Whether the open round closes, as of the last event.
    decision: Decision = field(default_factory=lambda: Decision(Why(Reason.PARAMETERS)))
    # By fragment, the workers that rounds wait for.
    barriers: dict[int, Barrier] = field(default_factory=lambda: defaultdict(Barrier))
    # A version that waits for its checkpoint or for the lease.
    unreleased: UnreleasedVersion | None = None
    chunks_waiting: int = 0  # received chunks of pseudo-gradients, not yet added or inspected
    slack: Slack = field(default_factory=Slack)  # for the grace period of `--grace auto`
    # Staged pushes, if the mode needs complete ones.
    submissions: Submissions = field(default_factory=Submissions)
    now: float = 0.0  # the time of the current event, seconds of the core's clock
    held_s: float = 0.0  # seconds of it during which the run was held; see `operations.holding`
    resumed: str = ""  # title of the run that this incarnation resumed; empty if none
    saving: Saving = field(default_factory=Saving)
    totals: Totals = field(default_factory=Totals)
    # The totals when this incarnation of the broker started.
    totals_before: Totals = field(default_factory=Totals)
    last_report: effects.RoundReport | None = None
    ending: Ending = field(default_factory=Ending)
    orders: dict[str, Order] = field(default_factory=dict)  # the newest of each kind
    stopping: Stopping | None = None  # None while the broker is not stopping
    # When the broker was last resumed after a suspension of its process; None if never.
    back_at: float | None = None
    # The configuration that an operator has requested, until the next version is started.
    wanted: BrokerConfig | None = None
    # When an operator paused the run; None while it is not paused.
    paused_at: float | None = None
    first_round_pending: bool = True  # this incarnation closed no round: `workers` is the floor
    departed: Departure | None = None  # the last worker that died or left
    # The last answer to a heartbeat, reused since most are equal.
    alive: Notice = field(default_factory=lambda: Notice("alive"))
    # Workers to probe after some connection was closed, since it is unknown whose.
    to_probe: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # rejected pushes, by code
    refusals: Refusals = field(default_factory=Refusals)
    rejections: deque[Rejection] = field(default_factory=lambda: deque(maxlen=REJECTIONS_KEPT))
    surroundings: Surroundings = field(default_factory=Surroundings)
    # Of a hub with a standby: the lease without which no version is released.
    standby: Lease | None = None
    term: int = 0  # how often the run's hub was replaced by a standby
    # When the wait for workers that may hold newer versions started (run time).
    recovers_from: float = 0.0
    # Groups of the user's outer optimizer, over all fragments; empty before it exists.
    outer_groups: tuple[OuterGroup, ...] = ()
    # Settings of it that an operator has requested, until the next version is started.
    wanted_outer: dict[str, float] = field(default_factory=dict)
    is_advised: bool = False  # `operations.advice` has warned
    # Versions of asynchronous mode that were not logged yet.
    untold: UntoldVersions = field(default_factory=UntoldVersions)

    @property
    def run_time(self) -> float:
        """Seconds of the core's clock, without those in which the run was held: `operations.holding`."""
        return self.now - self.held_s

    @property
    def is_running(self) -> bool:
        return self.start is Start.RUNNING

    @property
    def run_config(self) -> RunConfig:
        return self.config.run_config

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the outer optimizer is one of torch's, made by the user's factory."""
        return self.surroundings.has_own_optimizer

    @property
    def fragment_pattern(self) -> str:
        """How the model is split: the name of a pattern, or "own"."""
        return OWN if self.surroundings.has_own_split else self.config.fragment_pattern

    @property
    def pushes_in_progress(self) -> list[PushInProgress]:
        """Accepted pushes that no released version contains."""
        found: list[PushInProgress] = [*self.submissions]
        return found or ([] if self.round is None else [*self.round.pushes])

    def knows(self, route: effects.Route) -> bool:
        """Whether this is a connection of a member or of a relay."""
        return self.relays.on(route) is not None or self.members.on_route(route) is not None

    def reject(self, worker_id: str, code: str, text: str) -> None:
        self.totals.rejected += 1
        self.refused[code] += 1
        self.rejections.append(Rejection(self.now, worker_id, code, text))

    def warn(self, cause: str, text: str, *, is_listed: bool = True) -> effects.Effects:
        """Warn, unless a warning with the same cause was logged within the last minute."""
        said = self.refusals.to_say(cause, text, self.now)
        if said is not None:
            yield effects.warning(said, is_listed=is_listed)

    @property
    def closing(self) -> Update | None:
        """The current round if it is closing, else None."""
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
            # These workers are present, but their pushes are rejected.
            needed -= sum(name in self.members for name in round_.barrier.skipped)
        return max(config.min_workers, needed)

    @property
    def below_floor(self) -> bool:
        """Whether the open round has too few workers, even if all of them deliver."""
        round_ = self.round
        if round_ is None or round_.barrier is None or self.closing:
            return False
        return len(round_.barrier.expected | round_.participating) < self.floor

    @property
    def grace_s(self) -> float:
        """Seconds that a round waits after its quorum: as configured, or of the last quorum."""
        return self.slack.grace_s if self.config.grace == AUTO else self.config.fixed_grace

    def skip(self, worker_id: str, fragment: int) -> None:
        """Stop waiting for a worker in a round of this fragment, since its push was refused."""
        if self.round is not None and self.round.barrier is not None:
            self.barriers[fragment].skip(worker_id)

    def coming(self, number: int) -> tuple[int, int]:
        """The fragment of round `number`, and the number of its chunks."""
        fragment = number % self.config.num_fragments
        return fragment, self.versions[fragment].layout.chunks

    def open_barrier(self, fragment: int) -> Barrier:
        """Open the barrier of a round of this fragment: it expects all members that are not stalled."""
        barrier = self.barriers[fragment]
        barrier.open(
            {member.worker_id for member in self.members if not member.liveness.is_stalled}
        )
        return barrier

    def next_round_of(self, fragment: int) -> int:
        """The first round that can count a new push of this fragment."""
        assert self.round is not None
        pieces = self.config.num_fragments
        first = self.round.number + bool(self.closing)
        return first + (fragment - first) % pieces

    def begin_version(self, fragment: int, gradients: int) -> int:
        """Start a version of the fragment, made by this number of gradients.

        Returns the number of gradients of this fragment that the outer optimizer received before.
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
        """Its weight in a mean; `messages.WEIGHTS` has what must be positive for it."""
        by = {
            "equal": 1,
            "tokens": push.tokens,
            "samples": push.samples,
            "tokens2-per-step": push.tokens**2 / max(1, push.steps),  # arXiv 2604.21428
        }
        return push.weight * by[self.config.weight_by]
