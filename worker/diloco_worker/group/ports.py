"""The ports of the ranks of one worker: each runs the same boundary, in lockstep.

The leader polls its link and broadcasts what it found, so all ranks decide alike; each of them freezes,
offers and merges its own share of the model. A failure at one of them is a failure of the worker: it is
unknown which part of the model is ahead, so all of them end, and go on from the script's checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import msgpack

from diloco_protocol import ModelLayout, RunConfig, UsageError
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.messages import Heartbeat, Progress, Push, Released, decode, encode
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.spread.ranks import STEP, GroupBroken, Ranks
from diloco_worker.model.spread.saved_share import OF_FLIGHT
from diloco_worker.model.spread.spread_tensors import SpreadTensors
from diloco_worker.ports import LocalPorts, RunFacts
from diloco_worker.saved_state import Plain, SavedFragment
from diloco_worker.session.compatibility import Terms
from diloco_worker.session.connection import Phase
from diloco_worker.session.events import Event, TakeUnits
from diloco_worker.session.news import Arrival, LinkState, News, Poll, Rejection, Turning, Work
from diloco_worker.sync.fragment import InFlight, Merge
from diloco_worker.sync.metrics import SyncMetrics
from diloco_worker.sync.patience import HASTY_S
from diloco_worker.sync.ports import NonFinite
from diloco_worker.transport.lanes.lane import LaneThread

# Seconds after which a waiting leader polls: far less than a collective of torch.distributed waits.
POLL_EVERY_S = 20.0
# Seconds that the leader may take to leave, besides those that it waits for what is in flight.
LEADER_LEAVES_WITHIN_S = 10.0

T = TypeVar("T")


@dataclass(eq=False, repr=False, kw_only=True)
class GroupPorts(LocalPorts):
    """What the leader and its followers have in common."""

    ranks: Ranks
    metrics: SyncMetrics
    timeout: float  # seconds that a worker may take to leave

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
        # The leader may have left, and heard more of the broker since than the others.
        common = self.ranks.broadcast(without_vectors(plain) if self.ranks.leads else None)
        own = plain if self.ranks.leads else with_vectors(common, plain)
        return self.tensors.shared_out(own, self.reports.counts)

    def draw(self) -> int:
        drawn: int = self.ranks.broadcast(super().draw() if self.ranks.leads else None)
        return drawn

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
        """What all ranks have reported; their loss is the mean of those that have one."""
        mine, others = self.reports.totals, self._others
        loss = mine.loss if others.loss is None else others.loss
        return Work(0, mine.tokens + others.tokens, mine.samples + others.samples, loss)


class LeaderPorts(GroupPorts):
    """The ports of rank 0, which has the session with the broker."""

    _is_leaving = False

    def link_state(self) -> LinkState:
        state = super().link_state()
        self.ranks.broadcast(_plain_link(state))
        return state

    def take(self, fragments: Sequence[int]) -> list[Arrival]:
        arrivals = super().take(fragments)
        self.ranks.broadcast([_plain_arrival(each) for each in arrivals])
        return arrivals

    def poll(self) -> Poll:
        found = replace(super().poll(), totals=self._totals)
        self._facts = super(GroupPorts, self).facts
        if not self._is_leaving:
            self.ranks.broadcast([*_plain_poll(found), asdict(self._facts)])
        return found

    def offer(self, in_flight: InFlight, *, is_new: bool) -> int:
        reconnections = super().offer(in_flight, is_new=is_new)
        self.ranks.broadcast(reconnections)
        return reconnections

    async def wait(self, seconds: float) -> Poll:
        self._listen(seconds if self._is_leaving else min(seconds, POLL_EVERY_S))
        if self._has_lost_a_rank:
            raise GroupBroken(f"{self.link.lost_process}: the others cannot go on without it.")
        return self.poll()

    @property
    def _has_changed(self) -> bool:
        return self._has_lost_a_rank or super()._has_changed

    @property
    def _has_lost_a_rank(self) -> bool:
        return self.link.lost_process is not None and not self._is_leaving

    def leave(self, *, hasty: bool) -> None:
        """The others wait until this process has left, and hear nothing over the group any more."""
        self._is_leaving = True
        super().leave(hasty=hasty)
        last = {"metrics": asdict(self.metrics), "facts": asdict(self._facts)}
        self.link.say_at_the_end(msgpack.packb(last))


class FollowerPorts(GroupPorts):
    """The ports of the other ranks: the leader speaks to the broker, the script's log and displays."""

    @property
    def lane_link(self) -> LaneLink:
        link: Any = self.link
        assert isinstance(link, LaneLink)
        return link

    @property
    def lane(self) -> LaneThread:
        return self.lane_link.lane

    def link_state(self) -> LinkState:
        self._shown = _link_of(self.ranks.broadcast())
        return self._shown

    def take(self, fragments: Sequence[int]) -> list[Arrival]:
        return [_arrival_of(each) for each in self.ranks.broadcast()]

    def values_of(self, arrival: Arrival) -> FlatState | None:
        if arrival.values is None:
            return None
        return self.lane.take(arrival.released.fragment, arrival.version)

    def stand_on(
        self, saved: Sequence[SavedFragment], layout: ModelLayout, config: RunConfig
    ) -> None:
        assert self.lane.buffers is not None
        for fragment, each in enumerate(saved):
            self.lane.buffers.stand_on(fragment, each.base.version, each.values)
        super().stand_on(saved, layout, config)

    def set_base(
        self, fragment: int, base: FlatState | None, came_as: FlatState | None = None
    ) -> None:
        assert self.lane.buffers is not None
        if base is not None:
            self.lane.buffers.set_base(fragment, base, came_as)

    def poll(self) -> Poll:
        news, link, totals, facts = self.ranks.broadcast()
        self._facts = _facts_of(facts)
        self._shown = _link_of(link)
        self.lane_link.polled(self._shown)
        return Poll(_news_of(news), self._shown, Work(*totals))

    async def wait(self, seconds: float) -> Poll:
        return self.poll()  # the leader polls again when it has waited

    def offer(self, in_flight: InFlight, *, is_new: bool) -> int:
        delta = self.fragments[in_flight.push.fragment].delta
        assert delta is not None
        self.lane.lay_out(in_flight.push_id, delta.wire)
        reconnections: int = self.ranks.broadcast()
        return reconnections

    async def merge(self, fragment: int, merge: Merge, step: int) -> None:
        arrival = merge.arrival
        if arrival is not None:
            merge = replace(merge, arrival=replace(arrival, values=self.values_of(arrival)))
        await super().merge(fragment, merge, step)

    def log(self, text: str, *, is_warning: bool = False) -> None:
        """The leader logs it."""

    def trouble(self, text: str, cause: BaseException | None = None) -> None:
        self.lane_link.leader_error = text  # the leader logs it

    def leave(self, *, hasty: bool) -> None:
        """The leader waits for what is in flight; some of it goes over the connection of this rank.

        It may have left before this rank came here: its last word is counted all the same.
        """
        self.has_left = True
        patience = HASTY_S if hasty else self.timeout
        self.lane.wait_for_the_end(patience + LEADER_LEAVES_WITHIN_S)
        if self.lane.last_word:
            last = msgpack.unpackb(self.lane.last_word)
            self._facts = _facts_of(last["facts"])
            for name, value in last["metrics"].items():
                setattr(self.metrics, name, value)


class LaneLink:
    """What a follower has instead of a link to the broker: its lane, and what the leader polled."""

    def __init__(self, lane: LaneThread) -> None:
        self.lane = lane
        self.terms: Terms | None = None  # until the leader broadcasts them
        self.shard: tuple[int, int] | None = None
        self.progress: Heartbeat | None = None  # the leader sends its own
        self.bytes_up = self.bytes_down = self.retries = self.reconnections = 0
        self.own_error: str | None = None
        self.leader_error: str | None = None
        self.stopping: str | None = None  # why the run is over
        self.dropped_units: dict[str, Any] = {}
        self.results: dict[int, Any] = {}

    @property
    def config(self) -> RunConfig | None:
        return self.terms.config if self.terms else None

    @property
    def layout(self) -> ModelLayout | None:
        return self.terms.layout if self.terms else None

    @property
    def last_error(self) -> str | None:
        return self.own_error or self.lane.last_error or self.leader_error

    @last_error.setter
    def last_error(self, text: str | None) -> None:
        self.own_error = text

    @property
    def has_ended(self) -> bool:
        return self.lane.has_ended

    def polled(self, link: LinkState) -> None:
        """The leader's link stands like this."""
        self.stopping, self.leader_error = link.over, link.last_error
        if self.terms is not None and self.terms.config != link.config:
            self.terms = replace(self.terms, config=link.config)

    def tell(self, event: Event) -> None:
        """Only the leader speaks to the broker; raises UsageError for what only it may ask for."""
        if isinstance(event, TakeUnits):
            raise UsageError(
                "Units of a work queue are handed to the first process of a worker; take them there, "
                "and give them to the others with torch.distributed."
            )

    def wake(self) -> None:
        """Nothing waits here that a signal could wake: the leader's word ends the waiting."""

    def close(self, reason: str, patience: float) -> None:
        self.lane.close(patience)


# What the leader broadcasts, as plain values. Values of tensors never travel there: each rank has its
# own share of them.

ELSEWHERE = "this rank's share is in its lane"


def _plain_poll(found: Poll) -> list[Any]:
    news, totals = found.news, found.totals
    return [
        [
            [encode(each) for each in news.turns],
            [_plain_arrival(each) for each in news.arrivals.values()],
            [
                [push_id, each.code, each.text, _plain_bitmap(each.counted)]
                for push_id, each in news.rejections.items()
            ],
        ],
        _plain_link(found.link),
        [totals.steps, totals.tokens, totals.samples, totals.loss],
    ]


def _news_of(plain: Any) -> News:
    turns, arrivals, rejections = plain
    arrived = [_arrival_of(each) for each in arrivals]
    return News(
        tuple(_turning(each) for each in turns),
        {each.released.fragment: each for each in arrived},
        {
            push_id: Rejection(code, text, _bitmap_of(counted))
            for push_id, code, text, counted in rejections
        },
    )


def _turning(frame: bytes) -> Turning:
    message: Any = decode(frame)
    turning: Turning = message
    return turning


def _plain_arrival(arrival: Arrival) -> list[Any]:
    return [
        encode(arrival.released),
        sorted(arrival.counted),
        arrival.values is not None,
        arrival.staleness,
        arrival.superseding,
    ]


def _arrival_of(plain: Any) -> Arrival:
    released, counted, has_values, staleness, superseding = plain
    message = decode(released)
    assert isinstance(message, Released)
    values = ELSEWHERE if has_values else None
    return Arrival(message, frozenset(counted), values, staleness, superseding)


def _plain_bitmap(chunks: Bitmap | None) -> list[Any] | None:
    return None if chunks is None else [chunks.size, chunks.to_bytes()]


def _bitmap_of(plain: Any) -> Bitmap | None:
    return None if plain is None else Bitmap.from_bytes(plain[1], plain[0])


def _plain_link(link: LinkState) -> dict[str, Any]:
    config = asdict(link.config)
    plain = {name: value for name, value in vars(link).items() if name != "config"}
    sets = {name: sorted(plain[name]) for name in ("uploaded", "put_off")}
    return {**plain, **sets, "phase": link.phase.value, "config": config}


def _link_of(plain: Mapping[str, Any]) -> LinkState:
    sets = {name: frozenset(plain[name]) for name in ("uploaded", "put_off")}
    config = RunConfig(**plain["config"])
    return LinkState(**{**plain, **sets, "phase": Phase(plain["phase"]), "config": config})


def _facts_of(plain: Mapping[str, Any]) -> RunFacts:
    return RunFacts(**{**plain, "progress": Progress(**plain["progress"])})


# What is saved of a worker: the same at all ranks, and the vectors of each one's share.


def without_vectors(plain: Plain) -> Plain:
    fragments = []
    for each in plain["fragments"]:
        push = each["flight"]
        if push is not None:
            push = {**push, **dict.fromkeys((*OF_FLIGHT, "codes"))}
        fragments.append({**each, "base": None, "flight": push, "residual": None, "gains": []})
    return {**plain, "fragments": fragments, "checksums": {}}


def with_vectors(common: Plain, own: Plain) -> Plain:
    fragments = []
    for each, mine in zip(common["fragments"], own["fragments"], strict=True):
        vectors = {name: mine[name] for name in ("base", "residual", "gains")}
        push = each["flight"]
        if push is not None:
            push = {**push, **{name: mine["flight"][name] for name in (*OF_FLIGHT, "codes")}}
        fragments.append({**each, **vectors, "flight": push})
    return {**common, "fragments": fragments, "checksums": own["checksums"]}
