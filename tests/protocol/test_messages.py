"""Messages and frames: what goes in comes out, and whatever else comes in gets a sentence."""

from dataclasses import fields
from typing import Any

import msgpack
import pytest

from diloco_broker import BrokerConfig
from diloco_broker.core.members.admission import MAX_EXTRA_LENGTH
from diloco_broker.core.members.members import MAX_HOST_LENGTH
from diloco_protocol import messages
from diloco_protocol.errors import Code, ProtocolError, UsageError
from diloco_protocol.frames import LONGEST_UNAUTHENTICATED, MAX_BUFFER_BYTES, pack, unpack
from diloco_protocol.manifest import Kind, Manifest, TensorEntry
from diloco_protocol.messages import (
    KINDS,
    Chunk,
    Control,
    Message,
    Purpose,
    RunConfig,
    decode,
    encode,
)
from diloco_protocol.version import Counted, Ledger, VersionId

VERSION = VersionId("0123456789abcdef", 7, 2**64 - 1)
LEDGER = Ledger({"a": (Counted(1), Counted(2**64 - 1, b"\x05"))})
MANIFEST = Manifest(
    (
        TensorEntry("wte", (256, 64), "bfloat16", Kind.TRAINABLE, ("head",)),
        TensorEntry("count", (), "int64", Kind.BUFFER),
    )
)
EVERY_KIND: list[Message] = [
    messages.Join(
        "a", MANIFEST, "0" * 16, b"s" * 16, (VERSION, None), {"sync_every": 5}, "host", 7, {"x": 1}
    ),
    messages.Describe(b"piece"),
    messages.Probe(7, 49152),
    messages.Vote(b"s" * 16, 2**64 - 1, 7),
    messages.Promise("sb", 7, 8, "hold", 1),
    messages.Lease(7, 1, 8, 3.0, (1, 2**64 - 1), {"grace": 1.5, "quorum": None}, 12, True),
    messages.Lane(b"s" * 16, 1, (b"\x02", b""), 8),
    messages.Leave(b"s", "done"),
    messages.Heartbeat(b"s", 10, 3, "waiting", 4.5, 2.25, 100),
    messages.Push(
        b"s", 2**64 - 1, 0, 3, "fp32", VERSION, 2.0, 5, 9, 4, 1.5, 0.1, Purpose.SEEDING, LEDGER
    ),
    Chunk(0, 5, session=b"s", push_id=4),
    messages.Commit(b"s", 4, 0),
    messages.Pull(0, 6, b"s", 8, VERSION, b"\x01"),
    messages.Credit(3, b"s"),
    messages.Attach("north", 7, b"t" * 8),
    messages.Attached(b"t" * 8, True, "bf16", 1000, ((10, 0, 2), (0, 4, 0)), "tcp://127.0.0.1:2"),
    messages.Via(b"\0who", "w0", messages.Held(2**64 - 1, 4096, 1.5, 2**64 - 1)),
    messages.Gone(b"\0who"),
    messages.Collect(3, 1, 2, (messages.Part(4, 0.5), messages.Part(2**64 - 1, 1.5))),
    messages.Combined(3, 1, 2, (4, 5), "int4z"),
    messages.Forget((9, 12)),
    messages.Take(
        b"s", 4, "text", 100, 2, 7, 8, (0, 5, 9, 10), (messages.Lot((1, 2), {"text": (0, 3)}),)
    ),
    messages.Welcome(
        b"s", "e", RunConfig("sync", 20), 4, "0" * 16, (None, VERSION), "tcp://127.0.0.1:1", (0, 1)
    ),
    messages.Grant(4, 0, messages.Standing.RESUME, b"\x01", 8, "text", 12),
    messages.Ack(4, 0, (1, 2)),
    messages.Released(0, VERSION, LEDGER, 6, 2, 3, messages.Progress(7, 700, 9000), 2.5),
    messages.Notice("alive", "text", 0, 5, 250),
    messages.Rejoin("e", "text"),
    messages.Error("bad_push", "text", True, 4, "push"),
    Control("status", 1, {"deep": {"a": [1, 2.5, None, True]}}),
    messages.Result(1, True, "text", {"n": 1}),
]


def test_every_kind_is_in_the_list() -> None:
    assert {message.kind for message in EVERY_KIND} == set(KINDS)


@pytest.mark.parametrize("message", EVERY_KIND, ids=lambda m: m.kind)
def test_message_survives_the_wire(message: Message) -> None:
    payload = b"\x00" * 8 if isinstance(message, Chunk | messages.Combined) else None
    received, buffer = unpack(pack(message, payload))
    if isinstance(message, Control):  # arrays come back as tuples
        message = Control("status", 1, {"deep": {"a": (1, 2.5, None, True)}})
    assert received == message
    assert (buffer is None) == (payload is None)
    plain = msgpack.unpackb(encode(message)) | {"from_the_future": [1, 2]}
    assert decode(msgpack.packb(plain)) == received, "unknown keys are ignored"


LEAVE = {"v": 1, "kind": "leave", "session": b"s"}
OF_A_TYPE = LEAVE | {"reason": [msgpack.ExtType(39, b"abc")]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (msgpack.packb(LEAVE | {"v": 99}), "version 99, we speak 1"),
        (msgpack.packb({"v": 1, "kind": "leave"}), r"leave\.session is missing"),
        (msgpack.packb(OF_A_TYPE), r"msgpack extension \(type 39\)"),
        (b"\x91" * 100_000, "msgpack map"),
    ],
    ids=["version", "missing field", "extension type", "deep nesting"],
)
def test_header_that_cannot_be_read_is_refused(header: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words) as caught:
        decode(header)
    assert (caught.value.code is Code.PROTOCOL_VERSION) == ("version" in words)


HEARTBEAT, RELEASED = messages.Heartbeat(b"s", 1), messages.Released(0, VERSION, LEDGER)


@pytest.mark.parametrize(
    ("message", "place", "value", "words"),
    [
        (HEARTBEAT, ["kind"], "jump", "message kind 'jump'"),
        (HEARTBEAT, ["kind"], 5, "message kind 5"),
        (HEARTBEAT, ["step"], "many", "heartbeat.step is 'many'"),
        (HEARTBEAT, ["step"], True, "heartbeat.step is True"),
        (HEARTBEAT, ["session"], "text", "heartbeat.session is 'text'"),
        (HEARTBEAT, ["loss"], [1], "heartbeat.loss is of type tuple"),
        (RELEASED, ["version", "tag"], "x", r"released\.version\.tag is 'x'"),
        (EVERY_KIND[0], ["manifest", "entries", 0, "kind"], "?", "one of trainable, frozen, "),
    ],
)
def test_field_of_wrong_type_is_refused_by_name(
    message: Message, place: list[Any], value: object, words: str
) -> None:
    plain = inner = msgpack.unpackb(encode(message))
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ProtocolError, match=words):
        decode(msgpack.packb(plain))


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "got 0 frames"),
        ([encode(Chunk(0, 1)), b"x", b"y"], "got 3 frames"),
        ([encode(Chunk(0, 1))], "empty buffer"),
        ([encode(Chunk(0, 1)), b""], "empty buffer"),
        ([encode(messages.Credit(1)), b"x"], "credit message must not have a buffer"),
        ([encode(Chunk(0, 1)), bytes(MAX_BUFFER_BYTES + 1)], "the limit is"),
        ([bytes((8 << 20) + 1)], "header has"),
    ],
)
def test_malformed_frames_are_refused(frames: list[bytes], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        unpack(frames)


def test_payload_is_sent_and_received_without_a_copy() -> None:
    payload = bytearray(b"12345678")
    frames = pack(Chunk(0, 1), payload)
    assert frames[1] is payload
    _, buffer = unpack(frames)
    payload[0] = ord("9")
    assert buffer is not None
    assert bytes(buffer[:1]) == b"9"


def test_longest_join_of_a_returning_worker_fits_into_a_header() -> None:
    most = BrokerConfig(sync_every=1000, num_fragments=1000).num_fragments
    with pytest.raises(UsageError, match="from 1 to 1000"):
        BrokerConfig(sync_every=2000, num_fragments=most + 1)
    versions = (VersionId("f" * 16, 2**64 - 1, 2**64 - 1),) * (most + 1)
    entries = [
        TensorEntry(f"layers.{n}.weight", (4096,), "float32", Kind.TRAINABLE) for n in range(2000)
    ]
    join = messages.Join(
        "w" * 64,
        Manifest(tuple(entries)),
        run="f" * 16,
        session=bytes(16),
        versions=versions,
        wants={each.name: 2**64 - 1 for each in fields(RunConfig)},
        host="h" * MAX_HOST_LENGTH,
        extra={"note": "\U0001f600" * (MAX_EXTRA_LENGTH - 20)},
    )
    assert len(encode(messages.in_a_header(join))) <= LONGEST_UNAUTHENTICATED
