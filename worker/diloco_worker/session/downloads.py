"""Downloads: the versions that this worker requests, assembles from chunks, and holds. Pure.

A download survives a broken connection. An observer has no session, and gives its credit with the first
`pull` instead of a `credit` on bulk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from diloco_protocol import Bitmap, Ledger, ModelLayout, VersionId, messages
from diloco_protocol.dtypes import is_quantized
from diloco_worker.session import effects
from diloco_worker.session.connection import Connection, Lanes

# Chunks in flight to us. 4 to 16 reach the speed of a raw connection on a local network; 1 Gb/s with a
# round trip of 100 ms has 12 MiB in flight, 12 chunks of bf16.
DOWNLOAD_WINDOW = 16
# Credit is returned in batches: fewer messages, and the broker never runs out.
CREDIT_BATCH = 4


@dataclass(frozen=True)
class Held:
    """A complete version, with its ledger."""

    version: VersionId
    ledger: Ledger
    is_left_behind: bool = False  # of lost rounds: not named at joining


@dataclass
class Download:
    """The version of one fragment that is being assembled, and the one that is held."""

    fragment: int
    size: int  # chunks of the fragment
    held: Held | None = None  # the newest complete version, merged or not
    wanted: bool = False  # a `pull` is outstanding, or will be after the next welcome
    takes_any: bool = False  # deliver the next complete version even if it lacks the push in flight
    after: int = -1  # request a version with a counter above this
    version: VersionId | None = None  # the one being assembled
    arrived: Bitmap = field(init=False)  # its received chunks
    released: messages.Released | None = None  # the last; before, between or after the chunks
    seen: VersionId | None = None  # the last complete version
    # Counter of the broker's newest known version; -1 = it has none, None = unknown.
    theirs: int | None = None
    takes_deltas: bool = False  # replies of the run are quantized
    is_doubted: bool = False  # the held copy differs from the broker's
    own: VersionId | None = None  # the version that the model's own values would be

    def __post_init__(self) -> None:
        self.arrived = Bitmap(self.size)

    @property
    def is_due(self) -> bool:
        """Whether the requested version is complete at the broker and chunks of it are missing here."""
        released = self.released
        if not self.wanted or released is None or self.arrived.is_full:
            return False
        return self.version is None or self.version.counter <= released.version.counter

    def pull(self, session: bytes | None, credit: int) -> messages.Pull:
        resume = self.version is not None and bool(self.arrived)
        return messages.Pull(
            fragment=self.fragment,
            after=self.after,
            session=session,
            credit=credit,
            held_version=self.version if resume else None,
            held=self.arrived.to_bytes() if resume else None,
            delta_of=self.base,
        )

    @property
    def base(self) -> VersionId | None:
        """The version that differences may be from."""
        is_good = self.takes_deltas and not self.is_doubted
        return self.held.version if self.held is not None and is_good else None

    def spoilt(self) -> None:
        """The held version differs from the broker's of that name: the next one comes complete."""
        self.is_doubted = True
        self.version, self.arrived = None, Bitmap(self.size)

    def resume(self, theirs: VersionId | None, *, in_flight: bool) -> bool:
        """After a welcome with the broker's version: whether to request one."""
        held = self.held
        if in_flight or held is None:
            self.wanted = True
        elif theirs is not None and theirs != held.version:
            # A broker that is behind may be about to request our version: keep it.
            self.wanted |= theirs.counter >= held.version.counter
        self.theirs = -1 if theirs is None else theirs.counter
        if not self.wanted:
            return False
        if in_flight:
            # Back, but older: the version with the push comes after the broker's own.
            self.after = min(self.after, self.theirs)
        elif not self.takes_any:
            self.after = -1
        return True

    def want_next(self) -> None:
        """A push begins: request a version newer than the newest seen, by the broker's count."""
        newest = self.seen or (self.held.version if self.held else None)
        self.after = newest.counter if newest else -1
        if self.theirs is not None:
            self.after = min(self.after, self.theirs)
        self.wanted = True

    def want_newest(self, after: int | None) -> None:
        """Request the newest version, whatever it contains, or the next above `after`."""
        self.takes_any = True
        if after is None:
            self.want_current()
        else:
            self.after = after
            self.wanted = True

    def want_current(self) -> None:
        """Request the newest version at once; where it is the held one no chunk is sent.

        A broker that went back has an older one, which is its newest.
        """
        if self.held is not None and not (self.wanted and self.arrived):
            self.version = self.held.version
            self.arrived = Bitmap.full(self.size)
            self.released = None
        self.after = -1
        self.wanted = True

    def want_own(self, own: VersionId) -> None:
        """Request the run's version at once; where it is that of the model no chunk is sent."""
        if self.version in (None, self.own):  # else chunks of another one arrived
            self.version, self.arrived = own, Bitmap.full(self.size)
        self.own = own
        self.wanted = True

    def begins(self, version: VersionId) -> bool:
        """Whether this is the first chunk of a version; another version is discarded.

        `released` stays: it comes on another connection, and may be ahead of chunks of an older
        version.
        """
        if self.version == version:
            return False
        self.version = version
        self.arrived = Bitmap(self.size)
        return True

    def is_here(self, version: VersionId) -> bool:
        """Whether nothing of this version was assembled: it is held, or the model's own."""
        return version == self.own or (self.held is not None and self.held.version == version)

    @property
    def is_whole(self) -> bool:
        released = self.released
        return released is not None and released.version == self.version and self.arrived.is_full

    def finish(self) -> messages.Released:
        """Take the complete version, and reset for the next."""
        released, self.released, self.version = self.released, None, None
        assert released is not None
        self.seen = released.version
        self.after = self.theirs = released.version.counter
        self.arrived = Bitmap(self.size)
        self.wanted = self.takes_any = self.is_doubted = False
        return released


class Downloads:
    """The downloads of all fragments, and the credit for chunks."""

    def __init__(self, connection: Connection, *, observer: bool, lanes: Lanes) -> None:
        self._connection = connection
        self._lanes = lanes
        # By fragment, the newest version received on this connection; another lane may be behind.
        self._newest: dict[int, VersionId] = {}
        # Including the frozen one; empty before the layout is known.
        self.by_fragment: dict[int, Download] = {}
        self._observer = observer
        self._pull_at: dict[int, float] = {}
        self._owed = 0  # credits not yet returned
        self._at_broker = 0  # credits of the broker on this connection

    def set_layout(self, layout: ModelLayout) -> None:
        self.by_fragment = {
            part.fragment: Download(part.fragment, part.chunks) for part in layout.all
        }

    def set_reply(self, dtype: str) -> None:
        """Set the dtype of replies."""
        for download in self.by_fragment.values():
            download.takes_deltas = is_quantized(dtype)

    def spoilt(self, fragment: int) -> Iterator[effects.Effect]:
        """A difference from the held version did not lead to the broker's version."""
        download = self.by_fragment[fragment]
        if download.is_doubted:
            return  # differences that were already in flight
        download.spoilt()
        yield effects.Say(
            f"Fragment {fragment} differs from the broker's version of that name; fetching it complete.",
            trouble=True,
        )
        if self._connection.is_joined and download.wanted:
            yield self.pull(fragment)

    def of(self, fragment: int) -> Download:
        """The download of a fragment; ValueError for one that does not exist."""
        if fragment not in self.by_fragment:
            raise ValueError(
                f"fragment {fragment} does not exist (before a welcome there are none)"
            )
        return self.by_fragment[fragment]

    @property
    def has_all(self) -> bool:
        """Whether every fragment was complete once; true before they are known."""
        return all(not each.size or each.held for each in self.by_fragment.values())

    @property
    def versions(self) -> tuple[VersionId | None, ...]:
        """The held versions, for joining; empty unless all fragments were complete once."""
        held = [each.held for each in self.by_fragment.values()]
        if not (any(held) and self.has_all):
            return ()
        return tuple(each.version if each and not each.is_left_behind else None for each in held)

    @property
    def times(self) -> list[float]:
        """The deadlines of `tick`."""
        return list(self._pull_at.values())

    def is_part_of_another_run(self, run: str | None) -> bool:
        """Whether only some fragments were complete, and they were of another run."""
        held = (each.held for each in self.by_fragment.values())
        return not self.has_all and any(each and each.version.run != run for each in held)

    def left_behind(self, fragment: int, theirs: VersionId | None) -> Iterator[effects.Effect]:
        """The run goes on from this version: a held one that is not older belongs to lost rounds."""
        download = self.by_fragment[fragment]
        held = download.held
        if held is None or theirs is None or held.version == theirs:
            return
        if held.version.counter >= theirs.counter and not held.is_left_behind:
            download.held = replace(held, is_left_behind=True)
            has_fragments = len(self.by_fragment) > 2  # one of them is the frozen one
            which = f" of fragment {fragment}" if has_fragments else ""
            yield effects.Say(
                f"This worker holds version {held.version}{which}, and the broker goes on from "
                f"{theirs}: it restarted from an older copy, so later rounds are lost. Taking the "
                "broker's parameters; a push in flight is offered again.",
                trouble=True,
            )

    @property
    def waits_for_chunks(self) -> bool:
        """Whether chunks that the broker announced are missing."""
        return any(download.is_due for download in self.by_fragment.values())

    def open_window(self, token: bytes) -> Iterator[effects.Effect]:
        """Send the first credit, which binds the bulk connection, or each lane once shares are known."""
        if not self._lanes.are_known:
            return
        self._at_broker = DOWNLOAD_WINDOW
        if self._lanes.count == 1:
            yield effects.Send(messages.Credit(DOWNLOAD_WINDOW, token), bulk=True)
            return
        own, *others = self._lanes.bindings(token, DOWNLOAD_WINDOW)
        yield effects.Send(own, bulk=True)
        yield effects.OpenLanes(tuple(others))

    def pull(self, fragment: int) -> effects.Send:
        credit = 0
        if self._observer:
            credit = DOWNLOAD_WINDOW - self._at_broker - self._owed
            self._at_broker += credit
        session = self._connection.live_token
        return effects.Send(self.by_fragment[fragment].pull(session, credit))

    def chunk(self, chunk: messages.Chunk) -> Iterator[effects.Effect]:
        """Received a chunk: return its credit, and store it if its version is requested."""
        self._at_broker -= 1
        self._owed += 1
        if self._owed >= CREDIT_BATCH:
            self._at_broker += self._owed
            yield effects.Send(messages.Credit(self._owed, self._connection.live_token))
            self._owed = 0
        yield from self.take(chunk, is_here=True)

    def take(self, chunk: messages.Chunk, *, is_here: bool) -> Iterator[effects.Effect]:
        """Take in a received chunk; not `is_here`: another process of this worker has it."""
        download, version = self.by_fragment.get(chunk.fragment), chunk.version
        if download is not None and chunk.delta_of not in (None, download.base):
            return  # of an abandoned pull: its base is not held any more
        if download is None or version is None or not 0 <= chunk.index < download.size:
            yield effects.Say(
                f"The broker sent chunk {chunk.index}, which does not exist.", trouble=True
            )
        elif is_here and self._lanes.of(chunk.fragment, chunk.index) != 0:
            yield effects.Say(
                f"The broker sent chunk {chunk.index} to a process that does not own it.",
                trouble=True,
            )
        elif self._lanes.count > 1 and not self._is_newest(chunk.fragment, version):
            return
        elif download.wanted:
            if download.begins(version):
                yield effects.BeginVersion(chunk.fragment, version)
            if chunk.index not in download.arrived:
                download.arrived.add(chunk.index)
                if is_here:
                    is_delta = chunk.delta_of is not None
                    parts, checksum = (
                        (chunk.parts or (), chunk.checksum or 0) if is_delta else ((), 0)
                    )
                    yield effects.StoreChunk(chunk.fragment, chunk.index, parts, checksum)

    def _is_newest(self, fragment: int, version: VersionId) -> bool:
        """False for a version that another lane has passed: on a connection they only rise."""
        newest = self._newest.setdefault(fragment, version)
        if version.counter > newest.counter:
            newest = self._newest[fragment] = version
        return version == newest

    def released(self, released: messages.Released) -> None:
        """A version is complete at the broker."""
        download = self.by_fragment.get(released.fragment)
        if download is None or not download.wanted:
            return
        download.released = released
        held = download.held
        if held is not None and held.version == released.version:
            # Its chunks are here already; the broker sends none.
            download.version = released.version
            download.arrived = Bitmap.full(download.size)
        elif download.version == download.own != released.version:
            download.version = None  # the model is another one: chunks follow
            download.arrived = Bitmap(download.size)

    def again(self, at: float) -> None:
        """A pull was refused: repeat the requests at this time."""
        for fragment, download in self.by_fragment.items():
            if download.wanted:
                self._pull_at[fragment] = at

    def tick(self, now: float) -> Iterator[effects.Effect]:
        for fragment in [f for f, at in self._pull_at.items() if now >= at]:
            del self._pull_at[fragment]
            if self.by_fragment[fragment].wanted:
                yield self.pull(fragment)

    def disconnected(self) -> None:
        """All credit is void; received chunks stay."""
        self._pull_at.clear()
        self._newest.clear()
        self._owed = self._at_broker = 0

    def check_invariants(self) -> None:
        """Raise AssertionError when an invariant is broken; for tests."""
        assert 0 <= self._owed < CREDIT_BATCH
        assert self._at_broker <= DOWNLOAD_WINDOW
        for download in self.by_fragment.values():
            assert download.wanted or not download.takes_any
