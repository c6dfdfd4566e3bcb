"""Staged rounds: submissions are kept until they are complete, and merged when the round closes.

Used with a quorum, in deterministic order, with a limit on the norm of a push, or where an aggregate
needs complete submissions. A worker may send before its round is open. A submission that is incomplete
when a round closes is deferred to the next round of the fragment, or dropped (`--late`); its worker is
notified either way. The rules:

- A round is OPEN until the submissions of all expected workers, and at least `floor`, are complete; with
  a quorum K also once K have been complete for the grace period. K never exceeds the number of workers
  that can still contribute, nor falls below the floor.
- Then it is CLOSING with the complete submissions that it has chosen, at most one of each worker, in the
  order of worker ids. Later events of a worker do not change the choice.
- A worker whose push was refused is *skipped*: the round does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from diloco_broker.config import BrokerConfig
from diloco_broker.core.effects import Effects, info, nothing
from diloco_broker.core.events import WorkRefused
from diloco_broker.core.members.members import Member
from diloco_broker.core.relays import combining
from diloco_broker.core.rounds import collect, grants, lines, norms
from diloco_broker.core.rounds.decision import Tally
from diloco_broker.core.rounds.round import Barrier, Phase
from diloco_broker.core.rounds.submissions import Pool, StagedUpdate, Submission
from diloco_broker.core.state import RunState
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.messages import Notice, Push


@dataclass
class StagedRound(StagedUpdate):
    """A round over complete submissions."""

    barrier: Barrier
    pool: Pool = field(default_factory=dict)  # the submissions of its fragment
    quorum: int | None = None
    quorum_at: float | None = None  # when `quorum` of them were complete (run time)

    @property
    def begun(self) -> set[str]:
        return self.participating | self.barrier.skipped

    @property
    def participating(self) -> set[str]:
        members = self.chosen if self.phase is Phase.CLOSING else self.pool.values()
        return {s.worker_id for s in members}

    def has_all_of(self, worker_id: str) -> bool:
        return any(s.is_whole for s in self.pool.values() if s.worker_id == worker_id)

    @property
    def has_work_to_look_at(self) -> bool:
        return any(s.is_sent and not s.is_whole for s in self.pool.values())

    def whole(self) -> list[Submission]:
        """The first complete submission of each worker, in the order of worker ids."""
        first: dict[str, Submission] = {}
        for submission in self.pool.values():
            other = first.get(submission.worker_id)
            if submission.whole_at is not None and (
                other is None or submission.whole_at < (other.whole_at or 0.0)
            ):
                first[submission.worker_id] = submission
        return [first[worker_id] for worker_id in sorted(first)]

    def look(self, now: float, *, floor: int, quorum: int | None) -> bool:
        """Note when a quorum is complete. Returns whether it is now."""
        if quorum != self.quorum:
            self.quorum, self.quorum_at = quorum, None
        is_new = self.quorum_at is None and self._has_quorum(floor)
        if is_new:
            self.quorum_at = now
        return is_new

    def tally(self, floor: int) -> Tally:
        here, expected = self._whole_of, self.barrier.expected
        is_complete = expected <= here | self.barrier.skipped
        may_come = len(expected) + len(self.participating - expected)
        enough_at = self.quorum_at if self._has_quorum(floor) else None
        return Tally(len(here), is_complete, may_come, enough_at)

    @property
    def lacking(self) -> set[str]:
        """Expected workers whose push is not complete."""
        return self.barrier.expected - self._whole_of - self.barrier.skipped

    @property
    def _whole_of(self) -> set[str]:
        return {s.worker_id for s in self.pool.values() if s.is_whole}

    def _has_quorum(self, floor: int) -> bool:
        here = self._whole_of
        if self.quorum is None or not here:
            return False
        # As in the tally, but a push in progress whose worker is not expected may never be complete.
        may_come = len(self.barrier.expected) + len(here - self.barrier.expected)
        return len(here) >= max(floor, min(self.quorum, may_come))

    def close(self, chosen: Iterable[Submission]) -> None:
        """Begin to close, with these."""
        self.phase = Phase.CLOSING
        self.chosen = tuple(chosen)
        for each in self.chosen:
            each.number = self.number

    def check_invariants(self) -> None:
        super().check_invariants()
        workers = [s.worker_id for s in self.chosen]
        assert len(workers) == len(set(workers)), "two submissions of a worker are merged"


find, done, commit, lost = collect.find, collect.done, collect.commit, collect.lost
tell = lines.closed
tick = nothing  # time does not matter here


def asked_for_by(config: BrokerConfig) -> str:
    """The option that needs complete submissions; empty if none does."""
    if config.quorum is not None:
        return "--quorum"
    if config.deterministic:
        return "--deterministic"
    if config.max_delta_norm is not None:
        return "--max-delta-norm"
    return f"--aggregate {config.aggregate}" if config.aggregate != "mean" else ""


def room_needed(config: BrokerConfig, sizes: Sequence[int]) -> tuple[int, str, int]:
    """Each worker may have one pending submission of each fragment."""
    return config.workers, "worker", sum(sizes)


def _round(state: RunState) -> StagedRound:
    assert isinstance(state.round, StagedRound)
    return state.round


def open_round(state: RunState, number: int) -> Effects:
    """Open a round with the pool of its fragment, and with the pushes that were deferred to it."""
    if state.round is not None:
        collect.forget(state, _round(state).chosen)
    fragment, size = state.coming(number)
    barrier, pool = state.open_barrier(fragment), state.submissions.pool(fragment)
    state.round = StagedRound(
        number=number,
        fragment=fragment,
        size=size,
        opened_at=state.run_time,
        barrier=barrier,
        pool=pool,
    )
    for member in state.members:
        push = member.deferred.get(fragment)
        if push is not None and not collect.has_whole(state, member, push):
            member.take_deferred(fragment)
            yield from _begin(state, member, push)


def check(state: RunState, member: Member, push: Push) -> None:
    """Refuse a late push, if late pushes are dropped."""
    was_chosen = (member.worker_id, push.push_id) in state.submissions.in_time
    # After a restart of the broker only the ledger shows it: it has a part of such a push.
    is_counted = was_chosen or bool(state.standing(member, push))
    is_new = not (is_counted or collect.is_known(state, member, push))
    if is_new and state.config.late == "drop" and _is_late(state, push):
        raise ProtocolError(
            Code.LATE,
            f"The round this push was meant for closed without it (it starts from version "
            f"{push.base.counter if push.base else None}); late work is dropped in this run.",
        )


def offer(state: RunState, member: Member, push: Push) -> Effects:
    """Enter an offered push into the pool of its fragment."""
    coming = state.next_round_of(push.fragment)
    sharing = len(state.members)
    if (yield from collect.comes_again(state, member, push, sharing=sharing, number=coming)):
        return
    collect.abandon_others(state, member, push)
    if collect.has_whole(state, member, push):
        text = "A push of this worker is in that fragment's coming round; this one is for the next."
        yield from grants.wait(member, push, text, coming + state.config.num_fragments)
    else:
        yield from _begin(state, member, push)


def _begin(state: RunState, member: Member, push: Push) -> Effects:
    state.barriers[push.fragment].has_begun(member.worker_id)
    number = state.next_round_of(push.fragment)
    yield from collect.begin(state, member, push, sharing=len(state.members), number=number)


def _is_late(state: RunState, push: Push) -> bool:
    """Whether a round of its fragment has closed, or begun to, since its base was released."""
    round_ = _round(state)
    is_closing = round_.phase is Phase.CLOSING and round_.fragment == push.fragment
    return is_closing or state.versions[push.fragment].staleness(push) > 0


def refused(state: RunState, event: WorkRefused) -> Effects:
    """A chunk was not finite: drop the push; its round does not wait for another."""
    if (yield from collect.refused(state, event)):
        state.skip(event.work.worker_id, event.work.fragment)


def look(state: RunState) -> Effects:
    """Note when a quorum is complete, and determine the grace period that begins then."""
    yield from ()
    round_ = _round(state)
    if round_.look(state.run_time, floor=state.floor, quorum=state.config.quorum):
        # Also that of a deferred push: its worker waits for it, too.
        first_at = min(each.begun_at for each in round_.pool.values())
        pauses_s = (
            state.config.overlap_steps(member.sync_every) / member.figures.speed
            for member in state.members
            if member.figures.speed is not None
        )
        state.slack.begin(state.run_time, first_at, pauses_s)


def tally(state: RunState) -> Tally:
    return _round(state).tally(state.floor)


def close(state: RunState) -> Effects:
    """Merge the complete submissions, and defer or drop the others.

    A submission that is too large is refused instead: without it the round may not be due.
    """
    round_ = _round(state)
    whole = round_.whole()
    kept = yield from norms.refuse_too_large(state, whole)
    if len(kept) == len(whole):
        round_.close(kept)
        steps = collect.merge(state, round_.fragment, [round_.chosen])
        yield from combining.with_sums(state, steps, round_.chosen)
        downloading = (
            route
            for route, reader in state.versions.readers.items()
            if reader.joined and round_.fragment in reader.downloads
        )
        state.slack.closed(state.run_time, downloading)
        yield from _tell_the_late(state, round_)


def _tell_the_late(state: RunState, round_: StagedRound) -> Effects:
    following = round_.number + state.config.num_fragments
    for submission in [s for s in round_.pool.values() if not s.is_chosen]:
        worker_id, push = submission.worker_id, submission.push
        if state.config.late == "drop" and not submission.is_whole:
            state.submissions.drop(submission)
            text = f"Round {round_.number} closed without {worker_id}; dropped its late push."
            yield from grants.refuse(state, push.fragment, submission.key, Code.LATE, text)
            continue
        text = (
            f"Round {round_.number} closed without {worker_id}; deferred its push to {following}."
        )
        yield info(text)
        member = state.members.named(worker_id)
        if member is not None:
            yield member.tell(Notice("deferred", text, push.fragment, following))


def released(state: RunState) -> Effects:
    state.slack.released(state.run_time)
    yield from ()


def leave(state: RunState, worker_id: str) -> Effects:
    _round(state).barrier.expect_no_more(worker_id)
    collect.leave(state, worker_id)
    yield from ()


def do_without(state: RunState, worker_id: str) -> Effects:
    round_ = _round(state)
    round_.barrier.expect_no_more(worker_id)
    for submission in [s for s in round_.pool.values() if s.worker_id == worker_id]:
        if not (submission.is_whole or submission.is_chosen):
            state.submissions.drop(submission)
    yield from ()
