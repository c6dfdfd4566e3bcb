"""Reads a run's `history.jsonl`, its rotated older part and `control.jsonl` into the facts of a report,
in one pass and in bounded memory.
"""

import re
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco_protocol.feed import FeedError, Snapshot
from diloco_protocol.quantities import moment, plural
from diloco_protocol.records import from_plain
from diloco_tools.monitor.feed.history_lines import (
    GIVE,
    checked,
    history_of,
    parsed,
    read_lines,
    snapshot_of,
)
from diloco_tools.monitor.feed.series import WholeSeries
from diloco_tools.monitor.report.facts import (
    Action,
    Change,
    Ended,
    Ending,
    Event,
    Facts,
    Life,
    Said,
    Worker,
    quantile,
)

ACTIONS = "control.jsonl"
POINTS = 1500  # of a curve: at most twice as many, more than a plot has columns
MOST_CURVES = 32  # speeds of workers
MOST_WORKERS = 500  # tracked individually
MOST_OTHERS = 1_000_000  # only counted
MOST_LIVES = 1000
MOST_EVENTS = 300  # the newest
MOST_CHANGES = 300
MOST_ACTIONS = 500
MOST_SAID = 200  # distinct warnings
LONGEST_TEXT = 500  # characters
NO_SETTINGS = ("", "reducer.submissions", "reducer.waiting")  # state in the place of settings
# The history records joins and departures only in the broker's own sentences. A worker's warning is
# ignored, since it may quote any of them.
SIGN = re.compile(
    r"(?s)(?P<name>.{1,64}?) "
    r"(?P<what>joins(?: from (?P<host>.{1,64}))?\.$|leaves: |counts as dead: |warns: )"
)
WENT = {"leaves: ": Ended.LEFT, "counts as dead: ": Ended.DIED}
ROUND = re.compile(r"Round \d+ (\(fragment \d+\) )?closed in ")  # it has a line of its own


class Digest:
    """Takes documents of a history in their order, and summarises them."""

    def __init__(self, actions: Iterable[Action] = ()) -> None:
        self._facts = Facts()
        self._actions = tuple(actions)
        self._orders = {each.sentence for each in self._actions}  # logged as warnings
        self.lives: list[Life] = []
        self._workers: dict[str, Worker] = {}
        self._others: set[int] = set()  # hashes of names beyond `MOST_WORKERS`
        self._seconds = array("d")
        self._series = WholeSeries(POINTS, MOST_CURVES)
        self._said: dict[str, Said] = {}
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._settings_of = ""  # the epoch of the settings
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        self._repeated = 0  # rounds with the number of an earlier one
        self._highest = -1

    def take(self, document: dict[str, Any]) -> None:
        """Take one line whose kind, epoch and time are valid. Raises MalformedFeedError."""
        kind, epoch, facts = document["kind"], document["epoch"][:64], self._facts
        if kind not in ("start", "round", "event", "stop"):
            return
        # Settings are reported verbatim, so they are not validated.
        read = snapshot_of(document | {"settings": {}})
        facts.lines += 1
        at = facts.ended_at = max(facts.ended_at, float(document["at"]))
        if not self.lives or self.lives[-1].epoch != epoch:
            self._begin_life(epoch, at)
        life = self.lives[-1]
        if kind == "start":
            self._take_start(at, epoch, read, document.get("settings"))
        elif kind == "round":
            self._take_round(at, life, read)
        elif kind == "event":
            self._take_event(at, read.events[0].level, read.events[0].text[:LONGEST_TEXT])
        else:
            life.ending = str(document.get("text") or "no reason given")[:LONGEST_TEXT]
            life.is_over = document.get("run_is_over") is True
        life.ended_at = at

    def _begin_life(self, epoch: str, at: float) -> None:
        if len(self.lives) == MOST_LIVES:
            del self.lives[MOST_LIVES // 2]
        self.lives.append(Life(epoch, at, at))
        for worker in self._workers.values():
            if worker.ended == Ended.HERE:
                worker.ended = Ended.AWAY

    def _take_start(self, at: float, epoch: str, read: Snapshot, settings: Any) -> None:
        facts = self._facts
        facts.run, facts.mode = read.run or facts.run, read.mode or facts.mode
        facts.model = read.model or facts.model
        self.lives[-1].version = read.version
        given = {name: each for name, each in flat(settings).items() if name not in NO_SETTINGS}
        for name in sorted(given.keys() | facts.settings.keys()) if facts.settings else ():
            before, after = facts.settings.get(name), given.get(name)
            if before != after:
                facts.changes_left_out += len(self._changes) == MOST_CHANGES
                by_restart = epoch != self._settings_of
                self._changes.append(Change(at, name, before, after, by_restart))
        facts.settings, self._settings_of = given, epoch

    def _take_round(self, at: float, life: Life, read: Snapshot) -> None:
        facts, closed = self._facts, read.last_round
        assert closed is not None
        life.closed(closed, read)
        self._repeated += closed.number <= self._highest
        self._highest = max(closed.number, self._highest)
        facts.rounds += 1
        facts.contributions += closed.averaged
        facts.most_alive = max(facts.most_alive, read.counts.alive)
        self._seconds.append(closed.seconds)
        if closed.loss is not None:
            facts.first_loss = closed.loss if facts.first_loss is None else facts.first_loss
            facts.last_loss = closed.loss
            if facts.best_loss is None or closed.loss < facts.best_loss:
                facts.best_loss, facts.best_loss_round = closed.loss, closed.number
        for each in read.workers:
            if (worker := self._worker(each.id, at)) is not None:
                worker.contributed(at, each, life)
        # By time, not by round: a broker resumed from an older version repeats rounds.
        self._series.update(replace(read, uptime_s=at, sequence=facts.lines), at)

    def _take_event(self, at: float, level: str, sentence: str) -> None:
        if ROUND.match(sentence):
            return
        self._facts.events_left_out += len(self._events) == MOST_EVENTS
        self._events.append(Event(at, level, sentence))
        if level in ("warning", "error") and sentence not in self._orders:
            self._warn(at, level, sentence)
        sign = SIGN.match(sentence)
        if sign is None or sign["what"] == "warns: ":
            return
        if (worker := self._worker(sign["name"], at)) is not None:
            if (went := WENT.get(sign["what"])) is not None:
                worker.went(at, went)
            else:
                worker.is_here(at, sign["host"] or "")

    def _warn(self, at: float, level: str, sentence: str) -> None:
        """Count warnings that differ only in numbers together."""
        self._facts.warnings += level == "warning"
        self._facts.errors += level == "error"
        key = f"{level} {re.sub(r'[0-9][0-9.]*', '#', sentence)}"
        known = self._said.get(key)
        if known is not None:
            self._said[key] = Said(level, sentence, known.count + 1, known.first_at, at)
        elif len(self._said) < MOST_SAID:
            self._said[key] = Said(level, sentence, 1, at, at)

    def _worker(self, name: str, at: float) -> Worker | None:
        """A worker by its id; None beyond `MOST_WORKERS`."""
        found = self._workers.get(name)
        if found is None and len(self._workers) < MOST_WORKERS:
            found = self._workers[name] = Worker(name[:64], first_seen=at, last_seen=at)
        elif found is None and len(self._others) < MOST_OTHERS:
            self._others.add(hash(name))
        return found

    def facts(self, actions_left_out: int = 0, damaged: int = 0) -> Facts:
        """The facts, after at least one line; no `take` may follow."""
        found, lives, last = self._facts, tuple(self.lives), self.lives[-1]
        found.began_at, found.lives, found.last_words = lives[0].began_at, lives, last.ending
        if last.ending is not None:
            found.ending = Ending.OVER if last.is_over else Ending.STOPPED
        found.bytes_up = sum(life.bytes_up for life in lives)
        found.bytes_down = sum(life.bytes_down for life in lives)
        for each in self._actions:
            kicked = self._workers.get(str(each.before)) if each.what == "kick" else None
            if kicked is not None and kicked.last_seen <= each.at:
                kicked.went(each.at, Ended.KICKED)
        workers = sorted(self._workers.values(), key=lambda each: (-each.contributions, each.id))
        for worker in workers:
            worker.steps_per_s = quantile(worker.speeds, 0.5)
        found.workers, found.workers_left_out = tuple(workers), len(self._others)
        found.series = self._series.later(found.began_at, float("-inf"), is_whole=True)
        seconds = self._seconds
        found.round_median_s, found.round_p95_s = quantile(seconds, 0.5), quantile(seconds, 0.95)
        found.round_longest_s = max(seconds, default=None)
        said = sorted(self._said.values(), key=lambda each: (each.level != "error", -each.count))
        found.said, found.events = tuple(said), tuple(self._events)
        found.changes, found.actions = tuple(self._changes), self._actions
        found.actions_left_out, found.damaged = actions_left_out, damaged
        found.remarks = tuple(self._remarks())
        return found

    def _remarks(self) -> Iterator[str]:
        damaged, first = self._facts.damaged, self.lives[0].first
        if damaged:
            yield f"Skipped {plural(damaged, 'damaged line')}: a full disk or a crash truncates lines."
        if first is not None and first > 0:
            yield (
                f"The history begins with round {first}: the broker keeps the newest 16 to 32 MiB "
                "of lines, and the run may have started with another folder."
            )
        if self._repeated:
            yield (
                f"{plural(self._repeated, 'round')} repeated the number of an earlier one: the broker "
                "resumed from an older version."
            )
        if not self._facts.rounds:
            yield "No round closed in this history, so there are no curves."
        if self._facts.ending == Ending.OPEN:
            yield (
                f"The history ends at {moment(self._facts.ended_at)} UTC without a last line: the "
                "broker is running, was killed, or its machine went down."
            )


def flat(value: Any, before: str = "") -> dict[str, Any]:
    """Settings by paths such as "outer.lr"; lists become text."""
    if isinstance(value, dict) and before.count(".") < 4:
        found: dict[str, Any] = {}
        for key, each in value.items():
            found |= flat(each, f"{before}{str(key)[:64]}.")
        return found
    plain = value if isinstance(value, bool | int | float | None) else str(value)[:LONGEST_TEXT]
    return {before[:-1]: plain}


def read_run(given: Path) -> Facts:
    """The facts of the history at `given`, a file or its folder.

    Raises:
        FeedError: the history is missing, unreadable, or has no valid line.
    """
    path = history_of(given)
    actions, left_out = _actions(path.with_name(ACTIONS))
    digest = Digest(actions)
    damaged = read_lines(path, lambda text: digest.take(checked(text)))
    if not digest.lives:
        why = f"{plural(damaged, 'damaged line')}" if damaged else "it is empty"
        raise FeedError(f"{path} contains no history of a run ({why}): {GIVE}")
    return digest.facts(left_out, damaged)


def _actions(path: Path) -> tuple[list[Action], int]:
    """The newest actions of operators, and the number of older ones; damaged lines are skipped."""
    kept: deque[Action] = deque(maxlen=MOST_ACTIONS)
    seen = 0

    def take(text: bytes) -> None:
        nonlocal seen
        made = from_plain(Action, parsed(text), "action", lenient=True)
        before, after = (
            next(iter(flat(each).values()), None) for each in (made.before, made.after)
        )
        said = made.text[:LONGEST_TEXT]
        kept.append(replace(made, who=made.who[:128], text=said, before=before, after=after))
        seen += 1

    if path.is_file():
        read_lines(path, take)
    return list(kept), seen - len(kept)
