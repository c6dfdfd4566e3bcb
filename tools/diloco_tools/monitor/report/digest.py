"""From the lines of a history, one by one, to the facts of a report: one pass."""

from __future__ import annotations

import heapq
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from diloco_tools.monitor.report.curves import Curve, Points, quantile
from diloco_tools.monitor.report.facts import (
    OVER,
    STOPPED,
    Action,
    Change,
    Event,
    Facts,
    Life,
    Said,
    SlowRound,
)
from diloco_tools.monitor.report.plain_values import (
    LONGEST_NAME,
    count,
    flat,
    mapping,
    number,
    text,
)
from diloco_tools.monitor.report.sentences import Sign, closed_of, sign_of
from diloco_tools.monitor.report.workers import CURVES, Worker

STRETCHES = 160  # of a curve of the whole run: at most four points each, about one for each pixel
RATE_OVER_S = 1.0  # bytes a second are measured over at least as long
MOST_WORKERS = 500  # that are followed one by one
MOST_RESTARTS = 100_000  # of workers under new ids; later ones are workers of their own
MOST_LIVES = 1000
MOST_EVENTS = 300  # the newest
MOST_CHANGES = 300
MOST_ACTIONS = 500
MOST_CURVES = 32  # of workers, those that contributed most
MOST_FRAGMENTS = 64
MOST_SAID = 200  # different warnings
SLOWEST = 10
STALEST = 30  # what is older is counted together
# State of the loop, or known only after the first moment: not a setting that an operator changed.
_NO_SETTING = ("reducer.submissions", "reducer.waiting")
_LEVELS = ("warning", "error")
# The id that diloco_worker generates for a worker that was given none.
GENERATED_ID = re.compile(r"(?P<host>.*)-[0-9a-f]{8}", re.DOTALL)


class Digest:
    """Takes documents of a history in their order, and sums them up."""

    def __init__(self, actions: frozenset[str] = frozenset()) -> None:
        """`actions`: sentences of what operators did, which the broker logs as warnings."""
        self._facts = Facts()
        self._actions = actions
        self._lives: list[Life] = []
        self._lives_left_out = 0
        self._workers: dict[str, Worker] = {}
        self._here: set[str] = set()
        self._first_ids: dict[str, str] = {}  # of a restarted worker's newer ids
        self._others: set[int] = set()  # hashes of names beyond `MOST_WORKERS`
        self._curves = {key: Points() for key in ("loss", "seconds", "averaged", "alive")}
        self._norms: dict[int, Points] = {}
        self._rates = {"up": Points(), "down": Points()}
        self._rate_from: tuple[float, int, int] | None = None
        self._staleness: Counter[int] = Counter()
        self._slowest: list[tuple[float, int, SlowRound]] = []
        self._said: dict[str, Said] = {}
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._settings_of = ""  # the epoch whose settings they are
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        self._repeated = 0  # rounds with a number that an earlier one had
        self._highest = -1

    @property
    def is_empty(self) -> bool:
        return not self._lives

    def take(self, document: Mapping[str, Any]) -> None:
        """One line whose kind, epoch and time have been checked."""
        facts = self._facts
        facts.lines += 1
        at = facts.ended_at = max(facts.ended_at, float(document["at"]))
        epoch = text(document["epoch"], LONGEST_NAME)
        if not self._lives or self._lives[-1].epoch != epoch:
            self._begin_life(epoch, at)
        life = self._lives[-1]
        match document["kind"]:
            case "start":
                self._take_start(at, epoch, document)
            case "round":
                self._take_round(at, life, document)
            case "event":
                self._take_event(at, document)
            case "stop":
                life.ending = text(document.get("text")) or "no reason is given"
                life.is_over = document.get("run_is_over") is True
        life.ended_at = at

    def _begin_life(self, epoch: str, at: float) -> None:
        self._end_life()
        if len(self._lives) == MOST_LIVES:
            del self._lives[MOST_LIVES // 2]
            self._lives_left_out += 1
        self._lives.append(Life(epoch, at, at))
        self._rate_from = None

    def _end_life(self) -> None:
        if self._lives:
            for worker in self._workers.values():
                worker.broker_ended(self._lives[-1].ended_at)
        self._here.clear()

    def _take_start(self, at: float, epoch: str, line: Mapping[str, Any]) -> None:
        facts = self._facts
        facts.run = text(line.get("run")) or facts.run
        facts.mode = text(line.get("mode")) or facts.mode
        if model := mapping(line.get("model")):
            facts.model = {key: count(value) for key, value in model.items()}
        self._lives[-1].version = text(line.get("version"), LONGEST_NAME)
        given = flat(mapping(line.get("settings")))
        given = {name: value for name, value in given.items() if name not in _NO_SETTING}
        for name in sorted(given.keys() | facts.settings.keys()) if facts.settings else ():
            before, after = facts.settings.get(name), given.get(name)
            if before != after:
                facts.changes_left_out += len(self._changes) == MOST_CHANGES
                by_restart = epoch != self._settings_of
                self._changes.append(Change(at, name, before, after, by_restart))
        facts.settings, self._settings_of = given, epoch

    def _take_round(self, at: float, life: Life, line: Mapping[str, Any]) -> None:
        round_, averaged = count(line.get("number")) or 0, count(line.get("averaged")) or 0
        fragment, seconds = count(line.get("fragment")) or 0, number(line.get("seconds")) or 0.0
        alive = count(line.get("alive")) or 0
        life.closed(round_, averaged, line)
        self._repeated += round_ <= self._highest
        self._highest = max(round_, self._highest)
        facts = self._facts
        facts.rounds += 1
        facts.contributions += averaged
        facts.most_alive = max(facts.most_alive, alive)
        loss, norm = number(line.get("loss")), number(line.get("delta_norm"))
        if loss is not None:
            facts.first_loss = loss if facts.first_loss is None else facts.first_loss
            facts.last_loss = loss
            if facts.best_loss is None or loss < facts.best_loss:
                facts.best_loss, facts.best_loss_round = loss, round_
        values = {"loss": loss, "seconds": max(0.0, seconds), "averaged": averaged, "alive": alive}
        for key, value in values.items():
            if value is not None:
                self._curves[key].add(at, round_, value)
        if norm is not None and (fragment in self._norms or len(self._norms) < MOST_FRAGMENTS):
            self._norms.setdefault(fragment, Points()).add(at, round_, norm)
        self._take_bytes(at, round_, life)
        contributors = line.get("workers")
        for each in contributors if isinstance(contributors, list) else ():
            self._take_contribution(at, round_, life, mapping(each))
        for name in self._here:
            self._workers[self._first_ids.get(name, name)].rounds_here += 1
        slow = SlowRound(round_, at, fragment, seconds, averaged)
        heapq.heappush(self._slowest, (seconds, facts.lines, slow))
        if len(self._slowest) > SLOWEST:
            heapq.heappop(self._slowest)

    def _take_bytes(self, at: float, round_: int, life: Life) -> None:
        before, up, down = self._rate_from or (at, 0, 0)
        if self._rate_from is not None and at - before < RATE_OVER_S:
            return
        if self._rate_from is not None:
            self._rates["up"].add(at, round_, (life.bytes_up - up) / (at - before))
            self._rates["down"].add(at, round_, (life.bytes_down - down) / (at - before))
        self._rate_from = (at, life.bytes_up, life.bytes_down)

    def _take_contribution(
        self, at: float, round_: int, life: Life, line: Mapping[str, Any]
    ) -> None:
        name = text(line.get("id"), LONGEST_NAME)
        worker = self._worker(name, at) if name else None
        if worker is None:
            return
        staleness = worker.contributed(at, round_, line, life.bytes_up, life.bytes_down)
        if staleness is not None:
            self._staleness[min(staleness, STALEST + 1)] += 1
        self._here.add(name)

    def _take_event(self, at: float, line: Mapping[str, Any]) -> None:
        level, sentence = text(line.get("level"), 20) or "info", text(line.get("text"))
        closed = closed_of(sentence)
        if closed is not None:  # the round has a line of its own, but for these two
            self._slowest = [
                (seconds, order, replace(slow, expected=closed.expected, without=closed.without))
                if order == self._facts.lines - 1 and slow.number == closed.number
                else (seconds, order, slow)
                for seconds, order, slow in self._slowest
            ]
            return
        self._facts.events_left_out += len(self._events) == MOST_EVENTS
        self._events.append(Event(at, level, sentence))
        if level in _LEVELS and sentence not in self._actions:
            self._warn(at, level, sentence)
        sign = sign_of(sentence, self._here)
        worker = self._worker(sign.worker, at) if sign is not None else None
        if sign is not None and worker is not None:
            self._take_sign(at, worker, sign, sentence)

    def _warn(self, at: float, level: str, sentence: str) -> None:
        """Warnings that differ in their numbers alone are counted together."""
        self._facts.warnings += level == "warning"
        self._facts.errors += level == "error"
        key = f"{level} {re.sub(r'[0-9][0-9.]*', '#', sentence)}"
        known = self._said.get(key)
        if known is not None:
            self._said[key] = Said(level, sentence, known.count + 1, known.first_at, at)
        elif len(self._said) < MOST_SAID:
            self._said[key] = Said(level, sentence, 1, at, at)

    def _take_sign(self, at: float, worker: Worker, sign: Sign, sentence: str) -> None:
        worker.shows(sign, at, sentence)
        if worker.now is None:
            self._here.discard(sign.worker)
        else:
            self._here.add(sign.worker)

    def _worker(self, name: str, at: float) -> Worker | None:
        """A worker by its id; None beyond `MOST_WORKERS`.

        A worker without an id of its own has a new one after each restart: host and random digits. It
        goes on as the one that was gone from its host.
        """
        found = self._workers.get(self._first_ids.get(name, name))
        if found is None and (found := self._gone_from(name)) is not None:
            self._first_ids[name] = found.name
            found.id = name
            found.restarts += 1
        if found is None and len(self._workers) < MOST_WORKERS:
            found = self._workers[name] = Worker(name, first_seen=at, last_seen=at, name=name)
        elif found is None and len(self._others) < 1_000_000:
            self._others.add(hash(name))
        return found

    def _gone_from(self, name: str) -> Worker | None:
        """The last worker to leave the host in the generated id `name`; None if it is another id."""
        generated = GENERATED_ID.fullmatch(name)
        if generated is None or len(self._first_ids) >= MOST_RESTARTS:
            return None
        gone = [
            each
            for each in self._workers.values()
            if each.now is None
            and not each.was_here_at_end  # it may come back to the next broker under its id
            and generated["host"] in each.hosts
            and GENERATED_ID.fullmatch(each.id)
        ]
        return max(gone, key=lambda each: each.last_seen, default=None)

    def facts(self, actions: list[Action], actions_left_out: int, damaged: int) -> Facts:
        """Sum up. `take` has been called, and is not called afterwards."""
        self._end_life()
        found, lives, last = self._facts, tuple(self._lives), self._lives[-1]
        found.began_at, found.lives = lives[0].began_at, lives
        found.last_words = last.ending
        if last.ending is not None:
            found.ending = OVER if last.is_over else STOPPED
        found.bytes_up = sum(life.bytes_up for life in lives)
        found.bytes_down = sum(life.bytes_down for life in lives)
        workers = sorted(self._workers.values(), key=lambda each: (-each.contributions, each.name))
        for worker in workers:
            worker.finish(found.began_at, found.ended_at)
        found.workers, found.workers_left_out = tuple(workers), len(self._others)
        found.curves = self._all_curves(workers)
        seconds = self._curves["seconds"].values
        found.round_median_s, found.round_p95_s = quantile(seconds, 0.5), quantile(seconds, 0.95)
        found.round_longest_s = max(seconds, default=None)
        found.staleness = tuple(sorted(self._staleness.items()))
        found.slowest = tuple(slow for _, _, slow in sorted(self._slowest, reverse=True))
        said = sorted(self._said.values(), key=lambda each: (each.level != "error", -each.count))
        found.said, found.events, found.changes = (
            tuple(said),
            tuple(self._events),
            tuple(self._changes),
        )
        found.actions, found.actions_left_out = tuple(actions), actions_left_out
        found.pauses = tuple(_pauses(actions, lives))
        found.damaged, found.remarks = damaged, tuple(self._remarks(damaged))
        return found

    def _all_curves(self, workers: list[Worker]) -> dict[str, tuple[Curve, ...]]:
        shown = workers[:MOST_CURVES]
        norms = sorted(self._norms.items())
        return {
            **{key: (points.curve("", STRETCHES),) for key, points in self._curves.items()},
            "norm": tuple(
                points.curve(f"fragment {each}" if len(norms) > 1 else "", STRETCHES)
                for each, points in norms
            ),
            "network": tuple(points.curve(way, STRETCHES) for way, points in self._rates.items()),
            **{
                f"{key} of workers": tuple(filter(None, (each.curve(key) for each in shown)))
                for key in CURVES
            },
        }

    def _remarks(self, damaged: int) -> Iterator[str]:
        if damaged:
            lines = "1 line is" if damaged == 1 else f"{damaged} lines are"
            yield f"{lines} damaged and left out: a full disk or a crash cuts lines."
        first = self._lives[0].first
        if first is not None and first > 0:
            yield (
                f"The history begins with round {first}: the broker keeps the newest 16 to 32 MiB "
                "of lines, and a run may have begun with another folder."
            )
        if self._repeated:
            yield (
                f"{self._repeated} rounds have a number that an earlier round had: the broker went on "
                "from an older version than the newest."
            )
        if self._lives_left_out:
            yield f"{self._lives_left_out} starts of the broker are left out of the table."


def _pauses(actions: list[Action], lives: tuple[Life, ...]) -> Iterator[tuple[float, float]]:
    """From each pause to the next resume; a broker that is started again is not paused."""
    began: float | None = None
    for each in actions:
        if each.what == "pause" and began is None:
            began = each.at
        elif each.what == "resume" and began is not None:
            yield began, each.at
            began = None
    if began is not None:
        yield began, next((life.ended_at for life in lives if life.ended_at >= began), began)
