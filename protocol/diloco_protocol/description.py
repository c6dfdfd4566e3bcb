"""The description of a model: its manifest, packed, for a model that is too large for a header.

A `join` then names the description by its digest. A broker that knows one with this digest takes the
worker in as if the manifest had been there; another asks for it, and it comes in pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgpack

from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.manifest import Manifest
from diloco_protocol.records import from_plain, to_plain

# What a header has room for, and the whole. 50,000 tensors take about 5 MB.
PIECE_BYTES = 48 << 10
MOST_BYTES = 8 << 20
# Bytes a second that a slow link carries: both ends give a description the time that it takes then.
LEAST_RATE = 16 << 10


@dataclass(frozen=True)
class Description:
    """A packed manifest."""

    packed: bytes = field(repr=False)
    digest: bytes

    def pieces(self) -> Iterator[bytes]:
        for start in range(0, len(self.packed), PIECE_BYTES):
            yield self.packed[start : start + PIECE_BYTES]


def seconds_for(size: int) -> float:
    """How long a description of `size` bytes may take on its way."""
    return size / LEAST_RATE


@lru_cache(maxsize=2)  # a broker asks at each join
def describe(manifest: Manifest) -> Description:
    """Pack a manifest."""
    packed = bytes(msgpack.packb(to_plain(manifest)))
    return Description(packed, hashlib.sha256(packed).digest())


class DescriptionInProgress:
    """A packed manifest of `size` bytes, whose pieces are received one after the other.

    Raises:
        ProtocolError: it is too long.
    """

    def __init__(self, digest: bytes, size: int) -> None:
        if not 0 < size <= MOST_BYTES:
            raise ProtocolError(
                Code.MODEL_DIFFERS,
                f"The description of the model has {size} bytes; it may have {MOST_BYTES}.",
            )
        self.digest, self.size = digest, size
        self._packed = bytearray()

    def add(self, piece: bytes) -> bool:
        """Take in the next piece; returns whether it was the last.

        Raises:
            ProtocolError: the pieces do not match the announced size or digest.
        """
        self._packed += piece
        if not piece or len(self._packed) > self.size:
            raise _wrong(f"{len(self._packed)} of {self.size} bytes came")
        if len(self._packed) < self.size:
            if len(piece) != PIECE_BYTES:
                raise _wrong(
                    f"a piece of {len(piece)} bytes is not the last, so it has {PIECE_BYTES}"
                )
            return False
        if hashlib.sha256(self._packed).digest() != self.digest:
            raise _wrong("its digest is another one")
        return True

    def manifest(self) -> Manifest:
        """What all the pieces say. To read 50,000 tensors takes a moment.

        Raises:
            ProtocolError: it is not a manifest.
        """
        try:
            plain: Any = msgpack.unpackb(self._packed, use_list=False, strict_map_key=True)
        except (ValueError, RecursionError, msgpack.exceptions.UnpackException):
            raise _wrong("it is not msgpack") from None
        return from_plain(Manifest, plain, "manifest")


def _wrong(why: str) -> ProtocolError:
    return ProtocolError(
        Code.BAD_HEADER, f"The description of the model is not what the join named: {why}."
    )
