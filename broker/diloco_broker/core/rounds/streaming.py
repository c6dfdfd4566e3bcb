"""Streaming rounds: pushes enter the open round, and their chunks are added as they arrive.

The default of synchronous mode. The broker keeps one accumulator and the few chunks that arrived last,
so its memory does not depend on the number of workers, and a push counts chunk by chunk: a round that
closes while a worker dies keeps the chunks that it delivered. The rules:

- A round is OPEN until every expected worker has begun its push and at least `floor` contribute; then
  it is CLOSING, and it ends when every chunk has been stepped.
- A worker that dies or leaves an open round leaves the expected set at once. A closing round stops
  waiting for the chunks that a dead worker has not delivered. So a closing round always ends.
- A contribution *owes* a chunk until the chunk has been folded. In a closing round, a chunk that no
  contribution owes is ready. It is normalised by the weight that reached it.
- A chunk that an earlier version contains (`before`) is not owed again: each (worker, push id, chunk)
  counts once.
- A worker whose push was refused before it began is *skipped*: the round does not wait for it.
- A worker has one live contribution in a round, and one vote on each chunk. Another push id abandons an
  unfinished contribution; the chunks that had arrived still count, and the new push delivers only the
  others. (Both in full would count the same steps twice: a worker that is killed during an upload
  repeats them.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from diloco_broker.core.effects import Effects, Fold, Step, nothing
from diloco_broker.core.events import WorkDone, WorkRefused
from diloco_broker.core.members.members import Member
from diloco_broker.core.rounds import grants, lines
from diloco_broker.core.rounds.decision import Tally
from diloco_broker.core.rounds.round import (
    Barrier,
    Phase,
    PushInProgress,
    PushKey,
    RemoteChunk,
    Update,
)
from diloco_broker.core.state import RunState
from diloco_protocol.bitmap import Bitmap
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import Commit, Push


class Ended(str, Enum):
    """Why a contribution will deliver no more chunks."""

    GONE = "gone"
    VOIDED = "voided"
    ABANDONED = "abandoned"


@dataclass(eq=False)
class Contribution(PushInProgress):
    """A push in a round; its taken chunks have been added to the round's sums.

    `before` are chunks that an earlier version contains, or an earlier push of its worker in this round.
    """

    ended: Ended | None = None  # None while its worker may deliver more
    # Chunks in `before` only because an earlier push of its worker in this round delivered them.
    delivered_before: Bitmap | None = None

    @property
    def is_whole(self) -> bool:
        settled = self.before | self.taken
        return settled.is_full or all(index in self.remote for index in settled.missing())

    def work(self, index: int, payload: Any) -> Fold:
        push, dtype = self.push, self.push.wire_dtype
        return Fold(push.fragment, index, *self.key, self.weight, dtype, payload)

    def owed(self) -> Iterable[int]:
        """Chunks that have not been folded."""
        settled = self.before | self.taken
        return settled.missing() if self.ended is None else self.arrived - settled


@dataclass
class StreamingRound(Update):
    """State of a streaming round."""

    barrier: Barrier
    contributions: dict[PushKey, Contribution] = field(default_factory=dict)
    reached: list[float] = field(init=False)  # weight in the sum of each chunk
    # Contributions that owe each chunk; only while it is closing.
    owed: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reached = [0.0] * self.size

    # Workers.

    @property
    def begun(self) -> set[str]:
        """Workers that have begun a push, also one that was voided, unless they left before its end."""
        served = (None, Ended.VOIDED)
        return {c.worker_id for c in self.pushes if c.ended in served or c.is_whole}

    @property
    def participating(self) -> set[str]:
        return {c.worker_id for c in self.contributions.values() if c.ended is None or c.is_whole}

    def has_all_of(self, worker_id: str) -> bool:
        return any(c.held.is_full for c in self.of_worker(worker_id) if c.ended is not Ended.VOIDED)

    @property
    def pushes(self) -> Collection[Contribution]:
        return self.contributions.values()

    def of_worker(self, worker_id: str) -> Iterator[Contribution]:
        return (c for c in self.contributions.values() if c.worker_id == worker_id)

    # Changes. Those that return indexes return the chunks that have become ready.

    def begin(
        self, worker_id: str, push: Push, before: Bitmap, weight: float, staleness: int
    ) -> Contribution:
        """Enter a push. The caller has ended or excluded other pushes of its worker."""
        counted = before
        for other in self.of_worker(worker_id):
            before = before | other.arrived  # one vote on each chunk
        contribution = Contribution(worker_id, push, before, weight, staleness=staleness)
        contribution.delivered_before = before - counted
        self.contributions[contribution.key] = contribution
        if self.phase is Phase.CLOSING:
            raise AssertionError(f"{worker_id} begins a push in closing round {self.number}")
        return contribution

    def folded(self, key: PushKey, index: int, squares: float, fingerprint: int = 0) -> list[int]:
        """A chunk has been added."""
        contribution = self.contributions[key]
        contribution.looked_at(index, squares, fingerprint)
        self.reached[index] += contribution.weight
        return self._settle((index,))

    def refused(self, key: PushKey, index: int) -> list[int]:
        """A chunk that arrived could not be folded: void the push."""
        contribution = self.contributions[key]
        contribution.arrived.discard(index)
        ready = self._settle([index]) + self._end(contribution, Ended.VOIDED, settled=index)
        if contribution.ended is Ended.GONE:
            contribution.ended = Ended.VOIDED  # its worker cannot resume it
        return ready

    def _end(self, contribution: Contribution, why: Ended, settled: int | None = None) -> list[int]:
        """A contribution will deliver no more chunks."""
        if contribution.ended is not None:
            return []
        undelivered = [i for i in contribution.held.missing() if i != settled]
        contribution.ended = why
        return self._settle(undelivered)

    def abandon(self, contribution: Contribution) -> list[int]:
        """Its worker has begun another push."""
        ready = self._end(contribution, Ended.ABANDONED)
        if contribution.ended is Ended.GONE:
            contribution.ended = Ended.ABANDONED  # its worker cannot resume it
        return ready

    def lost(self, contribution: Contribution, index: int) -> list[int]:
        """A chunk that arrived was lost: its worker has to deliver it again, with any of its pushes."""
        contribution.arrived.discard(index)
        for other in self.of_worker(contribution.worker_id):
            if other.delivered_before is not None and index in other.delivered_before:
                other.delivered_before.discard(index)
                other.before.discard(index)
                if self.phase is Phase.CLOSING and other.ended is None:
                    self.owed[index] += 1
        # A contribution under way owes it as before.
        return [] if contribution.ended is None else self._settle((index,))

    def leave(self, worker_id: str) -> list[int]:
        """A worker died or left."""
        self.barrier.expect_no_more(worker_id)
        ready: list[int] = []
        for contribution in list(self.of_worker(worker_id)):
            ready += self._end(contribution, Ended.GONE)
        return ready

    def tally(self) -> Tally:
        here, expected = self.participating, self.barrier.expected
        is_complete = expected <= self.begun | self.barrier.skipped
        return Tally(len(here), is_complete, len(expected) + len(here - expected))

    def close(self) -> list[int]:
        """Begin to close."""
        self.phase = Phase.CLOSING
        self.owed = self._owed()
        return [index for index in range(self.size) if not self.owed[index]]

    def _owed(self) -> list[int]:
        owed = [0] * self.size
        for contribution in self.contributions.values():
            for index in contribution.owed():
                owed[index] += 1
        return owed

    def _settle(self, indexes: Iterable[int]) -> list[int]:
        """A contribution no longer owes these chunks."""
        ready: list[int] = []
        if self.phase is Phase.OPEN:
            return ready
        for index in indexes:
            self.owed[index] -= 1
            if not self.owed[index]:
                ready.append(index)
        return ready

    def check_invariants(self) -> None:
        for key, c in self.contributions.items():
            assert key == c.key
            c.check_invariants()
        for index in range(self.size):
            weight = sum(c.weight for c in self.contributions.values() if index in c.taken)
            assert abs(weight - self.reached[index]) <= 1e-9 * max(1.0, weight)
        if self.phase is Phase.CLOSING:
            assert self.owed == self._owed(), "chunks that are owed are miscounted"
            assert not any(self.owed[i] for i in self.stepped), "a chunk was stepped too early"
        live = [c.worker_id for c in self.contributions.values() if c.ended is None]
        assert len(live) == len(set(live)), "a worker has two live contributions"


# Pushes that a worker may begin in one round. Each abandoned one is remembered until the round ends,
# which may take days; a worker that is killed and restarted begins another.
MOST_PUSHES = 32

tell = lines.closed
tick = look = released = nothing  # neither time nor free memory matters here


def _round(state: RunState) -> StreamingRound:
    assert isinstance(state.round, StreamingRound)
    return state.round


def open_round(state: RunState, number: int) -> Effects:
    """Open a round and enter the pushes that were deferred to it."""
    fragment, size = state.coming(number)
    barrier = state.open_barrier(fragment)
    round_ = state.round = StreamingRound(number, fragment, size, state.run_time, barrier)
    for member in state.members:
        push = member.take_deferred(fragment)
        if push is not None:
            before = state.standing(member, push)
            yield from _begin(state, round_, member, push, before)


def check(state: RunState, member: Member, push: Push) -> None:
    """Refuse a push that has ended, and one beyond the limit of its worker."""
    round_ = _round(state)
    known = round_.contributions.get((member.worker_id, push.push_id))
    if known is not None and known.ended in (Ended.VOIDED, Ended.ABANDONED):
        text = f"This push was {known.ended.value} in round {round_.number}; drop it."
        raise ProtocolError(Code.BAD_PUSH, text)
    if known is None and sum(1 for _ in round_.of_worker(member.worker_id)) >= MOST_PUSHES:
        text = (
            f"{member.worker_id} has begun {MOST_PUSHES} pushes in round {round_.number} already."
        )
        raise ProtocolError(Code.BAD_PUSH, text)


def offer(state: RunState, member: Member, push: Push) -> Effects:
    """Enter an offered push into the open round, or defer it to its own."""
    round_, before = _round(state), state.standing(member, push)
    known = round_.contributions.get((member.worker_id, push.push_id))
    if known is None:
        yield from _abandon_others(state, round_, member.worker_id, push)
    if before.is_full:
        yield from grants.counted(member, push)
    elif known is not None and (known.ended is None or round_.phase is Phase.OPEN):
        known.ended = None  # the worker resumes the same push
        yield from _grant(round_, member, known)
    elif _takes_now(round_, member, push):
        yield from _begin(state, round_, member, push, before)
    else:
        number = state.next_round_of(push.fragment)
        if known is not None and known.held.is_full:
            number = round_.number  # the closing round has all of it
        elif number == round_.number:  # the round has a complete push of its worker
            number += state.config.num_fragments
        text = f"Deferred from round {round_.number} to round {number}."
        yield from grants.wait(member, push, text, number)


def _abandon_others(state: RunState, round_: StreamingRound, worker_id: str, push: Push) -> Effects:
    for other in list(round_.of_worker(worker_id)):
        same = other.push.fragment == push.fragment
        if same and other.push.push_id != push.push_id and not other.held.is_full:
            yield from _step(state, round_, round_.abandon(other))


def _takes_now(round_: StreamingRound, member: Member, push: Push) -> bool:
    """Whether a new push can enter the current round; a second complete one belongs to the next."""
    is_its_round = round_.phase is Phase.OPEN and round_.fragment == push.fragment
    return is_its_round and not round_.has_all_of(member.worker_id)


def _begin(
    state: RunState, round_: StreamingRound, member: Member, push: Push, before: Bitmap
) -> Effects:
    """Enter a new push into the open round. Others of its worker have been abandoned."""
    if before.is_full:
        yield from grants.counted(member, push)
        return
    staleness = state.versions[push.fragment].staleness(push)
    round_.barrier.has_begun(member.worker_id)
    contribution = round_.begin(member.worker_id, push, before, state.weight_of(push), staleness)
    member.begins(push, round_.number)
    state.totals.pushes += 1
    yield from _grant(round_, member, contribution)


def _grant(round_: StreamingRound, member: Member, contribution: Contribution) -> Effects:
    sharing = len(round_.barrier.expected)
    yield from grants.grant(member, contribution, sharing=sharing, number=round_.number)


def find(state: RunState, worker_id: str, push: Push) -> Contribution | None:
    contribution = _round(state).contributions.get((worker_id, push.push_id))
    return contribution if contribution and contribution.ended is None else None


def done(state: RunState, event: WorkDone) -> Effects:
    work, round_ = event.work, _round(state)
    assert round_.fragment == work.fragment
    key = (work.worker_id, work.push_id)
    ready = round_.folded(key, work.index, event.squares, event.fingerprint)
    yield from grants.acknowledge_work(state, work)
    yield from _step(state, round_, ready)
    if round_.contributions[key].ended is Ended.VOIDED:
        yield from _let_in(state, round_, work.worker_id)


def sum_folded(state: RunState, part: RemoteChunk) -> Effects:
    """A sum that contains this chunk has been added to the closing round."""
    round_ = _round(state)
    ready = round_.folded(part.push.key, part.index, part.squares, part.fingerprint)
    yield from _step(state, round_, ready)


def refused(state: RunState, event: WorkRefused) -> Effects:
    """A chunk was not finite: void the rest of the push; the round continues."""
    work, round_ = event.work, _round(state)
    assert round_.fragment == work.fragment
    key = (work.worker_id, work.push_id)
    is_news = round_.contributions[key].ended is not Ended.VOIDED
    ready = round_.refused(key, work.index)
    if is_news:
        taken = round_.contributions[key].arrived
        then = "the rest of the push is void, and the round continues without it"
        yield from grants.refuse_values(state, work, then, taken=taken)
    yield from _step(state, round_, ready)
    yield from _let_in(state, round_, work.worker_id)


def _let_in(state: RunState, round_: StreamingRound, worker_id: str) -> Effects:
    """Enter a push that was deferred because of an earlier complete one, which is now void."""
    member = state.members.named(worker_id)
    push = member.deferred.get(round_.fragment) if member else None
    is_settled = all(each.arrived == each.taken for each in round_.of_worker(worker_id))
    if member and push and is_settled and _takes_now(round_, member, push):
        member.take_deferred(round_.fragment)
        yield from _begin(state, round_, member, push, state.standing(member, push))


def commit(state: RunState, member: Member, commit: Commit) -> None:
    """Chunks are counted as they arrive, so a commit changes nothing."""


def tally(state: RunState) -> Tally:
    return _round(state).tally()


def close(state: RunState) -> Effects:
    """Begin to close the round, and step the chunks that are ready."""
    round_ = _round(state)
    ready = round_.close()
    state.begin_version(round_.fragment, 1)
    yield from _step(state, round_, ready)


def lost(state: RunState, chunk: RemoteChunk) -> Effects:
    round_, contribution = _round(state), chunk.push
    assert isinstance(contribution, Contribution)
    yield from _step(state, round_, round_.lost(contribution, chunk.index))


def _step(state: RunState, round_: StreamingRound, indexes: Iterable[int]) -> Effects:
    """Take the outer step of ready chunks."""
    count = state.versions[round_.fragment].gradients - 1
    for index in indexes:
        yield Step(round_.fragment, index, round_.reached[index], count)


def leave(state: RunState, worker_id: str) -> Effects:
    round_ = _round(state)
    yield from _step(state, round_, round_.leave(worker_id))


do_without = leave  # each round has contributions of its own
