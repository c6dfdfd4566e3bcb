"""All that reads bytes of a peer: what it cannot take, it refuses by its own error and no other.

An input is a choice of what reads it, and the bytes.
"""

from collections.abc import Callable

import msgpack

from diloco_protocol.bitmap import Bitmap
from diloco_protocol.chunks import CHUNK_ELEMENTS, ChunkSpan, Segment, lay_out
from diloco_protocol.description import PIECE_BYTES, DescriptionInProgress, describe
from diloco_protocol.dtypes import SPARSE_KEPT, WIRE_DTYPES, span_bytes
from diloco_protocol.errors import LONGEST, ProtocolError
from diloco_protocol.feed import TOPIC, FeedError, parse_snapshot
from diloco_protocol.frames import LONGEST_OF_A_MEMBER, pack, unpack
from diloco_protocol.manifest import Manifest, differences, summarise
from diloco_protocol.messages import KINDS, decode, encode, in_a_header
from diloco_protocol.records import from_plain
from diloco_protocol.relays import read, unwrap
from diloco_protocol.tensors.codecs import decode_chunk, is_finite
from diloco_protocol.version import Ledger, VersionId
from fuzz import hostile_messages
from fuzz.draws import Draws

LONGEST_SENTENCE = LONGEST + 10


def run(data: bytes) -> int:
    """Have one input read. Returns how many messages it was."""
    draws = Draws(data)
    sentence = "it was read"
    try:
        READERS[draws.below(len(READERS))](draws)
    except (ProtocolError, FeedError) as error:
        sentence = str(error)
    assert 0 < len(sentence.encode()) <= 4 * LONGEST_SENTENCE  # it is sent back
    return 1


def _frames(draws: Draws) -> None:
    frames = [draws.bytes(draws.below(400)) for _ in range(draws.below(4))]
    via, inner = unwrap(frames)
    if via is None:
        _read(frames)
    else:
        read(inner, LONGEST_OF_A_MEMBER, via.held)


def _header(draws: Draws) -> None:
    """A header with names that there are, and any values."""
    _read([hostile_messages.header(draws)])


def _record(draws: Draws) -> None:
    """Sound types with any values, and a buffer that may not belong there."""
    message = hostile_messages.Words().message(draws, sorted(KINDS))
    try:
        header = encode(message)
    except (OverflowError, UnicodeEncodeError):
        return
    _read([header, draws.bytes(20)] if draws.is_so() else [header])


def _read(frames: list[bytes]) -> None:
    message, payload = unpack(frames)
    may_have_one = message.kind in ("probe", "combined")
    assert may_have_one or (payload is not None) == (message.kind == "chunk")
    again = decode(pack(message)[0])
    assert repr(again) == repr(message)  # NaN is not equal to itself
    if message.kind == "join":
        in_a_header(message)  # type: ignore[arg-type]


def _manifest(draws: Draws) -> None:
    if draws.is_so():
        manifest = hostile_messages.Words().value(draws, Manifest)
    else:
        try:
            plain = msgpack.unpackb(draws.bytes(10_000), use_list=False, strict_map_key=True)
        except (ValueError, RecursionError, msgpack.exceptions.UnpackException):
            return
        manifest = from_plain(Manifest, plain, "manifest")
    summarise(manifest.problems())
    summarise(differences(manifest, Manifest(())))
    if not manifest.problems() and manifest.trainable_elements < 1000 * CHUNK_ELEMENTS:
        lay_out(manifest)


def _description(draws: Draws) -> None:
    """A manifest in pieces, which may not match the announcement."""
    manifest = hostile_messages.Words().value(draws, Manifest)
    try:
        sound = describe(manifest)
    except OverflowError:
        return
    claimed = len(sound.packed) if draws.below(4) else draws.one_of(hostile_messages.WHOLE)
    progress = DescriptionInProgress(sound.digest if draws.below(4) else draws.bytes(32), claimed)
    at = 0
    while at < len(sound.packed):
        size = PIECE_BYTES if draws.below(4) else 1 + draws.below(64)
        if progress.add(sound.packed[at : at + size]):
            progress.manifest()
            return
        at += size


def _ledger(draws: Draws) -> None:
    """Of a checkpoint or a saved state."""
    plain = hostile_messages.header(draws)
    for reader in (Ledger.from_plain, VersionId.from_plain):
        try:
            reader(msgpack.unpackb(plain, strict_map_key=False, ext_hook=lambda *_: None))
        except (TypeError, ValueError):
            continue


def _snapshot(draws: Draws) -> None:
    """A frame of the feed, as monitors read it."""
    parse_snapshot((TOPIC if draws.below(8) else b"") + draws.bytes(1 << 20))


def _payload(draws: Draws) -> None:
    """A chunk of the right length, of any bytes; and a bitmap."""
    span = ChunkSpan(0, draws.one_of(list(Segment)), 0, 1 + draws.below(8))
    wire = draws.one_of(sorted(WIRE_DTYPES))
    size = span_bytes(span, wire)
    try:
        values = decode_chunk(span, bytearray(draws.bytes(size).ljust(size, b"\xff")), wire)
    except ProtocolError:
        assert wire == "int4z" or wire in SPARSE_KEPT, "all others are numbers whatever the bytes"
    else:
        assert values.numel() == span.elements
        is_finite(values)
    Bitmap.from_bytes(draws.bytes(9), draws.below(70))


READERS: list[Callable[[Draws], None]] = [
    *(_frames, _header, _record, _manifest, _description, _ledger, _snapshot, _payload)
]
