"""The Quantized codecs, written from docs/codecs.md alone: plain Python, nothing of ours.

Slow, and of one value at a time, so that nothing is hidden in an operation on tensors.
"""

import struct
from collections.abc import Sequence
from fractions import Fraction

import zstandard

BLOCK = 256


def bf16_of(value: float, *, up: bool = False) -> float:
    """Rounded to bf16: to the nearest (ties to even), or to the least that is not below."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    low = bits & 0xFFFF
    top = bits >> 16
    if up:
        top += (low > 0) or from_bf16(top) < value
    else:
        top += low > 0x8000 or (low == 0x8000 and top & 1)
    return from_bf16(top)


def from_bf16(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def largest_scale(most: int) -> float:
    """The largest bf16 whose multiple by this count is finite in fp32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", (2 - 2**-23) * 2.0**127 / most))
    return from_bf16(bits >> 16)


def bits_of(value: float) -> bytes:
    return struct.pack("<f", value)[2:]


def fp32(value: Fraction | float) -> float:
    """Rounded to fp32."""
    return float(struct.unpack("<f", struct.pack("<f", float(value)))[0])


def encode(values: Sequence[float], wire: str) -> bytes:
    """The bytes of a chunk in int8, int4 or int4z."""
    scales, codes = b"", b""
    for start in range(0, len(values), BLOCK):
        block = [*values[start : start + BLOCK]]
        block += [0.0] * (BLOCK - len(block))
        most = 127 if wire == "int8" else 7
        if wire == "int4z":
            mean = sum(Fraction(value) ** 2 for value in block) / BLOCK
            scale = bf16_of(fp32(float(mean) ** 0.5))
        else:
            scale = bf16_of(fp32(Fraction(max(map(abs, block))) / most), up=True)
        scale = min(scale, largest_scale(most))
        exact = [Fraction(value) / Fraction(scale) if scale else Fraction(0) for value in block]
        numbers = [max(-most, min(most, round(fp32(each)))) for each in exact]
        scales += bits_of(scale)
        if wire == "int8":
            codes += struct.pack(f"<{BLOCK}b", *numbers)
        else:
            halves = zip(numbers[: BLOCK // 2], numbers[BLOCK // 2 :], strict=True)
            codes += bytes((low + 8) + 16 * (high + 8) for low, high in halves)
    return scales + (zstandard.compress(codes, 1) if wire == "int4z" else codes)


def decode(payload: bytes, wire: str, elements: int) -> list[float]:
    """The values of a chunk; exact."""
    blocks = -(-elements // BLOCK)
    scales, codes = payload[: 2 * blocks], payload[2 * blocks :]
    if wire == "int4z":
        codes = zstandard.decompress(codes)
    values: list[float] = []
    for block in range(blocks):
        scale = from_bf16(struct.unpack_from("<H", scales, 2 * block)[0])
        if wire == "int8":
            numbers = list(struct.unpack_from(f"<{BLOCK}b", codes, block * BLOCK))
        else:
            both = codes[block * BLOCK // 2 : (block + 1) * BLOCK // 2]
            numbers = [byte % 16 - 8 for byte in both] + [byte // 16 - 8 for byte in both]
        values += [number * scale for number in numbers]
    return values[:elements]
