"""The feed: one whole snapshot of the broker once a second, as a JSON object.

The broker fills these records and publishes them; monitors read them. A subscriber that connects late
or misses some needs nothing but the next one. Keys may be added without a new `FEED_VERSION`: a reader
ignores those that it does not know, and an absent or null one takes its default. Ages are durations by
the broker's own clock, so no two machines' clocks are ever compared.
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
# What `Snapshot.security` says of who may connect to the broker.
KEYS = "keys"  # whoever has one of its keys
LOOPBACK = "loopback"  # whoever is on its machine: it listens to no other, and asks for no keys
INSECURE = "INSECURE"  # whoever reaches it from any machine
DEAD = "dead"  # the health of a worker that died: it stays in displays, marked
TOPIC = b"status "  # first bytes of a frame: what a SUB socket filters on
MAX_SNAPSHOT_BYTES = 16 << 20  # 16 MiB: tens of thousands of workers fit
MAX_DEPTH = 32  # levels of nesting: a snapshot has four, `extra` may add some


class FeedError(Exception):
    """What can be wrong with a feed, a sentence for the person at the terminal."""


class MalformedFeedError(FeedError):
    """The bytes are not a snapshot; the next frame may be one."""


class FeedVersionError(FeedError):
    """The broker publishes a feed version that this program cannot read."""


class FeedRefusedError(FeedError):
    """The broker wants a key, or another one; the sentence says what to do."""


class FeedAddressError(FeedError):
    """The address cannot be subscribed to."""


@dataclass(frozen=True)
class Round:
    """The round now open or closing; worker ids in `expected`, `arrived` and `missing`."""

    number: int
    fragment: int = 0
    phase: str = "open"
    age_s: float = 0.0  # since it opened, without the time for which the run was held
    expected: tuple[str, ...] = ()
    arrived: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    floor: int = 0  # workers below which the round stays open


@dataclass(frozen=True)
class Counts:
    """Workers alive, participating in this round, averaged in the last.

    `due` are those that should be alive: the `workers_wanted` less those that left properly, or those
    alive together with the dead where these are more.
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
    """A group of a torch outer optimizer."""

    lr: float | None = None
    momentum: float | None = None


@dataclass(frozen=True)
class Outer:
    """The outer optimizer and its settings; of torch's, what all of its groups have in common."""

    optimizer: str = ""
    lr: float | None = None
    momentum: float | None = None
    groups: tuple[OuterGroup, ...] = ()  # empty but for an optimizer of torch
    nesterov: bool | None = None
    variant: str | None = None  # of Delayed Nesterov
    buffer: int | None = None  # gradients to a momentum step; None where there is no buffer
    c: float | None = None  # of Delayed Nesterov
    # How both go over rounds, as the options have it; see `Fragment` for what they are now.
    lr_schedule: str | None = None
    momentum_warmup: str | None = None  # None where no momentum warms up


@dataclass(frozen=True)
class Reducer:
    """How contributions are reduced, and how many submissions are kept or wait for a slot."""

    staged: bool = False
    aggregate: str = "mean"
    trim: float | None = None  # of trimmed-mean: what is left out at each end
    deterministic: bool = False
    relays: bool = False
    # Longer pushes are refused: than this, or (auto) than 5 times `usual_norm` of the fragment.
    max_delta_norm: float | None = None
    max_delta_norm_auto: bool = False
    weight_by: str = "equal"
    quorum: int | None = None
    grace_s: float = 0.0
    late: str = "carry"
    submissions: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class Liveness:
    """When a worker counts as gone; None: a broker that does not say."""

    heartbeat_timeout_s: float | None = None  # dead for its silence; 0: never
    stall_timeout_s: float | None = None  # stalled without a step; 0: never
    disconnect_grace_s: float | None = None  # after its connection broke


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
    """The newest version of one fragment."""

    fragment: int
    version: int = 0  # its counter
    tag: str = ""  # random, in hexadecimal digits
    gradients: int = 0
    contributions: int = 0
    buffered: int = 0  # gradients to its next momentum step that are in
    usual_norm: float | None = (
        None  # of pushes, median over the workers; None with fewer than three
    )
    # Of its next outer step, as the schedules have them by then; None as in `Outer`.
    lr: float | None = None
    momentum: float | None = None


@dataclass  # not frozen: that takes twice as long, and the feed has one for each worker
class Worker:
    """One worker as the broker sees it. `tokens` are since it joined, `staleness` is in versions.

    One of several `processes` has a connection for chunks for each; `connections` are those there now.
    """

    id: str
    via: str = ""  # the relay nearest to the broker that it connects through; "": none
    host: str = ""
    pid: int = 0
    state: str = ""
    health: str = "ok"
    round: int | None = None  # that its last push was for
    step: int = 0
    inner_step: int = 0  # steps since its last boundary, of sync_every
    inner_age_s: float | None = None  # since it told so; None: it has not, the broker concluded it
    sync_every: int = 0
    steps_per_s: float | None = None
    loss: float | None = None
    loss_is_finite: bool = True  # where it is not, `loss` is left out: strict JSON has no NaN
    staleness: int = 0
    pushes: int = 0
    beat_age_s: float = 0.0
    sync_age_s: float | None = None  # since its work was last counted
    # Another worker that sent the same update, bit for bit, when both last pushed from one version.
    same_as: str | None = None
    tokens: int = 0
    merge_delay: int | None = None  # steps from slot to merge, of its last merge
    # What it warns of in its heartbeats, a sentence; of a dead one, what it died of.
    warning: str | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    rejected: int = 0
    delta_norm: float | None = None  # of its last whole push, as the broker measured it
    times_usual: float | None = None  # that over `usual_norm` of the fragment
    processes: int = 1
    connections: int = 1
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its name, and of how many processes it is: "b x2", "b x3/4" while one has no connection."""
        return self.id + share_of_processes(self.processes, self.connections)


def share_of_processes(processes: int, connections: int) -> str:
    """What follows the name of a worker; nothing where it is one process."""
    if processes <= 1:
        return ""
    return f" x{processes}" if connections >= processes else f" x{connections}/{processes}"


@dataclass(frozen=True)
class Relay:
    """A relay that is connected."""

    name: str
    workers: int = 0  # that come through it
    held_bytes: int = 0  # of chunks that it holds for the broker
    silent_s: float = 0.0  # since it was heard


@dataclass(frozen=True)
class Totals:
    """Counters since the broker started."""

    rounds: int = 0
    pushes: int = 0
    rejected: int = 0
    malformed: int = 0
    ended_connections: int = 0  # of peers that cost the broker too much
    contributions: int = 0  # whole ones, in versions
    steps: int = 0  # optimizer steps of the run's workers; see `diloco_protocol.messages.Progress`
    tokens: int = 0  # that went into versions, as reported
    open_s: int = 0  # seconds in which rounds could close
    bytes_up: int = 0
    deaths: int = 0
    refused: Mapping[str, Any] = field(default_factory=dict)  # work refused: how often, by reason
    bytes_down: int = 0


@dataclass(frozen=True)
class LastRound:
    """The round that closed last."""

    number: int
    fragment: int = 0
    version: int = 0  # that it made of this fragment
    seconds: float = 0.0  # from its opening to its end, without the time for which the run was held
    averaged: int = 0  # workers, counted whole
    weight: float = 0.0  # of them all
    loss: float | None = None  # mean of those that they reported
    delta_norm: float | None = None  # mean of those of its pushes, as the broker measured them
    staleness: int = 0  # of its oldest push, in versions


@dataclass(frozen=True)
class DataSet:
    """A data set of the work queue; units of all epochs together."""

    name: str
    size: int = 0  # units of one epoch
    epochs: int = 0  # 0: without an end
    epoch: int = 0  # the oldest of which something is not counted, from 0
    counted: int = 0  # in the global parameters
    held: int = 0  # by workers
    given_back: int = 0  # and not handed out again yet


@dataclass(frozen=True)
class Checkpoint:
    """Where checkpoints go, and how old the newest is."""

    folder: str = ""
    round: int | None = None  # the coming one, of the newest
    age_s: float | None = None
    error: str | None = None  # what is wrong, if anything
    durable: bool = False  # each version is saved before anybody is told of it


@dataclass(frozen=True)
class Standby:
    """Of a hub that has a standby: whether it may release versions."""

    holds_lease: bool = False
    lease_s: float = 0.0
    heard_age_s: float | None = None  # since the standby was heard; None: never in this life
    is_replaced: bool = False  # the standby has taken over
    is_alone: bool = False  # an operator has said that there is none any more


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
class End:
    """The end that the run was given, and how far it is; None: no such end."""

    max_rounds: int | None = None
    token_budget: int | None = None
    max_time_s: float | None = None
    rounds: int = 0  # made so far
    tokens: int = 0  # in counted work
    seconds: int = 0  # in which rounds could close
    last_round: int | None = None  # its number, once it is known
    is_over: bool = False


@dataclass(frozen=True)
class Order:
    """What an operator has asked all workers to do; shown while somebody has not answered."""

    action: str  # save_all or stop_all
    waiting: tuple[str, ...] = ()  # ids of workers that have not answered
    saved: int = 0  # workers that have
    left: int = 0


@dataclass(frozen=True)
class Wait:
    """Why the open round does not close, or none is open."""

    reason: str = ""  # a value of the broker's `Reason`
    workers: tuple[str, ...] = ()  # whose pushes are missing
    needed: int = 0  # pushes, or workers, that are missing at least
    since_s: float = 0.0  # for how long the reason has been the same
    left_s: float | None = None  # after which time it ends by itself; None: only an event ends it


@dataclass(frozen=True)
class Snapshot:
    """Everything the broker says about itself at one moment."""

    feed: int
    sequence: int  # counts the snapshots of one epoch
    epoch: str  # one life of the broker
    run: str | None = None
    version: str = ""
    control: str = ""
    security: str = ""  # KEYS, LOOPBACK or INSECURE; empty: a broker that does not say
    unix_s: float | None = None  # the broker's clock; None: a broker that does not say
    uptime_s: float = 0.0
    mode: str = ""
    state: str = ""
    waiting_for: str | None = None  # completes "the run waits"
    why: Wait | None = None  # None: a broker that does not say
    ended: bool = False  # rounds were made, and all workers have left as done
    paused_for_s: float | None = None
    end: End | None = None  # None: nobody has set one, or a broker that does not say
    orders: tuple[Order, ...] = ()  # those that are pending
    round: Round | None = None
    counts: Counts = Counts()
    model: Model | None = None
    outer: Outer = Outer()
    sync_every: int | None = None
    num_fragments: int | None = None
    fragment_pattern: str | None = None  # None: one fragment, or a broker that does not say
    fragment_sync_delay: int = 0
    fragment_delay_auto: bool = False  # replies are merged when they are here
    fragment_max_delay: int | None = None  # steps after which a worker waits for a reply
    fragment_update_alpha: float = 0.0
    fragment_merge: str = "alpha"
    reducer: Reducer = Reducer()
    liveness: Liveness = Liveness()
    asynchronous: Asynchronous | None = None
    wire_dtype: str = ""
    reply_dtype: str = ""
    workers_wanted: int | None = None
    min_workers: int | None = None
    save_every: int | None = None
    fragments: tuple[Fragment, ...] = ()
    workers: tuple[Worker, ...] = ()
    # Those that died and neither came back nor were replaced, as they were: 100 at most, for two days.
    dead: tuple[Worker, ...] = ()
    relays: tuple[Relay, ...] = ()
    totals: Totals = Totals()
    rejections: tuple[Rejection, ...] = ()
    checkpoint: Checkpoint | None = None
    term: int = 0  # how often the run's hub was replaced by a standby
    standby: Standby | None = None  # None: it is no hub with a standby
    data_sets: tuple[DataSet, ...] = ()  # of which the broker hands out units
    last_round: LastRound | None = None
    events: tuple[Event, ...] = ()
    loop: Loop = Loop()
    # The JSON object as it came, with unknown keys, and null for numbers that are not finite.
    raw: Mapping[str, object] = field(
        default_factory=dict, repr=False, compare=False, metadata=NOT_SENT
    )

    @property
    def listed(self) -> tuple[Worker, ...]:
        """What tables of workers show: those that are here, and the dead."""
        return self.workers + self.dead

    @property
    def training(self) -> tuple[str, ...]:
        """Ids of those that the round waits for and that train towards their push, as they should."""
        well = {
            each.id for each in self.workers if each.health == "ok" and each.state == "training"
        }
        return tuple(sorted(well.intersection(self.round.missing))) if self.round else ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Ids of the others that the round waits for."""
        return tuple(sorted(set(self.round.missing) - set(self.training))) if self.round else ()


def parse_snapshot(frame: bytes) -> Snapshot:
    """Read one frame of the feed, topic included.

    Raises:
        FeedVersionError: a snapshot of another feed version.
        MalformedFeedError: anything else that is not a snapshot, naming the place.
    """
    if len(frame) > MAX_SNAPSHOT_BYTES:
        raise MalformedFeedError(f"the frame has {len(frame)} bytes, no snapshot is that long")
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
    """The same from a JSON object."""
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
    """The same as strict JSON: null for numbers that are not finite, texts for what JSON lacks.

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
