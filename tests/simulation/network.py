"""Virtual time and a network that breaks: what the parts of a simulated run stand on.

Nothing in here is real: a second passes when the heap of what is to happen says so, and all chance comes
from one seeded die. The same seed gives the same run, event by event.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diloco_protocol.messages import Message, Via

# Lines of the story that are kept.
STORY_LINES = 100_000
# Between two messages of one connection, so that they never change their order.
INSTANT_S = 1e-6


class World:
    """A clock, a heap of what happens when, the dice, and the story of what has happened."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.dice = random.Random(seed)
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._story: deque[tuple[float, str, object]] = deque(maxlen=STORY_LINES)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later. What is due at the same moment happens in the order of asking."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), action))

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """The same by the clock, for what must keep its order: sums of floats are inexact."""
        heapq.heappush(self._heap, (moment, next(self._order), action))

    def run(self, until: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until that moment, or until there is enough (looked at every second)."""
        look_at = self.now + 1.0
        while self._heap and self._heap[0][0] <= until:
            at, _, action = heapq.heappop(self._heap)
            if at >= look_at:
                if enough():
                    return
                look_at = at + 1.0
            self.now = at
            self.events += 1
            action()
        self.now = until

    def tell(self, who: str, what: object) -> None:
        """Remember for the story; it is formatted only when it is read."""
        self._story.append((self.now, who, what))

    def story(self, who: str | None = None, lines: int = STORY_LINES) -> str:
        """The last lines of the story, of all hosts or of one."""
        told = [line for line in self._story if who in (None, line[1])][-lines:]
        return "\n".join(f"{at:10.4f} {who:>14}  {what!s:.230}" for at, who, what in told)


@dataclass(frozen=True)
class Clock:
    """The clock of a machine, which may be slow or fast."""

    world: World
    rate: float = 1.0

    @property
    def now(self) -> float:
        return self.rate * self.world.now

    def in_world(self, moment: float) -> float:
        return moment / self.rate


@dataclass(frozen=True)
class Wrapped:
    """A message from or to a peer behind a relay."""

    via: Via
    message: Message


Listener = Callable[["Connection", Any, Any], None]


@dataclass(frozen=True)
class Weather:
    """How the network behaves. Seconds, drawn anew for each connection or message."""

    latency: tuple[float, float] = (0.001, 0.08)  # one-way, of a connection
    jitter: float = 0.005  # mean of what each message takes longer
    stall: float = 0.004  # probability that a message, and all behind it, is held up
    stall_s: float = 2.0  # longest such delay
    chunk_s: tuple[float, float] = (0.0, 0.02)  # time a chunk occupies its connection


class Connection:
    """One connection of a worker to the broker: in order each way, until it breaks.

    What is under way when it breaks is lost. Each end finds out in its own time, or never. The broker
    calls it by its `route`; `to_broker` and `to_worker` take what arrives.
    """

    def __init__(
        self,
        world: World,
        weather: Weather,
        route: bytes,
        owner: str,
        *,
        to_broker: Listener,
        to_worker: Listener,
    ) -> None:
        self.world = world
        self.route = route
        self.owner = owner
        self.is_severed = False  # nothing arrives any more
        self.is_gone = False  # the broker knows that nothing can be sent on it any more
        self.on_gone: Callable[[], None] = lambda: None  # called when the broker finds out
        self._weather = weather
        self._latency = world.dice.uniform(*weather.latency)
        self._to_broker = to_broker
        self._to_worker = to_worker
        self.is_up_at = world.now
        self._up_at = self._down_at = world.now  # when the last message of a direction arrives

    def comes_up(self, at: float) -> None:
        """It is there from that moment on; what is sent before waits."""
        self.is_up_at = self._up_at = self._down_at = at

    def up(self, message: Message | Wrapped, payload: Any = None) -> None:
        self._up_at = self._arrival(self._up_at, payload)
        self._arrives(self._up_at, lambda: self._to_broker(self, message, payload))

    def down(self, message: Message | Wrapped, payload: Any = None) -> bool:
        """The broker sends a message. False when it knows that the connection is gone."""
        if self.is_gone:
            return False
        self._down_at = self._arrival(self._down_at, payload)
        self._arrives(self._down_at, lambda: self._to_worker(self, message, payload))
        return True

    def sever(self) -> None:
        """It breaks: nothing that is under way, or sent from now on, arrives."""
        self.is_severed = True

    def is_found_gone(self, seconds: float) -> None:

        def find_out() -> None:
            self.is_gone = True
            self.on_gone()

        self.world.after(seconds, find_out)

    def hang_up(self) -> None:
        """The worker's end is closed; what it has sent may still arrive, or not."""
        if self.world.dice.random() < 0.5:
            self.sever()
        late = self.world.dice.choice((0.0, 0.1, 1.0))
        self.is_found_gone(self._latency + late * self.world.dice.random())

    def _arrival(self, last: float, payload: Any) -> float:
        dice, weather = self.world.dice, self._weather
        delay = self._latency + dice.expovariate(1 / weather.jitter)
        if dice.random() < weather.stall:
            delay += dice.uniform(0, weather.stall_s)
        takes = INSTANT_S if payload is None else INSTANT_S + dice.uniform(*weather.chunk_s)
        return max(self.world.now + delay, last) + takes

    def _arrives(self, at: float, heard: Callable[[], None]) -> None:
        self.world.after(at - self.world.now, lambda: None if self.is_severed else heard())
