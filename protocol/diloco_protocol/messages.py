"""All message kinds as typed, frozen records, and the codec of their headers.

A header is a msgpack map: "v" (protocol version), "kind", and one key for each field below, encoded by
`records`. docs/specification.md defines their meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, NoReturn

import msgpack

from diloco_protocol.chunks import CHUNK_ELEMENTS
from diloco_protocol.description import describe
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.manifest import Manifest
from diloco_protocol.packed import Packed, pack_with
from diloco_protocol.records import from_plain, plain_fields
from diloco_protocol.version import Ledger, VersionId

PROTOCOL_VERSION = 1
# The form of float buffers in a push: values. Earlier releases sent differences from the base, with
# which late work made variances negative. Both ends announce the form, so that it is never misread.
BUFFERS = "values"

# The choices of fields of `RunConfig`, which explains them.
MODES = ("sync", "async")
MERGES = ("alpha", "rebase")
# By weight, the fields of a push that it depends on, and that must be positive.
WEIGHTS = {
    "equal": (),
    "tokens": ("tokens",),
    "samples": ("samples",),
    "tokens2-per-step": ("tokens", "steps"),
}

LONGEST_WORKER_ID = 64  # characters
MOST_PROCESSES = 256  # of one worker: 32 machines with eight accelerators
LONGEST_JOIN = 60 << 10  # bytes of its header; a longer one has only the digest of the manifest
# Bytes of a probe's buffer: below the limit of a message of a peer that has not joined.
LONGEST_PROBE = 48 << 10


def is_worker_id(text: str) -> bool:
    """Whether a text is a valid worker id: 1 to `LONGEST_WORKER_ID` printable characters."""
    return 0 < len(text) <= LONGEST_WORKER_ID and text.isprintable()


def is_data_set_name(text: str) -> bool:
    """Whether a text is a valid data set name: 1 to `LONGEST_WORKER_ID` printable characters."""
    return is_worker_id(text)


@dataclass(frozen=True)
class RunConfig:
    """The training configuration of a run. The broker owns it and sends it in `welcome`."""

    mode: str  # "sync" (rounds) or "async" (each push is a separate outer step)
    sync_every: int  # H, inner (optimizer) steps between two pushes of a fragment
    num_fragments: int = 1  # P
    fragment_sync_delay: int = 0  # tau, inner steps from sending a fragment to merging the reply
    fragment_update_alpha: float = 0.0  # weight of the local parameters in that merge
    fragment_merge: str = "alpha"  # as in the paper; or "rebase": keeps the steps since sending
    # Inner steps at which a worker pauses to wait for a late reply; None = tau, and with
    # `fragment_delay_auto` the result of `fragments.longest_delay`.
    fragment_max_delay: int | None = None
    # merge replies at the first step after their arrival; tau is 0
    fragment_delay_auto: bool = False
    dylu: bool = False  # replies to heartbeats have an H for each worker
    weight_by: str = "equal"  # weight of a contribution, one of `WEIGHTS`
    wire_dtype: str = "bf16"  # of pseudo-gradients, worker to broker
    # What a quantized push that counted left out is multiplied by before it goes with the next one.
    feedback_decay: float = 1.0
    reply_dtype: str = "fp32"  # of parameters, broker to worker
    heartbeat_timeout: float = 120.0  # seconds of silence after which a worker is dead; 0 = never
    chunk_elements: int = CHUNK_ELEMENTS  # of a chunk, both ways
    # Form of float buffers in a push, `BUFFERS` in this release. A broker without this field is of an
    # earlier release, which expects differences.
    buffers: str = "differences"


@dataclass(frozen=True)
class Progress:
    """The progress of a run; 0 also if the broker does not report a value.

    Attributes:
        rounds: closed rounds; in asynchronous mode applied pushes.
        steps: optimizer steps of a worker that was in the run from the start.
        tokens: tokens of counted work, as reported by all workers.
        seconds: time during which rounds could close.
        max_rounds, token_budget, max_seconds: limits at which the run ends; None: no limit.
    """

    rounds: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: int = 0
    max_rounds: int | None = None
    token_budget: int | None = None
    max_seconds: float | None = None

    @property
    def fraction(self) -> float | None:
        """The completed part of the run, 0 to 1, by the nearest limit; None without limits."""
        ends = (
            (self.rounds, self.max_rounds),
            (self.tokens, self.token_budget),
            (self.seconds, self.max_seconds),
        )
        return max((min(1.0, done / end) for done, end in ends if end), default=None)


class Purpose(str, Enum):
    """The purpose of a push."""

    GRADIENT = "gradient"  # a pseudo-gradient for a round
    SEEDING = "seeding"  # initial parameters from a seed worker


class Standing(str, Enum):
    """The state of a push at the broker."""

    NEW = "new"  # no chunk has arrived: send all
    RESUME = "resume"  # the chunks in `held` have arrived: send the others
    COUNTED = "counted"  # a version contains all of it: send nothing, pull
    WAIT = "wait"  # its round is not open yet: wait for another grant


@dataclass(frozen=True)
class Message:
    """Base of all messages; `kind` is the name on the wire, the class name in lower case."""

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__.lower()


@dataclass(frozen=True)
class Lot:
    """A batch of units of the work queue, which counts when all of these pushes are counted."""

    pushes: tuple[int, ...]  # ids, for each fragment of the push with the last steps of these units
    units: Mapping[str, tuple[int, ...]]  # by data set, ranges of tickets: start, stop, start, stop


# Worker to broker.


@dataclass(frozen=True)
class Join(Message):
    """Ask to join the run. `wants` has only the values that the worker requires, by RunConfig field.

    A worker with several `processes` has a lane (a data connection) for each. A manifest that is too
    long for a header is omitted; `digest` and `size` are those of its description.
    """

    worker_id: str
    manifest: Manifest | None = None
    run: str | None = None
    session: bytes | None = None
    versions: tuple[VersionId | None, ...] = ()
    wants: Mapping[str, Any] = field(default_factory=dict)
    host: str = ""
    pid: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    digest: bytes | None = None
    size: int = 0
    processes: int = 1
    voter: int | None = None  # random id of this incarnation of the worker, for votes (STANDBY.md)


@dataclass(frozen=True)
class Describe(Message):
    """The next part of the description that this connection's join referred to, on request."""

    piece: bytes


@dataclass(frozen=True)
class Leave(Message):
    session: bytes
    reason: str = ""


@dataclass(frozen=True)
class Heartbeat(Message):
    """Shows that the worker is alive. The step count reveals a hung training loop."""

    session: bytes
    step: int
    inner_step: int = 0
    state: str = "training"
    steps_per_s: float | None = None
    loss: float | None = None
    tokens: int = 0
    merge_delay: int | None = None  # steps from slot to merge, of the last merge
    warning: str | None = None  # a current problem of this worker, for people
    saved: int | None = None  # the number of the last `save_all` that its script has executed


@dataclass(frozen=True)
class Push(Message):
    """Offer a pseudo-gradient (or, from a seed worker, initial parameters); the reply is a `grant`."""

    session: bytes
    push_id: int
    fragment: int
    chunks: int
    wire_dtype: str
    base: VersionId | None = None
    weight: float = 1.0
    steps: int = 0
    tokens: int = 0
    samples: int = 0
    loss: float | None = None
    norm: float | None = None
    purpose: Purpose = Purpose.GRADIENT
    ledger: Ledger | None = None
    buffers: str = "differences"  # form of its float buffers: `BUFFERS`
    lots: tuple[Lot, ...] | None = None  # batches of work units that count with this push


@dataclass(frozen=True)
class Chunk(Message):
    """A chunk, in either direction, followed by its buffer. Up: session, push_id. Down: version."""

    fragment: int
    index: int
    session: bytes | None = None
    push_id: int | None = None
    version: VersionId | None = None
    # Down, quantized: the payload is the difference from the chunk of version `delta_of`, which the
    # reader holds: one code for each version since then, with these lengths in bytes, to be added in
    # order. The checksum is that of the resulting chunk (`tensors.codecs.checksum`).
    delta_of: VersionId | None = None
    parts: tuple[int, ...] | None = None
    checksum: int | None = None


@dataclass(frozen=True)
class Commit(Message):
    """All chunks of this push have been sent: the push is complete."""

    session: bytes
    push_id: int
    fragment: int


@dataclass(frozen=True)
class Pull(Message):
    """Request the newest version of a fragment whose counter is above `after`."""

    fragment: int
    after: int = -1
    session: bytes | None = None  # None: a reader that has not joined
    credit: int = 0  # chunks that it can receive now
    held_version: VersionId | None = None  # continues an interrupted download
    held: bytes | None = None  # bitmap of its chunks
    # The reader holds this version completely: a newer one may be sent as differences from it.
    delta_of: VersionId | None = None


@dataclass(frozen=True)
class Credit(Message):
    """The reader can receive this many more chunks. The first one binds the data connection."""

    chunks: int
    session: bytes | None = None


@dataclass(frozen=True)
class Lane(Message):
    """The first message on each data connection of a worker with several processes; binds it.

    Attributes:
        index: of the connection; 0 corresponds to `bulk` of a worker with one process.
        shares: for each fragment, including the frozen one, a bitmap of the chunks of this connection.
        credit: chunks that it can receive now.
    """

    session: bytes
    index: int
    shares: tuple[bytes, ...]
    credit: int = 0


@dataclass(frozen=True)
class Take(Message):
    """Report the units of a data set that this worker holds, and request more; the reply is a `result`.

    The first request with a name creates the data set. `data` of the result has `units` (newly
    assigned), `lost` (units of `holds` that this worker must give up), and `is_over` (all epochs are
    counted).
    """

    session: bytes
    request: int
    name: str
    size: int  # K, number of units
    epochs: int = 0  # 0: unlimited
    seed: int | None = None  # of the order; None: in order of their numbers
    count: int = 0  # units requested
    holds: tuple[int, ...] = ()  # ranges of tickets: start, stop, start, stop
    lots: tuple[Lot, ...] = ()  # counted recently: a restarted broker may not know it


@dataclass(frozen=True)
class Vote(Message):
    """The reply to a `notice` with a nonce, which it returns; see protocol/STANDBY.md."""

    session: bytes  # at a hub; empty at a standby
    voter: int
    nonce: int


# Hub and standby.


@dataclass(frozen=True)
class Promise(Message):
    """From a standby to its hub: its identity; with `nonce` a promise not to take over for a while."""

    standby: str  # its permanent name; a hub has one standby
    incarnation: int  # random id of its process
    nonce: int | None = None  # of the `lease` that it answers; None: no promise
    # "hold": close no further round, and save; "charge": it wants to take over; "over": it has taken
    # over.
    wants: str = ""
    term: int = 0  # its own, with "over"


@dataclass(frozen=True)
class Lease(Message):
    """From a hub to its standby, a few times in each `seconds`."""

    incarnation: int  # id of the standby's process that it is addressed to
    term: int  # number of takeovers in the run
    nonce: int  # to be returned with a promise
    seconds: float  # validity of the promise
    # Voter set from now on, until a nonce is returned; empty: unchanged.
    voters: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)  # current settings of operators
    settled: int | None = None  # on hold: number of the checkpoint that has all of the run
    is_over: bool = False  # this hub has stepped down, and releases no versions


# Relay and hub: see `relays`.


@dataclass(frozen=True)
class Held:
    """The report of a relay to its hub about a chunk that it holds instead of forwarding it.

    Attributes:
        number: identifies the chunk in later requests; increasing.
        nbytes: of the chunk as received.
        squares, fingerprint: as the hub would compute them; `squares` is None if the chunk has a value
            that is not finite or cannot be decoded. Then the relay does not hold it.
    """

    number: int
    nbytes: int
    squares: float | None = None
    fingerprint: int = 0


@dataclass(frozen=True)
class Attach(Message):
    """The first message of a relay on both connections; has the `token` on the data connection."""

    relay: str  # its name
    incarnation: int  # random id of its process
    token: bytes | None = None


@dataclass(frozen=True)
class Attached(Message):
    """The reply to `attach` on the control connection; sent again when one of these values changes."""

    token: bytes
    combines: bool  # the relay holds chunks of pseudo-gradients for sums, or forwards them
    wire_dtype: str  # of parameters in sums
    chunk_elements: int = CHUNK_ELEMENTS
    # Elements of parameters, float buffers and integers in each fragment; empty until the model is
    # known.
    fragments: tuple[tuple[int, ...], ...] = ()
    feed: str | None = None  # address of the hub's feed


@dataclass(frozen=True)
class Via(Message):
    """An envelope: the frames after it are a message from or to a downstream connection of a relay.

    Attributes:
        who: the connection, or the path to it through several relays.
        peer: up, if the relay requires keys: the worker that owns the key.
        held: up, for a `chunk` without its buffer.
    """

    who: bytes
    peer: str | None = None
    held: Held | None = None


@dataclass(frozen=True)
class Gone(Message):
    """Up: this downstream connection of a relay was closed. Down: close it."""

    who: bytes


@dataclass(frozen=True)
class Part:
    """A chunk that a relay holds, and its weight in a mean."""

    number: int
    weight: float


@dataclass(frozen=True)
class Collect(Message):
    """The hub requests the weighted mean of these parts, all of one chunk; the maximum of integers."""

    request: int
    fragment: int
    index: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Combined(Message):
    """The reply to `collect`, on the data connection, with a buffer. `numbers`: the parts in it."""

    request: int
    fragment: int
    index: int
    numbers: tuple[int, ...]
    wire_dtype: str


@dataclass(frozen=True)
class Forget(Message):
    """The hub will not collect the chunks with these numbers."""

    numbers: tuple[int, ...]


# Broker to worker.


@dataclass(frozen=True)
class Welcome(Message):
    """The reply to `join`. `plan` has the fragment of each manifest entry, in order; empty if P is 1."""

    session: bytes
    epoch: str
    config: RunConfig
    first_round: int
    run: str | None = None
    versions: tuple[VersionId | None, ...] = ()
    feed: str | None = None
    plan: tuple[int, ...] = ()
    shard: int | None = None  # this worker's shard of the data, if it samples by itself,
    num_shards: int | None = None  # of this many
    ipc: str | None = None  # Unix socket for chunks of workers of the same machine and user,
    bound: str | None = None  # if they have connected to this address
    term: int = 0  # number of takeovers in the run
    lease: float | None = None  # of a hub that has a standby, seconds


@dataclass(frozen=True)
class Grant(Message):
    """The reply to a push: the chunks that have arrived already, and how many may be sent now."""

    push_id: int
    fragment: int
    standing: Standing
    held: bytes | None = None
    credit: int = 0
    text: str = ""
    round: int | None = None  # the round that will contain it; None in asynchronous mode


@dataclass(frozen=True)
class Ack(Message):
    """These chunks have arrived; each returns one credit to its lane, and `lane` gets `credit` more."""

    push_id: int
    fragment: int
    chunks: tuple[int, ...]
    credit: int = 0
    lane: int = 0


@dataclass(frozen=True)
class Released(Message):
    """A version is complete: a reader may use its chunks once all have arrived."""

    fragment: int
    version: VersionId
    ledger: Ledger
    round: int = 0
    averaged: int = 0
    # of the reader's last push in it: versions between its base and this one
    staleness: int | None = None
    progress: Progress | None = None  # of the run, including this version
    loss: float | None = None  # mean of the losses that its workers have reported


@dataclass(frozen=True)
class Notice(Message):
    """A notification of a worker: `alive`, `describe`, `seed`, `deferred`, `shutdown`, ..."""

    what: str
    text: str = ""
    fragment: int = 0
    round: int = 0
    sync_every: int | None = None
    # For `lease` of a hub and `standby` of its standby: a nonce that a `vote` returns, and the validity
    # of that vote in seconds.
    nonce: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Rejoin(Message):
    """This session is unknown on this connection: open new connections and join."""

    epoch: str
    text: str = ""


@dataclass(frozen=True)
class Error(Message):
    """A refusal. `push_id` is set if it ends a push; `about` is the kind of the rejected message.

    `counted` is a bitmap of the chunks of that push that a version contains or may still contain; None
    if the broker does not report it.
    """

    code: str
    text: str
    retry: bool = False
    push_id: int | None = None
    about: str | None = None
    counted: bytes | None = None


# Operator and anyone.


@dataclass(frozen=True)
class Probe(Message):
    """Measures the link. The broker replies with the same number; both may have a buffer.

    Attributes:
        answer: requested bytes of the reply's buffer.
    """

    number: int
    answer: int = 0


@dataclass(frozen=True)
class Control(Message):
    action: str
    request: int
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result(Message):
    request: int
    ok: bool
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)


KINDS = {record.kind: record for record in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """Encode a message as a header frame."""
    if isinstance(message, Result) and isinstance(message.data, Packed):
        plain = {
            "v": PROTOCOL_VERSION,
            "kind": message.kind,
            **plain_fields(replace(message, data={})),
        }
        del plain["data"]
        return pack_with(plain, {"data": message.data.packed})
    plain = {"v": PROTOCOL_VERSION, "kind": message.kind, **plain_fields(message)}
    return bytes(msgpack.packb(plain))


def _refuse_extension(code: int, _: bytes) -> NoReturn:
    """Reject msgpack extensions, which could be forwarded in an `extra` or in arguments."""
    problem = f"The header has a msgpack extension (type {code}), which is not allowed."
    raise ProtocolError(Code.BAD_HEADER, problem)


def decode(header: bytes | memoryview) -> Message:
    """Decode a header frame; raises ProtocolError, whose message can be sent back."""
    try:
        plain = msgpack.unpackb(
            header, use_list=False, strict_map_key=True, ext_hook=_refuse_extension
        )
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        problem = f"The header is not a msgpack map ({type(error).__name__})."
        raise ProtocolError(Code.BAD_HEADER, problem) from None
    if not isinstance(plain, dict):
        problem = f"The header is a msgpack {type(plain).__name__}, not a map."
        raise ProtocolError(Code.BAD_HEADER, problem)
    version = plain.get("v")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            Code.PROTOCOL_VERSION,
            f"This message speaks protocol version {version!r:.40}, we speak {PROTOCOL_VERSION}; "
            "install the same release of diloco-broker at both ends.",
        )
    kind = plain.get("kind")
    record = KINDS.get(kind) if isinstance(kind, str) else None
    if record is None:
        raise ProtocolError(
            Code.BAD_HEADER,
            f"Unknown message kind {kind!r:.60}."
            if not isinstance(kind, str)
            else f"Unknown message kind {kind[:60]!r}.",
        )
    return from_plain(record, plain, str(kind))


def in_a_header(join: Join) -> Join:
    """The join, with the digest instead of the manifest if the header would be too long."""
    if join.manifest is None or len(encode(join)) <= LONGEST_JOIN:
        return join
    found = describe(join.manifest)
    return replace(join, manifest=None, digest=found.digest, size=len(found.packed))
