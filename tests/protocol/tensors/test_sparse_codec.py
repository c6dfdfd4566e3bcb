"""Sparse codecs: the largest of each 4096 elements, against the same in plain Python."""

import math
import struct
from collections.abc import Sequence

import pytest
import torch

from diloco_broker import BrokerConfig
from diloco_protocol.chunks import ChunkSpan, Segment
from diloco_protocol.dtypes import SPARSE_KEPT, span_bytes
from diloco_protocol.errors import ProtocolError, UsageError
from diloco_protocol.tensors.codecs import BLOCKS, decode_chunk
from kit.raw_codecs import bf16_of, bits_of, fp32, from_bf16

BLOCK = 4096
HUGE = (2 - 2**-23) * 2.0**127
LENGTHS = [1, 63, 64, 65, 4095, 4096, 4097, 10_000]


# In plain Python: what the layout in docs/codecs.md says, and nothing more.


def by_halves(values: list[float]) -> float:
    while len(values) > 1:
        half = len(values) // 2
        values = [fp32(a + b) for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


def raw_encode(values: Sequence[float], kept: int) -> bytes:
    payload = b""
    for start in range(0, len(values), BLOCK):
        block = [*values[start : start + BLOCK]]
        block += [0.0] * (BLOCK - len(block))
        indices = sorted(sorted(range(BLOCK), key=lambda i: (-abs(block[i]), i))[:kept])
        magnitudes = [abs(block[i]) for i in indices]
        middle = by_halves([fp32(each / kept) for each in magnitudes])
        is_second = [each >= middle for each in magnitudes]
        payload += packed(indices, 12) + packed([block[at] < 0 for at in indices], 1)
        payload += packed(is_second, 1)
        for group in (False, True):
            count = is_second.count(group)
            parts = [
                fp32(each / count) if second == group else 0.0
                for each, second in zip(magnitudes, is_second, strict=True)
            ]
            payload += bits_of(min(bf16_of(by_halves(parts)), from_bf16(0x7F7F)))
    return payload


def raw_decode(payload: bytes, kept: int, elements: int) -> list[float]:
    values: list[float] = []
    size = 7 * kept // 4 + 4
    for start in range(0, len(payload), size):
        row = payload[start : start + size]
        means = [from_bf16(each) for each in struct.unpack("<HH", row[-4:])]
        indices, signs, second = (
            int.from_bytes(row[a * kept // 8 : b * kept // 8], "little")
            for a, b in ((0, 12), (12, 13), (13, 14))
        )
        block = [0.0] * BLOCK
        for i in range(kept):
            value = means[second >> i & 1]
            block[indices >> 12 * i & 4095] = (-value if signs >> i & 1 else value) + 0.0
        values += block
    return values[:elements]


def packed(values: Sequence[int], bits: int) -> bytes:
    number = sum(value << bits * i for i, value in enumerate(values))
    return number.to_bytes(len(values) * bits // 8, "little")


def read(payload: bytes, elements: int, wire: str = "sparse") -> torch.Tensor:
    span = ChunkSpan(0, Segment.PARAMETERS, 0, elements)
    assert span_bytes(span, wire) == len(payload)
    return decode_chunk(span, bytearray(payload), wire)


def sent(values: torch.Tensor, wire: str = "sparse") -> bytes:
    return bytes(BLOCKS[wire].encode(values).payload)


def normal(elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(elements)) * 1e-3


SEVERAL = [
    *((normal(elements), "sparse") for elements in LENGTHS),
    *((normal(4100), wire) for wire in SPARSE_KEPT),
    (torch.zeros(5000), "sparse"),
    (-torch.zeros(300), "sparse:32"),
    (torch.full((4096,), -(2.0**-149)), "sparse"),
    (torch.full((100,), HUGE), "sparse"),
    (torch.eye(1, 4096).view(-1), "sparse:128"),
    ((normal(4096) * 2000).round(), "sparse"),  # many of the same magnitude
]


@pytest.mark.parametrize(("values", "wire"), SEVERAL, ids=str)
def test_chunk_has_the_bytes_and_the_values_of_plain_python(
    values: torch.Tensor, wire: str
) -> None:
    payload = sent(values, wire)
    assert payload == raw_encode(values.tolist(), SPARSE_KEPT[wire])
    found = read(payload, values.numel(), wire)
    assert found.tolist() == raw_decode(payload, SPARSE_KEPT[wire], values.numel())
    assert torch.isfinite(found).all()
    assert not [each for each in found.tolist() if each == 0 and math.copysign(1, each) < 0]


def test_indices_that_do_not_ascend_are_refused() -> None:
    payload = sent(normal(BLOCK))
    indices = [int.from_bytes(payload[:96], "little") >> 12 * i & 4095 for i in range(64)]
    twice = [*indices[:5], indices[4], *indices[6:]]
    unsorted = [*indices[:-2], indices[-1], indices[-2]]
    assert packed(indices, 12) == payload[:96]
    for bad in ([0] * 64, twice, unsorted):
        with pytest.raises(ProtocolError, match="ascending order"):
            read(packed(bad, 12) + payload[96:], BLOCK)


def test_sparse_is_for_pseudo_gradients_only() -> None:
    assert BrokerConfig(wire_dtype="sparse:128").wire_dtype == "sparse:128"
    with pytest.raises(UsageError, match="--reply-dtype is sparse"):
        BrokerConfig(reply_dtype="sparse")
    with pytest.raises(UsageError, match="--wire-dtype is sparse:63"):
        BrokerConfig(wire_dtype="sparse:63")
