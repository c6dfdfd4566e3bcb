"""Copying the newest checkpoint of a hub over the network.

A thread asks the hub each second for its newest checkpoint, and copies it the way brokers write theirs:
into a temporary folder, each file checked and flushed, then renamed. So an interrupted copy never looks
like a checkpoint. A local file with the same checksum is linked instead of copied; a copy that a broken
connection interrupted is resumed while the hub keeps that checkpoint.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from diloco_broker.storage import checkpoint, pieces
from diloco_broker.storage.checkpoint import FILE, MANIFEST, NAME, Damaged
from diloco_broker.storage.folder_lock import FolderLock
from diloco_broker.storage.pieces import PIECE_BYTES
from diloco_protocol.addresses import with_scheme
from diloco_protocol.clients.dealer import Dealer
from diloco_protocol.clients.keys import Keys
from diloco_protocol.errors import ProtocolError, UsageError
from diloco_protocol.messages import Control, Error, Result
from diloco_protocol.records import from_plain

logger = logging.getLogger("diloco.standby")

# Pieces in flight: 4 MiB cover a round trip of 0.3 s at 100 Mb/s.
WINDOW = 4
# Seconds between two requests for the newest checkpoint.
POLL_S = 1.0
# Seconds without an answer before the mirror reconnects.
ANSWER_WITHIN_S = 10.0
# Seconds between two checks whether to stop.
LOOK_S = 0.2
# Seconds that `close` waits for the thread, which may be in the middle of a write.
CLOSE_WITHIN_S = 10.0
_SUM = re.compile(r"[0-9a-f]{64}")


class CopyFailed(Exception):
    """The copy failed; the text is a sentence."""


class Outdated(CopyFailed):
    """The hub has removed this checkpoint, or has none yet; ask for the newest again."""


class _Lost(CopyFailed):
    """The hub does not answer; the pieces received so far stay valid."""


@dataclass(frozen=True)
class Listed:
    """A file as the hub names it."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Listing:
    """The hub's newest checkpoint; its manifest is the last of the files."""

    checkpoint: str
    files: tuple[Listed, ...]


def listing_of(result: Result) -> Listing:
    """Parse the answer to the action `checkpoint`.

    Raises:
        Outdated: there is no checkpoint yet.
        CopyFailed: the hub refused, or the answer is invalid.
    """
    _check_refusal(result)
    try:
        listing = from_plain(Listing, dict(result.data), "the hub's list", lenient=True)
    except ProtocolError as error:
        raise CopyFailed(f"{error} Is the hub another release?") from None
    names = [each.name for each in listing.files]
    are_files = all(
        (FILE.fullmatch(each.name) or each.name == MANIFEST)
        and each.bytes >= 0
        and _SUM.fullmatch(each.sha256)
        for each in listing.files
    )
    is_complete = names[-1:] == [MANIFEST] and len(set(names)) == len(names)
    if not (NAME.fullmatch(listing.checkpoint) and are_files and is_complete):
        raise CopyFailed(f"The hub listed an invalid checkpoint, {listing.checkpoint!r:.80}.")
    return listing


def _check_refusal(result: Result) -> None:
    if not result.ok:
        raise (Outdated if result.data.get("again") else CopyFailed)(result.text)


class Copy:
    """A checkpoint that is being copied into a temporary folder.

    The hub is not trusted: pieces with another offset or length, files with another checksum, and a
    manifest that names other files end the copy.

    Args:
        listing: the checkpoint.
        folder: of the local checkpoints.
        here: local files by checksum, which are linked.

    Attributes:
        coming: the files that are not linked.
        missing: their missing pieces, in order: file and offset.
    """

    def __init__(self, listing: Listing, folder: Path, here: Mapping[str, Path]) -> None:
        self.listing = listing
        self._aside = folder / f".{listing.checkpoint}.{os.getpid()}"
        try:
            self._begin(here)
        except OSError:  # the file system has no hard links, or a file was removed
            self._begin({})

    def _begin(self, here: Mapping[str, Path]) -> None:
        self.drop()
        self._aside.mkdir(parents=True)
        # The manifest identifies the checkpoint and is always copied.
        linked = [each for each in self.listing.files[:-1] if each.sha256 in here]
        for each in linked:
            os.link(here[each.sha256], self._aside / each.name)
        self.coming = [each for each in self.listing.files if each not in linked]
        self.missing = deque(
            (each, offset)
            for each in self.coming
            # An empty file is requested, too, so that it is created.
            for offset in range(0, max(each.bytes, 1), PIECE_BYTES)
        )

    def arrives(self, result: Result) -> int:
        """Write the first missing piece; returns its length.

        Raises:
            Outdated: the hub has removed this checkpoint.
            CopyFailed: the answer is not that piece.
            OSError: it cannot be written.
        """
        _check_refusal(result)
        file, offset = self.missing[0]
        piece, wanted = result.data.get("bytes"), min(PIECE_BYTES, file.bytes - offset)
        is_it = result.data.get("offset") == offset
        if not (is_it and isinstance(piece, bytes) and len(piece) == wanted):
            raise CopyFailed(f"Received another piece than that of {file.name} at {offset}.")
        with open(self._aside / file.name, "ab") as written:
            written.write(piece)
        self.missing.popleft()
        return wanted

    def finish(self, place: Path) -> None:
        """Check the copy and rename it to `place`. Raises CopyFailed, Damaged or OSError."""
        plain = checkpoint.read_manifest(self._aside)
        listed = {
            each.name: {"bytes": each.bytes, "sha256": each.sha256} for each in self.listing.files
        }
        del listed[MANIFEST]
        if plain["files"] != listed:
            raise CopyFailed(f"The manifest of {place.name} names other files than the hub listed.")
        came = [each.name for each in self.coming]
        checkpoint.check_files(self._aside, {"files": {n: listed[n] for n in listed if n in came}})
        for name in came:
            with open(self._aside / name, "rb") as file:
                os.fsync(file.fileno())
        checkpoint.sync_folder(self._aside)
        if place.exists():  # damaged, or another checkpoint with the same name
            shutil.rmtree(place)
        self._aside.rename(place)
        checkpoint.sync_folder(place.parent)

    def drop(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self._aside, ignore_errors=True)


class Mirror:
    """The copying thread. `start` it once and `close` it once, or use it in a `with`.

    Args:
        address: the hub's control address.
        save_dir: the folder for the copies, locked until `close`.
        keys: an operator's, if the hub requires keys.
        keep: how many checkpoints of the run are kept.

    Attributes:
        newest: the last complete copy.
        problem: why there is none, or no newer one, a sentence; None if there is no problem.
        bytes_copied: in total.

    Raises:
        UsageError: another broker saves to this folder.
    """

    def __init__(
        self, address: str, save_dir: Path, *, keys: Keys | None = None, keep: int = 2
    ) -> None:
        self.address = with_scheme(address)
        self.save_dir = save_dir
        self.newest: Path | None = None
        self.problem: str | None = "The hub has not answered yet."
        self.bytes_copied = 0
        self._keys, self._keep = keys, keep
        self._lock = FolderLock(save_dir)
        self._here: dict[str, Path] = {}  # intact files, by checksum
        self._copy: Copy | None = None  # the incomplete one
        self._requests = 0  # made so far
        self._least = 0  # answers to earlier requests belong to an abandoned copy
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._main, name="diloco-mirror", daemon=True)

    def start(self) -> Mirror:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop copying, remove an incomplete copy, and unlock the folder."""
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_WITHIN_S)
        if self._thread.is_alive():
            logger.error("The copy to %s does not stop; the disk may hang.", self.save_dir)
        else:
            self._drop()
        self._lock.release()

    def __enter__(self) -> Mirror:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread.

    def _main(self) -> None:
        while not self._is_ending.is_set():
            try:
                with closing(Dealer(self.address, self._keys)) as dealer:
                    while not self._is_ending.is_set():
                        try:
                            self._look(dealer)
                        except Outdated as error:
                            self._has_problem(str(error))
                        self._is_ending.wait(POLL_S)
            except (CopyFailed, UsageError, ProtocolError, Damaged) as error:
                self._has_problem(str(error))
            except OSError as error:
                self._has_problem(f"{self.save_dir} cannot be written: {error.strerror or error}.")
            except Exception as error:
                logger.exception("Could not copy a checkpoint; retrying.")
                self._has_problem(f"Could not copy a checkpoint: {error!r:.200}.")
            self._is_ending.wait(POLL_S)

    def _has_problem(self, text: str) -> None:
        if text != self.problem and not self._is_ending.is_set():
            logger.warning("No newer checkpoint of the hub: %s", text)
        self.problem = text

    def _look(self, dealer: Dealer) -> None:
        """Ask for the newest checkpoint, and copy it unless it is here."""
        self._least = self._requests + 1
        if self._copy is not None:
            listing = self._copy.listing
        else:
            self._ask(dealer, "checkpoint")
            listing = listing_of(self._answer(dealer))
        if self.newest is None or self.newest.name != listing.checkpoint:
            self._take(dealer, listing)
        newest = checkpoint.found(self.save_dir)[0]
        if newest.name == listing.checkpoint:
            self.problem = None
        else:
            self._has_problem(
                f"A broker with --save-dir {self.save_dir} would resume {newest.name}, which is not a "
                "checkpoint of the hub; move it away."
            )

    def _take(self, dealer: Dealer, listing: Listing) -> None:
        self._lock.take()
        place = self.save_dir / listing.checkpoint
        for path in [place] if place.exists() else checkpoint.found(self.save_dir)[:1]:
            if not self._here or path == place:
                self._here = _sound_files(path) or self._here
        if not all(self._here.get(each.sha256) == place / each.name for each in listing.files):
            self._fetch(dealer, listing, place)
        self.newest = place
        if checkpoint.found(self.save_dir)[0] == place:  # otherwise `retire` would remove this one
            run = str(checkpoint.read_manifest(place).get("run"))
            checkpoint.retire(self.save_dir, run, self._keep)

    def _fetch(self, dealer: Dealer, listing: Listing, place: Path) -> None:
        copy = self._copy = self._copy or Copy(listing, self.save_dir, self._here)
        try:
            asked = 0  # missing pieces that have been requested
            while copy.missing:
                for file, offset in itertools.islice(copy.missing, asked, WINDOW):
                    self._ask(dealer, "piece", checkpoint=place.name, file=file.name, offset=offset)
                    asked += 1
                self.bytes_copied += copy.arrives(self._answer(dealer))
                asked -= 1
            copy.finish(place)
        except (_Lost, UsageError):  # the latter if the hub rejects our key now
            raise
        except BaseException:
            self._drop()
            raise
        self._copy = None
        self._here = {each.sha256: place / each.name for each in listing.files}
        logger.info("Copied %s of the hub, %d files.", place.name, len(copy.coming))

    def _drop(self) -> None:
        if self._copy is not None:
            self._copy.drop()
        self._copy = None

    # Requests.

    def _ask(self, dealer: Dealer, action: str, **arguments: object) -> None:
        self._requests += 1
        dealer.send(Control(action, self._requests, arguments))

    def _answer(self, dealer: Dealer) -> Result:
        """The next answer; the hub answers requests in order, apart from errors."""
        until = time.monotonic() + ANSWER_WITHIN_S
        while time.monotonic() < until and not self._is_ending.is_set():
            found = dealer.receive(min(until, time.monotonic() + LOOK_S))
            if found is None:
                continue
            if isinstance(found[0], Error):
                raise _Lost(found[0].text)
            if isinstance(found[0], Result) and found[0].request >= self._least:
                return found[0]
        raise _Lost(dealer.failure or f"No broker answers at {self.address}.")


def _sound_files(place: Path) -> dict[str, Path]:
    """The files of a local checkpoint by checksum; empty if it is damaged."""
    try:
        plain = checkpoint.read_manifest(place)
        checkpoint.check_files(place, plain)
        return {each["sha256"]: place / each["name"] for each in pieces.files_of(place)}
    except Damaged:
        return {}
