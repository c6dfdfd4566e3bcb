"""Virtual time, and resources that flows share: a link at the broker, or the cores of a machine.

A `Hub` has a rate, and so may each flow through it. The hub's rate is shared max-min fairly, by weight,
as many TCP connections share a link and busy threads share cores. Flows of one kind have equal rates,
so 500 of them cost no more simulation than one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[], None]
ROUNDING = 1e-9  # relative rounding error of sums of floats


class World:
    """A clock and a heap of scheduled actions."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self.events = 0  # executed
        self._heap: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def at(self, moment: float, action: Action) -> None:
        """Schedule an action. Actions of the same moment run in the order of their scheduling."""
        heapq.heappush(self._heap, (max(moment, self.now), next(self._order), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self, is_enough: Callable[[], bool], most_events: int) -> bool:
        """Advance time until `is_enough`. False without actions left, or after `most_events`."""
        while not is_enough():
            if not self._heap or self.events >= most_events:
                return False
            self.now, _, action = heapq.heappop(self._heap)
            self.events += 1
            action()
        return True


class Flow:
    """A queue through a hub: a connection, or a thread."""

    def __init__(self, hub: Hub, kind: _Kind) -> None:
        self._hub, self._kind = hub, kind
        self._queue: deque[tuple[float, Action]] = deque()
        self.total = 0.0  # amount sent, including the queue

    def send(self, amount: float, done: Action) -> None:
        """Queue an amount (bytes, or seconds of work), and call `done` when it is through."""
        self.total += amount
        self._queue.append((amount, done))
        if len(self._queue) == 1:
            self._hub.begins(self, self._kind, amount)

    def finish_first(self) -> Action:
        """Remove the first amount, which is through; returns its `done`."""
        _, done = self._queue.popleft()
        if self._queue:
            self._hub.begins(self, self._kind, self._queue[0][0])
        return done


class _Kind:
    """Flows of the same rate and weight, possibly behind a link that they share with others."""

    def __init__(self, most: float, weight: float, behind: _Line | None) -> None:
        self.most, self.weight, self.behind = most, weight, behind
        self.active = 0
        self.served = 0.0  # amount served to each flow that was active all the time
        self.rate = 0.0  # of one flow
        self.finishes: list[tuple[float, int, Flow]] = []  # by `served`

    @property
    def level(self) -> float:
        """The largest rate it can have, per unit of weight."""
        most = self.most
        if self.behind is not None:
            most = min(most, self.behind.rate * self.weight / self.behind.weight)
        return most / self.weight


@dataclass
class _Line:
    """A link in front of the hub, and the weight of all active flows behind it."""

    rate: float
    weight: float = 0.0


class Hub:
    """A shared resource. `rate` is an amount a second or `math.inf`; some flow or the hub is limited."""

    def __init__(self, world: World, rate: float) -> None:
        self._world, self._rate = world, rate
        self._kinds: dict[tuple[float, float, object], _Kind] = {}
        self._lines: dict[object, _Line] = {}
        self._order = itertools.count()
        self._at = 0.0  # when the served amounts were last updated
        self._plan = 0
        self._is_planned = False

    def flow(
        self,
        most: float = math.inf,
        behind: tuple[object, float] | None = None,
        weight: float = 1.0,
    ) -> Flow:
        """A new flow with at most this rate. `behind` is the name and rate of a shared link."""
        line = None if behind is None else self._lines.setdefault(behind[0], _Line(behind[1]))
        key = (most, weight, None if behind is None else behind[0])
        return Flow(self, self._kinds.setdefault(key, _Kind(most, weight, line)))

    def begins(self, flow: Flow, kind: _Kind, amount: float) -> None:
        self._bring_up_to_date()
        if not kind.active:
            kind.served = 0.0
        kind.active += 1
        heapq.heappush(kind.finishes, (kind.served + amount, next(self._order), flow))
        self._plan_anew()

    def _bring_up_to_date(self) -> None:
        seconds = self._world.now - self._at
        self._at = self._world.now
        if seconds > 0:
            for kind in self._kinds.values():
                if kind.active:
                    kind.served += kind.rate * seconds

    def _plan_anew(self) -> None:
        """Recompute the shares after all actions of this moment."""
        if not self._is_planned:
            self._is_planned = True
            self._world.at(self._world.now, self._share)

    def _share(self) -> None:
        self._is_planned = False
        self._bring_up_to_date()
        active = [kind for kind in self._kinds.values() if kind.active]
        for line in self._lines.values():
            line.weight = 0.0
        for kind in active:
            if kind.behind is not None:
                kind.behind.weight += kind.active * kind.weight
        busy = sorted(active, key=lambda kind: kind.level)
        left, weights = self._rate, sum(kind.active * kind.weight for kind in busy)
        for kind in busy:
            kind.rate = min(kind.level, left / weights) * kind.weight
            left -= kind.rate * kind.active
            weights -= kind.active * kind.weight
        self._plan += 1
        plan, first = self._plan, min(map(_seconds_left, busy), default=None)
        if first is not None:
            self._world.after(first, lambda: self._finish() if plan == self._plan else None)

    def _finish(self) -> None:
        """Complete the amounts that are through."""
        self._bring_up_to_date()
        done: list[Action] = []
        for kind in self._kinds.values():
            if not kind.active:
                continue
            reached = kind.served * (1 + ROUNDING) + kind.rate * ROUNDING
            through: list[Flow] = []
            while kind.finishes and kind.finishes[0][0] <= reached:
                through.append(heapq.heappop(kind.finishes)[2])
            kind.active -= len(through)
            done += [flow.finish_first() for flow in through]
        self._plan_anew()
        for action in done:
            action()


def _seconds_left(kind: _Kind) -> float:
    amount = kind.finishes[0][0] - kind.served
    return max(0.0, amount / kind.rate) if kind.rate else math.inf
