"""How a worker of several processes starts: they agree on the model, and join as one worker.

All processes run the same steps in the same order; the leader broadcasts its results. A failure of one
is a failure of all.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, astuple
from typing import Any

from diloco_protocol import RunConfig, UsageError
from diloco_protocol.version import digest_of, tag_of
from diloco_worker.group.ports import FollowerPorts, GroupPorts, LeaderPorts
from diloco_worker.joining import await_model, await_versions
from diloco_worker.model.flat_state import FlatState
from diloco_worker.model.placement import CPU
from diloco_worker.model.spread.ranks import GroupBroken, Ranks
from diloco_worker.model.spread.spread_tensors import SpreadTensors
from diloco_worker.ports import Participant
from diloco_worker.saved_state import Resumption
from diloco_worker.session.compatibility import Terms, cut
from diloco_worker.settings import Settings
from diloco_worker.transport.between_ranks import (
    Followers,
    LeaderAddress,
    LeaderConnection,
    machine,
)
from diloco_worker.transport.link import Link

logger = logging.getLogger("diloco.worker")

# What the leader broadcasts until training begins: nothing yet, a result, or a failure.
WAITING, FOUND, FAILED = "waiting", "found", "failed"
# By fragment, this process's share of the model's initial values, and the tag of all frozen ones. A
# broker without parameters may ask for them before they are read.
Own = Future[tuple[dict[int, FlatState], int]]
# Seconds that a process waits for the others before it logs that.
LOG_AFTER_S = 30.0

UNREACHABLE_LEADER = (
    "The processes of this worker are on several machines, and MASTER_ADDR is {reach!r}, by which the "
    "others cannot find the first of them; set it to an address of that machine that all can reach."
)


@contextmanager
def logging_long_waits(call: str) -> Iterator[None]:
    """Log a wait that takes long: the others may be waiting in a collective of the script."""
    text = f"{call} waits for the other processes of this worker. Call it in all, at the same step."
    timer = threading.Timer(LOG_AFTER_S, logger.warning, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def same_settings(ranks: Ranks, settings: Settings, chosen_id: str | None) -> str | None:
    """Check that all processes have the same settings. Returns the id that the leader chose.

    Raises:
        UsageError: they differ; raised in all processes.
    """
    names = ("server", "dylu", "keep_global_on", "timeout", "max_sync_retries", "local")
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
            "not support: each keeps its share of the global parameters on the host; leave it out."
        )
    found: str | None = told[0][1]
    return found


def same_resumption(
    ranks: Ranks, resumption: Resumption | None, step: int, cycle_start: int
) -> None:
    """Check that all processes resume from a checkpoint of one moment, or none does.

    Raises:
        UsageError: raised in all processes.
    """
    told = ranks.gather([[step, cycle_start], resumption and resumption.moment])
    missing = [rank for rank, (_, moment) in enumerate(told) if moment is None]
    if missing and len(missing) < len(told):
        raise UsageError(
            f"Process {', '.join(map(str, missing))} of this worker has no state to resume from, and "
            "others have; call load_state_dict() in all of them, or in none."
        )
    for rank, (at, moment) in enumerate(told):
        if (at, moment) != told[0]:
            raise UsageError(
                f"Process 0 of this worker resumes at step {told[0][0][0]}, and process {rank} at step "
                f"{at[0]}, or from another state; load in each a state of the same moment."
            )


def begin_together(parts: Participant, ranks: Ranks) -> GroupPorts:
    """Join as one worker; raises as `DiLoCoWorker.start` does, in all processes."""
    make = LeaderPorts if ranks.leads else FollowerPorts
    ports, tensors = make(**vars(parts), ranks=ranks), parts.tensors
    assert isinstance(tensors, SpreadTensors)
    ranks.waits_for = logging_long_waits
    own: Own = Future()
    link = (_connect_leader if ranks.leads else _connect_follower)(ports, ranks, own)

    def tick() -> None:
        ranks.broadcast([WAITING])
        if isinstance(link.others, Followers) and link.others.lost is not None:
            raise GroupBroken(f"{link.others.lost}; this worker has not started.")

    def await_terms() -> list[Any]:
        await_model(link, only_terms=True, tick=tick)
        assert link.terms is not None
        return [asdict(link.terms.config), list(link.terms.plan), link.shard, link.has_forgotten]

    def take_versions() -> list[Any]:
        ports.arrived = await_versions(link, tick=tick)
        return [link.has_forgotten]  # it may have rejoined since

    fields, plan, shard, is_new = _from_leader(ranks, await_terms)
    if not ranks.leads:
        config = RunConfig(**fields)
        link.terms, link.shard = Terms(config, plan, cut(tensors.manifest, config, plan)), shard
    terms = link.terms
    assert terms is not None
    if is_new:
        ports.resumption = None
    tensors.set_layout(terms.layout)
    if ranks.leads:
        ranks.gather(None)  # the followers have shared out theirs
    link.share_out(tensors.owners, ranks.rank, tensors.shares)
    if not ranks.leads:
        ranks.gather(None)
    own.set_result(_own_values(ports, ranks, tensors, terms))
    (is_new,) = _from_leader(ranks, take_versions)
    if is_new:
        ports.resumption = None
    ports.begin()
    states, _ = own.result()
    for fragment in [each for each in states if link.buffers.holds(each)]:
        del states[fragment]
    return ports


def _connect_leader(ports: GroupPorts, ranks: Ranks, own: Own) -> Link:
    reach = os.environ.get("MASTER_ADDR")
    followers = Followers(ranks.count, reach)
    try:
        machines = set(ranks.gather(machine()))
        if len(machines) > 1 and len(followers.address.addresses) == 1:
            ranks.broadcast(None)
            raise UsageError(UNREACHABLE_LEADER.format(reach=reach))
        ranks.broadcast(astuple(followers.address))
        session = ports.session(processes=ranks.count)
    except BaseException:
        followers.close()
        raise
    try:
        return ports.connect(
            session,
            capture=lambda part: own.result()[0][part.fragment],
            tag_of=lambda _: own.result()[1],
            others=followers,
        )
    except Exception as error:
        ranks.broadcast([FAILED, str(error)])
        raise


def _connect_follower(ports: GroupPorts, ranks: Ranks, own: Own) -> Link:
    ranks.gather(machine())
    told = ranks.broadcast()
    if told is None:
        raise UsageError(UNREACHABLE_LEADER.format(reach=os.environ.get("MASTER_ADDR")))
    leader = LeaderConnection(LeaderAddress(*told), ranks.rank)
    return ports.connect(None, capture=lambda part: own.result()[0][part.fragment], others=leader)


def _from_leader(ranks: Ranks, find: Callable[[], list[Any]]) -> Sequence[Any]:
    """The leader's result, at all ranks; where it failed, UsageError (its own error at the leader)."""
    if ranks.leads:
        try:
            found = find()
        except GroupBroken:
            raise
        except Exception as error:
            ranks.broadcast([FAILED, str(error)])
            raise
        ranks.broadcast([FOUND, *found])
        return found
    while True:
        what, *told = ranks.broadcast()
        if what == FAILED:
            raise UsageError(told[0])
        if what == FOUND:
            heard: Sequence[Any] = told
            return heard


def _own_values(
    ports: GroupPorts, ranks: Ranks, tensors: SpreadTensors, terms: Terms
) -> tuple[dict[int, FlatState], int]:
    """This process's share of the model's initial values, and the tag of all frozen ones."""
    layout = terms.layout
    parts = layout.all if ports.resumption is None else (layout.frozen,)
    states = {
        part.fragment: tensors.capture(tensors.share_of(part)) for part in parts if part.chunks
    }
    frozen = layout.frozen
    if not frozen.chunks:
        return states, 0
    mine = states[frozen.fragment]
    digests = [digest_of([mine.chunk(index)]) for index in range(mine.layout.chunks)]
    told: list[Any] = [iter(each) for each in ranks.gather(digests)]
    return states, tag_of(next(told[owner]) for owner in tensors.owners[frozen.fragment])
