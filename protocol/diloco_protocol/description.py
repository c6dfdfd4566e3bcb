"""Descriptions of models: packed manifests that are too large for a header.

A `join` then has the digest of the description instead of the manifest. A broker that knows a
description with this digest handles the join as if it had the manifest; otherwise it requests the
description, which is sent in parts.
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

# Bytes of a part, which must fit into a header, and of a description. 50,000 tensors take about 5 MB.
PIECE_BYTES = 48 << 10
MOST_BYTES = 8 << 20
# Bytes per second of a slow link, from which both ends compute the timeout of a description.
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
    """The timeout for the transfer of a description of `size` bytes."""
    return size / LEAST_RATE


@lru_cache(maxsize=2)  # a broker calls it at each join
def describe(manifest: Manifest) -> Description:
    """Pack a manifest."""
    packed = bytes(msgpack.packb(to_plain(manifest)))
    return Description(packed, hashlib.sha256(packed).digest())


class DescriptionInProgress:
    """A packed manifest of `size` bytes that is being received in parts.

    Raises:
        ProtocolError: it is too large.
    """

    def __init__(self, digest: bytes, size: int) -> None:
        if not 0 < size <= MOST_BYTES:
            raise ProtocolError(
                Code.MODEL_DIFFERS,
                f"The description of the model has {size} bytes; the limit is {MOST_BYTES}.",
            )
        self.digest, self.size = digest, size
        self._packed = bytearray()

    def add(self, piece: bytes) -> bool:
        """Add the next part; returns whether it was the last.

        Raises:
            ProtocolError: the parts do not match the announced size or digest.
        """
        self._packed += piece
        if not piece or len(self._packed) > self.size:
            raise _wrong(f"{len(self._packed)} of {self.size} bytes arrived")
        if len(self._packed) < self.size:
            if len(piece) != PIECE_BYTES:
                raise _wrong(
                    f"a part that is not the last must have {PIECE_BYTES} bytes, got {len(piece)}"
                )
            return False
        if hashlib.sha256(self._packed).digest() != self.digest:
            raise _wrong("its digest differs")
        return True

    def manifest(self) -> Manifest:
        """Parse the complete description, which takes noticeable time for 50,000 tensors.

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
        Code.BAD_HEADER, f"The description of the model does not match the join: {why}."
    )
