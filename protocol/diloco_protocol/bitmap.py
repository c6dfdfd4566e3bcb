"""Sets of chunk numbers as bitmaps, for example of arrived, held or counted chunks."""

from __future__ import annotations

from collections.abc import Iterator

from diloco_protocol.errors import Code, ProtocolError


class Bitmap:
    """A set of chunk numbers below `size`; on the wire, bit i of byte i // 8, lowest bit first."""

    __slots__ = ("_bits", "size")

    def __init__(self, size: int, bits: int = 0) -> None:
        self.size = size
        self._bits = bits

    @classmethod
    def full(cls, size: int) -> Bitmap:
        return cls(size, (1 << size) - 1)

    @classmethod
    def from_bytes(cls, raw: bytes, size: int) -> Bitmap:
        """Read `to_bytes`; raises ProtocolError if the length is wrong or a bit past `size` is set."""
        bits = int.from_bytes(raw, "little")
        if len(raw) != (size + 7) // 8 or bits >> size:
            raise ProtocolError(
                Code.BAD_HEADER,
                f"A bitmap of {len(raw)} bytes does not fit {size} chunks; "
                f"send {(size + 7) // 8} bytes with no bit set past the last chunk.",
            )
        return cls(size, bits)

    def to_bytes(self) -> bytes:
        return self._bits.to_bytes((self.size + 7) // 8, "little")

    def add(self, index: int) -> None:
        self._bits |= 1 << index

    def discard(self, index: int) -> None:
        self._bits &= ~(1 << index)

    def missing(self) -> Iterator[int]:
        """The chunk numbers that are not in the set, in ascending order."""
        return (index for index in range(self.size) if not self._bits >> index & 1)

    @property
    def is_full(self) -> bool:
        return self._bits == (1 << self.size) - 1

    def __contains__(self, index: int) -> bool:
        return bool(self._bits >> index & 1)

    def __iter__(self) -> Iterator[int]:
        return (index for index in range(self.size) if self._bits >> index & 1)

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __or__(self, other: Bitmap) -> Bitmap:
        return Bitmap(self.size, self._bits | other._bits)

    def __sub__(self, other: Bitmap) -> Bitmap:
        return Bitmap(self.size, self._bits & ~other._bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bitmap) and (self.size, self._bits) == (other.size, other._bits)

    def __hash__(self) -> int:
        return hash((self.size, self._bits))

    def __repr__(self) -> str:
        return f"Bitmap({len(self)} of {self.size})"
