"""How a worker of several processes begins: they meet, agree on the model, and join as one.

Every process does the same steps in the same order; what only the leader knows, it tells. One that fails
fails for all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from diloco_protocol import RunConfig, UsageError
from diloco_protocol.chunks import FragmentLayout
from diloco_protocol.version import digest_of, tag_of
from diloco_worker.group.ports import FollowerPorts, GroupPorts, LaneLink, LeaderPorts
from diloco_worker.group.waiting import said_when_long
from diloco_worker.joining import Joining, await_model, await_versions
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.placement import CPU
from diloco_worker.model.spread.ranks import GroupBroken, Ranks
from diloco_worker.model.spread.spread_tensors import SpreadTensors
from diloco_worker.saved_state import Resumption
from diloco_worker.session.compatibility import Terms, cut
from diloco_worker.session.news import Arrival
from diloco_worker.settings import Settings
from diloco_worker.transport.lanes import words
from diloco_worker.transport.lanes.hub import Hub
from diloco_worker.transport.lanes.lane import LaneThread
from diloco_worker.transport.lanes.lane_buffers import LaneBuffers, numbers_of
from diloco_worker.transport.lanes.words import Meeting

# What the leader broadcasts until training begins: nothing yet, the terms of the run, that it begins, or
# that it has failed.
WAIT, TERMS, BEGIN, FAIL = "wait", "terms", "begin", "fail"

UNREACHABLE_LEADER = (
    "The processes of this worker are on several machines, and MASTER_ADDR is {reach!r}, by which the "
    "others cannot find the first of them; set it to an address of that machine that all can reach."
)


def same_settings(ranks: Ranks, settings: Settings, chosen_id: str | None) -> str | None:
    """See that all processes ask for the same. Returns the id that the leader has chosen.

    Raises:
        UsageError: they do not; at all of them.
    """
    names = ("server", "dylu", "keep_global_on", "timeout", "max_sync_retries")
    asked = {**{name: getattr(settings, name) for name in names}, **settings.wants}
    if callable(asked["server"]):
        asked["server"] = "a function"  # only the leader calls it
    told = ranks.gather([asked, chosen_id])
    for rank, (theirs, _) in enumerate(told):
        for name in sorted({*theirs, *told[0][0]}):
            ours, other = told[0][0].get(name), theirs.get(name)
            if ours != other:
                raise UsageError(
                    f"{name} is {ours!r} in process 0 of this worker and {other!r} in process {rank}; "
                    "give all processes of a worker the same arguments and variables."
                )
    if settings.keep_global_on not in (None, CPU):
        raise UsageError(
            f"keep_global_on is {settings.keep_global_on!r}, which a worker of several processes does "
            "not do yet: each keeps its share of the global parameters on the host; leave it out."
        )
    found: str | None = told[0][1]
    return found


def same_resumption(
    ranks: Ranks, resumption: Resumption | None, step: int, cycle_start: int
) -> None:
    """See that all processes go on from a checkpoint of one moment, or none from any.

    Raises:
        UsageError: they do not; at all of them.
    """
    told = ranks.gather([[step, cycle_start], resumption and resumption.moment])
    missing = [rank for rank, (_, moment) in enumerate(told) if moment is None]
    if missing and len(missing) < len(told):
        raise UsageError(
            f"Process {', '.join(map(str, missing))} of this worker has no state to go on from, and "
            "others have; call load_state_dict() in all of them, or in none."
        )
    for rank, (at, moment) in enumerate(told):
        if (at, moment) != told[0]:
            raise UsageError(
                f"Process 0 of this worker goes on at step {told[0][0][0]}, and process {rank} at "
                f"step {at[0]}, or from another state; load in each what was saved at the same moment."
            )


def begin_together(joining: Joining, ranks: Ranks) -> GroupPorts:
    """Join as one worker; raises as `DiLoCoWorker.start` does, at all processes."""
    tensors = joining.tensors
    assert isinstance(tensors, SpreadTensors)
    ranks.waits_for = said_when_long
    return _lead(joining, ranks, tensors) if ranks.leads else _follow(joining, ranks, tensors)


class Initial:
    """The model's own values before the run's, which a broker without parameters may ask for.

    What another thread asks for before it is there, it waits for.
    """

    def __init__(self) -> None:
        self._states: dict[int, FlatState] = {}
        self._tag: int | None = None
        self._is_here = threading.Event()

    def put(self, states: dict[int, FlatState], tag: int | None) -> None:
        self._states, self._tag = states, tag
        self._is_here.set()

    def capture(self, layout: FragmentLayout) -> FlatState:
        """This process's share of a fragment."""
        self._is_here.wait()
        return self._states[layout.fragment]

    def tag(self, layout: FragmentLayout) -> int:
        """The tag that the frozen parameters of the worker have."""
        self._is_here.wait()
        assert self._tag is not None, "there are no frozen parameters"
        return self._tag

    def release(self, fragments: Sequence[int]) -> None:
        """Training stands on versions of these now."""
        for fragment in fragments:
            self._states.pop(fragment, None)


def _lead(joining: Joining, ranks: Ranks, tensors: SpreadTensors) -> GroupPorts:
    reach = os.environ.get("MASTER_ADDR")
    hub = Hub(ranks.count, reach)
    try:
        machines = set(ranks.gather(words.machine()))
        if len(machines) > 1 and len(hub.meeting.addresses) == 1:
            ranks.broadcast(None)
            raise UsageError(UNREACHABLE_LEADER.format(reach=reach))
        ranks.broadcast(hub.meeting.plain())
        initial = Initial()
        session = joining.session(processes=ranks.count)
    except BaseException:
        hub.close()
        raise

    def tick() -> None:
        ranks.broadcast([WAIT])
        if link.lost_process is not None:
            raise GroupBroken(f"{link.lost_process}; this worker has not begun.")

    with _failing_together(ranks):
        link = joining.link(session, capture=initial.capture, tag_of=initial.tag, hub=hub)
        await_model(link, joining.patience(), only_terms=True, tick=tick)
        terms = link.terms
        assert terms is not None
        has_forgotten = link.has_forgotten
        told = [asdict(terms.config), list(terms.plan), link.shard, has_forgotten]
        ranks.broadcast([TERMS, *told])
    if has_forgotten:
        joining.resumption = None
    tensors.set_layout(terms.layout)
    ranks.gather(None)  # all of them have room for what comes
    numbers = tuple(numbers_of(owners, ranks.rank) for owners in tensors.owners)
    link.share_out(tensors.owners, tensors.shares, numbers)
    initial.put(*_own_values(joining, ranks, tensors, terms))
    with _failing_together(ranks):
        arrived = await_versions(link, joining.patience(), tick=tick)
    has_forgotten = link.has_forgotten  # it may have rejoined meanwhile
    ranks.broadcast([BEGIN, has_forgotten])
    if has_forgotten:
        joining.resumption = None
    ports = LeaderPorts(**_of_group(joining, ranks, link, arrived))
    ports.begin()
    initial.release([part.fragment for part in terms.layout.fragments])
    return ports


@contextmanager
def _failing_together(ranks: Ranks) -> Iterator[None]:
    """What fails at the leader fails at all ranks."""
    try:
        yield
    except GroupBroken:
        raise
    except Exception as error:
        ranks.broadcast([FAIL, str(error)])
        raise


def _of_group(
    joining: Joining, ranks: Ranks, link: Any, arrived: dict[int, Arrival]
) -> dict[str, Any]:
    """The arguments of the ports of a rank."""
    of_group = {"ranks": ranks, "metrics": joining.metrics, "timeout": joining.settings.timeout}
    return {**joining.of_ports(link, arrived), **of_group}


def _follow(joining: Joining, ranks: Ranks, tensors: SpreadTensors) -> GroupPorts:
    ranks.gather(words.machine())
    told = ranks.broadcast()
    if told is None:
        raise UsageError(UNREACHABLE_LEADER.format(reach=os.environ.get("MASTER_ADDR")))
    meeting = Meeting.from_plain(told)
    lane = LaneThread(meeting, ranks.rank, joining.keys)
    link = LaneLink(lane)
    joining.opened(link)
    lane.start()
    joining.take_signals()
    terms = _heard_terms(joining, ranks, tensors, link)
    tensors.set_layout(terms.layout)
    lane.buffers = LaneBuffers(
        tensors.shares,
        tuple(numbers_of(owners, ranks.rank) for owners in tensors.owners),
        joining.placement.is_pinned,
    )
    ranks.gather(None)
    lane.buffers.initial, _ = _own_values(joining, ranks, tensors, terms)
    lane.has_own_values()
    (has_forgotten,) = _heard(ranks, BEGIN)
    if has_forgotten:
        joining.resumption = None
    ports = FollowerPorts(**_of_group(joining, ranks, link, {}))
    ports.begin()
    return ports


def _heard_terms(joining: Joining, ranks: Ranks, tensors: SpreadTensors, link: LaneLink) -> Terms:
    config, plan, shard, has_forgotten = _heard(ranks, TERMS)
    if has_forgotten:
        joining.resumption = None
    made = RunConfig(**config)
    link.terms, link.shard = Terms(made, plan, cut(tensors.manifest, made, plan)), shard
    return link.terms


def _heard(ranks: Ranks, wanted: str) -> Sequence[Any]:
    """What the leader says with this word, as soon as it does.

    Raises:
        UsageError: it has failed.
    """
    while True:
        word, *told = ranks.broadcast()
        heard: Sequence[Any] = told
        if word == FAIL:
            raise UsageError(told[0])
        if word == wanted:
            return heard


def _own_values(
    joining: Joining, ranks: Ranks, tensors: SpreadTensors, terms: Terms
) -> tuple[dict[int, FlatState], int | None]:
    """What this process owns of the model's own values, and the tag of the frozen ones of all."""
    layout = terms.layout
    parts = layout.all if joining.resumption is None else (layout.frozen,)
    states = {
        part.fragment: tensors.capture(tensors.share_of(part)) for part in parts if part.chunks
    }
    frozen = layout.frozen
    if not frozen.chunks:
        return states, None
    mine = states[frozen.fragment]
    digests = [digest_of([mine.chunk(index)]) for index in range(mine.layout.chunks)]
    told: list[Any] = [iter(each) for each in ranks.gather(digests)]
    return states, tag_of(next(told[owner]) for owner in tensors.owners[frozen.fragment])
