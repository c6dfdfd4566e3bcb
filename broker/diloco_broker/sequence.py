"""The sequence of rounds: opening one, closing it, stepping, releasing the version.

Round n concerns fragment n mod P. There is one sequence for all fragments: with independent ones a slow
newcomer can make the fragments wait for each other crosswise. In asynchronous mode a round is the
application of one submission (or of those in one grace window), and its fragment is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

from diloco_broker import asynchronous, staged, streaming
from diloco_broker.events import Effect, Log, Send, Stepped
from diloco_broker.rounds import Counting, Round
from diloco_broker.staging import StagedRound
from diloco_broker.state import RoundReport, State
from diloco_protocol.messages import Push, Rejoin


def open_round(state: State, number: int) -> Iterator[Effect]:
    """Open a round, with everyone here expected, and enter the pushes that came too early for it."""
    config = state.config
    fragment = number % config.num_fragments
    chunks = state.shelf.stocks[fragment].layout.chunks
    if config.is_async:
        state.round = StagedRound(number, fragment, chunks, 0, set(), state.now)
    else:
        floor = config.workers if state.first_round_pending else config.min_workers
        expected = {member.worker_id for member in state.members}
        if config.is_staged:
            round_ = StagedRound(
                number,
                fragment,
                chunks,
                floor,
                expected,
                state.now,
                state.staging.pool(fragment),
                state.staging.excused_from(fragment),
                config.quorum,
                config.grace,
            )
            yield from staged.open_round(state, round_)
        else:
            excused = state.staging.excused_from(fragment)
            yield from streaming.open_round(
                state, Round(number, fragment, chunks, floor, expected, state.now, excused)
            )
    yield from close_if_due(state)


def close_if_due(state: State) -> Iterator[Effect]:
    """Begin to close the round if it is time to."""
    round_ = state.round
    if round_ is None or state.stopping:
        return
    if isinstance(round_, Round):
        yield from streaming.close_if_due(state, round_)
    elif state.config.is_async:
        yield from asynchronous.apply_if_ready(state, round_)
    else:
        yield from staged.close_if_due(state, round_)


def leave(state: State, worker_id: str) -> Iterator[Effect]:
    """A worker is gone: whoever waited for it waits no longer."""
    round_ = state.round
    if isinstance(round_, Round):
        yield from streaming.leave(state, round_, worker_id)
    elif round_ is not None:
        staged.leave(state, round_, worker_id)
        if state.config.is_async:
            yield from asynchronous.hand_out_slots(state)
    yield from _expect_all(state)
    yield from close_if_due(state)


def _expect_all(state: State) -> Iterator[Effect]:
    """A round that has fallen below its floor needs everybody, also those expected from a later one."""
    round_ = state.round
    if round_ is None or not round_.below_floor:
        return
    for member in state.members:
        if member.worker_id not in round_.expected:
            round_.expected.add(member.worker_id)
            if state.config.num_fragments > 1:
                text = (
                    f"Round {round_.number} lacks workers and needs this one as well; join again."
                )
                yield Send(member.control, Rejoin(state.epoch, text))


def excuse(state: State, worker_id: str, push: Push) -> Iterator[Effect]:
    """A push was refused: the others do not wait for its worker in that round."""
    if state.round is not None and not state.config.is_async:
        state.staging.excused_from(push.fragment).add(worker_id)
        yield from close_if_due(state)


def look_after(state: State) -> Iterator[Effect]:
    """Time has passed: is a window over, has an upload stood still?"""
    if state.round is not None and state.config.is_async:
        yield from asynchronous.take_back_slots(state)
    yield from close_if_due(state)


def stepped(state: State, event: Stepped) -> Iterator[Effect]:
    """An outer step was taken: the chunk can be handed out; with the last one, the version."""
    round_ = state.round
    assert round_ is not None and round_.fragment == event.fragment
    round_.stepped.add(event.index)
    if event.overflow:
        yield Log(
            "error",
            f"A gradient of chunk {event.index} in round {round_.number} overflowed and was left out. "
            "A worker sends very large pseudo-gradients.",
        )
    yield from state.shelf.chunk_ready(event.fragment, event.index, event.wire)
    if round_.stepped.is_full:
        yield from _release(state, round_)


def _release(state: State, ended: Round | StagedRound) -> Iterator[Effect]:
    """Every chunk has been stepped: the version is whole, the next round opens."""
    fragment = ended.fragment
    ledger = state.shelf.stocks[fragment].ledger
    counting = list(ended.counting())
    for each in counting:
        ledger = ledger.with_push(each.worker_id, each.push.push_id, each.chunks)
        member = state.members.named(each.worker_id)
        if member is not None:
            upload = member.uploads.get(fragment)
            if upload is not None and upload.push.push_id == each.push.push_id:
                upload.is_void = True
            member.state = "training"
            member.inner_step = 0
            member.staleness = each.staleness
            member.account.staleness[fragment] = each.staleness
    ledger = ledger.without_the_long_gone({member.worker_id for member in state.members})
    state.totals.rounds += 1
    state.last_report = _report(ended, counting, state.now)
    state.first_round_pending = False
    yield from _tell(state, ended, counting)
    yield from state.shelf.release(fragment, ledger, ended.number, ended.averaged)
    state.staging.excused_from(fragment).clear()
    if isinstance(ended, StagedRound):
        staged.released(state, ended)
    yield from open_round(state, ended.number + 1)
    if state.config.is_async:
        yield from asynchronous.hand_out_slots(state)


def _tell(state: State, ended: Round | StagedRound, counting: list[Counting]) -> Iterator[Effect]:
    if state.config.is_async:
        whose = ", ".join(f"{c.worker_id} ({c.staleness} versions old)" for c in counting)
        yield Log("debug", f"Version {ended.number + 1} contains the push of {whose}.")
        return
    whole = {each.worker_id for each in counting if each.chunks.is_full}
    absent = sorted(ended.expected - whole)
    names = f", without {', '.join(absent[:5])}{' ...'[: 4 * (len(absent) > 5)]}" if absent else ""
    which = f" (fragment {ended.fragment})" if state.config.num_fragments > 1 else ""
    yield Log(
        "info",
        f"Round {ended.number}{which} closed in {state.now - ended.opened_at:.1f} s: "
        f"{ended.averaged} of {len(ended.expected)} expected workers averaged{names}.",
    )


def _report(ended: Round | StagedRound, counting: list[Counting], now: float) -> RoundReport:
    whole = [each for each in counting if each.chunks.is_full]
    losses = [each.push.loss for each in whole if each.push.loss is not None]
    norms = [each.push.norm for each in whole if each.push.norm is not None]
    return RoundReport(
        ended.number,
        now - ended.opened_at,
        ended.averaged,
        sum(each.weight for each in whole),
        sum(losses) / len(losses) if losses else None,
        sum(norms) / len(norms) if norms else None,
        max((each.staleness for each in whole), default=0),
    )
