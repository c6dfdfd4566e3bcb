"""The versions of one fragment: the current one, the one in progress, and old ones still being read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diloco_broker.core.versions.record import FragmentRecord
from diloco_broker.core.versions.reply import Chain, Reply
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.messages import Chunk, Push
from diloco_protocol.version import Ledger, VersionId

# Old versions of a fragment that are kept for slow readers; each takes as much memory as the fragment.
OLD_VERSIONS_KEPT = 2
# Tags of past versions that are kept for each fragment; each takes two numbers.
TAGS_KEPT = 1024
# Of these, tags in a checkpoint; fewer, since one is written each round.
TAGS_SAVED = 128


class Replies(dict[VersionId | None, dict[int, Reply]]):
    """Cached replies to the readers of a version: by the base of their deltas, then by chunk.

    Replies can be made again, so tapes leave them out: they have only the attributes of a class.
    """


@dataclass(frozen=True)
class WholeVersion:
    """A complete version: its record, and its chunks in wire form (`wires`)."""

    record: FragmentRecord
    wires: tuple[Any, ...]
    replies: Replies = field(default_factory=Replies, compare=False)

    @property
    def version(self) -> VersionId:
        return self.record.version


@dataclass
class VersionInProgress:
    """A version in progress: its chunks so far."""

    version: VersionId
    gradients: int  # number of gradients that the outer optimizer will have received with it
    wires: list[Any]
    codes: list[Any]  # of the same chunks, if replies are quantized
    left: int
    replies: Replies = field(default_factory=Replies)


@dataclass
class FragmentVersions:
    """The current version of a fragment, the one in progress, and old ones that are still read."""

    layout: FragmentLayout
    current: WholeVersion | None = None
    in_progress: VersionInProgress | None = None
    old: list[WholeVersion] = field(default_factory=list)
    contributions: int = 0  # complete ones in its versions since the broker started
    tags: dict[int, int] = field(default_factory=dict)  # of its last versions, by counter
    chain: Chain = field(default_factory=Chain)  # codes of its last versions

    @property
    def record(self) -> FragmentRecord:
        """The record of the current version, which must exist."""
        assert self.current is not None
        return self.current.record

    @property
    def version(self) -> VersionId | None:
        return self.current.version if self.current else None

    @property
    def wires(self) -> tuple[Any, ...]:
        return self.current.wires if self.current else ()

    def at(self, version: VersionId) -> VersionInProgress | WholeVersion:
        """The version in progress, the current one, or an old one with this id, which must exist."""
        for each in (self.in_progress, self.current, *self.old):
            if each is not None and each.version == version:
                return each
        raise AssertionError("a reader is at a version that is not kept")

    def reply(
        self, at: VersionInProgress | WholeVersion, index: int, held: VersionId | None
    ) -> Reply:
        """A chunk of a version for readers that hold `held`, which share one object."""
        if held is not None and self.chain.between(held, at.version) is None:
            held = None  # a peer may claim any version
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
        """Number of gradients that the outer optimizer has received, including those in progress."""
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
        """The version with this counter on this broker's branch."""
        assert self.version is not None
        return VersionId(self.version.run, counter, self.tags[counter])

    def is_of_another_branch(self, version: VersionId) -> bool:
        """Whether this broker had another version with this counter; False if it was too long ago."""
        return self.tags.get(version.counter, version.tag) != version.tag

    def staleness(self, push: Push) -> int:
        """Number of versions released since the base of a push."""
        if self.version is None or push.base is None:
            return 0
        return max(0, self.version.counter - push.base.counter)
