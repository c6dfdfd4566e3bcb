"""The feed: a complete snapshot of the broker once a second, as a JSON object.

The broker fills these records and publishes them; monitors read them. A subscriber that connects late
or misses snapshots needs only the next one. Keys may be added without a new `FEED_VERSION`: a reader
ignores unknown keys, and an absent or null one takes its default. Ages are durations by the broker's
own clock, so the clocks of two machines are never compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_protocol.errors import ProtocolError
from diloco_protocol.printable import printable_all
from diloco_protocol.records import NOT_SENT, from_plain

FEED_VERSION = 1
# Values of `Snapshot.security`: who may connect to the broker.
KEYS = "keys"  # holders of one of its keys
LOOPBACK = "loopback"  # every process on its machine: it listens on loopback only, without keys
INSECURE = "INSECURE"  # every process on any machine that reaches it
DEAD = "dead"  # the health of a worker that died: displays keep it
TOPIC = b"status "  # first bytes of a frame: the filter of a SUB socket
MAX_SNAPSHOT_BYTES = 16 << 20  # 16 MiB: tens of thousands of workers fit
MAX_DEPTH = 32  # levels of nesting: a snapshot has four, `extra` may add some


class FeedError(Exception):
    """An error of a feed; the message is a sentence for the user."""


class MalformedFeedError(FeedError):
    """The bytes are not a snapshot; the next frame may be one."""


class FeedVersionError(FeedError):
    """The broker publishes a feed version that this program cannot read."""


class FeedRefusedError(FeedError):
    """The broker requires a key, or another one; the message has the remedy."""


class FeedAddressError(FeedError):
    """The address cannot be subscribed to."""


@dataclass(frozen=True)
class Round:
    """The round now open or closing; worker ids in `expected`, `arrived` and `missing`."""

    number: int
    fragment: int = 0
    phase: str = "open"
    age_s: float = 0.0  # since it opened, without time in which the run was held
    expected: tuple[str, ...] = ()
    arrived: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    floor: int = 0  # minimum contributions


@dataclass(frozen=True)
class Counts:
    """Workers alive, participating in this round, averaged in the last.

    `due` is the number that should be alive: `workers_wanted` less those that left properly, or the
    alive and the dead together if they are more.
    """

    alive: int = 0
    due: int = 0
    participating: int = 0
    averaged: int = 0


@dataclass(frozen=True)
class Model:
    """Size of the model: trainable elements, tensors, bytes at the broker."""

    parameters: int = 0
    tensors: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class OuterGroup:
    """A parameter group of a torch outer optimizer."""

    lr: float | None = None
    momentum: float | None = None


@dataclass(frozen=True)
class Outer:
    """The outer optimizer and its settings; of a torch optimizer, those common to all its groups."""

    optimizer: str = ""
    lr: float | None = None
    momentum: float | None = None
    groups: tuple[OuterGroup, ...] = ()  # empty but for an optimizer of torch
    nesterov: bool | None = None
    variant: str | None = None  # of Delayed Nesterov
    buffer: int | None = None  # gradients per momentum step; None: no buffer
    c: float | None = None  # of Delayed Nesterov
    # Their schedules over rounds, as options; see `Fragment` for the current values.
    lr_schedule: str | None = None
    momentum_warmup: str | None = None
    momentum_restart: int | None = None  # rounds of a fragment; None: never


@dataclass(frozen=True)
class Reducer:
    """How contributions are reduced, and how many submissions are stored or wait for a slot."""

    staged: bool = False
    aggregate: str = "mean"
    trim: float | None = None  # of trimmed-mean: the share trimmed at each end
    deterministic: bool = False
    relays: bool = False
    # Pushes with a larger norm are rejected: than this, or (auto) than 5 times the `usual_norm`.
    max_delta_norm: float | None = None
    max_delta_norm_auto: bool = False
    weight_by: str = "equal"
    quorum: int | None = None
    grace_s: float = 0.0  # with `grace_auto` that of the last quorum
    grace_auto: bool = False
    late: str = "carry"
    submissions: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class Liveness:
    """Timeouts of workers; None: unknown."""

    heartbeat_timeout_s: float | None = None  # without a message: dead; 0: never
    stall_timeout_s: float | None = None  # without a step: stalled; 0: never
    disconnect_grace_s: float | None = None  # to reconnect


@dataclass(frozen=True)
class Asynchronous:
    """Settings of an asynchronous run: Dynamic Local Updates, staleness, admission slots."""

    dylu: bool = False
    dylu_min_steps: int | None = None
    staleness_weight: str = "none"
    max_staleness: int | None = None  # staler work is rejected; None: no limit
    slots: int | None = None  # submissions in progress at a time
    deadline_s: float | None = None  # without progress, after which a submission loses its slot
    # Of cgad alone: the decay with staleness, the staleness from which a push counts nothing.
    cgad_decay: float | None = None
    cgad_cutoff: int | None = None
    cgad_epsilon: float | None = None


@dataclass(frozen=True)
class Fragment:
    """The newest version of one fragment."""

    fragment: int
    version: int = 0  # its counter
    tag: str = ""  # random, in hexadecimal digits
    gradients: int = 0
    contributions: int = 0
    buffered: int = 0  # gradients in the buffer of its next momentum step
    usual_norm: float | None = None  # median of pushes over the workers; None with fewer than three
    # Scheduled values of its next outer step; None as in `Outer`.
    lr: float | None = None
    momentum: float | None = None


@dataclass  # not frozen: that takes twice as long, and the feed has one for each worker
class Worker:
    """One worker as the broker sees it. `tokens` are since it joined, `staleness` is in versions.

    `connections` is the number of its open data connections, of one for each of its `processes`.
    """

    id: str
    via: str = ""  # the relay nearest to the broker that it connects through; "": none
    host: str = ""
    pid: int = 0
    state: str = ""
    health: str = "ok"
    round: int | None = None  # of its last push
    step: int = 0
    inner_step: int = 0  # steps since its last boundary, of sync_every
    inner_age_s: float | None = None  # since it reported them; None: the broker inferred them
    sync_every: int = 0
    steps_per_s: float | None = None
    loss: float | None = None
    loss_is_finite: bool = True  # otherwise `loss` is None: strict JSON has no NaN
    staleness: int = 0
    pushes: int = 0
    beat_age_s: float = 0.0
    sync_age_s: float | None = None  # since its work was last counted
    # Another worker that sent the same update, bit for bit, when both last pushed from one version.
    same_as: str | None = None
    tokens: int = 0
    merge_delay: int | None = None  # steps from `sync_step` to the merge, of its last merge
    warning: str | None = None  # from its heartbeats; of a dead worker, the cause of its death
    bytes_up: int = 0
    bytes_down: int = 0
    rejected: int = 0
    delta_norm: float | None = None  # of its last complete push, as the broker measured it
    times_usual: float | None = None  # that over `usual_norm` of the fragment
    processes: int = 1
    connections: int = 1
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its id with its number of processes: "b x2", "b x3/4" while one has no connection."""
        return self.id + share_of_processes(self.processes, self.connections)


def share_of_processes(processes: int, connections: int) -> str:
    """The suffix of a worker's name for its processes; empty for one process."""
    if processes <= 1:
        return ""
    return f" x{processes}" if connections >= processes else f" x{connections}/{processes}"


@dataclass(frozen=True)
class Relay:
    """A connected relay."""

    name: str
    workers: int = 0  # connected through it
    held_bytes: int = 0  # of chunks that it holds for the broker
    silent_s: float = 0.0  # since its last message


@dataclass(frozen=True)
class Totals:
    """Counters since the broker started."""

    rounds: int = 0
    pushes: int = 0
    rejected: int = 0
    malformed: int = 0
    ended_connections: int = 0  # dropped by the broker for exceeding a limit
    contributions: int = 0  # complete ones, in versions
    steps: int = 0  # optimizer steps of the run's workers; see `diloco_protocol.messages.Progress`
    tokens: int = 0  # in versions, as reported
    open_s: int = 0  # seconds in which rounds could close
    bytes_up: int = 0
    deaths: int = 0
    refused: Mapping[str, Any] = field(default_factory=dict)  # rejected work, by reason
    bytes_down: int = 0


@dataclass(frozen=True)
class LastRound:
    """The round that closed last."""

    number: int
    fragment: int = 0
    version: int = 0  # of this fragment, which it made
    seconds: float = 0.0  # from opening to close, without time in which the run was held
    averaged: int = 0  # workers with a complete contribution
    weight: float = 0.0  # sum over the contributions
    loss: float | None = None  # mean of the reported losses
    delta_norm: float | None = None  # mean over its pushes, as the broker measured them
    staleness: int = 0  # of its oldest push, in versions


@dataclass(frozen=True)
class DataSet:
    """A data set of the work queue; units of all epochs together."""

    name: str
    size: int = 0  # units of one epoch
    epochs: int = 0  # 0: unlimited
    epoch: int = 0  # the oldest with units that are not counted, from 0
    counted: int = 0  # in the global parameters
    held: int = 0  # by workers
    given_back: int = 0  # and not handed out again


@dataclass(frozen=True)
class Checkpoint:
    """The folder of checkpoints, and the age of the newest."""

    folder: str = ""
    round: int | None = None  # that follows the newest
    age_s: float | None = None
    error: str | None = None
    durable: bool = False  # each version is saved before it is released


@dataclass(frozen=True)
class Standby:
    """Of a broker with a standby: whether it may release versions."""

    holds_lease: bool = False
    lease_s: float = 0.0
    heard_age_s: float | None = None  # since the last message of the standby; None: none yet
    is_replaced: bool = False  # the standby has taken over
    is_alone: bool = False  # an operator declared the standby gone


@dataclass(frozen=True)
class Rejection:
    """Work of a worker that the broker rejected; `code` for programs, `text` for people."""

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
    """The broker's loop: longest turn in ms, CPU seconds, resident bytes."""

    longest_turn_ms: float | None = None
    cpu_s: float | None = None
    rss_bytes: int | None = None


@dataclass(frozen=True)
class End:
    """The limits of the run, and its progress; None: no such limit."""

    max_rounds: int | None = None
    token_budget: int | None = None
    max_time_s: float | None = None
    rounds: int = 0  # closed
    tokens: int = 0  # in counted work
    seconds: int = 0  # in which rounds could close
    last_round: int | None = None  # its number, once known
    is_over: bool = False


@dataclass(frozen=True)
class Order:
    """A pending command of an operator to all workers."""

    action: str  # save_all or stop_all
    waiting: tuple[str, ...] = ()  # ids of workers that have not acknowledged it
    saved: int = 0  # workers
    left: int = 0


@dataclass(frozen=True)
class Wait:
    """Why the open round does not close, or none is open."""

    reason: str = ""  # a value of the broker's `Reason`
    workers: tuple[str, ...] = ()  # whose pushes are missing
    needed: int = 0  # fewest missing pushes or workers
    since_s: float = 0.0  # since the reason changed
    left_s: float | None = None  # until it ends by a timeout; None: only an event ends it


@dataclass(frozen=True)
class Snapshot:
    """The state of the broker at one moment."""

    feed: int
    sequence: int  # counts the snapshots of one epoch
    epoch: str  # one incarnation of the broker
    run: str | None = None
    version: str = ""
    control: str = ""
    security: str = ""  # KEYS, LOOPBACK or INSECURE; empty: unknown
    unix_s: float | None = None  # the broker's clock; None: unknown
    uptime_s: float = 0.0
    mode: str = ""
    state: str = ""
    waiting_for: str | None = None  # completes "the run waits"
    why: Wait | None = None  # None: unknown
    ended: bool = False  # after at least one round all workers have left as done
    paused_for_s: float | None = None
    end: End | None = None  # None: no limits, or unknown
    orders: tuple[Order, ...] = ()
    round: Round | None = None
    counts: Counts = Counts()
    model: Model | None = None
    outer: Outer = Outer()
    sync_every: int | None = None
    num_fragments: int | None = None
    fragment_pattern: str | None = None  # None: one fragment, or unknown
    fragment_sync_delay: int = 0
    fragment_delay_auto: bool = False  # replies are merged on arrival
    fragment_max_delay: int | None = None  # steps after which a worker waits for a reply
    fragment_update_alpha: float = 0.0
    fragment_merge: str = "alpha"
    reducer: Reducer = Reducer()
    liveness: Liveness = Liveness()
    asynchronous: Asynchronous | None = None
    wire_dtype: str = ""
    feedback_decay: float = 1.0  # of what quantized pushes leave out
    reply_dtype: str = ""
    workers_wanted: int | None = None
    min_workers: int | None = None
    save_every: int | None = None
    fragments: tuple[Fragment, ...] = ()
    workers: tuple[Worker, ...] = ()
    # Workers that died and neither came back nor were replaced: at most 100, for two days.
    dead: tuple[Worker, ...] = ()
    relays: tuple[Relay, ...] = ()
    totals: Totals = Totals()
    rejections: tuple[Rejection, ...] = ()
    checkpoint: Checkpoint | None = None
    term: int = 0  # how often a standby took over the run
    standby: Standby | None = None  # None: no standby
    data_sets: tuple[DataSet, ...] = ()  # of the work queue
    last_round: LastRound | None = None
    events: tuple[Event, ...] = ()
    loop: Loop = Loop()
    # The received JSON object, with unknown keys, and null for numbers that are not finite.
    raw: Mapping[str, object] = field(
        default_factory=dict, repr=False, compare=False, metadata=NOT_SENT
    )

    @property
    def listed(self) -> tuple[Worker, ...]:
        """The rows of tables of workers: the present, then the dead."""
        return self.workers + self.dead

    @property
    def training(self) -> tuple[str, ...]:
        """Ids of the workers that the round waits for and that are training normally."""
        well = {
            each.id for each in self.workers if each.health == "ok" and each.state == "training"
        }
        return tuple(sorted(well.intersection(self.round.missing))) if self.round else ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Ids of the other workers that the round waits for."""
        return tuple(sorted(set(self.round.missing) - set(self.training))) if self.round else ()


def parse_snapshot(frame: bytes) -> Snapshot:
    """Read one frame of the feed, topic included.

    Raises:
        FeedVersionError: a snapshot of another feed version.
        MalformedFeedError: anything else that is not a snapshot, naming the place.
    """
    if len(frame) > MAX_SNAPSHOT_BYTES:
        raise MalformedFeedError(f"the frame has {len(frame)} bytes, too many for a snapshot")
    if not frame.startswith(TOPIC):
        raise MalformedFeedError(f"the frame starts with {frame[: len(TOPIC)]!r}, not {TOPIC!r}")
    try:
        document = json.loads(frame[len(TOPIC) :])
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, huge integers
        raise MalformedFeedError(f"the snapshot is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise MalformedFeedError("the snapshot is not a JSON object")
    return read_snapshot(document)


def read_snapshot(document: Mapping[str, Any]) -> Snapshot:
    """Read a snapshot from a JSON object; raises as `parse_snapshot`."""
    version = document.get("feed")
    if type(version) is not int:
        raise MalformedFeedError(f"feed is {version!r:.40}; it must be a whole number")
    if version != FEED_VERSION:
        raise FeedVersionError(
            f"the broker publishes feed version {version} and this program reads version "
            f"{FEED_VERSION}: install the same version of diloco-broker here and there"
        )
    try:
        raw = json_safe(document)
        snapshot = from_plain(Snapshot, printable_all(document), "snapshot", lenient=True)
        return replace(snapshot, raw=raw)
    except (ProtocolError, ValueError) as error:
        raise MalformedFeedError(str(error)) from None


def json_safe(value: Any, levels: int = MAX_DEPTH) -> Any:
    """The value as strict JSON: null for numbers that are not finite, text for other types.

    Raises:
        ValueError: it is nested more than `MAX_DEPTH` levels deep.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if not isinstance(value, Mapping | list | tuple):
        return str(value)
    if levels == 0:
        raise ValueError(f"the snapshot is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        return {str(key): json_safe(item, levels - 1) for key, item in value.items()}
    return [json_safe(item, levels - 1) for item in value]
