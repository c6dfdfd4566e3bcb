"""How a model is described and cut, what travels, and what a version's ledger says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol.bitmap import Bitmap
from diloco_protocol.chunks import Segment, lay_out
from diloco_protocol.dtypes import span_bytes
from diloco_protocol.errors import ProtocolError
from diloco_protocol.frames import pack
from diloco_protocol.manifest import Kind, Manifest, TensorEntry, differences, summarise
from diloco_protocol.messages import Chunk
from diloco_protocol.tensors.codecs import as_bytes
from diloco_protocol.version import ABSENT_REMEMBERED, PUSHES_REMEMBERED, Ledger
from kit.paths import ROOT


def entry(
    name: str, *shape: int, dtype: str = "float32", kind: Kind = Kind.TRAINABLE
) -> TensorEntry:
    return TensorEntry(name, shape, dtype, kind)


entries = st.builds(
    TensorEntry,
    st.uuids().map(str),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from(["float32", "bfloat16", "int64", "bool"]),
    st.sampled_from(Kind),
)


@given(st.lists(entries, max_size=12), st.integers(1, 3), st.integers(1, 7), st.data())
def test_every_element_of_every_tensor_is_in_exactly_one_chunk(
    tensors: list[TensorEntry], num_fragments: int, chunk_elements: int, data: st.DataObject
) -> None:
    fragment_of = {
        t.name: data.draw(st.integers(0, num_fragments - 1))
        for t in tensors
        if t.kind is Kind.TRAINABLE
    }
    layout = lay_out(
        Manifest(tuple(tensors)),
        fragment_of,
        num_fragments=num_fragments,
        chunk_elements=chunk_elements,
    )
    covered = {t.name: 0 for t in tensors}
    for part in layout.all:
        assert [span.index for span in part.spans] == list(range(part.chunks))
        for span in part.spans:
            assert 0 < span.elements <= chunk_elements
            for place in part.places:
                if place.segment is span.segment:
                    overlap = min(place.stop, span.stop) - max(place.start, span.start)
                    covered[place.entry.name] += max(0, overlap)
    assert covered == {t.name: t.elements for t in tensors}


def test_segments_follow_kind_and_dtype() -> None:
    layout = lay_out(
        Manifest(
            (
                entry("w", 3),
                entry("mean", 2, kind=Kind.BUFFER),
                entry("count", dtype="int64", kind=Kind.BUFFER),
                entry("flag", dtype="bool", kind=Kind.BUFFER),
                entry("frozen", 4, dtype="bfloat16", kind=Kind.FROZEN),
                entry("ids", 2, dtype="int32", kind=Kind.FROZEN),
            )
        ),
        num_fragments=2,
    )
    lengths = [dict(part.lengths) for part in layout.all]
    p, b, i = Segment.PARAMETERS, Segment.BUFFERS, Segment.INTEGERS
    assert lengths == [{p: 3, b: 0, i: 0}, {p: 0, b: 2, i: 2}, {p: 0, b: 4, i: 2}]
    sizes = [span_bytes(span, "bf16") for part in layout.all for span in part.spans]
    assert sizes == [6, 8, 16, 16, 16]


@given(st.integers(0, 40), st.data())
def test_bitmap_survives_the_wire_and_lists_missing_chunks(size: int, data: st.DataObject) -> None:
    members = data.draw(st.sets(st.integers(0, size - 1))) if size else set()
    bitmap = Bitmap(size)
    for index in members:
        bitmap.add(index)
    again = Bitmap.from_bytes(bitmap.to_bytes(), size)
    assert again == bitmap
    assert set(again) == members
    assert set(again.missing()) == set(range(size)) - members
    assert again.is_full == (len(members) == size)


@pytest.mark.parametrize(("raw", "size"), [(b"", 1), (b"\x00\x00", 8), (b"\x08", 3)])
def test_bitmap_that_does_not_fit_is_refused(raw: bytes, size: int) -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        Bitmap.from_bytes(raw, size)


def test_differences_name_what_differs_and_only_that() -> None:
    ours = Manifest((entry("a", 2), entry("b", 3), entry("c", 1)))
    assert differences(ours, ours) == []
    theirs = Manifest((entry("a", 2), entry("b", 3, dtype="bfloat16"), entry("d", 1)))
    assert differences(ours, theirs) == [
        "it lacks c float32[1] trainable",
        "it has an extra d float32[1] trainable",
        "b is bfloat16 instead of float32",
    ]
    swapped = Manifest((entry("b", 3), entry("a", 2), entry("c", 1)))
    assert differences(ours, swapped) == ["the order differs from position 0: b for a"]
    frozen = Manifest((entry("a", 2, kind=Kind.FROZEN), entry("b", 3), entry("c", 1)))
    assert differences(ours, frozen) == ["a is frozen instead of trainable"]
    assert summarise([str(n) for n in range(8)]) == "0; 1; 2; 3; 4; and 3 more"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ((), "no trainable parameters"),
        ((entry("w", 2, kind=Kind.FROZEN),), "no trainable parameters"),
        ((entry("w", 2), entry("w", 2)), "'w' occurs twice"),
        ((entry("w", 2), entry("q", 2, dtype="complex64")), "cannot be exchanged"),
        ((entry("w", 2, dtype="int64"),), "integer dtype int64"),
        ((entry("w", -2, -2),), "negative size"),
        ((entry("w", *([2] * 100_000)),), "100000 dimensions"),
        ((entry("w", 2**40, 2**23),), "more than 1e+11 elements"),
    ],
)
def test_unusable_manifest_names_the_problem(tensors: tuple[TensorEntry, ...], words: str) -> None:
    assert any(words in problem for problem in Manifest(tensors).problems())


def test_ledger_keeps_the_last_pushes_and_partial_counts() -> None:
    half = Bitmap(3, 0b010)
    ledger = Ledger().with_push("a", 1, half)
    assert not ledger.names_whole("a", 1)
    assert ledger.standing("a", 1, 3) == half
    ledger = ledger.with_push("a", 1, Bitmap.full(3))
    assert ledger.names_whole("a", 1)
    assert ledger.standing("b", 1, 3) == Bitmap(3)
    assert ledger.with_push("a", 9, Bitmap(3)) is ledger, "nothing counted, nothing to remember"
    for push_id in range(2, 30):
        ledger = ledger.with_push("a", push_id, Bitmap.full(3))
    assert [c.push_id for c in ledger.pushes["a"]] == list(range(30 - PUSHES_REMEMBERED, 30))


def test_ledger_distinguishes_chunks_counted_from_an_earlier_push() -> None:
    """Also once the push goes on in a later version, and after a way through a file."""
    ledger = Ledger().with_push("a", 2, Bitmap(4, 0b0011), added=Bitmap(4, 0b0010))
    assert ledger.standing("a", 2, 4) == Bitmap(4, 0b0011)
    assert ledger.own_chunks("a", 2, 4) == Bitmap(4, 0b0010)
    ledger = ledger.with_push("a", 2, Bitmap.full(4), added=Bitmap(4, 0b1100))
    assert ledger.names_whole("a", 2)
    for in_hex in (False, True):
        again = Ledger.from_plain(ledger.plain(in_hex=in_hex))
        assert again.own_chunks("a", 2, 4) == Bitmap(4, 0b1110)


def test_ledger_drops_long_absent_workers_only() -> None:
    ledger = Ledger().with_push("here", 1, Bitmap.full(1))
    for number in range(ABSENT_REMEMBERED + 50):
        ledger = ledger.with_push(f"spot-{number}", number, Bitmap.full(1))
        ledger = ledger.without_the_long_gone({"here"})
    assert len(ledger.pushes) == ABSENT_REMEMBERED + 1
    assert ledger.names_whole("here", 1)
    assert ledger.names_whole(f"spot-{ABSENT_REMEMBERED + 49}", ABSENT_REMEMBERED + 49)
    assert not ledger.names_whole("spot-0", 0)


def hex_dump() -> str:
    """The frames of a small chunk, sixteen bytes a line."""
    payload = as_bytes(torch.tensor([1.0, -2.0, 0.5]).bfloat16())
    message = Chunk(fragment=0, index=2, session=bytes(range(16)), push_id=0x1122334455667788)
    lines = []
    for number, frame in enumerate(pack(message, payload)):
        raw = bytes(frame)
        lines.append(f"frame {number}: {len(raw)} bytes")
        for start in range(0, len(raw), 16):
            part = raw[start : start + 16]
            text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
            lines.append(f"  {start:04x}  {part.hex(' '):<47}  {text}")
    return "\n".join(lines)


def test_hex_dump_of_the_specification_equals_the_sent_bytes() -> None:
    assert hex_dump() in (ROOT / "docs" / "specification.md").read_text()
