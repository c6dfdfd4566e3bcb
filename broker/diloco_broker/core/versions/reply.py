"""Replies in few bits, as the core sees them: which codes lead a reader from what it holds to a version.

A chunk of a version in few bits has a *code*, which leads from the version before it, and its values
whole. Codes of the last versions are kept, so that a reader which has missed some gets a chain of them
while that is shorter than the chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_protocol.messages import Chunk
from diloco_protocol.version import VersionId

# Versions that a chain leads over at most.
LONGEST_CHAIN = 8


@dataclass(frozen=True, eq=False)
class Coded:
    """One chunk of a version. `whole` and `code` are bytes-like; without a code it goes whole."""

    whole: Any
    code: Any
    checksum: int  # of the values

    def joined(self, codes: Sequence[Any]) -> Any:
        """Several codes as one payload, which is no longer than all of them."""
        return codes[0] if len(codes) == 1 else memoryview(b"".join(codes))


@dataclass(frozen=True)
class Reply:
    """A chunk as it is sent to readers that hold the same version."""

    message: Chunk
    payload: Any


@dataclass(eq=False)
class Chain:
    """The codes of the last versions of a fragment, which were made one from the other."""

    _links: deque[tuple[VersionId, VersionId, Sequence[Any]]] = field(
        default_factory=lambda: deque(maxlen=LONGEST_CHAIN)
    )

    def follows(self, version: VersionId, made_from: VersionId, codes: Sequence[Any]) -> None:
        """A version is being made from another; its `codes` are filled in one by one."""
        while self._links and self._links[-1][1] != made_from:
            self._links.pop()  # it came to nothing, or the broker went back
        self._links.append((made_from, version, codes))

    def reply(self, last: Any, whole: Chunk, held: VersionId | None) -> Reply:
        """How a chunk of a version goes to a reader that holds this one.

        `last` is the chunk: bytes-like where it always goes whole. `whole` is its message then.
        """
        if not isinstance(last, Coded):
            return Reply(whole, last)
        assert whole.version is not None
        chain = self.between(held, whole.version) if held is not None else None
        codes: list[Any] = [each[whole.index] for each in chain or ()]
        is_shorter = None not in codes and sum(code.nbytes for code in codes) < last.whole.nbytes
        if held is None or not codes or not is_shorter:
            return Reply(whole, last.whole)
        parts = tuple(code.nbytes for code in codes)
        message = replace(whole, delta_of=held, parts=parts, checksum=last.checksum)
        return Reply(message, last.joined(codes))

    def between(self, held: VersionId, version: VersionId) -> list[Sequence[Any]] | None:
        """The codes of each version after `held` up to this one; None where no chain leads there."""
        found: list[Sequence[Any]] = []
        wanted = version
        for made_from, made, codes in reversed(self._links):
            if made == wanted:
                found.append(codes)
                if made_from == held:
                    return found[::-1]
                wanted = made_from
        return None


def code_of(wire: Any) -> Any:
    """The code of a chunk; None where it always goes whole."""
    return wire.code if isinstance(wire, Coded) else None
