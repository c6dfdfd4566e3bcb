"""The log's line for each round: how it closed; in asynchronous mode, whose push a version contains.

Hundreds of asynchronous pushes may be applied in a minute. Then a line tells of all that came since the
one before, a second ago. These lines stay out of the feed's list of events, which has room for twenty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from diloco_broker.core import effects
from diloco_broker.core.state.staged_round import StagedRound
from diloco_broker.core.state.streaming_round import Counting, Round

# Least seconds between two lines of asynchronous mode.
LINE_S = 1.0
NAMES_SHOWN = 5


@dataclass
class Untold:
    """Versions of asynchronous mode that no line has told of yet.

    Attributes:
        told_at: when the last line was; None before the first.
        versions: how many have come since.
        newest: the last of them, in words.
        staleness: of each push in them, the largest by worker.
    """

    told_at: float | None = None
    versions: int = 0
    newest: str = ""
    staleness: dict[str, int] = field(default_factory=dict)

    def add(self, newest: str, counting: Sequence[Counting]) -> None:
        self.versions += 1
        self.newest = newest
        for each in counting:
            known = self.staleness.get(each.worker_id, 0)
            self.staleness[each.worker_id] = max(known, each.staleness)

    def tell(self, now: float) -> Iterator[effects.Log]:
        """A line, if there is something to tell and the last one was long enough ago."""
        if not self.versions or (self.told_at is not None and now - self.told_at < LINE_S):
            return
        names = sorted(self.staleness)
        others = f" and {len(names) - NAMES_SHOWN} more" * (len(names) > NAMES_SHOWN)
        if self.versions == 1:
            shown = [f"{name} ({_age(self.staleness[name])})" for name in names[:NAMES_SHOWN]]
            text = f"{self.newest.capitalize()} contains the push of {', '.join(shown)}{others}."
        else:
            text = (
                f"{self.versions} versions, the last of them {self.newest}, contain pushes of "
                f"{', '.join(names[:NAMES_SHOWN])}{others}, at most "
                f"{_age(max(self.staleness.values(), default=0))}."
            )
        self.told_at, self.versions = now, 0
        self.staleness.clear()
        yield effects.Log("info", text, is_listed=False)


def _age(staleness: int) -> str:
    return f"{staleness} version{'s'[: staleness != 1]} old"


def closed(
    ended: Round | StagedRound, counting: Sequence[Counting], pieces: int, now: float
) -> effects.Log:
    """How a round of synchronous mode closed."""
    whole = {each.worker_id for each in counting if each.chunks.is_full}
    absent = sorted(ended.expected - whole)
    shown = ", ".join(absent[:NAMES_SHOWN])
    names = f", without {shown}{' ...' * (len(absent) > NAMES_SHOWN)}" if absent else ""
    which = f" (fragment {ended.fragment})" if pieces > 1 else ""
    return effects.Log(
        "info",
        f"Round {ended.number}{which} closed in {now - ended.opened_at:.1f} s: "
        f"{ended.averaged} of {len(ended.expected)} expected workers averaged{names}.",
    )
