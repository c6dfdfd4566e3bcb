"""`top64` in plain Python, of exact numbers: what the layout in CODECS.md says, and nothing more."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction

from kit.raw_codecs import bf16_of, bits_of, fp32, from_bf16

BLOCK, KEPT, SIZE = 4096, 64, 84


def encode(values: Sequence[float]) -> bytes:
    """The bytes of a chunk of which no two magnitudes in a block are the same."""
    payload = b""
    for start in range(0, len(values), BLOCK):
        block = [*values[start : start + BLOCK]]
        block += [0.0] * (BLOCK - len(block))
        largest = sorted(range(BLOCK), key=lambda i: -abs(block[i]))[:KEPT]
        indices = sorted(largest)
        magnitudes = [Fraction(abs(block[i])) for i in indices]
        middle = sum(magnitudes) / KEPT
        groups = [[m for m in magnitudes if m < middle], [m for m in magnitudes if m >= middle]]
        means = [bf16_of(fp32(sum(group) / len(group))) if group else 0.0 for group in groups]
        payload += number(sum((at % 64) << 6 * i for i, at in enumerate(indices)), 48)
        payload += number(sum(1 << (at // 64 + i) for i, at in enumerate(indices)), 16)
        payload += number(sum((block[at] < 0) << i for i, at in enumerate(indices)), 8)
        payload += number(sum((m >= middle) << i for i, m in enumerate(magnitudes)), 8)
        payload += bits_of(means[0]) + bits_of(means[1])
    return payload


def decode(payload: bytes, elements: int) -> list[float]:
    """The values of a chunk; exact."""
    values: list[float] = []
    for start in range(0, len(payload), SIZE):
        row = payload[start : start + SIZE]
        low, high, signs, larger = (
            int.from_bytes(row[a:b], "little") for a, b in ((0, 48), (48, 64), (64, 72), (72, 80))
        )
        means = [from_bf16(each) for each in struct.unpack("<HH", row[80:])]
        block = [0.0] * BLOCK
        places = [place for place in range(128) if high >> place & 1]
        for i, place in enumerate(places):
            value = means[larger >> i & 1]
            block[(place - i) * 64 + (low >> 6 * i) % 64] = -value if signs >> i & 1 else value
        values += block
    return values[:elements]


def number(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")
