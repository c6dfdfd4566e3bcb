"""The kernels themselves: one pass over memory each, compiled by numba; `calls` hands tensors to them.

Each works on a piece of `PIECE` elements at a time, in a few rooms that stay in a core's first-level
cache, with one short loop for each thing that is written: such loops vectorise. Loops run over slices,
from 0: with an offset numba would ask of each index whether it is negative.

Nothing is contracted or reordered but where `fma` says so: torch's `add(..., alpha=w)` is fused, too, so
the bits are torch's. `float32` is written out since numba computes in float64 where a number is not.
A *form* is how the numbers of a chunk lie in memory (`forms`); a form has an address, since one kernel
reads several chunks of different forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from diloco_protocol.dtypes import BLOCK
from diloco_protocol.kernels.forms import BF16, FP16, FP32, INT8

PIECE = 1024
HALF = BLOCK // 2
# A scale below it makes no value that is not finite.
MOST = np.float32(2.0**120)
# Lengths of a block whose squares fp32 has room for (`block_codecs`).
SHORT, LONG = np.float32(1e-14), np.float32(1e18)
MAGNITUDE, INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
ZERO, ONE, SIXTEEN, ROUND = np.uint32(0), np.uint32(1), np.uint32(16), np.uint32(0x7FFF)

# Errors of Python's division have branches, which do not vectorise.
OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}
I8, F4, F8, FLAG = types.int64, types.float32, types.float64, types.boolean
FLOATS, WORDS, HALVES = types.float32[::1], types.uint32[::1], types.uint16[::1]
BYTES, NUMBERS = types.uint8[::1], types.int64[::1]
# A sum of weighted chunks: the form, address and weight of each.
TERMS = (NUMBERS, NUMBERS, FLOATS)


_kernels: list[tuple[Any, Any]] = []  # each with its signature


def kernel(signature: Any) -> Callable[[Any], Any]:
    """What makes a kernel of a function; `load` compiles it."""

    def made(function: Any) -> Any:
        found = njit(**OPTIONS)(function)
        _kernels.append((found, signature))
        return found

    return made


def is_cached() -> bool:
    """Whether numba's cache seems to have all kernels."""
    source = Path(__file__)
    changed = source.stat().st_mtime
    return all(
        any(
            entry.stat().st_mtime >= changed
            for entry in Path(found.stats.cache_path).glob(f"{source.stem}.{found.__name__}-*.nbi")
        )
        for found, _ in _kernels
    )


def load() -> None:
    """Take the kernels from the cache, or compile them."""
    for found, signature in _kernels:
        found.compile(signature)
        found.disable_compile()


@intrinsic
def fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once."""
    return F4(F4, F4, F4), lambda context, builder, signature, given: builder.fma(*given)


@intrinsic
def of_half(_: Any, bits: Any) -> Any:
    """fp16, given by its bits, as fp32."""

    def made(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.fpext(builder.bitcast(given[0], ir.HalfType()), ir.FloatType())

    return F4(types.uint16), made


@intrinsic
def to_half(_: Any, value: Any) -> Any:
    """The bits of the nearest fp16."""

    def made(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.bitcast(builder.fptrunc(given[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(F4), made


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    def made(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], ir.IntType(8).as_pointer())

    return types.voidptr(I8), made


@njit(**OPTIONS)
def read(form, address, elements, at, size, room, bits):
    """Read `size` of a chunk's values, from `at` on, into `room`; `bits` is the same memory."""
    if form == FP32:
        values = carray(pointer(address + 4 * at), size, np.float32)
        for j in range(size):
            room[j] = values[j]
    elif form == BF16:
        halves = carray(pointer(address + 2 * at), size, np.uint16)
        for j in range(size):
            bits[j] = np.uint32(halves[j]) << SIXTEEN
    elif form == FP16:
        halves = carray(pointer(address + 2 * at), size, np.uint16)
        for j in range(size):
            room[j] = of_half(halves[j])
    else:
        blocks = (elements + BLOCK - 1) // BLOCK
        for start in range(0, size, BLOCK):
            block = (at + start) // BLOCK
            values, words = room[start : start + BLOCK], bits[start : start + BLOCK]
            words[0] = np.uint32(carray(pointer(address + 2 * block), 1, np.uint16)[0]) << SIXTEEN
            by = values[0]
            if form == INT8:
                codes = carray(pointer(address + 2 * blocks + block * BLOCK), BLOCK, np.int8)
                for j in range(BLOCK):
                    values[j] = np.float32(codes[j]) * by
            else:
                pairs = carray(pointer(address + 2 * blocks + block * HALF), HALF, np.uint8)
                above = values[HALF:]
                for j in range(HALF):
                    values[j] = np.float32(np.int32(pairs[j] & 15) - 8) * by
                for j in range(HALF):
                    above[j] = np.float32(np.int32(pairs[j] >> 4) - 8) * by


@njit(**OPTIONS)
def largest(bits, size):
    """The largest magnitude, as bits: of floats without a sign these are in the order of the values."""
    top = ZERO
    for j in range(size):
        top = max(top, bits[j] & MAGNITUDE)
    return top


@njit(**OPTIONS)
def near_half(bits):
    """The bits of the nearest bf16, half to even; not for NaN."""
    return (bits + ROUND + ((bits >> SIXTEEN) & ONE)) >> SIXTEEN


@njit(**OPTIONS)
def write(form, room, bits, out):
    """Write the values of `room` in 16 bits."""
    if form == BF16:
        for j in range(out.size):
            out[j] = np.uint16(near_half(bits[j]))
    else:
        for j in range(out.size):
            out[j] = to_half(room[j])


@njit(**OPTIONS)
def halved(values, count):
    """The sum of `count` values, a power of two: the halves are added until one is left."""
    while count > 1:
        count //= 2
        upper = values[count:]
        for j in range(count):
            values[j] += upper[j]
    return values[0]


@njit(**OPTIONS)
def summed(forms, addresses, weights, elements, at, size, total, room, words, bits):
    """Into `total`: of `size` elements from `at` on, the sum of the terms, in their order.

    `words` and `bits` are the memory of `total` and of `room`.
    """
    for term in range(forms.size):
        form, address, weight = forms[term], addresses[term], weights[term]
        if term == 0:
            read(form, address, elements, at, size, total, words)
            if weight != 1:
                for j in range(size):
                    total[j] = total[j] * weight
        elif form == FP32:
            values = carray(pointer(address + 4 * at), size, np.float32)
            for j in range(size):
                total[j] = fma(values[j], weight, total[j])
        else:
            read(form, address, elements, at, size, room, bits)
            for j in range(size):
                total[j] = fma(room[j], weight, total[j])


@kernel(FLAG(*TERMS, F4, FLOATS))
def add_up(forms, addresses, weights, divisor, out):
    """out <- sum(w_i x_i) / divisor. `out` may be the memory of a term."""
    room, total = np.empty(PIECE, np.float32), np.empty(PIECE, np.float32)
    bits, words = room.view(np.uint32), total.view(np.uint32)
    for at in range(0, out.size, PIECE):
        to = out[at : at + PIECE]
        summed(forms, addresses, weights, out.size, at, to.size, total, room, words, bits)
        if divisor != 1:
            for j in range(to.size):
                to[j] = total[j] / divisor
        else:
            for j in range(to.size):
                to[j] = total[j]
    return True


@kernel(F8(I8, HALVES, BYTES))
def squares(form, scales, codes):
    """The sum of a coded chunk's squared values; infinite where one may be too large for fp32."""
    found = 0.0
    word, size = np.empty(1, np.float32), BLOCK if form == INT8 else HALF
    one = word.view(np.uint32)
    for block in range(scales.size):
        part, total = codes[block * size : block * size + size], np.int32(0)
        if form == INT8:
            for j in range(BLOCK):
                code = np.int32(np.int8(part[j]))
                total += code * code
        else:
            for j in range(HALF):
                low, high = np.int32(part[j] & 15) - 8, np.int32(part[j] >> 4) - 8
                total += np.int32(low * low + high * high)
        one[0] = (np.uint32(scales[block]) << SIXTEEN) & MAGNITUDE
        if not word[0] < MOST:
            return np.inf
        found += np.float64(word[0]) * np.float64(word[0]) * np.float64(total)
    return found


@kernel(FLAG(I8, FLAG, FLOATS, FLOATS, F4, HALVES, BYTES))
def encode(form, is_rms, values, other, sign, scales, codes):
    """`values` plus `sign` times `other`, if there is one, in few bits: protocol/CODECS.md.

    Returns:
        Whether the sum is finite; where it is not the codes are of no use.
    """
    room, spare = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    word, whole = np.empty(1, np.float32), np.empty(BLOCK, np.uint8)
    bits, one = room.view(np.uint32), word.view(np.uint32)
    most = np.float32(127) if form == INT8 else np.float32(7)
    word[0] = np.float32(3.4028234663852886e38) / most
    cap = one[0] >> SIXTEEN
    for block in range(scales.size):
        given = values[block * BLOCK : block * BLOCK + BLOCK]
        if other.size:
            beside = other[block * BLOCK : block * BLOCK + BLOCK]
            for j in range(given.size):
                room[j] = given[j] + sign * beside[j]
        else:
            for j in range(given.size):
                room[j] = given[j]
        for j in range(given.size, BLOCK):
            room[j] = np.float32(0)
        top = largest(bits, BLOCK)
        if top >= INFINITE:
            return False
        one[0] = top
        longest = word[0]
        if is_rms:
            for j in range(BLOCK):
                spare[j] = room[j] * room[j]
            length = np.float32(math.sqrt(halved(spare, BLOCK)))
            if length >= SHORT and length <= LONG:
                word[0] = length * np.float32(0.0625)
            else:
                by = longest if longest > 0 else np.float32(1)
                for j in range(BLOCK):
                    spare[j] = room[j] / by
                for j in range(BLOCK):
                    spare[j] = spare[j] * spare[j]
                mean = halved(spare, BLOCK) * np.float32(1 / 256)
                word[0] = np.float32(math.sqrt(mean)) * longest
            scale = near_half(one[0])
        else:
            wanted = longest / most
            word[0] = wanted
            scale = near_half(one[0])
            one[0] = scale << SIXTEEN
            if word[0] < wanted:
                scale += ONE
        scale = min(scale, cap)
        scales[block] = np.uint16(scale)
        one[0] = scale << SIXTEEN
        by = word[0] if word[0] > 0 else np.float32(np.inf)
        for j in range(BLOCK):
            room[j] = min(max(np.rint(room[j] / by), -most), most)
        if form == INT8:
            to = codes[block * BLOCK : block * BLOCK + BLOCK]
            for j in range(BLOCK):
                to[j] = np.uint8(np.int32(room[j]))
        else:
            to, above = codes[block * HALF : block * HALF + HALF], whole[HALF:]
            for j in range(BLOCK):
                whole[j] = np.uint8(np.int32(room[j]) + 8)
            for j in range(HALF):
                to[j] = whole[j] | (above[j] << np.uint8(4))
    return True


@kernel(types.UniTuple(types.uint64, 2)(I8, I8, FLOATS, FLOATS, F4, FLOATS))
def shift(form, address, values, other, sign, out):
    """out <- (values + other) + sign x, x being a coded chunk; without `other`: values + sign x.

    Returns:
        The sum of its bit patterns as `codecs.checksum` has it, and the largest one without its sign.
    """
    room, total = np.empty(PIECE, np.float32), np.empty(PIECE, np.float32)
    bits, words, pairs = room.view(np.uint32), total.view(np.uint32), total.view(np.uint64)
    found, most = np.uint64(0), ZERO
    for at in range(0, out.size, PIECE):
        to, given = out[at : at + PIECE], values[at : at + PIECE]
        read(form, address, out.size, at, to.size, room, bits)
        if other.size:
            beside = other[at : at + PIECE]
            for j in range(to.size):
                total[j] = (given[j] + beside[j]) + sign * room[j]
        else:
            for j in range(to.size):
                total[j] = given[j] + sign * room[j]
        for j in range(to.size):
            to[j] = total[j]
        for j in range(to.size // 2):
            found += pairs[j]
        if to.size % 2:
            found += np.uint64(words[to.size - 1])
        most = max(most, largest(words, to.size))
    return found, np.uint64(most)


@kernel(types.uint32(*TERMS, F4, FLOATS, FLOATS, F4, F4, FLAG, FLOATS, FLOATS, I8, HALVES))
def nesterov(
    forms, addresses, weights, divisor, theta, momentum, mu, lr, is_nesterov,
    moved, after, wire_form, wire,
):  # fmt: skip
    """One step of SGD with momentum (`outer.chunked.Nesterov`), g being the terms' mean:

        m' <- mu m + g;   theta' <- theta - lr (g + mu m')     Nesterov
                          theta' <- theta - lr m'              classical

    Without `after`, memory for m', there is no momentum; without `momentum` it begins with g. theta'
    is written to `moved`, in 16 bits to `wire` as well.

    Returns:
        The bits of the largest magnitude of theta'.
    """
    room, total = np.empty(PIECE, np.float32), np.empty(PIECE, np.float32)
    bits, words, most = room.view(np.uint32), total.view(np.uint32), ZERO
    for at in range(0, theta.size, PIECE):
        start, to = theta[at : at + PIECE], moved[at : at + PIECE]
        summed(forms, addresses, weights, theta.size, at, to.size, total, room, words, bits)
        if divisor != 1:
            for j in range(to.size):
                total[j] = total[j] / divisor
        if after.size:
            kept = after[at : at + PIECE]
            if momentum.size:
                before = momentum[at : at + PIECE]
                for j in range(to.size):
                    kept[j] = before[j] * mu + total[j]
            else:
                for j in range(to.size):
                    kept[j] = total[j]
            if is_nesterov:
                for j in range(to.size):
                    total[j] = fma(kept[j], mu, total[j])
            else:
                for j in range(to.size):
                    total[j] = kept[j]
        for j in range(to.size):
            total[j] = fma(total[j], -lr, start[j])
            to[j] = total[j]
        most = max(most, largest(words, to.size))
        if wire_form != FP32:
            write(wire_form, total, words, wire[at : at + PIECE])
    return most
