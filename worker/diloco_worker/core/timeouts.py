"""How long a session waits for what, and when nothing that must come through a connection does. Pure."""

from __future__ import annotations

# Seconds before new connections are opened: doubling from the first to the longest. After a crash the
# broker gives its workers 10 s to come back with what they hold, so the longest stays far below it.
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0
# Seconds between two attempts when the broker has answered "not now".
RETRY_S = 1.0
# Seconds between two attempts after a final refusal in the middle of a run.
REFUSED_RETRY_S = 30.0
# Seconds without an answer to a join before the connections are made anew.
JOIN_PATIENCE_S = 20.0
# A joined broker answers every heartbeat. After so many intervals of silence, and at least so many
# seconds, the connection counts as broken although nobody has said so.
SILENT_BEATS = 3
SILENT_S = 10.0
# Seconds in which a chunk that is under way arrives, or its acknowledgement. Doubled each time that none
# has, so that a link that needs longer for 2 MiB gets there at last.
BULK_PATIENCE_S = 30.0
LONGEST_BULK_PATIENCE_S = 960.0


class BulkWatch:
    """Notices that the bulk connection is dead although the control connection lives.

    A router that has forgotten a connection drops what is sent on it and tells nobody; heartbeats go
    their own way. What must come is known: chunks that were sent are acknowledged, and chunks of a
    version that the broker has released are there to be sent.
    """

    def __init__(self) -> None:
        self._since: float | None = None  # when waiting began, or something came last
        self._patience_s = BULK_PATIENCE_S

    @property
    def gives_up_at(self) -> float | None:
        """None while nothing must come."""
        return None if self._since is None else self._since + self._patience_s

    def look(self, waits: bool, now: float) -> None:
        """After each event: must something come?"""
        if not waits:
            self._since = None
        elif self._since is None:
            self._since = now

    def moved(self, now: float) -> None:
        """Something came."""
        self._patience_s = BULK_PATIENCE_S
        if self._since is not None:
            self._since = now

    def is_dead(self, now: float) -> bool:
        """Whether nothing has come for too long."""
        return self.gives_up_at is not None and now >= self.gives_up_at

    def give_up(self) -> str:
        """The connections are made anew; returns why."""
        waited_s, self._since = self._patience_s, None
        self._patience_s = min(2 * waited_s, LONGEST_BULK_PATIENCE_S)
        return f"Nothing came through the connection for chunks for {waited_s:.0f} s."
