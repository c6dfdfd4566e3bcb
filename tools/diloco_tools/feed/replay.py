"""A past run from the history that the broker wrote: the snapshots that its feed might have sent.

`read_history` checks every line of `SAVE_DIR/history.jsonl`, and of the older `history.1.jsonl` beside
it, and gives one `Moment` for each. A moment is built when it is asked for, so a long history takes
about as much memory as its files. Its snapshot holds what the history knows:

- Figures are those of the newest round, `uptime_s` included; only ages go on between rounds.
- Workers are those that contributed last, as many as were alive then. Their health is not recorded.
- What nobody wrote down (heartbeats, checkpoints, refusals) has the default of its record.

Times are those of the broker's wall clock; they step back where somebody set it back.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

from diloco_protocol.errors import ProtocolError
from diloco_protocol.feed import (
    FEED_VERSION,
    Event,
    FeedError,
    Fragment,
    MalformedFeedError,
    Round,
    Snapshot,
    Worker,
    json_safe,
    read_snapshot,
)
from diloco_protocol.records import from_json, to_plain

EVENTS = 20  # in a snapshot, as in the feed
LOOK_BACK = 400  # rounds searched for the last work of each worker and fragment
LINES_KEPT = 512  # as records, so that going through a history reads each line about once
MAX_FILE_BYTES = 256 << 20  # the broker rotates at 16 MiB
MAX_LINE_BYTES = 4 << 20  # a round of ten thousand workers fits

# What the line of a start has besides its settings, and what is no setting, whatever a line holds.
OF_START = ("run", "version", "mode", "control", "model")
NO_SETTINGS = {"round", "last_round", "counts", "fragments", "totals", "loop", "workers"}


@dataclass(frozen=True)
class Moment:
    """The run as it was at `at`, Unix seconds."""

    at: float
    snapshot: Snapshot


@dataclass(frozen=True)
class History:
    """The moments of a run in the order in which they were written.

    `skipped` counts damaged lines.
    """

    moments: Sequence[Moment]
    skipped: int = 0


def read_history(path: Path) -> History:
    """Read `path`, a history or the folder that has one, after the older file beside it.

    Raises:
        FeedError: the file is missing, cannot be read, or has no line of a history.
    """
    lines: list[_Line] = []
    skipped = 0
    try:
        if path.is_dir():
            path = path / "history.jsonl"
        for text in _texts(path):
            try:
                lines.append(_line(text, lines[-1] if lines else None))
            except MalformedFeedError:
                skipped += 1
            except _UnknownKind:
                pass
    except OSError as error:
        raise FeedError(
            f"{path} cannot be read ({error.strerror or error}): give the history.jsonl in the "
            "folder that diloco-broker serve saves to"
        ) from None
    if not lines:
        raise FeedError(
            f"{path} has no history of a run ({skipped} damaged lines): give the history.jsonl "
            "in the folder that diloco-broker serve saves to"
        )
    return History(_Moments(lines), skipped)


def _texts(path: Path) -> Iterator[bytes]:
    """Lines of the older file, then of `path` itself, though the broker may rotate meanwhile."""
    with ExitStack() as stack:
        files = []
        for each in (path, path.with_name(f"{path.stem}.1{path.suffix}")):
            if each.exists() and not each.is_file():
                raise OSError("it is not a file")
            with suppress(FileNotFoundError):
                files.append(stack.enter_context(each.open("rb")))
                size = os.fstat(files[-1].fileno()).st_size
                if size > MAX_FILE_BYTES:
                    raise OSError(f"it has {size} bytes, more than the broker ever lets it have")
        if not files:
            raise OSError("there is no such file")
        # Rotated between the two calls: then both are the same file.
        if len(files) == 2 and os.path.sameopenfile(files[0].fileno(), files[1].fileno()):
            files.pop()
        for file in reversed(files):
            yield from filter(bytes.strip, file)


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a history and where it stands in it; the counts include this line."""

    text: bytes
    kind: str
    at: float
    epoch: str
    since: float  # when this life of the broker began
    start: bytes | None  # the line with the settings that hold
    rounds: int  # in the whole history
    rounds_before: int  # this life of the broker
    contributions: int  # in this life
    events: int  # in the whole history
    stopped: bool


class _UnknownKind(Exception):
    """A line that a newer broker has written for others."""


def _line(text: bytes, before: _Line | None) -> _Line:
    """Check one line. Raises MalformedFeedError, and _UnknownKind for one to pass over."""
    if len(text) > MAX_LINE_BYTES:
        raise MalformedFeedError(f"a line of {len(text)} bytes")
    document = _parsed(text)
    kind, at, epoch = (document.get(key) for key in ("kind", "at", "epoch"))
    if not isinstance(kind, str) or not isinstance(epoch, str):
        raise MalformedFeedError("no kind or no epoch")
    if not isinstance(at, int | float) or isinstance(at, bool) or not 0 <= at < 1e12:
        raise MalformedFeedError("no time")
    if kind not in ("start", "round", "event", "stop"):
        raise _UnknownKind(kind)
    _snapshot_of(document)
    whole = before
    if before is not None and before.epoch != epoch:
        before = None
    averaged = int(document.get("averaged") or 0) if kind == "round" else 0
    rounds = whole.rounds if whole else 0
    return _Line(
        text=text,
        kind=kind,
        at=float(at),
        epoch=epoch,
        since=before.since if before else float(at),
        start=text if kind == "start" else before.start if before else None,
        rounds=rounds + (kind == "round"),
        rounds_before=before.rounds_before if before else rounds,
        contributions=(before.contributions if before else 0) + averaged,
        events=(whole.events if whole else 0) + (kind in ("event", "stop")),
        stopped=kind == "stop" or (before is not None and before.stopped),
    )


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedFeedError(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise MalformedFeedError("not a JSON object")
    return document


def _snapshot_of(document: Mapping[str, Any]) -> Snapshot:
    """A snapshot with nothing but what one line gives."""
    given: dict[str, Any] = {"feed": FEED_VERSION, "sequence": 0, "epoch": document.get("epoch")}
    try:
        match document["kind"]:
            case "start":
                return read_snapshot({**_settings(document), **given})
            case "round":
                return _round_of(document, given)
            case "event":
                return from_json(Snapshot, {"events": [document], **given}, "event")
            case _:
                said = {**document, "text": f"The broker stopped: {document.get('text')}."}
                return from_json(Snapshot, {"events": [said], **given}, "stop")
    except ProtocolError as error:
        raise MalformedFeedError(str(error)) from None


def _settings(document: Mapping[str, Any]) -> dict[str, Any]:
    settings = document.get("settings") or {}
    if not isinstance(settings, dict):
        raise MalformedFeedError("settings is not an object")
    part = {key: value for key, value in settings.items() if key not in NO_SETTINGS}
    part |= {key: document.get(key) for key in OF_START}
    if isinstance(reducer := part.get("reducer"), dict):  # settings, and two counts of then
        part["reducer"] = reducer | {"submissions": 0, "waiting": 0}
    return part


def _round_of(document: Mapping[str, Any], given: Mapping[str, Any]) -> Snapshot:
    """The line of a round has the keys of several records of a snapshot side by side."""
    averaged = document.get("averaged")
    counts = {"alive": document.get("alive"), "participating": averaged, "averaged": averaged}
    whole = {
        **dict.fromkeys(("last_round", "totals", "loop"), document),
        "counts": counts,
        "fragments": [{**document, "fragment": document.get("fragment") or 0}],
        "workers": document.get("workers"),
        **given,
    }
    read = from_json(Snapshot, whole, "round")
    assert read.last_round is not None
    names = tuple(worker.id for worker in read.workers)
    number, fragment = read.last_round.number, read.last_round.fragment
    closed = Round(number, fragment, "closed", expected=names, arrived=names)
    return replace(read, round=closed)


class _Moments(Sequence[Moment]):
    """The lines of a history, each made a moment when somebody looks at it."""

    def __init__(self, lines: Sequence[_Line]) -> None:
        self._lines = lines
        self._rounds = [line for line in lines if line.kind == "round"]
        self._events = [line for line in lines if line.kind in ("event", "stop")]
        # The first of each life, for the events that come before it.
        self._starts = {line.epoch: line.text for line in reversed(lines) if line.kind == "start"}
        self._read = lru_cache(LINES_KEPT)(lambda text: _snapshot_of(_parsed(text)))

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> Moment: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Moment]: ...
    def __getitem__(self, index: int | slice) -> Moment | Sequence[Moment]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        sequence = 1 + range(len(self))[index]
        line = self._lines[index]
        return Moment(line.at, self._snapshot(line, sequence))

    def _snapshot(self, line: _Line, sequence: int) -> Snapshot:
        first = max(line.rounds_before, line.rounds - LOOK_BACK)
        rounds = self._rounds[first : line.rounds]  # of this life of the broker
        start = line.start or self._starts.get(line.epoch)
        base = self._read(start) if start else Snapshot(FEED_VERSION, 0, line.epoch)
        now: dict[str, Any] = {
            "sequence": sequence,
            "epoch": line.epoch,
            "uptime_s": max(0.0, rounds[-1].at - line.since) if rounds else 0.0,
            "state": "stopping" if line.stopped else "training" if rounds else "waiting",
            "waiting_for": None if rounds or line.stopped else "for the first round to close",
            "events": self._last_events(line),
        }
        if rounds:
            newest = self._read(rounds[-1].text)
            assert newest.round is not None
            fragments, workers = self._last_work(line.at, rounds, base)
            counted: dict[str, Any] = {
                "rounds": line.rounds - line.rounds_before,
                "contributions": line.contributions,
            }
            now |= {
                "round": replace(newest.round, age_s=max(0.0, line.at - rounds[-1].at)),
                "last_round": newest.last_round,
                "counts": newest.counts,
                "loop": newest.loop,
                "totals": replace(newest.totals, **counted),
                "fragments": tuple(fragments),
                "workers": tuple(workers),
            }
        plain = {key: to_plain(value, with_none=True) for key, value in now.items()}
        raw = {**base.raw, "feed": FEED_VERSION, **json_safe(plain)}
        return replace(base, **now, raw=raw)

    def _last_events(self, line: _Line) -> tuple[Event, ...]:
        first = max(0, line.events - EVENTS)
        found = []
        for number, each in enumerate(self._events[first : line.events], first + 1):
            (event,) = self._read(each.text).events
            found.append(replace(event, sequence=number, age_s=max(0.0, line.at - each.at)))
        return tuple(found)

    def _last_work(
        self, at: float, rounds: Sequence[_Line], settings: Snapshot
    ) -> tuple[list[Fragment], list[Worker]]:
        """The newest version of each fragment, and the workers that contributed last."""
        alive = self._read(rounds[-1].text).counts.alive
        count = settings.raw.get("num_fragments")
        fragments: dict[int, Fragment] = {}
        workers: dict[str, Worker] = {}
        for line in reversed(rounds):
            part = self._read(line.text)
            fragments.setdefault(part.fragments[0].fragment, part.fragments[0])
            if line is rounds[-1] or len(workers) < alive:
                age_s = max(0.0, at - line.at)
                for worker in part.workers:
                    if worker.id not in workers:
                        workers[worker.id] = replace(
                            worker,
                            round=part.last_round.number if part.last_round else None,
                            sync_every=settings.sync_every or 0,
                            beat_age_s=age_s,
                            sync_age_s=age_s,
                        )
            enough = len(fragments) >= count if isinstance(count, int) else True
            if enough and len(workers) >= alive:
                break
        return (
            [fragments[number] for number in sorted(fragments)],
            [workers[name] for name in sorted(workers)],
        )
