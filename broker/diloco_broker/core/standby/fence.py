"""The fence of a hub with a standby: what it may do without a lease, and how it keeps one.

While the lease does not hold no version is released, no round closes, a run neither begins nor goes on
nor ends, and its deadlines stand still (`operations.holding`). Without `--standby` there is no lease,
and all of this is nothing.
"""

from __future__ import annotations

from diloco_broker.core import effects
from diloco_broker.core.members.members import Member
from diloco_broker.core.standby.lease import Watch
from diloco_broker.core.state import RunState
from diloco_broker.core.versions import checkpoints
from diloco_protocol import messages
from diloco_protocol.errors import Code, ProtocolError

# A lease is renewed so many times in its length. Once the standby is silent, workers are asked twice as
# often.
TIMES = 3.0
# The standby is silent after this part of the length.
SILENT_AFTER = 0.5
_OTHER = (
    "This hub has another standby ({}). If that is gone for good, say so to the hub with diloco-broker "
    "promote, and start this one again."
)


def may_release(state: RunState) -> bool:
    """May a version be released now?"""
    return state.standby is None or state.standby.lease.holds


def holds_rounds(state: RunState) -> bool:
    """Does no round close, for want of a lease, or because the standby is about to take over?"""
    watch = state.standby
    return watch is not None and (watch.is_on_hold or not watch.lease.holds)


def check_join(state: RunState) -> None:
    """Raises ProtocolError where a worker should look for another broker."""
    watch = state.standby
    if watch is not None and not watch.lets_in:
        raise ProtocolError(Code.STANDBY, f"This broker lets nobody in: it {why_not(watch)}.")


def why_not(watch: Watch) -> str:
    """Why no version is released, as the end of a sentence that begins with the broker."""
    if watch.lease.superseded_by is not None:
        return "was replaced by its standby, which has the run now"
    if not watch.lease.standby:
        return "waits for its standby, which has not come yet"
    return "waits for a word of its standby, which may have taken over"


def tick(state: RunState) -> effects.Effects:
    """Time has passed: stamps are sent, and a change of the lease is said."""
    watch = state.standby
    if watch is None:
        return
    lease, now = watch.lease, watch.lease.now
    if now >= watch.speaks_at and watch.route is not None:
        yield _speak(state, watch)
    silent = now - lease.promised_at > SILENT_AFTER * lease.seconds
    if lease.holds and not lease.is_alone and silent and now >= watch.polls_at:
        watch.polls_at = now + lease.seconds / TIMES / 2
        asks = messages.Notice("lease", stamp=lease.stamp(), seconds=lease.seconds)
        for member in state.members:
            if member.voter is not None:
                yield member.tell(asks)
    yield from _say_changes(state, watch)


def _say_changes(state: RunState, watch: Watch) -> effects.Effects:
    holds, had = watch.lease.holds, watch.was_held
    watch.was_held = holds
    if holds:
        watch.has_sent_away = False
    if holds and not had:
        yield effects.info("This hub has its lease: versions are released.")
    elif had and not holds:
        yield effects.warning(
            f"This hub has lost its lease: it {why_not(watch)}. Until it has it again no version is "
            "released, and the run does not end."
        )


def sends_away(state: RunState) -> list[Member]:
    """Workers that are sent away now, since the lease lapsed a while ago."""
    watch = state.standby
    if watch is None or watch.lets_in or watch.has_sent_away:
        return []
    watch.has_sent_away = True
    return list(state.members)


def _speak(state: RunState, watch: Watch) -> effects.Effect:
    """Send the standby a stamp, and who votes."""
    lease = watch.lease
    watch.speaks_at = lease.now + lease.seconds / TIMES
    here = frozenset(m.voter for m in state.members if m.voter is not None)
    lease.voters.propose(state.draw(), here)
    newest, is_open = lease.voters.newest, lease.voters.proposed is not None
    told = messages.Lease(
        life=lease.life or 0,
        term=state.term,
        stamp=lease.stamp(),
        seconds=lease.seconds,
        roster=0 if newest is None else newest.number,
        voters=tuple(sorted(newest.voters)) if newest is not None and is_open else None,
        settled=_settled(state) if watch.is_on_hold else None,
        is_over=lease.superseded_by is not None,
    )
    assert watch.route is not None
    return effects.Send(watch.route, told)


def _settled(state: RunState) -> int | None:
    """Number of the checkpoint that has everything; 0 where none is wanted, None before it is there."""
    round_ = state.round
    if round_ is None or state.config.save_dir is None:
        return 0
    if state.closing:
        return None
    return round_.number if state.saving.number == round_.number else None


def promise(state: RunState, route: effects.Route, said: messages.Promise) -> effects.Effects:
    """The standby speaks."""
    watch = state.standby
    if watch is None:
        text = "This broker is no hub with a standby; start it with --standby."
        raise ProtocolError(Code.NOT_ALLOWED, text)
    lease = watch.lease
    knew = lease.standby
    if said.wants == "over" and said.term > state.term:  # under any name: it has the run
        if lease.superseded_by is None:
            yield from _is_superseded(state, watch, said.term)
        watch.wants = said.wants
        return
    if not lease.begins_with(said.standby, said.life):
        raise ProtocolError(Code.NOT_ALLOWED, _OTHER.format(lease.standby))
    is_known = lease.standby == knew
    lease.heard_at, before = lease.now, watch.wants
    watch.wants = said.wants
    lease.voters.acknowledged(said.roster)
    if said.wants in ("charge", "over") and lease.superseded_by is None:
        yield from _is_superseded(state, watch, max(said.term, state.term + 1))
    elif said.stamp is not None:
        lease.promised(said.stamp)
    if said.wants == "hold" and before != "hold":
        yield effects.info(
            "The standby is about to take over: no round closes, and the run is saved."
        )
    yield from _save(state, watch)
    if not is_known and state.round is not None and state.config.save_dir is not None:
        yield from checkpoints.save_soon(state)  # started again it must know whose word it needs
    is_new = route != watch.route
    watch.route = route
    if said.wants == "over":
        return
    if said.stamp is None or is_new or said.wants != before:
        yield _speak(state, watch)


def _is_superseded(state: RunState, watch: Watch, term: int) -> effects.Effects:
    watch.lease.superseded_by = term
    yield effects.warning(
        f"The standby takes over with term {term}: this hub releases nothing any more. Stop it, and "
        "start it as a standby of the other if you like."
    )


def _save(state: RunState, watch: Watch) -> effects.Effects:
    """What the standby is to go on with is written down."""
    round_ = state.round
    if not watch.is_on_hold or round_ is None or state.closing or state.config.save_dir is None:
        return
    if round_.number not in (state.saving.number, watch.saves):
        watch.saves = round_.number
        yield from checkpoints.save_soon(state)


def left(state: RunState, member: Member) -> None:
    """A worker leaves: once the run is over, that counts as its vote from then on."""
    if state.standby is not None and state.ending.is_over and member.voter is not None:
        state.standby.lease.left(member.voter)


def vote(state: RunState, member: Member, said: messages.Vote) -> effects.Effects:
    """A worker returns a stamp."""
    if state.standby is not None and said.voter == member.voter:
        state.standby.lease.voted(said.voter, said.stamp)
    return iter(())
