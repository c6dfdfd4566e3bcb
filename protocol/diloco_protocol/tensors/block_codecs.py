"""Quantized codecs: blocks of 256 elements, each with a scale in bf16 (docs/codecs.md).

A chunk has the scales of its blocks, then their codes; the last block is padded with zeros. A value is
its code times its block's scale. bf16 has 8 significant bits and a code at most 7, so the product is
exact in fp32, and all decoders get identical bits. Codes are rounded to the nearest; stochastic rounding
would need the state of a generator in every checkpoint, and has a larger error.

- int8: scale = largest magnitude / 127, rounded up to bf16.
- int4: scale = largest magnitude / 7, rounded up to bf16.
- int4z: scale = root of the mean square, so few values are clipped and most are zero; the codes are then
  compressed by zstd (RFC 8878). Squares are summed by adding one half to the other until one is left, an
  order that torch, the kernels and accelerators share.

Values are encoded on their device and decoded on that of `out`; the bytes are on the host. If kernels
are available and the values are on the host, one kernel does in one pass what torch does in several,
with identical results (`kernels`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import zstandard
from torch import Tensor

from diloco_protocol import kernels
from diloco_protocol.dtypes import BLOCK, SCALE_BYTES, packed_least, packed_most
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.kernels import INT4, INT8, Source, coded_bytes

ZSTD_LEVEL = 1
# Range of norms of a block whose squares neither underflow nor overflow in fp32.
SMALL, LARGE = 1e-14, 1e18
HALF = BLOCK // 2
LARGEST = {INT8: 127, INT4: 7}  # codes are -LARGEST to LARGEST


@dataclass(frozen=True)
class Encoded:
    """Encoded fp32 values, 1-D and finite."""

    data: Tensor  # the bytes, unpacked
    elements: int
    decode: Callable[[Any, int, Tensor | None], Tensor]  # its first argument is `data`
    pack: Callable[[memoryview, int], memoryview]
    source: Source | None = None  # `data` for kernels

    @property
    def payload(self) -> memoryview:
        """The bytes on the wire; a packed codec compresses them anew at each access."""
        return self.pack(self.data.numpy().data, self.elements)

    def read(self, out: Tensor | None = None) -> Tensor:
        """Return the values that a decoder of the payload obtains, bit for bit; in `out` if given."""
        return self.decode(self.data, self.elements, out)


class _Between(threading.local):
    """Reused memory for intermediate results and zstd contexts; each thread has its own.

    Fresh memory of the size of a chunk costs the kernel a page fault for every 4 KiB. Accelerators have
    a caching allocator.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}
        self.compress = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress
        self.decompress = zstandard.ZstdDecompressor().decompress

    def take(
        self, name: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """An uninitialised tensor, valid until the next call with the same name."""
        if device.type != "cpu":
            return torch.empty(rows, columns, dtype=dtype, device=device)
        elements = rows * columns
        room = self._rooms.get(name)
        if room is None or room.numel() < elements:
            room = self._rooms[name] = torch.empty(elements, dtype=dtype)
        return room[:elements].view(rows, columns)


_between = _Between()
# Returns uninitialised host memory of this number of bytes, for a payload.
NewBytes = Callable[[int], Tensor]


def new_bytes(count: int) -> Tensor:
    """Allocate fresh memory."""
    return torch.empty(count, dtype=torch.uint8)


@dataclass(frozen=True)
class BlockCodec:
    """One of these codecs; unpacked chunks on the host have the format `form`."""

    form: int
    is_rms: bool = False  # scales by the root of the mean square, not by the largest magnitude
    is_packed: bool = False
    block: int = BLOCK

    def encode(self, values: Tensor, new: NewBytes = new_bytes) -> Encoded:
        """Encode fp32 values. `new` allocates the payload, or for a packed codec the unpacked codes."""
        fast = kernels.ready()
        if fast is None or values.device.type != "cpu":
            return self.encode_rows(values[None], new)[0]
        made = new(coded_bytes(self.form, values.numel()))
        fast.encode((self.form, self.is_rms), values, made)
        return self._encoded(made, values.numel())

    def encode_rows(self, rows: Tensor, new: NewBytes = new_bytes) -> list[Encoded]:
        """Encode each row of fp32 values with torch, in as many launches as for one row."""
        return [self._encoded(made, rows.shape[1]) for made in self._by_torch(rows, new)]

    def encode_sum(
        self,
        fast: kernels.Kernels,
        values: Tensor,
        other: Tensor,
        new: NewBytes,
        *,
        sign: float = 1.0,
        followed: Tensor | None = None,
    ) -> tuple[Encoded, int] | None:
        """Encode `values + sign other`, on the host.

        Returns:
            The encoded sum, and the checksum of `followed`, which receives `other` plus the decoded
            values. None if the sum or `followed` is not finite.
        """
        made = new(coded_bytes(self.form, values.numel()))
        checksum = fast.encode(
            (self.form, self.is_rms), values, made, other=other, sign=sign, followed=followed
        )
        return None if checksum is None else (self._encoded(made, values.numel()), checksum)

    def source(self, payload: Any, elements: int) -> Source:
        """Unpack a chunk as an input of kernels; raises as `decode` does."""
        return Source.coded(self.form, self._unpacked(payload, elements), elements)

    def decode(self, payload: Any, elements: int, out: Tensor | None = None) -> Tensor:
        """Decode a payload to fp32 values, in `out` if given.

        Raises:
            ProtocolError: it cannot be unpacked, or unpacks to a wrong number of codes.
        """
        return self._decode_unpacked(self._unpacked(payload, elements), elements, out)

    def _encoded(self, data: Tensor, elements: int) -> Encoded:
        source = Source.coded(self.form, data, elements)
        return Encoded(data, elements, self._decode_unpacked, self._packed, source)

    def _packed(self, payload: memoryview, elements: int) -> memoryview:
        if not self.is_packed:
            return payload
        ends = -(-elements // BLOCK) * SCALE_BYTES
        # A bytearray: torch warns about read-only `bytes`.
        packed = bytearray(payload[:ends])
        packed += _between.compress(payload[ends:])
        return memoryview(packed)

    def _unpacked(self, payload: Any, elements: int) -> Tensor:
        """Scales and codes, which share the memory of the payload if it is not packed."""
        if not self.is_packed:
            return torch.frombuffer(
                payload, dtype=torch.uint8, count=coded_bytes(self.form, elements)
            )
        count = -(-elements // BLOCK)
        wanted, given = count * HALF, memoryview(payload)
        if not packed_least(elements) <= given.nbytes <= packed_most(elements):
            text = f"{given.nbytes} bytes cannot be {elements} elements."
            raise ProtocolError(Code.BAD_CHUNK, text)
        scales, packed = given[: count * SCALE_BYTES], given[count * SCALE_BYTES :]
        try:
            # Check the size in the frame header first: the decompressor would allocate it.
            size = zstandard.frame_content_size(packed)
            is_fit = size == wanted
            codes = _between.decompress(packed, allow_extra_data=False) if is_fit else b""
        except zstandard.ZstdError as error:
            raise ProtocolError(
                Code.BAD_CHUNK, f"Its codes cannot be unpacked: {error}."
            ) from error
        if len(codes) != wanted:
            text = f"Its codes unpack to {size} bytes, they must be {wanted}."
            raise ProtocolError(Code.BAD_CHUNK, text)
        data = bytearray(scales)
        data += codes
        return torch.frombuffer(data, dtype=torch.uint8)

    def _by_torch(self, rows: Tensor, new: NewBytes) -> Tensor:
        """The bytes of each row; the result is on the host."""
        blocks, largest = blocks_of(rows), LARGEST[self.form]
        if self.is_rms:
            scales = capped(_root_mean_square(blocks).to(torch.bfloat16), largest)
        else:
            scales = _rounded_up(_largest(blocks), largest)
        codes = _codes(blocks, scales, largest)
        count = len(blocks) // len(rows)
        size, ends = coded_bytes(self.form, rows.shape[1]), count * SCALE_BYTES
        made = _new_on(rows.device, size * len(rows), new).view(-1, size)
        made[:, :ends].view(torch.bfloat16).copy_(scales.view(-1, count))
        room = made[:, ends:].view(len(rows), count, -1)
        if self.form == INT8:
            room.view(torch.int8).copy_(codes.view(len(rows), count, BLOCK))
        else:
            _nibbles(codes.view(len(rows), count, BLOCK), room)
        return to_host(made, new)

    def _decode_unpacked(self, data: Tensor, elements: int, out: Tensor | None = None) -> Tensor:
        fast = kernels.ready()
        if fast is not None and (out is None or out.device.type == "cpu"):
            found = torch.empty(elements) if out is None else out
            fast.add_up([(Source.coded(self.form, data, elements), 1.0)], 1.0, found)
            return found
        room = _rows(-(-elements // self.block), self.block, out)
        self._values(data.to(room.device), room)
        return _put(room, elements, out)

    def _values(self, data: Tensor, room: Tensor) -> None:
        """Decode with torch into `room`, a row for each block."""
        ends = len(room) * SCALE_BYTES
        scales = data[:ends].view(torch.bfloat16).to(torch.float32)[:, None]
        if self.form == INT8:
            room.copy_(data[ends:].view(torch.int8).view(-1, BLOCK)).mul_(scales)
        else:
            _of_nibbles(data[ends:].view(-1, HALF), room).mul_(scales)


INT8_CODEC = BlockCodec(INT8)
INT4_CODEC = BlockCodec(INT4)
INT4Z_CODEC = BlockCodec(INT4, is_rms=True, is_packed=True)


def blocks_of(values: Tensor, block: int = BLOCK) -> Tensor:
    """View values as rows of one block; the last of each row of values is padded with zeros."""
    missing = -values.shape[-1] % block
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, block)


def _new_on(device: torch.device, count: int, new: NewBytes) -> Tensor:
    if device.type == "cpu":
        return new(count)
    return torch.empty(count, dtype=torch.uint8, device=device)


def to_host(made: Tensor, new: NewBytes) -> Tensor:
    """The bytes themselves if they are on the host, or a copy."""
    return made if made.device.type == "cpu" else new(made.numel()).view(made.shape).copy_(made)


def _largest(blocks: Tensor) -> Tensor:
    # Avoids a copy of the blocks. `abs_` because torch may return -0.0 as the maximum of zeros.
    return torch.maximum(blocks.amax(1), blocks.amin(1).neg_()).abs_()


def _rounded_up(magnitudes: Tensor, largest: int) -> Tensor:
    """The smallest bf16 scales such that `largest` times the scale is at least the magnitude."""
    # A device would multiply by the reciprocal of a plain number, and round otherwise.
    values = magnitudes / torch.full((), largest, dtype=magnitudes.dtype, device=magnitudes.device)
    rounded = values.to(torch.bfloat16)
    # Incrementing the bits of a positive float yields the next larger float.
    above = rounded.view(torch.int16) + (rounded.to(values.dtype) < values)
    return capped(above.view(torch.bfloat16), largest)


def capped(scales: Tensor, largest: int) -> Tensor:
    """Cap scales so that all decoded values are finite in fp32."""
    most = torch.tensor(torch.finfo(torch.float32).max / largest)
    rounded_down = (most.view(torch.int32) >> 16 << 16).view(torch.float32)
    return scales.clamp(max=float(rounded_down))


def _root_mean_square(blocks: Tensor) -> Tensor:
    lengths = halved(blocks.square()).sqrt_()
    # Squares of very large or small values overflow or underflow in fp32: scale those blocks first.
    rare = (lengths < SMALL) | ~(lengths <= LARGE)
    found = lengths.mul_(BLOCK**-0.5)
    if rare.any():
        rows = blocks[rare]
        largest = _largest(rows)
        by = torch.where(largest > 0, largest, 1.0)
        means = halved((rows / by[:, None]).square_()).mul_(1 / BLOCK)
        found[rare] = means.sqrt_().mul_(largest)
    return found


def halved(rows: Tensor) -> Tensor:
    """The sum of each row, in the order that the module docstring defines. Overwrites the rows."""
    while (count := rows.shape[1] // 2) > 0:
        rows = rows[:, :count].add_(rows[:, count:])
    return rows[:, 0]


def _codes(blocks: Tensor, scales: Tensor, largest: int) -> Tensor:
    """The codes of each block, in fp32; zeros for a scale of 0."""
    by = scales.to(torch.float32)
    by = torch.where(by > 0, by, torch.inf)
    codes = _between.take("codes", blocks.shape[0], BLOCK, torch.float32, blocks.device)
    return torch.div(blocks, by[:, None], out=codes).round_().clamp_(-largest, largest)


def _nibbles(codes: Tensor, room: Tensor) -> None:
    """Pack two codes into each byte: element j of the first half of a block with j of the second."""
    # Via int8, to which torch converts three times as fast.
    whole = _between.take("shifted", codes.numel() // BLOCK, BLOCK, torch.int8, codes.device)
    whole = whole.view(codes.shape)
    shifted = whole.copy_(codes).add_(LARGEST[INT4] + 1).view(torch.uint8)
    torch.bitwise_left_shift(shifted[..., HALF:], 4, out=room)
    room.bitwise_or_(shifted[..., :HALF])


def _of_nibbles(pairs: Tensor, values: Tensor) -> Tensor:
    half = _between.take("half", pairs.shape[0], HALF, torch.uint8, pairs.device)
    values[:, :HALF].copy_(torch.bitwise_and(pairs, 15, out=half))
    values[:, HALF:].copy_(torch.bitwise_right_shift(pairs, 4, out=half))
    return values.sub_(LARGEST[INT4] + 1)


def _rows(blocks: int, block: int, out: Tensor | None) -> Tensor:
    """Memory for decoded values, a row for each block: `out` if it has only complete blocks."""
    if out is not None and out.numel() == blocks * block:
        return out.view(blocks, block)
    return torch.empty(blocks, block, dtype=torch.float32, device=_device_of(out))


def _put(values: Tensor, elements: int, out: Tensor | None) -> Tensor:
    """The values in 1-D, without padding; in `out` if given."""
    found = values.view(-1)[:elements]
    return found if out is None or out.data_ptr() == found.data_ptr() else out.copy_(found)


def _device_of(out: Tensor | None) -> torch.device:
    return torch.device("cpu") if out is None else out.device
