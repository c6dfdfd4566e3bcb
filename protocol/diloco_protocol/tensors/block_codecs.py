"""Codecs of few bits: blocks of 256 elements, each with a scale in bf16 (protocol/CODECS.md).

A chunk is the scales of its blocks, then their codes; the last block is filled up with zeros. A value is
its code times its block's scale. bf16 has 8 significant bits and a code 7 at most, so the product is
exact in fp32: whoever decodes comes to the same bits. Codes are rounded to the nearest; to round at
random would need the state of a generator in every checkpoint, and errs more.

- int8: scale = largest magnitude / 127, rounded up to bf16.
- int4: scale = largest magnitude / 7, rounded up to bf16.
- int4z: scale = root of the mean square, so few values are clipped and most are zero; what the codes say
  is then packed by zstd (RFC 8878).

Values are encoded on their device and decoded on that of `out`; the bytes are on the host. An
accelerator adds up in another order, so scales of int4z may differ there in their last bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import zstandard
from torch import Tensor

from diloco_protocol.dtypes import BLOCK, SCALE_BYTES, packed_least, packed_most
from diloco_protocol.errors import Code, ProtocolError

# Codes are -LARGEST to LARGEST.
LARGEST_OF_8_BITS, LARGEST_OF_4_BITS = 127, 7
ZSTD_LEVEL = 1
# Lengths of a block whose squares fp32 has room for.
SMALL, LARGE = 1e-14, 1e18
HALF = BLOCK // 2


@dataclass(frozen=True)
class Encoded:
    """What became of fp32 values, 1-D and finite."""

    payload: memoryview
    codes: Tensor  # fp32, a row for each block; gone with the next encoding of this thread
    scales: Tensor | None  # bf16, of each block; None where the codes are the values
    elements: int

    def read(self, out: Tensor | None = None) -> Tensor:
        """What whoever decodes the payload reads, bit for bit, without doing so; in `out` if given."""
        if self.scales is None:
            values = self.codes.view(-1)[: self.elements]
            return values if out is None else out.copy_(values)
        # What was rounded to -0.0 is sent as the integer 0, and read as 0.0: in a sum with -0.0 the
        # sign shows.
        codes, values = self.codes.add_(0.0), _rows(self.scales.numel(), out)
        torch.mul(codes, self.scales.to(torch.float32)[:, None], out=values)
        return _put(values, self.elements, out)


class _Between(threading.local):
    """Memory for what is between values and bytes: each thread has its own, and uses it again.

    Fresh memory of the size of a chunk costs the system a page for every 4 KiB, each time. Accelerators
    have an allocator that keeps memory.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}

    def take(
        self, name: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Uninitialised; until the next call for the same name."""
        if device.type != "cpu":
            return torch.empty(rows, columns, dtype=dtype, device=device)
        elements = rows * columns
        room = self._rooms.get(name)
        if room is None or room.numel() < elements:
            room = self._rooms[name] = torch.empty(elements, dtype=dtype)
        return room[:elements].view(rows, columns)


_between = _Between()
# Returns uninitialised memory of so many bytes on the host, for a payload.
NewBytes = Callable[[int], Tensor]


def new_bytes(count: int) -> Tensor:
    """In fresh memory."""
    return torch.empty(count, dtype=torch.uint8)


def encode_int8(values: Tensor, new: NewBytes = new_bytes) -> Encoded:
    """In 8 bits."""
    blocks = _blocks_of(values)
    made, scales, room = _room(blocks, BLOCK, new)
    scales.copy_(_rounded_up(_largest(blocks), LARGEST_OF_8_BITS))
    codes = _codes(blocks, scales, LARGEST_OF_8_BITS)
    room.view(torch.int8).copy_(codes)
    return Encoded(_on_host(made, new), codes, scales, values.numel())


def decode_int8(payload: Any, elements: int, out: Tensor | None = None) -> Tensor:
    """The fp32 values of such bytes, in `out` if it is given."""
    scales, codes = _split(payload, elements, BLOCK, out)
    values = _rows(scales.numel(), out)
    values.copy_(codes.view(torch.int8).view(-1, BLOCK))
    return _put(values.mul_(scales.to(torch.float32)[:, None]), elements, out)


def encode_int4(values: Tensor, new: NewBytes = new_bytes) -> Encoded:
    """In 4 bits."""
    blocks = _blocks_of(values)
    made, scales, room = _room(blocks, HALF, new)
    scales.copy_(_rounded_up(_largest(blocks), LARGEST_OF_4_BITS))
    codes = _codes(blocks, scales, LARGEST_OF_4_BITS)
    _nibbles(codes, room)
    return Encoded(_on_host(made, new), codes, scales, values.numel())


def decode_int4(payload: Any, elements: int, out: Tensor | None = None) -> Tensor:
    """The fp32 values of such bytes, in `out` if it is given."""
    scales, codes = _split(payload, elements, HALF, out)
    return _of_nibbles(codes, scales, elements, out)


def encode_int4z(values: Tensor, new: NewBytes = new_bytes) -> Encoded:
    """In 4 bits, packed; how many bytes depends on the values, so `new` is of no use."""
    blocks = _blocks_of(values)
    scales = _capped(_root_mean_square(blocks).to(torch.bfloat16), LARGEST_OF_4_BITS)
    codes = _codes(blocks, scales, LARGEST_OF_4_BITS)
    nibbles = _between.take("nibbles", codes.shape[0], HALF, torch.uint8, codes.device)
    _nibbles(codes, nibbles)
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(nibbles.cpu().numpy().data)
    # No `bytes`, which torch does not like to read.
    payload = bytearray(scales.cpu().view(torch.uint8).numpy().data)
    payload += packed
    return Encoded(memoryview(payload), codes, scales, values.numel())


def decode_int4z(payload: Any, elements: int, out: Tensor | None = None) -> Tensor:
    """The fp32 values of such bytes, in `out` if it is given.

    Raises:
        ProtocolError: they cannot be unpacked, or not to as many codes as there must be.
    """
    count = -(-elements // BLOCK)
    bytes_of_scales, wanted = count * SCALE_BYTES, count * HALF
    given = memoryview(payload)
    if not packed_least(elements) <= given.nbytes <= packed_most(elements):
        raise ProtocolError(Code.BAD_CHUNK, f"{given.nbytes} bytes cannot be {elements} elements.")
    packed = given[bytes_of_scales:]
    try:
        # What the frame says of its size is asked first: it would be believed, and the memory taken.
        size = zstandard.frame_content_size(packed)
        unpack = zstandard.ZstdDecompressor().decompress
        codes = unpack(packed, allow_extra_data=False) if size == wanted else b""
    except zstandard.ZstdError as error:
        raise ProtocolError(Code.BAD_CHUNK, f"Its codes cannot be unpacked: {error}.") from error
    if len(codes) != wanted:
        text = f"Its codes unpack to {size} bytes, they must be {wanted}."
        raise ProtocolError(Code.BAD_CHUNK, text)
    device = _device_of(out)
    scales = torch.frombuffer(given, dtype=torch.bfloat16, count=count).to(device)
    rows = torch.frombuffer(bytearray(codes), dtype=torch.uint8).to(device)
    return _of_nibbles(rows, scales, elements, out)


def _blocks_of(values: Tensor) -> Tensor:
    """In rows of a block; the last is filled up with zeros."""
    missing = -values.numel() % BLOCK
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.view(-1, BLOCK)


def _room(blocks: Tensor, code_bytes: int, new: NewBytes) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for these blocks beside them; the part of the scales, and that of the codes, by block."""
    count = blocks.shape[0]
    size, ends = count * (SCALE_BYTES + code_bytes), count * SCALE_BYTES
    is_on_host = blocks.device.type == "cpu"
    made = new(size) if is_on_host else torch.empty(size, dtype=torch.uint8, device=blocks.device)
    return made, made[:ends].view(torch.bfloat16), made[ends:].view(count, code_bytes)


def _on_host(made: Tensor, new: NewBytes) -> memoryview:
    """The bytes that were made, which is all that leaves their device."""
    if made.device.type != "cpu":
        made = new(made.numel()).copy_(made)
    return made.numpy().data


def _largest(blocks: Tensor) -> Tensor:
    # With no copy of them all.
    return torch.maximum(blocks.amax(1), blocks.amin(1).neg_())


def _rounded_up(magnitudes: Tensor, largest: int) -> Tensor:
    """The least bf16 of which so many are not below."""
    values = magnitudes / largest
    rounded = values.to(torch.bfloat16)
    # Of positive floats the next one has the next bits.
    above = rounded.view(torch.int16) + (rounded.to(values.dtype) < values)
    return _capped(above.view(torch.bfloat16), largest)


def _capped(scales: Tensor, largest: int) -> Tensor:
    """So that no code makes a value that is not finite in fp32."""
    most = torch.tensor(torch.finfo(torch.float32).max / largest)
    rounded_down = (most.view(torch.int32) >> 16 << 16).view(torch.float32)
    return scales.clamp(max=float(rounded_down))


def _root_mean_square(blocks: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(blocks, dim=1)
    # fp32 has no room for the squares of large values, nor of small ones: these by the largest first.
    low, high = torch.aminmax(lengths)
    if low >= SMALL and high <= LARGE:
        return lengths.mul_(BLOCK**-0.5)
    largest = _largest(blocks)
    by = torch.where(largest > 0, largest, 1.0)
    return (blocks / by[:, None]).square_().mean(1).sqrt_().mul_(largest)


def _codes(blocks: Tensor, scales: Tensor, largest: int) -> Tensor:
    """fp32; a block whose scale is 0 has zeros."""
    by = scales.to(torch.float32)
    by = torch.where(by > 0, by, torch.inf)
    codes = _between.take("codes", blocks.shape[0], BLOCK, torch.float32, blocks.device)
    return torch.div(blocks, by[:, None], out=codes).round_().clamp_(-largest, largest)


def _nibbles(codes: Tensor, room: Tensor) -> None:
    """Two codes in each byte: j of the first half of a block with j of the second."""
    # By int8, to which torch is three times as fast.
    whole = _between.take("shifted", codes.shape[0], BLOCK, torch.int8, codes.device)
    shifted = whole.copy_(codes).add_(LARGEST_OF_4_BITS + 1).view(torch.uint8)
    torch.bitwise_left_shift(shifted[:, HALF:], 4, out=room)
    room.bitwise_or_(shifted[:, :HALF])


def _of_nibbles(codes: Tensor, scales: Tensor, elements: int, out: Tensor | None) -> Tensor:
    rows = codes.view(-1, HALF)
    values = _rows(rows.shape[0], out)
    half = _between.take("half", rows.shape[0], HALF, torch.uint8, rows.device)
    values[:, :HALF].copy_(torch.bitwise_and(rows, 15, out=half))
    values[:, HALF:].copy_(torch.bitwise_right_shift(rows, 4, out=half))
    values.sub_(LARGEST_OF_4_BITS + 1).mul_(scales.to(torch.float32)[:, None])
    return _put(values, elements, out)


def _rows(blocks: int, out: Tensor | None) -> Tensor:
    """Room for decoded values, a row for each block: in `out` where its last block is a whole one."""
    if out is not None and out.numel() == blocks * BLOCK:
        return out.view(blocks, BLOCK)
    return torch.empty(blocks, BLOCK, dtype=torch.float32, device=_device_of(out))


def _put(values: Tensor, elements: int, out: Tensor | None) -> Tensor:
    """1-D, without what the last block was filled up with; in `out` if it is given."""
    found = values.view(-1)[:elements]
    return found if out is None or out.data_ptr() == found.data_ptr() else out.copy_(found)


def _device_of(out: Tensor | None) -> torch.device:
    return torch.device("cpu") if out is None else out.device


def _split(
    payload: Any, elements: int, code_bytes: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scales and codes, where `out` is."""
    blocks = -(-elements // BLOCK)
    both = torch.frombuffer(payload, dtype=torch.uint8, count=blocks * (SCALE_BYTES + code_bytes))
    both = both.to(_device_of(out))
    return both[: blocks * SCALE_BYTES].view(torch.bfloat16), both[blocks * SCALE_BYTES :]
