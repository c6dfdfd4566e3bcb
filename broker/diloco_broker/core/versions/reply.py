"""Quantized replies, as the core sees them: codes that take a reader from its version to a newer one.

A chunk of a quantized version has a *code*, the delta from the version before it, and its full values.
Codes of the last versions are kept: a reader that missed versions receives a chain of codes, if that is
smaller than the full chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_protocol.messages import Chunk
from diloco_protocol.version import VersionId

# Versions in a chain at most: the broker keeps the codes of this many in memory.
LONGEST_CHAIN = 8


@dataclass(frozen=True, eq=False)
class Coded:
    """One chunk of a version: its full values and its code, both bytes-like; the code may be None."""

    whole: Any
    code: Any
    checksum: int  # of the values

    def joined(self, codes: Sequence[Any]) -> Any:
        """Join codes into one payload, which is at most as long as all of them."""
        return codes[0] if len(codes) == 1 else memoryview(b"".join(codes))


@dataclass(frozen=True)
class Reply:
    """A chunk as sent to all readers that hold the same version."""

    message: Chunk
    payload: Any


@dataclass(eq=False)
class Chain:
    """The codes of the last versions of a fragment, each made from the one before it."""

    _links: deque[tuple[VersionId, VersionId, Sequence[Any]]] = field(
        default_factory=lambda: deque(maxlen=LONGEST_CHAIN)
    )

    def follows(self, version: VersionId, made_from: VersionId, codes: Sequence[Any]) -> None:
        """Append a version in progress, whose `codes` are filled in one by one."""
        while self._links and self._links[-1][1] != made_from:
            self._links.pop()  # it was abandoned, or the broker resumed from an older version
        self._links.append((made_from, version, codes))

    def reply(self, last: Any, whole: Chunk, held: VersionId | None) -> Reply:
        """Make the reply with a chunk for a reader that holds `held`.

        `last` is the chunk, bytes-like if it has no code; `whole` is its message with full values.
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
        """The codes of each version after `held` up to this one; None if the chain lacks one."""
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
    """The code of a chunk; None if it has none and is always sent in full."""
    return wire.code if isinstance(wire, Coded) else None
