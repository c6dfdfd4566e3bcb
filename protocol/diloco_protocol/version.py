"""Versions of parameters: their identity and their ledger.

A version is immutable and belongs to one fragment. It is identified by (run, counter, tag), and has a
*ledger*. The counter is the number of outer steps of the fragment. The tag is random, so that two
histories with the same counter (after a restart from an older checkpoint) are never confused.

The ledger lists the pushes that the version contains. With it a contribution counts exactly once across
reconnects and restarts: any holder of a version can determine whether it contains a push.

On the wire both are maps (`records`). In files they are shorter lists, made by `plain`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol.bitmap import Bitmap

# Pushes per worker and fragment. A worker has one push in flight, so one would suffice; the others cover
# a worker that abandons several in a row and is then restored from a backup.
PUSHES_REMEMBERED = 8

# Workers that are kept after they have left. A worker without an explicit id gets a new one at each
# start, so the ledger must forget. A worker that returns after this many others have left since its last
# push, with that push still unconfirmed, would be counted again.
ABSENT_REMEMBERED = 128

RUN_PATTERN = re.compile(r"[0-9a-f]{16}")
# More outer steps than any run takes; keeps counters within 64 bits.
MAX_COUNTER = 1 << 48


@dataclass(frozen=True)
class VersionId:
    """The identity of a version of one fragment's parameters."""

    run: str  # 16 hexadecimal digits, random for each run
    counter: int  # outer steps of this fragment so far; 0 for the initial parameters
    tag: int  # random 64-bit number of this version

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
        """Run, counter, and the tag in hexadecimal digits, for logs and saved states."""
        return [self.run, self.counter, as_hex(self.tag)]

    @classmethod
    def from_plain(cls, plain: Any) -> VersionId:
        """Read the result of `plain`; raises TypeError or ValueError for anything else."""
        run, counter, tag = plain
        if not isinstance(run, str) or type(counter) is not int:
            raise TypeError(f"{plain!r:.60} does not name a version")
        return cls(run, counter, from_hex(tag))


@dataclass(frozen=True)
class Counted:
    """One push in a ledger."""

    push_id: int
    chunks: bytes | None = None  # bitmap of the counted chunks; None: all
    # Bitmap of those among them to which an earlier push of the worker contributed instead; None: no
    # chunks.
    from_earlier: bytes | None = None


@dataclass(frozen=True)
class Ledger:
    """The pushes that a version contains, by worker id, the newest last."""

    pushes: Mapping[str, tuple[Counted, ...]] = field(default_factory=dict)

    def standing(self, worker_id: str, push_id: int, size: int) -> Bitmap:
        """The chunks of this push, which has `size`, that the version contains."""
        for counted in self.pushes.get(worker_id, ()):
            if counted.push_id == push_id:
                if counted.chunks is None:
                    return Bitmap.full(size)
                return Bitmap.from_bytes(counted.chunks, size)
        return Bitmap(size)

    def own_chunks(self, worker_id: str, push_id: int, size: int) -> Bitmap:
        """The chunks of this push, which has `size`, whose values the version contains.

        An earlier push of the worker may have contributed to the other chunks of `standing`.
        """
        found = self.standing(worker_id, push_id, size)
        for counted in self.pushes.get(worker_id, ()):
            if counted.push_id == push_id and counted.from_earlier is not None:
                return found - Bitmap.from_bytes(counted.from_earlier, size)
        return found

    def names_whole(self, worker_id: str, push_id: int) -> bool:
        """Whether every chunk of this push is in the version."""
        return any(
            counted.push_id == push_id and counted.chunks is None
            for counted in self.pushes.get(worker_id, ())
        )

    def with_push(
        self, worker_id: str, push_id: int, counted: Bitmap, added: Bitmap | None = None
    ) -> Ledger:
        """This ledger with one more push, whose chunks in `counted` need not be sent any more.

        `added` are the chunks whose values are new in the version; None: all of `counted`. An earlier
        push of the worker contributed to the others, or an earlier version contains them.
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
        return Ledger({**rest, worker_id: kept})  # in order of their last push

    def without_the_long_gone(self, here: Collection[str]) -> Ledger:
        """This ledger with only the present workers (`here`), and those that left most recently."""
        away = [name for name in self.pushes if name not in here]
        gone = set(away[: max(0, len(away) - ABSENT_REMEMBERED)])
        if not gone:
            return self
        return Ledger({name: p for name, p in self.pushes.items() if name not in gone})

    def plain(self, *, in_hex: bool) -> dict[str, list[list[Any]]]:
        """For each worker a list of [push id, bitmap of chunks in hexadecimal digits or None].

        An optional third item is the bitmap of the chunks from an earlier push. Push ids are hexadecimal
        digits too in the state of a worker; in a checkpoint they are numbers.
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
        """Read either result of `plain`; raises TypeError or ValueError for anything else."""
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
    """A 64-bit id as 16 hexadecimal digits."""
    return f"{number:016x}"


def from_hex(text: object) -> int:
    """Read `as_hex`; raises TypeError or ValueError for anything else."""
    if not isinstance(text, str):
        raise TypeError(f"{text!r:.60} is not a string")
    number = int(text, 16)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{text!r} is not a 64-bit number")
    return number


# Frozen parameters never change, and workers that fine-tune a model have them already, from the same
# file. To avoid downloading them, their version has a tag that is computed from the values instead of a
# random one: a worker with the same values can compute the version, and reports that it holds it.


def digest_of(pieces: Iterable[bytes | memoryview]) -> bytes:
    """The SHA-256 of a chunk in wire form, which may be given in several parts, in order."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def tag_of(digests: Iterable[bytes]) -> int:
    """The tag of a version from the digests of its chunks in order: 64 bits of their SHA-256."""
    return int.from_bytes(digest_of(digests)[:8], "little")
