"""The ports of the ranks of one worker: each runs the same boundary, in lockstep.

The leader polls its link and broadcasts the result, so all ranks decide alike; each of them freezes,
offers and merges its own share of the model. A failure of one is a failure of the worker: which part of
the model is ahead is unknown, so all of them end, and resume from the script's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any, TypeVar

from diloco_protocol import RunConfig, UsageError
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Progress, Push
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.spread.ranks import STEP, GroupBroken, Ranks
from diloco_worker.model.spread.saved_share import with_vectors
from diloco_worker.model.spread.spread_tensors import SpreadTensors
from diloco_worker.ports import LocalPorts, RunFacts
from diloco_worker.saved_state import Plain
from diloco_worker.session.connection import Phase
from diloco_worker.session.news import Arrival, LinkState, News, Poll, Rejection, Work
from diloco_worker.sync.fragment import Merge
from diloco_worker.sync.ports import NonFinite
from diloco_worker.sync.state import HASTY_S
from diloco_worker.transport.between_ranks import Codec, Followers
from diloco_worker.transport.follower import Follower

# Seconds between polls of a waiting leader: far below the timeout of collectives.
POLL_EVERY_S = 20.0
# Seconds for the leader to leave, besides those that it waits for pushes in flight.
LEADER_LEAVES_WITHIN_S = 10.0

T = TypeVar("T")


@dataclass(eq=False, repr=False, kw_only=True)
class GroupPorts(LocalPorts):
    """The ports that leader and followers share."""

    ranks: Ranks

    def __post_init__(self) -> None:
        super().__post_init__()
        self._others = Work()  # what the other ranks have reported
        self._facts = RunFacts()  # as of the last poll
        self._is_asked = False  # a rank of this worker is to end

    def meet(self, call: str) -> None:
        if call == STEP:
            self._is_asked = self.ranks.meet(STEP, float(self.termination.is_asked)) > 0
        else:
            self.ranks.meet(call)

    @property
    def facts(self) -> RunFacts:
        reason = self._facts.stop_reason
        if self._is_asked and not self._facts.is_over:
            reason = "SIGTERM asks a process of this worker to end"
        return replace(self._facts, stop_reason=reason)

    @property
    def is_asked(self) -> bool:
        return self._is_asked

    def set_base(
        self, fragment: int, base: FlatState | None, came_as: FlatState | None = None
    ) -> None:
        # With None the model has the values, but no rank can read its share of them alone.
        if base is not None:
            super().set_base(fragment, base, came_as)

    def has_news(self) -> bool:
        return True  # only the leader knows, and all of them poll together

    def checksums(self) -> Mapping[str, tuple[int, ...]]:
        problem: str | None = None
        sums: Mapping[str, tuple[int, ...]] = {}
        try:
            sums = super().checksums()
        except (UsageError, GroupBroken) as error:  # of this rank, or of another one
            problem = str(error)
        for found in self.ranks.gather(problem):
            if found is not None:
                raise UsageError(found)
        return sums

    def to_save(self, plain: Plain) -> Plain:
        assert isinstance(self.tensors, SpreadTensors)
        # The leader may have left later than the others, and know more of the broker.
        common = self.ranks.broadcast(_without_vectors(plain) if self.ranks.leads else None)
        own = plain if self.ranks.leads else _with_own(common, plain)
        return self.tensors.shared_out(own, self.reports.counts)

    def of_leader(self, find: Callable[[], T]) -> T:
        # Without values of tensors.
        found: T
        if self.ranks.leads:
            found = find()
            self.ranks.broadcast(CODEC.packed(found))
        else:
            found = CODEC.unpacked(self.ranks.broadcast())
        return found

    def values_of(self, arrival: Arrival) -> FlatState | None:
        """This rank's share."""
        if arrival.values == ELSEWHERE:
            return self.link.buffers.share_of(arrival.released.fragment, arrival.version)
        return super().values_of(arrival)

    def check_model(self) -> None:
        watch = self.tensors.watch
        for found in self.ranks.gather(watch.look() if watch is not None else None):
            if found is not None:
                self.trouble(found)
                return

    async def freeze(self, push: Push) -> Push | NonFinite:
        try:
            return await super().freeze(push)
        except GroupBroken:
            raise
        except Exception as error:
            raise GroupBroken(f"The model of this worker could not be changed: {error}") from error

    async def merge(self, fragment: int, merge: Merge, step: int) -> None:
        try:
            self.fragments[fragment].apply(merge, step)
        except GroupBroken:
            raise
        except Exception as error:
            raise GroupBroken(
                f"The model of this worker could not take in what came: {error!r}"
            ) from error

    def read_reports(self) -> Work:
        mine = super().read_reports()
        has_loss = mine.loss is not None
        sums = self.ranks.total([mine.tokens, mine.samples, mine.loss or 0.0, float(has_loss)])
        loss = sums[2] / sums[3] if sums[3] else None
        self._others = Work(0, int(sums[0]) - mine.tokens, int(sums[1]) - mine.samples, loss)
        return self._totals

    @property
    def _totals(self) -> Work:
        """The reports of all ranks; their loss is the mean of those that have one."""
        mine, others = self.reports.totals, self._others
        loss = mine.loss if others.loss is None else others.loss
        return Work(0, mine.tokens + others.tokens, mine.samples + others.samples, loss)


class LeaderPorts(GroupPorts):
    """The ports of rank 0, which has the session with the broker."""

    def poll(self) -> Poll:
        found = replace(super().poll(), totals=self._totals)
        self._facts = super(GroupPorts, self).facts
        if not self.has_left:
            self.ranks.broadcast(CODEC.packed([found, self._facts]))
        return found

    async def wait(self, seconds: float) -> Poll:
        self._listen(seconds if self.has_left else min(seconds, POLL_EVERY_S))
        if (lost := self._lost) is not None:
            raise GroupBroken(f"{lost}: the others cannot go on without it.")
        return self.poll()

    @property
    def _has_changed(self) -> bool:
        return self._lost is not None or super()._has_changed

    @property
    def _lost(self) -> str | None:
        """A sentence once another rank is gone, unless all of them are leaving."""
        assert isinstance(self.link.others, Followers)
        return None if self.has_left else self.link.others.lost

    def leave(self, *, hasty: bool) -> None:
        """The others wait until this process has left, and hear nothing over the group any more."""
        super().leave(hasty=hasty)
        assert isinstance(self.link.others, Followers)
        self.link.others.last = CODEC.packed([asdict(self.metrics), self._facts])


class FollowerPorts(GroupPorts):
    """The ports of the other ranks: the leader handles the broker, the log and the displays."""

    def poll(self) -> Poll:
        found: Poll
        found, self._facts = CODEC.unpacked(self.ranks.broadcast())
        link, terms = self.link, self.link.terms
        link.stopping, link.last_error = found.link.over, found.link.last_error or link.last_error
        if terms is not None and terms.config != found.link.config:
            link.terms = replace(terms, config=found.link.config)
        return found

    async def wait(self, seconds: float) -> Poll:
        return self.poll()  # the leader polls again when it has waited

    async def merge(self, fragment: int, merge: Merge, step: int) -> None:
        arrival, mine = merge.arrival, merge
        if arrival is not None:
            mine = replace(merge, arrival=replace(arrival, values=self.values_of(arrival)))
        try:
            await super().merge(fragment, mine, step)
        finally:  # an interrupted one has begun here, too
            merge.change, merge.is_applied = mine.change, mine.is_applied

    def log(self, text: str, *, is_warning: bool = False) -> None:
        """The leader logs it."""

    def trouble(self, text: str, cause: BaseException | None = None) -> None:
        self.link.last_error = text  # the leader logs it

    def leave(self, *, hasty: bool) -> None:
        """The leader waits for pushes in flight, some of them over the connection of this rank.

        It may have left before this rank came here; its last message is counted nevertheless.
        """
        self.has_left = True
        patience = HASTY_S if hasty else self.settings.timeout
        self.link.wait_for(lambda: False, patience + LEADER_LEAVES_WITHIN_S)
        assert isinstance(self.link.session, Follower)
        if last := self.link.session.last:
            counts, self._facts = CODEC.unpacked(last)
            for name, value in counts.items():
                setattr(self.metrics, name, value)


# What the leader broadcasts instead of tensors.
ELSEWHERE = "this rank's share is in its own buffers"


class _WithoutTensors(Codec):
    """Values of tensors are never sent: each rank has its own share."""

    def _extension(self, value: Any) -> Any:
        return ELSEWHERE if isinstance(value, FlatState) else super()._extension(value)


CODEC = _WithoutTensors(
    *(Poll, News, Arrival, Rejection, Bitmap, LinkState, Phase, frozenset),
    *(RunConfig, Work, RunFacts, Progress),
)


def _without_vectors(plain: Plain) -> Plain:
    """The part of a saved state that all ranks share."""

    def nothing(_: object) -> None:
        return None

    fragments = [with_vectors([each], nothing, nothing) for each in plain["fragments"]]
    return {**plain, "fragments": fragments, "checksums": {}}


def _with_own(common: Plain, own: Plain) -> Plain:
    """That part, with the vectors of this rank."""
    pairs = zip(common["fragments"], own["fragments"], strict=True)
    last = itemgetter(-1)
    fragments = [with_vectors(pair, last, last) for pair in pairs]
    return {**common, "fragments": fragments, "checksums": own["checksums"]}
