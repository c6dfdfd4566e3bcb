"""The versions that this worker waits for and holds: pulling, assembling, giving credit back. Pure.

A `token` names the session on the connection at hand. An observer has none and gives its credit with the
first `pull` instead of a `credit` on bulk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diloco_protocol import Bitmap, Ledger, ModelLayout, VersionId
from diloco_protocol.messages import Chunk, Credit, Released
from diloco_worker.core.events import Begin, Effect, Say, Send, Store
from diloco_worker.core.transfers import Download, Held

# Chunks that the broker may have under way to us. 4 to 16 reach the speed of a raw connection on a local
# network; 1 Gb/s with a round trip of 100 ms has 12 MiB under way, 12 chunks of bf16.
DOWNLOAD_WINDOW = 16
# Credit goes back in batches: fewer messages, and the broker never runs dry.
CREDIT_BATCH = 4


class Pulls:
    """See the head of this module.

    Attributes:
        downloads: by fragment, the frozen one included; empty before the layout is known.
        held: the newest version of each fragment that is here whole, merged or not.
    """

    def __init__(self, *, observer: bool) -> None:
        self.downloads: dict[int, Download] = {}
        self.held: dict[int, Held] = {}
        self._observer = observer
        self._pull_at: dict[int, float] = {}
        self._owed = 0  # credits not yet given back
        self._at_broker = 0  # chunks the broker may still send on this connection

    def furnish(self, layout: ModelLayout) -> None:
        self.downloads = {
            part.fragment: Download(part.fragment, part.chunks) for part in layout.all
        }

    def of(self, fragment: int) -> Download:
        """The download of a fragment; raises ValueError for one that there is not."""
        if fragment not in self.downloads:
            raise ValueError(f"there is no fragment {fragment} (before a welcome there is none)")
        return self.downloads[fragment]

    @property
    def has_all(self) -> bool:
        """Whether every fragment has been here whole; true before it is known which there are."""
        return all(not each.size or each.fragment in self.held for each in self.downloads.values())

    @property
    def versions(self) -> tuple[VersionId | None, ...]:
        """What is held of each fragment, for joining; empty unless all of them have been here."""
        if not (self.held and self.has_all):
            return ()
        held = (self.held.get(fragment) for fragment in self.downloads)
        return tuple(each.version if each and not each.is_left_behind else None for each in held)

    @property
    def times(self) -> list[float]:
        """When `tick` has something to do."""
        return list(self._pull_at.values())

    def hold(self, fragment: int, version: VersionId, ledger: Ledger) -> None:
        self.of(fragment)
        self.held[fragment] = Held(version, ledger)

    def left_behind(self, fragment: int, theirs: VersionId | None) -> Iterator[Effect]:
        """The run goes on from this version: one that is not behind it is of rounds that are lost."""
        held = self.held.get(fragment)
        if held is None or theirs is None or held.version == theirs:
            return
        if held.version.counter >= theirs.counter and not held.is_left_behind:
            self.held[fragment] = replace(held, is_left_behind=True)
            which = (
                f" of fragment {fragment}" if len(self.downloads) > 2 else ""
            )  # and a frozen one
            yield Say(
                f"This worker holds version {held.version}{which}, and the broker goes on from "
                f"{theirs}: it came back from an older copy, and the rounds that only this worker has "
                "are lost. It goes on with the broker's parameters; a push in flight is offered again.",
                trouble=True,
            )

    @property
    def waits_for_chunks(self) -> bool:
        """Whether chunks must come that the broker has told of."""
        return any(download.is_due for download in self.downloads.values())

    def open_window(self, token: bytes) -> Send:
        """The first credit, which binds the bulk connection."""
        self._at_broker = DOWNLOAD_WINDOW
        return Send(Credit(DOWNLOAD_WINDOW, token), bulk=True)

    def pull(self, fragment: int, token: bytes | None) -> Send:
        credit = 0
        if self._observer:
            credit = DOWNLOAD_WINDOW - self._at_broker - self._owed
            self._at_broker += credit
        return Send(self.downloads[fragment].pull(token, credit))

    def resume(self, fragment: int, theirs: VersionId | None, *, in_flight: bool) -> Iterator[int]:
        """After a welcome: yields the fragment if a version of it is to be asked for.

        Args:
            theirs: the broker's version of the fragment, if it told one.
            in_flight: a pseudo-gradient waits for a version that contains it.
        """
        download, held = self.downloads[fragment], self.held.get(fragment)
        if in_flight or held is None:
            download.wanted = True
        elif theirs is not None and theirs != held.version:
            # A broker that is behind may be about to ask us for what we hold: keep it.
            download.wanted |= theirs.counter >= held.version.counter
        download.theirs = -1 if theirs is None else theirs.counter
        if download.wanted:
            if in_flight:
                # Back, but older: what counts the push comes after the broker's own version.
                download.after = min(download.after, download.theirs)
            elif not download.whatever:
                download.after = -1
            yield fragment

    def want_next(self, fragment: int) -> None:
        """A push begins: a version newer than the newest seen is wanted, by the broker's counting."""
        download, held = self.downloads[fragment], self.held.get(fragment)
        newest = download.seen or (held.version if held else None)
        download.after = newest.counter if newest else -1
        if download.theirs is not None:
            download.after = min(download.after, download.theirs)
        download.wanted = True

    def want_newest(self, fragment: int, after: int | None) -> None:
        """The newest version is wanted, whatever it contains, or the next above `after`."""
        download = self.downloads[fragment]
        download.whatever = True
        if after is None:
            self.want_current(fragment)
        else:
            download.after = after
            download.wanted = True

    def want_current(self, fragment: int) -> None:
        """The newest version is wanted, at once; it costs nothing where it is the one held."""
        download, held = self.downloads[fragment], self.held.get(fragment)
        if held is not None and not (download.wanted and download.arrived):
            download.expects_unchanged(held.version)
        else:
            download.after = -1  # what has arrived of a newer version stays
        download.wanted = True

    def want_whatever(self, fragment: int) -> None:
        """The version that is on its way is wanted, whatever it contains."""
        self.downloads[fragment].whatever = True

    def want_nothing(self, fragment: int) -> None:
        """No version is wanted."""
        download = self.downloads[fragment]
        download.wanted = download.whatever = False

    def want_no_more(self, fragment: int) -> None:
        """The push that waited for a version is over without one."""
        download = self.downloads[fragment]
        download.wanted = download.whatever

    def chunk(self, chunk: Chunk, token: bytes | None) -> Iterator[Effect]:
        """A chunk has come: its credit goes back, and it is stored if it is waited for."""
        self._at_broker -= 1
        self._owed += 1
        if self._owed >= CREDIT_BATCH:
            self._at_broker += self._owed
            yield Send(Credit(self._owed, token))
            self._owed = 0
        download = self.downloads.get(chunk.fragment)
        if download is None or chunk.version is None or not 0 <= chunk.index < download.size:
            yield Say(f"The broker sent chunk {chunk.index}, which does not exist.", trouble=True)
        elif download.wanted:
            if download.begins(chunk.version):
                yield Begin(chunk.fragment, chunk.version)
            if chunk.index not in download.arrived:
                download.arrived.add(chunk.index)
                yield Store(chunk.fragment, chunk.index)

    def released(self, released: Released) -> None:
        """A version is whole at the broker."""
        download = self.downloads.get(released.fragment)
        if download is None or not download.wanted:
            return
        download.released = released
        held = self.held.get(released.fragment)
        if held is not None and held.version == released.version:
            # Its chunks are here already; the broker sends none, and none of another version.
            download.version = released.version
            download.arrived = Bitmap.full(download.size)

    def again(self, at: float) -> None:
        """A pull was refused: send what is wanted again at this time."""
        for fragment, download in self.downloads.items():
            if download.wanted:
                self._pull_at[fragment] = at

    def tick(self, now: float, token: bytes | None) -> Iterator[Effect]:
        for fragment in [f for f, at in self._pull_at.items() if now >= at]:
            del self._pull_at[fragment]
            if self.downloads[fragment].wanted:
                yield self.pull(fragment, token)

    def disconnected(self) -> None:
        """All credit is void; what has arrived stays."""
        self._pull_at.clear()
        self._owed = self._at_broker = 0

    def check_invariants(self) -> None:
        """Raise AssertionError when the books do not balance; for tests."""
        assert 0 <= self._owed < CREDIT_BATCH
        assert self._at_broker <= DOWNLOAD_WINDOW
        for download in self.downloads.values():
            assert download.wanted or not download.whatever
