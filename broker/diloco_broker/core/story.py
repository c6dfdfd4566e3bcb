"""The last events of the core, for the error that ends it: what had happened to this worker and round?

Events are kept as short tuples of numbers and names, never with a payload or a text of a peer; sentences
are made when an error needs them. What comes for every chunk has a place of its own, so that it does not
push out what comes once a round. Heartbeats and ticks are not kept. (The idea is `story()` in
`distributed/worker_state_machine.py` of Dask.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from diloco_broker.core import events
from diloco_broker.core.state.members import Membership
from diloco_broker.core.state.run import RunState
from diloco_broker.core.state.update import InvariantBroken
from diloco_protocol import messages

KEPT = 200  # of the events that come once a round, and as many of those that come for each chunk
TOLD = 8  # of each of these, of a worker and of a round
LONGEST_CAUSE, LONGEST_ID = 500, 64  # characters

# What comes once a round or more rarely, and what comes for every chunk. Others are not kept.
RARE = {
    messages.Join,
    messages.Push,
    messages.Commit,
    messages.Leave,
    messages.Control,
    events.WorkRefused,
    events.InitialRefused,
    events.PeerGone,
    events.Saved,
    events.SaveFailed,
    events.StoodStill,
    events.Stop,
}
FREQUENT = {
    messages.Chunk,
    messages.Pull,
    events.WorkDone,
    events.InitialStored,
    events.Stepped,
    events.Malformed,
}
# Whose it is, by worker id, fragment, chunk and push id, as far as an event has them. A session is never
# kept: anybody may send megabytes as one.
Facts = tuple[str | None, int | None, int | None, int | None]
# When, in which round, what.
Entry = tuple[float, int | None, type, Facts]


def _facts(subject: Any, members: Membership) -> Facts:
    about = getattr(subject, "work", subject)
    worker_id = getattr(about, "worker_id", None)
    if worker_id is None and (session := getattr(about, "session", None)):
        member = members.with_session(session)
        worker_id = member.worker_id if member else None
    elif isinstance(subject, events.PeerGone):
        member = members.on_route(subject.route)
        worker_id = member.worker_id if member else None
    fragment, chunk = getattr(about, "fragment", None), getattr(about, "index", None)
    return worker_id and worker_id[:LONGEST_ID], fragment, chunk, getattr(about, "push_id", None)


class CoreError(RuntimeError):
    """The core could not handle an event; the cause is what it met. The text tells what came before."""


class Story:
    """See the head of this module. `len` is how many events it keeps."""

    def __init__(self) -> None:
        self._rare: deque[Entry] = deque(maxlen=KEPT)
        self._frequent: deque[Entry] = deque(maxlen=KEPT)
        self._last: Entry = (0.0, None, object, (None, None, None, None))

    def __len__(self) -> int:
        return len(self._rare) + len(self._frequent)

    def note(self, event: events.Event, state: RunState) -> None:
        """An event comes in; the state is as it was before. Every event comes here."""
        subject: Any = event
        if type(event) is events.Received:
            subject = event.message
        kind = type(subject)
        number = None if state.round is None else state.round.number
        self._last = (state.now, number, kind, _facts(subject, state.members))
        if kind in FREQUENT:
            self._frequent.append(self._last)
        elif kind in RARE:
            self._rare.append(self._last)

    def failure(self, error: Exception, state: RunState) -> InvariantBroken | CoreError:
        """The error to raise for one that the core has met: it names round, worker and their events."""
        round_ = state.round
        number = None if round_ is None else round_.number
        phase = "" if round_ is None else f" ({round_.phase.value}, fragment {round_.fragment})"
        worker_id = getattr(error, "worker_id", "") or _whose(self._last)
        cause = str(error) if isinstance(error, InvariantBroken) else repr(error)
        lines = [
            f"{cause:.{LONGEST_CAUSE}}",
            f"  in round {number}{phase}, at the event: {_sentence(self._last, state)}",
        ]
        if worker_id:
            lines.append(f"  before it, of {worker_id}:")
            lines += self._told(lambda entry: _whose(entry) == worker_id, state)
        lines.append("  before it, in this round:")
        lines += self._told(lambda entry: entry[1] == number, state)
        text = "\n".join(lines)
        if isinstance(error, AssertionError):
            return InvariantBroken(text, worker_id)
        return CoreError(text)

    def _told(self, concerns: Callable[[Entry], bool], state: RunState) -> list[str]:
        found: list[Entry] = []
        for kept in (self._rare, self._frequent):
            found += [each for each in kept if each is not self._last and concerns(each)][-TOLD:]
        found.sort(key=lambda entry: entry[0])
        return [f"    {_sentence(entry, state)}" for entry in found]


def _whose(entry: Entry) -> str:
    return entry[3][0] or ""


def _sentence(entry: Entry, state: RunState) -> str:
    at, number, kind, facts = entry
    worker_id = _whose(entry)
    named = zip(("fragment", "chunk", "push"), facts[1:], strict=True)
    said = [f"{name} {value}" for name, value in named if value is not None]
    of = f" of {worker_id}" if worker_id else ""
    when = f"{state.now - at:.3f} s ago, round {number}"
    return ", ".join([f"{when}: {kind.__name__}{of}", *said])
