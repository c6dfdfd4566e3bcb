"""The store of versions, and their readers.

A reader grants credit for chunks. It runs out before ZeroMQ's high-water marks are reached, so a slow
reader keeps references to a few chunks, never a copy of the model.

The store has, for each fragment, the current version (complete and immutable) and the one in progress. A
reader that waits for the next version receives its chunks as they become ready. When a newer version is
released, a reader that has started with the older one finishes that: otherwise a link that needs longer
for a version than the run would never complete any. At most `OLD_VERSIONS_KEPT` old versions are kept
for slow readers; other slow readers are moved to the newer version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diloco_broker.core import effects
from diloco_broker.core.rounds.uploads import Account
from diloco_broker.core.versions.fragment import (
    OLD_VERSIONS_KEPT,
    FragmentVersions,
    VersionInProgress,
    WholeVersion,
)
from diloco_broker.core.versions.readers import (
    MAX_OBSERVER_CREDIT,
    NO_LANE,
    Download,
    Outlet,
    Reader,
    lane_credit,
)
from diloco_broker.core.versions.record import FragmentRecord
from diloco_broker.core.versions.reply import code_of
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import Progress, Released
from diloco_protocol.version import VersionId


class VersionStore:
    """Versions of all fragments, and their readers. Methods yield the messages to send."""

    def __init__(self) -> None:
        self.fragments: list[FragmentVersions] = []
        self.readers: dict[effects.Route, Reader] = {}
        self.bytes_down = 0
        # Sent with each version: the progress of the run, and the mean loss of its workers.
        self.progress = Progress()
        self.loss: float | None = None

    def set_layout(self, layouts: tuple[FragmentLayout, ...]) -> None:
        """Set the fragments of the model, the frozen one last."""
        self.fragments = [FragmentVersions(layout) for layout in layouts]

    def __getitem__(self, fragment: int) -> FragmentVersions:
        return self.fragments[fragment]

    @property
    def trained(self) -> list[FragmentVersions]:
        """All fragments but the frozen one, of which rounds make no versions."""
        return self.fragments[:-1]

    # Making versions.

    def make(self, fragment: int, version: VersionId, gradients: int) -> None:
        """Start a version, and its download by the readers that wait for one."""
        versions = self[fragment]
        chunks = versions.layout.chunks
        made = VersionInProgress(version, gradients, [None] * chunks, [None] * chunks, chunks)
        versions.in_progress = made
        if versions.version is not None:
            versions.chain.follows(version, versions.version, made.codes)
        for reader in self.readers.values():
            after = reader.waiting.get(fragment)
            if after is not None and after < version.counter:
                reader.downloads[fragment] = Download(version, chunks, reader.holds.get(fragment))

    def install(self, fragment: int, whole: WholeVersion) -> None:
        """Set the first version of a fragment."""
        versions = self[fragment]
        assert versions.current is None and versions.in_progress is None
        versions.set_current(whole)

    def warn_of_branches(
        self, worker_id: str, versions: Sequence[VersionId | None]
    ) -> effects.Effects:
        """Warn if a worker holds a version, by fragment, that is not an ancestor of this broker's.

        A broker that resumes from an older checkpoint, or without a worker that is ahead of it, repeats
        rounds with other contributions. Counters are then equal and tags differ. The branches cannot be
        merged; the run continues with the broker's.
        """
        fragments = self.trained
        for fragment, (held, each) in enumerate(zip(versions, fragments, strict=False)):
            ours = each.version
            if held is None or ours is None or held.run != ours.run:
                continue
            if held.counter > ours.counter:
                instead = f"is at {ours}"
            elif each.is_of_another_branch(held):
                instead = (
                    f"has version {each.name_of(held.counter)} of another branch, now at {ours}"
                )
            else:
                continue
            which = f" of fragment {fragment}" if len(fragments) > 1 else ""
            yield effects.warning(
                f"{worker_id} holds version {held}{which}, but this broker resumed from an older one "
                f"and {instead}. The rounds that only {worker_id} has are lost, except for pushes that "
                "workers offer again."
            )

    def serve_waiting(self) -> effects.Effects:
        """Start the downloads of readers whose version is available now."""
        for reader in list(self.readers.values()):
            for fragment, after in list(reader.waiting.items()):
                version = self[fragment].version
                if version is not None and version.counter > after:
                    chunks = self[fragment].layout.chunks
                    yield from self._start(reader, fragment, Bitmap(chunks))

    def chunk_ready(self, fragment: int, index: int, wire: Any) -> list[effects.Send]:
        in_progress = self.fragments[fragment].in_progress
        assert in_progress is not None and in_progress.wires[index] is None
        in_progress.wires[index] = wire
        in_progress.codes[index] = code_of(wire)
        in_progress.left -= 1
        sends: list[effects.Send] = []
        for reader in self.readers.values():
            download = reader.downloads.get(fragment)
            if download is not None and download.version == in_progress.version:
                download.is_ready(reader.lane_of(fragment, index), index)
                sends += self.pump(reader)
        return sends

    def release(self, fragment: int, record: FragmentRecord) -> effects.Effects:
        """Make the version in progress, which is complete, the current one."""
        versions = self[fragment]
        in_progress = versions.in_progress
        assert in_progress is not None and in_progress.left == 0
        self._keep_if_read(versions)
        whole = WholeVersion(record, tuple(in_progress.wires), in_progress.replies)
        versions.set_current(whole)
        versions.in_progress = None
        for reader in list(self.readers.values()):
            download = reader.downloads.get(fragment)
            waits = reader.waiting.get(fragment)
            if download is not None and any(download.version == o.version for o in versions.old):
                continue
            if download is not None and download.version != record.version:
                yield from self._start(reader, fragment, Bitmap(versions.layout.chunks))
            elif waits is not None and waits < record.version.counter:
                del reader.waiting[fragment]
                yield effects.Send(reader.announce, self._released(fragment, reader))

    # Readers.

    def reader(
        self,
        route: effects.Route,
        announce: effects.Route,
        now: float,
        account: Account | None = None,
    ) -> Reader:
        """The reader on a connection, made if it is new; `account` is that of a member."""
        if route not in self.readers:
            joined = account is not None
            made = Reader(route, announce, account or Account(), joined, now)
            made.lanes[0] = Outlet(route)
            self.readers[route] = made
        return self.readers[route]

    def add_credit(
        self, reader: Reader, chunks: int, now: float, lane: int = 0, lanes: int = 1
    ) -> list[effects.Send]:
        """Add to the credit of a reader on one of its `lanes`, and send ready chunks."""
        most = lane_credit(lanes) if reader.joined else MAX_OBSERVER_CREDIT
        outlet = reader.lanes[lane]
        outlet.credit = min(outlet.credit + max(0, chunks), most)
        reader.heard_at = now
        return self.pump(reader)

    def bind(
        self, reader: Reader, lane: int, route: effects.Route, shares: Sequence[Bitmap]
    ) -> None:
        """Bind a lane of a worker of several processes to a connection and its shares of chunks."""
        if reader.lane_map is None:
            reader.lane_map = [[NO_LANE] * each.layout.chunks for each in self.fragments]
        reader.lanes[lane] = Outlet(route)
        for fragment, share in enumerate(shares):
            reader.give(fragment, lane, share)

    def forget(self, route: effects.Route | None) -> None:
        """Remove the reader that has this connection, with all its connections."""
        found = [
            each.route
            for each in self.readers.values()
            if route is not None and any(outlet.route == route for outlet in each.lanes.values())
        ]
        for each in found:
            del self.readers[each]
        if found:
            self._sweep()

    @property
    def observers(self) -> list[Reader]:
        return [reader for reader in self.readers.values() if not reader.joined]

    def pull(
        self,
        reader: Reader,
        fragment: int,
        after: int,
        held: tuple[VersionId, bytes] | None,
        delta_of: VersionId | None = None,
    ) -> effects.Effects:
        """Send a reader the newest version above `after`, now or once it exists.

        `held` is a version of which it has these chunks; `delta_of` one that it has completely.
        """
        versions = self[fragment]
        if reader.downloads.pop(fragment, None) is not None:
            self._sweep()
        reader.waiting.pop(fragment, None)
        reader.holds.pop(fragment, None)
        if delta_of is not None:
            reader.holds[fragment] = delta_of
        chunks = versions.layout.chunks

        def have_of(version: VersionId) -> Bitmap:
            is_held = held is not None and held[0] == version
            return Bitmap.from_bytes(held[1], chunks) if held and is_held else Bitmap(chunks)

        if versions.version is not None and versions.version.counter > after:
            yield from self._start(reader, fragment, have_of(versions.version))
            return
        reader.waiting[fragment] = after
        in_progress = versions.in_progress
        if in_progress is not None and in_progress.version.counter > after:
            have = have_of(in_progress.version)
            download = Download(in_progress.version, chunks - len(have), delta_of)
            reader.downloads[fragment] = download
            for index, wire in enumerate(in_progress.wires):
                if wire is not None and index not in have:
                    download.is_ready(reader.lane_of(fragment, index), index)
            yield from self.pump(reader)

    def pump(self, reader: Reader) -> list[effects.Send]:
        """Send ready chunks within the credit."""
        sends: list[effects.Send] = []
        for fragment, download in list(reader.downloads.items()):
            versions = self.fragments[fragment]
            at = versions.at(download.version)
            for lane, outlet in reader.lanes.items():
                ready = download.ready.get(lane)
                while ready and outlet.credit > 0:
                    index = ready.popleft()
                    outlet.credit -= 1
                    download.left -= 1
                    reply = versions.reply(at, index, download.held)
                    reader.account.bytes_down += reply.payload.nbytes
                    self.bytes_down += reply.payload.nbytes
                    sends.append(effects.Send(outlet.route, reply.message, reply.payload))
            if not download.left:
                del reader.downloads[fragment]
                self._sweep()
        return sends

    def _start(self, reader: Reader, fragment: int, have: Bitmap) -> effects.Effects:
        versions = self[fragment]
        assert versions.version is not None
        reader.waiting.pop(fragment, None)
        missing = list(have.missing())
        held = reader.holds.get(fragment)
        download = reader.downloads[fragment] = Download(versions.version, len(missing), held)
        for index in missing:
            download.is_ready(reader.lane_of(fragment, index), index)
        yield effects.Send(reader.announce, self._released(fragment, reader))
        yield from self.pump(reader)

    def _released(self, fragment: int, reader: Reader) -> Released:
        record = self[fragment].record
        return Released(
            fragment=fragment,
            version=record.version,
            ledger=record.ledger,
            round=record.round,
            averaged=record.averaged,
            staleness=reader.account.staleness.get(fragment),
            progress=self.progress,
            loss=self.loss,
        )

    def _keep_if_read(self, versions: FragmentVersions) -> None:
        """Keep the current version, which is about to be replaced, if a reader has started with it."""
        chunks, fragment = versions.layout.chunks, versions.layout.fragment
        downloads = (reader.downloads.get(fragment) for reader in self.readers.values())
        is_read = any(
            d is not None and d.version == versions.version and d.left < chunks for d in downloads
        )
        if is_read and versions.current is not None and len(versions.old) < OLD_VERSIONS_KEPT:
            versions.old.append(versions.current)

    def _sweep(self) -> None:
        """Drop old versions that no reader needs any more."""
        for versions in self.fragments:
            if versions.old:
                fragment = versions.layout.fragment
                downloads = [reader.downloads.get(fragment) for reader in self.readers.values()]
                read = {download.version for download in downloads if download is not None}
                versions.old = [kept for kept in versions.old if kept.version in read]

    def check_invariants(self) -> None:
        """Raise AssertionError if a reader downloads a version that does not exist; for tests."""
        for reader in self.readers.values():
            assert all(outlet.credit >= 0 for outlet in reader.lanes.values())
            assert all(len(each.old) <= OLD_VERSIONS_KEPT for each in self.fragments)
            for fragment, download in reader.downloads.items():
                wires = self[fragment].at(download.version).wires
                ready = [index for each in download.ready.values() for index in each]
                assert all(wires[index] is not None for index in ready)
                assert len(ready) <= download.left
                for lane, queue in download.ready.items():
                    assert all(reader.lane_of(fragment, index) == lane for index in queue)
