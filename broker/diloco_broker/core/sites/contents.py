"""What is in the push of a relay: named, bounded, and in no other push that counts.

A relay pushes the mean of the pushes of its site, and names each of them. The ledger of the version that
has it names them too, under the workers' own ids, as if each had pushed here. So whoever offers one of
them again, through whatever broker, finds that it is in; and a worker behind a relay reads its own push
in the ledger that comes down to it.

A relay that was started again, or a worker that went to another one, may bring a push a second time
while the first is still under way. Nothing can be taken out of a mean, so all of a relay's push is
refused then (`contained`): the relay makes another of what is not counted. The push of a worker that
came here directly is put off (`under_way`): it loses nothing, and is counted or wanted soon.

A ledger remembers a few pushes of each worker. A relay that was away while more than those were counted
may bring one that nobody remembers. Where that cannot be told, nothing counts: the push is refused as
too old (`stale`). Its relay leaves out what has the oldest base, and the rest goes up again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from diloco_broker.core.members.members import Member
from diloco_broker.core.rounds.submissions import Submission
from diloco_broker.core.state import RunState
from diloco_protocol.errors import Code, ProtocolError
from diloco_protocol.manifest import summarise
from diloco_protocol.messages import Push, is_worker_id


def together(state: RunState, whole: Sequence[Submission]) -> list[Submission]:
    """Those of these that can be merged at once; at a relay the others go up with the next.

    What goes up names one push of each worker. One that has moved, or was started again elsewhere,
    may have two on different ways here.
    """
    found: list[Submission] = []
    named: set[str] = set()
    for each in whole:
        names = {each.worker_id, *(each.push.contents or {})}
        if not (state.is_site and names & named):
            named |= names
            found.append(each)
    return found


def check(state: RunState, member: Member, push: Push) -> None:
    """Raise ProtocolError for contents that cannot be, or of which some are in another push."""
    if member.is_relay != (push.contents is not None):
        whose = (
            "a relay names the pushes in its own" if member.is_relay else "only a relay's has some"
        )
        raise ProtocolError(Code.BAD_PUSH, f"The contents of the push do not fit: {whose}.")
    if not (push.bases or {}).keys() <= (push.contents or {}).keys():
        text = "The push has bases of pushes that are not in it."
        raise ProtocolError(Code.BAD_PUSH, text)
    if push.contents is None:
        _check_direct(state, member, push)
    else:
        _check_names(state, member, push, len(push.contents))
        _check_others(state, member, push)


def _check_direct(state: RunState, member: Member, push: Push) -> None:
    if push.workers != 1:
        text = f"The push says that it is of {push.workers} workers; only a relay's is of more than one."
        raise ProtocolError(Code.BAD_PUSH, text)
    for whose, other in _under_way(state, push):
        if (other.contents or {}).get(member.worker_id) == push.push_id:
            raise ProtocolError(
                Code.UNDER_WAY,
                f"A push of relay {whose} that is under way contains this one; it can be offered again "
                "when that is over.",
            )


def _check_names(state: RunState, member: Member, push: Push, number: int) -> None:
    contents = push.contents or {}
    if not 1 <= push.workers <= number:
        text = f"The push has {number} pushes in it and says that it is of {push.workers} workers."
        raise ProtocolError(Code.BAD_PUSH, text)
    for worker_id, push_id in contents.items():
        if (
            not is_worker_id(worker_id)
            or worker_id == member.worker_id
            or not 0 <= push_id < 1 << 64
        ):
            text = f"The push cannot contain push {push_id!s:.40} of {worker_id!r:.80}."
            raise ProtocolError(Code.BAD_PUSH, text)
    if contents.keys() <= member.behind:
        return  # there was room for them: who came later, and names many, takes nothing away
    # The ledger names them all, and travels with each version.
    others = {name for each in state.members if each is not member for name in each.behind}
    here, most = len(state.members), state.config.max_workers
    if here + len(others | contents.keys()) > most:
        raise ProtocolError(
            Code.BAD_PUSH,
            f"With the {number} workers in this push there are more than {most}, which this broker "
            "takes at most. Start it with a larger --max-workers, if more are meant.",
        )


def _check_others(state: RunState, member: Member, push: Push) -> None:
    contents, ledger = push.contents or {}, state.versions[push.fragment].ledger
    if ledger.names_whole(member.worker_id, push.push_id):
        return  # it is in, and its relay is told so
    counted = ledger.names_any_of(contents)
    if counted:
        raise ProtocolError(
            Code.CONTAINED,
            f"What {summarise(sorted(counted))} sent in this push is counted already; pull the newest "
            "version, and push what is not in it.",
        )
    _check_memory(state, push)
    replaced = {each.push_id for each in member.deferred.values()} | {
        each.push.push_id
        for each in state.submissions
        if each.worker_id == member.worker_id and not each.is_whole
    }
    for whose, other in _under_way(state, push):
        if whose == member.worker_id and other.push_id in (*replaced, push.push_id):
            continue  # itself, or one that it takes the place of
        theirs = {whose: other.push_id, **(other.contents or {})}
        both = sorted(name for name, push_id in contents.items() if theirs.get(name) == push_id)
        if both:
            raise ProtocolError(
                Code.CONTAINED,
                f"What {summarise(both)} sent in this push is under way in one of {whose}; wait for the "
                "next version, and push what is not in it.",
            )


def _check_memory(state: RunState, push: Push) -> None:
    if state.is_site or push.base is None:
        return  # a relay has not seen each version; who makes them decides
    forgotten = state.versions[push.fragment].forgotten
    bases = push.bases or dict.fromkeys(push.contents or {}, push.base.counter)
    unsure = forgotten.may_name(bases, has_rounds=not state.config.is_async)
    if unsure:
        raise ProtocolError(
            Code.STALE,
            f"So much of {summarise(sorted(unsure))} has counted since this push was made that nobody "
            "can tell any more whether what it contains of theirs has; pull the newest version.",
        )


def _under_way(state: RunState, push: Push) -> Iterator[tuple[str, Push]]:
    """Pushes of the fragment that are here, whole, in part or put off, and in no version that is out."""
    for each in state.submissions:
        if each.push.fragment == push.fragment:
            yield each.worker_id, each.push
    for member in state.members:
        waiting = member.deferred.get(push.fragment)
        if waiting is not None:
            yield member.worker_id, waiting
