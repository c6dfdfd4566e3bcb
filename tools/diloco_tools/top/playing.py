"""Going through the history of a run: which moment is shown, and when comes the next. Pure."""

from collections.abc import Sequence
from datetime import datetime, tzinfo

from diloco_tools.feed.model import FeedModel
from diloco_tools.feed.replay import Moment
from diloco_tools.feed.series import RunSeries
from diloco_tools.top.drawing.scene import Replayed

POINTS = 256  # moments before the one shown, from which the curves are drawn: a jump takes a moment
SPEEDS = (1, 2, 5, 10, 20, 50, 100)  # moments a second


class Player:
    """One moment of a history, and the curves up to it. `now` is seconds of any monotonic clock.

    Begins to play at the first moment; there has to be one. `zone` is that of the clock that is shown;
    None: that of this machine.
    """

    def __init__(self, moments: Sequence[Moment], now: float, zone: tzinfo | None = None) -> None:
        self.moments = moments
        self.index = 0
        self.playing = len(moments) > 1
        self._speed = 2
        self._since = now
        self._zone = zone
        self._drawn = -1  # the moment that model and series are at
        self._model = FeedModel()
        self._series = RunSeries()

    @property
    def moment(self) -> Moment:
        return self.moments[self.index]

    @property
    def speed(self) -> int:
        """Moments a second."""
        return SPEEDS[self._speed]

    def tick(self, now: float) -> None:
        """Go on as far as the time that has passed asks for; the end stops the play."""
        if not self.playing:
            return
        steps = int((now - self._since) * self.speed)
        if steps > 0:
            self._since += steps / self.speed
            self._go(self.index + steps)
        if self.index == len(self.moments) - 1:
            self.playing = False

    def toggle(self, now: float) -> None:
        """Play or stop; at the end, play from the beginning."""
        if not self.playing and self.index == len(self.moments) - 1:
            self._go(0)
        self.playing = not self.playing and len(self.moments) > 1
        self._since = now

    def step(self, by: int) -> None:
        """Stop, and show a moment before or behind."""
        self.playing = False
        self._go(self.index + by)

    def first(self) -> None:
        self.step(-self.index)

    def last(self) -> None:
        self.step(len(self.moments))

    def change_speed(self, by: int, now: float) -> None:
        self._speed = max(0, min(len(SPEEDS) - 1, self._speed + by))
        self._since = now

    def picture(self) -> tuple[FeedModel, RunSeries]:
        """What is known at this moment, and fresh at the time `moment.at`."""
        if self._drawn != self.index:
            self._advance()
        return self._model, self._series

    def replayed(self) -> Replayed:
        """What a header says of this moment."""
        try:
            clock = datetime.fromtimestamp(self.moment.at, self._zone).strftime("%Y-%m-%d %H:%M:%S")
        except (ValueError, OverflowError, OSError):
            clock = "at no time"
        place = f"{self.index + 1}/{len(self.moments)}"
        return Replayed(clock, place, self.speed if self.playing else None)

    def _go(self, index: int) -> None:
        self.index = max(0, min(len(self.moments) - 1, index))

    def _advance(self) -> None:
        start = self._drawn + 1
        if self.index < self._drawn or self.index - self._drawn > POINTS or self._drawn < 0:
            self._series = RunSeries()
            start = max(0, self.index + 1 - POINTS)
        for moment in self.moments[start : self.index + 1]:
            self._series.update(moment.snapshot, moment.at)
        # A model of its own for each moment: going back is no older snapshot, it is another time.
        self._model = FeedModel()
        self._model.update(self.moment.snapshot, self.moment.at)
        self._drawn = self.index
