"""Every message kind as a typed, frozen record, and the header that it travels in.

The header is a msgpack map: "v" (protocol version), "kind", and one key for each field below, as the
codec of `records` writes them. The meaning of each is in docs/specification.md.
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
# How float buffers travel in a push: as they are. Earlier releases sent differences from the base, and
# late work drove variances below zero. Each end says it, or values would be read as differences.
BUFFERS = "values"

# What a run may be told where the choice is one of names; what each means is in `RunConfig`.
MODES = ("sync", "async")
MERGES = ("alpha", "rebase")
WEIGHTS = ("equal", "tokens", "samples")

LONGEST_WORKER_ID = 64  # characters
MOST_PROCESSES = 256  # of one worker: 32 machines with eight accelerators
LONGEST_JOIN = 60 << 10  # bytes of its header; in a longer one the manifest is only named
# Of a probe's buffer, bytes: less than a message that a stranger may be in the middle of.
LONGEST_PROBE = 48 << 10


def is_worker_id(text: str) -> bool:
    """Can a worker be called that: 1 to `LONGEST_WORKER_ID` printable characters?"""
    return 0 < len(text) <= LONGEST_WORKER_ID and text.isprintable()


def is_data_set_name(text: str) -> bool:
    """Can a data set be called that: 1 to `LONGEST_WORKER_ID` printable characters?"""
    return is_worker_id(text)


@dataclass(frozen=True)
class RunConfig:
    """How the run is trained. The broker owns it and hands it out in `welcome`."""

    mode: str  # "sync" (rounds) or "async" (each push is an outer step of its own)
    sync_every: int  # H, inner (optimizer) steps between two pushes of a fragment
    num_fragments: int = 1  # P
    fragment_sync_delay: int = 0  # tau, inner steps from sending a fragment to merging the reply
    fragment_update_alpha: float = 0.0  # weight of the local parameters in that merge
    fragment_merge: str = "alpha"  # the paper's; or "rebase", which keeps the steps made meanwhile
    # Inner steps after which a worker waits for a late reply; None = tau, and with `fragment_delay_auto`
    # what `fragments.longest_delay` says.
    fragment_max_delay: int | None = None
    # merged at the first step at which all of it is here; tau is 0
    fragment_delay_auto: bool = False
    dylu: bool = False  # the answers to heartbeats carry an H for each worker
    weight_by: str = "equal"  # what a contribution weighs; or its "tokens" or "samples"
    wire_dtype: str = "bf16"  # of pseudo-gradients, worker to broker
    reply_dtype: str = "fp32"  # of parameters, broker to worker
    heartbeat_timeout: float = 120.0  # seconds of silence after which a worker is dead; 0 = never
    chunk_elements: int = CHUNK_ELEMENTS  # of a chunk, both ways
    # How float buffers travel in a push, `BUFFERS` in this release. A broker that does not say so is of
    # an earlier one and takes them for differences.
    buffers: str = "differences"


@dataclass(frozen=True)
class Progress:
    """How far a run is, with all that its workers have done; 0: nothing, or a broker that does not say.

    Attributes:
        rounds: that have been made; in asynchronous mode pushes that were applied.
        steps: optimizer steps that a worker which was there from the beginning has behind it.
        tokens: that all workers together have reported with what is counted.
        seconds: in which rounds could close.
        max_rounds, token_budget, max_seconds: the run ends there; None: no such end is set.
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
        """How much of the run is done, 0 to 1, by the end that is nearest; None where none is set."""
        ends = (
            (self.rounds, self.max_rounds),
            (self.tokens, self.token_budget),
            (self.seconds, self.max_seconds),
        )
        return max((min(1.0, done / end) for done, end in ends if end), default=None)


class Purpose(str, Enum):
    """Why a worker pushes."""

    GRADIENT = "gradient"  # a pseudo-gradient for a round
    DONATION = "donation"  # parameters for a broker that has none


class Standing(str, Enum):
    """What the broker already has of a push."""

    NEW = "new"  # nothing: send every chunk
    RESUME = "resume"  # the chunks in `held`: send the others
    COUNTED = "counted"  # all of it is in a version already: send nothing, pull
    WAIT = "wait"  # its round is not open yet: another grant follows


@dataclass(frozen=True)
class Message:
    """Base of all messages; `kind` is its name on the wire, that of the class in small letters."""

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__.lower()


@dataclass(frozen=True)
class Lot:
    """Units of the work queue that count when all of these pushes do."""

    pushes: tuple[int, ...]  # push ids, of each fragment the one with the last steps of these units
    units: Mapping[str, tuple[int, ...]]  # by data set, ranges of tickets: start, stop, start, stop


# Worker to broker.


@dataclass(frozen=True)
class Join(Message):
    """Ask to take part. `wants` names only what the worker insists on, by RunConfig field.

    A worker of several `processes` has a lane, a connection for chunks, for each. A manifest that is
    too long for a header is left out; `digest` and `size` name its description.
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
    voter: int | None = (
        None  # random, of this process of the worker: whose votes (docs/specification.md, section 16)
    )


@dataclass(frozen=True)
class Describe(Message):
    """The next piece of the description that this connection's join has named, as it was asked for."""

    piece: bytes


@dataclass(frozen=True)
class Leave(Message):
    session: bytes
    reason: str = ""


@dataclass(frozen=True)
class Heartbeat(Message):
    """A sign of life. Carries the step count, so that a hung training loop is seen."""

    session: bytes
    step: int
    inner_step: int = 0
    state: str = "training"
    steps_per_s: float | None = None
    loss: float | None = None
    tokens: int = 0
    merge_delay: int | None = None  # steps from slot to merge, of the last merge
    warning: str | None = None  # what people should know of this worker, as long as it holds
    saved: int | None = None  # the number of the last `save_all` that its script has carried out


@dataclass(frozen=True)
class Push(Message):
    """Offer a pseudo-gradient (or, as a donation, whole parameters); a `grant` answers."""

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
    buffers: str = "differences"  # how its float buffers travel: `BUFFERS`
    lots: tuple[Lot, ...] | None = None  # units of the work queue that count with this push


@dataclass(frozen=True)
class Chunk(Message):
    """One chunk, both ways; the buffer frame follows. Up: session, push_id. Down: version."""

    fragment: int
    index: int
    session: bytes | None = None
    push_id: int | None = None
    version: VersionId | None = None
    # Down, in few bits: the payload is what the chunk has more than that of this version, which the
    # reader holds; a code for each version in between, of these lengths in bytes, to be added in order.
    # The checksum is that of the chunk which comes of it (`tensors.codecs.checksum`).
    delta_of: VersionId | None = None
    parts: tuple[int, ...] | None = None
    checksum: int | None = None


@dataclass(frozen=True)
class Commit(Message):
    """Every chunk of this push has been sent; count it whole."""

    session: bytes
    push_id: int
    fragment: int


@dataclass(frozen=True)
class Pull(Message):
    """Ask for the newest version of a fragment whose counter is above `after`."""

    fragment: int
    after: int = -1
    session: bytes | None = None  # None: a reader that has not joined
    credit: int = 0  # chunks that it can take now
    held_version: VersionId | None = None  # goes on with a download that broke off
    held: bytes | None = None  # bitmap of its chunks
    # The reader holds this version whole: a newer one may come as deltas from it.
    delta_of: VersionId | None = None


@dataclass(frozen=True)
class Credit(Message):
    """The reader can take this many chunks more. The first one binds the bulk connection."""

    chunks: int
    session: bytes | None = None


@dataclass(frozen=True)
class Lane(Message):
    """The first word on each connection for chunks of a worker of several processes, which it binds.

    Attributes:
        index: of the connection among them; 0 stands where `bulk` stands in a worker of one process.
        shares: of each fragment, the frozen one included, a bitmap of the chunks that come and go here.
        credit: chunks that can be taken here now.
    """

    session: bytes
    index: int
    shares: tuple[bytes, ...]
    credit: int = 0


@dataclass(frozen=True)
class Take(Message):
    """Say which units of a data set this worker stands for, and ask for more; a `result` answers.

    The first that names a data set makes it. `data` of the result has `units`, those handed out, `lost`,
    those of `holds` that this worker cannot have, and `is_over`: all epochs are counted.
    """

    session: bytes
    request: int
    name: str
    size: int  # K, units of it
    epochs: int = 0  # 0: without an end
    seed: int | None = None  # of the order; None: as they are numbered
    count: int = 0  # units asked for
    holds: tuple[int, ...] = ()  # ranges of tickets: start, stop, start, stop
    lots: tuple[Lot, ...] = ()  # counted lately: a broker that was started again may not know it


@dataclass(frozen=True)
class Vote(Message):
    """The answer to a `notice` with a nonce, which it returns: see docs/specification.md, section 16."""

    session: bytes  # at a hub; a standby has none
    voter: int
    nonce: int


# Hub and standby.


@dataclass(frozen=True)
class Promise(Message):
    """A standby speaks to its hub: who it is; with `nonce`, that it will not take over for a while."""

    standby: str  # its name for good; the hub has one standby
    life: int  # random, of its process
    nonce: int | None = None  # of the `lease` that it answers; None: it promises nothing
    # "hold": no other round should close, and what there is be saved; "charge": to take over; "over": it
    # has taken over.
    wants: str = ""
    term: int = 0  # with "over", its own


@dataclass(frozen=True)
class Lease(Message):
    """A hub speaks to its standby, a few times in each `seconds`."""

    life: int  # of the standby's process that this is for
    term: int  # how often the run's hub was replaced
    nonce: int  # to be returned with a promise
    seconds: float  # how long that holds
    voters: tuple[int, ...] = ()  # from now on, until a nonce comes back; empty: those that it has
    settings: Mapping[str, Any] = field(default_factory=dict)  # what operators may change, as it is
    settled: int | None = None  # on hold: the number of the checkpoint that has everything
    is_over: bool = False  # this hub has stepped down, and releases nothing any more


# Relay and hub: see `relays`.


@dataclass(frozen=True)
class Held:
    """What a relay tells its hub of a chunk that it holds, instead of sending it.

    Attributes:
        number: by which the hub asks for it; each is higher than those before.
        nbytes: of the chunk as it came.
        squares, fingerprint: as the hub itself would find them; `squares` is None where the chunk has a
            value that is not finite, or cannot be read. Then the relay does not hold it.
    """

    number: int
    nbytes: int
    squares: float | None = None
    fingerprint: int = 0


@dataclass(frozen=True)
class Attach(Message):
    """The first word of a relay on each of its two connections, that for chunks with the `token`."""

    relay: str  # its name
    life: int  # random, of its process
    token: bytes | None = None


@dataclass(frozen=True)
class Attached(Message):
    """The answer on the first of them, and again when one of these changes."""

    token: bytes
    combines: bool  # the relay holds chunks of pseudo-gradients, for sums; else it passes them on
    wire_dtype: str  # of parameters in sums
    chunk_elements: int = CHUNK_ELEMENTS
    # Elements of parameters, float buffers and integers in each fragment; empty before there is a model.
    fragments: tuple[tuple[int, ...], ...] = ()
    feed: str | None = None  # where the hub's feed is


@dataclass(frozen=True)
class Via(Message):
    """The frames behind this one are a message from or to this connection of a relay.

    Attributes:
        who: the connection, or the way to it where there are relays behind relays.
        peer: up, where the relay asks for keys: the worker whose key it is.
        held: up, of a `chunk` without its buffer.
    """

    who: bytes
    peer: str | None = None
    held: Held | None = None


@dataclass(frozen=True)
class Gone(Message):
    """Up: this connection of a relay is over. Down: end it."""

    who: bytes


@dataclass(frozen=True)
class Part:
    """A chunk that a relay holds, and what it weighs in a mean."""

    number: int
    weight: float


@dataclass(frozen=True)
class Collect(Message):
    """The hub asks for the weighted mean of these, all of one chunk; of integers for the maximum."""

    request: int
    fragment: int
    index: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Combined(Message):
    """The answer, on the connection for chunks, with a buffer. `numbers`: the parts in it."""

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
    """`plan` is the fragment of each manifest entry, in order; empty where P is 1."""

    session: bytes
    epoch: str
    config: RunConfig
    first_round: int
    run: str | None = None
    versions: tuple[VersionId | None, ...] = ()
    feed: str | None = None
    plan: tuple[int, ...] = ()
    shard: int | None = None  # this worker's share of the data, where it samples for itself,
    num_shards: int | None = None  # of so many
    ipc: str | None = None  # where workers of the same machine and user may connect for chunks,
    bound: str | None = None  # if it was at this address that they came
    term: int = 0  # how often the run's hub was replaced by a standby
    lease: float | None = None  # of a hub that has a standby, seconds


@dataclass(frozen=True)
class Grant(Message):
    """Answer to a push: what is held of it already and how many chunks may be sent now."""

    push_id: int
    fragment: int
    standing: Standing
    held: bytes | None = None
    credit: int = 0
    text: str = ""
    round: int | None = None  # that it will be part of; None where there are no common rounds


@dataclass(frozen=True)
class Ack(Message):
    """These chunks are in; each gives one credit back to its lane, `lane` gets `credit` on top."""

    push_id: int
    fragment: int
    chunks: tuple[int, ...]
    credit: int = 0
    lane: int = 0


@dataclass(frozen=True)
class Released(Message):
    """A version is whole: its chunks may be used once all of them are here."""

    fragment: int
    version: VersionId
    ledger: Ledger
    round: int = 0
    averaged: int = 0
    # of the reader's last push in it: versions between its base and here
    staleness: int | None = None
    progress: Progress | None = None  # of the run, with this version
    loss: float | None = None  # mean of what its workers have reported


@dataclass(frozen=True)
class Notice(Message):
    """Something the worker should know: `alive`, `describe`, `donate`, `carried`, `shutdown`, ..."""

    what: str
    text: str = ""
    fragment: int = 0
    round: int = 0
    sync_every: int | None = None
    # With `lease` of a hub and `standby` of its standby: a nonce that a `vote` returns, and for how many
    # seconds that is a word.
    nonce: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Rejoin(Message):
    """This session is not (or no longer) known on this connection: open new ones and join."""

    epoch: str
    text: str = ""


@dataclass(frozen=True)
class Error(Message):
    """A refusal. `push_id` is set when it ends a push, `about` names the offending kind.

    `counted` is the bitmap of the chunks of that push that a version contains or may yet contain; None
    where the broker does not say.
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
    """Measures the way. The broker answers one with another of the same number, both ways with a buffer.

    Attributes:
        answer: bytes of the buffer that the answer is to have.
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
    """The header frame of a message."""
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
    """It would be a value that nothing here knows, in an `extra` or in arguments, and be sent on."""
    problem = f"The header has a msgpack extension (type {code}), which has no place in it."
    raise ProtocolError(Code.BAD_HEADER, problem)


def decode(header: bytes | memoryview) -> Message:
    """Read a header frame; raises ProtocolError with a sentence fit to be sent back."""
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
            f"There is no message kind {kind!r:.60}."
            if not isinstance(kind, str)
            else f"There is no message kind {kind[:60]!r}.",
        )
    return from_plain(record, plain, str(kind))


def in_a_header(join: Join) -> Join:
    """The same, with its manifest only named where a header has no room for it."""
    if join.manifest is None or len(encode(join)) <= LONGEST_JOIN:
        return join
    found = describe(join.manifest)
    return replace(join, manifest=None, digest=found.digest, size=len(found.packed))
