"""The story of the core: its last events, which the text of a fatal error contains.

Events are kept as short records of numbers and names, without payloads and texts of peers; an error
formats them. Events of chunks are kept apart from those of rounds, which they would push out. Heartbeats
and ticks are not kept. (The idea is `story()` in `distributed/worker_state_machine.py` of Dask.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from diloco_broker.core import events
from diloco_broker.core.rounds.round import InvariantBroken
from diloco_broker.core.state import RunState
from diloco_protocol import messages

KEPT = 200  # events of rounds, and as many of chunks: bounds the memory
MOST_SHOWN = 8  # events of each kind in an error, for the worker and for the round
LONGEST_CAUSE, LONGEST_ID = 500, 64  # characters

# Events that occur once a round or more rarely, and those that occur for every chunk.
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


@dataclass(slots=True)
class Entry:
    """The fields of an event. Session tokens are not kept: a peer may send one of megabytes."""

    at: float = 0.0
    number: int | None = None  # of the round
    kind: type = object
    worker_id: str = ""
    fragment: int | None = None
    chunk: int | None = None
    push: int | None = None

    def __str__(self) -> str:
        named = {"fragment": self.fragment, "chunk": self.chunk, "push": self.push}
        said = [f"{name} {value}" for name, value in named.items() if value is not None]
        of = f" of {self.worker_id}" if self.worker_id else ""
        return ", ".join([f"{self.kind.__name__}{of}", *said])


def entry_of(event: events.Event, state: RunState, at: float) -> Entry:
    """Make the entry of an event; the state is that before the event."""
    subject: Any = event.message if type(event) is events.Received else event
    about = getattr(subject, "work", subject)
    get = partial(getattr, about)
    worker_id = get("worker_id", None)
    if worker_id is None:
        session = get("session", None)
        member = state.members.with_session(session) if session else None
        if type(subject) is events.PeerGone:
            member = state.members.on_route(subject.route)
        worker_id = member.worker_id if member else ""
    number = None if state.round is None else state.round.number
    name, its = worker_id[:LONGEST_ID], (get("fragment", None), get("index", None))
    return Entry(at, number, type(subject), name, *its, get("push_id", None))


class CoreError(RuntimeError):
    """The core failed to handle an event, with the exception as cause. The text has the last events."""


class Story:
    """Keeps the last events; `len` is their number."""

    def __init__(self) -> None:
        self._rare: deque[Entry] = deque(maxlen=KEPT)
        self._frequent: deque[Entry] = deque(maxlen=KEPT)
        self._last = Entry()

    def __len__(self) -> int:
        return len(self._rare) + len(self._frequent)

    def note(self, event: events.Event, state: RunState) -> None:
        """Record an event; the state is that before the event. To be called for every event."""
        self._last = entry_of(event, state, state.now)
        if self._last.kind in FREQUENT:
            self._frequent.append(self._last)
        elif self._last.kind in RARE:
            self._rare.append(self._last)

    def failure(self, error: Exception, state: RunState) -> InvariantBroken | CoreError:
        """Make the error to raise for an exception, with the events of its round and worker."""
        round_ = state.round
        number = None if round_ is None else round_.number
        phase = "" if round_ is None else f" ({round_.phase.value}, fragment {round_.fragment})"
        worker_id = getattr(error, "worker_id", "") or self._last.worker_id
        cause = str(error) if isinstance(error, InvariantBroken) else repr(error)
        lines = [
            f"{cause:.{LONGEST_CAUSE}}",
            f"  in round {number}{phase}, at the event: {_sentence(self._last, state)}",
        ]
        if worker_id:
            lines.append(f"  before it, of {worker_id}:")
            lines += self._lines(lambda entry: entry.worker_id == worker_id, state)
        lines.append("  before it, in this round:")
        lines += self._lines(lambda entry: entry.number == number, state)
        text = "\n".join(lines)
        if isinstance(error, AssertionError):
            return InvariantBroken(text, worker_id)
        return CoreError(text)

    def _lines(self, concerns: Callable[[Entry], bool], state: RunState) -> list[str]:
        found: list[Entry] = []
        for kept in (self._rare, self._frequent):
            found += [each for each in kept if each is not self._last and concerns(each)][
                -MOST_SHOWN:
            ]
        found.sort(key=lambda entry: entry.at)
        return [f"    {_sentence(entry, state)}" for entry in found]


def _sentence(entry: Entry, state: RunState) -> str:
    return f"{state.now - entry.at:.3f} s ago, round {entry.number}: {entry}"
