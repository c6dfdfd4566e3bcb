"""The sequence of rounds: opening one, entering pushes, closing it, stepping, releasing the version.

Round n concerns fragment n mod P. There is one sequence for all fragments: with independent ones a slow
newcomer can make the fragments wait for each other crosswise.
"""

from __future__ import annotations

from collections.abc import Iterator

from diloco_broker.events import Effect, Log, Send, Step, Stepped
from diloco_broker.membership import Member
from diloco_broker.rounds import Contribution, Phase, Round
from diloco_broker.state import RoundReport, State
from diloco_broker.transfer import Upload, upload_window
from diloco_protocol.chunks import Bitmap
from diloco_protocol.messages import Grant, Push, Standing
from diloco_protocol.version import VersionId


def open_round(state: State, number: int, now: float) -> Iterator[Effect]:
    """Open a round, with everyone here expected, and enter the pushes that came too early for it."""
    fragment = number % state.run_config.num_fragments
    stock = state.shelf.stocks[fragment]
    floor = state.config.workers if state.first_round_pending else state.config.min_workers
    expected = {member.worker_id for member in state.members}
    state.round = Round(number, fragment, stock.layout.chunks, floor, expected, now)
    for member in state.members:
        push = member.deferred.pop(fragment, None)
        if push is not None:
            before = stock.ledger.standing(member.worker_id, push.push_id, push.chunks)
            yield from enter(state, member, push, before)
    yield from close_if_due(state)


def takes_now(round_: Round, member: Member, push: Push) -> bool:
    """Can this new push enter the round that is going on?"""
    if round_.phase is Phase.CLOSING or round_.fragment != push.fragment:
        return False
    # One whole contribution of a worker in a round; a second one belongs to the next.
    return not any(c.is_whole for c in round_.of_worker(member.worker_id))


def abandon_others(state: State, worker_id: str, push_id: int) -> Iterator[Effect]:
    """A worker that comes with another push has given up the unfinished ones."""
    assert state.round is not None
    for other in list(state.round.of_worker(worker_id)):
        if other.push.push_id != push_id and not other.is_whole:
            yield from step(state, state.round.abandon(other))


def enter(state: State, member: Member, push: Push, before: Bitmap) -> Iterator[Effect]:
    """Let a new push into the open round. Others of the same worker have been abandoned."""
    assert state.round is not None and push.base is not None
    if before.is_full:
        yield Send(member.control, Grant(push.push_id, push.fragment, Standing.COUNTED))
        return
    current = state.shelf.stocks[push.fragment].version
    assert current is not None
    contribution = state.round.begin(member.worker_id, push, before)
    state.totals.pushes += 1
    member.pushes += 1
    member.last_round = state.round.number
    member.staleness = max(0, current.counter - push.base.counter)
    member.state = "pushing"
    member.inner_step = push.steps
    member.loss = push.loss if push.loss is not None else member.loss
    yield from grant(state, member, contribution)


def grant(state: State, member: Member, contribution: Contribution) -> Iterator[Effect]:
    """Tell the worker which chunks are held of its push, and how many it may send now."""
    assert state.round is not None
    push = contribution.push
    # Chunks that wait to be folded are still in our memory: they count against the window.
    waiting = len(contribution.arrived) - len(contribution.folded)
    credit = max(0, upload_window(len(state.round.expected)) - waiting)
    member.uploads[push.fragment] = Upload(push, credit)
    held = contribution.held
    if held:
        message = Grant(push.push_id, push.fragment, Standing.RESUME, held.to_bytes(), credit)
    else:
        message = Grant(push.push_id, push.fragment, Standing.NEW, credit=credit)
    yield Send(member.control, message)


def close_if_due(state: State) -> Iterator[Effect]:
    """Begin to close the round if everyone expected has begun; what is ready is stepped at once."""
    if state.round is None or state.stopping:
        return
    ready = state.round.close_if_due()
    if ready is None:
        return
    version = state.shelf.stocks[state.round.fragment].version
    assert version is not None
    following = VersionId(version.run, version.counter + 1, state.draw())
    state.shelf.make(state.round.fragment, following)
    yield from step(state, ready)


def step(state: State, indexes: list[int]) -> Iterator[Effect]:
    """The outer step of chunks that nobody owes any more."""
    for index in indexes:
        assert state.round is not None
        yield Step(state.round.fragment, index, state.round.reached[index])


def stepped(state: State, event: Stepped, now: float) -> Iterator[Effect]:
    """An outer step was taken: the chunk can be handed out; with the last one, the version."""
    work, round_ = event.work, state.round
    assert round_ is not None and round_.fragment == work.fragment
    round_.stepped.add(work.index)
    if event.overflow:
        yield Log(
            "error",
            f"The mean of chunk {work.index} in round {round_.number} overflowed; the chunk keeps "
            "its value. A worker sends very large pseudo-gradients.",
        )
    yield from state.shelf.chunk_ready(work.fragment, work.index, event.wire)
    if round_.stepped.is_full:
        yield from _release(state, round_, now)


def _release(state: State, ended: Round, now: float) -> Iterator[Effect]:
    """Every chunk has been stepped: the version is whole, the next round opens."""
    ledger = state.shelf.stocks[ended.fragment].ledger
    for contribution in ended.contributions.values():
        push = contribution.push
        ledger = ledger.with_push(contribution.worker_id, push.push_id, contribution.counted)
        member = state.members.named(contribution.worker_id)
        if member is not None:
            upload = member.uploads.get(ended.fragment)
            if upload is not None and upload.push.push_id == push.push_id:
                upload.is_void = True
            member.state = "training"
            member.inner_step = 0
    ledger = ledger.without_the_long_gone({member.worker_id for member in state.members})
    state.totals.rounds += 1
    state.last_report = _report(ended, now)
    state.first_round_pending = False
    yield Log(
        "info",
        f"Round {ended.number} closed in {now - ended.opened_at:.1f} s: "
        f"{ended.averaged} of {len(ended.expected)} expected workers averaged.",
    )
    yield from state.shelf.release(ended.fragment, ledger, ended.number, ended.averaged)
    yield from open_round(state, ended.number + 1, now)


def _report(ended: Round, now: float) -> RoundReport:
    whole = [c.push for c in ended.contributions.values() if c.is_whole]
    losses = [push.loss for push in whole if push.loss is not None]
    norms = [push.norm for push in whole if push.norm is not None]
    return RoundReport(
        ended.number,
        now - ended.opened_at,
        ended.averaged,
        sum(push.weight for push in whole),
        sum(losses) / len(losses) if losses else None,
        sum(norms) / len(norms) if norms else None,
    )
