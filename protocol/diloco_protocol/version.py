"""What a set of parameters is called and what it contains.

A version is immutable and belongs to one fragment: (run, counter, tag) and its *ledger*. The
counter is the number of outer steps behind it. The tag is random, so that two histories which
reached the same counter (a broker that came back from an older checkpoint) are never confused.

The ledger names the pushes contained in the version. It is what makes a contribution count exactly
once across reconnects and restarts: a holder of a version can say whether a push is in it.

On the wire both are maps (`records`). In files they are the shorter lists that `plain` makes here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol.bitmap import Bitmap

# Pushes remembered for each worker and fragment. A worker has one push in flight, so one would do;
# the others cover a worker that abandons several in a row and then comes back from a backup.
PUSHES_REMEMBERED = 8

# Workers remembered after they are gone. A worker without an id of its own gets a new one at each
# start, so the ledger must forget; one that comes back after this many others have left since its last
# push, with that very push still unconfirmed, would be counted again.
ABSENT_REMEMBERED = 128

RUN_PATTERN = re.compile(r"[0-9a-f]{16}")
# More outer steps than any run takes; keeps counters within 64 bits.
MAX_COUNTER = 1 << 48


@dataclass(frozen=True)
class VersionId:
    """Name of a version of one fragment's parameters."""

    run: str  # 16 hexadecimal digits, drawn once when a run begins
    counter: int  # outer steps of this fragment so far; the initial parameters are 0
    tag: int  # random 64-bit number drawn for this version alone

    def __str__(self) -> str:
        return f"{self.counter}#{self.tag:016x}"

    @property
    def is_valid(self) -> bool:
        """Whether each field is in its range."""
        return (
            RUN_PATTERN.fullmatch(self.run) is not None
            and 0 <= self.counter <= MAX_COUNTER
            and 0 <= self.tag < 1 << 64
        )

    def plain(self) -> list[Any]:
        """Run, counter, and the tag in hexadecimal digits: what logs and saved states hold."""
        return [self.run, self.counter, as_hex(self.tag)]

    @classmethod
    def from_plain(cls, plain: Any) -> VersionId:
        """Read what `plain` made; raises TypeError or ValueError for anything else."""
        run, counter, tag = plain
        if not isinstance(run, str) or type(counter) is not int:
            raise TypeError(f"{plain!r:.60} does not name a version")
        return cls(run, counter, from_hex(tag))


@dataclass(frozen=True)
class Counted:
    """One push in a ledger."""

    push_id: int
    chunks: bytes | None = None  # bitmap of those that were counted; None: every one
    # Bitmap of the chunks among them to which an earlier push of the worker contributed instead; None:
    # there are none.
    from_earlier: bytes | None = None


@dataclass(frozen=True)
class Ledger:
    """Which pushes a version contains, the newest last, by worker id."""

    pushes: Mapping[str, tuple[Counted, ...]] = field(default_factory=dict)

    def standing(self, worker_id: str, push_id: int, size: int) -> Bitmap:
        """The chunks of this push that the version contains, of `size` chunks in all."""
        for counted in self.pushes.get(worker_id, ()):
            if counted.push_id == push_id:
                if counted.chunks is None:
                    return Bitmap.full(size)
                return Bitmap.from_bytes(counted.chunks, size)
        return Bitmap(size)

    def own_chunks(self, worker_id: str, push_id: int, size: int) -> Bitmap:
        """The chunks of this push, of `size`, whose values the version contains.

        An earlier push of the worker may have contributed to the other chunks of `standing`.
        """
        found = self.standing(worker_id, push_id, size)
        for counted in self.pushes.get(worker_id, ()):
            if counted.push_id == push_id and counted.from_earlier is not None:
                return found - Bitmap.from_bytes(counted.from_earlier, size)
        return found

    def names_whole(self, worker_id: str, push_id: int) -> bool:
        """True when every chunk of this push is in the version."""
        return any(
            counted.push_id == push_id and counted.chunks is None
            for counted in self.pushes.get(worker_id, ())
        )

    def with_push(
        self, worker_id: str, push_id: int, counted: Bitmap, added: Bitmap | None = None
    ) -> Ledger:
        """This ledger and one more push, of which the chunks in `counted` need not come any more.

        `added` are those whose values are new in the version; None: all of `counted`. An earlier push of
        the worker contributed to the rest, or an earlier version contains them.
        """
        if not counted:
            return self
        added = counted if added is None else added
        earlier = counted - (added | self.own_chunks(worker_id, push_id, counted.size))
        entry = Counted(
            push_id,
            None if counted.is_full else counted.to_bytes(),
            earlier.to_bytes() if earlier else None,
        )
        others = tuple(c for c in self.pushes.get(worker_id, ()) if c.push_id != push_id)
        kept = (*others, entry)[-PUSHES_REMEMBERED:]
        rest = {name: pushes for name, pushes in self.pushes.items() if name != worker_id}
        return Ledger({**rest, worker_id: kept})  # the worker that pushed last is last

    def without_the_long_gone(self, here: Collection[str]) -> Ledger:
        """This ledger with the workers that are here, and those that left most recently."""
        away = [name for name in self.pushes if name not in here]
        gone = set(away[: max(0, len(away) - ABSENT_REMEMBERED)])
        if not gone:
            return self
        return Ledger({name: p for name, p in self.pushes.items() if name not in gone})

    def plain(self, *, in_hex: bool) -> dict[str, list[list[Any]]]:
        """By worker a list of [push id, bitmap of chunks in hexadecimal digits or None].

        A third item, only where there is one, is the bitmap of the chunks from an earlier push.
        Push ids are hexadecimal digits too in the state of a worker; in a checkpoint they are numbers.
        """
        return {
            worker: [
                [
                    as_hex(each.push_id) if in_hex else each.push_id,
                    None if each.chunks is None else each.chunks.hex(),
                    *(() if each.from_earlier is None else (each.from_earlier.hex(),)),
                ]
                for each in pushes
            ]
            for worker, pushes in self.pushes.items()
        }

    @classmethod
    def from_plain(cls, plain: Any) -> Ledger:
        """Read what `plain` made, in either way; raises TypeError or ValueError for anything else."""
        if not isinstance(plain, Mapping) or not all(isinstance(worker, str) for worker in plain):
            raise TypeError(f"{plain!r:.60} is not a ledger")
        return cls(
            {
                worker: tuple(
                    Counted(
                        push_id if type(push_id) is int else from_hex(push_id),
                        None if chunks is None else bytes.fromhex(chunks),
                        *(bytes.fromhex(each) for each in from_earlier),
                    )
                    for push_id, chunks, *from_earlier in pushes
                )
                for worker, pushes in plain.items()
            }
        )


def as_hex(number: int) -> str:
    """An id of 64 bits as 16 hexadecimal digits."""
    return f"{number:016x}"


def from_hex(text: object) -> int:
    """Read `as_hex`; raises TypeError or ValueError for anything else."""
    if not isinstance(text, str):
        raise TypeError(f"{text!r:.60} is not a text")
    number = int(text, 16)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{text!r} is not a number of 64 bits")
    return number


# Frozen parameters never change, and those who fine-tune have them already, from the same file. So that
# no worker fetches what it has, their version has a tag that follows from their values instead of a
# random one: who has the same values knows its name, and asks for it as one that it holds.


def digest_of(pieces: Iterable[bytes | memoryview]) -> bytes:
    """SHA-256 of a chunk as it is sent to workers; it may be given in pieces, in order."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def tag_of(digests: Iterable[bytes]) -> int:
    """The tag of a version, by the digests of its chunks in order: 64 bits of their own SHA-256."""
    return int.from_bytes(digest_of(digests)[:8], "little")
