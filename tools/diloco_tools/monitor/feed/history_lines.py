"""Lines of a history file: read from disk, validated one by one, each as a partial snapshot."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diloco_protocol.errors import ProtocolError
from diloco_protocol.feed import (
    FEED_VERSION,
    FeedError,
    MalformedFeedError,
    Round,
    Snapshot,
    read_snapshot,
)
from diloco_protocol.printable import printable_all
from diloco_protocol.records import from_plain

HISTORY = "history.jsonl"  # in the folder that the broker saves to
GIVE = "give the history.jsonl in the folder that diloco-broker serve saves to"
MAX_FILE_BYTES = 256 << 20  # the broker rotates at 16 MiB
MAX_LINE_BYTES = 4 << 20  # a round of ten thousand workers fits

# Keys of a start line beside its settings, and keys that are never settings.
OF_START = ("run", "version", "mode", "control", "model")
NO_SETTINGS = {"round", "last_round", "counts", "fragments", "totals", "loop", "workers"}


def history_of(given: Path) -> Path:
    """The given history, or the one in a run's folder."""
    return given / HISTORY if given.is_dir() else given


def read_lines(path: Path, take: Callable[[bytes], None]) -> int:
    """Pass each line to `take`; returns how many it rejected as malformed.

    Raises:
        FeedError: the file is missing or cannot be read.
    """
    damaged = 0
    try:
        for text in texts_of(path):
            try:
                take(text)
            except (MalformedFeedError, ProtocolError):
                damaged += 1
    except OSError as error:
        raise FeedError(f"{path} cannot be read ({error.strerror or error}): {GIVE}") from None
    return damaged


def texts_of(path: Path) -> Iterator[bytes]:
    """Lines of the older file, then of `path` itself; safe while the broker rotates them."""
    with ExitStack() as stack:
        files = []
        for each in (path, path.with_name(f"{path.stem}.1{path.suffix}")):
            if each.exists() and not each.is_file():
                raise OSError("not a file")
            with suppress(FileNotFoundError):
                files.append(stack.enter_context(each.open("rb")))
                size = os.fstat(files[-1].fileno()).st_size
                if size > MAX_FILE_BYTES:
                    raise OSError(f"it has {size} bytes; the broker rotates at 16 MiB")
        if not files:
            raise OSError("no such file")
        # Rotated between the two calls: both are the same file.
        if len(files) == 2 and os.path.sameopenfile(files[0].fileno(), files[1].fileno()):
            files.pop()
        for file in reversed(files):
            yield from filter(bytes.strip, file)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a history, with counts up to and including it."""

    epoch: str
    since: float  # start of this incarnation of the broker
    text: bytes = b""
    kind: str = ""
    at: float = 0.0
    start: bytes | None = None  # the line with the settings in force
    rounds: int = 0  # in the whole history
    rounds_before: int = 0  # before this incarnation
    contributions: int = 0  # in this incarnation
    events: int = 0  # in the whole history
    stopped: bool = False


def line_of(text: bytes, before: Line | None) -> Line | None:
    """Validate one line; None if its kind is unknown. Raises MalformedFeedError."""
    document = checked(text)
    kind, at, epoch = document["kind"], document["at"], document["epoch"]
    if kind not in ("start", "round", "event", "stop"):
        return None
    snapshot_of(document)
    last = before or Line(epoch, float(at))
    if last.epoch != epoch:
        rounds, events = last.rounds, last.events
        last = Line(epoch, float(at), rounds=rounds, rounds_before=rounds, events=events)
    averaged = int(document.get("averaged") or 0) if kind == "round" else 0
    return replace(
        last,
        text=text,
        kind=kind,
        at=float(at),
        start=text if kind == "start" else last.start,
        rounds=last.rounds + (kind == "round"),
        contributions=last.contributions + averaged,
        events=last.events + (kind in ("event", "stop")),
        stopped=last.stopped or kind == "stop",
    )


def checked(text: bytes) -> dict[str, Any]:
    """The JSON of a line, whose kind, time and epoch are valid. Raises MalformedFeedError."""
    document = parsed(text)
    kind, at, epoch = (document.get(key) for key in ("kind", "at", "epoch"))
    if not isinstance(kind, str) or not isinstance(epoch, str):
        raise MalformedFeedError("no kind or no epoch")
    if not isinstance(at, int | float) or isinstance(at, bool) or not 0 <= at < 1e12:
        raise MalformedFeedError("no time")
    return document


def parsed(text: bytes) -> dict[str, Any]:
    if len(text) > MAX_LINE_BYTES:
        raise MalformedFeedError(f"a line of {len(text)} bytes")
    try:
        document = printable_all(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise MalformedFeedError(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise MalformedFeedError("not a JSON object")
    return document


def snapshot_of(document: Mapping[str, Any]) -> Snapshot:
    """A snapshot with the contents of one line alone."""
    given = {"feed": FEED_VERSION, "sequence": 0, "epoch": document.get("epoch")}
    kind = document["kind"]
    try:
        if kind == "start":
            return read_snapshot({**_settings(document), **given})
        if kind == "round":
            return _round_of({**document, **given})
        stopped = {"text": f"The broker stopped: {document.get('text')}."} if kind == "stop" else {}
        whole = {"events": [{**document, **stopped}], **given}
        return from_plain(Snapshot, whole, kind, lenient=True)
    except ProtocolError as error:
        raise MalformedFeedError(str(error)) from None


def _settings(document: Mapping[str, Any]) -> dict[str, Any]:
    settings = document.get("settings") or {}
    if not isinstance(settings, dict):
        raise MalformedFeedError("settings is not an object")
    part = {key: value for key, value in settings.items() if key not in NO_SETTINGS}
    part |= {key: document.get(key) for key in OF_START}
    if isinstance(reducer := part.get("reducer"), dict):  # two counts in it are not settings
        part["reducer"] = reducer | {"submissions": 0, "waiting": 0}
    return part


def _round_of(document: Mapping[str, Any]) -> Snapshot:
    """A round line has the keys of several records of a snapshot side by side."""
    averaged = document.get("averaged")
    whole = {
        **{key: document.get(key) for key in ("feed", "sequence", "epoch", "workers")},
        **dict.fromkeys(("last_round", "totals", "loop"), document),
        "counts": {"alive": document.get("alive"), "participating": averaged, "averaged": averaged},
        "fragments": [{**document, "fragment": document.get("fragment") or 0}],
    }
    read = from_plain(Snapshot, whole, "round", lenient=True)
    assert read.last_round is not None
    names = tuple(worker.id for worker in read.workers)
    number, fragment = read.last_round.number, read.last_round.fragment
    return replace(read, round=Round(number, fragment, "closed", expected=names, arrived=names))
