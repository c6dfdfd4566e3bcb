"""From the lines of a history, one by one, to the facts of a report: one pass, in bounded memory."""

from __future__ import annotations

import heapq
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from diloco_tools.monitor.report.facts import (
    OPEN,
    OVER,
    STOPPED,
    Action,
    Change,
    Curve,
    Event,
    Facts,
    Life,
    SlowRound,
)
from diloco_tools.monitor.report.history.plain_values import (
    LONGEST_NAME,
    count,
    flat,
    mapping,
    number,
    text,
)
from diloco_tools.monitor.report.history.presence import Activity
from diloco_tools.monitor.report.history.sentences import Sign, closed_of, sign_of
from diloco_tools.monitor.report.history.tallies import LifeTally, Warnings, WorkerTally
from diloco_tools.monitor.report.thinning import Point, Spread, Thinned

BUCKETS = 160  # of a curve of the whole run: at most four points each, about one for each pixel
RATE_OVER_S = 1.0  # bytes a second are measured over at least as long
MOST_WORKERS = 500  # that are followed one by one
MOST_RESTARTS = 100_000  # of workers that come under new ids; later ones are workers of their own
MOST_LIVES = 1000
MOST_EVENTS = 300  # the newest
MOST_CHANGES = 300
MOST_ACTIONS = 500
MOST_CURVES = 32  # of workers, those that contributed most
MOST_FRAGMENTS = 64
SLOWEST = 10
STALEST = 30  # what is older is counted together
# Of the loop's own state, or known only after the first moment: no setting that somebody changed.
_NO_SETTING = ("reducer.submissions", "reducer.waiting")


# The id that diloco_worker generates for a worker that was given none.
DRAWN_ID = re.compile(r"(?P<host>.*)-[0-9a-f]{8}", re.DOTALL)


class Digest:
    """Takes documents of a history in their order, and says what they come to."""

    def __init__(self, orders: frozenset[str] = frozenset()) -> None:
        """`orders`: sentences of what operators did, which the broker logs as warnings."""
        self.lines = 0
        self._orders = orders
        self._lives: list[LifeTally] = []
        self._lives_left_out = 0
        self._at = 0.0  # of the newest line; a clock that was set back does not go back here
        self._workers: dict[str, WorkerTally] = {}
        self._here: set[str] = set()
        self._earlier: dict[
            str, str
        ] = {}  # of a restarted worker's newer ids, the first that it had
        self._others: set[int] = set()  # hashes of names beyond `MOST_WORKERS`
        self._activity = Activity()
        self._curves = {key: Thinned(BUCKETS) for key in ("loss", "seconds", "averaged", "alive")}
        self._norms: dict[int, Thinned] = {}
        self._rates = {"up": Thinned(BUCKETS), "down": Thinned(BUCKETS)}
        self._rate_from: tuple[float, int, int] | None = None
        self._seconds = Spread()
        self._staleness: Counter[int] = Counter()
        self._slowest: list[tuple[float, int, SlowRound]] = []
        self._newest_round: SlowRound | None = None
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._best_loss: tuple[float, int] | None = None
        self._most_alive = 0
        self._warnings = Warnings()
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._events_seen = 0
        self._start: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._settings_of = ""  # the epoch that they were last told in
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        self._changes_seen = 0
        self._repeated = 0  # rounds with a number that an earlier one had
        self._highest: int | None = None

    def take(self, document: Mapping[str, Any]) -> None:
        """One line whose kind, epoch and time have been checked."""
        self.lines += 1
        at = self._at = max(self._at, float(document["at"]))
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
        self._lives.append(LifeTally(epoch, at, at))
        self._rate_from = None

    def _end_life(self) -> None:
        if self._lives:
            for worker in self._workers.values():
                worker.track.end(self._lives[-1].ended_at)
        self._here.clear()

    def _take_start(self, at: float, epoch: str, line: Mapping[str, Any]) -> None:
        for key in ("run", "mode", "version"):
            self._start[key] = text(line.get(key)) or self._start.get(key)
        self._start["model"] = mapping(line.get("model")) or self._start.get("model", {})
        self._lives[-1].version = text(line.get("version"), LONGEST_NAME)
        told = flat(mapping(line.get("settings")))
        told = {name: value for name, value in told.items() if name not in _NO_SETTING}
        for name in sorted(told.keys() | self._settings.keys()) if self._settings else ():
            before, after = self._settings.get(name), told.get(name)
            if before != after:
                self._changes_seen += 1
                by_restart = epoch != self._settings_of
                self._changes.append(Change(at, name, before, after, by_restart))
        self._settings, self._settings_of = told, epoch

    def _take_round(self, at: float, life: LifeTally, line: Mapping[str, Any]) -> None:
        round_, averaged = count(line.get("number")) or 0, count(line.get("averaged")) or 0
        fragment, seconds = count(line.get("fragment")) or 0, number(line.get("seconds")) or 0.0
        alive = count(line.get("alive")) or 0
        life.closed(round_, averaged, line)
        self._repeated += self._highest is not None and round_ <= self._highest
        self._highest = max(round_, -1 if self._highest is None else self._highest)
        self._most_alive = max(self._most_alive, alive)
        self._seconds.add(max(0.0, seconds))
        loss, norm = number(line.get("loss")), number(line.get("delta_norm"))
        told = {"loss": loss, "seconds": seconds, "averaged": averaged, "alive": alive}
        for key, value in told.items():
            if value is not None:
                self._curves[key].add(Point(at, round_, float(value)))
        if norm is not None and (fragment in self._norms or len(self._norms) < MOST_FRAGMENTS):
            self._norms.setdefault(fragment, Thinned(BUCKETS)).add(Point(at, round_, norm))
        if loss is not None:
            self._first_loss = loss if self._first_loss is None else self._first_loss
            self._last_loss = loss
            if self._best_loss is None or loss < self._best_loss[0]:
                self._best_loss = (loss, round_)
        self._take_bytes(at, round_, life)
        contributors = line.get("workers")
        for each in contributors if isinstance(contributors, list) else ():
            self._take_contribution(at, round_, mapping(each))
        for name in self._here:
            self._workers[self._earlier.get(name, name)].rounds_here += 1
        slow = SlowRound(round_, at, fragment, seconds, averaged)
        heapq.heappush(self._slowest, (seconds, self.lines, slow))
        if len(self._slowest) > SLOWEST:
            heapq.heappop(self._slowest)

    def _take_bytes(self, at: float, round_: int, life: LifeTally) -> None:
        up, down = life.up.sum, life.down.sum
        if self._rate_from is None:
            self._rate_from = (at, up, down)
            return
        before, up_before, down_before = self._rate_from
        if at - before >= RATE_OVER_S:
            self._rates["up"].add(Point(at, round_, (up - up_before) / (at - before)))
            self._rates["down"].add(Point(at, round_, (down - down_before) / (at - before)))
            self._rate_from = (at, up, down)

    def _take_contribution(self, at: float, round_: int, line: Mapping[str, Any]) -> None:
        name = text(line.get("id"), LONGEST_NAME)
        worker = self._worker(name, at) if name else None
        if worker is None:
            return
        staleness = worker.contributed(at, round_, line, self._lives[-1])
        if staleness is not None:
            self._staleness[min(staleness, STALEST + 1)] += 1
        worker.track.is_here(at)
        self._here.add(name)
        self._activity.add(at, worker.name)

    def _take_event(self, at: float, line: Mapping[str, Any]) -> None:
        level, sentence = text(line.get("level"), 20) or "info", text(line.get("text"))
        closed = closed_of(sentence)
        if closed is not None:  # the round has a line of its own, but for these two
            self._slowest = [
                (seconds, order, replace(slow, expected=closed.expected, without=closed.without))
                if order == self.lines - 1 and slow.number == closed.number
                else (seconds, order, slow)
                for seconds, order, slow in self._slowest
            ]
            return
        self._events_seen += 1
        self._events.append(Event(at, level, sentence))
        if sentence not in self._orders:
            self._warnings.add(at, level, sentence)
        sign = sign_of(sentence, self._here)
        if sign is not None:
            self._take_sign(at, sign, sentence)

    def _take_sign(self, at: float, sign: Sign, sentence: str) -> None:
        worker = self._worker(sign.worker, at)
        if worker is None:
            return
        worker.track.take(sign, at, sentence)
        worker.came_from(sign.host)
        worker.last_seen = at
        if worker.track.now is None:
            self._here.discard(sign.worker)
        else:
            self._here.add(sign.worker)

    def _worker(self, name: str, at: float) -> WorkerTally | None:
        """The tally of a worker; None for one that came when too many had come.

        A worker without an id of its own has a new one after each restart: host and random digits. It
        goes on with the tally of the one that was gone from its host.
        """
        found = self._workers.get(self._earlier.get(name, name))
        if found is None and (found := self._gone_from(name)) is not None:
            self._earlier[name] = found.name
            found.id = name
            found.restarts += 1
        if found is None and len(self._workers) < MOST_WORKERS:
            found = self._workers[name] = WorkerTally(name, at)
        elif found is None and len(self._others) < 1_000_000:
            self._others.add(hash(name))
        return found

    def _gone_from(self, name: str) -> WorkerTally | None:
        """The last worker to leave the host in the generated id `name`; None if it is not one."""
        drawn = DRAWN_ID.fullmatch(name)
        if drawn is None or len(self._earlier) >= MOST_RESTARTS:
            return None
        gone = [
            each
            for each in self._workers.values()
            if each.track.now is None
            and not each.track.was_here_at_end  # it may come back to the next broker under its id
            and drawn["host"] in each.hosts
            and DRAWN_ID.fullmatch(each.id)
        ]
        return max(gone, key=lambda each: each.last_seen, default=None)

    def facts(self, actions: list[Action], actions_left_out: int, damaged: int) -> Facts:
        """What it all comes to. `take` has been called, and is not called afterwards."""
        self._end_life()
        lives = tuple(life.facts() for life in self._lives)
        last = lives[-1]
        ending = OPEN if last.ending is None else OVER if last.is_over else STOPPED
        tallies = sorted(self._workers.values(), key=lambda each: (-each.contributions, each.name))
        up, down = (sum(getattr(life, f"bytes_{way}") for life in lives) for way in ("up", "down"))
        best, best_round = self._best_loss or (None, None)
        return Facts(
            began_at=lives[0].began_at,
            ended_at=self._at,
            ending=ending,
            last_words=last.ending,
            run=self._start.get("run"),
            mode=self._start.get("mode") or "",
            model={key: count(value) for key, value in self._start.get("model", {}).items()},
            lives=lives,
            rounds=self._curves["seconds"].count,
            contributions=sum(life.contributions for life in lives),
            most_alive=self._most_alive,
            first_loss=self._first_loss,
            last_loss=self._last_loss,
            best_loss=best,
            best_loss_round=best_round,
            round_median_s=self._seconds.quantile(0.5),
            round_p95_s=self._seconds.quantile(0.95),
            round_longest_s=self._seconds.longest if self._seconds.count else None,
            bytes_up=up,
            bytes_down=down,
            workers=tuple(each.facts(self._activity.of(each.name)) for each in tallies),
            workers_left_out=len(self._others),
            curves=self._all_curves(tallies),
            staleness=tuple(sorted(self._staleness.items())),
            slowest=tuple(slow for _, _, slow in sorted(self._slowest, reverse=True)),
            said=self._warnings.facts(),
            warnings=self._warnings.by_level["warning"],
            errors=self._warnings.by_level["error"],
            events=tuple(self._events),
            events_left_out=self._events_seen - len(self._events),
            settings=self._settings,
            changes=tuple(self._changes),
            changes_left_out=self._changes_seen - len(self._changes),
            actions=tuple(actions),
            actions_left_out=actions_left_out,
            pauses=tuple(_pauses(actions, lives)),
            lines=self.lines,
            damaged=damaged,
            remarks=tuple(self._remarks(damaged)),
        )

    def _all_curves(self, tallies: list[WorkerTally]) -> dict[str, tuple[Curve, ...]]:
        def curve(name: str, thinned: Thinned) -> Curve:
            return Curve(name, tuple(thinned), thinned.count)

        def of_workers(key: str) -> tuple[Curve, ...]:
            return tuple(
                each.curve(key) for each in tallies[:MOST_CURVES] if each.curves[key].count
            )

        names = {number_: f"fragment {number_}" for number_ in self._norms}
        norms = sorted(self._norms.items())
        return {
            **{key: (curve("", thinned),) for key, thinned in self._curves.items()},
            "norm": tuple(curve(names[each] if len(norms) > 1 else "", n) for each, n in norms),
            "network": tuple(curve(way, thinned) for way, thinned in self._rates.items()),
            **{f"{key} of workers": of_workers(key) for key in ("loss", "norm", "speed")},
        }

    def _remarks(self, damaged: int) -> list[str]:
        found = []
        if damaged:
            lines = "1 line is" if damaged == 1 else f"{damaged} lines are"
            found.append(f"{lines} damaged and left out: a full disk or a crash cuts lines.")
        first = self._lives[0].first
        if first is not None and first > 0:
            found.append(
                f"The history begins with round {first}: the broker keeps the newest 16 to 32 MiB "
                "of lines, and a run may have begun with another folder."
            )
        if self._repeated:
            found.append(
                f"{self._repeated} rounds have a number that an earlier round had: the broker went on "
                "from an older version than the newest."
            )
        if self._lives_left_out:
            found.append(f"{self._lives_left_out} lives of the broker are left out of the table.")
        return found


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
        yield began, next(life.ended_at for life in (*lives, lives[-1]) if life.ended_at >= began)
