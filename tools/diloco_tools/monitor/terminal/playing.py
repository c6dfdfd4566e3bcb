"""Going through the history of a run: which moment is shown, and when comes the next. Pure."""

from collections.abc import Callable, Sequence
from datetime import datetime, tzinfo

from diloco_tools.monitor.feed.model import FeedModel
from diloco_tools.monitor.feed.replay import Moment
from diloco_tools.monitor.feed.series import RunSeries

POINTS = 256  # moments before the one shown, from which the curves are drawn: a jump takes a moment
SPEEDS = (1, 2, 5, 10, 20, 50, 100)  # moments a second


class Player:
    """One moment of a history, and the curves up to it. `clock` gives seconds, monotonic.

    Begins to play at the first moment; there has to be one. `zone` is that of the time of day that is
    shown; None: that of this machine.
    """

    def __init__(
        self,
        moments: Sequence[Moment],
        clock: Callable[[], float],
        zone: tzinfo | None = None,
    ) -> None:
        self.moments = moments
        self.index = 0
        self.playing = len(moments) > 1
        self._speed = 2
        self._clock, self._since = clock, clock()
        self._zone = zone
        self._drawn = -1  # the moment that model and series are at
        self._model, self._series = FeedModel(), RunSeries()

    @property
    def moment(self) -> Moment:
        return self.moments[self.index]

    @property
    def speed(self) -> int:
        """Moments a second."""
        return SPEEDS[self._speed]

    @property
    def time_of_day(self) -> str:
        """Date and time of the moment."""
        try:
            return datetime.fromtimestamp(self.moment.at, self._zone).strftime("%Y-%m-%d %H:%M:%S")
        except (ValueError, OverflowError, OSError):
            return "at no time"

    def tick(self) -> None:
        """Go on as far as the time that has passed asks for; the end stops the play."""
        if not self.playing:
            return
        steps = int((self._clock() - self._since) * self.speed)
        if steps > 0:
            self._since += steps / self.speed
            self._go(self.index + steps)
        if self.index == len(self.moments) - 1:
            self.playing = False

    def toggle(self) -> None:
        """Play or stop; at the end, play from the beginning."""
        if not self.playing and self.index == len(self.moments) - 1:
            self._go(0)
        self.playing = not self.playing and len(self.moments) > 1
        self._since = self._clock()

    def step(self, by: int) -> None:
        """Stop, and show a moment before or behind."""
        self.playing = False
        self._go(self.index + by)

    def first(self) -> None:
        self.step(-self.index)

    def last(self) -> None:
        self.step(len(self.moments))

    def faster(self, by: int) -> None:
        """Up the list of speeds by this many; down if it is negative."""
        self._speed = max(0, min(len(SPEEDS) - 1, self._speed + by))
        self._since = self._clock()

    def picture(self) -> tuple[FeedModel, RunSeries]:
        """What is known at this moment, and fresh at the time `moment.at`."""
        if self._drawn == self.index:
            return self._model, self._series
        start = self._drawn + 1
        if not 0 <= self._drawn < self.index <= self._drawn + POINTS:
            self._series = RunSeries()
            start = max(0, self.index + 1 - POINTS)
        for moment in self.moments[start : self.index + 1]:
            self._series.update(moment.snapshot, moment.at)
        # A model of its own for each moment: going back is no older snapshot, it is another time.
        self._model = FeedModel(self.moment.snapshot, self.moment.at)
        self._drawn = self.index
        return self._model, self._series

    def _go(self, index: int) -> None:
        self.index = max(0, min(len(self.moments) - 1, index))
