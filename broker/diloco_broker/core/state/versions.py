"""The versions that are handed out, and those who read them.

A reader says how many chunks it can take. This credit binds before any of ZeroMQ's high-water marks, so
a slow reader holds a few chunk references and never a copy of the model.

The store keeps, for each fragment, the current version (whole, never written again) and the one that is
being made. A reader that waits for the next version gets its chunks as they become ready. When a newer
version is released, a reader that has begun with the older one goes on with it: a link that needs longer
for a version than the next one takes to come would never have any otherwise. So that slow readers cost
no more than `OLD_VERSIONS_KEPT` old versions, others that are behind are moved to the newer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco_broker.core import effects
from diloco_broker.core.state.run_record import FragmentRecord
from diloco_broker.core.state.uploads import Account
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import Chunk, Progress, Push, Released
from diloco_protocol.version import Ledger, VersionId

# More credit than this is not believed, of a worker and of a reader that has not joined: chunks that
# were sent and not read are memory, also when newer versions have taken their place. Ours use 16,
# enough for 1 Gb/s with a round trip of 100 ms. (ZeroMQ's high-water mark is 1000 messages.)
MAX_READER_CREDIT = 64
MAX_OBSERVER_CREDIT = 16
# Seconds after which a reader in the middle of a version is given up, if it has used up its credit and
# asks for nothing: one that has not joined, and a worker. Ours give credit after four chunks of 2 MiB:
# 0.6 Mb/s.
OBSERVER_GOES_ON_WITHIN_S = 120.0
WORKER_GOES_ON_WITHIN_S = 300.0
# Old versions of a fragment that are kept until their readers are done.
OLD_VERSIONS_KEPT = 2
# Names of versions that are remembered, of each fragment: two numbers each.
TAGS_KEPT = 1024
# And in a checkpoint, which is written each round.
TAGS_SAVED = 128
# Readers that have not joined; more are refused.
MAX_OBSERVERS = 256


# The lane of chunks that belong to none which is bound.
NO_LANE = -1


def lane_credit(lanes: int) -> int:
    """Chunks that a worker may have on their way on each of so many connections."""
    return max(4, MAX_READER_CREDIT // lanes)


@dataclass
class Download:
    """One reader at one version of one fragment."""

    version: VersionId
    left: int  # chunks not sent yet, ready or not
    # By lane, the chunks that can be sent now.
    ready: dict[int, deque[int]] = field(default_factory=dict)

    def is_ready(self, lane: int, index: int) -> None:
        """This chunk can be sent on this lane."""
        self.ready.setdefault(lane, deque()).append(index)


@dataclass
class Outlet:
    """One connection of a reader: how many chunks it takes now."""

    route: effects.Route
    credit: int = 0


@dataclass
class Reader:
    """Somebody who takes chunks. `announce` is where its `released` goes.

    A worker of several processes takes them on several connections, its *lanes*, each of which has a
    share of the chunks. All others have lane 0 alone, which has all of them.
    """

    route: effects.Route  # of lane 0
    announce: effects.Route
    account: Account
    joined: bool
    heard_at: float  # when it last asked for something
    lanes: dict[int, Outlet] = field(default_factory=dict)
    lane_map: list[list[int]] | None = (
        None  # by fragment, the lane of each chunk; None: it is lane 0
    )
    probed_at: float = 0.0
    downloads: dict[int, Download] = field(default_factory=dict)  # by fragment
    waiting: dict[int, int] = field(default_factory=dict)  # fragment -> counter that it has

    def has_stopped(self, now: float) -> bool:
        """It does not go on with a version that it has begun."""
        within = WORKER_GOES_ON_WITHIN_S if self.joined else OBSERVER_GOES_ON_WITHIN_S
        lacks_credit = any(
            each.ready.get(lane)
            for lane, outlet in self.lanes.items()
            if not outlet.credit
            for each in self.downloads.values()
        )
        return lacks_credit and now - self.heard_at > within

    @property
    def credit(self) -> int:
        """Chunks that it takes now, on all its connections."""
        return sum(outlet.credit for outlet in self.lanes.values())

    def lane_of(self, fragment: int, index: int) -> int:
        """The lane of a chunk; `NO_LANE` while it is not bound."""
        return 0 if self.lane_map is None else self.lane_map[fragment][index]

    def give(self, fragment: int, lane: int, share: Bitmap) -> None:
        """These chunks come on this lane, but for those that another has already."""
        assert self.lane_map is not None
        owners = self.lane_map[fragment]
        for index in share:
            if owners[index] == NO_LANE:
                owners[index] = lane
        download = self.downloads.get(fragment)
        waiting = download.ready.pop(NO_LANE, ()) if download is not None else ()
        for index in waiting:
            assert download is not None
            download.is_ready(owners[index], index)


@dataclass(frozen=True)
class WholeVersion:
    """A version of which every chunk is there: `wires`, in wire form, and what is known of it."""

    record: FragmentRecord
    wires: tuple[Any, ...]

    @property
    def version(self) -> VersionId:
        return self.record.version


@dataclass
class VersionInProgress:
    """A version that is being made: its chunks so far."""

    version: VersionId
    gradients: int  # that the outer optimizer has had of the fragment when it is done
    wires: list[Any]
    left: int


@dataclass
class FragmentVersions:
    """One fragment: its current version, the one being made, and old ones that are still read."""

    layout: FragmentLayout
    current: WholeVersion | None = None
    in_progress: VersionInProgress | None = None
    old: list[WholeVersion] = field(default_factory=list)
    contributions: int = 0  # whole ones in its versions since the broker started
    tags: dict[int, int] = field(default_factory=dict)  # of its last versions, by counter

    @property
    def record(self) -> FragmentRecord:
        """Of the current version, which there must be."""
        assert self.current is not None
        return self.current.record

    @property
    def version(self) -> VersionId | None:
        return self.current.version if self.current else None

    @property
    def wires(self) -> tuple[Any, ...]:
        return self.current.wires if self.current else ()

    @property
    def ledger(self) -> Ledger:
        return self.current.record.ledger if self.current else Ledger()

    @property
    def gradients(self) -> int:
        """How many the outer optimizer has had of it, those being applied included."""
        if self.in_progress is not None:
            return self.in_progress.gradients
        return self.current.record.gradients if self.current else 0

    def set_current(self, whole: WholeVersion) -> None:
        self.current = whole
        self.tags.update(whole.record.tags)
        self.tags[whole.version.counter] = whole.version.tag
        while len(self.tags) > TAGS_KEPT:
            del self.tags[next(iter(self.tags))]

    def newest_tags(self) -> dict[int, int]:
        return dict(list(self.tags.items())[-TAGS_SAVED:])

    def name_of(self, counter: int) -> VersionId:
        """The version of this broker's branch that has this counter."""
        assert self.version is not None
        return VersionId(self.version.run, counter, self.tags[counter])

    def is_of_another_branch(self, version: VersionId) -> bool:
        """Has this broker another version with the same counter? False where it is too long ago."""
        return self.tags.get(version.counter, version.tag) != version.tag

    def staleness(self, push: Push) -> int:
        """Versions released since the one that a push starts from."""
        if self.version is None or push.base is None:
            return 0
        return max(0, self.version.counter - push.base.counter)


class VersionStore:
    """Versions of all fragments and the readers of them. Methods yield the sends that follow."""

    def __init__(self) -> None:
        self.fragments: list[FragmentVersions] = []
        self.readers: dict[effects.Route, Reader] = {}
        self.bytes_down = 0
        # Told with each version: how far the run is, and the mean loss of its workers.
        self.progress = Progress()
        self.loss: float | None = None

    def set_layout(self, layouts: tuple[FragmentLayout, ...]) -> None:
        """Make room for a model: one `FragmentVersions` for each fragment, the frozen one last."""
        self.fragments = [FragmentVersions(layout) for layout in layouts]

    def __getitem__(self, fragment: int) -> FragmentVersions:
        return self.fragments[fragment]

    @property
    def trained(self) -> list[FragmentVersions]:
        """Those that rounds make versions of: all but the frozen one."""
        return self.fragments[:-1]

    # Making versions.

    def make(self, fragment: int, version: VersionId, gradients: int) -> None:
        """Begin a version. Readers that wait for one follow it from now on."""
        versions = self[fragment]
        chunks = versions.layout.chunks
        versions.in_progress = VersionInProgress(version, gradients, [None] * chunks, chunks)
        for reader in self.readers.values():
            after = reader.waiting.get(fragment)
            if after is not None and after < version.counter:
                reader.downloads[fragment] = Download(version, chunks)

    def install(self, fragment: int, whole: WholeVersion) -> None:
        """This version is the first one of its fragment."""
        versions = self[fragment]
        assert versions.current is None and versions.in_progress is None
        versions.set_current(whole)

    def serve_waiting(self) -> effects.Effects:
        """Start the readers that have waited for a version which is here now."""
        for reader in list(self.readers.values()):
            for fragment, after in list(reader.waiting.items()):
                version = self[fragment].version
                if version is not None and version.counter > after:
                    chunks = self[fragment].layout.chunks
                    yield from self._start(reader, fragment, Bitmap(chunks))

    def chunk_ready(self, fragment: int, index: int, wire: Any) -> effects.Effects:
        in_progress = self[fragment].in_progress
        assert in_progress is not None and in_progress.wires[index] is None
        in_progress.wires[index] = wire
        in_progress.left -= 1
        for reader in self.readers.values():
            download = reader.downloads.get(fragment)
            if download is not None and download.version == in_progress.version:
                download.is_ready(reader.lane_of(fragment, index), index)
                yield from self.pump(reader)

    def release(self, fragment: int, record: FragmentRecord) -> effects.Effects:
        """The version being made is whole: it becomes the current one."""
        versions = self[fragment]
        in_progress = versions.in_progress
        assert in_progress is not None and in_progress.left == 0
        self._keep_what_is_read(versions)
        versions.set_current(WholeVersion(record, tuple(in_progress.wires)))
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
        """The reader on a connection, made if it is new; the account is that of one that has joined."""
        if route not in self.readers:
            joined = account is not None
            made = Reader(route, announce, account or Account(), joined, now)
            made.lanes[0] = Outlet(route)
            self.readers[route] = made
        return self.readers[route]

    def add_credit(
        self, reader: Reader, chunks: int, now: float, lane: int = 0, lanes: int = 1
    ) -> effects.Effects:
        """A reader can take more on one of its `lanes`."""
        most = lane_credit(lanes) if reader.joined else MAX_OBSERVER_CREDIT
        outlet = reader.lanes[lane]
        outlet.credit = min(outlet.credit + max(0, chunks), most)
        reader.heard_at = now
        yield from self.pump(reader)

    def bind(
        self, reader: Reader, lane: int, route: effects.Route, shares: Sequence[Bitmap]
    ) -> None:
        """A lane of a worker of several processes: what it takes comes on this connection."""
        if reader.lane_map is None:
            reader.lane_map = [[NO_LANE] * each.layout.chunks for each in self.fragments]
        reader.lanes[lane] = Outlet(route)
        for fragment, share in enumerate(shares):
            reader.give(fragment, lane, share)

    def given_up(self, now: float) -> list[Reader]:
        """Those that have begun with a version, have had what they had credit for, and ask no more."""
        return [reader for reader in self.readers.values() if reader.has_stopped(now)]

    def forget(self, route: effects.Route | None) -> None:
        """Whoever reads on this connection does so no more, nor on any other of its own."""
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
        self, reader: Reader, fragment: int, after: int, held: tuple[VersionId, bytes] | None
    ) -> effects.Effects:
        """Give a reader the newest version above `after`, now or when there is one."""
        versions = self[fragment]
        if reader.downloads.pop(fragment, None) is not None:
            self._sweep()
        reader.waiting.pop(fragment, None)
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
            download = Download(in_progress.version, chunks - len(have))
            reader.downloads[fragment] = download
            for index, wire in enumerate(in_progress.wires):
                if wire is not None and index not in have:
                    download.is_ready(reader.lane_of(fragment, index), index)
            yield from self.pump(reader)

    def pump(self, reader: Reader) -> effects.Effects:
        """Send what is ready while there is credit."""
        for fragment, download in list(reader.downloads.items()):
            wires = self._wires(fragment, download.version)
            for lane, outlet in reader.lanes.items():
                ready = download.ready.get(lane)
                while ready and outlet.credit > 0:
                    index = ready.popleft()
                    outlet.credit -= 1
                    download.left -= 1
                    reader.account.bytes_down += wires[index].nbytes
                    self.bytes_down += wires[index].nbytes
                    message = Chunk(fragment, index, version=download.version)
                    yield effects.Send(outlet.route, message, wires[index])
            if not download.left:
                del reader.downloads[fragment]
                self._sweep()

    def _start(self, reader: Reader, fragment: int, have: Bitmap) -> effects.Effects:
        versions = self[fragment]
        assert versions.version is not None
        reader.waiting.pop(fragment, None)
        missing = list(have.missing())
        download = reader.downloads[fragment] = Download(versions.version, len(missing))
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

    def _wires(self, fragment: int, version: VersionId) -> Any:
        versions = self[fragment]
        if versions.in_progress is not None and versions.in_progress.version == version:
            return versions.in_progress.wires
        if versions.version == version:
            return versions.wires
        found = [kept.wires for kept in versions.old if kept.version == version]
        assert found, "a reader is at a version that is not kept"
        return found[0]

    def _keep_what_is_read(self, versions: FragmentVersions) -> None:
        """The current version will be an old one: keep it for readers that have begun with it."""
        chunks, fragment = versions.layout.chunks, versions.layout.fragment
        downloads = (reader.downloads.get(fragment) for reader in self.readers.values())
        is_read = any(
            d is not None and d.version == versions.version and d.left < chunks for d in downloads
        )
        if is_read and versions.current is not None and len(versions.old) < OLD_VERSIONS_KEPT:
            versions.old.append(versions.current)

    def _sweep(self) -> None:
        """Let go of old versions that nobody reads any more."""
        for versions in self.fragments:
            if versions.old:
                fragment = versions.layout.fragment
                downloads = [reader.downloads.get(fragment) for reader in self.readers.values()]
                read = {download.version for download in downloads if download is not None}
                versions.old = [kept for kept in versions.old if kept.version in read]

    def check_invariants(self) -> None:
        """Raise AssertionError when a reader is at a version that does not exist; for tests."""
        for reader in self.readers.values():
            assert all(outlet.credit >= 0 for outlet in reader.lanes.values())
            assert all(len(each.old) <= OLD_VERSIONS_KEPT for each in self.fragments)
            for fragment, download in reader.downloads.items():
                wires = self._wires(fragment, download.version)
                ready = [index for each in download.ready.values() for index in each]
                assert all(wires[index] is not None for index in ready)
                assert len(ready) <= download.left
                for lane, queue in download.ready.items():
                    assert all(reader.lane_of(fragment, index) == lane for index in queue)
