"""Choices made from bytes: to change one of them changes one choice, and their end is not an error."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Takes choices off the bytes of one input; once they are used up, each choice is the first."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_used_up(self) -> bool:
        return self._at >= len(self._data)

    def bytes(self, most: int) -> bytes:
        found = self._data[self._at : self._at + most]
        self._at += len(found)
        return found

    def below(self, bound: int) -> int:
        """A number from 0 to `bound` - 1."""
        width = 1 if bound <= 256 else (bound.bit_length() + 7) // 8
        return int.from_bytes(self.bytes(width), "little") % bound

    def one_of(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def is_so(self) -> bool:
        return bool(self.below(2))
