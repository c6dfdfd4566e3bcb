"""Everything that a picture of the full screen is made from. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, tzinfo

from diloco_tools.feed.model import FeedModel, Freshness
from diloco_tools.feed.series import RunSeries
from diloco_tools.top.drawing.keys import Key


@dataclass(frozen=True)
class Replayed:
    """Where a replay is: the moment's Unix time, its place among all, and how fast it goes on."""

    at: float
    place: int  # from 1
    moments: int
    playing: bool
    speed: int  # moments a second
    zone: tzinfo | None = None  # None: that of this machine

    @property
    def clock(self) -> str:
        """Date and time of the moment."""
        try:
            return datetime.fromtimestamp(self.at, self.zone).strftime("%Y-%m-%d %H:%M:%S")
        except (ValueError, OverflowError, OSError):
            return "at no time"


@dataclass(frozen=True)
class Said:
    """A sentence for the status line. `style` has the colour of what it means."""

    text: str = ""
    style: str = ""


@dataclass(frozen=True)
class Scene:
    """`model` and `series` are shown as of `now`; `fresh` and `age_s` are those of the feed itself.

    The two differ while the picture is frozen: `frozen_s` is then for how long.
    """

    model: FeedModel
    series: RunSeries
    now: float
    fresh: Freshness
    age_s: float
    address: str
    cpu: float | None = None
    frozen_s: float | None = None
    replay: Replayed | None = None
    readonly: bool = False
    said: Said = Said()
    keys: Sequence[Key] = field(default=())
