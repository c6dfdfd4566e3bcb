"""Keeping the newest checkpoint of a hub in a folder here, over the wire.

    with Mirror("tcp://hub:8512", Path("standby-run"), keys=keys) as mirror:
        ...  # mirror.newest, mirror.problem
    Broker(BrokerConfig(save_dir="standby-run", ...))  # goes on from it, bit for bit

A thread asks the hub each second which its newest checkpoint is, and copies it as brokers write theirs:
beside its place, each file checked and flushed, then renamed. So a copy that was interrupted never looks
like a checkpoint. A file that is here already, with the same sum, is linked and does not come again; a
copy that the line has interrupted goes on where it was, while the hub keeps the checkpoint for it.
Nothing of it waits in the thread of who made it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from diloco_broker.standby.copying import CopyFailed, Copying, Listing, Outdated, listing_of
from diloco_broker.storage import checkpoint, pieces
from diloco_broker.storage.checkpoint import Damaged
from diloco_broker.storage.folder_lock import FolderLock
from diloco_protocol.addresses import with_scheme
from diloco_protocol.clients.dealer import Dealer
from diloco_protocol.clients.keys import Keys
from diloco_protocol.errors import ProtocolError, UsageError
from diloco_protocol.messages import Control, Error, Result

logger = logging.getLogger("diloco.standby")

# Seconds between two questions for the newest checkpoint.
POLL_S = 1.0
# Until the next where the hub has removed what was being copied, since it has a newer one.
AGAIN_S = 0.05
# How long an answer may take before the connection is made anew.
ANSWER_WITHIN_S = 10.0
# Between two looks whether to end.
LOOK_S = 0.2
# How long `close` waits for the thread, which may be in the middle of a write.
CLOSE_WITHIN_S = 10.0


class _Ending(Exception):
    """The mirror is closed in the middle of a copy."""


class _Lost(CopyFailed):
    """The hub does not answer, or not with a result: what has come so far is good."""


@dataclass
class _Partial:
    """A copy on its way, in a folder aside."""

    copying: Copying
    aside: Path
    file: BinaryIO | None = None  # that comes now

    def drop(self) -> None:
        if self.file is not None:
            self.file.close()
        shutil.rmtree(self.aside, ignore_errors=True)


class Mirror:
    """See the head of this module. `start` it once and `close` it once, or use it in a `with`.

    Args:
        address: the hub's control address.
        save_dir: where checkpoints go. The folder is this mirror's until it is closed: two brokers
            never write to one.
        keys: where the hub asks for keys, that of an operator.
        keep: how many checkpoints of the run stay there.

    Attributes:
        newest: the last checkpoint that was copied whole, or found here and compared with the hub's.
        copied_at: when that was, by `time.monotonic`.
        problem: why there is none, or none newer, a sentence; None while all is well.
        bytes_copied: that have come, all together.

    Raises:
        UsageError: another broker saves to this folder.
    """

    def __init__(
        self, address: str, save_dir: Path, *, keys: Keys | None = None, keep: int = 2
    ) -> None:
        self.address = with_scheme(address)
        self.save_dir = save_dir
        self.newest: Path | None = None
        self.copied_at: float | None = None
        self.problem: str | None = "The hub has not answered yet."
        self.bytes_copied = 0
        self._keys, self._keep = keys, keep
        self._lock = FolderLock(save_dir)
        self._here: dict[str, Path] = {}  # files that are sound, by sum
        self._has_looked = False  # at what was here before
        self._partial: _Partial | None = None
        self._requests = itertools.count(1)
        self._awaited: deque[int] = deque()  # requests without an answer, the oldest first
        self._changed = threading.Condition()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._main, name="diloco-mirror", daemon=True)

    def start(self) -> Mirror:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop copying, and give the folder free. What was copied in part is removed."""
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_WITHIN_S)
        if self._thread.is_alive():
            logger.error("The copy to %s does not end; the disk may hang.", self.save_dir)
        else:
            self._drop()
        self._lock.release()

    def wait_for(self, name: str, seconds: float) -> bool:
        """Wait until the checkpoint of this name is here; False where it is not in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.newest is not None and self.newest.name == name, seconds
            )

    def __enter__(self) -> Mirror:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread.

    def _main(self) -> None:
        while not self._is_ending.is_set():
            with self._as_problem(), closing(Dealer(self.address, self._keys)) as dealer:
                while not self._is_ending.is_set():
                    self._is_ending.wait(POLL_S if self._look(dealer) else AGAIN_S)
            self._is_ending.wait(POLL_S)

    @contextlib.contextmanager
    def _as_problem(self) -> Iterator[None]:
        """In here what fails is a problem, said once, after which the connection is made anew."""
        try:
            yield
        except _Ending:
            pass
        except (CopyFailed, UsageError, ProtocolError, Damaged) as error:
            self._has_problem(str(error))
        except OSError as error:
            self._has_problem(f"{self.save_dir} cannot be written: {error.strerror or error}.")
        except Exception as error:
            logger.exception("A checkpoint could not be copied; it is tried again.")
            self._has_problem(f"A checkpoint could not be copied: {error!r:.200}.")

    def _has_problem(self, text: str) -> None:
        if text != self.problem:
            logger.warning("No newer checkpoint of the hub: %s", text)
        self.problem = text

    def _look(self, dealer: Dealer) -> bool:
        """Ask for the newest checkpoint, and copy it where it is not here.

        Returns False where the hub has removed that meanwhile.
        """
        self._awaited.clear()  # what comes late of a copy that was given up is nobody's
        if self._partial is not None:
            listing = self._partial.copying.listing
        else:
            self._ask(dealer, "checkpoint")
            try:
                listing = listing_of(self._answer(dealer))
            except Outdated as error:  # there is none yet
                self._has_problem(str(error))
                return True
        if self.newest is None or self.newest.name != listing.checkpoint:
            try:
                self._take(dealer, listing)
            except Outdated as error:
                self.problem = str(error)
                return False
        newest = checkpoint.found(self.save_dir)[0]
        if newest.name == listing.checkpoint:
            self.problem = None
        else:
            self._has_problem(
                f"A broker that is started with {self.save_dir} would go on from {newest.name}, which "
                "is no checkpoint of the hub; move it away."
            )
        return True

    def _take(self, dealer: Dealer, listing: Listing) -> None:
        self._lock.take()
        place = self.save_dir / listing.checkpoint
        if not self._has_looked:
            for path in checkpoint.found(self.save_dir)[:1]:
                self._here = _sound_files(path)
            self._has_looked = True
        if place.exists():
            self._here = _sound_files(place) or self._here
        if not all(self._here.get(each.sha256) == place / each.name for each in listing.files):
            self._copy(dealer, listing, place)
        with self._changed:
            self.newest, self.copied_at = place, time.monotonic()
            self._changed.notify_all()
        if checkpoint.found(self.save_dir)[0] == place:  # else it would be this one that goes
            run = str(checkpoint.read_manifest(place).get("run"))
            checkpoint.retire(self.save_dir, run, self._keep)

    def _copy(self, dealer: Dealer, listing: Listing, place: Path) -> None:
        if self._partial is None:
            self._partial = self._begun(listing)
        partial = self._partial
        try:
            self._fetch(dealer, partial)
            _check_listed(checkpoint.read_manifest(partial.aside), listing)
            checkpoint.sync_folder(partial.aside)
            if place.exists():  # damaged, or the hub's of the same name is another one
                shutil.rmtree(place)
            partial.aside.rename(place)
            checkpoint.sync_folder(self.save_dir)
        except (_Lost, UsageError):  # the latter: the hub does not take this key now
            raise
        except BaseException:
            self._drop()
            raise
        self._partial = None
        self._here = {each.sha256: place / each.name for each in listing.files}
        said = "%s of the hub is here: %d bytes came, %d files were here already."
        logger.info(said, place.name, partial.copying.bytes_coming, len(partial.copying.linked))

    def _drop(self) -> None:
        partial, self._partial = self._partial, None
        if partial is not None:
            partial.drop()

    def _begun(self, listing: Listing) -> _Partial:
        """Link what is here already; the rest is to come."""
        aside = self.save_dir / f".{listing.checkpoint}.{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        copying = Copying(listing, self._here)
        try:
            for each in copying.linked:
                os.link(self._here[each.sha256], aside / each.name)
        except OSError:  # a file system without links, or the file is gone
            shutil.rmtree(aside)
            aside.mkdir()
            copying = Copying(listing, ())
        return _Partial(copying, aside)

    def _fetch(self, dealer: Dealer, partial: _Partial) -> None:
        copying = partial.copying
        copying.goes_on()
        name = copying.listing.checkpoint
        while not copying.is_whole:
            while (ask := copying.next()) is not None:
                self._ask(dealer, "piece", checkpoint=name, file=ask.file, offset=ask.offset)
            write = copying.arrives(self._answer(dealer))
            if partial.file is None:
                partial.file = open(partial.aside / write.file, "xb")  # noqa: SIM115  for later calls
            partial.file.write(write.piece)
            self.bytes_copied += len(write.piece)
            if write.is_whole:
                _flush(partial.file)
                partial.file = None

    # Asking.

    def _ask(self, dealer: Dealer, action: str, **arguments: object) -> None:
        number = next(self._requests)
        self._awaited.append(number)
        dealer.send(Control(action, number, arguments))

    def _answer(self, dealer: Dealer) -> Result:
        """The next answer: the hub reads in the order in which it was asked. Refusals may come first."""
        until = time.monotonic() + ANSWER_WITHIN_S
        while time.monotonic() < until:
            if self._is_ending.is_set():
                raise _Ending
            found = dealer.receive(min(until, time.monotonic() + LOOK_S))
            if found is None:
                continue
            if isinstance(found[0], Error):
                raise _Lost(found[0].text)
            if isinstance(found[0], Result) and found[0].request in self._awaited:
                self._awaited.remove(found[0].request)
                return found[0]
        raise _Lost(dealer.failure or f"No broker answers at {self.address}.")


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sound_files(place: Path) -> dict[str, Path]:
    """The files of a checkpoint here, by their sums; none of one that is not sound."""
    try:
        plain = checkpoint.read_manifest(place)
        checkpoint.check_files(place, plain)
        return {each["sha256"]: place / each["name"] for each in pieces.files_of(place)}
    except Damaged:
        return {}


def _check_listed(plain: dict[str, Any], listing: Listing) -> None:
    """Raises CopyFailed where the manifest names other files than those that have come."""
    listed = {each.name: {"bytes": each.size, "sha256": each.sha256} for each in listing.files[:-1]}
    if plain["files"] != listed:
        raise CopyFailed(f"The manifest of {listing.checkpoint} names other files than the hub.")
