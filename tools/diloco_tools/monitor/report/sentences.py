"""What the broker's sentences say of workers and rounds.

The history has nothing else of comings and goings.
A worker may be called anything, so a sentence is first read by the names that are here. What workers
say themselves ("NAME warns: ...") is evidence of nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from diloco_tools.monitor.report.plain_values import LONGEST_NAME

# How a sentence that begins with a worker's name goes on, and what has happened to the worker then.
_AFTER_NAME = {
    "leaves: ": "left",
    "counts as dead: ": "died",
    "is back on a new connection.": "reconnected",
    "has stood at step ": "stalled",
    "trains again, at step ": "moving",
}
_WARNS = "warns: "
_NAMED = re.compile(
    rf"(?s)(.{{1,{LONGEST_NAME}}}?) ({'|'.join(map(re.escape, [*_AFTER_NAME, _WARNS]))})"
)
_JOINS = re.compile(rf"(.{{1,{LONGEST_NAME}}}) joins(?: from (.*))?\.$")
_BROKE = re.compile(r"A connection of (.*) broke\.$")
_REVOKED = re.compile(r"The key of the worker (.*) was revoked\.$")
_REMOVED = " removed from the run."
_ROUND = re.compile(
    r"Round (\d{1,18})(?: \(fragment \d+\))? closed in [\d.]+ s: "
    r"(?:\d+ of (\d{1,9}) expected workers averaged|"
    r"\d+ workers averaged, of (\d{1,9}) relays?(?: and (\d{1,9}) others?)? expected)"
    r"(?:, without (.*))?\.$"
)


class Sign(NamedTuple):
    """Something has happened to a worker: a word of `facts.Mark`, and the host that it joined from."""

    worker: str
    what: str
    host: str = ""


class Closed(NamedTuple):
    """How a round closed: how many it waited for, of which a relay is one."""

    number: int
    expected: int
    without: str


def sign_of(sentence: str, here: Collection[str]) -> Sign | None:
    """What a sentence says of a worker; `here` are the names of those that are."""
    for name in here:
        if sentence.startswith(f"{name} "):
            rest = sentence[len(name) + 1 :]
            if rest.startswith(_WARNS):
                return None
            if (found := _going_on(name, rest)) is not None:
                return found
    if match := _JOINS.match(sentence):
        return Sign(match[1], "joined", match[2] or "")
    if match := _BROKE.match(sentence):
        return Sign(match[1], "lost")
    if match := _REVOKED.match(sentence):
        return Sign(match[1], "revoked")
    if sentence.endswith(_REMOVED):
        kicked = [name for name in here if sentence.endswith(f": {name}{_REMOVED}")]
        return Sign(max(kicked, key=len), "kicked") if kicked else None
    if match := _NAMED.match(sentence):
        name, rest = match[1], sentence[match.start(2) :]
        return None if rest.startswith(_WARNS) else _going_on(name, rest)
    return None


def _going_on(name: str, rest: str) -> Sign | None:
    for start, what in _AFTER_NAME.items():
        if rest.startswith(start):
            return Sign(name, what)
    return None


def closed_of(sentence: str) -> Closed | None:
    """What the line of a round says besides the round's own figures."""
    match = _ROUND.match(sentence)
    if match is None:
        return None
    expected = sum(int(match[place] or 0) for place in (2, 3, 4))
    return Closed(int(match[1]), expected, match[5] or "")
