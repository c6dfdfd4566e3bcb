"""One checkpoint on its way here from a hub: what is asked for, and whether what comes is right. Pure.

The hub is not believed blindly: names that are none of a checkpoint's files, pieces of another place or
length, and files with another sum end the copy.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from diloco_broker.storage.checkpoint import FILE, MANIFEST, NAME
from diloco_broker.storage.pieces import PIECE_BYTES
from diloco_protocol.messages import Result

# Pieces that are on their way at a time: 4 MiB cover a round trip of 0.3 s at 100 Mb/s.
WINDOW = 4
_SUM = re.compile(r"[0-9a-f]{64}")


class CopyFailed(Exception):
    """The copy cannot be finished; a sentence."""


class Outdated(CopyFailed):
    """The hub keeps this checkpoint no longer, or has none yet: ask for the newest again."""


@dataclass(frozen=True)
class Listed:
    """A file as the hub names it."""

    name: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True)
class Listing:
    """The hub's newest checkpoint; its manifest is the last of the files."""

    checkpoint: str
    files: tuple[Listed, ...]


@dataclass(frozen=True)
class Ask:
    """A piece of a file that is wanted."""

    file: str
    offset: int


@dataclass(frozen=True)
class Write:
    """These bytes come next in the file. `is_whole`: they are its last, and its sum is right."""

    file: str
    piece: bytes
    is_whole: bool


def listing_of(result: Result) -> Listing:
    """What the answer to the action `checkpoint` says.

    Raises:
        Outdated: there is no checkpoint yet.
        CopyFailed: the hub refuses, or says what no hub says.
    """
    _refusal(result)
    name, files = result.data.get("checkpoint"), result.data.get("files")
    if not (isinstance(name, str) and NAME.fullmatch(name) and isinstance(files, tuple | list)):
        raise CopyFailed("The hub lists no checkpoint; is it of another release?")
    listed = tuple(_listed(each) for each in files)
    names = [each.name for each in listed]
    if not names or names[-1] != MANIFEST or len(set(names)) < len(names):
        raise CopyFailed(f"The files of {name} that the hub lists are no checkpoint.")
    return Listing(name, listed)


def _listed(plain: Any) -> Listed:
    fields = plain if isinstance(plain, Mapping) else {}
    name, size, digest = (fields.get(each) for each in ("name", "bytes", "sha256"))
    is_file = isinstance(name, str) and (FILE.fullmatch(name) or name == MANIFEST)
    is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 0
    if not (is_file and is_size and isinstance(digest, str) and _SUM.fullmatch(digest)):
        raise CopyFailed(f"The hub lists {name!r:.80}, which is no file of a checkpoint.")
    assert isinstance(name, str) and isinstance(size, int)
    return Listed(name, size, digest)


def _refusal(result: Result) -> None:
    if not result.ok:
        raise (Outdated if result.data.get("again") else CopyFailed)(result.text)


class Copying:
    """See the head of this module.

    Args:
        listing: what is copied.
        here: the sums of files that need not come, being here already.
    """

    def __init__(self, listing: Listing, here: Container[str]) -> None:
        self.listing = listing
        # The manifest says which checkpoint it is; it always comes.
        self.linked = tuple(each for each in listing.files[:-1] if each.sha256 in here)
        self._coming = [each for each in listing.files if each not in self.linked]
        self._asks = [
            Ask(each.name, offset)
            for each in self._coming
            # An empty file is asked for, too: it has to be made.
            for offset in range(0, max(each.size, 1), PIECE_BYTES)
        ]
        self._asked = self._arrived = 0
        self._digest = hashlib.sha256()

    @property
    def is_whole(self) -> bool:
        """Everything has come that was to come."""
        return self._arrived == len(self._asks)

    @property
    def bytes_coming(self) -> int:
        return sum(each.size for each in self._coming)

    def goes_on(self) -> None:
        """On a new connection: what was asked for and has not come is asked for again."""
        self._asked = self._arrived

    def next(self) -> Ask | None:
        """What to ask for now; None while enough is on its way, and at the end."""
        if self._asked == len(self._asks) or self._asked - self._arrived >= WINDOW:
            return None
        self._asked += 1
        return self._asks[self._asked - 1]

    def arrives(self, result: Result) -> Write:
        """The next piece, in the order in which they were asked for.

        Raises:
            Outdated: the hub keeps this checkpoint no longer.
            CopyFailed: it is not that piece, or the file is not what was listed.
        """
        _refusal(result)
        ask = self._asks[self._arrived]
        file = next(each for each in self._coming if each.name == ask.file)
        piece, offset = result.data.get("bytes"), result.data.get("offset")
        wanted = min(PIECE_BYTES, file.size - ask.offset)
        if not isinstance(piece, bytes) or len(piece) != wanted or offset != ask.offset:
            raise CopyFailed(f"Another piece came than that of {ask.file} from {ask.offset} on.")
        if ask.offset == 0:
            self._digest = hashlib.sha256()
        self._digest.update(piece)
        is_whole = ask.offset + wanted == file.size
        if is_whole and self._digest.hexdigest() != file.sha256:
            raise CopyFailed(
                f"{ask.file} of {self.listing.checkpoint} came with another checksum than the hub "
                "lists; it is asked for again."
            )
        self._arrived += 1
        return Write(ask.file, piece, is_whole)
