"""Joining, rejoining, heartbeats, votes, and the broker's signs of life. Pure.

NEW -> CONNECTING -> JOINING -> JOINED
            ^           |          |
            |           v          |
            +-- AWAY <-- connection broke, `rejoin`, or silence; at most 2 s
With several addresses (`Places`) AWAY also leads to the next one.
REFUSED: the broker refuses this worker for good: before the first welcome, or when an operator removed
         it. Later refusals are retried every 30 s, since an operator may repair the broker.
LEFT: the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from diloco_protocol import Bitmap, Code, RunConfig, messages
from diloco_protocol.description import seconds_for
from diloco_worker.session import effects
from diloco_worker.session.compatibility import heartbeat_interval

# Seconds before new connections are opened, doubled from the first to the longest. After a crash the
# broker gives its workers 10 s to return with what they hold, so the longest stays far below it.
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0
# Seconds between two attempts after "not now".
RETRY_S = 1.0
# Seconds between two attempts after a refusal during a run.
REFUSED_RETRY_S = 30.0
# Seconds without an answer to a join before reconnecting.
JOIN_PATIENCE_S = 20.0
# The broker answers every heartbeat. After this many intervals of silence, and at least this many
# seconds, the connection counts as broken.
SILENT_BEATS = 3
SILENT_S = 10.0
# The same where there is a standby: heartbeats in one lease, and leases of silence.
BEATS_A_LEASE = 3
SILENT_LEASES = 2
# Seconds in which an expected chunk or acknowledgement arrives. Doubled each time that none did, so
# that a link that needs longer for 2 MiB succeeds eventually.
BULK_PATIENCE_S = 30.0
LONGEST_BULK_PATIENCE_S = 960.0

# Errors of a broker that accepts no worker, while another one may.
ELSEWHERE = (Code.STANDBY, Code.STOPPING)
# Seconds for an address to answer where there is another one: TCP and a handshake with keys take five
# round trips.
CONNECT_PATIENCE_S = 3.0
# The longest pause after all have been tried: a standby that takes over is found within it.
LONGEST_PAUSE_S = 0.5

# A promise is kept longer than others rely on it by this factor: clocks run at different rates.
SAFETY = 1.05
REPLACED = "This broker was replaced by its standby, which has the run now."
# By fragment, the frozen one included, the process that owns each chunk.
Owners = tuple[tuple[int, ...], ...]


class Phase(str, Enum):
    NEW = "new"
    CONNECTING = "connecting"
    JOINING = "joining"
    JOINED = "joined"
    AWAY = "away"
    REFUSED = "refused"
    LEFT = "left"


@dataclass
class Places:
    """Which of the broker's addresses is tried next; the link has the addresses, here they are numbers.

    A root broker and its standby have an address each, and one of them accepts workers. A worker that
    lost its connection first tries the same address, then the others in order; after all of them it
    pauses.

    Attributes:
        count: how many there are.
        current: the one that is tried or in use.
    """

    count: int = 1
    current: int = 0
    _asked: set[int] = field(default_factory=set)  # tried since the last pause
    _locked: set[int] = field(default_factory=set)  # rejected our key

    @property
    def are_several(self) -> bool:
        return self.count > 1

    def welcomed(self) -> None:
        """The current address is right: when it is lost, all are tried again."""
        self._asked.clear()
        self._locked.clear()

    def lock(self) -> bool:
        """The current address rejected our key. Returns whether all have."""
        self._locked.add(self.current)
        return len(self._locked) == self.count

    def turn(self) -> bool:
        """Go on to the next address. Returns whether all have been tried."""
        self._asked.add(self.current)
        left = [each for each in range(self.count) if each not in self._asked]
        self.current = left[0] if left else 0
        if not left:
            self._asked.clear()
        return not left


class BulkWatch:
    """Notices that the bulk connection is dead although the control connection lives.

    A router drops what is sent on a lost connection, and heartbeats use their own. But chunks that were
    sent must be acknowledged, and chunks of a released version must arrive.
    """

    def __init__(self) -> None:
        self._since: float | None = None  # when waiting began, or the last arrival
        self._patience_s = BULK_PATIENCE_S

    @property
    def gives_up_at(self) -> float | None:
        """None while nothing is expected."""
        return None if self._since is None else self._since + self._patience_s

    def look(self, waits: bool, now: float) -> None:
        """Called after each event: is anything expected?"""
        if not waits:
            self._since = None
        elif self._since is None:
            self._since = now

    def moved(self, now: float) -> None:
        self._patience_s = BULK_PATIENCE_S
        if self._since is not None:
            self._since = now

    def give_up(self, now: float) -> Iterator[str]:
        """Why to reconnect, if nothing was received for too long."""
        if self.gives_up_at is not None and now >= self.gives_up_at:
            waited_s, self._since = self._patience_s, None
            self._patience_s = min(2 * waited_s, LONGEST_BULK_PATIENCE_S)
            yield f"Nothing came through the connection for chunks for {waited_s:.0f} s."


class Connection:
    """The state of the connection to the broker, and its deadlines."""

    def __init__(self, asked_interval: float | None) -> None:
        self.phase = Phase.NEW
        # Of the session, kept when a connection breaks. None before a welcome, and for an observer.
        self.token: bytes | None = None
        self.reconnections = 0  # welcomes after the first
        self.last_heard: float | None = None  # when the last message arrived
        self.bulk = BulkWatch()
        self.places = Places()
        self._is_served = False  # the current address is that of the right broker
        # Between heartbeats; None = by the broker; 0 = none
        self._asked_interval = asked_interval
        self._interval = self._silent_s = 0.0
        self._backoff = FIRST_BACKOFF_S
        self._wake_at: float | None = None  # reopen (AWAY) or join again (JOINING, REFUSED)
        self._beat_at: float | None = None
        self._connecting_since = self._joining_since = 0.0
        self._join_patience_s = JOIN_PATIENCE_S

    @property
    def is_joined(self) -> bool:
        return self.phase is Phase.JOINED

    @property
    def live_token(self) -> bytes | None:
        """Of the session on this connection; None without one."""
        return self.token if self.is_joined else None

    @property
    def times(self) -> list[float]:
        """The deadlines."""
        times = [self._wake_at, self._beat_at, self.bulk.gives_up_at]
        return [*(at for at in times if at is not None), *(at for at, _ in self._patience_ends())]

    def open(self, now: float) -> effects.Effect:
        self.phase = Phase.CONNECTING
        self._connecting_since, self._is_served = now, False
        self._wake_at = None
        return effects.Open(self.places.current)

    def joins(self, now: float) -> None:
        self.phase = Phase.JOINING
        self._joining_since, self._join_patience_s = now, JOIN_PATIENCE_S
        self._wake_at = None

    def describes(self, size: int, now: float) -> None:
        """The answer to the join comes after a description of this size in bytes."""
        self._joining_since, self._join_patience_s = now, JOIN_PATIENCE_S + seconds_for(size)

    def observes(self) -> None:
        """An observer is connected, which does not join."""
        self.phase = Phase.JOINED
        if not self.places.are_several:
            self.serves()

    def serves(self) -> None:
        """The current address is that of the right broker."""
        self._is_served = True
        self._backoff = FIRST_BACKOFF_S
        self.places.welcomed()

    def is_welcomed(
        self, token: bytes, config: RunConfig, now: float, lease: float | None = None
    ) -> None:
        self.reconnections += self.token is not None
        self.phase = Phase.JOINED
        self.token = token
        self.serves()
        self._wake_at = None
        self._interval = heartbeat_interval(config, self._asked_interval)
        self._silent_s = max(SILENT_BEATS * self._interval, SILENT_S)
        if lease is not None and lease > 0 and self.places.are_several:
            self._interval = min(self._interval or lease, lease / BEATS_A_LEASE)
            self._silent_s = min(self._silent_s, SILENT_LEASES * lease)
        self._beat_at = now + self._interval if self._interval else None

    def puts_off(self, now: float) -> None:
        """The broker accepts no worker right now: join again soon."""
        self._wake_at = now + RETRY_S

    def is_refused(self, code: str, text: str, now: float) -> Iterator[effects.Effect]:
        """The broker refuses this worker."""
        final = self.token is None
        self.phase = Phase.REFUSED
        self._wake_at = None if final else now + REFUSED_RETRY_S
        self._beat_at = None
        yield effects.JoinRefused(code, text, final)

    def is_removed(self, notice: messages.Notice, now: float) -> Iterator[effects.Effect]:
        """An operator removed this worker for good."""
        self.token = None
        yield effects.Told(notice)
        yield from self.is_refused(Code.NOT_ALLOWED, notice.text, now)

    @property
    def can_break(self) -> bool:
        """Whether there is a connection to lose."""
        is_final = self.phase is Phase.REFUSED and self.token is None  # it is not reopened
        return not is_final and self.phase not in (Phase.NEW, Phase.AWAY)

    def breaks(self, reason: str, now: float) -> Iterator[effects.Effect]:
        """Close the connection, and open a new one soon."""
        if self.places.are_several and not self._is_served:
            yield from self.turns(now)
            return
        yield effects.Close()
        if self.is_joined:
            yield effects.Say(f"{reason} Connecting again.", trouble=True)
        self.phase = Phase.AWAY
        self._wake_at = now + self._backoff
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF_S)
        self._beat_at = None

    def turns(self, now: float) -> Iterator[effects.Effect]:
        """Try the next address at once, and all again after a pause."""
        yield effects.Close()
        self.phase = Phase.AWAY
        self._beat_at = None
        self._wake_at = now
        if self.places.turn():
            self._wake_at = now + min(self._backoff, LONGEST_PAUSE_S)
            self._backoff = min(2 * self._backoff, LONGEST_BACKOFF_S)

    def wakes(self, now: float) -> bool:
        """Whether it is time to open connections (AWAY), or else to join again."""
        is_due = self._wake_at is not None and now >= self._wake_at
        if is_due:
            self._wake_at = None
        return is_due

    def dead_ends(self, now: float) -> Iterator[str]:
        """Why the connection counts as broken although no error was reported."""
        for at, reason in self._patience_ends():
            if now >= at:
                yield reason.format(now - (self.last_heard or now))
        yield from self.bulk.give_up(now)

    def _patience_ends(self) -> Iterator[tuple[float, str]]:
        """When to give up on an answer, and why; with a place for the seconds of silence."""
        if self.seeks_another:  # the current address counts as unreachable
            reason = f"No broker answered within {CONNECT_PATIENCE_S:.0f} s."
            yield self._connecting_since + CONNECT_PATIENCE_S, reason
        if self.phase is Phase.JOINING and self._wake_at is None:
            reason = f"The broker did not answer the join within {self._join_patience_s:.0f} s."
            yield self._joining_since + self._join_patience_s, reason
        if self.is_joined and self._interval and self.last_heard is not None:
            yield self.last_heard + self._silent_s, "The broker was silent for {:.0f} s."

    @property
    def seeks_another(self) -> bool:
        """Whether there is another address to try when this one does not answer."""
        return self.places.are_several and self.phase is Phase.CONNECTING

    def must_beat(self, now: float) -> bool:
        return self._beat_at is not None and now >= self._beat_at

    def beat(self, now: float, *, uploading: bool) -> Iterator[effects.Effect]:
        if (token := self.live_token) is not None:
            self._beat_at = now + self._interval if self._interval else None
            yield effects.Beat(token, uploading)

    def leave(self, reason: str) -> Iterator[effects.Effect]:
        """End the session."""
        if (token := self.live_token) is not None:
            yield effects.Send(messages.Leave(token, reason))
        self.phase = Phase.LEFT


@dataclass
class Lanes:
    """The data connections of a group of processes: each moves the chunks that it owns.

    Lane i is that of process i; lane 0 is the bulk connection of the process with the session, and owns
    all chunks where the worker is not a group. A group, even of one process, shares its chunks out
    first.
    """

    count: int = 1
    is_group: bool = False
    owners: Owners | None = None  # None unless it is a group, and until its chunks are shared out

    @property
    def are_known(self) -> bool:
        return not self.is_group or self.owners is not None

    def of(self, fragment: int, index: int) -> int:
        """The lane of a chunk."""
        return 0 if self.owners is None else self.owners[fragment][index]

    def bindings(self, session: bytes, credit: int) -> tuple[messages.Lane, ...]:
        """The first message on each lane, in order."""
        assert self.owners is not None
        return tuple(
            messages.Lane(session, lane, tuple(_share(each, lane) for each in self.owners), credit)
            for lane in range(self.count)
        )


def _share(owners: tuple[int, ...], lane: int) -> bytes:
    bitmap = Bitmap(len(owners))
    for index, owner in enumerate(owners):
        if owner == lane:
            bitmap.add(index)
    return bitmap.to_bytes()


@dataclass
class Votes:
    """Votes of a worker where a root broker has a standby; `voter` numbers this incarnation.

    A root broker releases versions while a majority of its workers, or its standby, vote for it; the
    standby takes over with a majority as well. Each asks with a nonce, which a vote returns. A vote for
    one promises the other none for a time; a new incarnation has another number, since it knows no
    promises.
    """

    voter: int
    _term: int = 0  # of the newest root broker
    _for: str = ""  # the recipient of the last vote
    _until: float = -math.inf  # the other gets none before

    def goes_along(self, term: int) -> bool:
        """A root broker welcomes this worker. False for one that was replaced by another."""
        self._term, before = max(self._term, term), self._term
        return term >= before

    def asked(self, notice: messages.Notice, token: bytes, now: float) -> Iterator[effects.Effect]:
        """A root broker or a standby asks for a vote."""
        if notice.nonce is None or not 0 < notice.seconds < math.inf:
            return
        if self._for not in ("", notice.what) and now < self._until:
            return
        if self._for != notice.what:
            self._for, self._until = notice.what, now
        self._until = max(self._until, now + SAFETY * notice.seconds)
        yield effects.Send(messages.Vote(token, self.voter, notice.nonce))
