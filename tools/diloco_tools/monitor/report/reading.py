"""The files of a run, read to facts: `history.jsonl`, the older one beside it, `control.jsonl`."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from diloco_protocol.feed import FeedError, MalformedFeedError
from diloco_tools.monitor.feed.history_lines import MAX_LINE_BYTES, checked, parsed, texts_of
from diloco_tools.monitor.feed.replay import GIVE
from diloco_tools.monitor.report.digest import MOST_ACTIONS, Digest
from diloco_tools.monitor.report.facts import Action, Facts
from diloco_tools.monitor.report.plain_values import LONGEST_NAME, count, flat, number, text

HISTORY, ACTIONS = "history.jsonl", "control.jsonl"


def history_of(given: Path) -> Path:
    """The history that is meant: the file itself, or the one in a run's folder."""
    return given / HISTORY if given.is_dir() else given


def read_run(given: Path) -> Facts:
    """What the history at `given`, a file or the folder that has it, comes to.

    Raises:
        FeedError: there is none, it cannot be read, or no line of it is one of a history.
    """
    path = history_of(given)
    damaged = 0
    try:
        actions, left_out = _actions(path.with_name(ACTIONS))
        digest = Digest(frozenset(each.sentence for each in actions))
        for line in texts_of(path):
            try:
                document = checked(line)
            except MalformedFeedError:
                damaged += 1
                continue
            digest.take(document)
    except OSError as error:
        raise FeedError(f"{path} cannot be read ({error.strerror or error}): {GIVE}") from None
    if digest.is_empty:
        why = f"all of its {damaged} lines are damaged" if damaged else "it is empty"
        raise FeedError(f"{path} has no history of a run ({why}): {GIVE}")
    return digest.facts(actions, left_out, damaged)


def _actions(path: Path) -> tuple[list[Action], int]:
    """The newest things that operators did, and how many older ones are left out."""
    kept: deque[Action] = deque(maxlen=MOST_ACTIONS)
    seen = 0
    if not path.is_file():
        return [], 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            try:
                document = parsed(line)
            except MalformedFeedError:
                continue
            at = number(document.get("at"))
            if at is None:
                continue
            values = flat({name: document.get(name) for name in ("before", "after")})
            seen += 1
            kept.append(
                Action(
                    at,
                    text(document.get("who"), 2 * LONGEST_NAME),
                    document.get("is_proven") is True,
                    text(document.get("what"), LONGEST_NAME),
                    text(document.get("text")),
                    values.get("before"),
                    values.get("after"),
                    count(document.get("round")),
                )
            )
    return list(kept), seen - len(kept)
