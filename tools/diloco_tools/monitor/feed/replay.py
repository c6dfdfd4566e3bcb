"""A past run, as snapshots reconstructed from the broker's history.

`read_history` validates every line of `SAVE_DIR/history.jsonl`, and of the older `history.1.jsonl`, and
returns one `Moment` for each. Moments are built on access, so a long history takes about as much memory
as its files. In a reconstructed snapshot:

- Figures, including `uptime_s`, are those of the newest round; only ages advance between rounds.
- Workers are the latest contributors, as many as were alive. Their health is not recorded.
- Unrecorded parts (heartbeats, checkpoints, rejections) have the defaults of their records.

Times are those of the broker's wall clock, which may step back.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from diloco_protocol import feed
from diloco_protocol.feed import Fragment, Snapshot, Worker
from diloco_protocol.records import to_plain
from diloco_tools.monitor.feed.history_lines import (
    GIVE,
    Line,
    checked,
    history_of,
    line_of,
    parsed,
    read_lines,
    snapshot_of,
    texts_of,
)

EVENTS = 20  # in a snapshot, as in the feed
LOOK_BACK = 400  # rounds searched for the last work of each worker and fragment
LINES_KEPT = 512  # parsed, so that stepping through a history parses each line about once


@dataclass(frozen=True)
class Moment:
    """The run as it was at `at`, Unix seconds."""

    at: float
    snapshot: Snapshot


class History(Sequence[Moment]):
    """The moments of a run in the order of their lines, each built on access."""

    def __init__(self, lines: Sequence[Line], skipped: int) -> None:
        self.skipped = skipped  # damaged lines
        self._lines = lines
        self._rounds = [line for line in lines if line.kind == "round"]
        self._events = [line for line in lines if line.kind in ("event", "stop")]
        # The first of each incarnation, for events before it.
        self._starts = {line.epoch: line.text for line in reversed(lines) if line.kind == "start"}
        self._read = lru_cache(LINES_KEPT)(lambda text: snapshot_of(parsed(text)))

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        sequence = 1 + range(len(self))[index]
        line = self._lines[index]
        return Moment(line.at, self._snapshot(line, sequence))

    def _snapshot(self, line: Line, sequence: int) -> Snapshot:
        first = max(line.rounds_before, line.rounds - LOOK_BACK)
        rounds = self._rounds[first : line.rounds]  # of this incarnation
        start = line.start or self._starts.get(line.epoch)
        base = self._read(start) if start else Snapshot(feed.FEED_VERSION, 0, line.epoch)
        now: dict[str, Any] = {
            "sequence": sequence,
            "epoch": line.epoch,
            "uptime_s": 0.0,
            "state": "stopping" if line.stopped else "training" if rounds else "waiting",
            "waiting_for": None if rounds or line.stopped else "for the first round to close",
            "events": self._last_events(line),
        }
        if rounds:
            now |= self._last_work(line, rounds, base)
        plain = {key: to_plain(value, with_none=True) for key, value in now.items()}
        raw = {**base.raw, "feed": feed.FEED_VERSION, **feed.json_safe(plain)}
        return replace(base, **now, raw=raw)

    def _last_events(self, line: Line) -> tuple[feed.Event, ...]:
        first = max(0, line.events - EVENTS)
        found = []
        for number, each in enumerate(self._events[first : line.events], first + 1):
            (event,) = self._read(each.text).events
            found.append(replace(event, sequence=number, age_s=max(0.0, line.at - each.at)))
        return tuple(found)

    def _last_work(self, line: Line, rounds: Sequence[Line], settings: Snapshot) -> dict[str, Any]:
        """The newest round, the newest version of each fragment, and the latest contributors."""
        closed, newest = rounds[-1], self._read(rounds[-1].text)
        assert newest.round is not None
        alive, count = newest.counts.alive, settings.raw.get("num_fragments")
        fragments: dict[int, Fragment] = {}
        workers: dict[str, Worker] = {}
        for each in reversed(rounds):
            part = self._read(each.text)
            fragments.setdefault(part.fragments[0].fragment, part.fragments[0])
            age_s = max(0.0, line.at - each.at)
            for worker in part.workers if each is closed or len(workers) < alive else ():
                told = replace(
                    worker,
                    round=part.last_round.number if part.last_round else None,
                    sync_every=settings.sync_every or 0,
                    beat_age_s=age_s,
                    sync_age_s=age_s,
                )
                workers.setdefault(worker.id, told)
            has_all = not isinstance(count, int) or len(fragments) >= count
            if has_all and len(workers) >= alive:
                break
        made, contributions = line.rounds - line.rounds_before, line.contributions
        return {
            "uptime_s": max(0.0, closed.at - line.since),
            "round": replace(newest.round, age_s=max(0.0, line.at - closed.at)),
            "last_round": newest.last_round,
            "counts": newest.counts,
            "loop": newest.loop,
            "totals": replace(newest.totals, rounds=made, contributions=contributions),
            "fragments": tuple(fragments[number] for number in sorted(fragments)),
            "workers": tuple(workers[name] for name in sorted(workers)),
        }


def rounds_of(path: Path, epoch: str, most: int) -> list[Moment]:
    """At most `most` rounds of the history of the broker of this epoch, evenly spaced up to the newest.

    Only the returned lines are parsed: a history has up to 32 MiB, and may be growing. Snapshots have
    the time of their line as `uptime_s`. Empty if the file is missing, unreadable, or another broker's.
    """
    mark = f'"epoch": "{epoch}"'.encode()
    found: list[Moment] = []
    try:
        texts = list(texts_of(path))
    except OSError:
        return []
    if not any(mark in text for text in reversed(texts)):
        return []
    rounds = [text for text in texts if b'"kind": "round"' in text]
    stride = -(-len(rounds) // most) or 1
    for text in rounds[(len(rounds) - 1) % stride :: stride]:
        with suppress(feed.MalformedFeedError):
            document = checked(text)
            if document["kind"] == "round":
                at = float(document["at"])
                moment = replace(snapshot_of(document), uptime_s=at, sequence=len(found))
                found.append(Moment(at, moment))
    return found


def read_history(path: Path) -> History:
    """Read `path`, a history or the folder that has one, after the older file beside it.

    Raises:
        FeedError: the file is missing, cannot be read, or has no line of a history.
    """
    path, lines = history_of(path), list[Line]()

    def take(text: bytes) -> None:
        if (line := line_of(text, lines[-1] if lines else None)) is not None:
            lines.append(line)

    skipped = read_lines(path, take)
    if not lines:
        raise feed.FeedError(f"{path} has no history of a run ({skipped} damaged lines): {GIVE}")
    return History(lines, skipped)
