"""What the broker's feed says, as typed records, and a pure model of how much of it to believe.

The broker publishes a whole snapshot of itself once a second. `parse_snapshot` turns one frame into
frozen records; `FeedModel` keeps the newest one and answers what every display asks: is the feed
alive, is the run healthy, were snapshots missed, is this still the same broker. There is no socket
and no clock in here (`diloco_tools.feed.subscriber` has the socket): time is an argument, in seconds
of any monotonic clock.

Ages in a snapshot are durations measured by the broker. The model adds the time since the snapshot
arrived, measured by the caller; the clocks of two hosts are never subtracted.

Errors, all of them `FeedError`, each a sentence for the person at the terminal:
    MalformedFeedError   these bytes are no snapshot; the next frame may be one
    FeedVersionError     a snapshot of a feed version that this program cannot read
    FeedAddressError     the address is none that can be subscribed to
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

FEED_VERSION = 1  # the feed that these records describe; keys may be added without a new version
TOPIC = b"status "  # first bytes of a frame: what a SUB socket filters on
MAX_FRAME_BYTES = 16 << 20  # 16 MiB: tens of thousands of workers fit
MAX_DEPTH = 32  # levels of nesting: a snapshot has four, `extra` may add some

LIVE_BELOW_S = 3.0  # two snapshots of one a second may be lost before it shows
STALE_ABOVE_S = 10.0  # the broker is gone, or the network is: nothing on the screen is news


class FeedError(Exception):
    """Base of what can be wrong with a feed."""


class MalformedFeedError(FeedError):
    """The bytes are not a snapshot."""


class FeedVersionError(FeedError):
    """The broker publishes a feed version that this program cannot read."""


class FeedAddressError(FeedError):
    """The address cannot be subscribed to."""


@dataclass(frozen=True)
class Round:
    """The round now open or closing; worker ids in `expected`, `arrived` and `missing`."""

    number: int
    fragment: int = 0
    phase: str = "open"
    age_s: float = 0.0
    expected: tuple[str, ...] = ()
    arrived: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    floor: int = 0  # workers below which the round stays open


@dataclass(frozen=True)
class Counts:
    """Workers alive, participating in this round, averaged in the last one."""

    alive: int = 0
    participating: int = 0
    averaged: int = 0


@dataclass(frozen=True)
class Model:
    """Size of the model: trainable elements, tensors, bytes at the broker."""

    parameters: int = 0
    tensors: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Outer:
    """The outer optimizer and its settings."""

    optimizer: str = ""
    lr: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    variant: str | None = None  # of Delayed Nesterov
    buffer: int | None = None  # gradients to a momentum step; None where there is no buffer
    c: float | None = None  # of Delayed Nesterov


@dataclass(frozen=True)
class Reducer:
    """How contributions are reduced, and how many submissions are kept or wait for a slot."""

    staged: bool = False
    aggregate: str = "mean"
    deterministic: bool = False
    weight_by: str = "equal"
    quorum: int | None = None
    grace_s: float = 0.0
    late: str = "carry"
    submissions: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class Liveness:
    """Seconds after which a worker counts as dead for its silence, as stalled without a step (0: never
    either), and as gone after its connection broke. None: a broker that does not say.
    """

    heartbeat_timeout_s: float | None = None
    stall_timeout_s: float | None = None
    disconnect_grace_s: float | None = None


@dataclass(frozen=True)
class Asynchronous:
    """What an asynchronous run was told: Dynamic Local Updates, what staleness does, slots."""

    dylu: bool = False
    dylu_min_steps: int | None = None
    staleness_weight: str = "none"
    max_staleness: int | None = None  # older work is refused; None: none is too old
    slots: int | None = None  # submissions under way at a time
    deadline_s: float | None = None  # without progress, until one of them loses its slot


@dataclass(frozen=True)
class Fragment:
    """The newest version of one fragment: counter and random tag (hex).

    `buffered` of the gradients to its next momentum step are in.
    """

    fragment: int
    version: int = 0
    tag: str = ""
    gradients: int = 0
    contributions: int = 0
    buffered: int = 0


@dataclass(frozen=True)
class Worker:
    """One worker as the broker sees it. `staleness` is in versions, `tokens` since it joined."""

    id: str
    host: str = ""
    pid: int = 0
    state: str = ""
    health: str = "ok"
    round: int | None = None
    inner_step: int = 0  # steps since its last boundary, of sync_every
    inner_age_s: float | None = None  # since it told so; None: it has not, the broker concluded it
    sync_every: int = 0
    step: int = 0
    steps_per_s: float | None = None
    loss: float | None = None
    loss_is_finite: bool = True  # strict JSON has no NaN, so `loss` is null then
    tokens: int = 0
    beat_age_s: float = 0.0
    sync_age_s: float | None = None  # since its work was last counted
    staleness: int = 0
    merge_delay: int | None = None  # steps from slot to merge, of its last merge
    warning: str | None = None  # what it warns of in its heartbeats, a sentence
    bytes_up: int = 0
    bytes_down: int = 0
    pushes: int = 0
    rejected: int = 0
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Totals:
    """Counters since the broker started."""

    rounds: int = 0
    pushes: int = 0
    rejected: int = 0
    malformed: int = 0
    contributions: int = 0  # whole ones, in versions
    refused: Mapping[str, int] = field(default_factory=dict)  # work refused, by reason
    bytes_up: int = 0
    bytes_down: int = 0
    deaths: int = 0


@dataclass(frozen=True)
class LastRound:
    """The round that closed last: wall seconds, workers and weight averaged, norm of the mean.

    It made `version` of its fragment. `staleness` is that of its oldest push, in versions.
    """

    number: int
    seconds: float = 0.0
    averaged: int = 0
    weight: float = 0.0
    loss: float | None = None
    delta_norm: float | None = None
    staleness: int = 0
    fragment: int = 0
    version: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """Where checkpoints go, the coming round of the newest, its age, and what is wrong if anything.

    `durable`: each version is saved before anybody is told of it.
    """

    folder: str = ""
    round: int | None = None
    age_s: float | None = None
    error: str | None = None
    durable: bool = False


@dataclass(frozen=True)
class Rejection:
    """Work of a worker that the broker refused; `code` for programs, `text` for people."""

    age_s: float = 0.0
    worker: str = ""
    code: str = ""
    text: str = ""


@dataclass(frozen=True)
class Event:
    """One line of the broker's log; `level` is info, warning or error."""

    sequence: int = 0
    age_s: float = 0.0
    level: str = "info"
    text: str = ""


@dataclass(frozen=True)
class Loop:
    """How the broker's own thread fares: longest turn in ms, CPU seconds, resident bytes."""

    longest_turn_ms: float | None = None
    cpu_s: float | None = None
    rss_bytes: int | None = None


@dataclass(frozen=True)
class Snapshot:
    """Everything the broker says about itself at one moment.

    `sequence` counts the snapshots of one `epoch` (one life of the broker). `waiting_for` completes
    "the run waits". `raw` is the JSON object as it came, with keys that are unknown here, and null
    for numbers that are not finite.
    """

    feed: int
    sequence: int
    epoch: str
    run: str | None = None
    version: str = ""
    control: str = ""
    uptime_s: float = 0.0
    mode: str = ""
    state: str = ""
    waiting_for: str | None = None
    ended: bool = False  # rounds were made, and all workers have left as done
    paused_for_s: float | None = None
    round: Round | None = None
    counts: Counts = Counts()
    model: Model | None = None
    outer: Outer = Outer()
    reducer: Reducer = Reducer()
    liveness: Liveness = Liveness()
    asynchronous: Asynchronous | None = None
    sync_every: int | None = None
    fragment_pattern: str | None = None  # None: one fragment, or a broker that does not say
    fragment_sync_delay: int = 0
    fragment_delay_auto: bool = False  # replies are merged when they are here
    fragment_max_delay: int | None = None  # steps after which a worker waits for a reply
    fragment_update_alpha: float = 0.0
    fragment_merge: str = "alpha"
    wire_dtype: str = ""
    reply_dtype: str = ""
    workers_wanted: int | None = None
    min_workers: int | None = None
    save_every: int | None = None
    fragments: tuple[Fragment, ...] = ()
    workers: tuple[Worker, ...] = ()
    totals: Totals = Totals()
    last_round: LastRound | None = None
    checkpoint: Checkpoint | None = None
    rejections: tuple[Rejection, ...] = ()
    events: tuple[Event, ...] = ()
    loop: Loop = Loop()
    raw: Mapping[str, object] = field(
        default_factory=dict, repr=False, compare=False, metadata={"on_the_wire": False}
    )


def parse_snapshot(frame: bytes) -> Snapshot:
    """Read one frame of the feed, topic included.

    An absent key, or null, takes its default; unknown keys are kept in `Snapshot.raw` only.

    Raises:
        FeedVersionError: a snapshot of another feed version.
        MalformedFeedError: anything else that is not a snapshot, naming the place.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise MalformedFeedError(f"the frame has {len(frame)} bytes, no snapshot is that long")
    if not frame.startswith(TOPIC):
        raise MalformedFeedError(f"the frame starts with {frame[: len(TOPIC)]!r}, not {TOPIC!r}")
    try:
        document = json.loads(frame[len(TOPIC) :])
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, huge integers
        raise MalformedFeedError(f"the snapshot is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise MalformedFeedError("the snapshot is not a JSON object")
    version = _value(int, document.get("feed"), "feed")
    if version != FEED_VERSION:
        raise FeedVersionError(
            f"the broker publishes feed version {version} and this program reads version "
            f"{FEED_VERSION}: install the same version of diloco-broker here and there"
        )
    snapshot: Snapshot = _record(Snapshot, document, "snapshot")
    return replace(snapshot, raw=_strict(document, MAX_DEPTH))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _record(kind: Any, raw: object, where: str) -> Any:
    if not isinstance(raw, dict):
        raise MalformedFeedError(f"{where} is {type(raw).__name__}, not an object")
    values: dict[str, Any] = {}
    for item in (item for item in fields(kind) if item.metadata.get("on_the_wire", True)):
        value = raw.get(item.name)
        if value is not None:
            hint = _hints(kind)[item.name]
            values[item.name] = _value(hint, value, f"{where}.{item.name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise MalformedFeedError(f"{where}.{item.name} is missing")
    return kind(**values)


def _value(hint: Any, value: object, where: str) -> Any:
    if get_origin(hint) in (Union, UnionType):  # X | None; None itself never comes here
        hint = next(option for option in get_args(hint) if option is not type(None))
    if is_dataclass(hint) and isinstance(hint, type):
        return _record(hint, value, where)
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_value(get_args(hint)[0], x, f"{where}[{i}]") for i, x in enumerate(value))
    if get_origin(hint) is Mapping and isinstance(value, dict):
        return value
    if (hint is str and isinstance(value, str)) or (hint is bool and isinstance(value, bool)):
        return value
    # True is an int to Python; beyond 64 bits no counter and no float is meant.
    if isinstance(value, int | float) and not isinstance(value, bool):
        whole = isinstance(value, int) or value.is_integer()
        if hint is float and (isinstance(value, float) or abs(value) < 1 << 63):
            return float(value)
        if hint is int and whole and abs(value) < 1 << 63:
            return int(value)
    shown = type(value).__name__ if isinstance(value, dict | list) else repr(value)[:40]
    raise MalformedFeedError(f"{where} is {shown}, not {getattr(hint, '__name__', hint)}")


def _strict(value: Any, levels: int) -> Any:
    """The same value as strict JSON: RFC 8259 has no NaN and no infinity."""
    if levels == 0:
        raise MalformedFeedError(f"the snapshot is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        return {key: _strict(item, levels - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item, levels - 1) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Freshness(Enum):
    """How old the newest snapshot is."""

    LIVE = "LIVE"
    LATE = "LATE"
    STALE = "STALE"


@dataclass(frozen=True)
class Verdict:
    """How the run is, with one sentence for each reason of any word but "healthy".

    `word` is "healthy"; "waiting" before the first round, as long as nothing is wrong; "ended" once
    all workers have left as done; else "degraded".
    """

    reasons: tuple[str, ...] = ()
    word: str = "healthy"

    @property
    def healthy(self) -> bool:
        """Nothing is wrong, and nothing has to happen before training goes on."""
        return self.word in ("healthy", "ended")


@dataclass
class FeedModel:
    """The newest snapshot and what is known about the feed itself.

    `missed` counts snapshots of the running broker that never arrived, `restarts` how often another
    life of the broker took over.
    """

    snapshot: Snapshot | None = None
    received_at: float = -math.inf
    missed: int = 0
    restarts: int = 0

    def update(self, snapshot: Snapshot, now: float) -> bool:
        """Take a snapshot received at `now` (seconds). False if it is not newer than the last."""
        last = self.snapshot
        if last is not None and last.epoch == snapshot.epoch:
            if snapshot.sequence <= last.sequence:
                return False
            self.missed += snapshot.sequence - last.sequence - 1
        elif last is not None:
            self.restarts += 1
        self.snapshot = snapshot
        self.received_at = now
        return True

    def age_s(self, now: float) -> float:
        """Seconds since the newest snapshot arrived; infinite before the first."""
        return max(0.0, now - self.received_at)

    def freshness(self, now: float) -> Freshness:
        """LIVE under 3 s, LATE to 10 s, STALE after that and before the first snapshot."""
        age = self.age_s(now)
        if age < LIVE_BELOW_S:
            return Freshness.LIVE
        return Freshness.LATE if age <= STALE_ABOVE_S else Freshness.STALE

    def at(self, now: float) -> Snapshot | None:
        """The newest snapshot with the ages of its round, heartbeats and events counted on.

        `uptime_s` stays: nobody knows whether a broker that says nothing is still up.
        """
        snapshot = self.snapshot
        if snapshot is None:
            return None
        more = self.age_s(now)
        aged = snapshot.round and replace(snapshot.round, age_s=snapshot.round.age_s + more)
        return replace(
            snapshot,
            round=aged,
            paused_for_s=_plus(snapshot.paused_for_s, more),
            workers=tuple(
                replace(
                    w,
                    beat_age_s=w.beat_age_s + more,
                    sync_age_s=_plus(w.sync_age_s, more),
                    inner_age_s=_plus(w.inner_age_s, more),
                )
                for w in snapshot.workers
            ),
            checkpoint=snapshot.checkpoint
            and replace(snapshot.checkpoint, age_s=_plus(snapshot.checkpoint.age_s, more)),
            rejections=tuple(replace(r, age_s=r.age_s + more) for r in snapshot.rejections),
            events=tuple(replace(e, age_s=e.age_s + more) for e in snapshot.events),
        )

    def verdict(self, now: float) -> Verdict:
        """How the run is, and the reasons: feed, broker, round, then workers by id."""
        snapshot = self.at(now)
        if snapshot is None:
            return Verdict(("no snapshot has arrived yet",), "degraded")
        reasons = []
        if self.freshness(now) is Freshness.STALE:
            reasons.append(f"the broker has sent nothing for {self.age_s(now):.0f} s")
        reasons += _broker_reasons(snapshot)
        for worker in sorted(snapshot.workers, key=lambda w: w.id):
            if worker.health != "ok":
                heard = f"last heard {_seconds(worker.beat_age_s)} ago"
                reasons.append(f"{worker.id} is {worker.health}, {heard}")
            if not worker.loss_is_finite or not math.isfinite(worker.loss or 0.0):
                reasons.append(f"the loss of {worker.id} is not finite")
        if not reasons:
            return Verdict((_ending(snapshot),), "ended") if snapshot.ended else Verdict()
        waits = reasons == _waiting(snapshot) and not _has_begun(snapshot)
        return Verdict(tuple(reasons), "waiting" if waits else "degraded")


def _plus(age_s: float | None, more: float) -> float | None:
    return None if age_s is None else age_s + more


def _broker_reasons(snapshot: Snapshot) -> list[str]:
    floor = snapshot.round.floor if snapshot.round else 0
    alive = snapshot.counts.alive
    if snapshot.state == "stopping":
        return ["the broker is stopping"]
    if snapshot.state == "paused":
        return [f"the run is paused, for {_seconds(snapshot.paused_for_s or 0.0)}"]
    if snapshot.checkpoint is not None and snapshot.checkpoint.error is not None:
        return [f"no checkpoint can be written: {snapshot.checkpoint.error}"]
    if snapshot.state == "waiting":
        return [] if snapshot.ended else _waiting(snapshot)
    if alive < floor:
        return [f"the run waits for workers: {alive} here, the round needs {floor}"]
    return []


def _waiting(snapshot: Snapshot) -> list[str]:
    return [f"the run waits {snapshot.waiting_for or 'for workers'}"]


def _has_begun(snapshot: Snapshot) -> bool:
    """A version was made, or somebody who was to make one has died."""
    return any(part.version for part in snapshot.fragments) or snapshot.totals.deaths > 0


def _ending(snapshot: Snapshot) -> str:
    """Counts are of this life of the broker: one that was started again may have made no round."""
    if snapshot.mode == "async":
        count, one, many = snapshot.totals.contributions, "push", "pushes"
    else:
        count, one, many = snapshot.totals.rounds, "round", "rounds"
    after = f", after {count} {one if count == 1 else many}" if count else ""
    return f"all workers have left{after}"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"
