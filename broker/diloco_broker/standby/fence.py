"""The fence of a hub with a standby: what it may not do without a lease, and how it renews one.

A part of the core. Without a lease no version is released, no round closes, the run neither begins nor
resumes nor ends, and its deadlines are suspended (`operations.holding`). All of this applies only with
`--standby`.
"""

from __future__ import annotations

from diloco_broker.core import effects
from diloco_broker.core.members.members import Member
from diloco_broker.core.state import RunState
from diloco_broker.core.versions import checkpoints
from diloco_broker.standby.lease import Lease
from diloco_protocol import messages
from diloco_protocol.errors import Code, ProtocolError

# Renewals per lease length. While the standby is silent, workers are asked twice as often.
TIMES = 3.0
# The standby is silent after this part of the length.
SILENT_AFTER = 0.5
_OTHER = (
    "This hub has another standby ({}). If that will not come back, run diloco-broker promote against "
    "the hub and restart this standby."
)


def may_release(state: RunState) -> bool:
    """Whether a version may be released now."""
    return state.standby is None or state.standby.holds


def holds_rounds(state: RunState) -> bool:
    """Whether rounds stay open: the hub has no lease, or the standby is about to take over."""
    lease = state.standby
    return lease is not None and (lease.is_on_hold or not lease.holds)


def check_join(state: RunState) -> None:
    """Raise ProtocolError if workers should look for another broker."""
    lease = state.standby
    if lease is not None and not lease.lets_in:
        raise ProtocolError(Code.STANDBY, f"This broker admits no workers: it {why_not(lease)}.")


def why_not(lease: Lease) -> str:
    """Why no version is released, as a predicate of the broker."""
    if lease.superseded_by is not None:
        return "was replaced by its standby"
    if not lease.standby:
        return "waits for its standby to connect"
    return "has lost its standby, which may have taken over"


def tick(state: RunState) -> effects.Effects:
    """Send nonces that are due, and log when the lease is won or lost."""
    lease = state.standby
    if lease is None:
        return
    if lease.now >= lease.speaks_at and lease.route is not None:
        yield _speak(state, lease, lease.route)
    is_silent = lease.now - lease.promised_at > SILENT_AFTER * lease.seconds
    if lease.holds and not lease.is_alone and is_silent and lease.now >= lease.polls_at:
        lease.polls_at = lease.now + lease.seconds / TIMES / 2
        nonce = lease.ballot.nonce(lease.now)
        asks = messages.Notice("lease", nonce=nonce, seconds=lease.seconds)
        for member in state.members:
            if member.voter is not None:
                yield member.tell(asks)
    had, lease.was_held = lease.was_held, lease.holds
    if lease.holds and not had:
        yield effects.info("This hub has its lease: versions are released.")
    elif had and not lease.holds:
        yield effects.warning(
            f"This hub has lost its lease: it {why_not(lease)}. Until it has it again no version is "
            "released, and the run does not end."
        )


def sends_away(state: RunState) -> list[Member]:
    """Workers to send away because the lease lapsed a while ago."""
    lease = state.standby
    return [] if lease is None or lease.lets_in else list(state.members)


def _speak(state: RunState, lease: Lease, route: effects.Route) -> effects.Effect:
    """Send the standby a nonce, the voter set, and the settings of operators."""
    lease.speaks_at = lease.now + lease.seconds / TIMES
    lease.ballot.propose(frozenset(m.voter for m in state.members if m.voter is not None))
    said = messages.Lease(
        incarnation=lease.incarnation or 0,
        term=state.term,
        nonce=lease.ballot.nonce(lease.now),
        seconds=lease.seconds,
        voters=tuple(sorted(lease.ballot.proposed)),
        settings=(state.wanted or state.config).settings,
        settled=_settled(state) if lease.is_on_hold else None,
        is_over=lease.superseded_by is not None,
    )
    return effects.Send(route, said)


def _settled(state: RunState) -> int | None:
    """Number of the checkpoint that contains everything; 0 if none is needed, None until it exists."""
    round_ = state.round
    if round_ is None or state.config.save_dir is None:
        return 0
    return round_.number if not state.closing and state.saving.number == round_.number else None


def promise(state: RunState, route: effects.Route, said: messages.Promise) -> effects.Effects:
    """A standby greets the hub, or answers a nonce."""
    lease = state.standby
    if lease is None:
        text = "This broker accepts no standby; start it with --standby."
        raise ProtocolError(Code.NOT_ALLOWED, text)
    if said.wants == "over" and said.term > state.term:  # whatever its name
        yield from _is_superseded(lease, said.term)
        return
    knew, before, is_new = lease.standby, lease.wants, route != lease.route
    if not lease.begins_with(said.standby, said.incarnation):
        raise ProtocolError(Code.NOT_ALLOWED, _OTHER.format(lease.standby))
    lease.wants, lease.route = said.wants, route
    if said.wants in ("charge", "over"):
        yield from _is_superseded(lease, max(said.term, state.term + 1))
    elif said.nonce is not None:
        lease.promised(said.nonce)
    if said.wants == "hold" and before != "hold":
        yield effects.info("The standby is about to take over; holding rounds and saving the run.")
    yield from _save(state, lease, is_other=lease.standby != knew)
    if said.nonce is None or is_new or said.wants != before:
        yield _speak(state, lease, route)


def _is_superseded(lease: Lease, term: int) -> effects.Effects:
    if lease.superseded_by is None:
        lease.superseded_by = term
        yield effects.warning(
            f"The standby takes over with term {term}: this hub releases no more versions. Stop it; it "
            "can be restarted as a standby of the new hub."
        )


def _save(state: RunState, lease: Lease, *, is_other: bool) -> effects.Effects:
    """Save before a planned takeover, and when another standby connects: a restarted hub must know which
    standby's promise it needs."""
    round_ = state.round
    if round_ is None or state.config.save_dir is None:
        return
    is_due = lease.is_on_hold and round_.number not in (state.saving.number, lease.saves)
    if is_due and not state.closing:
        lease.saves = round_.number
    elif not is_other:
        return
    yield from checkpoints.save_soon(state)


def left(state: RunState, member: Member) -> None:
    """A worker leaves: once the run is over, that is a permanent vote for this hub."""
    if state.standby is not None and state.ending.is_over and member.voter is not None:
        state.standby.left(member.voter)


def vote(state: RunState, member: Member, said: messages.Vote) -> effects.Effects:
    """A worker returns a nonce."""
    if state.standby is not None and said.voter == member.voter:
        state.standby.voted(said.voter, said.nonce)
    return iter(())
