"""The versions of one fragment: the current one, the one being made, old ones that are still read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diloco_broker.core.versions.record import FragmentRecord
from diloco_broker.core.versions.reply import Chain, Reply
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import Chunk, Push
from diloco_protocol.version import Ledger, VersionId

# Old versions of a fragment that are kept until their readers are done.
OLD_VERSIONS_KEPT = 2
# Names of versions that are remembered, of each fragment: two numbers each.
TAGS_KEPT = 1024
# And in a checkpoint, which is written each round.
TAGS_SAVED = 128


class Replies(dict[VersionId | None, dict[int, Reply]]):
    """What the readers of a version are sent: by the version that they hold and take deltas from, each
    chunk.

    They can be made again, so a tape has none of them: of a class it has the attributes.
    """


@dataclass(frozen=True)
class WholeVersion:
    """A version of which every chunk is there: `wires`, in wire form, and what is known of it."""

    record: FragmentRecord
    wires: tuple[Any, ...]
    replies: Replies = field(default_factory=Replies, compare=False)

    @property
    def version(self) -> VersionId:
        return self.record.version


@dataclass
class VersionInProgress:
    """A version that is being made: its chunks so far."""

    version: VersionId
    gradients: int  # that the outer optimizer has had of the fragment when it is done
    wires: list[Any]
    codes: list[Any]  # of the same chunks, where replies are in few bits
    left: int
    replies: Replies = field(default_factory=Replies)


@dataclass
class FragmentVersions:
    """One fragment: its current version, the one being made, and old ones that are still read."""

    layout: FragmentLayout
    current: WholeVersion | None = None
    in_progress: VersionInProgress | None = None
    old: list[WholeVersion] = field(default_factory=list)
    contributions: int = 0  # whole ones in its versions since the broker started
    tags: dict[int, int] = field(default_factory=dict)  # of its last versions, by counter
    chain: Chain = field(default_factory=Chain)  # of the last versions

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

    def at(self, version: VersionId) -> VersionInProgress | WholeVersion:
        """One of those that are kept."""
        for each in (self.in_progress, self.current, *self.old):
            if each is not None and each.version == version:
                return each
        raise AssertionError("a reader is at a version that is not kept")

    def reply(
        self, at: VersionInProgress | WholeVersion, index: int, held: VersionId | None
    ) -> Reply:
        """A chunk of a version as it goes to readers that hold this one: one object for all of them."""
        if held is not None and self.chain.between(held, at.version) is None:
            held = None  # a peer may name anything
        made = at.replies.setdefault(held, {})
        reply = made.get(index)
        if reply is None:
            whole = Chunk(self.layout.fragment, index, version=at.version)
            reply = made[index] = self.chain.reply(at.wires[index], whole, held)
        return reply

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
