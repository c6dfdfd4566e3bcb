"""Where the time of a round goes, seen from a worker by what its counters say. Pure.

The phases of a round overlap: chunks come back while others are still being sent. What is told here
is the time that each phase adds behind the one before it, so that they sum up to the round:

    delta     from the start to the first chunk on its way up
    upload    to the last chunk on its way up
    step      to the first chunk that comes down; 0 where it came before the last went up
    download  to the last chunk that comes down
    apply     until the parameters are in the model
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

# Bytes: less than any chunk, more than what travels on control while a round goes on.
CHUNK_IS_MORE_THAN = 32 << 10

PHASES = ("delta", "upload", "step", "download", "apply")


@dataclass(frozen=True)
class Moments:
    """When the first and the last chunk went and came, in seconds of the monotonic clock."""

    began: float
    first_up: float
    last_up: float
    first_down: float
    last_down: float
    ended: float

    def plain(self) -> dict[str, float]:
        return asdict(self)


def moments(
    samples: Sequence[tuple[float, int, int]], began: float, ended: float
) -> Moments | None:
    """What samples of (time, bytes sent, bytes received) tell; None where no chunk went or came."""
    if not samples:
        return None
    (_, up, down), (_, all_up, all_down) = samples[0], samples[-1]
    if all_up - up < CHUNK_IS_MORE_THAN or all_down - down < CHUNK_IS_MORE_THAN:
        return None

    def within(at: float) -> float:
        return min(max(at, began), ended)

    return Moments(
        began,
        within(next(t for t, sent, _ in samples if sent - up >= CHUNK_IS_MORE_THAN)),
        within(next(t for t, sent, _ in samples if all_up - sent < CHUNK_IS_MORE_THAN)),
        within(next(t for t, _, got in samples if got - down >= CHUNK_IS_MORE_THAN)),
        within(next(t for t, _, got in samples if all_down - got < CHUNK_IS_MORE_THAN)),
        ended,
    )


def phases(found: Moments) -> Mapping[str, float]:
    """Seconds that each phase adds; they sum up to the time from `began` to `ended`."""
    marks = [found.began]
    for at in (found.first_up, found.last_up, found.first_down, found.last_down, found.ended):
        marks.append(max(marks[-1], at))
    return {name: marks[i + 1] - marks[i] for i, name in enumerate(PHASES)}
